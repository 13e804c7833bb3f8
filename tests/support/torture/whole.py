"""Power cuts of a whole server: under `-f0` a reply that has left is a promise, under `-fMS` it is one MS later.

The recorder takes down what the server receives and sends in the order of its other calls, so for each moment it is
known which commands had come and which replies had left. Run as a program, this is a server with a planted fault.
"""

# Bug: A server that did not start left the thread of Lag behind, and the tests never ended.

from __future__ import annotations

import bisect
import itertools
import random
import runpy
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from geventstalk.core.job import held_body
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.turn.syncs import Syncs
from geventstalk.turn.tasks import Task, Wait
from journal import Journal, JournalError
from tests.support.disk import fill_up
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.shapes import BOUND
from tests.support.torture.disk import Disk
from tests.support.torture.oracle import Violation
from tests.support.torture.recorder import RECEIVE, SEND, Call, read_trace, recording
from tests.support.torture.torturer import scratch

CLIENTS = 3
SEGMENT_BYTES = 50_000
_LARGE_SEGMENT_BYTES = 5_000_000
_SYNC_US = 300
_SLOW_SYNC_US = 10_000
NO_SYNC_WHEN_DUE = "no sync when due"
_SILENCES = 10
_PAUSE_S = 0.005
"""Between two rounds: a life has to be longer than what is not safe yet."""
_TICK_NS = 2_000_000
_SLACK_NS = 20_000_000
"""What a turn, a slice of compaction and a switch of threads take."""
_START_EVERY = 25  # images between two that a server starts on


class Asked(NamedTuple):
    """A command as the server had it, and when its reply began to leave: by the moment, and by the clock."""

    line: bytes
    body: bytes
    came: int
    reply: bytes
    left: int
    left_ns: int


def conversation(calls: Iterable[Call]) -> list[Asked]:
    """All commands of all connections that were answered."""
    asked: list[Asked] = []
    streams: dict[int, dict[str, list[Call]]] = {}
    for call in calls:
        if call.call in (SEND, RECEIVE) and call.data:
            streams.setdefault(call.fd, {SEND: [], RECEIVE: []})[call.call].append(call)
    for stream in streams.values():
        commands, replies = _lines(stream[RECEIVE]), _lines(stream[SEND])
        for (line, body, came), (reply, _, left) in zip(commands, replies, strict=False):
            asked.append(Asked(line, body, came.ended, reply, left.begun, left.begun_ns))
    return asked


_SIZE_AT = {b"put": 4, b"RESERVED": 2}
"""Words that a body follows, and which word of the line says how long it is."""


def _lines(pieces: list[Call]) -> list[tuple[bytes, bytes, Call]]:
    """Lines with their bodies, and the call that brought or sent their last byte."""
    ends = list(itertools.accumulate(len(piece.data) for piece in pieces))
    data = b"".join(piece.data for piece in pieces)
    found: list[tuple[bytes, bytes, Call]] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        line, body, at = data[at:end], b"", end + 2
        words = line.split()
        if words and words[0] in _SIZE_AT:
            size = int(words[_SIZE_AT[words[0]]])
            body, at = data[at : at + size], at + size + 2
        if at > len(data):
            break
        found.append((line, body, pieces[bisect.bisect_left(ends, at)]))
    return found


class Lag:
    """A thread that knows how late a busy machine wakes a thread that sleeps for some milliseconds.

    It also knows how long threads of a process were ready to run without a processor: other processes had them all.
    """

    def __init__(self, pid: int) -> None:
        self.worst_ns = 0
        self._tasks = Path(f"/proc/{pid}/task")
        self._waited: list[tuple[int, int]] = []  # moments, and how long threads had waited by then
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            begun_ns = time.monotonic_ns()
            time.sleep(_TICK_NS / 1e9)
            now_ns = time.monotonic_ns()
            self.worst_ns = max(self.worst_ns, now_ns - begun_ns - _TICK_NS)
            with suppress(OSError):  # a thread has just ended
                # The second number of `schedstat` in proc(5).
                waited_ns = sum(int(each.read_text().split()[1]) for each in self._tasks.glob("*/schedstat"))
                self._waited.append((now_ns, waited_ns))

    def since(self, now_ns: int, run_ns: int) -> int:
        """Returns the last moment since which the process could run for this long before `now_ns`; 0 for none."""
        before = [each for each in reversed(self._waited) if each[0] <= now_ns]
        for at_ns, waited_ns in before:
            if now_ns - at_ns - (before[0][1] - waited_ns) >= run_ns:
                return at_ns
        return 0


