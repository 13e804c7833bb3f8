"""Until when a node may answer its clients, as far as it knows itself.

This module must not know who leads, or how a heartbeat is made. Reservations write nothing, so the database cannot
fence them: what sends replies asks the lease first, after every wake-up.
Invariant: the lease ends before any other node takes it for ended, as long as clocks run alike within the margin.
"""

from __future__ import annotations

from typing import Final

MS_NS: Final = 1_000_000
MARGIN: Final = 5
"""A part of so many of a lease is the margin: for clocks that run unlike, and for a reply on its way out."""


class Lease:
    """Counts from the moment at which the last successful heartbeat was sent."""

    def __init__(self, lease_ms: int) -> None:
        self.ends_ns = 0
        self.revoked = False
        self._span_ns = lease_ms * MS_NS - lease_ms * MS_NS // MARGIN

    def holds(self, now_ns: int) -> bool:
        """Returns whether this node may send replies now."""
        return now_ns < self.ends_ns

    def renew(self, sent_ns: int) -> None:
        """A heartbeat that was sent then has succeeded."""
        if not self.revoked:
            self.ends_ns = max(self.ends_ns, sent_ns + self._span_ns)

    def revoke(self) -> None:
        """This node answers nothing any more, for ever."""
        self.revoked = True
        self.ends_ns = 0
