"""The part of serving/ in a world without gevent and sockets: which task runs when, and for how long.

The turn is the real one. A greenlet is a generator that yields what it waits for; a thread is a wait of some
milliseconds. Left out: signals, slow readers (nothing is ever unsent), limits of what is read, statistics of the
process, accepting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from geventstalk.core.bodies import Bodies
from geventstalk.core.engine import NEVER
from geventstalk.core.operate import Operate
from geventstalk.durable.store import Store
from geventstalk.turn.maintenance import Maintenance
from geventstalk.turn.queue import OperationQueue
from geventstalk.turn.replies import Channel
from geventstalk.turn.tasks import Sync, Wait
from geventstalk.turn.turn import Turn
from geventstalk.wire.session import Service, Session
from journal import JournalError

EXIT_JOURNAL = 74


@dataclass
class Pause:
    """Until the event is true or the moment has come, whichever is first; or until a sync in a thread is over."""

    event: Callable[[], bool] = lambda: False
    at_ns: int | None = None
    sync: Sync | None = None

    @staticmethod
    def of(wait: Wait) -> Pause:
        """Returns what a task of the turn waits for."""
        flag = wait.flag
        event = (lambda: False) if flag is None else (lambda: flag.is_set)
        return Pause(event, None if wait.at_ns == NEVER else wait.at_ns, wait.sync)

    def over(self, now_ns: int) -> bool:
        return (self.at_ns is not None and now_ns >= self.at_ns) or self.event()


NOW = Pause(at_ns=0)
Greenlet = Iterator[Pause]


class Peer(Protocol):
    """The client's end of a connection."""

    def deliver(self, data: bytes) -> bool:
        """Takes what the server sends; False when the client is gone."""
        ...

    def disconnect(self) -> None:
        """The server has closed the connection."""
        ...


class World(Protocol):
    """The surroundings of a server: its questions, and the listeners to its actions."""

    def now_ns(self) -> int:
        """The monotonic clock."""
        ...

    def wall_ns(self) -> int:
        """The wall clock."""
        ...

    def sync_ns(self) -> int:
        """Returns how long the next sync in a thread takes."""
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
        """The jobs of a client that is gone are given back from now on; done: all were given back."""
        ...

    def steps(self, connection: Connection | None) -> None:
        """A session executes commands from now on; None: not any more."""
        ...

    def trace(self, connection: Connection, direction: str, data: bytes) -> None:
        """A session executes a line, or replies."""
        ...


class Connection(Channel):
    """A session, its peer, and what travels between them."""

    def __init__(self, session: Session, peer: Peer, world: World) -> None:
        super().__init__(session)
        self.peer = peer
        self.inbox: deque[bytes] = deque()
        self.ended = False  # the peer sends nothing more
        self.read_all = False  # and the session knows
        self.gone = False
        self.told_to_go_on = False  # since its last step
        self._world = world

    def over(self) -> bool:
        return self.gone or (self.session.closed and not self.held and not self.session.out)

    def busy(self) -> bool:
        session = self.session
        if self.over():
            return True
        if session.closed:
            return False
        if session.unfinished:
            return not session.out and self.told_to_go_on
        return bool(self.inbox) or (self.ended and not self.read_all)

    def send(self, data: bytes) -> None:
        self._world.moment("before replies leave")
        if not self.gone and not self.peer.deliver(data):
            self.gone = True

    def goes_on(self) -> None:
        self.told_to_go_on = True


