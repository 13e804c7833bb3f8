"""The store over a real journal: what it promises when, and what it brings back. No server, no clock of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, Job, Tally
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import MS_NS, Store
from journal import CHANGE, FULL, Journal, JournalDamaged
from tests.support.faults import wants_compaction
from tests.support.minimal_log import Kept, MinimalLog

NOW_NS = 5_000_000_000
PATIENCE_S = 60.0
WALL_NS = 1_700_000_000_000_000_000


def journal_at(place: Path | str, **options: Any) -> Any:
    """A journal of either kind: a path is a directory, a text is a database."""
    if isinstance(place, Path):
        return Journal(str(place), **options)
    from tests.support.shared_log import pumped

    return pumped(place, **options)


class Jobs:
    """A store and the jobs that it is asked about, as an engine has them."""

    def __init__(
        self,
        place: Path | str,
        fsync_ms: int | None = 50,
        *,
        segment_bytes: int = 1 << 15,
    ) -> None:
        self.jobs: dict[int, Job] = {}
        self.names: dict[int, bytes] = {}
        self.journal = journal_at(place, segment_bytes=segment_bytes)
        self.store = Store(self.journal, fsync_ms, ClockOffset(WALL_NS, NOW_NS))
        try:
            for job, name in self.store.replay():
                self.jobs[job.id] = job
                self.names[job.id] = name
        except BaseException:
            self.store.abandon()
            raise
        self.first_id = self.store.start(self.find)

    def find(self, id: int) -> tuple[Job, bytes] | None:
        return (self.jobs[id], self.names[id]) if id in self.jobs else None

    def put(self, id: int, body: bytes = b"body", *, tube: bytes = b"default", state: int = READY) -> Job:
        job = Job(id, 0, 10, 20, 30)
        job.body = body + b"\r\n"
        job.state = state
        job.rank = NOW_NS + 7_000_000_000 if state == DELAYED else 0
        job.created_ns = NOW_NS - 1_000_000_000
        self.jobs[id] = job
        self.names[id] = tube
        self.store.put(job, tube)
        return job

    def delete(self, id: int) -> None:
        self.store.delete(self.jobs.pop(id))

    def settle(self) -> None:
        """Waits until the worker has nothing to do; compacts nothing."""
        deadline = time.monotonic() + PATIENCE_S
        while self.store.settling:
            wants_compaction(self.store)  # hears from the worker
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def rotate(self) -> None:
        """Changes of one job until the next segment takes over."""
        before = self.journal.current
        while self.journal.current == before:
            for job in list(self.jobs.values())[:200]:
                self.store.change(job)
            self.store.commit(NOW_NS)
            self.settle()

    def close(self) -> None:
        self.store.close()


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where a journal of each kind is."""
    found: str = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    return found or tmp_path / "journal"


@pytest.fixture
def jobs(place: Path | str) -> Iterator[Jobs]:
    jobs = Jobs(place)
    yield jobs
    jobs.store.abandon()


def test_a_commit_makes_a_sync_due_one_period_later(jobs: Jobs) -> None:
    assert jobs.store.sync_due_ns == 0
    jobs.put(1)
    assert jobs.store.sync_due_ns == 0
    jobs.store.commit(NOW_NS)
    assert jobs.store.sync_due_ns == NOW_NS + 50 * MS_NS
    jobs.put(2)
    jobs.store.commit(NOW_NS + 30 * MS_NS)
    assert jobs.store.sync_due_ns == NOW_NS + 50 * MS_NS, "the first commit decides"
    point = jobs.store.sync_point()
    assert point is not None and jobs.store.sync_due_ns == 0
    point.run()
    assert jobs.store.sync_point() is None


@pytest.mark.parametrize("fsync_ms", [None, 0])
def test_without_a_period_no_sync_is_due(tmp_path: Path, fsync_ms: int | None) -> None:
    jobs = Jobs(tmp_path / "journal", fsync_ms)
    jobs.put(1)
    jobs.store.commit(NOW_NS)
    assert jobs.store.sync_due_ns == 0
    assert jobs.store.syncs_before_replies == (fsync_ms == 0)
    jobs.close()


