"""One segment: a plain SQLite file of records, written in WAL mode. The only room that speaks SQL.

This room must not know what a payload means, nor of other segments. Schema, format version 2; docs/journal.md has more:
  record(seq, key, kind, crc, payload): seq counts 1, 2, 3 ...; kind is FULL, CHANGE or DELETE, or PART ... LAST for a
  FULL one that is too large for a row, or GROUP for several small ones in one: seq is that of the last, key how many,
  and the payload `[[key,kind,size],...]`, a line feed, and theirs. each_record is a view with a row for each of those.
  meta(name, value): `segment` its number, `high_water` the largest key ever written before it, `oldest` the first
  segment that a replay needs, once the segment is sealed `records`, their count, and `crc` over the others.
Commits never wait for the device (synchronous=OFF); sync() does, on the `-wal` file, from any thread. SQLite's locks
are on the database and `-shm` files, so a descriptor of the `-wal` file may come and go without losing them.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from struct import Struct
from struct import error as StructError
from typing import Final
from urllib.parse import quote
from zlib import crc32

from mypy_extensions import mypyc_attr

from journal.errors import JournalDamaged, JournalError, JournalFailed, JournalFull

FULL: Final = 1
CHANGE: Final = 2
DELETE: Final = 3
PART: Final = 4
LAST: Final = 5
GROUP: Final = 6
"""FULL, CHANGE and DELETE are appended. PART ... LAST are a FULL one that was split; LAST begins with the number of its
PARTs (u32). GROUP is a row of several small ones."""

NEW_SUFFIX: Final = ".new"
"""What the name of a segment ends in while it is made."""
APPLICATION_ID: Final = 0x67767374  # "gvst"
FORMAT_VERSION: Final = 2
_FORMAT_VERSIONS: Final = (1, 2)  # the first had neither groups nor the view; what reads the second reads it as well
PAGE_BYTES: Final = 2048
"""A commit writes whole pages to the WAL: small ones waste less on a single record, large ones less on large bodies."""
PART_BYTES: Final = 1 << 24
"""A larger payload is written in parts: SQLite holds at most 10**9 bytes in a value."""
_GROUPED_MAX: Final = 200
"""Payloads of at most so many bytes share rows with others of their commit: a small one costs little beside its row."""
_GROUP_BYTES: Final = 655
"""A group has at most so many: a page holds three, which hardly takes more room than their records would alone."""
_LARGE_BATCH: Final = 256
"""With so many records at once groups fill pages: a third of the rows, and only the last page is half empty."""
_HEAD_ENDS: Final = [[f",{kind},{size}]" for size in range(_GROUPED_MAX + 1)] for kind in range(DELETE + 1)]
"""Made once: a number to text is 200 instructions, of a durable put 4 % in all."""
_CELL_BYTES: Final = 24  # what a record takes in its page beside the payload
_LEAF_BYTES: Final = PAGE_BYTES - 8
_LOCAL_MAX: Final = PAGE_BYTES - 60  # a larger payload spills into pages of its own,
_LOCAL_MIN: Final = (PAGE_BYTES - 12) * 32 // 255 - 23  # and leaves at least this much where it stands
_SHARES: Final = tuple(-(-PAGE_BYTES // (_LEAF_BYTES // (size + _CELL_BYTES))) for size in range(_LOCAL_MAX + 1))

_PARTS: Final = Struct("<I")
_WAL_HEAD_BYTES: Final = 32
_FRAME_HEAD_BYTES: Final = 24
_LOOK_BYTES: Final = 1 << 16
_BUSY_MS: Final = 100  # how long sealing waits for others who look at the file
_INDEX_BYTES: Final = 1 << 15  # by so much SQLite's index of a WAL grows
_FRAMES: Final = Struct("=I")
_FRAMES_AT: Final = 16  # where that index has the number of frames that belong to whole transactions
_FSYNC_CODES: Final = (1034, 1290)  # SQLITE_IOERR_FSYNC, SQLITE_IOERR_DIR_FSYNC
_INDEX_CODE: Final = 4874  # SQLITE_IOERR_SHMSIZE: no room for the index of a WAL; by now there may be room again
_BATCH_ROWS: Final = 32
_SELECT: Final = "SELECT seq, key, kind, crc, payload FROM record WHERE seq > ? ORDER BY seq"
_SELECT_KEYS: Final = (
    f"SELECT seq, key, kind, CASE kind WHEN {GROUP} THEN payload END FROM record "
    f"WHERE seq > ? AND kind IN ({FULL}, {LAST}, {GROUP}) ORDER BY seq"
)
_GROUP_ERRORS: Final = (ValueError, TypeError, LookupError, OverflowError)
_JSON: Final = json.JSONDecoder()
_ZEROS: Final = bytes(1 << 16)
_INSERT: Final = "INSERT INTO record(seq, key, kind, crc, payload) VALUES(?, ?, ?, ?, ?)"
_SCHEMA: Final = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE record(
  seq INTEGER PRIMARY KEY, key INTEGER NOT NULL, kind INTEGER NOT NULL, crc INTEGER NOT NULL, payload BLOB NOT NULL
);
CREATE VIEW each_record(seq, key, kind, payload) AS
  SELECT seq, key, kind, payload FROM record WHERE kind <> 6
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

Entry = tuple[int, int, bytes]
"""A record as it is appended: its key, kind and payload."""
Row = tuple[int, int, int, int, bytes]
NewRow = tuple[int, int, int, int, bytearray]
"""To sqlite3 a bytearray is a blob; of bytes it asks first, row by row, whether somebody adapts them to something."""


def checksum(seq: int, key: int, kind: int, payload: bytes) -> int:
    """CRC-32 of the payload that also depends on where it stands, so that a moved record does not pass for another."""
    return crc32(payload, (key ^ (key >> 32) ^ (kind << 29) ^ (seq << 3)) & 0xFFFFFFFF)


def row_bytes(size: int) -> int:
    """What a payload of so many bytes takes on disk: of its page as much as when all records there are like it.

    A page holds whole records only, so one of 990 bytes takes half of it, and one of 1,010 all. Source: SQLite's file
    format, section 1.6.
    """
    if size <= _LOCAL_MAX:
        return _SHARES[size]
    pages, local = _spill(size)
    return pages * PAGE_BYTES + _SHARES[local]


def _spill(size: int) -> tuple[int, int]:
    """How many pages of its own a payload of so many bytes takes, and how much of it is left in the table's page."""
    if size <= _LOCAL_MAX:
        return 0, size
    pages, rest = divmod(size - _LOCAL_MIN, PAGE_BYTES - 4)
    rest += _LOCAL_MIN
    return (pages + 1, _LOCAL_MIN) if rest > _LOCAL_MAX else (pages, rest)


