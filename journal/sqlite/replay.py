"""Reads all segments of a directory in order, and finds out what is wrong with them. Changes nothing on disk.

This module must not know what a payload means. A crash may leave a torn tail: writes that were never acknowledged under
the policy in force. SQLite drops a torn tail; that is no damage. Anything else that is not as it was written is damage.
Invariant: a record is given back only when its checksum, place and segment are those that it was written with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

from journal.errors import JournalDamaged
from journal.liveness import Liveness
from journal.log import HEAD, Record
from journal.sqlite.files import (
    aside_numbers,
    begun_paths,
    bodies_bytes,
    read_ahead,
    read_watermark,
    segment_path,
    segment_paths,
)
from journal.sqlite.format import CHANGE, DELETE, FULL, Row, row_bytes, whole_bytes
from journal.sqlite.reader import SegmentReader

_AHEAD: Final = 16
"""The segments that are asked of the device while one is read, where HEAD rows will do. A cold start is a third faster
so, or more where the device is slow."""
_HINTS_SHARE: Final = 16
"""Hints are at the end of their file, and seldom larger than this part of the file. Only old segments have some."""
_MISSING_MAX: Final = 10_000
"""A larger gap in the numbers is not accepted for good: then some file has a wrong name, and nothing is missing."""


class Found(NamedTuple):
    """A segment that was read. A `damaged` segment is set aside once its records stand elsewhere."""

    number: int
    path: str
    records: int
    damaged: bool
    deleted: list[int]  # keys of other segments that its records delete; empty when that is not needed
    before: dict[int, int]  # earlier segments to how many records they have, as it says
    idle: bool  # whether it has no record, and says nothing that the segments before it do not say


def uncounted(sound: list[Found]) -> dict[int, int]:
    """Segments to their records, where no other one of these segments says rightly how many they are.

    The next segment says it. Otherwise a segment could not be told from an older copy of itself.
    """
    said: dict[int, int] = {}
    for found in sound:
        said.update(found.before)
    return {found.number: found.records for found in sound if said.get(found.number, 0) != found.records}


@mypyc_attr(allow_interpreted_subclasses=True)
class Source:
    """The source of a replay's segments: those of a directory, each opened when its turn comes."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.watermark = read_watermark(directory)

    def paths(self) -> list[tuple[int, str]]:
        """Number and path of every segment, oldest first."""
        return segment_paths(self.directory)

    def open(self, path: str) -> SegmentReader:
        """Raises JournalDamaged when it cannot be read as a segment, JournalNewer, or JournalFailed."""
        return SegmentReader(path)

    def begun(self, paths: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """The same without a newest segment that was never complete, and therefore never written to."""
        return begun_paths(paths, self.watermark)


class Replay:
    """One reading of a directory. Exhaust it, then look at `findings`, `found`, `live` and `high_water`."""

    def __init__(self, directory: str, source: Source | None = None) -> None:
        self.live = Liveness()
        self.findings: list[str] = []
        self.unfinished: list[str] = []  # segments that were never complete and hold nothing
        self.notes: list[str] = []
        """Returns lines for the operator about oddities that are no damage."""
        self.found: list[Found] = []
        self.high_water = 0
        self._directory = directory
        self._source = source or Source(directory)
        self._watermark = self._source.watermark
        self._reader: SegmentReader | None = None  # of the segment that is being read
        self.missing: list[tuple[int, int]] = []  # first and last number of each gap
        self.orphans: dict[int, int] = {}
        """Keys of which only changes are left, to the segment of the first change. A start deletes these keys."""
        self.unpromised: set[int] = set()  # the orphans whose whole records a loss of power may have taken
        self._open = 0  # the first segment that was never sealed: a loss of power may have cost it its tail
        self._oldest = 0  # the first segment that is needed, as the newest segment that knows it says
        self._deleted: list[int] = []
        self._before: dict[int, int] = {}  # segment to its records, as the newest segment says that is on the device
        self.suspects: set[int] = set()  # keys that damaged records name and no later record settles
        self.keeps_deleted = False  # whether `found` lists the deleted keys of sound segments, too
        self.heads = False  # whether HEAD rows will do
        self.checks_hints = False  # whether hints are read that are not needed

    def records(self) -> Iterator[Record]:
        """Every intact record, oldest first, without the CHANGE and DELETE of keys that have no whole record."""
        for segment, rows in self.batches():
            for _, key, kind, _, payload in rows:
                yield Record(key, kind, payload, segment)

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        """The same records, several at a time: their segment, and rows of (seq, key, kind, crc, payload)."""
        first = before = 0
        every = self._source.paths()
        paths = self._source.begun(every)
        for _, path in every[len(paths) :]:
            self.unfinished.append(path)
            self.notes.append(f"{path} was never complete and holds nothing; a start replaces it")
        told = 0
        for at, (number, path) in enumerate(paths):
            while self.heads and told < min(at + _AHEAD, len(paths)):
                read_ahead(paths[told][1], 1 if bodies_bytes(paths[told][1]) else _HINTS_SHARE)
                told += 1
            if not before:
                first = number
            elif number != before + 1:
                self._find_missing(before + 1, number - 1)
            before = number
            yield from self._read(number, path)
        self._find_cut_off()
        last = self._watermark[0] if self._watermark[1] else self._watermark[0] - 1  # an empty last one does not stay
        if last > before:
            self._find_missing(before + 1, last)
        # A segment that is written to notes `oldest` before an older segment goes. If no segment has the note, none has
        # gone. If a damaged segment might have had the note, nothing is known.
        needed = self._oldest or (first if self.findings else 1)
        if needed < first:
            self._find_missing(needed, first - 1)
        self._judge_orphans()

    def _judge_orphans(self) -> None:
        """Orphans behind a segment that was never sealed may have stood in its tail. Then they were never promised.

        The start seals that segment, so no later reading could tell these orphans from others: the start deletes them.
        """
        self.unpromised = {key for key, number in self.orphans.items() if 0 < self._open < number}
        if self.unpromised:
            self.notes.append(
                f"{len(self.unpromised)} jobs are known by their changes only: a loss of power took them before "
                f"they were promised; a start deletes what is left of them"
            )
        lost = len(self.orphans) - len(self.unpromised)
        if lost:
            self.findings.append(f"{lost} jobs are known by their changes only: the segment that held them is missing")

    def _read(self, number: int, path: str) -> Iterator[tuple[int, list[Row]]]:
        problems = len(self.findings)
        records = 0
        counts: dict[int, int] = {}
        self._deleted = []
        sealed = says = False
        try:
            reader = self._source.open(path)
        except JournalDamaged as error:
            self.findings.append(f"{error}")
        else:
            self._reader = reader
            try:
                says = self._take_note(reader, number, path)
                counts = reader.before
                sealed = reader.sealed
                if not sealed:
                    self._open = self._open or number
                reader.synced = self._watermark[1] if self._watermark[0] == number else 0
                for rows in reader.batches(self.heads and reader.alone):
                    if reader.suspects:
                        self._take_suspects(reader)
                    yield number, self._belonging(rows, number)
                if self.checks_hints and sealed:
                    reader.check_hints()
            except JournalDamaged as error:
                self.findings.append(f"{error}")
            finally:
                self.close()
            records = reader.records
            self._take_suspects(reader)
            self._judge(reader)
        synced = self._watermark[1] if self._watermark[0] == number else 0
        if records < synced and len(self.findings) == problems:
            self.findings.append(f"{path} ends after record {records}, but {synced} were on the device")
        damaged = len(self.findings) > problems
        deleted = [] if sealed and not damaged and not self.keeps_deleted else self._deleted
        idle = not (records or says or damaged) and len(self.found) > 0 and number >= self._watermark[0]
        self.found.append(Found(number, path, records, damaged, deleted, counts, idle))

    def _judge(self, reader: SegmentReader) -> None:
        """Records the notes and findings about a segment that was read."""
        path = reader.path
        if reader.hints_error:
            self.notes.append(f"the hints of {path} are damaged ({reader.hints_error}): its records are read instead")
        if reader.torn:
            self.notes.append(
                f"{path} ends after record {reader.records}: a loss of power took the body of the next job before a "
                f"client was told of it"
            )
        if reader.skipped:
            self.findings.append(f"{path} has {reader.skipped} damaged records, which are left out")

    def _take_note(self, reader: SegmentReader, number: int, path: str) -> bool:
        """Takes what a segment says of the journal. Returns whether no other segment has said all of this.

        Raises JournalDamaged.
        """
        if reader.number != number:
            raise JournalDamaged(f"{path} says that it is segment {reader.number}")
        says = reader.oldest > self._oldest or reader.high_water > self.high_water
        self.high_water = max(self.high_water, reader.high_water)
        self._oldest = max(self._oldest, reader.oldest)
        if number <= self._watermark[0]:
            self._before.update(reader.before)
        return says or not reader.before.keys() <= {number - 1}

    def is_sealed(self, segment: int) -> bool:
        """Returns whether this is the segment that is being read, and all of it stands in a file that no process
        changes.
        """
        reader = self._reader
        return reader is not None and reader.number == segment and reader.alone and reader.sealed

    def close(self) -> None:
        """Closes the segment at which a reading stopped early. A compiled generator closes nothing then."""
        reader = self._reader
        self._reader = None
        if reader is not None:
            reader.close()

    def _find_cut_off(self) -> None:
        """Finds segments that have fewer records than a newer segment says.

        A loss of power may take these records only before the newer segment is synced. Afterwards it is damage. A
        segment that the watermark has not reached says nothing, and what an earlier one said still holds.
        """
        for at, found in enumerate(self.found):
            records = self._before.get(found.number, 0)
            if found.records < records and not found.damaged:
                self.findings.append(
                    f"{found.path} ends after record {found.records}, but {records} were on the device"
                )
                self.found[at] = found._replace(damaged=True)

    @property
    def oldest(self) -> int:
        """The first segment that is needed; 0 when no segment says it."""
        return self._oldest

    def _take_suspects(self, reader: SegmentReader) -> None:
        self.suspects.update(reader.suspects)
        reader.suspects = []

    def _belonging(self, rows: list[Row], segment: int) -> list[Row]:
        """The rows that are part of their keys' histories."""
        whole = self.live.whole
        dead: set[int] = set()
        for row in rows:
            seq, key, kind, length, payload = row
            if kind == HEAD:
                self._belongs(key, FULL, whole_bytes(length), segment)
            elif kind == FULL and key > self.high_water:  # a key that was never seen: most of what a restart reads
                self.high_water = key
                whole(key, segment, whole_bytes(len(payload)))
            else:
                size = whole_bytes(len(payload)) if kind == FULL else row_bytes(len(payload))
                if not self._belongs(key, kind, size, segment):
                    dead.add(seq)
        return [row for row in rows if row[0] not in dead] if dead else rows

    def _belongs(self, key: int, kind: int, size: int, segment: int) -> bool:
        """Returns whether the record is part of a key's history. Without a whole record of the key before it, it is
        dead.
        """
        if key > self.high_water:
            self.high_water = key
        if kind == FULL:
            self.live.whole(key, segment, size)
            if self.orphans:
                self.orphans.pop(key, None)
            return True
        if kind == DELETE and self.suspects:
            self.suspects.discard(key)
        if self.live.segment_of(key):
            if kind == DELETE:
                self.live.delete(key)
                self._deleted.append(key)
            else:
                self.live.change(key, segment, size)
            return True
        if kind == CHANGE:
            self.orphans.setdefault(key, segment)  # dead, unless neither a delete nor a whole record follows
        elif self.orphans.pop(key, 0):
            self._deleted.append(key)
        return False

    def _find_missing(self, first: int, last: int) -> None:
        aside = sum(first <= number <= last for number in aside_numbers(self._directory))
        if aside < last - first + 1:
            if last - first < _MISSING_MAX:  # each of them gets a .missing file when the loss is accepted
                self.missing.append((first, last))
            path = segment_path(self._directory, first)
            more = f", and {last - first} more behind it" if last > first else ""
            self.findings.append(f"{path} is missing{more}")
