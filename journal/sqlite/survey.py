"""One reading of all segments of a directory: what is wrong with the journal, and which records are live.

This module must not know SQL nor what a payload means. Reading takes no lock and changes neither segment nor WAL, so a
tool may read beside a running server. SQLite may leave its index of a WAL (`-shm`) behind.
Invariant: what a Snapshot gives back is a state that the journal was in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from journal.errors import JournalDamaged, JournalLocked
from journal.liveness import Liveness
from journal.log import Record
from journal.sqlite.directory import list_segments
from journal.sqlite.files import WATERMARK_NAME
from journal.sqlite.format import CHANGE, FULL, KEY_MAX
from journal.sqlite.reader import SegmentReader, join
from journal.sqlite.repair import LOST_KEYS
from journal.sqlite.replay import Replay, Source, uncounted
from journal.sqlite.snapshot import SegmentSnapshot
from journal.sqlite.wal import torn_bytes
from journal.tools import Examine, SegmentFacts, Survey


class Snapshot(Source):
    """All segments of a directory at one moment, held open. A server may write and compact meanwhile."""

    def __init__(self, directory: str) -> None:
        """Raises JournalLocked when there is no such directory, or no journal in it. Raises JournalFailed."""
        super().__init__(directory)
        if not list_segments(directory) and not os.path.exists(os.path.join(directory, WATERMARK_NAME)):
            raise JournalLocked(f"{directory} has no journal in it")
        self._segments = SegmentSnapshot(directory)

    def paths(self) -> list[tuple[int, str]]:
        return self._segments.paths

    def open(self, path: str) -> SegmentReader:
        return self._segments.open(path)

    def bytes_of(self, path: str) -> int:
        """The bytes of a segment on disk at that moment. The server may have removed the segment since."""
        return self._segments.bytes_of(path)

    def close(self) -> None:
        """Closes the files."""
        self._segments.close()


class SegmentSurvey(Survey):
    """A survey of a directory's segments. See journal/tools.py for what each method promises."""

    def __init__(self, directory: str, examine: Examine) -> None:
        """Raises JournalLocked when there is no such directory, or no journal in it."""
        self.directory = directory
        self.findings = []
        self.notes = []
        self.segments = []
        self.keys = 0
        self.high_water = 0
        self.lost = []
        self.damaged: dict[int, str] = {}
        """Number and path of each damaged segment."""
        self.missing: list[tuple[int, int]] = []
        """First and last number of each gap between the segments."""
        self.oldest = 0
        self.uncounted: dict[int, int] = {}
        """Sound segments to their records, where no sound segment says rightly how many they are."""
        self._live = Liveness()
        self._dead: list[int] = []
        self._paths: list[str] = []
        self._examine = examine
        self._snapshot = Snapshot(directory)

    @property
    def live_bytes(self) -> int:
        return self._live.total_bytes

    @property
    def used_keys(self) -> int:
        return min(self.high_water + (LOST_KEYS if self.findings else 0), KEY_MAX)

    def read(self) -> Iterator[Record]:
        return (record for _, record in self._read())

    def live_records(self) -> Iterator[tuple[Record, bytes | None]]:
        wholes: dict[int, int] = {}
        changes: dict[int, bytes] = {}
        for place, record in self._read():
            if record.kind == FULL:
                wholes[record.key] = place
                changes.pop(record.key, None)
            elif record.kind == CHANGE:
                changes[record.key] = record.payload
            else:
                wholes.pop(record.key, None)
                changes.pop(record.key, None)
        self.keys = len(wholes)
        for place, record in enumerate(Replay(self.directory, self._snapshot).records()):
            if record.kind == FULL and wholes.get(record.key) == place:
                yield record, changes.get(record.key)

    def at_risk(self) -> tuple[set[int], list[int]]:
        """Keys that need a damaged segment, and keys that would come back, or be in doubt, without that segment."""
        return self._live.keys_in_any(set(self.damaged)), self._dead

    def close(self) -> None:
        self._snapshot.close()
        torn = []  # the size of a torn write can be asked only when no process has the file open
        for path in self._paths:
            size = torn_bytes(path)
            if size:
                torn.append(f"{path} ends in a torn write of {size} bytes; nothing acknowledged is in it")
        self.notes = torn + self.notes
        self._paths = []

    def _read(self) -> Iterator[tuple[int, Record]]:
        replay = Replay(self.directory, self._snapshot)
        replay.keeps_deleted = replay.checks_digests = True
        self._live = replay.live
        strange: set[int] = set()
        unsound: list[str] = []
        lost: set[int] = set()
        for place, record in enumerate(replay.records()):
            try:
                self._examine(record)
            except ValueError as error:
                strange.add(record.segment)
                unsound.append(f"segment {record.segment}: a record of job {record.key} is not a job's: {error}")
                if record.kind == FULL:
                    lost.add(record.key)
                continue
            if record.kind != CHANGE:
                lost.discard(record.key)
            elif record.key in lost:
                continue
            yield place, record
        self.findings = replay.findings + unsound
        self.notes = replay.notes
        self.high_water = replay.high_water
        self.keys = self._live.keys - len(lost)
        self.missing = replay.missing
        self.oldest = replay.oldest
        self.damaged = {each.number: each.path for each in replay.found if each.damaged or each.number in strange}
        self.uncounted = uncounted([found for found in replay.found if found.number not in self.damaged])
        gone = {key for key in replay.suspects if not self._live.segment_of(key)}
        self.lost = sorted(gone | (replay.orphans.keys() - replay.unpromised) | lost)
        deleted = {key for each in replay.found if each.number in self.damaged for key in each.deleted}
        self._dead = sorted({key for key in deleted if not self._live.segment_of(key)} | replay.orphans.keys() | lost)
        self._paths = [found.path for found in replay.found]
        self.segments = [
            SegmentFacts(
                found.number,
                found.records,
                self._snapshot.bytes_of(found.path),
                self._live.bytes_in(found.number),
                found.damaged,
            )
            for found in replay.found
        ]


def every_record(directory: str, complain: Callable[[str], None]) -> Iterator[tuple[int, Record]]:
    """Each intact record, also dead ones, with its place in its segment. Calls `complain` for what cannot be read."""
    snapshot = Snapshot(directory)
    try:
        for number, path in snapshot.paths():
            try:
                reader = snapshot.open(path)
                for key, kind, payload in join(reader):
                    yield reader.records, Record(key, kind, payload, number)
                if reader.skipped:
                    complain(f"{path} has {reader.skipped} damaged records, which are left out")
            except JournalDamaged as error:
                complain(str(error))
    finally:
        snapshot.close()
