"""Text for a terminal: tables, ages, bodies.

This module must not send requests. Invariant: it returns printable characters only, so that no name of a tube and no
body can move the cursor.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from geventstalk.logs import one_line
from geventstalk.remote.shapes import body_bytes

_GAP: Final = "  "
_ROOM_MIN: Final = 12
"""Columns that the flexible cell keeps before other columns are left out."""
_ROOM_FOR_LABELS: Final = 60
"""On a terminal as wide as this, the text behind labels is aligned."""
_HEX_COLUMNS: Final = 16
NO_VALUE: Final = "-"


@dataclass(frozen=True)
class Column:
    """A column of a table. On a narrow terminal the column with the highest `rank` is left out first, one with 0
    never.
    """

    title: str
    right: bool = False
    flexible: bool = False
    rank: int = 0


def cells(text: str) -> int:
    """Returns the width of the text in cells of a terminal."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def cut(text: str, room: int) -> str:
    """Returns the text, cut to this many cells."""
    if cells(text) <= room:
        return text
    while text and cells(text) > room - 1:
        text = text[: min(len(text) - 1, room)]
    return text + "…" if room > 0 else ""


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], room: int | None) -> list[str]:
    """Returns the lines of a table, the first of them the titles. `room` is the terminal's width, None for any
    width.
    """
    safe = [[one_line(cell) for cell in row] for row in rows]
    widths = [
        max([cells(column.title), *(cells(row[at]) for row in safe)]) if safe else cells(column.title)
        for at, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    if room is not None:
        widths, kept = _fitted(columns, widths, room)
    lines = [[column.title for column in columns], *safe]
    return [_line(columns, line, widths, kept) for line in lines]


def _fitted(columns: Sequence[Column], widths: list[int], room: int) -> tuple[list[int], list[int]]:
    """Returns the widths and the columns that fit: columns are left out by rank until the flexible ones fit."""
    kept = list(range(len(columns)))

    def least() -> int:
        each = [min(widths[at], _ROOM_MIN) if columns[at].flexible else widths[at] for at in kept]
        return sum(each) + len(_GAP) * (len(kept) - 1)

    while least() > room and (ranked := [at for at in kept if columns[at].rank]):
        kept.remove(max(ranked, key=lambda at: (columns[at].rank, at)))
    found = list(widths)
    for at in reversed(kept):
        if columns[at].flexible:
            over = sum(found[one] for one in kept) + len(_GAP) * (len(kept) - 1) - room
            found[at] = max(min(widths[at], _ROOM_MIN), found[at] - max(0, over))
    return found, kept


def _line(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int], kept: Sequence[int]) -> str:
    parts = []
    for at in kept:
        text = cut(row[at], widths[at])
        space = " " * (widths[at] - cells(text))
        parts.append(space + text if columns[at].right else text + space)
    return _GAP.join(parts).rstrip()


def facts_line(label: str, facts: Sequence[tuple[str, int]], room: int | None) -> str:
    """Returns a line of facts behind a label. Facts are left out by rank, as columns are."""
    begin = f"{label:<8}" if room is None or room >= _ROOM_FOR_LABELS else label
    line = begin + _GAP + (_GAP + " ").join(text for text, _ in facts)
    if room is None or cells(line) <= room:
        return line
    kept = list(facts)
    while cells(line := _GAP.join([begin, *(text for text, _ in kept)])) > room and any(rank for _, rank in kept):
        del kept[max(range(len(kept)), key=lambda at: (kept[at][1], at))]
    return cut(line, room)


def echo_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table, cut to the terminal's width. A file or a pipe gets all of it."""
    lines = table(columns, rows, width())
    click.echo(click.style(lines[0], bold=True) if colours() else lines[0])
    for line in lines[1:]:
        click.echo(line)


def width() -> int | None:
    """Returns the columns of the terminal; None where stdout is none."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(20, shutil.get_terminal_size().columns)


def colours() -> bool:
    """Returns whether stdout shows bold text and colours."""
    return width() is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def count(number: int | None) -> str:
    """Returns `1,204`; `-` for none."""
    return NO_VALUE if number is None else f"{number:,}"


def age(seconds: float | None) -> str:
    """Returns `45 s`, `12 min 5 s`, `3 h 12 min`, `2 d 4 h`; `-` for none."""
    if seconds is None:
        return NO_VALUE
    whole = max(0, int(seconds))
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size:,} {unit} {rest} {small}" if rest else f"{whole // size:,} {unit}"
    return f"{whole} s"


def time_of(seconds: float | None) -> str:
    """Returns `850 µs`, `12 ms`, `1.5 s`, `3 min 20 s`; `-` for none."""
    if seconds is None:
        return NO_VALUE
    if seconds < 0.0095:
        return f"{seconds * 1000:.1f} ms" if seconds >= 0.00095 else f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else age(seconds)


def size(count: int | None) -> str:
    """Returns `812 B`, `64.0 kB`, `1.2 MB`; `-` for none."""
    if count is None:
        return NO_VALUE
    if count < 1000:
        return f"{count} B"
    scaled = float(count)
    for unit in ("kB", "MB", "GB"):
        scaled /= 1000
        if scaled < 999.95 or unit == "GB":
            return f"{scaled:,.1f} {unit}"
    raise AssertionError("not reached")


def rate(per_second: float | None) -> str:
    """Returns `0.25`, `12.0`, `1,204`; `-` for none."""
    if per_second is None:
        return NO_VALUE
    if per_second == 0:
        return "0"
    return f"{per_second:.2f}" if per_second < 10 else f"{per_second:.1f}" if per_second < 100 else f"{per_second:,.0f}"


def body_line(body: Mapping[str, Any] | None) -> str:
    if body is None:
        return ""
    more = "" if body["whole"] else "…"
    if body["encoding"] == "text":
        return one_line(str(body["data"])) + more
    return f"hex {body_bytes(body).hex(' ')}{more}"


def body_lines(body: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a body: its text, or its bytes in hexadecimal."""
    if body["encoding"] == "text":
        return [_escaped(line) for line in str(body["data"]).split("\n")]
    data = body_bytes(body)
    lines = []
    for at in range(0, len(data), _HEX_COLUMNS):
        part = data[at : at + _HEX_COLUMNS]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:08x}  {part.hex(' '):<{3 * _HEX_COLUMNS - 1}}  {text}")
    return lines


def _escaped(line: str) -> str:
    return "\t".join(one_line(part) for part in line.split("\t"))
