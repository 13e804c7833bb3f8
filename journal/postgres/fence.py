"""The rows in which nodes agree who leads, in PostgreSQL: one statement, in one transaction, for each question.

This module must not know when a node should lead. What it says was done is on the synchronous replica, where there is
one: an answer that comes with a warning is taken for none, for the wait for the replica may have been cancelled.
Invariant: whatever changes the leader's row holds its lock until the commit, and whatever is written under an epoch
holds a share of that lock. So a claim waits for all that is on its way under the old epoch, and then ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from journal.errors import JournalError, JournalUnreachable
from journal.fence import (
    ASYNCHRONOUS,
    NONE,
    SYNCHRONOUS,
    Fence,
    FenceStale,
    FenceUnreachable,
    Identity,
    MemberFacts,
    Patience,
    Told,
    View,
)
from journal.postgres.link import POOLED, Answer, Link, Refused, Resolver, Stale, Waiter, poll
from journal.postgres.place import Place

OBSERVER: Final = Identity("", "", "", 1000)
"""The identity of a process that only looks and requests."""
LOCK_PART: Final = 4
"""A claim waits so small a part of a lease for a lock, and then sees who holds it. Where answers take long it waits
longer, up to all but that part."""
LATE: Final = 3
"""An answer on which no lease depends may take so many leases. A node that told nothing for so long counts as gone."""
_LEADER: Final = "epoch, node, address, incarnation, lease_ms, owed_ms, released, successor"
_SESSION: Final = (
    "SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
    " WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false)"
)
_KEY: Final = "hashtextextended('{schema}/' || {word}, 0)"
"""Of the lock that each session of a process shares, so that others see whether one is there."""
_WHERE: Final = "WHERE epoch = $1 AND incarnation = $2"
_COPIES: Final = (
    "CASE WHEN current_setting('synchronous_standby_names') <> '' THEN '" + SYNCHRONOUS + "'"
    " WHEN EXISTS (SELECT 1 FROM pg_stat_get_wal_senders()) THEN '" + ASYNCHRONOUS + "' ELSE '" + NONE + "' END"
)
_LOOK: Final = (
    "SELECT leader.*, beat.epoch, beat.n, wish.node, NOT pg_try_advisory_xact_lock({key}), {copies}, pg_backend_pid()"
    " FROM (SELECT {leader} FROM {schema}.leader LIMIT 1) AS leader,"
    " (SELECT epoch, n FROM {schema}.beat LIMIT 1) AS beat, (SELECT node FROM {schema}.wish LIMIT 1) AS wish"
)
"""Here and below LIMIT tells the planner that there is one row, as no statistics do at first: these tables are never
analysed before they have changed some dozens of times. It would expect 961 million rows."""
_BEAT: Final = (
    "WITH ok AS (SELECT {leader} FROM {schema}.leader {where} FOR SHARE),"
    " done AS (UPDATE {schema}.beat SET epoch = $1, n = $3 FROM ok RETURNING beat.n)"
    " SELECT ok.*, $1, done.n, wish.node, true, {copies}, pg_backend_pid() FROM ok, done,"
    " (SELECT node FROM {schema}.wish LIMIT 1) AS wish"
)
_SERVE: Final = (
    "WITH ok AS (UPDATE {schema}.leader SET owed_ms = 0 {where} RETURNING {leader}),"
    " done AS (UPDATE {schema}.beat SET epoch = $1, n = $3 FROM ok RETURNING beat.n)"
    " SELECT ok.*, $1, done.n, wish.node, true, {copies}, pg_backend_pid() FROM ok, done,"
    " (SELECT node FROM {schema}.wish LIMIT 1) AS wish"
)
_CLAIM: Final = (
    "UPDATE {schema}.leader SET epoch = epoch + 1, node = $3, address = $4, incarnation = $5, lease_ms = $6,"
    " owed_ms = $7, released = false, successor = '', pid = pg_backend_pid() {where}"
)
_TAKE_OVER: Final = (
    "WITH ok AS (" + _CLAIM + " RETURNING 1)"
    " INSERT INTO {schema}.meta SELECT 'claimed', extract(epoch FROM clock_timestamp()) * 1000000 FROM ok"
    " ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value"
)
"""The claim of a process that did not have the epoch before."""
_TAKEN: Final = (
    "SELECT greatest(0, extract(epoch FROM clock_timestamp()) - value / 1000000.0) FROM {schema}.meta"
    " WHERE name = 'claimed'"
)
_CONFIRM: Final = (
    "WITH free AS (SELECT pg_try_advisory_xact_lock({key}) AS yes)"
    " INSERT INTO {schema}.meta SELECT 'commits of ' || $1, 1 FROM free WHERE yes"
    " ON CONFLICT (name) DO UPDATE SET value = meta.value + 1"
)
"""The lock is held until the commit is safe: while one of this process waits, another one changes nothing."""
_RELEASE: Final = (
    "WITH ok AS (UPDATE {schema}.leader SET released = true, successor = $3 {where} RETURNING 1)"
    " UPDATE {schema}.wish SET node = '' FROM ok"
)
_HOLDERS: Final = (
    "SELECT pid, state IS NULL OR coalesce(wait_event = 'SyncRep', false)"
    " FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " WHERE relation = '{schema}.leader'::regclass AND locktype = 'relation' AND granted AND pid <> pg_backend_pid()"
    " AND mode IN ('RowShareLock', 'RowExclusiveLock') AND wait_event_type IS DISTINCT FROM 'Lock'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""Selects the sessions that hold a share of the row's lock, or all of it, and do not wait for it. The rows also say
whether a session waits for a replica, or belongs to another user, so that this cannot be known."""
_TELL: Final = (
    "WITH c AS (SELECT set_config('synchronous_commit', 'off', true)), now AS (SELECT clock_timestamp() AS at),"
    " before AS (SELECT address, value, extract(epoch FROM seen) AS seen FROM {schema}.member, {schema}.meta"
    " WHERE node = $1 AND name = 'process of ' || node),"
    " mine AS (INSERT INTO {schema}.meta SELECT 'process of ' || $1,"
    " CASE $6::bigint WHEN 0 THEN (extract(epoch FROM at) * 1000000)::bigint ELSE $6::bigint END FROM c, now"
    " ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value RETURNING value),"
    " told AS (INSERT INTO {schema}.member SELECT $1, $2, $3, $4, $5, at FROM c, now ON CONFLICT (node) DO UPDATE SET"
    " address = EXCLUDED.address, role = EXCLUDED.role, epoch = EXCLUDED.epoch, place = EXCLUDED.place,"
    " seen = EXCLUDED.seen)"
    " SELECT extract(epoch FROM at), mine.value, address, before.value, before.seen"
    " FROM now, mine LEFT JOIN before ON true"
)
"""A process marks what it tells with the moment, in microseconds, at which it first did so."""
_MEMBERS: Final = (
    "SELECT node, address, role, epoch, place, greatest(0, extract(epoch FROM clock_timestamp() - seen))"
    " FROM {schema}.member ORDER BY node"
)
_WEAK: Final = "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off'"


