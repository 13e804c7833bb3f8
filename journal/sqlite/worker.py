"""The journal's own thread: one piece of work after the other, results and failures handed back when asked.

This room must not know what the work is. Invariant: `done` callbacks run in the thread that calls check() or close().
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Event, Thread

from journal.errors import JournalError, JournalFailed


class Worker:
    """Runs submitted work in order. The first failure is final: nothing is run after it, and check() raises it."""

    def __init__(self) -> None:
        self._todo: deque[tuple[Callable[[], None], Callable[[], None]] | None] = deque()
        self._wake = Condition()
        self._done: deque[Callable[[], None]] = deque()
        self._open = 0  # submitted, and its `done` not run yet
        self._failure: JournalError | None = None
        self._thread: Thread | None = None
        self._progress = Event()

    def submit(self, work: Callable[[], None], done: Callable[[], None], *, urgent: bool = False) -> None:
        """Has `work` run in the thread, and then `done` by the next check(). Urgent work is done before all other."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        self._open += 1
        with self._wake:
            if urgent:
                self._todo.appendleft((work, done))
            else:
                self._todo.append((work, done))
            self._wake.notify()

    @property
    def busy(self) -> bool:
        """Whether work was submitted whose `done` has not been run."""
        return self._open > 0

    def check(self) -> None:
        """Runs the `done` of finished work. Raises the failure of work that failed."""
        self._report()
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout_s: float) -> None:
        """Waits until a piece of work is done and runs its `done`; a failure is left to check()."""
        if self._open and not self._done and self._failure is None:
            self._progress.wait(timeout_s)
        self._progress.clear()
        self._report()

    def fail(self, error: JournalError) -> None:
        """Something outside of the thread failed for good: no more work is run, and check() raises it from now on."""
        self._failure = self._failure or error

    def close(self) -> None:
        """Waits until all work is done, then as check()."""
        self._end()
        self.check()

    def abandon(self) -> None:
        """Ends the thread after the work it is at; what is still to do is forgotten."""
        self._failure = self._failure or JournalFailed("the journal was given up")
        self._end()

    def _end(self) -> None:
        if self._thread is not None:
            with self._wake:
                self._todo.append(None)
                self._wake.notify()
            self._thread.join()
            self._thread = None

    def _report(self) -> None:
        while self._done:
            self._open -= 1
            self._done.popleft()()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._todo:
                    self._wake.wait()
                item = self._todo.popleft()
            if item is None:
                return
            work, done = item
            if self._failure is not None:
                continue
            try:
                work()
            except JournalError as error:
                self._failure = error
            except OSError as error:
                self._failure = JournalFailed(f"journal: {error.strerror}: {error.filename}")
            else:
                self._done.append(done)
            self._progress.set()
