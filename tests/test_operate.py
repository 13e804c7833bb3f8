"""What an operator does to jobs, on a manual clock: the states, who is served, which timers are armed.

The random conversations of test_engine_model.py compare all of it with a model; here stands what a case looks like.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from geventstalk.core.engine import DRAINING, INSERTED, OUT_OF_MEMORY, TOO_BIG, UNFINISHED
from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, Job, Ledger, held_body
from geventstalk.core.operate import DONE, KEEP, NOT_FOUND, WRONG_STATE, Operate
from geventstalk.turn.operations import Changes, Put
from geventstalk.wire.commands import LARGE_PUT, MOVE_SLICE
from geventstalk.wire.session import Service, Session
from tests.support.check import check
from tests.support.clock import SECOND, ManualClock

IDS = {READY: 1, RESERVED: 2, DELAYED: 3, BURIED: 4}
"""The jobs of a house, all of priority 10, with a ttr of 60 s."""


class House:
    """An engine with a worker that holds a job, and a job in each other state, all in `default`."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.clock = ManualClock()
        self.engine = Operate(self.clock.ns, ledger)
        self.service = Service(self.engine, 1 << 22, dict)
        self.worker = Session(self.service)
        self.say(self.worker, b"put 1 0 60 1\r\na\r\nput 0 0 60 1\r\nb\r\nput 10 5 60 1\r\nc\r\nput 0 0 60 1\r\nd\r\n")
        self.say(self.worker, b"reserve-job 4\r\nbury 4 10\r\nreserve-job 2\r\n")
        self.engine.alter(1, 10, KEEP, KEEP, b"", self.clock.ns)
        check(self.engine)

    def say(self, session: Session, data: bytes) -> bytes:
        session.receive(data, self.clock.ns)
        return session.take_out()

    def waiter(self, tube: bytes) -> Session:
        session = Session(self.service)
        assert self.say(session, b"watch %b\r\nignore default\r\nreserve\r\n" % tube).endswith(b"WATCHING 1\r\n")
        return session

    def job(self, id: int) -> Job:
        job = self.engine.jobs.get(id)
        assert job is not None
        return job

    def pass_time(self, seconds: float) -> None:
        self.clock.pass_ns(int(seconds * SECOND))
        while not self.engine.advance(self.clock.ns, 100):
            pass
        check(self.engine)

    def alter(self, id: int, pri: int = KEEP, delay_s: int = KEEP, ttr_s: int = KEEP, tube: bytes = b"") -> int:
        outcome = self.engine.alter(id, pri, delay_s, ttr_s, tube, self.clock.ns)
        check(self.engine)
        return outcome


Action = Callable[[House, int], int]

ACTIONS: dict[str, tuple[Action, dict[int, int]]] = {
    "kick": (lambda house, id: house.engine.kick_one(id, house.clock.ns), {DELAYED: READY, BURIED: READY}),
    "release": (lambda house, id: house.engine.force_release(id, house.clock.ns), {RESERVED: READY}),
    "bury": (
        lambda house, id: house.engine.force_bury(id, house.clock.ns),
        {READY: BURIED, RESERVED: BURIED, DELAYED: BURIED},
    ),
    "pri": (lambda house, id: house.alter(id, pri=5), {READY: READY, DELAYED: DELAYED, BURIED: BURIED}),
    "delay": (lambda house, id: house.alter(id, delay_s=9), {READY: DELAYED, DELAYED: DELAYED}),
    "no delay": (lambda house, id: house.alter(id, delay_s=0), {READY: READY, DELAYED: READY}),
    "ttr": (
        lambda house, id: house.alter(id, ttr_s=9),
        {READY: READY, RESERVED: RESERVED, DELAYED: DELAYED, BURIED: BURIED},
    ),
    "tube": (lambda house, id: house.alter(id, tube=b"t"), {READY: READY, DELAYED: DELAYED, BURIED: BURIED}),
}
"""What is done, and the state that follows from each in which it can be done."""


