"""The lock on a journal's directory: one process has it at a time. The kernel releases it when the process ends.

There are two locks. The one on the file is beanstalkd's, and the one that readers look at. A person who removes that
file would let another server in, so the directory itself is locked, too, where its file system can do that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from typing import Final

from journal.errors import JournalLocked

LOCK_NAME = "lock"
_WAIT_S: Final = 0.5
"""A server that makes a unix socket in the directory locks it for a moment, see serving/listen.py."""
_RETRY_S: Final = 0.01


class DirectoryLock:
    """Holds `DIR/lock` until close(). beanstalkd uses the same file and the same kind of lock."""

    def __init__(self, directory: str) -> None:
        """Takes the lock. Makes the directory when only its last component is missing. Raises JournalLocked."""
        self.created = False
        try:
            if not os.path.isdir(directory):
                os.mkdir(directory, 0o750)
                self.created = True
            _sync_parent(directory, self.created)
            self._file = os.open(os.path.join(directory, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalLocked(f"cannot use journal directory {directory}: {error.strerror}") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise JournalLocked(f"journal directory {directory} is in use by another process") from error
            raise JournalLocked(f"cannot lock journal directory {directory}: {error.strerror}") from error
        try:
            self._folder = _locked_folder(directory)
        except OSError as error:
            os.close(self._file)
            if isinstance(error, BlockingIOError):
                raise JournalLocked(f"journal directory {directory} is in use by another process") from error
            raise JournalLocked(f"cannot use journal directory {directory}: {error.strerror}") from error

    def close(self) -> None:
        """Gives the lock back. May be called again: close() of a journal may fail, and then abandon() is called."""
        if self._file >= 0:
            os.close(self._folder)
            os.close(self._file)
            self._file = -1


def _locked_folder(directory: str) -> int:
    """A descriptor of the directory, with a lock where the file system has such locks.

    Raises BlockingIOError when another process has this lock, and OSError when the directory cannot be opened.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end_s = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                os.close(folder)
                raise
            time.sleep(_RETRY_S)
            continue
        except OSError:
            pass  # the lock on the file has to do
        return folder


def _sync_parent(directory: str, created: bool) -> None:
    """Waits until the name of the directory is on the device. Without its name, everything in the directory is lost.

    A start that died may have made a directory that exists now, so its name is synced, too. Raises OSError only if this
    process has made the directory.
    """
    try:
        parent = os.open(os.path.dirname(os.path.abspath(directory)), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    except PermissionError:
        return  # a process that may not read the parent cannot sync it
    except OSError:
        if created:
            raise
