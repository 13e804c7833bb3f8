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

import journal.sqlite.payloads as payloads_room
import journal.sqlite.reader as reader_room
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
from tests.support.check import check
from tests.support.clock import SECOND, ManualClock
from tests.support.faults import fetch, wants_compaction
from tests.support.forgetful import Forgetful
from tests.test_turn import Wire

WALL_NS = 1_700_000_000 * SECOND
PATIENCE_S = 20
SEGMENT_BYTES = 1 << 15
needs_pure = pytest.mark.skipif(BUILD == "compiled", reason="methods of compiled classes cannot be replaced")


class House:
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
                self.task = self.turn.keep_bodies(self.store, bodies)
                next(self.task)

    def client(self) -> Wire:
        wire = Wire(Session(self.service))
        self.turn.join(wire)
        return wire

    def tell(self, wire: Wire, data: bytes | None) -> bytes:
        """What has come back by the end of the turn."""
        self.turn.step(wire, data)
        self.turn.end()
        self.go_on()
        while self.prompt and any(channel.session.awaited for channel in self.turn.channels.values()):
            self.fetch()
        return wire.take()

    def go_on(self) -> None:
        """Whoever has something left to do does it, unless it waits for a body."""
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
            self.turn.keep_bound(self.store)
            assert time.monotonic() < end_s
        self.turn.let_changes_go_on()

    def begin_fetch(self) -> bool:
        """Lets the task go on until it has something read. Returns whether it has."""
        if self.pending is None and self.turn.missing.is_set:
            wait = next(self.task)
            self.pending = wait.work
        return self.pending is not None

    def end_fetch(self) -> None:
        """What is read has come, and who waited for it goes on."""
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
        assert self.begin_fetch(), "nobody wants a body"
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
            time.sleep(0.0005)

    def compact(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            if wants_compaction(self.store):
                self.store.compact_slice(self.clock.ns)
                self.turn.keep_bound(self.store)
            elif not self.store.settling:
                self.turn.keep_bound(self.store)
                return
            assert time.monotonic() < end_s

    def put(self, wire: Wire, id: int, size: int = 1000, more: str = "0 0 100") -> bytes:
        body = body_of(id, size)
        pri, delay, ttr = more.split()
        return self.tell(wire, f"put {pri} {delay} {ttr} {len(body)}\r\n".encode() + body + b"\r\n")

    def alter(self, id: int, tube_name: bytes, ttr_s: int = KEEP) -> int:
        """What an operator does to a job whose body is in memory by then."""
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
def house(tmp_path: Path) -> Iterator[House]:
    """200 jobs, and memory for some."""
    house = House(tmp_path / "journal", Forgetful(10_000))
    house.fill(house.client(), 200)
    assert house.forget() > 125
    yield house
    check(house.engine)
    house.close()


def is_gone(house: House, id: int) -> bool:
    job = house.engine.jobs.get(id)
    assert job is not None
    return job.body is None


def test_a_reserve_waits_for_the_body_and_what_follows_waits_with_it(house: House) -> None:
    wire, other = house.client(), house.client()
    assert is_gone(house, 1)
    assert house.tell(wire, b"reserve\r\nuse x\r\n") == b""
    assert house.tell(other, b"use y\r\n") == b"USING y\r\n", "nobody else waits"
    house.fetch()
    assert wire.take() == reserved(1) + b"USING x\r\n"


def test_who_waits_for_a_body_executes_nothing_else(house: House) -> None:
    wire = house.client()
    house.tell(wire, b"reserve\r\n")
    assert house.tell(wire, b"delete 1\r\n") == b""
    assert house.tell(wire, b"") == b""
    house.fetch()
    assert wire.take() == reserved(1) + b"DELETED\r\n"


def test_the_next_ones_are_there_before_they_are_asked_for(house: House) -> None:
    wire = house.client()
    assert house.bodies is not None
    house.bodies.max_bytes = 1 << 20
    house.tell(wire, b"reserve\r\n")
    house.fetch()
    assert wire.take() == reserved(1)
    for id in range(2, 200):
        said = house.tell(wire, b"reserve\r\n")
        assert said == reserved(id)
        if house.begin_fetch():
            house.end_fetch()
    assert 2 <= house.fetches <= 8


def test_a_peek_waits_for_the_body(house: House) -> None:
    wire = house.client()
    assert house.tell(wire, b"peek 7\r\npeek-ready\r\n") == b""
    house.fetch()
    assert wire.take() == b"FOUND 7 1000\r\n%s\r\n" % body_of(7)
    house.fetch()
    assert wire.take() == b"FOUND 1 1000\r\n%s\r\n" % body_of(1)


def test_a_peek_at_a_job_that_goes_meanwhile_finds_none(house: House) -> None:
    wire, other = house.client(), house.client()
    house.tell(wire, b"peek 7\r\n")
    assert house.begin_fetch()
    assert house.tell(other, b"delete 7\r\n") == b"DELETED\r\n"
    house.end_fetch()
    assert wire.take() == b"NOT_FOUND\r\n"


@pytest.mark.parametrize("deleted", [False, True])
def test_a_body_that_comes_within_the_turn_in_which_it_is_wanted(house: House, deleted: bool) -> None:
    """Nobody told the client to go on, for it was not among those that wait: it was never answered."""
    first, second, third = house.client(), house.client(), house.client()
    house.tell(first, b"reserve\r\n")
    assert house.begin_fetch() and house.pending is not None
    if house.engine.held:
        house.backpressure()
    house.turn.step(second, b"peek 2\r\n")
    if deleted:
        house.turn.step(third, b"delete 2\r\n")
    else:
        house.pending.run()
        next(house.task)
    turns = second.turns
    house.turn.end()
    assert second.turns > turns, "it goes on"
    house.turn.step(second, b"")
    house.turn.end()
    assert second.take() == (b"NOT_FOUND\r\n" if deleted else b"FOUND 2 1000\r\n%s\r\n" % body_of(2))


def test_many_clients_get_a_job_each(house: House) -> None:
    wires = [house.client() for _ in range(200)]
    for wire in wires:
        house.turn.step(wire, b"reserve\r\n")
    house.turn.end()
    while house.begin_fetch():
        house.end_fetch()
    assert [wire.take() for wire in wires] == [reserved(id) for id in range(1, 201)]
    assert house.fetches <= 3


def fetched_bytes(house: House) -> int:
    """The bodies of the fetch that is under way."""
    assert house.bodies is not None and house.bodies.fetching
    return sum([house.bodies.size_of(job) for job in house.bodies.fetching.values()])


def test_large_bodies_are_fetched_a_few_at_a_time(tmp_path: Path) -> None:
    """All of them at once would take memory beyond the bound, and their reading some times as much."""
    size = 100_000
    house = House(tmp_path / "journal", Forgetful(1 << 18))
    house.fill(house.client(), 60, size)
    assert house.forget() > 40
    wires = [house.client() for _ in range(40)]
    for id, wire in enumerate(wires, start=1):
        house.turn.step(wire, b"peek %d\r\n" % id)
    house.turn.end()
    while house.begin_fetch():
        assert fetched_bytes(house) <= AHEAD_BYTES_MAX + size + 2
        house.end_fetch()
    assert [wire.take().partition(b" ")[0] for wire in wires] == [b"FOUND"] * 40
    house.close()


# Bug: Bodies that were fetched at once had no bound: a megabyte of each of many tubes.
def test_bodies_of_many_tubes_are_fetched_ahead_a_few_at_a_time(house: House) -> None:
    assert house.bodies is not None
    wire, tubes = house.client(), 40
    for id in range(1, 201):
        assert house.alter(id, b"t%d" % (id % tubes)) == DONE
    house.turn.begin()
    house.turn.end()
    house.fill(house.client(), 100)
    house.forget()
    workers = [house.client() for _ in range(tubes)]
    for number, worker in enumerate(workers):
        house.turn.step(worker, b"watch t%d\r\nignore default\r\nreserve\r\n" % number)
    house.turn.end()
    most = tubes * 1002 + house.bodies.max_bytes // 8
    while house.begin_fetch():
        assert fetched_bytes(house) <= most
        house.end_fetch()
    assert not house.bodies._ahead and not wire.take()
    for number, worker in enumerate(workers):
        assert worker.take().endswith(reserved(number or tubes))


def test_a_client_that_goes_gives_the_job_back(house: House) -> None:
    wire, other = house.client(), house.client()
    house.tell(wire, b"reserve\r\n")
    assert house.begin_fetch()
    house.turn.leave(wire)
    house.end_fetch()
    job = house.engine.jobs.get(1)
    assert job is not None and job.state == READY
    assert house.bodies is not None and not house.bodies._pins and not house.turn._awaiting
    assert house.tell(other, b"reserve\r\n") == reserved(1)


def test_a_client_that_ends_its_input_gets_what_it_asked_for(house: House) -> None:
    wire = house.client()
    house.tell(wire, b"reserve\r\nuse x\r\n")
    assert house.tell(wire, None) == b""
    assert not wire.session.closed
    house.fetch()
    assert wire.take() == reserved(1) + b"USING x\r\n"
    assert wire.session.closed


def test_the_ttr_begins_when_the_client_is_told(house: House) -> None:
    wire = house.client()
    house.tell(wire, b"reserve\r\n")
    assert house.begin_fetch()
    house.clock.ns += 90 * SECOND
    house.end_fetch()
    assert wire.take() == reserved(1)
    job = house.engine.jobs.get(1)
    assert job is not None and job.rank == house.clock.ns + 100 * SECOND


@pytest.mark.parametrize("command", [b"reserve", b"reserve-with-timeout 0", b"reserve-with-timeout 150"])
def test_a_reservation_that_ends_meanwhile_begins_anew(house: House, command: bytes) -> None:
    wire, other = house.client(), house.client()
    house.tell(wire, command + b"\r\n")
    assert house.begin_fetch()
    house.clock.ns += 101 * SECOND
    house.turn.advance()
    job = house.engine.jobs.get(1)
    assert job is not None and job.state == READY
    assert house.tell(other, b"reserve\r\n") == b""
    house.end_fetch()
    assert other.take() == reserved(1), "who reserved it later has it"
    assert wire.take() == reserved(2)


def test_a_reservation_by_id_that_ends_meanwhile_is_made_again(house: House) -> None:
    wire, other = house.client(), house.client()
    for command, told in (b"reserve-job 5", reserved(5)), (b"reserve-job 6", b"NOT_FOUND\r\n"):
        house.tell(wire, command + b"\r\n")
        house.begin_fetch()
        house.clock.ns += 101 * SECOND
        house.turn.advance()
        if told.startswith(b"N"):
            assert house.tell(other, b"delete 6\r\n") == b"DELETED\r\n"
        house.end_fetch()
        assert wire.take() == told


def test_who_waits_for_a_job_waits_for_its_body_too(house: House) -> None:
    wire, worker = house.client(), house.client()
    house.tell(wire, b"watch y\r\nignore default\r\n")
    assert house.tell(wire, b"reserve\r\nuse x\r\n") == b""
    assert house.alter(9, b"y") == DONE
    house.turn.begin()
    house.turn.end()
    assert wire.take() == reserved(9), "what an operator moves is in memory until its new segment is sealed"
    assert house.tell(wire, b"") == b"USING x\r\n"
    house.tell(worker, b"reserve-job 10\r\n")
    house.fetch()
    worker.take()
    assert house.tell(worker, b"bury 10 0\r\n") == b"BURIED\r\n"
    house.forget()
    assert is_gone(house, 10)
    for id in range(1, 401):
        job = house.engine.jobs.get(id)
        if job is not None and job.state == READY:
            house.engine.force_bury(id, house.clock.ns)
    house.turn.begin()
    house.turn.end()
    house.tell(worker, b"watch default\r\n")
    assert house.tell(worker, b"reserve-with-timeout 50\r\n") == b""
    assert house.engine.waiting_count == 1
    assert house.tell(wire, b"kick-job 10\r\n") == b"KICKED\r\n"
    assert house.engine.waiting_count == 0 and worker.take() == b""
    house.fetch()
    assert worker.take() == reserved(10)


@needs_pure
def test_changes_read_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = house.client()
    jobs = [job for job in house.engine.jobs if job.body is None][:20]
    for job in jobs:
        house.engine.reserve_job(wire.session, job.id, house.clock.ns)
    monkeypatch.setattr(Journal, "payloads", None)
    for job in jobs:
        id = job.id
        assert house.tell(
            wire, b"touch %d\r\nbury %d 5\r\nkick-job %d\r\nstats-job %d\r\n" % (id, id, id, id)
        ).startswith(b"TOUCHED\r\nBURIED\r\nKICKED\r\nOK ")
        house.engine.reserve_job(wire.session, id, house.clock.ns)
        assert house.tell(wire, b"release %d 1 0\r\ndelete %d\r\n" % (id, id)) == b"RELEASED\r\nDELETED\r\n"
        assert job.body is None


def test_a_body_that_is_damaged_is_not_handed_out(house: House) -> None:
    wire = house.client()
    job = house.engine.jobs.get(1)
    assert job is not None and house.bodies is not None and house.journal is not None
    path = segment_path(house.journal.directory, job.segment)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute("UPDATE record SET payload = zeroblob(length(payload)) WHERE key = 1").rowcount == 1
    house.tell(wire, b"reserve\r\n")
    assert house.begin_fetch()
    assert house.pending is not None
    house.pending.run()
    with pytest.raises(JournalDamaged, match="key 1"):
        next(house.task)  # the server fails the turn with this, and ends
    assert wire.take() == b""
    house.turn.fail(JournalDamaged("as the server does"))


# Bug: The put was refused, and its job came with the next start.
def test_without_memory_to_note_where_a_record_stands_its_job_is_there(tmp_path: Path) -> None:
    """The put was refused, and the job came with the next start: its record stood in the journal by then."""

    class Poor(Bodies):
        def stands(self, id: int, place: int, size: int) -> None:
            raise MemoryError

    house = House(tmp_path / "journal", Poor(1 << 20))
    assert house.put(house.client(), 1) == b"INSERTED 1\r\n"
    check(house.engine)
    house.close()
    house = House(tmp_path / "journal", None)
    assert house.tell(house.client(), b"reserve\r\n") == reserved(1)
    house.close()


def test_a_body_comes_late_and_the_record_has_moved(house: House) -> None:
    wire = house.client()
    for id in range(1, 150):
        if id % 10:
            house.engine.force_delete(id, house.clock.ns)
    house.turn.begin()
    house.turn.end()
    assert house.tell(wire, b"peek 50\r\n") == b""
    assert house.begin_fetch()
    house.compact()
    assert not is_gone(house, 50), "it is in memory until its new segment is sealed"
    house.end_fetch()
    assert wire.take() == b"FOUND 50 1000\r\n%s\r\n" % body_of(50)
    for id in range(10, 150, 10):
        said = house.tell(wire, b"peek %d\r\n" % id)
        if not said:
            house.fetch()
            said = wire.take()
        assert said == b"FOUND %d 1000\r\n%s\r\n" % (id, body_of(id))


def test_what_is_moved_can_leave_memory_again(house: House) -> None:
    wire = house.client()
    for id in range(1, 300):
        if id % 10:
            house.engine.force_delete(id, house.clock.ns)
    house.turn.begin()
    house.turn.end()
    house.compact()
    house.fill(wire, 100)
    house.forget()
    assert is_gone(house, 50)
    assert house.tell(wire, b"peek 50\r\n") == b""
    house.fetch()
    assert wire.take() == b"FOUND 50 1000\r\n%s\r\n" % body_of(50)


class Moves(Changes):
    """Moves jobs to a tube, and hears of the end."""

    def __init__(self, house: House, ids: list[int]) -> None:
        engine = house.engine
        self.is_done = False
        super().__init__(engine, ids, lambda id, now_ns: engine.alter(id, KEEP, KEEP, KEEP, b"new", now_ns))

    def done(self) -> None:
        self.is_done = True

    def failed(self) -> None:
        raise AssertionError


def test_an_errand_waits_for_bodies_and_nobody_waits_for_the_errand(house: House) -> None:
    """It read them where all clients are served. They stay in memory until they are moved, however little may."""
    assert house.bodies is not None
    ids = [job.id for job in house.engine.jobs if job.body is None][:100]
    moves = Moves(house, [*ids, 10_000])
    house.backpressure()
    house.turn.accept(moves)
    house.turn.end()
    other = house.client()
    while not moves.is_done:
        if house.engine.held:
            house.backpressure()
        assert moves.awaited is not None and not house.turn.run_some_errands(), "it is not run for nothing"
        assert house.tell(other, b"stats-job 1\r\n").startswith(b"OK "), "others are served"
        assert house.begin_fetch()
        house.end_fetch()
        house.forget()
        assert house.turn.wanted.is_set
        while house.turn.run_some_errands():
            house.turn.end()
        house.turn.end()
    assert moves.counts == {DONE: 100, NOT_FOUND: 1}
    assert 1 < house.fetches < 60 and not house.bodies._pins
    house.prompt = True
    for id in ids:
        assert house.tell(other, b"reserve-job %d\r\n" % id) == reserved(id)


@pytest.mark.parametrize("gone", [False, True])
def test_an_errand_goes_on_when_the_body_it_waits_for_does_not_come(house: House, gone: bool) -> None:
    assert house.bodies is not None
    ids = [job.id for job in house.engine.jobs if job.body is None][:2]
    moves = Moves(house, ids)
    house.backpressure()
    house.turn.accept(moves)
    house.turn.end()
    assert house.begin_fetch()
    if gone:
        assert house.engine.force_delete(ids[0], house.clock.ns) == DONE
    else:
        moves.cancelled = True
    house.end_fetch()
    house.turn.run_some_errands()
    house.turn.end()
    assert moves.is_done and moves.counts == ({NOT_FOUND: 1, DONE: 1} if gone else {})
    assert not house.bodies._pins


@needs_pure
@pytest.mark.parametrize("name", ["compact", "backpressure"])
def test_compaction_waits_for_no_device(house: House, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it moves, and which keys those are, was read before, in a thread.

    While changes waited, it was asked for what to read before it had heard of the segment, and read it itself.
    """
    for id in range(1, 300):
        if id % 10:
            house.engine.force_delete(id, house.clock.ns)
    house.turn.begin()
    house.turn.end()
    assert house.journal is not None
    in_thread: list[bool] = []
    works = flags = 0

    def connected(path: str, mode: str) -> sqlite3.Connection:
        in_thread.append(wait.work is not None)
        return connect_to_read(path, mode)

    for room in (payloads_room, reader_room):
        monkeypatch.setattr(room, "connect_to_read", connected)
    monkeypatch.setattr(Journal, "behind", property(lambda journal: journal.wants_compaction()))
    moved = house.journal.records_moved
    task = getattr(house.turn, name)(house.store)
    end_s = time.monotonic() + PATIENCE_S
    for wait in task:
        house.turn.end()
        if wait.work is not None:
            works += 1
            wait.work.run()
            wait = Wait()
        elif wait.flag is not None:
            flags += 1
            if flags > 1:
                break  # it sleeps until something is written
            wait.flag.set()
        house.clock.ns += SECOND // 20
        time.sleep(0.001)
        assert time.monotonic() < end_s
    assert works > 2 and house.journal.records_moved > moved
    assert in_thread and all(in_thread)


def test_small_bodies_stay(tmp_path: Path) -> None:
    house = House(tmp_path / "journal", Forgetful(0))
    wire = house.client()
    house.fill(wire, 100, 100)
    house.fill(wire, 100, 1000)
    house.forget()
    assert 102 in {len(job.body) for job in house.engine.jobs if job.body is not None}
    assert all(job.id > 100 for job in house.engine.jobs if job.body is None)
    house.close()


def put_large(house: House, wire: Wire, count: int) -> None:
    """Puts jobs in parts, with other jobs in between."""
    for _ in range(count):
        job = house.engine.open_put(wire.session, 0, 0, 100, house.clock.ns)
        body = body_of(job.id, 9000) + b"\r\n"
        while (outcome := house.engine.prepare(job, body, house.clock.ns)) == UNFINISHED:
            house.put(wire, house.engine.next_id, 300)
        assert outcome == INSERTED
        assert house.engine.put(job, body, house.clock.ns) == INSERTED
        house.turn.begin()
        house.turn.end()
        house.settle()


@pytest.mark.slow
def test_large_bodies_leave_memory_like_others(tmp_path: Path) -> None:
    """They stayed, whatever the bound was. They stand in parts, with records of other jobs in between."""
    house = House(tmp_path / "journal", Forgetful(0))
    house.store.large_bytes, house.store.part_bytes = 5000, 2000
    wire = house.client()
    put_large(house, wire, 12)
    house.fill(wire, 40, 1000)
    house.forget()
    large = [job.id for job in house.engine.jobs if house.engine.size_of(job) == 9002]
    assert len(large) == 12 and all(is_gone(house, id) for id in large)
    for id in large[:3]:
        assert house.tell(wire, b"peek %d\r\n" % id) == b""
        house.fetch()
        assert wire.take() == b"FOUND %d 9000\r\n%b\r\n" % (id, body_of(id, 9000))
    for job in [*house.engine.jobs]:
        if job.id not in large[6:]:
            house.tell(wire, b"delete %d\r\n" % job.id)
    house.compact()  # which moves them in parts
    house.settle()
    assert house.store.facts()["binlog-records-migrated"] == 6
    assert house.bodies is not None and not house.bodies._pins
    house.forget()
    house.close()
    house = House(tmp_path / "journal", Forgetful(0), prompt=True)
    house.forget()
    assert all(is_gone(house, id) for id in large[6:])
    wire = house.client()
    for id in large[6:]:
        assert house.tell(wire, b"reserve\r\n") == b"RESERVED %d 9000\r\n%b\r\n" % (id, body_of(id, 9000))
    house.close()


# Bug: Bodies of 1 MiB and more could not leave memory.
def test_damage_in_a_part_is_not_handed_out(tmp_path: Path) -> None:
    house = House(tmp_path / "journal", Forgetful(0))
    house.store.large_bytes, house.store.part_bytes = 5000, 2000
    wire = house.client()
    put_large(house, wire, 8)
    house.forget()
    job = next(job for job in house.engine.jobs if job.body is None and house.engine.size_of(job) == 9002)
    with closing(sqlite3.connect(segment_path(str(tmp_path / "journal"), job.segment))) as db, db:
        db.execute("UPDATE record SET payload = zeroblob(length(payload)) WHERE key = ? AND kind = 4", (job.id,))
    reading = house.store.reading([job])
    reading.run()
    with pytest.raises(JournalDamaged):
        reading.body_of(job)
    assert house.journal is not None
    house.journal.abandon()


# Bug: Bodies that compaction had brought back stayed in memory when their segment was sealed, until the next put.
@pytest.mark.slow
def test_a_backlog_beyond_the_bound(tmp_path: Path) -> None:
    """Ten times as much as may be in memory comes in, survives a restart, and goes out."""
    limit = 50_000
    house = House(tmp_path / "journal", Bodies(limit))
    wire = house.client()
    count = 0
    most = 0
    assert house.bodies is not None
    while count < limit // 100:
        said = house.put(wire, house.engine.next_id)
        most = max(most, house.bodies.held_bytes)
        if said == b"OUT_OF_MEMORY\r\n":
            house.settle()  # what is written last has to be sealed first
        else:
            count += 1
    assert most <= limit
    check(house.engine)
    held = {job.id for job in house.engine.jobs}
    assert len(held) == count
    house.settle()
    house.close()
    again = House(tmp_path / "journal", Bodies(limit), prompt=True)
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
    house = House(None, Bodies(10 * (1002 + BODY_BYTES)))
    told: list[str] = []
    house.turn.tell = lambda text, error: told.append(text)
    wire = house.client()
    for id in range(1, 11):
        assert house.put(wire, id) == b"INSERTED %d\r\n" % id
    assert house.put(wire, 11) == b"OUT_OF_MEMORY\r\n"
    assert house.put(wire, 12, 5000) == b"OUT_OF_MEMORY\r\n"
    assert house.tell(wire, b"reserve\r\n") == reserved(1)
    assert house.tell(wire, b"release 1 0 0\r\nreserve\r\nbury 1 0\r\nkick 1\r\n").endswith(b"BURIED\r\nKICKED 1\r\n")
    assert house.tell(wire, b"delete 1\r\n") == b"DELETED\r\n"
    assert house.put(wire, 13) == b"INSERTED 13\r\n"
    assert house.put(wire, 14) == b"OUT_OF_MEMORY\r\n"
    assert house.bodies is not None and house.bodies.facts()["memory-puts-refused"] == 3
    check(house.engine)
    assert told == ["puts are refused: bodies take 10500 of 10500 bytes of memory"]
    house.tell(wire, b"delete 2\r\n")
    assert len(told) == 1, "the next put may be refused again"
    house.tell(wire, b"delete 3\r\n")
    assert told[1:] == ["puts are accepted again: memory has room for bodies"]


def test_memory_is_counted_anew_after_an_undone_change() -> None:
    house = House(None, Bodies(1 << 20))
    wire = house.client()
    for id in range(1, 11):
        house.put(wire, id)
    assert house.bodies is not None
    house.bodies.held_bytes = 5
    house.engine.undo()
    assert house.bodies.held_bytes == 10 * (1002 + BODY_BYTES)
    check(house.engine)


def test_what_is_about_to_be_reserved_goes_last(tmp_path: Path) -> None:
    house = House(tmp_path / "journal", Bodies(1 << 20))
    wire = house.client()
    house.fill(wire, 800)
    assert house.bodies is not None
    house.bodies.max_bytes = 300_000
    house.bodies.make_room(house.engine, 0)
    check(house.engine)
    assert house.bodies.held_bytes <= 300_000
    there = [job.id for job in house.engine.jobs if job.body is not None]
    assert set(range(1, 200)) <= set(there)
    house.bodies.max_bytes = 100_000
    house.bodies.make_room(house.engine, 0)
    assert house.bodies.held_bytes <= 100_000, "at last any may go"
    house.close()


def short(data: bytes) -> list[bytes]:
    return [line if len(line) < 80 else line[:30] + b"+%d" % len(line) for line in data.split(b"\r\n")]


class Pair:
    """The same commands to a house with all bodies in memory and to one that has hardly any there."""

    def __init__(self, draw: random.Random, tmp_path: Path) -> None:
        self.draw = draw
        self.houses = [
            House(tmp_path / "whole", None),
            House(tmp_path / "least", Forgetful(draw.choice([0, 3000, 50_000])), prompt=True),
        ]
        self.wires = [[house.client() for house in self.houses] for _ in range(3)]

    def tell(self, client: int, data: bytes | None) -> bytes:
        whole, least = (
            [house.tell(wire, data), *[each[at].take() for each in self.wires]]
            for at, (house, wire) in enumerate(zip(self.houses, self.wires[client], strict=True))
        )
        assert [short(each) for each in whole] == [short(each) for each in least], short(data or b"")
        return whole[0]

    def step(self) -> None:
        draw = self.draw
        ids = [job.id for job in self.houses[0].engine.jobs]
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
            for house in self.houses:
                house.clock.ns += SECOND
                house.turn.advance()
                house.turn.end()
        if draw.random() < 0.1:
            for house in self.houses:
                house.settle()
        if draw.random() < 0.05:
            for house in self.houses:
                house.compact()
        if ids and draw.random() < 0.05:
            alter = draw.choice(ids), draw.choice([b"", b"a"]), draw.choice([KEEP, 7])
            said = [house.alter(*alter) for house in self.houses]
            assert said[0] == said[1]
            for house in self.houses:
                house.turn.begin()
                house.turn.end()
        check(self.houses[1].engine)


@pytest.mark.parametrize("number", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 20))])
def test_nobody_sees_where_the_bodies_are(tmp_path: Path, seed: int, number: int) -> None:
    draw = random.Random(seed + number)
    pair = Pair(draw, tmp_path)
    for _ in range(400):
        pair.step()
    least = pair.houses[1]
    assert isinstance(least.bodies, Forgetful)
    assert least.bodies.let_gone > 20 and least.bodies.fetched > 5
    for house in pair.houses:
        house.settle()
        house.close()
    read = [House(tmp_path / name, bodies, prompt=True) for name, bodies in (("whole", None), ("least", Forgetful(0)))]
    pair.houses = read
    pair.wires = [[house.client() for house in read]]
    for job in list(read[0].engine.jobs):
        pair.tell(0, b"peek %d\r\n" % job.id)
    for house in read:
        house.close()


def refusals(house: House) -> list[str]:
    """Will hold what the operator hears."""
    told: list[str] = []
    house.turn.tell = lambda text, error: told.append(text)
    return told


def test_a_body_counts_from_its_first_bytes_on() -> None:
    """Half-sent puts took any memory: a body counted when it was complete."""
    bodies = Bodies(111_000)
    house = House(None, bodies)
    wires = [house.client() for _ in range(5)]
    for wire in wires:
        assert house.tell(wire, b"put 0 0 100 40000\r\n" + b"x" * 30_000) == b""
    assert bodies.taken_bytes == 3 * (30_000 + BODY_BYTES) and bodies.refused == 2
    check(house.engine)
    assert house.tell(wires[4], b"x" * 5000) == b""
    assert house.tell(wires[4], b"x" * 5000 + b"\r\nuse a\r\n") == b"OUT_OF_MEMORY\r\nUSING a\r\n"
    assert house.tell(wires[0], b"x" * 10_000 + b"\r\n").startswith(b"INSERTED ")
    assert bodies.held_bytes == 40_002 + BODY_BYTES and bodies.claimed_bytes == 2 * (30_000 + BODY_BYTES)
    assert house.tell(wires[1], b"x" * 10_000 + b"yz") == b"EXPECTED_CRLF\r\n"
    assert bodies.claimed_bytes == 30_000 + BODY_BYTES
    house.turn.leave(wires[2])
    assert bodies.claimed_bytes == 0
    house.tell(wires[1], b"put 0 0 100 30000\r\n" + b"x" * 20_000)
    house.engine.draining = True
    assert house.tell(wires[1], b"x" * 10_000 + b"\r\n") == b"DRAINING\r\n"
    assert bodies.claimed_bytes == 0 and bodies.held_bytes == 40_002 + BODY_BYTES
    check(house.engine)


class Unhurried(Ledger):
    def prepare(self, job: Job, tube_name: bytes) -> bool | None:
        return False


def test_large_bodies_count_from_when_they_are_admitted() -> None:
    """Sixty jobs of 1.1 MB passed a bound of 4 MB together, as none of them counted before the ledger had all of it."""
    house = House(None, bodies := Bodies(4 << 20))
    engine = house.engine
    engine.ledger = Unhurried()
    session = house.client().session
    jobs = [engine.open_put(session, 0, 0, 100, house.clock.ns) for _ in range(60)]
    said = [engine.prepare(job, bytes(1_100_000), house.clock.ns) for job in jobs]
    assert said == [UNFINISHED] * 3 + [OUT_OF_MEMORY] * 57
    assert bodies.taken_bytes == 3 * (1_100_000 + BODY_BYTES)
    assert engine.prepare(jobs[0], bytes(1_100_000), house.clock.ns) == UNFINISHED, "it counts once"
    assert engine.put(jobs[0], bytes(1_100_000), house.clock.ns) == INSERTED
    assert (bodies.held_bytes, bodies.claimed_bytes) == (1_100_048, 2 * 1_100_048)
    for job in jobs[1:]:
        engine.abandon_put(job)
    assert bodies.claimed_bytes == 0
    check(engine)


def test_after_a_failure_only_uploads_that_go_on_count() -> None:
    house = House(None, bodies := Bodies(100_000))
    wire = house.client()
    house.tell(wire, b"put 0 0 100 40000\r\n" + b"x" * 30_000)
    lost = house.engine.open_put_to(b"a", 0, 0, 100, house.clock.ns)
    assert bodies.claim(house.engine, lost.id, 5000)
    house.engine.undo()
    assert bodies.claimed_bytes == 30_000 + BODY_BYTES
    assert house.tell(wire, b"x" * 10_000 + b"\r\n").startswith(b"INSERTED ")
    assert bodies.claimed_bytes == 0


def test_a_reply_that_nobody_takes_counts() -> None:
    house = House(None, bodies := Bodies(100_000))
    unsent = Unsent(house.service)
    unsent.leave(b"x" * 5000)
    assert bodies.taken_bytes == 5000
    unsent.take(b"x" * 5000)
    assert bodies.taken_bytes == 0


@pytest.mark.parametrize(("size", "most"), [(10_000, 64 << 10), (20_000, 64 << 10), (60_000, 64 << 10)])
def test_a_bound_far_below_the_size_of_a_segment_takes_a_backlog(tmp_path: Path, size: int, most: int) -> None:
    """Nothing left memory before its segment was full: with a bound below that, puts were refused for ever."""
    house = House(tmp_path / "journal", bodies := Bodies(most), segment_bytes=10 << 20)
    wire = house.client()
    for id in range(1, 20):
        end_s = time.monotonic() + PATIENCE_S
        while not house.put(wire, id, size).startswith(b"INSERTED "):
            house.settle()
            assert time.monotonic() < end_s, "puts are refused for ever"
        assert bodies.taken_bytes <= most
    assert bodies.gone * size > 19 * size - most
    assert len([*(tmp_path / "journal").glob("segment-*.db")]) > 3
    house.settle()
    check(house.engine)
    house.close()


def test_memory_is_made_before_a_put_has_to_be_refused(tmp_path: Path) -> None:
    """While three quarters of the bound are taken, the newest segment is sealed, however little of it is full."""
    house = House(tmp_path / "journal", bodies := Bodies(64 << 10), segment_bytes=10 << 20)
    wire = house.client()
    for id in range(1, 30):
        assert house.put(wire, id, 5_000).startswith(b"INSERTED ")
        house.settle()
    assert not bodies.refused and bodies.gone
    house.close()


def test_a_body_that_does_not_fit_is_refused_with_its_first_bytes() -> None:
    house = House(None, bodies := Bodies(100_000))
    assert not bodies.claim(house.engine, 1, 10, 200_000)
    assert not bodies.claimed_bytes
    assert bodies.claim(house.engine, 1, 10, 50_000)


def test_while_memory_has_room_segments_become_full(tmp_path: Path) -> None:
    house = House(tmp_path / "journal", Bodies(1 << 20), segment_bytes=10 << 20)
    wire = house.client()
    for _ in range(40):
        house.put(wire, 1, 15_000)
    house.settle()
    assert len([*(tmp_path / "journal").glob("segment-*.db")]) == 2, "the current one and the next"
    house.close()


def test_each_refusal_is_told_but_seldom() -> None:
    """A body larger than an eighth of the bound could be refused without a word: seven eighths of it were free."""
    house = House(None, Bodies(64 << 10))
    told = refusals(house)
    wire = house.client()
    for _ in range(50):
        assert house.put(wire, 1, 70_000) == b"OUT_OF_MEMORY\r\n"
        assert house.put(wire, 1, 100).startswith(b"INSERTED ")
    assert told == [
        "puts are refused: a body of 70002 bytes is larger than the 65536 bytes of memory that bodies may take",
        "puts are accepted again: memory has room for bodies",
    ]
    house.clock.ns += 61 * SECOND
    house.put(wire, 1, 60_000)
    assert len(told) == 3 and told[2].startswith("puts are refused: bodies take 7")
    house.tell(wire, b"list-tube-used\r\n")
    assert len(told) == 4


def test_a_reserved_job_is_not_lost_with_its_body(house: House) -> None:
    """The body of a job that a worker has may go, and is there again when the job is ready once more."""
    wire = house.client()
    house.tell(wire, b"reserve\r\n")
    house.fetch()
    wire.take()
    job = house.engine.jobs.get(1)
    assert job is not None and job.state == RESERVED and not is_gone(house, 1)
    house.forget()
    assert is_gone(house, 1)
    assert house.tell(wire, b"release 1 0 0\r\n") == b"RELEASED\r\n"
    assert house.tell(wire, b"reserve\r\n") == b""
    house.fetch()
    assert wire.take() == reserved(1)
