"""geventstalk/front/parting.py: at the end of a server no client loses an answer that was sent to it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import pytest

from geventstalk.front import parting
from geventstalk.stream import Stream
from tests.support.process import ServerProcess


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over TCP: a close of the first one beside unread input is a reset for the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    server.setblocking(False)
    client.settimeout(30)
    return server, client


def read_all(client: socket.socket) -> bytes:
    got = []
    while data := client.recv(1 << 16):
        got.append(data)
    return b"".join(got)


class Eager:
    """A client that has its puts answered, reads nothing, and sends more behind a reserve than any server reads."""

    PUTS = 100
    MORE_BYTES = 12_000_000

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._left = memoryview(b"stats\r\n" * (self.MORE_BYTES // 7))
        sock.settimeout(60)
        sock.sendall(b"put 0 0 60 1\r\na\r\n" * self.PUTS + b"watch none\r\nignore default\r\nreserve\r\n")
        self._sends = Thread(target=self._go_on)
        self._sends.start()
        while not sock.recv(1 << 16, socket.MSG_PEEK).endswith(b"WATCHING 1\r\n"):
            time.sleep(0.01)

    def _go_on(self) -> None:
        with suppress(OSError):
            while self._left:
                self._left = self._left[self._sock.send(self._left[: 1 << 16]) :]

    def inserted(self) -> int:
        """Returns the number of answers that it finds after the server's end. Nothing was reset meanwhile."""
        self._sends.join(60)
        assert not self._left, "the connection was reset"
        with self._sock:
            return read_all(self._sock).count(b"INSERTED")


def test_who_still_sends_reads_what_was_said() -> None:
    server, client = pair()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) < 10:
            client.sendall(b"b" * 1000)

    with server, client:
        server.sendall(b"answer")
        client.sendall(b"a" * 1000)
        parting.let_read([Stream(server)], pause)
        server.close()
        assert read_all(client) == b"answer"
    assert 10 < len(pauses) <= parting.QUIET + 20, "it ends once nothing comes any more"


def test_a_closed_client_is_waited_for_no_longer_and_a_busy_one_not_for_ever() -> None:
    server, client = pair()
    pauses: list[float] = []
    with server:
        client.close()
        parting.let_read([Stream(server)], pauses.append)
    assert len(pauses) <= 1
    server, client = pair()
    with server, client:
        parting.let_read([Stream(server)], lambda seconds: client.sendall(b"more"))
        assert read_all(client) == b""


@pytest.mark.parametrize(
    ("takes", "looks"), [([3, 2, 1, 0], 4), ([5] * 1000, parting.QUIET + 1), (list(range(1000, 0, -1)), parting.LINGER)]
)
def test_what_is_left_is_sent_while_clients_take_it(takes: list[int], looks: int) -> None:
    left, asked = iter(takes), 0

    def flush() -> int:
        nonlocal asked
        asked += 1
        return next(left)

    parting.send_rest(flush, lambda: True, lambda seconds: None)
    assert asked == looks


def test_nothing_is_sent_when_it_may_not_be() -> None:
    def flush() -> int:
        raise AssertionError

    parting.send_rest(flush, lambda: False, lambda seconds: None)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--io-processes", "2")], ids=["alone", "fronts"])
def test_a_stop_takes_no_answer_away(flags: tuple[str, ...], start_server: Callable[..., ServerProcess]) -> None:
    """The client's input is not read to its end, for its reserve waits: to close beside that was a reset."""
    server = start_server(*flags)
    eager = Eager(server.connect())
    assert server.stop() == 0
    assert eager.inserted() == Eager.PUTS


@pytest.mark.slow
def test_a_stop_sends_what_the_client_has_yet_to_take(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("-z", "10000000")
    body = b"x" * 8_000_000
    with server.connect() as client:
        client.settimeout(30)
        client.sendall(b"put 0 0 60 %d\r\n%b\r\npeek 1\r\n" % (len(body), body))
        got = client.recv(100)
        server.process.terminate()
        got += read_all(client)
        assert server.process.wait(30) == 0
    assert len(got) == len(b"INSERTED 1\r\nFOUND 1 8000000\r\n") + len(body) + 2
