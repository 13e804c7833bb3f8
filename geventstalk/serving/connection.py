"""One client's socket: a greenlet with blocking-style code around a session, and the bytes on their way to the client.

This room must not know the engine or the journal. One persistent read watcher a connection: gevent's own recv() starts
and stops one each time, which costs a quarter of the speed of a plain request.
Invariant: what a session puts out leaves only through send(), called by the server after the commit that covers it.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from os import read, write
from typing import Any, Final

from gevent import get_hub, getcurrent
from greenlet import greenlet

from geventstalk.wire.session import OUT_BYTES_MAX, Session

CHUNK_BYTES: Final = 1 << 16
"""What one read takes at most, so that no client keeps the others waiting."""
_SHORT_BYTES: Final = 960
"""What is asked for from a client whose last piece was shorter still: memory for more than a kilobyte costs twice."""
INBOX_BYTES_MAX = 1 << 18
"""Of what a client sends while its reserve waits, so much is taken in. Beyond that only its hangup is looked for."""
HANGUP_CHECK_S = 1.0


class Connection:
    """Call serve() in a greenlet of its own. `step` runs a piece of the session's work for the server."""

    def __init__(self, sock: socket.socket, session: Session, step: Callable[[Connection, bytes | None], None]) -> None:
        self.session = session
        self.holds = 0  # replies that wait for an fsync; what comes later waits behind them
        self.touched = False  # the server's note that this connection takes part in the turn
        self.changed = False  # whether it changed something that has to be on the device before its replies leave
        self._socket = sock
        self._fd = sock.fileno()
        self._step = step
        self._unsent: list[memoryview] = []
        self._held_bytes = 0
        self._ask_bytes = CHUNK_BYTES
        self._gone = False
        self._reading = False  # whether the reader is started: asking gevent would cost more than the rest of a turn
        self._checking = False
        self._ending = False  # the client's end was seen behind input that is not read yet
        self._hub: Any = get_hub()
        self._sleep: Any = greenlet.switch.__get__(self._hub)
        self._wake: Any = getcurrent().switch
        self._reader: Any = self._hub.loop.io(self._fd, 1)
        self._writer: Any = self._hub.loop.io(self._fd, 2)
        # Not run_callback(): gevent runs up to 50 of those before it looks at any socket again.
        self._poke: Any = self._hub.loop.timer(0)
        self._check: Any = self._hub.loop.timer(HANGUP_CHECK_S, HANGUP_CHECK_S)

    def serve(self) -> None:
        """Returns when the connection is over; the socket is still open then."""
        session = self.session
        self._read_on()
        while True:
            self._sleep()  # until readable, writable, or poked; why is seen from the state
            if self._unsent:
                self._write()
            if self._gone or (session.closed and not self._unsent and not self.holds and not session.out):
                return
            if self._unsent or self._held_bytes >= OUT_BYTES_MAX or session.closed:
                self._read_no_more()
            elif session.unfinished:
                if not session.out:
                    self._read_no_more()
                    self._step(self, b"")
            elif session.eof:
                self._read_no_more()
            elif session.waiting and session.pending_bytes >= INBOX_BYTES_MAX and not self._ending:
                self._look_for_hangup()
            else:
                if self._checking:
                    self._checking = False
                    self._check.stop()
                if not self._reading:
                    self._read_on()
                self._read()

    def poke(self) -> None:
        """Has the greenlet look at its state again, in the next turn."""
        if not self._gone:
            self._poke.start(self._wake)

    def send(self, data: bytes) -> None:
        """Writes as much as the socket takes; the rest follows when it takes more. Until then nothing is read."""
        if self._unsent:
            self._unsent.append(memoryview(data))
            return
        try:
            sent = write(self._fd, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._end()
            return
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
            self._read_no_more()
            self._writer.start(self._wake)

    def hold(self, data: bytes) -> None:
        """The bytes wait for an fsync. A client that goes on sending meanwhile is read only up to a limit."""
        self.holds += 1
        self._held_bytes += len(data)

    def release(self, data: bytes) -> None:
        """The fsync that hold() waited for is over."""
        self.holds -= 1
        self._held_bytes -= len(data)
        if not self._gone:
            self.send(data)
            self.after_flush()

    def after_flush(self) -> None:
        """The turn is over for this connection: whatever it could not do in it goes on in the next one."""
        session = self.session
        stopped = not self._reading and not self._checking
        if session.closed or (not self._unsent and (session.unfinished or stopped)):
            self.poke()

    def close(self) -> None:
        """Closes the socket; serve() must have returned, or never run again."""
        self._gone = True
        for watcher in (self._reader, self._writer, self._check, self._poke):
            watcher.stop()
            watcher.close()
        self._wake = None
        self._socket.close()

    def _read_on(self) -> None:
        self._reading = True
        self._reader.start(self._wake)

    def _read_no_more(self) -> None:
        self._reading = False
        self._reader.stop()

    def _read(self) -> None:
        try:
            data = read(self._fd, self._ask_bytes)
        except BlockingIOError:
            return
        except OSError:
            self._gone = True
            return
        size = len(data)
        if not size:
            self._read_no_more()
        self._ask_bytes = _SHORT_BYTES if size < _SHORT_BYTES else CHUNK_BYTES
        self._step(self, data or None)

    def _write(self) -> None:
        try:
            while self._unsent:
                sent = write(self._fd, self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                    return
                del self._unsent[0]
        except BlockingIOError:
            return
        except OSError:
            self._gone = True
            return
        self._writer.stop()

    def _look_for_hangup(self) -> None:
        """With its input full, a waiting client that has gone is found by asking now and then, at no cost between."""
        self._read_no_more()
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        if poll.poll(0):
            self._ending = True  # nothing more will come than what the system holds, and that may be taken in
            self._read_on()
            self._read()
        else:
            self._checking = True
            self._check.start(self._wake)

    def _end(self) -> None:
        self._gone = True
        self._hub.loop.run_callback(self._wake)
