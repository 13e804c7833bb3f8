"""Takes rows in their order and gives back the records that count. Pure: others fetch the rows.

This module must not know SQL nor what a payload means. It keeps what it needs from one row to the next: a leader that
starts and a node that follows use the same object, and a node that begins to lead goes on with what it knows.
Invariant: a record is given back only when its row is as it was written, and the commit that it belongs to is complete.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from journal.liveness import Liveness
from journal.log import CHANGE, DELETE, FULL, Row
from journal.postgres.format import (
    HEAD_BYTES,
    LAST,
    LOST,
    MORE,
    PART,
    PARTS,
    SEALED,
    TAKEOVER,
    Damaged,
    Entry,
    claimed,
    record_bytes,
    row_bytes,
    unpack,
)

_NAMED_MAX: Final = 20
"""The most keys of damaged rows that a line names."""


class SegmentCount:
    """The contents of one segment."""

    __slots__ = ("bytes", "first", "number", "records")

    def __init__(self, number: int, first: int) -> None:
        self.number = number
        self.first = first
        """The number of its first row, or 0 while it has none."""
        self.bytes = 0
        self.records = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class Reading:
    """All that is known of the rows that were taken."""

    def __init__(self) -> None:
        self.live = Liveness()
        self.high_water = 0
        self.place = 0  # the number of the last row; 0 before the first one
        self.head = b""  # how that row begins, to know it again
        self.home = 0  # the segment in which it stands
        self.segments: list[SegmentCount] = []
        self.findings: list[str] = []
        self.damaged: list[tuple[int, int, int]] = []  # segment, first and last number of rows that are damaged or gone
        self.orphans: set[int] = set()  # keys of which only changes are left
        self._unfinished: list[Entry] = []  # of a commit that goes on in the next row
        self._parts: list[bytes] = []
        self._parts_key = 0
        self._sealed = False  # whether the last row ended its segment

    # --- segments

    def enter(self, number: int) -> None:
        """The rows that follow stand in this segment."""
        self.segments.append(SegmentCount(number, 0))
        self._sealed = False

    def begin_at(self, first: int) -> None:
        """The oldest segment says that this is its first row."""
        self.place = first - 1

    @property
    def segment(self) -> int:
        """The segment of the next row, if it is known."""
        return self.segments[-1].number

    @property
    def sealed(self) -> bool:
        """Returns whether the next row stands in a segment that enter() has not been told of."""
        return self._sealed

    def drop_gone(self, oldest: int) -> None:
        """Forgets the segments before this one, which are gone."""
        while self.segments and self.segments[0].number < oldest:
            self.live.forget(self.segments.pop(0).number)

    # --- rows

    def take(self, seq: int, packed: bytes) -> list[Row]:
        """The next row: its records that belong to the histories of their keys."""
        count = self.segments[-1]
        if not count.first:
            count.first = seq
        count.bytes += row_bytes(len(packed))
        gap = seq != self.place + 1 and self.place
        before = self.place
        self.place = seq
        self.head = packed[:HEAD_BYTES]
        self.home = count.number
        try:
            found = unpack(seq, packed)
        except Damaged as error:
            if gap:
                self._find_gap(count.number, before, seq)
            self._find_damage(count.number, seq, packed, error)
            return []
        if gap and not found.flags & LOST:
            self._find_gap(count.number, before, seq)
        flags = found.flags
        if found.high_water > self.high_water:
            self.high_water = found.high_water
        if flags & SEALED:
            self._sealed = True
        if flags & (TAKEOVER | LOST):
            self.drop_unfinished()
        entries = found.entries
        count.records += len(entries)
        if flags & MORE:
            self._unfinished += entries
            return []
        if self._unfinished:
            entries = self._unfinished + entries
            self._unfinished = []
        return self._belonging(seq, entries, count.number)

    def drop_unfinished(self) -> None:
        """Drops records that are not finished: nothing will finish them."""
        self._unfinished = []
        self._parts = []
        self._parts_key = 0

    def _find_gap(self, segment: int, before: int, seq: int) -> None:
        more = f" to {seq - 1}" if seq - before > 2 else ""
        self.findings.append(f"row {before + 1}{more} is missing before row {seq} of segment {segment}")
        self.damaged.append((segment, before + 1, seq - 1))
        self.drop_unfinished()

    def _find_damage(self, segment: int, seq: int, packed: bytes, error: Damaged) -> None:
        keys = claimed(packed)
        named = ", ".join(str(key) for key in keys[:_NAMED_MAX]) + (" ..." if len(keys) > _NAMED_MAX else "")
        self.findings.append(
            f"row {seq} of segment {segment} is damaged: {error}; "
            + (f"it seems to be of the keys {named}" if keys else "it names no key")
        )
        self.damaged.append((segment, seq, seq))
        self.drop_unfinished()

    def end(self) -> None:
        """Ends the log: faults of the log as a whole are among the findings now."""
        if self.orphans:
            keys = sorted(self.orphans)
            named = ", ".join(str(key) for key in keys[:_NAMED_MAX]) + (" ..." if len(keys) > _NAMED_MAX else "")
            self.findings.append(f"{len(keys)} keys are known by their changes only: {named}")

    # --- records

    def _belonging(self, seq: int, entries: list[Entry], segment: int) -> list[Row]:
        live = self.live
        rows: list[Row] = []
        for key, kind, payload in entries:
            if kind == FULL and key > self.high_water:  # it is in a high water before its row only after damage
                self.high_water = key
            if kind == FULL:
                live.whole(key, segment, record_bytes(len(payload)))
                if self.orphans:
                    self.orphans.discard(key)
                rows.append((seq, key, FULL, 0, payload))
            elif kind <= DELETE:
                if self._changed(key, kind, segment, payload):
                    rows.append((seq, key, kind, 0, payload))
            elif kind == PART:
                if key != self._parts_key:
                    self._parts, self._parts_key = [], key
                self._parts.append(payload)
            elif kind == LAST:
                whole = self._joined(key, segment, payload)
                if whole is not None:
                    rows.append((seq, key, FULL, 0, whole))
        return rows

    def _changed(self, key: int, kind: int, segment: int, payload: bytes) -> bool:
        """Takes a change or a delete. Returns whether the key is live: otherwise the record says nothing."""
        live = self.live
        if not live.segment_of(key):
            if kind == CHANGE:
                self.orphans.add(key)  # dead, unless neither a delete nor a whole record follows
            else:
                self.orphans.discard(key)
            return False
        if kind == DELETE:
            live.delete(key)
        else:
            live.change(key, segment, record_bytes(len(payload)))
        return True

    def _joined(self, key: int, segment: int, payload: bytes) -> bytes | None:
        """All parts of a large record; None when some are missing, which is found elsewhere."""
        parts = self._parts if key == self._parts_key else []
        self._parts, self._parts_key = [], 0
        count = PARTS.unpack_from(payload)[0] if len(payload) >= PARTS.size else -1
        if not 0 <= count <= len(parts):
            return None
        parts = parts[len(parts) - count :]
        size = sum([record_bytes(len(part)) for part in parts]) + record_bytes(len(payload))
        self.live.whole(key, segment, size)
        self.orphans.discard(key)
        return b"".join([*parts, payload[PARTS.size :]])
