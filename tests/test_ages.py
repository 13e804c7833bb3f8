"""The oldest job of each state: against a recount of large tubes, with ages that contradict ids, and in slices."""

from __future__ import annotations

import random
import sys

import pytest

from geventstalk.core.ages import NO_JOBS, Oldest, Search, find_strays
from geventstalk.core.engine import Engine
from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, Job
from geventstalk.core.tube import NO_ID, Tube
from tests.support.bench import Bench, Worker
from tests.support.check import check
from tests.support.clock import SECOND

STATES = (READY, DELAYED, RESERVED, BURIED)
MANY = 600
"""This many jobs of a state are not looked through one by one."""


class Ages(Bench):
    def put(self, tube: bytes, delay_s: int = 0) -> int:
        self.engine.use(self.worker, tube)
        job = self.engine.open_put(self.worker, 0, delay_s, 1000, self.clock.ns)
        self.engine.put(job, b"x\r\n", self.clock.ns)
        return job.id

    def restore(self, id: int, state: int, age_s: int, tube: bytes = b"a") -> None:
        """A job as a journal brings it back."""
        job = Job(id, 0, 0, 0, 60)
        job.state, job.rank, job.body = state, id, b"x\r\n"
        job.created_ns = self.clock.ns - age_s * SECOND
        if state == DELAYED:
            job.rank = self.clock.ns + 1000 * SECOND
        self.engine.jobs.add(job)
        self.engine.restore(job, tube, self.clock.ns)

    def oldest(self, tube: bytes | None) -> Oldest:
        found, _ = self.searched(tube)
        return found

    def searched(self, tube: bytes | None) -> tuple[Oldest, int]:
        """Returns what is found, and in how many slices."""
        search = Search(self.engine, None if tube is None else self.engine.tubes[tube])
        slices = 1
        while (found := search.go_on()) is None:
            slices += 1
        return found, slices

    def recount(self, tube: bytes | None) -> Oldest:
        jobs = [job for job in self.engine.jobs if tube in (None, self.engine.tube_of(job).name)]
        return Oldest(*[min((job.created_ns for job in jobs if job.state == state), default=None) for state in STATES])

    def agrees(self) -> None:
        for tube in (b"a", b"b", None):
            assert self.oldest(tube) == self.recount(tube)
        check(self.engine)


@pytest.fixture
def bench() -> Ages:
    return Ages(b"a", b"b")


def test_no_jobs(bench: Ages) -> None:
    assert bench.searched(b"a") == bench.searched(None) == (NO_JOBS, 1)


def test_each_state_by_its_own(bench: Ages) -> None:
    ages = {}
    for state in STATES:
        id = bench.put(b"a", 100 if state == DELAYED else 0)
        if state in (RESERVED, BURIED):
            assert bench.engine.reserve_job(bench.worker, id, bench.clock.ns)
        if state == BURIED:
            assert bench.engine.bury(bench.worker, id, 0, bench.clock.ns)
        ages[state] = bench.clock.ns
        bench.clock.pass_s(1)
    assert bench.oldest(b"a") == bench.oldest(None) == Oldest(*[ages[state] for state in STATES])
    assert bench.oldest(b"b") == NO_JOBS


def test_the_age_begins_with_the_line_of_the_put(bench: Ages) -> None:
    """As upstream's. So a job whose body comes late is older than those that were put meanwhile, as its id says."""
    bench.engine.use(bench.worker, b"a")
    begun_ns = bench.clock.ns
    late = bench.engine.open_put(bench.worker, 0, 0, 60, begun_ns)
    bench.clock.pass_s(5)
    bench.put(b"a")
    assert bench.oldest(b"a").ready == bench.clock.ns
    bench.clock.pass_s(5)
    bench.engine.put(late, b"x\r\n", bench.clock.ns)
    assert bench.oldest(b"a").ready == begun_ns
    bench.agrees()


