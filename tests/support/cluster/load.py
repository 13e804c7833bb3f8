"""Clients of a cluster that write down what they asked, what they were told, and when.

Each is a thread with one connection at a time. When that breaks, or nothing comes for as long as its patience lasts,
it connects anew, to the same address or to the next one, as real clients do: what it held it no longer holds, and
what was not answered may have happened or not. For each address there is one more client that stays with that address
and soon gives up: a gap is what the cluster takes, not what patient clients make of it. Each job has a body of its own,
which says which job it is. Imports nothing of geventstalk.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from tests.support.cluster.jobs import NOT_FOUND, NS, Connection, Operation, promises
from tests.support.wire import ReplyReader, WireError

Address = tuple[str, int]

TUBES = (b"mail", b"reports")
TTR_S = (600, 600, 600, 2)
SIZES = (10, 50, 200, 1000, 4000)
LARGE = 60_000
CONNECT_S = 1.0
PATIENCE_S = (1.0, 30.0)
"""Every second client waits for long, as clients without a time limit do."""
SOON_S = 0.2
"""The patience of those who stay with an address, and how long each of them waits for a connection."""
PAUSE_S = 0.004
"""From one batch of a client to the next: the load is there to see what happens, not to measure the machine."""
POPULATION = 60
"""Jobs that there are at most for each client, about."""


class Link:
    """One connection to one address. Replies come in the order of what was asked."""

    def __init__(self, address: Address, patience_s: float, connect_s: float = CONNECT_S) -> None:
        self.sock = socket.create_connection(address, connect_s)
        self.sock.settimeout(patience_s)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = ReplyReader()
        self._replies: deque[bytes] = deque()

    def reply(self) -> bytes:
        """The next reply; OSError when none comes."""
        while not self._replies:
            data = self.sock.recv(65536)
            if not data:
                raise ConnectionResetError("closed by the server")
            self._replies.extend(self._reader.feed(data))
        return self._replies.popleft()

    def ask(self, line: bytes) -> bytes:
        self.sock.sendall(line + b"\r\n")
        return self.reply()

    def close(self) -> None:
        self.sock.close()


class Record:
    """The notes of all clients of a crew. Each client appends to a list of its own."""

    def __init__(self) -> None:
        self.operations: list[list[Operation]] = []
        self.connections: dict[int, Connection] = {}
        self.buried: deque[tuple[int, bytes]] = deque(maxlen=1000)
        self.left: deque[tuple[int, bytes]] = deque(maxlen=100)
        """Jobs that a client held when the connection broke."""
        self.alive = 0
        """About how many jobs there are."""
        self.complaints: list[str] = []
        self._lock = threading.Lock()
        self._connections = 0

    def connection(self, address: Address) -> Connection:
        with self._lock:
            self._connections += 1
            connection = Connection(self._connections, f"{address[0]}:{address[1]}")
            self.connections[connection.number] = connection
            return connection

    def count(self, more: int) -> None:
        with self._lock:
            self.alive += more

    def all(self) -> list[Operation]:
        """Everything so far. Those that are still under way have no answer yet."""
        return [operation for operations in list(self.operations) for operation in list(operations)]


class Crew:
    """Clients at work: this many that go from address to address, and one that stays for each address.

    `name` begins each body, so that no two crews put the same job.
    """

    def __init__(self, addresses: Sequence[Address], seed: int, name: str, clients: int = 6) -> None:
        self.record = Record()
        self._addresses = list(addresses)
        self._over = threading.Event()
        self.name = name
        self._links: dict[int, Link] = {}
        self._movers = clients
        self.clients = clients + len(self._addresses)
        self._threads = [
            threading.Thread(target=self._guarded, args=(number, random.Random(seed * 1000 + number)), daemon=True)
            for number in range(self.clients)
        ]
        self._latest = [(0, "")] * self.clients
        for _ in range(self.clients):
            self.record.operations.append([])

    def start(self) -> Crew:
        for thread in self._threads:
            thread.start()
        return self

    def __enter__(self) -> Crew:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def answered(self) -> int:
        """Returns how many changes were acknowledged so far."""
        return sum(map(promises, self.record.all()))

    def served_since(self, moment: int, but_not: str = "") -> bool:
        """Returns whether another node than that one acknowledged a change that was asked for after this moment."""
        return any(begun > moment and node != but_not for begun, node in self._latest)

    def served(self, number: int, begun: int, node: str) -> None:
        """A change of a client was acknowledged."""
        self._latest[number] = (begun, node or "?")

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ends all clients; who waits for a reply that does not come is cut off."""
        self._over.set()
        end = time.monotonic() + 3.0
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        for link in list(self._links.values()):
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)
                assert not thread.is_alive(), f"{thread.name} does not end"

    # --- one client

    def _guarded(self, number: int, draw: random.Random) -> None:
        try:
            Client(self, number, draw).run()
        except BaseException as error:  # for the thread that judges
            self.record.complaints.append(f"client {number}: {type(error).__name__}: {error}")

    def rest(self, seconds: float) -> None:
        """Waits this long, or until the crew ends."""
        self._over.wait(seconds)

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def stays(self, number: int) -> bool:
        """Returns whether this client has one address for ever."""
        return number >= self._movers

    def connect(self, number: int, at: int) -> tuple[Link, Connection, int]:
        """A connection to some address, from `at` on, and where that was. Raises OSError when the crew ends."""
        stays = self.stays(number)
        patience = SOON_S if stays else PATIENCE_S[number % len(PATIENCE_S)]
        while not self.over:
            address = self._addresses[at % len(self._addresses)]
            try:
                link = Link(address, patience, SOON_S if stays else CONNECT_S)
            except OSError:
                at += 0 if stays else 1
                self._over.wait(0.01)
                continue
            self._links[number] = link
            return link, self.record.connection(address), at
        raise OSError("the crew ends")


