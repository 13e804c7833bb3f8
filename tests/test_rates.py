"""Rates: against the single events of random traffic, over idle times, and how the turn keeps them."""

from __future__ import annotations

import random
from math import exp

import pytest

from geventstalk.core.figures import rates
from geventstalk.core.job import Job
from geventstalk.core.meter import EVENTS, NO_RATES, SPANS_S, Rates
from geventstalk.core.operate import Operate
from geventstalk.turn.maintenance import RATES_NS, RATES_SLICE
from geventstalk.turn.tasks import NEXT_TURN
from geventstalk.turn.turn import Turn
from geventstalk.wire.session import Service, Session
from tests.support.bench import Bench
from tests.support.check import check, is_settled
from tests.support.clock import SECOND, ManualClock

EVERY_NS = RATES_NS
NEAR = 0.09
"""An event counts as if it had come at any moment between two looks: e**(5/60) - 1."""


def faded(events_ns: list[int], now_ns: int, span_s: int) -> float:
    """Returns what a rate is by its definition: each event counts for less and less."""
    return sum(exp((ns - now_ns) / SECOND / span_s) / span_s for ns in events_ns)


def test_no_events() -> None:
    assert Rates(5).now([0] * 5, 5) == Rates(5).now([0] * 5, 50 * SECOND) == NO_RATES


def test_a_steady_stream_has_its_rate() -> None:
    """Half of it is known after 0.7 of a span, all of it after some."""
    found = Rates(0)
    for second in range(5, 7200, 5):
        found.settle([3 * second, 0, 0, 0, 7 * second], second * SECOND)
        if second == 40:
            assert found.now([120, 0, 0, 0, 280], second * SECOND)[0] == pytest.approx(3 * (1 - exp(-40 / 60)))
    put_1m, _, delete_1m, _, bury_1m, put_15m, *_, bury_15m = found.now([3 * 7195, 0, 0, 0, 7 * 7195], 7195 * SECOND)
    assert [put_1m, delete_1m, bury_1m] == pytest.approx([3, 0, 7])
    assert [put_15m, bury_15m] == pytest.approx([3, 7], rel=0.001)


def test_events_of_this_very_moment() -> None:
    found = Rates(9).now([6, 0, 0, 0, 0], 9)
    assert found[::5] == pytest.approx([0.1, 6 / 900])
    assert Rates(9).now([6, 0, 0, 0, 0], 10)[::5] == pytest.approx([0.1, 6 / 900])


def test_what_has_not_happened_fades() -> None:
    found = Rates(0)
    found.settle([600, 0, 0, 0, 0], SECOND)
    before = found.now([600, 0, 0, 0, 0], SECOND)
    after = found.now([600, 0, 0, 0, 0], 61 * SECOND)
    assert after[0] == pytest.approx(before[0] / exp(1)) and after[5] == pytest.approx(before[5] / exp(60 / 900))
    found.fade(31 * SECOND)
    assert found.now([600, 0, 0, 0, 0], 61 * SECOND) == pytest.approx(after)


class Events(Bench):
    """Rates are settled as a turn does it. `events` says what has really happened, by tube and event."""

    def __init__(self) -> None:
        super().__init__(b"a", b"b", b"c")
        self.events: dict[tuple[bytes, str], list[int]] = {}
        self.due_ns = 0

    def happens(self, job: Job | None, event: str) -> None:
        assert job is not None
        for name in (b"", self.engine.tube_of(job).name):
            self.events.setdefault((name, event), []).append(self.clock.ns)

    def passes(self, ns: int) -> None:
        """Time, with what a turn's task does on the way."""
        end_ns = self.clock.ns + ns
        while self.engine.active and self.due_ns <= end_ns:
            self.clock.to(self.due_ns)
            assert self.engine.settle_rates(self.clock.ns, 100)
            self.due_ns = self.clock.ns + EVERY_NS
        self.clock.to(end_ns)

    def acts(self, draw: random.Random) -> None:
        engine, worker, now_ns = self.engine, self.worker, self.clock.ns
        if not engine.active:
            self.due_ns = now_ns + EVERY_NS
        what = draw.random()
        if what < 0.5:
            engine.use(worker, draw.choice((b"a", b"a", b"b", b"c")))
            job = engine.open_put(worker, 0, draw.choice((0, 0, 1)), 3, now_ns)
            engine.put(job, b"x\r\n", now_ns)
            self.happens(job, "put")
        elif what < 0.7:
            taken = engine.reserve(worker, now_ns)
            if taken is not None:
                self.happens(taken, "reserve")
        elif what < 0.75 and engine.delayed_count:
            delayed = next(job for job in engine.jobs if job.state == 4)
            engine.reserve_job(worker, delayed.id, now_ns)
            self.happens(delayed, "reserve")
        elif worker.reserved:
            id, held = draw.choice([*worker.reserved.items()])
            if what < 0.95:
                self.happens(held, "delete")
                engine.delete(worker, id, now_ns)
            else:
                self.happens(held, "bury")
                engine.bury(worker, id, 0, now_ns)
        overdue = [job for job in worker.reserved.values() if job.rank <= now_ns]
        for job in overdue:
            self.happens(job, "timeout")
        engine.advance(now_ns, 1000)

    def agrees(self) -> None:
        for name in (b"", b"a", b"b", b"c"):
            of = self.engine.tubes[name] if name else self.engine
            found = iter(rates(of, self.clock.ns))
            for span_s in SPANS_S:
                for event in EVENTS:
                    right = faded(self.events.get((name, event), []), self.clock.ns, span_s)
                    assert next(found) == pytest.approx(right, rel=NEAR, abs=1e-6), (name, event, span_s)


