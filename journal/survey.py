"""What surveys of all kinds of logs share: which records are their owner's, and which of them are live.

This module must not know where records come from: a derived class reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from journal.liveness import Liveness
from journal.log import CHANGE, FULL, Record
from journal.parts import KEY_MAX, LOST_KEYS
from journal.tools import Examine, Survey


class ExaminedSurvey(Survey):
    """`examine` raises ValueError for a record that its owner does not write."""

    def __init__(self, examine: Examine) -> None:
        self.findings = []
        self.notes = []
        self.segments = []
        self.keys = 0
        self.high_water = 0
        self.lost = []
        self.strange: set[int] = set()
        """Keys whose last whole record is none that its owner writes."""
        self._examine = examine
        self._unsound: list[str] = []  # findings about such records

    @property
    def _live(self) -> Liveness:
        """The live records of the last reading."""
        raise NotImplementedError

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
        for at, record in self._read():
            if record.kind == FULL:
                wholes[record.key] = at
                changes.pop(record.key, None)
            elif record.kind == CHANGE:
                changes[record.key] = record.payload
            else:
                wholes.pop(record.key, None)
                changes.pop(record.key, None)
        self.keys = len(wholes)
        for at, record in enumerate(self._records_again()):
            if record.kind == FULL and wholes.get(record.key) == at:
                yield record, changes.get(record.key)

    def _read(self) -> Iterator[tuple[int, Record]]:
        """Yields the sound records by their numbers in the reading, and then completes the facts."""
        raise NotImplementedError

    def _records_again(self) -> Iterable[Record]:
        """Returns the records of another reading."""
        raise NotImplementedError

    def _sound(self, records: Iterable[Record], spoils: Callable[[Record], object]) -> Iterator[tuple[int, Record]]:
        """Yields the records that their owner writes. `spoils` is called with each other one."""
        lost = self.strange = set()
        self._unsound = []
        for at, record in enumerate(records):
            try:
                self._examine(record)
            except ValueError as error:
                spoils(record)
                self._unsound.append(f"segment {record.segment}: a record of job {record.key} is not a job's: {error}")
                if record.kind == FULL:
                    lost.add(record.key)
                continue
            if record.kind != CHANGE:
                lost.discard(record.key)
            elif record.key in lost:
                continue
            yield at, record
