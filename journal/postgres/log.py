"""The log in a schema of a PostgreSQL database: what a store needs, where this node leads and where it follows.

This module must not know what a payload means. Rows on their way are the writer's business, tables that of segments.py,
reading that of reader.py. One thread calls it; while one of its methods waits, others may be called.
Invariant: as in journal/log.py. What a SyncPoint has covered is in the database under an epoch that was the last one
then, and the database did not warn of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from mypy_extensions import mypyc_attr

from journal.errors import (
    JournalDamaged,
    JournalFailed,
    JournalForked,
    raise_failure,
)
from journal.log import (
    CHANGE,
    DELETE,
    FULL,
    Facts,
    PayloadOf,
    Record,
    Row,
    SegmentState,
    SyncPoint,
)
from journal.postgres import schema as tables_of
from journal.postgres import sizing
from journal.postgres.compaction import Compaction
from journal.postgres.format import (
    ENTRY,
    LOST,
    PART_BYTES,
    PARTS,
    SEALED,
    TAKEOVER,
    pack,
    record_bytes,
    row_bytes,
)
from journal.postgres.link import ANSWER_S, Link, Refused, Resolver, Waiter, poll
from journal.postgres.place import Place
from journal.postgres.reader import Reader
from journal.postgres.replay import SegmentCount
from journal.postgres.segments import FENCED, Tables, making, repairing
from journal.postgres.writer import CommitPoint, Writer
from journal.shared import SharedLog

PENDING_MAX: Final = 1 << 23
"""With this many bytes on their way changes wait."""
_CLOSE_S: Final = 10.0


@mypyc_attr(allow_interpreted_subclasses=True)
class PostgresLog(SharedLog):
    """open(), exhaust batches(), more() while another node leads; then lead(), start(), append and commit.

    `budget` is the largest size of all segments in bytes. With `accept_damage` what is damaged is left out, and
    repair() notes that. With `synchronous` off a commit does not wait for the database's device.
    """

    def __init__(
        self,
        url: str,
        *,
        segment_bytes: int,
        compact: bool = True,
        budget: int | None = None,
        accept_damage: bool = False,
        synchronous: bool = True,
        answer_s: float = ANSWER_S,
        wait: Waiter = poll,
        resolve: Resolver | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Raises PlaceError."""
        self.place_of = Place(url)
        self.schema = self.place_of.schema
        super().__init__(PART_BYTES, PARTS, budget, log)
        self.safe_after_commit = False
        self.epoch = 0
        self.refuse_puts = False
        self.created = False
        self._link = Link(self.place_of, wait, resolve)
        self._link.answer_s = answer_s
        self._writer = Writer(self._link, self.schema)
        self._tables = Tables(Link(self.place_of, wait), self.schema, log)
        self._tables.fenced = self._was_fenced
        self._compaction = Compaction(self._tables, self._writer, switched_on=compact)
        self._compaction.budget = budget
        self._limit = self._compaction.limit = sizing.segment_limit(segment_bytes, budget)
        self._segment_bytes = segment_bytes
        self._writer.written = self._count_row
        self._reader = Reader(self._link, self.schema, log, accept_damage=accept_damage, synchronous=synchronous)
        self._reading = self._reader.reading
        self.live = self._reading.live
        self._numbers: dict[int, SegmentCount] = {}
        self._batch_bytes = 0
        self._filled = 0  # what the current segment takes, with all that is committed
        self._remembered: list[int] = []

    # --- what the owner sees of the link

    @property
    def place(self) -> int:
        """The number of the last row that was read or is safe."""
        return self._writer.place if self.epoch else self._reading.place

    @property
    def cut(self) -> bool:
        return self._writer.cut

    @property
    def fenced(self) -> bool:
        return self._writer.fenced

    @property
    def wants_write(self) -> bool:
        return self._writer.wants_write

    @property
    def waits_ns(self) -> int:
        return self._writer.sent_ns

    @property
    def waits_for(self) -> str:
        writer = self._writer
        if not writer.sent_ns:
            return ""
        if writer.cut:
            return "a link to the database"
        return "room in the database" if writer.full else "the database's answer to a commit"

    @property
    def on_cut(self) -> Callable[[str], None]:
        return self._writer.on_cut

    @on_cut.setter
    def on_cut(self, heard: Callable[[str], None]) -> None:
        self._writer.on_cut = heard

    @property
    def rewired(self) -> Callable[[], None]:
        return self._writer.rewired

    @rewired.setter
    def rewired(self, heard: Callable[[], None]) -> None:
        self._writer.rewired = heard

    @property
    def fileno(self) -> int:
        return self._link.fileno if self.epoch and not self._writer.cut else -1

    def pump(self) -> None:
        try:
            if self.epoch:
                self._writer.pump()
        except BaseException as error:
            self._fail(error)

    # --- start

    def open(self) -> None:
        link = self._link
        self._reader.connect()
        try:
            if not tables_of.require(link, self.schema):
                raise link.broken(
                    f"there is no log, for schema {self.schema} is not there; bring it back if it was there before, "
                    "and make a new log with `geventstalk cluster init` if there never was one"
                )
            self._writer.identity = tables_of.identity(link, self.schema)
            if self._remembered and self._remembered[0] != self._writer.identity:
                self._log("journal: this is another log than before: a new one was made")
            elif self._remembered:
                link.run(tables_of.raising_floor(self.schema, self._remembered[1]))
            weak = [name for name in ("fsync", "full_page_writes") if link.execute(f"SHOW {name}").rows[0][0] == b"off"]
        except Refused as error:
            link.refuse(error)
        for name in weak:
            self._log(f"journal: the database runs with {name}=off: a loss of power there may cost everything")

    def replay(self) -> Iterator[Record]:
        """Every record that still counts, oldest first."""
        for segment, rows in self.batches():
            for _, key, kind, _, payload in rows:
                yield Record(key, kind, payload, segment)

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        try:
            yield from self._reader.batches()
        except Refused as error:
            self._link.refuse(error)
        self.high_water = self._reading.high_water
        self._tables.made |= self._reader.spare

    def seen(self) -> list[int]:
        identity, link = self._writer.identity, self._link
        return [identity, self.high_water, link.timeline, link.system] if identity else self._remembered

    def remember(self, seen: list[int]) -> None:
        self._remembered = seen
        if seen:
            self._link.timeline, self._link.system = seen[2:]

    # --- following

    def more(self) -> list[tuple[int, list[Row]]]:
        batches = self._reader.more()
        self.high_water = self._reading.high_water
        return batches

    # --- leading

    def lead(self, epoch: int) -> bool:
        reading = self._reading
        if not self._link.up:
            self._reader.relink()
            for _, rows in self.more():
                if rows:
                    raise JournalForked(f"{self.place_of.shown}: another node has written since")
        self._reader.require_epoch(epoch)
        self._skip_lost_keys()
        number = reading.segment
        damaged = bool(reading.damaged)
        seq = reading.place + 1
        flags = TAKEOVER | (SEALED if damaged else 0)
        packed = pack(seq, flags, self.high_water, [])
        schema = self.schema
        try:  # the segment is there, for it was just read; to make sure would be a commit that all clients wait for
            if damaged:
                self._link.run(making(schema, epoch, number + 1))
            answer = self._link.execute(
                f"WITH ok AS (SELECT 1 FROM {schema}.leader WHERE epoch = $1::bigint FOR SHARE) "
                f"INSERT INTO {schema}.seg_{number} "
                f"SELECT $2::bigint, $1::bigint, decode($3, 'hex') FROM ok",
                (str(epoch).encode(), str(seq).encode(), packed.hex().encode()),
            )
        except Refused as error:
            if error.state == FENCED:
                return False
            if error.state == "23505":
                raise JournalForked(f"{self.place_of.shown}: another node has written since") from error
            raise self._link.broken(error) from error
        if answer.changed != 1:
            return False
        if answer.warnings:
            raise self._link.broken(f"the database warns of a commit: {'; '.join(answer.warnings)}")
        reading.take(seq, packed)
        if reading.sealed:
            reading.enter(number + 1)
        self._begin(epoch)
        return True

    def _skip_lost_keys(self) -> None:
        """Gives no key again that a node knew and the database has lost."""
        floor = tables_of.floor(self._link, self.schema)
        if floor > self.high_water:
            self._log(
                f"journal: the database has lost the keys from {self.high_water + 1} to {floor}, which a node knew; "
                f"none of them is given again"
            )
            self.high_water = self._reading.high_water = floor

    def _begin(self, epoch: int) -> None:
        reading, compaction, tables = self._reading, self._compaction, self._tables
        self._writer.begin(epoch, reading.place, reading.head, reading.home)
        compaction.live = self.live
        compaction.segments = reading.segments
        self._numbers = {each.number: each for each in reading.segments}
        compaction.disk_bytes = sum([each.bytes for each in reading.segments])
        self._number = reading.segment
        self._filled = reading.segments[-1].bytes
        self.epoch = epoch
        tables.begin(epoch, self._link.words)
        tables.make(self._number + 1)
        tables.tend()
        self._writer.rewired()

    def start(self) -> None:
        """Logs what the budget is for. lead() has made the log ready."""
        if not self._number:
            self._refuse()
        if self._budget is not None:
            self._log(
                f"journal: of {self._budget} bytes about {sizing.of_budget(self._budget, self._limit)} are for the "
                f"records of jobs, which are larger than their bodies; the rest is for changes, deletes and compaction"
            )

    def repair(self, payload_of: PayloadOf) -> int:
        reading = self._reading
        if not reading.damaged and not reading.orphans:
            return 0
        for segment, first, last in reading.damaged:
            sealed = self._ends_segment(segment, last)
            lost = pack(last, LOST | (SEALED if sealed else 0), self.high_water, [])
            try:
                self._link.run(repairing(self.schema, self.epoch, segment, first, last, lost))
            except Refused as error:
                raise JournalFailed(f"journal: damage cannot be noted: {error}") from error
            self._log(
                f"journal: rows {first} to {last} of segment {segment} are lost; what stood there is in `damaged`"
            )
        for key in sorted(reading.orphans):
            self._batch.append((key, DELETE, b""))
            self._batch_bytes += ENTRY.size
            self.appended += 1
        reading.damaged, reading.orphans = [], set()
        self.commit()
        self._writer.wait_until(self._writer.committed)
        return 0

    def _ends_segment(self, segment: int, last: int) -> bool:
        """Returns whether the row was the last one of a segment that others follow."""
        return any(each.number > segment and each.first == last + 1 for each in self._reading.segments)

    def resume(self, epoch: int) -> bool:
        writer = self._writer
        writer.leave()
        self._tables.begin(epoch, {})
        try:
            self._reader.connect()
            self._reader.require_epoch(epoch)
            self._link.run(making(self.schema, epoch, self._number))
            self._link.run(making(self.schema, epoch, self._number + 1))
            if self._link.execute(f"SELECT to_regclass('{self.schema}.seg_{self._number}')").rows == [(None,)]:
                raise JournalDamaged(f"{self.place_of.shown}: the table of segment {self._number} is missing")
            writer.resume(epoch)
        except Refused as error:
            if error.state == FENCED:
                writer.fence()
                return False
            raise self._link.broken(error) from error
        self.epoch = epoch
        self._tables.begin(epoch, self._link.words)
        self._tables.made.add(self._number + 1)
        return not writer.fenced

    def _was_fenced(self) -> None:
        self._writer.fence()

    # --- every turn

    @property
    def oldest(self) -> int:
        """The number of the oldest segment."""
        segments = self._compaction.segments or self._reading.segments
        return segments[0].number if segments else 0

    @property
    def disk_bytes(self) -> int:
        """Returns what the segments take in the database."""
        return self._compaction.disk_bytes

    @property
    def records_moved(self) -> int:
        """Returns how many records compaction appended anew."""
        return self._compaction.records_moved

    @property
    def short_of_room(self) -> bool:
        return self._writer.full

    def commit(self) -> None:
        failure = self._writer.failure
        if failure is not None:
            self._fail(failure)
        try:
            if self._batch:
                self._commit()
            self._compaction.judge()
        except BaseException as error:
            self._fail(error)

    def _commit(self) -> None:
        batch = self._batch
        if not batch:
            return
        size = self._batch_bytes
        self._batch = []
        self._batch_bytes = 0
        writer = self._writer
        writer.add(batch, size, self._number, self.high_water)
        self.records_written += len(batch)
        self._filled += size
        if self._filled >= self._limit and not self._parts:
            self._rotate()
        writer.send()

    def hold(self, until_ns: int) -> None:
        self._writer.hold_until_ns = until_ns
        if not until_ns:
            self._writer.send()

    def _rotate(self) -> None:
        """The next segment takes over, if it is there. The commit that was added last ends this one."""
        tables, number = self._tables, self._number + 1
        if number not in tables.made:
            tables.tend()
            return
        self._writer.seal()
        tables.made.discard(number)
        tables.make(number + 1)
        count = SegmentCount(number, 0)
        self._numbers[number] = count
        self._compaction.segments.append(count)
        self._number = number
        self._filled = 0
        tables.tend()

    def _rotate_late(self) -> None:
        """The next segment was not there when this one was full, and nothing is written now: an empty row ends it."""
        if self._number + 1 in self._tables.made and self.live.bytes_in(self._number) < self._filled:
            self._writer.add([], 0, self._number, self.high_water)
            self._rotate()
            self._writer.send()

    def _count_row(self, segment: int, seq: int, size: int, records: int) -> None:
        count = self._numbers[segment]
        if not count.first:
            count.first = seq
        taken = row_bytes(size)
        count.bytes += taken
        count.records += records
        self._compaction.disk_bytes += taken
        if segment == self._number:
            self._filled += taken - size

    def sync_point(self) -> SyncPoint | None:
        writer = self._writer
        if writer.pointed == writer.committed:
            return None
        writer.pointed = writer.committed
        return CommitPoint(writer, writer.committed)

    # --- failure

    def _fail(self, error: BaseException) -> NoReturn:
        """Ends the log: the batch is dropped, and append() and commit() raise from now on."""
        self._number = 0
        self._batch = []
        self._tables.close()
        if self._writer.failure is None and isinstance(error, Exception):
            try:
                raise_failure(error)
            except JournalFailed as failure:
                self._writer.fail(failure)
        raise_failure(error)

    def _refuse(self) -> NoReturn:
        if self._writer.failure is not None:
            raise self._writer.failure
        raise AssertionError("the journal is not started")

    # --- room

    def admits(self, size: int) -> bool:
        if self.refuse_puts or self._writer.full or self._tables.full:
            return False
        if self._budget is None:
            return True
        need = sizing.of_put(size)
        if self._slack < need:
            self._slack = sizing.granted(self._left_for_puts(), need, self._limit)
        if self._slack < need or self._is_over():
            self._say_refusing(True)
            return False
        self._slack -= need
        return True

    def _is_over(self) -> bool:
        """Returns whether the segments take all of the budget because another session reads the oldest."""
        assert self._budget is not None
        return self.disk_bytes + self._writer.pending_bytes > self._budget - self._limit

    def _left_for_puts(self) -> int:
        assert self._budget is not None
        return sizing.left_for_puts(self._budget, self._limit, self.live.total_bytes, self.live.keys)

    def _capacity(self) -> int:
        assert self._budget is not None
        return self._budget

    # --- keeping pace

    @property
    def behind(self) -> bool:
        return self._writer.pending_bytes > PENDING_MAX or self._compaction.behind

    def catch_up(self, payload_of: PayloadOf) -> bool:
        if not self.behind:
            return False
        self.tend()
        moves = self.wants_compaction()
        if moves:
            self.compact_slice(payload_of)
        elif not self._tables.busy:
            self._compaction.let_go()
        return moves

    # --- compaction

    @property
    def settling(self) -> bool:
        return self._tables.busy or self._writer.sent_ns > 0 or self._compaction.settling

    def tend(self) -> None:
        try:
            writer = self._writer
            if writer.failure is not None:
                raise writer.failure
            if not self._number or writer.cut or writer.fenced:
                return
            writer.tend()
            self._compaction.tend()
            self._tables.tend()
            if self._filled >= self._limit and not self._batch and not self._parts and not writer.pending_bytes:
                self._rotate_late()
            if self._refusing and self._budget is not None:
                self._say_refusing(self._left_for_puts() < self._budget // 64 or self._is_over())
        except BaseException as error:
            self._fail(error)

    def wants_compaction(self) -> bool:
        return self._number > 0 and self._compaction.is_wanted()

    def compact_slice(self, payload_of: PayloadOf) -> None:
        try:
            self._compaction.move_some(payload_of, self.append, self._commit)
        except BaseException as error:
            self._fail(error)

    # --- numbers and end

    def facts(self) -> Facts:
        segments = self._reading.segments
        return Facts(
            oldest=self.oldest,
            current=self._number or (segments[-1].number if segments else 0),
            segment_bytes=self._segment_bytes,
            records_written=self.records_written,
            records_moved=self.records_moved,
            disk_bytes=sum([each.bytes for each in segments]) + self._writer.pending_bytes,
            live_bytes=self.live.total_bytes,
        )

    def segments(self, most: int) -> list[SegmentState]:
        found = [
            SegmentState(
                each.number,
                "current" if each.number == self._number else "sealed",
                each.bytes,
                self.live.bytes_in(each.number),
                each.records,
            )
            for each in self._reading.segments[-most:]
        ]
        if self._number + 1 in self._tables.made:
            found.append(SegmentState(self._number + 1, "spare", 0, 0, 0))
        return found[-most:]

    def close(self) -> None:
        try:
            if self._number:
                self.commit()
                self._writer.wait_until(self._writer.committed, _CLOSE_S)
        except BaseException as error:
            self.abandon()
            raise_failure(error)
        self.abandon()

    def abandon(self) -> None:
        self._number = 0
        self._batch = []
        self._tables.close()
        self._writer.leave()

    # --- what a batch takes

    def _takes(self, size: int) -> int:
        return record_bytes(size)

    def _account(self, key: int, kind: int, size: int, segment: int) -> None:
        takes = record_bytes(size)
        if size > PART_BYTES:
            takes += (size - 1) // PART_BYTES * ENTRY.size + PARTS.size
        total = self._batch_bytes + takes
        if kind == FULL:
            self.live.whole(key, segment, takes)
        elif kind == CHANGE:
            self.live.change(key, segment, takes)
        else:
            assert kind == DELETE
            self.live.delete(key)
        self._batch_bytes = total

    def _count_large(self, size: int) -> None:
        self._batch_bytes += record_bytes(size)

    def _count_moved(self) -> None:
        self._compaction.records_moved += 1
