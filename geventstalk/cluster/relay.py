"""Clients of a standby, passed through to the node that leads: bytes both ways, as they come.

This room must not know the protocol, nor who leads. Invariant: no more than one read of a client or of the node waits
here to be sent on, and whatever ends one side ends the other.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from select import POLLERR, POLLHUP, POLLRDHUP, poll
from typing import Any, Final

import gevent
from gevent import select
from gevent import socket as green

CHUNK_BYTES: Final = 1 << 16


class Relays:
    """All connections that are passed through, each to the same process."""

    def __init__(self) -> None:
        self._open: dict[int, _Relay] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._open)

    def run(self, client: Any, node: Any) -> bool:
        """Passes on between these two, until one of them ends, in this greenlet and another. Closes both.

        Returns False when the node has ended before anything was passed on. Then it closes the node alone: another node
        can serve this client.
        """
        self._number += 1
        number = self._number
        relay = self._open[number] = _Relay(client, node)
        try:
            return relay.run()
        finally:
            del self._open[number]

    def close(self) -> None:
        """Ends all of them, as a restart of the server would."""
        for relay in list(self._open.values()):
            relay.end()


class _Relay:
    def __init__(self, client: Any, node: Any) -> None:
        self._client = client
        self._node = node
        self._begun = False

    def run(self) -> bool:
        if not self._begins():
            self._node.close()
            return False
        self._begun = True
        back = gevent.spawn(self._pass_on, self._node, self._client)
        try:
            if self._pass_on(self._client, self._node):
                # The client sends nothing more. It still gets what the node answers to what it has sent.
                with suppress(OSError):
                    self._node.shutdown(socket.SHUT_WR)
            else:
                self.end()
            back.join()
        finally:
            back.kill()
            self._client.close()
            self._node.close()
        return True

    def _begins(self) -> bool:
        """Waits until there is something to pass on. Returns whether the node is there by then."""
        try:
            select.select([self._client, self._node], [], [])
            if not select.select([self._node], [], [], 0)[0]:
                return True
            return bool(self._node.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _pass_on(self, source: Any, sink: Any) -> bool:
        """Returns whether the source has ended, and not the sink. An end of the node ends the client, too."""
        try:
            while data := source.recv(CHUNK_BYTES):
                sink.sendall(data)
        except OSError:
            self.end()
            return False
        if source is self._node:
            self.end()
        return True

    def end(self) -> None:
        for sock in (self._client, self._node) if self._begun else (self._node,):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def green_of(sock: socket.socket) -> Any:
    """The same socket for code that waits in its greenlet. The first one is no socket any more."""
    return green.socket(sock.family, sock.type, sock.proto, fileno=sock.detach())


def plain_of(sock: Any) -> socket.socket:
    """The way back."""
    made = socket.socket(sock.family, sock.type, sock.proto, fileno=sock.detach())
    made.setblocking(False)
    return made


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
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return made


def has_gone(sock: Any) -> bool:
    """Whether a client that waits has closed its connection, as far as can be known without reading."""
    look = poll()
    look.register(sock.fileno(), POLLRDHUP)
    return any(events & (POLLHUP | POLLERR) for _, events in look.poll(0))
