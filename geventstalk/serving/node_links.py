"""Connections between nodes with TLS: who may make them, and whose clients they carry.

This module must not know who leads, nor what users may do. A node proves by its certificate that it is one. In front of
a client's bytes it says who the client is, in a header of the PROXY protocol.
Invariant: what a connection says of its client is believed only behind the certificate of a node.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, NamedTuple

from gevent.socket import wait_read, wait_write

from geventstalk.addresses import peer_of
from geventstalk.cluster.relay import ACCEPTED, LINE_BYTES, Stranger
from geventstalk.config_listeners import CERTIFICATE, IDENTITIES, UNIX_USER, Listener
from geventstalk.serving.proxied import NoHeader, header_of, header_of_node
from geventstalk.serving.tls import READ, WRITE, TlsStream
from geventstalk.serving.users import account_of
from geventstalk.stream import Stream, reason_of

PATIENCE_S: Final = 10.0
"""A node that sends nothing for this long before its client's bytes is hung up on."""
_OWN_BYTES_MAX: Final = 1 << 20
"""A peer is hung up on when TLS itself has more than this to send to it and the peer does not read."""


class PassedOn(NamedTuple):
    """Describes the client of another node: the identities of its listener, its address, and what the client showed."""

    identity: tuple[str, ...] = ()
    peer: str = ""
    names: tuple[str, ...] = ()
    account: str = ""


class StreamSocket:
    """A stream for greenlets that wait: one may read and another write, and any may call shutdown()."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._timeout_s: float | None = None
        self.held = b""

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def recv(self, size: int) -> bytes:
        """Returns bytes that have come; none are the end. Raises OSError."""
        stream = self._stream
        while True:
            if isinstance(stream, TlsStream) and stream.own_bytes > _OWN_BYTES_MAX:
                raise ConnectionAbortedError("it does not read what TLS has to say")
            try:
                return stream.get(size)
            except BlockingIOError:
                pass
            except ssl.SSLError as error:
                raise Stranger(reason_of(error)) from None
            stream.flush()  # not waiting for it: what TLS has to say itself must not hold up the other direction
            self._wait(READ)

    def sendall(self, data: bytes) -> None:
        """Raises OSError."""
        stream = self._stream
        stream.send(data)
        while stream.unsent:
            self._wait(WRITE)
            stream.flush()

    def shutdown(self, how: int) -> None:
        """Raises OSError."""
        if how == socket.SHUT_WR:
            self._stream.end_output()
        else:
            self._stream.socket.shutdown(how)

    def close(self) -> None:
        self._stream.close()

    def read(self, size: int) -> bytes:
        """Returns exactly `size` bytes, and keeps further bytes in `held`. Raises OSError."""
        while len(self.held) < size:
            piece = self.recv(size)
            if not piece:
                raise ConnectionResetError("closed")
            self.held += piece
        data, self.held = self.held[:size], self.held[size:]
        return data

    def _wait(self, events: int) -> None:
        wait = wait_read if events == READ else wait_write
        wait(self._stream.fd, timeout=self._timeout_s, timeout_exc=TimeoutError("it does not answer in time"))


def link_to_node(sock: Any, context: ssl.SSLContext, names: tuple[str, ...], seconds: float) -> StreamSocket:
    """Returns a connection to a node behind its handshake. Raises OSError, and Stranger when it is none of a node."""
    plain = socket.socket(sock.family, sock.type, sock.proto, fileno=sock.detach())
    plain.setblocking(False)
    stream = TlsStream(plain, context, server_side=False)
    ends_s = monotonic() + seconds
    try:
        while events := stream.shake_hands():
            wait = wait_read if events == READ else wait_write
            left_s = max(0.0, ends_s - monotonic())
            wait(stream.fd, timeout=left_s, timeout_exc=TimeoutError("no handshake in time"))
        if not is_node(stream, names):
            raise Stranger("its certificate is not that of a node")
    except BaseException as error:
        plain.close()
        if isinstance(error, ssl.SSLError):
            raise Stranger(reason_of(error)) from None
        raise
    return StreamSocket(stream)


def is_node(stream: Stream, names: tuple[str, ...]) -> bool:
    """Returns whether a connection has shown the certificate of a node."""
    return bool(names) and isinstance(stream, TlsStream) and not set(names).isdisjoint(stream.names_of_peer())


def header_for(stream: Stream, listener: Listener | None) -> bytes:
    """Returns what a node says of a client that it passes on. Raises OSError when that is too much."""
    identity = () if listener is None else listener.identity
    names = stream.names_of_peer() if CERTIFICATE in identity and isinstance(stream, TlsStream) else []
    account = account_of(stream.socket) if UNIX_USER in identity else ""
    peer = stream.peer or peer_of(stream.socket)
    return header_of(peer, json.dumps(PassedOn(identity, peer, tuple(names), account)._asdict()).encode())


def take_client(link: StreamSocket, answer: Callable[[bytes], bytes | None]) -> PassedOn:
    """Answers the greeting of another node, and hears whose client it passes on. Raises OSError.

    `answer` returns the answer to a line, None to one that is no greeting for this process.
    """
    link.settimeout(PATIENCE_S)
    line = link.read(LINE_BYTES)
    reply = answer(line.removesuffix(b"\r\n"))
    if reply is None:
        raise NoHeader("it looks for another node")
    link.sendall(reply)
    peer, told = header_of_node(link.read)
    found = passed_on(told)
    if link.held:
        raise NoHeader("it does not wait for an answer")
    link.sendall(ACCEPTED)
    link.settimeout(None)
    return found._replace(peer=peer or found.peer)


def passed_on(told: bytes) -> PassedOn:
    """Parses a node's description of a client. Raises NoHeader."""
    try:
        found = json.loads(told)
        identity, names = tuple(found["identity"]), tuple(found["names"])
        if set(identity) <= set(IDENTITIES) and all(isinstance(each, str) for each in names):
            return PassedOn(identity, str(found["peer"]), names, str(found["account"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise NoHeader("what it tells of its client cannot be read")
