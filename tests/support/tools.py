"""Runs a command of the tools in this process, and makes journals to look at."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

from geventstalk.cli.program import main
from geventstalk.core.job import BURIED, DELAYED, READY, Job, Tally
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from journal import Journal
from tests.support.faults import wants_compaction

SECOND = 1_000_000_000
PATIENCE_S = 60.0
Jobs = dict[int, dict[str, object]]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def run_tool(*words: object, stdin: str = "") -> Ran:
    """Runs a command in this process and returns its exit code and output."""
    real = sys.stdin, sys.stdout, sys.stderr
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    sys.stdin, sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(stdin.encode())), out, err
    try:
        code = main([str(word) for word in words])
    finally:
        sys.stdin, sys.stdout, sys.stderr = real
    texts = []
    for stream in (out, err):
        stream.flush()
        stream.seek(0)
        texts.append(stream.read())
    assert "Traceback" not in texts[1]
    return Ran(code, *texts)


def exported(ran: Ran) -> Jobs:
    header, *lines = map(json.loads, ran.out.splitlines())
    assert header["jobs"] == len(lines)
    return {job["id"]: job for job in lines}


def make_job(id: int, state: int = READY, body: bytes = b"body", rank: int = 0, tally: Tally | None = None) -> Job:
    # A start corrects a deadline that is further away than the job's delay.
    job = Job(id, 0, id % 7, 4_000_000_000 if state == DELAYED else 0, 60)
    job.body = body + b"\r\n"
    job.created_ns = 1000 * SECOND
    job.state = state
    job.rank = rank
    job.tally = tally
    return job


def open_store(folder: Path, *, accept_damage: bool = False) -> Store:
    journal = Journal(str(folder), segment_bytes=1 << 15, compact=False, accept_damage=accept_damage)
    store = Store(journal, None, ClockOffset(0, 0))
    jobs = {job.id: (job, tube) for job, tube in store.replay()}
    store.start(jobs.get)
    return store


def fill(store: Store, jobs: int = 60) -> None:
    """Several segments: jobs in all states, changed and deleted in later segments than they were put in."""
    for id in range(1, jobs + 1):
        store.put(make_job(id, body=bytes([id]) * 3000), b"tube-%d" % (id % 3))
        settle(store)
        if id > 10:
            if id % 5 == 0:
                store.delete(make_job(id - 10))
            elif id % 5 == 1:
                store.change(make_job(id - 10, BURIED, rank=id, tally=Tally(1, 0, 0, 1, 0)))
            elif id % 5 == 2:
                store.change(make_job(id - 10, DELAYED, rank=4_000_000_000 * SECOND))
        settle(store)
    store.put(make_job(jobs + 1), b"the highest id, and gone")
    store.delete(make_job(jobs + 1))
    settle(store)


def settle(store: Store) -> None:
    """Commits, and waits until the segments are made and sealed that this called for."""
    store.commit(0)
    deadline = time.monotonic() + PATIENCE_S
    while wants_compaction(store) or store.settling:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.db"))


def prints(folder: Path) -> dict[str, str]:
    """Returns what is in every file but SQLite's indexes of WALs, which are made anew at need."""
    files = (path for path in folder.iterdir() if not path.name.endswith("-shm"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path
