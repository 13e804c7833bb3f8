"""One segment: a plain SQLite file of records, written in WAL mode. The only room that speaks SQL.

This room must not know what a payload means, nor of other segments. Schema, format version 1:
  record(seq, key, kind, crc, payload): seq counts 1, 2, 3 ... without a gap; kind is FULL, CHANGE, DELETE or PART;
  crc is the CRC-32 of the payload, begun with a number made of seq, key and kind.
  meta(name, value): `segment` its number, `high_water` the largest key ever written before it.
Commits never wait for the device (synchronous=OFF); sync() does, on the `-wal` file, from any thread. SQLite's locks
are on the database and `-shm` files, so a descriptor of the `-wal` file may come and go without losing them.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import quote
from zlib import crc32

from journal.errors import JournalDamaged, JournalError, JournalFailed, JournalFull

FULL: Final = 1
CHANGE: Final = 2
DELETE: Final = 3
PART: Final = 4

APPLICATION_ID: Final = 0x67767374  # "gvst"
FORMAT_VERSION: Final = 1
PAGE_BYTES: Final = 2048
"""A commit writes whole pages to the WAL: small ones waste less on a single record, large ones less on large bodies."""
PART_BYTES: Final = 1 << 24
"""A larger payload is written as PART records before its FULL one: SQLite holds at most 10**9 bytes in a value."""
ROW_BYTES: Final = 24
"""About what a record takes on disk beside its payload."""

_INSERT: Final = "INSERT INTO record(seq, key, kind, crc, payload) VALUES(?, ?, ?, ?, ?)"
_SCHEMA: Final = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE record(
  seq INTEGER PRIMARY KEY, key INTEGER NOT NULL, kind INTEGER NOT NULL, crc INTEGER NOT NULL, payload BLOB NOT NULL
);
"""

Row = tuple[int, int, int, int, bytes]


def checksum(seq: int, key: int, kind: int, payload: bytes) -> int:
    """CRC-32 of the payload that also depends on where it stands, so that a moved record does not pass for another."""
    return crc32(payload, (key ^ (key >> 32) ^ (kind << 29) ^ (seq << 3)) & 0xFFFFFFFF)


class WalFile:
    """A descriptor of a `-wal` file for fdatasync; closed when nobody refers to it any more."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def sync(self) -> None:
        """Waits until all that was written is on the device. Raises JournalFailed; never call it again after that."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise JournalFailed(f"fsync of the journal failed: {error.strerror}") from error

    def size(self) -> int:
        return os.fstat(self._file).st_size

    def __del__(self) -> None:
        os.close(self._file)


class SegmentWriter:
    """A new segment, open for appending."""

    def __init__(self, path: str, number: int, high_water: int) -> None:
        """Creates the file. Raises JournalFull or JournalFailed; what was begun is removed then."""
        self.path = path
        self.number = number
        self.records = 0
        try:
            # check_same_thread: the connection is handed to one other thread once, to be sealed there.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=16)
            self._db.executescript(
                f"PRAGMA page_size={PAGE_BYTES}; PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;"
                f"PRAGMA wal_autocheckpoint=0; PRAGMA cache_size=-256;"
                f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={FORMAT_VERSION};"
                f"BEGIN; {_SCHEMA}"
                f"INSERT INTO meta VALUES('segment', {number}), ('high_water', {high_water}); COMMIT;"
            )
            self.wal = WalFile(path + "-wal")
        except (sqlite3.Error, OSError) as error:
            remove_files(path)
            raise _failure(error, f"cannot create journal segment {path}") from error

    def row(self, key: int, kind: int, payload: bytes) -> Row:
        """The next record, to be written by the next append() in the order of these calls."""
        self.records += 1
        seq = self.records
        return (seq, key, kind, checksum(seq, key, kind, payload), payload)

    def append(self, rows: Sequence[Row]) -> None:
        """Commits the rows in one transaction, without waiting for the device. Raises JournalFailed."""
        execute = self._db.execute
        try:
            if len(rows) == 1:
                execute(_INSERT, rows[0])
            else:
                execute("BEGIN")
                self._db.executemany(_INSERT, rows)
                execute("COMMIT")
        except sqlite3.Error as error:
            raise JournalFailed(f"write to journal segment {self.path} failed: {error}") from error

    def set_high_water(self, key: int) -> None:
        """Notes the largest key written before this segment, which was made ahead of time. Raises JournalFailed."""
        try:
            self._db.execute("UPDATE meta SET value = ? WHERE name = 'high_water'", (key,))
        except sqlite3.Error as error:
            raise JournalFailed(f"write to journal segment {self.path} failed: {error}") from error

    def discard(self) -> None:
        """Closes and removes a segment that was never used."""
        self._db.close()
        remove_files(self.path)

    def seal(self) -> None:
        """Moves everything from the WAL into the database file, synced, and closes. For a thread away from the hub."""
        try:
            self._db.execute("PRAGMA synchronous=FULL")
            busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._db.close()
        except sqlite3.Error as error:
            raise JournalFailed(f"sealing journal segment {self.path} failed: {error}") from error
        if busy:
            # Somebody reads the file (sqlite3, a backup); closing left the WAL beside it, which is as good.
            fsync_path(self.path + "-wal")