class ServerTorment:
    """A life of a server with some clients, and images of what a loss of power may leave of it.

    With `fsync_ms`, what was answered is safe this much later, and with `disk`, a small one, a process fills the disk
    while the server runs.
    """

    def __init__(
        self, seed: int, *, fault: str = "", fsync_ms: int = 0, disk: Path | None = None, max_memory: int = 0
    ) -> None:
        """With `max_memory` bodies have that bound."""
        self._draw = random.Random(seed)
        self._command = [sys.executable, "-m", "tests.support.torture.whole", fault] if fault else BOUND
        self._flags = ["--max-memory", str(max_memory)] if max_memory else []
        self._fsync_ms = fsync_ms
        # Under -fMS a large one: to seal a segment syncs it, too.
        self._segment_bytes = _LARGE_SEGMENT_BYTES if fsync_ms and disk is None else SEGMENT_BYTES
        self._sync_us = _SLOW_SYNC_US if fsync_ms else _SYNC_US
        self._disk = disk
        self._grace_ns = 0
        self._lag: Lag | None = None
        self.cuts = 0
        self.started = 0
        self.refused = 0  # puts, for want of room

    def run(self, cuts: int, rounds: int = 40) -> None:
        """Raises Violation."""
        with tempfile.TemporaryDirectory(dir=scratch()) as name:
            folder = Path(name)
            directory = (self._disk or folder) / "journal"
            directory.mkdir()
            calls = self._live(directory, folder / "trace", rounds)
            disk = Disk()
            disk.play(calls)
            asked = conversation(calls)
            assert len(asked) > rounds, "nothing was recorded"
            self.refused = sum(each.reply == b"OUT_OF_MEMORY" for each in asked)
            first = min(each.came for each in asked)
            moments = [each.left for each in asked] + [moment for moment in disk.moments if moment > first]
            silences = _ends_of_silence(asked)
            for number in range(cuts):
                image = folder / f"image-{number}"
                image.mkdir()
                if number % 2 and self._fsync_ms:
                    moment = self._draw.choice(silences) - 1
                else:
                    moment = self._draw.choice(moments) + self._draw.choice([-1, 0, 1, 2, 5])
                disk.image(moment, self._draw, image)
                self.cuts += 1
                there = _read(image)
                _check(asked, there, moment, self._safe_ns(calls, moment))
                if number % _START_EVERY == 0:
                    self._start(image, there)

    def _safe_ns(self, calls: list[Call], moment: int) -> int:
        """Returns what was answered before this time is safe at that moment."""
        if not self._fsync_ms:
            return 1 << 63
        assert self._lag is not None
        return self._lag.since(max(call.begun_ns for call in calls if call.begun <= moment), self._grace_ns)

    def _live(self, directory: Path, trace: Path, rounds: int) -> list[Call]:
        draw = self._draw
        server = ServerProcess(
            self._command,
            ["-b", str(directory), f"-f{self._fsync_ms}", "-s", str(self._segment_bytes), *self._flags],
            env=recording(directory, trace, {"WIRE": "1", "SYNC_US": str(self._sync_us)}),
        )
        clients: list[socket.socket] = []
        live: list[list[bytes]] = [[] for _ in range(CLIENTS)]
        number = 0
        lag = self._lag = Lag(server.pid)
        try:
            server.wait_ready()
            clients += [server.connect() for _ in range(CLIENTS)]
            for turn in range(rounds):
                if self._disk is not None and turn == rounds // 4:
                    fill_up(self._disk / "filler")
                due: list[list[bytes]] = []
                for client, mine in zip(clients, live, strict=True):
                    sent: list[bytes] = []
                    for _ in range(draw.randint(0, 8)):
                        number += 1
                        if mine and self._disk is not None and draw.random() < 0.9:
                            id = draw.choice(mine)
                            sent.append(b"reserve-job %b\r\n" % id)
                            sent.append(b"release %b %d 0\r\n" % (id, number))
                        elif mine and draw.random() < 0.5:
                            sent.append(b"delete %b\r\n" % mine.pop(draw.randrange(len(mine))))
                        else:
                            body = b"%d:" % number + b"x" * draw.choice([0, 50, 900, 5000])
                            sent.append(b"put 1 0 60 %d\r\n%b\r\n" % (len(body), body))
                    client.sendall(b"".join(sent))
                    due.append(sent)
                if self._fsync_ms:
                    time.sleep(_PAUSE_S)
                for client, mine, sent in zip(clients, live, due, strict=True):
                    bodies = sum(line.startswith(b"reserve-job ") for line in sent)
                    for line in _replies(client, len(sent) + bodies):
                        if line.startswith(b"INSERTED "):
                            mine.append(line.split()[1])
        finally:
            for client in clients:
                client.close()
            lag.stop()
            server.stop()  # a kill could come before the last reply is taken down
        # A sync may begin behind another one, and each may be woken late.
        self._grace_ns = self._fsync_ms * 1_000_000 + 2 * self._sync_us * 1000 + 2 * lag.worst_ns + _SLACK_NS
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


