"""The timer wheel: nothing fires early, nothing is forgotten, and the cost does not grow with the number of timers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geventstalk._build import BUILD
from geventstalk.core import timerwheel
from geventstalk.core.timerwheel import NEVER, TICK_BITS, Timer, TimerWheel
from tests.support.clock import BOOT_NS, SECOND
from tests.support.tracing import frames_traced

TICK = 1 << TICK_BITS


def is_armed(timer: Timer) -> bool:
    """Asked anew each time; a type checker takes the property for a constant."""
    return timer.armed


class Wheel:
    """A wheel whose check() runs after each change."""

    def __init__(self, now_ns: int = BOOT_NS) -> None:
        self._wheel = TimerWheel(now_ns)
        self.now_ns = now_ns
        self.add = self._wheel.add
        self.cancel = self._wheel.cancel
        self.next_ns = self._wheel.next_ns
        self.pop_due = self._wheel.pop_due
        self.check = self._wheel.check

    def __len__(self) -> int:
        return len(self._wheel)

    def arm(self, deadline_ns: int) -> Timer:
        timer = Timer()
        self.add(timer, deadline_ns)
        self.check()
        return timer

    def advance(self, now_ns: int) -> list[Timer]:
        """Everything that is due then, each of it proved to be due."""
        assert now_ns >= self.now_ns
        self.now_ns = now_ns
        fired = []
        while (timer := self.pop_due(now_ns)) is not None:
            assert not timer.armed
            assert timer.deadline_ns <= now_ns, "fired early"
            fired.append(timer)
            self.check()
        self.check()
        return fired

    def run_to_the_end(self) -> Iterator[tuple[int, Timer]]:
        """Follows next_ns() as a server does; gives every moment and what fired then."""
        idle = 0
        while (next_ns := self.next_ns()) != NEVER:
            fired = self.advance(max(self.now_ns, next_ns))
            idle = 0 if fired else idle + 1
            assert idle < 10, "it asks to be called and has nothing to do"
            for timer in fired:
                yield self.now_ns, timer


def test_empty() -> None:
    wheel = Wheel()
    assert len(wheel) == 0
    assert wheel.next_ns() == NEVER
    assert wheel.advance(BOOT_NS + 1000 * SECOND) == []
    assert wheel.next_ns() == NEVER


@pytest.mark.parametrize("start", [0, 1, TICK - 1, TICK, BOOT_NS, 63 * TICK, 64 * TICK - 1, 4096 * TICK - 1])
@pytest.mark.parametrize(
    "delay",
    [
        1,
        1000,
        TICK - 1,
        TICK,
        TICK + 1,
        63 * TICK,
        64 * TICK,
        65 * TICK,
        SECOND,
        4095 * TICK,
        4096 * TICK,
        64**3 * TICK + 12_345,
        64**4 * TICK,
        64**5 * TICK - 1,
        2**32 * SECOND,
    ],
)
def test_fires_at_its_deadline_not_a_nanosecond_before(start: int, delay: int) -> None:
    wheel = Wheel(start)
    timer = wheel.arm(start + delay)
    assert is_armed(timer) and len(wheel) == 1
    assert start < wheel.next_ns() <= start + delay
    assert wheel.advance(start) == []
    assert wheel.advance(start + delay - 1) == []
    assert is_armed(timer) and wheel.next_ns() == start + delay
    assert wheel.advance(start + delay) == [timer]
    assert not is_armed(timer) and len(wheel) == 0 and wheel.next_ns() == NEVER


@pytest.mark.parametrize("delay", [1, TICK, 64 * TICK, SECOND, 2**32 * SECOND])
def test_fires_after_a_stall(delay: int) -> None:
    wheel = Wheel()
    timer = wheel.arm(BOOT_NS + delay)
    assert wheel.advance(BOOT_NS + delay + 1) == [timer]
    wheel = Wheel()
    timer = wheel.arm(BOOT_NS + delay)
    assert wheel.advance(BOOT_NS + delay + 2**32 * SECOND) == [timer]


@pytest.mark.parametrize("late", [0, 1, TICK, SECOND, BOOT_NS])
def test_a_deadline_in_the_past_is_due_at_once(late: int) -> None:
    wheel = Wheel()
    later = wheel.arm(BOOT_NS + 10)
    timer = wheel.arm(BOOT_NS - late)
    assert wheel.next_ns() <= BOOT_NS
    assert wheel.advance(BOOT_NS) == [timer]
    assert wheel.advance(BOOT_NS + 10) == [later]


def test_next_ns_is_exact_once_the_deadline_is_near() -> None:
    """A server that sleeps until next_ns() is woken a few times on the way, not once a tick."""
    wheel = Wheel()
    deadline = BOOT_NS + 2**32 * SECOND + 7
    timer = wheel.arm(deadline)
    assert list(wheel.run_to_the_end()) == [(deadline, timer)]


def test_add_moves_an_armed_timer() -> None:
    wheel = Wheel()
    timer = wheel.arm(BOOT_NS + SECOND)
    wheel.add(timer, BOOT_NS + 5 * SECOND)
    wheel.check()
    assert len(wheel) == 1
    assert wheel.advance(BOOT_NS + 5 * SECOND - 1) == []
    wheel.add(timer, BOOT_NS + 7 * SECOND)
    wheel.add(timer, BOOT_NS + 6 * SECOND)
    assert wheel.next_ns() <= BOOT_NS + 6 * SECOND
    assert wheel.advance(BOOT_NS + 6 * SECOND) == [timer]
    assert len(wheel) == 0


def test_a_timer_that_fired_can_be_armed_again() -> None:
    wheel = Wheel()
    timer = wheel.arm(BOOT_NS + 1)
    for turn in range(1, 200):
        assert wheel.advance(BOOT_NS + turn * SECOND) == [timer]
        wheel.add(timer, BOOT_NS + turn * SECOND + 1)
        assert wheel.next_ns() <= BOOT_NS + turn * SECOND + 1


def test_cancel_on_every_level() -> None:
    delays = [0, 1, TICK, *(digit * 64**level * TICK for level in range(7) for digit in (1, 2, 63))]
    for gone in range(len(delays)):
        wheel = Wheel()
        timers = [wheel.arm(BOOT_NS + delay) for delay in delays]
        wheel.cancel(timers[gone])
        wheel.check()
        assert not timers[gone].armed
        wheel.cancel(timers[gone])  # which changes nothing
        assert len(wheel) == len(delays) - 1
        fired = [timer for _, timer in wheel.run_to_the_end()]
        assert sorted(map(id, fired)) == sorted(id(timer) for timer in timers if timer is not timers[gone])


def test_cancel_within_a_full_slot() -> None:
    for gone in range(5):
        wheel = Wheel()
        timers = [wheel.arm(BOOT_NS + SECOND) for _ in range(5)]
        wheel.cancel(timers.pop(gone))
        wheel.check()
        assert set(wheel.advance(BOOT_NS + SECOND)) == set(timers)


def test_cancel_of_the_earliest_shows_in_next_ns() -> None:
    wheel = Wheel()
    soon = wheel.arm(BOOT_NS + 10)
    wheel.arm(BOOT_NS + SECOND)
    assert wheel.next_ns() == BOOT_NS + 10
    wheel.cancel(soon)
    assert BOOT_NS + 10 < wheel.next_ns() <= BOOT_NS + SECOND
    wheel = Wheel()
    wheel.cancel(wheel.arm(BOOT_NS + 10))
    assert wheel.next_ns() == NEVER


def test_next_ns_is_never_when_the_last_timer_was_cancelled() -> None:
    """Also when the bound it gave before was a slot's beginning and not that timer's deadline."""
    wheel = Wheel()
    timer = wheel.arm(BOOT_NS + 100 * SECOND)
    wheel.advance(BOOT_NS)
    assert wheel.next_ns() < BOOT_NS + 100 * SECOND
    wheel.cancel(timer)
    assert wheel.next_ns() == NEVER


def test_many_at_one_moment() -> None:
    wheel = TimerWheel(BOOT_NS)
    timers = [Timer() for _ in range(3_000)]
    for timer in timers:
        wheel.add(timer, BOOT_NS + SECOND)
    wheel.check()
    assert wheel.pop_due(BOOT_NS + SECOND - 1) is None
    fired = set()
    while (due := wheel.pop_due(BOOT_NS + SECOND)) is not None:
        fired.add(due)
    assert fired == set(timers)


def test_a_slice_of_what_is_due_leaves_the_rest_due() -> None:
    wheel = Wheel()
    timers = [wheel.arm(BOOT_NS + SECOND + number) for number in range(10)]
    now_ns = BOOT_NS + SECOND + 6
    fired = {wheel.pop_due(now_ns) for _ in range(3)}
    assert len(wheel) == 7 and wheel.next_ns() <= now_ns
    wheel.check()
    left = [timer for timer in timers if timer not in fired and timer.deadline_ns <= now_ns]
    wheel.cancel(left[0])
    wheel.add(left[1], now_ns + SECOND)  # moved while it was due
    assert wheel.next_ns() <= now_ns
    wheel.check()
    assert set(wheel.advance(now_ns)) == set(left[2:])
    assert set(wheel.advance(now_ns + SECOND)) == {left[1], *timers[7:]}
    assert len(wheel) == 0


def test_one_that_is_overdue_comes_to_those_a_slice_left() -> None:
    wheel = Wheel()
    timers = [wheel.arm(BOOT_NS + SECOND + number) for number in range(3)]
    now_ns = BOOT_NS + 2 * SECOND
    first = wheel.pop_due(now_ns)
    wheel.cancel(timers[0])  # so that the bound has to be found anew
    overdue = wheel.arm(BOOT_NS)
    assert wheel.next_ns() <= BOOT_NS
    wheel.check()
    assert {first, *wheel.advance(now_ns)} | {timers[0]} == {*timers, overdue}


def test_fires_in_the_order_of_ticks() -> None:
    """After a stall, what was due earlier comes first; within one tick any order will do."""
    draw = random.Random(1)
    wheel = Wheel()
    for _ in range(300):
        wheel.arm(BOOT_NS + draw.randrange(10 * SECOND))
    ticks = [timer.deadline_ns >> TICK_BITS for timer in wheel.advance(BOOT_NS + 20 * SECOND)]
    assert ticks == sorted(ticks) and len(ticks) == 300


def delays_of(draw: random.Random) -> int:
    """Mostly short, sometimes centuries; often on a border between slots."""
    match draw.randrange(6):
        case 0:
            return draw.randrange(TICK * 3)
        case 1:
            return draw.randrange(10 * SECOND)
        case 2:
            return draw.randrange(2**32) * SECOND
        case 3:
            return draw.choice((1, 2, 63)) * (1 << 6 * draw.randrange(6)) * TICK + draw.randrange(-2, 3)
        case 4:
            return -draw.randrange(SECOND)
        case _:
            return draw.choice((1, 60, 120)) * SECOND


def test_random_against_a_list(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(15):
        wheel = Wheel(draw.randrange(2**60))
        armed: dict[Timer, int] = {}
        spare: list[Timer] = []
        for _ in range(150):
            choice = draw.randrange(10)
            if choice < 4:
                timer = spare.pop() if spare and draw.random() < 0.5 else Timer()
                armed[timer] = wheel.now_ns + delays_of(draw)
                wheel.add(timer, armed[timer])
            elif choice < 5 and armed:
                timer = draw.choice(list(armed))
                armed[timer] = wheel.now_ns + delays_of(draw)
                wheel.add(timer, armed[timer])
            elif choice < 6 and armed:
                for _ in range(draw.randrange(1, 4)):  # a slice: what else is due stays in the wheel
                    if (due := wheel.pop_due(wheel.now_ns)) is not None:
                        assert armed.pop(due) <= wheel.now_ns
                        spare.append(due)
            elif choice < 7 and armed:
                timer = draw.choice(list(armed))
                wheel.cancel(timer)
                del armed[timer]
                spare.append(timer)
            else:
                near = [max(0, deadline - wheel.now_ns) for deadline in armed.values()]
                step = draw.choice([*near, draw.randrange(SECOND), 0]) + draw.choice((-1, 0, 1))
                now_ns = wheel.now_ns + max(0, step)
                if draw.random() < 0.3 and (due := wheel.pop_due(now_ns)) is not None:
                    assert armed.pop(due) <= now_ns
                    spare.append(due)
                    wheel.now_ns = now_ns
                    wheel.check()
                    continue
                fired = wheel.advance(now_ns)
                assert set(fired) == {timer for timer, at in armed.items() if at <= wheel.now_ns}
                assert len(fired) == len(set(fired))
                for timer in fired:
                    del armed[timer]
                spare += fired
            assert len(wheel) == len(armed)
            next_ns = wheel.next_ns()
            assert (next_ns == NEVER) == (not armed)
            assert not armed or next_ns <= min(armed.values()), "next_ns is late"
            wheel.check()
        left = dict(armed)
        for now_ns, timer in wheel.run_to_the_end():
            assert now_ns == max(left.pop(timer), now_ns)
        assert not left


@settings(deadline=None, database=None, print_blob=True)
@given(
    st.integers(0, 2**62),
    st.lists(st.integers(0, 2**62), max_size=20),
    st.lists(st.integers(0, 2**40) | st.integers(0, 2**62), max_size=10),
)
def test_any_deadlines_and_any_steps(start: int, delays: list[int], steps: list[int]) -> None:
    wheel = Wheel(start)
    armed = {wheel.arm(start + delay): start + delay for delay in delays}
    for step in steps:
        now_ns = wheel.now_ns + step
        assert set(wheel.advance(now_ns)) == {timer for timer, at in armed.items() if at <= now_ns}
        armed = {timer: at for timer, at in armed.items() if at > now_ns}
        assert (wheel.next_ns() == NEVER) == (not armed)
        if armed:
            assert now_ns < wheel.next_ns() <= min(armed.values())


# --- cost


def lines_run(call: Callable[[], object]) -> int:
    """Returns how many lines of the wheel's source the call executes: a cost that does not depend on the machine."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != timerwheel.__file__:
            return None
        count += event == "line"
        return trace

    with frames_traced(trace):
        call()
    return count


