"""Clients that want much at the same time take turns, and a client that asks for little waits for little.

The turn's clock goes on by a millisecond whenever it is read. So what fits into one pass of the event loop is a number
of steps, whatever the machine does meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest

from geventstalk.core.operate import Operate
from geventstalk.front import frames as f
from geventstalk.serving.acceptor import Acceptor
from geventstalk.serving.connection import Ahead, Connection, Unsent
from geventstalk.serving.fd_limits import Descriptors
from geventstalk.serving.link import FrontClient, Link, LinkOwner
from geventstalk.serving.parking import Parking
from geventstalk.serving.runqueue import LITTLE_PRESSURE_MAX, Runnable, RunQueue
from geventstalk.stream import Stream
from geventstalk.turn.replies import Channel
from geventstalk.turn.turn import LITTLE_WORK, PASSES_MAX, SHARE_NS, Turn
from geventstalk.wire.session import COMMAND_SLICE, Service, Session
from tests.support.clients import CLOSERS

TICK_NS = SHARE_NS // 2
STEPS_MAX = 20
"""This many steps and ends of clients fit into one turn of such a clock, with some to spare."""
CROWD = 100
ASK = b"list-tube-used\r\n"
ANSWER = b"USING default\r\n"


class CountedTurn(Turn):
    """Counts what is done for clients between two commits."""

    def __init__(self, engine: Operate, begins: Callable[[], None]) -> None:
        clock = itertools.count(TICK_NS, TICK_NS)
        super().__init__(engine, clock.__next__, time.time_ns, begins, fail)
        self.counts = [0]
        self.stepped: dict[int, int] = {}  # in which turn a client had its last step

    def step(self, channel: Channel, data: bytes | None) -> None:
        self.counts[-1] += 1
        self.stepped[channel.session.number] = len(self.counts)
        super().step(channel, data)

    def leave(self, channel: Channel) -> None:
        self.counts[-1] += 1
        super().leave(channel)

    def end(self) -> None:
        self.counts.append(0)
        super().end()


class Scene(LinkOwner):
    """The wiring of a server, in this process."""

    def __init__(self) -> None:
        self.loop: Any = gevent.get_hub().loop
        self.service = Service(Operate(0), 65535, dict)
        self.turn = CountedTurn(self.service.engine, lambda: self.loop.run_callback(self.turn.end))
        self.queue = RunQueue(self.loop, self.turn)
        self.shared = Ahead(), Unsent(self.service)

    def connect(self) -> tuple[socket.socket, Connection]:
        """A client's socket, and the connection that serves it in a greenlet."""
        client, own = socket.socketpair()
        own.setblocking(False)
        made: list[Connection] = []
        gevent.spawn_raw(self._serve, own, made)
        while not made:
            gevent.sleep(0)
        client.setblocking(False)
        return client, made[0]

    def _serve(self, own: socket.socket, made: list[Connection]) -> None:
        connection = Connection(Stream(own), Session(self.service), self.turn, *self.shared, self.queue, Parking())
        self.turn.join(connection)
        made.append(connection)
        connection.serve()
        connection.close()
        self.turn.leave(connection)

    def link(self, sock: socket.socket) -> Link:
        sock.setblocking(False)
        return Link(sock, self.loop, self.come, self.turn.leave, self.turn.step, *self.shared, self.queue, print, self)

    def come(self, link: Link, number: int, peer: str, own_end: str) -> FrontClient:
        client = FrontClient(link, number, Session(self.service), peer, own_end)
        self.turn.join(client)
        return client

    def came(self, link: Link) -> None:
        """The test knows."""


def fail(error: BaseException) -> None:
    raise error


def until(true: Callable[[], object]) -> None:
    with gevent.Timeout(30):
        while not true():
            gevent.sleep(0.001)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with gevent.Timeout(60):
        yield Scene()


