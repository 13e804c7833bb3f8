"""All that HTTP sees of the server: the engine to look at, errands to change it, and a turn to breathe in.

This module must not know HTTP. Whoever reads the engine reads it between turns and needs no lock, as long as nothing in
between yields. Whatever is large is read in slices of a millisecond, with breathe() in between.
Invariant: of all that goes on for HTTP, about one such slice runs each time the event loop goes round, so the clients
of the beanstalk port wait for one slice and not for one of each request. While they send commands, HTTP has a quarter
of the time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import monotonic, perf_counter_ns, thread_time
from typing import Any, Final, Protocol

from gevent import get_hub, sleep
from gevent.event import Event
from gevent.hub import Waiter

from geventstalk.config import Settings
from geventstalk.core.job import DELETED, Job
from geventstalk.core.operate import Operate
from geventstalk.durable.reading import JournalError, Reading
from geventstalk.http.audit import Audit
from geventstalk.http.history import History, Sparks, TubeHistory
from geventstalk.http.memory import memory_limit_bytes
from geventstalk.replies import Channel, Errand
from geventstalk.turn import Turn
from geventstalk.upkeep import LACKING_NS
from geventstalk.wire.session import Service

ACTIVE: Final = "active"
REPLICATIONS: Final = ("synchronous", "asynchronous", "none")
"""The role of a node that leads and may answer. A server alone has it, too."""
SLICE_NS: Final = 1_000_000
"""How long the slices take that run each time the event loop goes round. At least one runs."""
WAITING_MAX: Final = 128
"""So many requests wait for their changes. The other connections stay for looking when changes do not get on."""
_GROUP_BYTES: Final = 1 << 22
"""So much of bodies that are not in memory is read at once for a request."""
_RESTS: Final = 3
"""After slices between which clients sent commands, HTTP rests so many times as long as the slices took."""
NEXT_TURN_S: Final = 1e-9
"""A timer of this length lets every socket have its turn before."""


class Failed(Exception):
    """A change was given up: nobody knows how far it came."""


class Busy(Exception):
    """So many changes wait that no other is taken. This one was not begun."""


class _Awaited(Errand):
    """An errand whose sender sleeps until it is over."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self.over: Any = Event()
        self.has_failed = False

    def run(self, now_ns: int) -> bool:
        try:
            return self._errand.run(now_ns)
        finally:
            self.begun, self.awaited = self._errand.begun, self._errand.awaited

    def done(self) -> None:
        self._errand.changed = self.changed
        self._errand.done()
        self.over.set()

    def failed(self) -> None:
        self.has_failed = True
        self._errand.failed()
        self.over.set()


class NodeView(Protocol):
    """What HTTP sees of the node that this server is in a cluster."""

    serves: bool

    @property
    def role(self) -> str:
        """In a word, such as `active` or `standby`."""

    @property
    def leader(self) -> str:
        """The node that leads, and where; empty when there is none that is known."""

    @property
    def epoch(self) -> int:
        """How often a node has claimed to lead."""

    @property
    def lag(self) -> int:
        """How many records it has yet to take in."""

    @property
    def replication(self) -> str:
        """How the database replicates the log, in a word; empty when that is not known."""

    @property
    def passed(self) -> int:
        """How many connections it passes through."""


class ClusterFault(Exception):
    """The nodes cannot be asked, or refuse. The text is for the operator."""


class ClusterView(Protocol):
    """The nodes as `geventstalk cluster` sees them. Each method may take seconds, and runs in a thread.

    Raises ClusterFault.
    """

    def status(self) -> dict[str, Any]:
        """The facts of `geventstalk cluster status`, and the address of the console of the node that leads."""

    def promote(self, node: str) -> None:
        """Has this node lead, and waits until it does."""


class FrontsView(Protocol):
    """What HTTP sees of front-end processes."""

    restarts: int

    def seen(self) -> list[tuple[int, int, int]]:
        """Of each front-end process that there is: its place, from 1 on, its pid, and how many clients it has."""


