"""The operator's view of a cluster: finds the leader and the standbys, and has another node lead.

It must not know SQL or click. It reads the rows that the nodes share, and sends no requests to nodes. Invariant: a
change is reported when the rows show it; a transfer request that was not fulfilled is withdrawn.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from geventstalk.cluster.member import ACTIVE, CLAIMING, ENDED, FRESH, LEAVING, SILENT, STANDBY
from journal import JournalError, JournalLocked, JournalUnreachable, fence_for, make_shared_log, tools_for
from journal.fence import Fence, MemberFacts, View

ANY: Final = "*"
"""A request that any other node than the leader lead."""
GONE: Final = "gone"
"""The role of a node that has reported nothing for some leases."""
_POLL_S: Final = 0.005
_RETRY_S: Final = 0.1
_LOOKS: Final = 20
"""The number of looks in a lease for signs of life of the leader, which has five heartbeats in that time."""


class NotDone(Exception):
    """The leader did not change. The text is one line for the operator."""


class Node(NamedTuple):
    """A node as its rows show it. `lag` is the number of rows of the log it has not read; None where that is
    unknown.
    """

    node: str
    address: str
    role: str
    epoch: int
    lag: int | None
    seen_s: float


class Status(NamedTuple):
    """The present state of a cluster. `leader` is "" when no node leads; `last` is then the node that led last.

    `claims` names the holder of the epoch that does not serve: a node that takes over, or a command with the journal to
    itself. `takeover_s` is how long ago the process of the epoch began to lead; None when that is not known.
    """

    leader: str
    last: str
    claims: str
    epoch: int
    lease_s: float
    transfer_to: str
    replication: str
    takeover_s: float | None
    nodes: list[Node]


class Handover(NamedTuple):
    """The leader, its predecessor, and how long no node led, as far as the rows show it. 0 without a change."""

    before: str
    leader: str
    epoch: int
    gap_s: float

    @property
    def changed(self) -> bool:
        return self.before != self.leader


class Watch:
    """Watches a cluster through its fence."""

    def __init__(
        self, fence: Fence, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._fence = fence
        self._clock = clock
        self._sleep = sleep

    def close(self) -> None:
        self._fence.close()

    # --- looking

    def status(self) -> Status:
        """Returns the present state. Takes up to a lease when no node leads: only a heartbeat proves that one does."""
        view, alive = self._look_closely()
        members = self._fence.members()
        leads = next((each.place for each in members if each.node == view.node), 0)
        nodes = {each.node: _node(each, view, alive, leads) for each in members}
        if alive and view.address and view.node not in nodes:
            nodes[view.node] = Node(view.node, view.address, _role_of_leader("", view), view.epoch, 0, 0.0)
        living = view.node if alive else ""
        leader, claims = ("", living) if view.owed_ms else (living, "")
        order = sorted(nodes.values(), key=lambda each: (each.node != leader, each.role in (GONE, ENDED), each.node))
        last = view.node if view.address else ""
        taken_s = self._fence.takeover_age_s()
        return Status(
            leader, last, claims, view.epoch, view.lease_ms / 1000, view.transfer_to, view.replication, taken_s, order
        )

    def _look_closely(self) -> tuple[View, bool]:
        """Returns the rows, and whether the node of the last epoch is alive."""
        first = view = self._fence.look()
        end = self._clock() + view.lease_ms / 1000
        while not view.released and view.epoch and self._clock() < end:
            if (view.epoch, view.beat) != (first.epoch, first.beat):
                return view, True
            self._sleep(view.lease_ms / 1000 / _LOOKS)
            view = self._fence.look()
        return view, False

    # --- changing

    def promote(self, node: str, timeout_s: float) -> Handover:
        """Has this node lead, and waits until it does. Raises NotDone."""
        status = self._need_leader()
        if status.leader == node:
            return Handover(node, node, status.epoch, 0.0)
        found = _find(status, node)
        if found.role != STANDBY:
            raise NotDone(f"{node} cannot lead now: {_why_not(found)}")
        return self._hand_over(node, timeout_s)

    def demote(self, node: str | None, timeout_s: float) -> Handover:
        """Has another node lead than this one, or than the leader, and waits until it does. Raises NotDone."""
        status = self._need_leader()
        if node is not None and status.leader != node:
            _find(status, node)
            return Handover(status.leader, status.leader, status.epoch, 0.0)
        if not any(each.role == STANDBY for each in status.nodes):
            raise NotDone(f"{status.leader} leads on: there is no standby that could take over")
        return self._hand_over(ANY, timeout_s)

    def _need_leader(self) -> Status:
        status = self.status()
        if not status.leader:
            last = f", {status.last} was the last one" if status.last and not status.claims else ""
            now = f", {status.claims} is at it" if status.claims else last
            raise NotDone(f"no node leads{now}: there is no node to hand over")
        return status

    def _hand_over(self, successor: str, timeout_s: float) -> Handover:
        end = self._clock() + timeout_s
        before = self._fence.look()
        self._fence.request_transfer(successor)
        done = False
        try:
            found = self._await_leader(before, successor, end, timeout_s)
            done = True
        finally:
            if not done:
                with contextlib.suppress(JournalUnreachable):
                    self._fence.withdraw_transfer(successor)
        return found

    def _await_leader(self, before: View, successor: str, end: float, timeout_s: float) -> Handover:
        """Waits until the request is fulfilled. Raises NotDone when it is refused, or not fulfilled in time."""
        led_until = self._clock()
        for view in self._looks(end):
            now = self._clock()
            if view.incarnation == before.incarnation:
                if view.released:
                    continue
                if not view.transfer_to:
                    raise NotDone(f"{view.node} leads on: it found no standby to hand over to{_named(successor)}")
                led_until = now
            elif not view.owed_ms and not view.released:
                if successor not in (ANY, view.node):
                    raise NotDone(f"{view.node} leads now, and not {successor}")
                if view.node == before.node:
                    raise NotDone(f"{view.node} leads again: it was started anew")
                return Handover(before.node, view.node, view.epoch, max(0.0, now - led_until))
        what = "no other node leads" if successor == ANY else f"{successor} does not lead"
        raise NotDone(f"{what} after {timeout_s:g} s; the request is withdrawn")

    def _looks(self, end: float) -> Iterator[View]:
        """Yields the rows until the end of the time. Asks a database that fails over meanwhile again."""
        while self._clock() < end:
            try:
                yield self._fence.look()
            except JournalUnreachable:
                if self._clock() + _RETRY_S >= end:
                    raise
                self._sleep(_RETRY_S)
            else:
                self._sleep(_POLL_S)


def init(place: str) -> bool:
    """Makes an empty log for a cluster. Returns False when a log is there already. Raises a JournalError."""
    return make_shared_log(place)


def watch(place: str) -> Watch:
    """Returns the cluster whose log is at this place. Raises a JournalError."""
    log = tools_for(place)
    if not log.exists():
        raise JournalLocked(f"{log.place} has no journal in it: `geventstalk cluster init` makes one")
    return Watch(fence_for(place))


def names(place: str) -> list[str]:
    """Returns the names of the nodes, for a shell that completes words; none where the database does not answer."""
    try:
        with contextlib.closing(fence_for(place)) as fence:
            return sorted(each.node for each in fence.members())
    except (JournalError, ImportError):
        return []


def _node(told: MemberFacts, view: View, alive: bool, place: int) -> Node:
    """Returns the present state of a node. `place` is that of the leader, if it is known."""
    if alive and told.node == view.node and not view.released:
        role, epoch = _role_of_leader(told.role, view), view.epoch
    else:
        role, epoch = _role_of_other(told, view), told.epoch
    lag = max(0, place - told.place) if alive and role not in (GONE, ENDED) else None
    return Node(told.node, told.address, role, epoch, lag, told.age_s)


def _role_of_other(told: MemberFacts, view: View) -> str:
    led = told.node == view.node and not view.released and told.role in (ACTIVE, SILENT, LEAVING, CLAIMING)
    silent = told.age_s * 1000 > FRESH * view.lease_ms
    return GONE if told.role != ENDED and (silent or led) else told.role


def _role_of_leader(told: str, view: View) -> str:
    """Returns the role of the leader. A node writes its role once in a lease; other rows are more recent."""
    if view.owed_ms:
        return CLAIMING
    return told if told in (SILENT, LEAVING) else ACTIVE


def _find(status: Status, node: str) -> Node:
    """Returns the node of this name. Raises NotDone when there is none."""
    for each in status.nodes:
        if each.node == node:
            return each
    known = ", ".join(each.node for each in status.nodes) or "none"
    raise NotDone(f"there is no node {node}; known: {known}")


def _why_not(found: Node) -> str:
    if found.role == ENDED:
        return "it was stopped"
    if found.role == GONE:
        return f"it told nothing for {found.seen_s:.1f} s"
    return f"it is {found.role}"


def _named(successor: str) -> str:
    return "" if successor == ANY else f", which should be {successor}"
