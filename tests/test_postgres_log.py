"""journal/postgres/log.py: what is the business of a log on PostgreSQL alone. Both kinds: see test_journal_kinds.py.

Safety: a writer that is fenced out, a commit whose answer is lost, a wait for the replica that is cancelled, rows that
are damaged, tables of an old epoch.
"""

from __future__ import annotations

import threading
import time

import pytest

from journal import (
    CHANGE,
    DELETE,
    FULL,
    JournalDamaged,
    JournalFailed,
    JournalForked,
    JournalLocked,
    JournalNewer,
    JournalUnreachable,
    SyncPoint,
    make_shared_log,
)
from tests.support.postgres import Pair, Postgres, have_psycopg, new_schema

if not have_psycopg():
    pytest.skip("psycopg is not installed", allow_module_level=True)

from journal.postgres import segments
from journal.postgres.link import Link, Refused
from journal.postgres.log import PostgresLog
from journal.postgres.place import Place
from journal.postgres.segments import FENCED, dropping, making
from tests.support.shared_log import claim, compact, open_log, settle, sync, take_over


class Heard:
    """Collects what a log tells its owner."""

    def __init__(self, log: PostgresLog) -> None:
        self.cuts: list[str] = []
        self.log = log
        log.on_cut = self.cuts.append

    def await_cut(self) -> str:
        end = time.monotonic() + 20
        while not self.cuts:
            assert time.monotonic() < end, "nothing is heard of a cut"
            self.log.pump()
            time.sleep(0.001)
        return self.cuts[-1]


class Reply:
    """A reply that waits for a SyncPoint."""

    def __init__(self, log: PostgresLog) -> None:
        self.over = False
        point = log.sync_point()
        assert point is not None
        self.point: SyncPoint = point
        assert point.begin(self._end)

    def _end(self) -> None:
        self.over = True


def read(url: str, **options: object) -> dict[int, bytes]:
    """The live keys of a log with their last payload, as another node reads them."""
    log = PostgresLog(url, segment_bytes=1 << 20, **options)  # type: ignore[arg-type]  # they pass through
    log.open()
    try:
        found: dict[int, bytes] = {}
        for record in log.replay():
            if record.kind == DELETE:
                del found[record.key]
            else:
                found[record.key] = record.payload
        assert len(found) == log.live.keys
        return found
    finally:
        log.abandon()


def table(url: str, number: int) -> str:
    return f"{Place(url).schema}.seg_{number}"


def run(url: str, sql: str) -> list[tuple[bytes | None, ...]]:
    link = Link(Place(url))
    link.connect()
    try:
        return link.execute(sql).rows
    finally:
        link.close()


# --- the way of a commit


def test_replies_wait_for_the_database(postgres_url: str) -> None:
    log = open_log(postgres_url)
    log.append(1, FULL, b"one")
    log.commit()
    reply = Reply(log)
    assert (log.dirty, reply.over) == (False, False) and log.sync_point() is None
    assert log.waits_ns and log.waits_for == "the database's answer to a commit"
    settle(log, lambda: reply.over)
    assert log.place == 2 and not log.waits_ns and not log.waits_for
    assert read(postgres_url) == {1: b"one"}
    log.close()


def test_what_is_committed_meanwhile_is_one_row(postgres_url: str) -> None:
    log = open_log(postgres_url)
    for key in range(1, 101):
        log.append(key, FULL, b"%d" % key)
        log.commit()
    sync(log)
    assert log.place == 3, "the takeover, the first commit, and all others"
    assert read(postgres_url) == {key: b"%d" % key for key in range(1, 101)}
    log.close()


@pytest.mark.parametrize("end", ["a point", "its time", "the owner"])
def test_commits_that_are_expected_share_a_row(end: str, postgres_url: str) -> None:
    log = open_log(postgres_url)
    log.append(1, FULL, b"1")
    log.commit()
    first = Reply(log)
    log.append(2, FULL, b"2")
    log.commit()
    settle(log, lambda: first.over)
    on_its_way = [log.waits_ns]
    log.hold(time.monotonic_ns() + (50_000_000 if end == "its time" else 60_000_000_000))
    log.append(3, FULL, b"3")
    log.commit()
    log.tend()
    on_its_way.append(log.waits_ns)
    assert on_its_way == [0, 0], "the owner first says whether more are expected"
    if end == "a point":
        Reply(log)
    elif end == "its time":
        time.sleep(0.06)
        log.tend()
    else:
        log.hold(0)
    assert log.waits_ns
    settle(log, lambda: not log.waits_ns)
    assert log.place == 3
    log.close()
    assert len(read(postgres_url)) == 3


