"""Changes all jobs that match a filter, in slices; a change goes on when its client is gone, and can be cancelled.

This module must not know requests. Search and changes take turns: a search finds some hundred jobs, one operation of
the turn changes them, and they count as done when the change is safe. A job in another state than the action takes is
counted and left alone. Invariant: `done` counts changes that are as safe as an answer is. A change never touches a job
that was put after its beginning, nor one that no longer matches when its turn comes.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from gevent import spawn
from gevent.event import Event

from geventstalk.core.engine import OUT_OF_MEMORY, UNFINISHED
from geventstalk.core.job import STATE_NAMES, Job
from geventstalk.core.operate import DONE, WRONG_STATE, Operate
from geventstalk.filters import Term
from geventstalk.http.audit import Author
from geventstalk.http.backend import Backend, Failed
from geventstalk.http.changes import Values, change_of, fitting
from geventstalk.http.scope import EVERYTHING, Scope
from geventstalk.http.search import Search, SearchFailed
from geventstalk.rights import MANAGE
from geventstalk.turn.operations import Changes

KEPT_MAX: Final = 100
_PARTS_SHOWN: Final = 20
"""The most tubes and states that the answer of a dry run names."""
RUNNING_MAX: Final = 4
_BATCH_MAX: Final = 500
"""The most jobs that one operation changes; they share one sync."""
_BATCH_S: Final = 0.25
"""The longest search for the jobs of an operation."""
_TELL_S: Final = 0.5
"""The interval between reports of progress to Backend.bulk_listeners."""

Json = dict[str, Any]


class TooMany(Exception):
    """Too many bulk changes are running; no other is begun."""


class BulkChange:
    """One bulk change. `terms` are its filter, `limit` is the most jobs it changes."""

    def __init__(
        self,
        backend: Backend,
        who: Author,
        text: str,
        terms: tuple[Term, ...],
        action: str,
        values: Values,
        limit: int | None,
        number: int,
        scope: Scope = EVERYTHING,
    ) -> None:
        """Raises FilterError for a regular expression that cannot be used."""
        engine = backend.engine
        self.number: Final = number
        self.state = "running" if number else "dry-run"
        self.over: Any = Event()
        self.cancelled = False
        self._backend = backend
        self.who: Final = who
        self._scope = scope
        self._text = text
        self._action = action
        self._values = values
        self._limit = limit
        self._fitting = fitting(action, values)
        self._search = Search(backend, terms, last=engine.next_id - 1, scope=scope)
        self._began = monotonic()
        self._ended: float | None = None
        self._began_unix_s = backend.unix_s(backend.now_ns())
        jobs = engine.ready_count + engine.reserved_count + engine.delayed_count + engine.buried_count
        self._jobs_before = jobs if scope.sees_all else 0
        self._matched = self._done = self._failed = 0
        self._parts: Counter[tuple[bytes, int]] = Counter()  # of a dry run: tube and state
        self._error: str | None = None
        self._changes: Changes | None = None

    def is_of(self, who: Author) -> bool:
        return (self.who.name, self.who.role) == (who.name, who.role)

    def as_json(self) -> Json:
        tube = self._values.tube
        return {
            "number": self.number,
            "filter": self._text,
            "action": self._action,
            "tube": tube.decode("ascii") if tube else None,
            "state": self.state,
            "by": self.who.name,
            "began": self._began_unix_s,
            "took_s": (monotonic() if self._ended is None else self._ended) - self._began,
            "searched": self._search.searched,
            "matched": self._matched,
            "done": self._done,
            "failed": self._failed,
            "jobs_before": self._jobs_before,
            "parts": [
                {"tube": tube.decode("ascii"), "state": STATE_NAMES[state], "count": count}
                for (tube, state), count in self._parts.most_common(_PARTS_SHOWN)
            ],
            "parts_total": len(self._parts),
            "error": self._error,
        }

    def count(self) -> None:
        """Counts the matching jobs, by tube and state, and those that would be left alone. Raises SearchFailed."""
        left, engine = self._limit, self._backend.engine
        for jobs in self._search.pages():
            taken = {*self._take(jobs, left)}
            self._matched += len(taken)
            self._parts.update((engine.tube_of(job).name, job.state) for job in jobs if job.id in taken)
            left = None if left is None else left - len(taken)
            if left == 0:
                break
            if self._backend.stopping.is_set():
                self._error = "The server stops."
                break
        self._ended = monotonic()

    def cancel(self) -> None:
        """Ends the change soon, before its next jobs."""
        self.cancelled = True
        if self._changes is not None:
            self._changes.cancelled = True

    def run(self, tell: Callable[[], None]) -> None:
        """Runs the change. Calls `tell` when there is progress."""
        try:
            self._run(tell)
        except SearchFailed as error:
            self._end("failed", str(error))
        except Failed:
            self._end("failed", "A change was given up: the server stops, or its log says why.")
        except Exception:
            self._end("failed", "The server has a fault; its log says which.")
            raise
        else:
            self._end("cancelled" if self.cancelled else "failed" if self._error else "done", self._error)
        finally:
            changed = f"work {self.number}: {self.state}"
            values = f"; {self._values}" if self._values else ""
            self._backend.audit.record(
                self.who, f"bulk {self._action}", self._done, filter=self._text, detail=f"{changed}{values}"
            )
            self.over.set()
            tell()

    def _end(self, state: str, error: str | None) -> None:
        self.state = state
        self._error = error
        self._ended = monotonic()
        self._search.let_go()

    def _run(self, tell: Callable[[], None]) -> None:
        ids: list[int] = []
        left = self._limit
        due = monotonic() + _BATCH_S
        for jobs in self._search.pages():
            taken = self._take(jobs, left)
            left = None if left is None else left - len(taken)
            ids += taken
            if len(ids) >= _BATCH_MAX or monotonic() >= due or left == 0:
                self._change(ids)
                ids = []
                due = monotonic() + _BATCH_S
                tell()
            if left == 0 or self._stops():
                return
        self._change(ids)

    def _take(self, jobs: list[Job], most: int | None) -> list[int]:
        """Returns the ids of at most `most` jobs that fit the action. Counts the others."""
        ids: list[int] = []
        scope, tube_of = self._scope, self._backend.engine.tube_of
        for job in jobs:
            if job.state in self._fitting and scope.may(tube_of(job).name, MANAGE):
                ids.append(job.id)
                if len(ids) == most:
                    break
            else:
                self._matched += 1
                self._failed += 1
        return ids

    def _stops(self) -> bool:
        if self._backend.stopping.is_set():
            raise Failed
        if self._values.tube and not self._scope.may(self._values.tube, MANAGE):
            self._error = "The right to move jobs there was taken away."
        return self.cancelled or self._error is not None

    def _change(self, ids: list[int]) -> None:
        """Changes these jobs, and returns when that is safe."""
        self._matched += len(ids)
        if not ids or self.cancelled:
            return
        changes = self._changes = _Batch(
            self._backend, self._search, ids, change_of(self._backend.engine, self._action, self._values), self._scope
        )
        try:
            self._backend.carry_out(changes)
        finally:
            self._changes = None
        self._done += changes.counts.get(DONE, 0)
        self._failed += sum(changes.counts.values()) - changes.counts.get(DONE, 0)
        if OUT_OF_MEMORY in changes.counts:
            self._error = "There is no room for it: memory or the journal is full."


class _ChangeOfMatch:
    """Changes a job that still matches. Sets `is_full` when memory or the journal is full.

    The operation holds this object and not the reverse: the server has no collector of cycles.
    """

    def __init__(self, engine: Operate, search: Search, do: Callable[[int, int], int], scope: Scope) -> None:
        self.is_full = False
        self._scope = scope
        self._engine = engine
        self._search = search
        self._do = do

    def __call__(self, id: int, now_ns: int) -> int:
        if self.is_full:
            return UNFINISHED  # until the slice ends, and the operation with it
        job = self._engine.jobs.get(id)
        may = job is not None and self._scope.may(self._engine.tube_of(job).name, MANAGE)
        if job is None or not may or not self._search.still(job):
            self._engine.abandon_alter(id)  # if it was begun
            return WRONG_STATE
        outcome = self._do(id, now_ns)
        self.is_full = outcome == OUT_OF_MEMORY
        return outcome


class _Batch(Changes):
    """Changes some jobs, each if it still matches. Stops when memory or the journal is full."""

    def __init__(
        self, backend: Backend, search: Search, ids: list[int], do: Callable[[int, int], int], scope: Scope
    ) -> None:
        self._change_of_match = _ChangeOfMatch(backend.engine, search, do, scope)
        super().__init__(backend.engine, ids, self._change_of_match)

    def run(self, now_ns: int) -> bool:
        over = super().run(now_ns)
        if self._change_of_match.is_full and not over:
            self.cancelled = True
            over = super().run(now_ns)
        return over

    def done(self) -> None:
        pass

    def failed(self) -> None:
        pass


class BulkChanges:
    """The bulk changes of a server: running, and ended lately."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept: deque[BulkChange] = deque()
        self._number = 0

    def begin(
        self,
        who: Author,
        text: str,
        terms: tuple[Term, ...],
        action: str,
        values: Values,
        limit: int | None,
        scope: Scope = EVERYTHING,
    ) -> BulkChange:
        """Begins a change. A user with rights has one at a time, and leaves one to others. Raises TooMany, and
        FilterError.
        """
        running = [change for change in self._kept if change.state == "running"]
        is_user = scope is not EVERYTHING
        if len(running) >= RUNNING_MAX - is_user or (is_user and any(change.is_of(who) for change in running)):
            raise TooMany
        change = BulkChange(self._backend, who, text, terms, action, values, limit, self._number + 1, scope)
        self._number += 1
        self._kept.append(change)
        if len(self._kept) > KEPT_MAX:
            self._kept.remove(next(old for old in self._kept if old.state != "running"))
        # If the server dies, the audit has the beginning.
        self._backend.audit.record(who, f"begin bulk {action}", 0, filter=text, detail=f"work {change.number}")
        spawn(_supervised, change, _Teller(self._backend, change).tell, self._backend.log)
        return change

    def find(self, number: int, who: Author, scope: Scope) -> BulkChange | None:
        shown = (change for change in self._kept if change.number == number)
        return next((change for change in shown if scope.sees_all or change.is_of(who)), None)

    def latest_first(self, who: Author, scope: Scope) -> list[Json]:
        """Returns the changes that may be looked at: all, or those of the sender."""
        return [change.as_json() for change in reversed(self._kept) if scope.sees_all or change.is_of(who)]


class _Teller:
    """Reports the end to the listeners, and progress now and then."""

    def __init__(self, backend: Backend, change: BulkChange) -> None:
        self._listeners = backend.bulk_listeners
        self._change = change
        self._next = 0.0

    def tell(self) -> None:
        now = monotonic()
        if self._change.over.is_set() or now >= self._next:
            self._next = now + _TELL_S
            for listener in self._listeners:
                listener(self._change.as_json())


def _supervised(change: BulkChange, tell: Callable[[], None], log: logging.Logger) -> None:
    """A fault ends this bulk change only. The turn handles the failures of its operations."""
    try:
        change.run(tell)
    except Exception as error:
        log.error("work %d on many jobs failed", change.number, exc_info=error)
