"""Accepts connections from one listening socket, also when descriptors run out.

This room must not know what is served. Invariant: what cannot be accepted waits in the system's backlog, at no cost.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import gevent
from gevent.server import StreamServer

ACCEPT_RETRY_S = 0.1
SPARE_DESCRIPTORS = 64


class Acceptor(StreamServer):
    """Accepts connections; when there is no descriptor left for one, it waits and tries again."""

    def __init__(
        self, listener: socket.socket, serve: Callable[[socket.socket], None], log: logging.Logger, *, durable: bool
    ) -> None:
        base: Any = super()  # its stubs know neither raw greenlets nor its own hooks
        base.__init__(listener, serve, spawn=gevent.spawn_raw)
        self._log = log
        self._refused = False
        self._spare = SPARE_DESCRIPTORS if durable else 0

    def do_read(self) -> Any:
        """The next connection as (socket,), or None when there is none to be had now."""
        listener: Any = self.socket
        try:
            self._require_descriptors(listener.fileno())
            fd, _ = listener._accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._pause(error)
            return None
        self._refused = False
        sock = socket.socket(listener.family, listener.type, listener.proto, fileno=fd)
        sock.setblocking(False)
        return (sock,)

    def _require_descriptors(self, any_fd: int) -> None:
        """Leaves some descriptors to the journal, whose segments come and go. Raises OSError when no more are left."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = os.dup(any_fd)
        os.close(lowest)
        if self._spare and lowest >= limit - min(self._spare, limit // 4):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _pause(self, error: OSError) -> None:
        if not self._refused:
            self._refused = True
            self._log.warning(
                "cannot accept a connection: %s; those that are connected are served, and it is tried again",
                error.strerror,
            )
        self.stop_accepting()
        base: Any = self
        base._timer = base.loop.timer(ACCEPT_RETRY_S)
        base._timer.start(base._start_accepting_if_started)
