"""Clients of a standby, passed through to the node that leads: bytes both ways, as they come.

This module must not know the protocol, nor who leads. A relay begins when its client has sent something, and first
proves which process it has reached: with a line that only one process can answer, which no relay ever passes on.
Invariant: a byte of a client goes to no other process than the one that leads; no more than one read of a client or of
the node waits here to be sent on; whatever ends one side ends the other, behind all that was on its way.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from select import POLLERR, POLLHUP, POLLRDHUP, poll
from time import monotonic
from typing import Any, Final

import gevent
from gevent import socket as green
from gevent.event import Event

CHUNK_BYTES: Final = 1 << 16
LINGER_S: Final = 1.0
"""The input of a client whose node has ended is read and discarded for this long: an immediate close could discard
replies that the client has not read."""
LAST_S: Final = 0.05
"""After the end of a client's input, replies of a node that has ended or leads no more may still come for this long."""
_LOOK_S: Final = 0.005
IDLE_S: Final = 20
"""A connection to the node that is idle for this long is probed, and again each quarter of this time."""
LOST_S: Final = 60
"""A connection is over when its peer has confirmed or taken nothing for this long."""
_GREETING: Final = b"cluster-node "
"""The beginning of the line with which a relay asks for a process. No command of the protocol begins like it."""
_NONCE_BYTES: Final = 16
_PROOF_BYTES: Final = 32
LINE_BYTES: Final = len(_GREETING) + _NONCE_BYTES + 1 + _PROOF_BYTES + 2
"""The length of that line with its end."""
ACCEPTED: Final = b"CLUSTER_CLIENT\r\n"
"""The answer of the node that leads to a header: the node knows the client, and the bytes of the client may follow."""


class Stranger(OSError):
    """Another process than the node that leads has answered."""