class Client:
    """One client of a crew: what it holds, and what it does next."""

    def __init__(self, crew: Crew, number: int, draw: random.Random) -> None:
        self._crew = crew
        self._number = number
        self._draw = draw
        self._record = crew.record
        self._operations = crew.record.operations[number]
        self._put = 0
        self._held: dict[int, bytes] = {}
        self._stays = crew.stays(number)
        self._at = number
        self._goes_on = number % 4 < 2  # whether it leaves an address whose connection broke; others come back first

    def run(self) -> None:
        while not self._crew.over:
            link = None
            try:
                link, connection, self._at = self._crew.connect(self._number, self._at)
                self._greet(link, connection)
                while not self._crew.over:
                    self._batch(link, connection)
                    self._crew.rest(PAUSE_S * self._draw.uniform(0.5, 1.5))
            except OSError as error:
                if (isinstance(error, TimeoutError) or self._goes_on) and not self._stays:
                    self._at += 1
                if not self._crew.over:
                    time.sleep(0.002)
            finally:
                if link is not None:
                    link.close()
                for job in self._held.items():
                    self._record.left.append(job)
                self._held.clear()

    def _greet(self, link: Link, connection: Connection) -> None:
        stats = self._ask(link, connection, "stats", b"stats")
        for line in stats.decode(errors="replace").splitlines():
            key, _, value = line.partition(": ")
            if key == "cluster-node":
                connection.node = value.strip('"')
            elif key == "cluster-epoch":
                connection.epoch = int(value)
        for tube in TUBES:
            self._ask(link, connection, "watch", b"watch " + tube)
        self._ask(link, connection, "use", b"use " + self._draw.choice(TUBES))

    def _ask(self, link: Link, connection: Connection, word: str, line: bytes) -> bytes:
        operation = Operation(connection.number, word, time.monotonic_ns())
        self._operations.append(operation)
        reply = link.ask(line)
        operation.reply = reply.split(None, 1)[0].decode()
        operation.ended = time.monotonic_ns()
        return reply

    def _batch(self, link: Link, connection: Connection) -> None:
        """Some commands in one go, and their replies."""
        planned = [self._plan(connection.number) for _ in range(self._draw.choice((1, 1, 1, 2, 5)))]
        lines = b"".join(line for _, line in planned)
        begun = time.monotonic_ns()
        for operation, _ in planned:
            operation.begun = begun
            self._operations.append(operation)
        link.sock.sendall(lines)
        for operation, _ in planned:
            reply = link.reply()
            self._answered(connection, operation, reply, time.monotonic_ns())

    def _plan(self, connection: int) -> tuple[Operation, bytes]:
        draw = self._draw
        chance = draw.random()
        operation = Operation(connection, "", 0)
        if self._held and chance < 0.5:
            return self._act(operation)
        full = self._record.alive > POPULATION * self._crew.clients
        if chance < (0.5 if full else 0.72):
            timeout = 1 if draw.random() < 0.02 else 0
            operation.word = "reserve"
            return operation, b"reserve-with-timeout %d\r\n" % timeout
        if chance < 0.76:
            place = self._record.buried if draw.random() < 0.8 else self._record.left
            with suppress(IndexError):
                operation.id, operation.body = place.popleft()
                operation.word = "kick" if place is self._record.buried else "delete"
                word = b"kick-job" if operation.word == "kick" else b"delete"
                return operation, b"%b %d\r\n" % (word, operation.id)
        operation.word = "put"
        self._put += 1
        size = LARGE if draw.random() < 0.003 else draw.choice(SIZES)
        ttr = draw.choice(TTR_S)
        name = b"%b %d %d %d" % (self._crew.name.encode(), self._number, self._put, ttr)
        operation.body = name
        body = name + bytes(size)
        delay = 1 if draw.random() < 0.05 else 0
        operation.delay_ns = delay * NS
        pri = draw.choice((0, 10, 1024))
        return operation, b"put %d %d %d %d\r\n%b\r\n" % (pri, delay, ttr, len(body), body)

    def _act(self, operation: Operation) -> tuple[Operation, bytes]:
        """Something with a job that this client holds."""
        draw = self._draw
        operation.id, operation.body = draw.choice(list(self._held.items()))
        chance = draw.random()
        if chance < 0.1:
            operation.word = "touch"
            operation.ttr_ns = ttr_of(operation.body)
            return operation, b"touch %d\r\n" % operation.id
        del self._held[operation.id]
        if chance < 0.7:
            operation.word = "delete"
            return operation, b"delete %d\r\n" % operation.id
        if chance < 0.85:
            operation.word = "bury"
            return operation, b"bury %d 5\r\n" % operation.id
        operation.word = "release"
        delay = 1 if draw.random() < 0.3 else 0
        operation.delay_ns = delay * NS
        return operation, b"release %d 7 %d\r\n" % (operation.id, delay)

    def _answered(self, connection: Connection, operation: Operation, reply: bytes, now: int) -> None:
        word = reply.split(None, 1)[0].decode(errors="replace")
        match operation.word:
            case "put":
                if word == "INSERTED":
                    operation.id = int(reply.split()[1])
                    self._record.count(1)
                elif word not in ("OUT_OF_MEMORY", "DRAINING"):
                    raise WireError(f"a put was answered {reply!r}")
            case "reserve":
                if word == "RESERVED":
                    header, _, body = reply.partition(b"\r\n")
                    operation.id = int(header.split()[1])
                    operation.body = name_of(body)
                    operation.ttr_ns = ttr_of(operation.body)
                    self._held[operation.id] = operation.body
                elif word not in ("TIMED_OUT", "DEADLINE_SOON"):
                    raise WireError(f"a reserve was answered {reply!r}")
            case "delete" if word == "DELETED":
                self._record.count(-1)
            case "bury" if word == "BURIED":
                self._record.buried.append((operation.id, operation.body))
            case "kick" if word == "KICKED":
                pass
            case "release" if word == "RELEASED":
                pass
            case "touch" if word == "TOUCHED":
                pass
            case _ if word != NOT_FOUND:
                raise WireError(f"{operation.word} was answered {reply!r}")
        if word == NOT_FOUND and operation.word == "touch":
            self._held.pop(operation.id, None)  # its time ran out
        operation.reply = word
        operation.ended = now
        if promises(operation):
            self._crew.served(self._number, operation.begun, connection.node)


