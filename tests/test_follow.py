"""A follower's engine beside one that replays the whole log: they are the same after any history, whatever its cuts."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from geventstalk._build import BUILD
from geventstalk.core.ages import Search
from geventstalk.core.bodies import Bodies
from geventstalk.core.job import DELAYED, READY, SECOND_NS, Job
from geventstalk.core.operate import KEEP, Operate
from geventstalk.core.tube import Client
from geventstalk.durable.follow import Follower
from geventstalk.durable.records import ClockOffset, encode_change, encode_whole, stamp_of
from geventstalk.durable.store import Store
from geventstalk.turn.turn import Turn
from journal.errors import JournalDamaged
from journal.log import CHANGE, DELETE, FULL, Row
from tests.support.check import check
from tests.support.clock import SECOND, ManualClock
from tests.test_turn import WALL_NS, FakeJournal

TUBES = [b"default", b"one", b"two"]


class MemoryLog(FakeJournal):
    """Keeps its records, some to a segment."""

    def __init__(self, rows: list[tuple[int, Row]] | None = None) -> None:
        super().__init__()
        self.rows: list[tuple[int, Row]] = [] if rows is None else rows

    @property
    def current(self) -> int:  # type: ignore[override]  # a plain attribute there
        return 1 + len(self.rows) // 50

    def append(self, key: int, kind: int, payload: bytes) -> None:
        self.rows.append((self.current, (len(self.rows), key, kind, 0, payload)))
        self.high_water = max(self.high_water, key)
        self.appended += 1
        self.dirty = True

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        """All, without changes of keys that are gone, as a log gives them."""
        live = {row[1] for _, row in self.rows if row[2] == FULL} - {row[1] for _, row in self.rows if row[2] == DELETE}
        self.high_water = max([0, *[row[1] for _, row in self.rows]])
        return iter([(segment, [row]) for segment, row in self.rows if row[1] in live])


class Worker(Client):
    def answer(self, outcome: int, job: Job | None) -> None:
        return


class Leader:
    """An engine whose clients and operator do anything."""

    def __init__(self, clock: ManualClock, draw: random.Random) -> None:
        self.clock = clock
        self.draw = draw
        self.wall_step_ns = 0
        self.engine = Operate(clock.ns)
        self.log = MemoryLog()
        self.store = Store(self.log, 0, ClockOffset(self.wall_ns(), clock.ns))
        self.turn = Turn(self.engine, lambda: clock.ns, self.wall_ns, lambda: None, self.fails)
        self.turn.open(self.store)
        self.clients = [self.come() for _ in range(3)]

    def wall_ns(self) -> int:
        return WALL_NS + self.clock.ns + self.wall_step_ns

    def fails(self, error: BaseException) -> None:
        raise error

    def come(self) -> Worker:
        worker = Worker()
        self.engine.join(worker)
        for tube in TUBES:
            self.engine.watch(worker, tube)
        return worker

    def step(self) -> None:
        engine, draw, now_ns = self.engine, self.draw, self.clock.ns
        client = draw.choice(self.clients)
        held = list(client.reserved)
        ids = [job.id for job in engine.jobs]
        what = draw.randrange(14)
        if what <= 3:
            self.put(client, draw.choice([0, 0, 3, 60]))
        elif what == 4:
            late = engine.open_put(client, 5, 0, 5, now_ns)  # its body comes after others were put
            self.clock.pass_s(draw.choice([0, 0.5]))
            self.put(client, 0)
            engine.put(late, b"late\r\n", self.clock.ns)
        elif what == 5:
            engine.reserve(client, now_ns)
        elif what == 6 and ids:
            engine.reserve_job(client, draw.choice(ids), now_ns)
        elif what == 7 and held:
            engine.release(client, draw.choice(held), draw.choice([0, 7]), draw.choice([0, 4]), now_ns)
        elif what == 8 and held:
            engine.bury(client, draw.choice(held), 3, now_ns)
        elif what == 9 and ids:
            engine.delete(client, draw.choice(ids), now_ns)
        elif what == 10 and ids:
            engine.kick_job(draw.choice(ids), now_ns)
        elif what == 11 and ids:
            pri, ttr_s, tube = draw.choice([KEEP, 9]), draw.choice([KEEP, 30]), b"new-%d" % draw.randrange(3)
            engine.alter(draw.choice(ids), pri, KEEP, ttr_s, draw.choice([b"", *TUBES, tube]), now_ns)
        elif what == 12 and ids:
            for id in draw.sample(ids, min(len(ids), 3)):  # as compaction does
                self.log.append(id, FULL, self.store._whole_of(id))
        else:
            self.clock.pass_s(draw.choice([0.1, 1, 6]))
            while not engine.advance(self.clock.ns, 100):
                pass

    def put(self, client: Worker, delay_s: int) -> None:
        engine, now_ns = self.engine, self.clock.ns
        engine.use(client, self.draw.choice(TUBES))
        job = engine.open_put(client, self.draw.choice([0, 5, 2000]), delay_s, self.draw.choice([1, 5, 60]), now_ns)
        engine.put(job, b"body of %d\r\n" % job.id, now_ns)


class Standby:
    def __init__(self, clock: ManualClock, rows: list[tuple[int, Row]]) -> None:
        self.clock = clock
        self.at = len(rows)
        self.engine = Operate(clock.ns)
        self.engine.bodies = Bodies(1 << 30)  # counted as they come and go: a takeover counts nothing
        self.store = Store(MemoryLog(list(rows)), 0, ClockOffset(WALL_NS + clock.ns, clock.ns))
        self.follower = Follower(self.engine, self.store)
        self.follower.load(lambda: clock.ns)

    def read(self, rows: list[tuple[int, Row]], end: int) -> None:
        for segment, row in rows[self.at : end]:
            self.follower.apply(segment, [row], self.clock.ns)
        self.at = max(self.at, end)

    def pass_time(self) -> None:
        while not self.engine.advance(self.clock.ns, 100):
            pass


def picture(engine: Operate, offset: ClockOffset) -> dict[str, object]:
    """All that clients can see of the jobs, and all that a next journal would have."""
    search = Search(engine, None)
    jobs = {
        job.id: (
            engine.tube_of(job).name,
            encode_whole(job, b"", offset) if job.state != 3 else encode_whole(job, b"", offset)[17:],
            job.state,
            job.rank if job.state != 3 else 0,
            job.segment,
            job.holder,
        )
        for job in engine.jobs.in_order()
    }
    tubes = {
        tube.name: (
            tube.jobs,
            tube.urgent,
            tube.reserved,
            tube.ready.smallest(1 << 30),
            tube.delayed.smallest(1 << 30),
            tube.buried.smallest(1 << 30),
            Search(engine, tube).go_on(),
        )
        for tube in sorted(engine.tubes.values(), key=lambda tube: tube.name)
    }
    return {
        "jobs": jobs,
        "tubes": tubes,
        "counts": (engine.ready_count, engine.urgent_count, engine.delayed_count, engine.buried_count),
        "totals": (engine.reserved_count, engine.total_jobs, engine.total_deletes, engine.total_timeouts),
        "ages": search.go_on(),
    }


def restarted(leader: Leader) -> tuple[Operate, Store]:
    """Returns what a restart makes of the log."""
    engine = Operate(leader.clock.ns)
    turn = Turn(engine, lambda: leader.clock.ns, leader.wall_ns, lambda: None, leader.fails)
    store = Store(MemoryLog(list(leader.log.rows)), 0, ClockOffset(WALL_NS + leader.clock.ns, leader.clock.ns))
    turn.open(store)
    return engine, store


# Bug: With --max-memory a takeover counted the bodies of all jobs on the hub, after its claim.
@pytest.mark.parametrize("round", range(40))
def test_following_and_replaying_come_to_the_same(round: int, seed: int) -> None:
    draw = random.Random(f"{seed} {round}")
    leader = Leader(ManualClock(), draw)
    standbys: list[Standby] = []
    for _ in range(draw.choice([20, 100, 300])):
        leader.step()
        if len(standbys) < 3 and draw.random() < 0.05:
            standbys.append(Standby(leader.clock, leader.log.rows))
        for standby in standbys:
            if draw.random() < 0.3:
                standby.read(leader.log.rows, draw.randint(standby.at, len(leader.log.rows)))
                standby.pass_time()
                if draw.random() < 0.1:
                    check(standby.engine)
    standbys.append(Standby(leader.clock, leader.log.rows))
    other, store = restarted(leader)
    while not other.advance(leader.clock.ns, 100):
        pass
    expected = picture(other, store.offset)
    for standby in standbys:
        standby.read(leader.log.rows, len(leader.log.rows))
        standby.pass_time()
        check(standby.engine)
        assert picture(standby.engine, standby.store.offset) == expected
        turn = Turn(standby.engine, lambda: leader.clock.ns, leader.wall_ns, lambda: None, leader.fails)
        assert isinstance(standby.store._log, MemoryLog)
        standby.store._log.high_water = leader.log.high_water
        turn.write_to(standby.store)
        assert standby.engine._bury_number >= other._bury_number, "a job that is buried now is the last one"
        assert standby.engine.next_id == other.next_id and standby.engine.ledger is standby.store


def calls_of(work: Callable[[], None]) -> int:
    """Returns how many functions it calls, also those in C: a search through all jobs makes one or more for each."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def test_to_begin_to_write_takes_no_longer_with_more_jobs() -> None:
    def calls_with(jobs: int) -> int:
        leader = Leader(ManualClock(), random.Random(1))
        for _ in range(jobs):
            leader.put(leader.clients[0], 0)
        standby = Standby(leader.clock, leader.log.rows)
        turn = Turn(standby.engine, lambda: leader.clock.ns, leader.wall_ns, lambda: None, leader.fails)
        return calls_of(lambda: turn.write_to(standby.store))

    assert calls_with(10) == calls_with(1000)


