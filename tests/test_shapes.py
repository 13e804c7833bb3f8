"""Faults of disks, threads, memory and processes where bodies are on disk, or clients behind front-end processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geventstalk._build import BUILD
from tests.support.clients import Launch, burst, fronts_of, launcher, memory_bytes, number, probing, until
from tests.support.disk import fill_up, small_disk
from tests.support.faults import strace_problem
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.wire import Client, WireError

pytestmark = pytest.mark.slow
needs_strace = pytest.mark.skipif(bool(strace_problem()), reason=strace_problem() or "strace works")
needs_the_source = pytest.mark.skipif(BUILD == "compiled", reason="a compiled method cannot be replaced")

LIMIT = 65_536
FLAGS = ("--max-memory", str(LIMIT), "-s", "32768")
SIZE = 2000


def body_of(number: int) -> bytes:
    return (b"%08x." % (number * 0x9E3779B1 % 2**32) * (SIZE // 9 + 1))[:SIZE]


def fill(client: Client, jobs: dict[int, bytes], count: int, patience_s: float = 20.0) -> bool:
    """Puts this many jobs more. Returns whether all were taken; while a segment is sealed there may be no room."""
    numbers = iter(range(len(jobs), 1 << 30))
    least = len(jobs) + count
    deadline = time.monotonic() + patience_s
    while len(jobs) < least and time.monotonic() < deadline:
        body = body_of(next(numbers))
        reply = client.ask(b"put 0 0 100 %d\r\n%b" % (SIZE, body))
        if reply.startswith(b"INSERTED "):
            jobs[int(reply.split()[1])] = body
            deadline = time.monotonic() + patience_s
        else:
            assert reply == b"OUT_OF_MEMORY\r\n"
            time.sleep(0.005)
    return len(jobs) >= least


def check(client: Client, jobs: dict[int, bytes]) -> None:
    """All of them are there, as they were put, and no others."""
    replies = burst(client, [b"peek %d\r\n" % id for id in jobs])
    assert replies == [b"FOUND %d %d\r\n%b\r\n" % (id, SIZE, body) for id, body in jobs.items()]
    assert number(client, "current-jobs-ready") == len(jobs)


def run_through(client: Client, jobs: dict[int, bytes], share: int) -> None:
    """Some of the jobs are reserved, released, buried and kicked; every `share`-th is deleted."""
    for id in list(jobs)[::3]:
        assert client.ask(b"reserve-job %d" % id) == b"RESERVED %d %d\r\n%b\r\n" % (id, SIZE, jobs[id])
        word = client.ask(b"release %d 5 0" % id if id % 2 else b"bury %d 5" % id)
        assert word == (b"RELEASED\r\n" if id % 2 else b"BURIED\r\n")
    client.ask(b"kick 100000")
    for id in list(jobs)[::share]:
        assert client.ask(b"delete %d" % id) == b"DELETED\r\n"
        del jobs[id]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_backlog_beyond_the_bound_on_a_full_disk(tmp_path: Path, seed: int) -> None:
    """Twenty times the bound; others fill the disk; changes, deletes, kill -9 and starts go on."""
    with (
        small_disk(tmp_path / "disk", 6 << 20) as disk,
        contextlib.contextmanager(launcher_of)(tmp_path) as launch,
    ):
        flags = ("-b", str(disk / "journal"), *FLAGS, ("-f0", "-f50", "-F")[seed % 3])
        jobs: dict[int, bytes] = {}
        server = launch(*flags)
        with Client(server.connect()) as client:
            assert fill(client, jobs, 20 * LIMIT // SIZE)
            fill_up(disk / "filler")
            assert not fill(client, jobs, 200, 0.3), "there is no room"
            check(client, jobs)
            run_through(client, jobs, 2)
        server.kill()
        server = launch(*flags)
        with Client(server.connect()) as client:
            check(client, jobs)
            run_through(client, jobs, 2)
            (disk / "filler").unlink()
            assert fill(client, jobs, 100), "there is room again"
        server.kill()
        server = launch(*flags)
        with Client(server.connect()) as client:
            check(client, jobs)
            assert number(client, "memory-bytes") <= LIMIT
            run_through(client, jobs, 1)
            assert number(client, "memory-bytes") == number(client, "memory-bytes-on-disk") == 0
        assert server.stop() == 0


def launcher_of(folder: Path) -> Iterator[Launch]:
    servers: list[ServerProcess] = []

    def start(*args: str, **options: object) -> ServerProcess:
        servers.append(ServerProcess(GEVENTSTALK, args, **options))  # type: ignore[arg-type]  # as launcher() calls it
        return servers[-1].wait_ready()

    try:
        yield from launcher(start, folder, unix=False)
    finally:
        for server in servers:
            server.stop()


@needs_strace
@pytest.mark.long
def test_no_client_waits_for_the_bodies_of_others(tmp_path: Path) -> None:
    """Each read of the disk takes 30 ms. A client that wants a body waits, and no other does."""
    flags = ["-b", str(tmp_path / "journal"), *FLAGS]
    server = ServerProcess(GEVENTSTALK, flags).wait_ready()
    jobs: dict[int, bytes] = {}
    with Client(server.connect()) as client:
        assert fill(client, jobs, 150)
    assert server.stop() == 0
    slow = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", "trace=pread64"]
    server = ServerProcess([*slow, "-e", "inject=pread64:delay_enter=30000", *GEVENTSTALK], flags)
    try:
        with Client(server.wait_ready().connect()) as client:
            ids = list(jobs)[:60:12]
            begun = time.monotonic()
            with probing(server) as probes:
                for id in ids:
                    assert client.ask(b"peek %d" % id) == b"FOUND %d %d\r\n%b\r\n" % (id, SIZE, jobs[id])
            assert time.monotonic() - begun > 0.03 * len(ids), "reads are slow"
            waits = sorted(probe.wall_s for probe in probes)
            assert waits[len(waits) * 9 // 10] < 0.025
    finally:
        server.stop()


def test_a_body_that_rots_on_the_disk_is_not_handed_out(tmp_path: Path) -> None:
    """The process ends, and so does the next start. With --accept-damage the others are served."""
    flags = ["-b", str(tmp_path / "journal"), *FLAGS]
    server = ServerProcess(GEVENTSTALK, flags, stderr=tmp_path / "log").wait_ready()
    jobs: dict[int, bytes] = {}
    with Client(server.connect()) as client:
        assert fill(client, jobs, 150)
        rotten, *_ = jobs
        assert rot(min((tmp_path / "journal").glob("segment-*.db")), jobs[rotten][100:140], b"#" * 40)
        with pytest.raises((WireError, OSError)):
            client.ask(b"reserve")
    assert server.process.wait(30) == 74
    assert "damaged" in (tmp_path / "log").read_text()
    server = ServerProcess(GEVENTSTALK, flags, stderr=tmp_path / "log")
    assert server.process.wait(30) not in (0, None)
    assert "is damaged" in (tmp_path / "log").read_text()
    server = ServerProcess(GEVENTSTALK, [*flags, "--accept-damage"], stderr=tmp_path / "log").wait_ready()
    with Client(server.connect()) as client:
        del jobs[rotten]
        check(client, jobs)
    assert server.stop() == 0


def rot(path: Path, was: bytes, becomes: bytes) -> bool:
    """Other bytes in the place of some, as a device may give them back. Returns whether they were there."""
    data = path.read_bytes()
    if was not in data:
        return False
    with path.open("r+b") as file:
        file.seek(data.index(was))
        file.write(becomes)
    return True


PROGRAM = """
import sys
from journal.sqlite.payloads import SegmentPayloads
from geventstalk.durable.reading import Reading
from geventstalk.cli.main import main
def breaks(*arguments): raise {error}
{where} = breaks
sys.exit(main())
"""


@needs_the_source
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("SegmentPayloads.run", 'ZeroDivisionError("planted")'),
        pytest.param("Reading.body_of", 'ZeroDivisionError("planted")', marks=pytest.mark.long),
        pytest.param("Reading.body_of", 'MemoryError("planted")', marks=pytest.mark.long),
    ],
    ids=["a bug in a thread", "a bug", "no memory"],
)
def test_a_fault_while_bodies_are_read_is_the_end(tmp_path: Path, where: str, error: str) -> None:
    """No client waits for ever, and nothing is lost."""
    flags = ["-b", str(tmp_path / "journal"), *FLAGS]
    server = ServerProcess(GEVENTSTALK, flags).wait_ready()
    jobs: dict[int, bytes] = {}
    with Client(server.connect()) as client:
        assert fill(client, jobs, 100)
    assert server.stop() == 0
    program = PROGRAM.format(where=where, error=error)
    server = ServerProcess([sys.executable, "-c", program], flags, stderr=tmp_path / "log")
    server.log.expects = "planted"
    with Client(server.wait_ready().connect()) as client, pytest.raises((WireError, OSError)):
        for id in jobs:
            client.ask(b"peek %d" % id)
    assert server.process.wait(30) in (70, 74)
    assert (tmp_path / "log").read_text().count("stopping") == 1
    server.read_log()
    server = ServerProcess(GEVENTSTALK, flags).wait_ready()
    with Client(server.connect()) as client:
        check(client, jobs)
    assert server.stop() == 0


def test_without_a_descriptor_for_a_segment_its_client_waits(tmp_path: Path) -> None:
    """The limit falls while the server runs. Others go on, and with a descriptor all bodies are there."""
    flags = ["-b", str(tmp_path / "journal"), *FLAGS]
    server = ServerProcess(GEVENTSTALK, flags, stderr=tmp_path / "log").wait_ready()
    jobs: dict[int, bytes] = {}
    with Client(server.connect()) as client, Client(server.connect()) as other:
        assert fill(client, jobs, 120)
        begun = number(client, "binlog-current-index")
        while number(client, "binlog-current-index") == begun:  # a segment with more in it may be sealed meanwhile
            assert fill(client, jobs, 1)
        # While segments are sealed and made, descriptors come and go.
        until(
            lambda: len(list((tmp_path / "journal").glob("*-wal"))) == 2, "all but the current and the next are sealed"
        )
        looks: list[set[int]] = []

        def stays() -> bool:  # and their files are closed: on a busy machine that takes its time
            looks.append({int(name) for name in os.listdir(f"/proc/{server.pid}/fd")})
            time.sleep(0.05)
            return len(looks) > 20 and all(each == looks[-1] for each in looks[-20:])

        until(stays, "no descriptor comes or goes for a second")
        taken = looks[-1]
        few = next(number for number in itertools.count() if number not in taken)
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (few, hard))
        waits = threading.Thread(target=check, args=(client, jobs))
        waits.start()
        waits.join(1)
        assert waits.is_alive()
        assert other.ask(b"list-tube-used") == b"USING default\r\n"
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
        waits.join(60)
        assert not waits.is_alive()
        check(other, jobs)
    assert server.stop() == 0


# Fronts


def test_a_front_that_stands_still_delays_only_its_own_clients(tmp_path: Path) -> None:
    """The jobs of its clients come back when their time is over, and data that it leaves does not fill memory."""
    server = ServerProcess(GEVENTSTALK, ["--io-processes", "2", "-z", "1000000"], stderr=tmp_path / "log").wait_ready()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(server.connect())) for _ in range(10)]
        for client in clients:
            client.sync()
        victim = fronts_of(server)[0]
        large = clients[0].put(b"x" * 300_000)
        clients[0].ask(b"reserve-job %d" % large)
        clients[0].ask(b"bury %d 0" % large)
        for client in clients:
            client.put(b"held", ttr=2)
        for client in clients:
            assert client.ask(b"reserve").startswith(b"RESERVED")
        os.kill(victim, signal.SIGSTOP)
        for client in clients:
            client.send(b"peek %d\r\n" % large * 20 + b"list-tube-used\r\n")
        until(lambda: readable(clients), "some are answered")
        time.sleep(1)
        answered = readable(clients)
        held_up = [client for client in clients if client not in answered]
        assert held_up
        for client in answered:
            hear(client, large)
        control = answered[0]
        until(lambda: number(control, "job-timeouts") >= len(held_up), "what they hold comes back")
        begun = time.monotonic()
        for _ in range(200):
            control.sync()
        assert time.monotonic() - begun < 10
        assert memory_bytes(server.pid) < 150 << 20
        os.kill(victim, signal.SIGCONT)
        for client in held_up:
            hear(client, large)
        assert len(fronts_of(server)) == 2 and victim in fronts_of(server)
    assert server.stop() == 0


def readable(clients: list[Client]) -> list[Client]:
    ready = select.select([client.sock for client in clients], [], [], 0)[0]
    return [client for client in clients if client.sock in ready]


def hear(client: Client, large: int) -> None:
    """A client hears all that it has asked for."""
    replies = [client.reply() for _ in range(21)]
    assert replies[:20] == [b"FOUND %d 300000\r\n%b\r\n" % (large, b"x" * 300_000)] * 20
    assert replies[20] == b"USING default\r\n"
