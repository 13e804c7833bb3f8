"""The files of a journal's directory: their names, and what is done to them as files.

This module must not know SQL nor records. A segment is up to four files: the database; `-wal`, with the records that
SQLite has not merged into the database yet; `-shm`, the index of the WAL, which SQLite makes again when it is missing;
`-bodies`, with large payloads, unless there are none.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from typing import Final
from zlib import crc32

from journal.errors import JournalFailed
from journal.sqlite.format import EMPTY_BYTES, PAGE_BYTES, SEGMENT_MAX, is_beginning

NEW_SUFFIX: Final = ".new"
"""The name of a segment ends in this while the segment is made."""
ASIDE_SUFFIX: Final = ".damaged"
BODIES_SUFFIX: Final = "-bodies"
SUFFIXES: Final = ("", "-wal", "-shm", BODIES_SUFFIX)
"""The files of a segment, in the order in which they are removed: the database goes first. A database without its WAL,
which may hold deletes, would pass for a whole segment."""
MISSING_SUFFIX: Final = ".missing"
"""The name of an empty file ends in this. It says that a segment is missing, and that its loss was accepted."""
WATERMARK_NAME: Final = "synced"
SUSPECT_NAME: Final = "suspect"
"""An empty file of this name says that the server has met damage: the next start reads and checks everything."""
_DESCRIPTORS_OF_A_SEGMENT: Final = 7
"""The database, its WAL, the index, the WAL once more for its fsync, the large payloads, and two that SQLite may open
for a moment."""
_FILES_OF_A_SEGMENT: Final = 4
"""The database, its WAL, the index, and the large payloads."""
_NUMBER: Final = r"(?:\d{8}|[1-9]\d{8,17})"
_NAME: Final = re.compile(rf"segment-({_NUMBER})\.db")
_LEFT_OVER: Final = re.compile(rf"(segment-{_NUMBER}\.db)({re.escape(NEW_SUFFIX)})?(-wal|-shm|-journal|-bodies)?")
"""A segment, or a file beside a segment, also while the segment is made."""
_BEGINNING_BYTES: Final = 1 << 14
_WATERMARK: Final = re.compile(rb"(\d{20}) (\d{20}) (\d{10})\n")


def segment_path(directory: str, number: int) -> str:
    """The path of the segment with this number."""
    return os.path.join(directory, f"segment-{number:08d}.db")


def segment_paths(directory: str) -> list[tuple[int, str]]:
    """Number and path of every segment in the directory, oldest first."""
    found = [(int(match[1]), name) for name in os.listdir(directory) if (match := _NAME.fullmatch(name))]
    return [(number, os.path.join(directory, name)) for number, name in sorted(found) if number <= SEGMENT_MAX]


def read_ahead(path: str, share: int) -> None:
    """Has the system read the beginning of a file, and its end, one of `share` parts. Does not wait for that.

    This process may not have the file open: closing it would drop the locks that SQLite holds on it.
    """
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return
    with suppress(OSError):  # the reader of the file tells what is wrong with it
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            advise(file, 0, _BEGINNING_BYTES, os.POSIX_FADV_WILLNEED)
            advise(file, size - size // share, size // share, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)


def suspect(directory: str) -> None:
    """Has the next start read everything. Ignores errors: the server is about to end."""
    with suppress(OSError):
        os.close(
            os.open(
                os.path.join(directory, SUSPECT_NAME), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        )


def is_suspect(directory: str) -> bool:
    """Returns whether the server has met damage, and no start has found the journal sound since."""
    return os.path.lexists(os.path.join(directory, SUSPECT_NAME))


def acquit(directory: str) -> None:
    """A start has read everything, and damage, if any, is made good."""
    with suppress(OSError):
        os.unlink(os.path.join(directory, SUSPECT_NAME))


def aside_numbers(directory: str) -> list[int]:
    """The numbers of segments that were set aside because they were damaged, or are known to be missing."""
    names = {name.removesuffix(ASIDE_SUFFIX).removesuffix(MISSING_SUFFIX) for name in os.listdir(directory)}
    numbers = [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
    return [number for number in numbers if not os.path.exists(segment_path(directory, number))]


def never_begun(path: str) -> bool:
    """Returns whether a file is the beginning of a segment that was never complete. Nothing was ever written to such a
    segment.

    On a full disk, an earlier version gave a segment its name too early, and a loss of power left the file like this. A
    complete segment is never so short, and a segment that was written to has a WAL or is sealed.
    """
    try:
        size = os.stat(path).st_size
        if size >= EMPTY_BYTES or size % PAGE_BYTES or _size_of(path + "-wal"):
            return False
        with open(path, "rb") as file:
            return is_beginning(file.read(PAGE_BYTES))
    except OSError:
        return False


def begun_paths(paths: list[tuple[int, str]], watermark: tuple[int, int]) -> list[tuple[int, str]]:
    """All segments, except a newest one that was never complete. Nothing was written to it, and it may be replaced."""
    if paths and never_begun(paths[-1][1]) and not (watermark[0] >= paths[-1][0] and watermark[1]):
        return paths[:-1]
    return paths


def _size_of(path: str) -> int:
    """The size of a file, or 0 when the file does not exist. Raises OSError when neither can be known."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def write_watermark(file: int, segment: int, records: int) -> None:
    """Notes that this many records of a segment are on the device. The note is not synced, so it is a lower bound."""
    text = b"%b %b" % (_padded(segment, 20), _padded(records, 20))
    os.pwrite(file, b"%b %b\n" % (text, _padded(crc32(text), 10)), 0)


