"""Operators' changes of single jobs, as operations, and the answer for each outcome.

This module must not know requests. Invariant: a job that changed since the operator saw it is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import falcon

from geventstalk.core.engine import CYCLE, DRAINING, DUPLICATE, INSERTED, OUT_OF_MEMORY, TOO_BIG, UNFINISHED
from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, STATE_NAMES, Job
from geventstalk.core.operate import DONE, KEEP, NOT_FOUND, WRONG_STATE, Operate, can_alter
from geventstalk.http import views
from geventstalk.http.backend import Backend
from geventstalk.http.scope import EVERYTHING, Scope
from geventstalk.rights import LOOK, MANAGE
from geventstalk.tags import Tags
from geventstalk.turn.operations import Changes, Put

ACTIONS: Final = ("delete", "kick", "bury", "release", "move", "change")
BODY_BYTES: Final = 65536
"""The bytes of a body that are shown with its job."""
NO_ROOM: Final = "There is no room for it: memory or the journal is full."
NO_RIGHT: Final = "You have no right to change this tube's jobs."
_UNFIT: Final = {
    "kick": "The job is {state}. Only a buried or a delayed job can be kicked.",
    "bury": "The job is buried already.",
    "release": "The job is {state}. Only a reserved job can be released.",
    "change": "The job is {state}. A reserved job takes a new ttr only, and a buried job has no delay.",
}


class Values:
    """The new values of a job: KEEP, and no tube, leave the old ones."""

    def __init__(self, pri: int = KEEP, delay_s: int = KEEP, ttr_s: int = KEEP, tube: bytes = b"") -> None:
        self.pri = pri
        self.delay_s = delay_s
        self.ttr_s = ttr_s
        self.tube = tube

    def __bool__(self) -> bool:
        return (self.pri, self.delay_s, self.ttr_s, self.tube) != (KEEP, KEEP, KEEP, b"")

    def __str__(self) -> str:
        named = {"pri": self.pri, "delay": self.delay_s, "ttr": self.ttr_s}
        words = [f"{name} {value}" for name, value in named.items() if value != KEEP]
        if self.tube:
            words.append(f"tube {self.tube.decode('ascii')}")
        return ", ".join(words)


def change_of(engine: Operate, action: str, values: Values) -> Callable[[int, int], int]:
    """Returns a function that changes the job of an id."""
    if action == "delete":
        return engine.force_delete
    if action == "kick":
        return engine.kick_one
    if action == "release":
        return engine.force_release
    if action == "bury":
        return engine.force_bury
    pri, delay_s, ttr_s, tube = values.pri, values.delay_s, values.ttr_s, values.tube
    return lambda id, now_ns: engine.alter(id, pri, delay_s, ttr_s, tube, now_ns)


def fitting(action: str, values: Values) -> frozenset[int]:
    """Returns the states of jobs that the action fits."""
    if action == "kick":
        return frozenset((DELAYED, BURIED))
    if action == "bury":
        return frozenset((READY, DELAYED, RESERVED))
    if action == "release":
        return frozenset((RESERVED,))
    states = frozenset((READY, DELAYED, RESERVED, BURIED))
    if action == "delete":
        return states
    pri, delay_s, moves = values.pri, values.delay_s, bool(values.tube)
    return frozenset(state for state in states if can_alter(state, pri, delay_s, moves))


class _ChangeOfJob:
    """Changes one job, and keeps its views before and after: afterwards it may be gone already.

    `body` is that of the job, which may not be in memory. The operation holds this object and not the reverse: the
    server has no collector of cycles.
    """

    def __init__(self, backend: Backend, action: str, values: Values, body: bytes, scope: Scope) -> None:
        self.outcome = UNFINISHED
        self.before: views.Json = {}
        self.after: views.Json = {}
        self._backend = backend
        self._body = body
        self._scope = scope
        self._deletes = action == "delete"
        self._do = change_of(backend.engine, action, values)

    def __call__(self, id: int, now_ns: int) -> int:
        engine = self._backend.engine
        job = engine.jobs.get(id)
        if job is not None:
            name = engine.tube_of(job).name
            if not self._scope.may(name, MANAGE):  # the job was moved, or the right taken away, since the request came
                self.outcome = NOT_FOUND
                return NOT_FOUND
            self.before = {"tube": name.decode("ascii"), "state": STATE_NAMES[job.state]}
        self.outcome = self._do(id, now_ns)
        if self.outcome == DONE and job is not None and not self._deletes:
            self.after = views.job(self._backend, job, now_ns, BODY_BYTES, self._body)
        return self.outcome


class OneChange(Changes):
    """Changes one job. `before` and `after` are its views."""

    def __init__(
        self, backend: Backend, id: int, action: str, values: Values, body: bytes, scope: Scope = EVERYTHING
    ) -> None:
        self._action = action
        self._change_of_job = _ChangeOfJob(backend, action, values, body, scope)
        super().__init__(backend.engine, [id], self._change_of_job)

    @property
    def before(self) -> views.Json:
        return self._change_of_job.before

    @property
    def after(self) -> views.Json:
        return self._change_of_job.after

    def done(self) -> None:
        pass

    def failed(self) -> None:
        pass

    def require_done(self) -> None:
        """Raises HTTPError for any other outcome."""
        outcome = self._change_of_job.outcome
        if outcome == NOT_FOUND:
            raise no_such_job()
        if outcome == WRONG_STATE:
            raise falcon.HTTPConflict(description=_UNFIT[self._action].format(**self.before))
        if outcome == OUT_OF_MEMORY:
            raise falcon.HTTPInsufficientStorage(description=NO_ROOM)
        assert outcome == DONE, outcome


class OnePut(Put):
    """Puts a job. `after` is its view; later it may be gone already. With DUPLICATE, id and state of the first job."""

    def __init__(
        self, backend: Backend, tube: bytes, body: bytes, numbers: tuple[int, int, int], tags: Tags | None
    ) -> None:
        super().__init__(backend.engine, backend.service, tube, body, *numbers, tags)
        self.after: views.Json = {}
        self._backend = backend
        self._tube = tube
        self.size = len(body)

    def run(self, now_ns: int) -> bool:
        over = super().run(now_ns)
        job = self.job
        if self.outcome == INSERTED and job is not None:
            self.after = views.job(self._backend, job, now_ns, BODY_BYTES)
        elif self.outcome == DUPLICATE:
            first = self._backend.engine.rules_of_tags().duplicate
            self.after = {"id": first.id, "state": STATE_NAMES[first.state]}
        return over

    def done(self) -> None:
        pass

    def failed(self) -> None:
        pass

    def require_done(self) -> None:
        """Raises HTTPError for any other outcome."""
        if self.outcome == DRAINING:
            raise falcon.HTTPServiceUnavailable(description="The server is draining: it refuses puts.")
        policies, tube = self._backend.engine.policies, self._backend.engine.tubes.get(self._tube)
        policy = None if policies is None else policies.of(self._tube)
        if self.outcome == TOO_BIG:
            most = self._backend.service.max_job_bytes
            most = most if policy is None else min(most, policy.max_job_bytes)
            raise falcon.HTTPContentTooLarge(description=f"The body of a job has at most {most} bytes.")
        if self.outcome == OUT_OF_MEMORY:
            taken = (0, 0) if tube is None else (tube.whole_jobs(), tube.body_bytes())
            allowed = "" if policy is None else policy.room_for(self.size, *taken)
            raise falcon.HTTPInsufficientStorage(
                description=f"The tube's policy allows {allowed}." if allowed else NO_ROOM
            )
        if self.outcome == CYCLE:
            raise falcon.HTTPConflict(description="With this job, groups of jobs would wait for each other for ever.")
        assert self.outcome in (INSERTED, DUPLICATE), self.outcome


def no_such_job() -> falcon.HTTPError:
    return falcon.HTTPNotFound(description="There is no such job.")


def find(backend: Backend, id: int, scope: Scope, right: int = LOOK) -> Job:
    """Returns the job of an id, if the sender has this right on its tube. Raises HTTPError."""
    job = backend.engine.jobs.get(id)
    name = b"" if job is None else backend.engine.tube_of(job).name
    if job is None or not scope.looks(name):
        raise no_such_job()
    if not scope.may(name, right):
        raise falcon.HTTPForbidden(description=NO_RIGHT)
    return job
