"""How much room a journal has: the disk's or its budget's, and a reserve of real blocks for when the disk is full.

This room must not know segments or records. The reserve is a file of allocated blocks: when somebody else fills the
disk, it is given back to the disk, so that what was accepted can still be changed and deleted.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

RESERVE_NAME: Final = "reserve"


class Space:
    """Room in a directory, below an optional budget of bytes."""

    def __init__(self, directory: str, budget: int | None) -> None:
        self._directory = directory
        self._budget = budget
        self._path = os.path.join(directory, RESERVE_NAME)
        self.reserved = os.path.getsize(self._path) if os.path.exists(self._path) else 0

    def free(self) -> int:
        """Bytes that the disk has left for us."""
        disk = os.statvfs(self._directory)
        return disk.f_bavail * disk.f_frsize

    def capacity(self, used: int) -> int:
        """Bytes that the journal may come to, `used` of which it takes now, the reserve not counted."""
        capacity = used + self.reserved + self.free()
        return capacity if self._budget is None else min(capacity, self._budget)

    def resize(self, size: int) -> bool:
        """Makes the reserve larger or smaller. Returns whether it has that size: a full disk leaves it as it was."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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

    def give_back(self) -> bool:
        """Returns the whole reserve to the disk. Returns whether there was any."""
        return self.reserved > 0 and self.resize(0)
