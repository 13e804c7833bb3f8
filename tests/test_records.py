"""Records: what of a job goes into the journal comes back, on another day's clock, or is a ValueError."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geventstalk.core.job import (
    BURIED,
    DELAYED,
    DELETED,
    READY,
    RESERVED,
    U32_MAX,
    UPLOADING,
    Job,
    Tally,
)
from geventstalk.durable.records import (
    ClockOffset,
    Encoder,
    apply_change,
    decode_whole,
    encode_change,
    encode_whole,
    make_plausible,
)
from journal.log import GROWN_BYTES
from tests.support.clock import BOOT_NS, SECOND

WALL_NS = 1_750_000_000 * SECOND
ID_LAST = 2**63 - 1
EPOCH = ClockOffset(WALL_NS, BOOT_NS)
LATER = ClockOffset(WALL_NS + 3_600 * SECOND, 77 * SECOND)
"""An hour later, after the machine was started anew: its monotonic clock is younger than that of the first offset."""

Facts = tuple[object, ...]


def job_of(state: int = READY, rank: int = 0, body: bytes = b"body\r\n", tally: Tally | None = None) -> Job:
    job = Job(42, 3, 1000, 7, 60)
    job.state, job.rank, job.body, job.tally = state, rank, body, tally
    job.created_ns = BOOT_NS - 5 * SECOND
    return job


def counts(job: Job) -> Facts | None:
    tally = job.tally
    if tally is None:
        return None
    return tally.reserves, tally.timeouts, tally.releases, tally.buries, tally.kicks


def facts(job: Job) -> Facts:
    return job.id, job.state, job.pri, job.delay_s, job.ttr_s, job.rank, job.created_ns, job.body, counts(job)


def test_epoch() -> None:
    assert EPOCH.to_wall(BOOT_NS) == WALL_NS
    assert EPOCH.to_monotonic(WALL_NS) == BOOT_NS
    assert EPOCH.to_wall(BOOT_NS + 5) == WALL_NS + 5
    assert LATER.to_monotonic(WALL_NS) == 77 * SECOND - 3_600 * SECOND  # before the machine was started: negative


@pytest.mark.parametrize("tally", [None, Tally(1, 2, 3, 4, 5), Tally(U32_MAX, 0, U32_MAX, 0, U32_MAX), Tally()])
@pytest.mark.parametrize(
    ("state", "rank"), [(READY, 0), (DELAYED, BOOT_NS + 9 * SECOND), (BURIED, 12), (BURIED, 2**62), (DELAYED, 0)]
)
def test_whole_job_comes_back(state: int, rank: int, tally: Tally | None) -> None:
    job = job_of(state, rank, tally=tally)
    again, name = decode_whole(42, encode_whole(job, b"a-tube", EPOCH), EPOCH)
    assert name == b"a-tube"
    assert facts(again) == facts(job)
    assert again.holder == 0 and again.tube == 0


def test_an_encoder_writes_job_after_job_as_each_alone(seed: int) -> None:
    """The parts that it keeps of the last one must not stand in the next, whatever the two differ in."""
    draw = random.Random(seed)
    encoder = Encoder(EPOCH)
    job = job_of(READY, 0)
    name = b"t"
    for _ in range(2000):
        match draw.randrange(8):
            case 0:
                job.pri = draw.choice([0, 1, 2**32 - 1])
            case 1:
                job.delay_s = draw.choice([0, 1, 2**32 - 1])
            case 2:
                job.ttr_s = draw.choice([1, 60, 2**32 - 1])
            case 3:
                job.created_ns = draw.choice([0, BOOT_NS, BOOT_NS + 1])
            case 4:
                job.state, job.rank = draw.choice([(READY, 0), (BURIED, 7), (DELAYED, BOOT_NS + 9), (RESERVED, 5)])
            case 5:
                job.tally = draw.choice([None, Tally(1, 2, 3, 4, 5)])
            case 6:
                name = draw.choice([b"t", b"u", b"default"])
            case _:
                job.body = draw.choice([b"\r\n", b"body\r\n"])
        assert encoder.whole(job, name) == encode_whole(job, name, EPOCH)


@pytest.mark.parametrize("rank", [0, 5, BOOT_NS + 60 * SECOND])
@pytest.mark.parametrize("state", [READY, RESERVED])
def test_a_reserved_job_is_kept_as_a_ready_one(state: int, rank: int) -> None:
    """Whatever rank it has at the moment: a restart ranks it by its priority."""
    again, _ = decode_whole(42, encode_whole(job_of(state, rank), b"t", EPOCH), EPOCH)
    assert (again.state, again.rank) == (READY, 0)
    changed = job_of(DELAYED, 99)
    apply_change(changed, encode_change(job_of(state, rank), EPOCH), EPOCH)
    assert (changed.state, changed.rank) == (READY, 0)


@pytest.mark.parametrize(
    "body", [b"\r\n", b"x\r\n", b"a\r\nb\r\n", b"\r\n\r\n", bytes(range(256)) + b"\r\n", b"\0" * 70_000 + b"\r\n"]
)
@pytest.mark.parametrize("name", [b"t", b"default", b"x" * 200])
def test_any_body_and_any_name(name: bytes, body: bytes) -> None:
    again, found = decode_whole(42, encode_whole(job_of(body=body), name, EPOCH), EPOCH)
    assert (found, again.body) == (name, body)


def test_the_largest_numbers() -> None:
    job = Job(ID_LAST, 1, U32_MAX, U32_MAX, U32_MAX)
    job.state, job.body, job.created_ns = DELAYED, b"\r\n", BOOT_NS
    job.rank = BOOT_NS + U32_MAX * SECOND
    again, _ = decode_whole(ID_LAST, encode_whole(job, b"t", EPOCH), EPOCH)
    assert facts(again) == facts(job)


def test_counts_beyond_32_bits_do_not_fail() -> None:
    job = job_of(tally=Tally(2**32 + 5, 2**40, 0, 0, 2**32 - 1))
    again, _ = decode_whole(42, encode_whole(job, b"t", EPOCH), EPOCH)
    assert counts(again) == (5, 0, 0, 0, U32_MAX)


def test_a_deadline_is_a_moment_of_the_wall_clock() -> None:
    """Delayed for 9 s, found again an hour later by a process whose monotonic clock began elsewhere."""
    payload = encode_whole(job_of(DELAYED, BOOT_NS + 9 * SECOND), b"t", EPOCH)
    again, _ = decode_whole(42, payload, LATER)
    assert again.rank == 77 * SECOND - (3_600 - 9) * SECOND
    assert again.created_ns == 77 * SECOND - 3_605 * SECOND
    assert LATER.to_wall(again.rank) == WALL_NS + 9 * SECOND
    twice, _ = decode_whole(42, encode_whole(again, b"t", LATER), EPOCH)
    assert twice.rank == BOOT_NS + 9 * SECOND


def test_the_number_of_a_burying_is_no_moment() -> None:
    again, _ = decode_whole(42, encode_whole(job_of(BURIED, 12), b"t", EPOCH), LATER)
    assert again.rank == 12


@pytest.mark.parametrize("tally", [None, Tally(1, 2, 3, 4, 5)])
@pytest.mark.parametrize("before", [None, Tally(9, 9, 9, 9, 9)])
def test_a_change_is_applied_to_the_job(before: Tally | None, tally: Tally | None) -> None:
    job = job_of(READY, tally=before)
    changed = job_of(BURIED, 8, tally=tally)
    changed.pri, changed.delay_s = 5, 0
    payload = encode_change(changed, EPOCH)
    assert apply_change(job, payload, EPOCH) == len(payload)
    assert (job.state, job.pri, job.delay_s, job.rank) == (BURIED, 5, 0, 8)
    assert counts(job) == counts(changed)
    assert (job.ttr_s, job.body, job.created_ns) == (60, b"body\r\n", BOOT_NS - 5 * SECOND)


def test_a_change_costs_few_bytes() -> None:
    assert len(encode_change(job_of(), EPOCH)) <= 20
    assert len(encode_change(job_of(tally=Tally(1)), EPOCH)) <= 40


# --- what is not a record


@pytest.mark.parametrize("tally", [None, Tally(1, 2, 3, 4, 5)])
def test_a_truncated_record_is_refused(tally: Tally | None) -> None:
    payload = encode_whole(job_of(DELAYED, BOOT_NS, tally=tally), b"a-tube", EPOCH)
    for length in range(len(payload)):
        with pytest.raises(ValueError, match=r"short|state"):
            decode_whole(42, payload[:length], EPOCH)
    change = encode_change(job_of(tally=tally), EPOCH)
    for length in range(len(change)):
        with pytest.raises(ValueError, match="short"):
            apply_change(job_of(), change[:length], EPOCH)


@pytest.mark.parametrize("state", [UPLOADING, RESERVED, DELETED, 6, 0x3F])
@pytest.mark.parametrize("tally", [None, Tally()])
def test_a_state_that_cannot_be_kept_is_refused(state: int, tally: Tally | None) -> None:
    for payload in (encode_whole(job_of(tally=tally), b"t", EPOCH), encode_change(job_of(tally=tally), EPOCH)):
        spoiled = bytes([payload[0] & 0x80 | state]) + payload[1:]
        with pytest.raises(ValueError, match="state"):
            apply_change(job_of(), spoiled, EPOCH)


def test_a_body_without_its_end_is_refused() -> None:
    payload = encode_whole(job_of(body=b"abc\r\n"), b"t", EPOCH)
    with pytest.raises(ValueError, match="short"):
        decode_whole(42, payload[:-2] + b"xy", EPOCH)


@settings(deadline=None, database=None, print_blob=True, max_examples=300)
@given(st.binary(max_size=80), st.sampled_from((READY, DELAYED, BURIED)), st.booleans())
def test_any_bytes_are_a_job_or_a_value_error(rest: bytes, state: int, tally: bool) -> None:
    for payload in (rest, bytes([state | 0x80 * tally]) + rest):
        try:
            job, name = decode_whole(1, payload, EPOCH)
        except ValueError:
            continue
        assert encode_whole(job, name, EPOCH)[0] == payload[0]


@settings(deadline=None, database=None, print_blob=True)
@given(
    st.sampled_from((READY, DELAYED, BURIED)),
    st.integers(0, 2**61),
    st.integers(0, U32_MAX),
    st.integers(0, U32_MAX),
    st.integers(1, U32_MAX),
    st.none() | st.tuples(*[st.integers(0, U32_MAX)] * 5),
    st.binary(max_size=300),
    st.integers(-(2**60), 2**60),
)
def test_any_job_comes_back(
    state: int, rank: int, pri: int, delay_s: int, ttr_s: int, tally: tuple[int, ...] | None, body: bytes, shift: int
) -> None:
    job = Job(1, 1, pri, delay_s, ttr_s)
    job.state, job.body, job.created_ns = state, body + b"\r\n", 5
    job.rank = 0 if state == READY else rank
    job.tally = None if tally is None else Tally(*tally)
    other = ClockOffset(shift, 0)
    again, _ = decode_whole(1, encode_whole(job, b"t", other), other)
    assert facts(again) == facts(job)


def test_a_job_of_a_wrong_clock_is_made_plausible() -> None:
    """A machine without a clock of its own wrote it in another year."""
    now_ns = 77 * SECOND
    for years in (-56, 56):
        early = ClockOffset(WALL_NS + years * 31_536_000 * SECOND, BOOT_NS)
        job = job_of(DELAYED, BOOT_NS + 5 * SECOND)
        found, _ = decode_whole(42, encode_whole(job, b"t", early), ClockOffset(WALL_NS, now_ns))
        make_plausible(found, now_ns)
        assert found.created_ns <= now_ns, "no age is negative"
        assert found.rank <= now_ns + job.delay_s * SECOND, "no delay is longer than it was"
    later, _ = decode_whole(42, encode_whole(job_of(DELAYED, BOOT_NS + 5 * SECOND), b"t", EPOCH), LATER)
    before = facts(later)
    make_plausible(later, now_ns)
    assert facts(later) == before, "sound times stay"


def test_a_whole_job_grows_by_no_more_than_the_log_is_told() -> None:
    """The log keeps room for that: it may ask for a job anew when the disk is full."""
    job = Job(1, 0, 0, 0, 60)
    job.state, job.body = READY, b"body\r\n"
    before = len(encode_whole(job, b"tube", EPOCH))
    job.state, job.rank, job.delay_s = DELAYED, 1, 10
    job.tally = Tally(1, 2, 3, 4, 5)
    assert len(encode_whole(job, b"tube", EPOCH)) == before + GROWN_BYTES
