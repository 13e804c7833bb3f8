"""Finds the jobs that match a filter, in order of id, in slices; other requests and clients run in between.

A search continues at an id, not at a job: changes of other jobs never make it miss a job or return one twice. Matching
a large body runs in a thread. Invariant: jobs match when pages() yields them. A caller that yields to others then calls
still().
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain
from time import perf_counter_ns
from typing import Any, Final

from gevent import get_hub
from gevent.lock import BoundedSemaphore

from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, Job, held_body
from geventstalk.core.tube import Tube
from geventstalk.filters import Term
from geventstalk.http.backend import SLICE_NS, Backend
from geventstalk.http.matcher import CRLF_BYTES, ID_MAX, Matcher
from geventstalk.http.patterns import Pattern
from geventstalk.http.scope import EVERYTHING, Scope

_WORK_NS: Final = 200_000_000
"""The most time that a search works for one answer."""
_WAIT_NS: Final = 1_000_000_000
"""The most time that one answer takes, with other work in between."""
_HUB_COST_MAX: Final = 100_000
"""The most that a pattern's cost times the bytes of a body may be on the hub: about a millisecond."""
_BATCH_COST_MAX: Final = 30_000_000
"""The most cost of a thread's task."""
_COST_MAX: Final = 2_000_000_000
"""The most cost of one body. More would take a thread longer than twenty seconds at the worst."""
_READ_BYTES_MAX: Final = 1 << 22
"""The bytes of bodies on disk that are matched at once, or one body: they take memory beside its bound."""
_WINDOW_BYTES: Final = 1 << 16
"""The bytes of a body that are searched for words at once."""
_LISTED_MAX: Final = 8000
"""The most ids, tubes and clients that are listed in one slice."""
_WORTH: Final = 8
"""A list of ids is better than the table when the table has more than this many times as many jobs."""

_GONE: Final = b"\r\n"
"""The body of a job that is gone; its verdict is ignored."""

_one_at_a_time: Any = BoundedSemaphore(1)
"""Threads that match patterns leave the other core to the server, and the other threads of the pool to its fsyncs."""


class SearchFailed(Exception):
    """The search cannot continue; the text tells the user why."""


