"""Packs records into rows: a head, the list of records, and the payloads. Pure.

This module must not know what a payload means, nor SQL. A row is the bytes of one commit, or a piece of them:
  >B version, B flags, H nothing, I crc;  I count, Q high water;  count times (Q key, B kind, I size);  the payloads.
The checksum also covers the number of the row, so that a row does not pass for another. It does not cover the epoch:
a commit that is written again under a newer epoch has the same bytes.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from journal.log import FULL
from journal.parts import KEY_MAX as KEY_MAX
from journal.parts import LAST as LAST
from journal.parts import PART as PART
from journal.parts import Entry as Entry
from journal.parts import split as cut

VERSION: Final = 1
SEALED: Final = 1
"""The last row of its segment: the next one stands in the next segment."""
MORE: Final = 2
"""The commit goes on in the next row. Without that row this one counts for nothing."""
TAKEOVER: Final = 4
"""Another process writes from here on: parts and commits that its predecessor did not finish are garbage."""
LOST: Final = 8
"""Marks rows that were damaged or missing, a loss that an operator has accepted."""
PARTS: Final = Struct(">I")
SEGMENT_MAX: Final = (1 << 32) - 1
ROW_BYTES: Final = 1 << 20
"""A row ends when it has this many bytes: packing, sending and unpacking them takes about a millisecond each."""
ROW_RECORDS: Final = 4096
"""A row also ends when it has this many records."""
FIRST: Final = Struct(">BBHI")
COUNTS: Final = Struct(">IQ")
ENTRY: Final = Struct(">QBI")
PART_BYTES: Final = ROW_BYTES - ENTRY.size
"""A larger payload is written in parts."""
HEAD_BYTES: Final = FIRST.size + COUNTS.size
_BESIDE_BYTES: Final = 24 + 4 + 16 + 4 + 20
"""Bytes that PostgreSQL adds to a row: head, pointer, two numbers, a length, and its place in the index."""
_TOAST_BYTES: Final = 1996
"""A larger value is cut into pieces of this many bytes (PostgreSQL's TOAST_MAX_CHUNK_SIZE), four to a page of 8192."""
_INLINE_MAX: Final = 1900


class Damaged(ValueError):
    """Bytes that are not as they were written."""


class Packed(NamedTuple):
    """The contents of a row."""

    flags: int
    high_water: int
    entries: list[Entry]


def record_bytes(size: int) -> int:
    """Returns the bytes that a record with this many bytes of payload takes."""
    return size + ENTRY.size


def row_bytes(size: int) -> int:
    """Returns the bytes that a row of this many packed bytes takes in its table, with indexes."""
    if size <= _INLINE_MAX:
        return size + _BESIDE_BYTES
    pieces = -(-size // _TOAST_BYTES)
    return pieces * 8192 // 4 + pieces * 24 + _BESIDE_BYTES


def _checksum(seq: int, first: bytes, rest: bytes) -> int:
    return crc32(rest, crc32(first, (seq ^ (seq >> 32)) & 0xFFFFFFFF))


def pack(seq: int, flags: int, high_water: int, entries: list[Entry]) -> bytes:
    """The bytes of a row."""
    head = ENTRY.pack
    rest = b"".join(
        [
            COUNTS.pack(len(entries), high_water),
            *[head(key, kind, len(payload)) for key, kind, payload in entries],
            *[payload for _, _, payload in entries],
        ]
    )
    first = FIRST.pack(VERSION, flags, 0, 0)[:4]
    return b"".join((first, _checksum(seq, first, rest).to_bytes(4, "big"), rest))


def unpack(seq: int, packed: bytes) -> Packed:
    """Returns the records of a row. Raises Damaged when the row is not as pack() made it for this place."""
    if len(packed) < HEAD_BYTES:
        raise Damaged("it is too short")
    rest = packed[FIRST.size :]
    version, flags, _, crc = FIRST.unpack_from(packed)
    if crc != _checksum(seq, packed[:4], rest):
        raise Damaged("its checksum is wrong")
    if version != VERSION:
        raise Damaged(f"it has format version {version}")
    count, high_water = COUNTS.unpack_from(rest)
    at = COUNTS.size + count * ENTRY.size
    entries: list[Entry] = []
    for key, kind, size in ENTRY.iter_unpack(rest[COUNTS.size : at]):
        end = at + size
        entries.append((key, kind, rest[at:end]))
        at = end
    if at != len(rest):
        raise Damaged("its sizes are wrong")
    return Packed(flags, high_water, entries)


def claimed(packed: bytes) -> list[int]:
    """The keys that a damaged row seems to name. They may be wrong: use them for a line to the operator only."""
    if len(packed) < HEAD_BYTES:
        return []
    count, _ = COUNTS.unpack_from(packed, FIRST.size)
    heads = packed[HEAD_BYTES : HEAD_BYTES + min(count, ROW_RECORDS) * ENTRY.size]
    heads = heads[: len(heads) - len(heads) % ENTRY.size]
    found = {key for key, kind, _ in ENTRY.iter_unpack(heads) if FULL <= kind <= LAST and 0 < key <= KEY_MAX}
    return sorted(found)


def whole_keys(head: bytes) -> list[int]:
    """The keys of the whole records in a row, of which only what stands before the payloads is given."""
    heads = head[HEAD_BYTES:]
    return [key for key, kind, _ in ENTRY.iter_unpack(heads) if kind in (FULL, LAST)]


def split(key: int, payload: bytes) -> list[Entry]:
    """Returns a whole record that is too large for one row, in entries that a reading makes one again."""
    return cut(key, payload, PART_BYTES, PARTS)