def _ends_of_silence(asked: list[Asked]) -> list[int]:
    """The moments that end the longest times without a reply: a server that waits syncs nothing."""
    left = sorted({(each.left_ns, each.left) for each in asked})
    gaps = sorted((after[0] - before[0], after[1]) for before, after in itertools.pairwise(left))
    return [moment for _, moment in gaps[-_SILENCES:]]


def _replies(client: socket.socket, count: int) -> list[bytes]:
    data = b""
    while data.count(b"\r\n") < count:
        piece = client.recv(1 << 16)
        assert piece, "the server closed a connection"
        data += piece
    return data.split(b"\r\n")[:-1]


def _read(image: Path) -> dict[int, bytes]:
    said: list[str] = []
    store = Store(Journal(str(image), segment_bytes=SEGMENT_BYTES, log=said.append), None, ClockOffset(0, 0))
    try:
        return {job.id: held_body(job)[:-2] for job, _ in store.replay()}
    except JournalError as error:
        raise Violation(f"refused: {error} {said}") from error
    finally:
        store.abandon()


def _check(asked: list[Asked], there: dict[int, bytes], moment: int, safe_ns: int) -> None:
    """Records later than `moment` cannot be there. Records of replies that left before `safe_ns` have to be."""
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
            if end is not None and end.left <= moment and end.left_ns <= safe_ns:
                raise Violation(f"job {id} is back, and DELETED had left at {end.left} of {moment}")
        elif each.left <= moment and each.left_ns <= safe_ns and (end is None or end.came > moment):
            raise Violation(f"job {id} is lost, and INSERTED had left at {each.left} of {moment}")
    if unknown := there.keys() - known:
        raise Violation(f"jobs {sorted(unknown)[:5]} had not come at {moment}")


def _no_sync_when_due(syncs: Syncs, store: Store) -> Task:
    yield Wait()


if __name__ == "__main__":
    from tests.support.torture.canaries import plant

    fault = sys.argv.pop(1)
    if fault == NO_SYNC_WHEN_DUE:
        Syncs.when_due = _no_sync_when_due  # type: ignore[assignment, method-assign]  # the planted fault
    else:
        plant(fault)
    runpy.run_module("geventstalk", run_name="__main__")
