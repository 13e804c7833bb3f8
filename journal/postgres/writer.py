"""Rows on their way to the database: one statement at a time, while the commits behind it gather to the next row.

This module must not know keys nor what a record is for. It never waits but in resume(). Invariant: a commit is safe
when a row at or behind its last one was written under this epoch and the database said so without any warning. A row
whose answer is not known is kept until that is known, and nothing is sent behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr
from psycopg import pq
from psycopg.errors import Error as PsycopgError

from journal.errors import JournalFailed, JournalForked, JournalUnreachable
from journal.log import SyncPoint
from journal.postgres.format import HEAD_BYTES, MORE, ROW_BYTES, ROW_RECORDS, SEALED, Entry, pack, record_bytes
from journal.postgres.link import GONE, RELINK, UNREACHABLE, Link, Refused, finish, refusal

_OK: Final = int(pq.ExecStatus.COMMAND_OK)
_BINARY: Final = (1, 1, 1, 1, 1)
_RETRY_S: Final = 0.1


class Load:
    """Commits of one segment that gather to rows."""

    __slots__ = ("bytes", "entries", "high_water", "last", "segment", "upto")

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.entries: list[Entry] = []
        self.bytes = 0
        self.high_water = 0
        self.upto = 0  # the number of its last commit
        self.last = False  # whether its segment ends with it


class Flight:
    """A row that is not safe yet. When it is, commits up to `upto` are."""

    __slots__ = ("packed", "records", "segment", "seq", "size", "upto")

    def __init__(self, seq: int, segment: int, packed: bytes, records: int, size: int, upto: int) -> None:
        self.seq = seq
        self.segment = segment
        self.packed = packed
        self.records = records
        self.size = size
        self.upto = upto


@mypyc_attr(allow_interpreted_subclasses=True)
class CommitPoint(SyncPoint):
    """Covers the commits up to a number."""

    def __init__(self, writer: Writer, upto: int) -> None:
        self.error: BaseException | None = None
        self._writer = writer
        self.upto = upto
        self.over: Callable[[], None] | None = None

    def begin(self, over: Callable[[], None]) -> bool:
        self.over = over
        self._writer.await_point(self)
        return True

    def run(self) -> None:
        self._writer.wait_until(self.upto)


@mypyc_attr(allow_interpreted_subclasses=True)
class Writer:
    """Takes commits of a leading node to the database."""

    def __init__(self, link: Link, schema: str) -> None:
        self.link = link
        self.epoch = 0
        self.identity = 0  # of the log, see schema.py
        self.place = 0  # the last row that is safe
        self.committed = 0
        self.pointed = 0  # up to here some SyncPoint covers them
        self.safe = 0  # how many of the commits are safe
        self.pending_bytes = 0
        self.cut = False
        self.fenced = False
        self.full = False  # the database has no room
        self.failure: JournalFailed | None = None
        self.sent_ns = 0  # when the oldest row was sent last; 0: none is under way
        self.hold_until_ns = 0  # until then no new row begins
        self.wants_write = False
        self.on_cut: Callable[[str], None] = _hear_nothing
        self.rewired: Callable[[], None] = _do_nothing
        self.written: Callable[[int, int, int, int], None] = _count_nothing
        """Hears of each row that is safe: its segment, number, packed bytes and records."""
        self._schema = schema
        self._loads: deque[Load] = deque()
        self._load: Load | None = None  # of which rows are being sent
        self._at = 0  # how many of its records are in rows
        self._seq = 0  # the last row that was made
        self._flights: list[Flight] = []
        self._sent = False  # whether a statement is under way
        self._preparing = False
        self._prepared = 0  # the segment whose insert the session knows
        self._result: pq.abc.PGresult | None = None
        self._retry_s = 0.0  # when the row is sent again; 0: nothing to be sent again
        self._points: deque[CommitPoint] = deque()
        self._epoch_bytes = b""
        self._head = b""  # how the last safe row begins
        self._home = 0  # its segment

    # --- the beginning

    def begin(self, epoch: int, place: int, head: bytes, home: int) -> None:
        """The row at `place` was written under this epoch, and is safe."""
        self.epoch = epoch
        self._epoch_bytes = epoch.to_bytes(8, "big")
        self.place = self._seq = place
        self._head = head
        self._home = home

    @property
    def next_seq(self) -> int:
        """The number of the next row that is made."""
        return self._seq + 1

    # --- commits

    def add(self, entries: list[Entry], size: int, segment: int, high_water: int) -> None:
        """Adds a commit; send() has to follow."""
        loads = self._loads
        load = loads[-1] if loads else None
        if load is None or load.segment != segment:
            load = Load(segment)
            loads.append(load)
        if load.entries:
            load.entries += entries
        else:
            load.entries = entries
        load.bytes += size
        load.high_water = high_water
        self.committed += 1
        load.upto = self.committed
        self.pending_bytes += size

    def seal(self) -> None:
        """The segment ends with the last commit, which was not sent yet."""
        self._loads[-1].last = True

    def send(self) -> None:
        """Begins to write the next row, if nothing is under way, and no more commits are expected for that row."""
        if self._flights or self.cut or self.fenced:
            return
        load = self._load
        if load is None:
            if not self._loads or (self.hold_until_ns and time.monotonic_ns() < self.hold_until_ns):
                return
            self.hold_until_ns = 0
            load = self._load = self._loads.popleft()
            self._at = 0
        entries = load.entries
        count = len(entries)
        size = load.bytes
        flags = SEALED if load.last else 0
        upto = load.upto
        if self._at or count > ROW_RECORDS or size > ROW_BYTES:
            end, size = _cut_off(entries, self._at)
            if end < count:
                flags, upto = MORE, 0
            entries = entries[self._at : end]
            self._at = end
            if end == count:
                self._load = None
        else:
            self._load = None
        self._seq += 1
        packed = pack(self._seq, flags, load.high_water, entries)
        self._flights.append(Flight(self._seq, load.segment, packed, len(entries), size, upto))
        self._transmit()

    def _transmit(self) -> None:
        """Sends the first row that is not safe."""
        flight = self._flights[0]
        self.sent_ns = time.monotonic_ns()
        try:
            conn = self.link.conn
            if flight.segment == self._prepared:
                here = (self.link.pid.to_bytes(4, "big"), self.identity.to_bytes(8, "big"))
                conn.send_query_prepared(
                    b"", (self._epoch_bytes, flight.seq.to_bytes(8, "big"), flight.packed, *here), _BINARY, 1
                )
            else:
                # Without a name: it takes the place of the last segment's, so that the session does not grow.
                self._preparing = True
                conn.send_prepare(b"", self._insert(flight.segment))
            self._sent = True
            if conn.flush():
                self.wants_write = True
                self.rewired()
        except (PsycopgError, JournalUnreachable) as error:
            self._lose(str(error))

    def _insert(self, segment: int) -> bytes:
        """Writes nothing in a session that is not this one, nor in another log whose statement stands in its place."""
        schema = self._schema
        return (
            f"WITH ok AS (SELECT 1 FROM {schema}.leader WHERE epoch = $1::bigint AND pg_backend_pid() = $4::int "
            f"AND (SELECT value FROM {schema}.meta WHERE name = 'log') = $5::bigint FOR SHARE) "
            f"INSERT INTO {schema}.seg_{segment} SELECT $2::bigint, $1::bigint, $3::bytea FROM ok"
        ).encode()

    # --- answers

    def pump(self) -> None:
        """The descriptor is ready. Raises JournalFailed."""
        if self.cut:
            return
        try:
            conn = self.link.conn
            if self.wants_write and not conn.flush():
                self.wants_write = False
                self.rewired()
            conn.consume_input()
            while not conn.is_busy():
                result = conn.get_result()
                if result is None:
                    break
                self._result = result
            else:
                return
        except (PsycopgError, JournalUnreachable) as error:
            self._lose(str(error))
            return
        result, self._result = self._result, None
        if result is not None and self._sent:
            self._sent = False
            self._answered(result)

    def _answered(self, result: pq.abc.PGresult) -> None:
        if result.status != _OK:
            self._refused(result)
            return
        if self._preparing:
            self._preparing = False
            self._prepared = self._flights[0].segment
            self._transmit()
            return
        if self.link.warnings:
            said, self.link.warnings[:] = "; ".join(self.link.warnings), []
            self._lose(f"the database warns of a commit, which does not count then: {said}")
            return
        if result.command_tuples != 1:
            self.fence()
            return
        flight = self._flights.pop(0)
        self.full = False
        self.place = flight.seq
        self._home = flight.segment
        self._head = flight.packed[:HEAD_BYTES]
        self.pending_bytes -= flight.size
        if flight.upto:
            self.safe = flight.upto
        self.written(flight.segment, flight.seq, len(flight.packed), flight.records)
        self.sent_ns = 0
        points = self._points
        if self._flights:
            self._transmit()
        elif self._load is not None or not points or points[0].upto > self.safe:
            self.send()
        # Otherwise the next row waits for hold(): the owner of that point knows whether more commits are on their way.
        while points and points[0].upto <= self.safe:
            over = points.popleft().over
            assert over is not None
            over()

    def _refused(self, result: pq.abc.PGresult) -> None:
        refused = refusal(result)
        assert refused is not None
        self.link.warnings.clear()
        self._preparing = False
        state = refused.state
        if not self.link.up or state.startswith(UNREACHABLE) or state in RELINK or state in GONE or not state:
            self._lose(str(refused))
        elif refused.passing:
            self.full = state == "53100"
            self._retry_s = time.monotonic() + _RETRY_S
        else:
            self.fail(JournalFailed(f"journal: the database refuses a commit: {refused} ({state})"))

    def tend(self) -> None:
        """Sends a row again that the database could not take, or the next one when no hold is left."""
        if self._retry_s and time.monotonic() >= self._retry_s and not self.cut and not self.fenced:
            self._retry_s = 0.0
            self._transmit()
        self.send()

    def fail(self, error: JournalFailed) -> None:
        """Ends the writer: nothing more is written, and all syncs that wait get the error. Raises the error."""
        self.failure = error
        points, self._points = self._points, deque()
        for point in points:
            point.error = error
            if point.over is not None:
                point.over()
        raise error

    # --- no link

    def _lose(self, why: str) -> None:
        self._leave()
        if not self.cut:
            self.cut = True
            self.on_cut(why)

    def _leave(self) -> None:
        """Leaves the link. A row that was under way may be there or not."""
        conn = self.link.give_up()
        self.wants_write = self._sent = self._preparing = False
        self._retry_s = 0.0
        self._prepared = 0
        self._result = None
        if conn is not None:
            self.rewired()
            finish(conn)

    def fence(self) -> None:
        """The epoch is over."""
        if self.fenced:
            return
        self.fenced = True
        self.on_cut(f"epoch {self.epoch} is over: another node leads")

    def leave(self) -> None:
        """Before resume(): the owner gives the link up, whatever is under way, and an epoch that is over."""
        self._leave()
        self.cut = True
        self.fenced = False

    def resume(self, epoch: int) -> None:
        """The link is new, and the epoch is this node's. Waits.

        Raises JournalForked when the last safe row is gone, JournalUnreachable, or Refused.
        """
        schema = self._schema
        if self.place:
            found = self._head_at(self._home, self.place)
            if found is not None and found != self._head:
                raise JournalForked(f"{self.link.shown}: row {self.place} is not there any more, which was safe")
        there = 0
        for flight in self._flights:
            found = self._head_at(flight.segment, flight.seq)
            if not found:
                break
            if found != flight.packed[:HEAD_BYTES]:
                raise JournalForked(f"{self.link.shown}: row {flight.seq} is another node's")
            there += 1
        answer = self.link.execute(f"SELECT epoch FROM {schema}.leader")
        self.epoch = epoch
        self._epoch_bytes = epoch.to_bytes(8, "big")
        if self._flights and there == len(self._flights):
            # They are there, but it is not known whether they are safe: a row behind them that is safe says it.
            last = self._flights[-1]
            self._seq += 1
            packed = pack(self._seq, 0, self._high_water(last), [])
            self._flights.append(Flight(self._seq, self._segment_behind(last), packed, 0, 0, 0))
        for flight in self._flights[:there]:
            self._confirm(flight)
        del self._flights[:there]
        if answer.rows and answer.rows[0][0] != str(epoch).encode():
            self.fence()
            return
        self.cut = False
        self.rewired()
        if self._flights:
            self._transmit()
        else:
            self.send()

    def _confirm(self, flight: Flight) -> None:
        """The row is there: it becomes safe together with the next one."""
        following = self._flights[-1]
        following.size += flight.size
        if flight.upto:
            following.upto = max(following.upto, flight.upto)
        self.written(flight.segment, flight.seq, len(flight.packed), flight.records)

    def _head_at(self, segment: int, seq: int) -> bytes | None:
        """Returns the beginning of a row; b"" when it is not there, None when its segment is gone."""
        try:
            answer = self.link.execute(
                f"SELECT substr(packed, 1, {HEAD_BYTES}) FROM {self._schema}.seg_{segment} WHERE seq = $1",
                (str(seq).encode(),),
                binary=True,
            )
        except Refused as error:
            if error.state == "42P01":
                return None
            raise
        return (answer.rows[0][0] or b"") if answer.rows else b""

    def _high_water(self, flight: Flight) -> int:
        return int.from_bytes(flight.packed[HEAD_BYTES - 8 : HEAD_BYTES], "big")

    def _segment_behind(self, flight: Flight) -> int:
        return flight.segment + 1 if flight.packed[1] & SEALED else flight.segment

    # --- waiting

    def await_point(self, point: CommitPoint) -> None:
        """Its `over` is called when its commits are safe."""
        over = point.over
        assert over is not None
        if self.failure is not None:
            point.error = self.failure
            over()
        elif point.upto <= self.safe:
            over()
        else:
            self._points.append(point)
            self.write_on()

    def write_on(self) -> None:
        """Ends a hold."""
        self.hold_until_ns = 0
        self.send()

    def wait_until(self, upto: int, seconds: float = 60.0) -> None:
        """Waits here until this many commits are safe. Raises JournalFailed."""
        end = time.monotonic() + seconds
        self.write_on()
        while self.safe < upto:
            if self.failure is not None:
                raise self.failure
            if self.cut or self.fenced:
                raise JournalFailed("journal: the database cannot be reached, or another node leads")
            left = end - time.monotonic()
            if left <= 0:
                raise JournalFailed(f"journal: the database does not commit for {seconds:g} s")
            self.link.wait(self.link.fileno, True, self.wants_write, min(left, _RETRY_S))
            self.pump()
            self.tend()


def _cut_off(entries: list[Entry], at: int) -> tuple[int, int]:
    """Returns where a row that begins at a record ends, and how many bytes it has."""
    size = 0
    end = at
    while end < len(entries) and end - at < ROW_RECORDS:
        grown = size + record_bytes(len(entries[end][2]))
        if grown > ROW_BYTES and end > at:
            break
        size = grown
        end += 1
    return end, size


def _hear_nothing(why: str) -> None:
    return


def _do_nothing() -> None:
    return


def _count_nothing(segment: int, seq: int, size: int, records: int) -> None:
    return
