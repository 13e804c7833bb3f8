"""Figures over time, for charts: of the server and of busy tubes over four ranges, and ready jobs of tubes over 15 min.

This module must not know the source of figures, nor the time: each comes with its time. A range has steps of one
length. A point is the first reading after the end of its step, and the events since the reading before. Invariant: a
range keeps as many points as it has steps, and a step without a reading behind it has no figures.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain
from math import nan, pow
from operator import add
from typing import Final, Literal, NamedTuple

from geventstalk.api_shapes import RATES
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
"""The length of a step, and the number of steps. A point takes 136 bytes: all of them 134 kB."""
TUBE_RANGES: Final = {
    "15m": (30 * SECOND_NS, 30),
    "1h": (60 * SECOND_NS, 60),
    "1d": (600 * SECOND_NS, 144),
    "1w": (3600 * SECOND_NS, 168),
}
"""The same for a tube. A point takes 36 bytes: all of them 14.5 kB, with the objects about them 16 kB."""
LEVELS: Final = ("ready", "reserved", "delayed", "buried", "memory_bytes", "journal_bytes")
_TIMES: Final = ("queued_p50", "queued_p95", "queued_p99", "worked_p50", "worked_p95", "worked_p99")
SERIES: Final = (*RATES, *LEVELS, *_TIMES)
TUBE_SERIES: Final = (*RATES, *LEVELS[:4])
RANK_HALVES_NS: Final = 6 * 3600 * SECOND_NS
SPARK_STEP_NS: Final = 30 * SECOND_NS
SPARK_POINTS: Final = 30

Value = float | None
_UNKNOWN: Final = -1
"""Stands for None in a line of Sparks."""


class Reading(NamedTuple):
    """A reading of figures. `counts` are of RATES since the server or the tube began, `levels` of LEVELS.

    `times` are the counts of the engine's Times: queued and worked. Of a tube there are the levels of jobs alone.
    """

    at_ns: int
    counts: tuple[int, ...]
    levels: tuple[int, ...]
    times: tuple[list[int], ...] = ()


class History:
    """All ranges of the server. Has figures from the second reading on."""

    def __init__(self) -> None:
        self._ranges = {name: _Range(*steps, len(SERIES), "d") for name, steps in RANGES.items()}

    def add(self, reading: Reading) -> None:
        """Adds a reading. Readings come in order of time."""
        for each in self._ranges.values():
            each.add(reading)

    def series(self, name: str, now_ns: int) -> tuple[int, Iterator[list[Value]]]:
        """Returns the end of the last step, and a list of points for each of SERIES."""
        return self._ranges[name].series(now_ns)


class _Range:
    """Points of `width` values each, one behind the other in an array of this kind of numbers."""

    __slots__ = ("_last", "_number", "_points", "_step_ns", "_width")

    def __init__(self, step_ns: int, size: int, width: int, kind: Literal["d", "f"]) -> None:
        self._step_ns = step_ns
        self._width = width
        self._points = array(kind, [nan]) * (size * width)
        self._number = 0  # of the step in which the last reading was taken
        self._last: Reading | None = None

    def add(self, reading: Reading) -> None:
        number = reading.at_ns // self._step_ns
        if self._last is not None:
            if number == self._number:
                return
            self._skip(number - self._number - 1)
            self._append(array(self._points.typecode, _point(self._last, reading)))
        self._number, self._last = number, reading

    def _append(self, values: array[float]) -> None:
        del self._points[: len(values)]
        self._points.extend(values)

    def _skip(self, count: int) -> None:
        if count > 0:
            blank = array(self._points.typecode, [nan])
            self._append(blank * min(count * self._width, len(self._points)))

    def series(self, now_ns: int) -> tuple[int, Iterator[list[Value]]]:
        """Returns columns of this time, whenever they are read."""
        # The reading of the step that has just ended may still come.
        number = max(self._number, now_ns // self._step_ns - 1)
        self._skip(number - self._number)
        self._number = number
        points, width = self._points[:], self._width
        return number * self._step_ns, ([_value(one) for one in points[at::width]] for at in range(width))


def _value(number: float) -> Value:
    if number != number:
        return None
    return int(number) if number.is_integer() else round(number, 6)


def _point(before: Reading, now: Reading) -> tuple[float, ...]:
    """Returns the point between two readings. Three decimals are more than a chart shows."""
    elapsed_s = (now.at_ns - before.at_ns) / SECOND_NS
    rates = [round((late - early) / elapsed_s, 3) for late, early in zip(now.counts, before.counts, strict=True)]
    times = [_seconds(early, late) for early, late in zip(before.times, now.times, strict=True)]
    return (*rates, *now.levels, *chain(*times))


def _seconds(before: list[int], now: list[int]) -> list[float]:
    """Returns quantiles of the times between two readings."""
    counts = [late - early for late, early in zip(now, before, strict=True)]
    if not any(counts):
        return [nan, nan, nan]
    return [round(each / SECOND_NS, 6) for each in quantiles(counts)]


class TubeHistory:
    """All ranges of some tubes, which the caller chooses by their ranks."""

    def __init__(self) -> None:
        self._courses: dict[bytes, _Course] = {}

    def __len__(self) -> int:
        return len(self._courses)

    def names(self) -> list[bytes]:
        return list(self._courses)

    def rank(self, name: bytes, activity: float, now_ns: int) -> float:
        """Returns the tube's activity, now or at its best: that halves after RANK_HALVES_NS."""
        course = self._courses.get(name)
        if course is None:
            return activity
        return max(activity, course.rank * pow(0.5, (now_ns - course.at_ns) / RANK_HALVES_NS))

    def add(self, name: bytes, rank: float, number: int, reading: Reading) -> None:
        """Adds a reading of a tube, and its number: another tube of the same name counts from 0."""
        course = self._courses.get(name)
        if course is None:
            course = self._courses[name] = _Course(number)
        course.add(rank, number, reading)

    def forget(self, name: bytes) -> None:
        self._courses.pop(name, None)

    def series(self, name: bytes, span: str, now_ns: int) -> tuple[int, Iterator[list[Value]]]:
        """As History.series(), for each of TUBE_SERIES. All values are None for an unknown tube."""
        course = self._courses.get(name)
        return (_Course(0) if course is None else course).ranges[span].series(now_ns)


