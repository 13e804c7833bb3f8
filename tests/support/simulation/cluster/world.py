"""Time, chance, and who can reach whom. Nothing here depends on the time of day, on hashing or on ids of objects."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

MS_NS = 1_000_000
TRACE_LINES = 400
AT_ONCE_MAX = 10_000


class Violation(Exception):
    """Something happened that must not."""


def require(condition: object, *words: object) -> None:
    if not condition:
        raise Violation(" ".join(str(word) for word in words))


@dataclass
class Scenario:
    """Everything about a life but its steps. Faults are chances in each lease."""

    seed: int
    draw: random.Random = field(repr=False)
    nodes: int
    lease_ms: int
    leases: int
    drift: float
    slow: float  # how likely a message takes long
    lingers: float  # how likely a statement stops on its way through the server
    wrong_address: bool
    log_heeds_timeline: bool
    replicates: bool  # whether there is a synchronous replica; without one a failover loses nothing here
    stumbles: float  # how likely a process stands still, or dies, when it asks for something that matters
    faults: dict[str, float]

    @staticmethod
    def drawn(seed: int) -> Scenario:
        draw = random.Random(seed)
        often = draw.choice((0.3, 0.6))
        faults = {name: draw.choice((0, 0, 0.02, 0.1, often)) for name in FAULTS}
        return Scenario(
            seed=seed,
            draw=draw,
            nodes=draw.choice((2, 2, 3)),
            lease_ms=100,
            leases=draw.choice((8, 15, 30)),
            drift=draw.choice((0, 0.01, 0.1)),
            slow=draw.choice((0, 0.002, 0.02)),
            lingers=draw.choice((0, 0.002, 0.02)),
            wrong_address=draw.random() < 0.25,
            log_heeds_timeline=draw.random() < 0.5,
            replicates=draw.random() < 0.9,
            stumbles=draw.choice((0, 0, 0.01, 0.05)),
            faults=faults,
        )


FAULTS = (
    *("kill", "freeze", "stop", "promote", "cut link", "cut off", "part nodes"),
    *("fail over", "leave behind", "crash database", "lose replica", "terminate", "phantom", "refuse"),
)


class World:
    """A clock that jumps from event to event."""

    def __init__(self, scenario: Scenario, show: Callable[[str], None] | None) -> None:
        self.scenario = scenario
        self.draw = scenario.draw
        self.now_ns = 0
        self.faulty = True
        self.lines: deque[str] = deque(maxlen=TRACE_LINES)
        self.hash = hashlib.sha256()
        self.events = 0
        self.severed: set[tuple[str, str]] = set()  # pairs that do not reach each other
        self._show = show
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def note(self, text: str) -> None:
        line = f"{self.now_ns / MS_NS:10.3f}  {text}"
        self.lines.append(line)
        self.hash.update(line.encode())
        if self._show is not None:
            self._show(line)

    def at(self, at_ns: int, what: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._heap, (max(at_ns, self.now_ns), self._count, what))

    def after(self, ns: int, what: Callable[[], None]) -> None:
        self.at(self.now_ns + ns, what)

    def run(self, until_ns: int) -> None:
        at_once = 0
        while self._heap and self._heap[0][0] <= until_ns:
            at_once = at_once + 1 if self._heap[0][0] == self.now_ns else 0
            require(at_once < AT_ONCE_MAX, "all are busy, and no time passes")
            self.now_ns, _, what = heappop(self._heap)
            self.events += 1
            what()
        self.now_ns = until_ns

    # --- the network

    def reaches(self, one: str, other: str) -> bool:
        return (one, other) not in self.severed

    def sever(self, one: str, other: str) -> None:
        self.severed |= {(one, other), (other, one)}

    def heal(self, one: str, other: str) -> None:
        self.severed -= {(one, other), (other, one)}

    def hop_ns(self) -> int:
        """Returns how long a message is on its way."""
        if self.faulty and self.draw.random() < self.scenario.slow:
            return int(self.scenario.lease_ms * MS_NS * self.draw.choice((0.1, 0.5, 1, 2, 4)) * self.draw.random())
        return self.draw.randrange(50_000, 1_500_000)

    def lingers_ns(self) -> int:
        """Returns how long a statement stops at one point of its way through the server."""
        if self.faulty and self.draw.random() < self.scenario.lingers:
            return int(self.scenario.lease_ms * MS_NS * self.draw.choice((0.1, 1, 3, 6)) * self.draw.random())
        return self.draw.randrange(0, 200_000)

    def send(self, source: str, target: str, message: Callable[[], None]) -> None:
        """Delivers a message. Where there is no way it is lost, or comes once there is one."""
        if self.reaches(source, target):
            self.after(self.hop_ns(), message)
        elif self.draw.random() < 0.5:
            self._send_later(source, target, message)

    def _send_later(self, source: str, target: str, message: Callable[[], None]) -> None:
        if self.reaches(source, target):
            message()
        else:
            pause_ns = int(self.scenario.lease_ms * MS_NS * (0.1 + self.draw.random()))
            self.after(pause_ns, lambda: self._send_later(source, target, message))
