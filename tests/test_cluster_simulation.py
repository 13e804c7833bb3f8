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
    "serves on a free lock": (4, 5, 7),
    "trusts any door": (9, 17, 43),
    "never asks the lease": (5, 15, 21),
    "counts the lease from the answer": (15, 27, 33),
    "does not wait for the lease before": (24, 44, 49),
    "does not look again after the claim": (49, 100, 116),
    "never claims": (1, 2, 3),
    "does not see the cut": (4, 6, 7),
    "does not read to the end": (8, 12, 18),
    "trusts what it has read": (12, 49, 63),
    "says goodbye too early": (83, 107),
    "resumes without a claim": (5, 6, 12),
    "writes without a lock": (749,),
    "replies without the lease": (5, 28, 52),
    "replies before the commit is safe": (1, 2, 3),
    "applies no deletes": (1, 2, 4),
    "takes a warning for success": (1, 13, 49),
}
"""Lives that show a planted fault. A change of the code makes them other lives: as long as one of them shows its fault,
nothing needs to be done."""
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
    if any(shows(seed, name) for seed in PINNED[name]):
        return
    found = [seed for seed in range(1, CANARY_SEEDS + 1) if shows(seed, name)][:3]
    if found:
        pytest.fail(f"no pinned life shows it any more, but {found} do: they belong in PINNED")
    pytest.fail(f"{CANARY_SEEDS} lives do not show it")


def test_a_seed_is_the_same_life_again(seed: int) -> None:
    assert live(seed, WHOLE).digest == live(seed, WHOLE).digest
