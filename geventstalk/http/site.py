"""HTTP in the server: its listening sockets, its connections, and the application behind them.

The server imports this module and the backend only where `--http` is given. The server accepts the connections. This
module serves them, closes idle connections to admit new ones, and ends them. Invariant: connections of HTTP take a
small share of what beanstalk's clients may have.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import gevent

from geventstalk.config import Settings
from geventstalk.http import app, wire
from geventstalk.http.access import SECURITY_HEADERS, Access
from geventstalk.http.audit import Audit
from geventstalk.http.backend import Backend, ClusterView
from geventstalk.http.sampler import Sampler
from geventstalk.http.tokens import Tokens, UserTokens
from geventstalk.rights import Access as Users

CONNECTIONS_MAX: Final = 256
_GIVE_UP_AT_ONCE: Final = 16
_END_S: Final = 1.0
"""The time that open requests have at a stop."""
_TELL_EVERY_S: Final = 10.0
_PUT_BYTES_MAX: Final = 1 << 22
"""The largest request that puts a job: reading more would block other clients for longer than 5 ms."""


class Site:
    """Call open() once, then serve() for each connection, then stop()."""

    def __init__(
        self, settings: Settings, listeners: list[socket.socket], tokens: Tokens | None, log: logging.Logger
    ) -> None:
        self.listeners: Final = listeners
        self._settings = settings
        self._log = log
        names = [address.rpartition(":")[0].strip("[]") for address in settings.http if not address.startswith("unix:")]
        self._audit = Audit(settings.audit, log)
        self._access = Access(map(str.lower, names), settings.http_host, tokens, self._audit, log)
        self._service: Service | None = None
        self.cluster: ClusterView | None = None

    def admit_users(self, access: Callable[[], Users]) -> None:
        """Has users with a token use HTTP, and no client without a token."""
        self._access.add(UserTokens(access))

    def open(self, backend: Backend) -> None:
        """Makes the application. serve() can be called then."""
        self._audit.unix_s = lambda: backend.unix_s(backend.now_ns())
        backend.audit = self._audit
        backend.cluster = self.cluster
        gevent.spawn(Sampler(backend).run)
        self._service = Service(backend, app.make(backend, self._access), self._log)

    def serve(self, sock: Any, peer: str, *, secure: bool = False) -> None:
        """Serves one connection until its end, and closes it. Runs in the greenlet of the connection.

        `sock` waits as gevent's sockets do; `secure` says that it has TLS.
        """
        assert self._service is not None
        self._service.serve(sock, peer, secure=secure)

    def give_up_some(self) -> None:
        """Closes the connections that have been idle the longest, to admit new ones."""
        if self._service is not None:
            self._service.give_up(_GIVE_UP_AT_ONCE)

    def stop(self) -> None:
        """Ends all connections: idle ones at once, the others after their requests or soon."""
        if self._service is not None:
            self._service.stop()


class Service:
    """The state that the handlers of all connections share; for pywsgi it is the server."""

    def __init__(self, backend: Backend, application: Any, log: logging.Logger) -> None:
        self.application = application
        self.yield_now = backend.yield_now
        self.stopping = False
        self._backend = backend
        self._log = log
        self._idle: dict[wire.Handler, None] = {}  # the longest first
        self._sending: dict[wire.Handler, None] = {}  # they wait for their clients to read; the longest first
        self._working: set[wire.Handler] = set()
        self._told_s = -_TELL_EVERY_S
        self._untold = 0
        self._put_bytes_max = min(3 * backend.settings.max_job_bytes + 4096, _PUT_BYTES_MAX)
        headers = "".join(f"{name}: {value}\r\n" for name, value in SECURITY_HEADERS.items())
        self._head_end = f"{headers}Content-Type: application/problem+json\r\nConnection: close\r\n".encode()

    # --- connections

    def serve(self, sock: Any, peer: str, *, secure: bool = False) -> None:
        handler = wire.Handler(sock, peer, self, secure=secure)
        self._backend.turn.others += 1
        try:
            handler.handle()
        except Exception as error:
            self.tell_fault("a connection", error)
        finally:
            self._backend.turn.others -= 1
            self._forget(handler)
            sock.close()

    def set_idle(self, handler: wire.Handler) -> None:
        """Notes that the connection waits for a request, or for its end."""
        self._forget(handler)
        self._idle[handler] = None

    def set_sending(self, handler: wire.Handler) -> None:
        """Notes that the connection waits for its client to read."""
        self._forget(handler)
        self._sending[handler] = None

    def set_working(self, handler: wire.Handler) -> None:
        """Notes that the connection has an open request."""
        self._forget(handler)
        self._working.add(handler)

    def _forget(self, handler: wire.Handler) -> None:
        self._idle.pop(handler, None)
        self._sending.pop(handler, None)
        self._working.discard(handler)

    def give_up(self, count: int) -> None:
        """Ends this many connections that wait for their clients: those without a request first."""
        for handler in [*self._idle, *self._sending][:count]:
            self._forget(handler)
            handler.hang_up()

    def stop(self) -> None:
        self.stopping = True
        self._backend.stop()
        self.give_up(len(self._idle))
        end_s = monotonic() + _END_S
        while (self._working or self._sending) and monotonic() < end_s:
            gevent.sleep(0.01)
        for handler in [*self._sending, *self._working]:
            handler.hang_up()

    # --- for the handlers

    def get_environ(self) -> dict[str, Any]:
        """Returns the environment that all requests share."""
        return {
            "SCRIPT_NAME": "",
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
            "wsgi.errors": _Nowhere(),
            "wsgi.multiprocess": False,
            "wsgi.multithread": False,
            "wsgi.run_once": False,
            "wsgi.url_scheme": "http",
            "wsgi.version": (1, 0),
        }

    def body_bytes_max(self, method: str, path: str) -> int:
        """Returns the size of the largest body that such a request may have."""
        puts = method == "POST" and path.partition("?")[0] == "/api/v1/jobs"
        return self._put_bytes_max if puts else wire.BODY_BYTES_MAX

    def refusal(self, status: int, why: str) -> bytes:
        """Returns a whole response to a request that did not reach the application."""
        body = app.problem(status, why)
        title = app.phrase(status)
        start = f"HTTP/1.1 {status} {title}\r\nContent-Length: {len(body)}\r\n".encode()
        return start + self._head_end + b"\r\n" + body

    def log_refused(self, peer: str, refused: wire.Refused) -> None:
        """Logs a refused request, at most one in ten seconds."""
        now_s = monotonic()
        if now_s - self._told_s < _TELL_EVERY_S:
            self._untold += 1
            return
        more = f"; {self._untold} more since the last such line" if self._untold else ""
        self._told_s, self._untold = now_s, 0
        self._log.warning("refused an HTTP request of %s: %s%s", peer, refused.why, more)

    def tell_fault(self, what: str, error: BaseException) -> None:
        """Logs an unexpected exception. The server goes on."""
        self._log.error("an HTTP request failed: %s", what, exc_info=error)


class _Nowhere:
    """falcon's own log, which drops all messages."""

    def write(self, text: str) -> None:
        pass

    def flush(self) -> None:
        pass