@pytest.mark.parametrize("state", IDS)
@pytest.mark.parametrize("name", ACTIONS)
def test_what_fits_which_state(name: str, state: int) -> None:
    action, fits = ACTIONS[name]
    house = House()
    id = IDS[state]
    job = house.job(id)
    before = (job.state, job.rank, job.pri, job.delay_s, job.ttr_s, job.holder, job.tube)
    outcome = action(house, id)
    check(house.engine)
    if state in fits:
        assert (outcome, job.state) == (DONE, fits[state])
        assert (job.holder != 0) == (job.state == RESERVED)
    else:
        assert outcome == WRONG_STATE
        assert (job.state, job.rank, job.pri, job.delay_s, job.ttr_s, job.holder, job.tube) == before
    assert action(house, 99) == NOT_FOUND
    assert house.engine.work > 0, "also what finds nothing counts"


@pytest.mark.parametrize("state", IDS)
def test_delete_by_force(state: int) -> None:
    house = House()
    assert house.engine.force_delete(IDS[state], house.clock.ns) == DONE
    check(house.engine)
    assert house.engine.jobs.get(IDS[state]) is None
    assert house.engine.force_delete(IDS[state], house.clock.ns) == NOT_FOUND
    assert house.engine.default.total_deletes == 1


@pytest.mark.parametrize("name", ["release", "bury", "delete"])
def test_a_worker_whose_job_was_taken_finds_no_job(name: str) -> None:
    house = House()
    assert house.engine.force_delete(2, house.clock.ns) if name == "delete" else ACTIONS[name][0](house, 2) == DONE
    for command in (b"release 2 0 0", b"bury 2 0", b"touch 2"):
        assert house.say(house.worker, command + b"\r\n") == b"NOT_FOUND\r\n"
    house.pass_time(61)
    assert house.engine.total_timeouts == 0
    tally = None if name == "delete" else house.job(2).tally
    assert name == "delete" or (
        tally is not None and (tally.releases, tally.buries) == (name != "bury", name == "bury")
    )


def test_a_job_is_taken_from_a_client_that_is_being_forgotten() -> None:
    house = House()
    house.say(house.worker, b"put 0 0 60 1\r\ne\r\nreserve\r\n")
    house.engine.leave(house.worker, house.clock.ns, 1)
    (held,) = [id for id in (2, 5) if house.job(id).state == RESERVED]
    assert house.engine.force_bury(held, house.clock.ns) == DONE
    check(house.engine)
    while not house.engine.leave(house.worker, house.clock.ns, 1):
        check(house.engine)
    assert house.job(held).state == BURIED


def test_released_by_force_a_job_goes_to_who_waits() -> None:
    house = House()
    house.engine.pause(b"default", 9, house.clock.ns)
    other = Session(house.service)
    house.say(other, b"reserve\r\n")
    assert house.engine.force_release(2, house.clock.ns) == DONE
    assert not other.out, "the tube is paused"
    house.engine.pause(b"default", 0, house.clock.ns)
    assert other.take_out() == b"RESERVED 2 1\r\nb\r\n"


def test_a_moved_job_goes_to_who_waits_and_its_old_tube_ends() -> None:
    house = House()
    house.say(house.worker, b"use old\r\nput 7 0 60 1\r\ne\r\nuse default\r\n")
    other = house.waiter(b"t")
    assert house.alter(5, tube=b"t") == DONE
    assert other.take_out() == b"RESERVED 5 1\r\ne\r\n"
    assert b"old" not in house.engine.tubes
    assert house.engine.tubes[b"t"].reserved == house.engine.tubes[b"t"].jobs == 1
    assert house.job(5).pri == 7


def test_a_job_that_is_moved_to_a_paused_tube_waits_there() -> None:
    house = House()
    other = house.waiter(b"t")
    house.engine.pause(b"t", 9, house.clock.ns)
    assert house.alter(1, tube=b"t") == DONE
    assert not other.out
    house.pass_time(9)
    assert other.take_out() == b"RESERVED 1 1\r\na\r\n"


def test_a_moved_delay_ends_in_the_new_tube() -> None:
    house = House()
    other = house.waiter(b"t")
    assert house.alter(3, tube=b"t") == DONE
    house.pass_time(4.9)
    assert not other.out
    house.pass_time(0.1)
    assert other.take_out() == b"RESERVED 3 1\r\nc\r\n"


