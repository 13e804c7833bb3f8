"""Whether to look for the next request for some microseconds before the process goes to sleep.

A client that waits for each reply sends its next command as soon as it has it, and to sleep and be woken takes longer
than that: a single client's commands are answered half as fast again. This room must not know clocks or the event loop.
Invariant: where looking does not pay, it takes less than a hundredth of the turns, so that an idle server stays idle.
"""

from __future__ import annotations

from typing import Final

LOOK_NS: Final = 50_000
"""How long to look. A client on the same machine needs 10 to 50 µs from a reply to its next command."""
_WIN: Final = 1
_LOSS: Final = 4
"""It has to pay four of five times."""
_CREDIT_MAX: Final = 2 * _LOSS
_REST_TURNS: Final = 128


class Linger:
    """Tell it of each turn's end; while it says so, ask over() whenever there is nothing to do."""

    __slots__ = ("_credit", "_looking", "_rest_turns", "_until_ns")

    def __init__(self) -> None:
        self._looking = False
        self._until_ns = 0
        self._credit = 0
        self._rest_turns = 0

    def turn_ends(self, now_ns: int) -> bool:
        """Returns whether looking has to begin; when it is under way already, it goes on for LOOK_NS from now."""
        if self._looking:  # and this turn is what it was for
            self._credit = min(self._credit + _WIN, _CREDIT_MAX)
            self._until_ns = now_ns + LOOK_NS
            return False
        if self._rest_turns:
            self._rest_turns -= 1
            return False
        self._looking = True
        self._until_ns = now_ns + LOOK_NS
        return True

    def over(self, now_ns: int) -> bool:
        """Whether nothing has come for so long that looking has to end."""
        if now_ns < self._until_ns:
            return False
        self._looking = False
        self._credit -= _LOSS
        if self._credit < 0:
            self._credit = 0
            self._rest_turns = _REST_TURNS
        return True
