"""The data that the engine keeps of a tube and of a client.

This module must not know the rules by which they change. Invariant: that of the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from geventstalk.core.job import CRLF_BYTES, SECOND_NS, Job
from geventstalk.core.line import Line
from geventstalk.core.meter import Rates, Times
from geventstalk.core.order import Order
from geventstalk.core.timerwheel import NEVER, Timer
from geventstalk.policies import Policies, Policy

if TYPE_CHECKING:
    from geventstalk.core.shares import Shares

NO_ID: Final = 1 << 61
"""A lower bound for the ids of no jobs at all, also for ids beyond it."""
DEADLINE_MARGIN_NS: Final = SECOND_NS
"""A reserve gets DEADLINE_SOON when a job of the client has no more time left than this."""

# How a client's wait ends, named as on the wire.
RESERVED_JOB: Final = 1
TIMED_OUT: Final = 2
DEADLINE_SOON: Final = 3


class Tube(Timer):
    """A named set of jobs, and the line of clients that wait for one. Its timer is for its delays and its pause.

    `ready`, `delayed` and `buried` hold ranks and ids; so does `blocked`, of ready jobs that may not be given out yet:
    see rules.py; None before the first of them. `behind` says that more jobs could be handed to waiting
    clients than one slice may, and that the tube's timer goes on with that. `queued` and `worked` say how long jobs
    were ready until they were reserved, and reserved until that ended; None before the first reservation. `low_...` are
    lower bounds of ids, see ages.py. `rates` are None before the first event; `active` says that an event has come
    since they were settled.
    """

    __slots__ = (
        "active",
        "behind",
        "blocked",
        "buried",
        "bytes",
        "delayed",
        "jobs",
        "kept_paused",
        "line",
        "low_buried",
        "low_delayed",
        "low_ready",
        "low_reserved",
        "name",
        "number",
        "pause_s",
        "paused_until_ns",
        "policies",
        "policy",
        "queued",
        "rates",
        "ready",
        "reserved",
        "reserved_unready",
        "total_buries",
        "total_deletes",
        "total_jobs",
        "total_kicks",
        "total_pauses",
        "total_releases",
        "total_timeouts",
        "urgent",
        "using",
        "watchers",
        "worked",
    )

    def __init__(self, number: int, name: bytes) -> None:
        super().__init__()
        self.number = number
        self.name = name
        self.ready = Order()
        self.blocked: Order | None = None
        self.delayed = Order()
        self.buried = Order()
        self.line = Line()
        self.watchers: dict[int, Client] = {}
        self.behind = False
        self.using = 0
        self.jobs = 0  # in any state, also while they are uploaded
        self.bytes = 0  # of the bodies of its jobs, each with its CRLF; uploads do not count
        self.reserved = 0
        self.urgent = 0
        self.pause_s = 0
        self.paused_until_ns = 0  # 0: not paused
        self.kept_paused = False  # by its policy, until that says otherwise
        self.policies: Policies | None = None  # those of the engine when `policy` was looked up
        self.policy: Policy | None = None
        self.total_jobs = 0
        self.total_deletes = 0
        self.total_releases = 0
        self.total_buries = 0
        self.total_kicks = 0
        self.total_timeouts = 0
        self.total_pauses = 0
        self.reserved_unready = 0  # how often a job was reserved by its id while it was delayed or buried
        self.low_ready = self.low_delayed = self.low_reserved = self.low_buried = NO_ID
        self.active = False
        self.rates: Rates | None = None
        self.queued: Times | None = None
        self.worked: Times | None = None

    def block(self, pri: int, id: int) -> None:
        """Places a ready job that may not be given out yet."""
        if self.blocked is None:
            self.blocked = Order()
        self.blocked.push(pri, id)

    def unblock(self, pri: int, id: int) -> None:
        """Takes such a job out of its place."""
        assert self.blocked is not None
        self.blocked.discard(pri, id)

    def whole_jobs(self) -> int:
        """Returns how many jobs there are in any state, without those that are uploaded."""
        return self.ready_count() + len(self.delayed) + len(self.buried) + self.reserved

    def body_bytes(self) -> int:
        """Returns the bytes of the bodies of all jobs, as puts say them."""
        return self.bytes - CRLF_BYTES * self.whole_jobs()

    def ready_count(self) -> int:
        """Returns how many jobs are ready."""
        return len(self.ready) if self.blocked is None else len(self.ready) + len(self.blocked)


@mypyc_attr(allow_interpreted_subclasses=True)
class Client(Timer):
    """A connection, as the engine sees it. Its timer is for the deadlines of its jobs and the end of its wait.

    `reserved` is in order of reservation. `deadlines` holds deadlines and ids of the same jobs, and of those of
    `leaving` that are still held. The client has an entry in the line of each watched tube that is not in `absent`.
    """

    __slots__ = (
        "absent",
        "arrivals",
        "candidates",
        "deadlines",
        "gone",
        "leaving",
        "number",
        "producer",
        "reserved",
        "shares",
        "upload",
        "used",
        "wait_number",
        "wait_since_ns",
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
        self.absent: dict[int, Tube] = {}  # watched tubes in whose line it does not stand, by number
        self.arrivals = NEVER  # Engine.arrivals when it last looked at all of its many tubes
        self.candidates: list[tuple[int, int, Tube]] = []  # a heap by their first jobs of then, when needed
        self.reserved: dict[int, Job] = {}
        self.leaving: list[Job] = []  # what is still to be given back of a client that is gone, last one first
        self.deadlines = Order()
        self.shares: Shares | None = None  # how it shares its reserves among its tubes, when it has said so
        self.upload: Job | None = None  # a job whose body is still on its way
        self.gone = False  # the connection has ended, and what it held is given back
        self.waiting = False
        self.wait_number = 0
        self.wait_since_ns = 0  # when the last wait began
        self.wait_until_ns = NEVER
        self.producer = False
        self.worker = False

    def answer(self, outcome: int, job: Job | None) -> None:
        """Called once for each wait that ends: with RESERVED_JOB and the job, TIMED_OUT or DEADLINE_SOON."""
        raise NotImplementedError
