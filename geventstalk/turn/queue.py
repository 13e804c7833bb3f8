"""The operations that a turn was given: runs their slices, and hands over those that are finished.

A turn has one. This module must not know clients, nor when a change is safe: turn.py calls settle() behind the commit.
Invariant: an operation hears done() or failed() once, and done() only behind the commit that covers it, or its sync.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mypy_extensions import mypyc_attr

from geventstalk.core.job import DELETED
from geventstalk.core.operate import Operate
from geventstalk.durable.store import Store
from geventstalk.turn.operations import Settling
from geventstalk.turn.replies import Operation, ReplyGate
from geventstalk.turn.tasks import NEXT_TURN, Flag, Task, Wait
from geventstalk.wire.session import MOVE_SLICE


@mypyc_attr(allow_interpreted_subclasses=True)
class OperationQueue:
    """`begins` is called before a slice: a commit and replies follow.

    `undo` is called with the failure of a change that may be half made. It returns whether the change is undone; if
    not, give_up() follows. `tell` gets lines for the operator.
    """

    def __init__(
        self,
        engine: Operate,
        clock: Callable[[], int],
        gate: ReplyGate,
        begins: Callable[[], None],
        undo: Callable[[Exception], bool],
        tell: Callable[[str, BaseException | None], None],
    ) -> None:
        self.store: Store | None = None
        self.settles = True  # whether this server is the one that changes jobs by itself
        self.ran = False  # whether an operation had a slice in this turn
        self.wanted = Flag()  # operations want another slice
        self.finished: deque[Operation] = deque()  # those whose last slice is not committed yet
        self._engine = engine
        self._clock = clock
        self._gate = gate
        self._begins = begins
        self._undo = undo
        self._tell = tell
        self._waiting: deque[Operation] = deque()  # those that are to have another slice
        self._budget = MOVE_SLICE  # what operations may still do within this turn
        self._settling: Settling | None = None  # the operation that does what tags want

    def accept(self, operation: Operation) -> None:
        """Runs the first slice of an operation now, or in a later turn: with budget left, and after Engine.held."""
        if self._engine.held or self._budget <= 0:
            self._put_off(operation)
        else:
            self._run(operation)

    def wake(self) -> None:
        """Something has come that operations may have waited for."""
        if self._waiting:
            self.wanted.set()

    def run_all(self) -> Task:
        """Runs the further slices of operations, one operation after the other, within the budget of each turn."""
        while True:
            yield Wait(self.wanted)
            self.wanted.clear()
            while self.run_some():
                yield Wait(at_ns=NEXT_TURN)

    def run_some(self) -> bool:
        """Runs one slice of each operation within the budget. Returns whether to call again in the next turn.

        If not, accept() or wake() sets the flag.
        """
        ran = False
        for _ in range(len(self._waiting)):
            if self._budget <= 0:
                return True
            if not self._waiting:
                return False  # a slice has failed, and all were given up
            operation = self._waiting.popleft()
            job = operation.awaited
            awaits = job is not None and job.body is None and job.state != DELETED
            if awaits or (self._engine.held and not operation.begun):
                self._waiting.append(operation)
                continue
            self._run(operation)
            ran = True
        return ran

    def do_what_tags_want(self) -> None:
        """Begins an operation for the jobs whose tags want something now, unless one is under way."""
        settling = self._settling
        if (settling is None or settling.over) and self.settles:
            self._settling = Settling(self._engine)
            self._put_off(self._settling)

    def settle(self, durably: bool) -> None:
        """Ends a turn, which is committed: its finished operations are done, or `durably` wait at the gate."""
        self.ran = False
        self._budget = MOVE_SLICE
        for _ in range(len(self.finished)):  # done() may bring the next operation, which is not committed
            operation = self.finished.popleft()
            if durably and operation.changed:
                self._gate.hold_operation(operation)
            else:
                operation.done()

    def give_up(self) -> None:
        """Fails those that are not done, also at the gate: they never will be."""
        operations = [*self._gate.operations, *self.finished, *self._waiting]
        self._gate.operations.clear()
        self.finished.clear()
        self._waiting.clear()
        for operation in operations:
            operation.failed()

    def _put_off(self, operation: Operation) -> None:
        self._waiting.append(operation)
        self.wanted.set()

    def _run(self, operation: Operation) -> None:
        """One slice of an operation."""
        self._begins()
        self.ran = True
        engine, store = self._engine, self.store
        before = 0 if store is None else store.appended
        engine.work = 0
        engine.changing = False
        try:
            finished = operation.run(self._clock())
        except Exception as error:
            self._failed(operation, error)
            return
        self._budget -= 1 + engine.work
        if store is not None and store.appended != before:
            operation.changed = True
        if finished:
            self.finished.append(operation)
        else:
            self._put_off(operation)

    def _failed(self, operation: Operation, error: Exception) -> None:
        if not self._engine.changing and not operation.begun:
            self._tell("a change of an operator's failed before it changed anything", error)
            operation.failed()
            return
        self.finished.append(operation)  # to hear of it with the others, if all fail
        if self._undo(error):
            self.finished.pop()
            self._tell("a change of an operator's failed and is undone", error)
            operation.failed()
