"""The wire, seen from a client: framing of replies, a blocking client, and golden conversations.

A transcript is read into steps (`read_transcript`) and played through a `Driver` (`play`): a real server, or
sessions in memory. Nothing here knows which server answers or imports geventstalk. Every reply passes through
`ReplyReader`, so a wrong byte count in a header is found wherever it appears. The format: tests/transcripts/README.md.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Protocol

TRANSCRIPTS = Path(__file__).resolve().parents[1] / "transcripts"
NS = 1_000_000_000
SLOW_NS = NS // 4

_BODY_HEADER = re.compile(rb"(?:OK|(?:RESERVED|FOUND) \d+) (\d+)\r\n")

FACTS: dict[str, object] = {
    "pid": 4711,
    "version": b"1.13",
    "rusage-utime": "0.000001",
    "rusage-stime": "12.345678",
    "id": "0123456789abcdef",
    "hostname": b"host",
    "os": b"#1 SMP",
    "platform": b"x86_64",
    "binlog-oldest-index": 0,
    "binlog-current-index": 0,
    "binlog-records-migrated": 0,
    "binlog-records-written": 0,
    "binlog-max-size": 10485760,
}
"""What a process says of itself in `stats`."""


class WireError(Exception):
    """A server sent something that is no reply, or did not send one in time."""


class ReplyReader:
    """Cuts a server's output into replies; a body and its CRLF belong to the reply that announces them."""

    def __init__(self) -> None:
        self.pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The replies completed by `data`; WireError when a body is not as long as announced."""
        self.pending += data
        replies = []
        while (size := self._complete()) is not None:
            replies.append(self.pending[:size])
            self.pending = self.pending[size:]
        return replies

    def _complete(self) -> int | None:
        line_end = self.pending.find(b"\r\n") + 2
        if line_end < 2:
            return None
        header = _BODY_HEADER.fullmatch(self.pending, 0, line_end)
        if header is None:
            return line_end
        end = line_end + int(header.group(1)) + 2
        if len(self.pending) < end:
            return None
        if self.pending[end - 2 : end] != b"\r\n":
            raise WireError(f"the body is not as long as announced: {self.pending!r}")
        return end


class Client:
    """A blocking client. Owns `sock`, whose timeout bounds every wait; use it as a context manager."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = ReplyReader()
        self._replies: list[bytes] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reply(self) -> bytes:
        """The next reply, whole, with its CRLF; WireError when the server closes or stays silent instead."""
        while not self._replies:
            try:
                data = self.sock.recv(65536)
            except TimeoutError:
                raise WireError(f"no reply in time; so far {self._reader.pending!r}") from None
            if not data:
                raise WireError(f"closed by the server; so far {self._reader.pending!r}")
            self._replies += self._reader.feed(data)
        return self._replies.pop(0)

    def ask(self, command: bytes) -> bytes:
        """Sends one command (CRLF is added) and returns its reply."""
        self.send(command + b"\r\n")
        return self.reply()

    def put(self, body: bytes, *, pri: int = 0, delay: int = 0, ttr: int = 60) -> int:
        """Puts a job and returns its id; WireError on any other reply."""
        reply = self.ask(b"put %d %d %d %d\r\n%b" % (pri, delay, ttr, len(body), body))
        if not reply.startswith(b"INSERTED "):
            raise WireError(f"put was answered {reply!r}")
        return int(reply.split()[1])

    def stats(self, command: bytes) -> dict[str, str]:
        """The mapping in the reply of a `stats`, `stats-job ID` or `stats-tube TUBE`, values as sent."""
        return dict(line.split(": ", 1) for line in yaml_lines(self.ask(command)))

    def sync(self) -> None:
        """Returns once the server has run everything sent here before. Leaves no trace in any statistic."""
        if (reply := self.ask(b"sync")) != b"UNKNOWN_COMMAND\r\n":
            raise WireError(f"out of step: {reply!r}")

    def at_end(self) -> bool:
        """True once the server has closed this connection; WireError when it does anything else."""
        try:
            data = self.sock.recv(65536)
        except ConnectionError:
            return True
        except TimeoutError:
            raise WireError("the server neither closes nor answers") from None
        if data:
            raise WireError(f"expected the end, got {data!r}")
        return True