class SegmentReader:
    """A segment opened for reading; a WAL that a crash left beside it is part of it."""

    def __init__(self, path: str) -> None:
        """Raises JournalDamaged when this is not a segment of a version that we know."""
        self.path = path
        # Without a WAL nobody writes to the file, so no lock is needed and nothing is created beside it.
        mode = "mode=rw" if os.path.exists(path + "-wal") else "mode=ro&immutable=1"
        try:
            self._db = sqlite3.connect(
                f"file:{quote(path)}?{mode}", uri=True, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA wal_autocheckpoint=0")
            (application,) = self._db.execute("PRAGMA application_id").fetchone()
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if application != APPLICATION_ID:
                raise JournalDamaged(f"{path} is not a journal segment")
            if version != FORMAT_VERSION:
                raise JournalDamaged(f"{path} has format version {version}; this server reads {FORMAT_VERSION}")
            meta = dict(self._db.execute("SELECT name, value FROM meta"))
            self.number = int(meta["segment"])
            self.high_water = int(meta["high_water"])
        except sqlite3.Error as error:
            raise JournalDamaged(f"journal segment {path} cannot be read: {error}") from error

    def rows(self) -> Iterator[tuple[int, int, bytes]]:
        """Every record in order as (key, kind, payload). Raises JournalDamaged at the first one that is not intact."""
        expected = 0
        try:
            for seq, key, kind, crc, payload in self._db.execute(
                "SELECT seq, key, kind, crc, payload FROM record ORDER BY seq"
            ):
                expected += 1
                if seq != expected or crc != checksum(seq, key, kind, payload):
                    raise JournalDamaged(f"journal segment {self.path} is damaged at record {expected}")
                yield key, kind, payload
        except sqlite3.Error as error:
            raise JournalDamaged(f"journal segment {self.path} is damaged: {error}") from error

    def keys_after(self, seq: int, limit: int) -> list[tuple[int, int]]:
        """Up to `limit` pairs (seq, key) of whole records behind `seq`, in order."""
        found = self._db.execute(
            "SELECT seq, key FROM record WHERE seq > ? AND kind = ? ORDER BY seq LIMIT ?", (seq, FULL, limit)
        )
        return list(found)

    def seal(self) -> None:
        """Merges a WAL that a crash left, synced, and closes. For a thread away from the hub."""
        try:
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._db.close()
        except sqlite3.Error as error:
            raise JournalFailed(f"sealing journal segment {self.path} failed: {error}") from error

    def close(self) -> None:
        self._db.close()


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


def remove_files(path: str) -> None:
    """Unlinks a segment with what SQLite keeps beside it; what is not there is no error."""
    for suffix in ("-wal", "-shm", ""):
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


def _failure(error: Exception, what: str) -> JournalError:
    text = str(error)
    if "full" in text or "No space" in text:
        return JournalFull(f"{what}: no space left on device")
    return JournalFailed(f"{what}: {text}")
