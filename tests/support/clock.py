"""A clock that stands still until it is told otherwise: integer nanoseconds, as the core wants them."""

from __future__ import annotations

from dataclasses import dataclass

SECOND = 1_000_000_000
BOOT_NS = 86_400 * SECOND + 123_456_789
"""Where it starts: no whole second, no whole tick of the timer wheel."""


@dataclass
class ManualClock:
    """`ns` is now. It never runs backwards, as a monotonic clock does not."""

    ns: int = BOOT_NS

    def pass_ns(self, ns: int) -> int:
        """Lets time pass and returns what time it is then."""
        assert ns >= 0
        self.ns += ns
        return self.ns

    def pass_s(self, seconds: float) -> int:
        """The same in seconds."""
        return self.pass_ns(round(seconds * SECOND))

    def to(self, ns: int) -> int:
        """Moves on to a moment, or stays when that has passed."""
        self.ns = max(self.ns, ns)
        return self.ns