def test_a_large_commit_is_several_rows_and_counts_as_a_whole(postgres_url: str) -> None:
    log = open_log(postgres_url, segment_bytes=1 << 26)
    log.append(1, FULL, b"first")
    log.commit()
    bodies = {key: bytes([key]) * 300_000 for key in range(2, 12)}
    for key, body in bodies.items():
        log.append(key, FULL, body)
    log.append(12, FULL, b"x" * (3 << 20))
    log.commit()
    sync(log)
    assert log.place > 6
    assert read(postgres_url) == {1: b"first", **bodies, 12: b"x" * (3 << 20)}
    log.abandon()
    run(postgres_url, f"DELETE FROM {table(postgres_url, 1)} WHERE seq = {log.place}")
    assert read(postgres_url) == {1: b"first"}, "the commit is not complete"
    log = open_log(postgres_url)
    assert log.live.keys == 1
    log.append(1, DELETE, b"")
    log.commit()
    log.close()
    assert read(postgres_url) == {}, "what was not finished stays garbage"


def test_a_follower_reads_on(postgres_url: str) -> None:
    log = open_log(postgres_url, segment_bytes=1 << 14)
    follower = PostgresLog(postgres_url, segment_bytes=1 << 14)
    follower.open()
    assert list(follower.batches()) == [] and follower.more() == []
    jobs: dict[int, bytes] = {}
    for key in range(1, 200):
        log.append(key, FULL, b"x" * 500)
        if key % 3 == 0:
            log.append(key - 1, DELETE, b"")
        if key % 5 == 0:
            log.append(key, CHANGE, b"c")
        log.commit()
        sync(log)
        log.tend()
        if key % 7 == 0:
            take(follower, jobs)
    while take(follower, jobs):
        pass
    assert log.current > 3 and follower.place == log.place
    assert set(jobs) == {key for key in range(1, 200) if key % 3 != 2}
    assert jobs[5 * 3] == b"c" and follower.live.total_bytes == log.live.total_bytes
    assert follower.high_water == 199 and follower.facts().disk_bytes == log.facts().disk_bytes
    follower.abandon()
    log.close()


def take(follower: PostgresLog, jobs: dict[int, bytes]) -> bool:
    batches = follower.more()
    for _, rows in batches:
        for _, key, kind, _, payload in rows:
            if kind == DELETE:
                del jobs[key]
            else:
                jobs[key] = payload
    return bool(batches)


def test_a_follower_whose_segment_was_dropped_begins_anew(postgres_url: str) -> None:
    log = open_log(postgres_url, segment_bytes=1 << 14)
    follower = PostgresLog(postgres_url, segment_bytes=1 << 14)
    follower.open()
    assert list(follower.batches()) == []
    for key in range(1, 100):
        log.append(key, FULL, b"x" * 1000)
        log.append(key, DELETE, b"")
        log.commit()
        sync(log)
        log.tend()
    compact(log, lambda key: b"")
    assert log.oldest > 1
    with pytest.raises(JournalForked, match="dropped"):
        while follower.more():
            pass
    follower.abandon()
    log.close()


def test_a_schema_that_is_gone_is_waited_for_and_never_made_anew(postgres_url: str) -> None:
    """It was renamed, or the name of the host leads to another database: an empty log would be a lost one."""
    schema = Place(postgres_url).schema
    log = open_log(postgres_url)
    log.append(1, FULL, b"one")
    log.commit()
    sync(log)
    follower = PostgresLog(postgres_url, segment_bytes=1 << 14)
    follower.open()
    assert len(list(follower.batches())) == 1
    reading, heard = PostgresLog(postgres_url, segment_bytes=1 << 14), Heard(log)
    reading.open()
    run(postgres_url, f"ALTER SCHEMA {schema} RENAME TO {schema}_away")
    for _ in range(2):
        with pytest.raises(JournalUnreachable):
            follower.more()
    again = PostgresLog(postgres_url, segment_bytes=1 << 14)
    with pytest.raises(JournalUnreachable, match="cluster init"):
        again.open()
    with pytest.raises(JournalUnreachable):
        list(reading.replay())
    log._tables.make(9)
    settle(log, lambda: log._tables._stuck != "")
    log.append(2, FULL, b"two")
    log.commit()
    assert "does not exist" in heard.await_cut()
    with pytest.raises(JournalUnreachable):
        log.resume(2)
    run(postgres_url, f"ALTER SCHEMA {schema}_away RENAME TO {schema}")
    assert follower.more() == []
    again.open()
    assert [record.key for record in again.replay()] == [1]
    assert log.resume(claim(postgres_url))
    sync(log)
    assert read(postgres_url) == {1: b"one", 2: b"two"}
    for each in (log, follower, again, reading):
        each.abandon()


