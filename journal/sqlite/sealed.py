"""A segment that takes no more records, from the end of its writing to its removal; and the sync of several WALs.

This module must not know the other segments of a directory. Invariant: a segment is `ready` only when all of its
records are on the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from journal.errors import raise_failure
from journal.log import SyncPoint
from journal.sqlite.files import bodies_bytes, disk_bytes, remove_files, sync_files
from journal.sqlite.replay import Found
from journal.sqlite.sizing import OVERSIZE_BYTES, Sizing
from journal.sqlite.wal import WalFile
from journal.sqlite.watermark import Watermark
from journal.sqlite.writer import SegmentWriter, seal_left_over

_UNKNOWN_RECORD_BYTES: Final = 32
"""After a restart the bytes of a segment's records are unknown. The number of records, shifted left by this many bits,
stands for the bytes. That value is larger than any file, so Sizing.merge_bytes() takes the size of the file."""


class FileSync(SyncPoint):
    """Syncs the WALs that were written since the last sync, then moves the watermark."""

    def __init__(
        self,
        files: list[WalFile],
        failed: Callable[[BaseException], None],
        watermark: Watermark,
        segment: int,
        records: int,
    ) -> None:
        self._files = files
        self._failed = failed
        self._watermark = watermark
        self._segment = segment
        self._records = records

    def run(self) -> None:
        try:
            for file in self._files:
                file.sync()
            self._watermark.advance(self._segment, self._records)
        except BaseException as error:
            self._failed(error)
            raise_failure(error)


class Sealed:
    """A segment that takes no more records. `ready` once the worker has merged its WAL, or found no room to merge."""

    def __init__(self, sizing: Sizing, path: str, number: int, writer: SegmentWriter | None, written: int) -> None:
        self.path = path
        self.number = number
        self.ready = False
        self.bytes = disk_bytes(path)
        self.body_bytes = bodies_bytes(path)  # of these, what merging does not move
        self.merge_bytes = sizing.merge_bytes(self.bytes - self.body_bytes, written)
        self.records = writer.records if writer else 0
        self.large_bytes = writer.large_bytes if writer else 0  # what the parts of large records take
        self.row_max = writer.row_max if writer else OVERSIZE_BYTES  # how large its rows are, at the most
        self.wal = writer.wal if writer else None
        self._writer = writer  # this process's writer, until the WAL is merged
        self._left_over: int | None = None  # number of its records when a crash left the WAL, until that is merged

    @classmethod
    def found(cls, sizing: Sizing, found: Found) -> Sealed:
        """A segment that a replay found."""
        sealed = cls(sizing, found.path, found.number, None, found.records << _UNKNOWN_RECORD_BYTES)
        sealed.records = found.records
        if os.path.exists(found.path + "-wal"):
            sealed._left_over = found.records
            sealed.large_bytes = sealed.bytes  # it is not known which records: changes must not wait for a large one
        else:
            sealed.ready = True
        return sealed

    @property
    def writer(self) -> SegmentWriter | None:
        """This process's writer of the segment, until the WAL is merged."""
        return self._writer

    @property
    def merged(self) -> bool:
        """Returns whether all records stand in the database file, and none in a WAL."""
        return self._writer is None and self._left_over is None

    @property
    def makes_files(self) -> bool:
        """Returns whether merging has to make the index of the WAL, as a crash may leave none."""
        return self._left_over is not None and not os.path.exists(self.path + "-shm")

    @property
    def standing(self) -> int:
        """Returns the bytes of the segment once it is merged."""
        return self.bytes if self.ready else self.merge_bytes + self.body_bytes

    def merge(self, log: Callable[[str], None]) -> None:
        """Seals the segment, in the worker. Raises JournalFull when the caller may try again later."""
        if self._writer is not None:
            self._writer.seal()
        elif self._left_over is not None:
            torn = seal_left_over(self.path, self._left_over)
            if torn:
                log(f"journal: {self.path} ended in a torn write of {torn} bytes, which was not acknowledged")
        self._writer = None
        self._left_over = None

    def keep(self) -> None:
        """Syncs the segment with its WAL, in the worker, when there is no room to seal it."""
        self.merge_bytes += self.bytes - self.body_bytes  # merging took more than was expected
        sync_files(self.path)

    def remove(self) -> None:
        """Removes the segment's files but for its large payloads, in the worker."""
        if self._writer is not None:
            self._writer.discard(bodies=False)
            self._writer = None
        else:
            remove_files(self.path, bodies=False)
        self.wal = None
