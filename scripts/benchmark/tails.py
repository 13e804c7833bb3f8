"""Tails: how long a single request waits while the server has something large to do.

Each case prepares a server, then lets the large thing happen while a prober asks all the time.
Invariant: what is prepared is not measured; a case ends when the large thing has ended, which the server says itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmark import backlog
from scripts.benchmark.load import Client, Load, LoadError, fill, put_request
from scripts.benchmark.prober import probing
from scripts.benchmark.rows import Scale, fill_tubes
from scripts.benchmark.servers import REFERENCE, Build, Server, serving

LIMIT_MS = 10.0
PATIENCE_S = 60.0
SOON_S = 12
RATE = 100_000
"""Jobs a second that are put or reserved, about; what is meant to happen together is planned with it."""
BIG_BYTES = 1_000_000
FULL = b"reserve\r\n"

Prepare = Callable[[Server, Scale], Any]
Act = Callable[[Server, Scale, Any], None]


@dataclass(frozen=True)
class Case:
    """`prepare` returns what `act` needs. `own` says that beanstalkd does not have what is asked for."""

    title: str
    prepare: Prepare
    act: Act
    flags: tuple[str, ...] = ()
    own: bool = False


def _wait_for(port: int, key: bytes, wanted: Callable[[int], bool]) -> None:
    """Returns once a number of `stats` is as wanted."""
    deadline = time.monotonic() + PATIENCE_S
    with Client(port) as client:
        while time.monotonic() < deadline:
            for line in client.text(b"stats\r\n").splitlines():
                name, _, value = line.partition(b": ")
                if name == key and wanted(int(value)):
                    return
            time.sleep(0.05)
    raise LoadError(f"{key.decode()} did not come to what it should in {PATIENCE_S:.0f} s")


def _nothing(server: Server, scale: Scale) -> None:
    """Nothing is to be prepared."""


def _rest(server: Server, scale: Scale, _: object) -> None:
    time.sleep(scale.seconds)


def _put(server: Server, scale: Scale, _: object) -> None:
    load = Load(server.port, connections=10, depth=100, cycle=False)
    load.work(PATIENCE_S, scale.jobs)
    load.close()


def _put_delayed(server: Server, scale: Scale) -> None:
    fill(server.port, scale.jobs, put_request(delay_s=36000))


def _kick(server: Server, scale: Scale, _: object) -> None:
    with Client(server.port) as client:
        client.sock.settimeout(PATIENCE_S)
        client.ask(b"kick %d\r\n" % scale.jobs, b"KICKED %d" % scale.jobs)


def _put_due_together(server: Server, scale: Scale) -> None:
    """All jobs will be due in the same second."""
    due = time.monotonic() + SOON_S + 1.5 * scale.jobs / RATE
    left = scale.jobs
    while left:
        number = min(left, 5000)
        left -= number
        if due - time.monotonic() < 2:
            raise LoadError("putting took longer than the delays that were planned")
        fill(server.port, number, put_request(delay_s=round(due - time.monotonic())))


def _fall_due(server: Server, scale: Scale, _: object) -> None:
    _wait_for(server.port, b"current-jobs-delayed", lambda left: left == 0)


def _reserve_all(server: Server, scale: Scale, ttr_s: Callable[[int], int]) -> Client:
    """One client reserves all jobs."""
    with Client(server.port) as producer:
        producer.bursts((put_request(ttr_s=ttr_s(number)) for number in range(scale.jobs)), b"INSERTED ")
    worker = Client(server.port)
    worker.bursts((FULL for _ in range(scale.jobs)), b"RESERVED ", lines_each=2)
    return worker


def _reserve_to_expire(server: Server, scale: Scale) -> Client:
    """One client reserves all jobs, whose times to run end at about the same moment."""
    return _reserve_all(server, scale, lambda number: SOON_S + (scale.jobs - number) // RATE)


def _expire(server: Server, scale: Scale, worker: Client) -> None:
    _wait_for(server.port, b"current-jobs-reserved", lambda left: left == 0)
    worker.close()


def _reserve_for_long(server: Server, scale: Scale) -> Client:
    return _reserve_all(server, scale, lambda number: 36000)


def _disconnect(server: Server, scale: Scale, worker: Client) -> None:
    worker.close()
    _wait_for(server.port, b"current-jobs-reserved", lambda left: left == 0)


def _put_some(server: Server, scale: Scale) -> None:
    fill(server.port, scale.jobs // 20)


def _cycle(server: Server, scale: Scale, _: object) -> None:
    load = Load(server.port, connections=20, depth=8)
    load.work(2 * scale.seconds)
    load.close()


def _ask_again(request: bytes) -> Act:
    def act(server: Server, scale: Scale, _: object) -> None:
        end = time.monotonic() + scale.seconds
        with Client(server.port) as client:
            while time.monotonic() < end:
                client.text(request)

    return act


def _make_tubes(server: Server, scale: Scale) -> None:
    fill_tubes(server.port, scale.things)


def _big_bodies(server: Server, scale: Scale, _: object) -> None:
    put = put_request(BIG_BYTES)
    end = time.monotonic() + scale.seconds
    with Client(server.port) as client:
        while time.monotonic() < end:
            client.ask(put, b"INSERTED ")
            reply = client.ask(FULL, b"RESERVED ").split()
            client.chunk(int(reply[2]))
            client.ask(b"delete %b\r\n" % reply[1], b"DELETED")


def _put_bodies(server: Server, scale: Scale) -> None:
    fill(server.port, backlog.jobs_of(scale), put_request(backlog.BODY_BYTES))
    assert server.directory is not None
    drop_cache(server.directory)


def drop_cache(directory: Path) -> None:
    """Has the system forget what it keeps in memory of the files of a journal."""
    for path in directory.iterdir():
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # its segment was sealed meanwhile
            continue
        try:
            os.fsync(fd)  # it keeps what is not on the disk yet
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _cycle_bodies(server: Server, scale: Scale, _: object) -> None:
    """A client that reserves gets the oldest of the jobs, whose bodies are on the disk alone."""
    load = Load(server.port, connections=10, depth=backlog.DEPTH, body_bytes=backlog.BODY_BYTES)
    load.work(scale.seconds)
    load.close()


def cases(scale: Scale) -> Sequence[Case]:
    """All cases, named with the sizes of a scale."""
    jobs, things = f"{scale.jobs:,} jobs", f"{scale.things:,}"
    journal = ("-b", "{dir}", "-f50")
    return (
        Case("nothing else happens", _nothing, _rest),
        Case(f"{jobs} are put", _nothing, _put),
        Case(f"{jobs} are put with `-f50`: segments rotate", _nothing, _put, journal),
        Case(f"{jobs} are kicked at once", _put_delayed, _kick),
        Case(f"{jobs} fall due within a second", _put_due_together, _fall_due),
        Case(f"{jobs} expire together", _reserve_to_expire, _expire),
        Case(f"{jobs} are released by one disconnect", _reserve_for_long, _disconnect),
        Case("small segments (`-s 200000`) rotate and compact", _put_some, _cycle, (*journal, "-s", "200000")),
        Case("`stats` is served to another", _nothing, _ask_again(b"stats\r\n")),
        Case(f"`list-tubes` with {things} tubes is served to another", _make_tubes, _ask_again(b"list-tubes\r\n")),
        Case("another puts, reserves and deletes a body of 1 MB", _nothing, _big_bodies, ("-z", str(BIG_BYTES))),
        Case(
            f"bodies of 10 kB come from the disk (`--max-memory {backlog.cap_of(scale)}`, nothing in the page cache)",
            _put_bodies,
            _cycle_bodies,
            (*backlog.flags_of(scale), "--max-memory", backlog.cap_of(scale)),
            own=True,
        ),
    )


def run(case: Case, build: Build, scale: Scale, core: int) -> dict[str, Any]:
    """One case with one server. What a server does not get done is a result, too."""
    with serving(build, case.flags, core=core) as server:
        try:
            prepared = case.prepare(server, scale)
            with probing(server.port, server.pid) as waits:
                case.act(server, scale, prepared)
        except (LoadError, OSError) as error:
            return {"fault": str(error)}
        return dict(waits.__dict__)


def shown(waits: dict[str, Any]) -> str:
    """A result in a few words."""
    if "fault" in waits:
        return str(waits["fault"])
    over = "" if waits["net_worst_ms"] <= LIMIT_MS else " (over)"
    return (
        f"p99.9 {waits['p999_ms']:.1f} ms, worst {waits['worst_ms']:.1f} ms, "
        f"with the processor {waits['net_p999_ms']:.1f} and {waits['net_worst_ms']:.1f} ms{over}"
    )


def measure(builds: Sequence[Build], scale: Scale, core: int) -> list[dict[str, Any]]:
    """Every case with every server. Returns what report.tails_part() shows."""
    found = []
    for case in cases(scale):
        waits: dict[str, dict[str, float]] = {}
        for build in builds:
            if not (case.own and build.name == REFERENCE):
                waits[build.name] = run(case, build, scale, core)
        print(f"{case.title}: {'; '.join(f'{name} {shown(each)}' for name, each in waits.items())}", flush=True)
        found.append({"title": case.title, "builds": waits})
    return found
