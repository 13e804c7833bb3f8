"""Events of the jobs of a tube, found by comparing two looks at them, over the API or over the protocol alone.

The counts of a job (reserves, releases, ...) tell what happened between two looks. Jobs that were put and deleted
between two looks are told as a number, from the counters of the tube. Invariant: a look costs the server a bounded
number of jobs, however many the tube has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from geventstalk.remote import shapes
from geventstalk.remote.api import Api, tube_path
from geventstalk.remote.api import field as api_field
from geventstalk.remote.errors import Absent
from geventstalk.remote.protocol import DEFAULT, PEEKS, Beanstalk
from geventstalk.remote.shapes import Shape

_FOLLOWED_MAX: Final = 500
"""The most jobs that a look requests one by one."""
EACH_END: Final = 250
"""Jobs with the smallest and with the largest ids that a look over the API takes: some milliseconds of the server."""
_COUNTED: Final = {
    "reserves": "reserved",
    "timeouts": "timed out",
    "releases": "released",
    "buries": "buried",
    "kicks": "kicked",
}


@dataclass(frozen=True)
class Event:
    """An event of a job; or, without an id, of `jobs` jobs that no look has seen."""

    event: str
    id: int | None = None
    job: Shape | None = None
    jobs: int = 1
    tube: str | None = None
    """The tube that a job moved to."""


@dataclass
class Look:
    """The jobs of the tube at one time. `covers` returns whether it holds a job of this id, if the tube does."""

    jobs: dict[int, Shape] = field(default_factory=dict)
    covers: Callable[[int], bool] = lambda _id: False
    put: int = 0
    deleted: int = 0
    fresh: frozenset[int] = frozenset()
    """Jobs that were put since the last look, where the source knows that."""


class Source(Protocol):
    """A way of looking at a tube."""

    def look(self) -> Look: ...

    def where(self, id: int) -> str | None:
        """Returns the tube of a job; None when it is gone."""


def compare(before: Look, now: Look, where: Callable[[int], str | None]) -> Iterator[Event]:
    """Yields the events between two looks, in the order of ids."""
    put = deleted = missing = 0
    for id in sorted(before.jobs.keys() | now.jobs.keys()):
        old, new = before.jobs.get(id), now.jobs.get(id)
        if new is None:
            if not now.covers(id):
                continue
            missing += 1
            tube = where(id) if missing <= _FOLLOWED_MAX else None
            deleted += tube is None
            yield Event("deleted" if tube is None else "moved", id, old, tube=tube)
        elif old is not None:
            yield from _happened(old["counts"], new, old["state"])
        elif id in now.fresh:
            put += 1
            yield Event("put", id, new)
            yield from _happened(dict.fromkeys(_COUNTED, 0), new, new["state"])
    # A tube that went with its last job begins to count at 0.
    for event, unseen in (("put", now.put - before.put), ("deleted", now.deleted - before.deleted)):
        unseen = max(0, unseen) - (put if event == "put" else deleted)
        if unseen > 0:
            yield Event(event, jobs=unseen)


def _happened(counts: dict[str, int], new: Shape, state_before: str) -> Iterator[Event]:
    """Returns the events that the counts of a job tell. A job that is reserved now was reserved last."""
    found = [name for key, name in _COUNTED.items() if new["counts"][key] > counts[key]]
    if len(found) > 1 and new["state"] == "reserved" and found[0] == "reserved":
        found = [*found[1:], found[0]]
    if not found and new["state"] != state_before:
        found = [new["state"]]  # a delay that ended, or a worker that left
    for name in found:
        yield Event(name, new["id"], new)


class OverApi:
    """Looks at the jobs of the tube with the smallest and with the largest ids, over the API."""

    def __init__(self, api: Api, tube: str, body: int) -> None:
        self._api: Final = api
        self._tube: Final = tube
        self._body: Final = body
        self._highest: int | None = None

    def look(self) -> Look:
        totals = self._totals()
        first, whole = self._page(newest_first=False)
        last: dict[int, Shape] = {} if whole else self._page(newest_first=True)[0]
        up_to, since = max(first, default=0), min(last, default=0)
        jobs = {**first, **last}
        before, self._highest = self._highest, max([self._highest or 0, *jobs])
        # A job with a smaller id than one that was seen came from another tube, or was hidden among many.
        fresh = frozenset(id for id in jobs if before is not None and id > before)
        return Look(
            jobs=jobs,
            covers=(lambda _id: True) if whole else (lambda id: id <= up_to or id >= since),
            put=totals.get("put", 0),
            deleted=totals.get("delete", 0),
            fresh=fresh,
        )

    def where(self, id: int) -> str | None:
        try:
            return str(self._api.job(id, 0)["tube"])
        except Absent:
            return None

    def _page(self, *, newest_first: bool) -> tuple[dict[int, Shape], bool]:
        """Returns a page of jobs, and whether these are all."""
        jobs: dict[int, Shape] = {}
        cursor: str | None = None
        # A page may end early, where the server has searched long enough for one answer.
        for _ in range(5):
            page = self._api.get(
                "/jobs",
                filter=f"tube:{self._tube}",
                limit=EACH_END - len(jobs),
                cursor=cursor,
                descending=newest_first or None,
                body=self._body,
            )
            jobs.update({job["id"]: job for job in map(shapes.checked_job, api_field(page, "jobs", list))})
            cursor = page.get("next")
            if cursor is None or len(jobs) >= EACH_END:
                break
        return jobs, cursor is None

    def _totals(self) -> dict[str, int]:
        try:
            totals = api_field(self._api.get(tube_path(self._tube)), "totals", dict)
            return {key: api_field(totals, key, int) for key in ("put", "delete")}
        except Absent:
            return {}


class OverProtocol:
    """Looks at the next job of each state, and follows the jobs that were seen, over the protocol."""

    def __init__(self, server: Beanstalk, tube: str, body: int) -> None:
        self._server: Final = server
        self._tube: Final = tube
        self._body: Final = body
        self._followed: dict[int, bytes] = {}
        self._began = False

    def look(self) -> Look:
        facts = next(self._server.tube_stats([self._tube]), None)
        new = set() if facts is None else self._peek()
        asked = set(self._followed)
        jobs = {}
        for job_facts in self._server.job_stats(list(self._followed)):
            job = shapes.job(job_facts, self._followed.get(shapes.number(job_facts, "id")), self._body)
            if job["tube"] == self._tube:
                jobs[job["id"]] = job
        self._follow(jobs)
        fresh = frozenset(id for id in new & jobs.keys() if self._began and jobs[id]["age_s"] <= 1)
        self._began = True
        return Look(
            jobs=jobs,
            covers=lambda id: id in asked,
            put=shapes.number(facts, "total-jobs") if facts else 0,
            deleted=shapes.number(facts, "cmd-delete") if facts else 0,
            fresh=fresh,
        )

    def _peek(self) -> set[int]:
        """Follows the next job of each state; returns the ids that are new."""
        new = set()
        self._server.use(self._tube)  # `use` would create a tube that does not exist
        for state in PEEKS:
            found = self._server.peek_next(state)
            if found is not None and found[0] not in self._followed:
                self._followed[found[0]] = found[1]
                new.add(found[0])
        self._server.use(DEFAULT)  # the tube can go when its last job goes
        return new

    def _follow(self, jobs: dict[int, Shape]) -> None:
        """Follows the jobs that are still there; of too many the latest."""
        kept = sorted(jobs)[-_FOLLOWED_MAX:]
        self._followed = {id: self._followed[id] for id in kept}

    def where(self, id: int) -> str | None:
        facts = next(self._server.job_stats([id]), None)
        return None if facts is None else facts.get("tube", "")
