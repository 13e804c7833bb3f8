"""Accepts connections from one listening socket, also when file descriptors run out.

This room must not know what is served. Invariant: a client that cannot be accepted waits in the backlog of the system
and costs the server nothing.
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
JOURNAL_DESCRIPTORS = 64
"""So many descriptors are kept for a journal. An open segment needs four: the database, SQLite's two files beside it,
and one to sync the WAL. While one segment is written, up to a dozen others are prepared, sealed, compacted or read."""
OWN_DESCRIPTORS = 16
"""The server has so many open before any client comes: its log, the event loop, some listeners, the journal's lock."""
DESCRIPTORS_MIN = 2 * JOURNAL_DESCRIPTORS + OWN_DESCRIPTORS
"""With fewer descriptors than this, the journal gets half of them and the clients get the other half."""
DESCRIPTORS_MAX = 1 << 20
"""The soft limit is not raised beyond this. Some systems allow a billion, and no server has so many clients."""


def raise_limit(log: logging.Logger, *, durable: bool) -> None:
    """Raises the soft limit of descriptors as far as the system allows, and warns when it is low for a journal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of open files stays %d: %s", soft, error)
        else:
            log.info("raised the limit of open files from %d to %d", soft, wanted)
            soft = wanted
    if durable and soft != resource.RLIM_INFINITY and soft < DESCRIPTORS_MIN:
        log.warning(
            "the limit of open files is %d; with less than %d, few clients fit beside the journal",
            soft,
            DESCRIPTORS_MIN,
        )


class Acceptor(StreamServer):
    """Accepts connections. When no descriptor is left, the acceptor pauses and then tries again."""

    def __init__(
        self, listener: socket.socket, serve: Callable[[socket.socket], None], log: logging.Logger, *, durable: bool
    ) -> None:
        base: Any = super()  # its stubs know neither raw greenlets nor its own hooks
        base.__init__(listener, serve, spawn=gevent.spawn_raw)
        self._log = log
        self._refused = False
        self._spare = JOURNAL_DESCRIPTORS if durable else 0

    def do_read(self) -> Any:
        """The next connection as (socket,), or None when none can be accepted now."""
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
        """Raises OSError when the only descriptors left are those kept for the journal, whose segments come and go."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = os.dup(any_fd)
        os.close(lowest)
        if self._spare and lowest >= limit - min(self._spare, limit // 2):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _pause(self, error: OSError) -> None:
        if not self._refused:
            self._refused = True
            self._log.warning(
                "cannot accept a connection: %s; connected clients are served, and new ones have to wait",
                error.strerror,
            )
        self.stop_accepting()
        base: Any = self
        base._timer = base.loop.timer(ACCEPT_RETRY_S)
        base._timer.start(base._start_accepting_if_started)
