"""Bodies that leave memory whenever they can, and never refuse a put: for tests of all that needs them back."""

from __future__ import annotations

from geventstalk.core.bodies import Bodies, _Page
from geventstalk.core.job import RESERVED, Job
from geventstalk.core.state import EngineState
from geventstalk.wire.commands import _FOR_PEEK
from geventstalk.wire.session import Session


class Forgetful(Bodies):
    """`kept_bytes` stay in memory, and what cannot leave it."""

    def __init__(self, kept_bytes: int) -> None:
        super().__init__(kept_bytes)
        self.let_gone = 0

    def claim(self, engine: EngineState, id: int, size: int, left: int = 0) -> bool:
        if not left:
            self.make_room(engine, size)
        return super().claim(engine, id, size, left)

    def _has_room(self, engine: EngineState, size: int) -> bool:
        return True

    def _refuse(self, size: int) -> bool:
        return True

    def seal_at(self) -> int:
        """Segments end when they are full: otherwise the bound of 0 would end one every 4 KB."""
        return 0

    def _let_go(self, job: Job, page: _Page, stored: int) -> None:
        super()._let_go(job, page, stored)
        self.let_gone += 1


AWAITS_JOB, AWAITS_LOOK, BEGINS_ANEW = "awaits to tell of", "awaits to show", "begins anew"
"""What a session traces beside commands and replies. The data is the id of a job."""


class AwaitingSession(Session):
    """A client that says when its reply waits for a body."""

    def _await(self, job: Job, what_for: int) -> None:
        super()._await(job, what_for)
        if self.trace is not None:
            self.trace(AWAITS_LOOK if what_for == _FOR_PEEK else AWAITS_JOB, b"%d" % job.id)

    def _awaits_body(self, job: Job, now_ns: int) -> bool:
        ended = job.state != RESERVED or job.holder != self.number
        if self.trace is not None and ended and self._await_for != _FOR_PEEK:
            self.trace(BEGINS_ANEW, b"%d" % job.id)
        return super()._awaits_body(job, now_ns)
