"""The agreement of nodes on which of them leads a log: rows that fence, looked at and changed in round trips.

This module must not know SQL, clocks, or when a node should lead: geventstalk/cluster decides that. A heartbeat and a
session's lock are hints; the epoch is proof, for each write to the log names it.
Invariant: an epoch for which claim() has returned True is this process's alone, also after a failover of the database,
and nothing of a lower epoch is written any more.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from journal.errors import JournalUnreachable


class FenceUnreachable(JournalUnreachable):
    """The rows cannot be reached, or did not answer in time. The request may have been executed or not."""


class FenceStale(FenceUnreachable):
    """This is another database than before, or a part of it that was left behind. The right one may be back later."""


class Identity(NamedTuple):
    """The identity of a process: its node's name, the address for clients, a unique word, and the lease."""

    node: str
    address: str
    incarnation: str
    lease_ms: int


SYNCHRONOUS: Final = "synchronous"
ASYNCHRONOUS: Final = "asynchronous"
NONE: Final = "none"
"""The ways in which the database replicates: each commit waits for a replica, there are replicas and no commit waits,
or there are none that the database knows of."""


TIMES: Final = 3
"""An answer may take this many times as long as answers have taken lately."""
FADE: Final = 7 / 8
"""The share of the longest one that is left with each that is quicker."""


class View(NamedTuple):
    """The rows as one look shows them. A failover of the database may undo them. `epoch` is 0 before any node has led.

    `node` is the name of the node that claimed this epoch, `incarnation` that of its process alone. `owed_ms` is how
    long leases of earlier nodes could still run at the claim; it is 0 when this node serves, and not before. `beat` is
    the epoch of the last heartbeat, and its number: each attempt at one has its own. `released` says that the node has
    said goodbye, and wants `successor` to follow ("" is any node). `transfer_to` is the node that an operator asks to
    lead: "*" is any other node than the one that leads, "" says that there is no such request. `locked` says that the
    session of the node that leads is there, as far as the database knows. `timeline` and `system` tell which database
    this is; 0 is unknown. `replication` is one of the words below; "" is unknown.
    `session` is another number whenever this process had to connect anew.
    """

    epoch: int
    node: str
    address: str
    incarnation: str
    lease_ms: int
    owed_ms: int
    beat: tuple[int, int]
    released: bool
    successor: str
    transfer_to: str
    locked: bool
    timeline: int
    system: int
    replication: str = ""
    session: int = 0


class MemberFacts(NamedTuple):
    """The facts that a node last told of itself. `age_s`: how long ago, by the database's clock."""

    node: str
    address: str
    role: str
    epoch: int
    place: int
    age_s: float


class Told(NamedTuple):
    """The database's answer to a node that tells of itself: its clock, in seconds since 1970, and a namesake.

    `namesake` is the address of another process that has told under the same name since this one did; "" is none.
    `older` says that this other process has begun to tell before this one did.
    """

    clock_s: float
    namesake: str = ""
    older: bool = False


class Patience:
    """The time to wait for an answer, by how long answers have taken lately. One that did not come took its time."""

    def __init__(self) -> None:
        self._lately_s = 0.0

    def took(self, seconds: float) -> None:
        """An answer has come, or is waited for no longer."""
        self._lately_s = max(seconds, self._lately_s * FADE)

    def between(self, least_s: float, most_s: float) -> float:
        """Returns how long to wait for the next one, within these bounds."""
        return min(max(least_s, TIMES * self._lately_s), most_s)


class Fence:
    """One process's way to the rows. Each method waits for one round trip, with a deadline of its own.

    Each raises FenceUnreachable: what was asked may have happened, may happen later, or never. It raises FenceStale
    when the database is another one than before, or its timeline is lower.
    """

    linked_ns: int = 0
    """When its connection was begun, on the monotonic clock. 0 when that is not known."""

    def look(self) -> View:
        """The rows as they are."""
        raise NotImplementedError

    def claim(self, seen: View, owed_ms: int) -> bool:
        """Raises the epoch of `seen` by one for this process. False when it is not that incarnation's epoch by now.

        A writer of the old epoch that hangs in the database is ended, but not one that waits for a replica. True says
        that the claim is as safe as the most careful commit.
        """
        raise NotImplementedError

    def confirm(self) -> None:
        """Has the database commit something of this process that nothing else waits for, and nothing reads.

        It counts as safe as the most careful commit. Raises FenceUnreachable at once while an earlier one still waits.
        """
        raise NotImplementedError

    def beat(self, epoch: int) -> View | None:
        """Writes a heartbeat of the node that leads, and looks. Returns None when the node leads no more.

        A heartbeat is as safe in the database as the most careful commit: a primary without its synchronous replica
        does not answer.
        """
        raise NotImplementedError

    def serve(self, epoch: int) -> View | None:
        """Does what beat() does, and says that this node answers clients from now on."""
        raise NotImplementedError

    def release(self, epoch: int, successor: str) -> bool:
        """Says goodbye: nothing of this epoch is written or answered any more. False when the epoch is another one.

        It also withdraws the request for a transfer.
        """
        raise NotImplementedError

    def request_transfer(self, node: str) -> None:
        """Asks the node that leads to hand over to this node, or with "*" to any other."""
        raise NotImplementedError

    def withdraw_transfer(self, node: str) -> None:
        """Withdraws the request: it is fulfilled, or cannot be fulfilled."""
        raise NotImplementedError

    def tell(self, facts: MemberFacts) -> Told:
        """Tells the others of this node. `age_s` does not count."""
        raise NotImplementedError

    def members(self) -> list[MemberFacts]:
        """Returns the facts that all nodes have told, also nodes that are gone."""
        raise NotImplementedError

    def takeover_age_s(self) -> float | None:
        """Returns the seconds since the leading process claimed its first epoch; None when they are not known."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives the connection up, and with it the session's lock."""
        raise NotImplementedError