@pytest.mark.skipif(BUILD == "compiled", reason="lines of compiled code cannot be counted")
def test_cost_does_not_grow_with_the_number_of_timers() -> None:
    draw = random.Random(2)
    costs = []
    for size in (10, 10_000):
        wheel = TimerWheel(BOOT_NS)
        for _ in range(size):
            wheel.add(Timer(), BOOT_NS + draw.randrange(SECOND, 1000 * SECOND))
        timer = Timer()
        costs.append(
            [
                lines_run(partial(wheel.add, timer, BOOT_NS + 500 * SECOND)),
                lines_run(partial(wheel.add, timer, BOOT_NS + 600 * SECOND)),
                lines_run(partial(wheel.cancel, timer)),
                lines_run(wheel.next_ns),
                lines_run(partial(wheel.pop_due, BOOT_NS + 1)),
            ]
        )
    for few, many in zip(*costs, strict=True):
        assert many <= few + 10 < 100


@pytest.mark.skipif(BUILD == "compiled", reason="lines of compiled code cannot be counted")
def test_firing_costs_a_timer_a_few_steps_on_the_whole() -> None:
    """Each timer moves down a level at a time, so what firing costs is bounded by the levels."""
    draw = random.Random(3)
    wheel = TimerWheel(BOOT_NS)
    for _ in range(5_000):
        wheel.add(Timer(), BOOT_NS + draw.randrange(100 * SECOND))

    def fire_all() -> None:
        now_ns = BOOT_NS
        while len(wheel):
            now_ns = max(now_ns, wheel.next_ns())
            while wheel.pop_due(now_ns) is not None:
                pass

    assert lines_run(fire_all) < 5_000 * 150


