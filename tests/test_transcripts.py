"""Golden conversations, played over sockets against the server, and against beanstalkd where it is installed.

Each conversation has a server of its own, so that its job ids and counters start at nothing. The next server
is started while one is in use, because starting is most of the cost.
"""

from __future__ import annotations

import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from geventstalk._build import BUILD
from tests.support.process import ServerProcess, beanstalkd_path
from tests.support.shapes import DISK_AT_ONCE, FRONT, MEMORY
from tests.support.wire import (
    NS,
    Client,
    Transcript,
    WireError,
    as_master,
    as_without_journal,
    load_transcripts,
    play,
    read_transcript,
)

needs_the_source = pytest.mark.skipif(BUILD == "compiled", reason="constants of compiled code cannot be replaced")
TRANSCRIPTS = load_transcripts()
TRANSLATIONS = {"beanstalkd": as_master, "disk": as_without_journal}
REPLY_TIMEOUT_S = 10.0
SIDE_BY_SIDE = 8
"""Conversations at once: most of them sleep, and a machine with two cores still answers each within a few ms."""
LATE_S = 0.08
"""Transcripts leave 0.1 s between a moment and what should, or should not, have happened by then.

A conversation in which time passes and that takes so much longer than it says proves nothing when it fails: its moments
were missed. It is skipped with these seconds. tests/test_session.py plays the same one on a manual clock.
"""
SECOND_S = 0.9
"""The same for a conversation in which no time passes: a second later an age is not 0 any more. It takes 10 ms."""


class SocketDriver:
    """Plays a transcript against a server process; a connection of its own tells when that has caught up."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.sockets: dict[str, socket.socket] = {}
        self.control = Client(server.connect(REPLY_TIMEOUT_S))
        self._begun = time.monotonic()
        self.waited_s = 0.0

    @property
    def late_s(self) -> float:
        """Returns the excess over the transcript's time, when that may be why it failed; otherwise 0."""
        late_s = time.monotonic() - self._begun - self.waited_s
        return late_s if late_s > (LATE_S if self.waited_s else SECOND_S) else 0.0

    def shut(self) -> None:
        for sock in (*self.sockets.values(), self.control.sock):
            sock.close()

    def open(self, name: str) -> None:
        self.sockets[name] = self.server.connect(REPLY_TIMEOUT_S)
        self.settle()

    def send(self, name: str, data: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # that it closed is seen when reading
            self.sockets[name].sendall(data)

    def receive(self, name: str, *, wait: bool) -> bytes | None:
        sock = self.sockets[name]
        sock.settimeout(REPLY_TIMEOUT_S if wait else 0)
        try:
            return sock.recv(65536) or None
        except ConnectionError:
            return None
        except (TimeoutError, BlockingIOError):
            return b""
        finally:
            sock.settimeout(REPLY_TIMEOUT_S)

    def settle(self) -> None:
        # What was sent before is readable when the server looks for input and finds the first of these, so it is
        # acted on before the second is read; the third leaves one more turn to replies caused elsewhere.
        for _ in range(3):
            self.control.sync()

    def advance(self, ns: int) -> None:
        self.waited_s += ns / NS
        time.sleep(ns / NS)

    def act(self, name: str, verb: str) -> None:
        match verb:
            case "half-close":
                self.sockets[name].shutdown(socket.SHUT_WR)
            case "drain":
                self.server.process.send_signal(signal.SIGUSR1)
            case "undrain":
                self.server.process.send_signal(signal.SIGUSR2)
            case "close":
                self.sockets.pop(name).close()
            case "reset":
                sock = self.sockets.pop(name)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()


class Servers:
    """Fresh servers of each kind, one started in advance."""

    KINDS = ("tcp", "unix", "front", "disk", "beanstalkd")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self._spare: dict[tuple[str, int], ServerProcess] = {}
        self._taken: list[ServerProcess] = []

    def take(self, kind: str, max_job_bytes: int) -> ServerProcess:
        key = kind, max_job_bytes
        server = self._spare.pop(key, None) or self._start(*key)
        if (kind, 65535) not in self._spare:
            self._spare[kind, 65535] = self._start(kind, 65535)
        self._taken.append(server)
        return server.wait_ready()

    def _start(self, kind: str, max_job_bytes: int) -> ServerProcess:
        own = self._folder / str(next(self._numbers))
        command, flags = {"front": FRONT, "disk": DISK_AT_ONCE}.get(kind, MEMORY).started(own)
        if kind == "disk":
            own.mkdir()
        if kind == "beanstalkd":
            command = [str(beanstalkd_path())]
        return ServerProcess(
            command, ["-z", str(max_job_bytes), *flags], unix_path=str(own) if kind == "unix" else None
        )

    def stop(self) -> None:
        for server in (*self._taken, *self._spare.values()):
            server.kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("s"))
    yield servers
    servers.stop()


def run(servers: Servers, kind: str, transcripts: list[Transcript]) -> None:
    """Plays these conversations side by side, each on a server of its own."""
    if kind == "beanstalkd" and beanstalkd_path() is None:
        pytest.skip("beanstalkd is not installed")
    started = [servers.take(kind, transcript.max_job_bytes) for transcript in transcripts]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        played = [pool.submit(run_one, *pair, kind) for pair in zip(started, transcripts, strict=True)]
        outcomes = [future.result() for future in played]
    failures = [outcome for outcome in outcomes if outcome]
    assert all(outcome.late_s for outcome in failures), "\n".join(map(str, failures))
    if failures:
        pytest.skip(f"this machine is too busy: {'; '.join(map(str, failures))}")