def test_parts_of_a_dead_leader_never_join(postgres_url: str) -> None:
    log = open_log(postgres_url)
    log.append(7, FULL, b"old")
    log.append_part(7, b"dead ")
    log.append_part(7, b"parts ")
    log.commit()
    sync(log)
    log.abandon()
    follower = PostgresLog(postgres_url, segment_bytes=1 << 20)
    follower.open()
    jobs = {record.key: record.payload for record in follower.replay()}
    log = open_log(postgres_url)
    log.append_part(7, b"living ")
    log.commit()
    take(follower, jobs)
    log.append_last(7, b"end", moved=False)
    log.commit()
    sync(log)
    while take(follower, jobs):
        pass
    assert jobs == {7: b"living end"} == read(postgres_url)
    assert follower.live.total_bytes == log.live.total_bytes
    follower.abandon()
    log.close()


# --- fencing


def test_a_writer_of_an_old_epoch_is_refused(postgres_url: str) -> None:
    log = open_log(postgres_url)
    heard = Heard(log)
    log.append(1, FULL, b"safe")
    log.commit()
    sync(log)
    claim(postgres_url)
    log.append(2, FULL, b"late")
    log.commit()
    reply = Reply(log)
    assert "is over" in heard.await_cut()
    assert log.fenced and not log.cut and not reply.over
    log.append(3, FULL, b"later")
    log.commit()
    log.pump()
    log.tend()
    assert read(postgres_url) == {1: b"safe"} and not reply.over
    with pytest.raises(JournalFailed):
        log.close()


# Bug: The log took its epoch for over for ever, and the node claimed fifty times a second.
def test_a_log_whose_epoch_was_over_goes_on_under_a_newer_one(postgres_url: str) -> None:
    """The epoch that it found was this node's own: what was under way met the claim of the same node."""
    log = open_log(postgres_url)
    heard = Heard(log)
    log.append(1, FULL, b"one")
    log.commit()
    sync(log)
    claim(postgres_url)
    log.append(2, FULL, b"two")
    log.commit()
    reply = Reply(log)
    heard.await_cut()
    assert log.fenced
    assert log.resume(claim(postgres_url))
    settle(log, lambda: reply.over)
    log.close()
    assert read(postgres_url) == {1: b"one", 2: b"two"}


def test_work_on_tables_that_found_its_epoch_over_goes_on_under_a_newer_one(postgres_url: str) -> None:
    """Otherwise a segment would never be dropped, and all of the log that comes later would stay."""
    log = open_log(postgres_url)
    settle(log, lambda: not log.settling)
    claim(postgres_url)
    log._tables.make(5)
    settle(log, lambda: log.fenced)
    assert log.resume(claim(postgres_url))
    settle(log, lambda: not log.settling)
    assert run(postgres_url, f"SELECT count(*) FROM {table(postgres_url, 5)}") == [(b"0",)]
    log.abandon()


# Bug: Rows of one cluster stood in the log of another.
@pytest.mark.parametrize("wrong", ["session", "log"])
def test_a_row_goes_into_its_own_log_over_its_own_session_or_nowhere(wrong: str, postgres_url: str) -> None:
    """A pooler let a statement of one cluster meet a session that another one had prepared."""
    log = open_log(postgres_url)
    heard = Heard(log)
    log.append(1, FULL, b"one")
    log.commit()
    sync(log)
    if wrong == "session":
        log._link.pid += 1
    else:
        log._writer.identity += 1
    log.append(2, FULL, b"two")
    log.commit()
    heard.await_cut()
    assert log.fenced and read(postgres_url) == {1: b"one"}
    log.abandon()


# Bug: After a failover to an asynchronous replica a node gave ids again that other jobs had had.
def test_ids_that_a_failover_has_lost_are_not_given_again(postgres_url: str) -> None:
    """Whichever node leads next: one that knew the ids has told the database, which had lost them."""
    log = open_log(postgres_url)
    for key in range(1, 6):
        log.append(key, FULL, b"x")
        log.commit()
        sync(log)
    seen = log.seen()
    log.abandon()
    run(postgres_url, f"DELETE FROM {table(postgres_url, 1)} WHERE seq > 4")
    assert open_log(postgres_url).high_water == 3, "this is what nodes know that are started now"
    knows, told = PostgresLog(postgres_url, segment_bytes=1 << 20), list[str]()
    knows.remember(seen)
    knows.open()
    knows.abandon()
    log = open_log(postgres_url, log=told.append)
    assert log.high_water == 5
    assert told[-1:] == [
        "journal: the database has lost the keys from 4 to 5, which a node knew; none of them is given again"
    ]
    log.close()
    assert open_log(postgres_url).high_water == 5


