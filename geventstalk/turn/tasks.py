"""Tasks and their waits. A task is a generator: it yields a Wait and is resumed when that is over.

This module must not know what drives tasks (the server with greenlets and threads, the simulation with a clock of its
own), nor what they are for.
Invariant: a task that waits for a flag is resumed after the flag is set, also when it was set before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

from geventstalk.core.timerwheel import NEVER

NEXT_TURN: Final = 0
"""A moment that is over when all others had a turn."""


class Flag:
    """A flag that one task waits for. `raised`, which the driver of the task sets, is called when the flag is set."""

    __slots__ = ("is_set", "raised")

    def __init__(self, is_set: bool = False) -> None:
        self.is_set = is_set
        self.raised: Callable[[], None] | None = None

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            if self.raised is not None:
                self.raised()

    def clear(self) -> None:
        self.is_set = False


class Point(Protocol):
    """The part of SyncPoint in journal/log.py that a sync needs."""

    error: BaseException | None

    def begin(self, over: Callable[[], None]) -> bool:
        """Begins without a thread, if that is possible."""

    def run(self) -> None:
        """Waits."""


class Sync:
    """One sync: run() in any thread, or begin() without a thread. An exception is kept in `error`."""

    def __init__(self, point: Point, clock: Callable[[], int]) -> None:
        self._point = point
        self._clock = clock
        self._tell: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.begun_ns = 0
        self.took_ns = 0
        self.over = False

    def run(self) -> None:
        self.begun_ns = self._clock()
        try:
            self._point.run()
        except BaseException as error:
            self.error = error
        self._end()

    def begin(self, over: Callable[[], None]) -> bool:
        """Returns whether it has begun; then `over` is called at its end. Otherwise the caller calls run()."""
        self.begun_ns = self._clock()
        self._tell = over
        return self._point.begin(self._ended)

    def _ended(self) -> None:
        self.error = self._point.error
        self._end()
        assert self._tell is not None
        self._tell()

    def _end(self) -> None:
        self.took_ns = self._clock() - self.begun_ns
        self.over = True


class Work(Protocol):
    """Work of a task that may wait for a device."""

    def run(self) -> None:
        """Called once, in any thread."""


class Wait:
    """A wait: for a flag or a moment, the first of them, or for the end of a sync or of work in a thread.

    With `awake` the driver does not sleep until the moment, which is near: it looks for input again and again.
    """

    def __init__(
        self,
        flag: Flag | None = None,
        at_ns: int = NEVER,
        sync: Sync | None = None,
        work: Work | None = None,
        *,
        awake: bool = False,
    ) -> None:
        self.flag = flag
        self.at_ns = at_ns
        self.sync = sync
        self.work = work
        self.awake = awake


Task = Iterator[Wait]
