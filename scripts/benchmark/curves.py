"""Growth: what a command costs the server, in processor time, among more and more of something.

Processor time of the server is what others on the machine disturb least, and what grows when something is searched.
Invariant: the work that is measured is the same for every size; only what stands around it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmark.load import Client, Load, fill, put_request
from scripts.benchmark.rows import Scale, fill_tubes
from scripts.benchmark.servers import Build, Server, serving

DEPTH = 16
CONNECTIONS = 10
WARM_UP = 0.2

Surround = Callable[[Server, int], Load]


@dataclass(frozen=True)
class Curve:
    """`surround` puts this many of a thing into a server and returns the load to measure among them."""

    title: str
    most: int
    surround: Surround


def _work(server: Server) -> Load:
    return Load(server.port, connections=CONNECTIONS, depth=DEPTH)


def _jobs(server: Server, count: int) -> Load:
    fill(server.port, count)
    return _work(server)


def _tubes(server: Server, count: int) -> Load:
    fill_tubes(server.port, count)
    return _work(server)


def _connections(server: Server, count: int) -> Load:
    return Load(server.port, connections=count)


def _reservations(server: Server, count: int) -> Load:
    client = Client(server.port)
    client.bursts((put_request() for _ in range(count)), b"INSERTED ")
    client.bursts((b"reserve\r\n" for _ in range(count)), b"RESERVED ", lines_each=2)
    return Load(server.port, depth=DEPTH, sockets=[client.sock])


def _watched(server: Server, count: int) -> Load:
    client = Client(server.port)
    client.bursts((b"watch tube-%d\r\n" % number for number in range(count)), b"WATCHING ")
    return Load(server.port, depth=DEPTH, sockets=[client.sock])


def curves(scale: Scale) -> Sequence[Curve]:
    """All curves, up to the sizes of a scale."""
    return (
        Curve("ready jobs in the tube", scale.jobs, _jobs),
        Curve("other tubes with a job", scale.things, _tubes),
        Curve("connections at work, one command at a time", scale.things, _connections),
        Curve("reservations of the connection", scale.things, _reservations),
        Curve("tubes that the connection watches", min(1000, scale.things), _watched),
    )


def sizes(most: int) -> list[int]:
    """1, 10, 100 and so on, and the most."""
    found = [1]
    while found[-1] * 10 < most:
        found.append(found[-1] * 10)
    return [*found, most]


def cost_us(build: Build, curve: Curve, size: int, seconds: float, core: int) -> float:
    """Microseconds of the server's processor time a command."""
    with serving(build, core=core) as server:
        load = curve.surround(server, size)
        try:
            load.work(WARM_UP + seconds / 4)
            before = server.cpu_s()
            commands, spent_s = 0, 0.0
            while not commands or not spent_s:  # beside other programs the first time may pass without a command
                commands += load.work(seconds)
                spent_s = server.cpu_s() - before
            return spent_s / commands * 1e6
        finally:
            load.close()


def measure(builds: Sequence[Build], scale: Scale, core: int) -> list[dict[str, Any]]:
    """Every curve with every server. Returns what report.curves_part() and the picture show."""
    found = []
    for curve in curves(scale):
        steps = sizes(curve.most)
        points: dict[str, list[float]] = {build.name: [] for build in builds}
        for size in steps:
            for build in builds:
                points[build.name].append(cost_us(build, curve, size, scale.seconds / 3, core))
        for name, costs in points.items():
            shown = " ".join(f"{cost:.2f}" for cost in costs)
            print(f"{curve.title}, 1 to {curve.most:,}: {name} {shown} µs a command", flush=True)
        found.append({"title": curve.title, "sizes": steps, "builds": points})
    return found
