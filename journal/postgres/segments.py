"""Segments are tables. They are made ahead, dropped, and looked through for compaction, over a link of their own.

This module must not wait: tend() takes each piece of work as far as it goes without. Each DDL is one statement that
locks the leader's row as a commit does, so that nothing of an old epoch changes a table. It may be done twice without
harm. None of it waits for a replica: a table that is made comes before the first commit into it, and a table is dropped
after what replaced its rows is safe.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Final

from journal.errors import JournalFailed, JournalLocked, JournalUnreachable
from journal.postgres.format import ENTRY, HEAD_BYTES, whole_keys
from journal.postgres.link import GONE, RELINK, Answer, Link, Need, Refused
from journal.postgres.schema import SEGMENT

FENCED: Final = "GV001"
"""The SQLSTATE with which a DDL of an old epoch is refused."""
SETTINGS: Final = "SET synchronous_commit = off"
_PAUSE_S: Final = 0.1
"""The work pauses this long after an error that may pass, and when the database cannot be reached."""
_PATIENCE_S: Final = 10.0
"""A piece of work that fails for this long is reported to the operator."""
_LOCK_MS: Final = 100
"""A drop waits this long for nodes that read the table: meanwhile others wait behind the drop."""
_KEYS_MAX: Final = 16384
"""About this many records are looked through at once."""
_AHEAD: Final = 2
"""The most such answers that are kept."""

Job = Generator[Need, bool, None]


def _fenced(epoch: int, schema: str, before: str, body: str) -> str:
    return f"""DO $ddl$ DECLARE each bigint; BEGIN
  {before}
  PERFORM 1 FROM {schema}.leader WHERE epoch = {epoch} FOR SHARE;
  IF NOT FOUND THEN RAISE EXCEPTION 'epoch {epoch} is over' USING ERRCODE = '{FENCED}'; END IF;
  {body}
