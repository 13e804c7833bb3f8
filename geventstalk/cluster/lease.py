"""The lease of a node: the time until which the node may answer its clients.

This module must not know which node leads, or how a heartbeat is made. Reservations write nothing, so the database
cannot fence them: the code that sends replies checks the lease first, after every wake-up. Invariant: the lease ends
before any other node considers it ended, as long as clocks run alike within the margin.
"""

from __future__ import annotations

from typing import Final

MS_NS: Final = 1_000_000
MARGIN: Final = 5
"""The margin is this part of a lease: for clocks that run at different speeds, and for a reply on its way out."""


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
        """Ends the lease for good: this node never answers again."""
        self.revoked = True
        self.ends_ns = 0