def test_ids_of_another_log_than_before_mean_nothing(postgres_url: str) -> None:
    open_log(postgres_url).close()
    told: list[str] = []
    log = PostgresLog(postgres_url, segment_bytes=1 << 20, log=told.append)
    log.remember([7, 1000, 0, 0])
    log.open()
    log.abandon()
    assert told == ["journal: this is another log than before: a new one was made"]
    assert open_log(postgres_url).high_water == 0


def test_a_log_of_an_older_version_is_served_on(postgres_url: str) -> None:
    log = open_log(postgres_url)
    log.append(1, FULL, b"one")
    log.close()
    run(postgres_url, f"DELETE FROM {Place(postgres_url).schema}.meta WHERE name = 'log'")
    log = open_log(postgres_url)
    log.append(2, FULL, b"two")
    log.close()
    assert read(postgres_url) == {1: b"one", 2: b"two"}


def test_to_lead_needs_the_last_epoch(postgres_url: str) -> None:
    make_shared_log(postgres_url)
    log = PostgresLog(postgres_url, segment_bytes=1 << 20)
    log.open()
    assert list(log.batches()) == []
    epoch = claim(postgres_url)
    claim(postgres_url)
    assert not log.lead(epoch)
    assert log.place == 0
    log.abandon()


def test_tables_of_an_old_epoch_are_left_alone(postgres_url: str) -> None:
    log = open_log(postgres_url)
    schema, epoch = Place(postgres_url).schema, log.epoch
    claim(postgres_url)
    link = Link(Place(postgres_url))
    link.connect()
    for ddl in (making(schema, epoch, 9), dropping(schema, epoch, 1, 1)):
        with pytest.raises(Refused) as caught:
            link.run(ddl)
        assert caught.value.state == FENCED
    assert link.execute(f"SELECT count(*) FROM {schema}.seg_1").rows == [(b"1",)]
    assert link.execute(f"SELECT no FROM {schema}.segment ORDER BY no").rows[0] == (b"1",)
    link.close()
    log.abandon()


# --- a commit whose answer is lost


@pytest.mark.parametrize("there", [True, False], ids=["there", "absent"])
def test_a_commit_whose_answer_is_lost(postgres_server: Postgres, postgres_url: str, there: bool) -> None:
    """It is in the database, or it never came there: in both cases it counts once, after a newer epoch was claimed."""
    log = open_log(postgres_url)
    heard = Heard(log)
    log.append(1, FULL, b"one")
    log.commit()
    sync(log)
    pid = log._link.conn.backend_pid
    blocker = postgres_server.connect()
    if not there:
        blocker.autocommit = False
        blocker.execute(f"LOCK TABLE {table(postgres_url, 1)} IN ACCESS EXCLUSIVE MODE")
    log.append(2, FULL, b"two")
    log.commit()
    reply = Reply(log)
    if there:
        end = time.monotonic() + 10
        while not run(postgres_url, f"SELECT 1 FROM {table(postgres_url, 1)} WHERE seq = 3"):
            assert time.monotonic() < end
    else:
        end = time.monotonic() + 10
        waiting = f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
        while not postgres_server.ask(waiting):
            assert time.monotonic() < end
    log.append(3, FULL, b"three")
    log.commit()
    later = Reply(log)
    postgres_server.ask(f"SELECT pg_terminate_backend({pid})")
    end = time.monotonic() + 10
    while postgres_server.ask(f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}"):
        assert time.monotonic() < end
    if there:
        log._link.conn.finish()  # the answer is not read
    blocker.close()
    heard.await_cut()
    assert log.cut and not reply.over and log.waits_for == "a link to the database"
    assert log.resume(claim(postgres_url))
    settle(log, lambda: reply.over and later.over)
    assert read(postgres_url) == {1: b"one", 2: b"two", 3: b"three"}
    epochs = run(postgres_url, f"SELECT epoch FROM {table(postgres_url, 1)} ORDER BY seq")
    assert epochs[:4] == [(b"1",), (b"1",), (b"1" if there else b"2",), (b"2",)]
    log.append(4, FULL, b"four")
    log.commit()
    log.close()
    assert sorted(read(postgres_url)) == [1, 2, 3, 4]


