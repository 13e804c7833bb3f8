"""Journals of every format version are read for ever. tests/data/journal-vN is one that was written by version N.

It has jobs in all states, with and without tallies, jobs changed and deleted, a record split into parts, and a newest
segment that a crash left with its WAL. To write it anew, which only a new format version is a reason for:
GEVENTSTALK_WRITE_TEST_DATA=1 python -m pytest tests/test_journal_format.py
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
import zlib
from pathlib import Path

import pytest

from geventstalk._build import BUILD
from geventstalk.core.job import (
    BURIED,
    DELAYED,
    DELETED,
    READY,
    RESERVED,
    STATE_NAMES,
    Job,
    TaggedTally,
    Tally,
    held_body,
    tags_of,
)
from geventstalk.core.operate import SETTINGS_TUBE
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.tags import kept_settings, parse
from journal import Journal
from journal.sqlite.format import APPLICATION_ID, FORMAT_VERSION

DATA = Path(__file__).parent / "data"
SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND
PART = 2048
VERSIONS = [1, 2, 3, 4, 5, 6, 7]
FILES = (
    "segment-00000001.db",
    "segment-00000001.db-bodies",
    "segment-00000002.db",
    "segment-00000002.db-bodies",
    "segment-00000002.db-wal",
    "synced",
)


def make_job(id: int, state: int, body: bytes, rank: int = 0, tally: Tally | None = None) -> Job:
    job = Job(id, 0, 100 + id, 10 * id, 60 + id)
    job.body = body + b"\r\n"
    job.created_ns = id * SECOND
    job.state = state
    job.rank = rank
    job.tally = tally
    return job


def write_journal(scratch: Path, into: Path) -> None:
    """Two segments: one sealed, one that is left as `kill -9` leaves it."""
    folder = scratch / "running"
    scratch.mkdir(exist_ok=True)
    offset = ClockOffset(WALL, 0)

    def opened() -> Store:
        store = Store(Journal(str(folder), segment_bytes=1 << 20), None, offset)
        kept = {job.id: (job, tube) for job, tube in store.replay()}
        store.start(kept.get)
        return store

    store = opened()
    store.put(make_job(1, READY, b"ready"), b"default")
    store.put(make_job(2, DELAYED, b"delayed", 5000 * SECOND), b"default")
    store.put(make_job(3, READY, b"to be buried"), b"work")
    store.put(make_job(4, READY, b"to be deleted"), b"work")
    large = make_job(5, READY, bytes(range(256)) * 30)
    assert not store.prepare(large, b"t" * 200)
    store.put(make_job(6, READY, b""), b"a-+/;.$_()")  # between the parts of another job
    while not store.prepare(large, b"t" * 200):
        store.commit(0)
    store.put(large, b"t" * 200)
    store.commit(0)
    store.change(make_job(3, BURIED, b"", 7, Tally(reserves=1, buries=1)))
    store.change(make_job(1, RESERVED, b"", 123, Tally(1, 2, 3, 4, 5)))
    store.delete(make_job(4, READY, b""))
    store.commit(0)
    store.close()

    store = opened()
    store.change(make_job(2, DELAYED, b"", 9000 * SECOND, Tally(reserves=1, releases=1)))
    store.commit(0)  # what stands alone is no group
    store.put(make_job(7, BURIED, b"buried from the start", 8, Tally(0, 0, 0, 2**32 - 1, 0)), b"work")
    store.put(make_job(8, READY, b"the highest id, and gone"), b"work")
    store.commit(0)
    store.delete(make_job(8, READY, b""))
    store.commit(0)
    tagged = TaggedTally(parse(b"grp:g aft:h idp:i:60 tries:3 by:u:11"), reserves=1)
    tagged.tried = 1
    store.put(make_job(9, READY, b"with tags", tally=tagged), b"work")
    store.put(make_job(10, READY, b"to be a mark", tally=tagged), b"work")
    store.retire(make_job(10, READY, b""), make_job(10, DELETED, b"", 60 * SECOND, tagged), b"work")
    store.change(make_job(9, DELAYED, b"", 20 * SECOND, tagged))
    settings = TaggedTally(kept_settings(b'{"policies":{"a":{"tries":3}},"schedules":{}}'))
    store.mark(make_job(11, DELETED, b"", 60 * SECOND, settings), SETTINGS_TUBE)
    store.put(make_job(12, READY, b"larger than half a page" * 200), b"work")
    store.commit(0)
    point = store.sync_point()
    assert point is not None
    point.run()
    into.mkdir()
    for name in FILES:
        shutil.copy(folder / name, into)
    store.close()


def content(folder: Path) -> dict[str, object]:
    """Returns what the present code finds in a journal. May change the folder."""
    journal = Journal(str(folder), segment_bytes=1 << 20)
    jobs = []
    for job, tube in Store(journal, None, ClockOffset(0, 0)).replay():
        tally = job.tally
        counts = tally and [tally.reserves, tally.timeouts, tally.releases, tally.buries, tally.kicks]
        times = {"created_ns": job.created_ns, "rank": job.rank}
        numbers = {"pri": job.pri, "delay": job.delay_s, "ttr": job.ttr_s, "counts": counts}
        where = {"id": job.id, "tube": tube.decode(), "state": STATE_NAMES[job.state]}
        tags = tags_of(job)
        if tags is not None:
            where["tags"] = tags.text.decode()
        jobs.append({**where, **numbers, **times, "body": held_body(job).decode("latin-1")})
    high_water = journal.high_water
    journal.abandon()
    return {"high_water": high_water, "jobs": jobs}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def committed(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the committed journal of a version."""
    data = DATA / f"journal-v{version}"
    if os.environ.get("GEVENTSTALK_WRITE_TEST_DATA") and version == FORMAT_VERSION:
        monkeypatch.setattr("geventstalk.durable.store.PART_BYTES", PART)
        shutil.rmtree(data, ignore_errors=True)
        write_journal(tmp_path / "first", data)
        shutil.copytree(data, tmp_path / "written")
        (data / "expected.json").write_text(json.dumps(content(tmp_path / "written"), indent=1) + "\n")
    folder = tmp_path / "journal"
    shutil.copytree(data, folder)
    return folder


