"""Policies of tubes: how a file says them, what they do to puts, and that they can change in a running server."""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from geventstalk.config import ConfigError, Settings, load
from geventstalk.core.engine import DUPLICATE, INSERTED, OUT_OF_MEMORY, TOO_BIG
from geventstalk.core.job import BURIED, DELAYED, SECOND_NS, tags_of
from geventstalk.core.operate import DONE, KEEP, Operate
from geventstalk.http.memory import used_by
from geventstalk.limits import U32_MAX
from geventstalk.policies import Policies, Policy, Terms
from geventstalk.tags import parse, parse_put
from tests.support.check import check
from tests.support.clients import until
from tests.support.clock import ManualClock
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client
from tests.test_follow import Worker
from tests.test_reload import log_of
from tests.test_tags import Server

Starter = Callable[..., ServerProcess]
S = SECOND_NS


def processor_s(server: ServerProcess) -> float:
    found = used_by(server.pid)
    assert found is not None
    return found.processor_s


def settings_of(folder: Path, entry: object) -> Settings:
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({"policies": entry}, sort_keys=False), encoding="utf-8")
    return load({}, {}, str(path))[0]


def test_a_file_says_policies(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        {
            "mail.*": {"tries": 5, "dead_letter": "lost", "backoff": [10, 60], "expires": 9, "ttr": {"max": 600}},
            "b": {"backoff": {"first": 2, "factor": 3, "limit": 99, "jitter": 20}, "priority": {"min": 1, "max": 2}},
            "c": {"backoff": 7, "max_jobs": 0, "max_job_bytes": 8, "delay": {"min": 3}, "max_bytes": 9, "max_rate": 5},
            "*": {},
        },
    )
    assert settings.policies == (
        ("mail.*", Terms(("tries:5", "dead:lost", "backoff:10;60", "ttr:9".replace("ttr", "ttl")), ttr=(1, 600))),
        ("b", Terms(("backoff:2:3:99:20",), priority=(1, 2))),
        ("c", Terms(("backoff:7",), delay=(3, U32_MAX), max_jobs=0, max_job_bytes=8, max_bytes=9, max_rate=5)),
        ("*", Terms()),
    )
    policies = Policies(settings.policies)
    assert [glob for name in (b"mail.x", b"b", b"bb") for glob, _ in policies.all_of(name)] == ["mail.*", "b", "*"]
    assert policies.of(b"bb") is not None and Policies(settings.policies[:3]).of(b"bb") is None


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([], "policies are a list, and have to be a mapping"),
        ({"a b": {}}, "a b is no pattern of tubes"),
        ({5: {}}, "5 is no pattern of tubes"),
        ({"": {}}, "(empty) is no pattern"),
        ({"a": 5}, "policy of a: a policy is 5, and has to be a mapping of tries"),
        ({"a": {"trys": 5}}, "policy of a: a policy has no key trys, but tries, dead_letter"),
        ({"a": {"tries": 0}}, "policy of a: tries is 0, and has to be at least 1"),
        ({"a": {"tries": 2**32}}, "invalid tries: 4294967296, the highest is 4294967295"),
        ({"a": {"dead_letter": "lost"}}, "dead_letter is for jobs with tries, or that expire"),
        ({"a": {"tries": 1, "dead_letter": "-"}}, "dead_letter is -, which is no name of a tube"),
        ({"a": {"tries": 1, "dead_letter": "ü"}}, "dead_letter is ü, which is no name of a tube"),
        ({"a": {"backoff": []}}, "a number of a backoff is from 1 to"),
        ({"a": {"backoff": [0]}}, "backoff is 0, and has to be at least 1"),
        ({"a": {"backoff": [1] * 102}}, "a number of a backoff is from 1 to"),
        ({"a": {"backoff": {"factor": 2}}}, "the key first of a backoff is missing"),
        ({"a": {"backoff": {"first": 2, "jitter": 101}}}, "invalid jitter: 101, the highest is 100"),
        ({"a": {"ttr": 5}}, "a bound is 5, and has to be a mapping of min, max"),
        ({"a": {"max_rate": 0}}, "max_rate is 0, and has to be at least 1"),
        ({"a": {"max_bytes": 2**53}}, "invalid max_bytes: 9007199254740992, the highest is 9007199254740991"),
        ({"a": {"ttr": {"min": 0}}}, "a bound is 0, and has to be at least 1"),
        ({"a": {"delay": {"min": 5, "max": 4}}}, "min is 5, and max is 4"),
        ({"a": {"max_jobs": "x"}}, "invalid max_jobs: x"),
    ],
)
def test_policies_that_make_no_sense_are_refused(tmp_path: Path, entry: object, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        settings_of(tmp_path, entry)


@pytest.fixture
def server() -> Server:
    made = Server(ManualClock())
    made.engine.policies = Policies(
        [
            ("a", Terms(("tries:2", "dead:lost", "backoff:5"), (3, 9), (0, 60), (20, 30), 3, 100)),
            ("b", Terms(("ttl:7",))),
        ]
    )
    return made


def test_a_put_gets_what_the_policy_says(server: Server) -> None:
    client = server.come()
    for pri, delay, wanted in ((5, 0, (5, 0, 20)), (1, 99, (3, 60, 20)), (10, 7, (9, 7, 20))):
        job = server.job(server.put(client, tube=b"a", pri=pri, delay=delay))
        assert (job.pri, job.delay_s, job.ttr_s) == wanted
        assert (job.state == DELAYED, job.rank) == (bool(delay), server.clock.ns + wanted[1] * 10**9 if delay else pri)
        tags = tags_of(job)
        assert tags is not None and tags.text == b"tries:2 dead:lost backoff:5"
    assert server.put(client, tube=b"a") == -OUT_OF_MEMORY, "there are three jobs"
    plain = server.job(server.put(client))
    assert plain.tally is None and plain.ttr_s == 10
    check(server.engine)


def test_a_tag_of_the_client_counts_before_that_of_the_policy(server: Server) -> None:
    client = server.come()
    tags = tags_of(server.job(server.put(client, "note:n tries:7 dead:mine", tube=b"a")))
    assert tags is not None and tags.text == b"note:n tries:7 dead:mine backoff:5"
    tags = tags_of(server.job(server.put(client, "tries:1 dead:x backoff:9", tube=b"a")))
    assert tags is not None and tags.text == b"tries:1 dead:x backoff:9"


@pytest.mark.parametrize("size", [100, 101, 300_000])
def test_a_body_that_is_too_large_is_refused(server: Server, size: int) -> None:
    engine, client = server.engine, server.come()
    engine.use(client, b"a")
    job = engine.open_put(client, 5, 0, 60, server.clock.ns)
    body = b"x" * size + b"\r\n"
    if size < 10_000:
        outcome = engine.put(job, body, server.clock.ns)
    else:
        outcome = engine.prepare(job, body, server.clock.ns)
        engine.abandon_put(job)
    assert outcome == (INSERTED if size == 100 else TOO_BIG)
    assert engine.tubes[b"a"].jobs == (size == 100)


def test_all_bodies_of_a_tube_have_a_bound(server: Server) -> None:
    """Also over a restart."""
    server.engine.policies = Policies([("a", Terms(max_bytes=2))])
    engine, client = server.engine, server.come()
    puts = [server.put(client, tube=b"a") for _ in range(3)]
    assert puts[0] and puts[2] == -OUT_OF_MEMORY
    assert engine.policies is not None and engine.policies.all[0][1].refused == 1
    check(engine)
    again = Server(server.clock, server.log)
    again.engine.policies = Policies([("a", Terms(max_bytes=2))])
    client = again.come()
    assert again.put(client, tube=b"a") == -OUT_OF_MEMORY, "the jobs of before the restart count"
    assert again.engine.delete(client, puts[0], again.clock.ns)
    assert again.put(client, tube=b"a") > 0 and again.put(client, tube=b"b") > 0
    assert again.engine.alter(puts[1], KEEP, KEEP, KEEP, b"b", again.clock.ns) == DONE
    assert (again.engine.tubes[b"a"].body_bytes(), again.engine.tubes[b"b"].body_bytes()) == (1, 2)
    check(again.engine)


def test_puts_that_wait_are_no_jobs_yet(server: Server) -> None:
    engine, client = server.engine, server.come()
    engine.policies = Policies([("a", Terms(max_jobs=2))])
    engine.use(client, b"a")
    jobs = [engine.open_put(client, 5, 0, 60, server.clock.ns) for _ in range(9)]
    outcomes = [engine.put(job, b"x\r\n", server.clock.ns) for job in jobs]
    assert outcomes == [INSERTED, INSERTED, *[OUT_OF_MEMORY] * 7]
    check(engine)


def test_large_bodies_that_come_at_the_same_time_have_a_bound_together() -> None:
    """The ledger takes each of them in parts, and none of them counts before it is whole."""
    engine, client, body = Operate(0), Worker(), b"x" * 1_500_000 + b"\r\n"
    engine.policies = Policies([("*", Terms(max_bytes=3_000_000))])
    engine.join(client)
    jobs = [engine.open_put(client, 5, 0, 60, 0) for _ in range(3)]
    assert [engine.prepare(job, body, 0) for job in jobs] == [INSERTED] * 3
    assert [engine.put(job, body, 0) for job in jobs] == [INSERTED, INSERTED, OUT_OF_MEMORY]
    assert engine.tubes[b"default"].body_bytes() == 3_000_000 and engine.tubes[b"default"].jobs == 2
    check(engine)


def test_puts_of_a_tube_have_turns() -> None:
    policy = Policy(Terms(max_rate=4))
    assert [policy.turn_of_put(b"a", S) - S for _ in range(6)] == [0, 0, 0, 0, S // 4, S // 2]
    assert policy.turn_of_put(b"b", S) == S, "each tube has turns of its own"
    assert not policy.takes_put(b"a", S) and not policy.takes_put(b"a", S) and policy.delayed == 2
    assert policy.turn_of_put(b"a", 2 * S) == 2 * S, "turns that were not taken are free again"
    assert [policy.turn_of_put(b"a", 9 * S) - 9 * S for _ in range(5)] == [0, 0, 0, 0, S // 4]
    for number in range(10_000):
        assert policy.turn_of_put(b"%d" % number, 10 * S + number) == 10 * S + number
    assert policy.turn_of_put(b"a", 10 * S + 10_000) == 10 * S + 10_000


# Bug: with more than 4,096 tubes whose turns were to come, each put went through all of them.
def test_a_put_pays_for_few_tubes() -> None:
    policy = Policy(Terms(max_rate=1))
    passes, known = 0, id(policy._due_ns)
    for number in range(100_000):
        policy.turn_of_put(b"%d" % number, S)
        passes += id(policy._due_ns) != known
        known = id(policy._due_ns)
    assert passes < 10 and len(policy._due_ns) == 100_000, "all of these turns are to come"
    for number in range(200_000, 400_000):
        policy.turn_of_put(b"%d" % number, 9 * S + number * S)
    assert len(policy._due_ns) < 210_000, "those that are past are forgotten"


@pytest.mark.parametrize("extra", [[], ["--io-processes", "1"]], ids=["plain", "fronts"])
def test_more_puts_than_a_policy_allows_wait(start_server: Starter, tmp_path: Path, extra: list[str]) -> None:
    path, port = tmp_path / "settings.yaml", free_port()
    path.write_text("policies: {slow: {max_rate: 4}, full: {max_bytes: 3}, stuck: {max_rate: 1}}\n")
    server = start_server("--config", str(path), "--http", str(port), *extra)
    web = Web(port)
    with Client(server.connect()) as client, Client(server.connect()) as other:
        begun = time.monotonic()
        client.send(b"use slow\r\n" + b"put 0 0 60 1\r\nx\r\n" * 7 + b"stats-tube slow\r\n")
        assert client.reply() == b"USING slow\r\n"
        for _ in range(4):
            assert client.reply().startswith(b"INSERTED ")
        assert other.ask(b"put-in quick 0 0 60 1\r\nx").startswith(b"INSERTED "), "other tubes do not wait"
        status, headers, answer = web.ask("POST", "/api/v1/jobs", {"tube": "slow", "body": "1"})
        assert (status, headers["retry-after"]) == (429, "1") and b"allows 4 puts a second" in answer
        for _ in range(3):
            assert client.reply().startswith(b"INSERTED ")
        assert 0.6 < time.monotonic() - begun < 5
        assert b"total-jobs: 7" in client.reply()
        assert other.ask(b"put-in full 0 0 60 4\r\nxxxx") == b"OUT_OF_MEMORY\r\n"
        assert b"policy-refused-puts: 1\n" in other.ask(b"stats")
        assert b"policy-delayed-puts: 4\n" in other.ask(b"stats")
        counts = web.ask("GET", "/metrics")[2]
        assert b'geventstalk_policy_puts_delayed_total{tubes="slow"} 4' in counts
        assert b'geventstalk_policy_puts_refused_total{tubes="full"} 1' in counts
        status, _, answer = web.ask("POST", "/api/v1/jobs", {"tube": "full", "body": "1234"})
        assert status == 507 and b"policy allows 3 bytes" in answer
        until(
            lambda: "puts into the tube full are refused: they are above a limit" in log_of(server), "the log says so"
        )
        until(lambda: "puts into the tube slow wait for their turn" in log_of(server), "the log says so")
        assert web.ask("PUT", "/api/v1/schedules/s", {"cron": "@yearly", "tube": "t"})[0] == 204
        assert b"policy-refused-puts: 2\n" in other.ask(b"stats"), "a schedule changes no policy"
        client.send(b"use stuck\r\n" + b"put 0 0 60 1\r\nx\r\n" * 2)
        assert client.reply() == b"USING stuck\r\n"
        assert client.reply().startswith(b"INSERTED ")
        gone = [Client(server.connect()) for _ in range(10)]
        for each in gone:
            each.send(b"put-in stuck 0 0 60 1\r\nx\r\n")
        until(lambda: b"policy-delayed-puts: 15\n" in other.ask(b"stats"), "all of them wait")
        for each in gone[:5]:
            each.close()
        before = processor_s(server)
        time.sleep(0.5)
        assert processor_s(server) - before < 0.25, "a client that waits costs nothing"
        path.write_text("policies: {slow: {max_rate: 4}}\n")
        assert web.json("POST", "/api/v1/reload", {})["at_restart"] == []
        reloaded = time.monotonic()
        assert client.reply().startswith(b"INSERTED "), "no policy holds it any more"
        for each in gone[5:]:
            assert each.reply().startswith(b"INSERTED ")
            each.close()
        assert time.monotonic() - reloaded < 5, "by their turns they would wait for up to ten seconds"
        until(lambda: b"current-connections: 2\n" in other.ask(b"stats"), "all of them end")
        client.send(b"use slow\r\n" + b"put 0 0 60 1\r\nx\r\n" * 20)
        assert client.reply() == b"USING slow\r\n"
    assert server.stop() == 0


def test_jobs_live_by_the_policy_of_their_put(server: Server) -> None:
    """Over a restart, and when the policy has changed or is gone."""
    client = server.come()
    id, short = server.put(client, tube=b"a"), server.put(client, tube=b"b")
    server.engine.policies = None
    later = server.put(client, tube=b"a")
    again = Server(server.clock, server.log)
    client = again.come()
    assert again.reserve(client) == id and again.engine.release(client, id, 5, 0, again.clock.ns)
    assert again.job(id).state == DELAYED and again.job(id).delay_s == 5 and tags_of(again.job(later)) is None
    again.pass_s(5.5)
    again.engine.ignore(client, b"default")
    again.engine.ignore(client, b"b")
    assert again.reserve(client) == id and again.engine.release(client, id, 5, 0, again.clock.ns)
    again.settle()
    assert again.engine.tube_of(again.job(id)).name == b"lost"
    again.pass_s(2)
    assert again.engine.jobs.get(short) is None, "it has expired"
    check(again.engine)


def test_a_unique_job_is_unique_in_a_tube_with_a_policy(server: Server) -> None:
    client = server.come()
    assert server.put(client, "idp:k", tube=b"a") == 1
    assert server.put(client, "idp:k", tube=b"a", pri=1) == -DUPLICATE
    assert server.duplicate()[2] == 3, "the bound of the policy holds for the second put, too"


def test_without_a_dead_letter_a_job_is_buried(server: Server) -> None:
    server.engine.policies = Policies([("*", Terms(("tries:1",)))])
    client = server.come()
    id = server.put(client)
    assert server.reserve(client) == id and server.engine.release(client, id, 5, 0, server.clock.ns)
    server.settle()
    assert server.job(id).state == BURIED


def test_tags_of_client_and_policy_together(seed: int) -> None:
    draw = random.Random(seed)
    words = {
        "tries": ["1", "9"],
        "dead": ["x", "y"],
        "backoff": ["1", "2;3:4"],
        "ttl": ["5"],
        "note": ["n"],
        "con": ["k:2"],
    }
    for _ in range(2000):
        sides = []
        for names in (list(words), list(words)[:4]):
            chosen = draw.sample(names, draw.randrange(len(names) + 1))
            sides.append([f"{name}:{draw.choice(words[name])}" for name in chosen])
        client, given = sides
        policy = Policy(Terms(tuple(given)))
        if not client:
            continue
        found = policy.tags_with(parse_put(" ".join(client).encode()))
        effective = {word.split(":", 1)[0]: word for word in given} | {word.split(":", 1)[0]: word for word in client}
        assert set(found.text.decode().split()) == set(effective.values())
        assert parse(found.text).text == found.text


def run(server: ServerProcess, *words: str) -> str:
    command = [*GEVENTSTALK, *words, "-p", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_policies_of_a_running_server(start_server: Starter, tmp_path: Path) -> None:
    path, port = tmp_path / "settings.yaml", free_port()
    path.write_text("policies: {'mail.*': {tries: 1, dead_letter: lost, max_job_bytes: 5, max_jobs: 2}}\n")
    server = start_server("--config", str(path), "--http", str(port))
    web = Web(port)
    with Client(server.connect()) as client:
        assert client.ask(b"put-in mail.a 0 0 60 6\r\n123456") == b"JOB_TOO_BIG\r\n"
        assert client.ask(b"put-in mail.a 0 0 60 1\r\nx") == b"INSERTED 2\r\n"
        assert client.ask(b"put-in mail.a 0 0 60 1\r\nx") == b"INSERTED 3\r\n"
        assert client.ask(b"put-in mail.a 0 0 60 1\r\nx") == b"OUT_OF_MEMORY\r\n"
        status, _, answer = web.ask("POST", "/api/v1/jobs", {"tube": "mail.b", "body": "123456"})
        assert status == 413 and b"at most 5 bytes" in answer
        status, _, answer = web.ask("POST", "/api/v1/jobs", {"tube": "mail.a", "body": "1"})
        assert status == 507 and b"policy allows 2 jobs" in answer
        assert web.get("/policies")["policies"][0]["tags"] == ["tries:1", "dead:lost"]
        assert [each["tubes"] for each in web.get("/policies?tube=mail.a")["policies"]] == ["mail.*"]
        assert web.get("/policies?tube=b")["policies"] == []
        shown = "mail.*  tries:1 dead:lost max_jobs=2 max_job_bytes=5 4 refused puts"
        assert run(server, "policies").splitlines()[1] == run(server, "policies", "mail.a").splitlines()[1] == shown
        assert run(server, "policies", "b") == "geventstalk: the tube b has no policy\n"
        path.write_text("policies: {'*': {backoff: 100}}\nmax_job_bytes: 100\n")
        assert web.json("POST", "/api/v1/reload", {})["at_restart"] == ["max_job_bytes"]
        until(lambda: "use those that have changed: policies" in log_of(server), "the log says so")
        assert b'backoff: ""' in client.ask(b"stats-job 2") and b"tries: 1" in client.ask(b"stats-job 2")
        assert client.ask(b"put-in mail.a 0 0 60 6\r\n123456") == b"INSERTED 7\r\n"
        assert b'backoff: "100"' in client.ask(b"stats-job 7")
        path.write_text("")
        assert web.json("POST", "/api/v1/reload", {})["at_restart"] == []
        assert web.get("/policies")["policies"] == []
        assert client.ask(b"put-in mail.a 0 0 60 1\r\nx") == b"INSERTED 8\r\n"
        assert b"backoff" not in client.ask(b"stats-job 8")