class PostgresFence(Fence):
    """The schema must be there. `tells` gets lines for the operator."""

    def __init__(
        self,
        place: Place,
        me: Identity = OBSERVER,
        wait: Waiter = poll,
        resolve: Resolver | None = None,
        tells: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._me = me
        self._link = Link(place, wait, resolve)
        self._tells = tells
        self._lease_s = self._link.answer_s = me.lease_ms / 1000
        self._patience = Patience()
        self._lock_s = 0.0  # how long a statement of the session waits for a lock
        self._mark = 0  # of what this process tells; 0 before it has
        self._told_s = 0.0  # when it did last, by the database's clock
        self._link.patient = False
        self._schema = place.schema
        self._attempts = 0  # of heartbeats
        self._pid = 0  # of the backend of the last session; 0 before the first
        self._told: set[str] = set()
        self._link.tells = self._tell_once
        self._look = self._sql(_LOOK, _KEY.format(schema=self._schema, word="incarnation"))
        self._beat = self._sql(_BEAT)
        self._serve = self._sql(_SERVE)
        self._claims = {False: self._sql(_TAKE_OVER), True: self._sql(_CLAIM)}  # by whether it has the epoch

    def _sql(self, text: str, key: str = "") -> str:
        return text.format(schema=self._schema, leader=_LEADER, where=_WHERE, key=key, copies=_COPIES)

    # --- the questions

    def look(self) -> View:
        rows = self._ask(self._look, most=LATE).rows
        if not rows:
            raise FenceUnreachable(f"{self._link.shown}: a row of leader, beat or wish in {self._schema} is gone")
        return self._view(rows[0])

    def claim(self, seen: View, owed_ms: int) -> bool:
        me = self._me
        sql = self._claims[seen.incarnation == me.incarnation]
        values = _texts(seen.epoch, seen.incarnation, me.node, me.address, me.incarnation, me.lease_ms, owed_ms)
        try:
            return self._ask(sql, values).changed == 1
        except _LockTimeout:
            view = self.look()
            if (view.epoch, view.incarnation) != (seen.epoch, seen.incarnation):
                return False
            self._end_who_hangs()
            return self._ask(sql, values).changed == 1

    def _end_who_hangs(self) -> None:
        """Ends writers of the old epoch. One that waits for the replica has committed, and is left alone."""
        ended = waits = 0
        for pid, replicates in self._ask(self._sql(_HOLDERS)).rows:
            if replicates == b"t":
                waits += 1
            else:
                self._ask("SELECT pg_terminate_backend($1)", [pid])
                ended += 1
        if ended:
            self._tells(f"ended {ended} sessions of the database that held up a takeover")
        elif waits:
            raise FenceUnreachable(self._waits())

    def _waits(self) -> str:
        return f"{self._link.shown}: commits wait for the synchronous replica"

    def confirm(self) -> None:
        me, key = self._me, _KEY.format(schema=self._schema, word="'commits of ' || $2")
        name = me.node if me.address else "commands"
        if self._ask(self._sql(_CONFIRM, key), _texts(name, me.incarnation)).changed != 1:
            raise FenceUnreachable(self._waits())

    def beat(self, epoch: int) -> View | None:
        return self._live(self._beat, epoch)

    def serve(self, epoch: int) -> View | None:
        return self._live(self._serve, epoch)

    def _live(self, sql: str, epoch: int) -> View | None:
        """A heartbeat. Each attempt has a number of its own: no two of them look alike to others."""
        self._attempts += 1
        rows = self._ask(sql, _texts(epoch, self._me.incarnation, self._attempts)).rows
        return self._view(rows[0]) if rows else None

    def release(self, epoch: int, successor: str) -> bool:
        return self._ask(self._sql(_RELEASE), _texts(epoch, self._me.incarnation, successor)).changed == 1

    def request_transfer(self, node: str) -> None:
        self._ask(self._sql("UPDATE {schema}.wish SET node = $1, n = n + 1"), _texts(node))

    def withdraw_transfer(self, node: str) -> None:
        self._ask(self._sql("UPDATE {schema}.wish SET node = '' WHERE node = $1"), _texts(node))

    def tell(self, facts: MemberFacts) -> Told:
        mark, since_s = self._mark, self._told_s
        ((clock, mine, *before),) = self._ask(self._sql(_TELL), _texts(*facts[:5], mark), LATE).rows
        self._mark, self._told_s = _int(mine), float(_str(clock))
        address, other, seen = before
        if not mark or other is None or _int(other) == mark or float(_str(seen)) <= since_s:
            return Told(self._told_s)
        return Told(self._told_s, _str(address), _int(other) < mark)

    def members(self) -> list[MemberFacts]:
        return [
            MemberFacts(_str(node), _str(address), _str(role), _int(epoch), _int(place), float(_str(age)))
            for node, address, role, epoch, place, age in self._ask(self._sql(_MEMBERS), most=LATE).rows
        ]

    def takeover_age_s(self) -> float | None:
        rows = self._ask(self._sql(_TAKEN), most=LATE).rows
        return float(_str(rows[0][0])) if rows else None

    def close(self) -> None:
        self._link.close()

    def _view(self, row: Sequence[bytes | None]) -> View:
        epoch, node, address, incarnation, lease_ms, owed_ms, released, successor, *others = row
        beat_epoch, beat, transfer_to, locked, replication, pid = others
        if _int(pid) != self._link.pid:
            self._link.close()
            raise FenceUnreachable(f"{self._link.shown}: {POOLED}")
        return View(
            *(_int(epoch), _str(node), _str(address), _str(incarnation), _int(lease_ms), _int(owed_ms)),
            *((_int(beat_epoch), _int(beat)), released == b"t", _str(successor), _str(transfer_to), locked == b"t"),
            *(self._link.timeline, self._link.system, _str(replication), self.linked_ns),
        )

    # --- the connection

    def _ask(self, sql: str, values: Sequence[bytes | None] = (), most: int = 1) -> Answer:
        """The answer may take a lease, and up to `most` of them where answers have taken long lately.

        Raises _LockTimeout, FenceUnreachable, FenceStale; JournalLocked and others when it never was connected."""
        link, patience = self._link, self._patience
        link.answer_s = patience.between(self._lease_s, most * self._lease_s)
        lock_s = patience.between(self._lease_s / LOCK_PART, self._lease_s * (LOCK_PART - 1) / LOCK_PART)
        try:
            if not link.up:
                self._connect()
            if not self._lock_s / 2 < lock_s < self._lock_s * 2:
                self._lock_s = lock_s
                link.run(f"SET lock_timeout = {max(50, round(lock_s * 1000))}")
            begun_s = time.monotonic()
            try:
                answer = link.execute(sql, values)
            finally:
                patience.took(time.monotonic() - begun_s)
        except FenceUnreachable:
            link.close()
            raise
        except Stale as error:
            raise FenceStale(str(error)) from error
        except JournalUnreachable as error:
            link.close()
            raise FenceUnreachable(str(error)) from error
        except Refused as error:
            if error.state == "55P03":
                raise _LockTimeout(f"{link.shown}: {error}") from error
            link.close()
            raise FenceUnreachable(f"{link.shown}: {error}") from error
        except JournalError as error:
            if not self._pid:
                raise  # never connected: this is about the settings
            raise FenceUnreachable(str(error)) from error
        if answer.warnings:
            link.close()
            raise FenceUnreachable(f"{link.shown}: {answer.warnings[0]}")
        return answer

    def _connect(self) -> None:
        link = self._link
        begun_ns = time.monotonic_ns()
        self._lock_s = 0.0
        link.connect(_SESSION)
        for each in link.untold:
            self._tell_once(each)
        if self._me.incarnation:
            key = _KEY.format(schema=self._schema, word="$1")
            link.execute(f"SELECT pg_advisory_lock_shared({key})", _texts(self._me.incarnation))
        if not self._pid:
            for name, _ in link.execute(_WEAK).rows:
                self._tell_once(f"{_str(name)} is off in the database: a loss of power may lose what was acknowledged")
        self._pid = link.pid
        self.linked_ns = begun_ns

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tells(text)


class _LockTimeout(FenceUnreachable):
    """Another transaction holds the row."""


def _texts(*values: str | int | float) -> list[bytes | None]:
    return [str(value).encode() for value in values]


def _str(value: bytes | None) -> str:
    return "" if value is None else value.decode(errors="replace")


def _int(value: bytes | None) -> int:
    return 0 if value is None else int(value)
