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
from journal.sqlite.reader import SegmentReader, join
from journal.sqlite.replay import Replay, Source, uncounted
from journal.sqlite.snapshot import SegmentSnapshot
from journal.sqlite.wal import torn_bytes
from journal.survey import ExaminedSurvey
from journal.tools import Examine, SegmentFacts


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


class SegmentSurvey(ExaminedSurvey):
    """A survey of a directory's segments. See journal/tools.py for what each method promises."""

    def __init__(self, directory: str, examine: Examine) -> None:
        """Raises JournalLocked when there is no such directory, or no journal in it."""
        super().__init__(examine)
        self.directory = directory
        self.damaged: dict[int, str] = {}
        """Number and path of each damaged segment."""
        self.missing: list[tuple[int, int]] = []
        """First and last number of each gap between the segments."""
        self.oldest = 0
        self.uncounted: dict[int, int] = {}
        """Sound segments to their records, where no sound segment says rightly how many they are."""
        self._dead: list[int] = []
        self._paths: list[str] = []
        self._snapshot = Snapshot(directory)
        self._replay = Replay(directory, self._snapshot)

    @property
    def _live(self) -> Liveness:
        return self._replay.live

    def _records_again(self) -> Iterator[Record]:
        return Replay(self.directory, self._snapshot).records()

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
        replay = self._replay = Replay(self.directory, self._snapshot)
        replay.keeps_deleted = replay.checks_hints = True
        spoilt: set[int] = set()
        yield from self._sound(replay.records(), lambda record: spoilt.add(record.segment))
        lost = self.strange
        self.findings = replay.findings + self._unsound
        self.notes = replay.notes
        self.high_water = replay.high_water
        self.keys = self._live.keys - len(lost)
        self.missing = replay.missing
        self.oldest = replay.oldest
        self.damaged = {each.number: each.path for each in replay.found if each.damaged or each.number in spoilt}
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
