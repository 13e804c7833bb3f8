"""The commands of this program over the port of any beanstalkd: geventstalk.client speaks, this module tells the user.

Statistics stay text, because a tube named `007` is no number. Invariant: each call returns an answer or raises an error
of errors.py. A call after a loss connects again; what was reserved before is not reserved any more.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from geventstalk import client
from geventstalk.client import protocol
from geventstalk.client.protocol import Command, Reply
from geventstalk.remote.address import Address
from geventstalk.remote.errors import (
    Absent,
    ClientError,
    Nonsense,
    NotAllowed,
    NotDone,
    Unreachable,
    WantsToken,
    why_lost,
)

if TYPE_CHECKING:
    import ssl

Facts = dict[str, str]
"""Statistics in the server's words."""
T = TypeVar("T")

_AT_ONCE: Final = 100
"""Commands that are sent together. A command of the user may come between two such groups."""
_REFUSALS: Final = {
    client.Draining: "the server is draining and takes no jobs",
    client.JobTooBig: "the job is larger than the server takes",
    client.OutOfMemory: "the server has no memory or disk space for the job",
    client.InternalError: "the server has a fault and did not do it",
    client.BadFormat: "the server does not understand the command",
    client.UnknownCommand: "the server does not know the command",
    client.Buried: "the server had no memory and buried the job",
    client.DeadlineSoon: "a reserved job is about to time out",
}
DEFAULT: Final = "default"
"""The tube that a new connection uses and watches."""
PEEKS: Final = {
    "ready": protocol.peek_ready,
    "delayed": protocol.peek_delayed,
    "buried": protocol.peek_buried,
}
"""The states of which the protocol shows the next job, and how."""


