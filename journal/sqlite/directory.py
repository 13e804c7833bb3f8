"""A journal's directory: its lock while a tool writes to it, and whether a server could use it.

Asking takes no lock, not even for a moment: a server that starts meanwhile would be refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from journal.errors import JournalLocked
from journal.sqlite.files import fsync_path
from journal.sqlite.lock import LOCK_NAME, DirectoryLock

_FLOCK: Final = Struct("hhqqi")
"""struct flock as Linux has it: type, whence, start, length, pid."""


class Owner(NamedTuple):
    """The user as which a server would use a directory."""

    uid: int
    gids: frozenset[int]


@contextlib.contextmanager
def writing(directory: str) -> Iterator[None]:
    """Holds a directory's lock. A directory that was made for this goes again when it fails."""
    lock = DirectoryLock(directory)
    try:
        yield
        fsync_path(os.path.dirname(os.path.abspath(directory)))
    except BaseException:
        if lock.created:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, LOCK_NAME))
                os.rmdir(directory)
        raise
    finally:
        lock.close()


def require_readable(directory: str) -> None:
    """Raises JournalLocked when this process may not read a journal. Without this, it would look like damage."""
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


def require_usable(directory: str, owner: Owner | None = None) -> None:
    """Raises JournalLocked, in the words of a start, when this user (by default: this process) could not use it.

    A directory that is missing is made by the start, so its parent has to be there.
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
    """The process that holds a directory's lock; None when nobody does, or when that cannot be told."""
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


def _may_use(facts: os.stat_result, owner: Owner) -> bool:
    """Whether the file's mode lets the user read, write and enter a directory."""
    if owner.uid == 0:
        return True
    shift = 6 if facts.st_uid == owner.uid else 3 if facts.st_gid in owner.gids else 0
    return facts.st_mode >> shift & 0o7 == 0o7
