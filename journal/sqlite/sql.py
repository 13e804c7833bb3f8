"""The common parts of modules that speak SQL: the table `meta`, and what errors of SQLite and the system mean."""

from __future__ import annotations

import os
import sqlite3
from typing import Final
from urllib.parse import quote

from journal.errors import JournalDamaged, JournalError, JournalFailed, JournalFull
from journal.sqlite.files import takes_files
from journal.sqlite.format import INDEX_BYTES, meta_checksum

_FSYNC_CODES: Final = (1034, 1290)  # SQLITE_IOERR_FSYNC, SQLITE_IOERR_DIR_FSYNC
_INDEX_CODE: Final = 4874  # SQLITE_IOERR_SHMSIZE: there was no room for the index of a WAL. There may be room again
CANNOT_OPEN: Final = "unable to open database file"  # or the WAL, or its index: there may be no inode for them


def connect_to_read(path: str, mode: str) -> sqlite3.Connection:
    """Opens a connection that cannot write, so that closing it merges no WAL. Raises sqlite3.Error."""
    return sqlite3.connect(f"file:{quote(path)}?{mode}", uri=True, isolation_level=None, check_same_thread=False)


def write_meta(db: sqlite3.Connection, meta: dict[str, int]) -> None:
    """Writes all values and their checksum, in one statement."""
    rows = {**meta, "crc": meta_checksum(meta)}
    places = ", ".join(["(?, ?)"] * len(rows))
    db.execute(f"INSERT OR REPLACE INTO meta VALUES {places}", [part for row in rows.items() for part in row])


def read_meta(db: sqlite3.Connection) -> dict[str, int]:
    return {str(name): int(value) for name, value in db.execute("SELECT name, value FROM meta")}


def unreadable(error: sqlite3.Error, what: str, path: str) -> JournalError:
    """Returns the JournalError for an error while reading. A failing device or a limit of the system is no damage."""
    text = " ".join(str(error).split())  # SQLite may quote a schema of many lines
    if "I/O error" in text or "unable to open" in text or "locked" in text or isinstance(error, sqlite3.InternalError):
        return JournalFull(f"{what}: no space left on device") if _is_full(path) else JournalFailed(f"{what}: {text}")
    return JournalDamaged(f"{what}: {text}")


def failure_of(error: Exception, what: str, path: str) -> JournalError:
    """Returns the JournalError for an error while writing. sqlite3 gives error codes only from Python 3.11 on."""
    text = " ".join(str(error).split())
    code = getattr(error, "sqlite_errorcode", 0)
    full = "full" in text or "No space" in text or code == _INDEX_CODE
    if text in ("disk I/O error", CANNOT_OPEN) and not full and code not in _FSYNC_CODES:
        full = _is_full(path)
    if full:
        return JournalFull(f"{what} {path}: no space left on device")
    return JournalFailed(f"{what} {path}: {text}")


def _is_full(path: str) -> bool:
    """Returns whether the disk has no room for the index of a WAL, or no inode. SQLite then reports an I/O error, or
    that it cannot open a file.
    """
    directory = os.path.dirname(path) or "."
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize < INDEX_BYTES or not takes_files(directory)
