"""A client of the port of any beanstalkd: greenstalk sends the commands, this module reads the statistics.

greenstalk reads statistics one by one, and takes the tube `007` of beanstalkd 1.12 for the number 7. So both readers
share the socket. That is safe, because replies come to commands only, and each reader takes all of its replies.
Invariant: each call returns an answer or raises an error of errors.py.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import greenstalk

from geventstalk.remote.address import Address
from geventstalk.remote.errors import Absent, Nonsense, NotDone, Unreachable

Facts = dict[str, str]
"""Statistics in the server's words."""

_AT_ONCE: Final = 100
"""The number of commands sent before their replies are read. All of them fit into the buffers of a socket."""
_LINE_BYTES_MAX: Final = 1024
_ANSWER_BYTES_MAX: Final = 1 << 28  # a million tubes with the longest names
_REFUSALS: Final = {
    greenstalk.DrainingError: "the server is draining and takes no jobs",
    greenstalk.JobTooBigError: "the job is larger than the server takes",
    greenstalk.OutOfMemoryError: "the server has no room for the job",
    greenstalk.InternalError: "the server has a fault and did not do it",
    greenstalk.BadFormatError: "the server does not understand the command",
    greenstalk.UnknownCommandError: "the server does not know the command",
    greenstalk.BuriedError: "the server had no memory and buried the job",
    greenstalk.DeadlineSoonError: "a reserved job is about to time out",
}
DEFAULT: Final = greenstalk.DEFAULT_TUBE
"""The tube that a new connection uses and watches."""
PEEKS: Final = ("ready", "delayed", "buried")
"""The states of which the protocol shows the next job."""


