"""One client's stream: a greenlet with blocking-style code around a session, and the bytes on their way to the client.

This module must not know the engine or the journal. Each connection has one lasting read watcher: gevent's own recv()
starts and stops a watcher each time, which costs a quarter of the speed of a plain request. Nor does a plain request
wake the greenlet: to go there and back is a quarter of a request's instructions. The event loop reads the request
itself, and the session's step never yields.
Invariant: replies leave only through send(). The turn calls send() after the commit that covers the replies. A watcher
of the socket runs only in the state that it belongs to. It wakes the greenlet from its parking for all but to read.
"""

from __future__ import annotations

import select
from time import monotonic
from typing import Any, Final

from geventstalk.core.job import SMALL_BYTES
from geventstalk.serving.parking import Parking
from geventstalk.serving.runqueue import Runnable, RunQueue
from geventstalk.stream import Stream
from geventstalk.turn.replies import Channel
from geventstalk.turn.turn import Turn
from geventstalk.wire.session import OUT_BYTES_MAX, Service, Session

CHUNK_BYTES: Final = 1 << 16
"""The most that one read takes, so that no client keeps the others waiting."""
_SHORT_BYTES: Final = SMALL_BYTES
"""Bytes that a read asks for when the client's last pieces were shorter than this. Memory for more is the C library's,
at several times the cost."""
_SHORT_PIECES: Final = 8
"""The last pieces that count: a client that sends puts and then the deletes of their jobs has pieces of all sizes."""
_WRITE_BYTES_MAX: Final = 1 << 18
"""The most that one turn writes to a client. Without a limit, a client that reads quickly would get all of a large
reply in one turn."""
AHEAD_BYTES_MAX = 1 << 18
"""Bytes of a client's input that are read while its reserve waits. Beyond that the server looks only for a hangup."""
AHEAD_BYTES_MIN: Final = 1 << 12
"""The same limit, and the limit of one read, while all clients together have sent too much ahead."""
ALL_AHEAD_BYTES_MAX: Final = 1 << 23
"""With more than this sent ahead by all clients together, AHEAD_BYTES_MIN holds for each: 32 times AHEAD_BYTES_MAX."""
OUT_BYTES_MIN: Final = 1 << 12
"""The value of OUT_BYTES_MAX while all clients together leave too much unread."""
ALL_UNSENT_BYTES_MAX: Final = 1 << 23
"""With more than this unread by all clients together, OUT_BYTES_MIN holds for each: 32 times OUT_BYTES_MAX."""
_COUNTED_BYTES_MAX: Final = 1 << 17
"""The most bytes that are counted of one reply. A larger reply is the body of a job, which takes memory anyway, or a
long list, which is made only for a client without other unsent replies."""
DEEP_BYTES_MAX: Final = 1 << 23
"""Bytes of a client's input that are read to find its end. Linux keeps 6 MB for a receiver and 4 MB for a sender at the
most, when no administrator has changed that."""
ALL_DEEP_BYTES_MAX: Final = 3 << 23
"""With this much beyond the limits of all clients together, no client's end is looked for in this way."""
_DEEP_CHUNK_BYTES: Final = 1 << 20
"""Bytes of one read then. A read takes a third of a millisecond, and earlier input is copied less often."""
HANGUP_CHECK_S = 1.0

# What a connection waits for. A watcher that runs belongs to one of these states.
READING: Final = 0  # for bytes, or for the end of the input
SENDING: Final = 1  # for room in the socket: the client reads slowly, and the server reads nothing from it meanwhile
PAUSED: Final = 2  # for the end of a turn or of a sync, behind which replies leave, or for its place in the run queue
FULL: Final = 3  # for its reserve to end: the client sent so much behind it that the server looks only for a hangup
OVER: Final = 4  # for nothing: the connection is over


