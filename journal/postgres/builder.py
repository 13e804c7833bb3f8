"""Writes to a log in a database in one transaction: a new log, what goes behind an old one, or what repairs one.

This module must not know what a payload means. The caller has the log to itself. Invariant: what is written is
there as a whole when finish() has returned, and nothing of it before, whatever ends this process or the database.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from journal.errors import JournalFailed, JournalFull, JournalLocked, JournalUnreachable
from journal.log import CHANGE, DELETE, FULL
from journal.postgres.exclusive import Exclusive
from journal.postgres.format import (
    HEAD_BYTES,
    LOST,
    PART,
    PART_BYTES,
    ROW_BYTES,
    ROW_RECORDS,
    SEALED,
    TAKEOVER,
    Entry,
    pack,
    record_bytes,
    row_bytes,
    split,
)
from journal.postgres.link import Link, Refused
from journal.postgres.place import Place
from journal.postgres.schema import SEGMENT, finishing
from journal.postgres.segments import FENCED, repairing
from journal.postgres.survey import PostgresSurvey
from journal.tools import Builder

SEGMENT_BYTES: Final = 10485760
"""The size of segments that tools write: the default of a server's -s."""
_ANSWER_S: Final = 60.0
"""A statement may take this long: a large commit waits for the replica."""
_SETTINGS: Final = (
    "SET idle_in_transaction_session_timeout = 0;"
    "SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
    " WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false)"
)


