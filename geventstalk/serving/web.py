"""HTTP beside the protocol: its listening sockets accept, its connections are served, and its garbage is collected.

The server imports this module only where --http is given. This module must not know what HTTP serves: geventstalk/http
does. Invariant: HTTP accepts few connections at once, so that clients of the protocol have their turn in between.
"""

from __future__ import annotations

import logging
import socket
from typing import Any, Final

from gevent import socket as gevent_socket

from geventstalk.addresses import peer_of
from geventstalk.config import Settings
from geventstalk.http.backend import Backend
from geventstalk.http.site import CONNECTIONS_MAX, Site
from geventstalk.serving.acceptor import TELL_SELDOM_S, Acceptor
from geventstalk.serving.fd_limits import Descriptors, Share
from geventstalk.serving.handshakes import Handshakes
from geventstalk.serving.listen import describe, full_address_of
from geventstalk.serving.memory import Collector

_ACCEPTS_AT_ONCE: Final = 2
"""Connections that are accepted before clients have their turn, and before those that were closed for them are gone."""
_COLLECT_EVERY_S: Final = 1.0


class Web:
    """Serves from the start on, until each of `acceptors` is stopped."""

    def __init__(
        self,
        site: Site,
        backend: Backend,
        descriptors: Descriptors,
        handshakes: Handshakes | None,
        settings: Settings,
        log: logging.Logger,
    ) -> None:
        self._site = site
        self._backend = backend
        self._handshakes = handshakes
        self._tls = settings.http_tls
        self._timer: Any = None
        self._share = Share(descriptors, CONNECTIONS_MAX, site.give_up_some)
        backend.http = [self._address_of(each) for each in site.listeners]
        site.open(backend)
        self.acceptors: Final = [Acceptor(each, self._serve, self._share, log) for each in site.listeners]
        for acceptor in self.acceptors:
            acceptor.max_accept = _ACCEPTS_AT_ONCE
            acceptor.tell_every_s = TELL_SELDOM_S
            acceptor.start()
        for listener in site.listeners:
            log.info("%s on %s", "HTTPS" if self._is_secure(listener) else "HTTP", describe(listener))

    def collect(self, loop: Any, collector: Collector) -> None:
        """Collects the garbage of the libraries each second, when the event loop has nothing else to do."""
        idle: Any = loop.idle()

        def look() -> None:
            idle.stop()
            collector.look()

        self._backend.tidy_up = collector.look_at_many
        self._timer = loop.timer(_COLLECT_EVERY_S, _COLLECT_EVERY_S)
        self._timer.start(idle.start, look)

    def _is_secure(self, listener: socket.socket) -> bool:
        return listener.family != socket.AF_UNIX and self._tls is not None

    def _address_of(self, listener: socket.socket) -> str:
        """Returns where HTTP is served, for commands and people."""
        address = full_address_of(listener)
        return f"https://{address}" if self._is_secure(listener) else address

    def _serve(self, sock: socket.socket) -> None:
        """Serves one connection until its end. Runs in the greenlet of the connection."""
        try:
            peer = peer_of(sock)
            if not self._is_secure(sock):
                own = gevent_socket.socket(sock.family, sock.type, sock.proto, fileno=sock.detach())
                self._site.serve(own, peer)
                return
            from geventstalk.serving.tls_socket import TlsSocket  # here: most servers have none

            assert self._handshakes is not None and self._tls is not None
            context = self._handshakes.context_of(self._tls)
            self._site.serve(TlsSocket(sock, context, self._handshakes, self._backend.yield_now), peer, secure=True)
        finally:
            self._share.give_back()
