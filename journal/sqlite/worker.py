"""The journal's own thread. It does one piece of work after the other, and reports when it is asked.

This module must not know what the work is. Invariants: `done` callbacks run in the thread that calls check(), wait() or
close(). After an exception out of a piece of work, or out of the thread itself, check() raises JournalFailed for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Event, Lock, Thread
from typing import Final

from journal.errors import JournalFailed, failure_of

_ABANDON_S: Final = 5.0
"""After a failure, the end of the journal waits this long for the current work. No work takes longer on a device that
answers."""


class Worker:
    """Runs submitted work in order. The first failure is final: the thread runs nothing more, and check() raises it."""

    def __init__(self) -> None:
        self._todo: deque[tuple[Callable[[], None], Callable[[], None]] | None] = deque()
        self._wake = Condition()
        self._done: deque[Callable[[], None]] = deque()
        self._open = 0  # pieces of work whose `done` was not run yet
        self._failure: JournalFailed | None = None
        self._thread: Thread | None = None
        self._progress = Event()
        self._failing = Lock()

    def submit(self, work: Callable[[], None], done: Callable[[], None], *, urgent: bool = False) -> None:
        """Runs `work` in the thread; the next check() runs `done`. Urgent work is done before all other work."""
        if self._thread is None:
            thread = Thread(target=self._run, name="journal", daemon=True)
            thread.start()  # where that fails, there is no thread whose end could be waited for
            self._thread = thread
        self._open += 1
        with self._wake:
            if urgent:
                self._todo.appendleft((work, done))
            else:
                self._todo.append((work, done))
            self._wake.notify()

    @property
    def busy(self) -> bool:
        """Returns whether work was submitted whose `done` has not been run."""
        return self._open > 0

    def check(self) -> None:
        """Runs the `done` of finished work. Raises the failure of work that failed."""
        self._report()
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout_s: float) -> None:
        """Waits until a piece of work is done and runs its `done`. Leaves a failure to check()."""
        if self._open and not self._done and self._failure is None:
            self._progress.wait(timeout_s)
        self._progress.clear()
        self._report()

    def fail(self, error: BaseException) -> None:
        """Ends all work after a final failure. From now on check() raises the first failure."""
        with self._failing:
            if self._failure is None:
                self._failure = failure_of(error)

    def close(self) -> None:
        """Waits until all work is done, and then does what check() does."""
        self._end()
        self.check()

    def abandon(self) -> bool:
        """Ends the thread after its current work. Other work is dropped.

        Returns whether the thread has ended. A device that does not answer must not hold up the end of the process.
        """
        self.fail(JournalFailed("the journal was given up"))
        return self._end(_ABANDON_S)

    def _end(self, timeout_s: float | None = None) -> bool:
        if self._thread is not None:
            with self._wake:
                self._todo.append(None)
                self._wake.notify()
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _report(self) -> None:
        while self._done:
            self._open -= 1
            self._done.popleft()()

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                if self._failure is None:
                    self._do(*item)
        except BaseException as error:  # otherwise the thread would end unnoticed
            self.fail(error)
            self._progress.set()

    def _next(self) -> tuple[Callable[[], None], Callable[[], None]] | None:
        with self._wake:
            while not self._todo:
                self._wake.wait()
            return self._todo.popleft()

    def _do(self, work: Callable[[], None], done: Callable[[], None]) -> None:
        try:
            work()
            self._done.append(done)
        except BaseException as error:
            self.fail(error)
        self._progress.set()