def test_resuming_under_an_epoch_that_is_over(postgres_url: str) -> None:
    log = open_log(postgres_url)
    epoch = claim(postgres_url)
    claim(postgres_url)
    assert not log.resume(epoch)
    assert log.fenced
    log.abandon()


def test_a_database_that_does_not_know_the_epoch_was_left_behind(postgres_url: str) -> None:
    """A primary whose replica was promoted knows nothing of the epoch that was claimed there: that is no fence."""
    log = open_log(postgres_url)
    with pytest.raises(JournalUnreachable, match="left behind"):
        log.resume(log.epoch + 1)
    assert not log.fenced
    follower = PostgresLog(postgres_url, segment_bytes=1 << 20)
    follower.open()
    assert list(follower.batches()) == []
    with pytest.raises(JournalUnreachable, match="left behind"):
        follower.lead(log.epoch + 1)
    assert log.resume(claim(postgres_url))
    log.append(1, FULL, b"one")
    log.commit()
    log.close()
    follower.abandon()
    assert read(postgres_url) == {1: b"one"}


def test_a_database_that_lost_what_was_safe_is_refused(postgres_url: str) -> None:
    log = open_log(postgres_url)
    log.append(1, FULL, b"one")
    log.commit()
    sync(log)
    run(postgres_url, f"DELETE FROM {table(postgres_url, 1)} WHERE seq = 2")
    with pytest.raises(JournalForked, match="row 2"):
        log.resume(claim(postgres_url))
    log.abandon()


def test_a_follower_of_a_database_that_lost_what_was_read(postgres_url: str) -> None:
    log = open_log(postgres_url)
    follower = PostgresLog(postgres_url, segment_bytes=1 << 20)
    follower.open()
    log.append(1, FULL, b"one")
    log.commit()
    sync(log)
    assert list(follower.replay())
    follower._link.close()
    assert follower.more() == []
    follower._link.close()
    run(postgres_url, f"UPDATE {table(postgres_url, 1)} SET packed = '\\x00' WHERE seq = 2")
    with pytest.raises(JournalForked, match="row 2"):
        follower.more()
    follower.abandon()
    log.abandon()


@pytest.mark.slow
def test_a_wait_for_the_replica_that_is_cancelled_is_no_answer(postgres_pair: Pair) -> None:
    """PostgreSQL says success then, and warns. The commit is only on the primary, which may be lost with it."""
    pair = postgres_pair
    log = open_log(pair.url)
    heard = Heard(log)
    log.append(1, FULL, b"one")
    log.commit()
    sync(log)
    pid = log._link.conn.backend_pid
    pair.replica.freeze()
    log.append(2, FULL, b"two")
    log.commit()
    reply = Reply(log)
    end = time.monotonic() + 10
    while pair.primary.ask(f"SELECT wait_event FROM pg_stat_activity WHERE pid = {pid}") != [("SyncRep",)]:
        assert time.monotonic() < end
    pair.primary.ask(f"SELECT pg_cancel_backend({pid})")
    assert "warns" in heard.await_cut()
    assert log.cut and not reply.over
    pair.replica.thaw()
    assert log.resume(claim(pair.url))
    settle(log, lambda: reply.over)
    assert read(pair.url) == {1: b"one", 2: b"two"}
    log.close()


@pytest.mark.long
def test_the_database_fails_over(postgres_pair: Pair) -> None:
    pair = postgres_pair
    log = open_log(pair.url, segment_bytes=1 << 14)
    heard = Heard(log)
    for key in range(1, 100):
        log.append(key, FULL, b"x" * 500)
        log.commit()
        sync(log)
        log.tend()
    log.append(100, FULL, b"y")
    log.commit()
    reply = Reply(log)
    pair.primary.kill()
    heard.await_cut()
    log.append(101, FULL, b"z")
    log.commit()
    pair.fail_over()
    assert log.resume(claim(pair.url))
    settle(log, lambda: reply.over)
    sync(log)
    assert sorted(read(pair.url)) == list(range(1, 102))
    log.close()


# --- damage


