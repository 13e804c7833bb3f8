"""The troubles of a node, for its operator: a statement of the cluster that fails, and that succeeds again.

Invariant: a trouble that lasts is logged more and more rarely, and its end is logged once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from geventstalk.cluster.lease import MS_NS
from journal.fence import ASYNCHRONOUS, NONE, SYNCHRONOUS

LOOK: Final = ("the database of the cluster cannot be reached", "the database of the cluster can be reached again")
BEAT: Final = ("the database of the cluster takes no heartbeat", "the database of the cluster takes heartbeats again")
CLAIM: Final = ("the database of the cluster takes no claim", "the database of the cluster takes claims again")
COMMIT: Final = (
    "the database of the cluster confirms no commit",
    "the database of the cluster confirms commits again",
)
NAME: Final = ("two processes are one node", "no other process has the name of this node any more")
LOG: Final = ("the log in the database cannot be reached", "the log in the database can be reached again")
"""The troubles: the line of a failure, and that of its end. Looks may succeed while no heartbeat does."""
COPIES: Final = {
    "": "the database does not tell how it replicates",
    SYNCHRONOUS: "each commit of the log waits for a replica",
    ASYNCHRONOUS: "no commit of the log waits for a replica: a failover of the database may lose what was acknowledged",
    NONE: "the database has no replica: the log is where its one server keeps it",
}
"""The line for the operator, by the way in which the log is replicated."""
_REPEAT_NS: Final = 10_000 * MS_NS
"""A trouble that lasts this long is logged again, and then after twice that time."""


class Troubles:
    """The troubles of now. `tells` gets the lines."""

    def __init__(self, clock: Callable[[], int], tells: Callable[[str], None]) -> None:
        self._clock = clock
        self._tells = tells
        self._there: dict[tuple[str, str], tuple[int, int]] = {}  # when to tell of it again, and for how long not then

    def begin(self, what: tuple[str, str], error: Exception | str) -> None:
        """There is this trouble, now or still."""
        now_ns = self._clock()
        again_ns, rest_ns = self._there.get(what, (now_ns, _REPEAT_NS))
        if now_ns >= again_ns:
            self._there[what] = (now_ns + rest_ns, 2 * rest_ns)
            self._tells(f"{what[0]}: {error}")

    def end(self, what: tuple[str, str]) -> None:
        """There is no such trouble now."""
        if self._there.pop(what, None) is not None:
            self._tells(what[1])

    def forget(self, what: tuple[str, str]) -> None:
        """Such a trouble is of no interest any more."""
        self._there.pop(what, None)
