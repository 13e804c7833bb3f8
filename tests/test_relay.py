"""geventstalk/cluster/relay.py: how a relay proves whom it has reached, and what it passes on."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Protocol

import gevent
import pytest

from geventstalk.cluster import node as node_of
from geventstalk.cluster import relay
from geventstalk.cluster.relay import green_of
from geventstalk.cluster.wants import OPEN, REFUSED, SILENT
from geventstalk.wire.protocol import R_UNKNOWN_COMMAND
from tests.support.process import free_port


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


class Answerer:
    """Something that listens: it answers the first line of each connection by `reply`, and then gathers what comes."""

    def __init__(self, listener: Any, reply: Callable[[bytes], bytes]) -> None:
        host, port = listener.getsockname()
        self.address = f"{host}:{port}"
        self.got: list[bytes] = []
        self.lines = 0
        self._reply = reply
        self._listener = green_of(listener)
        self._greenlets: list[Any] = [gevent.spawn(self._accept)]

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            self._greenlets.append(gevent.spawn(self._serve, sock))

    def _serve(self, sock: Any) -> None:
        with sock:
            data = b""
            while not data.endswith(b"\r\n"):
                piece = sock.recv(1 << 16)
                if not piece:
                    return
                data += piece
            self.lines += 1
            sock.sendall(self._reply(data[:-2]))
            while piece := sock.recv(1 << 16):
                self.got.append(piece)
                sock.sendall(b"got " + piece)

    def close(self) -> None:
        gevent.killall(self._greenlets)
        self._listener.close()


def proves(incarnation: str) -> Callable[[bytes], bytes]:
    return lambda line: relay.answer_to(line, incarnation) or R_UNKNOWN_COMMAND


class Listening(Protocol):
    def __call__(self, reply: Callable[[bytes], bytes]) -> Answerer: ...


@pytest.fixture
def listening(listener: socket.socket) -> Iterator[Listening]:
    made: list[Answerer] = []

    def make(reply: Callable[[bytes], bytes]) -> Answerer:
        made.append(Answerer(listener, reply))
        return made[0]

    yield make
    for each in made:
        each.close()


def test_a_probe(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_of, "_PROBE_S", 10.0)
    there = listening(proves("b.1"))
    assert node_of._probe(there.address, "b.1") == OPEN
    assert node_of._probe(there.address, "b.2") == SILENT, "a process listens there, and it is another one"
    assert node_of._probe(f"127.0.0.1:{free_port()}", "b.1") == REFUSED


# Bug: With a wrong --advertise a standby passed clients on to itself, or to another beanstalk server, which answered.
@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(lambda line: R_UNKNOWN_COMMAND, id="another beanstalk server, or an old node"),
        pytest.param(lambda line: b"INSERTED 1\r\n", id="it takes anything"),
        pytest.param(lambda line: line + b"\r\n", id="an echo"),
        pytest.param(proves("another"), id="another node"),
        pytest.param(lambda line: b"HTTP/1.1 400 Bad Request\r\n\r\n", id="HTTP"),
    ],
)
def test_a_stranger_gets_no_byte_of_a_client(listening: Listening, reply: Callable[[bytes], bytes]) -> None:
    stranger = listening(reply)
    ours, theirs = socket.socketpair()
    ours.sendall(b"put 0 0 60 1\r\na\r\n")
    with pytest.raises(relay.Stranger), ours, theirs:
        relay.Relays().run(theirs, relay.connect(stranger.address, 5), "b.1", 5)
    gevent.sleep(0.01)
    assert stranger.got == [] and stranger.lines == 1


def test_a_node_that_does_not_answer_is_waited_for_no_longer_than_asked(listener: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    host, port = listener.getsockname()
    with pytest.raises(TimeoutError), ours, theirs:
        relay.Relays().run(theirs, relay.connect(f"{host}:{port}", 5), "b.1", 0.02)


def test_a_greeting_is_known_by_one_process_and_its_answer_shows_nothing() -> None:
    line = relay._greeting("b.1", b"0123456789abcdef")
    answer = relay.answer_to(line, "b.1")
    assert answer is not None and b"b.1" not in line + answer
    for other in (b"", b"put 0 0 60 1", b"cluster-node", line[:-1], line + b"0", line.upper()):
        assert relay.answer_to(other, "b.1") is None
    assert relay.answer_to(line, "b.2") is None
    assert relay.answer_to(relay._greeting("b.1", b"0123456789abcdeg"), "b.1") != answer
    whole = line + b"\r\n"
    assert relay.greeting_bytes(whole) == len(whole) <= 224
    assert not any(relay.greeting_bytes(other) for other in (line, b"reserve\r\n", b"x" + whole, line + b"0\r\n"))


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("this user may not have 2,048 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def high(sock: Any) -> Any:
    """The same socket on a descriptor that select() cannot have."""
    fd = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)
    made = type(sock)(sock.family, sock.type, sock.proto, fileno=fd)
    sock.close()
    return made


# Bug: select takes no descriptor above 1,023.
def test_a_client_is_passed_through_whatever_its_descriptor_is(listening: Listening, many_descriptors: None) -> None:
    """The 507th client of a standby ended it."""
    there = listening(proves("b.1"))
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    relays = relay.Relays()
    theirs, node = high(theirs), high(relay.connect(there.address, 5))
    ours.sendall(b"stats\r\n")
    assert relays.await_word(theirs) == b"stats\r\n"
    running = gevent.spawn(relays.run, theirs, node, "b.1", 5)
    with green_of(ours) as client:
        assert client.recv(100) == b"got stats\r\n"
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    running.get(timeout=20)
    assert len(relays) == 0


def test_who_has_sent_nothing_waits_and_can_be_woken() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    relays = relay.Relays()
    waiting = gevent.spawn(relays.await_word, theirs)
    gevent.sleep(0.001)
    relays.wake()
    assert waiting.get(timeout=20) is None
    ours.close()
    assert relays.await_word(theirs) == b""
    theirs.close()


def test_answers_that_were_sent_reach_a_client_that_goes_on_sending(listener: socket.socket) -> None:
    """The node has ended behind its last answer. To close at once would be a reset, which takes the answer away."""
    left = b"x" * (1 << 20)

    def serve() -> None:
        with green_of(listener) as accepting:
            node, _ = accepting.accept()
        node.sendall(proves("b.1")(node.recv(100)[:-2]))
        node.recv(100)
        node.sendall(left)
        node.shutdown(socket.SHUT_WR)
        while node.recv(1 << 16):
            pass
        node.close()

    host, port = listener.getsockname()
    serving = gevent.spawn(serve)
    gevent.sleep(0)
    with socket.create_server(("127.0.0.1", 0)) as way_in:
        ours = socket.create_connection(way_in.getsockname())
        theirs, _ = way_in.accept()
    theirs.setblocking(False)
    running = gevent.spawn(relay.Relays().run, theirs, relay.connect(f"{host}:{port}", 5), "b.1", 5)
    with green_of(ours) as client:
        client.settimeout(20)
        for _ in range(20):
            client.sendall(b"stats\r\n" * 1000)
            gevent.sleep(0.001)
        got = b""
        while data := client.recv(1 << 16):
            got += data
    assert len(got) == len(left)
    running.get(timeout=20)
    serving.get(timeout=20)


def test_answers_that_are_on_their_way_reach_a_client_when_another_node_leads(listener: socket.socket) -> None:
    """The node has handed over behind its last answer, which comes a moment later than that another one leads."""

    def serve() -> None:
        with green_of(listener) as accepting:
            node, _ = accepting.accept()
        node.sendall(proves("b.1")(node.recv(100)[:-2]))
        assert node.recv(100) == b"stats\r\n" and node.recv(100) == b""
        node.sendall(b"late")
        node.close()

    host, port = listener.getsockname()
    serving = gevent.spawn(serve)
    gevent.sleep(0)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    relays = relay.Relays()
    running = gevent.spawn(relays.run, theirs, relay.connect(f"{host}:{port}", 5), "b.1", 5)
    with green_of(ours) as client:
        client.settimeout(20)
        client.sendall(b"stats\r\n")
        while not serving.ready() and not len(relays):
            gevent.sleep(0)
        gevent.sleep(0.01)  # it is passed on by now, or is before the end of what the node gets
        ending = gevent.spawn(relays.part)
        assert client.recv(100) == b"late" and client.recv(100) == b""
    running.get(timeout=20)
    ending.get(timeout=20)
    serving.get(timeout=20)
    assert len(relays) == 0


def test_a_way_to_the_node_notices_that_it_is_lost(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    with closing(relay.connect(f"{host}:{port}", 5)) as node:
        assert node.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found = [
            node.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        ]
    assert found == [relay.IDLE_S, relay.IDLE_S // 4, relay.LOST_S * 1000]
