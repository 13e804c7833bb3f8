"""Divides the reserves of a client among the tubes that it watches, where the client asks for it.

This module must not know how a job is reserved. A tube that was chosen waits for as long as its job costs, divided by
its weight; the tube that has waited longest is the next (stride scheduling: Waldspurger and Weihl, 1995).
Invariant: among tubes that always have jobs, the shares of each stretch of choices are those of the weights.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core.tube import Tube

DEFAULT: Final = 0
WEIGHTED: Final = 1
WEIGHTED_FAIR: Final = 2
FIFO_FAIR: Final = 3
MODES: Final = ("default", "weighted", "weighted-fair", "fifo-fair")
_STRIDE: Final = 1 << 30
"""The cost of a choice for a tube of weight 1, where it is no time."""
_UNMEASURED_NS: Final = 1_000_000
"""The cost of a tube's jobs before any job of these tubes was measured."""


class Shares:
    """The mode of a client, the weights of its tubes by their numbers, and how far each of them has come."""

    __slots__ = ("_passes", "_reached", "_usual_ns", "mode", "weights")

    def __init__(self) -> None:
        self.mode = DEFAULT
        self.weights: dict[int, int] = {}
        self._passes: dict[int, int] = {}
        self._usual_ns = _UNMEASURED_NS  # what a job of the last tube took that has a measured one
        self._reached = 0  # of the last tube that was chosen: one that had no jobs goes on from here

    def set_mode(self, mode: int) -> None:
        """Starts again in this mode."""
        self.mode = mode
        self._passes.clear()
        self._reached = 0

    def forget(self, number: int) -> None:
        """Forgets a tube that the client does not watch any more."""
        self.weights.pop(number, None)
        self._passes.pop(number, None)

    def choose(self, tubes: list[Tube]) -> Tube:
        """Returns the tube whose turn it is, among tubes with ready jobs in the order in which they were watched."""
        passes, reached = self._passes, self._reached
        best = tubes[0]
        least = max(passes.get(best.number, 0), reached)
        for tube in tubes[1:]:
            its = max(passes.get(tube.number, 0), reached)
            if its < least:
                best, least = tube, its
        self._reached = least
        passes[best.number] = least + self._cost(best)
        return best

    def _cost(self, tube: Tube) -> int:
        weight = 1 if self.mode == FIFO_FAIR else self.weights.get(tube.number, 1)
        if self.mode != WEIGHTED_FAIR:
            return _STRIDE // weight
        worked = tube.worked
        if worked is not None:
            self._usual_ns = worked.sum_ns // max(1, worked.count()) + 1
        return self._usual_ns // weight + 1
