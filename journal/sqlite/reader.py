"""A segment opened for reading, its records checked one by one.

This module must not know what a payload means, nor other segments. It writes nothing to the segment. Invariant: a
record is given back only when its checksum and its place are those that it was written with.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Final
from zlib import crc32

from mypy_extensions import mypyc_attr

from journal.errors import JournalDamaged, JournalFailed, JournalFull, JournalNewer
from journal.log import HEAD, UNCUT_MIN
from journal.sqlite.bodies import BodyReader
from journal.sqlite.files import fsync_path
from journal.sqlite.format import (
    APPLICATION_ID,
    BEFORE,
    DELETE,
    FORMAT_LIMIT,
    FORMAT_VERSION,
    FORMAT_VERSIONS,
    FULL,
    GROUP,
    GROUP_ERRORS,
    KEY_MAX,
    LAST,
    OUTSIDE,
    PAGE_BYTES,
    PART,
    PARTS,
    PLACE,
    Entry,
    Row,
    checksum,
    is_kind,
    is_possible,
    keys_of_group,
    meta_checksum,
    ungroup,
)
from journal.sqlite.hints import HINTS_ERRORS, has_hints, read_hints
from journal.sqlite.sql import connect_to_read, failure_of, read_meta, unreadable
from journal.sqlite.writer import seal

_BATCH_ROWS: Final = 32
"""Rows that are read together. A row may hold 16 MB (PART_BYTES), so this bounds the memory."""
_SELECT: Final = "SELECT seq, key, kind, crc, payload FROM record WHERE seq > ? AND seq <= ? ORDER BY seq"
_SELECT_OUTSIDE: Final = f"""
SELECT seq, key, kind, crc, payload FROM record WHERE seq > ? AND kind > {OUTSIDE} ORDER BY seq
"""
_SELECT_KEYS: Final = f"""
SELECT group_concat(seq || ' ' || key || ' ' || kind, x'0a'), CAST(group_concat(head, '') AS BLOB)
FROM (
  SELECT seq, key, kind, CASE kind WHEN {GROUP} THEN substr(payload, 1, instr(payload, x'0a')) END AS head
  FROM record WHERE seq > ? ORDER BY seq LIMIT ?
)
"""
"""All keys in one row, for the reason that payloads.py gives."""
_GROUP_WORK: Final = 8
"""The rows of single records that cost as much to look at as taking a group apart."""


def join(reader: SegmentReader, behind: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """The reader's records. Records in parts are made whole; a record that misses a part is skipped.

    Other records may stand between the parts of a key, but no parts of another key. Where there are some, the writer
    gave up the earlier parts.
    """
    parts: list[bytes] = []
    parts_key = 0
    for key, kind, payload in reader.rows(behind):
        if kind == PART:
            if key != parts_key:
                parts, parts_key = [], key
            parts.append(payload)
        elif kind == LAST:
            count = PARTS.unpack_from(payload)[0] if len(payload) >= PARTS.size else -1
            if count == 0 or (key == parts_key and 0 < count <= len(parts)):
                yield key, FULL, b"".join([*parts[len(parts) - count :], payload[PARTS.size :]])
            else:
                reader.skipped += 1
            parts, parts_key = [], 0
        else:
            yield key, kind, payload


@mypyc_attr(allow_interpreted_subclasses=True)
class SegmentReader:
    """A segment opened for reading. A WAL that a crash left beside the file belongs to the segment and stays there."""

    def __init__(self, path: str) -> None:
        """Raises JournalDamaged when the file is no segment, JournalNewer when its format is a later one.

        `oldest` is 0 when the segment does not say it: the segment was prepared and never begun.
        """
        self.path = path
        # Read-only, so that closing merges nothing. Without a WAL nothing is written to the file. Then SQLite needs no
        # lock and creates nothing beside the file.
        _require_file(path)
        self._bodies = BodyReader(path)
        alone = self.alone = not os.path.exists(path + "-wal")
        mode = "mode=ro&immutable=1" if alone else "mode=ro"
        try:
            self._db = connect_to_read(path, mode)
        except sqlite3.Error as error:
            self._bodies.close()
            raise unreadable(error, f"{path} cannot be read as a journal segment", path) from error
        try:
            self._read_head()
            if alone and self.sealed and os.path.getsize(path) % PAGE_BYTES:  # SQLite takes what lacks for zeros
                raise JournalDamaged(f"{path} is cut short: its last page is not whole")
        except OSError as error:
            SegmentReader.close(self)
            raise JournalFailed(f"cannot read {path}: {error.strerror}") from error
        except BaseException:
            SegmentReader.close(self)
            raise
        self.synced = 0  # how many of its records were surely on the device
        self.torn = False  # whether its end lacks a payload that was not
        self._end = 0  # up to which record it counts; 0 as long as that is not known
        self.records = 0  # number of the last record that rows() found
        self.skipped = 0  # how many damaged records rows() left out
        self.suspects: list[int] = []  # keys that damaged records seem to be of, until they are taken
        self.hints_error = ""  # the fault of the hints, if one was found so far

    def _read_head(self) -> None:
        path = self.path
        try:
            (application,) = self._db.execute("PRAGMA application_id").fetchone()
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if application != APPLICATION_ID:
                raise JournalDamaged(f"{path} is not a journal segment")
            if FORMAT_VERSION < version <= FORMAT_LIMIT:
                raise JournalNewer(
                    f"{path} was written by a newer geventstalk: it has format version {version}, "
                    f"and this one reads 1 to {FORMAT_VERSION}"
                )
            if version not in FORMAT_VERSIONS:
                raise JournalDamaged(f"{path} has format version {version}, which no geventstalk writes")
            meta = read_meta(self._db)
            if meta["crc"] != meta_checksum(meta) or not is_possible(meta):
                raise JournalDamaged(f"{path} cannot be read as a journal segment: its head is damaged")
            self.number = meta["segment"]
            self.high_water = meta["high_water"]
            self.oldest = meta.get("oldest", 0)
            self.before = {
                int(name.removeprefix(BEFORE)): value for name, value in meta.items() if name.startswith(BEFORE)
            }
            self._expected = meta.get("records")
        except sqlite3.Error as error:
            raise unreadable(error, f"{path} cannot be read as a journal segment", path) from error
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise JournalDamaged(f"{path} cannot be read as a journal segment: {error}") from error

    def batches(self, heads: bool = False) -> Iterator[list[Row]]:
        """The records of join(), several at a time, each as (seq, key, kind, crc, payload), in a third of the time.

        From the first record that is not as it should be, the records come one at a time. With `heads`, the payloads of
        a sealed segment that stand outside are not read, and what stands in its hints is read there: versions before 7
        wrote some.
        """
        self.records = self.skipped = 0
        heads = heads and self.sealed
        if heads:
            yield from self._hints()
        try:
            cursor = self._db.execute(_SELECT, (self.records, self._last()))
            while rows := self._whole(cursor.fetchmany(_BATCH_ROWS), heads):
                self.records = rows[-1][0]
                yield rows
        except sqlite3.Error:
            pass  # join() reads what can still be read
        for key, kind, payload in join(self, self.records):
            yield [(self.records, key, kind, 0, payload)]

    def _hints(self) -> Iterator[list[Row]]:
        try:
            if has_hints(self._db):
                for rows in read_hints(self._db, self.number):
                    self.records = rows[-1][0]
                    yield rows
        except HINTS_ERRORS as error:
            self.hints_error = f"{error}"

    def check_hints(self) -> None:
        """Reads the hints, if there are some. Afterwards `hints_error` says what is wrong with them."""
        records, self.records = self.records, 0
        for _ in self._hints():
            pass
        if self.records not in (0, records) and not self.hints_error:
            self.hints_error = f"they have {self.records} records of {records}"
        self.records = records

    def _whole(self, rows: list[Row], heads: bool) -> list[Row]:
        """A row for each record. None at all unless every record is whole, as it was written, and next in order."""
        whole: list[Row] = []
        before = self.records
        try:
            for row in rows:
                seq, key, kind, crc, payload = row
                # checksum() written out: a call for each record takes a twentieth of a restart.
                if crc != crc32(payload, (key ^ (key >> 32) ^ (kind << 29) ^ (kind >> 3) ^ (seq << 3)) & 0xFFFFFFFF):
                    return []
                if kind == FULL + OUTSIDE and seq == before + 1:
                    cuts = heads and payload[PLACE.size] < UNCUT_MIN
                    inside = self._head_of(row) if cuts else self._bodies.whole(row)
                    if inside is None:
                        return []
                    whole.append(inside)
                elif kind == GROUP and seq == before + key:
                    whole += ungroup(seq, key, payload)
                elif seq == before + 1 and FULL <= kind <= DELETE:
                    whole.append(row)
                else:
                    return []
                before = seq
        except GROUP_ERRORS:
            return []
        return whole

    def _head_of(self, row: Row) -> Row | None:
        """A HEAD row for a payload that stands outside. None when it cannot stand there."""
        seq, key, _, _, place = row
        return (seq, key, HEAD, PLACE.unpack_from(place)[1], place[PLACE.size :]) if self._bodies.has(place) else None

    def rows(self, behind: int = 0) -> Iterator[Entry]:
        """Every intact record behind that many; the others are counted in `skipped`.

        Raises JournalDamaged where it cannot go on, and behind the last record when some are missing there.
        """
        self.records, self.skipped = behind, 0
        try:
            for last, key, kind, crc, payload in self._db.execute(_SELECT, (behind, self._last())):
                records = self._intact(last, key, kind, crc, payload)
                if last <= self.records or (records and records[0][0] <= self.records):
                    self.skipped += 1  # a page stands in the place of another: what it says was said before
                    continue
                self.skipped += last - self.records - len(records)
                if not records:
                    self.suspects += _claimed(last, key, kind, payload)
                for seq, key, kind, _, payload in records:
                    self.records = seq
                    yield key, kind, payload
                self.records = last
        except sqlite3.Error as error:
            raise unreadable(error, f"{self.path} is damaged behind record {self.records}", self.path) from error
        except (TypeError, OverflowError) as error:
            raise JournalDamaged(f"{self.path} is damaged behind record {self.records}: {error}") from error
        if self._expected is not None and self.records != self._expected:
            raise JournalDamaged(f"{self.path} was sealed with {self._expected} records and has {self.records}")

    def _last(self) -> int:
        """Up to which record the segment counts. Raises sqlite3.Error or JournalFailed.

        A loss of power may leave the row of a payload and take the payload. In a segment that was not sealed, that is
        the end, as a torn WAL is: the whole commit does not count, and nothing behind it. Records that were `synced`
        were promised: there it is damage.
        """
        if not self._end:
            self._end = KEY_MAX
            for row in () if self.sealed else self._db.execute(_SELECT_OUTSIDE, (self.synced,)):
                seq, key, kind, crc, place = row
                sound = len(place) >= PLACE.size and crc == checksum(seq, key, kind, place)
                if sound and self._bodies.payload_at(place) is None:
                    self._end = int(seq) - 1 - int(PLACE.unpack_from(place)[3])
                    self.torn = True
                    break
        return self._end

    def _intact(self, seq: int, key: int, kind: int, crc: object, payload: bytes) -> list[Row]:
        """The records of a row; none when the row is not as it was written. Raises TypeError or OverflowError."""
        if not is_kind(kind) or crc != checksum(seq, key, kind, payload):
            return []
        try:
            if kind == GROUP:
                return ungroup(seq, key, payload)
            if kind < OUTSIDE:
                return [(seq, key, kind, 0, payload)]
            inside = self._bodies.whole((seq, key, kind, 0, payload))
        except GROUP_ERRORS:
            return []
        return [] if inside is None else [inside]

    def keys_after(self, seq: int, limit: int) -> tuple[list[tuple[int, int]], int]:
        """Pairs (seq, key) of whole records behind `seq`, in order, and up to which record it looked.

        It finds up to `limit` pairs and as many more as share a row, and looks at as many rows at the most. It looks no
        further than `seq` itself when nothing follows. Raises JournalDamaged when the file is not as it was written any
        more, or JournalFailed.
        """
        found: list[tuple[int, int]] = []
        seen = seq
        work = 0
        try:
            rows, text = self._db.execute(_SELECT_KEYS, (seq, limit)).fetchone()
            heads = iter((text or b"").splitlines())
            for row in (rows or "").splitlines():
                seen, key, kind = map(int, row.split())
                work += 1
                if kind == GROUP:
                    found += [(at, each) for at, each in keys_of_group(seen, key, next(heads, b"")) if at > seq]
                    work += _GROUP_WORK
                elif kind & ~OUTSIDE in (FULL, LAST):
                    found.append((seen, key))
                if work >= limit or len(found) >= limit:
                    break
        except sqlite3.Error as error:
            raise unreadable(error, f"{self.path} is damaged behind record {seq}", self.path) from error
        except GROUP_ERRORS as error:
            raise JournalDamaged(f"{self.path} is damaged behind record {seq}: {error}") from error
        return found, seen

    @property
    def sealed(self) -> bool:
        """Returns whether the segment is sealed: nothing is written to a sealed segment."""
        return self._expected is not None

    def pin(self) -> None:
        """Makes every later reading see the segment as it is now, whatever its writer does meanwhile.

        The file may even be unlinked. Raises JournalDamaged.

        A segment that was just made may have no WAL yet. Then SQLite takes the file for one that never changes, and
        nothing keeps the writer from merging a WAL into the file. So this reads a page of each table: those are all
        pages of an empty segment, and SQLite does not read a page twice.
        """
        try:
            self._db.execute("BEGIN")
            self._db.execute("SELECT count(*) FROM meta").fetchone()
        except sqlite3.Error as error:
            raise JournalDamaged(f"{self.path} cannot be read as a journal segment: {error}") from error
        with suppress(sqlite3.Error):  # rows() tells of damage
            self._db.execute("SELECT seq FROM record LIMIT 1").fetchone()

    def copy_to(self, path: str, seals: bool = True) -> int:
        """Writes the segment as it is now to new synced files, and `seals` it. Returns how many records it has.

        Raises JournalDamaged when it cannot be read, JournalFull or JournalFailed when the copy cannot be written.
        """
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            copy = sqlite3.connect(path, isolation_level=None)
        except (sqlite3.Error, OSError) as error:
            raise failure_of(error, "cannot create", path) from error
        with closing(copy):
            try:
                self._db.backup(copy)
                (records,) = copy.execute("SELECT coalesce(max(seq), 0) FROM record").fetchone()
                self._bodies.copy_to(path)
                if self._last() < records:
                    records = self._last()
                    copy.execute("DELETE FROM record WHERE seq > ?", (records,))
            except OSError as error:
                raise failure_of(error, "cannot write", path) from error
            except sqlite3.Error as error:
                failure = failure_of(error, "cannot write", path)
                if isinstance(failure, JournalFull):
                    raise failure from error
                raise JournalDamaged(f"{self.path} cannot be copied: {error}") from error
            if seals and not self.sealed:  # a sealed segment says itself how many records its copy should have
                seal(copy, path, int(records))
        fsync_path(path)
        return int(records)

    def close(self) -> None:
        self._db.close()
        self._bodies.close()


def _require_file(path: str) -> None:
    """Raises JournalDamaged where a name stands for no file, JournalFailed where the system does not say.

    SQLite would wait for ever for a writer of a pipe. A file that this user may not read is no damage, and
    neither is a link to a disk that is not there. The check does not open the file: closing a file drops all locks that
    SQLite holds on the same file in this process.
    """
    try:
        kind = os.stat(path).st_mode
    except OSError as error:
        raise JournalFailed(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(kind):
        raise JournalDamaged(f"{path} is not a file")
    if not os.access(path, os.R_OK):
        raise JournalFailed(f"cannot read {path}: {os.strerror(errno.EACCES)}")


def _claimed(seq: int, key: object, kind: object, payload: bytes) -> list[int]:
    """The keys that a damaged row names. They may be wrong: use them for a line to the operator only."""
    try:
        keys = [row[1] for row in ungroup(seq, int(str(key)), payload)] if kind == GROUP else [int(str(key))]
    except GROUP_ERRORS:
        return []
    return [key for key in keys if 0 < key <= KEY_MAX]
