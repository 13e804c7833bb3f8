"""An engine with a clock and a client: for tests of what the engine measures."""

from __future__ import annotations

from geventstalk.core.engine import Engine
from geventstalk.core.job import Job
from geventstalk.core.tube import Client
from tests.support.clock import ManualClock


class Worker(Client):
    """It waits for nothing."""

    def answer(self, outcome: int, job: Job | None) -> None:
        raise AssertionError("this client waits for nothing")


class Bench:
    """`worker` watches `default` and these tubes."""

    def __init__(self, *tubes: bytes) -> None:
        self.clock = ManualClock()
        self.engine = Engine(self.clock.ns)
        self.worker = Worker()
        self.engine.join(self.worker)
        for name in tubes:
            self.engine.watch(self.worker, name)
