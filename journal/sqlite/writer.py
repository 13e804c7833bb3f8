"""A new segment: made, appended to, sealed. Commits never wait for the device (synchronous=OFF); sync() does.

This module must not know what a payload means, nor of other segments.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing, suppress
from typing import Final

from journal.errors import JournalFailed
from journal.sqlite.bodies import BodyFile
from journal.sqlite.files import BODIES_SUFFIX, NEW_SUFFIX, bodies_bytes, remove_files, sync_bodies, sync_files
from journal.sqlite.format import (
    APPLICATION_ID,
    BEFORE,
    CELL_BYTES,
    DELETE,
    EMPTY_BYTES,
    FORMAT_VERSION,
    GROUP_BYTES,
    GROUPED_MAX,
    HEAD_BYTES,
    HEAD_ENDS,
    INSIDE_MAX,
    LARGE_BATCH,
    LEAF_BYTES,
    LOCAL_MAX,
    PAGE_BYTES,
    SCHEMA,
    Entry,
    NewRow,
    outside_row,
    pages_of,
    row_of,
    uses_wal,
)
from journal.sqlite.sql import connect_to_read, failure_of, read_meta, write_meta
from journal.sqlite.wal import WalFile, bytes_behind

_BUSY_MS: Final = 100
"""Sealing waits this long for others that read the file. Sealing is in a thread of its own: nothing waits for it."""
_INSERT: Final = "INSERT INTO record(seq, key, kind, crc, payload) VALUES(?, ?, ?, ?, ?)"


class SegmentWriter:
    """A new segment, open for appending."""

    def __init__(self, path: str, number: int, high_water: int, ahead: int = 0) -> None:
        """Creates the file and syncs it. Fills the first `ahead` bytes of its WAL with zeros.

        Raises JournalFull or JournalFailed, and removes what was begun.
        """
        self.path = path
        self.number = number
        self.before: dict[int, int] = {}
        """Earlier segments to how many records they have, where no other segment says so. An older copy of a segment
        does not say it itself."""
        self.records = 0
        self.bytes = 0  # what its rows take once the segment is sealed
        self.large_bytes = 0  # what the parts of large records take
        self.row_max = 0  # how large its largest payload is
        self._page_bytes = 0  # the free part of the page that takes the next row
        new = path + NEW_SUFFIX
        ours: list[str] = []  # files that this call made, and may remove again
        try:
            _require_none(path)
            # Job bodies are for this user alone; SQLite gives its own files the mode of this one.
            os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            ours.append(new)
            _create(new, number, high_water)
            self.bodies = BodyFile(path)
            ours.append(path)
            os.rename(new, path)
            # check_same_thread: the connection is handed to one other thread once, to be sealed there.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=16)
            try:
                self._db.executescript("PRAGMA synchronous=OFF; PRAGMA wal_autocheckpoint=0; PRAGMA cache_size=-256;")
                self._db.execute("SELECT count(*) FROM meta").fetchone()  # makes the WAL
                self._cursor = self._db.cursor()  # one for all: a connection's execute() makes one each time
                self.wal = WalFile(path + "-wal", self.bodies)
                if ahead:
                    self.wal.allocate(ahead)
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.Error, OSError) as error:
            failure = failure_of(error, "cannot create journal segment", path)  # before removing: is the disk full?
            self._undo(ours)
            raise failure from error
        except BaseException:
            self._undo(ours)
            raise

    def _undo(self, ours: list[str]) -> None:
        if self.path in ours:
            self.bodies.close()  # a file that is unlinked and open still takes room on the disk
        for each in ours:
            remove_files(each)

    @property
    def filled(self) -> int:
        """Returns how large the larger of its two files is that grow."""
        return max(self.wal.size(), self.bodies.bytes)

    def rows(self, batch: list[Entry], outside: list[bytes]) -> list[NewRow]:
        """The rows of a batch, for append(). Small records that follow each other share rows.

        Large payloads are added to `outside`, for the `-bodies` file.
        """
        limit = LOCAL_MAX if len(batch) >= LARGE_BATCH else GROUP_BYTES
        rows: list[NewRow] = []
        heads: list[bytes] = []
        begin = end = taken = 0
        offset = self.bodies.bytes
        for key, kind, payload in batch:
            size = len(payload)
            if size > INSIDE_MAX:
                if heads:
                    rows.append(row_of(self.records + end, batch[begin:end], heads))
                end += 1
                begin, heads, taken = end, [], 0
                rows.append(outside_row(self.records + end, key, kind, payload, offset, end - 1))
                outside.append(payload)
                offset += size
                continue
            head, weight = b"", limit
            if size <= GROUPED_MAX and kind <= DELETE:
                head = b"[%d%b" % (key, HEAD_ENDS[kind][size])
                weight = size + len(head) + 1
            taken += weight
            if taken > limit and heads:
                rows.append(row_of(self.records + end, batch[begin:end], heads))
                begin, heads, taken = end, [], weight
            heads.append(head)
            end += 1
        if heads:
            rows.append(row_of(self.records + end, batch[begin:end], heads))
        return rows

    def append(self, batch: list[Entry]) -> None:
        """Commits records in one transaction, without waiting for the device.

        Raises JournalFull when nothing was written: the caller may try again with more room. Raises JournalFailed.
        """
        outside: list[bytes] = []
        rows = self.rows(batch, outside)
        written = self.bodies.write(outside) if outside else 0
        cursor = self._cursor
        try:
            if len(rows) == 1:
                cursor.execute(_INSERT, rows[0])
            else:
                cursor.execute("BEGIN")
                cursor.executemany(_INSERT, rows)
                cursor.execute("COMMIT")
        except sqlite3.Error as error:
            try:
                if self._db.in_transaction:
                    cursor.execute("ROLLBACK")
            except sqlite3.Error as worse:
                raise JournalFailed(f"cannot write to journal segment {self.path}: {worse}") from error
            raise failure_of(error, "cannot write to journal segment", self.path) from error
        self.bodies.bytes += written
        for payload in outside:
            self.row_max = max(self.row_max, len(payload))
        for row in rows:
            self.records = row[0]
            self._grow(len(row[4]))

    def _grow(self, size: int) -> None:
        if size > self.row_max:
            self.row_max = size
        if size + CELL_BYTES > self._page_bytes:
            self.bytes += PAGE_BYTES
            self._page_bytes = LEAF_BYTES
        self._page_bytes -= size + CELL_BYTES

    def note(self, high_water: int, oldest: int) -> None:
        """Notes the largest key written before this segment, the oldest segment that a replay needs, and `before`.

        Raises JournalFull or JournalFailed.
        """
        before = {f"{BEFORE}{number}": records for number, records in self.before.items()}
        try:
            write_meta(self._db, {"segment": self.number, "high_water": high_water, "oldest": oldest, **before})
        except sqlite3.Error as error:
            raise failure_of(error, "cannot write to journal segment", self.path) from error

    def discard(self, *, bodies: bool = True) -> None:
        """Closes and removes a segment that is not needed, as remove_files(). The segment may be sealed or not.

        Raises JournalFailed.
        """
        try:
            remove_files(self.path, bodies=bodies)
        except JournalFailed:
            self.leave()  # the next start finds what could not be removed as it is
            raise
        finally:
            with suppress(sqlite3.Error):  # closing merges the WAL into a file that has no name any more
                self._db.close()

    def leave(self) -> None:
        """Closes the segment as it is, with its WAL. The next start reads both.

        When the last connection to a file is closed, SQLite merges the WAL and unlinks it. With synchronous=OFF it does
        not wait for the device, so a loss of power would take records that were synced in the WAL. A second connection,
        which only reads, keeps SQLite from merging. Raises nothing: the end of the process closes the rest.
        """
        with suppress(sqlite3.Error):
            self._db.execute("SELECT 1").fetchone()  # fails when the segment is closed, as sealing closes it
            with closing(connect_to_read(self.path, "mode=ro")) as keeper:
                keeper.execute("SELECT count(*) FROM meta").fetchone()
                self._db.close()

    def seal(self) -> None:
        """Moves all rows from the WAL into the database file, syncs that file, and closes it. For a worker thread.

        Raises JournalFull when the caller may try again with more room. Raises JournalFailed.
        """
        if self.bodies.bytes:
            self.wal.sync(only_bodies=True)
        seal(self._db, self.path, self.records)


def _require_none(path: str) -> None:
    """Raises OSError when a segment's name is taken: a rename would overwrite another's file."""
    if os.path.lexists(path) or os.path.lexists(path + BODIES_SUFFIX):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def _create(path: str, number: int, high_water: int) -> None:
    """Makes a new file an empty segment, complete and on the device. Only then does the caller give it its own name.

    So a file with a segment's name is whole, whatever a crash leaves. Otherwise a loss of power might leave a WAL
    beside an empty database, and SQLite would delete the WAL. The schema is written without a WAL: SQLite merges a WAL
    while it closes the file, and is silent when the disk is full then. Raises OSError, sqlite3.Error or JournalFailed.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(
            # With exclusive locking SQLite makes no index of a WAL: 32 KiB that a full disk may not have.
            # SQLite needs no rollback journal either: a segment that was begun and not finished is removed.
            f"PRAGMA locking_mode=EXCLUSIVE; PRAGMA page_size={PAGE_BYTES}; PRAGMA journal_mode=OFF;"
            f"PRAGMA synchronous=OFF; PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={FORMAT_VERSION};"
            f"BEGIN; {SCHEMA}"
        )
        write_meta(db, {"segment": number, "high_water": high_water})
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode=WAL").fetchone()  # last: this writes two bytes of the database and makes no WAL
    _require_whole(path)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _require_whole(path: str) -> None:
    """Raises JournalFailed when a new segment is not complete although SQLite reported no failure."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if (
        os.path.getsize(path) != EMPTY_BYTES
        or pages_of(head) * PAGE_BYTES != EMPTY_BYTES
        or not uses_wal(head)
        or os.path.exists(path + "-wal")
    ):
        raise JournalFailed(f"cannot create journal segment {path}: the file is not complete")


def seal(db: sqlite3.Connection, path: str, records: int) -> None:
    if not bodies_bytes(path):
        with suppress(OSError):  # there is none, or an empty file, which does no harm
            os.unlink(path + BODIES_SUFFIX)
    try:
        db.executescript(f"PRAGMA busy_timeout={_BUSY_MS}; PRAGMA synchronous=FULL;")
        meta = read_meta(db)
        del meta["crc"]
        write_meta(db, {**meta, "records": records})
        busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        if "locked" not in str(error):
            raise failure_of(error, "cannot seal journal segment", path) from error
        busy = 1
    db.close()
    if busy:
        # Another process reads the file (sqlite3, a backup), so closing left the WAL. A synced WAL is as good.
        sync_files(path)


def seal_left_over(path: str, records: int) -> int:
    """Merges the WAL that a crash left beside a segment of so many records, as SegmentWriter.seal() does.

    Removes rows behind these records: their payloads were not on the device. Returns how many bytes of that WAL were
    torn: they belong to no whole transaction.
    """
    try:
        sync_bodies(path)
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            _, frames, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            torn = bytes_behind(path + "-wal", frames, os.path.getsize(path + "-wal"))
            db.execute("DELETE FROM record WHERE seq > ?", (records,))
            seal(db, path, records)
    except (sqlite3.Error, OSError) as error:
        raise failure_of(error, "cannot seal journal segment", path) from error
    return torn
