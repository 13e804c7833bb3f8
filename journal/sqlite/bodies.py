"""The `-bodies` file of a segment: payloads of more than half a page of SQLite, one after the other as they are.

SQLite would write such a payload twice, with a checksum for each page, and read it once more to seal the segment. Here
it is written once and never moved. The row of the record says where it stands, and has its checksum.
This module must not know SQL nor what a payload means. Invariant: a payload is given back only as it was written.
"""

from __future__ import annotations

import errno
import os
from typing import Final
from zlib import crc32

from journal.errors import JournalFailed, JournalFull
from journal.sqlite.files import BODIES_SUFFIX
from journal.sqlite.format import OUTSIDE, PLACE, Row

_COPY_BYTES: Final = 1 << 20
_AT_ONCE: Final = 1 << 16
"""About the size of one write. Joining a megabyte needs memory that the system clears first, which takes as long as the
write."""


class BodyFile:
    """The file of a segment that is written. It is closed when nothing refers to it any more."""

    def __init__(self, segment: str) -> None:
        """Creates the file. Raises OSError, also when the file exists."""
        self._file = -1
        self.path = segment + BODIES_SUFFIX
        self.bytes = 0  # what the committed payloads take
        self._unsynced = False
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, payloads: list[bytes]) -> int:
        """Writes payloads behind those that are committed. Returns how many bytes they have.

        They count once the caller has committed the rows that name them, and added these bytes to `bytes`. Raises
        JournalFull when the caller may try again with more room. Raises JournalFailed.
        """
        end, size = self.bytes, 0
        together: list[bytes] = []
        try:
            for payload in payloads:
                together.append(payload)
                size += len(payload)
                if size >= _AT_ONCE:
                    end = self._write(b"".join(together), end)
                    together, size = [], 0
            if size:
                end = self._write(b"".join(together), end)
        except OSError as error:
            kind = JournalFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else JournalFailed
            raise kind(f"cannot write to {self.path}: {error.strerror}") from error
        self._unsynced = True
        return end - self.bytes

    def _write(self, data: bytes, at: int) -> int:
        done = os.pwrite(self._file, data, at)
        while done < len(data):  # so says a disk that has just become full
            done += os.pwrite(self._file, data[done:], at + done)
        return at + done

    def sync(self) -> None:
        """Waits until all that was written is on the device. Any thread may call, one at a time. Raises OSError."""
        if self._unsynced:
            self._unsynced = False  # before the sync: what is written from now on needs the next one
            os.fdatasync(self._file)

    def close(self) -> None:
        """Closes the file, which is not needed any more."""
        file = getattr(self, "_file", -1)  # a signal may come before the first line of __init__
        self._file = -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


class BodyReader:
    """The file of a segment that is read, also when it is unlinked meanwhile. Without a file nothing stands in it.

    It is opened before the database, which is made after it and removed before it: so no row lacks the file.
    """

    def __init__(self, segment: str) -> None:
        """Raises JournalFailed when there is a file that cannot be opened."""
        self.path = segment + BODIES_SUFFIX
        self._file = -1
        self._bytes = 0
        try:
            self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise JournalFailed(f"cannot read {self.path}: {error.strerror}") from error

    def payload_at(self, place: bytes) -> bytes | None:
        """Returns the payload whose place a row names; None when it is not as it was written. Raises JournalFailed."""
        if self._file < 0 or len(place) < PLACE.size:
            return None
        offset, size, crc, _ = PLACE.unpack_from(place)
        try:
            payload = os.pread(self._file, size, offset)
        except OSError as error:
            raise JournalFailed(f"cannot read {self.path}: {error.strerror}") from error
        return payload if len(payload) == size and crc32(payload) == crc else None

    def whole(self, row: Row) -> Row | None:
        """The record of a row whose payload stands outside, as if the payload stood in the row, and without a checksum.

        The row is as it was written. None when the payload is not. Raises JournalFailed.
        """
        seq, key, kind, _, place = row
        payload = self.payload_at(place)
        if payload is None:
            return None
        return seq, key, kind - OUTSIDE, 0, payload

    def has(self, place: bytes) -> bool:
        """Returns whether the file is long enough for the payload whose place a row names. Raises JournalFailed."""
        if len(place) < PLACE.size:
            return False
        offset, size, _, _ = PLACE.unpack_from(place)
        end = int(offset) + int(size)
        if end > self._bytes and self._file >= 0:
            try:
                self._bytes = os.fstat(self._file).st_size
            except OSError as error:
                raise JournalFailed(f"cannot read {self.path}: {error.strerror}") from error
        return end <= self._bytes

    def copy_to(self, segment: str) -> None:
        """Writes all payloads to the new file of another segment, and syncs it. Raises OSError."""
        if self._file < 0:
            return
        copy = BodyFile(segment)
        try:
            while piece := os.pread(self._file, _COPY_BYTES, copy.bytes):
                copy.bytes += copy.write([piece])
            copy.sync()
        finally:
            copy.close()

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
