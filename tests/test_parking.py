"""The parking of a greenlet: a wake-up counts only while the greenlet sleeps there."""

from __future__ import annotations

from time import monotonic_ns

import gevent
import pytest

from geventstalk.serving import driver
from geventstalk.serving.parking import Parking
from geventstalk.turn.tasks import NEXT_TURN, Flag, Wait


class Sleeper:
    """A greenlet that parks again and again, and now and then waits for something else."""

    def __init__(self) -> None:
        self.woken = 0
        self.elsewhere = gevent.event.Event()
        self.goes_elsewhere = False
        self.parking: Parking
        self.greenlet = gevent.spawn(self._run)
        gevent.sleep(0)

    def _run(self) -> None:
        self.parking = Parking()
        while True:
            self.parking.park()
            self.woken += 1
            if self.goes_elsewhere:
                self.elsewhere.wait()
                self.goes_elsewhere = False

    def end(self) -> None:
        self.greenlet.kill()
        self.parking.close()


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


def test_who_sleeps_is_woken(sleeper: Sleeper) -> None:
    sleeper.parking.wake_soon()
    assert sleeper.woken == 0, "not on the spot: the greenlet that wakes it goes on first"
    gevent.sleep(0)
    assert sleeper.woken == 1
    sleeper.end()


def test_several_wake_ups_at_once_are_one_or_more_and_never_an_error(sleeper: Sleeper) -> None:
    for _ in range(5):
        sleeper.parking.wake_soon()
    gevent.sleep(0)
    assert 1 <= sleeper.woken <= 5
    sleeper.end()


# Bug: A wake-up switched into a greenlet that waited for the lock: hundreds of closed clients stayed, each with a job.
def test_a_greenlet_that_waits_for_something_else_is_left_alone(sleeper: Sleeper) -> None:
    """The wake-up of a connection switched into its greenlet while that waited for the lock: it stayed for ever."""
    sleeper.goes_elsewhere = True
    sleeper.parking.wake_soon()
    sleeper.parking.wake_soon()  # comes when the greenlet waits elsewhere
    gevent.sleep(0)
    sleeper.parking.wake_soon()
    gevent.get_hub().loop.run_callback(sleeper.parking.wake)
    gevent.sleep(0.001)
    assert sleeper.woken == 1 and not sleeper.greenlet.dead
    sleeper.elsewhere.set()
    gevent.sleep(0.001)
    sleeper.parking.wake_soon()
    gevent.sleep(0.001)
    assert sleeper.woken == 2
    sleeper.end()


def test_who_was_killed_is_not_woken(sleeper: Sleeper) -> None:
    sleeper.parking.wake_soon()
    sleeper.greenlet.kill()
    woken = sleeper.woken
    gevent.get_hub().loop.run_callback(sleeper.parking.wake)
    gevent.sleep(0.001)
    assert sleeper.greenlet.dead and sleeper.woken == woken
    sleeper.parking.close()
    sleeper.parking.wake()


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("moment", ["next turn", "past", "soon"])
def test_a_task_sleeps_with_and_without_a_flag(flagged: bool, moment: str) -> None:
    """Compiled, a wait without a flag ended the server: mypyc took the flag for one that is there, in a `finally`."""
    at_ns = {"next turn": NEXT_TURN, "past": monotonic_ns() - 1, "soon": monotonic_ns() + 1_000_000}[moment]

    def sleep() -> bool:
        parking = Parking()
        driver.sleep(Wait(Flag() if flagged else None, at_ns), parking)
        parking.close()
        return True

    assert gevent.spawn(sleep).get(timeout=60)