def yaml_lines(reply: bytes) -> list[str]:
    """The lines of an `OK` reply's body below `---`; WireError when it is no such reply."""
    header, _, body = reply.partition(b"\r\n")
    if not header.startswith(b"OK ") or not body.startswith(b"---\n"):
        raise WireError(f"no statistics: {reply!r}")
    return body[4:].decode("ascii").splitlines()[:-1]


_BARE_VALUE = re.compile(rb'^((?:tube|name|hostname|os|platform): )(?!")([^\n]*)$', re.MULTILINE)


def as_master(reply: bytes) -> bytes:
    """A reply of beanstalkd 1.12 as 1.13 sends it: names in YAML mappings quoted, the byte count to match."""
    if not reply.startswith(b"OK "):
        return reply
    body = _BARE_VALUE.sub(rb'\1"\2"', reply.partition(b"\r\n")[2])
    return b"OK %d\r\n%b" % (len(body) - 2, body)


_OF_A_JOURNAL = re.compile(rb"^(file|binlog-(?!max-size)[a-z-]+): \d+$", re.MULTILINE)
_WITH_A_JOURNAL = re.compile(rb"^(?:journal|memory)-[a-z-]+: \d+\n", re.MULTILINE)


def as_without_journal(reply: bytes) -> bytes:
    """A reply of a server with a journal as one without sends it: nothing is in a file, the byte count to match."""
    if not reply.startswith(b"OK "):
        return reply
    body = _WITH_A_JOURNAL.sub(b"", _OF_A_JOURNAL.sub(rb"\1: 0", reply.partition(b"\r\n")[2]))
    body = re.sub(rb"^binlog-max-size: \d+$", b"binlog-max-size: 10485760", body, flags=re.MULTILINE)
    return b"OK %d\r\n%b" % (len(body) - 2, body)


# Transcripts


@dataclass(frozen=True)
class Send:
    """The client sends these bytes in one go; {name} stands for a captured number until they are sent."""

    connection: str
    text: str
    line: int


@dataclass(frozen=True)
class Expect:
    """The server sends exactly this line, or one (`many`: any number) that the pattern matches."""

    connection: str
    text: str
    ending: bytes
    line: int
    pattern: bool = False
    many: bool = False


@dataclass(frozen=True)
class Nothing:
    """Nothing more has arrived on the connection."""

    connection: str
    line: int


@dataclass(frozen=True)
class Closed:
    """The server closes the connection."""

    connection: str
    line: int


@dataclass(frozen=True)
class Wait:
    """Time passes."""

    ns: int
    line: int


@dataclass(frozen=True)
class Act:
    """The client hangs up (`close`, `reset`, `half-close`), or the operator signals (`drain`, `undrain`)."""

    connection: str
    verb: str
    line: int


Step = Send | Expect | Nothing | Closed | Wait | Act


@dataclass(frozen=True)
class Transcript:
    """One golden conversation. `reference` is empty, or why beanstalkd 1.12 answers differently."""

    name: str
    steps: tuple[Step, ...]
    reference: str = ""
    max_job_bytes: int = 65535

    @property
    def slow(self) -> bool:
        """Returns whether it takes longer than 0.25 s on a real clock."""
        return sum(step.ns for step in self.steps if isinstance(step, Wait)) > SLOW_NS


def load_transcripts() -> list[Transcript]:
    """All transcripts of the corpus, by name."""
    return [read_transcript(path.stem, path.read_text(encoding="ascii")) for path in sorted(TRANSCRIPTS.glob("*.txt"))]


ACTS = ("close", "reset", "half-close", "drain", "undrain")


