"""A journal brings all jobs back: after a stop, after kill -9, again and again, under each policy, in many segments."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.clients import (
    Launch,
    Pump,
    burst,
    launcher,
    number,
    put_many,
    reserve_many,
    until,
)
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.wire import Client

End = Callable[[ServerProcess], object]

ENDS: dict[str, End] = {"stop": ServerProcess.stop, "kill": ServerProcess.kill}
ends = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)


@pytest.fixture
def launch(start_server: Callable[..., ServerProcess], tmp_path: Path) -> Iterator[Launch]:
    """Starts servers one after the other; they log to tmp_path/log."""
    yield from launcher(start_server, tmp_path, unix=False)


@pytest.fixture
def launch_unix(start_server: Callable[..., ServerProcess], tmp_path: Path) -> Iterator[Launch]:
    yield from launcher(start_server, tmp_path, unix=True)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def segments(journal: Path) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in journal.glob("segment-*.db"))


def job(client: Client, id: int, keys: Iterable[str]) -> dict[str, str]:
    """These statistics of a job, and its body."""
    stats = client.stats(b"stats-job %d" % id)
    header, _, body = client.ask(b"peek %d" % id).partition(b"\r\n")
    assert header.startswith(b"FOUND")
    stats["body"] = body.hex()
    return {key: stats[key] for key in keys}


def expected(id: int, tube: str, state: str, body: bytes, **other: object) -> dict[str, str]:
    """Returns what is to survive of a job: all but times that pass and its place on disk. None: that does not count."""
    values: dict[str, object] = {"id": id, "tube": f'"{tube}"', "state": state, "pri": 0, "delay": 0, "ttr": 60}
    counters = dict.fromkeys(("reserves", "timeouts", "releases", "buries", "kicks"), 0)
    every = values | counters | other | {"body": (body + b"\r\n").hex()}
    return {key: str(value) for key, value in every.items() if value is not None}


ANY_BYTES = bytes(range(256)) * 3


def jobs_of_all_states(client: Client) -> list[dict[str, str]]:
    """Puts jobs and brings each into another state; returns what is to be found after a restart."""
    client.ask(b"watch a")
    client.ask(b"use a")
    put = client.put
    ask = client.ask
    jobs = [expected(put(ANY_BYTES, pri=4294967295, ttr=7), "a", "ready", ANY_BYTES, pri=4294967295, ttr=7)]
    jobs.append(expected(put(b"", delay=1000), "a", "delayed", b"", delay=1000))
    jobs.append(expected(put(b"\r\n", pri=1024, ttr=0), "a", "ready", b"\r\n", pri=1024, ttr=1))
    gone = put(b"gone")
    assert ask(b"delete %d" % gone) == b"DELETED\r\n"

    def taken(body: bytes) -> int:
        id = put(body, pri=5)
        assert ask(b"reserve-job %d" % id).startswith(b"RESERVED %d " % id)
        return id

    id = taken(b"held")
    # A reservation is no record; the count of it comes along only when compaction makes one.
    jobs.append(expected(id, "a", "ready", b"held", pri=5, reserves=None))
    id = taken(b"released")
    ask(b"release %d 77 0" % id)
    jobs.append(expected(id, "a", "ready", b"released", pri=77, reserves=1, releases=1))
    id = taken(b"later")
    ask(b"release %d 78 900" % id)
    jobs.append(expected(id, "a", "delayed", b"later", pri=78, delay=900, reserves=1, releases=1))
    id = taken(b"kicked")
    ask(b"bury %d 79" % id)
    assert ask(b"kick-job %d" % id) == b"KICKED\r\n"
    jobs.append(expected(id, "a", "ready", b"kicked", pri=79, reserves=1, buries=1, kicks=1))
    id = put(b"kicked early", delay=500)
    assert ask(b"kick-job %d" % id) == b"KICKED\r\n"
    jobs.append(expected(id, "a", "ready", b"kicked early", delay=500, kicks=1))
    id = taken(b"touched")
    assert ask(b"touch %d" % id) == b"TOUCHED\r\n"
    jobs.append(expected(id, "a", "ready", b"touched", pri=5, reserves=None))
    id = taken(b"twice")
    ask(b"release %d 5 0" % id)
    assert ask(b"reserve-job %d" % id).startswith(b"RESERVED")
    ask(b"bury %d 80" % id)
    jobs.append(expected(id, "a", "buried", b"twice", pri=80, reserves=2, releases=1, buries=1))
    # Taken out of the buried ones and given back: ready it was before the end, ready it is after it.
    id = taken(b"unburied")
    ask(b"bury %d 81" % id)
    assert ask(b"reserve-job %d" % id).startswith(b"RESERVED")
    ask(b"release %d 82 0" % id)
    jobs.append(expected(id, "a", "ready", b"unburied", pri=82, reserves=2, releases=1, buries=1))
    client.ask(b"use " + b"t" * 200)
    jobs.append(expected(put(b"x" * 65535), "t" * 200, "ready", b"x" * 65535))
    return jobs


@pytest.mark.parametrize(
    ("end", "flags"),
    [
        (ServerProcess.kill, ["-f0"]),
        (ServerProcess.stop, ["-f50"]),
        (ServerProcess.kill, ["-f50"]),
        (ServerProcess.kill, ["-F"]),
        (ServerProcess.stop, ["-s", "20000"]),
        (ServerProcess.kill, ["-n"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__name__,
)
@pytest.mark.slow
def test_jobs_of_all_states_come_back(launch: Launch, journal: Path, end: End, flags: list[str]) -> None:
    server = launch("-b", str(journal), *flags)
    with Client(server.connect()) as client:
        jobs = jobs_of_all_states(client)
        # Still connected when the server goes: its reservations are not given back before.
        end(server)
    for again in (ServerProcess.kill, ServerProcess.stop):
        server = launch("-b", str(journal), *flags)
        with Client(server.connect()) as client:
            assert [job(client, int(wanted["id"]), wanted) for wanted in jobs] == jobs
            stats = client.stats(b"stats")
            states = [wanted["state"] for wanted in jobs]
            assert [int(stats[f"current-jobs-{state}"]) for state in ("ready", "delayed", "buried", "reserved")] == [
                *map(states.count, ("ready", "delayed", "buried")),
                0,
            ]
            assert number(client, "current-jobs-urgent") == len(
                [1 for wanted in jobs if wanted["state"] == "ready" and int(wanted["pri"]) < 1024]
            )
            assert [stats["total-jobs"], stats["binlog-records-written"]] == ["0", "0"], "counted by process"
            lost = int(jobs[2]["id"]) + 1
            assert client.ask(b"peek %d" % lost) == b"NOT_FOUND\r\n", "what was deleted stays deleted"
        again(server)


@ends
@pytest.mark.slow
def test_a_unix_socket_is_taken_over_and_the_jobs_are_there(launch_unix: Launch, journal: Path, end: End) -> None:
    server = launch_unix("-b", str(journal))
    with Client(server.connect()) as client:
        client.put(b"x")
    end(server)
    with Client(launch_unix("-b", str(journal)).connect()) as client:
        assert client.ask(b"reserve") == b"RESERVED 1 1\r\nx\r\n"


@ends
@pytest.mark.slow
def test_jobs_come_back_in_their_order(launch: Launch, journal: Path, end: End, seed: int) -> None:
    """Ready ones by priority and id, buried ones by the moment of burying, delayed ones by their deadline."""
    rng = random.Random(seed)
    server = launch("-b", str(journal))
    with Client(server.connect()) as client:
        ids = [client.put(b"x", pri=rng.randrange(3)) for _ in range(40)]
        pris = {id: number(client, "pri", b"stats-job %d" % id) for id in ids}
        buried = rng.sample(ids, 20)
        for id in buried:
            client.ask(b"reserve-job %d" % id)
            client.ask(b"bury %d %d" % (id, rng.randrange(100)))
        delays = {client.put(b"x", delay=delay): delay for delay in rng.sample(range(100, 1000), 10)}
    end(server)
    server = launch("-b", str(journal))
    with Client(server.connect()) as client:
        # One more in each place behind those that came back.
        id = client.put(b"x")
        client.ask(b"reserve-job %d" % id)
        client.ask(b"bury %d 0" % id)
        buried.append(id)
    end(server)
    server = launch("-b", str(journal))
    with Client(server.connect()) as client:
        for id in buried:
            assert client.ask(b"peek-buried").startswith(b"FOUND %d " % id)
            client.ask(b"delete %d" % id)
        for id in sorted(delays, key=lambda id: delays[id]):
            assert client.ask(b"peek-delayed").startswith(b"FOUND %d " % id)
            client.ask(b"delete %d" % id)
        ready = sorted(set(ids) - set(buried), key=lambda id: (pris[id], id))
        assert reserve_many(client, len(ready)) == ready


@pytest.mark.slow
def test_a_delay_ends_when_it_would_have_without_a_restart(launch: Launch, journal: Path) -> None:
    server = launch("-b", str(journal))
    with Client(server.connect()) as client:
        begun = time.monotonic()
        client.put(b"soon", delay=1)
        client.put(b"later", delay=4)
        client.put(b"much later", delay=1000)
        put = time.monotonic()
    server.stop()
    time.sleep(max(0.0, put + 1.1 - time.monotonic()))
    server = launch("-b", str(journal))
    with Client(server.connect()) as client:
        assert client.stats(b"stats-job 1")["state"] == "ready", "it ended while nothing ran"
        later = client.stats(b"stats-job 2")
        if time.monotonic() - begun < 3.9:
            assert later["state"] == "delayed" and int(later["time-left"]) <= 2, "it does not begin anew"
        left = number(client, "time-left", b"stats-job 3")
        assert 998 - (time.monotonic() - begun) <= left <= 998, "nor is it longer ago than it is"
        assert number(client, "age", b"stats-job 3") >= 1, "ages go on"
        until(lambda: client.stats(b"stats-job 2")["state"] == "ready", "it ends")
        assert time.monotonic() - begun > 3.95


@ends
@pytest.mark.slow
def test_ids_go_on_when_every_segment_with_an_old_one_is_gone(launch: Launch, journal: Path, end: End) -> None:
    flags = ["-b", str(journal), "-s", "20000"]
    server = launch(*flags)
    last = 0
    with Client(server.connect()) as client:

        def put_and_delete() -> int:
            ids = put_many(client, 50, body=b"x" * 500)
            burst(client, [b"delete %d\r\n" % id for id in ids])
            return ids[-1]

        deadline = time.monotonic() + 60
        while number(client, "binlog-oldest-index") < 3:
            assert time.monotonic() < deadline, "segments do not go"
            last = put_and_delete()
    end(server)
    for _ in range(2):
        launch(*flags).stop()
    with Client(launch(*flags).connect()) as client:
        assert client.put(b"x") == last + 1


@pytest.mark.slow
def test_restarts_do_not_pile_up_segments(launch: Launch, journal: Path) -> None:
    flags = ["-b", str(journal)]
    server = launch(*flags)
    with Client(server.connect()) as client:
        put_many(client, 50, body=b"x" * 100)
        burst(client, [b"delete %d\r\n" % id for id in range(1, 41)])
    # A kill may leave two of them, that of its life and the next one, where the device is quick. Up to ten are not
    # worth the work; then they are merged.
    for end in (ServerProcess.stop, ServerProcess.kill, ServerProcess.kill) * 4:
        end(server)
        server = launch(*flags)
        until(lambda: len(segments(journal)) <= 12, "empty segments go")
    with Client(server.connect()) as client:
        assert reserve_many(client, 10) == list(range(41, 51))


@pytest.mark.parametrize("policy", ["-f0", "-f50", "-F"])
@pytest.mark.slow
def test_acknowledged_puts_of_many_clients_are_there(launch: Launch, journal: Path, policy: str) -> None:
    """kill -9 amid the load, with segments coming and going. test_signals.py has the same for SIGTERM."""
    flags = ["-b", str(journal), "-s", "100000", policy]
    server = launch(*flags)
    pumps = [Pump(server, f"p{at}") for at in range(4)]
    try:
        until(lambda: all(len(pump.acknowledged) > 1000 for pump in pumps), "all are at work", 60)
    finally:
        server.kill()
        for pump in pumps:
            pump.stop()
    acknowledged = {id: body for pump in pumps for id, body in pump.acknowledged.items()}
    sent = {body for pump in pumps for body in pump.sent}
    with Client(launch(*flags).connect()) as client:
        replies = burst(client, [b"peek %d\r\n" % id for id in acknowledged])
        assert replies == [b"FOUND %d %d\r\n%b\r\n" % (id, len(body), body) for id, body in acknowledged.items()]
        count = number(client, "current-jobs-ready")
        bodies = [reply.split(b"\r\n")[1] for reply in burst(client, [b"reserve-with-timeout 0\r\n"] * count)]
        assert len(set(bodies)) == count, "a job is there twice"
        assert sent.issuperset(bodies), "a job is there that no client put"


class Load:
    """Random work on a server and, naively, what must come of it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.jobs: dict[int, dict[str, object]] = {}
        self.buried: list[int] = []

    def work(self, client: Client, steps: int) -> None:
        for _ in range(steps):
            kind = self._rng.choice(("put", "put", "put", "delete", "delete", "bury", "release", "delay", "kick"))
            if kind == "put" or not self.jobs:
                self._put(client)
            else:
                self._change(client, self._rng.choice(sorted(self.jobs)), kind)

    def _put(self, client: Client) -> None:
        body = self._rng.randbytes(self._rng.choice((0, 10, 100, 1500)))
        pri = self._rng.randrange(2000)
        delay = self._rng.choice((0, 0, 0, 1000))
        id = client.put(body, pri=pri, delay=delay)
        assert id not in self.jobs
        self.jobs[id] = {"state": "delayed" if delay else "ready", "pri": pri, "delay": delay, "body": body}

    def _change(self, client: Client, id: int, kind: str) -> None:
        job = self.jobs[id]
        if kind == "kick":
            movable = job["state"] != "ready"
            assert client.ask(b"kick-job %d" % id) == (b"KICKED\r\n" if movable else b"NOT_FOUND\r\n")
            job["state"] = "ready"
        elif kind == "delete":
            assert client.ask(b"delete %d" % id) == b"DELETED\r\n"
            del self.jobs[id]
        else:
            assert client.ask(b"reserve-job %d" % id).startswith(b"RESERVED")
            pri = self._rng.randrange(2000)
            if kind == "bury":
                assert client.ask(b"bury %d %d" % (id, pri)) == b"BURIED\r\n"
                job |= {"state": "buried", "pri": pri}
            else:
                delay = 2000 if kind == "delay" else 0
                assert client.ask(b"release %d %d %d" % (id, pri, delay)) == b"RELEASED\r\n"
                job |= {"state": "delayed" if delay else "ready", "pri": pri, "delay": delay}
        if id in self.buried:
            self.buried.remove(id)
        if kind == "bury":
            self.buried.append(id)

    def thin(self, client: Client) -> None:
        """Deletes most of the jobs, and leaves some in every segment."""
        for id in self._rng.sample(sorted(self.jobs), len(self.jobs) * 3 // 4):
            self._change(client, id, "delete")

    def check(self, client: Client) -> None:
        ids = sorted(self.jobs)
        for id, stats, peek in zip(
            ids,
            burst(client, [b"stats-job %d\r\n" % id for id in ids]),
            burst(client, [b"peek %d\r\n" % id for id in ids]),
            strict=True,
        ):
            job = self.jobs[id]
            body = job["body"]
            assert isinstance(body, bytes)
            assert peek == b"FOUND %d %d\r\n%b\r\n" % (id, len(body), body)
            for key in ("state", "pri", "delay"):
                assert f"\n{key}: {job[key]}\n".encode() in stats, (key, job[key], stats)
        states = [job["state"] for job in self.jobs.values()]
        numbers = client.stats(b"stats")
        for state in ("ready", "delayed", "buried"):
            assert int(numbers[f"current-jobs-{state}"]) == states.count(state)
        if self.buried:
            assert client.ask(b"peek-buried").startswith(b"FOUND %d " % self.buried[0])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "flags",
    [pytest.param([], marks=pytest.mark.long), pytest.param(["-n"], marks=pytest.mark.long), ["-f0"]],
    ids=lambda flags: " ".join(flags) or "-c",
)
@pytest.mark.slow
def test_small_segments_under_mixed_load(launch: Launch, journal: Path, flags: list[str], seed: int) -> None:
    load = Load(random.Random(seed))
    command = ["-b", str(journal), "-s", "20000", *flags]
    moved = 0
    for end in (ServerProcess.kill, ServerProcess.stop, ServerProcess.kill):
        server = launch(*command)
        with Client(server.connect()) as client:
            load.check(client)
            load.work(client, 300)
            load.check(client)
            load.thin(client)
            if "-n" not in flags:
                until(lambda: segments(journal)[0] > 1, "segments go")
            moved += number(client, "binlog-records-migrated")
            assert number(client, "binlog-max-size") == 20000
        end(server)
    with Client(launch(*command).connect()) as client:
        load.check(client)
        for id in load.buried:
            assert client.ask(b"peek-buried").startswith(b"FOUND %d " % id)
            client.ask(b"delete %d" % id)
    if "-n" in flags:
        assert moved == 0
        there = segments(journal)  # asked for once: the server may be making the next one
        assert there == list(range(1, len(there) + 1))
    else:
        assert moved > 0, "compaction was at work"