class Relays:
    """The connections that are passed through, each to the same process, and the clients that have sent nothing yet."""

    def __init__(self) -> None:
        self._open: dict[int, _Relay] = {}
        self._quiet: dict[int, Any] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._open)

    def await_word(self, client: socket.socket) -> bytes | None:
        """The first bytes that a client has sent, which stay where they are. b"" at its end, None after wake()."""
        self._number += 1
        number = self._number
        event = self._quiet[number] = Event()
        watcher: Any = gevent.get_hub().loop.io(client.fileno(), 1)
        watcher.start(event.set)
        try:
            event.wait()
            return client.recv(LINE_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        finally:
            watcher.stop()
            watcher.close()
            del self._quiet[number]

    def wake(self) -> None:
        """Wakes the greenlets that wait for a client's first bytes."""
        for event in list(self._quiet.values()):
            event.set()

    def run(
        self,
        client: socket.socket,
        node: Any,
        incarnation: str,
        seconds: float,
        header: bytes = b"",
        open: Callable[[socket.socket], Any] | None = None,
    ) -> None:
        """Passes bytes on between a client and a node, until one of them ends, in this greenlet and another. Closes
        both.

        With a `header` the node is first told whose client it is. `open` makes a waiting stream of the client. Raises
        OSError when this process of a node does not answer in time, Stranger when another process answers. Then only
        the node is closed, and nothing was passed on: another node can serve this client.
        """
        self._number += 1
        number = self._number
        relay = self._open[number] = _Relay(client, node, green_of if open is None else open)
        try:
            greet(node, incarnation, seconds)
            if header:
                ask(node, header, ACCEPTED, seconds)
            relay.run()
        finally:
            node.close()
            del self._open[number]

    def close(self, last_s: float = LAST_S) -> None:
        """Ends all connections, as a restart of the server would. What their node has answered by then is passed on."""
        for relay in list(self._open.values()):
            relay.end(socket.SHUT_WR)
            gevent.spawn_later(last_s, relay.end)

    def part(self) -> None:
        """Does what close() does, and waits for the end: the node executes what it was sent, and answers."""
        self.close(LINGER_S)
        end_s = monotonic() + 2 * LINGER_S
        while self._open and monotonic() < end_s:
            gevent.sleep(_LOOK_S)


class _Relay:
    def __init__(self, client: socket.socket, node: Any, open: Callable[[socket.socket], Any]) -> None:
        self._client: Any = client
        self._node = node
        self._open = open

    def run(self) -> None:
        self._client = self._open(self._client)
        forth = gevent.spawn(self._forth)
        try:
            with suppress(OSError):
                while data := self._node.recv(CHUNK_BYTES):
                    self._client.sendall(data)
            self.end()
            with suppress(OSError):
                self._client.shutdown(socket.SHUT_WR)
            forth.join(LINGER_S)
        finally:
            forth.kill()
            self._client.close()

    def _forth(self) -> None:
        """Passes on the client's input. The client still gets the node's answers when the node takes no more input."""
        how = socket.SHUT_WR
        takes = True
        try:
            while data := self._client.recv(CHUNK_BYTES):
                if takes:
                    try:
                        self._node.sendall(data)
                    except OSError:
                        takes = False
        except OSError:
            how = socket.SHUT_RDWR
        with suppress(OSError):
            self._node.shutdown(how)

    def end(self, how: int = socket.SHUT_RDWR) -> None:
        with suppress(OSError):
            self._node.shutdown(how)


def greet(node: Any, incarnation: str, seconds: float) -> None:
    """Returns when the other end has proved to be this process of a node. Raises OSError, and Stranger."""
    nonce = secrets.token_hex(_NONCE_BYTES // 2).encode()
    ask(node, _greeting(incarnation, nonce) + b"\r\n", _answer(incarnation, nonce), seconds)


def ask(node: Any, question: bytes, want: bytes, seconds: float) -> None:
    """Returns when the other end has given this answer. Raises OSError, and Stranger for another one."""
    node.settimeout(seconds)
    node.sendall(question)
    got = b""
    while got != want:
        data = node.recv(len(want) - len(got))
        if not data:
            raise ConnectionResetError("closed")
        got += data
        if not want.startswith(got):
            raise Stranger(f"it says {got.decode(errors='replace').strip()!r}")
    node.settimeout(None)


def greeting_bytes(word: bytes) -> int:
    """The length of the greeting that these first bytes of a client are, with its end of line; 0 for anything else."""
    whole = word.startswith(_GREETING) and word.find(b"\r\n") == LINE_BYTES - 2
    return LINE_BYTES if whole else 0


def answer_to(line: bytes, incarnation: str) -> bytes | None:
    """Returns the answer of this process to a line: None unless the line is a greeting that proves to know it."""
    nonce = line[len(_GREETING) : len(_GREETING) + _NONCE_BYTES]
    if not secrets.compare_digest(line, _greeting(incarnation, nonce)):
        return None
    return _answer(incarnation, nonce)


def _greeting(incarnation: str, nonce: bytes) -> bytes:
    return b"%b%b %b" % (_GREETING, nonce, _proof(incarnation, b"asks " + nonce))


def _answer(incarnation: str, nonce: bytes) -> bytes:
    return b"CLUSTER_NODE %b\r\n" % _proof(incarnation, b"answers " + nonce)


def _proof(incarnation: str, text: bytes) -> bytes:
    return blake2b(text, digest_size=_PROOF_BYTES // 2, key=incarnation.encode()[:64]).hexdigest().encode()


def green_of(sock: socket.socket) -> Any:
    """The same socket for code that waits in its greenlet. The first one is no socket any more."""
    return green.socket(sock.family, sock.type, sock.proto, fileno=sock.detach())


def connect(address: str, seconds: float) -> Any:
    """A socket to HOST:PORT. Raises OSError, also when that takes longer: to look the host up counts, too."""
    host, _, port = address.rpartition(":")
    timeout = gevent.Timeout.start_new(seconds)
    try:
        number = int(port)
        if not 0 < number < 1 << 16:
            raise ValueError("no such port")
        made: Any = green.create_connection((host.strip("[]"), number))
    except gevent.Timeout as over:
        if over is not timeout:
            raise
        raise TimeoutError(f"{address} does not answer for {seconds:g} s") from None
    except ValueError as error:  # another node has told the address, whatever it is
        raise OSError(f"{address!r} is no address: {error}") from error
    finally:
        timeout.close()
    made.settimeout(None)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, IDLE_S),
        (socket.TCP_KEEPINTVL, IDLE_S // 4),
        (socket.TCP_USER_TIMEOUT, LOST_S * 1000),
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def has_gone(sock: socket.socket) -> bool:
    """Returns whether a client that waits has closed its connection, as far as can be known without reading."""
    look = poll()
    look.register(sock.fileno(), POLLRDHUP)
    return any(events & (POLLHUP | POLLERR) for _, events in look.poll(0))
