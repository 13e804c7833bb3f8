"""The client for threads, and for gevent where sockets are patched: one blocking socket."""

from __future__ import annotations

import functools
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Concatenate, Final, ParamSpec, TypeVar

from geventstalk.client import protocol, session
from geventstalk.client.errors import BeanstalkError, ServerError, TimedOut
from geventstalk.client.protocol import ROUND_S, Command, Job
from geventstalk.client.session import ClientSession, Connect, Outcomes, Pending, Queue, Receive, Send, Step, Steps

P = ParamSpec("P")
T = TypeVar("T")

_READ_BYTES: Final = 1 << 16
_WRITE_BYTES: Final = 1 << 18


def _now(make: Callable[P, Command[T]]) -> Callable[Concatenate[Client, P], T]:
    """Returns the method that does the command and returns its result."""

    @functools.wraps(make)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.do(make(*args, **kwargs))

    return method


def _later(make: Callable[P, Command[T]]) -> Callable[Concatenate[Verbs, P], Pending[T]]:
    """Returns the method that adds the command to a pipeline."""

    @functools.wraps(make)
    def method(self: Verbs, /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return self.queue.add(make(*args, **kwargs))

    return method


class Client:
    """A connection to the first of the addresses that answers. It is for one thread or greenlet at a time.

    It connects with the first call, and again after a loss. `timeout` is the time in seconds without a byte from the
    server after which the connection counts as lost, and `attempts` how often each address is tried.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "127.0.0.1",
        *,
        use: str = "default",
        watch: Sequence[str] = ("default",),
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        attempts: int = 3,
        tls: ssl.SSLContext | None = None,
        token: str = "",
    ) -> None:
        self._session: Final = ClientSession(session.parse_addresses(addresses), use, watch, timeout, attempts, token)
        self._timeout_s: Final = timeout
        self._connect_timeout_s: Final = connect_timeout
        self._tls: Final = tls
        self._socket: socket.socket | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the server releases its reserved jobs. A later call connects again."""
        self._session.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def connection(self) -> int:
        """The number of the last connection: 1 for the first one, and one more after each loss."""
        return self._session.connection

    def do(self, command: Command[T]) -> T:
        outcomes: Outcomes = []
        self.drive(self._session.run([command], outcomes))
        if isinstance(outcomes[0], BeanstalkError):
            raise outcomes[0]
        result: T = outcomes[0]
        return result

    def reserve(self) -> Job:
        """Takes a job of the watched tubes; waits for one without an end."""
        while True:
            try:
                return self.reserve_with_timeout(ROUND_S)
            except TimedOut:
                continue

    def reserve_batch(self, most: int, timeout: int = 0) -> list[Job]:
        """Takes up to this many jobs in one command. Waits up to this many seconds for the first."""
        outcomes: Outcomes = []
        self.drive(self._session.reserve_batch(most, timeout, outcomes))
        return session.jobs_of(outcomes)

    def delete_batch(self, ids: Sequence[int]) -> int:
        """Deletes jobs, many at once; returns how many there were."""
        outcomes: Outcomes = []
        self.drive(self._session.delete_batch(ids, outcomes))
        return session.deleted_of(outcomes)

    def pipeline(self) -> Pipeline:
        return Pipeline(self)

    def flush(self, queue: Queue) -> None:
        commands, pending = queue.take()
        outcomes: Outcomes = []
        try:
            self.drive(self._session.run(commands, outcomes))
        finally:
            session.settle(pending, outcomes)

    put = _now(protocol.put)
    use = _now(protocol.use)
    reserve_with_timeout = _now(protocol.reserve_with_timeout)
    reserve_job = _now(protocol.reserve_job)
    delete = _now(protocol.delete)
    release = _now(protocol.release)
    bury = _now(protocol.bury)
    touch = _now(protocol.touch)
    watch = _now(protocol.watch)
    ignore = _now(protocol.ignore)
    peek = _now(protocol.peek)
    peek_ready = _now(protocol.peek_ready)
    peek_delayed = _now(protocol.peek_delayed)
    peek_buried = _now(protocol.peek_buried)
    kick = _now(protocol.kick)
    kick_job = _now(protocol.kick_job)
    stats = _now(protocol.stats)
    stats_job = _now(protocol.stats_job)
    stats_tube = _now(protocol.stats_tube)
    stats_group = _now(protocol.stats_group)
    put_in = _now(protocol.put_in)
    peek_reserved = _now(protocol.peek_reserved)
    list_jobs = _now(protocol.list_jobs)
    flush_tube = _now(protocol.flush_tube)
    move = _now(protocol.move)
    reprioritize = _now(protocol.reprioritize)
    reserve_mode = _now(protocol.reserve_mode)
    drain = _now(protocol.drain)
    undrain = _now(protocol.undrain)
    list_tubes = _now(protocol.list_tubes)
    list_tube_used = _now(protocol.list_tube_used)
    list_tubes_watched = _now(protocol.list_tubes_watched)
    pause_tube = _now(protocol.pause_tube)

    def drive(self, steps: Steps) -> None:
        """Does the steps. An error of the server leaves the connection as it is; any other closes it."""
        try:
            step = next(steps)
            while True:
                try:
                    data = self._io(step)
                except OSError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(data)
        except StopIteration:
            return
        except (ServerError, RuntimeError):  # the latter for a thread that comes while another waits
            raise
        except BaseException:
            steps.close()
            self.close()
            raise

    def _io(self, step: Step) -> bytes:
        if isinstance(step, Connect):
            self.close()
            self._socket = self._connect(step)
            return b""
        if isinstance(step, session.Sleep):
            time.sleep(step.seconds)
            return b""
        if self._socket is None:
            raise OSError("there is no connection")
        if isinstance(step, Receive):
            self._socket.settimeout(step.limit_s)
            return self._socket.recv(_READ_BYTES)
        if isinstance(step, Send):
            self._send(self._socket, step.data)
        else:
            _probe(self._socket)
        return b""

    def _send(self, sock: socket.socket, data: bytes) -> None:
        sock.settimeout(self._timeout_s)
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                at += sock.send(view[at : at + _WRITE_BYTES])

    def _connect(self, to: Connect) -> socket.socket:
        if to.port:
            made = socket.create_connection((to.host, to.port), self._connect_timeout_s)
        else:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if to.port:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            else:
                made.settimeout(self._connect_timeout_s)
                made.connect(to.host)
            return self._tls.wrap_socket(made, server_hostname=to.host) if self._tls else made
        except BaseException:
            made.close()
            raise


class Verbs:
    """The verbs of a pipeline: each returns at once, and what it returns has the result when the pipeline is done."""

    def __init__(self) -> None:
        self.queue: Final = Queue()

    put = _later(protocol.put)
    use = _later(protocol.use)
    reserve_with_timeout = _later(protocol.reserve_with_timeout)
    reserve_job = _later(protocol.reserve_job)
    delete = _later(protocol.delete)
    release = _later(protocol.release)
    bury = _later(protocol.bury)
    touch = _later(protocol.touch)
    watch = _later(protocol.watch)
    ignore = _later(protocol.ignore)
    peek = _later(protocol.peek)
    peek_ready = _later(protocol.peek_ready)
    peek_delayed = _later(protocol.peek_delayed)
    peek_buried = _later(protocol.peek_buried)
    kick = _later(protocol.kick)
    kick_job = _later(protocol.kick_job)
    stats = _later(protocol.stats)
    stats_job = _later(protocol.stats_job)
    stats_tube = _later(protocol.stats_tube)
    stats_group = _later(protocol.stats_group)
    put_in = _later(protocol.put_in)
    peek_reserved = _later(protocol.peek_reserved)
    list_jobs = _later(protocol.list_jobs)
    flush_tube = _later(protocol.flush_tube)
    move = _later(protocol.move)
    reprioritize = _later(protocol.reprioritize)
    reserve_mode = _later(protocol.reserve_mode)
    drain = _later(protocol.drain)
    undrain = _later(protocol.undrain)
    list_tubes = _later(protocol.list_tubes)
    list_tube_used = _later(protocol.list_tube_used)
    list_tubes_watched = _later(protocol.list_tubes_watched)
    pause_tube = _later(protocol.pause_tube)


class Pipeline(Verbs):
    """Commands that are sent together when the block ends, or with `flush`."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client: Final = client

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.flush()

    def flush(self) -> None:
        """Sends what there is and reads the replies. Raises ConnectionLost."""
        self._client.flush(self.queue)


def _probe(sock: socket.socket) -> None:
    sock.settimeout(0)
    try:
        data = sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return
    raise ConnectionResetError("the server spoke without being asked" if data else "the server closed the connection")