@pytest.mark.slow
def test_without_compaction_every_segment_stays(launch: Launch, journal: Path) -> None:
    flags = ["-b", str(journal), "-s", "20000", "-n"]
    server = launch(*flags)
    with Client(server.connect()) as client:
        deadline = time.monotonic() + 60
        while (count := number(client, "binlog-current-index")) < 4:
            assert time.monotonic() < deadline, "segments do not come"
            burst(client, [b"delete %d\r\n" % id for id in put_many(client, 50, body=b"x" * 500)])
        assert number(client, "binlog-oldest-index") == 1
    server.stop()
    assert launch(*flags).stop() == 0
    found = segments(journal)
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= count - 1, "one that was not used yet goes at a stop"


# Who may have the directory


def refused(journal: Path, *flags: str, log: Path) -> str:
    """Starts a server that must not start; returns its one line."""
    log.unlink(missing_ok=True)
    server = ServerProcess(GEVENTSTALK, ["-b", str(journal), *flags], port=free_port(), stderr=log)
    try:
        assert server.process.wait(30) == 10
    finally:
        server.kill()
    lines = log.read_text().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.slow
def test_one_server_at_a_time_has_the_directory(launch: Launch, journal: Path, tmp_path: Path) -> None:
    server = launch("-b", str(journal))
    with Client(server.connect()) as client:
        client.put(b"x")
        assert "in use" in refused(journal, log=tmp_path / "second")
        assert client.put(b"y") == 2, "the first one does not mind"
    server.kill()
    with Client(launch("-b", str(journal)).connect()) as client:
        assert number(client, "current-jobs-ready") == 2, "and its end gives the directory back"


