"""Sealed segments as versions before 7 of the format wrote them: payloads in their rows, and hints."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from journal.log import HEAD_BYTES, UNCUT_MIN
from journal.sqlite.files import BODIES_SUFFIX
from journal.sqlite.format import FULL, OUTSIDE, PLACE, Row, checksum
from journal.sqlite.hints import CUT_MIN

_HINTS_KIND = 7
_PIECE_RECORDS = 20
"""Rows of hints have this many records here, so that a segment has several of them."""


def make_old(path: str) -> None:
    """Turns a sealed segment into one of version 6."""
    bodies = Path(path + BODIES_SUFFIX).read_bytes()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA user_version=6")
        db.execute("PRAGMA journal_mode=OFF")
        number = db.execute("SELECT value FROM meta WHERE name = 'segment'").fetchone()[0]
        for seq, key, kind, _, place in db.execute(f"SELECT * FROM record WHERE kind > {OUTSIDE}").fetchall():
            offset, size, _, _ = PLACE.unpack_from(place)
            payload = bodies[offset : offset + size]
            row = (kind - OUTSIDE, checksum(seq, key, kind - OUTSIDE, payload), payload, seq)
            db.execute("UPDATE record SET kind = ?, crc = ?, payload = ? WHERE seq = ?", row)
        db.execute("CREATE TABLE digest(seq INTEGER PRIMARY KEY, crc INTEGER NOT NULL, records BLOB NOT NULL)")
        rows = db.execute("SELECT * FROM record ORDER BY seq").fetchall()
        db.executemany("INSERT INTO digest VALUES(?, ?, ?)", [*_hints(rows, number)])
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.unlink(path + BODIES_SUFFIX)


def _hints(rows: list[Row], segment: int) -> Iterator[tuple[int, int, bytes]]:
    for at in range(0, len(rows), _PIECE_RECORDS):
        some = rows[at : at + _PIECE_RECORDS]
        heads = ",".join(f"[{key},{kind},{len(payload)}]" for _, key, kind, _, payload in some)
        kept = b"".join(
            payload[:HEAD_BYTES] if kind == FULL and len(payload) >= CUT_MIN and payload[0] < UNCUT_MIN else payload
            for _, _, kind, _, payload in some
        )
        records = f"[{heads}]\n".encode() + kept
        yield some[-1][0], checksum(some[-1][0], segment, _HINTS_KIND, records), records
