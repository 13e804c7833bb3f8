"""Helpers for tests of a running server, beside a client: bursts, hard closes, a prober, the cost of a process.

Nothing here imports geventstalk. Every wait is bounded by the timeout of its socket or by an argument.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from tests.support import prober
from tests.support.process import ServerProcess
from tests.support.wire import Client

_BURST = 500  # commands in flight: their replies fit into the buffers of a socket, so neither side waits


class Launch(Protocol):
    def __call__(self, *flags: str) -> ServerProcess: ...


def launcher(
    start_server: Callable[..., ServerProcess], folder: Path, *, unix: bool, more: Sequence[str] = ()
) -> Iterator[Launch]:
    """For fixtures: starts servers that log to `folder/log`, with some flags more.

    Afterwards those that still run must end cleanly, and none may have shown a traceback.
    """
    log = folder / "log"
    servers: list[ServerProcess] = []

    def launch(*flags: str) -> ServerProcess:
        path = str(folder / "s") if unix else None
        servers.append(start_server(*more, *flags, unix_path=path, stderr=log))
        return servers[-1]

    yield launch
    for server in servers:
        if server.process.poll() is None:
            assert server.stop() == 0, log.read_text()
    assert not servers or "Traceback" not in log.read_text(), log.read_text()


def until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Returns once the condition is true; AssertionError with `what` when it does not become so in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.005)


def burst(client: Client, commands: Sequence[bytes]) -> list[bytes]:
    """Runs whole commands (with their CRLF) pipelined and returns their replies."""
    replies: list[bytes] = []
    for at in range(0, len(commands), _BURST):
        part = commands[at : at + _BURST]
        client.send(b"".join(part))
        replies += [client.reply() for _ in part]
    return replies


def put_many(client: Client, count: int, *, body: bytes = b"", delay: int = 0, ttr: int = 100) -> list[int]:
    """Puts equal jobs into the used tube; returns their ids."""
    replies = burst(client, [b"put 9 %d %d %d\r\n%b\r\n" % (delay, ttr, len(body), body)] * count)
    assert all(reply.startswith(b"INSERTED ") for reply in replies), set(replies)
    return [int(reply.split()[1]) for reply in replies]


def reserve_many(client: Client, count: int) -> list[int]:
    """Reserves jobs that are ready; returns their ids."""
    replies = burst(client, [b"reserve-with-timeout 0\r\n"] * count)
    assert all(reply.startswith(b"RESERVED ") for reply in replies), set(replies)
    return [int(reply.split()[1]) for reply in replies]


def number(client: Client, key: str, command: bytes = b"stats") -> int:
    """One number of a statistic."""
    return int(client.stats(command)[key])


def receive_all(sock: socket.socket) -> bytes:
    """Everything up to the end; the timeout of the socket bounds each piece of it."""
    pieces = []
    while data := sock.recv(1 << 20):
        pieces.append(data)
    return b"".join(pieces)


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """This many bytes, or fewer when the other side ends before."""
    pieces = []
    while count and (data := sock.recv(min(count, 1 << 20))):
        pieces.append(data)
        count -= len(data)
    return b"".join(pieces)


def fill(sock: socket.socket, piece: bytes, limit: int) -> int:
    """Sends a piece again and again, to `limit` bytes or until the peer takes none for 0.1 s. Returns how many went."""
    timeout = sock.gettimeout()
    sock.setblocking(False)
    sent = 0
    quiet_since = time.monotonic()
    while sent < limit and time.monotonic() - quiet_since < 0.1:
        try:
            sent += sock.send(piece[sent % len(piece) :])
            quiet_since = time.monotonic()
        except BlockingIOError:
            time.sleep(0.005)
    sock.settimeout(timeout)
    return sent


def reset(sock: socket.socket) -> None:
    """Closes so that TCP sends RST and forgets what was not delivered; on a unix socket, closes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


CLOSERS: dict[str, Callable[[socket.socket], None]] = {"close": socket.socket.close, "reset": reset}


# What it costs


def cpu_s(pid: int) -> float:
    """Processor time that all threads of the process have used so far; resolution 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_share(pid: int, over_s: float = 1.0) -> float:
    """The part of one core that the process uses in the time from now on."""
    before_s, begun = cpu_s(pid), time.monotonic()
    time.sleep(over_s)
    return (cpu_s(pid) - before_s) / (time.monotonic() - begun)


def wakeups(pid: int) -> int:
    """Returns how often a thread of the process has gone to sleep so far: while it idles, how often it woke up."""
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                count += int(line.split()[1])
    return count


def memory_bytes(pid: int) -> int:
    """Resident memory of the process, without files that it has mapped."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/PID/status")


def fronts_of(server: ServerProcess) -> list[int]:
    """The pids of the server's front-end processes; none when it is gone."""
    try:
        return [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_there(pid: int) -> bool:
    """Returns whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_files(pid: int) -> list[str]:
    """Returns what the descriptors of the process refer to."""
    names = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return names


def main_thread_cpu_ns(pid: int) -> int:
    """Processor time of the main thread in nanoseconds; skips the test where the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    except FileNotFoundError:
        pytest.skip("the kernel does not tell what a process ran")


class Probe(NamedTuple):
    """The time of an answer, and the part in which the server worked. The rest, others had the machine."""

    wall_s: float
    work_s: float


@contextmanager
def probing(server: ServerProcess) -> Iterator[list[Probe]]:
    """Asks `list-tube-used` all the time from a process of its own; yields the growing list of what that took."""
    main_thread_cpu_ns(server.pid)  # or skips the test
    address = [server.unix_path] if server.unix_path else [server.host, str(server.port)]
    probes: list[Probe] = []
    with subprocess.Popen(
        [sys.executable, "-I", "-S", prober.__file__, str(server.pid), *address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        answers = process.stdout

        def take() -> None:
            for line in answers:
                wall_ns, work_ns = map(int, line.split())
                probes.append(Probe(wall_ns / 1e9, work_ns / 1e9))

        thread = threading.Thread(target=take)
        thread.start()
        try:
            until(lambda: probes or process.poll() is not None, "the prober has begun")
            yield probes
        finally:
            process.stdin.close()
            thread.join()
            errors = process.stderr.read()
    assert process.returncode == 0, errors


class Pump:
    """A thread that puts without end, pipelined, until it is stopped or the server goes. Its `bodies` are distinct."""

    def __init__(self, server: ServerProcess, name: str, *, batch: int = 20) -> None:
        self.acknowledged: dict[int, bytes] = {}
        self.sent: set[bytes] = set()
        self._client = Client(server.connect())
        self._name = name.encode()
        self._batch = batch
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Ends it, also when the server has gone; then `acknowledged` and `sent` are final."""
        self._over.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        count = 0
        with suppress(Exception):  # the server went: what it said before is what counts
            while not self._over.is_set():
                bodies = [b"%b-%d" % (self._name, count + at) for at in range(self._batch)]
                count += self._batch
                self.sent.update(bodies)
                self._client.send(b"".join(b"put 1 0 60 %d\r\n%b\r\n" % (len(body), body) for body in bodies))
                for body in bodies:
                    reply = self._client.reply()
                    assert reply.startswith(b"INSERTED "), reply
                    self.acknowledged[int(reply.split()[1])] = body