def test_random_traffic(seed: int) -> None:
    """Bursts, a trickle, and hours without anything."""
    draw = random.Random(seed)
    bench = Events()
    for _ in range(60):
        pause_ns = draw.choice((10, SECOND // 100, SECOND // 2, 2 * SECOND))
        for _ in range(draw.randrange(1, 30)):
            bench.acts(draw)
            bench.passes(draw.randrange(2 * pause_ns))
        bench.agrees()
        if draw.random() < 0.1:
            bench.engine.undo()
            bench.agrees()
        check(bench.engine)
        bench.passes(draw.choice((0, 7 * SECOND, 90 * SECOND, 1800 * SECOND)))
        bench.agrees()
    assert all(bench.events[b"", event] for event in EVENTS), "some event never came"


# Bug: The undo forgot the tube's events, and the rates of the server came too late.
def test_what_happened_to_a_tube_that_is_gone_is_settled_after_an_undo() -> None:
    bench = Bench()
    engine, worker = bench.engine, bench.worker
    engine.use(worker, b"lone")
    job = engine.open_put(worker, 0, 0, 1, bench.clock.ns)
    engine.put(job, b"x\r\n", bench.clock.ns)
    engine.use(worker, b"default")
    assert engine.delete(worker, job.id, bench.clock.ns) and b"lone" not in engine.tubes
    engine.undo()
    check(engine)
    bench.clock.pass_ns(EVERY_NS)
    assert engine.active and engine.settle_rates(bench.clock.ns, 100)
    check(engine)
    assert is_settled(engine.rates, [1, 0, 1, 0, 0])


def test_rates_in_statistics() -> None:
    clock = ManualClock()
    engine = Operate(clock.ns)
    session = Session(Service(engine, 100, dict))
    for _ in range(6):
        session.receive(b"put 0 0 1 1\r\nx\r\n", clock.ns)
    session.receive(b"reserve\r\nreserve\r\nbury 1 0\r\ndelete 3\r\n", clock.ns)
    session.take_out()
    session.receive(b"stats-tube default\r\n", clock.ns)
    expected = (
        b"put-rate-1m: 0.100\nreserve-rate-1m: 0.033\ndelete-rate-1m: 0.017\ntimeout-rate-1m: 0.000\n"
        b"bury-rate-1m: 0.017\n"
        b"put-rate-15m: 0.007\nreserve-rate-15m: 0.002\ndelete-rate-15m: 0.001\ntimeout-rate-15m: 0.000\n"
        b"bury-rate-15m: 0.001\n"
    )
    assert session.take_out().endswith(expected + b"\r\n")


# --- the turn


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.engine = Operate(self.clock.ns)
        self.turn = Turn(self.engine, lambda: self.clock.ns, lambda: self.clock.ns, lambda: None, self.fails)
        self.service = Service(self.engine, 100, dict)
        self.task = self.turn.maintenance.keep_rates()

    def fails(self, error: BaseException) -> None:
        raise error

    def happens(self, tube: bytes) -> None:
        session = Session(self.service)
        session.receive(b"use %b\r\nput 0 0 1 1\r\nx\r\n" % tube, self.clock.ns)
        self.turn.end()


def test_an_idle_server_sleeps() -> None:
    rig = Rig()
    wait = next(rig.task)
    assert wait.flag is rig.turn.maintenance.busy and wait.at_ns < 0
    rig.turn.end()
    assert not wait.flag.is_set


def test_a_busy_server_settles_every_five_seconds() -> None:
    rig = Rig()
    next(rig.task)
    rig.happens(b"a")
    assert rig.turn.maintenance.busy.is_set
    wait = next(rig.task)
    assert wait.flag is None and wait.at_ns == rig.clock.ns + EVERY_NS
    rig.clock.to(wait.at_ns)
    wait = next(rig.task)
    assert wait.flag is not None and not wait.flag.is_set
    assert not rig.engine.active
    check(rig.engine)


def test_many_tubes_are_settled_in_slices() -> None:
    rig = Rig()
    next(rig.task)
    count = 3 * RATES_SLICE
    for number in range(count):
        rig.happens(b"t%d" % number)
    wait = next(rig.task)
    rig.clock.to(wait.at_ns)
    turns = 0
    while (wait := next(rig.task)).flag is None:
        assert wait.at_ns == NEXT_TURN
        turns += 1
        rig.happens(b"late")  # which wakes one more tube, for the next time
        check(rig.engine)
    assert turns == count // RATES_SLICE - 1
    assert wait.flag is rig.turn.maintenance.busy and [tube.name for tube in rig.engine.active] == [b"late"]


def test_a_timeout_without_a_turn_is_settled_too() -> None:
    rig = Rig()
    session = Session(rig.service)
    session.receive(b"put 0 0 1 1\r\nx\r\nreserve\r\n", rig.clock.ns)
    rig.turn.end()
    next(rig.task)
    rig.clock.to(next(rig.task).at_ns)
    wait = next(rig.task)
    assert wait.flag is not None and not wait.flag.is_set
    rig.turn.advance()
    assert rig.engine.total_timeouts == 1 and rig.turn.maintenance.busy.is_set