class Ahead:
    """Counts the bytes that all clients together have sent and that cannot be executed yet."""

    def __init__(self) -> None:
        self.total_bytes = 0  # up to AHEAD_BYTES_MAX of each client: one that is read further takes nothing from others
        self.deep_bytes = 0  # what is beyond that
        self._deep: Channel | None = None
        self._deep_until_s = 0.0

    def change(self, before: int, now: int) -> None:
        """Notes that the bytes which one client has sent ahead have changed."""
        self.total_bytes += min(now, AHEAD_BYTES_MAX) - min(before, AHEAD_BYTES_MAX)
        self.deep_bytes += max(now - AHEAD_BYTES_MAX, 0) - max(before - AHEAD_BYTES_MAX, 0)

    def is_deep(self, channel: Channel) -> bool:
        """Returns whether this client's input is read beyond the limits, to see whether its end stands behind."""
        return self._deep is channel

    def go_deep(self, channel: Channel) -> bool:
        """One client at a time, for a moment, and while there is memory for that. Returns whether it is this one."""
        now_s = monotonic()
        if self.deep_bytes >= ALL_DEEP_BYTES_MAX or (self._deep is not None and now_s < self._deep_until_s):
            return False
        self._deep = channel
        self._deep_until_s = now_s + HANGUP_CHECK_S
        return True

    def forget(self, channel: Channel) -> None:
        if self._deep is channel:
            self._deep = None