class Writer:
    """Records of jobs of which only the ages matter."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.offset = ClockOffset(WALL_NS + self.clock.ns, self.clock.ns)
        self.standby = Standby(self.clock, [])

    def job(self, id: int, age_s: float) -> Job:
        job = Job(id, 0, 0, 0, 1)
        job.state, job.body, job.created_ns = READY, b"x\r\n", self.clock.ns - round(age_s * SECOND)
        return job

    def put(self, id: int, age_s: float, tube: bytes = b"default") -> None:
        self.apply(id, FULL, encode_whole(self.job(id, age_s), tube, self.offset))

    def apply(self, id: int, kind: int, payload: bytes = b"") -> None:
        self.standby.follower.apply(1, [(id, id, kind, 0, payload)], self.clock.ns)

    def oldest_s(self) -> float:
        found = Search(self.standby.engine, None).go_on()
        assert found is not None and found.ready is not None
        return (self.clock.ns - found.ready) / SECOND


def test_ages_that_contradict_ids_stay_right_while_following() -> None:
    """A node with another clock leads for a while."""
    writer = Writer()
    for id, age_s in ((1, 50), (2, 40), (3, 90), (4, 80), (5, 30), (7, 10), (6, 20), (8, 60)):
        writer.put(id, age_s)
        check(writer.standby.engine)
    assert writer.standby.engine.strays == [3, 4, 8]
    for id, left_s in ((3, 80), (1, 80), (4, 60), (8, 40), (2, 30), (5, 20), (6, 10)):
        writer.apply(id, DELETE)
        check(writer.standby.engine)
        assert writer.oldest_s() == left_s


def test_a_stray_that_is_written_with_another_age_is_found_by_it() -> None:
    writer = Writer()
    for id, age_s in ((1, 50), (2, 90), (3, 40)):
        writer.put(id, age_s)
    assert writer.standby.engine.strays == [2]
    writer.put(2, 45)
    check(writer.standby.engine)
    assert not writer.standby.engine.strays and writer.oldest_s() == 50
    writer.put(1, 20)
    check(writer.standby.engine)
    assert writer.oldest_s() == 45


@pytest.mark.skipif(BUILD == "compiled", reason="a constant of a compiled module cannot be replaced")
def test_a_clock_far_ahead_makes_few_strays(monkeypatch: pytest.MonkeyPatch) -> None:
    from geventstalk.core import mirror

    monkeypatch.setattr(mirror, "_STRAYS", 16)
    writer = Writer()
    writer.put(1, -3600)  # taken for put now
    for id in range(2, 500):
        writer.put(id, 1000 - id)
    engine = writer.standby.engine
    check(engine)
    assert len(engine.strays) < 500 // 8 + 2 * 16 and 1 in engine.strays
    for id in range(2, 499):
        writer.apply(id, DELETE)
    for id in range(500, 600):
        writer.put(id, 2000 - id)
    check(engine)
    assert len(engine.strays) < 200


def test_the_moment_of_a_delay_is_that_of_the_leader() -> None:
    writer = Writer()
    job = writer.job(1, 5)
    job.state, job.delay_s, job.rank = DELAYED, 10, writer.clock.ns + 4 * SECOND_NS
    writer.apply(1, FULL, encode_whole(job, b"default", writer.offset))
    assert writer.standby.engine.delayed_count == 1
    writer.clock.pass_s(4)
    writer.standby.pass_time()
    assert writer.standby.engine.ready_count == 1
    check(writer.standby.engine)


def test_a_change_that_does_not_fit_its_job_is_left_out_and_made_good_in_the_end() -> None:
    writer = Writer()
    writer.put(1, 5)
    job = writer.job(1, 5)
    job.pri = 77
    writer.apply(1, CHANGE, encode_change(job, writer.offset) + stamp_of(b"elsewhere", 1))
    engine, store = writer.standby.engine, writer.standby.store
    found = engine.jobs.get(1)
    assert found is not None and found.pri == 0 and store.unfit == {1}
    turn = Turn(engine, lambda: writer.clock.ns, lambda: WALL_NS + writer.clock.ns, lambda: None, print)
    turn.write_to(store)
    assert isinstance(store._log, MemoryLog) and store._log.rows[-1][1][1:3] == (1, CHANGE)


@pytest.mark.parametrize(("kind", "payload"), [(FULL, b"?"), (CHANGE, b"?"), (CHANGE, b"")])
def test_what_is_no_record_of_a_job_is_damage(kind: int, payload: bytes) -> None:
    writer = Writer()
    with pytest.raises(JournalDamaged, match="job 1"):
        writer.apply(1, kind, payload)
