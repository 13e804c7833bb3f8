"""What `scripts/demo --cluster` shows: two nodes on two servers of PostgreSQL; one of each is killed under load.

Clients use the addresses of both nodes and connect again when a connection breaks, as real ones do. What they saw is
judged at the end: what was acknowledged is there or was deleted, nothing came back, and nobody held what another held.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.cluster.campaign import Campaign
from tests.support.cluster.faults import BY_NAME, Cause
from tests.support.cluster.jobs import LOST, Verdict, gaps, longest_gap
from tests.support.cluster.load import Crew
from tests.support.cluster.nodes import Cluster
from tests.support.postgres import have_psycopg, programs

CHANGES = 1500
"""So many changes are acknowledged before each event, and behind the last one."""
QUIET_S = 60.0
SHOWN_FAULTS = 10

EVENTS = [
    BY_NAME["kill -9 of the active node"],
    BY_NAME["cluster promote"],
    BY_NAME["primary killed, replica promoted"],
]

Say = Callable[[str], None]


def problem() -> str:
    """Why there can be no demo here; "" when there can be."""
    if programs() is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    if not have_psycopg():
        return "psycopg is not installed (pip install 'geventstalk[postgres]')"
    return ""


class Demo:
    """One run. `meddle` is called behind the last event: a test does damage there."""

    def __init__(self, seed: int, say: Say, changes: int = CHANGES, keep: bool = False) -> None:
        self.meddle: Callable[[Cluster], None] = lambda cluster: None
        self._seed = seed
        self._say = say
        self._changes = changes
        self._keep = keep

    def run(self) -> int:
        """Returns the exit code: 0 only when nothing was lost, nothing invented and nothing else was wrong."""
        if reason := problem():
            self._say(f"FAULT: {reason}")
            return 1
        cluster = Cluster()
        begun = time.monotonic()
        try:
            with cluster:
                try:
                    fine = self._play(cluster, begun)
                except AssertionError as error:
                    self._say(f"FAULT: the demo did not come to its end: {error}")
                    fine = False
                if self._keep or not fine:
                    self._say(f"the logs are kept in {cluster.keep()}")
        except AssertionError as error:
            self._say(f"FAULT: the cluster does not start: {error}")
            return 1
        return 0 if fine else 1

    def _play(self, cluster: Cluster, begun: float) -> bool:
        where = " and ".join(f"{node.name} on {node.address[0]}:{node.address[1]}" for node in cluster.nodes)
        self._say(f"two servers of PostgreSQL, one the synchronous replica of the other; nodes {where}")
        campaign = Campaign(cluster, self._seed)
        crew = campaign.crew()
        self._say(
            f"{crew.clients} clients put, reserve, release, bury, kick and delete at both nodes, --seed {self._seed}"
        )
        with crew:
            for cause in EVENTS:
                self._work(cluster, crew)
                self._event(cluster, campaign, cause, crew)
            self._work(cluster, crew)
        self.meddle(cluster)
        verdict = campaign.judge(crew)
        self._sum_up(verdict, time.monotonic() - begun)
        return bool(verdict)

    def _work(self, cluster: Cluster, crew: Crew) -> None:
        enough = crew.answered() + self._changes
        cluster.wait(lambda: crew.answered() >= enough, f"{self._changes} changes are acknowledged", QUIET_S)

    def _event(self, cluster: Cluster, campaign: Campaign, cause: Cause, crew: Crew) -> None:
        before = cluster.leader().name
        self._say(f"{cause.name}, with {crew.answered()} changes acknowledged; node {before} is active")
        begun, ended = campaign.round(cause, crew)
        gap = longest_gap(gaps(crew.record.all()), begun, ended)
        self._say(f"  node {cluster.leader().name} is active; for {gap / 1e6:.0f} ms no change was acknowledged")

    def _sum_up(self, verdict: Verdict, seconds: float) -> None:
        counts = verdict.counts
        changes = sum(counts[name] for name in ("put INSERTED", "delete DELETED", "release RELEASED", "bury BURIED"))
        unanswered = sum(count for name, count in counts.items() if name.endswith("without answer"))
        lost = len(verdict.faults[LOST])
        others = sum(len(lines) for kind, lines in verdict.faults.items() if kind != LOST)
        rows = [
            ("jobs put and acknowledged", counts["put INSERTED"]),
            ("puts, deletes, releases and buries acknowledged", changes),
            ("commands without an answer, because of the kills", unanswered),
            ("lost", lost),
            ("invented, back after a delete, held by two, or otherwise wrong", others),
        ]
        for label, number in rows:
            self._say(f"{label}: {number}")
        for kind, lines in verdict.faults.items():
            for line in lines[:SHOWN_FAULTS]:
                self._say(f"FAULT: {kind}: {line}")
        self._say(f"{seconds:.1f} s in all")