class PostgresBuilder(Builder):
    """See journal/tools.py for what each method promises. Making this object asks nothing of the database."""

    def __init__(
        self, place: Place, exclusive: Exclusive, high_water: int = 0, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.place = place
        self.high_water = high_water
        self._exclusive = exclusive
        self._segment_bytes = segment_bytes
        self._link: Link | None = None
        self._batch: list[Entry] = []
        self._batch_bytes = 0
        self._seq = 0  # the last row
        self._number = 0  # the segment of the next row
        self._filled = 0  # what it takes
        self._flags = TAKEOVER
        self._noted = -1  # the high water in the last row

    def append(self, key: int, payload: bytes, change: bytes | None = None) -> None:
        if len(payload) > PART_BYTES:
            for entry in split(key, payload):
                self._add(entry)
        else:
            self._add((key, FULL, payload))
        if change is not None:
            self._add((key, CHANGE, change))
        self.high_water = max(self.high_water, key)

    def delete(self, key: int) -> None:
        """Adds a record that a key is gone."""
        self._add((key, DELETE, b""))

    def finish(self) -> None:
        self._write()
        if self._noted != self.high_water:
            self._write_row([])
        link = self._begun()
        self._run(finishing(self.place.schema))
        self._run("COMMIT")
        if link.warnings:
            raise JournalFailed(f"{self.place.shown}: the database warns of the commit: {link.warnings[0]}")
        link.close()

    def discard(self) -> None:
        if self._link is not None:
            if self._link.up:
                with suppress(Refused, JournalUnreachable):
                    self._link.run("ROLLBACK")
            self._link.close()

    def set_aside(self, segment: int, first: int, last: int, sealed: bool) -> None:
        """Puts a row that says so in place of damaged or missing rows. The rows that are there are kept elsewhere."""
        self._begun()
        lost = pack(last, LOST | (SEALED if sealed else 0), self.high_water, [])
        self._run(repairing(self.place.schema, self._exclusive.epoch, segment, first, last, lost))

    # --- rows

    def _add(self, entry: Entry) -> None:
        size = record_bytes(len(entry[2]))
        if self._batch and (self._batch_bytes + size > ROW_BYTES or len(self._batch) >= ROW_RECORDS):
            self._write()
        self._batch.append(entry)
        self._batch_bytes += size

    def _write(self) -> None:
        if self._batch:
            batch, self._batch, self._batch_bytes = self._batch, [], 0
            self._write_row(batch)

    def _write_row(self, entries: list[Entry]) -> None:
        link = self._begun()
        self._seq += 1
        flags = self._flags
        self._filled += row_bytes(HEAD_BYTES + sum(record_bytes(len(payload)) for _, _, payload in entries))
        if self._filled >= self._segment_bytes and not (entries and entries[-1][1] == PART):
            flags |= SEALED
        packed = pack(self._seq, flags, self.high_water, entries)
        values = [b"%d" % self._seq, b"%d" % self._exclusive.epoch, b"\\x" + packed.hex().encode()]
        schema = self.place.schema
        try:
            link.execute(f"INSERT INTO {schema}.seg_{self._number} VALUES($1, $2, $3)", values, seconds=_ANSWER_S)
        except Refused as error:
            raise self._failed(error) from error
        self._noted = self.high_water
        self._flags = 0
        if flags & SEALED:
            self._number += 1
            self._filled = 0
            self._make_segment()

    # --- the transaction

    def _begun(self) -> Link:
        if self._link is None:
            self._link = Link(self.place)
            self._link.connect(_SETTINGS)
            self._run("BEGIN")
            mine = f"epoch = {self._exclusive.epoch} AND incarnation = '{self._exclusive.me.incarnation}'"
            if not self._ask(f"SELECT 1 FROM {self.place.schema}.leader WHERE {mine} FOR SHARE"):
                raise JournalLocked(f"{self.place.shown}: a node has taken the lead meanwhile: stop all nodes first")
            self._find_end()
        return self._link

    def _find_end(self) -> None:
        schema = self.place.schema
        segments = self._ask(f"SELECT no, first_seq FROM {schema}.segment ORDER BY no DESC")
        flags = 0
        for number, first in segments:
            self._number = int(number or 0)
            self._seq = max(0, int(first or 0) - 1)
            head = f"SELECT seq, encode(substr(packed, 1, {HEAD_BYTES}), 'hex') FROM {schema}.seg_{self._number}"
            last = self._ask(f"{head} ORDER BY seq DESC LIMIT 1")
            if last:
                self._seq = int(last[0][0] or 0)
                found = bytes.fromhex((last[0][1] or b"").decode())
                if len(found) == HEAD_BYTES:
                    flags = found[1]
                    self.high_water = max(self.high_water, int.from_bytes(found[-8:], "big"))
                break
        if flags & SEALED:
            self._number += 1
        if not segments:
            self._number = 1
        self._make_segment()
        size = f"SELECT coalesce(sum(octet_length(packed)), 0) FROM {schema}.seg_{self._number}"
        self._filled = int(self._ask(size)[0][0] or 0)

    def _make_segment(self) -> None:
        schema = self.place.schema
        if not self._ask(f"SELECT 1 FROM {schema}.segment WHERE no = {self._number}"):
            self._run(SEGMENT.format(schema, self._number, 0))

    def _ask(self, sql: str) -> list[tuple[bytes | None, ...]]:
        assert self._link is not None
        try:
            return self._link.execute(sql, seconds=_ANSWER_S).rows
        except Refused as error:
            raise self._failed(error) from error

    def _run(self, sql: str) -> None:
        assert self._link is not None
        try:
            self._link.run(sql, _ANSWER_S)
        except Refused as error:
            raise self._failed(error) from error

    def _failed(self, error: Refused) -> JournalFailed | JournalFull | JournalLocked:
        text = f"{self.place.shown}: {error}"
        if error.state in (FENCED, "42501"):
            return JournalLocked(text)
        return JournalFull(text) if error.state == "53100" else JournalFailed(text)


def mend(survey: PostgresSurvey, builder: PostgresBuilder) -> list[tuple[str, str]]:
    """Sets rows aside that are damaged, and writes anew what is intact in them, all at once.

    Rows that are sound stay as they are. Returns old and new names of what was set aside. Raises a JournalError.
    """
    try:
        for _ in survey.read():
            pass
        reading = survey.reading
        moving, dead = _at_risk(survey)
        if survey.spoilt:
            for record, change in survey.live_records():
                if record.key in moving:
                    builder.append(record.key, record.payload, change)
        for key in sorted(dead | reading.orphans | survey.strange):
            builder.delete(key)
        builder.high_water = max(builder.high_water, survey.used_keys)
        aside = list(reading.damaged) + [(segment, seq, seq) for segment, seq in survey.spoilt]
        for segment, first, last in sorted(aside):
            sealed = any(each.number > segment and each.first == last + 1 for each in reading.segments)
            builder.set_aside(segment, first, last, sealed)
        builder.finish()
    except BaseException:
        builder.discard()
        raise
    name = f"{builder.place.schema}.damaged"
    return [
        (f"row {first}" + (f" to {last}" if last > first else "") + f" of segment {segment}", f"rows of table {name}")
        for segment, first, last in sorted(aside)
    ]


def _at_risk(survey: PostgresSurvey) -> tuple[set[int], set[int]]:
    """Keys that need a row with a record that is not its owner's, and those that would come back without that row."""
    wholes: set[int] = set()
    changes: set[int] = set()
    dead: set[int] = set()
    if not survey.spoilt:
        return wholes, dead
    for segment, (seq, key, kind, _, _) in survey.rows():
        risky = (segment, seq) in survey.spoilt
        if kind != CHANGE:
            changes.discard(key)
            dead.discard(key)
            (wholes.add if risky and kind == FULL else wholes.discard)(key)
            if risky and kind == DELETE:
                dead.add(key)
        else:
            (changes.add if risky else changes.discard)(key)
    return wholes | changes, dead