def test_a_client_that_asks_for_little_waits_for_no_more_than_a_share_of_each_of_those_that_ask_for_much(
    scene: Scene,
) -> None:
    """A turn gave each ready client its slice: beside 300 that always had more, another one waited for all of them."""
    asked = 4 * COMMAND_SLICE
    sane, connection = scene.connect()
    greedy = [scene.connect()[0] for _ in range(40)]
    turn = scene.turn
    for client in greedy:
        client.sendall(ASK * asked)
    until(lambda: len(turn.counts) > 10)
    sane.sendall(ASK)
    at = len(turn.counts)
    gevent.sleep(0)
    until(lambda: connection.session.number in turn.stepped)
    assert turn.stepped[connection.session.number] <= at + 2
    got = [0] * len(greedy)

    def all_have_all() -> bool:
        for number, client in enumerate(greedy):
            with contextlib.suppress(BlockingIOError):
                got[number] += len(client.recv(1 << 20))
        return set(got) == {len(ANSWER) * asked}

    until(all_have_all)
    assert sane.recv(100) == ANSWER
    assert max(turn.counts) <= STEPS_MAX
    for client in (sane, *greedy):
        client.close()
    until(lambda: not turn.channels)


@pytest.mark.parametrize("close", CLOSERS.values(), ids=CLOSERS)
def test_of_many_clients_that_hang_up_at_once_few_end_in_one_turn(
    scene: Scene, close: Callable[[socket.socket], None]
) -> None:
    """All of them ended in one pass of the event loop: 8,000 held others up for 0.6 s."""
    with socket.create_server(("127.0.0.1", 0), backlog=CROWD) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(CROWD)]
        for _ in clients:
            own = listener.accept()[0]
            own.setblocking(False)
            gevent.spawn_raw(scene._serve, own, [])
    until(lambda: len(scene.turn.channels) == CROWD)
    gevent.sleep(0.01)
    for client in clients:
        close(client)
    until(lambda: not scene.turn.channels)
    assert max(scene.turn.counts) <= STEPS_MAX


@pytest.mark.parametrize("how", [f.END, f.HANGUP, f.GONE, 0], ids=["end", "hangup", "gone", "front"])
def test_of_many_clients_of_a_front_that_hang_up_at_once_few_end_in_one_turn(scene: Scene, how: int) -> None:
    """All that one read had brought from the front, or all clients of a front that had ended, ended at once."""
    ours, theirs = socket.socketpair()
    link = scene.link(ours)
    numbers = range(1, CROWD + 1)
    theirs.sendall(b"".join(f.frame(number, f.OPEN, b"peer\nend") for number in numbers))
    until(lambda: len(link.clients) == CROWD)
    if how == f.HANGUP:  # the end stands behind what is not sent yet
        theirs.sendall(b"".join(f.frame(number, f.DATA, b"reserve\r\n") for number in numbers))
        until(lambda: scene.service.engine.waiting_count == CROWD)
        scene.turn.counts = [0]
    if how:
        theirs.sendall(b"".join(f.frame(number, how) for number in numbers))
    else:
        theirs.close()
    until(lambda: not scene.service.engine.waiting_count if how == f.HANGUP else not scene.turn.channels)
    assert max(scene.turn.counts) <= STEPS_MAX
    theirs.close()
    until(lambda: not link.clients)


def test_of_many_clients_of_a_front_that_ask_for_much_few_have_their_slice_in_one_turn(scene: Scene) -> None:
    """One read from a front brings some milliseconds of work, or a second of it."""
    ours, theirs = socket.socketpair()
    link = scene.link(ours)
    numbers = range(1, CROWD + 1)
    theirs.sendall(b"".join(f.frame(number, f.OPEN, b"peer\nend") for number in numbers))
    for _ in range(2):
        theirs.sendall(b"".join(f.frame(number, f.DATA, ASK * (LITTLE_WORK + 1)) for number in numbers))
        cutter, left = f.Cutter(), CROWD * (LITTLE_WORK + 1) * len(ANSWER)
        while left:
            until(lambda: scene.turn.counts[-1] == 0)
            gevent.sleep(0.001)
            try:
                cutter.feed(theirs.recv(1 << 20, socket.MSG_DONTWAIT))
            except BlockingIOError:
                continue
            while cutter.take():
                left -= len(cutter.data) if cutter.kind == f.REPLY else 0
    assert max(scene.turn.counts) <= STEPS_MAX
    theirs.close()
    until(lambda: not link.clients)


