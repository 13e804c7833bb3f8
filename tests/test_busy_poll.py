"""BusyPoll: looking for the next request before sleeping, only where it pays."""

from __future__ import annotations

import random

import pytest

from geventstalk.serving.busy_poll import LOOK_NS, BusyPoll

ROUNDS = 10_000


class Loop:
    """An event loop with turns at given distances; it counts what BusyPoll has it do."""

    def __init__(self) -> None:
        self.busy_poll = BusyPoll()
        self.now_ns = 0
        self.looking = False
        self.looks = 0  # times that looking began
        self.looked_ns = 0
        self.slept = 0  # turns before which the process slept

    def turn(self, gap_ns: int) -> None:
        """Something comes `gap_ns` after the end of the last turn; the turn itself takes no time."""
        if self.looking and gap_ns >= LOOK_NS:
            assert not self.busy_poll.over(self.now_ns + LOOK_NS - 1)
            assert self.busy_poll.over(self.now_ns + LOOK_NS)
            self.looking = False
            self.looked_ns += LOOK_NS
        elif self.looking:
            assert not self.busy_poll.over(self.now_ns + gap_ns)
            self.looked_ns += gap_ns
        self.slept += not self.looking
        self.now_ns += gap_ns
        if self.busy_poll.turn_ends(self.now_ns):
            assert not self.looking
            self.looking = True
            self.looks += 1


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_client_that_asks_again_at_once_is_waited_for(loop: Loop) -> None:
    for _ in range(ROUNDS):
        loop.turn(LOOK_NS // 2)
    assert loop.looks == 1
    assert loop.slept == 1


@pytest.mark.parametrize("gap_ns", [LOOK_NS, 10 * LOOK_NS])
def test_where_nothing_comes_in_time_hardly_any_turn_looks(loop: Loop, gap_ns: int) -> None:
    for _ in range(ROUNDS):
        loop.turn(gap_ns)
    assert 0 < loop.looks <= ROUNDS // 100
    assert loop.slept == ROUNDS


def test_a_pause_now_and_then_does_not_end_it(loop: Loop) -> None:
    for number in range(ROUNDS):
        loop.turn(LOOK_NS // 2 if number % 10 else 100 * LOOK_NS)
    assert loop.slept <= ROUNDS // 10 + 200


def test_it_begins_anew_with_a_client_that_asks_at_once(loop: Loop) -> None:
    for _ in range(ROUNDS):
        loop.turn(10 * LOOK_NS)
    slept = loop.slept
    for _ in range(ROUNDS):
        loop.turn(LOOK_NS // 2)
    assert loop.slept - slept <= 200


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
def test_where_it_pays_too_seldom_it_takes_little_time(loop: Loop, seed: int, share: float) -> None:
    """A loss costs LOOK_NS; all of it together, less than a tenth of that a turn."""
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        loop.turn(LOOK_NS // 2 if draw.random() < share else 10 * LOOK_NS)
    assert loop.looked_ns < ROUNDS * LOOK_NS / 10