def name_of(body: bytes) -> bytes:
    """The name of a job, from its body: what comes before the zeros that fill it."""
    return body.removesuffix(b"\r\n").rstrip(b"\0")


def ttr_of(name: bytes) -> int:
    """The time to run of a job, in ns: the last word of its name."""
    return int(name.rpartition(b" ")[2]) * NS


def drain(connect: Callable[[], Link], record: Record) -> None:
    """Takes every job out, and notes that in the record; behind it the server holds no job. No other client is at work.

    Raises AssertionError when the server says otherwise.
    """
    link = connect()
    connection = record.connection(link.sock.getpeername()[:2])
    operations: list[Operation] = []
    record.operations.append(operations)

    def ask(word: str, line: bytes, id: int = 0, body: bytes = b"") -> tuple[bytes, Operation]:
        operation = Operation(connection.number, word, time.monotonic_ns(), id=id, body=body)
        reply = link.ask(line)
        operation.ended = time.monotonic_ns()
        operation.reply = reply.split(None, 1)[0].decode()
        operations.append(operation)
        return reply, operation

    for tube in TUBES:
        ask("watch", b"watch " + tube)
    end = time.monotonic() + 60
    while True:
        for tube in TUBES:
            ask("use", b"use " + tube)
            while True:
                reply, _ = ask("peek", b"peek-buried")
                if not reply.startswith(b"FOUND"):
                    break
                header, _, body = reply.partition(b"\r\n")
                ask("kick", b"kick-job %d" % int(header.split()[1]), id=int(header.split()[1]), body=name_of(body))
        while True:
            reply, operation = ask("reserve", b"reserve-with-timeout 0")
            if not reply.startswith(b"RESERVED"):
                break
            header, _, body = reply.partition(b"\r\n")
            operation.id, operation.body = int(header.split()[1]), name_of(body)
            ask("delete", b"delete %d" % operation.id, id=operation.id, body=operation.body)
        stats = link.ask(b"stats").decode()
        left = {
            key: int(value)
            for key, _, value in (line.partition(": ") for line in stats.splitlines())
            if key.startswith("current-jobs-") and key != "current-jobs-urgent"
        }
        if not any(left.values()):
            break
        assert time.monotonic() < end, f"jobs that no client can take out: {left}"
        time.sleep(0.05)  # delays, and holds of connections that the server has not seen the end of
    link.close()
