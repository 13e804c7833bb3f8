"""Accepts connections from one listening socket, also when file descriptors run out.

This room must not know what is served. Invariant: a client that cannot be accepted waits in the backlog of the system
and costs the server nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
from collections.abc import Callable
from typing import Any

import gevent
from gevent.server import StreamServer

from geventstalk.serving.descriptors import Descriptors

ACCEPT_RETRY_S = 0.1


class Acceptor(StreamServer):
    """Accepts connections. When no descriptor is left, the acceptor pauses and then tries again."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket], None],
        descriptors: Descriptors,
        log: logging.Logger,
    ) -> None:
        """`serve` gives the client's descriptor back when it has closed the socket."""
        base: Any = super()  # its stubs know neither raw greenlets nor its own hooks
        base.__init__(listener, serve, spawn=gevent.spawn_raw)
        self._log = log
        self._refused = False
        self._descriptors = descriptors

    def do_read(self) -> Any:
        """The next connection as (socket,), or None when none can be accepted now."""
        listener: Any = self.socket
        if not self._descriptors.take():
            if _somebody_waits(listener.fileno()):
                self._pause(errno.EMFILE)
            return None
        try:
            fd, _ = listener._accept()
        except OSError as error:
            self._descriptors.give_back()
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._pause(error.errno)
            return None
        self._refused = False
        sock = socket.socket(listener.family, listener.type, listener.proto, fileno=fd)
        sock.setblocking(False)
        return (sock,)

    def _pause(self, number: int) -> None:
        if not self._refused:
            self._refused = True
            self._log.warning(
                "cannot accept a connection: %s; connected clients are served, and new ones have to wait",
                os.strerror(number),
            )
        self.stop_accepting()
        base: Any = self
        base._timer = base.loop.timer(ACCEPT_RETRY_S)
        base._timer.start(base._start_accepting_if_started)


def _somebody_waits(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
