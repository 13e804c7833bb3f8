"""Limits: what a connection, a tube, a job and a body cost in memory, and how many of them 4 GB carry.

Each is tried with as many as a server of 4 GB, the descriptors of this machine, or the time allow.
Invariant: nothing is estimated that was not measured with at least thousands of the thing.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

from scripts.benchmark.load import Client, connect, fill
from scripts.benchmark.rows import Scale, fill_tubes
from scripts.benchmark.servers import Build, Server, serving

MEMORY_BYTES = 4 << 30
USABLE = 0.9
"""The server's share of the memory; the rest is the system's and its buffers'."""
TIME_S = 90.0
BODY_BYTES_MAX = 1 << 30
SPARE_DESCRIPTORS = 60
MIB = 1 << 20


def _row(title: str, cost: str, fits: str, tried: str) -> dict[str, str]:
    return {"title": title, "cost": cost, "fits": fits, "tried": tried}


def _many(value: float) -> str:
    """A number of things, not more exact than it is known."""
    digits = 10 ** max(0, len(str(int(value))) - 2)
    return f"{int(value) // digits * digits:,}"


def _grow(server: Server, step: int, add: Callable[[int], None], time_s: float) -> tuple[int, int]:
    """Adds things, a step at a time, until memory or time is used up. Returns how many, and the bytes they took."""
    before = server.rss_bytes()
    begun = time.monotonic()
    count = 0
    while time.monotonic() < begun + time_s and server.rss_bytes() < MEMORY_BYTES * USABLE:
        add(count)
        count += step
    return count, server.rss_bytes() - before


def _things(
    title: str, build: Build, step: int, scale: Scale, core: int, make: Callable[[int, int], None]
) -> dict[str, str]:
    with serving(build, core=core) as server:
        base = server.rss_bytes()
        count, grown = _grow(server, step, lambda done: make(server.port, done), TIME_S * scale.jobs / 1_000_000)
        cost = grown / count
        fits = (MEMORY_BYTES * USABLE - base) / cost
        with Client(server.port) as client:
            begun = time.perf_counter()
            client.ask(b"list-tube-used\r\n", b"USING")
            answer_ms = (time.perf_counter() - begun) * 1000
        tried = (
            f"{count:,} in {server.rss_bytes() / MIB:,.0f} MiB; the next command was answered after {answer_ms:.1f} ms"
        )
        return _row(title, f"{cost:,.0f} bytes", _many(fits), tried)


def connections(build: Build, scale: Scale, core: int) -> dict[str, str]:
    """As many connections as this process and the server have descriptors for."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
    tried = f"{most:,}, all that `ulimit -n` allows here"
    if scale.things < Scale().things:
        most = scale.things
        tried = f"{most:,}"
    with serving(build, core=core) as server:
        before = server.rss_bytes()
        sockets = [connect(server.port) for _ in range(most)]
        with Client(server.port) as client:
            while b"current-connections: %d\n" % (most + 1) not in client.text(b"stats\r\n"):
                time.sleep(0.05)
        cost = (server.rss_bytes() - before) / most
        for sock in sockets:
            sock.close()
    fits = MEMORY_BYTES * USABLE / cost
    what = f"{cost:,.0f} bytes, a descriptor, and what the system needs for a socket"
    return _row("connections", what, f"{_many(fits)}, given the descriptors", tried)


def body(build: Build, scale: Scale, core: int) -> dict[str, str]:
    """A body as large as memory allows, put and reserved."""

    def peak(size: int) -> tuple[int, float]:
        with serving(build, ("-z", str(BODY_BYTES_MAX)), core=core) as server:
            begun = time.monotonic()
            with Client(server.port) as client:
                client.sock.sendall(b"put 0 0 600 %d\r\n" % size)
                part = b"x" * MIB
                for _ in range(size // MIB):
                    client.sock.sendall(part)
                client.ask(b"x" * (size % MIB) + b"\r\n", b"INSERTED ")
                reply = client.ask(b"reserve\r\n", b"RESERVED ").split()
                left = int(reply[2])
                while left > 0:
                    left -= len(client.some())
            status = Path(f"/proc/{server.pid}/status").read_text()
            (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024, time.monotonic() - begun

    first = 16 * MIB if scale.jobs < 1_000_000 else 128 * MIB
    base = peak(1)[0]
    factor = (peak(first)[0] - base) / first
    fits = min(BODY_BYTES_MAX, int((MEMORY_BYTES * USABLE - base) / factor))
    size = first if scale.jobs < 1_000_000 else fits // MIB * MIB
    used, seconds = peak(size)
    tried = f"{size // MIB:,} MiB put and reserved in {seconds:.1f} s, at most {used / MIB:,.0f} MiB"
    return _row("largest body", f"{factor:.1f} times its size, for a moment", f"{fits // MIB:,} MiB", tried)


def measure(build: Build, scale: Scale, core: int) -> list[dict[str, str]]:
    """All limits of one build. Returns what report.limits_part() shows."""
    jobs, tubes = scale.jobs // 10, scale.things
    steps: tuple[Callable[[], dict[str, str]], ...] = (
        lambda: _things("jobs of 64 bytes", build, jobs, scale, core, lambda port, done: fill(port, jobs)),
        lambda: _things(
            "tubes with a job", build, tubes, scale, core, lambda port, done: fill_tubes(port, tubes, done)
        ),
        lambda: connections(build, scale, core),
        lambda: body(build, scale, core),
    )
    found = []
    for step in steps:
        found.append(step())
        print("; ".join(found[-1].values()), flush=True)
    return found