def test_random_traffic_in_large_tubes(bench: Ages, seed: int) -> None:
    """Jobs of both tubes stand mixed in the job table; some come back, as old ones, among many younger."""
    draw = random.Random(seed)
    engine, worker = bench.engine, bench.worker
    held: list[int] = []
    for step in range(12 * MANY):
        bench.clock.pass_ns(draw.randrange(3))
        now_ns = bench.clock.ns
        what = draw.random()
        if what < 0.45 or step < 3 * MANY:
            bench.put(draw.choice((b"a", b"b")), draw.choice((0, 0, 500)))
        elif what < 0.65:
            job = engine.reserve(worker, now_ns)
            held += [job.id] if job is not None else []
        elif what < 0.75 and held:
            engine.release(worker, held.pop(draw.randrange(len(held))), draw.randrange(3), 0, now_ns)
        elif what < 0.85 and held:
            engine.bury(worker, held.pop(draw.randrange(len(held))), 0, now_ns)
        elif what < 0.9 and held:
            engine.delete(worker, held.pop(0), now_ns)
        elif what < 0.92:
            engine.kick(engine.tubes[draw.choice((b"a", b"b"))], draw.random() < 0.5, draw.randrange(4), now_ns)
        elif what < 0.99:
            tube = draw.choice((b"a", b"b", None))
            assert bench.oldest(tube) == bench.recount(tube)
        elif what < 0.993:
            engine.undo()
    assert len(engine.tubes[b"a"].ready) > MANY and engine.delayed_count > MANY, "nothing was large"
    bench.agrees()


@pytest.mark.parametrize("watchers", [0, 5, 300])
def test_reserved_jobs_of_all_clients(bench: Ages, watchers: int) -> None:
    """Clients that watch the tube and others, one with many jobs, and one that is gone and gives back in slices."""
    engine, clock = bench.engine, bench.clock
    for _ in range(watchers):
        engine.join(watcher := Worker())
        engine.watch(watcher, b"a")
    engine.join(stranger := Worker())
    engine.join(leaver := Worker())
    engine.watch(leaver, b"a")
    ids = []
    for _ in range(100):
        clock.pass_s(1)
        ids.append(bench.put(b"a"))
        bench.put(b"b")
    for id in ids[:60]:
        engine.reserve_job(leaver, id, clock.ns)
    for id in ids[60:]:
        engine.reserve_job(stranger if id % 4 == 1 else bench.worker, id, clock.ns)
    bench.agrees()
    while not engine.leave(leaver, clock.ns, 7):
        bench.agrees()
    for id in ids[60:]:
        holder = stranger if id in stranger.reserved else bench.worker
        assert engine.release(holder, id, 0, 0, clock.ns)
        assert bench.oldest(b"a") == bench.recount(b"a")
    for _ in range(600):
        bench.put(b"b")
    while engine.reserve(bench.worker, clock.ns) is not None:
        pass
    engine.release(bench.worker, ids[0], 0, 0, clock.ns)
    bench.agrees()


# --- ages that contradict ids


@pytest.mark.parametrize(
    ("ages_s", "strays"),
    [
        ([9, 8, 8, 3, 1], []),
        ([9, 8, 20, 3, 1], [3]),
        ([9, 2, 7, 6, 1], [2]),
        ([0, 0, 9, 8, 7, 6], [1, 2]),
        ([1, 2, 3, 4], [1, 2, 3]),
        ([5], []),
        ([], []),
    ],
)
def test_as_few_strays_as_possible(bench: Ages, ages_s: list[int], strays: list[int]) -> None:
    for id, age_s in enumerate(ages_s, 1):
        bench.restore(id, READY, age_s)
    assert bench.engine.unsorted == (strays != [])
    find_strays(bench.engine)
    assert len(bench.engine.strays) == len(strays)
    assert {*bench.engine.strays} == bench.engine.stray_ids
    check(bench.engine)


def test_random_strays(bench: Ages, seed: int) -> None:
    draw = random.Random(seed)
    for id in range(1, MANY):
        bench.restore(
            id, draw.choice((READY, DELAYED, BURIED)), draw.choice((MANY - id, draw.randrange(900))), b"ab"[:1]
        )
        if not draw.randrange(20):
            bench.restore(2 * MANY + id, READY, draw.randrange(900), b"b")
    bench.agrees()
    assert not bench.engine.unsorted and bench.engine.strays
    for _ in range(4 * MANY):
        job = draw.choice([*bench.engine.jobs][:50])
        if draw.random() < 0.5:
            bench.engine.delete(bench.worker, job.id, bench.clock.ns)
        elif job.state != RESERVED:
            bench.engine.reserve_job(bench.worker, job.id, bench.clock.ns)
        else:
            bench.engine.release(bench.worker, job.id, 0, draw.choice((0, 900)), bench.clock.ns)
        if draw.random() < 0.05:
            bench.engine.undo()
        if draw.random() < 0.05:
            bench.put(b"b")
        if len(bench.engine.jobs) < 60:
            break
        tube = draw.choice((b"a", b"b", None))
        if tube is None or tube in bench.engine.tubes:
            assert bench.oldest(tube) == bench.recount(tube)
    bench.agrees()


