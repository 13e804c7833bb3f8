"""The cluster part: rates on PostgreSQL with a synchronous replica beside SQLite, and takeovers with and without jobs.

Invariant: both kinds of journal do the same work under the same build, in turns. PostgreSQL's processes run wherever
the system puts them: on a machine of two cores they take time from the server and from the load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from journal import fence_for
from scripts.benchmark.load import Client, LoadError, fill, put_request
from scripts.benchmark.rows import Row, Sample, Scale, throughput
from scripts.benchmark.servers import Build
from tests.support.cluster.nodes import Cluster
from tests.support.postgres import Pair, new_schema, programs, scratch

SQLITE, POSTGRES = "SQLite", "PostgreSQL"
GOAL = 0.5
TAKEOVERS = 5
LIMIT_S = 60.0

RATES = (
    ("`-f0`: put, 50 connections", {"connections": 50, "cycle": 0}),
    ("`-f0`: put 100 deep, 50 connections", {"connections": 50, "depth": 100, "cycle": 0}),
    ("`-f0`: put+reserve+delete, 50 connections", {"connections": 50}),
    ("`-f0`: put, 1 connection", {"connections": 1, "cycle": 0}),
)


def measure(builds: Sequence[Build], scale: Scale, core: int, runs: int) -> dict[str, Any]:
    """All of it, for these builds. Raises LoadError without PostgreSQL."""
    if programs() is None:
        raise LoadError("PostgreSQL is not installed")
    found: dict[str, Any] = {"rates": [], "takeovers": []}
    pair = Pair(scratch())
    try:
        pair.start()
        for title, load in RATES:
            values: dict[str, dict[str, list[float]]] = {}
            costs: dict[str, dict[str, list[float]]] = {}
            for run in range(runs):
                for build in builds if run % 2 == 0 else reversed(builds):
                    for kind in (SQLITE, POSTGRES):
                        sample = _rate(build, kind, pair, load, scale, core)
                        values.setdefault(build.name, {}).setdefault(kind, []).append(sample.value)
                        cost_us = sample.server_busy * 1e6 / sample.value
                        costs.setdefault(build.name, {}).setdefault(kind, []).append(cost_us)
            found["rates"].append({"title": title, "values": values, "cpu_us": costs})
            print(_rate_line(title, values), flush=True)
    finally:
        pair.close()
    for build in builds:
        for jobs in (0, scale.jobs):
            seconds = takeovers(build, jobs)
            found["takeovers"].append({"build": build.name, "jobs": jobs, "seconds": seconds})
            print(f"takeover of {build.name} with {jobs:,} jobs: {_ms(seconds)}", flush=True)
    return found


def _rate(build: Build, kind: str, pair: Pair, load: dict[str, int], scale: Scale, core: int) -> Sample:
    place = "{dir}" if kind == SQLITE else f"{pair.url}?schema={new_schema()}"
    row = Row(kind, kind, 0, 0, throughput, flags=("-b", place, "-f0"), load=load)
    return throughput(build, row, scale, core)


def takeovers(build: Build, jobs: int) -> list[float]:
    """Seconds from kill -9 of the active node to the first put that another node acknowledges, some times."""
    seconds = []
    with Cluster(command=build.command, cwd=build.cwd) as cluster:
        if jobs:
            fill(cluster.leader().address[1], jobs)
        for _ in range(TAKEOVERS):
            cluster.wait_healthy()
            followers_have_all(cluster, LIMIT_S)
            old, new = cluster.leader(), cluster.standby()
            begun = time.monotonic()
            old.kill()
            until_served(new.address[1], begun + LIMIT_S)
            seconds.append(time.monotonic() - begun)
            old.start()
    return seconds


def followers_have_all(cluster: Cluster, limit_s: float) -> None:
    """Returns when the standby has read what there is, as the nodes tell: nothing is put meanwhile."""
    fence = fence_for(cluster.url)
    try:
        cluster.wait(lambda: len({each.place for each in fence.members()}) == 1, "all has been read", limit_s)
    finally:
        fence.close()


def until_served(port: int, end: float) -> None:
    """Returns when a put is acknowledged there."""
    put = put_request()
    while time.monotonic() < end:
        try:
            with Client(port) as client:
                client.ask(put, b"INSERTED ")
            return
        except (OSError, LoadError):
            time.sleep(0.001)
    raise LoadError("no node took over")


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f} ms (worst {max(seconds) * 1000:.0f} ms)"


def _rate_line(title: str, values: dict[str, dict[str, list[float]]]) -> str:
    cells = []
    for build, kinds in values.items():
        sqlite, postgres = statistics.median(kinds[SQLITE]), statistics.median(kinds[POSTGRES])
        cells.append(f"{build}: SQLite {sqlite:,.0f}, PostgreSQL {postgres:,.0f}, ratio {postgres / sqlite:.2f}")
    return f"{title:44} {'; '.join(cells)}"
