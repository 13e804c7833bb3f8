"""Histograms of times with fixed buckets, and rates of events that fade.

This module must not know clocks, nor what is measured. The buckets are octaves: the first one ends at 15.625
microseconds, each other at twice the end of the one before, so that ends lie at 1, 2, 4 ms and so on.
Invariant: each time that was added is counted in exactly one bucket.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate
from math import exp, expm1
from operator import add, sub
from typing import Final

from mypy_extensions import mypyc_attr

UNIT_NS: Final = 15_625
"""The end of the first bucket: a 64th of a millisecond."""
_BUCKETS: Final = 50
"""The last one ends after 278 years, beyond what 63 bits of nanoseconds hold."""
BOUNDS: Final = 37
"""Buckets that are told one by one, up to 12.4 days. All longer times are told as one."""
BOUNDS_NS: Final = tuple([UNIT_NS << at for at in range(BOUNDS)])
"""The ends of these buckets. A time is counted in the first bucket whose end is greater."""
_ENDS_NS: Final = [UNIT_NS << at for at in range(_BUCKETS)]
_WIDTHS_NS: Final = [UNIT_NS, *_ENDS_NS[:-1]]
PERCENTS: Final = (50, 95, 99)
"""The quantiles that statistics tell."""


@mypyc_attr(acyclic=True)
class Times:
    """A histogram of times, and their sum."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.sum_ns = 0

    def add(self, ns: int, total: Times) -> None:
        """Counts a time here and in the total, or, without memory for a number, in neither."""
        at = (ns // UNIT_NS).bit_length()
        counts = self.counts
        of_all = total.counts
        count = counts[at] + 1
        count_of_all = of_all[at] + 1
        sum_ns = self.sum_ns + ns
        total.sum_ns += ns  # what is behind this cannot fail
        self.sum_ns = sum_ns
        of_all[at] = count_of_all
        counts[at] = count

    def take_back(self, ns: int, total: Times) -> None:
        """Undoes add()."""
        at = (ns // UNIT_NS).bit_length()
        for times in self, total:
            times.counts[at] -= 1
            times.sum_ns -= ns

    def add_here(self, ns: int) -> None:
        """Counts a time that no total includes."""
        self.counts[(ns // UNIT_NS).bit_length()] += 1
        self.sum_ns += ns

    def count(self) -> int:
        """Returns how many times were added."""
        return sum(self.counts)

    def buckets(self) -> list[int]:
        """Returns the counts of the buckets that end at BOUNDS_NS, then how many times were longer."""
        counts = self.counts
        return [*counts[:BOUNDS], sum(counts[BOUNDS:])]


EVENTS: Final = ("put", "reserve", "delete", "timeout", "bury")
"""The events whose rates are known."""
SPANS_S: Final = (60, 900)
"""The spans of the rates."""
NO_RATES: Final = [0.0] * (len(EVENTS) * len(SPANS_S))
_SECOND_NS: Final = 1_000_000_000


class Rates:
    """The rates of EVENTS over each of SPANS_S, in the manner of Unix's load averages.

    The weight of an event fades: to 1/e when its span is over. Events since the last settle() count as if they had
    come evenly, so settle() is called every few seconds while there are events.
    """

    __slots__ = ("_at_ns", "_rates", "_seen")

    def __init__(self, now_ns: int) -> None:
        self._at_ns = now_ns
        self._rates = [array("d", [0.0] * len(EVENTS)) for _ in SPANS_S]
        self._seen = array("q", [0] * len(EVENTS))

    def now(self, counts: list[int], now_ns: int) -> list[float]:
        """Returns the rates over the first span, then over the next. `counts` are all events since the start."""
        since_s = (now_ns - self._at_ns) / _SECOND_NS
        new = [*map(sub, counts, self._seen)]
        found: list[float] = []
        for span_s, rates in zip(SPANS_S, self._rates, strict=True):
            fades = -since_s / span_s
            left = exp(fades)
            weight = -expm1(fades) / since_s if since_s else 1 / span_s
            found += map(add, map(left.__mul__, rates), map(weight.__mul__, new))
        return found

    def settle(self, counts: list[int], now_ns: int) -> None:
        """Takes in the events since the last settle() or fade()."""
        rates = self.now(counts, now_ns)
        self._rates = [array("d", rates[at : at + len(EVENTS)]) for at in range(0, len(rates), len(EVENTS))]
        self._seen = array("q", counts)
        self._at_ns = now_ns

    def fade(self, now_ns: int) -> None:
        """Lets the rates fade: there was no event since the last settle()."""
        self.settle([*self._seen], now_ns)


NO_TIMES: Final = Times()
"""Stands for the times of a tube whose jobs were never reserved. Nothing is added to it."""


def quantiles(counts: list[int]) -> list[int]:
    """Returns the quantiles of a Times, or of the difference of two readings, for PERCENTS, in nanoseconds; 0 of none.

    A quantile is interpolated within its bucket: it is at most 15.625 microseconds, or a factor of two, wrong.
    """
    sums = list(accumulate(counts))
    count = sums[-1]
    if not count:
        return [0] * len(PERCENTS)
    found = []
    for percent in PERCENTS:
        rank = (count * percent + 99) // 100
        at = bisect_left(sums, rank)
        found.append(_ENDS_NS[at] - _WIDTHS_NS[at] * (sums[at] - rank) // counts[at])
    return found