class Unsent:
    """Counts the bytes of replies that all clients together have not taken. With too many, each client may have few.

    A reply is always made as a whole, and kept. So what a client costs is at most what one turn makes for it, which is
    Service.out_bytes_max and one reply more: a client with unsent replies executes nothing. Where the limit is lower, a
    client that reads gets as much, in smaller pieces.
    """

    def __init__(self, service: Service) -> None:
        self.turn_bytes = 0  # made in this turn by all clients to which it made more than OUT_BYTES_MIN
        self._left_bytes = 0  # what clients did not take when it was sent
        self._service = service
        self._bodies = service.engine.bodies
        self._share = OUT_BYTES_MAX

    def made(self, count: int) -> None:
        """Adds this many bytes for a client, which are to be sent at the end of the turn."""
        self.turn_bytes += count
        self._limit()

    def turn_ends(self) -> None:
        """Adapts the shares: they fall and rise with what a turn makes, so that all clients get the same."""
        if self.turn_bytes >= ALL_UNSENT_BYTES_MAX:
            self._share = max(self._share // 2, OUT_BYTES_MIN)
        elif self.turn_bytes < ALL_UNSENT_BYTES_MAX // 4:
            self._share = min(self._share * 2, OUT_BYTES_MAX)
        self.turn_bytes = 0
        self._limit()

    def leave(self, data: bytes) -> None:
        """Holds a reply until its client reads."""
        self._left_bytes += min(len(data), _COUNTED_BYTES_MAX)
        if self._bodies is not None:
            self._bodies.claimed_bytes += len(data)
        self._limit()

    def take(self, data: Any) -> None:
        """A reply that was left is sent, or no client takes it any more."""
        self._left_bytes -= min(len(data), _COUNTED_BYTES_MAX)
        if self._bodies is not None:
            self._bodies.claimed_bytes -= len(data)
        self._limit()

    def _limit(self) -> None:
        crowded = self.turn_bytes + self._left_bytes >= ALL_UNSENT_BYTES_MAX
        self._service.out_bytes_max = OUT_BYTES_MIN if crowded else self._share


class Connection(Runnable):
    """Call serve() in a greenlet of its own. `turn` runs the session's work, piece by piece."""

    def __init__(
        self,
        stream: Stream,
        session: Session,
        turn: Turn,
        ahead: Ahead,
        unsent: Unsent,
        queue: RunQueue,
        parking: Parking,
    ) -> None:
        super().__init__(session)
        self.stream: Final = stream
        stream.done = unsent.take
        self._turn = turn
        self._all_ahead = ahead
        self._ahead_bytes = 0
        self._all_unsent = unsent
        self._run_queue = queue
        self._unsent: Final = stream.unsent
        self._ask_bytes: Any = CHUNK_BYTES  # Any: as an object, as read() wants it
        self._short_pieces = 0  # how many in a row
        self._state = PAUSED
        self._has_stopped = False
        self._parking = parking
        loop = parking.loop
        self._reader: Any = loop.io(stream.fd, 1)
        self._writer: Any = loop.io(stream.fd, 2)
        self._check: Any = loop.timer(HANGUP_CHECK_S, HANGUP_CHECK_S)

    def serve(self) -> None:
        """Returns when the connection is over; the stream is still open then."""
        self._become(READING)
        if self.stream.holds_input:
            self._read()
        while self._state != OVER:
            self._parking.park()
            if self._unsent:
                self._write()
            state = self._next_state()
            if state != self._state:
                self._become(state)
            if state == READING:
                self._read()
            elif state == PAUSED and self._may_go_on():
                self._step(b"")
            elif state == FULL:
                self._look_for_hangup()

    def _readable(self) -> None:
        """For the event loop, as the callback of a watcher: the socket has bytes, or the end of the input."""
        if self._turn.pressure and self._run_queue.postpones(self):
            self._become(PAUSED)
            return
        if self._next_state() == READING:
            self._read()
            if self._state == OVER:
                self._end()
        else:
            self._parking.wake()

    def _writable(self) -> None:
        """For the event loop: the socket has room. Many clients may read at once, so they take turns."""
        self._become(PAUSED)
        self._run_queue.add(self)

    def run(self) -> None:
        if not self._has_stopped:  # serve() would return, and the socket would be closed
            self._parking.wake()

    def _end(self) -> None:
        """The connection is over: serve() returns in a later pass."""
        self._become(OVER)
        self._run_queue.end(self)

    # --- the turn's side

    def send(self, data: bytes) -> None:
        """Writes as much as the socket takes. The rest follows when there is room again; nothing is read until then."""
        if self._unsent:
            self.stream.send(data)
            self._all_unsent.leave(data)
            if self._state == READING:  # what is left is the stream's own, of its last read
                self._become(SENDING)
            return
        if self._state == OVER:
            return
        try:
            sent = self.stream.send(data, _WRITE_BYTES_MAX)
        except OSError:
            self._end()
            return
        if sent < len(data):
            self._all_unsent.leave(data)
            self._become(SENDING)

    def goes_on(self) -> None:
        """The turn is over for this connection. Work that is left goes on in the next turn."""
        session = self.session
        stops = session.closed or session.unfinished or self._state == PAUSED
        if stops and not self._unsent and self._state != OVER:
            self._run_queue.add(self)

    @property
    def output_bytes(self) -> int:
        """The bytes of replies that the client has not taken, if they have not left."""
        return self.held_bytes + self.session.out_bytes + self.stream.unsent_bytes

    def hang_up(self) -> None:
        """Ends the connection as if the client had hung up: what the client has sent is executed."""
        self.stream.hang_up()

    def stop_reading(self) -> None:
        """Reads and executes nothing more. flush() sends the replies that the client has not taken."""
        self._become(OVER)
        self._has_stopped = True

    def flush(self) -> int:
        """After stop_reading(): sends what the client takes now. Returns how many bytes are left."""
        Connection._write(self)
        return self.stream.unsent_bytes

    def close(self) -> None:
        """Closes the stream if it is open. serve() must have returned, or must never run again."""
        self._state = OVER
        if self.stream.socket.fileno() < 0:
            return
        for watcher in (self._reader, self._writer, self._check):
            watcher.stop()
            watcher.close()
        self._parking.close()
        self.stream.forget()
        self._all_ahead.change(self._ahead_bytes, 0)
        self._ahead_bytes = 0
        self._all_ahead.forget(self)
        self.stream.close()

    # --- states

    def _next_state(self) -> int:
        """Returns the events that the connection waits for now."""
        session = self.session
        if self._state == OVER:
            return OVER
        if self._unsent:
            return SENDING
        if session.closed:
            return PAUSED if self.held or session.out else OVER
        if session.unfinished or (session.eof and not session.unread) or self.held_bytes >= OUT_BYTES_MAX:
            return PAUSED
        if session.waiting and self._ahead_bytes >= self._ahead_max():
            return FULL
        return READING

    def _become(self, state: int) -> None:
        if self._state == READING:
            self._reader.stop()
        elif self._state == SENDING:
            self._writer.stop()
        elif self._state == FULL:
            self._check.stop()
        if state == READING:
            self._reader.start(self._readable)
        elif state == SENDING:
            self._writer.start(self._writable)
        elif state == FULL:
            self._check.start(self._parking.wake)
        self._state = state

    def _may_go_on(self) -> bool:
        """Returns whether there is something to execute, and all earlier replies have left."""
        session = self.session
        if session.suspended or session.out or session.closed:
            return False
        return session.unfinished and self.held_bytes < OUT_BYTES_MAX

    # --- input and output

    def _step(self, data: bytes | None) -> None:
        self._turn.step(self, data)
        ahead_bytes = self.session.pending_bytes
        if ahead_bytes != self._ahead_bytes:
            self._all_ahead.change(self._ahead_bytes, ahead_bytes)
            self._ahead_bytes = ahead_bytes
        if self.session.out_bytes > OUT_BYTES_MIN:
            self._all_unsent.made(self.session.out_bytes)

    def _ahead_max(self) -> int:
        if self._all_ahead.is_deep(self):
            return DEEP_BYTES_MAX
        return AHEAD_BYTES_MAX if self._all_ahead.total_bytes < ALL_AHEAD_BYTES_MAX else AHEAD_BYTES_MIN

    def _read(self) -> None:
        ask_bytes = self._ask_bytes
        ahead = self._all_ahead
        if self.session.waiting and ahead.is_deep(self):
            ask_bytes = _DEEP_CHUNK_BYTES
        elif ahead.total_bytes >= ALL_AHEAD_BYTES_MAX and ask_bytes > AHEAD_BYTES_MIN:
            ask_bytes = AHEAD_BYTES_MIN
        try:
            data = self.stream.get(ask_bytes)
        except BlockingIOError:
            return
        except OSError:
            self._become(OVER)
            return
        except MemoryError:
            self._ask_for_less(ask_bytes)
            return
        size = len(data)
        if not size:
            self.session.unread = False
            ahead.forget(self)
            self._become(PAUSED)
        if size >= _SHORT_BYTES:
            self._ask_bytes = CHUNK_BYTES
            self._short_pieces = 0
        elif self._short_pieces < _SHORT_PIECES:
            self._short_pieces += 1
        else:
            self._ask_bytes = _SHORT_BYTES
        self._step(data or None)

    def _ask_for_less(self, ask_bytes: int) -> None:
        """There was no memory for a read. In small pieces, commands are still executed or refused."""
        if ask_bytes > _SHORT_BYTES:
            self._ask_bytes = _SHORT_BYTES
        else:
            self._become(OVER)

    def _write(self) -> None:
        try:
            self.stream.flush(_WRITE_BYTES_MAX)
        except OSError:
            self.stream.forget()
            self._become(OVER)

    def _look_for_hangup(self) -> None:
        """Asks whether a waiting client has gone. Asking now and then costs nothing in between.

        After a reset no client is left to answer. Otherwise the wait ends now, and what the client sent before is read
        and executed piece by piece: to read all of it first could take megabytes for each client. TCP tells of an end
        only when its buffer has taken all input before the end. So now and then the server reads further than usual.
        """
        poll = select.poll()
        poll.register(self.stream.fd, select.POLLRDHUP)
        events = poll.poll(0)
        if not events:
            if self._ahead_bytes < DEEP_BYTES_MAX and self._all_ahead.go_deep(self):
                self._become(READING)
            return
        if events[0][1] & select.POLLERR:
            self._become(OVER)
            return
        self.session.unread = True
        self._become(PAUSED)
        self._step(None)
