"""Histograms and their quantiles: at the ends of buckets, and against the times themselves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geventstalk.core.meter import BOUNDS, BOUNDS_NS, NO_TIMES, PERCENTS, UNIT_NS, Times, quantiles
from tests.support.clock import SECOND

LONGEST_NS = 200 * 366 * 86_400 * SECOND


def measured(*times_ns: int) -> Times:
    times = Times()
    for ns in times_ns:
        times.add(ns, Times())
    return times


def exact(times_ns: list[int], percent: int) -> int:
    """The shortest of these that this many percent of them do not exceed."""
    return sorted(times_ns)[-(-len(times_ns) * percent // 100) - 1]


def test_nothing_was_measured() -> None:
    assert quantiles(Times().counts) == quantiles(NO_TIMES.counts) == [0, 0, 0]
    assert Times().count() == 0 and Times().buckets() == [0] * (BOUNDS + 1)


@pytest.mark.parametrize("at", [0, 1, 6, 7, BOUNDS - 1])
def test_where_a_bucket_ends(at: int) -> None:
    end_ns = BOUNDS_NS[at]
    assert measured(end_ns - 1).buckets().index(1) == at
    assert measured(end_ns).buckets().index(1) == at + 1


def test_buckets_read_well() -> None:
    assert [bound_ns / SECOND for bound_ns in BOUNDS_NS[:8]] == [
        *(0.000015625, 0.00003125, 0.0000625, 0.000125, 0.00025, 0.0005, 0.001, 0.002)
    ]
    assert BOUNDS_NS[-1] > 12 * 86_400 * SECOND


def test_what_is_longer_than_all_bounds_is_told_as_one() -> None:
    times = measured(0, BOUNDS_NS[-1], 2 * BOUNDS_NS[-1], LONGEST_NS)
    assert times.buckets() == [1, *[0] * (BOUNDS - 1), 3]
    assert times.count() == 4 and times.sum_ns == 3 * BOUNDS_NS[-1] + LONGEST_NS


def test_what_is_added_is_in_the_total() -> None:
    total = Times()
    one, other = Times(), Times()
    one.add(5, total)
    other.add(7 * SECOND, total)
    assert total.sum_ns == 5 + 7 * SECOND
    assert total.counts == [a + b for a, b in zip(one.counts, other.counts, strict=True)]


@given(st.lists(st.one_of(st.integers(0, 50_000), st.integers(0, 10 * SECOND), st.integers(0, LONGEST_NS)), min_size=1))
def test_quantiles_are_as_near_as_they_say(times_ns: list[int]) -> None:
    found = quantiles(measured(*times_ns).counts)
    for percent, ns in zip(PERCENTS, found, strict=True):
        right_ns = exact(times_ns, percent)
        assert abs(ns - right_ns) <= UNIT_NS or right_ns / 2 <= ns <= right_ns * 2
    assert found == sorted(found)


def test_quantiles_of_many_even_times_are_nearer() -> None:
    """Within a bucket they are interpolated."""
    draw = random.Random(1)
    times_ns = [draw.randrange(SECOND, 4 * SECOND) for _ in range(20_000)]
    found = quantiles(measured(*times_ns).counts)
    assert found == [pytest.approx(exact(times_ns, percent), rel=0.05) for percent in PERCENTS]


def test_quantiles_between_two_readings() -> None:
    times = measured(*[10 * SECOND] * 100)
    before = [*times.counts]
    times.add(SECOND // 1000, Times())
    recently = [now - then for now, then in zip(times.counts, before, strict=True)]
    assert quantiles(recently) == [2_000_000] * 3
