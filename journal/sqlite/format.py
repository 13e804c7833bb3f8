"""The format of a segment: kinds of records, checksums, groups, parts, sizes and the schema. Knows no file.

This module must not know what a payload means, nor SQLite's module. Schema and records; docs/journal.md has more:
  record(seq, key, kind, crc, payload): seq counts 1, 2, 3 ...; kind is FULL, CHANGE or DELETE, or PART ... LAST for a
  FULL one that is too large for a row, or GROUP for several small ones in one: seq is that of the last, key how many,
  and the payload `[[key,kind,size],...]`, a line feed, and theirs. each_record is a view with a row for each of those.
  A payload of more than half a page stands in the segment's `-bodies` file: its kind is OUTSIDE more.
  meta(name, value): `segment` its number, `high_water` the largest key ever written before it, `oldest` the first
  segment that a replay needs, `records-N` those of segment N before it, once it is sealed `records`, their
  count, and `crc` over the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from struct import Struct
from typing import Final
from zlib import crc32

from journal.log import CHANGE as CHANGE  # those that are appended; the segments have some more
from journal.log import DELETE as DELETE
from journal.log import FULL as FULL
from journal.log import GROWN_BYTES, PAYLOAD_MAX, PAYLOAD_MIN
from journal.log import HEAD_BYTES as CUT_BYTES
from journal.log import Row as Row
from journal.parts import KEY_MAX as KEY_MAX
from journal.parts import LAST as LAST
from journal.parts import PART as PART
from journal.parts import Entry as Entry
from journal.parts import split as cut

GROUP: Final = 6
"""Kinds of rows beside FULL, CHANGE and DELETE. A FULL record that is too large for a row becomes PART ... LAST. LAST
begins with the number of its PARTs (u32). Other records may stand between them, but no PARTs of another key. GROUP is a
row of several small records."""
OUTSIDE: Final = 8
"""A record of another kind than GROUP whose payload stands in the `-bodies` file has a kind that is greater by so
much. The payload of its row is PLACE, and behind PLACE the first CUT_BYTES of the payload of a FULL record."""
PLACE: Final = Struct("<QIII")
"""Where a payload stands in the `-bodies` file: its offset, its length, and its CRC-32. Then how many records of its
commit come before it: a loss of power that takes the payload takes the commit."""
APPLICATION_ID: Final = 0x67767374  # "gvst"
FORMAT_VERSION: Final = 7
FORMAT_VERSIONS: Final = (1, 2, 3, 4, 5, 6, 7)
"""The versions that can be read. Version 1 has neither groups nor the view. In version 2 nothing stands between PARTs.
Up to version 3 no payload has tags, up to version 4 no tag tells of a user, up to version 5 no mark keeps settings, and
up to version 6 no payload stands outside. A reader of version 7 reads all of them."""
FORMAT_LIMIT: Final = 99
"""Largest format version that any geventstalk will write. A larger one is damage: one bit of a number of 32 flipped."""
PAGE_BYTES: Final = 2048
"""A commit writes whole pages to the WAL, so small pages waste less on a single record."""
INDEX_BYTES: Final = 1 << 15
"""SQLite keeps the index of a WAL in a file of its own. The file begins with this size, and grows by this much
(SQLite's WAL-mode file format, section 2)."""
KEY_BITS: Final = 63
"""SQLite's integers have 64 bits with their sign, and keys are not negative."""
SEGMENT_MAX: Final = (1 << 32) - 1
"""Liveness keeps the number of a segment in 32 bits. At a segment a second that is enough for 136 years."""
BEFORE: Final = "records-"
"""A name in `meta` that begins so says how many records an older segment has. The number of that segment follows."""
EMPTY_BYTES: Final = 3 * PAGE_BYTES
"""A segment without records: a page for SQLite's schema, which has room for all of SCHEMA, and one for each table."""
_MAGIC: Final = b"SQLite format 3\0"
HEAD_BYTES: Final = 100
"""Every SQLite file begins with a header of this size (its file format, section 1.3)."""
PART_BYTES: Final = PAYLOAD_MAX
"""A larger payload is written in parts: SQLite holds at most 10**9 bytes in a value."""
GROUPED_MAX: Final = PAYLOAD_MIN - 1
"""Smaller payloads share rows with others of their commit, because a small one costs little beside its row."""
GROUP_BYTES: Final = 655
"""The most bytes of a group: a third of LEAF_BYTES, less CELL_BYTES and one byte to spare. So a page holds three
groups, and that hardly takes more room than their records would take alone."""
LARGE_BATCH: Final = 256
"""With this many records in a commit a group fills a page: there are a third as many rows, and only the last page is
half empty."""
HEAD_ENDS: Final = [[b",%d,%d]" % (kind, size) for size in range(GROUPED_MAX + 1)] for kind in range(DELETE + 1)]
"""The end of each possible head. Turning a number into text takes 200 instructions: 4 % of a durable put in all."""
CELL_BYTES: Final = 24
"""Bytes of a record in its page beside the payload: a pointer of 2 bytes, and about 22 for the length of the row,
`seq`, the row's header, `key`, `kind` and `crc`; SQLite stores small numbers in fewer bytes."""
LEAF_BYTES: Final = PAGE_BYTES - 8
"""Bytes of a page for rows: a leaf of SQLite's tree begins with a header of 8 bytes (file format, section 1.6)."""
LOCAL_MAX: Final = PAGE_BYTES - 60
"""SQLite would give a larger payload pages of its own: a row may have PAGE_BYTES - 35 bytes in its page (section 1.6),
and up to 25 of them are not payload."""
INSIDE_MAX: Final = LEAF_BYTES // 2 - CELL_BYTES
"""The payload of a larger record stands in the `-bodies` file: a page would hold only one of them."""
_SHARES: Final = tuple(-(-PAGE_BYTES // (LEAF_BYTES // (size + CELL_BYTES))) for size in range(INSIDE_MAX + 1))
_OUTSIDE_BYTES: Final = _SHARES[PLACE.size + CUT_BYTES]
"""The bytes that the row of an outside payload takes."""
_ENTRY_BYTES: Final = 16
"""Bytes of a grouped record beside its payload, with a key of seven digits."""

PARTS: Final = Struct("<I")
"""The beginning of a LAST record's payload."""
GROUP_ERRORS: Final = (ValueError, TypeError, LookupError, OverflowError, RecursionError)
"""The exceptions of ungroup() for a payload that is no group's."""
_JSON: Final = json.JSONDecoder()
SCHEMA: Final = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE record(
  seq INTEGER PRIMARY KEY, key INTEGER NOT NULL, kind INTEGER NOT NULL, crc INTEGER NOT NULL, payload BLOB NOT NULL
);
CREATE VIEW each_record(seq, key, kind, payload) AS
  SELECT seq, key, kind & 7, CASE kind & 8 WHEN 0 THEN payload ELSE substr(payload, 21) END FROM record WHERE kind <> 6
  UNION ALL
  SELECT seq - count + 1 + head.key, json_extract(head.value, '$[0]'), json_extract(head.value, '$[1]'),
    coalesce(substr(payloads, 1 + (SELECT total(json_extract(before.value, '$[2]')) FROM json_each(heads) before
      WHERE before.key < head.key), json_extract(head.value, '$[2]')), x'')
  FROM (
    SELECT seq, key AS count, CAST(substr(payload, 1, instr(payload, x'0a')) AS TEXT) AS heads,
      substr(payload, instr(payload, x'0a') + 1) AS payloads
    FROM record WHERE kind = 6
  ), json_each(heads) head;
"""

NewRow = tuple[int, int, int, int, bytearray]
"""To sqlite3 a bytearray is a blob; of bytes it asks first, row by row, whether an adapter stands for them."""


def checksum(seq: int, key: int, kind: int, payload: bytes) -> int:
    """CRC-32 of the payload that also depends on where it stands, so that a moved record does not pass for another."""
    return crc32(payload, (key ^ (key >> 32) ^ (kind << 29) ^ (kind >> 3) ^ (seq << 3)) & 0xFFFFFFFF)


def is_kind(kind: int) -> bool:
    """Returns whether a row may have this kind."""
    return FULL <= kind <= GROUP or FULL <= kind - OUTSIDE <= LAST


def row_bytes(size: int) -> int:
    """Returns what a payload of this size takes on disk: of its page as much as when all records there are like it.

    A page holds whole records only, so one of 600 bytes takes a third of it, and one of 700 half. Source: SQLite's file
    format, section 1.6.
    """
    return _SHARES[size] if size <= INSIDE_MAX else size + _OUTSIDE_BYTES


def whole_bytes(size: int) -> int:
    """Returns what a FULL record of this size takes, and still takes when it was changed and moved.

    By then it may have grown, so that a page holds three instead of four, and small ones may share rows.
    """
    return _WHOLES[size] if size <= INSIDE_MAX else row_bytes(size + GROWN_BYTES)


def _whole_bytes(size: int) -> int:
    weight = size + GROWN_BYTES + _ENTRY_BYTES
    together = GROUP_BYTES // weight
    if together < 2 or size + GROWN_BYTES > GROUPED_MAX:
        return row_bytes(size + GROWN_BYTES)
    groups = LEAF_BYTES // (together * weight + CELL_BYTES)
    return max(row_bytes(size + GROWN_BYTES), -(-PAGE_BYTES // (groups * together)))


def ungroup(seq: int, count: int, payload: bytes) -> list[Row]:
    """Returns the records of a group, with 0 for checksums. Raises GROUP_ERRORS when it is no group of this many."""
    end = payload.index(b"\n") + 1
    heads: list[list[int]]
    heads, stop = _JSON.raw_decode(payload[:end].decode())  # json.loads() takes 3 % of a restart more
    at = end
    seq -= count
    rows: list[Row] = []
    for head in heads:
        key, kind, size = head[0], head[1], head[2]  # unpacking it costs the compiled build 4 % of a restart
        if not FULL <= kind <= DELETE or size < 0 or key >> KEY_BITS:
            raise ValueError("a group has whole small records only")
        seq += 1
        rows.append((seq, key, kind, 0, payload[at : at + size]))
        at += size
    if len(rows) != count or at != len(payload) or stop != end - 1:
        raise ValueError("a group's payload is not what its head says")
    return rows


def keys_of_group(seq: int, count: int, head: bytes) -> list[tuple[int, int]]:
    """Pairs (seq, key) of the whole records of a group, by its head alone. Raises GROUP_ERRORS as ungroup() does."""
    heads: list[list[int]] = _JSON.decode(head.decode())
    if len(heads) != count or max([each[0] >> KEY_BITS for each in heads], default=0):
        raise ValueError("a group's head is not that of so many records")
    return [(at, each[0]) for at, each in enumerate(heads, seq - count + 1) if each[1] == FULL]


def pages_of(head: bytes) -> int:
    """Returns how many pages a SQLite file has, as its header says."""
    return int.from_bytes(head[28:32], "big")


def uses_wal(head: bytes) -> bool:
    """Returns whether a SQLite file is written by way of a WAL, as its header says."""
    return head[18:20] == b"\2\2"


def is_beginning(page: bytes) -> bool:
    """Returns whether this is how the file of a new segment begins: nothing, a SQLite file without any table, or with
    ours.
    """
    if not page:
        return True
    ours = int.from_bytes(page[68:72], "big") == APPLICATION_ID
    tables = int.from_bytes(page[HEAD_BYTES + 3 : HEAD_BYTES + 5], "big")
    return page.startswith(_MAGIC + PAGE_BYTES.to_bytes(2, "big")) and (ours or not tables)


def meta_checksum(meta: Mapping[str, int]) -> int:
    """CRC-32 of `name=value` lines in order of their names, as `meta` keeps it of itself under the name `crc`."""
    return crc32("".join(f"{name}={meta[name]}\n" for name in sorted(meta) if name != "crc").encode())


def is_possible(meta: Mapping[str, int]) -> bool:
    """Returns whether a segment may say so of itself: numbers within their bounds. Raises KeyError where one is
    missing.
    """
    number = meta["segment"]
    return (
        0 < number <= SEGMENT_MAX
        and 0 <= meta["high_water"] <= KEY_MAX
        and 0 < meta.get("oldest", number) <= number
        and meta.get("records", 0) >= 0
    )


def split(key: int, payload: bytes) -> list[Entry]:
    """Returns a whole record that is too large for one row, as the rows that join() makes one again."""
    return cut(key, payload, PART_BYTES, PARTS)


def outside_row(seq: int, key: int, kind: int, payload: bytes, offset: int, before: int) -> NewRow:
    """Returns the row of a record whose payload stands at this offset of the `-bodies` file.

    `before` is the number of records of the same commit that come before the record.
    """
    kept = PLACE.pack(offset, len(payload), crc32(payload), before) + (payload[:CUT_BYTES] if kind == FULL else b"")
    kind += OUTSIDE
    return seq, key, kind, checksum(seq, key, kind, kept), bytearray(kept)


def row_of(seq: int, entries: list[Entry], heads: list[bytes]) -> NewRow:
    """A row for one record, or for the group of them that ends with number `seq`."""
    key, kind, payload = entries[0]
    if len(entries) > 1:
        key, kind = len(entries), GROUP
        payload = b"".join((b"[%b]\n" % b",".join(heads), *[payload for _, _, payload in entries]))
    return seq, key, kind, checksum(seq, key, kind, payload), bytearray(payload)


_WHOLES: Final = tuple(_whole_bytes(size) for size in range(INSIDE_MAX + 1))
