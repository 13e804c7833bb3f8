"""Keeps the last events of jobs, and done jobs, for tubes whose policies ask for them.

This module must not know clients, tubes or formats. All of it is in memory, within the bounds below, and ends with the
process. Invariant: no job has more than EVENTS_MAX events, all tubes together no more than DONE_MAX done jobs.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

from geventstalk.core.job import CRLF_BYTES, SECOND_NS, Job
from geventstalk.policies import Policy

EVENTS_MAX: Final = 10
JOBS_MAX: Final = 10_000
"""Jobs with events; of more, those go first that have had events for the longest time."""
DONE_MAX: Final = 10_000
BODY_BYTES: Final = 200
"""The bytes that a done job keeps of its body."""

PUT: Final = 0
RESERVED: Final = 1
RELEASED: Final = 2
TIMED_OUT: Final = 3
HUNG_UP: Final = 4
BURIED: Final = 5
KICKED: Final = 6
MOVED: Final = 7
EVENT_NAMES: Final = ("put", "reserved", "released", "timed out", "hung up", "buried", "kicked", "moved")


class Event(NamedTuple):
    """Something that happened to a job. `client` is the number of the connection, 0 where it was none."""

    what: int
    at_ns: int
    client: int


class Done(NamedTuple):
    """A job that its worker has deleted. `begun_ns` is when the worker has reserved it."""

    id: int
    put_ns: int
    begun_ns: int
    ended_ns: int
    reserves: int
    size: int
    body: bytes


@mypyc_attr(acyclic=True)
class Trails:
    """The events of jobs, and the done jobs of tubes. The engine tells of each change, with the policy of the tube."""

    def __init__(self, jobs_max: int = JOBS_MAX, done_max: int = DONE_MAX) -> None:
        self._jobs_max = jobs_max
        self._done_max = done_max
        self._events: dict[int, list[Event]] = {}  # by the job
        self._done: dict[bytes, deque[Done]] = {}  # by the tube, the last one at the end
        self._count = 0

    def note(self, policy: Policy | None, id: int, what: int, client: int, now_ns: int) -> None:
        """Notes an event, where the policy wants events."""
        if policy is None or not policy.terms.events:
            return
        events = self._events.get(id)
        if events is None:
            if len(self._events) >= self._jobs_max:
                del self._events[next(iter(self._events))]
            events = self._events[id] = []
        elif len(events) >= EVENTS_MAX:
            del events[0]
        events.append(Event(what, now_ns, client))

    def ends(self, policy: Policy | None, tube: bytes, job: Job, now_ns: int) -> None:
        """Notes that a job is deleted, by the worker that has it reserved or by another client."""
        self._events.pop(job.id, None)
        if policy is None or not job.holder:
            return
        most, most_s = policy.terms.keep
        if not most and not most_s:
            return
        done = self._done.get(tube)
        if done is None:
            done = self._done[tube] = deque()
        body = job.body or b""
        size = max(0, len(body) - CRLF_BYTES)
        tally = job.tally
        reserves = 0 if tally is None else int(tally.reserves)
        kept = body[: min(size, BODY_BYTES)]
        done.append(Done(job.id, job.created_ns, job.since_ns, now_ns, reserves, size, kept))
        self._count += 1
        while most and len(done) > most:
            self._forget(done)
        while most_s and done and done[0].ended_ns < now_ns - most_s * SECOND_NS:
            self._forget(done)
        while self._count > self._done_max:
            self._make_room()

    def _forget(self, done: deque[Done]) -> None:
        done.popleft()
        self._count -= 1

    def _make_room(self) -> None:
        """Forgets the first done job of the tube that is the first to have one."""
        name, done = next(iter(self._done.items()))
        self._forget(done)
        if not done:
            del self._done[name]

    def events_of(self, id: int) -> list[Event]:
        """Returns the last events of a job, the first one first."""
        return self._events.get(id, [])

    def done_in(self, tube: bytes, policy: Policy | None, now_ns: int) -> list[Done]:
        """Returns the done jobs of a tube that are kept, the last one first."""
        found = [*reversed(self._done.get(tube, ()))]
        most, most_s = (0, 0) if policy is None else policy.terms.keep
        if most_s:
            return [each for each in found if each.ended_ns >= now_ns - most_s * SECOND_NS]
        return found[:most]
