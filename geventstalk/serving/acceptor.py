"""Accepts connections from one listening socket, also when file descriptors run out.

This module must not know what is served. Invariant: a client that cannot be accepted waits in the backlog of the system
and costs the server nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any

import gevent
from gevent.server import StreamServer

from geventstalk.serving.address_shares import AddressShares
from geventstalk.serving.fd_limits import Descriptors

ACCEPT_RETRY_S = 0.1
TELL_SELDOM_S = 60.0
CANNOT_ACCEPT = "cannot accept a connection: %s; connected clients are served, and new ones have to wait"


class Acceptor(StreamServer):
    """Accepts connections. When no descriptor is left, the acceptor pauses and then tries again."""

    max_accept = 16  # in one pass of the event loop: to accept 100 connections takes 10 ms

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket], None],
        descriptors: Descriptors,
        log: logging.Logger,
        shares: AddressShares | None = None,
    ) -> None:
        """`serve` gives the client's descriptor back when it has closed the socket.

        With `shares` no address has more than its share of connections; others are closed at once.
        """
        base: Any = super()  # its stubs know neither raw greenlets nor its own hooks
        base.__init__(listener, serve if shares is None else self._serve_counted, spawn=gevent.spawn_raw)
        self._serve = serve
        self._shares = shares
        self._log = log
        self._refused = False
        self._told_s = -TELL_SELDOM_S
        self.tell_every_s = 0.0  # where connections make room for others, that ends and begins again all the time
        self._descriptors = descriptors

    def do_read(self) -> Any:
        """The arguments that serve the next connection, or None when none can be accepted now."""
        listener: Any = self.socket
        if not self._descriptors.take():
            if _somebody_waits(listener.fileno()):
                self._pause(self._descriptors.shortage)
            return None
        try:
            fd, peer = listener._accept()
        except OSError as error:
            self._descriptors.give_back()
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._pause(os.strerror(error.errno))
            return None
        self._refused = False
        sock = socket.socket(listener.family, listener.type, listener.proto, fileno=fd)
        sock.setblocking(False)
        if self._shares is None:
            return (sock,)
        host = peer[0] if peer and listener.family != socket.AF_UNIX else ""
        if self._shares.enter(host):
            return sock, host
        sock.close()
        self._shares.leave(host)
        self._descriptors.give_back()
        return None

    def _serve_counted(self, sock: socket.socket, host: str) -> None:
        assert self._shares is not None
        try:
            self._serve(sock)
        finally:
            self._shares.leave(host)

    def _pause(self, why: str) -> None:
        now_s = monotonic()
        if not self._refused and now_s >= self._told_s + self.tell_every_s:
            self._told_s = now_s
            self._refused = True
            self._log.warning(CANNOT_ACCEPT, why)
        self.stop_accepting()
        base: Any = self
        base._timer = base.loop.timer(ACCEPT_RETRY_S)
        base._timer.start(base._start_accepting_if_started)


def _somebody_waits(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
