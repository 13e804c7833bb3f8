"""Operations of every operator, that put a job and change many jobs, and one of the server itself. See replies.py.

This module must not know how an operator is answered: the classes that derive from these do.
Invariant: while Engine.held, an operation only goes on with a large job of which the ledger has some parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.bodies import AHEAD_MAX
from geventstalk.core.engine import ADMITTED, INSERTED, OUT_OF_MEMORY, UNFINISHED
from geventstalk.core.job import Job, TaggedTally
from geventstalk.core.operate import Operate
from geventstalk.tags import Tags
from geventstalk.turn.replies import Operation
from geventstalk.wire.commands import LARGE_PUT, MOVE_SLICE, PART_UNITS, Service


@mypyc_attr(allow_interpreted_subclasses=True)
class Put(Operation):
    """Puts a job. In the end `outcome` is INSERTED, DRAINING, OUT_OF_MEMORY or TOO_BIG; with INSERTED it is `job`.

    With tags it may also be DUPLICATE, and the engine's rules know the first job, or CYCLE.
    """

    def __init__(
        self,
        engine: Operate,
        service: Service,
        tube_name: bytes,
        body: bytes,
        pri: int,
        delay_s: int,
        ttr_s: int,
        tags: Tags | None = None,
    ) -> None:
        self.job: Job | None = None
        self.outcome = UNFINISHED
        self._engine = engine
        self._service = service
        self._tube_name = tube_name
        self._body = body
        self._numbers = pri, delay_s, ttr_s or 1
        self._tags = tags

    def run(self, now_ns: int) -> bool:
        outcome = self._put(now_ns)
        self.outcome = outcome
        if outcome == UNFINISHED:
            return False
        self.begun = False
        self._body = b""
        return True

    def _put(self, now_ns: int) -> int:
        engine, service = self._engine, self._service
        job = self.job
        if job is None:
            outcome = service.admit(len(self._body))
            if outcome != ADMITTED:
                return outcome
            try:
                self._body += b"\r\n"
            except MemoryError:
                return OUT_OF_MEMORY
            pri, delay_s, ttr_s = self._numbers
            job = self.job = engine.open_put_to(self._tube_name, pri, delay_s, ttr_s, now_ns)
            if self._tags is not None:
                job.tally = TaggedTally(self._tags)
        if len(self._body) >= LARGE_PUT:
            outcome = engine.prepare(job, self._body, now_ns)
            if outcome == UNFINISHED:
                self.begun = engine.ledger.has_begun(job)
                engine.work += PART_UNITS
                return UNFINISHED
            if outcome != INSERTED:
                engine.abandon_put(job)
                return outcome
        return engine.put(job, self._body, now_ns)


@mypyc_attr(allow_interpreted_subclasses=True)
class Changes(Operation):
    """Makes the same change to many jobs, one after the other. `counts` holds the outcomes.

    `change` gets an id and the time, and returns the outcome of its call of Operate. It is called again for the same id
    after UNFINISHED. `next` is the number of jobs that are done with. With `cancelled`, no other job follows.
    """

    def __init__(self, engine: Operate, ids: list[int], change: Callable[[int, int], int]) -> None:
        self.counts: dict[int, int] = {}
        self.next = 0
        self.cancelled = False
        self._engine = engine
        self._ids = ids
        self._change = change
        self._kept: list[Job] = []  # their bodies are to come, and to stay until the jobs are done with

    def run(self, now_ns: int) -> bool:
        engine, ids = self._engine, self._ids
        self.awaited = None
        while self.next < len(ids) and not self.cancelled:
            if engine.work >= MOVE_SLICE or (engine.held and not self.begun):
                return False
            id = ids[self.next]
            outcome = self._change(id, now_ns)
            if outcome == UNFINISHED:
                job = engine.jobs.get(id)
                self.begun = job is not None and engine.ledger.has_begun(job)
                if job is not None and job.body is None:
                    self._await(job)
                return False
            self.begun = False
            self.counts[outcome] = self.counts.get(outcome, 0) + 1
            self.next += 1
        if self.begun:
            engine.abandon_alter(ids[self.next])
            self.begun = False
        self._let_be()
        return True

    def _await(self, job: Job) -> None:
        """Has the body of this job fetched, and those of the next jobs."""
        jobs, bodies = self._engine.jobs, self._engine.bodies
        assert bodies is not None
        self._let_be()
        left = bodies.ahead_bytes
        for id in self._ids[self.next : self.next + AHEAD_MAX]:
            following = jobs.get(id)
            if following is not None and following.body is None and left > 0:
                left -= bodies.size_of(following)
                bodies.wait_for(following)
                self._kept.append(following)
        self.awaited = job

    def _let_be(self) -> None:
        for job in self._kept:
            assert self._engine.bodies is not None
            self._engine.bodies.let_be(job)
        self._kept.clear()


@mypyc_attr(allow_interpreted_subclasses=True)
class KeepSettings(Operation):
    """Keeps settings of the operator: see Operate.keep_settings(). In the end `outcome` is DONE or OUT_OF_MEMORY."""

    def __init__(self, engine: Operate, text: bytes) -> None:
        self._engine = engine
        self._text = text
        self.outcome = UNFINISHED

    def run(self, now_ns: int) -> bool:
        self.outcome = self._engine.keep_settings(self._text, now_ns)
        return True


class SettlePauses(Operation):
    """Pauses the tubes whose policies say so, and no others, after a change of the policies."""

    def __init__(self, engine: Operate) -> None:
        self._engine = engine
        self._tubes = [*engine.tube_by_number.values()]

    def run(self, now_ns: int) -> bool:
        engine, tubes = self._engine, self._tubes
        while tubes and engine.work < MOVE_SLICE:
            tube = tubes.pop()
            engine.work += 1
            if engine.tube_by_number.get(tube.number) is tube:
                engine.settle_pause(tube, now_ns)
        return not tubes

    def done(self) -> None:
        pass

    def failed(self) -> None:
        pass


SETTLE_MAX: Final = 1000
"""Jobs of one such operation."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Settling(Changes):
    """Changes some jobs whose tags want something now: see Operate.settle(). `over` in the end."""

    def __init__(self, engine: Operate) -> None:
        assert engine.rules is not None
        due = engine.rules.due
        super().__init__(engine, [due.popleft() for _ in range(min(len(due), SETTLE_MAX))], engine.settle)
        self.over = False

    def done(self) -> None:
        self.over = True

    def failed(self) -> None:
        self.over = True
