"""The participants of turns (clients and operations), and the replies that wait until what they say is safe.

This module must not know when that is: turn.py holds and releases.
Invariant: what is held leaves in the order in which it came, and each client with replies here is counted once.
"""

from __future__ import annotations

from collections import deque

from mypy_extensions import mypyc_attr

from geventstalk.core.job import Job
from geventstalk.wire.session import Session


@mypyc_attr(allow_interpreted_subclasses=True)
class Channel:
    """A client, as a turn sees it. Its owner derives from it and feeds it through Turn.step()."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.in_turn = False  # whether it takes part in the turn that is under way
        self.heavy = False  # whether its last step did much, or left something to do
        self.changed = False  # whether it made a change that its replies have to wait for
        self.held = 0  # how many pieces of its replies the gate holds
        self.held_bytes = 0
        self.joined_ns = 0
        self.heard_ns = 0  # when it last sent something; at first when it joined

    def send(self, data: bytes) -> None:
        """Sends replies, which are safe now."""
        raise NotImplementedError

    def goes_on(self) -> None:
        """The turn is over for this client. Work that did not fit may go on in the next turn."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Operation:
    """An operation: a change of an operator. Its owner derives from it, and hears done() or failed() once.

    A slice ends when Engine.work, where it counts what it does beyond one move, is MOVE_SLICE: after about two
    milliseconds. `begun` says that the ledger has some parts of a large job of this operation. Then slices are run
    while Engine.held, too, and only go on with this job. While the body of the job `awaited`, which the operation has
    fetched, is not in memory, no slice is run.
    """

    changed: bool = False  # whether it made a change that done() has to wait for; the turn sets it
    begun: bool = False
    awaited: Job | None = None

    def run(self, now_ns: int) -> bool:
        """Runs a slice of the change. Returns whether it was the last one. Never yields."""
        raise NotImplementedError

    def done(self) -> None:
        """Hears that all that it changed is safe: committed, and under `-f0` synced."""
        raise NotImplementedError

    def failed(self) -> None:
        """The operation is given up, after an unknown part of its last slice."""
        raise NotImplementedError


class ReplyGate:
    """The replies and operations that wait for a sync, in the order in which they will leave."""

    def __init__(self) -> None:
        self.clients = 0  # how many have replies here
        self.operations: deque[Operation] = deque()
        self._held: list[tuple[Channel | None, bytes]] = []  # None stands for the next operation

    @property
    def pieces(self) -> int:
        """The number of replies and operations that wait; a client that goes on sending has several replies."""
        return len(self._held)

    def hold(self, channel: Channel, data: bytes) -> None:
        if not channel.held:
            self.clients += 1
        channel.held += 1
        channel.held_bytes += len(data)
        self._held.append((channel, data))

    def hold_operation(self, operation: Operation) -> None:
        self.operations.append(operation)
        self._held.append((None, b""))

    def release(self, pieces: int) -> None:
        """Lets this many of them leave, the oldest first."""
        leaving, self._held = self._held[:pieces], self._held[pieces:]
        for channel, data in leaving:
            if channel is None:
                self.operations.popleft().done()
                continue
            channel.held -= 1
            channel.held_bytes -= len(data)
            if not channel.held:
                self.clients -= 1
            channel.send(data)
            channel.goes_on()

    def clients_that_also_wait(self) -> int:
        """Returns how many of the clients with replies here have a reserve that waits for a job."""
        return len(
            {channel.session.number for channel, _ in self._held if channel is not None and channel.session.waiting}
        )
