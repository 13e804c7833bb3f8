"""One reading of the whole log in a database: what is wrong with it, and which records are live.

This module must not know what a payload means. It reads in one transaction of its own, beside nodes that write: what it
sees is the log at the moment in which it began. No segment is dropped meanwhile, so the log may grow.
Invariant: it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from journal.errors import JournalDamaged, JournalFailed, JournalLocked
from journal.liveness import Liveness
from journal.log import CHANGE, DELETE, FULL, Record, Row
from journal.postgres import schema as tables
from journal.postgres.format import LAST, PART, PARTS, Entry
from journal.postgres.link import Link, Refused
from journal.postgres.place import Place
from journal.postgres.replay import Reading
from journal.survey import ExaminedSurvey
from journal.tools import Examine, SegmentFacts

_CHUNK_BYTES: Final = 1 << 22
_CHUNK_ROWS: Final = 4096
_ATTEMPTS: Final = 100
"""The attempts to hold all segments at once, while a node drops and makes some."""
_ANSWER_S: Final = 60.0
SETTINGS: Final = "SET idle_in_transaction_session_timeout = '1h'"
"""The reader of the output may be slow. A reader that stops for good may not hold up the nodes for ever."""


@contextmanager
def saying(place: Place) -> Iterator[None]:
    """A refusal within becomes an error for the operator: that this user may not, or what the database says."""
    try:
        yield
    except Refused as error:
        raise (JournalLocked if error.state == "42501" else JournalFailed)(f"{place.shown}: {error}") from error


def linked(place: Place, settings: str = SETTINGS) -> Link:
    """A link to a schema of a version that is known. Raises JournalLocked when there is none, and as Link.connect()."""
    link = Link(place)
    try:
        with saying(place):
            link.connect(settings)
            if not tables.require(link, place.schema):
                raise JournalLocked(f"{place.shown} has no journal in it: schema {place.schema} is not there")
    except BaseException:
        link.close()
        raise
    return link


class Snapshot:
    """The rows of all segments at one moment. May be read several times. Holds a connection until close()."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._link = linked(place)
        self.segments: list[tuple[int, int]] = []
        """Number and first row, as far as a segment says that."""
        try:
            with saying(place):
                self._hold()
        except BaseException:
            self.close()
            raise

    def _hold(self) -> None:
        link, schema = self._link, self.place.schema
        said = ""
        for _ in range(_ATTEMPTS):
            names = [f"{schema}.seg_{number}" for number, _ in self._list()]
            link.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                # Locks come before the first question: only then do they hold what the questions see.
                if names:
                    link.run(f"LOCK TABLE {', '.join(names)} IN ACCESS SHARE MODE", _ANSWER_S)
                self.segments = self._list()
                if {f"{schema}.seg_{number}" for number, _ in self.segments} <= set(names):
                    return
            except Refused as error:
                if error.state != "42P01":
                    raise
                said = str(error)
            link.run("ROLLBACK")
        raise JournalDamaged(f"{self.place.shown}: {said or 'the segments change faster than they can be held'}")

    def _list(self) -> list[tuple[int, int]]:
        rows = self._link.execute(f"SELECT no, first_seq FROM {self.place.schema}.segment ORDER BY no").rows
        return [(int(number or 0), int(first or 0)) for number, first in rows]

    def rows(self, number: int) -> Iterator[tuple[int, bytes]]:
        """The rows of a segment in their order, some megabytes at a time. Raises JournalDamaged."""
        sql = (
            f"SELECT seq, packed FROM (SELECT seq, packed, sum(octet_length(packed)) OVER (ORDER BY seq) "
            f"- octet_length(packed) AS before FROM (SELECT seq, packed FROM {self.place.schema}.seg_{number} "
            f"WHERE seq > $1::bigint ORDER BY seq LIMIT {_CHUNK_ROWS}) a) b WHERE before < {_CHUNK_BYTES} ORDER BY seq"
        )
        last = -1
        while True:
            try:
                answer = self._link.execute_again(sql, (b"%d" % last,), binary=True)
            except Refused as error:
                raise JournalDamaged(f"{self.place.shown}: segment {number} cannot be read: {error}") from error
            if not answer.rows:
                return
            for seq, packed in answer.rows:
                last = int.from_bytes(seq or b"", "big", signed=True)
                yield last, packed or b""

    def take_all(self, reading: Reading) -> Iterator[tuple[int, list[Row]]]:
        """Has all rows taken. Yields each segment's number with the records that count."""
        if self.segments and self.segments[0][1] > 1:
            reading.begin_at(self.segments[0][1])
        for number, _ in self.segments:
            reading.enter(number)
            for seq, packed in self.rows(number):
                yield number, reading.take(seq, packed)
        reading.end()

    def count_aside(self) -> int:
        """Returns how many rows a repair has set aside."""
        schema = self.place.schema
        with saying(self.place):
            return self._count(f"{schema}.damaged")

    def _count(self, table: str) -> int:
        if self._link.execute(f"SELECT to_regclass('{table}') IS NULL").rows[0][0] == b"t":
            return 0
        return int(self._link.execute(f"SELECT count(*) FROM {table}").rows[0][0] or 0)

    def close(self) -> None:
        """Lets the segments go."""
        self._link.close()


