"""Finds the oldest job of each state, in one tube or in all: exactly, in slices, at next to no cost for commands.

This module must not know clocks. A job that was put later has a greater id, so the oldest job of a state is the one
with the smallest id. Strays are the exceptions: jobs of a restored journal whose times contradict their ids, because a
clock was wrong or an import brought them.
Invariant: no job of a state, but a stray, has a smaller id than the `low_...` of its tube and of the engine. A job that
comes into a state lowers these bounds; only a search raises them, up to the first job that is there. So a search goes
on where the last one ended, and looks once at each id that is gone.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

from geventstalk.core.engine import Engine
from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, Job
from geventstalk.core.state import EngineState
from geventstalk.core.tube import NO_ID, Tube

_STATES: Final = (READY, DELAYED, RESERVED, BURIED)
_PAGES: Final = 64
"""Pages of the job table that a slice searches for each state: a quarter of a millisecond, in pure Python."""
_FEW: Final = 256
"""Among this many jobs of a tube and a state the smallest id is searched directly."""
_LOOKS: Final = 4096
"""Clients and jobs that are looked at for the few reserved jobs of a tube."""
_STRAYS: Final = 4096
"""Strays that a slice looks at."""


class Oldest(NamedTuple):
    """The time at which the oldest job of each state was put, in monotonic nanoseconds, which are negative before this
    boot. None stands for a state without jobs.
    """

    ready: int | None
    delayed: int | None
    reserved: int | None
    buried: int | None


NO_JOBS: Final = Oldest(None, None, None, None)


class Search:
    """Searches for the oldest jobs of a tube, or with None of the server. go_on() is called until it returns them.

    The result is true when it is returned. Only among more than 4096 strays can a job be overlooked that
    came into its state while the search was under way.
    """

    __slots__ = ("_engine", "_stray", "_strays", "_tube")

    def __init__(self, engine: Engine, tube: Tube | None) -> None:
        self._engine = engine
        self._tube = tube
        self._stray = 0  # how many strays were looked at
        self._strays: dict[int, int] = {}  # when the oldest ones were put, by state
        if engine.unsorted:
            find_strays(engine)

    def go_on(self) -> Oldest | None:
        """Searches for up to a millisecond. Returns None when there is more to search."""
        engine, tube = self._engine, self._tube
        if tube is not None and not tube.jobs:
            return NO_JOBS
        found: list[int | None] = []
        for state in _STATES:
            first = _first(engine, tube, state)
            if first is _UNFINISHED:
                return None
            found.append(None if first is None else first.created_ns)
        if engine.strays:
            if not self._look_at_strays():
                return None
            for at, state in enumerate(_STATES):
                first_ns, stray_ns = found[at], self._strays.get(state)
                if stray_ns is not None and (first_ns is None or stray_ns < first_ns):
                    found[at] = stray_ns
        return Oldest(*found)

    def _look_at_strays(self) -> bool:
        """Looks at some strays; they are in order of age. Returns whether that was all."""
        strays, jobs, tube = self._engine.strays, self._engine.jobs, self._tube
        if len(strays) <= _STRAYS:
            self._stray = 0
            self._strays.clear()
        end = min(self._stray + _STRAYS, len(strays))
        for id in strays[self._stray : end]:
            job = jobs.get(id)
            if job is not None and (tube is None or job.tube == tube.number):
                self._strays.setdefault(job.state, job.created_ns)
        self._stray = end
        return end == len(strays)


_UNFINISHED: Final = Job(0, 0, 0, 0, 0)
"""Stands for the first job of a search that is not at its end."""


def _first(engine: Engine, tube: Tube | None, state: int) -> Job | None:
    """Returns the job of this state with the smallest id that is no stray, None, or _UNFINISHED."""
    if not _count(engine, tube, state):
        return None
    where: EngineState | Tube = engine if tube is None else tube
    low = _low(where, state)
    job = engine.jobs.get(low)
    if job is not None and _is_there(engine, tube, state, job):
        return job
    ids = None if tube is None or _count(engine, tube, state) > _FEW else _ids(tube, state)
    if ids is not None:
        low = min([id for id in ids if id not in engine.stray_ids], default=NO_ID)
        _raise_low(where, state, low)
        return engine.jobs.get(low)
    for _ in range(_PAGES):
        jobs = engine.jobs.up_from(low)
        if not jobs:  # all of the state are strays
            _raise_low(where, state, low)
            return None
        for job in jobs:
            if job.state == state and _is_there(engine, tube, state, job):
                _raise_low(where, state, job.id)
                return job
        low = jobs[-1].id + 1
    _raise_low(where, state, low)
    return _UNFINISHED


def _is_there(engine: Engine, tube: Tube | None, state: int, job: Job) -> bool:
    if job.state != state or (tube is not None and job.tube != tube.number):
        return False
    return not engine.stray_ids or job.id not in engine.stray_ids


def _count(engine: Engine, tube: Tube | None, state: int) -> int:
    if tube is None:
        if state == READY:
            return engine.ready_count
        if state == DELAYED:
            return engine.delayed_count
        return engine.reserved_count if state == RESERVED else engine.buried_count
    if state == RESERVED:
        return tube.reserved
    if state == READY:
        return tube.ready_count()
    return len(tube.delayed if state == DELAYED else tube.buried)


def _ids(tube: Tube, state: int) -> list[int] | None:
    """Returns the ids of few jobs, or None when to find them would take long."""
    if state == RESERVED:
        return _held_by_watchers(tube)
    order = tube.ready if state == READY else tube.delayed if state == DELAYED else tube.buried
    ids = order.smallest(_FEW)
    if state == READY and tube.blocked is not None:
        ids += tube.blocked.smallest(_FEW)
    return ids


def _held_by_watchers(tube: Tube) -> list[int] | None:
    """Returns the reserved jobs of a tube, or None unless few clients that watch the tube hold all of them."""
    ids = []
    looks = len(tube.watchers)
    for client in tube.watchers.values() if looks <= _LOOKS else ():
        looks += len(client.reserved)
        if looks > _LOOKS:
            break
        ids += [job.id for job in client.reserved.values() if job.tube == tube.number]
    return ids if len(ids) == tube.reserved else None


def _low(where: EngineState | Tube, state: int) -> int:
    if state == READY:
        return where.low_ready
    if state == DELAYED:
        return where.low_delayed
    return where.low_reserved if state == RESERVED else where.low_buried


def _raise_low(where: EngineState | Tube, state: int, id: int) -> None:
    if state == READY:
        where.low_ready = id
    elif state == DELAYED:
        where.low_delayed = id
    elif state == RESERVED:
        where.low_reserved = id
    else:
        where.low_buried = id


def find_strays(engine: Engine) -> None:
    """Finds, after a restart, the fewest jobs without which ages fit ids. O(jobs)."""
    jobs = [*engine.jobs.in_order()]
    ends: list[int] = []  # when the last job of a chain was put that fits, by the chain's length
    lengths = []  # of the longest chain that ends with each job
    for job in jobs:
        length = bisect_right(ends, job.created_ns)
        ends[length : length + 1] = [job.created_ns]
        lengths.append(length)
    strays = []
    length, next_ns = len(ends) - 1, ends[-1] if ends else 0
    for job, chain in zip(reversed(jobs), reversed(lengths), strict=True):
        if chain == length and job.created_ns <= next_ns:
            length -= 1
            next_ns = job.created_ns
        else:
            strays.append(job)
    strays.sort(key=_age)
    engine.strays = [job.id for job in strays]
    engine.stray_ids = {*engine.strays}
    engine.unsorted = False


def _age(job: Job) -> int:
    return job.created_ns
