"""Finds jobs of a tube and a state in order of id, in slices: among all jobs, for no order of a tube is one of ids.

This module must not know clocks or commands. Invariant: a job that is there, in that state, from the first slice to the
last is found, unless enough others were.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core.ages import _count, _low
from geventstalk.core.engine import Engine
from geventstalk.core.tube import Tube

_PAGES: Final = 64
"""Pages of the job table that a slice looks through: a quarter of a millisecond, in pure Python."""


_ALL: Final = 1 << 60


class Listing:
    """Up to `count` jobs of a tube and a state, with ids above `after`. Their ids come into `found`."""

    def __init__(self, engine: Engine, tube: Tube, state: int, after: int, count: int) -> None:
        self.found: list[int] = []
        self._engine = engine
        self._tube = tube
        self._state = state
        self._count = count if after else min(count, _count(engine, tube, state))
        self._next = after + 1 if engine.stray_ids else max(after + 1, _low(tube, state))

    def forget(self) -> None:
        """Forgets the jobs that were found: the caller needs them no more."""
        self._count -= len(self.found)
        self.found = []

    def go_on(self, most: int = _ALL) -> bool:
        """Looks through a slice, and further only with fewer than `most` in `found`. Returns whether that was all."""
        found, count = self.found, self._count
        number, state = self._tube.number, self._state
        for _ in range(_PAGES):
            jobs = self._engine.jobs.up_from(self._next) if len(found) < count else []
            if not jobs:
                return True
            if len(found) >= most:
                break
            for job in jobs:
                if job.state == state and job.tube == number and len(found) < count:
                    found.append(job.id)
            self._next = jobs[-1].id + 1
        return False
