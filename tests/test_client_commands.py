"""The commands against a running server: geventstalk without HTTP, and beanstalkd, over the protocol alone."""

from __future__ import annotations

import os
import re
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import greenstalk
import pytest

from geventstalk.exits import EXIT_NONSENSE, EXIT_UNREACHABLE, EXIT_USAGE
from geventstalk.remote.address import Address
from geventstalk.remote.errors import Unreachable
from geventstalk.remote.protocol import Beanstalk
from geventstalk.remote.watching import OverProtocol, compare
from tests.support.clients import until
from tests.support.live import Ran, Runner
from tests.support.process import GEVENTSTALK, ServerProcess, beanstalkd_path, free_port

Run = Callable[..., Ran]
Green = greenstalk.Client[bytes]


@pytest.fixture(scope="module", params=["geventstalk", "beanstalkd"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """One server for all tests of this file. Each test has tubes of its own."""
    command = GEVENTSTALK
    if request.param == "beanstalkd":
        path = beanstalkd_path()
        if path is None:
            pytest.skip("beanstalkd is not installed")
        command = [path]
    started = ServerProcess(command)
    try:
        yield started.wait_ready()
    finally:
        started.stop()


@pytest.fixture
def run(server: ServerProcess, bare: Runner) -> Run:
    """Runs a command for the server."""
    return bare.to("-p", str(server.port))


@pytest.fixture
def tube(request: pytest.FixtureRequest) -> str:
    """A tube of this test alone."""
    return f"{request.node.originalname}/x"


@pytest.fixture
def green(server: ServerProcess, tube: str) -> Iterator[Green]:
    """A client that uses and watches the tube."""
    with greenstalk.Client(("127.0.0.1", server.port), encoding=None, use=tube, watch=tube) as client:
        yield client


def counts(run: Run, tube: str) -> dict[str, int]:
    (line,) = run("tubes", tube, "--json").lines
    return {state: line["jobs"][state] for state in ("ready", "reserved", "delayed", "buried")}


# Looking


def test_tubes(run: Run, green: Green, tube: str) -> None:
    green.put(b"a")
    green.put(b"b", delay=1000)
    (line,) = run("tubes", tube, "--json").lines
    assert line["jobs"] == {"urgent": 0, "ready": 1, "reserved": 0, "delayed": 1, "buried": 0}
    assert (line["name"], line["using"], line["watching"], line["totals"]["put"]) == (tube, 1, 1, 2)
    ran = run("tubes", tube[:-1] + "*")
    assert (ran.code, ran.err) == (0, "")
    title, row = ran.out.splitlines()
    assert title.split()[:3] == ["TUBE", "READY", "RESERVED"] and row.split()[:4] == [tube, "1", "0", "1"]
    (default,) = (line for line in run("tubes", "--json").lines if line["name"] == "default")
    assert (default["using"], default["watching"]) == (0, 0), "the command itself does not count"


def test_stats(run: Run, server: ServerProcess, green: Green, tube: str) -> None:
    green.put(b"a")
    ran = run("stats")
    assert ran.code == 0 and f"\npid: {server.pid}\n" in ran.out
    assert run("stats", "--json").lines[0]["pid"] == str(server.pid)
    assert (
        run("stats", tube).out.splitlines()[0] == f"name: {tube}"
        and run("stats", tube, "--json").lines[0]["name"] == tube
    )
    assert run("stats", "absent") == (1, "", "geventstalk: there is no tube absent\n")


def test_a_change_of_a_job(run: Run, green: Green, tube: str) -> None:
    id = green.put(b"a", priority=5)
    ran = run("change", str(id), "--pri", "9", "--delay", "1h", "--tube", tube)
    if "beanstalkd cannot change a job" in ran.err:
        assert ran.code == 1 and green.stats_job(id)["pri"] == 5
        return
    assert ran == (0, f"changed job {id}\n", "")
    stats = green.stats_job(id)
    assert (stats["pri"], stats["state"], stats["delay"]) == (9, "delayed", 3600)
    assert run("change", str(id), "--delay", "0").code == 0 and green.stats_job(id)["pri"] == 9
    assert green.stats_job(id)["state"] == "ready"
    assert run("change", str(id), "--tube", "changed").code == 0 and green.stats_job(id)["tube"] == "changed"
    ran = run("change", str(id), "--ttr", "1")
    assert ran.code == 1 and "needs the server's API" in ran.err
    assert run("change", "9999999", "--pri", "1").code == 1
    green.delete(id)


def test_a_tube_that_is_not_there(run: Run) -> None:
    assert run("tubes", "absent", "nowhere*") == (1, "", "geventstalk: there is no tube absent, nowhere*\n")
    assert run("tubes", "absent", "--json") == (1, "", "")
    assert run("pause", "absent", "5") == (1, "", "geventstalk: there is no tube absent\n")
    for words in (["kick", "tube:absent"], ["flush", "absent", "--yes"], ["bury", "tube:absent"]):
        assert run(*words) == (1, "", "no job matches\n")
    assert run("flush", "absent", "--dry-run") == (1, "0 jobs would be deleted\n", "")
    assert run("jobs", "tube:absent").code == 1
    assert "absent" not in [line["name"] for line in run("tubes", "--json").lines], "a question makes no tube"


def test_a_name_that_looks_like_a_number_stays_as_it_is(run: Run) -> None:
    """beanstalkd 1.12 writes it without quotes."""
    id = run("put", "007", "x", "--json").lines[0]["id"]
    assert run("job", str(id), "--json").lines[0]["tube"] == "007"
    assert run("tubes", "00*", "--json").lines[0]["name"] == "007"
    assert run("kick", str(id)).code == 1 and run("bury", str(id)).code == 0 and run("kick", str(id)).code == 0
    assert run("delete", str(id)) == (0, "deleted 1 job\n", "")


def test_a_thousand_tubes(run: Run, server: ServerProcess, tube: str) -> None:
    prefix = "thousand"
    with greenstalk.Client(("127.0.0.1", server.port), encoding=None) as client:
        for number in range(1000):
            client.use(f"{prefix}-{number}")
            client.put(b"x")
    assert len(run("tubes", prefix + "-*", "--json").lines) == 1000
    assert run("jobs", f"tube:{prefix}-*", "--limit", "5", "--json").out.count("\n") == 5
    assert len(run("top", "--json").lines[0]["tubes"]) > 1000
    assert run("flush", prefix + "-*", "--yes") == (0, "deleted 1,000 jobs\n", "")
    assert run("tubes", prefix + "-*").code == 1


def test_the_next_jobs(run: Run, green: Green, tube: str) -> None:
    first, later = green.put(b"first\x1b[2J"), green.put(b"\xff\x00", delay=1000)
    green.put(b"second")
    green.bury(green.reserve())
    ran = run("jobs", f"tube:{tube}")
    assert ran.code == 0 and ran.err.startswith("note: without the server's API (--http) only the next job")
    _, *rows = ran.out.splitlines()
    assert [row.split()[2] for row in rows] == ["ready", "delayed", "buried"]
    assert rows[1].endswith("hex ff 00") and rows[2].endswith("first\\x1b[2J")
    found = run("jobs", f"tube:{tube}", "state:delayed,buried", "--json").lines
    assert [(one["id"], one["state"]) for one in found] == [(later, "delayed"), (first, "buried")]
    assert run("jobs", str(first), str(later), "999999999", "--json").out.count("\n") == 2
    ran = run("jobs", f"tube:{tube}", "state:reserved")
    assert (ran.code, ran.out) == (1, "") and "needs the server's API: start geventstalk with --http" in ran.err
    ran = run("jobs", "age>1h")
    assert (ran.code, ran.out) == (1, "") and ran.err.startswith(
        "geventstalk: looking for age>1h needs the server's API"
    )


def test_one_job(run: Run, green: Green, tube: str) -> None:
    body = b"line one\r\nline two \x1b[2J\ttab"
    id = green.put(body, priority=5, delay=7200, ttr=120)
    (line,) = run("job", str(id), "--json").lines
    wanted = {"id": id, "tube": tube, "state": "delayed", "pri": 5, "delay_s": 7200, "ttr_s": 120, "size": len(body)}
    assert {key: line[key] for key in wanted} == wanted
    assert line["body"] == {"encoding": "text", "data": body.decode(), "whole": True}
    assert line["time_left_s"] in (7199, 7198) and set(line["counts"].values()) == {0}
    ran = run("job", str(id))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith("\n\nline one\\r\nline two \\x1b[2J\ttab\n")
    assert "state        delayed, 1 h 59 min left\n" in ran.out
    assert run("job", "--raw", str(id)).out.encode() == body
    ran = run("job", str(id), "--body", "4")
    assert ran.out.endswith("\n\nline\n") and ran.err.startswith("note: the body is longer")


def test_a_job_that_is_not_there(run: Run, green: Green) -> None:
    id = green.put(b"x")
    assert run("job", "999999999") == (1, "", "there is no job 999999999\n")
    ran = run("job", "999999999", str(id), "--json")
    assert (ran.code, ran.lines[0]["id"], ran.err) == (1, id, "there is no job 999999999\n")
    for words in (["delete"], ["kick"], ["bury"], ["move", "--to", "elsewhere"]):
        ran = run(*words, "999999999", "--json")
        assert (ran.code, ran.lines[0]["done"], ran.lines[0]["failed"]) == (1, 0, 1)
        assert ran.lines[0]["problems"][0].startswith("job 999999999: there is no such job")


# Changing


def test_put(run: Run, green: Green, tube: str) -> None:
    ran = run("put", tube, "h\udcff", "--pri", "7", "--delay", "2h", "--ttr", "90s", "--json")
    assert (ran.code, ran.lines[0]["size"]) == (0, 2)
    assert green.peek(ran.lines[0]["id"]).body == b"h\xff", "bytes of the command line that are no text are kept"
    stats = green.stats_job(ran.lines[0]["id"])
    assert (stats["pri"], stats["delay"], stats["ttr"]) == (7, 7200, 90)
    assert run("put", tube, "-", stdin=b"a\nb\n\x00").code == run("put", tube, stdin=b"").code == 0
    assert [green.reserve(timeout=0).body for _ in range(2)] == [b"a\nb\n\x00", b""]
    ran = run("put", tube, "x")
    assert ran.out == f"put job {green.peek_ready().id} into {tube}\n"
    ran = run("put", tube, stdin=b"x" * 70_000)
    assert (ran.code, ran.out, ran.err) == (1, "", "geventstalk: the job is larger than the server takes\n")


def test_put_lines(run: Run, green: Green, tube: str) -> None:
    ran = run("put", tube, "--lines", stdin=b"one\n\nthree")
    assert ran.code == 0 and ran.out.startswith(f"put 3 jobs into {tube}, ids ")
    assert [green.reserve(timeout=0).body for _ in range(3)] == [b"one", b"", b"three"]
    assert run("put", tube, "--lines", stdin=b"").code == 1
    assert run("put", tube, "--lines", "x").code == EXIT_USAGE
    ran = run("put", tube, "--lines", "--json", stdin=b"1\n" + b"x" * 70_000 + b"\n3\n")
    assert (ran.code, ran.lines[0]["done"], ran.lines[0]["stopped"]) == (1, 1, True)
    assert ran.err == "geventstalk: the job is larger than the server takes\n"


# Bug: `geventstalk kick tube:mail` also kicked delayed jobs, which no word had asked for.
def test_kick(run: Run, green: Green, tube: str) -> None:
    delayed = [green.put(b"x", delay=1000) for _ in range(3)]
    for _ in range(4):
        green.put(b"y")
    for _ in range(4):
        green.bury(green.reserve())
    assert run("kick", f"tube:{tube}", "state:delayed", "--limit", "1") == (0, "kicked 1 job\n", "")
    assert counts(run, tube) == {"ready": 1, "reserved": 0, "delayed": 2, "buried": 4}
    assert run("kick", f"tube:{tube}", "state:buried", "--limit", "3").out == "kicked 3 jobs\n"
    assert counts(run, tube) == {"ready": 4, "reserved": 0, "delayed": 2, "buried": 1}
    assert (
        run("kick", str(delayed[2]), str(delayed[0])).err
        == f"job {delayed[0]}: there is no such job, or its state does not fit\n"
    )
    for words in ([], ["-state:ready"]):  # no delayed job fires that was not asked for
        assert run("kick", "--dry-run", "--json", "--", f"tube:{tube}", *words).lines[0]["matched"] == 1
    assert run("kick", "--", f"tube:{tube}", "-state:buried").code == 1
    assert run("kick", f"tube:{tube}", "--json").lines[0]["done"] == 1
    assert counts(run, tube) == {"ready": 6, "reserved": 0, "delayed": 1, "buried": 0}
    assert run("kick", f"tube:{tube}").code == 1
    assert run("kick", f"tube:{tube}", "state:buried,delayed").code == 0
    assert counts(run, tube) == {"ready": 7, "reserved": 0, "delayed": 0, "buried": 0}
    assert run("kick", f"tube:{tube}").code == 1


def test_bury_keeps_the_priority(run: Run, green: Green, tube: str) -> None:
    ids = [green.put(b"x", priority=3), green.put(b"y", priority=4, delay=1000)]
    reserved = green.put(b"z", priority=0)
    green.reserve()
    assert run("bury", f"tube:{tube}").out == "buried 2 jobs; 1 was left alone\n"
    assert [green.stats_job(id)["state"] for id in ids] == ["buried", "buried"]
    assert [green.stats_job(id)["pri"] for id in ids] == [3, 4]
    ran = run("bury", str(reserved))
    assert (ran.code, ran.out) == (1, "buried 0 jobs; 1 was left alone\n")
    for what in (str(reserved), f"tube:{tube}"):
        ran = run("release", what)
        assert (ran.code, ran.out) == (1, "") and ran.err.startswith("geventstalk: releasing jobs of others needs the")
    ran = run("bury", f"tube:{tube}", "state:reserved")
    assert ran.code == 1 and "cannot bury jobs that are reserved) needs the server's API" in ran.err


def test_delete_asks_before_harm(run: Run, green: Green, tube: str) -> None:
    ids = [green.put(b"x") for _ in range(4)]
    assert run("delete", str(ids[0])) == (0, "deleted 1 job\n", "")
    ran = run("delete", f"tube:{tube}", "state:ready")
    assert (ran.code, ran.out) == (EXIT_USAGE, "") and ran.err.startswith("geventstalk: no terminal to ask on; --yes")
    assert run("delete", f"tube:{tube}", "--dry-run") == (0, "3 jobs would be deleted\n", "")
    assert run("delete", f"tube:{tube}", "--yes", "--limit", "2") == (0, "deleted 2 jobs\n", "")
    assert run("flush", tube, "--yes", "--state", "buried").code == 1
    assert run("flush", tube, "--yes") == (0, "deleted 1 job\n", "")
    assert counts(run, tube)["ready"] == 0
    assert run("delete", tube, "--yes").err.startswith(f"geventstalk: {tube} could mean anything; write tube:{tube}")


def test_jobs_that_others_hold_are_left_alone(run: Run, green: Green, tube: str) -> None:
    for _ in range(3):
        green.put(b"x")
    green.reserve()
    assert run("delete", f"tube:{tube}", "--dry-run").out == "2 jobs would be deleted\n"
    assert run("delete", f"tube:{tube}", "--yes") == (0, "deleted 2 jobs; 1 was left alone\n", "")
    assert run("bury", f"tube:{tube}") == (1, "buried 0 jobs; 1 was left alone\n", "")
    assert run("flush", tube, "--yes") == (1, "", "no job matches\n")


def test_move_keeps_what_a_job_is(run: Run, green: Green, tube: str) -> None:
    target = tube + "2"
    green.put(b"buried", priority=1)
    green.bury(green.reserve(), priority=1)
    green.put(b"ready", priority=2, ttr=77)
    delayed = green.put(b"delayed", priority=3, delay=1000)
    ran = run("move", f"tube:{tube}*", "--to", target)
    assert (ran.code, ran.out) == (0, f"moved 3 jobs to {target}\n")
    ours = "tags" in green.stats()
    note = "note: to beanstalkd a move is a put and a delete: not atomic, under new ids\n"
    assert ran.err == ("" if ours else note)
    if ours:
        assert green.stats_job(delayed)["tube"] == target, "it keeps its id"
    assert counts(run, target) == {"ready": 1, "reserved": 0, "delayed": 1, "buried": 1}
    assert counts(run, tube) == {"ready": 0, "reserved": 0, "delayed": 0, "buried": 0}
    found = {one["state"]: one for one in run("jobs", f"tube:{target}", "--json").lines}
    assert {state: (one["body"]["data"], one["pri"]) for state, one in found.items()} == {
        "ready": ("ready", 2),
        "delayed": ("delayed", 3),
        "buried": ("buried", 1),
    }
    assert found["ready"]["ttr_s"] == 77 and found["delayed"]["time_left_s"] in (998, 999)
    assert run("move", f"tube:{target}", "--to", target).code == 1, "where they are they stay"
    assert run("move", str(delayed), "--to", target).code == (0 if ours else 1), "beanstalkd gave it another id"


def test_a_buried_job_is_never_ready_while_it_moves(run: Run, server: ServerProcess, green: Green, tube: str) -> None:
    green.put(b"bad")
    green.bury(green.reserve())
    with server.connect() as worker:
        worker.sendall(b"watch %b-2\r\nreserve-with-timeout 1000\r\n" % tube.encode())
        assert worker.recv(100) == b"WATCHING 2\r\n"
        until(lambda: run("tubes", tube + "-2", "--json").lines[0]["waiting"], "the worker waits")
        assert run("move", f"tube:{tube}", "--to", tube + "-2").code == 0
        assert counts(run, tube + "-2")["buried"] == 1
        assert not select.select([worker], [], [], 0)[0]


def test_a_job_that_cannot_be_put_stays_as_it_was(
    start_beanstalkd: Callable[..., ServerProcess], bare: Runner, tube: str
) -> None:
    server = start_beanstalkd()
    where = ["-p", str(server.port)]
    with greenstalk.Client(("127.0.0.1", server.port), encoding=None, use=tube) as client:
        ids = [client.put(b"ready", priority=2), client.put(b"delayed", priority=3, delay=1000)]
        buried = client.put(b"buried", priority=1)
        assert bare("bury", str(buried), *where).code == 0
        os.kill(server.pid, signal.SIGUSR1)
        until(lambda: client.stats()["draining"] == "true", "draining")
        before = [client.stats_job(id) for id in [*ids, buried]]
        ran = bare("move", f"tube:{tube}", "--to", "other", *where)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.endswith("under new ids\ngeventstalk: the server is draining and takes no jobs\n")
        for id in [*ids, buried]:
            assert bare("move", str(id), "--to", "other", *where).code == 1
        after = [client.stats_job(id) for id in [*ids, buried]]
    for key in ("state", "pri", "tube"):
        assert [stats[key] for stats in after] == [stats[key] for stats in before]


def test_a_put_with_tags(run: Run, green: Green, tube: str) -> None:
    if "tags" not in green.stats():
        refused = run("put", tube, "x", "--tags", "tries:3")
        assert (refused.code, refused.err) == (EXIT_NONSENSE, "geventstalk: the server knows no tags\n")
        assert run("put", tube, "--lines", "--tags", "tries:3", stdin=b"x\n").code == EXIT_NONSENSE
        assert counts(run, tube)["ready"] == 0
        return
    (line,) = run("put", tube, "x", "--tags", " idp:k  tries:3", "--json").lines
    assert line == {"id": line["id"], "tube": tube, "size": 1}
    assert dict(green.stats_job(line["id"]))["idempotency-key"] == "k"
    assert run("put", tube, "y", "--tags", "idp:k") == (
        0,
        f"job {line['id']} has the same unique key: it is ready\n",
        "",
    )
    assert run("put", tube, "y", "--tags", "idp:k", "--json").lines == [
        {"id": line["id"], "tube": tube, "first": "ready"}
    ]
    assert run("put", tube, "--lines", "--tags", "con:a", stdin=b"1\n2\n").code == 0
    for wrong in ("idp:a idp:b", "tries:0", "what", "from:x", "idp:\xe9"):
        assert run("put", tube, "x", "--tags", wrong).code == EXIT_USAGE, wrong
    assert run("put", tube, "--lines", "--tags", "idp:k", stdin=b"1\n").code == EXIT_USAGE
    assert counts(run, tube)["ready"] == 3
    assert run("move", f"tube:{tube}", "--to", tube + "2").code == 0
    assert dict(green.stats_job(line["id"]))["idempotency-key"] == "k", "a move keeps the tags"


def test_pause(run: Run, green: Green, tube: str) -> None:
    assert run("pause", tube, "2h") == (0, f"{tube} is paused for 2 h\n", "")
    (line,) = run("tubes", tube, "--json").lines
    assert line["paused_s"] == 7200 and 7190 < line["pause_left_s"] < 7200
    assert "1 h 59 min" in run("tubes", tube).out
    assert run("pause", tube[:-1] + "*", "0", "--json").lines == [{"name": tube, "paused_s": 0}]
    assert run("tubes", tube, "--json").lines[0]["paused_s"] == 0
    for time_words in ("5x", "4294967296", "-1", "", "1.5h", "50000d"):
        assert run("pause", tube, "--", time_words).code == EXIT_USAGE


def test_drain_over_the_protocol(run: Run, server: ServerProcess, green: Green) -> None:
    ran, ended = run("drain"), run("drain", "--off")
    if "features" in green.stats():
        assert (ran, ended) == (
            (0, "the server is draining: puts are refused\n", ""),
            (0, "the server takes jobs\n", ""),
        )
        assert run("drain", "--json").lines == [{"draining": True}]
        with pytest.raises(greenstalk.DrainingError):
            green.put(b"x")
        assert run("drain", "--off", "--json").lines == [{"draining": False}]
        green.delete(green.put(b"x"))
    else:
        assert ran == (1, "", f"geventstalk: beanstalkd has no command for it; on its host: kill -USR1 {server.pid}\n")
        assert ended == (1, "", "geventstalk: beanstalkd drains until it ends\n")


@pytest.mark.parametrize("served", [[], ["-b"]])
def test_a_command_changes_no_job_of_a_server_that_began_anew(
    start_server: Callable[..., ServerProcess], tmp_path: Path, served: list[str]
) -> None:
    """Without a journal its ids are those of other jobs."""
    path = str(tmp_path / "socket")
    words = [*served, *[str(tmp_path / "data") for _ in served]]
    server = start_server(*words, unix_path=path)
    asking = Beanstalk(Address(path, None), 30)
    asking.put(b"one", 0, 0, 60)
    id = asking.peek_next("ready")
    assert id is not None
    server.kill()
    start_server(*words, unix_path=path)
    other = Beanstalk(Address(path, None), 30)
    if not served:
        other.put(b"another", 0, 0, 60)
    for _ in range(2):
        with pytest.raises(Unreachable, match="closed the connection"):
            asking.delete(id[0])
    assert other.peek(id[0]) == (b"one" if served else b"another")
    for each in (asking, other):
        each.close()


# Looking on


def test_what_a_look_tells(server: ServerProcess, green: Green, tube: str) -> None:
    asking = Beanstalk(Address("127.0.0.1", str(server.port)), 30)
    source = OverProtocol(asking, tube, 100)
    before = source.look()

    def told() -> list[tuple[str, object]]:
        nonlocal before
        then, before = before, source.look()
        return [(event.event, event.id or f"{event.jobs} jobs") for event in compare(then, before, source.where)]

    try:
        id = green.put(b"one")
        assert told() == [("put", id)]
        held = green.reserve()
        assert told() == [("reserved", id)]
        green.release(held, delay=1000)
        assert told() == [("released", id)]
        green.kick_job(id)
        assert told() == [("kicked", id)]
        green.bury(green.reserve())
        for _ in range(3):
            green.put(b"more")
            green.delete(green.reserve())
        assert told() == [("reserved", id), ("buried", id), ("put", "3 jobs"), ("deleted", "3 jobs")]
        green.delete(id)
        assert told() == [("deleted", id)]
        assert told() == []
    finally:
        asking.close()


@pytest.mark.slow
def test_watch(run: Run, green: Green, tube: str) -> None:
    thread = threading.Timer(0.3, green.put, [b"one"])
    thread.start()
    ran = run("watch", tube, "--interval", "0.1", "--for", "1s")
    thread.join()
    assert ran.code == 0 and re.search(r"^\d\d:\d\d:\d\d  put +\d+  ready     pri 65,536  one$", ran.out, re.MULTILINE)
    assert ran.err.startswith("note: without the server's API")


def test_watch_where_nothing_happens(run: Run) -> None:
    ran = run("watch", "nothing-here", "--interval", "0.05", "--for", "0")
    assert (ran.code, ran.out) == (1, "") and "nothing-here has no jobs at this moment" in ran.err
    assert run("tubes", "nothing-here").code == 1


def test_top_without_a_terminal(run: Run, green: Green, tube: str) -> None:
    green.put(b"x")
    first, second = run("top", "--json", "--count", "2", "--interval", "0.2").lines
    assert first["server"]["per_s"] is None and second["server"]["per_s"]["put"] == 0
    assert {one["name"]: one["watching"] for one in second["tubes"]}[tube] == 1
    ran = run("top", "--sort", "name")
    assert ran.code == 0 and f"\n{tube} " in ran.out and "\x1b" not in ran.out


# Where the server is


def test_the_server_is_found_by_flags_environment_and_file(
    server: ServerProcess, bare: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"listen: 0.0.0.0\nport: {server.port}\n", encoding="utf-8")
    assert bare("tubes", "--config", str(settings)).code == 0
    monkeypatch.setenv("GEVENTSTALK_TOKEN", "secret")
    monkeypatch.setenv("GEVENTSTALK_CONFIG", str(settings))
    assert bare("tubes").code == 0
    monkeypatch.setenv("GEVENTSTALK_PORT", str(free_port()))
    assert bare("tubes").code == EXIT_UNREACHABLE
    assert bare("tubes", "-p", str(server.port), "-l", "localhost").code == 0
    assert bare("tubes", "-p", "x y") == (EXIT_USAGE, "", "geventstalk: invalid port: x y (-p, --port)\n")
    monkeypatch.setenv("GEVENTSTALK_PROT", "1")
    assert bare("tubes").err.startswith("geventstalk: unknown environment variable: GEVENTSTALK_PROT")


def test_a_unix_socket(start_server: Callable[..., ServerProcess], bare: Runner, tmp_path: Path) -> None:
    start_server(unix_path=f"{tmp_path}/s")
    assert bare("put", "mail", "x", "-l", f"unix:{tmp_path}/s") == (0, "put job 1 into mail\n", "")
    absent = bare("tubes", "-l", f"unix:{tmp_path}/absent")
    assert absent == (
        69,
        "",
        f"geventstalk: cannot reach the server at unix:{tmp_path}/absent: No such file or directory\n",
    )