class PostgresSurvey(ExaminedSurvey):
    """A survey of a database's log. See journal/tools.py for what each method promises."""

    def __init__(self, place: Place, examine: Examine) -> None:
        super().__init__(examine)
        self.reading = Reading()
        """The facts about the rows, once all were read."""
        self.spoilt: set[tuple[int, int]] = set()
        """Segments and numbers of rows with a record that is none that its owner writes."""
        self._seq = 0  # the row of the record that was read last
        self._snapshot = Snapshot(place)

    @property
    def _live(self) -> Liveness:
        return self.reading.live

    def _records_again(self) -> Iterator[Record]:
        return self._records(Reading())

    def close(self) -> None:
        self._snapshot.close()

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Every record that counts, with its segment and its row, once more."""
        for number, rows in self._snapshot.take_all(Reading()):
            for row in rows:
                yield number, row

    def _records(self, reading: Reading) -> Iterator[Record]:
        for number, rows in self._snapshot.take_all(reading):
            for seq, key, kind, _, payload in rows:
                self._seq = seq
                yield Record(key, kind, payload, number)

    def _read(self) -> Iterator[tuple[int, Record]]:
        reading = self.reading = Reading()
        self.spoilt = set()
        yield from self._sound(self._records(reading), lambda record: self.spoilt.add((record.segment, self._seq)))
        lost = self.strange
        self.findings = reading.findings + self._unsound
        self.high_water = reading.high_water
        self.keys = reading.live.keys - len(lost)
        self.lost = sorted(reading.orphans | lost)
        damaged = {number for number, _ in self.spoilt}.union(number for number, _, _ in reading.damaged)
        self.segments = [
            SegmentFacts(
                each.number, each.records, each.bytes, reading.live.bytes_in(each.number), each.number in damaged
            )
            for each in reading.segments
        ]
        aside = self._snapshot.count_aside()
        self.notes = [f"table damaged has {aside} rows that were set aside"] if aside else []


class _Everything(Reading):
    """Gives back every record, also those that do not count any more."""

    def __init__(self) -> None:
        super().__init__()
        self._large: list[bytes] = []
        self._large_key = 0

    def _belonging(self, seq: int, entries: list[Entry], segment: int) -> list[Row]:
        rows: list[Row] = []
        for key, kind, payload in entries:
            if kind in (FULL, CHANGE, DELETE):
                rows.append((seq, key, kind, 0, payload))
            elif kind == PART:
                if key != self._large_key:
                    self._large, self._large_key = [], key
                self._large.append(payload)
            elif kind == LAST:
                parts = self._large if key == self._large_key else []
                self._large, self._large_key = [], 0
                count = int.from_bytes(payload[: PARTS.size], "big")
                if count <= len(parts):
                    whole = b"".join([*parts[len(parts) - count :], payload[PARTS.size :]])
                    rows.append((seq, key, FULL, 0, whole))
        return rows


def every_record(place: Place, complain: Callable[[str], None]) -> Iterator[tuple[int, Record]]:
    """Each intact record, also dead ones, with the number of its row, which several records may share."""
    snapshot = Snapshot(place)
    try:
        reading = _Everything()
        told = 0
        try:
            for number, rows in snapshot.take_all(reading):
                for finding in reading.findings[told:]:
                    complain(finding)
                told = len(reading.findings)
                for seq, key, kind, _, payload in rows:
                    yield seq, Record(key, kind, payload, number)
        except JournalDamaged as error:
            complain(str(error))
        for finding in reading.findings[told:]:
            complain(finding)
    finally:
        snapshot.close()


def is_blank(place: Place) -> bool:
    """Returns whether no key was ever written to the log that is there."""
    snapshot = Snapshot(place)
    try:
        reading = _Everything()
        return not any(rows or reading.high_water or reading.findings for _, rows in snapshot.take_all(reading))
    except JournalDamaged:
        return False
    finally:
        snapshot.close()