def ungroup(seq: int, count: int, payload: bytes) -> list[Row]:
    """The records of a group, with 0 for their checksums. Raises _GROUP_ERRORS when it is none of so many."""
    end = payload.index(b"\n") + 1
    heads: list[list[int]]
    heads, stop = _JSON.raw_decode(payload[:end].decode())  # json.loads() takes 3 % of a restart more
    at = end
    seq -= count
    rows: list[Row] = []
    for head in heads:
        key, kind, size = head[0], head[1], head[2]  # unpacking it costs the compiled build 4 % of a restart
        if not FULL <= kind <= DELETE or size < 0:
            raise ValueError("a group has whole small records only")
        seq += 1
        rows.append((seq, key, kind, 0, payload[at : at + size]))
        at += size
    if len(rows) != count or at != len(payload) or stop != end - 1:
        raise ValueError("a group's payload is not what its head says")
    return rows


def meta_checksum(meta: Mapping[str, int]) -> int:
    """CRC-32 of `name=value` lines in order of their names, as `meta` keeps it of itself under the name `crc`."""
    return crc32("".join(f"{name}={meta[name]}\n" for name in sorted(meta) if name != "crc").encode())


def split(key: int, payload: bytes) -> list[tuple[int, int, bytes]]:
    """A whole record that is too large for one row, as the batch of rows that join() makes one again."""
    parts = [payload[at : at + PART_BYTES] for at in range(0, len(payload), PART_BYTES)]
    last = parts.pop()
    return [*((key, PART, part) for part in parts), (key, LAST, _PARTS.pack(len(parts)) + last)]


