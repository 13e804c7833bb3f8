"""Copies a journal while its server may write and compact.

This module must not know SQL nor what a payload means. It takes no lock of the original and changes nothing there.
Invariant: a copy that is not complete never passes for a journal.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import closing, suppress

from journal.errors import JournalDamaged, JournalError, JournalLocked
from journal.sqlite.directory import failing, list_segments
from journal.sqlite.files import (
    ASIDE_SUFFIX,
    MISSING_SUFFIX,
    WATERMARK_NAME,
    begun_paths,
    fsync_path,
    read_watermark,
    remove_files,
    segment_path,
    write_watermark,
)
from journal.sqlite.reader import SegmentReader
from journal.sqlite.snapshot import SegmentSnapshot


def backup(directory: str, target: str) -> int:
    """Copies a journal, also while its server runs, into an empty directory whose lock the caller holds.

    The copy is the journal as it was at some moment between begin and end. Returns the number of segments. Raises
    JournalDamaged when a segment cannot be read, and JournalFailed. The copy is then removed.

    Sealed segments never change, so they are copied first, and may take long. Then the few others are opened at one
    moment, which takes no write and no fsync: however slow the device is, the server does not get ahead. What is open
    can be copied at leisure, also when the server has removed it.
    """
    path = os.path.join(target, WATERMARK_NAME)
    with failing(f"cannot create {path}"):
        watermark = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    copy = _Copy(directory, target, watermark)
    try:
        copy.run()
        _copy_asides(directory, target)
        fsync_path(target)  # a loss of power must not leave the mark and take a name
        copy.mark()
        fsync_path(target)
    except BaseException:
        for number in copy.records:
            remove_files(segment_path(target, number))
        os.unlink(path)
        raise
    finally:
        os.close(watermark)
    return len(copy.records)


class _Copy:
    """The segments of a backup. `records` has the number of records of each segment that was copied."""

    def __init__(self, directory: str, target: str, watermark: int) -> None:
        self.records: dict[int, int] = {}
        self._directory = directory
        self._target = target
        self._file = watermark
        self._forbidden = 0  # the segment that the watermark names, and that is missing
        self._synced = read_watermark(directory)
        self._before: dict[int, dict[int, int]] = {}  # what each segment that was copied says of older ones

    def run(self) -> None:
        """Copies everything. Raises JournalDamaged, JournalNewer or JournalFailed."""
        self._copy_sealed()
        segments = SegmentSnapshot(self._directory, self.records.keys())
        try:
            listed = begun_paths(segments.paths, self._synced)
            self._keep(listed)
            pinned = [(number, segments.open(path)) for number, path in listed if number not in self.records]
            # Until an open segment is released, the server cannot merge its WAL. A sealed one has nothing to merge.
            for number, reader in sorted(pinned, key=lambda each: each[1].sealed):
                # The copy of a segment that may have lost its tail says so as well: a start excuses what is lost there.
                self._copy(number, reader, number < self._synced[0] or number == listed[-1][0])
                reader.release()
        finally:
            segments.close()

    def mark(self) -> None:
        """Writes the watermark of the copy: its last record, or a later one that the original has lost.

        It stays that of the original where newer segments count records that a loss of power took before a client was
        promised them. With another watermark they would count as lost.
        """
        last = max(self.records)
        segment, records = self._synced
        said: dict[int, int] = {}
        for number in sorted(self.records):
            said.update(self._before[number])
        short = any(said.get(number, 0) > count for number, count in self.records.items())
        if not short and segment <= last and records <= self.records.get(segment, records):
            segment, records = last, self.records[last]
        self._write_watermark(segment, records)

    def _copy_sealed(self) -> None:
        """Copies the sealed segments, and those that were sealed meanwhile, as long as fewer and fewer are left."""
        left = sys.maxsize
        while True:
            listed = list_segments(self._directory)
            self._keep(listed)
            rest = [(number, path) for number, path in listed if number not in self.records]
            if not rest or len(rest) >= left:
                return
            left = len(rest)
            for number, path in reversed(rest):  # the oldest may go meanwhile, and need not be copied then
                self._copy_if_sealed(number, path)

    def _copy_if_sealed(self, number: int, path: str) -> None:
        """Leaves out a segment that cannot be read. It may just be gone; otherwise the snapshot finds it again."""
        try:
            reader = SegmentReader(path)
        except JournalError:
            return
        with closing(reader), suppress(JournalDamaged):
            if reader.sealed:
                self._copy(number, reader)

    def _copy(self, number: int, reader: SegmentReader, seals: bool = True) -> None:
        """Writes and syncs a copy. Raises a JournalError, and leaves none then."""
        copy = segment_path(self._target, number)
        try:
            self.records[number] = reader.copy_to(copy, seals)
            self._before[number] = reader.before
        except BaseException:
            remove_files(copy)
            raise

    def _keep(self, listed: list[tuple[int, str]]) -> None:
        """Removes copies of other segments, and forbids a start as long as not all of these are copied.

        As in SegmentBuilder, the watermark names a record that does not exist, so no server starts on half a copy.
        """
        if not listed:
            raise JournalLocked(f"{self._directory} has no journal in it")
        numbers = {number for number, _ in listed}
        for number in self.records.keys() - numbers:
            remove_files(segment_path(self._target, number))
            del self.records[number]
        if max(numbers) >= self._forbidden:
            self._forbidden = max(numbers) + 1
            self._write_watermark(self._forbidden, 1)
            fsync_path(self._target)  # the name of the watermark comes before those of the copies

    def _write_watermark(self, segment: int, records: int) -> None:
        with failing("cannot write the watermark of the copy"):
            write_watermark(self._file, segment, records)
            os.fsync(self._file)


def _copy_asides(directory: str, target: str) -> None:
    """Copies the segments that were set aside, or leaves no copy. Without them their numbers would seem to be missing.

    Raises JournalFailed.
    """
    begun = []
    try:
        for name in os.listdir(directory):
            if name.startswith("segment-") and (ASIDE_SUFFIX in name or MISSING_SUFFIX in name):
                copy = os.path.join(target, name)
                begun.append(copy)
                with failing(f"cannot copy {name}"):
                    shutil.copy(os.path.join(directory, name), copy)
                fsync_path(copy)
    except BaseException:
        for copy in begun:
            with suppress(FileNotFoundError):
                os.unlink(copy)
        raise