class WatchedTurn(Turn):
    """The turn, which tells the world what it does. Its maintenance and its `queue` are of these kinds."""

    kind = Maintenance
    queue = OperationQueue

    def __init__(self, engine: Operate, world: World, host: Host) -> None:
        super().__init__(engine, world.now_ns, world.wall_ns, host.turn_begins, host.turn_fails)
        self.maintenance = self.kind(engine, world.now_ns, self.begin, self.let_awaiting_go_on, self.syncs.written)
        self.operations = self.queue(engine, world.now_ns, self.gate, self.begin, self._undo, self._say)
        self.world = world

    def step(self, channel: Channel, data: bytes | None) -> None:
        assert isinstance(channel, Connection)
        channel.told_to_go_on = False
        self.world.steps(channel)
        super().step(channel, data)
        self.world.steps(None)

    def look_at_memory(self, bodies: Bodies, now_ns: int) -> None:
        bodies.keep_bound(self.engine)  # not only when a put or compaction needs room
        super().look_at_memory(bodies, now_ns)

    def advance(self) -> bool:
        done = super().advance()
        self.world.advanced(done)
        return done

    def give_back(self, channel: Channel) -> bool:
        assert isinstance(channel, Connection)
        self.world.leaves(channel, False)
        done = super().give_back(channel)
        if done:
            self.world.leaves(channel, True)
        return done


class Host:
    """One process. Its turn has no store when there is no journal."""

    def __init__(
        self, world: World, max_job_bytes: int, slice_moves: int, turn: type[WatchedTurn], session: type[Session]
    ) -> None:
        self.world = world
        self.session_type = session
        self.engine = Operate(world.now_ns())
        self.service = Service(self.engine, max_job_bytes, dict)
        self.turn = turn(self.engine, world, self)
        self.turn.move_slice = slice_moves
        self.stopped = False
        self.exit_code = 0
        self._sync: Callable[[], None] | None = None

    def open_journal(self, store: Store) -> None:
        """Brings the jobs back. Raises JournalError."""
        self.turn.open(store)

    def start(self) -> None:
        """Everything that runs beside the clients."""
        for number, task in enumerate(self.turn.tasks()):
            self.world.spawn(f"task {number}", self._drive(task))

    def finish(self) -> None:
        """The end after a stop; the greenlets are dead by now."""
        self._end_sync()
        self.turn.finish()
        for channel in list(self.turn.channels.values()):
            assert isinstance(channel, Connection)
            channel.peer.disconnect()

    # --- what the turn calls

    def turn_begins(self) -> None:
        self.world.spawn("end of turn", self._end_turn())

    def _end_turn(self) -> Greenlet:
        yield NOW
        self.turn.end()

    def turn_fails(self, error: BaseException) -> None:
        if not isinstance(error, JournalError):
            raise error  # in the simulation nothing else may fail
        self.world.fails(error)
        self.exit_code = EXIT_JOURNAL
        self.stopped = True

    # --- greenlets

    def _drive(self, task: Iterator[Wait]) -> Greenlet:
        try:
            for wait in task:
                if wait.work is not None:
                    yield Pause(at_ns=self.world.now_ns() + self.world.sync_ns())
                    wait.work.run()
                    continue
                if wait.sync is None:
                    yield Pause.of(wait)
                    continue
                self._sync = partial(self.world.run_sync, wait.sync.run, self.world.begin_sync())
                took_ns = self.world.sync_ns()
                yield Pause(at_ns=self.world.now_ns() + took_ns)
                self._end_sync()
                wait.sync.took_ns = took_ns
        except JournalError as error:
            self.turn.fail(error)

    def _end_sync(self) -> None:
        sync, self._sync = self._sync, None
        if sync is not None:
            sync()

    def accept(self, peer: Peer) -> Connection:
        session = self.session_type(self.service)
        connection = Connection(session, peer, self.world)
        session.trace = partial(self.world.trace, connection)
        self.turn.join(connection)
        self.world.spawn(f"connection {session.number}", self._serve(connection))
        return connection

    def _serve(self, connection: Connection) -> Greenlet:
        while True:
            yield Pause(connection.busy)
            if connection.over():
                break
            if connection.session.unfinished:
                self.turn.step(connection, b"")
            elif connection.inbox:
                self.turn.step(connection, connection.inbox.popleft())
            else:
                connection.read_all = True
                self.turn.step(connection, None)
        if not self.stopped:
            connection.gone = True
            connection.peer.disconnect()
            self.turn.leave(connection)
