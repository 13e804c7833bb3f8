"""A turn on a node of a cluster. It begins without a ledger, and leads under a lease that may run out.

This module must not know nodes, heartbeats or databases: `holds` says whether the lease holds at a moment, and
`renewed` is set when it was renewed.
Invariant: no reply leaves, and no operation is done, while the lease does not hold. The one exception promises nothing:
a put is refused. Reservations write nothing, so no fence of the log holds them back: the lease alone keeps two nodes
from handing out the same job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.operate import Operate
from geventstalk.durable.store import Store
from geventstalk.turn.replies import Channel, Operation
from geventstalk.turn.tasks import Flag, Task, Wait
from geventstalk.turn.turn import Turn
from geventstalk.wire.protocol import R_OUT_OF_MEMORY
from geventstalk.wire.session import Service

_PATIENCE_NS: Final = 1_000_000_000
"""A longer wait is logged."""
_LOOK_NS: Final = 100_000_000
"""The time between two looks at how long replies have waited."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LeasedTurn(Turn):
    """A turn that leads from write_to() on. `waits` gets the reason when replies wait for long, and then ""."""

    def __init__(
        self,
        engine: Operate,
        clock: Callable[[], int],
        wall_clock: Callable[[], int],
        begins: Callable[[], None],
        fails: Callable[[BaseException], None],
        service: Service,
        holds: Callable[[int], bool],
        put_wait_ns: int,
    ) -> None:
        super().__init__(engine, clock, wall_clock, begins, fails)
        self.operations.settles = False
        self.renewed = Flag()  # the lease may hold again
        self.silent = False  # the lease did not hold at the last look, and nothing has gone on since
        self.waits: Callable[[str], None] = _tell_nothing
        self._service = service
        self._holds = holds
        self._put_wait_ns = put_wait_ns
        self._silent_since_ns = 0
        self._spoken = Flag()  # the silence is over

    def tasks_of(self, store: Store) -> list[Task]:
        return [*super().tasks_of(store), self.keep_patience()]

    def write_to(self, store: Store) -> None:
        super().write_to(store)
        self.operations.settles = True

    def take_no_more(self) -> None:
        """Executes no more commands. Called before finish(), and after the end of all tasks."""
        self._service.silent = self.engine.held = True

    def step_down(self) -> None:
        """Stops all replies, since another node leads, or will. That is no failure."""
        if not self.failed:
            self.failed = self.maintenance.stopped = True
            self.operations.give_up()

    # --- silence

    def speaks(self) -> bool:
        """Returns whether replies may leave now. If not, all clients wait until the lease was renewed."""
        now_ns = self._clock()
        if self._holds(now_ns):
            return not self.silent
        if not self.silent:
            self.silent = True
            self._silent_since_ns = now_ns
            self._service.silent = True
            self.engine.held = True
            self.maintenance.late.set()
        return False

    def backpressure(self, store: Store) -> Task:
        """Does what Turn.backpressure() does, and ends the silence."""
        while True:
            yield Wait(self.maintenance.late)
            self.maintenance.late.clear()
            while self.silent or store.behind:
                if not self.silent:
                    yield from self.maintenance.catch_up(store)
                    continue
                self.renewed.clear()
                if self._holds(self._clock()):
                    self.silent = self._service.silent = False
                    self._spoken.set()
                else:
                    yield Wait(self.renewed)
            self.let_changes_go_on()

    def keep_patience(self) -> Task:
        """Reports replies that wait for long, and then refuses puts: a client may have another server."""
        told = False
        while True:
            yield Wait(at_ns=self._clock() + _LOOK_NS)
            if not self.speaks() and self._holds(self._clock()):
                self.renewed.set()  # the lease came back before anything else saw it away
            begun_ns = self._waiting_since_ns()
            waited_ns = self._clock() - begun_ns if begun_ns else 0
            if waited_ns >= _PATIENCE_NS and not told:
                told = True
                self.waits("the lease" if self.silent else "a commit")
            elif not begun_ns and told:
                told = False
                self.waits("")
            refuses = begun_ns != 0 and waited_ns >= self._put_wait_ns
            if refuses != self._service.refuses:
                self._service.refuse(refuses)
                if refuses:
                    self._let_puts_be_refused()

    def _waiting_since_ns(self) -> int:
        """Returns since when replies wait; 0 when they do not."""
        if self.silent:
            return self._silent_since_ns
        sync = self.syncs.under_way
        return sync.begun_ns if sync is not None and not sync.over else 0

    def _let_puts_be_refused(self) -> None:
        """Wakes clients that wait. All but puts find that they are still held."""
        held_up, self._held_up = self._held_up, {}
        for channel in held_up.values():
            channel.session.held_up = False
            channel.goes_on()

    # --- what leaves

    def step(self, channel: Channel, data: bytes | None) -> None:
        self.speaks()
        super().step(channel, data)

    def accept(self, operation: Operation) -> None:
        if self.store is None:
            operation.failed()  # this node does not lead
            return
        self.speaks()
        super().accept(operation)

    def settle_operations(self) -> None:
        if not self.speaks():
            for operation in self.operations.finished:
                operation.changed = True  # it waits with the replies, as if it had made a change
        super().settle_operations()

    def flush_durably(self, touched: list[Channel]) -> None:
        if self.speaks():
            self._hold_what_shows_jobs(touched)
            super().flush_durably(touched)
            return
        for channel in touched:
            channel.in_turn = False
            session = channel.session
            others = [piece for piece in session.out if piece is not R_OUT_OF_MEMORY]
            refused = not others and not channel.held and not channel.changed
            while session.out:
                data = session.take_out()
                if refused:
                    channel.send(data)
                else:
                    channel.changed = False
                    self.gate.hold(channel, data)
            if session.held_up:
                self._held_up[session.number] = channel
            else:
                channel.goes_on()
        if self.gate.pieces:
            self.awaited.set()

    def _hold_what_shows_jobs(self, touched: list[Channel]) -> None:
        """Holds replies that show a job until all that has happened so far is committed.

        A takeover undoes what is not committed, and the id of a job that was shown is then another job's.
        """
        unsafe = self.gate.pieces > 0 or self.syncs.is_under_way
        for channel in touched:
            unsafe = unsafe or channel.changed
        if unsafe:
            for channel in touched:
                if not channel.changed and channel.session.shows_job:
                    channel.changed = True

    def release(self, pieces: int) -> None:
        if self.speaks():
            super().release(pieces)

    def await_lease(self) -> Task:
        while not self.failed and not self.speaks():
            self._spoken.clear()
            yield Wait(self._spoken)


def _tell_nothing(text: str) -> None:
    return
