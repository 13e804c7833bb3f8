"""The rows of the table: what is measured, how, and which ratio to beanstalkd is asked for.

Invariant: a row measures every server with the same steps, and each measurement begins with a fresh server. Only
`batches` asks each server for as much at a time as its protocol allows.
"""

from __future__ import annotations

import os
import select
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmark.load import SILENCE_S, Client, Load, LoadError, connect, fill, put_request, unexpected
from scripts.benchmark.servers import Build, Server, serving, spent

WARM_UP_S = 0.3
TIDY_S = 1.0
"""Enough for compaction at leisure to remove the segments of 100,000 jobs."""
BUSY = 0.90
"""Below this share of a core, something else than the server's own work decided the figure."""


@dataclass(frozen=True)
class Sample:
    """One run: its value, and the shares of the measured interval for which the two cores were busy.

    `server_user` is the part of `server_busy` in user space.
    """

    value: float
    server_busy: float
    load_busy: float
    server_user: float = 0.0


@dataclass(frozen=True)
class Scale:
    """The time and the size of runs. `seconds` a run, `jobs` where a row names a million, `things` for 10,000."""

    seconds: float = 3.0
    jobs: int = 1_000_000
    things: int = 10_000

    @property
    def tenth(self) -> int:
        """Jobs for what is asked with 100,000 of them."""
        return max(1, self.jobs // 10)


Measure = Callable[[Build, "Row", Scale, int], Sample]


@dataclass(frozen=True)
class Row:
    """`compiled` and `pure` are the ratios to beanstalkd to reach; `why_idle` says why a server may have time left.

    The title holds {jobs}, {tenth} and {things} where it names the numbers of a Scale.
    """

    name: str
    title: str
    compiled: float
    pure: float
    measure: Measure
    unit: str = "commands/s"
    smaller: bool = False
    flags: tuple[str, ...] = ()
    load: dict[str, int] = field(default_factory=dict)
    why_idle: str = ""

    def said(self, scale: Scale) -> str:
        """The title with the numbers of what was really asked."""
        return self.title.format(jobs=scale.jobs, tenth=scale.tenth, things=scale.things)

    def target(self, build: str) -> float:
        return self.compiled if build == "compiled" else self.pure

    def met(self, build: str, ratio: float) -> bool:
        """Returns whether a ratio to beanstalkd is as good as asked for."""
        return ratio <= self.target(build) if self.smaller else ratio >= self.target(build)


class Watch:
    """Measures an interval: wall time, and the processor time of a server and of this process."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._cpu = spent(server.pid)
        self._own = time.process_time()
        self._begun = time.monotonic()

    def sample(self, value: float = 0.0, *, a_second: bool = False) -> Sample:
        """The interval ends. With `a_second`, the value is divided by its seconds."""
        wall = time.monotonic() - self._begun
        busy, user = spent(self._server.pid).since(self._cpu)
        own = (time.process_time() - self._own) / wall
        return Sample(value / wall if a_second else value, busy / wall, own, user / wall)


def throughput(build: Build, row: Row, scale: Scale, core: int) -> Sample:
    """Commands answered a second."""
    with serving(build, row.flags, core=core) as server:
        if row.load.get("other_tubes"):
            fill_tubes(server.port, scale.things)
        load = Load(
            server.port,
            connections=row.load["connections"],
            depth=row.load.get("depth", 1),
            cycle=bool(row.load.get("cycle", 1)),
        )
        try:
            load.work(min(WARM_UP_S, scale.seconds / 4))
            watch = Watch(server)
            return watch.sample(work(load, scale.seconds), a_second=True)
        finally:
            load.close()


def work(load: Load, seconds: float) -> int:
    """Commands answered in this many seconds; on a busy machine it goes on until there is something to count."""
    begun = time.monotonic()
    commands = load.work(seconds)
    while not commands:
        if time.monotonic() > begun + SILENCE_S:
            raise LoadError(f"the server answered nothing in {SILENCE_S:g} s")
        commands = load.work(seconds)
    return commands


def taking(build: Build, row: Row, scale: Scale, core: int) -> Sample:
    """Jobs that one worker takes and deletes a second: a batch at a time where the server has batches, or one."""
    with serving(build, row.flags, core=core) as server:
        fill(server.port, scale.jobs)
        with Client(server.port) as worker:
            most = row.load["batch"] if b"reserve-batch" in worker.text(b"stats\r\n") else 1
            watch, end = Watch(server), time.monotonic() + scale.seconds
            left = scale.jobs
            while left >= most and time.monotonic() < end:
                take(worker, most)
                left -= most
            return watch.sample(scale.jobs - left, a_second=True)


def take(worker: Client, jobs: int) -> None:
    """Reserves and deletes this many jobs of one line each, in two round trips."""
    if jobs == 1:
        id = worker.ask(b"reserve-with-timeout 0\r\n", b"RESERVED ").split()[1]
        worker.line()
        worker.ask(b"delete %b\r\n" % id, b"DELETED")
        return
    reserve = b"reserve-batch %d\r\n" % jobs
    worker.ask(reserve, b"RESERVED_BATCH %d" % jobs)
    ids = [words[1] for words in map(bytes.split, worker.lines(2 * jobs)[::2])]
    worker.ask(b"delete-batch %b\r\n" % b" ".join(ids), b"DELETED_BATCH %d 0" % jobs)


def fill_tubes(port: int, tubes: int, first: int = 0) -> None:
    """This many other tubes that hold a job each, numbered from the first."""
    with Client(port) as client:
        put = put_request()
        client.bursts(
            (b"use tube-%d\r\n%b" % (number, put) for number in range(first, first + tubes)), b"INSERTED ", lines_each=2
        )


def delivery(build: Build, row: Row, scale: Scale, core: int) -> Sample:
    """Median microseconds from a put to its delivery, when many workers are blocked in reserve."""
    with serving(build, row.flags, core=core) as server:
        workers = [connect(server.port) for _ in range(scale.things)]
        poll = select.epoll()
        for worker in workers:
            os.write(worker.fileno(), b"reserve\r\n")
            poll.register(worker.fileno(), select.EPOLLIN)
        with Client(server.port) as producer:
            while b"current-waiting: %d\n" % scale.things not in producer.text(b"stats\r\n"):
                time.sleep(0.01)
            end = time.monotonic() + scale.seconds
            latencies: list[float] = []
            put = put_request()
            watch = Watch(server)
            while time.monotonic() < end:
                begun = time.perf_counter()
                producer.sock.sendall(put)
                ((fd, _),) = poll.poll(10.0, 1) or ((-1, 0),)
                reply = os.read(fd, 512) if fd >= 0 else b""
                latencies.append(time.perf_counter() - begun)
                if not reply.startswith(b"RESERVED "):
                    raise unexpected(reply)
                producer.line()
                os.write(fd, b"delete %b\r\nreserve\r\n" % reply.split()[1])
                poll.poll(10.0, 1)
                if (reply := os.read(fd, 512)) != b"DELETED\r\n":
                    raise unexpected(reply)
            sample = watch.sample(statistics.median(latencies) * 1e6)
        for worker in workers:
            worker.close()
        poll.close()
        return sample


class Journals:
    """Journals with many jobs, made once for each build and then started from as often as asked."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int, bool], Path] = {}

    def directory(self, build: Build, row: Row, jobs: int, churned: bool = False) -> Path:
        """With `churned`, as many jobs came before and were deleted while these came."""
        key = (build.name, jobs, churned)
        if key not in self._made:
            self._made[key] = Path(tempfile.mkdtemp(prefix="geventstalk-bench-"))
            server = Server(build, row.flags, directory=self._made[key])
            try:
                server.wait_ready()
                fill(server.port, jobs)
                if churned:
                    replace(server.port, jobs)
            finally:
                server.kill()
        return self._made[key]

    def remove(self) -> None:
        for path in self._made.values():
            shutil.rmtree(path, ignore_errors=True)
        self._made.clear()


journals = Journals()


def replace(port: int, jobs: int) -> None:
    """Deletes the jobs 1 to this many and puts as many others, in turns; then the server may tidy up for a moment."""
    put = put_request()
    with Client(port) as client:
        turns = (b"delete %d\r\n%b" % (id, put) for id in range(1, jobs + 1))
        client.bursts(turns, b"INSERTED ", lines_each=2)
        time.sleep(TIDY_S)


def restart(build: Build, row: Row, scale: Scale, core: int) -> Sample:
    """Seconds from a start to the first answer, with a journal that holds many jobs and ended by kill -9."""
    return start(build, row, journals.directory(build, row, scale.jobs), scale.jobs, core)


def restart_after_churn(build: Build, row: Row, scale: Scale, core: int) -> Sample:
    """Returns how many times as long a restart takes when other jobs came before those that there are."""
    fresh = start(build, row, journals.directory(build, row, scale.tenth), scale.tenth, core)
    churned = start(build, row, journals.directory(build, row, scale.tenth, churned=True), scale.tenth, core)
    return Sample(churned.value / fresh.value, churned.server_busy, churned.load_busy)


def start(build: Build, row: Row, directory: Path, jobs: int, core: int) -> Sample:
    """Seconds from a start to the first answer, with a journal of this many jobs."""
    own = time.process_time()
    server = Server(build, row.flags, core=core, directory=directory)
    try:
        seconds = server.wait_ready()
        busy = server.cpu_s() / seconds
        load_busy = (time.process_time() - own) / seconds
        with Client(server.port) as client:
            ready = b"current-jobs-ready: %d\n" % jobs
            if ready not in client.text(b"stats\r\n"):
                raise unexpected(b"stats without " + ready)
        return Sample(seconds, busy, load_busy)
    finally:
        server.kill()


def memory(build: Build, row: Row, scale: Scale, core: int) -> Sample:
    """Bytes of memory a job: what the server grew by while it took many jobs."""
    with serving(build, row.flags, core=core) as server:
        fill(server.port, 1000)  # what the first jobs need once is not theirs
        before = server.rss_bytes()
        watch = Watch(server)
        fill(server.port, scale.jobs)
        return watch.sample((server.rss_bytes() - before) / scale.jobs)


CHURN_MOST = 1.5
"""A restart reads a dead record more for each job; a search among the dead would take a hundred times as long."""
_CYCLE = "put+reserve+delete"
_OFF = ("-b", "{dir}", "-F")
_EVERY = ("-b", "{dir}", "-f50")
_ALWAYS = ("-b", "{dir}", "-f0")
_DISK = "each reply waits for the disk"
_TURN = "one request at a time: most of it is the way between the two processes"


def _speed(name: str, title: str, compiled: float, pure: float, flags: tuple[str, ...] = (), **load: int) -> Row:
    waits = _DISK if flags == _ALWAYS else _TURN if load["connections"] == 1 else ""
    return Row(name, title, compiled, pure, throughput, flags=flags, load=load, why_idle=waits)


ROWS = (
    _speed("plain", f"{_CYCLE}, 50 connections", 1.0, 0.75, connections=50),
    _speed("plain-1", f"{_CYCLE}, 1 connection", 0.95, 0.8, connections=1),
    _speed("plain-500", f"{_CYCLE}, 500 connections", 1.0, 0.75, connections=500),
    _speed("deep-16", f"{_CYCLE} 16 deep, 50 connections", 4, 2.5, connections=50, depth=16),
    _speed("put-100", "put 100 deep, 50 connections", 3, 2, connections=50, depth=100, cycle=0),
    _speed("never", f"`-F`: {_CYCLE}, 50 connections", 1.0, 0.8, _OFF, connections=50),
    _speed("never-put-100", "`-F`: put 100 deep, 50 connections", 4, 3, _OFF, connections=50, depth=100, cycle=0),
    _speed("f50", f"`-f50`: {_CYCLE}, 50 connections", 1.0, 0.8, _EVERY, connections=50),
    _speed("f50-put-100", "`-f50`: put 100 deep, 50 connections", 4, 3, _EVERY, connections=50, depth=100, cycle=0),
    _speed("f0", f"`-f0`: {_CYCLE}, 50 connections", 5, 3, _ALWAYS, connections=50),
    _speed("f0-put", "`-f0`: put, 50 connections", 10, 7, _ALWAYS, connections=50, cycle=0),
    _speed("f0-put-500", "`-f0`: put, 500 connections", 12, 9, _ALWAYS, connections=500, cycle=0),
    _speed("f0-put-100", "`-f0`: put 100 deep, 50 connections", 45, 35, _ALWAYS, connections=50, depth=100, cycle=0),
    _speed("f0-put-1", "`-f0`: put, 1 connection", 0.8, 0.6, _ALWAYS, connections=1, cycle=0),
    _speed(
        "tubes",
        f"{_CYCLE}, 50 connections, while {{things:,}} other tubes hold a job",
        2,
        1.5,
        connections=50,
        other_tubes=1,
    ),
    Row(
        "batches",
        "reserve and delete of one worker, 100 jobs a batch where the server has batches, {jobs:,} jobs",
        10,
        10,
        taking,
        unit="jobs/s",
        load={"batch": 100},
        why_idle=_TURN,
    ),
    Row(
        "blocked",
        "{things:,} workers blocked in reserve: put to delivery, median",
        1.2,
        1.5,
        delivery,
        unit="µs",
        smaller=True,
        why_idle=_TURN,
    ),
    Row("restart", "restart with {jobs:,} jobs until served", 0.8, 1.2, restart, unit="s", smaller=True, flags=_OFF),
    Row(
        "restart-churned",
        "restart with {tenth:,} jobs that followed as many deleted ones ÷ restart with fresh ones",
        CHURN_MOST,
        CHURN_MOST,
        restart_after_churn,
        unit="times",
        smaller=True,
        flags=_OFF,
    ),
    Row(
        "memory",
        "memory a job, {jobs:,} jobs, no journal",
        0.9,
        1.6,
        memory,
        unit="bytes",
        smaller=True,
        why_idle="a size, not a speed",
    ),
)
BY_NAME = {row.name: row for row in ROWS}
