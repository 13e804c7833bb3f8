"""The room of a journal: the disk's or its budget's, and a reserve of real blocks for when the disk is full.

This module must not know segments or records. The reserve is a file of allocated blocks: when another process fills the
disk, it is given back piece by piece, each just before it is needed, so that what was accepted can still be changed
and deleted. What a write leaves of it is taken back before others take it. Any thread may call. Invariant: while
`tight`, the reserve is not what it should be.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from threading import Lock
from typing import Final, TypeVar

from journal.errors import JournalFailed, JournalFull
from journal.sqlite.files import takes_files
from journal.sqlite.sizing import BLOCK_BYTES, PIECE_BYTES

RESERVE_NAME: Final = "reserve"
_STEP_BYTES: Final = 1 << 20
"""The reserve grows by this much at a time. A thread that needs room meanwhile waits for one step, and no longer."""

_T = TypeVar("_T")


class Space:
    """Sizing in a directory, below an optional budget of bytes."""

    def __init__(self, directory: str, budget: int | None) -> None:
        """Raises JournalFailed when the file that has the reserve's name is another's."""
        self._directory = directory
        self._budget = budget
        self._path = os.path.join(directory, RESERVE_NAME)
        self._lock = Lock()
        self._wanted = False  # whether a thread needs room at once
        self.reserved = _size_of_reserve(self._path)
        self.target = 0  # how large the reserve is to be, as the thread that writes last said
        self.tight = False
        self.lacks_files = False  # whether it is tight because there were no inodes

    def free(self) -> int:
        """Bytes that the disk has left for us."""
        disk = os.statvfs(self._directory)
        return disk.f_bavail * disk.f_frsize

    def takes_files(self) -> bool:
        """Returns whether the disk takes the files of another segment: inodes run out as bytes do."""
        return takes_files(self._directory)

    def require_files(self) -> None:
        """Raises JournalFull when the disk does not take the files of another segment. Then the space is `tight`."""
        if not self.takes_files():
            self.lacks_files = True
            self.tight = True
            raise JournalFull("no inode left on device")

    def capacity(self, used: int) -> int:
        """Returns the most bytes that the journal may take. It takes `used` of them now, the reserve not counted."""
        capacity = used + self.reserved + self.free()
        return capacity if self._budget is None else min(capacity, self._budget)

    def within(self, write: Callable[[], _T], need: int = 0, *, files: bool = False) -> _T:
        """Does a write. While the write finds no room, gives back more of the reserve and does the write again.

        The first time the reserve gives back the bytes that the disk lacks for `need`, and one piece at the least; then
        two pieces, four pieces, and so on. After the write the reserve takes back the bytes that are still free. From
        then on the space is `tight`, until refill() finds space. A failed write has to remove its files and its bytes.
        Raises JournalFull when the reserve is used up, when less space than `need` is free, or when the write makes
        `files` and the disk takes none.
        """
        piece, given = PIECE_BYTES, 0
        if files:
            self.require_files()
        if need and need > self.free() + self.reserved:
            self.tight = True
            raise JournalFull("no space left on device")
        while True:
            try:
                done = write()
            except JournalFull:
                self._wanted = True
                with self._lock:
                    self._wanted = False
                    self.tight = True
                    size = piece if given else max(piece, need - self.free())
                    size += -size % BLOCK_BYTES
                    if not self._give_back(size):
                        self._grow(self.reserved + given)
                        raise
                given += size
                piece *= 2
            else:
                if given:
                    with self._lock:
                        self._grow(self.reserved + given)
                return done

    def refill(self, size: int, margin: int) -> bool:
        """Makes `size` the target of the reserve, and does what refill_to_target() does."""
        self.target = size
        return self.refill_to_target(margin)

    def refill_to_target(self, margin: int) -> bool:
        """Makes the reserve as large as its target, or as a full disk allows. Returns whether the disk kept its word.

        The space is `tight` when the reserve is smaller than that. It stops being `tight` when the reserve is complete,
        `margin` bytes are free beside it, and the disk takes files. A thread that needs room ends this early.
        """
        while True:
            with self._lock:  # until it is decided: another thread may give room back, and be the last to say `tight`
                free, size = self.free(), self.target
                possible = min(size, self.reserved + free - free % BLOCK_BYTES)
                resized = self._resize(min(possible, self.reserved + _STEP_BYTES))
                goes_on = resized and self.reserved < possible and not self._wanted
                if not goes_on and self.reserved < size:
                    self.tight = True
                elif not goes_on and self.free() >= margin and self.takes_files():
                    self.tight = self.lacks_files = False
            if not goes_on:
                return resized

    def hold(self, size: int) -> None:
        """Has the reserve grow to this size, as far as the disk has room: others may take what a file gives back."""
        grows = True
        while grows and not self._wanted:
            with self._lock:
                before = self.reserved
                self._grow(min(size, before + _STEP_BYTES))
                grows = before < self.reserved < size

    def give_back(self, size: int) -> bool:
        """Frees this many bytes of the reserve, or all of it. Returns whether there was a reserve."""
        with self._lock:  # what another thread is about to reserve counts as well
            return self._give_back(size)

    def _grow(self, size: int) -> None:
        free = self.free()
        size = min(size, self.reserved + free - free % BLOCK_BYTES)
        if size > self.reserved:
            self._resize(size)

    def _give_back(self, size: int) -> bool:
        return self.reserved > 0 and self._resize(max(0, self.reserved - size))

    def _resize(self, size: int) -> bool:
        """Makes the reserve larger or smaller. Returns whether that worked: otherwise the reserve is as before."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            if size > self.reserved:
                os.posix_fallocate(file, 0, size)
            os.ftruncate(file, size)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, self.reserved)
            return False
        finally:
            os.close(file)
        self.reserved = size
        return True


def _size_of_reserve(path: str) -> int:
    """Returns the size of an earlier process's reserve. A reserve is a file of zeros. No other file is ever cut.

    Raises JournalFailed.
    """
    try:
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                if not file.read(BLOCK_BYTES).strip(b"\0"):
                    return status.st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise JournalFailed(f"cannot use the journal's reserve {path}: {error.strerror}") from error
    raise JournalFailed(f"{path} is no reserve of a journal; nothing was changed, move the file away")