def test_jobs_that_are_older_than_this_boot(bench: Ages) -> None:
    """On the monotonic clock they were put at a negative moment."""
    age_s = bench.clock.ns // SECOND + 1
    bench.restore(1, READY, age_s, b"a")
    bench.restore(2, BURIED, age_s - 5, b"a")
    assert not bench.engine.unsorted
    bench.agrees()
    assert bench.oldest(b"a").ready == bench.clock.ns - age_s * SECOND < 0


def test_only_strays_are_left(bench: Ages) -> None:
    bench.restore(1, READY, 0)
    bench.restore(2, BURIED, 7)
    bench.restore(3, BURIED, 5)
    assert bench.oldest(b"a") == Oldest(bench.clock.ns, None, None, bench.clock.ns - 7 * SECOND)
    assert bench.engine.strays == [1]
    bench.engine.delete(bench.worker, 2, bench.clock.ns)
    bench.engine.delete(bench.worker, 3, bench.clock.ns)
    bench.agrees()


# Bug: A job whose age contradicts its id, as after an import, kept its body in memory after its delete until the next
# restart.
def test_a_stray_that_is_deleted_gives_its_memory_back(bench: Ages) -> None:
    bench.restore(1, READY, 0)
    bench.restore(2, READY, 7)
    body = bytes(1000)
    for job in bench.engine.jobs:
        job.body = body
    bench.engine.undo()  # counts the bodies
    find_strays(bench.engine)
    before = sys.getrefcount(body)
    (stray,) = bench.engine.strays
    del job
    bench.engine.delete(bench.worker, stray, bench.clock.ns)
    assert sys.getrefcount(body) == before - 1
    bench.agrees()


# --- slices


def test_a_search_goes_on_where_it_was(bench: Ages) -> None:
    """The first of many jobs are gone; meanwhile others come and go, also in what was searched already."""
    count = 50_000
    for id in range(1, count):
        bench.restore(id, READY, 9, b"b")
    bench.restore(count, READY, 9, b"a")
    for id in range(count + 1, count + MANY):
        bench.restore(id, READY, 8, b"a")
    tube = bench.engine.tubes[b"a"]
    tube.low_ready = bench.engine.low_buried = 1  # as if old jobs had been there and gone
    search = Search(bench.engine, tube)
    assert search.go_on() is None
    assert 1 < tube.low_ready < count
    slices = 1
    while (found := search.go_on()) is None:
        slices += 1
    assert found == bench.recount(b"a") and 5 < slices < 50
    assert bench.searched(b"a") == (found, 1), "the next reading begins where this one ended"

    tube.low_ready = 1
    search = Search(bench.engine, tube)
    assert search.go_on() is None
    job = bench.engine.jobs.get(5)
    assert job is not None
    bench.engine.delete(bench.worker, 5, bench.clock.ns)
    job.state, job.created_ns = READY, job.created_ns
    bench.engine.jobs.add(job)
    bench.engine.restore(job, b"a", bench.clock.ns)
    bench.engine.unsorted = False
    assert search.go_on() is not None and tube.low_ready == 5
    check(bench.engine)


def test_many_strays_in_slices(bench: Ages) -> None:
    count = 10_000
    for id in range(1, count):
        bench.restore(id, BURIED if id < 9_990 else READY, id // 10)
    bench.restore(count, READY, 0)
    assert len(find(bench.engine)) > 8_000
    found, slices = bench.searched(b"a")
    assert found == bench.recount(b"a") and slices > 1


def find(engine: Engine) -> list[int]:
    find_strays(engine)
    return engine.strays


def test_a_new_tube_has_no_bounds(bench: Ages) -> None:
    tube = bench.engine.tubes[b"b"]
    assert (tube.low_ready, tube.low_delayed, tube.low_reserved, tube.low_buried) == (NO_ID,) * 4
    assert isinstance(tube, Tube)