def read_transcript(name: str, text: str) -> Transcript:
    """Reads the text of a transcript; ValueError names the line that makes no sense."""
    headers: dict[str, str] = {}
    steps: list[Step] = []
    connection = "a"
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        mark, _, rest = line.partition(" ")
        if mark.endswith(":") and not steps:
            headers[mark[:-1]] = rest
        elif mark == "@" and rest.isalnum():
            connection = rest
        elif (step := _step(connection, mark, rest, number)) is not None:
            last = steps[-1] if steps else None
            if isinstance(step, Send) and isinstance(last, Send) and last.connection == step.connection:
                steps[-1] = replace(last, text=last.text + step.text)
            else:
                steps.append(step)
        else:
            raise ValueError(f"{name}:{number}: cannot read {line!r}")
    reference = headers.pop("reference", "yes")
    if reference != "yes" and not re.fullmatch(r"no \(.+\)", reference):
        raise ValueError(f"{name}: `reference:` is neither `yes` nor `no (reason)`")
    size = int(headers.pop("max-job-bytes", "65535"))
    if headers:
        raise ValueError(f"{name}: unknown header {sorted(headers)}")
    return Transcript(name, tuple(steps), "" if reference == "yes" else reference[4:-1], size)


def _step(connection: str, mark: str, rest: str, number: int) -> Step | None:
    if mark in (">", ">-"):
        return Send(connection, rest + ("\\r\\n" if mark == ">" else ""), number)
    if mark in ("<", "<-", "<|"):
        ending = {"<": b"\r\n", "<-": b"", "<|": b"\n"}[mark]
        return Expect(connection, rest, ending, number)
    if mark in ("<~", "<|~", "<|*"):
        ending = b"\r\n" if mark == "<~" else b"\n"
        return Expect(connection, rest, ending, number, pattern=True, many=mark == "<|*")
    if mark == "=" and rest == "nothing":
        return Nothing(connection, number)
    if mark == "=" and rest == "closed":
        return Closed(connection, number)
    if mark == "+" and rest.endswith("s"):
        return Wait(int(Decimal(rest[:-1]) * NS), number)
    if mark == "!" and rest in ACTS:
        return Act(connection, rest, number)
    return None


_REPEAT = re.compile(r"\{([^{}]+)\*(\d+)\}")
_CAPTURED = re.compile(r"\{([a-z]\w*)([+-]\d+)?\}")
_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|.)")
_ESCAPES = {b"r": b"\r", b"n": b"\n", b"t": b"\t", b"0": b"\0", b"\\": b"\\"}


def _fill(text: str, captured: dict[str, int]) -> str:
    return _CAPTURED.sub(lambda match: str(captured[match[1]] + int(match[2] or 0)), text)


def _literal(text: str, captured: dict[str, int]) -> bytes:
    repeated = _REPEAT.sub(lambda match: match[1] * int(match[2]), text)
    return _ESCAPE.sub(_unescape, _fill(repeated, captured).encode("ascii"))


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match[1]
    return bytes([int(code[1:], 16)]) if len(code) == 3 else _ESCAPES[code]


class Driver(Protocol):
    """Plays a transcript, over connections to a server or in sessions in memory."""

    def open(self, name: str) -> None:
        """Connects; the name may have belonged to a connection that is closed by now."""

    def send(self, name: str, data: bytes) -> None: ...

    def receive(self, name: str, *, wait: bool) -> bytes | None:
        """Returns what has arrived, None at the end of the connection. With `wait`, empty only after too long."""

    def settle(self) -> None:
        """Returns once the server has acted on everything sent and closed so far."""

    def advance(self, ns: int) -> None:
        """Lets this much time pass, and whatever falls due in it happen."""

    def act(self, name: str, verb: str) -> None:
        """Does what `Act` says: one of ACTS."""


@dataclass
class _Stream:
    """The input of one connection: whole replies not yet expected, and whether it is closed."""

    reader: ReplyReader = field(default_factory=ReplyReader)
    buffer: bytes = b""
    closed: bool = False


