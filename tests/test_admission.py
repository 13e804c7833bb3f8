"""Puts that are refused for want of room: when that begins and ends is told, with the figures, and counted."""

from __future__ import annotations

import time
from pathlib import Path

from geventstalk.core.job import READY, Job
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from journal import Journal
from journal.sqlite.sizing import Sizing
from tests.support.faults import wants_compaction

BUDGET = 5_000_000
PATIENCE_S = 60.0


# Bug: Puts were refused without a line in the log and without a statistic.
def test_refusing_is_told_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(str(tmp_path / "journal"), segment_bytes=200_000, budget=BUDGET, log=said.append)
    store = Store(journal, None, ClockOffset(0, 0))
    assert list(store.replay()) == []
    jobs: dict[int, Job] = {}
    store.start(lambda id: (jobs[id], b"default"))
    allowed = Sizing(200_000)
    allowed.fit(BUDGET)
    assert len(said) == 1 and f"of {BUDGET} bytes about {allowed.of_budget(BUDGET)} are" in said[0]
    while store.admits(1000, b"default"):
        job = Job(len(jobs) + 1, 0, 0, 0, 60)
        job.state, job.body = READY, bytes(1000)
        store.put(job, b"default")
        jobs[job.id] = job
        store.commit(0)
        assert len(jobs) < BUDGET // 1000, "no put is ever refused"
    for _ in range(100):
        store.admits(1000, b"default")
    assert store.facts()["journal-puts-refused"] == 101
    assert len(said) == 2 and "puts are refused" in said[1] and str(journal.live.total_bytes) in said[1]
    assert allowed.of_budget(BUDGET) // 2 < journal.live.total_bytes < 2 * allowed.of_budget(BUDGET)
    for id in list(jobs):
        del jobs[id]
        job = Job(id, 0, 0, 0, 60)
        store.delete(job)
    store.commit(0)
    deadline = time.monotonic() + PATIENCE_S
    while wants_compaction(store) or store.settling:
        assert time.monotonic() < deadline
        if store.wants_compaction():
            store.compact_slice(0)
        else:
            time.sleep(0.001)
    assert len(said) == 3 and "puts are accepted again" in said[2]
    assert store.admits(1000, b"default")
    store.close()