def test_a_rotten_row_is_found_and_accepted(postgres_url: str) -> None:
    log = open_log(postgres_url)
    for key in (1, 2, 3):
        log.append(key, FULL, b"x" * 50)
        log.commit()
        sync(log)
    log.append(2, CHANGE, b"c")
    log.commit()
    log.close()
    name = table(postgres_url, 1)
    run(postgres_url, f"UPDATE {name} SET packed = set_byte(packed, 60, 7) WHERE seq = 3")
    with pytest.raises(JournalDamaged, match="2 findings"):
        read(postgres_url)
    said: list[str] = []
    log = open_log(postgres_url, accept_damage=True, log=said.append)
    assert any("row 3 of segment 1 is damaged" in line and "keys 2" in line for line in said)
    assert any("known by their changes only: 2" in line for line in said)
    assert log.live.keys == 2 and log.high_water > 1 << 20
    log.repair(lambda key: b"")
    log.append(log.high_water + 1, FULL, b"new")
    log.commit()
    log.close()
    found = read(postgres_url)
    assert sorted(found)[:2] == [1, 3] and len(found) == 3, "a later start finds no damage"
    assert run(postgres_url, f"SELECT segment, seq FROM {Place(postgres_url).schema}.damaged") == [(b"1", b"3")]


def test_rows_that_are_missing_are_damage(postgres_url: str) -> None:
    log = open_log(postgres_url)
    for key in range(1, 6):
        log.append(key, FULL, b"x")
        log.commit()
        sync(log)
    log.close()
    run(postgres_url, f"DELETE FROM {table(postgres_url, 1)} WHERE seq IN (3, 4)")
    with pytest.raises(JournalDamaged):
        read(postgres_url)
    log = open_log(postgres_url, accept_damage=True)
    log.repair(lambda key: b"")
    log.close()
    assert sorted(read(postgres_url)) == [1, 4, 5]


def test_a_newer_schema_is_left_alone(postgres_url: str) -> None:
    open_log(postgres_url).close()
    run(postgres_url, f"UPDATE {Place(postgres_url).schema}.meta SET value = 2 WHERE name = 'version'")
    log = PostgresLog(postgres_url, segment_bytes=1 << 20)
    with pytest.raises(JournalNewer):
        log.open()
    log.abandon()


# --- segments


def test_segments_come_and_go(postgres_url: str) -> None:
    log = open_log(postgres_url, segment_bytes=1 << 14)
    jobs = {}
    for key in range(1, 600):
        jobs[key] = b"%d" % key + b"x" * 200
        log.append(key, FULL, jobs[key])
        if key > 40 and key % 10:
            log.append(key - 40, DELETE, b"")
            del jobs[key - 40]
        log.commit()
        sync(log)
        log.tend()
    assert log.current > 5
    compact(log, lambda key: jobs[key])
    sync(log)
    facts = log.facts()
    assert facts.records_moved and facts.oldest > 1
    assert facts.disk_bytes < 2 * facts.live_bytes + 4 * (1 << 14)
    numbers = run(postgres_url, f"SELECT no FROM {Place(postgres_url).schema}.segment ORDER BY no")
    assert int(numbers[0][0] or 0) == facts.oldest
    assert read(postgres_url) == jobs
    log.close()
    log = PostgresLog(postgres_url, segment_bytes=1 << 14)
    take_over(log)
    assert log.live.total_bytes == facts.live_bytes and log.oldest == facts.oldest
    log.abandon()


def test_a_segment_that_a_failover_brought_back_goes_before_those_behind_it(postgres_url: str) -> None:
    """A drop waits for no replica, so a failover may undo it. What a later segment deletes must not come back then."""
    log = open_log(postgres_url, segment_bytes=1 << 14)
    name = table(postgres_url, 1)
    schema = Place(postgres_url).schema

    def churn(first: int, last: int) -> None:
        for key in range(first, last):
            log.append(key, FULL, b"x" * 1000)
            if key > 5:
                log.append(key - 5, DELETE, b"")
            log.commit()
            sync(log)
            log.tend()

    churn(1, 40)
    run(postgres_url, f"CREATE TABLE {schema}.kept AS SELECT * FROM {name}")
    compact(log, lambda key: b"x" * 1000)
    assert log.oldest > 1
    run(postgres_url, f"ALTER TABLE {schema}.kept RENAME TO seg_1")
    run(postgres_url, f"INSERT INTO {schema}.segment VALUES(1, 1)")
    churn(40, 80)
    before = log.oldest
    compact(log, lambda key: b"x" * 1000)
    assert log.oldest > before
    assert run(postgres_url, f"SELECT min(no) FROM {schema}.segment") == [(b"%d" % log.oldest,)]
    assert sorted(read(postgres_url)) == [75, 76, 77, 78, 79]
    log.close()


