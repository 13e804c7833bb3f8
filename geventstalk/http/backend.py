"""The interface of HTTP to the server: the engine to read, operations to change it, and yield_now() to yield.

This module must not know HTTP. The engine is read between turns and without a lock, as long as the reader does not
yield. Large data is read in slices of a millisecond, with yield_now() in between. Invariant: about one slice of all
requests together runs each time the event loop goes round, so the clients of the beanstalk port wait for one slice and
not for one of each request. While they send commands, HTTP has a quarter of the time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic, perf_counter_ns, thread_time
from typing import Any, Final, Protocol

from gevent import get_hub, sleep
from gevent.event import Event
from gevent.hub import Waiter
from gevent.lock import BoundedSemaphore

from geventstalk.config import Settings
from geventstalk.config_schedules import Schedule
from geventstalk.core.job import DELETED, Job
from geventstalk.core.operate import Operate
from geventstalk.durable.reading import JournalError, Reading
from geventstalk.http.audit import Audit
from geventstalk.http.history import History, Sparks, TubeHistory
from geventstalk.http.memory import memory_limit_bytes
from geventstalk.rights import Access as Users
from geventstalk.runtime_settings import RuntimeSettings
from geventstalk.turn.maintenance import LACKING_NS
from geventstalk.turn.replies import Channel, Operation
from geventstalk.turn.turn import Turn
from geventstalk.wire.guarded import Usage
from geventstalk.wire.session import Service

ACTIVE: Final = "active"
"""The role of a node that leads and may answer, and of a server alone."""
REPLICATIONS: Final = ("synchronous", "asynchronous", "none")
SLICE_NS: Final = 1_000_000
"""The time of all slices in one round of the event loop. At least one runs."""
WAITING_MAX: Final = 128
"""The most requests that wait for their changes. The other connections stay free for reading when changes are stuck."""
_GROUP_BYTES: Final = 1 << 22
"""The bytes of bodies on disk that are read at once for a request."""
_PAUSE: Final = 3
"""After slices in which clients sent commands, HTTP pauses this many times as long as the slices took."""
NEXT_TURN_S: Final = 1e-9
"""A timer of this length fires after every socket has had its turn."""


class Failed(Exception):
    """A change was given up. It is unknown how much of the change was made."""


class Busy(Exception):
    """Too many changes wait. This one was not begun."""


class _Awaited(Operation):
    """An operation whose sender sleeps until it is over."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self.over: Any = Event()
        self.has_failed = False

    def run(self, now_ns: int) -> bool:
        try:
            return self._operation.run(now_ns)
        finally:
            self.begun, self.awaited = self._operation.begun, self._operation.awaited

    def done(self) -> None:
        self._operation.changed = self.changed
        self._operation.done()
        self.over.set()

    def failed(self) -> None:
        self.has_failed = True
        self._operation.failed()
        self.over.set()


class NodeView(Protocol):
    """This server as a node of a cluster."""

    serves: bool

    @property
    def role(self) -> str:
        """A word such as `active` or `standby`."""

    @property
    def leader(self) -> str:
        """The leader's name and address; empty when none is known."""

    @property
    def epoch(self) -> int:
        """The number of claims to lead."""

    @property
    def lag(self) -> int:
        """The number of records that the node has not read."""

    @property
    def replication(self) -> str:
        """The database's replication of the log, in a word; empty when that is unknown."""

    @property
    def clock_ahead_s(self) -> float:
        """Returns by how much the wall clock of this host is ahead of the database's."""

    @property
    def passed(self) -> int:
        """The number of connections that the node relays."""


class ClusterFault(Exception):
    """The nodes do not answer, or refuse. The text is for the operator."""


class ClusterView(Protocol):
    """The nodes as `geventstalk cluster` shows them. Each method may take seconds, and runs in a thread.

    Raises ClusterFault.
    """

    def status(self) -> dict[str, Any]:
        """Returns the facts of `geventstalk cluster status`, and the address of the leader's console."""

    def promote(self, node: str) -> None:
        """Has this node lead, and waits until it does."""


class FrontsView(Protocol):
    restarts: int

    def seen(self) -> list[tuple[int, int, int]]:
        """Returns of each front-end process its place, from 1 on, its pid, and the number of its clients."""


class HandshakesView(Protocol):
    done: int
    failed: int
    refused: int
    unfinished: int


class SharesView(Protocol):
    refused: int
    refused_uploads: int


class GuardView(Protocol):
    def users(self) -> Users: ...

    def usage_of(self, name: str) -> Usage: ...