class Beanstalk:
    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address: Final = address
        self.timeout_s: Final = timeout_s
        self._used = DEFAULT
        with self._guard():
            self._socket: Final = _connect(address, timeout_s)
        try:
            self._reader: Final = self._socket.makefile("rb")
            with self._guard():
                self._client: Final = greenstalk.Client(self._socket, encoding=None)
            self.facts: Facts = self.stats()
            """The server's statistics at the time of the connection. They prove that this is a server."""
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._reader.close()
        self._client.close()

    # Statistics

    def stats(self) -> Facts:
        self._send([b"stats"])
        facts = self._facts()
        if facts is None or "current-jobs-ready" not in facts:
            raise self._nonsense()
        return facts

    def tubes(self) -> list[str]:
        self._send([b"list-tubes"])
        text = self._answer()
        if text is None or not text.startswith("---\n"):
            raise self._nonsense()
        return [line[2:] for line in text.split("\n")[1:] if line.startswith("- ")]

    def tube_stats(self, names: Iterable[str]) -> Iterator[Facts]:
        """Yields the statistics of the tubes that exist. `name` is as it was given."""
        for facts, name in self._many(b"stats-tube ", names):
            if facts is not None:
                yield {**facts, "name": name}

    def job_stats(self, ids: Iterable[int]) -> Iterator[Facts]:
        for facts, _ in self._many(b"stats-job ", map(str, ids)):
            if facts is not None:
                yield facts

    def _many(self, command: bytes, words: Iterable[str]) -> Iterator[tuple[Facts | None, str]]:
        rest = iter(words)
        while batch := list(islice(rest, _AT_ONCE)):
            self._send([command + _encode(word) for word in batch])
            # All replies are read before the first is yielded: its receiver may send a command.
            yield from list(zip([self._facts() for _ in batch], batch, strict=True))

    # Jobs

    def use(self, tube: str) -> None:
        if tube != self._used:
            with self._guard():
                self._client.use(tube)
            self._used = tube

    def put(self, body: bytes, pri: int, delay_s: int, ttr_s: int) -> int:
        """Puts a job into the used tube; returns its id."""
        with self._guard():
            return self._client.put(body, pri, delay_s, ttr_s)

    def peek(self, id: int) -> bytes:
        with self._guard():
            return self._client.peek(id).body

    def peek_next(self, state: str) -> tuple[int, bytes] | None:
        """Returns id and body of the next job of the used tube in this state, one of PEEKS."""
        peeks = {
            "ready": self._client.peek_ready,
            "delayed": self._client.peek_delayed,
            "buried": self._client.peek_buried,
        }
        try:
            with self._guard():
                job = peeks[state]()
                return job.id, job.body
        except Absent:
            return None

    def reserve(self, id: int) -> bytes:
        with self._guard():
            return self._client.reserve_job(id).body

    def delete(self, id: int) -> None:
        with self._guard():
            self._client.delete(id)

    def release(self, id: int, pri: int, delay_s: int) -> None:
        with self._guard():
            self._client.release(greenstalk.Job(id, b""), pri, delay_s)

    def bury(self, id: int, pri: int) -> None:
        with self._guard():
            self._client.bury(greenstalk.Job(id, b""), pri)

    def kick(self, most: int) -> int:
        """Kicks at most so many jobs of the used tube: buried ones, or if there are none, delayed ones."""
        with self._guard():
            return self._client.kick(most)

    def kick_job(self, id: int) -> None:
        with self._guard():
            self._client.kick_job(id)

    def pause(self, tube: str, seconds: int) -> None:
        with self._guard():
            self._client.pause_tube(tube, seconds)

    # The wire

    def _send(self, commands: Sequence[bytes]) -> None:
        with self._guard():
            self._socket.sendall(b"".join(command + b"\r\n" for command in commands))

    def _facts(self) -> Facts | None:
        text = self._answer()
        if text is None:
            return None
        facts = {}
        for line in text.split("\n")[1:]:
            key, colon, value = line.partition(": ")
            if colon:
                quoted = len(value) > 1 and value[0] == value[-1] == '"'
                facts[key] = value[1:-1] if quoted else value
        return facts

    def _answer(self) -> str | None:
        """Returns the text behind an OK; None for NOT_FOUND."""
        with self._guard():
            line = self._reader.readline(_LINE_BYTES_MAX)
            if not line:
                raise ConnectionResetError
            if line == b"NOT_FOUND\r\n":
                return None
            word, _, number = line.rstrip(b"\r\n").partition(b" ")
            if word != b"OK" or not line.endswith(b"\r\n") or not number.isdigit() or len(number) > 18:
                raise self._nonsense()
            size = int(number)
            if size > _ANSWER_BYTES_MAX:
                raise self._nonsense()
            data = self._reader.read(size + 2)
            if len(data) < size + 2:
                raise ConnectionResetError
            if not data.endswith(b"\r\n"):
                raise self._nonsense()
            return data[:-2].decode("utf-8", "surrogateescape")

    def _nonsense(self) -> Nonsense:
        return Nonsense(f"what answers at {self.address} does not speak the beanstalk protocol")

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turns the exceptions of sockets and greenstalk into errors of errors.py."""
        try:
            yield
        except greenstalk.NotFoundError:
            raise Absent("there is no such job, or its state does not fit") from None
        except greenstalk.BeanstalkdError as error:
            raise NotDone(_REFUSALS.get(type(error), f"the server answers {type(error).__name__}")) from None
        except (greenstalk.Error, AssertionError, ValueError, TypeError, OverflowError):
            raise self._nonsense() from None
        except TimeoutError:
            raise Unreachable(f"the server at {self.address} did not answer within {self.timeout_s:g} s") from None
        except ConnectionRefusedError:
            raise Unreachable(f"no server listens at {self.address}") from None
        except (ConnectionError, EOFError):
            raise Unreachable(f"the server at {self.address} closed the connection") from None
        except OSError as error:
            raise Unreachable(f"cannot reach the server at {self.address}: {error.strerror or error}") from None


def _connect(address: Address, timeout_s: float) -> socket.socket:
    if address.port is None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(timeout_s)
        try:
            made.connect(address.host)
        except BaseException:
            made.close()
            raise
        return made
    try:
        made = socket.create_connection((address.host, _port(address.port)), timeout_s)
    except UnicodeError:  # the name cannot be encoded
        raise OSError("there is no such host") from None
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _port(port: str) -> int:
    if port.isdecimal():
        return int(port)
    try:
        return socket.getservbyname(port, "tcp")
    except OSError:
        raise OSError(f"there is no service {port}") from None


def _encode(word: str) -> bytes:
    return word.encode("utf-8", "surrogateescape")
