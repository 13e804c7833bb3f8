"""Bodies of 64 bytes to 1 MB under each policy of fsync: rates, processor time, how long the slowest hundredth waits.

Invariant: every server does the same work, in turns, and a body that comes back is compared with the one that was put.
"""

from __future__ import annotations

import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from scripts.benchmark.load import SILENCE_S, LoadError, connect, put_request, unexpected
from scripts.benchmark.rows import WARM_UP_S, Scale
from scripts.benchmark.servers import Build, serving, spent

SIZES = {
    "64 B": (64, 50),
    "64 B, 500 connections": (64, 500),
    "64 B, 1 connection": (64, 1),
    "1 kB": (1 << 10, 50),
    "10 kB": (10 << 10, 50),
    "100 kB": (100 << 10, 50),
    "1 MB": (1 << 20, 4),
}
"""Bytes of a body, and connections."""
POLICIES = {"no journal": (), "`-F`": ("-F",), "`-f50`": ("-f50",), "`-f0`": ("-f0",)}
_LARGEST = ("-z", str(2 << 20))
_DEVICE_BYTES = 256 << 20


class Cycles:
    """Connections that each put a job, reserve one and delete it, again and again, one command at a time."""

    def __init__(self, port: int, connections: int, body_bytes: int) -> None:
        self._put = put_request(body_bytes)
        self._reply_end = b"\r\n" + b"x" * body_bytes + b"\r\n"
        self._sockets = {sock.fileno(): sock for sock in (connect(port, blocking=True) for _ in range(connections))}
        self._reply_max = body_bytes + 100
        self._begun_s: dict[int, float] = {}
        self._parts: dict[int, bytes] = {}  # what has come of a reply
        self._epoll = select.epoll()
        for fd in self._sockets:
            self._epoll.register(fd, select.EPOLLIN)
            self._send(fd, self._put)

    def work(self, seconds: float) -> list[float]:
        """Works for `seconds`, or until one command is answered. Returns the seconds that each command took."""
        waits: list[float] = []
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + seconds or not waits:
            if now > begun + seconds + SILENCE_S:
                raise LoadError(f"the server answered nothing in {SILENCE_S:g} s")
            for fd, _ in self._epoll.poll(0.1, len(self._sockets)):
                data = os.read(fd, self._reply_max)
                if not data:
                    raise unexpected(b"")
                reply = self._parts.pop(fd) + data if fd in self._parts else data
                command = self._next_of(reply)
                if command:
                    waits.append(time.monotonic() - self._begun_s[fd])
                    self._send(fd, command)
                else:
                    self._parts[fd] = reply
        return waits

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._epoll.close()

    def _next_of(self, reply: bytes) -> bytes:
        """Returns the command that follows a reply; b"" when the reply is not complete."""
        if reply.startswith(b"RESERVED "):
            head = reply.find(b"\r\n")
            if head < 0 or len(reply) < head + len(self._reply_end):
                return b""
            if reply[head:] == self._reply_end:
                return b"delete %b\r\n" % reply[9 : reply.find(b" ", 9)]
        elif reply.startswith(b"INSERTED ") and reply.endswith(b"\r\n"):
            return b"reserve\r\n"
        elif reply == b"DELETED\r\n":
            return self._put
        elif not reply.endswith(b"\r\n"):
            return b""
        raise unexpected(reply)

    def _send(self, fd: int, data: bytes) -> None:
        self._begun_s[fd] = time.monotonic()
        sent = os.write(fd, data)
        if sent < len(data):
            self._sockets[fd].sendall(data[sent:])


def measure(builds: Sequence[Build], scale: Scale, core: int, runs: int) -> dict[str, Any]:
    """Returns what report.bodies_part() shows."""
    found: dict[str, Any] = {"runs": runs, "rows": [], "device": device_mb_s()}
    for title, (size, connections) in SIZES.items():
        for policy, flags in POLICIES.items():
            values: dict[str, list[list[float]]] = {build.name: [] for build in builds}
            for run in range(runs):
                for build in builds if run % 2 == 0 else reversed(builds):
                    journal = ("-b", "{dir}", *flags) if flags else ()
                    try:
                        one = measure_one(build, (*_LARGEST, *journal), size, connections, scale.seconds, core)
                    except (LoadError, OSError) as error:
                        print(f"{title}, {policy}, {build.name}: a run is lost: {error}", file=sys.stderr, flush=True)
                        continue
                    values[build.name].append(one)
            found["rows"].append({"title": f"{title}, {policy}", "bytes": size, "builds": values})
            rates = {name: statistics.median(run[0] for run in each) for name, each in values.items() if each}
            said = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in rates.items())
            print(f"{title}, {policy}: {said}", flush=True)
    return found


def measure_one(
    build: Build, flags: tuple[str, ...], body_bytes: int, connections: int, seconds: float, core: int
) -> list[float]:
    """Commands a second; microseconds a command, and those in user space; the 99th percentile in milliseconds."""
    with serving(build, flags, core=core) as server:
        load = Cycles(server.port, connections, body_bytes)
        try:
            load.work(min(WARM_UP_S, seconds / 4))
            before, begun = spent(server.pid), time.monotonic()
            waits = load.work(seconds)
            wall, used = time.monotonic() - begun, spent(server.pid).since(before)
        except TimeoutError as error:
            raise LoadError("the server took nothing") from error
        finally:
            load.close()
    slow = sorted(waits)[len(waits) * 99 // 100]
    return [len(waits) / wall, *(each * 1e6 / len(waits) for each in used), slow * 1e3]


def device_mb_s() -> float:
    """Returns the megabytes a second at which one file is written and synced on the disk of the journals."""
    with tempfile.TemporaryFile(prefix="geventstalk-bench-") as file:
        data = os.urandom(1 << 20)
        begun = time.monotonic()
        for _ in range(_DEVICE_BYTES >> 20):
            file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
        return _DEVICE_BYTES / (time.monotonic() - begun) / 1e6