class Backend:
    """`facts` gives the server's facts, as `stats` has them; `drain` begins or ends draining."""

    def __init__(
        self,
        engine: Operate,
        service: Service,
        turn: Turn,
        settings: Settings,
        log: logging.Logger,
        clock: Callable[[], int],
        wall_clock: Callable[[], int],
        facts: Callable[[], dict[str, object]],
        drain: Callable[[bool], None],
    ) -> None:
        self.engine: Final = engine
        self.service: Final = service
        self.turn: Final = turn
        self.settings: Final = settings
        self.log: Final = log
        self.facts: Final = facts
        self.drain: Final = drain
        self.now_ns: Final = clock
        self.listen: list[str] = []  # addresses of the beanstalk port
        self.http: list[str] = []  # addresses of HTTP
        self.commands: list[int] = []  # how often each command was given, by its code
        self.audit = Audit(None, log)
        self.node: NodeView | None = None  # with a journal that several nodes share
        self.cluster: ClusterView | None = None
        self.fronts: FrontsView | None = None  # with front-end processes
        self.bulk_listeners: list[Callable[[dict[str, Any]], None]] = []  # they hear of progress of work on many jobs
        self.needy, self.needy_until_ns = "", 0  # what is said of tubes that need a person, and until when
        self.history: Final = History()
        self.tube_history: Final = TubeHistory()
        self.sparks: Final = Sparks()
        self.memory_limit_bytes = memory_limit_bytes()
        self.replay_s = 0.0
        self.look_at: Callable[[Channel], tuple[str, str, int, int]] = _nothing
        """A client's address, where it came in, how many bytes of replies it has not taken, and how many that it sent
        have not come to its session."""
        self.hang_up: Callable[[Channel], None] = _nothing
        """Ends a connection as if its client had hung up."""
        self.replayed = False  # until then the engine has only some of the jobs, and is nobody's to look at
        self.stopping: Any = Event()  # what goes on for long ends when this is set
        self._wall_clock = wall_clock
        self._waiting = 0
        self.tidy_up: Callable[[], object] = _nothing_to_tidy_up
        """Called now and then while there are requests, from the event loop itself."""
        self._line: deque[Any] = deque()
        self._next: Any = None  # a timer, while somebody waits in breathe()
        self._rest_until_s = 0.0
        self._served = 0  # how many commands clients had sent at the last slices

    def unix_s(self, ns: int) -> float:
        """The Unix time of a monotonic moment, by what the wall clock says now."""
        return (self._wall_clock() - self.now_ns() + ns) / 1e9

    def change(self, errand: Errand) -> None:
        """As carry_out(), for a request. Raises Busy, too."""
        if self._waiting >= WAITING_MAX:
            raise Busy
        self._waiting += 1
        try:
            self.carry_out(errand)
        finally:
            self._waiting -= 1

    def carry_out(self, errand: Errand) -> None:
        """Has the turn run the errand, and returns when all that it changed is safe. Raises Failed."""
        awaited = _Awaited(errand)
        self.turn.accept(awaited)
        awaited.over.wait()
        if awaited.has_failed:
            raise Failed

    # --- bodies

    def with_bodies(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, bytes]]:
        """The jobs with their bodies, without those that are gone by then. Raises Failed.

        Others may have a turn before each of them, when a body is not in memory. It is read, and not kept there.
        """
        group: list[Job] = []
        size = 0
        for job in jobs:
            group.append(job)
            if job.body is None:
                size += self.engine.size_of(job)
            if size >= _GROUP_BYTES:
                yield from self._read(group)
                group, size = [], 0
        yield from self._read(group)

    def _read(self, jobs: list[Job]) -> list[tuple[Job, bytes]]:
        found = {job.id: body for job in jobs if (body := job.body) is not None}
        while missing := [job for job in jobs if job.id not in found and job.state != DELETED]:
            store = self.turn.store
            assert store is not None, "without a journal all bodies are in memory"
            reading = store.reading(missing)
            get_hub().threadpool.apply(reading.run)
            found.update(self._taken(reading, missing))
            if reading.lacking:
                sleep(LACKING_NS / 1e9)
        return [(job, found[job.id]) for job in jobs if job.id in found]

    def _taken(self, reading: Reading, jobs: list[Job]) -> dict[int, bytes]:
        try:
            return {job.id: body for job in jobs if (body := reading.body_of(job)) is not None}
        except JournalError as error:
            self.turn.fail(error)  # as for a client of the beanstalk port
            raise Failed from error

    def breathe(self) -> None:
        """Lets everybody else have a turn. Whoever breathes comes back in the order in which they came here."""
        waiter: Any = Waiter()
        self._line.append(waiter)
        self._arm()
        waiter.get()

    def _arm(self) -> None:
        if self._next is None:
            loop: Any = get_hub().loop
            # Behind all sockets that are ready (priority), and behind the turn that ends with the callbacks before.
            self._next = loop.timer(max(NEXT_TURN_S, self._rest_until_s - monotonic()), priority=-1)
            self._next.start(loop.run_callback, self._run_slices)

    def _run_slices(self) -> None:
        """The event loop calls this each time it goes round, or after a rest, while breathe() is waited for."""
        line = self._line
        begun_s = thread_time()
        end_ns = perf_counter_ns() + SLICE_NS
        for _ in range(len(line)):
            line.popleft().switch(None)
            if perf_counter_ns() >= end_ns:
                break
        self.tidy_up()
        served = sum(self.commands)
        if served != self._served:
            self._served = served
            self._rest_until_s = monotonic() + _RESTS * (thread_time() - begun_s)
        self._next.close()
        self._next = None
        if line:
            self._arm()

    def stop(self) -> None:
        """Whatever goes on for long is to end."""
        self.stopping.set()


def _nothing_to_tidy_up() -> None:
    return


def _nothing(channel: Channel) -> Any:
    raise AssertionError("there are no connections")
