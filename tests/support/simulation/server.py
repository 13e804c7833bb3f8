"""serving/server.py and serving/connection.py once more, as small as possible, in a world without gevent and sockets.

It is a re-statement, method for method under the same names, so whoever changes one looks at the other: what it does
wrong in the order of commit, sync and reply, the simulation finds; that server.py does the same, it cannot prove.
A greenlet is a generator that yields what it waits for; a thread is a wait of some milliseconds. Left out: signals,
slow readers (nothing is ever unsent), limits of what is read, statistics of the process, accepting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from geventstalk.core.engine import NEVER, Engine
from geventstalk.core.job import Job
from geventstalk.durable.store import Store
from geventstalk.wire.session import MOVE_SLICE, Service, Session
from journal import JournalError

EXIT_JOURNAL = 74
HOUSEKEEPING_NS = 50_000_000


@dataclass
class Wait:
    """Until the event is true or the moment has come, whichever is first."""

    event: Callable[[], bool] = lambda: False
    at_ns: int | None = None

    def over(self, now_ns: int) -> bool:
        return (self.at_ns is not None and now_ns >= self.at_ns) or self.event()


NOW = Wait(at_ns=0)
Greenlet = Iterator[Wait]


class Peer(Protocol):
    """The client's end of a connection."""

    def deliver(self, data: bytes) -> bool:
        """Takes what the server sends; False when nobody is there any more."""
        ...

    def disconnect(self) -> None:
        """The server has closed the connection."""
        ...


class World(Protocol):
    """What the server asks of its surroundings, and whom it tells what it did."""

    def now_ns(self) -> int:
        """The monotonic clock."""
        ...

    def sync_ns(self) -> int:
        """How long the next sync in a thread takes."""
        ...

    def begin_sync(self) -> dict[int, int]:
        """Notes what a sync that begins now covers."""
        ...

    def run_sync(self, run: Callable[[], None], covers: dict[int, int]) -> None:
        """Has a sync that began earlier come to its end."""
        ...

    def moment(self, name: str) -> None:
        """The process may die here."""
        ...

    def fails(self, error: JournalError) -> None:
        """The server gives up."""
        ...

    def advanced(self, done: bool) -> None:
        """The engine let happen what was due, all of it if `done`."""
        ...

    def spawn(self, name: str, greenlet: Greenlet) -> None: ...

    def leaves(self, connection: Connection, done: bool) -> None:
        """What a client held that is gone is given back from now on; done: was given back."""
        ...

    def steps(self, connection: Connection | None) -> None:
        """A session executes commands from now on; None: not any more."""
        ...

    def trace(self, connection: Connection, direction: str, data: bytes) -> None:
        """A session executes a line, or replies."""
        ...


@dataclass(eq=False)
class Connection:
    """A session, its peer, and what travels between them."""

    session: Session
    peer: Peer
    inbox: deque[bytes] = field(default_factory=deque)
    ended: bool = False  # the peer sends nothing more
    read_all: bool = False  # and the session knows
    gone: bool = False
    holds: int = 0
    touched: bool = False
    changed: bool = False

    def busy(self) -> bool:
        session = self.session
        if self.gone or (session.closed and not self.holds and not session.out):
            return True
        if session.closed:
            return False
        if session.unfinished:
            return not session.out
        return bool(self.inbox) or (self.ended and not self.read_all)

    def send(self, data: bytes) -> None:
        if not self.gone and not self.peer.deliver(data):
            self.gone = True

    def release(self, data: bytes) -> None:
        self.holds -= 1
        self.send(data)


