"""Bodies that leave memory whenever they can, and never refuse a put: for tests of whoever needs them back."""

from __future__ import annotations

from geventstalk.core.bodies import Bodies, _Page
from geventstalk.core.job import Job
from geventstalk.core.places import Places
from geventstalk.durable.store import Store
from geventstalk.wire.commands import _FOR_PEEK
from geventstalk.wire.session import Session


class Forgetful(Bodies):
    """`kept_bytes` stay in memory, and what cannot leave it."""

    def __init__(self, kept_bytes: int) -> None:
        super().__init__(kept_bytes)
        self.let_gone = 0

    def admits(self, engine: Places, size: int) -> bool:
        self.make_room(engine, size)
        return True

    def _let_go(self, job: Job, page: _Page, stored: int) -> None:
        super()._let_go(job, page, stored)
        self.let_gone += 1


class PromptSession(Session):
    """A client that has a body at once, as if a device took no time."""

    def _await(self, job: Job, what_for: int) -> None:
        ledger = self._engine.ledger
        assert isinstance(ledger, Store)
        ledger._fetch(job)
        if what_for == _FOR_PEEK:
            self._found(job)
        else:
            self._reserved(job)
