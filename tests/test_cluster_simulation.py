"""Lives of several nodes over one fenced log that one seed decides, and planted faults that they must find.

One life: python -m tests.support.simulation.cluster [--whole] SEED. The members are real, and in every other life the
turn, the store, the engine, the sessions and the follower, too; database, network and clocks are made up, and the queue
of the other lives (tests/support/simulation/cluster/).
"""

from __future__ import annotations

import pytest

from tests.support.simulation.cluster.canaries import CANARIES
from tests.support.simulation.cluster.life import Outcome, Parts, live
from tests.support.simulation.cluster.whole import WholeProcess

SEEDS = 40
"""The known lives of every run, and beside them so many drawn ones."""
LONG_SEEDS = 2_000
"""The same with --long."""
CHUNK = 20
CANARY_SEEDS = 400
PINNED = {
    "serves on a free lock": (7, 13, 17),
    "trusts any door": (9, 48, 52),
    "never asks the lease": (2, 4, 5),
    "counts the lease from the answer": (15, 27, 48),
    "does not wait for the lease before": (177, 202, 342),
    "does not look again after the claim": (21, 123),
    "never claims": (1, 2, 3),
    "does not see the cut": (1, 3, 4),
    "does not read to the end": (8, 12, 18),
    "trusts what it has read": (172, 190, 266),
    "says goodbye too early": (23, 205, 214),
    "resumes without a claim": (5, 12, 17),
    "replies without the lease": (125, 126, 141),
    "replies before the commit is safe": (1, 2, 3),
    "applies no deletes": (1, 2, 4),
    "takes a warning for success": (17, 43, 73),
}
"""Lives that show a planted fault, to be tried first. A change of the code makes them other lives. Then others are
tried, which takes longer."""
WHOLE = Parts(process=WholeProcess)


def explain(outcome: Outcome) -> str:
    replay = f"replay with: python -m tests.support.simulation.cluster {outcome.scenario.seed}, perhaps with --whole"
    return "\n".join([*outcome.trace[-40:], replay])


def lives(first: int) -> list[Outcome]:
    """So many lives, which must be sound."""
    outcomes = [live(seed, WHOLE if seed % 2 else None) for seed in range(first, first + CHUNK)]
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


def shows(seed: int, name: str) -> bool:
    """Whether a life finds a planted fault and is sound without it."""
    parts = CANARIES[name]
    sound = WHOLE if issubclass(parts.process, WholeProcess) else Parts()
    return live(seed, parts).failure is not None and live(seed, sound).failure is None


@pytest.mark.parametrize("name", CANARIES)
def test_a_planted_fault_is_found(name: str) -> None:
    found = any(shows(seed, name) for seed in (*PINNED[name], *range(1, CANARY_SEEDS + 1)))
    assert found, f"{CANARY_SEEDS} lives do not show it"


def test_a_seed_is_the_same_life_again(seed: int) -> None:
    assert live(seed, WHOLE).digest == live(seed, WHOLE).digest
