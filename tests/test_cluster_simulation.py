"""Lives of several nodes over one fenced log that one seed decides, and planted faults that they must find.

One life: python -m tests.support.simulation.cluster SEED. The members are real; the database, the network, the clocks
and the queue are made up (tests/support/simulation/cluster/).
"""

from __future__ import annotations

import pytest

from tests.support.simulation.cluster.life import Outcome, live

SEEDS = 40
"""The known lives of every run, and beside them so many drawn ones."""
LONG_SEEDS = 2_000
"""The same with --long."""
CHUNK = 20


def explain(outcome: Outcome) -> str:
    replay = f"replay with: python -m tests.support.simulation.cluster {outcome.scenario.seed}"
    return "\n".join([*outcome.trace[-40:], replay])


def lives(first: int) -> list[Outcome]:
    """So many lives, which must be sound."""
    outcomes = [live(seed) for seed in range(first, first + CHUNK)]
    for outcome in outcomes:
        assert outcome.failure is None, explain(outcome)
    return outcomes


CHUNKS = [
    *range(0, SEEDS, CHUNK),
    *[pytest.param(first, marks=pytest.mark.long) for first in range(SEEDS, LONG_SEEDS, CHUNK)],
]


@pytest.mark.slow
@pytest.mark.parametrize("first", CHUNKS)
def test_lives_of_known_seeds(first: int) -> None:
    outcomes = lives(first + 1)
    # Otherwise the lives are sound because nothing happens in them.
    assert sum(outcome.replies for outcome in outcomes) > 50 * CHUNK
    assert sum(outcome.takeovers for outcome in outcomes) > 2 * CHUNK


@pytest.mark.slow
@pytest.mark.parametrize("first", CHUNKS)
def test_lives_of_drawn_seeds(seed: int, first: int) -> None:
    lives(seed + first)
