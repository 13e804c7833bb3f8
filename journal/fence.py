"""How nodes that share a log agree on which of them leads it: rows that fence, looked at and changed in round trips.

This room must not know SQL, clocks, or when a node should lead: geventstalk/cluster decides that. A heartbeat and a
session's lock are hints; the epoch is proof, for each write to the log names it.
Invariant: of two nodes that claim the same epoch, one gets it. Nothing of a lower epoch is written once claim() has
returned True.
"""

from __future__ import annotations

from typing import NamedTuple

from journal.errors import JournalError


class FenceUnreachable(JournalError):
    """The rows cannot be reached, or did not answer in time. What was asked may have happened or not."""


class FenceStale(JournalError):
    """The rows are older than what this node has seen, or those of another database."""


class View(NamedTuple):
    """What one look shows. Nobody has ever led where `epoch` is 0.

    `beat` counts the heartbeats of all epochs. `released` says that the node of this epoch has said goodbye, and wants
    `successor` to follow ("" is anybody). `wish` is the node that an operator wants to lead: "*" stands for any other
    node than the one that leads, "" for no wish. `locked` says that the session of the node that leads is there, as far
    as the database knows. `timeline` and `system` tell which database this is.
    """

    epoch: int
    node: str
    address: str
    lease_ms: int
    beat: int
    released: bool
    successor: str
    wish: str
    locked: bool
    timeline: int
    system: int


class MemberFacts(NamedTuple):
    """What a node last told of itself. `age_s` is how long ago, by the database's clock."""

    node: str
    address: str
    role: str
    epoch: int
    place: int
    age_s: float


class Fence:
    """One node's way to the rows. Each method waits for one round trip, with a deadline of its own.

    Each raises FenceUnreachable, and FenceStale when the rows are lower than this object has seen before.
    """

    def look(self) -> View:
        """The rows as they are."""
        raise NotImplementedError

    def claim(self, seen: int, node: str, address: str, lease_ms: int) -> bool:
        """Raises the epoch from `seen` by one for this node. False when the epoch is another one by now.

        A writer of the old epoch that hangs in the database is ended. Nothing of an old epoch is written afterwards.
        """
        raise NotImplementedError

    def beat(self, epoch: int) -> View | None:
        """A heartbeat of the node that leads, and a look. None when the epoch is another one: the node leads no more.

        It counts as safe in the database as the most careful commit: a primary without its synchronous replica does
        not answer.
        """
        raise NotImplementedError

    def release(self, epoch: int, successor: str) -> bool:
        """Says goodbye: nothing of this epoch is written or answered any more. False when the epoch is another one."""
        raise NotImplementedError

    def wish(self, node: str) -> None:
        """Asks the node that leads to hand over to this node, or with "*" to any other."""
        raise NotImplementedError

    def unwish(self, node: str) -> None:
        """The wish is fulfilled, or not to be fulfilled."""
        raise NotImplementedError

    def tell(self, facts: MemberFacts) -> None:
        """Tells the others of this node. `age_s` does not count."""
        raise NotImplementedError

    def members(self) -> list[MemberFacts]:
        """What all nodes have told, also those that are gone."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives the connection up, and with it the session's lock."""
        raise NotImplementedError
