"""The end of connections, behind all that was said to their clients.

To close a socket whose input was not read has the system reset the connection, and a reset takes away from the client
what it has not read yet. So each connection ends in one direction first, and its input is thrown away meanwhile.
This module must not know what the bytes mean. Time is counted in looks, so that a process that stands still, or has a
busy machine, waits no less for its clients. Invariant: no client holds up the end for longer than LINGER looks.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from geventstalk.stream import Stream

LOOK_S: Final = 0.002
QUIET: Final = 100
"""After this many looks in which no client has taken or sent anything, nothing is on its way to the others either."""
LINGER: Final = 500
_CHUNK_BYTES: Final = 1 << 16


def send_rest(flush: Callable[[], int], may: Callable[[], bool], pause: Callable[[float], None]) -> None:
    """Has flush() called, which returns how many bytes are left, while it may, and while clients take some of them."""
    left = quiet = 0
    for _ in range(LINGER):
        if not may():
            return
        before, left = left, flush()
        quiet = quiet + 1 if left == before else 0
        if not left or quiet == QUIET:
            return
        pause(LOOK_S)


def let_read(streams: Sequence[Stream], pause: Callable[[float], None]) -> None:
    """Shuts the sending side of these streams down, and waits until their clients have closed. They stay open."""
    looks = select.poll()
    left: dict[int, Stream] = {}
    for each in streams:
        with suppress(OSError):  # the client has gone
            each.end_output()
            left[each.fd] = each
            looks.register(each.fd, select.POLLIN)
    quiet = 0
    for _ in range(LINGER):
        if not left or quiet == QUIET:
            return
        ready = looks.poll(0)
        quiet = 0 if ready else quiet + 1
        for fd, _ in ready:
            if not _throw_away(left[fd]):
                looks.unregister(left.pop(fd).fd)
        pause(LOOK_S)


def _throw_away(stream: Stream) -> bool:
    """Reads the input that is there. Returns False at the end of the input."""
    try:
        return bool(stream.get(_CHUNK_BYTES))
    except BlockingIOError:
        return True
    except OSError:
        return False
