"""The distance between the wall clock of this host and the database's. Pure.

Leases need no wall clock. What survives a takeover by the wall clock is the delays of jobs.
"""

from __future__ import annotations

from typing import Final

OFF_S: Final = 2.0
"""A larger difference is logged, and again when the difference has changed by more than this."""


class Clocks:
    """`ahead_s` is how far this host is ahead; negative when it is behind, 0 before the first comparison."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._told_s = 0.0

    def compare(self, database_s: float, before_s: float, after_s: float) -> str:
        """The database said its time between these two of this host. Returns a line for the operator, or ""."""
        if abs(after_s - before_s) > OFF_S:
            return ""  # when is not known
        self.ahead_s = ahead_s = (before_s + after_s) / 2 - database_s
        if abs(ahead_s - self._told_s) <= OFF_S:
            return ""
        if abs(ahead_s) <= OFF_S:
            self._told_s = 0.0
            return "the wall clock of this host agrees with the database's again"
        self._told_s = ahead_s
        way = "ahead of" if ahead_s > 0 else "behind"
        return (
            f"the wall clock of this host is {abs(ahead_s):.1f} s {way} the database's: delays of jobs are wrong by "
            "the difference after a takeover; leases are not"
        )
