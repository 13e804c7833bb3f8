"""Events of jobs and done jobs, in tubes whose policies ask for them: they are right, and they are bounded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from geventstalk.config import ConfigError
from geventstalk.core.job import SECOND_NS
from geventstalk.core.operate import DONE, KEEP
from geventstalk.core.trail import BODY_BYTES, DONE_MAX, EVENT_NAMES, EVENTS_MAX, JOBS_MAX, Trails
from geventstalk.policies import Policies, Policy, Terms
from tests.support.check import check
from tests.support.clock import ManualClock
from tests.support.process import ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client
from tests.test_policies import run, settings_of
from tests.test_tags import Server

Starter = Callable[..., ServerProcess]


def watched(terms: Terms) -> Server:
    server = Server(ManualClock())
    server.engine.policies = Policies([("a", terms)])
    server.engine.trails = Trails()
    return server


def told(server: Server, id: int) -> list[tuple[str, int, int]]:
    assert server.engine.trails is not None
    now_ns = server.clock.ns
    return [
        (EVENT_NAMES[each.what], (now_ns - each.at_ns) // SECOND_NS, each.client)
        for each in server.engine.trails.events_of(id)
    ]


def test_a_job_tells_what_has_happened_to_it() -> None:
    server = watched(Terms(events=True))
    engine, client, other = server.engine, server.come(), server.come()
    id, plain = server.put(client, tube=b"a"), server.put(client, tube=b"b")
    server.pass_s(1)
    engine.ignore(client, b"b")
    assert server.reserve(client) == id
    server.pass_s(1)
    assert engine.release(client, id, 5, 0, server.clock.ns)
    assert server.reserve(client) == id and engine.bury(client, id, 5, server.clock.ns)
    assert engine.kick_job(id, server.clock.ns)
    assert server.reserve(client) == id
    server.pass_s(11)
    wanted = [("put", 13, 0), ("reserved", 12, client.number), ("released", 11, client.number)]
    wanted += [("reserved", 11, client.number), ("buried", 11, client.number), ("kicked", 11, 0)]
    wanted += [("reserved", 11, client.number), ("timed out", 0, client.number)]
    assert told(server, id) == wanted and not told(server, plain)
    engine.ignore(other, b"b")
    assert server.reserve(other) == id
    while not engine.leave(other, server.clock.ns, 10):
        pass
    assert told(server, id)[-2:] == [("reserved", 0, other.number), ("hung up", 0, other.number)]
    assert engine.alter(id, KEEP, KEEP, KEEP, b"b", server.clock.ns) == DONE
    assert len(told(server, id)) == EVENTS_MAX, "b wants none"
    assert engine.alter(id, KEEP, KEEP, KEEP, b"a", server.clock.ns) == DONE
    assert told(server, id)[-1] == ("moved", 0, 0) and len(told(server, id)) == EVENTS_MAX
    assert engine.delete(client, id, server.clock.ns) and not told(server, id)
    check(engine)


def test_a_tube_tells_its_done_jobs() -> None:
    server = watched(Terms(keep=(2, 0)))
    engine, client = server.engine, server.come()
    trails = engine.trails
    assert trails is not None and engine.policies is not None
    ids = [server.put(client, tube=b"a") for _ in range(4)]
    assert engine.delete(client, ids.pop(), server.clock.ns), "which no worker had"
    for id in ids:
        server.pass_s(2)
        assert server.reserve(client) == id
        server.pass_s(1)
        assert engine.delete(client, id, server.clock.ns)
    found = trails.done_in(b"a", engine.policies.of(b"a"), server.clock.ns)
    times = [(each.id, each.begun_ns - each.put_ns, each.ended_ns - each.begun_ns) for each in found]
    assert times == [(ids[2], 8 * SECOND_NS, SECOND_NS), (ids[1], 5 * SECOND_NS, SECOND_NS)]
    assert [(each.reserves, each.size, each.body) for each in found] == [(1, 1, b"x")] * 2
    later = Policy(Terms(keep=(0, 2)))
    assert [each.id for each in trails.done_in(b"a", later, server.clock.ns)] == [ids[2]]
    assert not trails.done_in(b"a", None, server.clock.ns) and not trails.done_in(b"b", later, 0)


def test_all_of_it_is_bounded(seed: int) -> None:
    draw = random.Random(seed)
    server = Server(ManualClock())
    engine = server.engine
    engine.policies = Policies([("*", Terms(events=True, keep=(0, 30)))])
    trails = engine.trails = Trails(50, 60)
    clients = [server.come() for _ in range(3)]
    for _ in range(3000):
        client = draw.choice(clients)
        action = draw.randrange(5)
        if action < 2:
            server.put(client, tube=draw.choice((b"a", b"b", b"default")))
        elif action == 2:
            server.reserve(client)
        elif client.reserved:
            id = draw.choice([*client.reserved])
            if action == 3:
                assert engine.delete(client, id, server.clock.ns)
            else:
                assert engine.release(client, id, 5, 0, server.clock.ns)
        server.pass_s(draw.choice((0, 0, 1)))
        assert len(trails._events) <= 50 and all(len(each) <= EVENTS_MAX for each in trails._events.values())
        assert sum(map(len, trails._done.values())) == trails._count <= 60
        for name in (b"a", b"b", b"default"):
            ended = [each.ended_ns for each in trails.done_in(name, engine.policies.of(name), server.clock.ns)]
            assert ended == sorted(ended, reverse=True) and all(
                each >= server.clock.ns - 30 * SECOND_NS for each in ended
            )
    check(engine)


@pytest.mark.parametrize(
    ("keep", "wanted"),
    [
        (1, (1, 0)),
        (DONE_MAX, (DONE_MAX, 0)),
        ("90s", (0, 90)),
        ("15min", (0, 900)),
        ("2h", (0, 7200)),
        ("1d", (0, 86400)),
    ],
)
def test_how_long_done_jobs_stay(tmp_path: Path, keep: object, wanted: tuple[int, int]) -> None:
    assert settings_of(tmp_path, {"a": {"keep": keep}}).policies == (("a", Terms(keep=wanted)),)


@pytest.mark.parametrize("keep", [0, DONE_MAX + 1, "5", "x", "1w", "s", "", "0s", "99999999d", [1], True])
def test_how_long_they_cannot_stay(tmp_path: Path, keep: object) -> None:
    with pytest.raises(ConfigError, match="keep"):
        settings_of(tmp_path, {"a": {"keep": keep}})


def test_of_a_server(start_server: Starter, tmp_path: Path) -> None:
    path, port = tmp_path / "settings.yaml", free_port()
    path.write_text("policies: {a: {keep: 5, events: true}}\n")
    server = start_server("--config", str(path), "--http", str(port))
    web = Web(port)
    with Client(server.connect()) as client:
        client.send(b"watch a\r\nput-in a 0 0 60 300\r\n" + b"y" * 300 + b"\r\nreserve\r\n")
        assert [client.reply().split()[0] for _ in range(3)] == [b"WATCHING", b"INSERTED", b"RESERVED"]
        stats = client.ask(b"stats-job 1")
        assert b'events: "put 0 s ago, reserved 0 s ago by ' in stats
        events = web.get("/jobs/1", where="/jobs/{id}")["events"]
        assert [(each["event"], each["connection"] is None) for each in events] == [("put", True), ("reserved", False)]
        assert client.ask(b"delete 1") == b"DELETED\r\n"
        assert client.ask(b"ignore a") == b"WATCHING 1\r\n"
    answer = web.get("/done?tube=a")
    (done,) = answer["done"]
    assert (answer["total"], done["id"], done["reserves"], done["size"]) == (1, 1, 1, 300)
    assert done["body"] == {"encoding": "text", "data": "y" * BODY_BYTES, "whole": False}
    assert 0 <= done["waited_s"] < 5 and 0 <= done["ran_s"] < 5 and abs(done["ended"] - done["created"]) < 5
    assert web.get("/done?tube=b") == {"done": [], "total": 0}
    assert web.ask("GET", "/api/v1/done")[0] == 400
    assert run(server, "policies").splitlines()[1] == "a      events keep=5"
    path.write_text("")
    assert web.json("POST", "/api/v1/reload", {})["at_restart"] == []
    assert web.get("/done?tube=a") == {"done": [], "total": 0}
    assert JOBS_MAX >= 1000
    assert server.stop() == 0
