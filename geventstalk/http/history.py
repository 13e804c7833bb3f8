"""Figures over time, for charts: of the server over four ranges, and how many jobs each tube had ready.

This room must not know where figures come from, nor what time it is: each comes in with its moment.
A range has steps of one length. A point is what was read first after the end of its step, and what happened since the
reading before. Invariant: a range keeps as many points as it has steps, whatever comes, and tells nothing of a step
behind which nothing was read.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final, NamedTuple

from geventstalk.core.job import SECOND_NS
from geventstalk.core.meter import quantiles

STEP_NS: Final = 5 * SECOND_NS
"""The shortest step. The lengths of all others are multiples of it."""
RANGES: Final = {
    "15m": (STEP_NS, 180),
    "1h": (20 * SECOND_NS, 180),
    "1d": (300 * SECOND_NS, 288),
    "1w": (1800 * SECOND_NS, 336),
}
"""The length of a step, and how many there are. A point takes half a kilobyte: all of them half a megabyte."""
RATES: Final = ("put", "reserve", "delete", "timeout", "bury")
LEVELS: Final = ("ready", "reserved", "delayed", "buried", "memory_bytes", "journal_bytes")
_TIMES: Final = ("queued_p50", "queued_p95", "queued_p99", "worked_p50", "worked_p95", "worked_p99")
SERIES: Final = (*RATES, *LEVELS, *_TIMES)
SPARK_STEP_NS: Final = 30 * SECOND_NS
SPARK_POINTS: Final = 30

Value = float | None
_NOTHING: Final[tuple[Value, ...]] = (None,) * len(SERIES)
_UNKNOWN: Final = -1
"""Stands for None in a line of Sparks."""


class Reading(NamedTuple):
    """What was read at a moment. `counts` are of RATES since the server began, `levels` of LEVELS.

    `queued` and `worked` are the counts of the engine's Times.
    """

    at_ns: int
    counts: tuple[int, ...]
    levels: tuple[int, ...]
    queued: list[int]
    worked: list[int]


class History:
    """All ranges. Begins to know something with the second reading."""

    def __init__(self) -> None:
        self._ranges = {name: _Range(step_ns, size) for name, (step_ns, size) in RANGES.items()}

    def add(self, reading: Reading) -> None:
        """Takes a reading. Readings come in order of their moments."""
        for each in self._ranges.values():
            each.add(reading)

    def series(self, name: str, now_ns: int) -> tuple[int, list[list[Value]]]:
        """When the last step ended, and a list of points for each of SERIES."""
        return self._ranges[name].series(now_ns)


class _Range:
    def __init__(self, step_ns: int, size: int) -> None:
        self._step_ns = step_ns
        self._points: deque[tuple[Value, ...]] = deque([_NOTHING] * size, maxlen=size)
        self._number = 0  # of the step in which the last reading was taken
        self._last: Reading | None = None

    def add(self, reading: Reading) -> None:
        number = reading.at_ns // self._step_ns
        if self._last is not None:
            if number == self._number:
                return
            self._skip(number - self._number - 1)
            self._points.append(_point(self._last, reading))
        self._number, self._last = number, reading

    def _skip(self, count: int) -> None:
        self._points.extend([_NOTHING] * min(count, len(self._points)))

    def series(self, now_ns: int) -> tuple[int, list[list[Value]]]:
        # The reading of the step that has just ended may still come.
        number = max(self._number, now_ns // self._step_ns - 1)
        self._skip(number - self._number)
        self._number = number
        return number * self._step_ns, [list(column) for column in zip(*self._points, strict=True)]


def _point(before: Reading, now: Reading) -> tuple[Value, ...]:
    """What is told of the time between two readings. Three digits behind the point are more than a chart shows."""
    elapsed_s = (now.at_ns - before.at_ns) / SECOND_NS
    rates = [round((late - early) / elapsed_s, 3) for late, early in zip(now.counts, before.counts, strict=True)]
    return (*rates, *now.levels, *_seconds(before.queued, now.queued), *_seconds(before.worked, now.worked))


def _seconds(before: list[int], now: list[int]) -> list[Value]:
    """Quantiles of the times that came between two readings."""
    counts = [late - early for late, early in zip(now, before, strict=True)]
    if not any(counts):
        return [None, None, None]
    return [round(each / SECOND_NS, 6) for each in quantiles(counts)]


class Sparks:
    """A short line of points for each of some tubes, which the caller chooses. Points are numbered by SPARK_STEP_NS."""

    def __init__(self) -> None:
        self._lines: dict[bytes, _Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def names(self) -> list[bytes]:
        return list(self._lines)

    def has_shape(self, name: bytes) -> bool:
        """Whether the tube had any ready job lately."""
        line = self._lines.get(name)
        return line is not None and max(line.points) > 0

    def add(self, name: bytes, number: int, ready: int) -> None:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line(number)
        line.skip_to(number)
        line.points.append(ready)
        del line.points[0]
        line.number = number

    def forget(self, name: bytes) -> None:
        self._lines.pop(name, None)

    def line(self, name: bytes, now_ns: int) -> list[int | None] | None:
        """The points of a tube, the latest last; None when nothing is known of the tube."""
        line = self._lines.get(name)
        if line is None:
            return None
        line.skip_to(now_ns // SPARK_STEP_NS)
        return [None if point == _UNKNOWN else point for point in line.points]


class _Line:
    __slots__ = ("number", "points")

    def __init__(self, number: int) -> None:
        self.number = number  # of the last point
        self.points = array("q", [_UNKNOWN]) * SPARK_POINTS

    def skip_to(self, number: int) -> None:
        """Makes the line end right before the point with this number, or where it does when that is later."""
        missed = min(number - self.number - 1, SPARK_POINTS)
        if missed > 0:
            del self.points[:missed]
            self.points.extend([_UNKNOWN] * missed)
            self.number = number - 1