def test_a_segment_is_not_dropped_while_a_node_reads(postgres_url: str) -> None:
    log = open_log(postgres_url, segment_bytes=1 << 14)
    for key in range(1, 100):
        log.append(key, FULL, b"x" * 1000)
        if key > 20:
            log.append(key - 20, DELETE, b"")
        log.commit()
        sync(log)
        log.tend()
    follower = PostgresLog(postgres_url, segment_bytes=1 << 14)
    follower.open()
    batches = follower.batches()
    next(batches)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        log.tend()
        log.pump()
        if log.wants_compaction():
            log.compact_slice(lambda key: b"x" * 1000)
    assert log.oldest == 1
    assert len(list(batches)) > 0
    compact(log, lambda key: b"x" * 1000)
    assert log.oldest > 1
    follower.abandon()
    log.close()


# Bug: It ended the node that led, when a table had to be made.
def test_a_database_that_takes_no_writes_for_a_while(postgres_url: str) -> None:
    """As after ALTER SYSTEM SET default_transaction_read_only: a service does so when its disk is nearly full."""
    log = open_log(postgres_url)
    settle(log, lambda: not log._tables.busy)
    log._tables.link.run("SET default_transaction_read_only = on")
    log._tables.make(7)
    settle(log, lambda: 7 in log._tables.made)
    log.close()


