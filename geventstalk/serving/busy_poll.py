"""Decides when the process looks for the next request for some microseconds before it goes to sleep.

A client that waits for each reply sends its next command at once. To sleep and be woken takes longer than that, so
looking makes a single client's commands half as fast again. This module must not know clocks or the event loop.
Invariant: where looking does not pay, fewer than one turn in a hundred looks, so that an idle server stays idle.
"""

from __future__ import annotations

from typing import Final

LOOK_NS: Final = 50_000
"""The time of one look. A client on the same machine needs 10 to 50 µs from a reply to its next command."""
_WIN: Final = 1
_LOSS: Final = 4
"""A look that finds nothing costs as much as four that find a request: looking has to pay four of five times."""
_CREDIT_MAX: Final = 2 * _LOSS
"""After success, two looks in a row may find nothing before looking pauses."""
_PAUSE_TURNS: Final = 128
"""Turns without looking, after looking did not pay. This keeps the invariant's hundredth."""


class BusyPoll:
    """Call turn_ends() after each turn. While looking goes on, call over() whenever there is nothing to do."""

    __slots__ = ("_credit", "_looking", "_pause_turns", "_until_ns")

    def __init__(self) -> None:
        self._looking = False
        self._until_ns = 0
        self._credit = 0
        self._pause_turns = 0

    def turn_ends(self, now_ns: int) -> bool:
        """Returns whether looking has to begin. Looking that is under way goes on for LOOK_NS from now."""
        if self._looking:  # and it has found the request of this turn
            self._credit = min(self._credit + _WIN, _CREDIT_MAX)
            self._until_ns = now_ns + LOOK_NS
            return False
        if self._pause_turns:
            self._pause_turns -= 1
            return False
        self._looking = True
        self._until_ns = now_ns + LOOK_NS
        return True

    def over(self, now_ns: int) -> bool:
        """Returns whether nothing has come for so long that looking has to end."""
        if now_ns < self._until_ns:
            return False
        self._looking = False
        self._credit -= _LOSS
        if self._credit < 0:
            self._credit = 0
            self._pause_turns = _PAUSE_TURNS
        return True