def join(reader: SegmentReader, behind: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """The reader's records with those that were split made whole; one that misses a part is skipped."""
    parts: list[bytes] = []
    for key, kind, payload in reader.rows(behind):
        if kind == PART:
            parts.append(payload)
        elif kind == LAST:
            if len(payload) >= _PARTS.size and _PARTS.unpack_from(payload)[0] == len(parts):
                yield key, FULL, b"".join([*parts, payload[_PARTS.size :]])
            else:
                reader.skipped += 1
            parts = []
        else:
            parts = []
            yield key, kind, payload


class WalFile:
    """A descriptor of a `-wal` file for fdatasync; closed when nobody refers to it any more."""

    def __init__(self, path: str) -> None:
        self._file = -1
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def sync(self) -> None:
        """Waits until all that was written is on the device. Raises JournalFailed; never call it again after that."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise JournalFailed(f"fsync of the journal failed: {error.strerror}") from error

    def size(self) -> int:
        return os.fstat(self._file).st_size

    def allocate(self, size: int) -> None:
        """Fills the still empty file with so many zeros, unless the disk has no room for them.

        An fsync of what is written over them has no size and no new block to write down: it takes half as long. Blocks
        that are only allocated have to be noted as written then, which is a quarter of that time. Raises OSError.
        """
        try:
            os.posix_fallocate(self._file, 0, size)
            left = size
            while left:
                left -= os.write(self._file, _ZEROS[:left])
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            os.ftruncate(self._file, 0)
        os.fsync(self._file)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class SegmentWriter:
    """A new segment, open for appending."""

    def __init__(self, path: str, number: int, high_water: int, ahead: int = 0) -> None:
        """Creates the file, synced, with so many bytes ahead of what will be written to its WAL.

        Raises JournalFull or JournalFailed; what was begun is removed then.
        """
        self.path = path
        self.number = number
        self.records = 0
        self.bytes = 0  # what they take once it is sealed
        self._page_bytes = 0  # of that, what is still free in the page that takes the next row
        try:
            _create(path + NEW_SUFFIX, number, high_water)
            os.rename(path + NEW_SUFFIX, path)
            # check_same_thread: the connection is handed to one other thread once, to be sealed there.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=16)
            try:
                self._db.executescript("PRAGMA synchronous=OFF; PRAGMA wal_autocheckpoint=0; PRAGMA cache_size=-256;")
                self._db.execute("SELECT count(*) FROM meta").fetchone()  # makes the WAL
                self.wal = WalFile(path + "-wal")
                if ahead:
                    self.wal.allocate(ahead)
            except BaseException:
                self._db.close()  # what is open keeps its room on the disk, also without a name
                raise
        except (sqlite3.Error, OSError) as error:
            failure = _failure(error, "cannot create journal segment", path)  # while the disk is as full as it was
            remove_files(path + NEW_SUFFIX)
            remove_files(path)
            raise failure from error

    def rows(self, batch: list[Entry]) -> list[NewRow]:
        """What append() is to write for a batch: small records that follow each other share rows."""
        limit = _LOCAL_MAX if len(batch) >= _LARGE_BATCH else _GROUP_BYTES
        rows: list[NewRow] = []
        heads: list[str] = []
        begin = end = taken = 0
        for key, kind, payload in batch:
            size = len(payload)
            head, weight = "", limit
            if size <= _GROUPED_MAX and kind <= DELETE:
                head = f"[{key}{_HEAD_ENDS[kind][size]}"
                weight = size + len(head) + 1
            taken += weight
            if taken > limit and heads:
                rows.append(_row(self.records + end, batch[begin:end], heads))
                begin, heads, taken = end, [], weight
            heads.append(head)
            end += 1
        if heads:
            rows.append(_row(self.records + end, batch[begin:end], heads))
        return rows

    def append(self, rows: Sequence[NewRow]) -> None:
        """Commits the rows in one transaction, without waiting for the device.

        Raises JournalFull, when nothing was written and it may be tried again with more room, or JournalFailed.
        """
        execute = self._db.execute
        try:
            if len(rows) == 1:
                execute(_INSERT, rows[0])
            else:
                execute("BEGIN")
                self._db.executemany(_INSERT, rows)
                execute("COMMIT")
        except sqlite3.Error as error:
            try:
                if self._db.in_transaction:
                    execute("ROLLBACK")
            except sqlite3.Error as worse:
                raise JournalFailed(f"cannot write to journal segment {self.path}: {worse}") from error
            raise _failure(error, "cannot write to journal segment", self.path) from error
        for row in rows:
            self.records = row[0]
            self._grow(len(row[4]))

    def _grow(self, size: int) -> None:
        pages, local = _spill(size)
        if local + _CELL_BYTES > self._page_bytes:
            pages += 1
            self._page_bytes = _LEAF_BYTES
        self._page_bytes -= local + _CELL_BYTES
        self.bytes += pages * PAGE_BYTES

    def note(self, high_water: int, oldest: int) -> None:
        """Notes the largest key written before this segment, and the oldest segment that a replay needs.

        Raises JournalFull or JournalFailed.
        """
        try:
            _write_meta(self._db, {"segment": self.number, "high_water": high_water, "oldest": oldest})
        except sqlite3.Error as error:
            raise _failure(error, "cannot write to journal segment", self.path) from error

    def discard(self) -> None:
        """Closes and removes a segment that nobody needs, sealed or not."""
        remove_files(self.path)
        with suppress(sqlite3.Error):  # it would merge the WAL now, into a file that has no name any more
            self._db.close()

    def seal(self) -> None:
        """Moves everything from the WAL into the database file, synced, and closes. For a thread away from the hub.

        Raises JournalFull, when it may be tried again with more room, or JournalFailed.
        """
        _seal(self._db, self.path, self.records)


def _row(seq: int, entries: list[Entry], heads: list[str]) -> NewRow:
    """A row for one record, or for the group of them that ends with number `seq`."""
    key, kind, payload = entries[0]
    if len(entries) > 1:
        key, kind = len(entries), GROUP
        payload = b"".join((f"[{','.join(heads)}]\n".encode(), *[payload for _, _, payload in entries]))
    return seq, key, kind, checksum(seq, key, kind, payload), bytearray(payload)


def _create(path: str, number: int, high_water: int) -> None:
    """Makes an empty segment, complete and on the device; it gets its own name only then.

    So whatever a crash leaves under that name is whole, and a WAL never stands beside an empty database, as a loss of
    power might leave it: SQLite would delete the WAL.
    """
    # Job bodies are nobody else's business; SQLite gives its own files the mode of this one.
    os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.executescript(
            # Alone with the file, SQLite needs no index of the WAL beside it: 32 KiB that a full disk may not have.
            f"PRAGMA locking_mode=EXCLUSIVE; PRAGMA page_size={PAGE_BYTES}; PRAGMA journal_mode=WAL;"
            f"PRAGMA synchronous=FULL; PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={FORMAT_VERSION};"
            f"BEGIN; {_SCHEMA}"
        )
        _write_meta(db, {"segment": number, "high_water": high_water})
        db.execute("COMMIT")
    finally:
        db.close()  # and with the last connection the WAL is merged and gone
    fsync_path(path)


def _write_meta(db: sqlite3.Connection, meta: dict[str, int]) -> None:
    """Writes values, with the checksum of all that stand then, in one statement."""
    rows = {**meta, "crc": meta_checksum(meta)}
    places = ", ".join(["(?, ?)"] * len(rows))
    db.execute(f"INSERT OR REPLACE INTO meta VALUES {places}", [part for row in rows.items() for part in row])


def _read_meta(db: sqlite3.Connection) -> dict[str, int]:
    return {str(name): int(value) for name, value in db.execute("SELECT name, value FROM meta")}


@mypyc_attr(allow_interpreted_subclasses=True)
class SegmentReader:
    """A segment opened for reading; a WAL that a crash left beside it is part of it, and stays as it is."""

    def __init__(self, path: str) -> None:
        """Raises JournalDamaged when this is not a segment of a version that we know."""
        self.path = path
        # Read-only, so that closing merges nothing. Without a WAL nobody writes to the file: then no lock is needed and
        # nothing is created beside it.
        mode = "mode=ro" if os.path.exists(path + "-wal") else "mode=ro&immutable=1"
        try:
            self._db = sqlite3.connect(
                f"file:{quote(path)}?{mode}", uri=True, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise _unreadable(error, f"{path} cannot be read as a journal segment", path) from error
        try:
            self._read_head()
        except BaseException:
            self._db.close()
            raise
        self.records = 0  # the last one that rows() found
        self.skipped = 0  # how many it left out because they are damaged

    def _read_head(self) -> None:
        path = self.path
        try:
            (application,) = self._db.execute("PRAGMA application_id").fetchone()
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if application != APPLICATION_ID:
                raise JournalDamaged(f"{path} is not a journal segment")
            if version not in _FORMAT_VERSIONS:
                raise JournalDamaged(f"{path} has format version {version}; this server reads 1 to {FORMAT_VERSION}")
            meta = _read_meta(self._db)
            if meta["crc"] != meta_checksum(meta):
                raise JournalDamaged(f"{path} cannot be read as a journal segment: its head is damaged")
            self.number = meta["segment"]
            self.high_water = meta["high_water"]
            self.oldest = meta.get("oldest", self.number)
            self._expected = meta.get("records")
        except sqlite3.Error as error:
            raise _unreadable(error, f"{path} cannot be read as a journal segment", path) from error
        except (KeyError, TypeError, ValueError) as error:
            raise JournalDamaged(f"{path} cannot be read as a journal segment: {error}") from error

    def batches(self) -> Iterator[list[Row]]:
        """As join(), some records at a time, each as (seq, key, kind, crc, payload): a third of its time.

        Only for what is as it should be. From the first record that is not, one at a time.
        """
        self.records = self.skipped = 0
        try:
            cursor = self._db.execute(_SELECT, (0,))
            while rows := self._whole(cursor.fetchmany(_BATCH_ROWS)):
                self.records = rows[-1][0]
                yield rows
        except sqlite3.Error:
            pass  # what can still be read is read below, up to where it cannot
        for key, kind, payload in join(self, self.records):
            yield [(self.records, key, kind, 0, payload)]

    def _whole(self, rows: list[Row]) -> list[Row]:
        """A row for each record; none when not all are as they were written, whole, and stand behind `records`."""
        whole: list[Row] = []
        before = self.records
        try:
            for row in rows:
                seq, key, kind, crc, payload = row
                # checksum() written out: a call a record is a twentieth of a restart.
                if crc != crc32(payload, (key ^ (key >> 32) ^ (kind << 29) ^ (seq << 3)) & 0xFFFFFFFF):
                    return []
                if kind == GROUP and seq == before + key:
                    whole += ungroup(seq, key, payload)
                elif seq == before + 1 and FULL <= kind <= DELETE:
                    whole.append(row)
                else:
                    return []
                before = seq
        except _GROUP_ERRORS:
            return []
        return whole

    def rows(self, behind: int = 0) -> Iterator[Entry]:
        """Every intact record behind that many; the others are counted in `skipped`.

        Raises JournalDamaged where it cannot go on, and behind the last record when some are missing there.
        """
        self.records, self.skipped = behind, 0
        try:
            for last, key, kind, crc, payload in self._db.execute(_SELECT, (behind,)):
                records = _intact(last, key, kind, crc, payload)
                if last <= self.records or (records and records[0][0] <= self.records):
                    self.skipped += 1  # a page stands in the place of another: what it says was said before
                    continue
                self.skipped += last - self.records - len(records)
                for seq, key, kind, _, payload in records:
                    self.records = seq
                    yield key, kind, payload
                self.records = last
        except sqlite3.Error as error:
            raise _unreadable(error, f"{self.path} is damaged behind record {self.records}", self.path) from error
        except (TypeError, OverflowError) as error:
            raise JournalDamaged(f"{self.path} is damaged behind record {self.records}: {error}") from error
        if self._expected is not None and self.records != self._expected:
            raise JournalDamaged(f"{self.path} was sealed with {self._expected} records and has {self.records}")

    def keys_after(self, seq: int, limit: int) -> list[tuple[int, int]]:
        """Up to `limit` pairs (seq, key) of whole records behind `seq`, in order, and as many more as share a row.

        Raises JournalDamaged when the file is not as it was written any more, or JournalFailed.
        """
        found: list[tuple[int, int]] = []
        try:
            for last, key, kind, payload in self._db.execute(_SELECT_KEYS, (seq,)):
                if kind == GROUP:
                    records = ungroup(last, key, payload)
                    found += [(at, each) for at, each, kind, _, _ in records if kind == FULL and at > seq]
                else:
                    found.append((last, key))
                if len(found) >= limit:
                    break
        except sqlite3.Error as error:
            raise _unreadable(error, f"{self.path} is damaged behind record {seq}", self.path) from error
        except _GROUP_ERRORS as error:
            raise JournalDamaged(f"{self.path} is damaged behind record {seq}: {error}") from error
        return found

    @property
    def sealed(self) -> bool:
        """Whether nobody writes to it any more."""
        return self._expected is not None

    def pin(self) -> None:
        """Makes every later reading see the segment as it is now, whatever its writer does meanwhile.

        The file may even be unlinked. Raises JournalDamaged.
        """
        try:
            self._db.execute("BEGIN")
            self._db.execute("SELECT count(*) FROM meta").fetchone()
        except sqlite3.Error as error:
            raise JournalDamaged(f"{self.path} cannot be read as a journal segment: {error}") from error

    def copy_to(self, path: str) -> int:
        """Writes the segment as it is now to a new file, sealed and synced. Returns how many records it has.

        Raises JournalDamaged when it cannot be read, JournalFull or JournalFailed when the copy cannot be written.
        """
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            copy = sqlite3.connect(path, isolation_level=None)
        except (sqlite3.Error, OSError) as error:
            raise _failure(error, "cannot create", path) from error
        try:
            self._db.backup(copy)
            (records,) = copy.execute("SELECT coalesce(max(seq), 0) FROM record").fetchone()
        except sqlite3.Error as error:
            copy.close()
            failure = _failure(error, "cannot write", path)
            if isinstance(failure, JournalFull):
                raise failure from error
            raise JournalDamaged(f"{self.path} cannot be copied: {error}") from error
        if not self.sealed:
            _seal(copy, path, int(records))
        else:  # it says itself how many it should have
            copy.close()
            fsync_path(path)
        return int(records)

    def close(self) -> None:
        self._db.close()


def _intact(seq: int, key: int, kind: int, crc: object, payload: bytes) -> list[Row]:
    """A row's record, or all of a group; none when it is not as it was written. Raises TypeError or OverflowError."""
    if not FULL <= kind <= GROUP or crc != checksum(seq, key, kind, payload):
        return []
    try:
        return ungroup(seq, key, payload) if kind == GROUP else [(seq, key, kind, 0, payload)]
    except _GROUP_ERRORS:
        return []


def torn_bytes(path: str) -> int:
    """How many bytes at the end of a segment's WAL are no part of a whole transaction; 0 when that is not known.

    For a segment that was just read and that this process does not have open: closing a file drops SQLite's locks.
    """
    try:
        size = os.path.getsize(path + "-wal")  # before the index: a writer only makes the number of frames grow
        with open(path + "-shm", "rb") as index:
            frames = _FRAMES.unpack(index.read(_FRAMES_AT + _FRAMES.size)[_FRAMES_AT:])[0]
        return _written(path + "-wal", frames, size)
    except (OSError, StructError):
        return 0


def _written(wal: str, frames: int, size: int) -> int:
    """How many bytes stand behind so many frames of a WAL of this size, but for whole frames that are only zeros."""
    frame_bytes = _FRAME_HEAD_BYTES + PAGE_BYTES
    begin = _WAL_HEAD_BYTES + frames * frame_bytes
    last = 0
    with open(wal, "rb") as file:
        for at in range(begin, size, _LOOK_BYTES):
            file.seek(at)
            length = len(file.read(min(_LOOK_BYTES, size - at)).rstrip(b"\0"))
            if length:
                last = at - begin + length
    return min(size - begin, -(-last // frame_bytes) * frame_bytes) if last else 0


def _seal(db: sqlite3.Connection, path: str, records: int) -> None:
    try:
        db.executescript(f"PRAGMA busy_timeout={_BUSY_MS}; PRAGMA synchronous=FULL;")
        meta = _read_meta(db)
        del meta["crc"]
        _write_meta(db, {**meta, "records": records})
        busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        if "locked" not in str(error):
            raise _failure(error, "cannot seal journal segment", path) from error
        busy = 1
    db.close()
    if busy:
        # Somebody looks at the file (sqlite3, a backup); closing left the WAL beside it, which is as good.
        sync_files(path)


def seal_left_over(path: str, records: int) -> int:
    """Merges the WAL that a crash left beside a segment of so many records, as SegmentWriter.seal() does.

    Returns how many bytes of that WAL were torn, that is, no part of a whole transaction.
    """
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            _, frames, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            torn = _written(path + "-wal", frames, os.path.getsize(path + "-wal"))
            _seal(db, path, records)
    except (sqlite3.Error, OSError) as error:
        raise _failure(error, "cannot seal journal segment", path) from error
    return torn


def fsync_path(path: str) -> None:
    """Waits until a file or directory is on the device. Raises JournalFailed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise JournalFailed(f"fsync of {path} failed: {error.strerror}") from error


def sync_files(path: str) -> None:
    """Waits until a segment is on the device, also what stands in its WAL. Raises JournalFailed."""
    if os.path.exists(path + "-wal"):
        try:
            fsync_path(path + "-wal")
        except JournalFailed:
            if os.path.exists(path + "-wal"):
                raise  # otherwise the last one who looked at it has merged it meanwhile
    fsync_path(path)


def remove_files(path: str) -> None:
    """Unlinks a segment with what SQLite keeps beside it; what is not there is no error.

    The database first: without its WAL, which may hold deletes, the rest of it would be believed.
    """
    for suffix in ("", "-wal", "-shm"):
        try:
            os.unlink(path + suffix)
        except FileNotFoundError:
            continue


def disk_bytes(path: str) -> int:
    """What a segment takes on disk, its WAL included."""
    total = 0
    for suffix in ("", "-wal"):
        try:
            total += os.stat(path + suffix).st_size
        except FileNotFoundError:
            continue
    return total


def _unreadable(error: sqlite3.Error, what: str, path: str) -> JournalError:
    """A device or a limit of the system that fails is no damage: the file may be whole the next time."""
    text = " ".join(str(error).split())  # SQLite may quote a schema of many lines
    if "I/O error" in text or "unable to open" in text or "locked" in text or isinstance(error, sqlite3.InternalError):
        return JournalFull(f"{what}: no space left on device") if _is_full(path) else JournalFailed(f"{what}: {text}")
    return JournalDamaged(f"{what}: {text}")


def _failure(error: Exception, what: str, path: str) -> JournalError:
    """What an error of SQLite or the system means. sqlite3 has error codes from Python 3.11 on only."""
    text = " ".join(str(error).split())
    code = getattr(error, "sqlite_errorcode", 0)
    full = "full" in text or "No space" in text or code == _INDEX_CODE
    if text == "disk I/O error" and not full and code not in _FSYNC_CODES:
        full = _is_full(path)
    if full:
        return JournalFull(f"{what} {path}: no space left on device")
    return JournalFailed(f"{what} {path}: {text}")


def _is_full(path: str) -> bool:
    """Whether the index of a WAL cannot grow; SQLite calls that an I/O error, or a file that it cannot open."""
    disk = os.statvfs(os.path.dirname(path) or ".")
    return disk.f_bavail * disk.f_frsize < _INDEX_BYTES