class SimulatedServer:
    """One process. `store` is None for a server without a journal."""

    session_type: type[Session] = Session

    def __init__(self, world: World, fsync_ms: int | None, max_job_bytes: int, slice_moves: int = MOVE_SLICE) -> None:
        self.world = world
        self.fsync_ms = fsync_ms
        self.slice_moves = slice_moves
        self.store: Store | None = None
        self.engine = Engine(world.now_ns())
        self.service = Service(self.engine, max_job_bytes, dict)
        self.connections: dict[int, Connection] = {}
        self.touched: list[Connection] = []
        self.turn_scheduled = False
        self.armed_ns = NEVER
        self.nudge = False
        self.written = False
        self.grown = True
        self.held: list[tuple[Connection, bytes]] = []
        self.sync_wanted = False
        self.syncing: Callable[[], None] | None = None
        self.syncs_quickly = False
        self.stopped = False
        self.exit_code = 0

    def open_journal(self, store: Store) -> None:
        """Brings the jobs back. Raises JournalError."""
        now_ns = self.world.now_ns()
        engine = self.engine
        for job, tube_name in store.replay(engine.jobs):
            engine.restore(job, tube_name, now_ns)
        engine.next_id = max(engine.next_id, store.start(self.find))
        engine.ledger = store
        self.store = store

    def start(self) -> None:
        """Everything that run() spawns."""
        store = self.store
        self.world.spawn("clock", self.keep_time())
        if store is not None:
            self.world.spawn("house", self.keep_house())
            if store.syncs_before_replies:
                self.world.spawn("sync for replies", self.sync_for_replies())
            elif self.fsync_ms is not None:
                self.world.spawn("sync when due", self.sync_when_due())

    def find(self, id: int) -> tuple[Job, bytes] | None:
        job = self.engine.jobs.get(id)
        return None if job is None else (job, self.engine.tube_of(job).name)

    def finish(self) -> None:
        """The end after stop(); the greenlets are dead by now."""
        if self.exit_code == 0:
            try:
                self.end_sync()
                self.end_turn()
                if self.store is not None:
                    point = self.store.sync_point()
                    if point is not None:
                        point.run()
                    self.release(self.held)
                    self.store.close()
            except JournalError as error:
                self.fail(error)
        for connection in list(self.connections.values()):
            connection.peer.disconnect()

    def fail(self, error: JournalError) -> None:
        self.world.fails(error)
        self.exit_code = EXIT_JOURNAL
        self.stopped = True

    # --- connections

    def accept(self, peer: Peer) -> Connection:
        session = self.session_type(self.service)
        connection = Connection(session, peer)
        session.trace = partial(self.world.trace, connection)
        self.connections[session.number] = connection
        self.world.spawn(f"connection {session.number}", self.serve(connection))
        return connection

    def serve(self, connection: Connection) -> Greenlet:
        session = connection.session
        while True:
            yield Wait(connection.busy)
            if connection.gone or (session.closed and not connection.holds and not session.out):
                break
            if session.unfinished:
                self.step(connection, b"")
            elif connection.inbox:
                self.step(connection, connection.inbox.popleft())
            else:
                connection.read_all = True
                self.step(connection, None)
        if not self.stopped:
            connection.gone = True
            connection.peer.disconnect()
            yield from self.give_back(connection)

    def give_back(self, connection: Connection) -> Greenlet:
        session = connection.session
        while True:
            self.world.leaves(connection, False)
            done = session.leave(self.world.now_ns())
            self.schedule_turn()
            if done:
                self.connections.pop(session.number)
                self.world.leaves(connection, True)
                return
            yield NOW

    def step(self, connection: Connection, data: bytes | None) -> None:
        session = connection.session
        store = self.store
        before = 0 if store is None else store.appended
        now_ns = self.world.now_ns()
        self.world.steps(connection)
        if data is None:
            session.hang_up(now_ns)
        elif data:
            session.receive(data, now_ns)
        else:
            session.run(now_ns)
        self.world.steps(None)
        if store is not None and store.appended != before:
            connection.changed = True
        if not connection.touched:
            connection.touched = True
            self.touched.append(connection)
        self.schedule_turn()

    # --- the end of a turn

    def schedule_turn(self) -> None:
        if not self.turn_scheduled:
            self.turn_scheduled = True
            self.world.spawn("end of turn", self.run_turn())

    def run_turn(self) -> Greenlet:
        yield NOW
        self.end_turn()

    def end_turn(self) -> None:
        self.turn_scheduled = False
        if self.exit_code:
            return
        now_ns = self.world.now_ns()
        self.collect_served()
        touched = self.touched
        self.touched = []
        store = self.store
        if store is not None and store.dirty:
            try:
                store.commit(now_ns)
            except JournalError as error:
                self.fail(error)
                return
            self.written = True
            self.grown = True
        self.flush(touched)
        self.arm(now_ns)

    def collect_served(self) -> None:
        served = self.engine.served
        for client in served:
            connection = self.connections.get(client.number)
            if connection is not None and not connection.touched:
                connection.touched = True
                self.touched.append(connection)
        served.clear()

    def flush(self, touched: list[Connection]) -> None:
        if self.store is not None and self.store.syncs_before_replies:
            self.flush_durably(touched)
            return
        for connection in touched:
            connection.touched = False
            session = connection.session
            if session.out:
                self.world.moment("before replies leave")
                connection.send(session.take_out())

    def flush_durably(self, touched: list[Connection]) -> None:
        for connection in touched:
            connection.touched = False
            session = connection.session
            if session.out:
                data = session.take_out()
                if connection.changed or connection.holds:
                    connection.changed = False
                    connection.holds += 1
                    self.held.append((connection, data))
                else:
                    self.world.moment("before replies leave")
                    connection.send(data)
        if self.held and not self.sync_wanted:
            if self.syncs_quickly or self.everybody_waits:
                self.sync_here()
            else:
                self.sync_wanted = True

    @property
    def everybody_waits(self) -> bool:
        return len(self.held) + self.engine.waiting_count >= len(self.connections)

    def sync_here(self) -> None:
        assert self.store is not None
        held = self.held
        self.held = []
        point = self.store.sync_point()
        try:
            if point is not None:
                point.run()
        except JournalError as error:
            self.fail(error)
            return
        self.release(held)

    def release(self, held: list[tuple[Connection, bytes]]) -> None:
        for connection, data in held:
            self.world.moment("before replies leave")
            connection.release(data)

    # --- greenlets

    def keep_time(self) -> Greenlet:
        while True:
            done = self.engine.advance(self.world.now_ns(), self.slice_moves)
            self.world.advanced(done)
            deadline_ns = self.engine.next_deadline_ns()
            if self.engine.served:
                self.schedule_turn()
            if not done:
                yield NOW
                continue
            self.armed_ns = deadline_ns
            self.nudge = False
            yield Wait(lambda: self.nudge, None if deadline_ns == NEVER else deadline_ns)

    def arm(self, now_ns: int) -> None:
        deadline_ns = self.engine.next_deadline_ns()
        if deadline_ns != NEVER and (self.armed_ns == NEVER or deadline_ns < self.armed_ns):
            self.nudge = True

    def sync_when_due(self) -> Greenlet:
        store = self.store
        assert store is not None
        while self.exit_code == 0:
            yield Wait(lambda: self.written)
            self.written = False
            if store.sync_due_ns:
                yield Wait(at_ns=store.sync_due_ns)
                yield from self.sync_away(0)

    def sync_for_replies(self) -> Greenlet:
        while self.exit_code == 0:
            yield Wait(lambda: self.sync_wanted)
            yield from self.sync_away(len(self.held))
            if self.exit_code == 0 and self.held and (self.syncs_quickly or self.everybody_waits):
                self.sync_here()
            if not self.held:
                self.sync_wanted = False

    def sync_away(self, held: int) -> Greenlet:
        """The sync in a thread, and behind it so many of the replies that wait."""
        assert self.store is not None
        try:
            point = self.store.sync_point()
            if point is not None:
                self.syncing = partial(self.world.run_sync, point.run, self.world.begin_sync())
                took_ns = self.world.sync_ns()
                yield Wait(at_ns=self.world.now_ns() + took_ns)
                self.end_sync()
                self.syncs_quickly = not took_ns
        except JournalError as error:
            self.fail(error)
            return
        synced, self.held = self.held[:held], self.held[held:]
        self.release(synced)

    def end_sync(self) -> None:
        syncing, self.syncing = self.syncing, None
        if syncing is not None:
            syncing()

    def keep_house(self) -> Greenlet:
        store = self.store
        assert store is not None
        while True:
            if not store.settling:
                self.grown = False
                yield Wait(lambda: self.grown)
            yield Wait(at_ns=self.world.now_ns() + HOUSEKEEPING_NS)
            try:
                while store.wants_compaction():
                    store.compact_slice(self.world.now_ns())
                    self.written = True
                    yield NOW
            except JournalError as error:
                self.fail(error)
                return