def test_of_many_clients_that_read_at_once_few_are_written_to_in_one_pass(scene: Scene) -> None:
    """Each takes a quarter of a megabyte: beside 300 of them, others waited for 20 ms."""
    pairs = [scene.connect() for _ in range(40)]
    for _, connection in pairs:
        connection.send(b"x" * (1 << 20))
    sizes = [[connection.output_bytes for _, connection in pairs]]
    passes = scene.loop.prepare()
    passes.start(lambda: sizes.append([connection.output_bytes for _, connection in pairs]))
    for client, _ in pairs:
        client.recv(1 << 20)
    until(lambda: all(now < first for now, first in zip(sizes[-1], sizes[0], strict=True)))
    passes.stop()
    passes.close()
    written = [
        sum(now != last for now, last in zip(after, before, strict=True)) for before, after in itertools.pairwise(sizes)
    ]
    assert 0 < max(written) <= STEPS_MAX
    for client, _ in pairs:
        client.close()
    until(lambda: not scene.turn.channels)


def test_few_connections_are_accepted_in_one_pass() -> None:
    came: list[socket.socket] = []
    counts = [0]
    with socket.create_server(("127.0.0.1", 0), backlog=CROWD) as listener:
        listener.setblocking(False)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(CROWD)]
        acceptor = Acceptor(listener, came.append, Descriptors(), logging.getLogger())
        passes: Any = gevent.get_hub().loop.prepare()
        passes.start(lambda: counts.append(len(came)))
        acceptor.start()
        until(lambda: len(came) == CROWD)
        acceptor.stop()
    passes.stop()
    passes.close()
    assert max(after - before for before, after in itertools.pairwise(counts)) <= STEPS_MAX
    for sock in came + clients:
        sock.close()


# The queue itself


class Timer:
    active = False
    callback: Callable[[], None]

    def start(self, callback: Callable[[], None]) -> None:
        self.active, self.callback = True, callback


class Loop:
    """Goes round when it is told."""

    def __init__(self) -> None:
        self.made = Timer()

    def timer(self, seconds: float) -> Timer:
        return self.made

    def goes_round(self, turn: Turn) -> None:
        assert self.made.active
        self.made.active = False
        self.made.callback()
        turn.end()


class Runner(Runnable):
    """Wants to run again, this many times."""

    def __init__(self, bench: Bench, name: str, heavy: bool, wants: int = 0) -> None:
        super().__init__(Session(bench.service))
        self.bench, self.name, self.heavy, self.wants = bench, name, heavy, wants
        self.sent = b""

    def send(self, data: bytes) -> None:
        self.sent += data

    def goes_on(self) -> None:
        """The test says what goes on."""

    def run(self) -> None:
        self.bench.ran.append(self.name)
        self.bench.now_ns += self.bench.takes_ns
        if self.wants:
            self.wants -= 1
            self.bench.queue.add(self)


class Bench:
    def __init__(self) -> None:
        self.now_ns = 1
        self.takes_ns = SHARE_NS // 2 + 1
        self.ran: list[str] = []
        self.service = Service(Operate(0), 65535, dict)
        self.turn = Turn(self.service.engine, lambda: self.now_ns, time.time_ns, lambda: None, fail)
        self.loop = Loop()
        self.queue = RunQueue(self.loop, self.turn)