class Failure(NamedTuple):
    """Of a conversation. `late_s`: how much longer it took than it says, when it cannot bear that; otherwise 0."""

    name: str
    why: BaseException
    late_s: float

    def __str__(self) -> str:
        return f"{self.name} took {self.late_s:.2f} s too long" if self.late_s else str(self.why)


def run_one(server: ServerProcess, transcript: Transcript, kind: str) -> Failure | None:
    driver = SocketDriver(server)
    try:
        play(transcript, driver, translate=TRANSLATIONS.get(kind, lambda reply: reply))
        assert server.process.poll() is None, f"{transcript.name}: the server ended"
    except (AssertionError, WireError, OSError) as error:
        return Failure(transcript.name, error, driver.late_s)
    finally:
        driver.shut()
        server.kill()
    return None


ON_DISK = {
    *("bury", "close-with-reservations", "delete", "half-close-job-there", "job-changes-hands", "kick", "peek"),
    *("peek-order", "pipelining", "put-any-bytes", "release", "reserve-job", "reserve-order", "waiters-in-order"),
}
"""Where it matters where a body is. With --long the others are played there, too."""
ONE_IN = 4
"""On a unix socket and behind a front every fourth is played, and all of them with --long."""


def cases() -> Iterator[Any]:
    for kind in Servers.KINDS:
        for number, transcript in enumerate(TRANSCRIPTS):
            if not transcript.slow:
                rare = kind in ("unix", "front") and number % ONE_IN > 0
                rare = rare or (kind == "disk" and transcript.name not in ON_DISK)
                marks = [*([needs_the_source] if kind == "disk" else []), *([pytest.mark.long] if rare else [])]
                yield pytest.param(kind, transcript, marks=marks, id=f"{kind}-{transcript.name}")


@pytest.mark.parametrize(("kind", "transcript"), list(cases()))
def test_transcript(servers: Servers, kind: str, transcript: Transcript) -> None:
    if kind == "beanstalkd" and transcript.reference:
        pytest.skip(transcript.reference)
    run(servers, kind, [transcript])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=([pytest.mark.long] if kind in ("disk", "unix", "front") else [])
            + ([needs_the_source] if kind == "disk" else []),
        )
        for kind in Servers.KINDS
    ],
)
def test_transcripts_that_take_their_time(servers: Servers, kind: str) -> None:
    slow = [transcript for transcript in TRANSCRIPTS if transcript.slow]
    run(servers, kind, [transcript for transcript in slow if kind != "beanstalkd" or not transcript.reference])


class Scripted:
    """A driver whose server says what it is told to, whatever it is sent."""

    def __init__(self, *output: bytes | None) -> None:
        self.output = list(output)

    def receive(self, name: str, *, wait: bool) -> bytes | None:
        return self.output.pop(0) if self.output else b""

    def open(self, name: str) -> None: ...

    def send(self, name: str, data: bytes) -> None:
        assert data == b"peek 1\r\n"

    def settle(self) -> None: ...

    def advance(self, ns: int) -> None: ...

    def act(self, name: str, verb: str) -> None: ...


PEEK = "> peek 1\n< FOUND 1 3\n< abc\n<~ K(?P<k>\\d+)\n< L{k+1}\n"


def test_player_accepts_what_is_expected() -> None:
    play(read_transcript("good", PEEK), Scripted(b"FOU", b"ND 1 3\r\nabc\r", b"\nK41\r\nL42\r\n"))


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (b"FOUND 1 3\r\nabd\r\n", "good:3: expected"),
        (b"FOUND 1 3\r\nabc\r\nX1\r\n", "good:4: expected to match"),
        (b"FOUND 1 3\r\nabc\r\nK1\r\nL1\r\n", "good:5: expected"),
        (b"FOUND 1 3\r\nabc\r\nK1\r\n", "good:5: expected"),
        (b"FOUND 1 3\r\nabc\r\nK1\r\nL2\r\nL2\r\n", "unexpected at the end"),
        (b"FOUND 1 3\r\nabc\r\nK1\r\nL2\r\nL", "unexpected at the end"),
    ],
)
def test_player_notices(output: bytes, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        play(read_transcript("good", PEEK), Scripted(output))


def test_player_notices_a_wrong_length() -> None:
    with pytest.raises(WireError, match="not as long as announced"):
        play(read_transcript("good", PEEK), Scripted(b"FOUND 1 2\r\nabc\r\nK1\r\nL2\r\n"))


def test_player_notices_silence_and_end() -> None:
    with pytest.raises(AssertionError, match="t:2: expected the end"):
        play(read_transcript("t", "> peek 1\n= closed\n"), Scripted(b"NOT_FOUND\r\n", None))
    with pytest.raises(AssertionError, match="t:2: the server does not close"):
        play(read_transcript("t", "> peek 1\n= closed\n"), Scripted())
    with pytest.raises(AssertionError, match="unexpected line 2"):
        play(read_transcript("t", "> peek 1\n= nothing\n"), Scripted(b"NOT_FOUND\r\n"))


@pytest.mark.parametrize("text", ["peek 1", "@ a b", "+ 5", "! explode", "reference: no", "colour: red", "= maybe"])
def test_reader_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"^t:"):
        read_transcript("t", text + "\n")
