"""The file `synced`: it says how much of the journal was on the device when a sync point last ended.

A replay uses the watermark to tell a torn tail, which no client was promised, from damage. The file itself is never
synced: the watermark is a lower bound. Several threads run sync points (the hub, a thread of its pool, the journal's
worker), and the sync points may end in any order.
Invariant: the watermark only moves forward while a journal is open. What end() writes is the last word.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from threading import Lock
from typing import Final

from mypy_extensions import mypyc_attr

from journal.errors import JournalError, JournalFailed, JournalFull
from journal.sqlite.files import WATERMARK_NAME, write_watermark

_TEXT_MAX: Final = 64
"""A watermark takes 53 bytes. A larger file with this name does not belong to a journal."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Watermark:
    """The largest pair of segment and records that a sync point has reached. Any thread may call."""

    def __init__(self, directory: str, segment: int) -> None:
        """Opens or makes the file, and writes that nothing of this new segment is synced.

        The old watermark is not needed any more: its segments were read and found whole. Raises JournalFull or
        JournalFailed.
        """
        self._lock = Lock()
        self._segment = segment
        self._records = 0
        self._file = self._open(os.path.join(directory, WATERMARK_NAME))
        try:
            self._write(segment, 0)
        except OSError as error:
            os.close(self._file)
            raise _failure_of(error, "cannot write the journal's watermark") from error

    def advance(self, segment: int, records: int) -> None:
        """Notes that all older segments and this many records of this segment are on the device. Never goes back."""
        with self._lock:
            if self._file < 0 or segment < self._segment or (segment == self._segment and records <= self._records):
                return
            try:
                self._write(segment, records)
            except OSError:
                return  # the older watermark is still true; a newer one finds more damage
            self._segment, self._records = segment, records

    def end(self, segment: int, records: int) -> None:
        """Says how many records the last segment has, when the empty one behind it goes, and closes the file.

        The empty segment noted how many there are, and nothing else does. All older segments are on the device.
        """
        with self._lock:
            if self._file >= 0:
                with suppress(OSError):  # the other watermark is still true
                    self._write(segment, records)
        self.close()

    def close(self) -> None:
        """Closes the file. A sync point that ends later writes nothing: its descriptor may be another file's."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _open(self, path: str) -> int:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _failure_of(error, f"cannot create the journal's watermark {path}") from error
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _TEXT_MAX:
            os.close(file)
            raise JournalFailed(f"{path} is no watermark of a journal; nothing was changed, move the file away")
        return file

    def _write(self, segment: int, records: int) -> None:
        write_watermark(self._file, segment, records)


def _failure_of(error: OSError, what: str) -> JournalError:
    kind = JournalFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else JournalFailed
    return kind(f"{what}: {error.strerror}")