def test_a_directory_whose_parent_is_missing(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "journal"
    assert str(missing) in refused(missing, log=tmp_path / "log")
    assert not missing.parent.exists()


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert str(file) in refused(file, log=tmp_path / "log")
    assert file.read_text() == "mine"


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    # root may use it all the same, but not the kernel's own.
    directory = Path("/proc/self/task") if os.geteuid() == 0 else closed
    try:
        assert str(directory) in refused(directory, log=tmp_path / "log")
    finally:
        closed.chmod(0o700)
    assert not list(closed.iterdir())


@pytest.mark.slow
def test_a_directory_is_made_and_that_is_said(launch: Launch, journal: Path, tmp_path: Path) -> None:
    launch("-b", str(journal)).stop()
    launch("-b", str(journal)).stop()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len([line for line in lines if "created" in line and str(journal) in line]) == 1


@ends
@pytest.mark.slow
def test_without_a_journal_everything_is_forgotten(launch: Launch, tmp_path: Path, end: End) -> None:
    server = launch()
    with Client(server.connect()) as client:
        assert put_many(client, 10) == list(range(1, 11))
        keys = ("binlog-oldest-index", "binlog-current-index", "binlog-records-migrated", "binlog-records-written")
        stats = client.stats(b"stats")
        assert [stats[key] for key in keys] == ["0"] * 4
        assert stats["binlog-max-size"] == "10485760"
        assert number(client, "file", b"stats-job 1") == 0
    end(server)
    with Client(launch().connect()) as client:
        assert client.ask(b"peek 1") == b"NOT_FOUND\r\n"
        assert client.put(b"x") == 1
    assert not [path for path in tmp_path.iterdir() if path.name != "log"]


@ends
def test_tags_hold_over_a_restart(launch: Launch, journal: Path, end: End) -> None:
    """A unique key, the time after its job, a group, a key's limit and a job's tries."""
    server = launch("-b", str(journal), "-f0")
    with Client(server.connect()) as client:
        for tags in ("idp:live", "idp:gone:60", "grp:g", "aft:g", "tries:2", "tries:1 dead:lost", "con:k", "con:k"):
            assert client.ask(b"put 9 0 60 1 %b\r\nx" % tags.encode()).startswith(b"INSERTED ")
        assert client.ask(b"delete 2") == b"DELETED\r\n"
        assert [client.ask(b"reserve-job %d" % id)[:8] for id in (5, 7)] == [b"RESERVED"] * 2
        assert client.ask(b"reserve-job 6")[:8] == b"RESERVED"
    end(server)
    server = launch("-b", str(journal), "-f0")
    with Client(server.connect()) as client:
        assert client.ask(b"put 9 0 60 1 idp:live\r\nx") == b"INSERTED 1 READY\r\n"
        assert client.ask(b"put 9 0 60 1 idp:gone\r\nx") == b"INSERTED 2 DELETED\r\n"
        assert client.ask(b"reserve-job 4") == b"NOT_FOUND\r\n"
        until(lambda: client.stats(b"stats-job 6")["tube"] == '"lost"', "the job with one try is not a dead letter")
        assert client.stats(b"stats-job 6")["reason"] == "tries"
        assert [client.ask(b"reserve-job %d" % id)[:8] for id in (5, 7, 8)] == [b"RESERVED"] * 2 + [b"NOT_FOUN"]
        assert client.ask(b"release 5 0 0") == b"RELEASED\r\n"
        until(lambda: client.stats(b"stats-job 5")["state"] == "buried", "the job with two tries is not buried")
        assert client.ask(b"delete 3") == b"DELETED\r\n" and client.ask(b"reserve-job 4")[:8] == b"RESERVED"