END $ddl$"""


def making(schema: str, epoch: int, number: int) -> str:
    """Makes a segment, if it is not there."""
    body = SEGMENT.format(schema, number, 0)
    return _fenced(
        epoch,
        schema,
        "",
        f"IF NOT EXISTS (SELECT 1 FROM {schema}.segment WHERE no = {number}) THEN {body} END IF;",
    )


def dropping(schema: str, epoch: int, number: int, next_first: int) -> str:
    """Drops the oldest segment. `next_first` is the first row of the one behind it.

    Segments before it are those that a failover of the database has brought back. They go with it: if it went alone,
    what it deletes of theirs would be there again.
    """
    return _fenced(
        epoch,
        schema,
        f"PERFORM set_config('lock_timeout', '{_LOCK_MS}', true);"
        f"LOCK TABLE {schema}.seg_{number} IN ACCESS EXCLUSIVE MODE;",
        f"FOR each IN SELECT no FROM {schema}.segment WHERE no <= {number} ORDER BY no LOOP "
        f"EXECUTE 'DROP TABLE {schema}.seg_' || each; END LOOP;"
        f"DELETE FROM {schema}.segment WHERE no <= {number};"
        f"UPDATE {schema}.segment SET first_seq = {next_first} WHERE no = {number + 1};",
    )


def repairing(schema: str, epoch: int, segment: int, first: int, last: int, lost: bytes) -> str:
    """Puts a row that says so in place of rows that are damaged or missing, and keeps what stood there."""
    rows = f"FROM {schema}.seg_{segment} WHERE seq BETWEEN {first} AND {last}"
    return _fenced(
        epoch,
        schema,
        f"CREATE TABLE IF NOT EXISTS {schema}.damaged(segment bigint, seq bigint, epoch bigint, packed bytea);",
        f"INSERT INTO {schema}.damaged SELECT {segment}, seq, epoch, packed {rows}; DELETE {rows};"
        f"INSERT INTO {schema}.seg_{segment} VALUES({last}, {epoch}, '\\x{lost.hex()}'::bytea);",
    )


def looking(schema: str, number: int) -> str:
    """The beginnings of rows behind $1, up to their payloads."""
    size = " + ".join(f"(get_byte(h, {at}) << {24 - 8 * at})" for at in range(4))
    return (
        f"SELECT seq, substr(packed, 1, {HEAD_BYTES} + {ENTRY.size} * n) FROM ("
        f"SELECT seq, packed, n, sum(n) OVER (ORDER BY seq) - n AS before FROM ("
        f"SELECT seq, packed, {size} AS n FROM ("
        f"SELECT seq, packed, substr(packed, {HEAD_BYTES - 11}, 4) AS h FROM {schema}.seg_{number} "
        f"WHERE seq > $1 ORDER BY seq LIMIT 4096) a) b) c WHERE before < {_KEYS_MAX} ORDER BY seq"
    )


class Tables:
    """The work on tables of a node that leads. `fenced` hears that it does not any more."""

    def __init__(self, link: Link, schema: str, log: Callable[[str], None]) -> None:
        self.link = link
        self.schema = schema
        self.epoch = 0
        self.words: dict[str, str] = {}
        """The options of the link: to the same server as the log itself."""
        self.made: set[int] = set()
        """Segments that are there and empty."""
        self.fenced: Callable[[], None] = lambda: None
        self.full = False
        """True when the database said that it has no room."""
        self._log = log
        self._jobs: deque[tuple[str, Callable[[], Job]]] = deque()
        """The pieces of work, each with its words for messages."""
        self._stuck = ""  # which of them fails again and again,
        self._stuck_s = 0.0  # when that is to be told,
        self._told = False  # and whether it was
        self._asked: set[int] = set()  # segments that are to be made
        self._work: Job | None = None
        self._over = False  # whether the epoch is; what is not done waits for begin()
        self._need: Need = (-1, False, False, 0.0)
        self._until_s = 0.0
        self._keys: deque[list[int]] = deque()
        self._victim = 0
        self._seen = 0  # the last row of the victim that was looked at
        self._ended = False  # whether that is all of it
        self._looks = 0  # how many looks are asked for

    # --- what is wanted

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def make(self, number: int) -> None:
        """Has a segment made."""
        if number not in self._asked and number not in self.made:
            self._asked.add(number)
            self._jobs.append((f"made: segment {number}", lambda: self._make(number)))

    def drop(self, number: int, next_first: int, done: Callable[[], None]) -> None:
        """Has the oldest segment dropped, and calls `done`. The segment is not looked through any more."""
        if number == self._victim:
            self._victim = 0
            self._ended = True
            self._keys.clear()
        self._jobs.append((f"dropped: segment {number}", lambda: self._drop(number, next_first, done)))

    def look_through(self, victim: int) -> None:
        """Begins to look for keys in a segment: take_keys() gives them."""
        self._victim = victim
        self._seen = 0
        self._ended = False
        self._keys.clear()
        self._look_ahead()

    def take_keys(self) -> list[int] | None:
        """The next keys of whole records in the victim. [] while they are not there yet, None behind the last ones."""
        if self._keys:
            keys = self._keys.popleft()
            self._look_ahead()
            return keys
        return None if self._ended else []

    @property
    def has_keys(self) -> bool:
        """Returns whether take_keys() has something to say."""
        return bool(self._keys) or self._ended

    def _look_ahead(self) -> None:
        if not self._ended and not self._looks and len(self._keys) < _AHEAD:
            self._looks += 1
            victim = self._victim
            self._jobs.append((f"looked through: segment {victim}", lambda: self._look(victim)))

    # --- the work

    def tend(self) -> None:
        """Goes on with the work as far as it goes without waiting. Raises JournalFailed."""
        while (self._work is not None or self._jobs) and not self._over:
            if self._work is None:
                self._work = self._run()
                came = True
                step: Callable[[], Need] = self._work.__next__
            else:
                came = self._came()
                if not came and time.monotonic() < self._until_s:
                    return
                work = self._work
                step = lambda: work.send(came)  # noqa: B023, E731
            try:
                self._need = step()
            except StopIteration:
                self._work = None
                continue
            self._until_s = time.monotonic() + self._need[3]

    def _came(self) -> bool:
        descriptor, reading, writing, _ = self._need
        if descriptor < 0:
            return False
        waiter = select.poll()
        waiter.register(descriptor, (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0))
        return bool(waiter.poll(0))

    def _run(self) -> Job:
        """All jobs, each until it is done. One that fails goes behind the others.

        So a segment that another session reads, and that cannot be dropped, holds up no new one. Where a new one has no
        space, an old one is dropped.
        """
        while self._jobs:
            what, job = self._jobs[0]
            try:
                if not self.link.up:
                    yield from self.link.connecting(self.words, SETTINGS)
                yield from job()
            except (JournalUnreachable, JournalLocked):
                yield from self._pause()
                continue
            except Refused as error:
                if error.state == FENCED:
                    self._over = True
                    self.fenced()
                    return
                if error.state in RELINK or (error.state in GONE and (yield from self._is_away())):
                    self.link.close()
                elif not error.passing:
                    raise JournalFailed(f"journal: the tables of segments cannot be changed: {error}") from error
                self.full = self.full or error.state == "53100"
                self._fails(what, error)
                self._jobs.rotate(-1)
                yield from self._pause()
                continue
            self.full = self.full and bool(self._asked)
            self._succeeds(what)
            if self._jobs:
                self._jobs.popleft()

    def _fails(self, what: str, error: Refused) -> None:
        """Says so when it lasts."""
        now_s = time.monotonic()
        if not self._stuck:
            self._stuck, self._stuck_s, self._told = what, now_s + _PATIENCE_S, False
        elif self._stuck == what and not self._told and now_s >= self._stuck_s:
            self._told = True
            reads = "; another session reads it, perhaps pg_dump" if error.state == "55P03" else ""
            self._log(f"journal: cannot be {what}: {error}{reads}")

    def _succeeds(self, what: str) -> None:
        if self._stuck == what:
            self._stuck = ""
            if self._told:
                self._log(f"journal: at last {what}")

    def _is_away(self) -> Generator[Need, bool, bool]:
        """Returns whether the schema as a whole is not there: what was to be done is done when it is back."""
        answer = yield from self.link.asking(f"SELECT to_regclass('{self.schema}.segment') IS NULL", ())
        return answer.rows == [(b"t",)]

    def _pause(self) -> Job:
        yield (-1, False, False, _PAUSE_S)

    def _make(self, number: int) -> Job:
        yield from self.link.asking(making(self.schema, self.epoch, number), ())
        self.made.add(number)
        self._asked.discard(number)

    def _drop(self, number: int, next_first: int, done: Callable[[], None]) -> Job:
        try:
            yield from self.link.asking(dropping(self.schema, self.epoch, number, next_first), ())
        except Refused as error:
            if error.state != "42P01" or (yield from self._is_away()):  # it was dropped, and the answer got lost
                raise
        done()

    def _look(self, victim: int) -> Job:
        if victim != self._victim:  # the segment is gone, or compaction is at another one
            self._looks -= 1
            self._look_ahead()
            return
        answer: Answer
        try:
            answer = yield from self.link.asking(looking(self.schema, victim), (str(self._seen).encode(),), binary=True)
        except Refused as error:
            if error.passing or (error.state in GONE and (yield from self._is_away())):
                raise
            raise JournalFailed(f"journal: segment {victim} cannot be read: {error}") from error
        self._looks -= 1
        if victim != self._victim:
            self._look_ahead()
            return
        for place, head in answer.rows:
            assert place is not None and head is not None
            self._seen = int.from_bytes(place, "big")
            self._keys.append(whole_keys(head))
        self._ended = not answer.rows
        self._look_ahead()

    # --- the end

    def begin(self, epoch: int, words: dict[str, str]) -> None:
        """Works for this epoch from now on, over a new link. Earlier requests are done over it."""
        self.link.close()
        if self._work is not None:
            self._work.close()
            self._work = None
        self.epoch = epoch
        self.words = words
        self._over = False

    def close(self) -> None:
        """Drops the work that is not done."""
        self._jobs.clear()
        if self._work is not None:
            self._work.close()
            self._work = None
        self.link.close()