def test_what_compaction_commits_for_a_client_is_synced_in_time_too(jobs: Jobs) -> None:
    """W5: a slice of compaction writes the whole batch, a client's change in it; the period begins then."""
    next_id = itertools.count(100)
    while jobs.journal.current < 4:  # nothing is garbage yet, so that no commit compacts
        jobs.put(next(next_id), b"x" * 500)
        jobs.store.commit(NOW_NS)
    jobs.settle()
    for id in [id for id in jobs.jobs if id % 40]:
        jobs.delete(id)
    jobs.store.commit(NOW_NS)
    point = jobs.store.sync_point()
    assert point is not None and jobs.store.sync_due_ns == 0
    point.run()
    assert wants_compaction(jobs.store)
    jobs.put(next(next_id))
    jobs.store.compact_slice(NOW_NS)
    if jobs.store.dirty:
        jobs.store.commit(NOW_NS)
    assert jobs.store.sync_due_ns > 0, "a put is committed and will never be synced"


def test_jobs_come_back_as_they_were(place: Path | str) -> None:
    jobs = Jobs(place)
    ready = jobs.put(1, b"")
    ready.tally = Tally(1, 2, 3, 4, 5)
    jobs.store.change(ready)
    buried = jobs.put(2, b"b" * 70_000, tube=b"t" * 200)
    buried.state, buried.rank = BURIED, 77
    jobs.store.change(buried)
    jobs.put(3, state=DELAYED)
    reserved = jobs.put(4)
    reserved.state, reserved.pri, reserved.delay_s = RESERVED, 2**32 - 1, 2**32 - 1
    jobs.store.change(reserved)
    jobs.put(5)
    jobs.delete(5)
    jobs.store.commit(NOW_NS)
    jobs.close()
    again = Jobs(place)
    assert sorted(again.jobs) == [1, 2, 3, 4]
    assert again.first_id == 6
    for id, job in again.jobs.items():
        before = jobs.jobs[id]
        for name in ("pri", "delay_s", "ttr_s", "body", "created_ns"):
            assert getattr(job, name) == getattr(before, name), (id, name)
        assert again.names[id] == jobs.names[id]
    assert [again.jobs[id].state for id in (1, 2, 3, 4)] == [READY, BURIED, DELAYED, READY]
    assert again.jobs[2].rank == 77
    assert again.jobs[3].rank == NOW_NS + 7_000_000_000
    tally = again.jobs[1].tally
    assert tally is not None
    assert (tally.reserves, tally.timeouts, tally.releases, tally.buries, tally.kicks) == (1, 2, 3, 4, 5)
    again.close()


def found_in(records: list[Kept]) -> tuple[dict[int, tuple[bytes, int, int]], MinimalLog]:
    """Tube, ttr and priority of each job that a start finds, and the log after that start."""
    log = MinimalLog(records)
    store = Store(log, None, ClockOffset(WALL_NS, NOW_NS))
    jobs = {job.id: (job, name) for job, name in store.replay()}
    store.start(jobs.get)
    return {id: (name, job.ttr_s, job.pri) for id, (job, name) in jobs.items()}, log


