"""The reader of beanstalkd's binlog, against files that beanstalkd 1.12 wrote and against beanstalkd itself.

tests/data/binlog-v7 holds such files and what is in them, for machines without beanstalkd. To write it anew:
GEVENTSTALK_WRITE_TEST_DATA=1 python -m pytest tests/test_binlog.py -k committed
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct

import pytest

from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, STATE_NAMES, Job, Tally, held_body
from geventstalk.offline.binlog import Binlog
from tests.support.binlogs import fill_beanstalkd, stats_of
from tests.support.process import ServerProcess
from tests.support.wire import Client

DATA = Path(__file__).parent / "data" / "binlog-v7"
SECOND = 1_000_000_000
V5 = Struct("<QI4xqqi4xqq5IB")
V7 = Struct("<QI4xqqi4xqq5IB3x")


def read(folder: Path) -> Binlog:
    log = Binlog()
    for path in sorted(folder.glob("binlog.*"), key=lambda path: int(path.suffix[1:])):
        log.read(path.name, path.read_bytes())
    return log


def facts(job: Job, tube: bytes) -> dict[str, object]:
    """A job as plain data, to be compared and to be kept as JSON."""
    tally = job.tally or Tally()
    return {
        "id": job.id,
        "tube": tube.decode(),
        "state": STATE_NAMES[job.state],
        "pri": job.pri,
        "delay": job.delay_s,
        "ttr": job.ttr_s,
        "created_ns": job.created_ns,
        "rank": job.rank,
        "counts": [tally.reserves, tally.timeouts, tally.releases, tally.buries, tally.kicks],
        "body": base64.b64encode(held_body(job)).decode(),
    }


def content(log: Binlog) -> list[dict[str, object]]:
    return [facts(job, tube) for job, tube in log.jobs()]


# --- what beanstalkd wrote


@pytest.fixture
def written(start_beanstalkd: Callable[..., ServerProcess], tmp_path: Path) -> Path:
    """A folder with the binlog of a beanstalkd that was killed: all states, several files, jobs deleted and moved."""
    folder = tmp_path / "beanstalkd"
    folder.mkdir()
    server = start_beanstalkd("-b", str(folder), "-s", "8192", "-F")
    with Client(server.connect()) as client:
        fill_beanstalkd(client)
    server.kill()
    assert len(list(folder.glob("binlog.*"))) > 1
    return folder


@pytest.mark.slow
def test_it_reads_what_beanstalkd_itself_restores(
    written: Path, start_beanstalkd: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    log = read(written)
    assert not log.findings and not log.notes
    jobs = {job.id: (job, facts(job, tube)) for job, tube in log.jobs()}
    assert {state for _, fact in jobs.values() for state in [fact["state"]]} == {"ready", "delayed", "buried"}

    again = tmp_path / "again"
    shutil.copytree(written, again)
    server = start_beanstalkd("-b", str(again))
    with Client(server.connect()) as client:
        for id in range(1, log.high_water + 1):
            if id not in jobs:
                assert client.ask(b"peek %d" % id) == b"NOT_FOUND\r\n"
                continue
            job, fact = jobs[id]
            theirs = stats_of(client, id)
            assert isinstance(fact["counts"], list)
            counts = list(fact["counts"])
            counts[3] += job.state == BURIED  # a restart of beanstalkd counts as a burying
            assert [int(theirs[key]) for key in ("reserves", "timeouts", "releases", "buries", "kicks")] == counts
            assert [theirs[key] for key in ("tube", "state")] == [fact["tube"], fact["state"]]
            assert [int(theirs[key]) for key in ("pri", "delay", "ttr")] == [job.pri, job.delay_s, job.ttr_s]
            body = base64.b64decode(str(fact["body"]))
            assert client.ask(b"peek %d" % id) == b"FOUND %d %d\r\n%b" % (id, len(body) - 2, body)
        highest = client.put(b"next")
    assert highest == log.high_water + 1


@pytest.mark.slow
def test_buried_jobs_come_in_the_order_of_beanstalkd(
    written: Path, start_beanstalkd: Callable[..., ServerProcess]
) -> None:
    buried = [(job.rank, job.id) for job, tube in read(written).jobs() if job.state == BURIED and tube == b"work"]
    assert len(buried) > 3
    server = start_beanstalkd("-b", str(written))
    order = []
    with Client(server.connect()) as client:
        client.ask(b"use work")
        for _ in buried:
            order.append(int(client.ask(b"peek-buried").split()[1]))
            client.ask(b"kick 1")
    assert order == [id for _, id in sorted(buried)]


@pytest.mark.long
def test_every_truncation_of_the_newest_file(
    written: Path, start_beanstalkd: Callable[..., ServerProcess], tmp_path: Path, seed: int
) -> None:
    """Never an error, never a finding, never a job that the whole file does not lead to; and as beanstalkd does."""
    paths = sorted(written.glob("binlog.*"), key=lambda path: int(path.suffix[1:]))
    older = [(path.name, path.read_bytes()) for path in paths[:-1]]
    newest = paths[-1].read_bytes().rstrip(b"\0")[:2500] + bytes(200)
    states = []
    for size in range(len(newest) + 1):
        log = Binlog()
        for name, data in [*older, ("newest", newest[:size])]:
            log.read(name, data)
        assert not log.findings, size
        assert len(log.notes) <= 1
        states.append(content(log))
    assert sum(before != after for before, after in pairwise(states)) >= 4
    for size in random.Random(seed).sample(range(len(newest)), 6):
        folder = tmp_path / f"at-{size}"
        folder.mkdir()
        for path, (_, data) in zip(paths, older, strict=False):
            (folder / path.name).write_bytes(data)
        (folder / paths[-1].name).write_bytes(newest[:size])
        server = start_beanstalkd("-b", str(folder))
        with Client(server.connect()) as client:
            count = int(client.stats(b"stats")["current-jobs-ready"])
            count += int(client.stats(b"stats")["current-jobs-delayed"])
            count += int(client.stats(b"stats")["current-jobs-buried"])
        server.stop()
        assert count == len(states[size]), size


def test_the_committed_binlog_is_read_as_ever(request: pytest.FixtureRequest) -> None:
    if os.environ.get("GEVENTSTALK_WRITE_TEST_DATA"):
        folder = request.getfixturevalue("written")
        shutil.rmtree(DATA, ignore_errors=True)
        DATA.mkdir(parents=True)
        for path in folder.glob("binlog.*"):
            (DATA / path.name).write_bytes(path.read_bytes())
        log = read(DATA)
        expected = {"high_water": log.high_water, "jobs": content(log)}
        (DATA / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    expected = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
    log = read(DATA)
    assert not log.findings and not log.notes
    assert log.high_water == expected["high_water"]
    assert content(log) == expected["jobs"]
    states = {job["state"] for job in expected["jobs"]}
    assert states == {"ready", "delayed", "buried"}
    assert any(job["counts"][4] for job in expected["jobs"]) and any(job["counts"][2] for job in expected["jobs"])


# --- what we write ourselves, byte by byte


def record(
    id: int,
    state: int,
    body: bytes | None = None,
    *,
    tube: bytes = b"default",
    pri: int = 7,
    delay: int = 0,
    deadline: int = 0,
    size: int = 6,
    counts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
    version: int = 7,
) -> bytes:
    unit = 1000 if version == 5 else 1
    length, layout = (Struct("<Q"), V5) if version == 5 else (Struct("<i"), V7)
    assert (layout.size, length.size) == ((77, 8) if version == 5 else (80, 4))
    size = size if body is None else len(body)
    values = (id, pri, delay * SECOND // unit, 60 * SECOND // unit, size, 5 * SECOND // unit, deadline // unit)
    name = b"" if body is None else tube
    return length.pack(len(name)) + name + layout.pack(*values, *counts, state) + (body or b"")


def parsed(*records: bytes, version: int = 7, tail: bytes = b"") -> Binlog:
    log = Binlog()
    log.read("binlog.1", Struct("<i").pack(version) + b"".join(records) + tail)
    return log


RECORDS: list[Callable[[int], bytes]] = [
    lambda v: record(1, READY, b"four\r\n", version=v),
    lambda v: record(2, DELAYED, b"\r\n", delay=9, deadline=14 * SECOND, tube=b"a-b", version=v),
    lambda v: record(3, READY, b"\0\0\0\0\r\n", version=v),
    lambda v: record(1, BURIED, counts=(3, 1, 0, 1, 0), pri=1, version=v),
    lambda v: record(3, BURIED, counts=(1, 0, 0, 1, 0), version=v),
    lambda v: record(2, 0, size=2, version=v),
    lambda v: record(9, READY, version=v),  # a short record of a job whose whole one is gone
    lambda v: record(1, BURIED, b"four\r\n", pri=2, counts=(3, 1, 0, 1, 0), version=v),  # moved by compaction
    lambda v: record(4, RESERVED, b"x\r\n", version=v),
]


@pytest.mark.parametrize("version", [5, 7])
def test_every_cut_leaves_the_records_before_it(version: int) -> None:
    pieces = [make(version) for make in RECORDS]
    for count, piece in enumerate(pieces):
        whole = content(parsed(*pieces[:count], version=version))
        for size in range(len(piece)):
            log = parsed(*pieces[:count], piece[:size], version=version)
            assert not log.findings, (count, size)
            assert content(log) == whole, (count, size)
            assert bool(log.notes) == bool(piece[:size].strip(b"\0")), (count, size)


@pytest.mark.parametrize("version", [5, 7])
@pytest.mark.parametrize("zeros", [200, 5000])
def test_every_torn_write_into_zeros_leaves_the_others(version: int, zeros: int) -> None:
    """beanstalkd fills files with zeros ahead of time. It writes a record in parts: length, name, fields, body."""
    pieces = [make(version) for make in RECORDS]
    for count, piece in enumerate(pieces):
        whole = content(parsed(*pieces[:count], version=version))
        length, layout = (8, V5) if version == 5 else (4, V7)
        fields_at = length + piece[0]
        id = layout.unpack_from(piece, fields_at)[0]
        for size in range(len(piece)):
            log = parsed(*pieces[:count], piece[:size], version=version, tail=bytes(zeros))
            if (piece[:size] + bytes(zeros)).startswith(piece):
                continue  # what was cut off is zeros
            assert not log.findings, (count, size)
            if size in range(fields_at + 1, fields_at + layout.size):
                # Within the fields there is no telling: state 0 is a deleted job.
                others = [[job for job in jobs if job["id"] != id] for jobs in (content(log), whole)]
                assert [{**job, "rank": 0} for job in others[0]] == [{**job, "rank": 0} for job in others[1]]
            else:
                assert content(log) == whole, (count, size)
                assert bool(log.notes) == bool(piece[:size].strip(b"\0")), (count, size)


@pytest.mark.parametrize("version", [5, 7])
def test_records_add_up(version: int) -> None:
    log = parsed(*(make(version) for make in RECORDS), version=version, tail=bytes(100))
    assert not log.findings and not log.notes
    assert log.high_water == 9
    one, three, four = content(log)
    assert (one["id"], one["state"], one["pri"], one["rank"]) == (1, "buried", 2, 1)
    assert one["counts"] == [3, 1, 0, 1, 0]
    assert (three["id"], three["state"], three["rank"]) == (3, "buried", 2)
    assert base64.b64decode(str(three["body"])) == b"\0\0\0\0\r\n"
    assert (four["id"], four["state"], four["counts"]) == (4, "ready", [0, 0, 0, 0, 0])
    assert one["created_ns"] == 5 * SECOND and one["ttr"] == 60
    (two,) = content(parsed(RECORDS[1](version), version=version))
    assert (two["state"], two["rank"], two["delay"], two["tube"]) == ("delayed", 14 * SECOND, 9, "a-b")


@pytest.mark.slow
@pytest.mark.parametrize("version", [5, 7])
def test_beanstalkd_reads_the_same_in_what_we_wrote(
    version: int, start_beanstalkd: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    data = Struct("<i").pack(version) + b"".join(make(version) for make in RECORDS)
    (tmp_path / "binlog.1").write_bytes(data)
    server = start_beanstalkd("-b", str(tmp_path))
    with Client(server.connect()) as client:
        for job, tube in parsed(data[4:], version=version).jobs():
            theirs = stats_of(client, job.id)
            assert theirs["tube"] == tube.decode() and theirs["state"] == STATE_NAMES[job.state]
            assert [int(theirs[key]) for key in ("pri", "delay", "ttr")] == [job.pri, job.delay_s, job.ttr_s]
            assert client.ask(b"peek %d" % job.id).endswith(b"\r\n" + held_body(job))
        assert client.ask(b"peek 2") == client.ask(b"peek 9") == b"NOT_FOUND\r\n"


GOOD = record(1, READY, b"four\r\n")


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (Struct("<i").pack(201) + bytes(90), "cannot have 201 bytes"),
        (Struct("<i").pack(-1) + bytes(90), "cannot have -1 bytes"),
        (record(2, READY, b"x\r\n", tube=b"a b"), "cannot be called"),
        (record(2, 6, b"x\r\n"), "unknown state 6"),
        (record(0, READY, b"x\r\n"), "the id 0"),
        (record(2, READY, b"xyz"), "does not end with CRLF"),
        (record(1, READY, size=7), "changes its size"),
        (record(2, READY, b""), "that no job can have"),
        (record(2, READY, b"x\r\n", delay=-1), "that no job can have"),
        (record(2, DELAYED, b"x\r\n", deadline=-1), "that no job can have"),
        (record(2**63, READY, b"x\r\n"), "that no job can have"),
        (record(2**63 - 1, READY, b"x\r\n"), "that no job can have"),
        (record(2, DELAYED, b"x\r\n", deadline=2**63 - 1), "that no job can have"),
    ],
)
def test_damage_is_told_with_its_place(bad: bytes, word: str) -> None:
    log = parsed(GOOD, bad, record(3, READY, b"y\r\n"))
    assert [job.id for job, _ in log.jobs()] == [1]
    (finding,) = log.findings
    assert word in finding and f"at byte {4 + len(GOOD)}" in finding
    assert not log.notes


def test_something_behind_the_zeros_is_damage() -> None:
    assert "bytes follow behind the last record" in parsed(GOOD, tail=bytes(500) + b"x").findings[0]


def test_unknown_versions_and_files_without_a_beginning() -> None:
    for head in (b"\x09\0\0\0", b"\0\0\0\x07", b"SQLite format 3\0"):
        log = Binlog()
        log.read("binlog.3", head + GOOD)
        assert "binlog.3 has format version" in log.findings[0]
        assert not len(log)
    for nothing in (b"", b"\0", bytes(4096)):
        log = Binlog()
        log.read("binlog.3", nothing)
        assert log.notes == ["binlog.3 has no records yet"] and not log.findings


def test_a_torn_rewrite_of_a_job_does_not_lose_it() -> None:
    """beanstalkd itself drops the job then."""
    log = parsed(GOOD, GOOD[:-3])
    assert [job.body for job, _ in log.jobs()] == [b"four\r\n"]


@pytest.fixture
def flipped(seed: int) -> Iterator[bytes]:
    draw = random.Random(seed)
    data = Struct("<i").pack(7) + b"".join(make(7) for make in RECORDS) + bytes(50)

    def flips() -> Iterator[bytes]:
        for _ in range(3000):
            garbled = bytearray(data)
            for _ in range(draw.choice((1, 1, 2, 10))):
                garbled[draw.randrange(len(garbled))] ^= 1 << draw.randrange(8)
            yield bytes(garbled)

    return flips()


def test_flipped_bits_are_never_an_error(flipped: Iterator[bytes]) -> None:
    for data in flipped:
        log = Binlog()
        log.read("binlog.1", data)
        for job, _ in log.jobs():
            assert held_body(job).endswith(b"\r\n") and job.id > 0