class Beanstalk:
    def __init__(
        self,
        address: Address,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        token_of_user: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Connects. Shows the token of the user where the server serves only users, over TLS or a unix socket.

        Raises Unreachable, NotAllowed, and Nonsense when the peer has no statistics of a server.
        """
        self.address: Final = address
        self.timeout_s: Final = timeout_s
        self.facts: Facts = {}
        """The server's statistics at the time of the connection. They prove that this is a server."""
        self._tls: Final = tls
        self._token = ""
        self._used = DEFAULT
        self._connection = 0
        self._client = self._made()
        try:
            self.facts = self._first_stats(token_of_user)
        except BaseException:
            self.close()
            raise

    def _made(self) -> client.Client:
        address, wait_s = self.address, self.timeout_s
        try:
            return client.Client(
                _with_port_number(address),
                timeout=wait_s,
                connect_timeout=wait_s,
                attempts=1,
                tls=self._tls,
                token=self._token,
            )
        except ValueError:  # the name cannot be encoded
            raise Unreachable(f"cannot reach the server at {address}: there is no such host") from None
        except OSError as error:
            raise Unreachable(f"cannot reach the server at {address}: {error}") from None

    def _first_stats(self, token_of_user: Callable[[], str | None]) -> Facts:
        try:
            return self.stats()
        except WantsToken:
            if self._tls is None and not self.address.is_unix:  # others could read the token
                raise
            token = token_of_user()
            if token is None:
                raise
        self.close()
        self._token = token
        self._client = self._made()
        return self.stats()

    def close(self) -> None:
        self._client.close()

    # Statistics

    def stats(self) -> Facts:
        facts = self._always(Command(b"stats", b"OK", _facts, safe=True))
        if "current-jobs-ready" not in facts:
            raise self._nonsense()
        return facts

    def tubes(self) -> list[str]:
        return self._always(protocol.list_tubes())

    def tube_stats(self, names: Iterable[str]) -> Iterator[Facts]:
        """Yields the statistics of the tubes that exist. `name` is as it was given."""
        for facts, name in self._many(b"stats-tube ", names):
            yield {**facts, "name": name}

    def job_stats(self, ids: Iterable[int]) -> Iterator[Facts]:
        for facts, _ in self._many(b"stats-job ", map(str, ids)):
            yield facts

    def _many(self, verb: bytes, words: Iterable[str]) -> Iterator[tuple[Facts, str]]:
        rest = iter(words)
        while group := list(islice(rest, _AT_ONCE)):
            pipeline = self._client.pipeline()
            asked = [
                pipeline.queue.add(Command(verb + word.encode("utf-8", "surrogateescape"), b"OK", _facts, safe=True))
                for word in group
            ]
            try:
                pipeline.flush()
            except client.BeanstalkError as error:
                raise self._told(error) from None
            self._connection = self._client.connection
            for pending, word in zip(asked, group, strict=True):
                try:
                    yield pending.get(), word
                except client.NotFound:
                    continue
                except client.BeanstalkError as error:
                    raise self._told(error) from None

    # Jobs

    def use(self, tube: str) -> None:
        if tube != self._used:
            self._do(protocol.use(tube))
            self._used = tube

    def put(self, body: bytes, pri: int, delay_s: int, ttr_s: int, tags: str = "") -> tuple[int, str]:
        """Puts a job into the used tube; returns its id, or id and state of the job that has the same unique key."""
        put = protocol.put(body, priority=pri, delay=delay_s, ttr=ttr_s, tags=tags)
        return self._do(protocol.Command(put.line[:-2], put.wanted, _placed, body=put.body, safe=put.safe))

    def peek(self, id: int) -> bytes:
        return self._do(protocol.peek(id)).body

    def peek_next(self, state: str) -> tuple[int, bytes] | None:
        """Returns id and body of the next job of the used tube in this state, one of PEEKS."""
        try:
            return self._do(PEEKS[state]())
        except Absent:
            return None

    def reserve(self, id: int) -> bytes:
        return self._change(protocol.reserve_job(id)).body

    def delete(self, id: int) -> None:
        self._change(protocol.delete(id))

    def release(self, id: int, pri: int, delay_s: int) -> None:
        self._change(protocol.release(id, priority=pri, delay=delay_s))

    def bury(self, id: int, pri: int) -> None:
        self._change(protocol.bury(id, priority=pri))

    def kick(self, most: int) -> int:
        """Kicks up to this many jobs of the used tube: buried jobs, or delayed jobs when no job is buried."""
        return self._do(protocol.kick(most))

    def kick_job(self, id: int) -> None:
        self._change(protocol.kick_job(id))

    def knows(self, word: str) -> bool:
        """Returns whether the server has a verb, or a tag, that beanstalkd does not have."""
        return word in f"{self.facts.get('features', '')} {self.facts.get('tags', '')}".split()

    def move(self, id: int, tube: str) -> None:
        self._change(protocol.move(id, tube))

    def reprioritize(self, id: int, pri: int, delay_s: int | None) -> None:
        self._change(protocol.reprioritize(id, pri, delay_s))

    def drain(self, on: bool) -> None:
        self._do(protocol.drain() if on else protocol.undrain())

    def pause(self, tube: str, seconds: int) -> None:
        self._do(protocol.pause_tube(tube, seconds))

    def _do(self, command: Command[T]) -> T:
        try:
            result = self._client.do(command)
        except client.BeanstalkError as error:
            raise self._told(error) from None
        self._connection = self._client.connection
        return result

    def _change(self, command: Command[T]) -> T:
        """Does a command on a job over the connection of the last look: another server has other jobs by these ids."""
        command.connection = self._connection
        return self._do(command)

    def _always(self, command: Command[T]) -> T:
        """Does a command that finds something on each server."""
        try:
            return self._do(command)
        except Absent:
            raise self._nonsense() from None

    # Errors

    def _told(self, error: client.BeanstalkError) -> ClientError:
        """Returns the error of errors.py that explains this error to the user."""
        if isinstance(error, client.NotFound):
            return Absent("there is no such job, or its state does not fit")
        if isinstance(error, client.Unauthorized):
            if self._token:
                return NotAllowed(f"the server at {self.address} does not know the token")
            return WantsToken(
                f"the server at {self.address} wants the token of a user: --token-file or GEVENTSTALK_TOKEN"
            )
        if isinstance(error, client.Forbidden):
            return NotAllowed(f"the server at {self.address} does not allow that to the user")
        if isinstance(error, client.ServerError):
            return NotDone(_REFUSALS.get(type(error), str(error)))
        if isinstance(error, client.BadReply) or isinstance(error.__cause__, client.BadReply):
            return self._nonsense()
        return Unreachable(self._lost(error.__cause__))

    def _lost(self, cause: BaseException | None) -> str:
        at = self.address
        if isinstance(cause, TimeoutError):
            return f"the server at {at} did not answer within {self.timeout_s:g} s"
        if isinstance(cause, ConnectionRefusedError):
            return f"no server listens at {at}"
        is_end = isinstance(cause, ConnectionError) or "EOF" in str(cause)  # of ssl, whose import takes 10 ms
        if isinstance(cause, OSError) and not is_end:
            what = "no TLS with" if hasattr(cause, "library") else "cannot reach"
            return f"{what} the server at {at}: {why_lost(cause)}"
        is_first = not self.facts and self._tls is None
        return f"the server at {at} closed the connection" + ("; where it serves TLS, give --tls" if is_first else "")

    def _nonsense(self) -> Nonsense:
        return Nonsense(f"what answers at {self.address} does not speak the beanstalk protocol")


def _placed(reply: Reply) -> tuple[int, str]:
    words = reply.words
    return int(words[1]), words[2].decode("ascii").lower() if len(words) > 2 else ""


def _facts(reply: Reply) -> Facts:
    facts = {}
    for line in reply.body.decode("utf-8", "surrogateescape").split("\n")[1:]:
        key, colon, value = line.partition(": ")
        if colon:
            quoted = len(value) > 1 and value[0] == value[-1] == '"'
            facts[key] = value[1:-1] if quoted else value
    return facts


def _with_port_number(address: Address) -> str:
    """Returns the address as geventstalk.client reads it."""
    if address.port is None or address.port.isdecimal():
        return str(address)
    return str(address._replace(port=str(socket.getservbyname(address.port, "tcp"))))
