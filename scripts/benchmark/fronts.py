"""Front-end processes: processor time a command of the server's process and of its front, and the rate of both.

The server's process has the first core and the load the last. The front has a core between them, or that of the load.
Invariant: beanstalkd, the server alone and the server with a front do the same work, in turns.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from scripts.benchmark.load import Load, LoadError
from scripts.benchmark.rows import WARM_UP_S, Scale, Watch, work
from scripts.benchmark.servers import REFERENCE, Build, serving, spent

ROWS: Sequence[tuple[str, dict[str, int]]] = (
    ("put+reserve+delete, 50 connections", {"connections": 50}),
    ("the same, 500 connections", {"connections": 500}),
    ("the same, 50 connections, 16 deep", {"connections": 50, "depth": 16}),
    ("put, 50 connections, 100 deep", {"connections": 50, "depth": 100, "cycle": 0}),
    ("put+reserve+delete, 1 connection", {"connections": 1}),
)
FRONT = ("--io-processes", "1")


def measure(builds: Sequence[Build], scale: Scale, core: int, load_core: int, runs: int) -> dict[str, Any]:
    """Returns what report.fronts_part() shows, of the last of our builds."""
    front_core = core + 1 if core + 1 < load_core else load_core
    of_front = "the front on the core of the load" if front_core == load_core else "a core each"
    ours = [build for build in builds if build.name != REFERENCE]
    found: dict[str, Any] = {"build": ours[-1].name, "cores": of_front, "runs": runs, "rows": []}
    kinds: list[tuple[str, Build, tuple[str, ...]]] = [
        ("reference", build, ()) for build in builds if build.name == REFERENCE
    ]
    kinds += [("alone", ours[-1], ()), ("front", ours[-1], FRONT)]
    for title, words in ROWS:
        values: dict[str, list[list[float]]] = {}
        for run in range(runs):
            for kind, build, flags in kinds if run % 2 == 0 else reversed(kinds):
                try:
                    values.setdefault(kind, []).append(one(build, flags, words, scale, core, front_core))
                except (LoadError, OSError) as error:
                    print(f"{title}, {kind}: a run is lost: {error}", file=sys.stderr, flush=True)
        found["rows"].append({"title": title, "kinds": values})
        print(f"{title}: {_line(values)}", flush=True)
    return found


def one(
    build: Build, flags: tuple[str, ...], words: dict[str, int], scale: Scale, core: int, front_core: int
) -> list[float]:
    """Commands a second; microseconds a command and those in user space, of the server's process and of its front."""
    with serving(build, flags, core=core) as server:
        fronts = server.pids()[1:]
        for pid in fronts:
            os.sched_setaffinity(pid, {front_core})
        load = Load(
            server.port,
            connections=words["connections"],
            depth=words.get("depth", 1),
            cycle=bool(words.get("cycle", 1)),
        )
        try:
            load.work(min(WARM_UP_S, scale.seconds / 4))
            before = [spent(pid) for pid in (server.pid, *fronts)]
            watch = Watch(server)
            commands = work(load, scale.seconds)
            found = [watch.sample(commands, a_second=True).value]
            after = [spent(pid) for pid in (server.pid, *fronts)]
        finally:
            load.close()
        for begun, ended in zip(before, after, strict=True):
            found += [seconds * 1e6 / commands for seconds in ended.since(begun)]
        return found


def _line(values: dict[str, list[list[float]]]) -> str:
    shown = []
    for kind, runs in values.items():
        if not runs:
            continue
        costs = [min(run[at] for run in runs) for at in range(1, len(runs[0]), 2)]
        rate = statistics.median(run[0] for run in runs)
        shown.append(f"{kind} {rate:,.0f}/s, {' + '.join(f'{cost:.2f}' for cost in costs)} µs")
    return "; ".join(shown)
