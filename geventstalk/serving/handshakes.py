"""TLS handshakes: what new connections of some listeners do before their first command.

This module must not know sessions nor the turn. Invariant: a connection that has not finished has no session, and
HANDSHAKE_S in all; there are no more than `unfinished_max` of them. Handshakes take SHARE_NS of a pass of the event
loop, or one step where that takes longer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from socket import socket as Socket
from time import monotonic, monotonic_ns
from typing import Any, Final

import gevent

from geventstalk.config import ConfigError
from geventstalk.config_listeners import Listener, Tls
from geventstalk.serving.parking import Parking
from geventstalk.serving.tls import Certificate, Found, TlsStream
from geventstalk.stream import Stream, reason_of

HANDSHAKE_S: Final = 10.0
UNFINISHED_MAX: Final = 1024
SHARE_NS: Final = 2_000_000
LOOK_EVERY_S: Final = 1.0
"""No more often do new connections have the files of certificates looked at."""
_TELL_EVERY_S: Final = 60.0


class Handshakes:
    """All connections that are on their way to a session, and the certificates of their listeners."""

    def __init__(self, certificates: Iterable[Tls], log: logging.Logger) -> None:
        """Raises ConfigError."""
        self._certificates = {each: Certificate(each) for each in certificates}
        self._log = log
        self._queue: deque[_Handshake] = deque()
        self._next_pass: Any = gevent.get_hub().loop.timer(0)
        self._looked_s = monotonic()
        self._look: Any = None  # the greenlet of the last look at the files
        self._told_s = -_TELL_EVERY_S
        self.unfinished_max = UNFINISHED_MAX  # the owner lowers it where descriptors are few
        self.unfinished = 0
        self.done = 0
        self.failed = 0
        self.refused = 0

    def run(self, sock: Socket, listener: Listener) -> Stream | None:
        """Returns the stream of a new connection that may have a session; None for one that is closed.

        Waits in the greenlet of the connection.
        """
        if self.unfinished >= self.unfinished_max:
            self.refused += 1
            sock.close()
            return None
        self.unfinished += 1
        handshake = _Handshake(self, sock)
        try:
            stream = handshake.shake_hands(self.context_of(listener.tls))
        except (OSError, MemoryError) as error:
            sock.close()
            self.count_failed(error)
            return None
        finally:
            handshake.close()
            self.unfinished -= 1
        self.done += 1
        return stream

    def queue(self, handshake: _Handshake) -> None:
        """Has handshake.go_on() called when handshakes have time."""
        self._queue.append(handshake)
        if not self._next_pass.active:
            self._next_pass.start(self._run)

    def _run(self) -> None:
        ends_ns = monotonic_ns() + SHARE_NS
        while self._queue and monotonic_ns() < ends_ns:
            self._queue.popleft().go_on()
        if self._queue and not self._next_pass.active:
            self._next_pass.start(self._run)

    def count_failed(self, error: Exception) -> None:
        """Counts a handshake that failed, and logs it, seldom. A client that goes away is no news."""
        self.failed += 1
        if isinstance(error, ConnectionError) or monotonic() < self._told_s + _TELL_EVERY_S:
            return
        self._told_s = monotonic()
        self._log.warning("a TLS handshake failed: %s; for a minute no other one is told of", reason_of(error))

    # --- files

    def context_of(self, files: Tls | None) -> Any:
        """Returns the context of these files as they were read last; looks for changes first, once a second."""
        return self._certificate_of(files).context

    def outgoing_context_of(self, files: Tls | None) -> Any:
        """Returns the same for connections to other nodes."""
        return self._certificate_of(files).outgoing

    def _certificate_of(self, files: Tls | None) -> Certificate:
        assert files is not None
        if monotonic() >= self._looked_s + LOOK_EVERY_S and (self._look is None or self._look.dead):
            self._looked_s = monotonic()
            self._look = gevent.spawn(self._look_for_changes)
        return self._certificates[files]

    def _look_for_changes(self) -> None:
        """Reads the files that have changed, in a thread; new connections use them from then on."""
        for files, certificate in self._certificates.items():
            found = gevent.get_hub().threadpool.apply(_read_changed, (certificate,))
            if isinstance(found, ConfigError):
                self._log.error("%s; the certificate in use stays", found)
            elif found is not None:
                self._use([(files, found)])

    @property
    def files(self) -> list[str]:
        return [path for files in self._certificates for path in files.files.values()]

    def read(self) -> Callable[[], None]:
        """Reads all files, and returns a function that puts them into use. Runs in a thread. Raises ConfigError."""
        return partial(self._use, [(files, each.read()) for files, each in self._certificates.items()])

    def _use(self, found: Iterable[tuple[Tls, Found]]) -> None:
        for files, one in found:
            self._certificates[files].use(one)
            self._log.info("read certificate %s and its key again", files.certificate)


def _read_changed(certificate: Certificate) -> Any:
    """Returns the new certificate, or the reason why it cannot be used; None without a change. Runs in a thread."""
    try:
        return certificate.read_changed()
    except ConfigError as error:  # gevent takes an exception out of a thread for a fault
        return error


class _Handshake:
    """One connection that is not finished. Belongs to its greenlet."""

    def __init__(self, handshakes: Handshakes, sock: Socket) -> None:
        self._handshakes = handshakes
        self._sock = sock
        self._parking = Parking()
        self._goes_on = False
        self._is_late = False
        self._timer: Any = self._parking.loop.timer(HANDSHAKE_S)
        self._timer.start(self._be_late)

    def shake_hands(self, context: Any) -> TlsStream:
        """Returns the stream behind its handshake. Raises OSError."""
        stream = TlsStream(self._sock, context)
        while True:
            self._sleep(lambda: self._handshakes.queue(self))
            events = stream.shake_hands()
            if not events:
                return stream
            self._wait(events)

    def _wait(self, events: int) -> None:
        """Returns when the socket is ready. Raises OSError."""
        watcher = self._parking.loop.io(self._sock.fileno(), events)
        try:
            self._sleep(lambda: watcher.start(self.go_on))
        finally:
            watcher.stop()
            watcher.close()

    def _sleep(self, begin: Callable[[], None]) -> None:
        """Returns after go_on(). Raises OSError when the connection is late."""
        self._goes_on = False
        begin()
        while not self._goes_on:
            if self._is_late:
                raise ConnectionAbortedError(f"no handshake within {HANDSHAKE_S:g} s")
            self._parking.park()

    def go_on(self) -> None:
        self._goes_on = True
        self._parking.wake()

    def _be_late(self) -> None:
        self._is_late = True
        self._parking.wake()

    def close(self) -> None:
        self._timer.stop()
        self._timer.close()
        self._parking.close()
