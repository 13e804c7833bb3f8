"""Reads whole records back from sealed segments, by their places.

This module must not know what a payload means, nor which segments there are. It may run in any thread: it opens a
sealed segment for itself, reads, and closes it again. Nothing is written to a sealed segment, so SQLite needs no lock.
Invariant: a payload is given back only when its checksum, place and key are those that it was written with.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import Final

from mypy_extensions import mypyc_attr

from journal.errors import JournalDamaged, JournalError, JournalFailed, JournalFull
from journal.log import Payloads, Wanted
from journal.sqlite.bodies import BodyReader
from journal.sqlite.files import lacks_descriptors, segment_path, suspect
from journal.sqlite.format import FULL, LAST, OUTSIDE, PART, PARTS, checksum
from journal.sqlite.sql import CANNOT_OPEN, connect_to_read, unreadable

READ_ROWS: Final = 64
"""The records that are read in one step of SQLite, see _SELECT."""
_TRIES: Final = 3
"""The attempts to open a file. A lack of descriptors may be over when a person looks for it."""
_SELECT: Final = """
SELECT group_concat(seq || ' ' || key || ' ' || kind || ' ' || crc || ' ' || length(payload), x'0a'),
  CAST(group_concat(payload, '') AS BLOB)
FROM (SELECT * FROM record WHERE seq IN ({}) ORDER BY seq)
"""
"""All records in one row. Python lets go of the interpreter for each row that it fetches, and a thread beside a busy
one gets it back after five milliseconds at worst: that is once for all of them, and not once for each."""

_SELECT_PARTS: Final = (
    "SELECT seq, key, kind, crc, payload FROM record WHERE key = ? AND kind IN (?, ?) AND seq < ?"
    " ORDER BY seq DESC LIMIT ?"
)

Row = tuple[int, int, int, int, bytes]


@mypyc_attr(allow_interpreted_subclasses=True)
class SegmentPayloads(Payloads):
    """Reads from the segments of a directory."""

    def __init__(self, directory: str, wanted: list[Wanted]) -> None:
        super().__init__(wanted)
        self._directory = directory

    def run(self) -> None:
        segments: dict[int, dict[int, int]] = {}
        for segment, place, key in self.wanted:
            segments.setdefault(segment, {})[place] = key
        for segment in sorted(segments):
            places = segments[segment]
            path = segment_path(self._directory, segment)
            try:
                rows = self._rows_in_time(path, sorted(places))
            except JournalError as error:
                self.failed.update(dict.fromkeys(places.values(), error))
            else:
                if rows is None:
                    self.lacking = True
                else:
                    self._take(path, places, rows)
            if any(isinstance(self.failed.get(key), JournalDamaged) for key in places.values()):
                suspect(self._directory)

    def _rows_in_time(self, path: str, places: list[int]) -> list[Row] | None:
        """Does what _rows() does. Returns None when the system lacks something now. Does not wait for that."""
        tries = 0
        while True:
            tries += 1
            try:
                return self._rows(path, places)
            except MemoryError:
                return None
            except (JournalFailed, JournalFull) as error:
                if isinstance(error, JournalFull) or lacks_descriptors(error):
                    return None
                if tries >= _TRIES or CANNOT_OPEN not in str(error):
                    raise

    def _rows(self, path: str, places: list[int]) -> list[Row]:
        """Raises JournalDamaged or JournalFailed."""
        if not os.path.exists(path):
            raise JournalFailed(f"cannot read {path}: it is gone")  # SQLite would only say that it cannot open it
        # Where another process reads the file (sqlite3, a backup) while it is sealed, its records stay in the WAL.
        mode = "mode=ro" if os.path.exists(path + "-wal") else "mode=ro&immutable=1"
        rows: list[Row] = []
        try:
            with closing(BodyReader(path)) as bodies, closing(connect_to_read(path, mode)) as db:
                db.text_factory = bytes
                for at in range(0, len(places), READ_ROWS):
                    some = places[at : at + READ_ROWS]
                    heads, payloads = db.execute(_SELECT.format(",".join("?" * len(some))), some).fetchone()
                    rows += [_joined(db, bodies, row) for row in _apart(heads or b"", payloads or b"")]
        except sqlite3.Error as error:
            raise unreadable(error, f"{path} cannot be read", path) from error
        except (ValueError, OverflowError) as error:
            raise JournalDamaged(f"{path} cannot be read: {error}") from error
        return rows

    def _take(self, path: str, places: dict[int, int], rows: list[Row]) -> None:
        """Keeps the payloads that are as they were written. A row that is not has another kind by now."""
        found = {row[0]: row for row in rows}
        for place, key in places.items():
            row = found.get(place)
            if row is None:
                self.failed[key] = JournalDamaged(f"{path} lacks record {place}, of key {key}")
                continue
            _, is_of, kind, _, payload = row
            if kind != FULL or is_of != key:
                self.failed[key] = JournalDamaged(f"{path} is damaged at record {place}, of key {key}")
            else:
                self.found[key] = payload


def _joined(db: sqlite3.Connection, bodies: BodyReader, row: Row) -> Row:
    """A record that stands in parts or outside as the row that it would be; any other row as it is.

    Raises sqlite3.Error or JournalFailed.
    """
    seq, key, kind, _, payload = inside = _inside(bodies, row)
    if kind != LAST or len(payload) < PARTS.size:
        return inside
    (count,) = PARTS.unpack_from(payload)
    found: list[Row] = db.execute(_SELECT_PARTS, (key, PART, PART + OUTSIDE, seq, count)).fetchall()
    parts = [_inside(bodies, part) for part in found]
    if len(parts) != count or any(part[2] != PART for part in parts):
        return row
    return seq, key, FULL, 0, b"".join([*[part[4] for part in reversed(parts)], payload[PARTS.size :]])


def _inside(bodies: BodyReader, row: Row) -> Row:
    """A record as if its payload stood in its row. One that is not as it was written has kind 0."""
    seq, key, kind, crc, payload = row
    if crc == checksum(seq, key, kind, payload):
        inside = bodies.whole(row) if kind > OUTSIDE else row
        if inside is not None:
            return inside
    return seq, key, 0, crc, payload


def _apart(heads: bytes, payloads: bytes) -> list[Row]:
    """The rows of which _SELECT made one. Raises ValueError when they are no rows of records."""
    rows: list[Row] = []
    at = 0
    for head in heads.splitlines():
        seq, key, kind, crc, size = map(int, head.split())
        rows.append((seq, key, kind, crc, payloads[at : at + size]))
        at += size
    return rows