def test_clients_of_the_queue_run_in_the_order_in_which_they_came_and_each_once_before_another_runs_twice() -> None:
    bench = Bench()
    for name in "abcde":
        runner = Runner(bench, name, heavy=True, wants=2)
        bench.queue.add(runner)
        bench.queue.add(runner)  # which is once
    rounds = []
    while bench.loop.made.active:
        bench.loop.goes_round(bench.turn)
        rounds.append(len(bench.ran))
    assert "".join(bench.ran) == "abcde" * 3
    assert max(after - before for before, after in itertools.pairwise([0, *rounds])) < 5, "a pass has a share of time"


def test_clients_that_ask_for_little_run_first_and_never_all_the_time() -> None:
    bench = Bench()
    bench.takes_ns = 2 * SHARE_NS
    bench.queue.add(Runner(bench, "M", heavy=True, wants=1))
    for name in "abc":
        bench.queue.add(Runner(bench, name, heavy=False, wants=2))
    bench.loop.goes_round(bench.turn)
    bench.loop.goes_round(bench.turn)
    assert bench.ran == ["a", "M", "b", "M"]


def test_who_has_to_wait_depends_on_how_long_the_turn_lasts() -> None:
    bench = Bench()
    heavy, light = Runner(bench, "heavy", heavy=True), Runner(bench, "light", heavy=False)
    turn, queue = bench.turn, bench.queue
    turn.begin()
    assert not turn.is_pressed()
    assert not queue.postpones(heavy)
    bench.now_ns += SHARE_NS
    assert turn.is_pressed()
    assert not queue.postpones(light)
    assert queue.postpones(heavy)
    for _ in range(LITTLE_PRESSURE_MAX - 1):
        bench.now_ns += SHARE_NS
        turn.is_pressed()
    assert queue.postpones(light)
    turn.end()
    another = Runner(bench, "another", heavy=True)
    assert not queue.postpones(another), "the next turn begins anew"
    for name in "ab":  # they have no step
        queue.end(Runner(bench, name, heavy=False))
        bench.now_ns += SHARE_NS
    queue.end(Runner(bench, "c", heavy=False))
    assert queue.postpones(another)


@pytest.mark.parametrize(
    ("says", "heavy"),
    [
        (ASK * (COMMAND_SLICE + 1), True),
        (ASK * (LITTLE_WORK + 1), True),
        (ASK * LITTLE_WORK, False),
        (b"stats\r\n", True),
        (b"kick 10\r\n", False),
    ],
    ids=["unfinished", "many", "some", "stats", "kick"],
)
def test_a_step_says_whether_the_client_asks_for_much(says: bytes, heavy: bool) -> None:
    bench = Bench()
    client = Runner(bench, "client", heavy=not heavy)
    bench.turn.step(client, says)
    assert client.heavy == heavy
    bench.turn.step(client, b"")
    assert client.heavy == heavy, "the rest of what it said is no other thing"


def test_a_turn_lasts_for_some_passes_while_it_is_only_of_clients_that_ask_for_much() -> None:
    """A commit for each share of time would take a tenth of it."""
    bench = Bench()
    turn, queue = bench.turn, bench.queue
    greedy = [Runner(bench, name, heavy=True) for name in "abcdefghi"]
    little = Runner(bench, "little", heavy=False)
    turn.step(greedy[0], ASK * COMMAND_SLICE)
    assert not queue.lasts(), "the queue is empty"
    turn.end()
    queue.add(greedy[1])
    turn.step(greedy[0], ASK * COMMAND_SLICE)
    bench.now_ns += SHARE_NS
    assert turn.is_pressed()
    assert queue.lasts()
    assert turn.pressure == 0, "the next pass has a share of its own"
    turn.step(little, ASK)
    assert not queue.lasts(), "a client that asks for little waits for the end"
    turn.end()
    for _ in range(2):
        passes = 0
        while queue.lasts():
            passes += 1
        assert passes == PASSES_MAX
        turn.end()
    bench.service.engine.served.append(little.session)
    assert not queue.lasts(), "and so does one whose wait is over"
