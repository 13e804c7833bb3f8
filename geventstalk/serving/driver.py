"""Drives the tasks of a turn: a greenlet for each, a thread for what waits for a device, and the sleeps between.

This module must not know what the tasks are for.
Invariant: a task runs in its greenlet alone. An exception out of a task is the turn's failure and ends no other task.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import Any, Final

import gevent

from geventstalk.core.timerwheel import NEVER
from geventstalk.serving.parking import Parking
from geventstalk.turn.tasks import NEXT_TURN, Task, Wait

NEXT_TURN_S: Final = 1e-9
"""A sleep of this length lets every socket have its turn. After sleep(0) gevent runs the greenlet up to 50 times more
before it looks at any socket."""
_END_OF_WORK_S: Final = 3.0
"""A stop waits this long for a thread that reads: a device that does not answer does not hold up the end."""


class Driver:
    """`fails` gets each exception out of a task."""

    def __init__(self, fails: Callable[[BaseException], None]) -> None:
        self._fails = fails
        self._greenlets: list[Any] = []
        self._sync_thread: Any = None  # the last sync in a thread
        self._work_threads: list[Any] = []  # other work in threads

    def drive(self, tasks: Iterable[Task]) -> None:
        """Starts tasks, each in a greenlet of its own."""
        for task in tasks:
            self._greenlets.append(gevent.spawn(self._drive, task))

    def run(self, work: Callable[[], object]) -> None:
        """Starts a greenlet that stop() ends with the tasks."""
        self._greenlets.append(gevent.spawn(work))

    def stop(self) -> None:
        """Ends all of them. Threads go on."""
        gevent.killall(self._greenlets)

    def await_threads(self) -> None:
        """Waits for the sync that is under way in a thread, and for a while for other work."""
        if self._sync_thread is not None:
            self._sync_thread.get()  # replies at the gate may wait for this sync
        for thread in self._work_threads:
            thread.wait(_END_OF_WORK_S)  # it may have a segment open

    def _drive(self, task: Task) -> None:
        parking = Parking()
        try:
            for wait in task:
                if wait.sync is not None:
                    self._sync_thread = gevent.get_hub().threadpool.spawn(wait.sync.run)
                    self._sync_thread.get()
                elif wait.work is not None:
                    thread: Any = gevent.get_hub().threadpool.spawn(wait.work.run)
                    self._work_threads.append(thread)
                    thread.get()
                    self._work_threads.remove(thread)
                else:
                    sleep(wait, parking)
        except Exception as error:
            self._fails(error)


def sleep(wait: Wait, parking: Parking) -> None:
    """Sleeps until the flag is set or the moment has come. NEXT_TURN means until the event loop went around once."""
    flag = wait.flag
    if flag is None:
        while not _sleep_some(wait.at_ns, parking):
            pass
        return
    flag.raised = parking.wake_soon
    try:
        while not flag.is_set and not (_look_once if wait.awake else _sleep_some)(wait.at_ns, parking):
            pass
    finally:
        flag.raised = None


def _sleep_some(at_ns: int, parking: Parking) -> bool:
    """Sleeps until the moment has come or the greenlet is woken. Returns whether the moment has come."""
    if at_ns == NEVER:
        parking.park()
        return False
    if at_ns == NEXT_TURN:
        _nap(NEXT_TURN_S, parking)
        return True
    left_ns = at_ns - monotonic_ns()
    if left_ns <= 0:
        return True
    _nap(left_ns / 1e9, parking)
    return False


def _look_once(at_ns: int, parking: Parking) -> bool:
    """Lets clients of this processor and every socket have their turn. Returns whether the moment has come."""
    os.sched_yield()
    _nap(NEXT_TURN_S, parking)
    return monotonic_ns() >= at_ns


def _nap(seconds: float, parking: Parking) -> None:
    """Sleeps for this long, or until the greenlet is woken."""
    timer = parking.loop.timer(seconds)
    timer.start(parking.wake)
    try:
        parking.park()
    finally:
        timer.stop()
        timer.close()
