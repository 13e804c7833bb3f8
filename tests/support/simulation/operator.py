"""A simulated operator: draws operations, and tells the oracle what came of each change, and what was promised."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from geventstalk.core.engine import DRAINING, INSERTED, OUT_OF_MEMORY, TOO_BIG, UNFINISHED
from geventstalk.core.operate import DONE, KEEP, NOT_FOUND, WRONG_STATE, Operate
from geventstalk.turn.operations import Changes, Put
from geventstalk.turn.replies import Operation
from geventstalk.wire.commands import MOVE_SLICE, Service
from tests.support.simulation.clients import DELAYS, PRIORITIES, TTRS, Habits
from tests.support.simulation.oracle import Change, Command, Oracle, View, require

KINDS = ("put", "put", "kick", "delete", "release", "bury", "alter", "alter", "alter")
WORDS = {
    DONE: "DONE",
    NOT_FOUND: "NOT_FOUND",
    WRONG_STATE: "WRONG_STATE",
    OUT_OF_MEMORY: "OUT_OF_MEMORY",
    DRAINING: "DRAINING",
    TOO_BIG: "JOB_TOO_BIG",
}


@dataclass(eq=False)
class Promise:
    """The parts of the oracle's log that an operation may have looked at, and that it changed."""

    what: str
    seen: int = 0
    changed: int = 0


@dataclass
class Operator:
    """`open` are the operations that have heard neither that they are done nor that they failed."""

    draw: random.Random
    habits: Habits
    oracle: Oracle
    ids: list[int]
    note: Callable[[str], None]
    syncs_first: bool
    gives_up: Callable[[], bool]  # whether the server stops or fails: only then may an operation fail
    open: list[Promise] = field(default_factory=list)
    view: View = field(default_factory=lambda: View(0))

    def operation(self, engine: Operate, service: Service) -> Operation:
        """The next thing that the operator wants."""
        kind = self.draw.choice(KINDS)
        if kind == "put":
            return self._put(engine, service)
        ids = [self._id() for _ in range(self.draw.choice((1, 1, 2, 10)))]
        change = Change(kind)
        if kind == "alter":
            change = Change(
                kind,
                pri=self._some(PRIORITIES),
                delay_s=self._some(DELAYS),
                ttr_s=self._some(TTRS),
                tube=self.draw.choice((b"", b"", b"fresh", *self.habits.tubes)),
            )
        room = self.draw.choice((1, 2, MOVE_SLICE))
        return SimulatedChanges(self, engine, ids, change, room)

    def _put(self, engine: Operate, service: Service) -> Operation:
        draw = self.draw
        most = draw.choice((self.habits.body_bytes, self.habits.body_bytes + 100, self.habits.max_job_bytes))
        size = draw.randint(0, most)
        body = (b"%d." % draw.randrange(10**9) * (size // 2 + 1))[:size]
        numbers = draw.choice(PRIORITIES), draw.choice(DELAYS), draw.choice(TTRS)
        command = Command("put", b"", body + b"\r\n", 0, *numbers, tube=draw.choice(self.habits.tubes))
        return SimulatedPut(self, engine, service, command)

    def _id(self) -> int:
        if self.ids and self.draw.random() < 0.95:
            return self.draw.choice(self.ids[-20:])
        return self.draw.randrange(1, len(self.ids) + 2)

    def _some(self, values: tuple[int, ...]) -> int:
        return self.draw.choice((KEEP, KEEP, self.draw.choice(values)))

    # --- what operations tell

    def begins(self, promise: Promise) -> None:
        self.open.append(promise)
        self.note(f"the operator wants {promise.what}")

    def done(self, promise: Promise) -> None:
        self._hears(promise, "done")
        self.oracle.kept = max(self.oracle.kept, promise.seen)
        if self.syncs_first:
            self.oracle.synced = max(self.oracle.synced, promise.changed)

    def failed(self, promise: Promise) -> None:
        self._hears(promise, "failed")
        require(self.gives_up(), "an operation fails although nothing failed:", promise.what)

    def _hears(self, promise: Promise, word: str) -> None:
        require(promise in self.open, "an operation hears twice what became of it:", promise.what)
        self.open.remove(promise)
        self.note(f"{word}: {promise.what}")

    def step(self, promise: Promise, change: Callable[[], None]) -> None:
        """Does one change; `change` tells the oracle of it."""
        before = len(self.oracle.log)
        self.oracle.steps(self.view)
        try:
            change()
        finally:
            self.oracle.steps(None)  # also when a body cannot be read: the operation fails, and the server goes on
        promise.seen = len(self.oracle.log)
        if promise.seen > before:
            promise.changed = promise.seen


class SimulatedPut(Put):
    def __init__(self, operator: Operator, engine: Operate, service: Service, command: Command) -> None:
        body = command.body[:-2]
        super().__init__(engine, service, command.tube, body, command.pri, command.delay_s, command.seconds)
        self.operator = operator
        self.command = command
        self.promise = Promise(f"to put {len(body)} bytes into {command.tube!r}")
        operator.begins(self.promise)

    def run(self, now_ns: int) -> bool:
        def put() -> None:
            oracle, view, command = self.operator.oracle, self.operator.view, self.command
            view.began_ns = oracle.wall_ns()
            oracle.uploads[command.tube] = oracle.uploads.get(command.tube, 0) + 1
            finished = super(SimulatedPut, self).run(now_ns)
            require(finished, "a small put takes several slices")
            word = WORDS.get(self.outcome, "")
            if self.outcome == INSERTED:
                assert self.job is not None
                word = f"INSERTED {self.job.id}"
                self.operator.ids.append(self.job.id)
            self.operator.note(f"{word}: {self.promise.what}")
            oracle.put_by_operator(view, command, word)

        self.operator.step(self.promise, put)
        return True

    def done(self) -> None:
        self.operator.done(self.promise)

    def failed(self) -> None:
        self.operator.failed(self.promise)


class SimulatedChanges(Changes):
    """`room` is how many units of work a slice has room for."""

    def __init__(self, operator: Operator, engine: Operate, ids: list[int], change: Change, room: int) -> None:
        super().__init__(engine, ids, self.change)
        self.operator = operator
        self.engine = engine
        self.what = change
        self.room = room
        self.promise = Promise(f"{change} of {ids}")
        operator.begins(self.promise)

    def run(self, now_ns: int) -> bool:
        self.engine.work += MOVE_SLICE - self.room
        return super().run(now_ns)

    def change(self, id: int, now_ns: int) -> int:
        outcome = UNFINISHED

        def change() -> None:
            nonlocal outcome
            self.operator.oracle.looks_at(id)
            outcome = self.call(id, now_ns)
            if outcome == UNFINISHED:
                self.operator.note(f"goes on: {self.what.kind} {id}")
                return
            self.operator.note(f"{WORDS[outcome]}: {self.what.kind} {id}")
            self.operator.oracle.changed_by_operator(id, self.what, WORDS[outcome])

        self.operator.step(self.promise, change)
        return outcome

    def call(self, id: int, now_ns: int) -> int:
        engine, what = self.engine, self.what
        if what.kind == "kick":
            return engine.kick_one(id, now_ns)
        if what.kind == "delete":
            return engine.force_delete(id, now_ns)
        if what.kind == "release":
            return engine.force_release(id, now_ns)
        if what.kind == "bury":
            return engine.force_bury(id, now_ns)
        return engine.alter(id, what.pri, what.delay_s, what.ttr_s, what.tube, now_ns)

    def done(self) -> None:
        self.operator.done(self.promise)

    def failed(self) -> None:
        self.operator.failed(self.promise)
