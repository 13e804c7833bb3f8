"""The digest of a sealed segment: its records without most of their bytes, side by side. A start reads it instead.

This module must not know what a payload means. A digest repeats what stands in the table `record`, which alone counts:
a version that cannot read a digest reads that table. So old versions, which know no digests, need not know them.
Invariant: a digest is made of records whose checksums were right, and is given back only as it was written. It says
nothing about the bytes that it leaves out.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Final

from journal.log import HEAD, HEAD_BYTES, UNCUT_MIN
from journal.sqlite.format import DELETE, FULL, GROUP, GROUP_ERRORS, LAST, PAGE_BYTES, PART, Row, checksum, ungroup

CUT_MIN: Final = 2048
"""A smaller payload is quicker to read than to leave out."""
CUT_MAX: Final = 1 << 20
"""A segment with a larger payload, or one in parts, has no digest."""
WORTH: Final = 4
"""A segment has a digest if at most one in so many bytes of its payloads goes there."""
_SURE_BYTES: Final = 1 << 18
"""With so many bytes the beginning of a digest tells whether the rest is worth while."""
SIZE_MAX: Final = 1 << 40
"""No digest has so many bytes."""
_PIECE_BYTES: Final = 1 << 16
_PIECE_RECORDS: Final = 1024
"""A row of a digest has about so many bytes, and no more records."""
_KIND: Final = 7
"""The kind in the checksum of such a row: no record has it."""
_SCHEMA: Final = "CREATE TABLE digest(seq INTEGER PRIMARY KEY, crc INTEGER NOT NULL, records BLOB NOT NULL)"
_JSON: Final = json.JSONDecoder()

DigestRow = tuple[int, int, bytes]


class Digest:
    """Makes the digest of a segment: add() each of its rows, then rows(). It keeps `most` bytes at the most."""

    def __init__(self, segment: int, most: int = SIZE_MAX) -> None:
        self._segment = segment
        self._most = most
        self._rows: list[DigestRow] = []
        self._heads: list[str] = []
        self._pieces: list[bytes] = []
        self._seq = 0
        self._piece_bytes = 0
        self._kept = 0  # bytes of payloads
        self._cut = 0
        self._spoiled = False

    def add(self, seq: int, key: int, kind: int, payload: bytes | bytearray) -> None:
        """The next row of the segment, as it is in the table `record`."""
        if self._spoiled:
            return
        size = len(payload)
        if size > CUT_MAX or kind > GROUP or kind in (PART, LAST):
            self._spoil()
            return
        kept = bytes(payload[:HEAD_BYTES] if kind == FULL and size >= CUT_MIN and payload[0] < UNCUT_MIN else payload)
        self._heads.append(f"[{key},{kind},{size}]")
        self._pieces.append(kept)
        self._piece_bytes += len(kept)
        self._kept += len(kept)
        self._cut += size - len(kept)
        self._seq = seq
        if self._piece_bytes >= _PIECE_BYTES or len(self._heads) >= _PIECE_RECORDS:
            self._end_row()
            if self._kept > self._most or (self._kept > _SURE_BYTES and not self._is_worth()):
                self._spoil()

    def _spoil(self) -> None:
        self._spoiled = True
        self._rows, self._heads, self._pieces = [], [], []

    def _is_worth(self) -> bool:
        return self._kept * (WORTH - 1) <= self._cut

    def _end_row(self) -> None:
        payload = f"[{','.join(self._heads)}]\n".encode() + b"".join(self._pieces)
        self._rows.append((self._seq, checksum(self._seq, self._segment, _KIND, payload), payload))
        self._heads, self._pieces, self._piece_bytes = [], [], 0

    @property
    def bytes(self) -> int:
        """About what it takes on disk."""
        return self._kept + self._kept // 8 + PAGE_BYTES

    def rows(self) -> list[DigestRow]:
        """For write_digest(). None when a digest is not worth while."""
        if self._spoiled or not self._cut or not self._is_worth():
            return []
        if self._heads:
            self._end_row()
        return self._rows


def write_digest(db: sqlite3.Connection, rows: list[DigestRow]) -> None:
    """In a transaction of its own. Raises sqlite3.Error, and has written nothing then."""
    if not rows or has_digest(db):
        return
    db.execute("BEGIN")
    try:
        db.execute(_SCHEMA)
        db.executemany("INSERT INTO digest(seq, crc, records) VALUES(?, ?, ?)", rows)
        db.execute("COMMIT")
    except sqlite3.Error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def has_digest(db: sqlite3.Connection) -> bool:
    """Returns whether a segment has one. Raises sqlite3.Error."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'digest'").fetchone() is not None


def read_digest(db: sqlite3.Connection, segment: int) -> Iterator[list[Row]]:
    """The records, many at a time. A payload that was cut is of kind HEAD, and its checksum is its whole length.

    Raises ValueError, or another of GROUP_ERRORS, where the digest is not as it was written; sqlite3.Error.
    """
    before = 0
    for last, crc, payload in db.execute("SELECT seq, crc, records FROM digest ORDER BY seq"):
        if crc != checksum(last, segment, _KIND, payload):
            raise ValueError("a digest's checksum is wrong")
        at = payload.index(b"\n") + 1
        heads: list[list[int]]
        heads, _ = _JSON.raw_decode(payload[:at].decode())
        rows: list[Row] = []
        for head in heads:
            key, kind, length = head[0], head[1], head[2]
            if kind == FULL and length >= CUT_MIN and payload[at] < UNCUT_MIN:
                before += 1
                rows.append((before, key, HEAD, length, payload[at : at + HEAD_BYTES]))
                at += HEAD_BYTES
                continue
            if kind == GROUP:
                before += key
                rows += ungroup(before, key, payload[at : at + length])
            elif FULL <= kind <= DELETE:
                before += 1
                rows.append((before, key, kind, 0, payload[at : at + length]))
            else:
                raise ValueError("a digest has an unknown kind of record")
            at += length
        if before != last or at != len(payload):
            raise ValueError("a digest is not what its head says")
        yield rows


DIGEST_ERRORS: Final = (sqlite3.Error, *GROUP_ERRORS)
"""What read_digest() raises."""
