"""Copies a journal while its server may write and compact.

This room must not know SQL nor what a payload means. It takes no lock of the original and changes nothing there.
Invariant: a copy that is not complete never passes for a journal.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time

from journal.errors import JournalDamaged, JournalError, JournalFailed
from journal.sqlite.directory import ATTEMPTS, PAUSE_S, failing, fingerprint, list_segments
from journal.sqlite.files import (
    ASIDE_SUFFIX,
    MISSING_SUFFIX,
    WATERMARK_NAME,
    fsync_path,
    read_watermark,
    remove_files,
    segment_path,
    write_watermark,
)
from journal.sqlite.reader import SegmentReader


def backup(directory: str, target: str) -> int:
    """Copies a journal, also while its server runs, into an empty directory whose lock the caller holds.

    The copy is the journal as it was at some moment between begin and end. Returns the number of segments. Raises
    JournalDamaged when a segment cannot be read, and JournalFailed. The copy is then removed.

    Sealed segments never change, so they are copied first, and may take long. Then the directory is listed again. If a
    segment is gone by now, its live records stand in another segment. The segments that are not sealed are copied last,
    the newest first, for the reason that Snapshot gives. They are small. If one of them goes before it is copied, the
    next round begins.
    """
    path = os.path.join(target, WATERMARK_NAME)
    with failing(f"cannot create {path}"):
        watermark = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    copy = _Copy(directory, target, watermark)
    try:
        copy.run()
        _copy_asides(directory, target)
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
        self._synced = read_watermark(directory)
        self._before: dict[int, dict[int, int]] = {}  # what each segment that was copied says of older ones

    def run(self) -> None:
        """Copies rounds until the copy is whole. Raises JournalDamaged or JournalFailed."""
        failed_on = None
        for _ in range(ATTEMPTS):
            before = fingerprint(self._directory)
            if self._round(strict=before == failed_on):
                return
            failed_on = before
            time.sleep(PAUSE_S)
        raise JournalFailed(f"the journal in {self._directory} changes faster than it can be copied")

    def mark(self) -> None:
        """Writes the watermark of the copy: its last record, or a later one that the original has lost.

        It stays that of the original where newer segments count records that a loss of power took before anybody was
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

    def _round(self, *, strict: bool) -> bool:
        """Copies the segments that are not copied yet. Returns whether the copy is whole now.

        With `strict`, a segment that cannot be read raises an exception. Otherwise it may just have been removed.
        """
        for number, path in list_segments(self._directory):
            if number not in self.records:
                self._copy(number, path, sealed=True)
        listed = list_segments(self._directory)
        whole = listed == list_segments(self._directory)
        unsealed = [(number, path) for number, path in reversed(listed) if number not in self.records]
        for number, path in unsealed:
            self._copy(number, path, strict=strict)
        if whole and listed and all(number in self.records and os.path.exists(path) for number, path in listed):
            for number in self.records.keys() - {number for number, _ in listed}:
                self._drop(number)
            return True
        for number, _ in unsealed:
            self._drop(number)
        return False

    def _copy(self, number: int, path: str, *, strict: bool = False, sealed: bool = False) -> None:
        """Copies a segment; with `sealed`, only a sealed one. With `strict`, raises when it cannot be read."""
        # As in SegmentBuilder, the watermark names a record that does not exist, so nobody starts on half a copy.
        self._write_watermark(max(number, *self.records, 0) + 1, 1)
        copy = segment_path(self._target, number)
        try:
            reader = SegmentReader(path)
        except JournalError:
            if strict:  # otherwise the segment may just be gone
                raise
            return
        try:
            if reader.sealed or not sealed:
                self.records[number] = reader.copy_to(copy)
                self._before[number] = reader.before
        except BaseException as error:
            remove_files(copy)
            if strict or not isinstance(error, JournalDamaged):
                raise
        finally:
            reader.close()

    def _drop(self, number: int) -> None:
        if self.records.pop(number, None) is not None:
            remove_files(segment_path(self._target, number))

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
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy)
        raise
