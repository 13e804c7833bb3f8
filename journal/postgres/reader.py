"""Rows come out of the database: all of them at a start, and those that another node has written since.

This module must not write a row, and must not know what a payload means. What the rows say is the business of
replay.py.
Invariant: rows are given in their order. Over a new link a log goes on only when the row that was read last is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from journal.errors import JournalDamaged, JournalForked, JournalUnreachable
from journal.log import Row
from journal.parts import KEY_MAX, LOST_KEYS
from journal.postgres.format import HEAD_BYTES
from journal.postgres.link import Link, Refused
from journal.postgres.replay import Reading

_CHUNK_BYTES: Final = 1 << 22
_CHUNK_ROWS: Final = 4096
_TRIES: Final = 10


class Reader:
    """connect(), exhaust batches(), then more(). What was found is in `reading`.

    With `accept_damage` what is damaged is left out. With `synchronous` off a commit over this link does not wait for
    the database's device.
    """

    def __init__(
        self, link: Link, schema: str, log: Callable[[str], None], *, accept_damage: bool, synchronous: bool
    ) -> None:
        self.link = link
        self.reading = Reading()
        self.spare: set[int] = set()
        """Segments that the start found and that hold nothing: they were made ahead."""
        self._schema = schema
        self._log = log
        self._accept_damage = accept_damage
        self._synchronous = synchronous

    def connect(self) -> None:
        """Waits. Raises JournalUnreachable."""
        wanted = "off"
        if self._synchronous:  # a database that waits for more goes on to do so
            wanted = "CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END"
            self.link.connect(f"SELECT set_config('synchronous_commit', {wanted}, false)")
        else:
            self.link.connect("SET synchronous_commit = off")

    # --- the start

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        """See Log.batches()."""
        reading = self.reading
        link = self.link
        if not link.up:
            self.connect()
        numbers = self._hold_segments()
        if numbers and numbers[0][1] > 1:
            reading.begin_at(numbers[0][1])
        for number, _ in numbers:
            reading.enter(number)
            while True:
                chunk = self._chunk(number)
                for seq, packed in chunk:
                    rows = reading.take(seq, packed)
                    if rows:
                        yield number, rows
                if not chunk:
                    break
        link.run("COMMIT")
        reading.end()
        self._leave_empty()
        self._judge_damage()

    def _hold_segments(self) -> list[tuple[int, int]]:
        """The segments and what they say of their first rows. None of them is dropped before the transaction ends."""
        link, schema = self.link, self._schema
        for _ in range(_TRIES):
            link.run("BEGIN")
            answer = link.execute(f"SELECT no, first_seq FROM {schema}.segment ORDER BY no")
            numbers = [(int(row[0] or 0), int(row[1] or 0)) for row in answer.rows]
            names = ", ".join([f"{schema}.seg_{number}" for number, _ in numbers])
            if not names:
                raise JournalDamaged(f"{link.shown}: there is no segment")
            try:
                link.run(f"LOCK TABLE {names} IN ACCESS SHARE MODE")
                return numbers
            except Refused as error:
                link.run("ROLLBACK")
                if error.state != "42P01" or not self._is_there():
                    raise
                sql = "SELECT tablename FROM pg_tables WHERE schemaname = $1"
                there = {row[0] for row in link.execute(sql, (schema.encode(),)).rows}
                lacking = [number for number, _ in numbers if f"seg_{number}".encode() not in there]
        raise JournalDamaged(f"{link.shown}: the table of segment {lacking[0]} is missing")

    def _leave_empty(self) -> None:
        """Segments that were made ahead are not those that the next row is written to."""
        reading = self.reading
        while len(reading.segments) > 1 and not reading.segments[-1].first:
            self.spare.add(reading.segments.pop().number)
        if reading.sealed:
            reading.enter(reading.segments[-1].number + 1)
            self.spare.discard(reading.segment)

    def _judge_damage(self) -> None:
        reading = self.reading
        for finding in reading.findings:
            self._log(f"journal: {finding}")
        if not reading.findings:
            return
        if not self._accept_damage:
            raise JournalDamaged(
                f"the journal at {self.link.shown} is damaged ({len(reading.findings)} findings, "
                f"{reading.live.keys} jobs intact); nothing was changed, --accept-damage starts without what is lost"
            )
        # A row that is lost may have had later ones.
        reading.high_water = min(reading.high_water + LOST_KEYS, KEY_MAX)

    # --- what another node writes

    def more(self) -> list[tuple[int, list[Row]]]:
        """See SharedLog.more()."""
        reading = self.reading
        if not self.link.up:
            self.relink()
        number = reading.segment
        try:
            chunk = self._chunk(number)
        except Refused as error:
            if error.state == "42P01" and self._is_there():
                raise JournalForked(
                    f"{self.link.shown}: segment {number} was dropped before this node had read it"
                ) from error
            raise self.link.broken(error) from error
        findings = len(reading.findings)
        batches: list[tuple[int, list[Row]]] = []
        for seq, packed in chunk:
            batches.append((number, reading.take(seq, packed)))
        if reading.sealed:
            reading.enter(number + 1)
        if len(reading.findings) > findings:
            raise JournalDamaged("; ".join(reading.findings[findings:]))
        return batches

    def relink(self) -> None:
        """A new link. Waits. Raises JournalForked when it leads to a log that lacks what was read."""
        self.connect()
        reading = self.reading
        if not reading.place:
            return
        try:
            answer = self.link.execute(
                f"SELECT substr(packed, 1, {HEAD_BYTES}) FROM {self._schema}.seg_{reading.home} WHERE seq = $1",
                (str(reading.place).encode(),),
                binary=True,
            )
        except Refused as error:
            if error.passing or not self._is_there():
                raise self.link.broken(error) from error
            if error.state == "42P01" and reading.home < reading.segment:
                return
            raise JournalForked(f"{self.link.shown}: the row that was read last cannot be read: {error}") from error
        if not answer.rows or answer.rows[0][0] != reading.head:
            raise JournalForked(f"{self.link.shown}: row {reading.place} is not there any more, which was read")

    def _is_there(self) -> bool:
        """Returns whether the schema is. It may have been renamed, or this is another database."""
        try:
            return self.link.execute(f"SELECT to_regclass('{self._schema}.segment') IS NOT NULL").rows == [(b"t",)]
        except Refused as error:
            raise self.link.broken(error) from error

    def require_epoch(self, epoch: int) -> None:
        """Raises JournalUnreachable when this database has not heard of an epoch: a primary that was left behind."""
        answer = self.link.execute(f"SELECT epoch FROM {self._schema}.leader")
        if not answer.rows or int(answer.rows[0][0] or 0) < epoch:
            self.link.close()
            raise JournalUnreachable(f"{self.link.shown}: a primary that was left behind: it knows no epoch {epoch}")

    def _chunk(self, number: int) -> list[tuple[int, bytes]]:
        """The rows of a segment behind the last one that was taken, some megabytes at the most."""
        sql = (
            f"SELECT seq, packed FROM (SELECT seq, packed, sum(octet_length(packed)) OVER (ORDER BY seq) "
            f"- octet_length(packed) AS before FROM (SELECT seq, packed FROM {self._schema}.seg_{number} "
            f"WHERE seq > $1::bigint ORDER BY seq LIMIT {_CHUNK_ROWS}) a) b WHERE before < {_CHUNK_BYTES} ORDER BY seq"
        )
        answer = self.link.execute_again(sql, (str(self.reading.place).encode(),), binary=True)
        return [(int.from_bytes(seq or b"", "big"), packed or b"") for seq, packed in answer.rows]
