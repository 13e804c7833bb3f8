"""An operator's changes of jobs, on a manual clock: the states, the clients that are served, the timers that are armed.

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
"""The jobs of a rig, all of priority 10, with a ttr of 60 s."""


class Rig:
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


Action = Callable[[Rig, int], int]

ACTIONS: dict[str, tuple[Action, dict[int, int]]] = {
    "kick": (lambda rig, id: rig.engine.kick_one(id, rig.clock.ns), {DELAYED: READY, BURIED: READY}),
    "release": (lambda rig, id: rig.engine.force_release(id, rig.clock.ns), {RESERVED: READY}),
    "bury": (
        lambda rig, id: rig.engine.force_bury(id, rig.clock.ns),
        {READY: BURIED, RESERVED: BURIED, DELAYED: BURIED},
    ),
    "pri": (lambda rig, id: rig.alter(id, pri=5), {READY: READY, DELAYED: DELAYED, BURIED: BURIED}),
    "delay": (lambda rig, id: rig.alter(id, delay_s=9), {READY: DELAYED, DELAYED: DELAYED}),
    "no delay": (lambda rig, id: rig.alter(id, delay_s=0), {READY: READY, DELAYED: READY}),
    "ttr": (
        lambda rig, id: rig.alter(id, ttr_s=9),
        {READY: READY, RESERVED: RESERVED, DELAYED: DELAYED, BURIED: BURIED},
    ),
    "tube": (lambda rig, id: rig.alter(id, tube=b"t"), {READY: READY, DELAYED: DELAYED, BURIED: BURIED}),
}
"""What is done, and the state that follows from each in which it can be done."""


@pytest.mark.parametrize("state", IDS)
@pytest.mark.parametrize("name", ACTIONS)
def test_what_fits_which_state(name: str, state: int) -> None:
    action, fits = ACTIONS[name]
    rig = Rig()
    id = IDS[state]
    job = rig.job(id)
    before = (job.state, job.rank, job.pri, job.delay_s, job.ttr_s, job.holder, job.tube)
    outcome = action(rig, id)
    check(rig.engine)
    if state in fits:
        assert (outcome, job.state) == (DONE, fits[state])
        assert (job.holder != 0) == (job.state == RESERVED)
    else:
        assert outcome == WRONG_STATE
        assert (job.state, job.rank, job.pri, job.delay_s, job.ttr_s, job.holder, job.tube) == before
    assert action(rig, 99) == NOT_FOUND
    assert rig.engine.work > 0, "also what finds nothing counts"


@pytest.mark.parametrize("state", IDS)
def test_delete_by_force(state: int) -> None:
    rig = Rig()
    assert rig.engine.force_delete(IDS[state], rig.clock.ns) == DONE
    check(rig.engine)
    assert rig.engine.jobs.get(IDS[state]) is None
    assert rig.engine.force_delete(IDS[state], rig.clock.ns) == NOT_FOUND
    assert rig.engine.default.total_deletes == 1


@pytest.mark.parametrize("name", ["release", "bury", "delete"])
def test_a_worker_whose_job_was_taken_finds_no_job(name: str) -> None:
    rig = Rig()
    assert rig.engine.force_delete(2, rig.clock.ns) if name == "delete" else ACTIONS[name][0](rig, 2) == DONE
    for command in (b"release 2 0 0", b"bury 2 0", b"touch 2"):
        assert rig.say(rig.worker, command + b"\r\n") == b"NOT_FOUND\r\n"
    rig.pass_time(61)
    assert rig.engine.total_timeouts == 0
    tally = None if name == "delete" else rig.job(2).tally
    assert name == "delete" or (
        tally is not None and (tally.releases, tally.buries) == (name != "bury", name == "bury")
    )


def test_a_job_is_taken_from_a_client_that_is_being_forgotten() -> None:
    rig = Rig()
    rig.say(rig.worker, b"put 0 0 60 1\r\ne\r\nreserve\r\n")
    rig.engine.leave(rig.worker, rig.clock.ns, 1)
    (held,) = [id for id in (2, 5) if rig.job(id).state == RESERVED]
    assert rig.engine.force_bury(held, rig.clock.ns) == DONE
    check(rig.engine)
    while not rig.engine.leave(rig.worker, rig.clock.ns, 1):
        check(rig.engine)
    assert rig.job(held).state == BURIED


def test_a_job_released_by_force_goes_to_a_waiting_client() -> None:
    rig = Rig()
    rig.engine.pause(b"default", 9, rig.clock.ns)
    other = Session(rig.service)
    rig.say(other, b"reserve\r\n")
    assert rig.engine.force_release(2, rig.clock.ns) == DONE
    assert not other.out, "the tube is paused"
    rig.engine.pause(b"default", 0, rig.clock.ns)
    assert other.take_out() == b"RESERVED 2 1\r\nb\r\n"


def test_a_moved_job_goes_to_a_waiting_client_and_its_old_tube_ends() -> None:
    rig = Rig()
    rig.say(rig.worker, b"use old\r\nput 7 0 60 1\r\ne\r\nuse default\r\n")
    other = rig.waiter(b"t")
    assert rig.alter(5, tube=b"t") == DONE
    assert other.take_out() == b"RESERVED 5 1\r\ne\r\n"
    assert b"old" not in rig.engine.tubes
    assert rig.engine.tubes[b"t"].reserved == rig.engine.tubes[b"t"].jobs == 1
    assert rig.job(5).pri == 7


def test_a_job_that_is_moved_to_a_paused_tube_waits_there() -> None:
    rig = Rig()
    other = rig.waiter(b"t")
    rig.engine.pause(b"t", 9, rig.clock.ns)
    assert rig.alter(1, tube=b"t") == DONE
    assert not other.out
    rig.pass_time(9)
    assert other.take_out() == b"RESERVED 1 1\r\na\r\n"


def test_a_moved_delay_ends_in_the_new_tube() -> None:
    rig = Rig()
    other = rig.waiter(b"t")
    assert rig.alter(3, tube=b"t") == DONE
    rig.pass_time(4.9)
    assert not other.out
    rig.pass_time(0.1)
    assert other.take_out() == b"RESERVED 3 1\r\nc\r\n"


def test_the_order_of_burying_stays_with_a_move() -> None:
    rig = Rig()
    rig.engine.force_bury(2, rig.clock.ns)
    rig.engine.force_bury(1, rig.clock.ns)
    for id in (1, 4, 2):
        assert rig.alter(id, pri=id, tube=b"t") == DONE
    rig.say(rig.worker, b"use t\r\n")
    found = []
    for _ in range(3):
        found.append(int(rig.say(rig.worker, b"peek-buried\r\n").split()[1]))
        assert rig.engine.kick_one(found[-1], rig.clock.ns) == DONE
    assert found == [4, 2, 1]


def test_a_delay_begins_now() -> None:
    rig = Rig()
    assert rig.alter(1, delay_s=3) == rig.alter(3, delay_s=4) == DONE
    rig.pass_time(3)
    assert (rig.job(1).state, rig.job(3).state) == (READY, DELAYED)
    rig.pass_time(1)
    assert (rig.job(3).state, rig.job(3).delay_s) == (READY, 4)


def test_another_priority_is_another_place() -> None:
    rig = Rig()
    rig.engine.force_release(2, rig.clock.ns)
    rig.alter(2, pri=2000)
    assert (rig.engine.urgent_count, rig.engine.default.urgent) == (1, 1)
    rig.alter(1, pri=3000)
    assert (rig.engine.urgent_count, rig.engine.default.urgent) == (0, 0)
    assert rig.say(rig.worker, b"reserve\r\n").startswith(b"RESERVED 2 ")


@pytest.mark.parametrize("ttr_s, left_s", [(9, 9), (0, 1), (60, 60)])
def test_a_ttr_begins_anew_for_a_worker(ttr_s: int, left_s: int) -> None:
    rig = Rig()
    rig.pass_time(50)
    assert rig.alter(2, ttr_s=ttr_s) == DONE
    assert rig.job(2).ttr_s == left_s
    rig.pass_time(left_s - 0.1)
    assert rig.job(2).state == RESERVED
    rig.pass_time(0.1)
    assert rig.job(2).state == READY and rig.engine.total_timeouts == 1


def test_a_worker_that_waits_hears_of_a_shorter_ttr_in_time() -> None:
    rig = Rig()
    rig.say(rig.worker, b"watch t\r\nignore default\r\nreserve\r\n")
    assert rig.alter(2, ttr_s=5) == DONE
    rig.pass_time(3.9)
    assert not rig.worker.out
    rig.pass_time(0.1)
    assert rig.worker.take_out() == b"DEADLINE_SOON\r\n"


def test_all_at_once_or_nothing() -> None:
    rig = Rig()
    assert rig.alter(1, pri=3, delay_s=4, ttr_s=5, tube=b"t") == DONE
    job = rig.job(1)
    assert (job.pri, job.delay_s, job.ttr_s, rig.engine.tube_of(job).name) == (3, 4, 5, b"t")
    assert rig.alter(2, ttr_s=5, tube=b"t") == WRONG_STATE
    assert rig.alter(4, pri=5, delay_s=0) == WRONG_STATE
    assert (rig.job(2).ttr_s, rig.job(4).pri) == (60, 10)


# The ledger

PARTS = 3


class Slow(Ledger):
    """Takes a large job in parts, and refuses as it is told. `kept` is what it has of each job."""

    def __init__(self) -> None:
        self.room = True
        self.large_bytes = 100
        self.parts: dict[int, int] = {}
        self.waits = 0  # this often it says that it has not begun
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
def rig(ledger: Slow) -> Rig:
    made = Rig(ledger)
    ledger.kept.clear()
    return made


def test_what_the_ledger_hears(rig: Rig, ledger: Slow) -> None:
    rig.alter(1, pri=3)
    rig.alter(1, delay_s=4)
    rig.alter(1, ttr_s=5, tube=b"t")
    rig.alter(1, tube=b"t", ttr_s=5)
    rig.alter(2, ttr_s=7)
    rig.alter(2, ttr_s=7)
    rig.engine.force_release(2, rig.clock.ns)
    rig.engine.force_bury(2, rig.clock.ns)
    assert ledger.kept == [
        ("change", 1, b"", (READY, 3, 0, 60)),
        ("change", 1, b"", (DELAYED, 3, 4, 60)),
        ("rewrite", 1, b"t", (DELAYED, 3, 4, 5)),
        ("change", 1, b"", (DELAYED, 3, 4, 5)),
        ("rewrite", 2, b"default", (RESERVED, 0, 0, 7)),
        ("change", 2, b"", (READY, 0, 0, 7)),
        ("change", 2, b"", (BURIED, 0, 0, 7)),
    ]


def test_without_room_a_job_stays_as_it_is(rig: Rig, ledger: Slow) -> None:
    ledger.room = False
    assert rig.alter(1, pri=3, tube=b"t") == rig.alter(1, ttr_s=3) == OUT_OF_MEMORY
    assert (rig.job(1).pri, b"t" in rig.engine.tubes, ledger.kept) == (10, False, [])
    assert rig.alter(1, pri=3, delay_s=3) == DONE, "a change finds room"


def large(rig: Rig) -> Job:
    rig.say(rig.worker, b"put 10 0 60 100\r\n" + b"x" * 100 + b"\r\n")
    return rig.job(5)


def test_a_large_job_is_as_it_was_until_the_ledger_has_it(rig: Rig, ledger: Slow) -> None:
    job = large(rig)
    for _ in range(PARTS - 1):
        assert rig.alter(5, delay_s=9, tube=b"t") == UNFINISHED
        assert job.state == READY and b"t" not in rig.engine.tubes
    rig.engine.force_bury(5, rig.clock.ns)
    assert rig.alter(5, delay_s=9, tube=b"t") == WRONG_STATE
    assert not ledger.parts, "what is no longer wanted is dropped"
    rig.engine.kick_one(5, rig.clock.ns)
    for _ in range(PARTS - 1):
        assert rig.alter(5, delay_s=9, tube=b"t") == UNFINISHED
    rig.clock.pass_ns(SECOND)
    assert rig.alter(5, delay_s=9, tube=b"t") == DONE
    assert job.rank == rig.clock.ns + 9 * SECOND
    assert rig.alter(5, ttr_s=9) == UNFINISHED
    rig.engine.abandon_alter(5)
    assert not ledger.parts
    rig.engine.abandon_alter(99)


# Operations


def run(operation: Put | Changes, rig: Rig) -> bool:
    rig.engine.work = 0
    finished = operation.run(rig.clock.ns)
    check(rig.engine)
    return finished


def test_an_operator_puts(rig: Rig, ledger: Slow) -> None:
    other = rig.waiter(b"t")
    put = Put(rig.engine, rig.service, b"t", b"hello", 3, 0, 0)
    assert run(put, rig) and put.outcome == INSERTED and put.job is not None
    assert other.take_out() == b"RESERVED 5 5\r\nhello\r\n"
    assert ledger.kept == [("put", 5, b"t", (READY, 3, 0, 1))]
    late = Put(rig.engine, rig.service, b"t", b"", 3, 2, 9)
    assert run(late, rig) and rig.job(6).state == DELAYED
    assert rig.engine.producer_count == 1, "an operator is no client"


@pytest.mark.parametrize("size", [10, LARGE_PUT])
@pytest.mark.parametrize("why", ["draining", "room", "memory", "size"])
def test_a_put_of_an_operator_is_refused_as_that_of_a_client(rig: Rig, ledger: Slow, why: str, size: int) -> None:
    if why == "draining":
        rig.engine.draining = True
    elif why == "room":
        ledger.room = False
    elif why == "memory":
        rig.service.watch_memory(lambda: False)
        rig.service.tell = lambda text, error: None
    else:
        rig.service.max_job_bytes = size - 1
    put = Put(rig.engine, rig.service, b"t", b"x" * size, 3, 0, 9)
    assert run(put, rig)
    assert put.outcome == {"draining": DRAINING, "size": TOO_BIG}.get(why, OUT_OF_MEMORY)
    assert b"t" not in rig.engine.tubes and not ledger.kept and len(rig.engine.jobs) == 4


def test_a_large_put_of_an_operator_goes_in_slices(rig: Rig, ledger: Slow) -> None:
    ledger.waits = 1
    put = Put(rig.engine, rig.service, b"t", b"x" * LARGE_PUT, 3, 0, 9)
    assert (run(put, rig), put.begun) == (False, False), "the ledger is at another job"
    assert (run(put, rig), put.begun) == (False, True)
    assert rig.engine.work > MOVE_SLICE // 3
    assert rig.engine.jobs.get(5) is None
    assert not run(put, rig)
    assert (run(put, rig), put.begun, put.outcome) == (True, False, INSERTED)
    ledger.room = True
    again = Put(rig.engine, rig.service, b"u", b"x" * LARGE_PUT, 3, 0, 9)
    assert not run(again, rig)
    ledger.room = False
    assert run(again, rig) and again.outcome == OUT_OF_MEMORY and b"u" not in rig.engine.tubes


def test_many_changes_go_in_slices(rig: Rig, ledger: Slow) -> None:
    rig.say(rig.worker, b"put 10 0 60 1\r\nx\r\n" * 100)
    rig.say(rig.worker, b"")
    while rig.worker.unfinished:
        rig.worker.run(rig.clock.ns)
    ids = list(range(rig.engine.next_id + 900))
    operation = Changes(rig.engine, ids, rig.engine.force_bury)
    slices = 1
    while not run(operation, rig):
        assert operation.next == slices * MOVE_SLICE
        slices += 1
    assert slices == -(-len(ids) // MOVE_SLICE)
    assert operation.counts == {DONE: 103, WRONG_STATE: 1, NOT_FOUND: 901}


def test_a_job_that_is_written_anew_counts_by_its_size(rig: Rig, ledger: Slow) -> None:
    ledger.large_bytes = 1 << 30
    for _ in range(4):
        assert run(Put(rig.engine, rig.service, b"default", b"x" * (1 << 18), 3, 0, 9), rig)
    ids = [5, 6, 7, 8]
    operation = Changes(rig.engine, ids, lambda id, now_ns: rig.engine.alter(id, KEEP, KEEP, KEEP, b"t", now_ns))
    for slices in (1, 2, 3, 4):
        assert run(operation, rig) == (slices == 4) and operation.next == slices
    assert operation.counts == {DONE: 4}
    small = Changes(rig.engine, ids, lambda id, now_ns: rig.engine.alter(1, KEEP, KEEP, id, b"", now_ns))
    assert run(small, rig)
    assert rig.engine.work == 2 * len(ids)


def test_while_changes_are_held_only_a_large_job_goes_on(rig: Rig, ledger: Slow) -> None:
    large(rig)
    operation = Changes(rig.engine, [5, 1], lambda id, now_ns: rig.engine.alter(id, KEEP, KEEP, 9, b"", now_ns))
    ledger.waits = 1
    assert (run(operation, rig), operation.begun) == (False, False)
    assert (run(operation, rig), operation.begun) == (False, True)
    rig.engine.held = True
    assert (run(operation, rig), operation.begun) == (False, True)
    assert (run(operation, rig), operation.begun, operation.next) == (False, False, 1)
    assert (run(operation, rig), operation.begun, operation.next) == (False, False, 1)
    rig.engine.held = False
    assert run(operation, rig) and operation.counts == {DONE: 2}


def test_cancelled_changes_leave_nothing_half_written(rig: Rig, ledger: Slow) -> None:
    large(rig)
    operation = Changes(rig.engine, [1, 5, 3], lambda id, now_ns: rig.engine.alter(id, KEEP, KEEP, 9, b"", now_ns))
    assert (run(operation, rig), operation.begun, operation.next) == (False, True, 1)
    operation.cancelled = True
    assert (run(operation, rig), operation.begun, ledger.parts) == (True, False, {})
    assert operation.counts == {DONE: 1} and rig.job(3).ttr_s == 60
