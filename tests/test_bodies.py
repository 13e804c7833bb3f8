"""Bodies that leave memory for a journal and come back: who waits for them, who does not, and that they are right.

Engine, sessions, turn, store and journal are real. The clock and the thread that reads are the tests'.
"""

# Bug: Compiled, a client that had waited for a body was never answered: mypyc takes an attribute for what a check
# before a call has found.

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import journal.sqlite.payloads as payloads_module
import journal.sqlite.reader as reader_module
from geventstalk._build import BUILD
from geventstalk.core.bodies import AHEAD_BYTES_MAX, BODY_BYTES, Bodies
from geventstalk.core.engine import INSERTED, OUT_OF_MEMORY, UNFINISHED
from geventstalk.core.job import READY, RESERVED, Job, Ledger
from geventstalk.core.operate import DONE, KEEP, NOT_FOUND, Operate
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.serving.connection import Unsent
from geventstalk.turn.operations import Changes
from geventstalk.turn.tasks import Wait, Work
from geventstalk.turn.turn import Turn
from geventstalk.wire.session import Service, Session
from journal import Journal, JournalDamaged, JournalError
from journal.sqlite.files import segment_path
from journal.sqlite.sql import connect_to_read
from tests.support import for_change
from tests.support.check import check
from tests.support.clock import SECOND, ManualClock
from tests.support.faults import fetch, wants_compaction
from tests.support.forgetful import Forgetful
from tests.test_turn import Wire

WALL_NS = 1_700_000_000 * SECOND
PATIENCE_S = 20
SEGMENT_BYTES = 1 << 15
needs_pure = pytest.mark.skipif(BUILD == "compiled", reason="methods of compiled classes cannot be replaced")