class PlanView(Protocol):
    @property
    def schedule(self) -> Schedule: ...

    next_s: int
    last_s: int
    outcome: str
    job: int


class SchedulesView(Protocol):
    @property
    def plans(self) -> Sequence[PlanView]: ...


class ReloadView(Protocol):
    refused: bool

    @property
    def files(self) -> list[str]: ...

    @property
    def at_restart(self) -> list[str]: ...

    def run(self) -> None:
        """Raises ConfigError."""


class Backend:
    """The server for HTTP. `facts` returns the server's facts, as `stats` has them; `drain` begins or ends draining."""

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
        self.handshakes: HandshakesView | None = None  # with TLS
        self.shares: SharesView | None = None  # of addresses; not of nodes
        self.guard: GuardView | None = None  # with users
        self.reload: ReloadView
        self.schedules: SchedulesView | None = None
        self.runtime_settings: RuntimeSettings
        self.use_runtime_settings: Callable[[], None] = _nothing_to_tidy_up
        """Uses the settings that the engine keeps."""
        self.one_setting: Final = BoundedSemaphore(1)  # settings are changed one at a time
        self.bulk_listeners: list[Callable[[dict[str, Any]], None]] = []  # called with the progress of bulk changes
        self.needy, self.needy_until_ns = "", 0  # the sentence about tubes that need an operator, and its end
        self.history: Final = History()
        self.tube_history: Final = TubeHistory()
        self.sparks: Final = Sparks()
        self.memory_limit_bytes = memory_limit_bytes()
        self.replay_s = 0.0
        self.look_at: Callable[[Channel], tuple[str, str, int, int]] = _nothing
        """Returns a client's address, its listener, the bytes of replies it has not read, and those it sent that its
        session has not read.
        """
        self.hang_up: Callable[[Channel], None] = _nothing
        """Ends a connection as if its client had hung up."""
        self.replayed = False  # until then the engine has only some of the jobs, and must not be read
        self.stopping: Any = Event()  # long work ends when this is set
        self._wall_clock = wall_clock
        self._waiting = 0
        self.tidy_up: Callable[[], object] = _nothing_to_tidy_up
        """Called now and then while there are requests, from the event loop itself."""
        self._line: deque[Any] = deque()
        self._next: Any = None  # a timer, while a greenlet waits in yield_now()
        self._paused_until_s = 0.0
        self._served = 0  # how many commands clients had sent at the last slices

    def unix_s(self, ns: int) -> float:
        """Returns the Unix time of a monotonic time, by the wall clock of now."""
        return (self._wall_clock() - self.now_ns() + ns) / 1e9

    def change(self, operation: Operation) -> None:
        """Does what carry_out() does, for a request. Raises Busy, too."""
        if self._waiting >= WAITING_MAX:
            raise Busy
        self._waiting += 1
        try:
            self.carry_out(operation)
        finally:
            self._waiting -= 1

    def carry_out(self, operation: Operation) -> None:
        """Has the turn run the operation, and returns when its changes are safe. Raises Failed."""
        awaited = _Awaited(operation)
        self.turn.accept(awaited)
        awaited.over.wait()
        if awaited.has_failed:
            raise Failed

    # --- bodies

    def with_bodies(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, bytes]]:
        """Yields the jobs with their bodies, without those that are gone by then. Raises Failed.

        May yield to the event loop before each job whose body is not in memory. Such a body is read, and not kept.
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

    def yield_now(self) -> None:
        """Yields to the event loop. Greenlets resume in the order of their calls."""
        waiter: Any = Waiter()
        self._line.append(waiter)
        self._arm()
        waiter.get()

    def _arm(self) -> None:
        if self._next is None:
            loop: Any = get_hub().loop
            # Behind all sockets that are ready (priority), and behind the turn that ends with the callbacks before.
            self._next = loop.timer(max(NEXT_TURN_S, self._paused_until_s - monotonic()), priority=-1)
            self._next.start(loop.run_callback, self._run_slices)

    def _run_slices(self) -> None:
        """Resumes greenlets that wait in yield_now(). The event loop calls this in each round, or after a pause."""
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
            self._paused_until_s = monotonic() + _PAUSE * (thread_time() - begun_s)
        self._next.close()
        self._next = None
        if line:
            self._arm()

    def stop(self) -> None:
        """Ends streams and other long work."""
        self.stopping.set()


def _nothing_to_tidy_up() -> None:
    return


def _nothing(channel: Channel) -> Any:
    raise AssertionError("there are no connections")
