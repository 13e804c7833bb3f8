"""A load generator: connections that keep a server busy with one kind of work, in one thread on one epoll.

It must cost less than the server it loads, so requests are bytes made once, a reply is looked at as bytes and never
taken apart further than its check needs, and the loop for one command at a time is written out: a function call for
each reply would cost it a tenth of its speed.
Invariant: a connection has one batch under way, and sends the next when every reply to it has come and was as expected.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Final

CRLF: Final = b"\r\n"
READ_BYTES: Final = 1 << 18
SILENCE_S: Final = 60.0
BURST: Final = 500
"""Commands that are sent at once where it is only about getting them done."""
_NO_LINGER: Final = struct.pack("ii", 1, 0)

PUT_PHASE, RESERVE_PHASE, DELETE_PHASE = range(3)


class LoadError(Exception):
    """The server closed a connection, stayed silent or answered what it must not."""


def connect(port: int, *, blocking: bool = False) -> socket.socket:
    """A connection to a server on this machine. It is reset when closed, which leaves no port waiting behind."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=SILENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    if not blocking:
        sock.setblocking(False)
    return sock


def put_request(body_bytes: int = 64, *, delay_s: int = 0, ttr_s: int = 600, priority: int = 1024) -> bytes:
    """One put with a body of this many x."""
    return b"put %d %d %d %d\r\n%b\r\n" % (priority, delay_s, ttr_s, body_bytes, b"x" * body_bytes)


def unexpected(data: bytes) -> LoadError:
    """Returns what to raise on bytes that are not the reply to what was sent."""
    return LoadError(f"the server answered {data[:60]!r}" if data else "the server closed a connection")