class Rig:
    """A server without sockets. Bodies are fetched when fetch() says so; with `prompt`, before tell() returns."""

    def __init__(
        self,
        directory: Path | None,
        bodies: Bodies | None,
        *,
        prompt: bool = False,
        fsync_ms: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.clock = ManualClock()
        self.prompt = prompt
        self.engine = Operate(self.clock.ns)
        self.engine.bodies = self.bodies = bodies
        self.service = Service(self.engine, 1 << 20, dict)
        self.failures: list[BaseException] = []
        self.turn = Turn(self.engine, lambda: self.clock.ns, lambda: WALL_NS, lambda: None, self.failures.append)
        self.fetches = 0
        self.journal: Journal | None = None
        self.pending: Work | None = None
        if directory is not None:
            self.journal = Journal(str(directory), segment_bytes=segment_bytes)
            self.store = Store(self.journal, fsync_ms, ClockOffset(WALL_NS, self.clock.ns))
            try:
                self.turn.open(self.store)
            except JournalError:
                self.journal.abandon()
                raise
            if bodies is not None:
                self.task = self.turn.maintenance.keep_bodies(self.store, bodies)
                next(self.task)

    def client(self) -> Wire:
        wire = Wire(Session(self.service))
        self.turn.join(wire)
        return wire

    def tell(self, wire: Wire, data: bytes | None) -> bytes:
        """Returns what has come back by the end of the turn."""
        self.turn.step(wire, data)
        self.turn.end()
        self.go_on()
        while self.prompt and any(channel.session.awaited for channel in self.turn.channels.values()):
            self.fetch()
        return wire.take()

    def go_on(self) -> None:
        """Each session with something left to do does it, unless it waits for a body."""
        while ready := [
            each for each in self.turn.channels.values() if each.session.unfinished and not each.session.awaited
        ]:
            if self.engine.held:
                self.backpressure()
            for channel in ready:
                self.turn.step(channel, b"")
            self.turn.end()

    def backpressure(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while self.store.behind:
            wants_compaction(self.store)
            if not self.store.catch_up(self.clock.ns):
                time.sleep(0.0005)
            self.turn.maintenance.keep_bound(self.store)
            assert time.monotonic() < end_s
        self.turn.let_changes_go_on()

    def begin_fetch(self) -> bool:
        """Lets the task go on until it has something read. Returns whether it has."""
        if self.pending is None and self.turn.maintenance.missing.is_set:
            wait = next(self.task)
            self.pending = wait.work
        return self.pending is not None

    def end_fetch(self) -> None:
        """Bodies have come, and the clients that waited for them go on."""
        assert self.pending is not None
        self.fetches += 1
        self.pending.run()
        self.pending = None
        waited = [each for each in self.turn.channels.values() if each.session.awaited is not None]
        wait = next(self.task)  # the end of the turn
        self.turn.end()
        for channel in waited:
            if channel.session.number in self.turn.channels and channel.session.number not in self.turn._awaiting:
                self.turn.step(channel, b"")
        self.turn.end()
        self.go_on()
        wait = next(self.task)
        self.pending = wait.work

    def fetch(self) -> None:
        assert self.begin_fetch(), "no body is wanted"
        self.end_fetch()

    def settle(self) -> None:
        """Waits until all full segments are sealed; compacts nothing."""
        assert self.journal is not None
        end_s = time.monotonic() + PATIENCE_S
        self.turn.end()
        while True:
            self.journal.tend()
            if not self.journal.settling:
                return
            assert time.monotonic() < end_s
            time.sleep(0.002)

    def compact(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            if wants_compaction(self.store):
                self.store.compact_slice(self.clock.ns)
                self.turn.maintenance.keep_bound(self.store)
            elif not self.store.settling:
                self.turn.maintenance.keep_bound(self.store)
                return
            else:
                time.sleep(0.001)  # for the journal's worker
            assert time.monotonic() < end_s

    def put(self, wire: Wire, id: int, size: int = 1000, more: str = "0 0 100") -> bytes:
        body = body_of(id, size)
        pri, delay, ttr = more.split()
        return self.tell(wire, f"put {pri} {delay} {ttr} {len(body)}\r\n".encode() + body + b"\r\n")

    def alter(self, id: int, tube_name: bytes, ttr_s: int = KEEP) -> int:
        """Returns what an operator does to a job whose body is in memory by then."""
        if job := self.engine.jobs.get(id):
            fetch(self.store, [job])
        return self.engine.alter(id, KEEP, KEEP, ttr_s, tube_name, self.clock.ns)

    def fill(self, wire: Wire, count: int, size: int = 1000) -> None:
        """A backlog of which all but the newest can leave memory."""
        for id in range(self.engine.next_id, self.engine.next_id + count):
            assert self.put(wire, id, size) == b"INSERTED %d\r\n" % id
            if not id % 8:
                self.settle()
        self.settle()

    def forget(self) -> int:
        """Lets all bodies go that can. Returns how many have gone."""
        assert self.bodies is not None
        self.bodies.make_room(self.engine, self.bodies.max_bytes)
        check(self.engine)
        return self.bodies.gone

    def close(self) -> None:
        if self.journal is not None:
            self.journal.abandon() if self.turn.failed else self.journal.close()


def body_of(id: int, size: int = 1000) -> bytes:
    return (b"%d." % id * size)[:size]


def reserved(id: int, size: int = 1000) -> bytes:
    return b"RESERVED %d %d\r\n%s\r\n" % (id, size, body_of(id, size))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """200 jobs, and memory for some."""
    rig = Rig(tmp_path / "journal", Forgetful(10_000))
    rig.fill(rig.client(), 200)
    assert rig.forget() > 125
    yield rig
    check(rig.engine)
    rig.close()


def is_gone(rig: Rig, id: int) -> bool:
    job = rig.engine.jobs.get(id)
    assert job is not None
    return job.body is None


def test_a_reserve_waits_for_the_body_and_what_follows_waits_with_it(rig: Rig) -> None:
    wire, other = rig.client(), rig.client()
    assert is_gone(rig, 1)
    assert rig.tell(wire, b"reserve\r\nuse x\r\n") == b""
    assert rig.tell(other, b"use y\r\n") == b"USING y\r\n", "the other client does not wait"
    rig.fetch()
    assert wire.take() == reserved(1) + b"USING x\r\n"


def test_who_waits_for_a_body_executes_nothing_else(rig: Rig) -> None:
    wire = rig.client()
    rig.tell(wire, b"reserve\r\n")
    assert rig.tell(wire, b"delete 1\r\n") == b""
    assert rig.tell(wire, b"") == b""
    rig.fetch()
    assert wire.take() == reserved(1) + b"DELETED\r\n"


def test_the_next_ones_are_there_before_they_are_asked_for(rig: Rig) -> None:
    wire = rig.client()
    assert rig.bodies is not None
    rig.bodies.max_bytes = 1 << 20
    rig.tell(wire, b"reserve\r\n")
    rig.fetch()
    assert wire.take() == reserved(1)
    for id in range(2, 200):
        said = rig.tell(wire, b"reserve\r\n")
        assert said == reserved(id)
        if rig.begin_fetch():
            rig.end_fetch()
    assert 2 <= rig.fetches <= 8


def test_a_peek_waits_for_the_body(rig: Rig) -> None:
    wire = rig.client()
    assert rig.tell(wire, b"peek 7\r\npeek-ready\r\n") == b""
    rig.fetch()
    assert wire.take() == b"FOUND 7 1000\r\n%s\r\n" % body_of(7)
    rig.fetch()
    assert wire.take() == b"FOUND 1 1000\r\n%s\r\n" % body_of(1)


def test_a_peek_at_a_job_that_goes_meanwhile_finds_none(rig: Rig) -> None:
    wire, other = rig.client(), rig.client()
    rig.tell(wire, b"peek 7\r\n")
    assert rig.begin_fetch()
    assert rig.tell(other, b"delete 7\r\n") == b"DELETED\r\n"
    rig.end_fetch()
    assert wire.take() == b"NOT_FOUND\r\n"


@pytest.mark.parametrize("deleted", [False, True])
def test_a_body_that_comes_within_the_turn_in_which_it_is_wanted(rig: Rig, deleted: bool) -> None:
    """The client was not told to go on, for it was not among those that wait: it was never answered."""
    first, second, third = rig.client(), rig.client(), rig.client()
    rig.tell(first, b"reserve\r\n")
    assert rig.begin_fetch() and rig.pending is not None
    if rig.engine.held:
        rig.backpressure()
    rig.turn.step(second, b"peek 2\r\n")
    if deleted:
        rig.turn.step(third, b"delete 2\r\n")
    else:
        rig.pending.run()
        next(rig.task)
    turns = second.turns
    rig.turn.end()
    assert second.turns > turns, "it goes on"
    rig.turn.step(second, b"")
    rig.turn.end()
    assert second.take() == (b"NOT_FOUND\r\n" if deleted else b"FOUND 2 1000\r\n%s\r\n" % body_of(2))


def test_many_clients_get_a_job_each(rig: Rig) -> None:
    wires = [rig.client() for _ in range(200)]
    for wire in wires:
        rig.turn.step(wire, b"reserve\r\n")
    rig.turn.end()
    while rig.begin_fetch():
        rig.end_fetch()
    assert [wire.take() for wire in wires] == [reserved(id) for id in range(1, 201)]
    assert rig.fetches <= 3


def fetched_bytes(rig: Rig) -> int:
    """The bodies of the fetch that is under way."""
    assert rig.bodies is not None and rig.bodies.fetching
    return sum([rig.bodies.size_of(job) for job in rig.bodies.fetching.values()])


def test_large_bodies_are_fetched_a_few_at_a_time(tmp_path: Path) -> None:
    """All of them at once would take memory beyond the bound, and their reading some times as much."""
    size = 100_000
    rig = Rig(tmp_path / "journal", Forgetful(1 << 18))
    rig.fill(rig.client(), 60, size)
    assert rig.forget() > 40
    wires = [rig.client() for _ in range(40)]
    for id, wire in enumerate(wires, start=1):
        rig.turn.step(wire, b"peek %d\r\n" % id)
    rig.turn.end()
    while rig.begin_fetch():
        assert fetched_bytes(rig) <= AHEAD_BYTES_MAX + size + 2
        rig.end_fetch()
    assert [wire.take().partition(b" ")[0] for wire in wires] == [b"FOUND"] * 40
    rig.close()


# Bug: Bodies that were fetched at once had no bound: a megabyte of each of many tubes.
def test_bodies_of_many_tubes_are_fetched_ahead_a_few_at_a_time(rig: Rig) -> None:
    assert rig.bodies is not None
    wire, tubes = rig.client(), 40
    for id in range(1, 201):
        assert rig.alter(id, b"t%d" % (id % tubes)) == DONE
    rig.turn.begin()
    rig.turn.end()
    rig.fill(rig.client(), 100)
    rig.forget()
    workers = [rig.client() for _ in range(tubes)]
    for number, worker in enumerate(workers):
        rig.turn.step(worker, b"watch t%d\r\nignore default\r\nreserve\r\n" % number)
    rig.turn.end()
    most = tubes * 1002 + rig.bodies.max_bytes // 8
    while rig.begin_fetch():
        assert fetched_bytes(rig) <= most
        rig.end_fetch()
    assert not rig.bodies._ahead and not wire.take()
    for number, worker in enumerate(workers):
        assert worker.take().endswith(reserved(number or tubes))


def test_a_client_that_goes_gives_the_job_back(rig: Rig) -> None:
    wire, other = rig.client(), rig.client()
    rig.tell(wire, b"reserve\r\n")
    assert rig.begin_fetch()
    rig.turn.leave(wire)
    rig.end_fetch()
    job = rig.engine.jobs.get(1)
    assert job is not None and job.state == READY
    assert rig.bodies is not None and not rig.bodies._pins and not rig.turn._awaiting
    assert rig.tell(other, b"reserve\r\n") == reserved(1)


def test_a_client_that_ends_its_input_gets_what_it_asked_for(rig: Rig) -> None:
    wire = rig.client()
    rig.tell(wire, b"reserve\r\nuse x\r\n")
    assert rig.tell(wire, None) == b""
    assert not wire.session.closed
    rig.fetch()
    assert wire.take() == reserved(1) + b"USING x\r\n"
    assert wire.session.closed


def test_the_ttr_begins_when_the_client_is_told(rig: Rig) -> None:
    wire = rig.client()
    rig.tell(wire, b"reserve\r\n")
    assert rig.begin_fetch()
    rig.clock.ns += 90 * SECOND
    rig.end_fetch()
    assert wire.take() == reserved(1)
    job = rig.engine.jobs.get(1)
    assert job is not None and job.rank == rig.clock.ns + 100 * SECOND


@pytest.mark.parametrize("command", [b"reserve", b"reserve-with-timeout 0", b"reserve-with-timeout 150"])
def test_a_reservation_that_ends_meanwhile_begins_anew(rig: Rig, command: bytes) -> None:
    wire, other = rig.client(), rig.client()
    rig.tell(wire, command + b"\r\n")
    assert rig.begin_fetch()
    rig.clock.ns += 101 * SECOND
    rig.turn.advance()
    job = rig.engine.jobs.get(1)
    assert job is not None and job.state == READY
    assert rig.tell(other, b"reserve\r\n") == b""
    rig.end_fetch()
    assert other.take() == reserved(1), "who reserved it later has it"
    assert wire.take() == reserved(2)


def test_a_reservation_by_id_that_ends_meanwhile_is_made_again(rig: Rig) -> None:
    wire, other = rig.client(), rig.client()
    for command, told in (b"reserve-job 5", reserved(5)), (b"reserve-job 6", b"NOT_FOUND\r\n"):
        rig.tell(wire, command + b"\r\n")
        rig.begin_fetch()
        rig.clock.ns += 101 * SECOND
        rig.turn.advance()
        if told.startswith(b"N"):
            assert rig.tell(other, b"delete 6\r\n") == b"DELETED\r\n"
        rig.end_fetch()
        assert wire.take() == told


def test_who_waits_for_a_job_waits_for_its_body_too(rig: Rig) -> None:
    wire, worker = rig.client(), rig.client()
    rig.tell(wire, b"watch y\r\nignore default\r\n")
    assert rig.tell(wire, b"reserve\r\nuse x\r\n") == b""
    assert rig.alter(9, b"y") == DONE
    rig.turn.begin()
    rig.turn.end()
    assert wire.take() == reserved(9), "what an operator moves is in memory until its new segment is sealed"
    assert rig.tell(wire, b"") == b"USING x\r\n"
    rig.tell(worker, b"reserve-job 10\r\n")
    rig.fetch()
    worker.take()
    assert rig.tell(worker, b"bury 10 0\r\n") == b"BURIED\r\n"
    rig.forget()
    assert is_gone(rig, 10)
    for id in range(1, 401):
        job = rig.engine.jobs.get(id)
        if job is not None and job.state == READY:
            rig.engine.force_bury(id, rig.clock.ns)
    rig.turn.begin()
    rig.turn.end()
    rig.tell(worker, b"watch default\r\n")
    assert rig.tell(worker, b"reserve-with-timeout 50\r\n") == b""
    assert rig.engine.waiting_count == 1
    assert rig.tell(wire, b"kick-job 10\r\n") == b"KICKED\r\n"
    assert rig.engine.waiting_count == 0 and worker.take() == b""
    rig.fetch()
    assert worker.take() == reserved(10)


@needs_pure
def test_changes_read_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = rig.client()
    jobs = [job for job in rig.engine.jobs if job.body is None][:20]
    for job in jobs:
        rig.engine.reserve_job(wire.session, job.id, rig.clock.ns)
    monkeypatch.setattr(Journal, "payloads", None)
    for job in jobs:
        id = job.id
        assert rig.tell(
            wire, b"touch %d\r\nbury %d 5\r\nkick-job %d\r\nstats-job %d\r\n" % (id, id, id, id)
        ).startswith(b"TOUCHED\r\nBURIED\r\nKICKED\r\nOK ")
        rig.engine.reserve_job(wire.session, id, rig.clock.ns)
        assert rig.tell(wire, b"release %d 1 0\r\ndelete %d\r\n" % (id, id)) == b"RELEASED\r\nDELETED\r\n"
        assert job.body is None


def test_a_body_that_is_damaged_is_not_handed_out(rig: Rig) -> None:
    wire = rig.client()
    job = rig.engine.jobs.get(1)
    assert job is not None and rig.bodies is not None and rig.journal is not None
    path = segment_path(rig.journal.directory, job.segment)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute("UPDATE record SET payload = zeroblob(length(payload)) WHERE key = 1").rowcount == 1
    rig.tell(wire, b"reserve\r\n")
    assert rig.begin_fetch()
    assert rig.pending is not None
    rig.pending.run()
    with pytest.raises(JournalDamaged, match="key 1"):
        next(rig.task)  # the server fails the turn with this, and ends
    assert wire.take() == b""
    rig.turn.fail(JournalDamaged("as the server does"))


# Bug: The put was refused, and its job came with the next start.
def test_without_memory_to_note_where_a_record_stands_its_job_is_there(tmp_path: Path) -> None:
    """The put was refused, and the job came with the next start: its record stood in the journal by then."""

    class Poor(Bodies):
        def stands(self, id: int, place: int, size: int) -> None:
            raise MemoryError

    rig = Rig(tmp_path / "journal", Poor(1 << 20))
    assert rig.put(rig.client(), 1) == b"INSERTED 1\r\n"
    check(rig.engine)
    rig.close()
    rig = Rig(tmp_path / "journal", None)
    assert rig.tell(rig.client(), b"reserve\r\n") == reserved(1)
    rig.close()


def test_a_body_comes_late_and_the_record_has_moved(rig: Rig) -> None:
    wire = rig.client()
    for id in range(1, 150):
        if id % 10:
            rig.engine.force_delete(id, rig.clock.ns)
    rig.turn.begin()
    rig.turn.end()
    assert rig.tell(wire, b"peek 50\r\n") == b""
    assert rig.begin_fetch()
    rig.compact()
    assert not is_gone(rig, 50), "it is in memory until its new segment is sealed"
    rig.end_fetch()
    assert wire.take() == b"FOUND 50 1000\r\n%s\r\n" % body_of(50)
    for id in range(10, 150, 10):
        said = rig.tell(wire, b"peek %d\r\n" % id)
        if not said:
            rig.fetch()
            said = wire.take()
        assert said == b"FOUND %d 1000\r\n%s\r\n" % (id, body_of(id))


def test_what_is_moved_can_leave_memory_again(rig: Rig) -> None:
    wire = rig.client()
    for id in range(1, 300):
        if id % 10:
            rig.engine.force_delete(id, rig.clock.ns)
    rig.turn.begin()
    rig.turn.end()
    rig.compact()
    rig.fill(wire, 100)
    rig.forget()
    assert is_gone(rig, 50)
    assert rig.tell(wire, b"peek 50\r\n") == b""
    rig.fetch()
    assert wire.take() == b"FOUND 50 1000\r\n%s\r\n" % body_of(50)


class Moves(Changes):
    """Moves jobs to a tube, and hears of the end."""

    def __init__(self, rig: Rig, ids: list[int]) -> None:
        engine = rig.engine
        self.is_done = False
        super().__init__(engine, ids, lambda id, now_ns: engine.alter(id, KEEP, KEEP, KEEP, b"new", now_ns))

    def done(self) -> None:
        self.is_done = True

    def failed(self) -> None:
        raise AssertionError


def test_an_operation_waits_for_bodies_and_delays_no_client(rig: Rig) -> None:
    """It read them where all clients are served. They stay in memory until they are moved, however little may."""
    assert rig.bodies is not None
    ids = [job.id for job in rig.engine.jobs if job.body is None][:100]
    moves = Moves(rig, [*ids, 10_000])
    rig.backpressure()
    rig.turn.accept(moves)
    rig.turn.end()
    other = rig.client()
    while not moves.is_done:
        if rig.engine.held:
            rig.backpressure()
        assert moves.awaited is not None and not rig.turn.operations.run_some(), "it is not run for nothing"
        assert rig.tell(other, b"stats-job 1\r\n").startswith(b"OK "), "others are served"
        assert rig.begin_fetch()
        rig.end_fetch()
        rig.forget()
        assert rig.turn.operations.wanted.is_set
        while rig.turn.operations.run_some():
            rig.turn.end()
        rig.turn.end()
    assert moves.counts == {DONE: 100, NOT_FOUND: 1}
    assert 1 < rig.fetches < 60 and not rig.bodies._pins
    rig.prompt = True
    for id in ids:
        assert rig.tell(other, b"reserve-job %d\r\n" % id) == reserved(id)


@pytest.mark.parametrize("gone", [False, True])
def test_an_operation_goes_on_when_the_body_it_waits_for_does_not_come(rig: Rig, gone: bool) -> None:
    assert rig.bodies is not None
    ids = [job.id for job in rig.engine.jobs if job.body is None][:2]
    moves = Moves(rig, ids)
    rig.backpressure()
    rig.turn.accept(moves)
    rig.turn.end()
    assert rig.begin_fetch()
    if gone:
        assert rig.engine.force_delete(ids[0], rig.clock.ns) == DONE
    else:
        moves.cancelled = True
    rig.end_fetch()
    rig.turn.operations.run_some()
    rig.turn.end()
    assert moves.is_done and moves.counts == ({NOT_FOUND: 1, DONE: 1} if gone else {})
    assert not rig.bodies._pins


@needs_pure
@pytest.mark.parametrize("name", ["compact", "backpressure"])
def test_compaction_waits_for_no_device(rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records that it moves, and their keys, were read before, in a thread.

    While changes waited, it was asked for what to read before it had heard of the segment, and read it itself.
    """
    for id in range(1, 300):
        if id % 10:
            rig.engine.force_delete(id, rig.clock.ns)
    rig.turn.begin()
    rig.turn.end()
    assert rig.journal is not None
    in_thread: list[bool] = []
    works = flags = 0

    def connected(path: str, mode: str) -> sqlite3.Connection:
        in_thread.append(wait.work is not None)
        return connect_to_read(path, mode)

    for module in (payloads_module, reader_module):
        monkeypatch.setattr(module, "connect_to_read", connected)
    monkeypatch.setattr(Journal, "behind", property(lambda journal: journal.wants_compaction()))
    moved = rig.journal.records_moved
    owner = rig.turn.maintenance if name == "compact" else rig.turn
    task = getattr(owner, name)(rig.store)
    end_s = time.monotonic() + PATIENCE_S
    for wait in task:
        rig.turn.end()
        if wait.work is not None:
            works += 1
            wait.work.run()
            wait = Wait()
        elif wait.flag is not None:
            flags += 1
            if flags > 1:
                break  # it sleeps until something is written
            wait.flag.set()
        rig.clock.ns += SECOND // 20
        time.sleep(0.001)
        assert time.monotonic() < end_s
    assert works > 2 and rig.journal.records_moved > moved
    assert in_thread and all(in_thread)


def test_small_bodies_stay(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal", Forgetful(0))
    wire = rig.client()
    rig.fill(wire, 100, 100)
    rig.fill(wire, 100, 1000)
    rig.forget()
    assert 102 in {len(job.body) for job in rig.engine.jobs if job.body is not None}
    assert all(job.id > 100 for job in rig.engine.jobs if job.body is None)
    rig.close()


def put_large(rig: Rig, wire: Wire, count: int) -> None:
    """Puts jobs in parts, with other jobs in between."""
    for _ in range(count):
        job = rig.engine.open_put(wire.session, 0, 0, 100, rig.clock.ns)
        body = body_of(job.id, 9000) + b"\r\n"
        while (outcome := rig.engine.prepare(job, body, rig.clock.ns)) == UNFINISHED:
            rig.put(wire, rig.engine.next_id, 300)
        assert outcome == INSERTED
        assert rig.engine.put(job, body, rig.clock.ns) == INSERTED
        rig.turn.begin()
        rig.turn.end()
        rig.settle()


@pytest.mark.slow
def test_large_bodies_leave_memory_like_others(tmp_path: Path) -> None:
    """They stayed, whatever the bound was. They stand in parts, with records of other jobs in between."""
    rig = Rig(tmp_path / "journal", Forgetful(0))
    rig.store.large_bytes, rig.store.part_bytes = 5000, 2000
    wire = rig.client()
    put_large(rig, wire, 12)
    rig.fill(wire, 40, 1000)
    rig.forget()
    large = [job.id for job in rig.engine.jobs if rig.engine.size_of(job) == 9002]
    assert len(large) == 12 and all(is_gone(rig, id) for id in large)
    for id in large[:3]:
        assert rig.tell(wire, b"peek %d\r\n" % id) == b""
        rig.fetch()
        assert wire.take() == b"FOUND %d 9000\r\n%b\r\n" % (id, body_of(id, 9000))
    for job in [*rig.engine.jobs]:
        if job.id not in large[6:]:
            rig.tell(wire, b"delete %d\r\n" % job.id)
    rig.compact()  # which moves them in parts
    rig.settle()
    assert rig.store.facts()["binlog-records-migrated"] == 6
    assert rig.bodies is not None and not rig.bodies._pins
    rig.forget()
    rig.close()
    rig = Rig(tmp_path / "journal", Forgetful(0), prompt=True)
    rig.forget()
    assert all(is_gone(rig, id) for id in large[6:])
    wire = rig.client()
    for id in large[6:]:
        assert rig.tell(wire, b"reserve\r\n") == b"RESERVED %d 9000\r\n%b\r\n" % (id, body_of(id, 9000))
    rig.close()


# Bug: Bodies of 1 MiB and more could not leave memory.
def test_damage_in_a_part_is_not_handed_out(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal", Forgetful(0))
    rig.store.large_bytes, rig.store.part_bytes = 5000, 2000
    wire = rig.client()
    put_large(rig, wire, 8)
    rig.forget()
    job = next(job for job in rig.engine.jobs if job.body is None and rig.engine.size_of(job) == 9002)
    with closing(sqlite3.connect(segment_path(str(tmp_path / "journal"), job.segment))) as db, db:
        db.execute("UPDATE record SET payload = zeroblob(length(payload)) WHERE key = ? AND kind & 7 = 4", (job.id,))
    reading = rig.store.reading([job])
    reading.run()
    with pytest.raises(JournalDamaged):
        reading.body_of(job)
    assert rig.journal is not None
    rig.journal.abandon()


# Bug: Bodies that compaction had brought back stayed in memory when their segment was sealed, until the next put.
@pytest.mark.long
def test_a_backlog_beyond_the_bound(tmp_path: Path) -> None:
    """Ten times as much as may be in memory comes in, survives a restart, and goes out."""
    limit = 50_000
    rig = Rig(tmp_path / "journal", Bodies(limit))
    wire = rig.client()
    count = 0
    most = 0
    assert rig.bodies is not None
    while count < limit // 100:
        said = rig.put(wire, rig.engine.next_id)
        most = max(most, rig.bodies.held_bytes)
        if said == b"OUT_OF_MEMORY\r\n":
            rig.settle()  # what is written last has to be sealed first
        else:
            count += 1
    assert most <= limit
    check(rig.engine)
    held = {job.id for job in rig.engine.jobs}
    assert len(held) == count
    rig.settle()
    rig.close()
    again = Rig(tmp_path / "journal", Bodies(limit), prompt=True)
    assert again.bodies is not None and again.bodies.held_bytes <= limit + 2000
    check(again.engine)
    worker = again.client()
    seen = set()
    for _ in range(count):
        said = again.tell(worker, b"reserve-with-timeout 0\r\n")
        id = int(said.split()[1])
        assert said == reserved(id)
        assert again.bodies.held_bytes <= limit + 2 * SEGMENT_BYTES, "what compaction moves stays until it is sealed"
        assert again.tell(worker, b"delete %d\r\n" % id) == b"DELETED\r\n"
        seen.add(id)
        if not id % 50:
            again.compact()
    assert seen == held
    assert (again.bodies.held_bytes, again.bodies.gone_bytes, again.bodies.gone) == (0, 0, 0)
    assert again.fetches < count / 5
    check(again.engine)
    again.close()


def test_without_a_journal_puts_are_refused_and_all_else_works() -> None:
    rig = Rig(None, Bodies(10 * (1002 + BODY_BYTES)))
    told: list[str] = []
    rig.turn.tell = lambda text, error: told.append(text)
    wire = rig.client()
    for id in range(1, 11):
        assert rig.put(wire, id) == b"INSERTED %d\r\n" % id
    assert rig.put(wire, 11) == b"OUT_OF_MEMORY\r\n"
    assert rig.put(wire, 12, 5000) == b"OUT_OF_MEMORY\r\n"
    assert rig.tell(wire, b"reserve\r\n") == reserved(1)
    assert rig.tell(wire, b"release 1 0 0\r\nreserve\r\nbury 1 0\r\nkick 1\r\n").endswith(b"BURIED\r\nKICKED 1\r\n")
    assert rig.tell(wire, b"delete 1\r\n") == b"DELETED\r\n"
    assert rig.put(wire, 13) == b"INSERTED 13\r\n"
    assert rig.put(wire, 14) == b"OUT_OF_MEMORY\r\n"
    assert rig.bodies is not None and rig.bodies.facts()["memory-puts-refused"] == 3
    check(rig.engine)
    assert told == ["puts are refused: bodies take 10500 of 10500 bytes of memory"]
    rig.tell(wire, b"delete 2\r\n")
    assert len(told) == 1, "the next put may be refused again"
    rig.tell(wire, b"delete 3\r\n")
    assert told[1:] == ["puts are accepted again: memory has room for bodies"]


def test_memory_is_counted_anew_after_an_undone_change() -> None:
    rig = Rig(None, Bodies(1 << 20))
    wire = rig.client()
    for id in range(1, 11):
        rig.put(wire, id)
    assert rig.bodies is not None
    rig.bodies.held_bytes = 5
    rig.engine.undo()
    assert rig.bodies.held_bytes == 10 * (1002 + BODY_BYTES)
    check(rig.engine)


def test_what_is_about_to_be_reserved_goes_last(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal", Bodies(1 << 20))
    wire = rig.client()
    rig.fill(wire, 800)
    assert rig.bodies is not None
    rig.bodies.max_bytes = 300_000
    rig.bodies.make_room(rig.engine, 0)
    check(rig.engine)
    assert rig.bodies.held_bytes <= 300_000
    there = [job.id for job in rig.engine.jobs if job.body is not None]
    assert set(range(1, 200)) <= set(there)
    rig.bodies.max_bytes = 100_000
    rig.bodies.make_room(rig.engine, 0)
    assert rig.bodies.held_bytes <= 100_000, "at last any may go"
    rig.close()


def short(data: bytes) -> list[bytes]:
    return [line if len(line) < 80 else line[:30] + b"+%d" % len(line) for line in data.split(b"\r\n")]


class Pair:
    """The same commands to a rig with all bodies in memory and to one that has hardly any there."""

    def __init__(self, draw: random.Random, tmp_path: Path) -> None:
        self.draw = draw
        self.rigs = [
            Rig(tmp_path / "whole", None),
            Rig(tmp_path / "least", Forgetful(draw.choice([0, 3000, 50_000])), prompt=True),
        ]
        self.wires = [[rig.client() for rig in self.rigs] for _ in range(3)]

    def tell(self, client: int, data: bytes | None) -> bytes:
        whole, least = (
            [rig.tell(wire, data), *[each[at].take() for each in self.wires]]
            for at, (rig, wire) in enumerate(zip(self.rigs, self.wires[client], strict=True))
        )
        assert [short(each) for each in whole] == [short(each) for each in least], short(data or b"")
        return whole[0]

    def step(self) -> None:
        draw = self.draw
        ids = [job.id for job in self.rigs[0].engine.jobs]
        id = draw.choice(ids) if ids and draw.random() < 0.95 else 10**6
        size = draw.choice([5, 150, 300, 300, 2000, 9000])
        body = body_of(draw.randrange(10**9), size)
        commands = [
            b"put %d %d %d %d\r\n%s"
            % (draw.randrange(3), draw.choice([0, 0, 0, 5]), draw.choice([1, 9, 99]), size, body)
        ] * 8
        commands += [b"reserve-with-timeout 0"] * 3 + [b"reserve-job %d" % id]
        commands += [b"peek %d" % id, b"peek-ready", b"peek-delayed", b"peek-buried", b"delete %d" % id, b"kick 3"]
        commands += [b"release %d 1 %d" % (id, draw.choice([0, 3])), b"bury %d 2" % id, b"kick-job %d" % id]
        commands += [b"touch %d" % id, b"use %s" % draw.choice([b"a", b"default"])]
        # Nothing stands behind a wait: how it mixes with what stands behind a body of another client is free.
        free = [at for at, (wire, _) in enumerate(self.wires) if not wire.session.waiting]
        count = draw.choice([1, 1, 4]) if len(free) == len(self.wires) else 1
        if count == 1:
            commands.append(b"reserve-with-timeout 20")
        data = b"\r\n".join([draw.choice(commands) for _ in range(count)]) + b"\r\n"
        if free:
            self.tell(draw.choice(free), data)
        if draw.random() < 0.1:
            for rig in self.rigs:
                rig.clock.ns += SECOND
                rig.turn.advance()
                rig.turn.end()
        if draw.random() < 0.1:
            for rig in self.rigs:
                rig.settle()
        if draw.random() < 0.05:
            for rig in self.rigs:
                rig.compact()
        if ids and draw.random() < 0.05:
            alter = draw.choice(ids), draw.choice([b"", b"a"]), draw.choice([KEEP, 7])
            said = [rig.alter(*alter) for rig in self.rigs]
            assert said[0] == said[1]
            for rig in self.rigs:
                rig.turn.begin()
                rig.turn.end()
        check(self.rigs[1].engine)


@pytest.mark.parametrize("number", for_change(range(20), 0))
def test_clients_cannot_tell_where_bodies_are(tmp_path: Path, seed: int, number: int) -> None:
    draw = random.Random(seed + number)
    pair = Pair(draw, tmp_path)
    for _ in range(400):
        pair.step()
    least = pair.rigs[1]
    assert isinstance(least.bodies, Forgetful)
    assert least.bodies.let_gone > 20 and least.bodies.fetched > 5
    for rig in pair.rigs:
        rig.settle()
        rig.close()
    read = [Rig(tmp_path / name, bodies, prompt=True) for name, bodies in (("whole", None), ("least", Forgetful(0)))]
    pair.rigs = read
    pair.wires = [[rig.client() for rig in read]]
    for job in list(read[0].engine.jobs):
        pair.tell(0, b"peek %d\r\n" % job.id)
    for rig in read:
        rig.close()


def refusals(rig: Rig) -> list[str]:
    """Will hold what the operator hears."""
    told: list[str] = []
    rig.turn.tell = lambda text, error: told.append(text)
    return told


def test_a_body_counts_from_its_first_bytes_on() -> None:
    """Half-sent puts took any memory: a body counted when it was complete."""
    bodies = Bodies(111_000)
    rig = Rig(None, bodies)
    wires = [rig.client() for _ in range(5)]
    for wire in wires:
        assert rig.tell(wire, b"put 0 0 100 40000\r\n" + b"x" * 30_000) == b""
    assert bodies.taken_bytes == 3 * (30_000 + BODY_BYTES) and bodies.refused == 2
    check(rig.engine)
    assert rig.tell(wires[4], b"x" * 5000) == b""
    assert rig.tell(wires[4], b"x" * 5000 + b"\r\nuse a\r\n") == b"OUT_OF_MEMORY\r\nUSING a\r\n"
    assert rig.tell(wires[0], b"x" * 10_000 + b"\r\n").startswith(b"INSERTED ")
    assert bodies.held_bytes == 40_002 + BODY_BYTES and bodies.claimed_bytes == 2 * (30_000 + BODY_BYTES)
    assert rig.tell(wires[1], b"x" * 10_000 + b"yz") == b"EXPECTED_CRLF\r\n"
    assert bodies.claimed_bytes == 30_000 + BODY_BYTES
    rig.turn.leave(wires[2])
    assert bodies.claimed_bytes == 0
    rig.tell(wires[1], b"put 0 0 100 30000\r\n" + b"x" * 20_000)
    rig.engine.draining = True
    assert rig.tell(wires[1], b"x" * 10_000 + b"\r\n") == b"DRAINING\r\n"
    assert bodies.claimed_bytes == 0 and bodies.held_bytes == 40_002 + BODY_BYTES
    check(rig.engine)


class Unhurried(Ledger):
    def prepare(self, job: Job, tube_name: bytes) -> bool | None:
        return False


def test_large_bodies_count_from_when_they_are_admitted() -> None:
    """Sixty jobs of 1.1 MB passed a bound of 4 MB together, as none of them counted before the ledger had all of it."""
    rig = Rig(None, bodies := Bodies(4 << 20))
    engine = rig.engine
    engine.ledger = Unhurried()
    session = rig.client().session
    jobs = [engine.open_put(session, 0, 0, 100, rig.clock.ns) for _ in range(60)]
    said = [engine.prepare(job, bytes(1_100_000), rig.clock.ns) for job in jobs]
    assert said == [UNFINISHED] * 3 + [OUT_OF_MEMORY] * 57
    assert bodies.taken_bytes == 3 * (1_100_000 + BODY_BYTES)
    assert engine.prepare(jobs[0], bytes(1_100_000), rig.clock.ns) == UNFINISHED, "it counts once"
    assert engine.put(jobs[0], bytes(1_100_000), rig.clock.ns) == INSERTED
    assert (bodies.held_bytes, bodies.claimed_bytes) == (1_100_048, 2 * 1_100_048)
    for job in jobs[1:]:
        engine.abandon_put(job)
    assert bodies.claimed_bytes == 0
    check(engine)


def test_after_a_failure_only_uploads_that_go_on_count() -> None:
    rig = Rig(None, bodies := Bodies(100_000))
    wire = rig.client()
    rig.tell(wire, b"put 0 0 100 40000\r\n" + b"x" * 30_000)
    lost = rig.engine.open_put_to(b"a", 0, 0, 100, rig.clock.ns)
    assert bodies.claim(rig.engine, lost.id, 5000)
    rig.engine.undo()
    assert bodies.claimed_bytes == 30_000 + BODY_BYTES
    assert rig.tell(wire, b"x" * 10_000 + b"\r\n").startswith(b"INSERTED ")
    assert bodies.claimed_bytes == 0


def test_a_reply_that_is_not_read_counts() -> None:
    rig = Rig(None, bodies := Bodies(100_000))
    unsent = Unsent(rig.service)
    unsent.leave(b"x" * 5000)
    assert bodies.taken_bytes == 5000
    unsent.take(b"x" * 5000)
    assert bodies.taken_bytes == 0


@pytest.mark.parametrize(("size", "most"), [(10_000, 64 << 10), (20_000, 64 << 10), (60_000, 64 << 10)])
def test_a_bound_far_below_the_size_of_a_segment_takes_a_backlog(tmp_path: Path, size: int, most: int) -> None:
    """Nothing left memory before its segment was full: with a bound below that, puts were refused for ever."""
    rig = Rig(tmp_path / "journal", bodies := Bodies(most), segment_bytes=10 << 20)
    wire = rig.client()
    for id in range(1, 20):
        end_s = time.monotonic() + PATIENCE_S
        while not rig.put(wire, id, size).startswith(b"INSERTED "):
            rig.settle()
            assert time.monotonic() < end_s, "puts are refused for ever"
        assert bodies.taken_bytes <= most
    assert bodies.gone * size > 19 * size - most
    assert len([*(tmp_path / "journal").glob("segment-*.db")]) > 3
    rig.settle()
    check(rig.engine)
    rig.close()


def test_memory_is_made_before_a_put_has_to_be_refused(tmp_path: Path) -> None:
    """While three quarters of the bound are taken, the newest segment is sealed, however little of it is full."""
    rig = Rig(tmp_path / "journal", bodies := Bodies(64 << 10), segment_bytes=10 << 20)
    wire = rig.client()
    for id in range(1, 30):
        assert rig.put(wire, id, 5_000).startswith(b"INSERTED ")
        rig.settle()
    assert not bodies.refused and bodies.gone
    rig.close()


def test_a_body_that_does_not_fit_is_refused_with_its_first_bytes() -> None:
    rig = Rig(None, bodies := Bodies(100_000))
    assert not bodies.claim(rig.engine, 1, 10, 200_000)
    assert not bodies.claimed_bytes
    assert bodies.claim(rig.engine, 1, 10, 50_000)


def test_while_memory_has_room_segments_become_full(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal", Bodies(1 << 20), segment_bytes=10 << 20)
    wire = rig.client()
    for _ in range(40):
        rig.put(wire, 1, 15_000)
    rig.settle()
    assert len([*(tmp_path / "journal").glob("segment-*.db")]) == 2, "the current one and the next"
    rig.close()


def test_each_refusal_is_told_but_seldom() -> None:
    """A body larger than an eighth of the bound could be refused without a word: seven eighths of it were free."""
    rig = Rig(None, Bodies(64 << 10))
    told = refusals(rig)
    wire = rig.client()
    for _ in range(50):
        assert rig.put(wire, 1, 70_000) == b"OUT_OF_MEMORY\r\n"
        assert rig.put(wire, 1, 100).startswith(b"INSERTED ")
    assert told == [
        "puts are refused: a body of 70002 bytes is larger than the 65536 bytes of memory that bodies may take",
        "puts are accepted again: memory has room for bodies",
    ]
    rig.clock.ns += 61 * SECOND
    rig.put(wire, 1, 60_000)
    assert len(told) == 3 and told[2].startswith("puts are refused: bodies take 7")
    rig.tell(wire, b"list-tube-used\r\n")
    assert len(told) == 4


def test_a_reserved_job_is_not_lost_with_its_body(rig: Rig) -> None:
    """The body of a job that a worker has may go, and is there again when the job is ready once more."""
    wire = rig.client()
    rig.tell(wire, b"reserve\r\n")
    rig.fetch()
    wire.take()
    job = rig.engine.jobs.get(1)
    assert job is not None and job.state == RESERVED and not is_gone(rig, 1)
    rig.forget()
    assert is_gone(rig, 1)
    assert rig.tell(wire, b"release 1 0 0\r\n") == b"RELEASED\r\n"
    assert rig.tell(wire, b"reserve\r\n") == b""
    rig.fetch()
    assert wire.take() == reserved(1)
