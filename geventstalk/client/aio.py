"""The client for asyncio: the session of the other, over streams."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from geventstalk.client import protocol, session
from geventstalk.client.blocking import Verbs
from geventstalk.client.errors import BeanstalkError, ServerError, TimedOut
from geventstalk.client.protocol import ROUND_S, Command, Job
from geventstalk.client.session import ClientSession, Connect, Outcomes, Queue, Receive, Send, Step, Steps

P = ParamSpec("P")
T = TypeVar("T")

_READ_BYTES: Final = 1 << 16
_WRITE_BYTES: Final = 1 << 18


def _now(make: Callable[P, Command[T]]) -> Callable[Concatenate[Client, P], Coroutine[Any, Any, T]]:
    """Returns the coroutine that does the command and returns its result."""

    @functools.wraps(make)
    async def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.do(make(*args, **kwargs))

    return method


class Client:
    """A connection as that of `geventstalk.client.Client`, for one task at a time."""

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
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the server releases its reserved jobs. A later call connects again."""
        self._session.close()
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    @property
    def connection(self) -> int:
        """The number of the last connection: 1 for the first one, and one more after each loss."""
        return self._session.connection

    async def do(self, command: Command[T]) -> T:
        outcomes: Outcomes = []
        await self.drive(self._session.run([command], outcomes))
        if isinstance(outcomes[0], BeanstalkError):
            raise outcomes[0]
        result: T = outcomes[0]
        return result

    async def reserve(self) -> Job:
        """Takes a job of the watched tubes; waits for one without an end."""
        while True:
            try:
                return await self.reserve_with_timeout(ROUND_S)
            except TimedOut:
                continue

    async def reserve_batch(self, most: int, timeout: int = 0) -> list[Job]:
        """Takes up to this many jobs in one command. Waits up to this many seconds for the first."""
        outcomes: Outcomes = []
        await self.drive(self._session.reserve_batch(most, timeout, outcomes))
        return session.jobs_of(outcomes)

    async def delete_batch(self, ids: Sequence[int]) -> int:
        """Deletes jobs, many at once; returns how many there were."""
        outcomes: Outcomes = []
        await self.drive(self._session.delete_batch(ids, outcomes))
        return session.deleted_of(outcomes)

    def pipeline(self) -> Pipeline:
        return Pipeline(self)

    async def flush(self, queue: Queue) -> None:
        commands, pending = queue.take()
        outcomes: Outcomes = []
        try:
            await self.drive(self._session.run(commands, outcomes))
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

    async def drive(self, steps: Steps) -> None:
        """Does the steps. An error of the server leaves the connection as it is; any other closes it."""
        try:
            step = next(steps)
            while True:
                try:
                    data = await self._io(step)
                except OSError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(data)
        except StopIteration:
            return
        except (ServerError, RuntimeError):  # the latter for a task that comes while another waits
            raise
        except BaseException:
            steps.close()
            self.close()
            raise

    async def _io(self, step: Step) -> bytes:
        if isinstance(step, Connect):
            self.close()
            self._streams = await _within(self._connect_timeout_s, self._connect(step))
            return b""
        if isinstance(step, session.Sleep):
            await asyncio.sleep(step.seconds)
            return b""
        if self._streams is None:
            raise OSError("there is no connection")
        reader, writer = self._streams
        if isinstance(step, Receive):
            return await _within(step.limit_s, reader.read(_READ_BYTES))
        if isinstance(step, Send):
            for at in range(0, len(step.data), _WRITE_BYTES):
                writer.write(step.data[at : at + _WRITE_BYTES])
                await _within(self._timeout_s, writer.drain())
        elif reader.at_eof() or writer.transport.is_closing():  # a Probe
            raise ConnectionResetError("the server closed the connection")
        return b""

    def _connect(self, to: Connect) -> Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        if not to.port:
            host = to.host if self._tls else None
            return asyncio.open_unix_connection(to.host, ssl=self._tls, server_hostname=host)
        return asyncio.open_connection(to.host, to.port, ssl=self._tls)


class Pipeline(Verbs):
    """Commands that are sent together when the block ends, or with `flush`."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client: Final = client

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if kind is None:
            await self.flush()

    async def flush(self) -> None:
        """Sends what there is and reads the replies. Raises ConnectionLost."""
        await self._client.flush(self.queue)


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Returns what the work brings. Raises TimeoutError.

    asyncio.wait_for loses a cancellation that comes when the work is just done, before Python 3.12.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()
    if not done:
        raise TimeoutError("the server does not answer")
    return task.result()