def test_a_committed_journal_is_read_as_ever(committed: Path, version: int) -> None:
    expected = json.loads((committed / "expected.json").read_text())
    assert content(committed) == expected
    jobs = {job["id"]: job for job in expected["jobs"]}
    if version > 6:
        assert jobs.pop(12)["body"] == "larger than half a page" * 200 + "\r\n"
        expected["high_water"] = 11
    if version > 5:
        settings = jobs.pop(11)
        assert settings["tube"] == SETTINGS_TUBE.decode() and parse(settings["tags"].encode()).settings.startswith(b"{")
        expected["high_water"] = 10
    if expected["high_water"] == 10:  # since version 4
        user = " by:u:11" if version > 4 else ""
        assert jobs.pop(10)["state"] == "deleted" and jobs[9]["tags"] == "grp:g aft:h idp:i:60 tries:3" + user
        assert jobs.pop(9)["rank"] == WALL + 20 * SECOND
        expected["high_water"] = 8
    assert sorted(jobs) == [1, 2, 3, 5, 6, 7] and expected["high_water"] == 8
    assert [jobs[id]["state"] for id in (1, 2, 3, 7)] == ["ready", "delayed", "buried", "buried"]
    assert jobs[2]["rank"] == WALL + 9000 * SECOND and jobs[1]["counts"] == [1, 2, 3, 4, 5]
    assert jobs[5]["body"] == (bytes(range(256)) * (30 if version > 6 else 10) + b"\r\n").decode("latin-1")
    assert jobs[1]["created_ns"] == WALL + SECOND and [jobs[3]["rank"], jobs[7]["rank"]] == [7, 8]


@pytest.mark.skipif(BUILD == "compiled", reason="a constant of a compiled module cannot be replaced")
def test_the_present_code_writes_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the format that forgot to raise its version is found here: the records differ byte by byte."""
    monkeypatch.setattr("geventstalk.durable.store.PART_BYTES", PART)
    write_journal(tmp_path, tmp_path / "made")
    shutil.copytree(DATA / f"journal-v{FORMAT_VERSION}", tmp_path / "committed")  # reading makes an index of the WAL
    for name in ("segment-00000001.db", "segment-00000002.db"):
        assert rows(tmp_path / "made" / name) == rows(tmp_path / "committed" / name)


def test_the_committed_journal_is_as_the_documents_say(committed: Path, version: int) -> None:
    kinds = set()
    for number in (1, 2):
        path = committed / f"segment-{number:08d}.db"
        with open(path, "rb") as file:
            head = file.read(100)
        assert int.from_bytes(head[68:72], "big") == APPLICATION_ID == 0x67767374
        assert int.from_bytes(head[60:64], "big") == version
        before = 0
        for seq, key, kind, crc, payload in rows(path):
            assert seq == before + (key if kind == 6 else 1)
            begin = key ^ key >> 32 ^ kind << 29 ^ kind >> 3 ^ seq << 3
            assert crc == zlib.crc32(payload, begin & 0xFFFFFFFF)
            if kind > 8:
                offset, size, body_crc = struct.unpack_from("<QII", payload)
                body = Path(f"{path}-bodies").read_bytes()[offset : offset + size]
                assert len(body) == size > 996 and zlib.crc32(body) == body_crc
                assert payload[20:] == (body[:256] if kind == 9 else b"")
            if kind == 6:
                heads, payloads = payload.split(b"\n", 1)
                assert len(json.loads(heads)) == key > 1
                assert sum(size for _, _, size in json.loads(heads)) == len(payloads)
            kinds.add(kind)
            before = seq
    outside = {9, 12, 13} if version > 6 else {4, 5}
    assert kinds == {1, 2, 3} | outside | ({6} if version > 1 else set())


def rows(path: Path) -> list[tuple[int, int, int, int, bytes]]:
    db = sqlite3.connect(path)
    try:
        return db.execute("SELECT seq, key, kind, crc, payload FROM record ORDER BY seq").fetchall()
    finally:
        db.close()