@pytest.mark.skipif(BUILD == "compiled", reason="lines of compiled code cannot be counted")
def test_firing_does_not_look_again_and_again_at_the_rest_of_a_tick() -> None:
    """Half of a tick's timers are due; the other half must not be passed over once for each one that fires."""
    wheel = TimerWheel(BOOT_NS)
    start = (BOOT_NS // TICK + 10) * TICK
    for number in range(1_000):
        wheel.add(Timer(), start + 1_000 - number)

    def fire_half() -> None:
        while wheel.pop_due(start + 500) is not None:
            pass

    assert lines_run(fire_half) < 500 * 200
    assert len(wheel) == 500


# Bug: 100,000 timers of one tick were moved in one call.
@pytest.mark.parametrize("spread_ns", [0, TICK - 1, SECOND])
def test_no_call_moves_more_than_it_is_allowed_to(spread_ns: int) -> None:
    """However many timers stand in a slot: what is left is due at once, and nothing is lost or fires early."""
    draw = random.Random(4)
    wheel = TimerWheel(BOOT_NS)
    armed = {Timer(): (BOOT_NS // TICK + 100_000) * TICK + draw.randint(0, spread_ns) for _ in range(1_000)}
    for timer, deadline_ns in armed.items():
        wheel.add(timer, deadline_ns)
    now_ns = BOOT_NS
    stopped = 0
    while armed:
        now_ns = max(now_ns, wheel.next_ns())
        wheel.allowance = 100
        due = wheel.pop_due(now_ns)
        assert 0 <= wheel.allowance <= 100
        if due is not None:
            assert armed.pop(due) <= now_ns
        elif not wheel.allowance:
            stopped += 1
            wheel.check()
            assert wheel.next_ns() <= min(armed.values())
    assert stopped, "a crowd was moved in one call"


def test_what_comes_and_goes_while_a_slot_is_moved(seed: int) -> None:
    draw = random.Random(seed)
    wheel = TimerWheel(BOOT_NS)
    armed = {Timer(): BOOT_NS + 100 * SECOND + draw.randrange(2 * SECOND) for _ in range(500)}
    for timer, deadline_ns in armed.items():
        wheel.add(timer, deadline_ns)
    now_ns = BOOT_NS + 99 * SECOND
    while armed:
        now_ns += draw.randrange(0, SECOND // 50)
        wheel.allowance = draw.randrange(10)
        if (due := wheel.pop_due(now_ns)) is not None:
            assert armed.pop(due) <= now_ns
        if draw.random() < 0.3 and armed:
            timer = draw.choice([*armed])
            wheel.cancel(timer)
            del armed[timer]
        if draw.random() < 0.3 and armed:
            timer = draw.choice([*armed])
            armed[timer] = now_ns + draw.randrange(-SECOND, SECOND)
            wheel.add(timer, armed[timer])
        wheel.check()
        assert not armed or wheel.next_ns() <= min(armed.values())


@pytest.mark.skipif(BUILD == "compiled", reason="lines of compiled code cannot be counted")
def test_asking_for_the_next_deadline_does_not_search_a_crowd() -> None:
    wheel = TimerWheel(BOOT_NS)
    timers = [Timer() for _ in range(10_000)]
    for number, timer in enumerate(timers):
        wheel.add(timer, BOOT_NS + 30 * TICK + number)
    for timer in timers[:10]:
        wheel.cancel(timer)  # the bound is not known any more
        assert lines_run(wheel.next_ns) < 100
