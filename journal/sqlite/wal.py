"""The `-wal` file of a segment as bytes: waiting for the device, blocks ahead, and what stands behind its records.

SQLite's locks are on the database and `-shm` files, so a descriptor of the `-wal` file may come and go without losing
them. This module must not know records; it knows SQLite's file format for a WAL and for the index of a WAL.
"""

from __future__ import annotations

import errno
import os
from struct import Struct
from struct import error as StructError
from threading import Lock
from typing import Final

from journal.errors import JournalFailed
from journal.sqlite.bodies import BodyFile
from journal.sqlite.format import PAGE_BYTES

_WAL_HEAD_BYTES: Final = 32
"""A WAL begins with a header of this size (SQLite's file format, section 4.1)."""
_FRAME_HEAD_BYTES: Final = 24
"""Each page in a WAL stands behind a header of this size (the same section)."""
_LOOK_BYTES: Final = 1 << 16
"""A WAL is looked through in pieces of this size, so that a large one takes no memory."""
_FRAMES: Final = Struct("=I")
_FRAMES_AT: Final = 16
"""Where SQLite's index of a WAL has the number of frames that belong to whole transactions (`mxFrame`, WAL-mode file
format, section 2.1)."""
_ZEROS: Final = bytes(1 << 16)
"""One write to a new WAL: large enough that the number of system calls does not matter."""


class WalFile:
    """A descriptor of a `-wal` file for fdatasync; closed when nothing refers to it any more.

    Its rows name payloads in `bodies`, which it syncs as well.
    """

    def __init__(self, path: str, bodies: BodyFile) -> None:
        self._file = -1
        self._syncing = Lock()
        self._failed = False
        self._bodies = bodies
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def sync(self, *, only_bodies: bool = False) -> None:
        """Waits until the WAL and its payloads are on the device, or the payloads only. Raises JournalFailed.

        Any thread may call.

        Linux tells of what it could not write once: an fsync after a failed one succeeds and proves nothing. So an
        fsync waits for the one before, and after a failure none is tried.
        """
        with self._syncing:
            if self._failed:
                raise JournalFailed("an earlier fsync of the journal failed")
            self._failed = True
            try:
                self._bodies.sync()
                if not only_bodies:
                    os.fdatasync(self._file)
            except OSError as error:
                raise JournalFailed(f"fsync of the journal failed: {error.strerror}") from error
            self._failed = False

    def size(self) -> int:
        return os.fstat(self._file).st_size

    def allocate(self, size: int) -> None:
        """Fills the still empty file with this many zeros, unless the disk has no room for them.

        An fsync of what is written over them has no size and no new block to write down: it takes half as long. Blocks
        that are only allocated have to be noted as written then, which is a quarter of that time. Raises OSError.
        """
        try:
            os.posix_fallocate(self._file, 0, size)
            left = size
            while left:
                left -= os.write(self._file, _ZEROS[:left])
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            os.ftruncate(self._file, 0)
        os.fsync(self._file)

    def __del__(self) -> None:
        file = getattr(self, "_file", -1)  # a signal may come before the first line of __init__
        if file >= 0:
            os.close(file)


def torn_bytes(path: str) -> int:
    """Returns how many bytes at the end of a segment's WAL are no part of a whole transaction; 0 when that is not
    known.

    For a segment that was just read and that this process does not have open: closing a file drops SQLite's locks.
    """
    try:
        size = os.path.getsize(path + "-wal")  # before the index: a writer only makes the number of frames grow
        with open(path + "-shm", "rb") as index:
            frames = _FRAMES.unpack(index.read(_FRAMES_AT + _FRAMES.size)[_FRAMES_AT:])[0]
        return bytes_behind(path + "-wal", frames, size)
    except (OSError, StructError):
        return 0


def bytes_behind(wal: str, frames: int, size: int) -> int:
    """Returns the bytes behind this many frames of a WAL of this size, but for whole frames that are only zeros."""
    frame_bytes = _FRAME_HEAD_BYTES + PAGE_BYTES
    begin = _WAL_HEAD_BYTES + frames * frame_bytes
    last = 0
    with open(wal, "rb") as file:
        for at in range(begin, size, _LOOK_BYTES):
            file.seek(at)
            length = len(file.read(min(_LOOK_BYTES, size - at)).rstrip(b"\0"))
            if length:
                last = at - begin + length
    return min(size - begin, -(-last // frame_bytes) * frame_bytes) if last else 0