def test_the_order_of_burying_stays_with_a_move() -> None:
    house = House()
    house.engine.force_bury(2, house.clock.ns)
    house.engine.force_bury(1, house.clock.ns)
    for id in (1, 4, 2):
        assert house.alter(id, pri=id, tube=b"t") == DONE
    house.say(house.worker, b"use t\r\n")
    found = []
    for _ in range(3):
        found.append(int(house.say(house.worker, b"peek-buried\r\n").split()[1]))
        assert house.engine.kick_one(found[-1], house.clock.ns) == DONE
    assert found == [4, 2, 1]


def test_a_delay_begins_now() -> None:
    house = House()
    assert house.alter(1, delay_s=3) == house.alter(3, delay_s=4) == DONE
    house.pass_time(3)
    assert (house.job(1).state, house.job(3).state) == (READY, DELAYED)
    house.pass_time(1)
    assert (house.job(3).state, house.job(3).delay_s) == (READY, 4)


def test_another_priority_is_another_place() -> None:
    house = House()
    house.engine.force_release(2, house.clock.ns)
    house.alter(2, pri=2000)
    assert (house.engine.urgent_count, house.engine.default.urgent) == (1, 1)
    house.alter(1, pri=3000)
    assert (house.engine.urgent_count, house.engine.default.urgent) == (0, 0)
    assert house.say(house.worker, b"reserve\r\n").startswith(b"RESERVED 2 ")


@pytest.mark.parametrize("ttr_s, left_s", [(9, 9), (0, 1), (60, 60)])
def test_a_ttr_begins_anew_for_a_worker(ttr_s: int, left_s: int) -> None:
    house = House()
    house.pass_time(50)
    assert house.alter(2, ttr_s=ttr_s) == DONE
    assert house.job(2).ttr_s == left_s
    house.pass_time(left_s - 0.1)
    assert house.job(2).state == RESERVED
    house.pass_time(0.1)
    assert house.job(2).state == READY and house.engine.total_timeouts == 1


def test_a_worker_that_waits_hears_of_a_shorter_ttr_in_time() -> None:
    house = House()
    house.say(house.worker, b"watch t\r\nignore default\r\nreserve\r\n")
    assert house.alter(2, ttr_s=5) == DONE
    house.pass_time(3.9)
    assert not house.worker.out
    house.pass_time(0.1)
    assert house.worker.take_out() == b"DEADLINE_SOON\r\n"


def test_all_at_once_or_nothing() -> None:
    house = House()
    assert house.alter(1, pri=3, delay_s=4, ttr_s=5, tube=b"t") == DONE
    job = house.job(1)
    assert (job.pri, job.delay_s, job.ttr_s, house.engine.tube_of(job).name) == (3, 4, 5, b"t")
    assert house.alter(2, ttr_s=5, tube=b"t") == WRONG_STATE
    assert house.alter(4, pri=5, delay_s=0) == WRONG_STATE
    assert (house.job(2).ttr_s, house.job(4).pri) == (60, 10)


# The ledger

PARTS = 3


class Slow(Ledger):
    """Takes a large job in parts, and refuses as it is told. `kept` is what it has of each job."""

    def __init__(self) -> None:
        self.room = True
        self.large_bytes = 100
        self.parts: dict[int, int] = {}
        self.waits = 0  # so often it says that it has not begun
        self.kept: list[tuple[str, int, bytes, tuple[int, ...]]] = []

    def admits(self, body_bytes: int, tube_name: bytes) -> bool:
        return self.room

    def put(self, job: Job, tube_name: bytes) -> None:
        self.parts.pop(job.id, None)
        self._keep("put", job, tube_name)

    def change(self, job: Job) -> None:
        self._keep("change", job, b"")

    def rewrite(self, job: Job, tube_name: bytes) -> None:
        self.parts.pop(job.id, None)
        self._keep("rewrite", job, tube_name)

    def _keep(self, what: str, job: Job, name: bytes) -> None:
        self.kept.append((what, job.id, name, (job.state, job.pri, job.delay_s, job.ttr_s)))

    def prepare(self, job: Job, tube_name: bytes) -> bool | None:
        return self._take(job)

    def prepare_rewrite(self, job: Job, tube_name: bytes, ttr_s: int) -> bool | None:
        if len(held_body(job)) < self.large_bytes:
            return True if self.room else None
        return self._take(job)

    def _take(self, job: Job) -> bool | None:
        if not self.room:
            return None
        if self.waits:
            self.waits -= 1
            return False
        self.parts[job.id] = self.parts.get(job.id, 0) + 1
        return self.parts[job.id] >= PARTS

    def unprepare(self, job: Job) -> None:
        self.parts.pop(job.id, None)

    abandon_rewrite = unprepare

    def has_begun(self, job: Job) -> bool:
        return job.id in self.parts


