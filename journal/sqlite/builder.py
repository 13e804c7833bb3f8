"""Writes whole segments: a new journal, or what repairs an old one.

This module must not know SQL nor what a payload means. The caller holds the directory's lock.
Invariant: what is written counts for a server only when it is complete and on the device.
"""

from __future__ import annotations

import contextlib
import os
from itertools import chain
from typing import Final

from journal.errors import JournalFailed
from journal.sqlite.directory import failing
from journal.sqlite.files import (
    ASIDE_SUFFIX,
    MISSING_SUFFIX,
    NEW_SUFFIX,
    SUFFIXES,
    WATERMARK_NAME,
    fsync_path,
    read_watermark,
    remove_files,
    remove_left_overs,
    segment_path,
    write_watermark,
)
from journal.sqlite.format import CHANGE, DELETE, FULL, PART_BYTES, split
from journal.sqlite.survey import SegmentSurvey
from journal.sqlite.writer import SegmentWriter
from journal.tools import Builder

SEGMENT_BYTES: Final = 10485760
"""The size of segments that tools write: the default of a server's -s."""
_BATCH_ROWS: Final = 1000
_BATCH_BYTES: Final = 1 << 20
"""Rows and bytes of one transaction: enough that its fixed cost does not count, and so few that they fit in memory."""


class SegmentBuilder(Builder):
    """Writes whole segments: a new journal, or new segments behind those of an old journal.

    Until finish() has returned, the directory's watermark names a record that does not exist. So a server refuses an
    unfinished journal. The caller holds the directory's lock. To make this object makes no file, and before a file is
    made it is noted: at each moment a signal may end the command, and discard() removes what there is.
    """

    def __init__(
        self,
        directory: str,
        *,
        first: int = 1,
        high_water: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        oldest: int = 0,
    ) -> None:
        """`first` is the number of the first new segment. `oldest` is the oldest segment that a replay needs, or 0 when
        that is the first new one. Raises JournalFailed.
        """
        self.directory = directory
        self.high_water = high_water
        self._segment_bytes = segment_bytes
        self._first = first
        self._oldest = oldest or first
        self.before: dict[int, int] = {}
        """Earlier segments to how many records they have, for the next new segment to say."""
        self._writers: list[SegmentWriter] = []
        self._making = ""  # path of the segment that is being made
        self._begun = False  # whether the watermark may be ours
        self._watermark = -1
        self._batch: list[tuple[int, int, bytes]] = []
        self._batch_bytes = 0
        remove_left_overs(directory)
        self._watermark_before = read_watermark(directory)
        self._watermark_path = os.path.join(directory, WATERMARK_NAME)

    def append(self, key: int, payload: bytes, change: bytes | None = None) -> None:
        """Adds a whole record of a key, and its last change; both are there or neither. Raises a JournalError."""
        if not self._begun:
            self._mark(self._first + 1, 1)
        if self._batch_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_ROWS:
            self._write()
        self._batch += split(key, payload) if len(payload) > PART_BYTES else [(key, FULL, payload)]
        self._batch_bytes += len(payload)
        if change is not None:
            self._batch.append((key, CHANGE, change))
            self._batch_bytes += len(change)

    def delete(self, key: int) -> None:
        """Adds a record that a key is gone. Raises a JournalError."""
        if len(self._batch) >= _BATCH_ROWS:
            self._write()
        self._batch.append((key, DELETE, b""))

    def finish(self) -> None:
        """Everything, and the high water with it, is on the device and valid. Raises a JournalError."""
        self._write()
        last = self._writers[-1]
        last.note(self.high_water, self._oldest)
        last.seal()
        self._mark(last.number, last.records)
        fsync_path(self.directory)
        self._close()

    def discard(self) -> None:
        """Removes the files that were written. The directory is as it was."""
        for writer in self._writers:
            writer.discard()
        if self._making:
            remove_files(self._making)
            remove_files(self._making + NEW_SUFFIX)
        if self._begun and self._watermark_before[0]:
            self._mark(*self._watermark_before)
        elif self._begun:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._watermark_path)
        self._close()

    def _open(self) -> None:
        self._begun = True
        with failing(f"cannot create {self._watermark_path}"):
            self._watermark = os.open(self._watermark_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _close(self) -> None:
        file, self._watermark = self._watermark, -1
        if file >= 0:
            os.close(file)

    def _write(self) -> None:
        writer = self._writers[-1] if self._writers else None
        if writer is None or writer.filled >= self._segment_bytes:
            if writer is not None:
                writer.seal()
                self.before = {writer.number: writer.records}
            number = self._first + len(self._writers)
            self._mark(number + 1, 1)
            path = segment_path(self.directory, number)
            if not os.path.lexists(path):  # otherwise it is another's file, and cannot be made
                self._making = path
            writer = SegmentWriter(path, number, self.high_water)
            self._writers.append(writer)
            self._making = ""
            writer.before = self.before
            writer.note(self.high_water, self._oldest)
        writer.append(self._batch)
        if self._batch:
            self.high_water = max(self.high_water, *(key for key, _, _ in self._batch))
        self._batch = []
        self._batch_bytes = 0

    def _mark(self, segment: int, records: int) -> None:
        if self._watermark < 0:
            self._open()
        with failing("cannot write the journal's watermark"):
            write_watermark(self._watermark, segment, records)
            os.fsync(self._watermark)


def mend(survey: SegmentSurvey, builder: SegmentBuilder) -> list[tuple[str, str]]:
    """Writes anew what needs a damaged segment, and only then sets the damaged segment aside.

    Sound segments stay as they are. Returns the old and the new path of what was set aside. Raises a JournalError.
    """
    try:
        records = survey.live_records()
        first = next(records, None)  # the survey has read everything by now
        moving, dead = survey.at_risk()
        builder.before = survey.uncounted
        for record, change in chain([first] if first else [], records):
            if record.key in moving:
                builder.append(record.key, record.payload, change)
        for key in dead:
            builder.delete(key)
        builder.high_water = max(builder.high_water, survey.used_keys)
        builder.finish()
    except BaseException:
        builder.discard()
        raise
    aside = [path for _, path in sorted(survey.damaged.items())]
    set_aside(aside)
    _mark_missing(survey.directory, survey.missing)
    return [(path, path + ASIDE_SUFFIX) for path in aside]


def _mark_missing(directory: str, missing: list[tuple[int, int]]) -> None:
    """Notes that these segments are missing, and that their loss is accepted. Raises JournalFailed."""
    with failing("cannot note that segments are missing"):
        for first, last in missing:
            for number in range(first, last + 1):
                mark = segment_path(directory, number) + MISSING_SUFFIX
                os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    fsync_path(directory)


def set_aside(paths: list[str]) -> None:
    """Renames segments, in this order, so that no replay reads them any more. Raises JournalFailed."""
    for path in paths:
        if os.path.exists(path + ASIDE_SUFFIX):
            raise JournalFailed(f"cannot set {path} aside: {path + ASIDE_SUFFIX} exists")
    with failing("cannot set a segment aside"):
        for path in paths:
            for suffix in SUFFIXES:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path + suffix, path + ASIDE_SUFFIX + suffix)
    if paths:
        fsync_path(os.path.dirname(paths[0]) or ".")
