"""What the engine keeps of a tube and of a client: data, no rules.

This room must not know when anything changes, or why: the engine alone does.
Invariant: the engine proves all of it, see check.py.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.job import Job
from geventstalk.core.order import Order
from geventstalk.core.timerwheel import NEVER, Timer

ID_BITS: Final = 64
ID_MASK: Final = (1 << ID_BITS) - 1
NUMBER_BITS: Final = 40
NUMBER_MASK: Final = (1 << NUMBER_BITS) - 1


class Tube(Timer):
    """A named set of jobs and the line of clients that wait for one. As a timer it fires when a delay or a pause ends.

    The orders hold `rank << 64 | id`. `line` holds `wait number << 40 | client number`, at most one entry a client, and
    no entry is later than the client's true place: an entry that surfaces is dropped when its client does not wait,
    and put at the client's true place when it waits anew. So a client that watches many tubes leaves all their lines
    by a change of its own state, and comes back to those only from which its entry was taken.
    """

    __slots__ = (
        "buried",
        "delayed",
        "in_line",
        "jobs",
        "line",
        "name",
        "number",
        "pause_s",
        "paused_until_ns",
        "ready",
        "reserved",
        "total_deletes",
        "total_jobs",
        "total_pauses",
        "urgent",
        "using",
        "watchers",
    )

    def __init__(self, number: int, name: bytes) -> None:
        super().__init__()
        self.number = number
        self.name = name
        self.ready = Order()
        self.delayed = Order()
        self.buried = Order()
        self.line: list[int] = []
        self.in_line: set[int] = set()
        self.watchers: dict[int, None] = {}
        self.using = 0
        self.jobs = 0  # in any state, also while they are uploaded
        self.reserved = 0
        self.urgent = 0
        self.pause_s = 0
        self.paused_until_ns = 0  # 0: not paused
        self.total_jobs = 0
        self.total_deletes = 0
        self.total_pauses = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class Client(Timer):
    """What the engine keeps of a connection. As a timer it fires for its jobs' deadlines and for its waiting.

    `reserved` is in order of reservation; `deadlines` holds `deadline << 64 | id` of the same jobs, and of those of
    `leaving` that are still held.
    """

    __slots__ = (
        "absent",
        "deadlines",
        "leaving",
        "number",
        "producer",
        "reserved",
        "used",
        "wait_number",
        "wait_until_ns",
        "waiting",
        "watched",
        "worker",
    )

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.used: Tube | None = None
        self.watched: dict[int, Tube] = {}  # by tube number, in order of watching
        self.absent: list[Tube] = []  # tubes whose line may lack an entry of this client
        self.reserved: dict[int, Job] = {}
        self.leaving: list[Job] = []  # what is still to be given back of a client that is gone, last one first
        self.deadlines = Order()
        self.waiting = False
        self.wait_number = 0
        self.wait_until_ns = NEVER
        self.producer = False
        self.worker = False

    def answer(self, outcome: int, job: Job | None) -> None:
        """Called once for each wait that ends: with RESERVED_JOB and the job, TIMED_OUT or DEADLINE_SOON."""
        raise NotImplementedError
