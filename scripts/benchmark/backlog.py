"""A backlog: bodies beyond --max-memory beside the same in memory, and the memory of a backlog that is gone.

Invariant: with and without the cap a server does the same work, in turns; each job that is reserved is the oldest one,
whose body has left memory where there is a cap.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from scripts.benchmark.load import Client, Load, LoadError, fill, put_request
from scripts.benchmark.rows import WARM_UP_S, Scale, Watch, work
from scripts.benchmark.servers import REFERENCE, Build, serving

BODY_BYTES = 10_000
DEPTH = 4
TIMES_THE_CAP = 4
SEGMENTS = 16
STAYS = 1000
"""One job of this many stays."""
GIVEN_BACK_S = 12.0
"""After this long the memory of jobs that are gone has been given back."""
_LOAD = 20
_MB = 1e6


def jobs_of(scale: Scale) -> int:
    """Returns how many jobs with large bodies the backlog has."""
    return max(2000, scale.jobs // 50)


def flags_of(scale: Scale) -> tuple[str, ...]:
    """A journal in segments of which the cap has room for as many as docs/operating.md asks for."""
    return "-b", "{dir}", "-F", "-s", str(jobs_of(scale) * BODY_BYTES // TIMES_THE_CAP // SEGMENTS)


def cap_of(scale: Scale) -> str:
    """The bound of --max-memory beside it."""
    return f"{jobs_of(scale) * BODY_BYTES // TIMES_THE_CAP // 1000}k"


def measure(builds: Sequence[Build], scale: Scale, core: int, runs: int) -> dict[str, Any]:
    """Returns what report.backlog_part() shows."""
    jobs, cap = jobs_of(scale), cap_of(scale)
    kinds: list[tuple[str, Build, tuple[str, ...]]] = []
    for build in builds:
        kinds.append(("memory", build, ()))
        if build.name != REFERENCE:
            kinds.append(("cap", build, ("--max-memory", cap)))
    rates: dict[str, dict[str, list[list[float]]]] = {}
    for run in range(runs):
        for kind, build, flags in kinds if run % 2 == 0 else reversed(kinds):
            try:
                found = rate(build, flags, jobs, scale, core)
            except (LoadError, OSError) as error:
                print(f"backlog, {kind}: a run of {build.name} is lost: {error}", file=sys.stderr, flush=True)
                continue
            rates.setdefault(build.name, {}).setdefault(kind, []).append(found)
    for name, values in rates.items():
        print(f"{jobs:,} bodies of 10 kB, {name}: {_line(values)}", flush=True)
    sizes = {}
    for build in builds:
        sizes[build.name] = drained(build, scale.jobs, core)
        print(f"{build.name}, resident MB with a backlog, drained, fresh: {sizes[build.name]}", flush=True)
    return {
        "title": (
            f"put+reserve+delete of 10 kB with `{' '.join(flags_of(scale)[2:])}`, {_LOAD} connections, {DEPTH} deep, "
            f"behind a backlog of {jobs:,} such jobs; the cap is `--max-memory {cap}`, 1/{TIMES_THE_CAP} of that; "
            f"{runs} runs in turns: median rates, the least processor time"
        ),
        "rates": {build.name: rates.get(build.name, {}) for build in builds},
        "drained_title": f"{scale.jobs:,} jobs of 64 bytes, of which one in {STAYS:,} stays",
        "drained": sizes,
    }


def rate(build: Build, flags: tuple[str, ...], jobs: int, scale: Scale, core: int) -> list[float]:
    """Commands a second, microseconds of processor time a command, resident MB."""
    with serving(build, (*flags_of(scale), *flags), core=core) as server:
        fill(server.port, jobs, put_request(BODY_BYTES))
        load = Load(server.port, connections=_LOAD, depth=DEPTH, body_bytes=BODY_BYTES)
        try:
            load.work(min(WARM_UP_S, scale.seconds / 4))
            watch = Watch(server)
            sample = watch.sample(work(load, scale.seconds), a_second=True)
            return [sample.value, sample.server_busy * 1e6 / sample.value, server.rss_bytes() / _MB]
        finally:
            load.close()


def drained(build: Build, jobs: int, core: int) -> list[float]:
    """Resident MB with a backlog, after all but few of its jobs were deleted, and of a server that had those few."""
    with serving(build, core=core) as server:
        fill(server.port, jobs)
        full = server.rss_bytes()
        with Client(server.port) as client:
            client.bursts((b"delete %d\r\n" % id for id in range(1, jobs + 1) if id % STAYS), b"DELETED")
        time.sleep(GIVEN_BACK_S)
        left = server.rss_bytes()
    with serving(build, core=core) as server:
        fill(server.port, max(1, jobs // STAYS))
        return [full / _MB, left / _MB, server.rss_bytes() / _MB]


def _line(values: dict[str, list[list[float]]]) -> str:
    shown = []
    for kind, runs in values.items():
        middle = statistics.median(run[0] for run in runs)
        cost, size = min(run[1] for run in runs), max(run[2] for run in runs)
        shown.append(f"{kind} {middle:,.0f} commands/s, {cost:.2f} µs, {size:.0f} MB")
    return "; ".join(shown)
