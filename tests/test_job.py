"""The fields of a job: each holds all that it may have to hold, and they take no more memory than they must."""

from __future__ import annotations

import sys

import pytest

from geventstalk._build import BUILD
from geventstalk.core.engine import Engine
from geventstalk.core.job import RESERVED, U32_MAX, Job, Tally
from geventstalk.durable.records import ClockOffset
from tests.support.bench import Worker

ID_LAST = 2**63 - 1
NUMBERS = ("id", "tube", "pri", "delay_s", "ttr_s", "rank", "created_ns", "since_ns", "segment", "state")
COUNTS = ("reserves", "timeouts", "releases", "buries", "kicks")


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**31, U32_MAX])
def test_unsigned_numbers(value: int) -> None:
    job = Job(1, value, value, value, value)
    assert (job.tube, job.pri, job.delay_s, job.ttr_s, job.segment) == (value, value, value, value, 0)
    job = Job(ID_LAST, 0, 0, 0, 0)
    job.tube = job.pri = job.delay_s = job.ttr_s = job.segment = value
    assert (job.tube, job.pri, job.delay_s, job.ttr_s, job.segment) == (value, value, value, value, value)
    assert job.id == ID_LAST


@pytest.mark.parametrize("value", [-(2**62), -113, -1, 0, 2**63 - 1])
def test_moments(value: int) -> None:
    job = Job(1, 0, 0, 0, 0)
    job.rank = job.created_ns = job.since_ns = value
    assert (job.rank, job.created_ns, job.since_ns) == (value, value, value)


def test_a_holder_takes_no_memory_until_there_is_one() -> None:
    job = Job(1, 0, 0, 0, 0)
    job.holder = 0
    assert job.tally is None and job.holder == 0
    job.holder = 2**40
    assert job.holder == 2**40
    job.counts().reserves += 1
    job.holder = 0
    assert job.holder == 0 and job.counts().reserves == 1


@pytest.mark.skipif(BUILD != "compiled", reason="the size of a job counts in the compiled build only")
def test_what_a_job_takes() -> None:
    job = Job(1, 0, 0, 0, 0)
    assert job.tally is None
    assert sys.getsizeof(job) <= 96
    assert sys.getsizeof(Tally()) <= 80


def test_the_numbers_of_tubes_begin_again_and_leave_out_those_that_are_there() -> None:
    engine = Engine(0)
    client = Worker()
    engine.join(client)
    engine.watch(client, b"old")
    engine._tube_number = U32_MAX - 1
    for name in b"last", b"again", b"next":
        engine.watch(client, name)
    assert [engine.tubes[name].number for name in (b"default", b"old", b"last", b"again", b"next")] == [
        1,
        2,
        U32_MAX,
        3,
        4,
    ]
    engine.use(client, b"last")
    job = engine.open_put(client, 0, 0, 1, 0)
    engine.put(job, b"\r\n", 0)
    held = engine.reserve(client, 0)
    assert held is job and engine.tube_of(job).name == b"last" and job.state == RESERVED


@pytest.mark.parametrize("wall_ns", [-(2**63), -(2**62), 0, 2**62, 2**63 - 1])
def test_whatever_a_file_says_a_moment_fits_into_a_job(wall_ns: int) -> None:
    job = Job(1, 0, 0, 0, 0)
    for epoch in ClockOffset(0, 0), ClockOffset(1_750_000_000 * 10**9, 5), ClockOffset(0, 10**18):
        job.created_ns = found_ns = epoch.to_monotonic(wall_ns)
        assert -(2**63) < found_ns < 2**63 and job.created_ns == found_ns
        if abs(wall_ns) < 2**61:
            assert epoch.to_wall(found_ns) == wall_ns


def test_a_moved_job_is_the_same() -> None:
    """All of it, whatever is added to Job and Tally."""
    job = Job(1, 2, 3, 4, 5)
    values = {name: 6 + at for at, name in enumerate(NUMBERS)}
    for name, value in values.items():
        setattr(job, name, value)
    job.tally = Tally(1, 2, 3, 4, 5)
    job.holder = 9
    for body in b"x\r\n", b"x" * 5000:
        job.body = body
        moved = job.moved()
        assert moved is not job and moved.tally is not job.tally and moved.tally is not None
        assert {name: getattr(moved, name) for name in values} == values
        assert (moved.body, moved.holder) == (body, 9)
        assert [getattr(moved.tally, name) for name in COUNTS] == [1, 2, 3, 4, 5]
    job.tally = None
    assert job.moved().tally is None


@pytest.mark.skipif(BUILD == "compiled", reason="a compiled class has no slots")
def test_nothing_of_a_job_is_forgotten_when_it_moves() -> None:
    fields = {name.lstrip("_") for name in Job.__slots__}
    assert fields == {*NUMBERS, "body", "holder", "tally"} and {*Tally.__slots__} == {*COUNTS, "holder"}
