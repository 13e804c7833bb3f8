"""Power cuts of a whole server under `-f0`: a reply that has left is a promise.

The recorder takes down what the server receives and sends in the order of its other calls, so for each moment it is
known which commands had come and which replies had left. Run as a program, this is a server with a planted fault.
"""

from __future__ import annotations

import random
import runpy
import socket
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from geventstalk.durable.records import Epoch
from geventstalk.durable.store import Store
from journal import Journal, JournalError
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.torture.disk import Disk
from tests.support.torture.oracle import Violation
from tests.support.torture.recorder import RECEIVE, SEND, Call, read_trace, recording
from tests.support.torture.torturer import scratch

CLIENTS = 3
SEGMENT_BYTES = 50_000
_START_EVERY = 25  # images between two that a server starts on


class Asked(NamedTuple):
    """A command as the server had it, and when its reply began to leave."""

    line: bytes
    body: bytes
    came: int
    reply: bytes
    left: int


def conversation(calls: Iterable[Call]) -> list[Asked]:
    """All commands of all connections that were answered."""
    asked: list[Asked] = []
    streams: dict[int, dict[str, list[tuple[int, bytes]]]] = {}
    for call in calls:
        if call.call in (SEND, RECEIVE) and call.data:
            moment = call.begun if call.call == SEND else call.ended
            streams.setdefault(call.fd, {SEND: [], RECEIVE: []})[call.call].append((moment, call.data))
    for stream in streams.values():
        commands, replies = _lines(stream[RECEIVE], bodies=True), _lines(stream[SEND], bodies=False)
        for (line, body, came), (reply, _, left) in zip(commands, replies, strict=False):
            asked.append(Asked(line, body, came, reply, left))
    return asked


def _lines(pieces: list[tuple[int, bytes]], *, bodies: bool) -> list[tuple[bytes, bytes, int]]:
    """Lines with the bodies of puts, and when the piece with their last byte came or left."""
    ends: list[tuple[int, int]] = []
    data = b""
    for moment, piece in pieces:
        data += piece
        ends.append((len(data), moment))
    found: list[tuple[bytes, bytes, int]] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        line, body, at = data[at:end], b"", end + 2
        if bodies and line.startswith(b"put "):
            size = int(line.split()[4])
            body, at = data[at : at + size], at + size + 2
        if at > len(data):
            break
        found.append((line, body, next(moment for length, moment in ends if length >= at)))
    return found


class ServerTorment:
    """A life of a server with some clients, and images of what a loss of power may leave of it."""

    def __init__(self, seed: int, *, fault: str = "") -> None:
        self._draw = random.Random(seed)
        self._command = [sys.executable, "-m", "tests.support.torture.whole", fault] if fault else GEVENTSTALK
        self.cuts = 0
        self.started = 0

    def run(self, cuts: int, rounds: int = 40) -> None:
        """Raises Violation."""
        with tempfile.TemporaryDirectory(dir=scratch()) as name:
            folder = Path(name)
            directory = folder / "journal"
            directory.mkdir()
            calls = self._live(directory, folder / "trace", rounds)
            disk = Disk()
            disk.play(calls)
            asked = conversation(calls)
            assert len(asked) > rounds, "nothing was recorded"
            first = min(each.came for each in asked)
            moments = [each.left for each in asked] + [moment for moment in disk.moments if moment > first]
            for number in range(cuts):
                image = folder / f"image-{number}"
                image.mkdir()
                moment = self._draw.choice(moments) + self._draw.choice([-1, 0, 1, 2, 5])
                disk.image(moment, self._draw, image)
                self.cuts += 1
                there = _read(image)
                _check(asked, there, moment)
                if number % _START_EVERY == 0:
                    self._start(image, there)

    def _live(self, directory: Path, trace: Path, rounds: int) -> list[Call]:
        draw = self._draw
        server = ServerProcess(
            self._command,
            ["-b", str(directory), "-f0", "-s", str(SEGMENT_BYTES)],
            env=recording(directory, trace, {"WIRE": "1", "SYNC_US": "300"}),
        ).wait_ready()
        clients = [server.connect() for _ in range(CLIENTS)]
        live: list[list[bytes]] = [[] for _ in clients]
        number = 0
        try:
            for _ in range(rounds):
                due: list[list[bytes]] = []
                for client, mine in zip(clients, live, strict=True):
                    sent: list[bytes] = []
                    for _ in range(draw.randint(0, 8)):
                        number += 1
                        if mine and draw.random() < 0.5:
                            sent.append(b"delete %b\r\n" % mine.pop(draw.randrange(len(mine))))
                        else:
                            body = b"%d:" % number + b"x" * draw.choice([0, 50, 900, 5000])
                            sent.append(b"put 1 0 60 %d\r\n%b\r\n" % (len(body), body))
                    client.sendall(b"".join(sent))
                    due.append(sent)
                for client, mine, sent in zip(clients, live, due, strict=True):
                    for line in _replies(client, len(sent)):
                        if line.startswith(b"INSERTED "):
                            mine.append(line.split()[1])
        finally:
            for client in clients:
                client.close()
            server.stop()  # a kill could come before the last reply is taken down
        return list(read_trace(trace))

    def _start(self, image: Path, there: dict[int, bytes]) -> None:
        """The server itself, on what is left, shows the same."""
        server = ServerProcess(GEVENTSTALK, ["-b", str(image)])
        try:
            server.wait_ready()
            self.started += 1
            with server.connect() as client:
                for id, body in there.items():
                    client.sendall(b"peek %d\r\n" % id)
                    expected = b"FOUND %d %d\r\n%b\r\n" % (id, len(body), body)
                    got = b""
                    while len(got) < len(expected) and (piece := client.recv(1 << 16)):
                        got += piece
                        if not expected.startswith(got):
                            raise Violation(f"a server shows job {id} as {got[:60]!r}")
        finally:
            server.stop()


def _replies(client: socket.socket, count: int) -> list[bytes]:
    data = b""
    while data.count(b"\r\n") < count:
        piece = client.recv(1 << 16)
        assert piece, "the server closed a connection"
        data += piece
    return data.split(b"\r\n")[:-1]


def _read(image: Path) -> dict[int, bytes]:
    said: list[str] = []
    store = Store(Journal(str(image), segment_bytes=SEGMENT_BYTES, log=said.append), None, Epoch(0, 0))
    try:
        return {job.id: job.body[:-2] for job, _ in store.replay()}
    except JournalError as error:
        raise Violation(f"refused: {error} {said}") from error
    finally:
        store.abandon()


def _check(asked: list[Asked], there: dict[int, bytes], moment: int) -> None:
    deleted = {int(each.line.split()[1]): each for each in asked if each.reply == b"DELETED"}
    known: set[int] = set()
    for each in asked:
        if not each.reply.startswith(b"INSERTED "):
            continue
        id = int(each.reply.split()[1])
        if each.came <= moment:
            known.add(id)
        end = deleted.get(id)
        if id in there:
            if there[id] != each.body:
                raise Violation(f"the body of job {id} is garbled")
            if end is not None and end.left <= moment:
                raise Violation(f"job {id} is back, and DELETED had left at {end.left} of {moment}")
        elif each.left <= moment and (end is None or end.came > moment):
            raise Violation(f"job {id} is lost, and INSERTED had left at {each.left} of {moment}")
    if unknown := there.keys() - known:
        raise Violation(f"jobs {sorted(unknown)[:5]} had not come at {moment}")


if __name__ == "__main__":
    from tests.support.torture.canaries import plant

    plant(sys.argv.pop(1))
    runpy.run_module("geventstalk", run_name="__main__")