@pytest.fixture
def ledger() -> Slow:
    return Slow()


@pytest.fixture
def house(ledger: Slow) -> House:
    made = House(ledger)
    ledger.kept.clear()
    return made


def test_what_the_ledger_hears(house: House, ledger: Slow) -> None:
    house.alter(1, pri=3)
    house.alter(1, delay_s=4)
    house.alter(1, ttr_s=5, tube=b"t")
    house.alter(1, tube=b"t", ttr_s=5)
    house.alter(2, ttr_s=7)
    house.alter(2, ttr_s=7)
    house.engine.force_release(2, house.clock.ns)
    house.engine.force_bury(2, house.clock.ns)
    assert ledger.kept == [
        ("change", 1, b"", (READY, 3, 0, 60)),
        ("change", 1, b"", (DELAYED, 3, 4, 60)),
        ("rewrite", 1, b"t", (DELAYED, 3, 4, 5)),
        ("change", 1, b"", (DELAYED, 3, 4, 5)),
        ("rewrite", 2, b"default", (RESERVED, 0, 0, 7)),
        ("change", 2, b"", (READY, 0, 0, 7)),
        ("change", 2, b"", (BURIED, 0, 0, 7)),
    ]


def test_without_room_a_job_stays_as_it_is(house: House, ledger: Slow) -> None:
    ledger.room = False
    assert house.alter(1, pri=3, tube=b"t") == house.alter(1, ttr_s=3) == OUT_OF_MEMORY
    assert (house.job(1).pri, b"t" in house.engine.tubes, ledger.kept) == (10, False, [])
    assert house.alter(1, pri=3, delay_s=3) == DONE, "a change finds room"


def large(house: House) -> Job:
    house.say(house.worker, b"put 10 0 60 100\r\n" + b"x" * 100 + b"\r\n")
    return house.job(5)


def test_a_large_job_is_as_it_was_until_the_ledger_has_it(house: House, ledger: Slow) -> None:
    job = large(house)
    for _ in range(PARTS - 1):
        assert house.alter(5, delay_s=9, tube=b"t") == UNFINISHED
        assert job.state == READY and b"t" not in house.engine.tubes
    house.engine.force_bury(5, house.clock.ns)
    assert house.alter(5, delay_s=9, tube=b"t") == WRONG_STATE
    assert not ledger.parts, "what is no longer wanted is dropped"
    house.engine.kick_one(5, house.clock.ns)
    for _ in range(PARTS - 1):
        assert house.alter(5, delay_s=9, tube=b"t") == UNFINISHED
    house.clock.pass_ns(SECOND)
    assert house.alter(5, delay_s=9, tube=b"t") == DONE
    assert job.rank == house.clock.ns + 9 * SECOND
    assert house.alter(5, ttr_s=9) == UNFINISHED
    house.engine.abandon_alter(5)
    assert not ledger.parts
    house.engine.abandon_alter(99)


# Errands


def run(errand: Put | Changes, house: House) -> bool:
    house.engine.work = 0
    finished = errand.run(house.clock.ns)
    check(house.engine)
    return finished


def test_an_operator_puts(house: House, ledger: Slow) -> None:
    other = house.waiter(b"t")
    put = Put(house.engine, house.service, b"t", b"hello", 3, 0, 0)
    assert run(put, house) and put.outcome == INSERTED and put.job is not None
    assert other.take_out() == b"RESERVED 5 5\r\nhello\r\n"
    assert ledger.kept == [("put", 5, b"t", (READY, 3, 0, 1))]
    late = Put(house.engine, house.service, b"t", b"", 3, 2, 9)
    assert run(late, house) and house.job(6).state == DELAYED
    assert house.engine.producer_count == 1, "an operator is no client"


