"""The state and the steps of a connection, without I/O: it yields steps, and a shell does them.

A session connects, restores what the last connection used and watched, sends commands in bounded pieces and reads their
replies. A step returns the bytes that a Receive brought, or raises OSError.
Invariant: a piece is sent when all replies to what was sent before are read, and fits into the buffers of sockets or
is a single command. So the two sides never wait for each other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from geventstalk.client import protocol
from geventstalk.client.errors import BadReply, BeanstalkError, ConnectionLost, NotFound, ServerError, TimedOut
from geventstalk.client.protocol import Command, Job, Replies, Reply

PIECE_BYTES: Final = 32 << 10
PORT: Final = 11300
_IDS_MAX: Final = 700
"""The number of ids of 20 digits that fit into the 16 KiB of a line."""
_DEFAULT: Final = "default"
_BACKOFF_S: Final = 0.1
_BACKOFF_MAX_S: Final = 2.0

_UNIX: Final = "unix:"

T = TypeVar("T")


class Connect(NamedTuple):
    host: str
    port: int
    """0 for the path of a unix socket."""


class Send(NamedTuple):
    data: bytes


class Receive(NamedTuple):
    limit_s: float


class Probe(NamedTuple):
    """Raises OSError if the peer has closed the connection."""


class Sleep(NamedTuple):
    seconds: float


Step = Connect | Send | Receive | Probe | Sleep
Steps = Generator[Step, bytes, None]
Outcomes = list[Any]
"""The result of each command, or the error in its place."""


class ClientSession:
    def __init__(
        self, addresses: Sequence[Connect], use: str, watch: Sequence[str], timeout_s: float, rounds: int, token: str
    ) -> None:
        self._auth = protocol.auth(token) if token else None
        self._addresses: Final = addresses
        self._at = 0
        self._used = use
        self._watched = dict.fromkeys(watch, 0)  # with their weights
        self._mode = _DEFAULT
        self._timeout_s: Final = timeout_s
        self._rounds: Final = rounds
        self._replies = Replies()
        self.connection = 0  # the number of connections so far
        self._connected = False
        self._busy = False
        self._batches: bool | None = None  # of this connection's server

    def run(self, commands: Sequence[Command[Any]], outcomes: Outcomes) -> Steps:
        """Sends the commands; appends an outcome for each. Raises ConnectionLost when some are not known."""
        self._require_idle()
        self._busy = True
        try:
            for piece in _pieces(commands):
                begun = len(outcomes)
                try:
                    yield from self._piece(piece, outcomes)
                except ConnectionLost as error:
                    outcomes.extend([error] * (begun + len(piece) - len(outcomes)))
                    raise
        finally:
            self._busy = False

    def reserve_batch(self, most: int, seconds: int, outcomes: Outcomes) -> Steps:
        """Takes up to this many jobs. Each outcome is a job, or the reason why there is none."""
        if not (yield from self._knows_batches()):
            yield from self.run(batch_of_reserves(most, seconds), outcomes)
            return
        while len(outcomes) < most:
            # Only the first may be sent again: with another connection, the jobs of this one are not held any more.
            told: Outcomes = []
            number = min(most - len(outcomes), protocol.BATCH_MAX)
            wait_s = 0 if outcomes else seconds
            yield from self.run([protocol.reserve_batch(number, wait_s, safe=not outcomes)], told)
            if not told[0]:
                return
            if not isinstance(told[0], list):
                outcomes.append(told[0])
                return
            outcomes.extend(told[0])

    def delete_batch(self, ids: Sequence[int], outcomes: Outcomes) -> Steps:
        """Deletes jobs: None is the outcome of each that was there."""
        if not (yield from self._knows_batches()):
            yield from self.run([protocol.delete(id) for id in ids], outcomes)
            return
        told: Outcomes = []
        lines = [ids[at : at + _IDS_MAX] for at in range(0, len(ids), _IDS_MAX)]
        yield from self.run([protocol.delete_batch(line) for line in lines], told)
        for outcome in told:
            outcomes.extend([None] * outcome if isinstance(outcome, int) else [outcome])

    def _knows_batches(self) -> Generator[Step, bytes, bool]:
        """Returns whether the server has batches. beanstalkd would take the rest of a long line for another command."""
        self._require_idle()
        yield from self._ready()
        if self._batches is None:
            told: Outcomes = []
            yield from self.run([protocol.stats()], told)
            features = told[0].get("features", "") if isinstance(told[0], dict) else ""
            self._batches = {"reserve-batch", "delete-batch"} <= set(str(features).split())
        return self._batches

    def _require_idle(self) -> None:
        if self._busy:
            raise RuntimeError("a client is for one thread or task at a time")

    def close(self) -> None:
        self._connected = False

    def _piece(self, piece: Sequence[Command[Any]], outcomes: Outcomes) -> Steps:
        safe = all(command.safe for command in piece)
        known = len(outcomes)
        for attempt in range(self._rounds):
            yield from self._ready()
            if any(command.connection not in (0, self.connection) for command in piece):
                raise ConnectionLost("the connection that the command is for is lost", sent=False)
            try:
                yield from self._exchange(piece, outcomes)
                return
            except BadReply:
                raise
            except OSError as error:
                if not safe or attempt == self._rounds - 1:
                    raise ConnectionLost(f"the connection is lost: {_text(error)}", sent=True) from error
            del outcomes[known:]
            yield Sleep(_backoff_s(attempt))

    def _ready(self) -> Steps:
        """Connects, unless a connection is open."""
        if self._connected:
            try:
                yield Probe()
                return
            except OSError:
                self._connected = False
        lost: Exception = OSError("no attempt")
        for attempt in range(self._rounds * len(self._addresses)):
            if attempt and attempt % len(self._addresses) == 0:
                yield Sleep(_backoff_s(attempt // len(self._addresses)))
            try:
                yield self._addresses[self._at]
                self._replies = Replies()
                self._batches = None
                self.connection += 1
                restored: Outcomes = []
                self._connected = True
                for piece in _pieces(list(self._restoration())):
                    yield from self._exchange(piece, restored)
            except (OSError, BadReply) as error:
                lost = error
                self._at = (self._at + 1) % len(self._addresses)
                continue
            refusals = [outcome for outcome in restored if isinstance(outcome, ServerError)]
            if refusals:
                self._connected = False
                raise refusals[0]
            return
        raise ConnectionLost(f"cannot connect: {_text(lost)}", sent=False) from lost

    def _restoration(self) -> Iterator[Command[Any]]:
        if self._auth is not None:
            yield self._auth
        if self._used != _DEFAULT:
            yield protocol.use(self._used)
        for tube, weight in list(self._watched.items()):
            if tube != _DEFAULT or weight:
                yield protocol.watch(tube, weight)
        if self._mode != _DEFAULT:
            yield protocol.reserve_mode(self._mode)
        if _DEFAULT not in self._watched:
            yield protocol.ignore(_DEFAULT)

    def _exchange(self, piece: Sequence[Command[Any]], outcomes: Outcomes) -> Steps:
        self._connected = False  # until all replies are read
        head = bytearray()
        for command in piece:
            head += command.line
            if command.body is None:
                continue
            if len(command.body) > PIECE_BYTES:
                yield Send(bytes(head))
                yield Send(command.body)
                head.clear()
            else:
                head += command.body
            head += b"\r\n"
        if head:
            yield Send(bytes(head))
        for command in piece:
            reply = yield from self._reply(command)
            jobs: list[Job] = []
            for _ in range(command.following(reply)):
                jobs.append(protocol.job_of((yield from self._reply(command))))
            outcome = jobs or command.result(reply)
            outcomes.append(outcome)
            if command.tube and not isinstance(outcome, BeanstalkError):
                self._remember(command)
        self._connected = self._replies.empty

    def _reply(self, command: Command[Any]) -> Generator[Step, bytes, Reply]:
        reply = self._replies.next()
        while reply is None:
            data = yield Receive(self._timeout_s + command.waits_s)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._replies.feed(data)
            reply = self._replies.next()
        return reply

    def _remember(self, command: Command[Any]) -> None:
        if command.line.startswith(b"use "):
            self._used = command.tube
        elif command.line.startswith(b"reserve-mode "):
            self._mode = command.tube
        elif command.line.startswith(b"watch "):
            words = command.line.split()
            self._watched[command.tube] = int(words[2]) if len(words) > 2 else self._watched.get(command.tube, 0)
        else:
            self._watched.pop(command.tube, None)


def _pieces(commands: Sequence[Command[Any]]) -> Iterator[Sequence[Command[Any]]]:
    """Commands that fit into the buffers together; a large one alone."""
    piece: list[Command[Any]] = []
    size = 0
    for command in commands:
        bytes_ = len(command.line) + (0 if command.body is None else len(command.body) + 2)
        if piece and size + bytes_ > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(command)
        size += bytes_
    if piece:
        yield piece


def _backoff_s(attempt: int) -> float:
    return min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0**attempt)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def parse_addresses(given: str | Sequence[str]) -> list[Connect]:
    addresses = [given] if isinstance(given, str) else given
    if not addresses:
        raise ValueError("no address is given")
    return [_parse(address) for address in addresses]


def _parse(address: str) -> Connect:
    if address.startswith(_UNIX):
        return Connect(address[len(_UNIX) :], 0)
    if address.startswith("["):
        host, bracket, port = address[1:].partition("]")
        port = port.removeprefix(":")
        sound = bool(bracket)
    else:
        host, _, port = address.partition(":")
        sound = True
    port = port or str(PORT)
    try:
        host.encode("idna")  # as the resolver does
    except UnicodeError:
        sound = False
    if not (sound and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} is no address of a server: host, host:port, [::1]:port or unix:path")
    return Connect(host, int(port))


class Pending(Generic[T]):
    """The future result of a command in a pipeline."""

    def __init__(self) -> None:
        self.outcome: Any = ConnectionLost("the pipeline has not sent the command", sent=False)

    def get(self) -> T:
        """Returns the result when the pipeline is done. Raises the command's error."""
        if isinstance(self.outcome, BeanstalkError):
            raise self.outcome
        result: T = self.outcome
        return result


