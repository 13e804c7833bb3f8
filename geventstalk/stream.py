"""A stream: bytes both ways without waiting, and the bytes that were sent and that the receiver has not taken yet.

This module must not know the meaning of the bytes, nor how an owner waits until a socket is ready: the owner of a
stream calls again then. A derived class has another way to the receiver in put(), and to the sender in get().
Invariant: bytes leave in the order in which they were sent, each once, and `unsent` is always the same list.
"""

from __future__ import annotations

import os
from contextlib import suppress
from socket import SHUT_RDWR, SHUT_WR
from socket import socket as Socket
from typing import Any, Final

from mypy_extensions import mypyc_attr

ALL: Final = 1 << 60
"""More bytes than any piece has."""
_read: Final = os.read  # found at once, and not by its name in two dicts
_write: Final = os.write


def reason_of(error: BaseException) -> str:
    """Returns why a system call or TLS failed, in the words of the system or of OpenSSL where they have some."""
    if hasattr(error, "library"):  # an error of ssl, whose import takes 10 ms
        text = getattr(error, "verify_message", None) or getattr(error, "reason", None)
        return str(text).replace("_", " ").lower() if text else "no PEM of this kind, or an encrypted key"
    return str(getattr(error, "strerror", None) or error)


@mypyc_attr(allow_interpreted_subclasses=True)
class Output:
    """Bytes on their way to a receiver that takes some at a time."""

    def __init__(self) -> None:
        self.unsent: Final[list[memoryview]] = []
        self.done: Any = None  # called with each object of `unsent` when all of it went

    def put(self, data: Any) -> int:
        """Hands over some of these bytes, and returns how many. The caller comes again with the others.

        Raises BlockingIOError when none can go now, and OSError when the receiver is lost.
        """
        raise NotImplementedError

    def send(self, data: bytes, most: int = ALL) -> int:
        """Sends what the receiver takes now, and keeps the rest. Returns how many bytes went. Raises OSError."""
        unsent = self.unsent
        if unsent:
            unsent.append(memoryview(data))
            return 0
        try:
            sent = self.put(data if len(data) <= most else memoryview(data)[:most])
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            unsent.append(memoryview(data)[sent:])
        return sent

    def flush(self, most: int = ALL) -> int:
        """Sends what the receiver takes of the bytes that are left. Returns how many went. Raises OSError."""
        unsent = self.unsent
        went = 0
        try:
            while unsent and went < most:
                piece = unsent[0]
                sent = self.put(piece if len(piece) <= most - went else piece[: most - went])
                went += sent
                if sent < len(piece):
                    unsent[0] = piece[sent:]
                    break
                del unsent[0]
                if self.done is not None:
                    self.done(piece.obj)
        except BlockingIOError:
            pass
        return went

    def forget(self) -> None:
        """Drops the bytes that are left."""
        unsent = self.unsent
        if self.done is not None:
            for piece in unsent:
                self.done(piece.obj)
        unsent.clear()

    @property
    def unsent_bytes(self) -> int:
        """Returns how many bytes are left."""
        return sum([len(piece) for piece in self.unsent])


@mypyc_attr(allow_interpreted_subclasses=True)
class Stream(Output):
    """A connected socket that does not block."""

    def __init__(self, sock: Socket) -> None:
        super().__init__()
        self.socket: Final = sock
        self.fd: Final[Any] = sock.fileno()  # Any: as an object, as read() wants it
        self.holds_input = False  # whether get() has something without the socket having it
        self.peer = ""  # the other end, where that is not the socket's
        self.passed_on: Any = None  # what another node says of a client that it has passed on

    def get(self, count: Any) -> bytes:
        """Returns bytes that have come, at most `count`; no bytes are the end of the input.

        Raises BlockingIOError when there are none now, OSError when the connection is lost, and MemoryError.
        """
        return _read(self.fd, count)

    def put(self, data: Any) -> int:
        return _write(self.fd, data)

    def end_output(self) -> None:
        """Tells the peer that nothing follows. Raises OSError where the peer has gone."""
        self.socket.shutdown(SHUT_WR)

    def hang_up(self) -> None:
        """Ends both directions. The owner finds the end of the input, behind the bytes that have come."""
        with suppress(OSError):  # the other end was quicker
            self.socket.shutdown(SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket. No watcher may use it any more."""
        self.socket.close()
