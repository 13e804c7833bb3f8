"""What goes over the link between a front-end process and the engine's process: frames of a client, a kind and bytes.

This room must not know sockets nor jobs: it makes frames, and cuts what has come into frames.
A client is a number that its front gives it, never the same one twice; 0 is no client. Both ways a client may have only
so many bytes under way as the receiver allowed, so no client can fill the link.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

HEAD: Final = Struct("<II")
"""The number of a client; the kind in the upper 8 bits and the count of the bytes that follow in the lower 24."""
_HEAD_BYTES: Final = 8
_COUNT: Final = Struct("<I")
FRAME_BYTES_MAX: Final = 1 << 18
"""More bytes never follow a head."""

# From a front to the engine.
HELLO: Final = 1  # the front is ready
OPEN: Final = 2  # a client has come; its address and where it came in follow, with a line feed in between
DATA: Final = 3  # what a client sent
END: Final = 4  # a client sends nothing more, and all that it sent has been handed on
HANGUP: Final = 5  # the same, but there is more that it sent before, for which the engine gave no room yet
GONE: Final = 6  # a client is lost, or its connection is closed
TAKEN: Final = 7  # so many more bytes of replies went into a client's socket
TELL: Final = 8  # a line for the log
# From the engine to a front.
ACCEPT: Final = 9  # accept connections; look whether somebody waits
REST: Final = 10  # accept no more
REPLY: Final = 11  # bytes for a client
MORE: Final = 12  # the client may send so many more bytes; without a client: so many more may be accepted
CLOSE: Final = 13  # close the client's connection once all replies have gone into its socket
SHUT: Final = 14  # shut the connection down, as if the client had hung up

ACCEPTS: Final = 4
"""How many clients one of several fronts may accept from its beginning on; each that has come gives another one."""
IN_BYTES: Final = 1 << 14
"""How many bytes a client may have under way to the engine from its beginning on."""
IN_BYTES_MAX: Final = 1 << 16
"""The same for a client that uses all of that."""
OUT_BYTES_MAX: Final = 1 << 15
"""How many bytes of replies a client may have under way that have not gone into its socket. Its front tells of
those that have when they are half as many."""


class FrameError(Exception):
    """What has come is no frame."""


def frame(client: int, kind: int, data: bytes = b"") -> bytes:
    """A whole frame."""
    return HEAD.pack(client, kind << 24 | len(data)) + data


def count_frame(client: int, kind: int, count: int) -> bytes:
    """A frame that tells a number."""
    return HEAD.pack(client, kind << 24 | 4) + _COUNT.pack(count)


def count_of(data: bytes) -> int:
    """The number that a frame tells. Raises FrameError."""
    if len(data) != 4:
        raise FrameError(f"a number of {len(data)} bytes")
    return int.from_bytes(data, "little")


class Cutter:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._left = b""

    def cut(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """The frames that are whole with these bytes: client, kind, bytes. Raises FrameError."""
        if self._left:
            data = self._left + data
        frames: list[tuple[int, int, bytes]] = []
        at = 0
        size = len(data)
        while size - at >= _HEAD_BYTES:
            client, word = HEAD.unpack_from(data, at)
            count = word & 0xFFFFFF
            if count > FRAME_BYTES_MAX:
                raise FrameError(f"a frame of {count} bytes")
            begin = at + _HEAD_BYTES
            end = begin + count
            if end > size:
                break
            frames.append((client, word >> 24, data[begin:end]))
            at = end
        self._left = data[at:]
        return frames
