"""A journal's directory: what is in it, its lock while a tool writes to it, and whether a server could use it.

This module must not know records. A process that only asks takes no lock, not even for a moment: a server that starts
meanwhile would be refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from struct import Struct
from typing import Final

from journal.errors import JournalFailed, JournalLocked
from journal.sqlite.files import (
    ASIDE_SUFFIX,
    MISSING_SUFFIX,
    NEW_SUFFIX,
    SUSPECT_NAME,
    WATERMARK_NAME,
    aside_numbers,
    begun_paths,
    fsync_path,
    read_watermark,
    segment_paths,
)
from journal.sqlite.lock import LOCK_NAME, DirectoryLock
from journal.sqlite.space import RESERVE_NAME
from journal.tools import ServerUser

_OURS: Final = re.compile(
    rf"{LOCK_NAME}|{WATERMARK_NAME}|{RESERVE_NAME}|{SUSPECT_NAME}|lost\+found"
    rf"|segment-\d{{8,18}}\.db({re.escape(ASIDE_SUFFIX)}|{re.escape(NEW_SUFFIX)})?(-wal|-shm|-bodies)?"
    rf"|segment-\d{{8,18}}\.db{re.escape(MISSING_SUFFIX)}"
)
_FILES_OF_AN_EMPTY_DIRECTORY: Final = {LOCK_NAME, "lost+found"}
_FLOCK: Final = Struct("hhqqi")
"""struct flock as Linux has it: type, whence, start, length, pid."""


@contextlib.contextmanager
def writing(directory: str) -> Iterator[None]:
    """Holds a directory's lock. If the body fails, a directory that was made for it is removed.

    So it is when a signal ends the command while the lock is being taken.
    """
    absent = not os.path.lexists(directory)
    lock = None
    try:
        lock = DirectoryLock(directory)
        yield
        fsync_path(os.path.dirname(os.path.abspath(directory)))
    except BaseException as error:
        if lock.created if lock is not None else absent and not isinstance(error, JournalLocked):
            with contextlib.suppress(OSError):
                _remove_lock(directory)
                os.rmdir(directory)
        raise
    finally:
        if lock is not None:
            lock.close()


@contextlib.contextmanager
def without_writers(directory: str) -> Iterator[None]:
    """Keeps servers out, and other readers not. Makes no file, so a journal may lie where no process may write.

    A directory without a lock was never a server's. Raises JournalLocked, also when a server came to such a one.
    """
    path = os.path.join(directory, LOCK_NAME)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        if os.path.lexists(path):
            raise JournalLocked(f"journal directory {directory} is in use by another process") from None
        return
    except OSError as error:
        raise JournalLocked(f"cannot open {path}: {error.strerror}") from error
    try:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise JournalLocked(f"journal directory {directory} is in use by another process") from error
        yield
    finally:
        os.close(file)


def _remove_lock(directory: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, LOCK_NAME))


def require_readable(directory: str) -> None:
    """Raises JournalLocked when this process may not read a journal, which would otherwise look like damage."""
    try:
        names = sorted(os.listdir(directory))
        os.stat(os.path.join(directory, "."))  # entering needs a right of its own
    except OSError as error:
        raise JournalLocked(f"cannot use journal directory {directory}: {error.strerror}") from error
    for name in names:
        path = os.path.join(directory, name)
        # A file may go while a server compacts.
        if name.startswith("segment-") and not os.access(path, os.R_OK) and os.path.lexists(path):
            raise JournalLocked(f"cannot read {path}: {os.strerror(errno.EACCES)}")


def require_usable(directory: str, owner: ServerUser | None = None) -> None:
    """Raises JournalLocked, in the words of a start, when a server of this user could not use a directory.

    Without an owner, the user is that of this process. A start makes a missing directory, so its parent has to exist.
    """
    folder = directory
    try:
        if not os.path.isdir(directory):
            if os.path.lexists(directory):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            folder = os.path.dirname(os.path.abspath(directory))
        facts = os.stat(folder)
        if not stat.S_ISDIR(facts.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        allowed = os.access(folder, os.R_OK | os.W_OK | os.X_OK) if owner is None else _may_use(facts, owner)
        if not allowed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise JournalLocked(f"cannot use journal directory {directory}: {error.strerror}") from error


def holder(directory: str) -> int | None:
    """The process that holds a directory's lock. None when no process holds it, or when that cannot be told."""
    try:
        file = os.open(os.path.join(directory, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    finally:
        os.close(file)
    return None if kind == fcntl.F_UNLCK else int(pid)


def list_segments(directory: str) -> list[tuple[int, str]]:
    """Number and path of every segment that was ever complete, oldest first.

    Raises JournalLocked when the directory cannot be read.
    """
    try:
        return begun_paths(segment_paths(directory), read_watermark(directory))
    except OSError as error:
        raise JournalLocked(f"cannot use journal directory {directory}: {error.strerror}") from error


def next_number(directory: str) -> int:
    """A number for a segment that no segment has or ever had. Raises JournalLocked."""
    numbers = [number for number, _ in list_segments(directory)]
    return max([0, *numbers, *aside_numbers(directory), read_watermark(directory)[0]]) + 1


def strangers(directory: str) -> list[str]:
    """A line for each file that no replay reads: its name, and what it is."""
    found = []
    for name in sorted(os.listdir(directory)):
        if name.startswith("segment-") and name.endswith(ASIDE_SUFFIX):
            found.append(f"{name} was set aside")
        elif name.startswith("segment-") and name.endswith(MISSING_SUFFIX):
            found.append(f"{name} stands for a segment whose loss was accepted")
        elif not _OURS.fullmatch(name):
            found.append(f"{name} does not belong to a journal")
    return found


def require_empty(directory: str) -> None:
    """Raises JournalLocked when a directory, if it is there at all, has more in it than a lock."""
    try:
        left = set(os.listdir(directory)) - _FILES_OF_AN_EMPTY_DIRECTORY
    except FileNotFoundError:
        return
    except OSError as error:
        raise JournalLocked(f"cannot use directory {directory}: {error.strerror}") from error
    if left:
        raise JournalLocked(f"{directory} is not empty: it has {min(left)}")


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """An OSError in the body becomes a JournalFailed that begins with these words."""
    try:
        yield
    except OSError as error:
        raise JournalFailed(f"{what}: {error.strerror}") from error


def _may_use(facts: os.stat_result, owner: ServerUser) -> bool:
    """Returns whether the file's mode lets the user read, write and enter a directory."""
    if owner.uid == 0:
        return True
    shift = 6 if facts.st_uid == owner.uid else 3 if facts.st_gid in owner.gids else 0
    return facts.st_mode >> shift & 0o7 == 0o7