class Search:
    """One pass over the jobs, from `at` on. `position` is the id at which another search continues."""

    def __init__(
        self,
        backend: Backend,
        terms: tuple[Term, ...],
        descending: bool = False,
        at: int | None = None,
        last: int = ID_MAX,
        scope: Scope = EVERYTHING,
    ) -> None:
        """`last` is the last id to look at; `scope` says which jobs there are to see.

        Raises FilterError for a regular expression that cannot be used.
        """
        self._backend = backend
        self._jobs = backend.engine.jobs
        self._scope = scope
        self._matcher = Matcher(terms, backend.engine, backend.now_ns())
        self._descending = descending
        self._began_ns = self._slice_ns = perf_counter_ns()
        self._worked_ns = 0
        self._turns = 0  # the number of yields
        self._searched = 0
        self._seen: list[Job] = []  # jobs of the present page
        ids = self._matcher.ids
        self._first = ids[0][0] if ids else 1
        self._last = min(last, ids[-1][1]) if ids else 0
        start = (ID_MAX if descending else 0) if at is None else at
        self.position = min(start, self._last) if descending else max(start, self._first)
        self.exhausted = False

    @property
    def searched(self) -> int:
        """The number of jobs that were looked at, or of those that match where the sender may not know of others."""
        at = self.position
        return self._searched + sum((job.id > at) if self._descending else (job.id < at) for job in self._seen)

    @property
    def is_long_enough(self) -> bool:
        """Returns whether the search has taken as long as one answer may take."""
        now_ns = perf_counter_ns()
        return self._worked_ns + now_ns - self._slice_ns >= _WORK_NS or now_ns - self._began_ns >= _WAIT_NS

    def step(self) -> None:
        """Yields when a slice is over. Call it after a piece of work of less than a tenth of a millisecond."""
        worked_ns = perf_counter_ns() - self._slice_ns
        if worked_ns >= SLICE_NS:
            self._worked_ns += worked_ns
            self._turns += 1
            self._backend.yield_now()
            self._slice_ns = perf_counter_ns()

    def stop_behind(self, job: Job) -> None:
        """Ends the page behind this job: another search continues there."""
        self.position = job.id - 1 if self._descending else job.id + 1

    def let_go(self) -> None:
        """Ends the search. It keeps its figures, and no job."""
        self._searched, self._seen = self.searched, []

    def still(self, job: Job) -> bool:
        """Returns whether a job that was found still exists and matches. Its body never changes."""
        return self._jobs.get(job.id) is job and bool(self._matcher.sift(self._seen_of([job])))

    def _seen_of(self, jobs: list[Job]) -> list[Job]:
        """Returns those of the jobs that may be looked at."""
        scope, tube_of = self._scope, self._backend.engine.tube_of
        return jobs if scope is EVERYTHING else [job for job in jobs if scope.looks(tube_of(job).name)]

    def pages(self) -> Iterator[list[Job]]:
        """Yields the jobs that match, some at a time. Between them `position` is behind all that was looked at."""
        matcher = self._matcher
        step = -1 if self._descending else 1
        listed = self._list()
        while True:
            page = (self._page() if listed is None else self._page_of(listed))[: matcher.at_once]
            seen = self._seen_of(page)
            self._searched, self._seen = self.searched, seen if self._scope.sees_all else []
            if not page:
                self.exhausted = True
                return
            turns = self._turns
            for part, found in self._matching(matcher.sift(seen)):
                if turns != self._turns:
                    found = [job for job in found if self.still(job)]
                self.position = part[-1].id + step
                self._searched += 0 if self._scope.sees_all else len(found)
                yield found
            self.position = page[-1].id + step
            self.step()

    def _matching(self, jobs: list[Job]) -> Iterator[tuple[list[Job], list[Job]]]:
        """Yields parts of the jobs, and of each part the jobs whose bodies match."""
        if self._matcher.words or self._matcher.patterns:
            for part in self._parts(jobs):
                yield part, [job for job, matches in zip(part, self._match(part), strict=True) if matches]
        elif jobs:
            yield jobs, jobs

    def _page(self) -> list[Job]:
        """Returns the next jobs of the table."""
        at, least, most = self.position, self._first, self._last
        if self._descending:
            jobs = self._jobs.down_from(at) if at >= 0 else []
        else:
            jobs = self._jobs.up_from(at) if at <= most else []
        if not jobs or least <= jobs[-1].id <= most:
            return jobs
        return [job for job in jobs if least <= job.id <= most]

    def _page_of(self, ids: list[int]) -> list[Job]:
        """Returns the next jobs of the list."""
        get = self._jobs.get
        while True:
            if self._descending:
                end = bisect_right(ids, self.position)
                part = ids[max(0, end - 64) : end][::-1]
            else:
                begin = bisect_left(ids, self.position)
                part = ids[begin : begin + 64]
            jobs = [job for job in map(get, part) if job is not None and job.id <= self._last]
            if jobs or not part:
                return jobs
            self.position = part[-1] + (-1 if self._descending else 1)
            self.step()

    # --- a better way than the whole table

    def _list(self) -> list[int] | None:
        """Returns the ids of all jobs that can match, in order, where these are few beside all jobs; else None.

        Jobs that exist all the time are in the list and in the table, whichever this or the next answer uses.
        """
        ids = self._matcher.ids
        if sum(most - least + 1 for least, most in ids) <= _LISTED_MAX:
            return [id for least, most in ids for id in range(least, min(most, self._last) + 1)]
        tubes = self._tubes()
        return None if tubes is None else self._list_of(tubes)

    def _tubes(self) -> list[Tube] | None:
        """Returns the tubes that can match; None for too many, or where too many of their jobs match."""
        tubes, matcher = self._backend.engine.tubes, self._matcher
        if matcher.tubes is not None:
            looks = self._scope.looks
            return [tube for name in matcher.tubes if looks(name) and (tube := tubes.get(name)) is not None]
        if len(tubes) > _LISTED_MAX // 8 or {RESERVED, READY} <= matcher.states:
            return None
        return list(tubes.values())

    def _list_of(self, tubes: list[Tube]) -> list[int] | None:
        engine = self._backend.engine
        orders = [order for tube in tubes for order in _orders(tube, self._matcher.states)]
        listed = sum(map(len, orders))
        all_jobs = engine.ready_count + engine.delayed_count + engine.buried_count + engine.reserved_count
        most = min(_LISTED_MAX, all_jobs // _WORTH)
        reserved = self._reserved_in(tubes) if listed <= most else None
        if reserved is None or listed + len(reserved) > most:
            return None
        return sorted(chain(reserved, *(order.smallest(_LISTED_MAX) for order in orders)))

    def _reserved_in(self, tubes: list[Tube]) -> list[int] | None:
        """Returns the ids of reserved jobs that can match; None for too many jobs or clients."""
        engine = self._backend.engine
        numbers = {tube.number for tube in tubes if tube.reserved}
        if RESERVED not in self._matcher.states or not numbers:
            return []
        if engine.reserved_count > _LISTED_MAX or len(engine.clients) > _LISTED_MAX // 4:
            return None
        held = (chain(client.reserved.values(), client.leaving) for client in engine.clients.values())
        return [job.id for job in chain.from_iterable(held) if job.tube in numbers]

    # --- bodies

    def _parts(self, jobs: list[Job]) -> Iterator[list[Job]]:
        """Yields the jobs, in parts that are matched at once. Raises SearchFailed."""
        cost = sum([pattern.cost for pattern, _ in self._matcher.patterns])
        engine = self._backend.engine
        part: list[Job] = []
        total = gone = 0
        for job in jobs:
            size = engine.size_of(job)
            job_cost = cost * size
            if job_cost > _COST_MAX:
                raise SearchFailed(
                    f"Job {job.id} has {size - CRLF_BYTES} bytes, too many for this regular expression. "
                    f"Add size<={_COST_MAX // cost} to the filter, or look for words."
                )
            job_gone = size if job.body is None else 0
            if part and (total + job_cost > _BATCH_COST_MAX or gone + job_gone > _READ_BYTES_MAX):
                yield part
                part, total, gone = [], 0, 0
            part.append(job)
            total += job_cost
            gone += job_gone
        if part:
            yield part

    def _match(self, jobs: list[Job]) -> list[bool]:
        """Returns for each job whether its body matches."""
        words, patterns = self._matcher.words, self._matcher.patterns
        bodies = self._bodies(jobs)
        verdicts = [self._has_words(body) for body in bodies] if words else [True] * len(jobs)
        cost = sum([pattern.cost for pattern, _ in patterns])
        large: list[int] = []
        for number, body in enumerate(bodies if patterns else ()):
            if not verdicts[number]:
                continue
            if cost * len(body) <= _HUB_COST_MAX:
                verdicts[number] = _fits(body[:-CRLF_BYTES], patterns)
                self.step()
            else:
                large.append(number)
        if large:
            for number, verdict in zip(large, self._match_in_thread([bodies[number] for number in large]), strict=True):
                verdicts[number] = verdict
        return verdicts

    def _match_in_thread(self, bodies: list[bytes]) -> list[bool]:
        views = [memoryview(body)[:-CRLF_BYTES] for body in bodies]
        with _one_at_a_time:
            verdicts: list[bool] = get_hub().threadpool.apply(_all_fit, (views, self._matcher.patterns))
        self._resume()
        return verdicts

    def _bodies(self, jobs: list[Job]) -> list[bytes]:
        if all(job.body is not None for job in jobs):
            return [held_body(job) for job in jobs]
        there = {job.id: body for job, body in self._backend.with_bodies(jobs)}
        self._resume()
        return [there.get(job.id, _GONE) for job in jobs]

    def _resume(self) -> None:
        """Begins a new slice, after a wait."""
        self._worked_ns += perf_counter_ns() - self._slice_ns
        self._slice_ns = perf_counter_ns()
        self._turns += 1

    def _has_words(self, body: bytes) -> bool:
        end = len(body) - CRLF_BYTES
        for word, wanted in self._matcher.words:
            if (self._has(body, word, end) if end > _WINDOW_BYTES else body.find(word, 0, end) >= 0) is not wanted:
                self.step()
                return False
            self.step()
        return True

    def _has(self, body: bytes, word: bytes, end: int) -> bool:
        """As find(), in windows: find() of a large body would block other clients."""
        for at in range(0, end, _WINDOW_BYTES):
            if body.find(word, at, min(end, at + _WINDOW_BYTES + len(word) - 1)) >= 0:
                return True
            self.step()
        return False


def _orders(tube: Tube, states: frozenset[int]) -> list[Any]:
    pairs = ((READY, tube.ready), (READY, tube.blocked), (DELAYED, tube.delayed), (BURIED, tube.buried))
    return [order for state, order in pairs if order is not None and state in states and order.first() >= 0]


def _fits(body: Any, patterns: list[tuple[Pattern, bool]]) -> bool:
    return all(pattern.matches(body) is wanted for pattern, wanted in patterns)


def _all_fit(bodies: list[Any], patterns: list[tuple[Pattern, bool]]) -> list[bool]:
    """Matches bodies in a thread. RE2 releases the interpreter's lock while it searches."""
    return [_fits(body, patterns) for body in bodies]