@pytest.mark.parametrize("size", [10, LARGE_PUT])
@pytest.mark.parametrize("why", ["draining", "room", "memory", "size"])
def test_a_put_of_an_operator_is_refused_as_that_of_a_client(house: House, ledger: Slow, why: str, size: int) -> None:
    if why == "draining":
        house.engine.draining = True
    elif why == "room":
        ledger.room = False
    elif why == "memory":
        house.service.watch_memory(lambda: False)
        house.service.tell = lambda text, error: None
    else:
        house.service.max_job_bytes = size - 1
    put = Put(house.engine, house.service, b"t", b"x" * size, 3, 0, 9)
    assert run(put, house)
    assert put.outcome == {"draining": DRAINING, "size": TOO_BIG}.get(why, OUT_OF_MEMORY)
    assert b"t" not in house.engine.tubes and not ledger.kept and len(house.engine.jobs) == 4


def test_a_large_put_of_an_operator_goes_in_slices(house: House, ledger: Slow) -> None:
    ledger.waits = 1
    put = Put(house.engine, house.service, b"t", b"x" * LARGE_PUT, 3, 0, 9)
    assert (run(put, house), put.begun) == (False, False), "the ledger is at another job"
    assert (run(put, house), put.begun) == (False, True)
    assert house.engine.work > MOVE_SLICE // 3
    assert house.engine.jobs.get(5) is None
    assert not run(put, house)
    assert (run(put, house), put.begun, put.outcome) == (True, False, INSERTED)
    ledger.room = True
    again = Put(house.engine, house.service, b"u", b"x" * LARGE_PUT, 3, 0, 9)
    assert not run(again, house)
    ledger.room = False
    assert run(again, house) and again.outcome == OUT_OF_MEMORY and b"u" not in house.engine.tubes


def test_many_changes_go_in_slices(house: House, ledger: Slow) -> None:
    house.say(house.worker, b"put 10 0 60 1\r\nx\r\n" * 100)
    house.say(house.worker, b"")
    while house.worker.unfinished:
        house.worker.run(house.clock.ns)
    ids = list(range(house.engine.next_id + 900))
    errand = Changes(house.engine, ids, house.engine.force_bury)
    slices = 1
    while not run(errand, house):
        assert errand.next == slices * MOVE_SLICE
        slices += 1
    assert slices == -(-len(ids) // MOVE_SLICE)
    assert errand.counts == {DONE: 103, WRONG_STATE: 1, NOT_FOUND: 901}


def test_a_job_that_is_written_anew_counts_by_its_size(house: House, ledger: Slow) -> None:
    ledger.large_bytes = 1 << 30
    for _ in range(4):
        assert run(Put(house.engine, house.service, b"default", b"x" * (1 << 18), 3, 0, 9), house)
    ids = [5, 6, 7, 8]
    errand = Changes(house.engine, ids, lambda id, now_ns: house.engine.alter(id, KEEP, KEEP, KEEP, b"t", now_ns))
    for slices in (1, 2, 3, 4):
        assert run(errand, house) == (slices == 4) and errand.next == slices
    assert errand.counts == {DONE: 4}
    small = Changes(house.engine, ids, lambda id, now_ns: house.engine.alter(1, KEEP, KEEP, id, b"", now_ns))
    assert run(small, house)
    assert house.engine.work == 2 * len(ids)


def test_while_changes_are_held_only_a_large_job_goes_on(house: House, ledger: Slow) -> None:
    large(house)
    errand = Changes(house.engine, [5, 1], lambda id, now_ns: house.engine.alter(id, KEEP, KEEP, 9, b"", now_ns))
    ledger.waits = 1
    assert (run(errand, house), errand.begun) == (False, False)
    assert (run(errand, house), errand.begun) == (False, True)
    house.engine.held = True
    assert (run(errand, house), errand.begun) == (False, True)
    assert (run(errand, house), errand.begun, errand.next) == (False, False, 1)
    assert (run(errand, house), errand.begun, errand.next) == (False, False, 1)
    house.engine.held = False
    assert run(errand, house) and errand.counts == {DONE: 2}


def test_cancelled_changes_leave_nothing_half_written(house: House, ledger: Slow) -> None:
    large(house)
    errand = Changes(house.engine, [1, 5, 3], lambda id, now_ns: house.engine.alter(id, KEEP, KEEP, 9, b"", now_ns))
    assert (run(errand, house), errand.begun, errand.next) == (False, True, 1)
    errand.cancelled = True
    assert (run(errand, house), errand.begun, ledger.parts) == (True, False, {})
    assert errand.counts == {DONE: 1} and house.job(3).ttr_s == 60
