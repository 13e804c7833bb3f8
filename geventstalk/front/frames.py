"""The frames on the link between a front-end process and the engine's process: a client, a kind and bytes.

This module must not know sockets nor jobs. A client is a number that its front gives it, and reuses after four billion
others; 0 is no client. In both directions a client may have only as many bytes under way as the receiver allowed, so no
client can fill the link.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

HEAD_BYTES: Final = 8
"""The number of a client in 4 bytes, the count of the bytes that follow in 3, and the kind; the low byte first."""
_COUNT_BYTES: Final = 4
CLIENTS_MAX: Final = (1 << 32) - 1
"""The greatest number of a client."""
FRAME_BYTES_MAX: Final = 1 << 18
"""More bytes never follow a head."""

# From a front to the engine.
HELLO: Final = 1  # the front is ready
OPEN: Final = 2  # a client has come; its address and where it came in follow, with a line feed in between
DATA: Final = 3  # what a client sent
END: Final = 4  # a client sends nothing more, and all that it sent has been handed on
HANGUP: Final = 5  # the same, but there is more that it sent before, for which the engine gave no room yet
GONE: Final = 6  # a client is lost, or its connection is closed
TAKEN: Final = 7  # this many more bytes of replies went into a client's socket
REFUSED: Final = 8  # a connection that waits cannot be accepted; the reason follows when it was not told before
# From the engine to a front.
ACCEPT: Final = 9  # accept connections, also those that wait already
STOP: Final = 10  # accept no more
REPLY: Final = 11  # bytes for a client
MORE: Final = 12  # the client may send this many more bytes; without a client: this many more may be accepted
CLOSE: Final = 13  # close the client's connection once all replies have gone into its socket
SHUT: Final = 14  # shut the connection down, as if the client had hung up

ACCEPTS: Final = 4
"""The clients that one of several fronts may accept at first. Each client that has come allows one more."""
IN_BYTES: Final = 1 << 14
"""Bytes that a client may have under way to the engine at first."""
IN_BYTES_MAX: Final = 1 << 16
"""The same for a client that uses all of that."""
OUT_BYTES_MAX: Final = 1 << 15
"""Bytes of a client's replies that may be under way to its socket. Its front reports each half of it."""


class FrameError(Exception):
    """The input is no frame."""


def head(client: i64, kind: i64, count: i64) -> bytes:
    """Returns the head of a frame of this size. `kind` is less than 128: compiled, the head is a signed integer."""
    whole: int = kind << 56 | count << 32 | client
    return whole.to_bytes(HEAD_BYTES, "little")


def frame(client: int, kind: int, data: bytes = b"") -> bytes:
    """Returns a whole frame."""
    return head(client, kind, len(data)) + data


def count_frame(client: int, kind: int, count: int) -> bytes:
    """Returns a frame with a number."""
    return head(client, kind, _COUNT_BYTES) + count.to_bytes(_COUNT_BYTES, "little")


def count_of(data: bytes) -> int:
    """Returns the number of a frame. Raises FrameError."""
    if len(data) != _COUNT_BYTES:
        raise FrameError(f"a number of {len(data)} bytes")
    return int.from_bytes(data, "little")


class Cutter:
    """Cuts a stream into frames: after feed(), each take() sets `client`, `kind` and `data`."""

    def __init__(self) -> None:
        self.client = 0
        self.kind: i64 = 0
        self.data = b""
        self._stream = b""
        self._at: i64 = 0

    def feed(self, stream: bytes) -> None:
        """Adds input. All whole frames before it must have been taken."""
        left = self._stream[self._at :]
        self._stream = left + stream if left else stream
        self._at = 0

    def take(self) -> bool:
        """Takes the next whole frame. Returns whether there was one. Raises FrameError."""
        stream = self._stream
        at = self._at
        begin = at + HEAD_BYTES
        size: i64 = len(stream)
        if begin > size:
            return False
        low: i64 = stream[at + 4]
        middle: i64 = stream[at + 5]
        high: i64 = stream[at + 6]
        count = low | middle << 8 | high << 16
        if count > FRAME_BYTES_MAX:
            raise FrameError(f"a frame of {count} bytes")
        end = begin + count
        if end > size:
            return False
        low = stream[at]
        middle = stream[at + 1]
        high = stream[at + 2]
        top: i64 = stream[at + 3]
        self.client = low | middle << 8 | high << 16 | top << 24
        self.kind = stream[at + 7]
        self.data = stream[begin:end]
        self._at = end
        return True