class Queue:
    """The commands of a pipeline, which each get their outcome."""

    def __init__(self) -> None:
        self._commands: list[Command[Any]] = []
        self._pending: list[Pending[Any]] = []

    def add(self, command: Command[T]) -> Pending[T]:
        pending: Pending[T] = Pending()
        self._commands.append(command)
        self._pending.append(pending)
        return pending

    def take(self) -> tuple[list[Command[Any]], list[Pending[Any]]]:
        taken = self._commands, self._pending
        self._commands, self._pending = [], []
        return taken


def settle(pending: Sequence[Pending[Any]], outcomes: Outcomes) -> None:
    for one, outcome in zip(pending, outcomes, strict=False):
        one.outcome = outcome


def batch_of_reserves(most: int, seconds: int) -> list[Command[Job]]:
    """Returns single reserves. The later ones are not sent again: their connection holds the jobs of the first ones."""
    commands = [protocol.reserve_with_timeout(0 if number else seconds) for number in range(most)]
    for command in commands[protocol.BATCH_MAX :]:
        command.safe = False
    return commands


def jobs_of(outcomes: Outcomes) -> list[Job]:
    """Returns the reserved jobs; [] if there were none. Raises another error if there is no job to lose."""
    jobs = [outcome for outcome in outcomes if isinstance(outcome, Job)]
    wrong = [outcome for outcome in outcomes if not isinstance(outcome, (Job, TimedOut))]
    if wrong and not jobs:
        raise wrong[0]
    return jobs


def deleted_of(outcomes: Outcomes) -> int:
    """Returns the number of jobs that were there to delete."""
    wrong = [outcome for outcome in outcomes if outcome is not None and not isinstance(outcome, NotFound)]
    if wrong:
        raise wrong[0]
    return outcomes.count(None)