class Load:
    """`connections` that each put `depth` jobs and, with `cycle`, reserve and delete as many; then begin anew.

    Takes over `sockets` that are connected already, beside the new connections.
    """

    def __init__(
        self,
        port: int,
        *,
        connections: int = 0,
        depth: int = 1,
        cycle: bool = True,
        body_bytes: int = 64,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self._cycle = cycle
        self._depth = depth
        self._put = put_request(body_bytes) * depth
        self._reserve = b"reserve-with-timeout 0\r\n" * depth
        self._sockets = [*sockets, *(connect(port) for _ in range(connections))]
        for sock in sockets:
            sock.setblocking(False)
        self._phases = {sock.fileno(): PUT_PHASE for sock in self._sockets}
        self._parts = dict.fromkeys(self._phases, b"")  # what has come of the replies to a batch
        self._counted = dict.fromkeys(self._phases, 0)
        self._epoll = select.epoll()
        for fd in self._phases:
            self._epoll.register(fd, select.EPOLLIN)
        self._begun = False

    def work(self, seconds: float, commands: int = 0) -> int:
        """Goes on for this many seconds, or until this many commands are answered. Returns how many were."""
        if not self._begun:
            self._begun = True
            for fd in self._phases:
                self._write(fd, self._put)
        end = time.monotonic() + seconds
        bound = commands or 1 << 62
        return self._work_singly(end, bound) if self._depth == 1 else self._work_deep(end, bound)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._epoll.close()

    @staticmethod
    def _write(fd: int, data: bytes) -> None:
        if os.write(fd, data) != len(data):
            raise LoadError("a batch does not fit into the socket")

    def _work_singly(self, end: float, bound: int) -> int:
        put, reserve, cycle, phases = self._put, self._reserve, self._cycle, self._phases
        poll, read, write, clock = self._epoll.poll, os.read, os.write, time.monotonic
        events = len(phases)
        count = 0
        while count < bound and clock() < end:
            for fd, _ in poll(0.1, events):
                data = read(fd, 512)
                if data[-1:] != b"\n":
                    raise unexpected(data)  # so short a reply never comes in two pieces
                phase = phases[fd]
                if phase == PUT_PHASE:
                    if data[:9] != b"INSERTED ":
                        raise unexpected(data)
                    if cycle:
                        phases[fd] = RESERVE_PHASE
                        write(fd, reserve)
                    else:
                        write(fd, put)
                elif phase == RESERVE_PHASE:
                    if data[:9] != b"RESERVED ":
                        raise unexpected(data)
                    phases[fd] = DELETE_PHASE
                    write(fd, b"delete %b\r\n" % data[9 : data.find(b" ", 9)])
                else:
                    if data != b"DELETED\r\n":
                        raise unexpected(data)
                    phases[fd] = PUT_PHASE
                    write(fd, put)
                count += 1
        return count

    def _work_deep(self, end: float, bound: int) -> int:
        poll, read, clock, parts, events = self._epoll.poll, os.read, time.monotonic, self._parts, len(self._phases)
        depth, counted = self._depth, self._counted
        count = 0
        while count < bound and clock() < end:
            for fd, _ in poll(0.1, events):
                data = read(fd, READ_BYTES)
                if not data:
                    raise unexpected(data)
                if parts[fd]:
                    data = parts[fd] + data
                replies = self._replies(fd, data)
                count += replies - counted[fd]
                if replies == depth:
                    counted[fd] = 0
                    parts[fd] = b""
                    self._write(fd, self._next_batch(fd, data))
                else:
                    counted[fd] = replies
                    parts[fd] = data
        return count

    def _replies(self, fd: int, data: bytes) -> int:
        """Returns how many whole replies to a connection's batch have come."""
        lines = data.count(b"\n")
        return lines // 2 if self._phases[fd] == RESERVE_PHASE else lines  # a body has a line, and no more than that

    def _next_batch(self, fd: int, data: bytes) -> bytes:
        """Returns what comes behind a batch to which `data` has all replies."""
        phase = self._phases[fd]
        word = (b"INSERTED ", b"RESERVED ", b"DELETED\r\n")[phase]
        if data[: len(word)] != word or data.count(word) != self._depth:
            raise unexpected(data)
        if not self._cycle:
            return self._put
        self._phases[fd] = (phase + 1) % 3
        if phase == PUT_PHASE:
            return self._reserve
        if phase == RESERVE_PHASE:
            return b"delete " + b"\r\ndelete ".join(data.split()[1::4]) + CRLF
        return self._put


class Client:
    """One blocking connection for what is not measured by the million: preparing, asking, probing."""

    def __init__(self, port: int) -> None:
        self.sock = connect(port, blocking=True)
        self._rest = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def line(self) -> bytes:
        """The next line of what the server says, without its end."""
        while (end := self._rest.find(CRLF)) < 0:
            self._rest += self._more()
        line, self._rest = self._rest[:end], self._rest[end + 2 :]
        return line

    def lines(self, number: int) -> list[bytes]:
        """The next lines, this many, without their ends."""
        while self._rest.count(CRLF) < number:
            self._rest += self._more()
        *lines, self._rest = self._rest.split(CRLF, number)
        return lines

    def chunk(self, size: int) -> bytes:
        """The next `size` bytes, whose end of line is taken off."""
        parts = [self._rest]
        have = len(self._rest)
        while have < size + 2:
            parts.append(self._more())
            have += len(parts[-1])
        data = b"".join(parts)
        self._rest = data[size + 2 :]
        return data[:size]

    def some(self) -> bytes:
        """Whatever has come, at least a byte: for what is too large to be kept."""
        data, self._rest = self._rest or self._more(), b""
        return data

    def ask(self, request: bytes, expected: bytes) -> bytes:
        """Sends one command; the line of its reply has to begin as expected."""
        self.sock.sendall(request)
        line = self.line()
        if not line.startswith(expected):
            raise unexpected(line)
        return line

    def burst(self, requests: Sequence[bytes], word: bytes, lines_each: int = 1) -> None:
        """Sends some commands at once and waits for all replies, each of which has the word in one of its lines."""
        self.sock.sendall(b"".join(requests))
        self.settle(len(requests), word, lines_each)

    def settle(self, replies: int, word: bytes, lines_each: int = 1) -> None:
        """Waits for the replies to a burst that was sent."""
        parts = []
        lines = 0
        while lines < replies * lines_each:
            parts.append(self._more())
            lines += parts[-1].count(b"\n")
        data = b"".join(parts)
        if lines != replies * lines_each or data.count(word) != replies:
            raise unexpected(data)

    def bursts(self, requests: Iterable[bytes], word: bytes, lines_each: int = 1) -> None:
        """Sends any number of commands, some hundred at once."""
        rest = iter(requests)
        while batch := list(itertools.islice(rest, BURST)):
            self.burst(batch, word, lines_each)

    def text(self, request: bytes) -> bytes:
        """Sends a command that is answered by OK and a text. Returns the text."""
        return self.chunk(int(self.ask(request, b"OK ").split()[1]))

    def _more(self) -> bytes:
        try:
            data = self.sock.recv(READ_BYTES)
        except TimeoutError as error:
            raise LoadError(f"the server was silent for {self.sock.gettimeout():.0f} s") from error
        if not data:
            raise unexpected(b"")
        return data


def fill(port: int, jobs: int, request: bytes = b"") -> None:
    """Puts this many jobs, many at once, from some connections; `request` is the put to send."""
    request = request or put_request()
    batch = max(1, min(BURST, READ_BYTES // len(request)))
    clients = [Client(port) for _ in range(4)]
    left = jobs
    while left:
        sent = []
        for client in clients:
            sent.append(min(batch, left))
            left -= sent[-1]
            client.sock.sendall(request * sent[-1])
        for client, number in zip(clients, sent, strict=True):
            client.settle(number, b"INSERTED ")
    for client in clients:
        client.close()
