"""Applies the changes of another node to the engine of a follower, which serves no client.

This module must not know clocks, nor how a change is written down. No client waits for a job, so no job is handed out;
the totals are those of this process.
Invariant: after each call the engine is as if all of its jobs had been restored just now, but for the moments since
which they are in their states; the tests prove it, ages included. So a follower that is to lead has nothing left to do.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from geventstalk.core.ages import find_strays
from geventstalk.core.engine import Engine
from geventstalk.core.job import BURIED, DELAYED, DELETED, READY, SECOND_NS, Job, TaggedTally
from geventstalk.core.tube import Tube

_LONG_AGO_NS: Final = -(1 << 62)
_PAGES: Final = 4
"""Pages of jobs that are searched for a neighbour whose age fits. Without one the job counts as a stray."""
_STRAYS: Final = 4096
"""With more new strays than this, and an eighth of all jobs, a search for fewer pays."""
_SAME_NS: Final = SECOND_NS
"""Two records of one job may differ by this in the time of its put, as the clocks of two nodes do."""


class Mirror:
    """Made when the engine has been filled. All jobs change through it until clients are served."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._newest_id = 0  # no job but a stray has a greater id,
        self._newest_ns = _LONG_AGO_NS  # nor was it put later
        self._strays_ns: list[int] = []  # when the strays were put, also those that are gone
        self._strays_max = 0
        if engine.unsorted:
            find_strays(engine)
        self._look_at_all()

    def set(self, job: Job, tube_name: bytes, now_ns: int) -> None:
        """Takes in a whole job, new or changed, or the mark of a job."""
        before = self.engine.jobs.get(job.id)
        if job.state == DELETED:
            self.mark(job, tube_name, now_ns)
        elif before is None:
            self.add(job, tube_name, now_ns)
        else:
            self.replace(before, job, tube_name, now_ns)

    def add(self, job: Job, tube_name: bytes, now_ns: int) -> None:
        """Adds a new job: READY, or DELAYED or BURIED with its rank."""
        engine = self.engine
        tube = engine._tube(tube_name)
        tube.jobs += 1
        tube.bytes += engine.size_of(job)
        job.tube = tube.number
        job.since_ns = now_ns
        if isinstance(job.tally, TaggedTally):
            engine.rules_of_tags().enter(job, tube)
        self.place(job, tube, now_ns)
        engine.jobs.add(job)
        if engine.bodies is not None:
            engine.bodies.came(job)
        if job.id >= engine.next_id:
            engine.next_id = job.id + 1
        if job.id > self._newest_id and job.created_ns >= self._newest_ns:
            self._newest_id, self._newest_ns = job.id, job.created_ns
        else:
            self._find_age(job)

    def replace(self, before: Job, job: Job, tube_name: bytes, now_ns: int) -> None:
        """Replaces a job, perhaps in another tube."""
        engine = self.engine
        left = engine._leave_place(before)
        tube = engine._tube(tube_name)
        if isinstance(job.tally, TaggedTally):
            engine.rules_of_tags()
        if engine.rules is not None:
            engine.rules.enter(job, tube)  # before the other leaves, or their group would be done for a moment
            engine.rules.leave(before, left, now_ns)
            engine.rules.moves(job, left, tube_name)
        left.jobs -= 1
        left.bytes -= engine.size_of(before)
        tube.jobs += 1
        tube.bytes += engine.size_of(job)
        job.tube = tube.number
        job.since_ns = before.since_ns if job.state == before.state else now_ns
        self.place(job, tube, now_ns)
        engine.jobs.set(job)
        if engine.bodies is not None:
            engine.bodies.left(before)
            engine.bodies.came(job)
        if left is not tube:
            engine._forget_if_unused(left)
        if -_SAME_NS < job.created_ns - before.created_ns < _SAME_NS:
            job.created_ns = before.created_ns
            return
        if job.id in engine.stray_ids:
            at = engine.strays.index(job.id)
            del engine.strays[at], self._strays_ns[at]
            engine.stray_ids.remove(job.id)
        self._find_age(job)

    def lift(self, job: Job) -> Tube:
        """Takes a job out of its place. The caller changes its fields, and calls place()."""
        return self.engine._leave_place(job)

    def place(self, job: Job, tube: Tube, now_ns: int) -> None:
        """Gives a job the place that its fields name."""
        engine = self.engine
        if job.state == BURIED:
            if job.rank > engine._bury_number:
                engine._bury_number = job.rank
            engine._place_buried(tube, job.rank, job)
        elif job.state == DELAYED and job.rank > now_ns:
            engine._place_delayed(tube, job.rank, job.id)
        else:
            engine._place_ready(tube, job.pri, job, now_ns)
            job.state = READY
            job.rank = job.pri

    def remove(self, job: Job, now_ns: int) -> None:
        """Removes a job."""
        engine = self.engine
        tube = engine._leave_place(job)
        tube.jobs -= 1
        tube.bytes -= engine.size_of(job)
        engine.jobs.remove(job.id)
        if engine.bodies is not None:
            engine.bodies.left(job)
        engine._forget_if_unused(tube)
        if engine.rules is not None:
            engine.rules.leave(job, tube, now_ns)

    def mark(self, mark: Job, tube_name: bytes, now_ns: int) -> None:
        """Keeps the mark of a job that is deleted, in place of the job or of an earlier copy of the mark."""
        engine = self.engine
        rules = engine.rules_of_tags()
        job = engine.jobs.get(mark.id)
        if job is not None:
            self.remove(job, now_ns)
        elif mark.id in rules.marks:
            rules.drop_mark(mark.id)
        mark.body = b"\r\n"
        rules.add_mark(mark, tube_name)
        if mark.id >= engine.next_id:
            engine.next_id = mark.id + 1

    def forget_mark(self, id: int) -> None:
        """Forgets a mark, if there is one of this id."""
        rules = self.engine.rules
        if rules is not None and id in rules.marks:
            rules.drop_mark(id)

    # --- ages

    def _find_age(self, job: Job) -> None:
        """Makes a job a stray if its age does not fit its id, see ages.py."""
        engine = self.engine
        before = self._neighbour(job.id, up=False)
        after = self._neighbour(job.id, up=True)
        if before is not None and after is not None:
            fits = (before is _NOTHING or before.created_ns <= job.created_ns) and (
                after is _NOTHING or job.created_ns <= after.created_ns
            )
            if fits:
                self._newest_id = max(self._newest_id, job.id)
                self._newest_ns = max(self._newest_ns, job.created_ns)
                return
        at = bisect_right(self._strays_ns, job.created_ns)
        self._strays_ns.insert(at, job.created_ns)
        engine.strays.insert(at, job.id)
        engine.stray_ids.add(job.id)
        if len(engine.strays) > self._strays_max:
            self._sort_strays()

    def _neighbour(self, id: int, *, up: bool) -> Job | None:
        """Returns the nearest job in this direction that is no stray, _NOTHING for none, None when it is far away."""
        jobs, strays = self.engine.jobs, self.engine.stray_ids
        step = 1 if up else -1
        id += step
        for _ in range(_PAGES):
            found = jobs.up_from(id) if up else jobs.down_from(id)
            if not found:
                return _NOTHING
            for job in found:
                if job.id not in strays:
                    return job
            id = found[-1].id + step
        return None

    def _sort_strays(self) -> None:
        """Forgets strays that are gone; when most are there, finds as few as possible."""
        engine = self.engine
        there = [id for id in engine.strays if engine.jobs.get(id) is not None]
        if len(there) * 8 > len(engine.jobs) + 8 * _STRAYS:
            find_strays(engine)
            self._look_at_all()
            return
        engine.strays = there
        engine.stray_ids = {*there}
        self._take_strays()

    def _look_at_all(self) -> None:
        """Finds the newest job, after the strays were found. O(jobs)."""
        engine = self.engine
        self._newest_id, self._newest_ns = 0, _LONG_AGO_NS
        for job in engine.jobs:
            if job.id not in engine.stray_ids:
                self._newest_id = max(self._newest_id, job.id)
                self._newest_ns = max(self._newest_ns, job.created_ns)
        self._take_strays()

    def _take_strays(self) -> None:
        self._strays_ns = []
        for id in self.engine.strays:
            job = self.engine.jobs.get(id)
            assert job is not None, "those that are gone were just forgotten"
            self._strays_ns.append(job.created_ns)
        self._strays_max = 2 * len(self._strays_ns) + _STRAYS


_NOTHING: Final = Job(0, 0, 0, 0, 0)
"""Stands for a neighbour where there is none."""