# Bug: A statement that was cancelled during the start ended the node.
def test_a_start_that_is_cancelled_may_begin_again(postgres_server: Postgres, postgres_url: str) -> None:
    open_log(postgres_url).close()
    name = table(postgres_url, 1)
    holder = postgres_server.connect()
    holder.execute(f"BEGIN; LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
    log = PostgresLog(postgres_url, segment_bytes=1 << 20)
    log.open()
    pid = log._link.conn.backend_pid

    def cancel() -> None:
        while postgres_server.ask(f"SELECT wait_event_type FROM pg_stat_activity WHERE pid = {pid}") != [("Lock",)]:
            time.sleep(0.01)
        postgres_server.ask(f"SELECT pg_cancel_backend({pid})")

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(JournalUnreachable, match="cancel"):
        list(log.batches())
    thread.join()
    holder.close()
    log.abandon()
    assert read(postgres_url) == {}


def test_a_user_without_rights_is_told(postgres_server: Postgres, postgres_url: str) -> None:
    open_log(postgres_url).close()
    name, schema = new_schema(), Place(postgres_url).schema
    postgres_server.ask(f"CREATE ROLE {name} LOGIN")
    postgres_server.ask(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
    log = PostgresLog(postgres_url.replace("geventstalk@", f"{name}@"), segment_bytes=1 << 20)
    with pytest.raises(JournalLocked, match="permission denied"):
        log.open()
    postgres_server.ask(f"GRANT SELECT ON {schema}.meta, {schema}.segment TO {name}")
    log.open()
    with pytest.raises(JournalLocked, match="permission denied"):
        list(log.batches())
    log.abandon()


# Bug: A session kept a prepared statement for each segment it ever used: in time a gigabyte of the backend's memory.
def test_sessions_do_not_grow_with_segments(postgres_url: str) -> None:
    log = open_log(postgres_url, segment_bytes=1 << 12)
    for key in range(1, 40):
        log.append(key, FULL, b"x" * 1000)
        log.commit()
        settle(log, lambda: not log._writer.pending_bytes and not log._tables.busy)
    assert log.current > 5
    follower = PostgresLog(postgres_url, segment_bytes=1 << 12)
    follower.open()
    assert len(list(follower.replay())) == 39
    for each in (log, follower):
        assert each._link.execute("SELECT count(*) FROM pg_prepared_statements").rows == [(b"0",)]
        each.abandon()


# Bug: A segment that could not be dropped held up every new one: one segment grew without end.
def test_while_another_session_reads_segments_come_and_the_budget_holds(
    postgres_server: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pg_dump does, for hours."""
    for name, value in {"_PATIENCE_S": 0.0, "_PAUSE_S": 0.01, "_LOCK_MS": 10}.items():
        monkeypatch.setattr(segments, name, value)
    said: list[str] = []
    log = open_log(postgres_url, segment_bytes=1 << 16, budget=1 << 21, log=said.append)
    dump = postgres_server.connect()
    dump.execute(f"BEGIN; SELECT count(*) FROM {table(postgres_url, 1)}")
    payload = b"x" * 20_000
    key = refused = 0
    end = time.monotonic() + 60
    while not refused or log.current < 5:
        assert time.monotonic() < end, (log.current, log.disk_bytes)
        if log.admits(len(payload)):
            key += 1
            log.append(key, FULL, payload)
        else:
            refused += 1
        if key > 5 and log.live.segment_of(key - 5):
            log.append(key - 5, DELETE, b"")
        log.commit()
        settle(log, lambda: not log._writer.pending_bytes and not log._tables._asked)
        if log.wants_compaction():
            log.compact_slice(lambda key: payload)
    assert log.oldest == 1 and log.disk_bytes < 1 << 21
    assert any("cannot be dropped: segment 1" in line and "pg_dump" in line for line in said)
    assert any("puts are refused" in line for line in said)
    dump.close()
    compact(log, lambda key: payload)
    assert log.oldest > 1 and log.admits(len(payload))
    assert any("at last dropped: segment 1" in line for line in said)
    log.close()


# Bug: Clients deleted the last live jobs of a segment while compaction looked through it. The next look came behind the
# drop of the segment, and the node ended.
def test_a_segment_that_goes_is_not_looked_through_any_more(postgres_url: str) -> None:
    log = open_log(postgres_url)
    log.append(1, FULL, b"one")
    log.commit()
    sync(log)
    dropped: list[int] = []
    tables = log._tables
    tables.look_through(1)
    tables.drop(1, 1, lambda: dropped.append(1))
    settle(log, lambda: bool(dropped) and not tables.busy)
    found = tables.take_keys()
    settle(log, lambda: not tables.busy)
    assert found is None
    log.abandon()


# Bug: A full database had no room for a new segment, and the old one that would have made room waited behind it.
def test_where_there_is_no_room_for_a_new_segment_an_old_one_goes(postgres_server: Postgres, postgres_url: str) -> None:
    log = open_log(postgres_url)
    settle(log, lambda: not log._tables.busy)
    schema = Place(postgres_url).schema
    run(
        postgres_url,
        f"CREATE FUNCTION {schema}.no_room() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100'; END $$",
    )
    run(
        postgres_url,
        f"CREATE TRIGGER no_room BEFORE INSERT ON {schema}.segment EXECUTE FUNCTION {schema}.no_room()",
    )
    dropped: list[int] = []
    tables = log._tables
    tables.make(7)
    tables.drop(1, 1, lambda: dropped.append(1))
    settle(log, lambda: bool(dropped))
    assert not log.admits(100) and 7 not in tables.made
    run(postgres_url, f"DROP TRIGGER no_room ON {schema}.segment")
    settle(log, lambda: 7 in tables.made)
    assert log.admits(100)
    log.abandon()


def test_a_full_database_refuses_puts_and_loses_nothing(postgres_url: str) -> None:
    log = open_log(postgres_url)
    name = table(postgres_url, 1)
    schema = Place(postgres_url).schema
    run(
        postgres_url,
        f"CREATE FUNCTION {schema}.no_room() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100'; END $$",
    )
    run(postgres_url, f"CREATE TRIGGER no_room BEFORE INSERT ON {name} EXECUTE FUNCTION {schema}.no_room()")
    log.append(1, FULL, b"one")
    log.commit()
    reply = Reply(log)
    settle(log, lambda: not log.admits(100))
    assert (log.short_of_room, log.takes_parts, reply.over) == (True, False, False)
    assert log.settling and log.waits_for == "room in the database"
    run(postgres_url, f"DROP TRIGGER no_room ON {name}")
    settle(log, lambda: reply.over)
    assert (log.short_of_room, log.takes_parts) == (False, True) and log.admits(100)
    assert read(postgres_url) == {1: b"one"}
    log.close()


def test_a_budget_refuses_puts_before_the_end(postgres_url: str) -> None:
    budget = 1 << 20
    said: list[str] = []
    log = open_log(postgres_url, segment_bytes=1 << 16, budget=budget, log=said.append)
    jobs: dict[int, bytes] = {}
    key = 0
    while log.admits(1000):
        key += 1
        jobs[key] = b"x" * 1000
        log.append(key, FULL, jobs[key])
        log.commit()
        if key % 20 == 0:
            sync(log)
            log.tend()
    sync(log)
    assert 100 < key < 900 and any("puts are refused" in line for line in said)
    for _ in range(6):
        for each in jobs:
            log.append(each, CHANGE, b"c" * 64)
            log.commit()
            if each % 20 == 0:
                sync(log)
                compact(log, lambda key: jobs[key])
        assert log.disk_bytes <= budget, log.segments(50)
    for each in jobs:
        log.append(each, DELETE, b"")
    log.commit()
    sync(log)
    jobs.clear()
    compact(log, lambda key: jobs[key])
    assert log.admits(1000) and any("accepted again" in line for line in said)
    log.close()
