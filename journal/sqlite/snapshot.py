"""The segments of a directory at one moment, held open while a server may write to them and remove them.

This module must not know SQL nor what a payload means. It takes no lock, writes nothing and never waits for the device.
Invariant: what a SegmentSnapshot holds is a state that the journal was in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container
from typing import Final

from journal.errors import JournalError, JournalFailed
from journal.sqlite.files import disk_bytes, segment_paths
from journal.sqlite.reader import SegmentReader

_ATTEMPTS: Final = 300
"""An attempt fails when a segment goes before it is opened. The next one finds all sealed segments open."""
_PAUSE_S: Final = 0.1
"""A segment that cannot be opened is damaged if that is so after this pause, too. It may just have been sealed."""
_GONE: Final = (-1, -1)


class Pinned(SegmentReader):
    """A segment as it was when this object was made. A replay may read it any number of times."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            self.pin()
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        """Does nothing: the moment closes the segment, with release()."""

    def release(self) -> None:
        super().close()


class SegmentSnapshot:
    """All segments of a directory as they were at one moment, but for those that the caller has copied already.

    A state of a journal is all records up to some place in their order. So the newest segment is opened first. An older
    segment may then show later records, but they still come before every record that the newer segment does not show.
    A segment that comes meanwhile has only later records. If a segment goes before it is opened, its live records stand
    in a newer segment, perhaps behind what was seen there. Then all segments that may change are opened again. A sealed
    segment never changes and stays open. So only a few are left to be opened, and soon none of them goes meanwhile.
    """

    def __init__(self, directory: str, copied: Container[int] = ()) -> None:
        """Raises JournalFailed. `copied` has the numbers of sealed segments that the caller does not need."""
        self.paths: list[tuple[int, str]] = []
        """Number and path of every segment, oldest first, also of those that were copied."""
        self._directory = directory
        self._copied = copied
        self._readers: dict[str, Pinned] = {}
        self._bytes: dict[str, int] = {}
        self._damage: dict[str, JournalError] = {}
        try:
            self._take()
        except BaseException:
            self.close()
            raise

    def open(self, path: str) -> Pinned:
        """A segment that was not copied. Raises the JournalError that opening it raised."""
        if path in self._damage:
            raise self._damage[path]
        return self._readers[path]

    def bytes_of(self, path: str) -> int:
        """The bytes on disk of a segment that was not copied. The server may have removed the segment since."""
        return self._bytes[path]

    def close(self) -> None:
        """Closes the files."""
        for reader in self._readers.values():
            reader.release()
        self._readers.clear()
        self._damage.clear()

    def _take(self) -> None:
        failed: set[tuple[str, tuple[int, int]]] = set()
        for _ in range(_ATTEMPTS):
            whole = self._attempt()
            before, failed = failed, {(str(error), _facts(path)) for path, error in self._damage.items()}
            if whole and failed <= before:
                return
            if failed:
                time.sleep(_PAUSE_S)
        raise JournalFailed(f"the journal in {self._directory} changes faster than it can be opened")

    def _attempt(self) -> bool:
        """Opens all segments that are not open yet. Returns whether none went before it was opened."""
        self.paths = segment_paths(self._directory)
        whole = self.paths == segment_paths(self._directory)  # a listing may miss a file that comes or goes meanwhile
        self._close_all_but_sealed({path for _, path in self.paths})
        self._damage.clear()
        for number, path in reversed(self.paths):
            if number not in self._copied and path not in self._readers:
                whole = self._open(path) and whole
        return whole

    def _open(self, path: str) -> bool:
        """Opens a segment. Returns False when it is gone, or may have gone or been sealed meanwhile.

        SQLite opens the database before the WAL, and the database goes first. So SQLite may have missed the WAL.
        """
        before = _facts(path)
        self._bytes[path] = disk_bytes(path)
        reader = None
        try:
            reader = Pinned(path)
        except JournalError as error:
            self._damage[path] = error
        same = before == _facts(path) != _GONE
        if not same:
            self._damage.pop(path, None)
            if reader is not None:
                reader.release()
        elif reader is not None:
            self._readers[path] = reader
        return same

    def _close_all_but_sealed(self, listed: set[str]) -> None:
        for path, reader in list(self._readers.items()):
            if path not in listed or not reader.sealed:
                self._readers.pop(path).release()


def _facts(path: str) -> tuple[int, int]:
    """The size of a file, and when it was changed."""
    try:
        facts = os.stat(path)
    except OSError:
        return (0, 0) if os.path.lexists(path) else _GONE  # it may be a link to nowhere, which does not go
    return facts.st_size, facts.st_mtime_ns
