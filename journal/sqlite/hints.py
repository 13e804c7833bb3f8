"""The hints of a sealed segment, as Bitcask has hint files: its records without most of their bytes, for a start.

Versions before 7 of the format have large payloads in the table `record`, and hints in the table `digest`. From 7 on
the table `record` itself is as short as hints. This module must not know what a payload means. Hints repeat what stands
in the table `record`, which alone counts. Invariant: hints are given back only as they were written.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Final

from journal.log import HEAD, HEAD_BYTES, UNCUT_MIN
from journal.sqlite.format import DELETE, FULL, GROUP, GROUP_ERRORS, Row, checksum, ungroup

CUT_MIN: Final = 2048
"""Smaller payloads are whole in hints."""
_KIND: Final = 7
"""The kind in the checksum of such a row: no record has it."""
_JSON: Final = json.JSONDecoder()


def has_hints(db: sqlite3.Connection) -> bool:
    """Returns whether a segment has hints. Raises sqlite3.Error."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'digest'").fetchone() is not None


def read_hints(db: sqlite3.Connection, segment: int) -> Iterator[list[Row]]:
    """The records, many at a time. A payload that was cut is of kind HEAD, and its checksum is its whole length.

    Raises ValueError, or another of GROUP_ERRORS, where the hints are not as they were written; sqlite3.Error.
    """
    before = 0
    for last, crc, payload in db.execute("SELECT seq, crc, records FROM digest ORDER BY seq"):
        if crc != checksum(last, segment, _KIND, payload):
            raise ValueError("the checksum of hints is wrong")
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
                raise ValueError("hints have an unknown kind of record")
            at += length
        if before != last or at != len(payload):
            raise ValueError("hints are not what their head says")
        yield rows


HINTS_ERRORS: Final = (sqlite3.Error, *GROUP_ERRORS)
"""The exceptions of read_hints()."""
