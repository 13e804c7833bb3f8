"""A socket with TLS that waits as gevent's sockets do: what HTTP needs of one, over a TlsStream.

This module must not know HTTP. The handshake is a part of the first recv(). Invariant: a call ends within the timeout
that was set last, and takes one step of TLS at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from socket import SHUT_WR
from socket import socket as Socket
from time import monotonic
from typing import Any

from gevent.socket import wait_read, wait_write

from geventstalk.serving.handshakes import HANDSHAKE_S, Handshakes
from geventstalk.serving.tls import READ, WRITE, TlsStream


class TlsSocket:
    """Belongs to one greenlet; shutdown() may come from others."""

    def __init__(self, sock: Socket, context: Any, handshakes: Handshakes, yield_now: Callable[[], None]) -> None:
        self._sock = sock
        self._stream = TlsStream(sock, context)
        self._handshakes = handshakes
        self._yield_now = yield_now
        self._shaken = False
        self._end_s = monotonic() + HANDSHAKE_S
        self._timeout_s = HANDSHAKE_S

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self._sock.setsockopt(level, name, value)

    def recv(self, size: int) -> bytes:
        """Returns the bytes that have come, up to this many; no bytes are the end of the input. Raises OSError."""
        if not self._shaken:
            self._shake_hands()
        while True:
            try:
                data = self._stream.get(size)
            except BlockingIOError:
                data = None
            self._send_own()
            if data is not None:
                return data
            self._wait(READ, self._timeout_s)

    def recv_into(self, buffer: bytearray) -> int:
        """Reads and drops bytes, and returns how many. Raises OSError."""
        return len(self.recv(len(buffer)))

    def sendall(self, data: Any) -> None:
        """Raises OSError."""
        if not self._shaken:
            raise ConnectionAbortedError("the handshake is not over")
        view = memoryview(data)
        while view:
            try:
                view = view[self._stream.put(view) :]
            except BlockingIOError:
                self._wait(WRITE, self._timeout_s)

    def shutdown(self, how: int) -> None:
        """Raises OSError."""
        if how == SHUT_WR and self._shaken:
            self._stream.end_output()
        else:
            self._sock.shutdown(how)

    def close(self) -> None:
        if self._shaken:
            self._stream.close()
        else:
            self._sock.close()

    def _shake_hands(self) -> None:
        try:
            while events := self._step():
                self._wait(events, self._end_s - monotonic())
        except (OSError, MemoryError) as error:
            self._handshakes.count_failed(error)
            raise
        self._handshakes.done += 1
        self._shaken = True

    def _step(self) -> int:
        self._yield_now()
        return self._stream.shake_hands()

    def _send_own(self) -> None:
        """Sends the messages of TLS itself, before more is read."""
        while self._stream.unsent:
            self._stream.flush()
            if self._stream.unsent:
                self._wait(WRITE, self._timeout_s)

    def _wait(self, events: int, seconds: float) -> None:
        """Returns when the socket is ready. Raises TimeoutError."""
        wait = wait_read if events == READ else wait_write
        wait(self._sock.fileno(), timeout=max(seconds, 0.0), timeout_exc=TimeoutError("the client is too slow"))