def _padded(number: int, size: int) -> bytes:
    """Returns the number as `%020d` would, of which only `%d` is compiled."""
    text = b"%d" % number
    return b"0" * (size - len(text)) + text


def read_watermark(directory: str) -> tuple[int, int]:
    """Segment and records of the last watermark; (0, 0) when there is no watermark, or no whole one.

    Raises JournalFailed when the file exists and cannot be read: the watermark might be needed.
    """
    path = os.path.join(directory, WATERMARK_NAME)
    try:
        with open(path, "rb") as file:
            match = _WATERMARK.fullmatch(file.read(64))
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        raise JournalFailed(f"cannot read {path}: {error.strerror}") from error
    if not match or crc32(match[0][:41]) != int(match[3]):
        return 0, 0
    return int(match[1]), int(match[2])


def lacks_descriptors(error: BaseException) -> bool:
    """Returns whether this error came from a lack of descriptors.

    SQLite says only that it cannot open a file, and has closed its files by now. So this opens as many descriptors as a
    new segment needs, and sees whether that works.
    """
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in (errno.EMFILE, errno.ENFILE)
    files: list[int] = []
    try:
        while len(files) < _DESCRIPTORS_OF_A_SEGMENT:
            files.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as now:
        return now.errno in (errno.EMFILE, errno.ENFILE)
    finally:
        for file in files:
            os.close(file)
    return False


def takes_files(directory: str) -> bool:
    """Returns whether a disk has inodes left for the files of a segment. Some disks do not count them."""
    disk = os.statvfs(directory)
    return disk.f_files == 0 or disk.f_favail >= _FILES_OF_A_SEGMENT


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
    """Waits until a segment is on the device, its WAL and its large payloads. Raises JournalFailed."""
    sync_bodies(path)
    if os.path.exists(path + "-wal"):
        try:
            fsync_path(path + "-wal")
        except JournalFailed:
            if os.path.exists(path + "-wal"):
                raise  # otherwise the last reader has closed the segment, which merges the WAL
    fsync_path(path)


def sync_bodies(path: str) -> None:
    """Waits until the large payloads of a segment are on the device, if it has any. Raises JournalFailed."""
    if os.path.exists(path + BODIES_SUFFIX):
        fsync_path(path + BODIES_SUFFIX)


def left_overs(directory: str) -> list[str]:
    """Files of segments that a crash left half made or half removed.

    Only files that a journal makes are among them. A file with another name, or a directory, belongs to another.
    """
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _LEFT_OVER.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                continue
            segment = os.path.join(directory, match[1])
            # Setting a segment aside renames file by file: what is not renamed yet is no left-over.
            kept = os.path.lexists(segment) or os.path.lexists(segment + ASIDE_SUFFIX)
            half_removed = match[3] is not None and not kept
            if match[2] is not None or half_removed:
                found.append(entry.path)
    return found


def remove_left_overs(directory: str) -> None:
    """Removes left_overs(). The caller holds the directory's lock. Raises JournalFailed.

    Before, a sync sees to it that no database comes back whose WAL or payloads are removed here.
    """
    try:
        paths = left_overs(directory)
        if paths:
            fsync_path(directory)
        for path in paths:
            os.unlink(path)
    except OSError as error:
        raise JournalFailed(f"cannot tidy the journal's directory: {error.strerror}: {error.filename}") from error


def remove_files(path: str, *, bodies: bool = True) -> None:
    """Unlinks all files of a segment, or all but its large payloads. Raises JournalFailed, not for a missing file.

    A loss of power may bring the database back. Where it has records that name payloads, the caller leaves the payloads
    until it has synced the directory, and calls this again.
    """
    for suffix in SUFFIXES if bodies else SUFFIXES[:-1]:
        try:
            os.unlink(path + suffix)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise JournalFailed(f"cannot remove {path}{suffix}: {error.strerror}") from error


def disk_bytes(path: str) -> int:
    """The bytes that a segment, its WAL and its large payloads take on disk."""
    return _size_of(path) + _size_of(path + "-wal") + bodies_bytes(path)


def bodies_bytes(path: str) -> int:
    """The bytes that the large payloads of a segment take on disk."""
    return _size_of(path + BODIES_SUFFIX)
