"""Lives of several nodes over one fenced log that one seed decides, and planted faults that they must find.

One life: python -m tests.support.simulation.cluster [--whole] SEED. The members are real, and in every other life the
turn, the store, the engine, the sessions and the follower, too; database, network and clocks are made up, and the queue
of the other lives (tests/support/simulation/cluster/).
"""

from __future__ import annotations

import pytest

from geventstalk.cluster.member import Member
from geventstalk.cluster.wants import Steps
from tests.support.simulation.cluster.canaries import CANARIES
from tests.support.simulation.cluster.life import Life, Outcome, Parts, live
from tests.support.simulation.cluster.whole import WholeProcess
from tests.support.simulation.cluster.world import FAULTS

SEEDS = 40
"""The known lives of every run, and beside them so many drawn ones."""
LONG_SEEDS = 2_000
"""The same with --long."""
CHUNK = 20
OUTAGES = 10
CANARY_SEEDS = 400
PINNED = {
    "serves on a free lock": (4, 7, 9),
    "trusts any door": (6, 48, 52),
    "never asks the lease": (5, 8, 10),
    "counts the lease from the answer": (10, 13, 20),
    "does not wait for the lease before": (25, 76, 196),
    "does not look again after the claim": (186, 289, 326),
    "never claims": (1, 2, 3),
    "does not see the cut": (2, 4, 7),
    "does not read to the end": (21, 22, 26),
    "trusts what it has read": (1, 130, 253),
    "says goodbye too early": (214, 324),
    "resumes without a claim": (12, 17, 21),
    "replies without the lease": (14, 20, 33),
    "replies before the commit is safe": (1, 2, 3),
    "applies no deletes": (1, 3, 4),
    "never speaks again": (2, 4, 7),
    "takes a warning for success": (17, 84, 184),
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


# --- one fault after another


def takeovers_of_an_outage(seed: int, leases: float, parts: Parts | None = None) -> int:
    """How many nodes took over because the database confirmed nothing for so many leases. Nothing else fails."""
    life = Life(seed, parts)
    scenario, world, server = life.scenario, life.world, life.primary
    scenario.faults = dict.fromkeys(FAULTS, 0.0)
    scenario.slow = scenario.lingers = scenario.stumbles = 0
    scenario.replicates = server.replicates = True
    scenario.leases = 20
    before: list[int] = []

    def lose_replica() -> None:
        before.append(life.takeovers)
        server.replica_there = False
        world.after(int(leases * life.lease_ns), server.find_replica)

    world.at(world.draw.randrange(6 * life.lease_ns, 7 * life.lease_ns), lose_replica)
    life.run()
    assert before[0] > 0, "nobody led before"
    return life.takeovers - before[0]


@pytest.mark.parametrize("leases", [1.2, 2.5, 5])
def test_who_leads_still_leads_when_the_database_confirms_commits_again(leases: float) -> None:
    """Standbys see a heartbeat that stands still, and looks succeed: they claimed as soon as a claim could succeed."""
    assert [takeovers_of_an_outage(seed, leases) for seed in range(1, OUTAGES + 1)] == [0] * OUTAGES


class AsksForNoCommit(Member):
    """The fault that the lives above must find."""

    def _confirm(self) -> Steps:
        yield from ()
        self._confirmed_ns = self._changed_ns


def test_a_node_that_asks_for_no_commit_takes_over_from_one_that_is_well() -> None:
    parts = Parts(member=AsksForNoCommit)
    assert sum(takeovers_of_an_outage(seed, 1.2, parts) for seed in range(1, OUTAGES + 1)) > OUTAGES // 2


# --- planted faults


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
