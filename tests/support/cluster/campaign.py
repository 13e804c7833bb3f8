"""Rounds: a cause strikes a cluster under load, the gap is measured, and what clients saw is judged as a whole."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

from tests.support.cluster.faults import CAUSES, Cause, possible
from tests.support.cluster.jobs import NS, Judge, Verdict, gaps, longest_gap
from tests.support.cluster.load import Crew, Link, drain
from tests.support.cluster.nodes import Cluster

SERVED_S = 30.0
"""By when clients must be served again, whatever happened."""
CLIENTS = 6


class Campaign:
    """Rounds on one cluster. Each crew works for some rounds; behind it, its history is judged as a whole."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.verdict = Verdict()
        self.gaps: dict[str, list[int]] = defaultdict(list)
        """In ns, by the name of the cause."""
        self._draw = random.Random(seed)
        self._judge = Judge()
        self._crews = 0

    def order(self, rounds: int) -> list[Cause]:
        """This many causes in random order: each of them as often as any other, or once more."""
        causes = possible(self.cluster)
        drawn: list[Cause] = []
        while len(drawn) < rounds:
            drawn += self._draw.sample(causes, len(causes))
        return drawn[:rounds]

    def crew(self, clients: int = CLIENTS) -> Crew:
        """Clients of this cluster that do not work yet."""
        self._crews += 1
        return Crew(self.cluster.addresses, self._draw.randrange(2**32), f"crew{self._crews}", clients)

    def run(self, causes: Sequence[Cause]) -> Verdict:
        """These, one after the other, under the load of one crew. Returns what is to be said of that crew's history."""
        crew = self.crew()
        struck: list[tuple[str, int, int]] = []
        with crew:
            for cause in causes:
                struck.append((cause.name, *self.round(cause, crew)))
        verdict = self.judge(crew)
        found = gaps(crew.record.all())
        for name, begun, ended in struck:
            self.gaps[name].append(longest_gap(found, begun, ended))
        return verdict

    def judge(self, crew: Crew) -> Verdict:
        """The verdict on a crew that has stopped. Every job is taken out of the cluster."""
        drain(lambda: Link(self.cluster.leader().address, SERVED_S), crew.record)
        verdict = self._judge.judge(crew.record.all(), crew.record.connections)
        for text in crew.record.complaints:
            verdict.faults["a client gave up"].append(text)
        self.verdict.add(verdict)
        return verdict

    def round(self, cause: Cause, crew: Crew) -> tuple[int, int]:
        """Returns when it began, and when clients were served again."""
        cluster = self.cluster
        cluster.wait_healthy()
        self._served(crew, time.monotonic_ns())
        time.sleep(self._draw.uniform(0.05, 0.3))
        before = cluster.leader()
        begun = time.monotonic_ns()
        mend = cause.strike(cluster, self._draw)
        mended = False
        if cause.moves:  # clients know; to ask the nodes all the time would take their time
            what = f"another node than {before.name} serves after: {cause.name}"
            cluster.wait(lambda: crew.served_since(begun, before.name), what, SERVED_S)
        elif cause.lasts_s:
            time.sleep(max(0.0, cause.lasts_s - (time.monotonic_ns() - begun) / NS))
            mend()
            mended = True
        self._served(crew, time.monotonic_ns())
        ended = time.monotonic_ns()
        if not mended:
            mend()
        cluster.wait_healthy()
        return begun, ended

    def _served(self, crew: Crew, since: int) -> None:
        self.cluster.wait(lambda: crew.served_since(since), "clients are served again", SERVED_S)

    def table(self) -> str:
        """Gaps by cause, for people."""
        lines = [f"{'cause':52} {'rounds':>6} {'p50 ms':>8} {'worst ms':>9}"]
        for name, values in self.in_order():
            median, worst = statistics.median(values) / 1e6, max(values) / 1e6
            lines.append(f"{name:52} {len(values):6} {median:8.0f} {worst:9.0f}")
        return "\n".join(lines)

    def in_order(self) -> list[tuple[str, list[int]]]:
        """The gaps, in the order in which causes are listed."""
        return [(cause.name, self.gaps[cause.name]) for cause in CAUSES if self.gaps.get(cause.name)]


def markdown(gaps: dict[str, list[float]]) -> list[str]:
    """The table of the page, from gaps in ms by the name of their cause."""
    lines = ["| cause | rounds | p50 | worst |", "|---|---|---|---|"]
    for cause in CAUSES:
        if values := gaps.get(cause.name):
            lines.append(
                f"| {cause.name} | {len(values)} | {statistics.median(values):.0f} ms | {max(values):.0f} ms |"
            )
    total = sum(map(len, gaps.values()))
    return [*lines, "", f"{total:,} rounds in random order."]