class _Play:
    def __init__(self, transcript: Transcript, driver: Driver, translate: Callable[[bytes], bytes]) -> None:
        self.transcript = transcript
        self.driver = driver
        self.translate = translate
        self.streams: dict[str, _Stream] = {}
        self.captured: dict[str, int] = {}

    def run(self) -> None:
        steps = self.transcript.steps
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            if not isinstance(step, Wait) and step.connection not in self.streams:
                self.driver.open(step.connection)
                self.streams[step.connection] = _Stream()
            self._take(step)
            if not (isinstance(following, Send | Expect) and isinstance(step, Send | Expect)) or (
                following.connection != step.connection
            ):
                self.driver.settle()
        for name in self.streams:
            self._nothing(name, "at the end")

    def _take(self, step: Step) -> None:
        match step:
            case Send(connection, text, _):
                self.driver.send(connection, _literal(text, self.captured))
            case Expect():
                self._expect(step)
            case Nothing(connection, line):
                self.driver.settle()
                self._nothing(connection, f"line {line}")
            case Closed(connection, line):
                self._closed(connection, line)
            case Wait(ns, _):
                self.driver.advance(ns)
            case Act(connection, verb, _):
                self.driver.act(connection, verb)
                if verb in ("close", "reset"):
                    del self.streams[connection]

    def _receive(self, name: str, *, wait: bool) -> bool:
        """Returns whether something has arrived, be it the end."""
        stream = self.streams[name]
        if stream.closed:
            return False
        data = self.driver.receive(name, wait=wait)
        if data is None:
            stream.closed = True
            return True
        for reply in stream.reader.feed(data):
            stream.buffer += self.translate(reply)
        return bool(data)

    def _expect(self, step: Expect) -> None:
        stream = self.streams[step.connection]
        while (size := self._match(step, stream.buffer)) is None:
            if not self._receive(step.connection, wait=True) or stream.closed:
                where = f"{step.connection}: {stream.buffer!r}, then {stream.reader.pending!r}"
                raise self._wrong(step.line, f"expected {step.text!r}, got on {where}{', closed' * stream.closed}")
        stream.buffer = stream.buffer[size:]

    def _match(self, step: Expect, data: bytes) -> int | None:
        """Returns how many bytes the expectation takes from the front of `data`; None when more must arrive."""
        if not step.pattern:
            expected = _literal(step.text, self.captured) + step.ending
            if data.startswith(expected):
                return len(expected)
            if expected.startswith(data):
                return None
            raise self._wrong(step.line, f"expected {expected!r}, got {data!r}")
        pattern = re.compile(_fill(step.text, self.captured).encode("ascii"))
        if step.many:  # lines within one reply, which is here as a whole
            lines = takewhile(lambda line: line != b"\r" and pattern.fullmatch(line), data.split(b"\n")[:-1])
            return sum(len(line) + 1 for line in lines)
        line, ending, _ = data.partition(step.ending)
        if not ending:
            return None
        match = pattern.fullmatch(line)
        if match is None:
            raise self._wrong(step.line, f"expected to match {step.text!r}, got {line!r}")
        self.captured.update({name: int(value) for name, value in match.groupdict().items()})
        return len(line) + len(step.ending)

    def _nothing(self, name: str, where: str) -> None:
        stream = self.streams[name]
        while self._receive(name, wait=False) and not stream.closed:
            pass
        if stream.buffer or stream.reader.pending:
            raise AssertionError(f"{self.transcript.name}: unexpected {where}, on {name}: {stream.buffer!r}")

    def _closed(self, name: str, line: int) -> None:
        stream = self.streams[name]
        while not stream.closed and not stream.buffer:
            if not self._receive(name, wait=True):
                raise self._wrong(line, "the server does not close the connection")
        if stream.buffer or stream.reader.pending:
            raise self._wrong(line, f"expected the end, got {stream.buffer!r} then {stream.reader.pending!r}")

    def _wrong(self, line: int, text: str) -> AssertionError:
        return AssertionError(f"{self.transcript.name}:{line}: {text}")


def play(transcript: Transcript, driver: Driver, *, translate: Callable[[bytes], bytes] = lambda reply: reply) -> None:
    """Plays a transcript through a driver; AssertionError names the line that went otherwise.

    `translate` sees every reply before it is compared. At the end nothing may be left on any connection.
    """
    _Play(transcript, driver, translate).run()


def split_randomly(data: bytes, draw: Callable[[int, int], int]) -> Iterator[bytes]:
    """Cuts `data` into pieces; `draw(low, high)` returns a number in that closed range."""
    while data:
        size = draw(1, min(len(data), draw(1, 64)))
        yield data[:size]
        data = data[size:]