# Bug: The job had its new priority and its old ttr.
@pytest.mark.parametrize("large", [False, True])
def test_a_job_is_never_a_mixture_of_what_it_was_and_what_it_became(large: bool) -> None:
    """A loss of power takes the job's record with another tube and ttr, and leaves a change in the next segment."""
    names: dict[int, tuple[Job, bytes]] = {}
    log = MinimalLog()
    store = Store(log, None, ClockOffset(WALL_NS, NOW_NS))
    list(store.replay())
    store.start(names.get)
    if large:
        store.large_bytes, store.part_bytes = 8, 4
    for id in (1, 2):
        job = Job(id, 0, 10, 0, 60)
        job.state, job.body = READY, b"hello there\r\n"
        names[id] = (job, b"old")
        store.put(job, b"old")
    first, other = names[1][0], names[2][0]
    first.pri = other.pri = 20
    store.change(first)
    store.change(other)
    before = len(log.records)
    while not store.prepare_rewrite(first, b"new", 7):
        pass
    first.ttr_s, first.pri = 7, 30
    names[1] = (first, b"new")
    store.rewrite(first, b"new")
    behind = len(log.records)
    first.pri = 40
    first.tally = Tally(1)
    store.change(first)
    other.pri = 50
    store.change(other)
    assert all(len(payload) <= 64 for _, kind, payload in log.records if kind == CHANGE), "see sizing.CHANGE_BYTES"
    assert found_in(log.records)[0] == {1: (b"new", 7, 40), 2: (b"old", 60, 50)}
    lost = log.records[:before] + log.records[behind:]
    found, repaired = found_in(lost)
    assert found == {1: (b"old", 60, 20), 2: (b"old", 60, 50)}
    # Compaction keeps the last change alone: that has to be one that counts.
    last = [record for record in repaired.records if record[:2] == (1, CHANGE)][-1]
    kept = [record for record in repaired.records if record[:2] != (1, CHANGE)] + [last]
    assert found_in(kept)[0] == found and len(found_in(repaired.records)[1].records) == len(repaired.records)
    store.delete(first)
    assert not store._rewritten
    assert found_in([*lost, log.records[-1]])[0] == {2: (b"old", 60, 50)}


def test_a_job_that_was_compacted_is_the_same(place: Path | str) -> None:
    jobs = Jobs(place)
    jobs.put(1, b"old", tube=b"first")
    buried = jobs.put(2, b"buried")
    buried.state, buried.rank = BURIED, 5
    jobs.store.change(buried)
    for id in range(3, 60):
        jobs.put(id, b"x" * 400)
    jobs.store.commit(NOW_NS)
    jobs.rotate()
    for id in range(3, 60):
        jobs.delete(id)
    jobs.store.commit(NOW_NS)
    deadline = time.monotonic() + PATIENCE_S
    while wants_compaction(jobs.store) or jobs.store.settling:
        assert time.monotonic() < deadline
        if wants_compaction(jobs.store):
            jobs.store.compact_slice(NOW_NS)
        else:
            time.sleep(0.0005)
    assert jobs.journal.records_moved >= 2
    assert jobs.journal.oldest > 1
    assert {job.segment for job in jobs.jobs.values()} == {jobs.journal.current}
    jobs.close()
    again = Jobs(place)
    assert sorted(again.jobs) == [1, 2]
    assert (again.jobs[1].body, again.names[1]) == (b"old\r\n", b"first")
    assert (again.jobs[2].state, again.jobs[2].rank) == (BURIED, 5)
    again.close()


def test_a_record_that_is_no_job_is_damage_and_not_a_traceback(place: Path | str) -> None:
    journal = journal_at(place, segment_bytes=1 << 15)
    assert list(journal.replay()) == []
    journal.start()
    journal.append(1, FULL, b"\xff" * 40)
    journal.commit()
    journal.close()
    with pytest.raises(JournalDamaged) as caught:
        Jobs(place)
    assert "\n" not in str(caught.value)


def test_the_facts_are_those_of_the_journal(jobs: Jobs) -> None:
    for id in range(1, 11):
        jobs.put(id, b"x" * 500)
    jobs.store.commit(NOW_NS)
    facts = jobs.store.facts()
    assert facts["binlog-oldest-index"] == facts["binlog-current-index"] == 1
    assert facts["binlog-records-written"] == 10
    assert facts["binlog-records-migrated"] == 0
    assert facts["binlog-max-size"] == 1 << 15
    live, standing = facts["journal-live-bytes"], facts["journal-bytes"]
    assert isinstance(live, int) and isinstance(standing, int)
    assert 5000 < live < standing