class _Course:
    __slots__ = ("_before", "_number", "_seen", "at_ns", "ranges", "rank")

    def __init__(self, number: int) -> None:
        self.rank = 0.0
        self.at_ns = 0
        self.ranges = {name: _Range(*steps, len(TUBE_SERIES), "f") for name, steps in TUBE_RANGES.items()}
        self._number = number
        self._before = self._seen = (0,) * len(RATES)  # of the tubes that had this name before, and of this one

    def add(self, rank: float, number: int, reading: Reading) -> None:
        if number != self._number:
            self._before = tuple(map(add, self._before, self._seen))
        self.rank, self.at_ns, self._number, self._seen = rank, reading.at_ns, number, reading.counts
        whole = reading._replace(counts=tuple(map(add, self._before, self._seen)))
        for each in self.ranges.values():
            each.add(whole)


class Sparks:
    """A short line of points for each of some tubes, which the caller chooses. Points are numbered by SPARK_STEP_NS."""

    def __init__(self) -> None:
        self._lines: dict[bytes, _Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def names(self) -> list[bytes]:
        return list(self._lines)

    def has_shape(self, name: bytes) -> bool:
        """Returns whether the tube had a ready job lately."""
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
        """Returns the points of a tube, the latest last; None for an unknown tube."""
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
        """Moves the end of the line to the point before this number, if that is later."""
        missed = min(number - self.number - 1, SPARK_POINTS)
        if missed > 0:
            del self.points[:missed]
            self.points.extend([_UNKNOWN] * missed)
            self.number = number - 1
