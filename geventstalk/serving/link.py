"""The engine's end of the link to a front-end process, and a channel for each of its clients.

This module must not know the engine, the journal, nor who starts fronts. All of it runs in callbacks of the event loop,
without a greenlet for each client, so nothing here waits.
Invariant: a client under way here has no more bytes than its window each way, and is executed as far as it would be
with a socket of its own: nothing while replies wait for it, and nothing behind a reserve that waits.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final

from gevent.event import Event
from mypy_extensions import mypyc_attr

from geventstalk.front import frames as f
from geventstalk.serving.connection import (
    AHEAD_BYTES_MAX,
    AHEAD_BYTES_MIN,
    ALL_AHEAD_BYTES_MAX,
    DEEP_BYTES_MAX,
    HANGUP_CHECK_S,
    OUT_BYTES_MIN,
    Ahead,
    Unsent,
)
from geventstalk.serving.runqueue import Runnable, RunQueue
from geventstalk.stream import Output, Stream
from geventstalk.turn.replies import Channel
from geventstalk.wire.session import OUT_BYTES_MAX, Session

LINK_BYTES: Final = 1 << 17
"""Bytes that one read takes from a link: they hold some milliseconds of work, during which others wait."""
LITTLE_LINK_BYTES: Final = 1 << 12
"""Bytes that one read takes while there is no memory for more."""
LITTLE_ROOM: Final = f.IN_BYTES // 2
"""A client that may send less than this is told that it may send more."""
CLOG_BYTES: Final = 1 << 20
"""While more than this waits for a front to read it, replies stay with their clients, which are not read from then."""
_END_S: Final = 2.0
"""The end waits this long for a front to read what is left."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LinkOwner:
    """The owner of a link, which hears what the front says about itself."""

    def greeted(self, link: Link) -> None:
        """The front is ready."""
        raise NotImplementedError

    def came(self, link: Link) -> None:
        """The front has accepted a client."""
        raise NotImplementedError

    def refused(self, link: Link) -> None:
        """The front cannot accept a connection that waits."""
        raise NotImplementedError


class _Window(Output):
    """The replies of a client, as many bytes as may be under way to its front."""

    def __init__(self, link: Link, number: int) -> None:
        super().__init__()
        self.done = link.unsent.take
        self.room = f.OUT_BYTES_MAX  # what may still go to the front
        self._link = link
        self._number = number

    def put(self, data: Any) -> int:
        size = min(len(data), self.room)
        if size <= 0:
            return 0
        self.room -= size
        self._link.reply(self._number, bytes(data[:size]))
        return size


class FrontClient(Runnable):
    """The channel of a client whose socket a front has."""

    def __init__(self, link: Link, number: int, session: Session, peer: str, own_end: str) -> None:
        super().__init__(session)
        self.number = number
        self.peer = peer
        self.own_end = own_end
        self._link = link
        self._give = link.give
        self._all_ahead = link.ahead
        self._ahead_bytes = 0
        self._all_unsent = link.unsent
        self._run_queue = link.run_queue
        self._window: Final = _Window(link, number)
        self._unsent: Final = self._window.unsent  # replies beyond the window
        self._queue: deque[bytes] = deque()  # input that the session cannot have yet
        self.queued_bytes = 0  # how much that is
        self._in_room = f.IN_BYTES  # what the front may still send
        self._in_bytes = f.IN_BYTES  # what it may send when nothing is queued
        self._ended = False  # the front said that no input follows
        self._hung_up = False  # the front said that the end of the input stands behind what it may not send yet
        self._gone = False  # the front said that the client's connection is over
        self.over = False

    # --- what the front says

    def receive(self, data: bytes) -> None:
        self._in_room -= len(data)
        if self._queue or not self._may_take() or self._run_queue.postpones(self):
            self._queue.append(data)
            self.queued_bytes += len(data)
            self.heard_ns = monotonic_ns()
            self._count_ahead()
        else:
            self._step(data)
        if self._in_room < LITTLE_ROOM:
            if self._in_room <= 0:
                self._in_bytes = f.IN_BYTES_MAX
            self.give_room()

    def ends(self) -> None:
        """All that the client sent has come."""
        self._ended = True
        self.heavy = True
        self._all_ahead.forget(self)
        if not self.in_turn and not self._run_queue.postpones(self):  # goes_on() follows then
            self._go_on()

    def hangs_up(self) -> None:
        """The client sends nothing more, but the front may not have sent all of its input yet."""
        self._hung_up = self.heavy = True
        if not self.in_turn and not self._run_queue.postpones(self):
            self._go_on()

    def taken(self, count: int) -> None:
        """Counts this many bytes that have gone into the client's socket."""
        self._window.room += count
        if not self._unsent or self._link.is_clogged(self):
            return
        self._window.flush()
        if not self._unsent:
            self._run_queue.add(self)

    def lost(self) -> None:
        """The client is gone. The channel ends in a later pass."""
        self._gone = True
        self._run_queue.end(self)

    # --- the turn's side

    def send(self, data: bytes) -> None:
        if self.over:
            return
        if self._unsent or not self._link.is_clogged(self):
            sent = self._window.send(data)
        else:
            sent = self._window.send(data, 0)
        if sent < len(data):
            self._all_unsent.leave(data)

    def goes_on(self) -> None:
        session = self.session
        stops = session.closed or session.unfinished or self._ended or self._hung_up
        if (stops or self._queue) and not self._unsent and not self.over:
            self._run_queue.add(self)

    @property
    def output_bytes(self) -> int:
        """The bytes of replies that have not left for the front."""
        return self.held_bytes + self.session.out_bytes + self._window.unsent_bytes

    def hang_up(self) -> None:
        """As if the client had hung up."""
        self._link.say(f.frame(self.number, f.SHUT))

    def close(self) -> None:
        """Takes nothing more for the channel, and says nothing to the front."""
        self.over = True
        self._window.forget()
        self._queue.clear()
        self.queued_bytes = 0
        self._all_ahead.change(self._ahead_bytes, 0)
        self._ahead_bytes = 0
        self._all_ahead.forget(self)

    # --- in between

    def run(self) -> None:
        """Goes on a turn later with one piece of the work that was left."""
        if self._gone:
            self._leave()
        else:
            self._go_on()
        if self._in_room < LITTLE_ROOM and not self.over:
            self.give_room()

    def _may_take(self) -> bool:
        """Returns whether the session may have more input now."""
        session = self.session
        if self._unsent or session.unfinished or session.closed or session.waiting or self.over:
            return False
        return self.held_bytes < OUT_BYTES_MAX

    def _go_on(self) -> None:
        session = self.session
        if self.over or self._unsent:
            return
        if session.closed:
            self._leave_if_done()
        elif session.waiting:
            if (self._ended or self._hung_up) and not session.eof:
                session.unread = len(self._queue) > 0 or not self._ended
                self._step(None)
        elif self.held_bytes >= OUT_BYTES_MAX:
            return
        elif session.unfinished:
            if not session.out and not session.suspended:
                self._step(b"")
        elif self._queue:
            data = self._queue.popleft()
            self.queued_bytes -= len(data)
            self._step(data)
        elif self._ended and (not session.eof or session.unread):
            session.unread = False
            self._step(None)
            self._leave_if_done()  # a command behind it in the same turn does not count it any more

    def _leave_if_done(self) -> None:
        if self.session.closed and not self.held and not self.session.out and not self._unsent:
            self._link.say(f.frame(self.number, f.CLOSE))
            self._leave()

    def _leave(self) -> None:
        if not self.over:
            self.close()
            self._link.left(self)

    def _step(self, data: bytes | None) -> None:
        self._give(self, data)
        if self._ahead_bytes or self.queued_bytes or self.session.waiting:
            self._count_ahead()
        if self.session.out_bytes > OUT_BYTES_MIN:
            self._all_unsent.made(self.session.out_bytes)

    def _count_ahead(self) -> None:
        ahead_bytes = self.queued_bytes + self.session.pending_bytes
        if ahead_bytes != self._ahead_bytes:
            self._all_ahead.change(self._ahead_bytes, ahead_bytes)
            self._ahead_bytes = ahead_bytes

    def give_room(self) -> bool:
        """Lets the front send more, if more may come. Returns whether it may send enough now."""
        crowded = self._all_ahead.total_bytes >= ALL_AHEAD_BYTES_MAX
        if self.session.waiting:
            most = AHEAD_BYTES_MIN if crowded else AHEAD_BYTES_MAX
            if self._all_ahead.is_deep(self):
                most = DEEP_BYTES_MAX
            room = min(most - self._ahead_bytes, f.IN_BYTES_MAX)
        else:
            room = (AHEAD_BYTES_MIN if crowded else self._in_bytes) - self.queued_bytes
        more = room - self._in_room
        if more > 0 and not self._ended:
            self._in_room += more
            self._link.say(f.count_frame(self.number, f.MORE, more))
        if self._in_room > 0:
            return True
        self._link.full(self)
        return False

    def look_deeper(self) -> None:
        """Reads ahead further than usual: the system shows the end of a client's input only behind all of its bytes."""
        if self._ahead_bytes < DEEP_BYTES_MAX and self.session.waiting and not self._hung_up:
            self._all_ahead.go_deep(self)


class Link:
    """The link to one front, and the channels of its clients."""

    def __init__(
        self,
        sock: socket.socket,
        loop: Any,
        come: Callable[[Link, int, str, str], FrontClient],
        go: Callable[[FrontClient], None],
        give: Callable[[Channel, bytes | None], None],
        ahead: Ahead,
        unsent: Unsent,
        queue: RunQueue,
        tell: Callable[[str], None],
        owner: LinkOwner,
    ) -> None:
        self.clients: dict[int, FrontClient] = {}
        self.give = give
        self.ahead = ahead
        self.unsent = unsent
        self.run_queue = queue
        self.over: Any = Event()
        self.greeted = False
        self._closed = False
        self.to_accept = 0  # how many more clients the front may accept, but was not told of yet
        self._stream: Final = Stream(sock)
        self._loop = loop
        self._come = come
        self._go = go
        self._tell = tell
        self._owner = owner
        self._cutter = f.Cutter()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._clogged: dict[int, FrontClient] = {}  # whose replies wait until the front reads
        self._reader: Any = loop.io(self._stream.fd, 1)
        self._writer: Any = loop.io(self._stream.fd, 2)
        self._full: dict[int, FrontClient] = {}  # clients that may send nothing; looked at now and then
        self._checker: Any = loop.timer(HANGUP_CHECK_S, HANGUP_CHECK_S)
        self._reader.start(self._hear)

    # --- from the front

    def _hear(self) -> None:
        try:
            data = self._stream.get(LINK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        except MemoryError:
            data = self._stream.get(LITTLE_LINK_BYTES)
        if not data:
            self.end()
            return
        try:
            self._take(data)
        except (f.FrameError, MemoryError):
            self.end()

    def _take(self, stream: bytes) -> None:  # noqa: C901 - one branch for each kind of frame
        """Does what the front says. Raises FrameError, and MemoryError where no change was half made."""
        clients, cutter = self.clients, self._cutter
        cutter.feed(stream)
        while cutter.take():
            kind = cutter.kind
            client = clients.get(cutter.client)
            if client is None:
                if kind == f.OPEN:
                    peer, _, own_end = cutter.data.decode(errors="replace").partition("\n")
                    clients[cutter.client] = self._come(self, cutter.client, peer, own_end)
                    self._owner.came(self)
                elif kind == f.HELLO:
                    self.greeted = True
                    self._owner.greeted(self)
                elif kind == f.REFUSED:
                    if cutter.data:
                        self._tell(cutter.data.decode(errors="replace"))
                    self._owner.refused(self)
            elif kind == f.DATA:
                client.receive(cutter.data)
            elif kind == f.TAKEN:
                client.taken(f.count_of(cutter.data))
            elif kind == f.END:
                client.ends()
            elif kind == f.HANGUP:
                client.hangs_up()
            elif kind == f.GONE:
                client.lost()

    def end(self) -> None:
        """The front is gone, and its clients with it."""
        if self.over.is_set():
            return
        self.stop()
        for client in list(self.clients.values()):
            client.lost()
        self.over.set()

    def stop(self) -> None:
        """Nothing is heard and said any more."""
        for watcher in (self._reader, self._writer, self._checker):
            watcher.stop()
            watcher.close()
        self._stream.close()
        self._closed = True

    def left(self, client: FrontClient) -> None:
        """A client is over."""
        del self.clients[client.number]
        self._full.pop(client.number, None)
        self._clogged.pop(client.number, None)
        self._go(client)

    # --- to the front

    def reply(self, number: int, data: bytes) -> None:
        out = self._out
        if not out:
            self._loop.run_callback(self.flush)
        out.append(f.head(number, f.REPLY, len(data)))
        out.append(data)
        self._out_bytes += len(data)

    def is_clogged(self, client: FrontClient) -> bool:
        """Returns whether so much waits for the front that no reply may join. The client hears when that ends."""
        if self._out_bytes < CLOG_BYTES:
            return False
        self._clogged[client.number] = client
        return True

    def say(self, frame: bytes) -> None:
        if not self._out:
            self._loop.run_callback(self.flush)
        self._out.append(frame)

    def flush(self) -> None:
        """One write for all that was said in a turn."""
        if self._stream.unsent or not self._out or self._closed:
            return
        data = b"".join(self._out)
        self._out = []
        self._out_bytes = 0
        try:
            sent = self._stream.send(data)
        except OSError:
            sent = len(data)  # the front is gone, as the reader will see
        if sent < len(data):
            self._writer.start(self._send_left)
        if self._clogged:
            clogged, self._clogged = self._clogged, {}
            for client in clogged.values():
                client.taken(0)

    def _send_left(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._stream.forget()
        if not self._stream.unsent:
            self._writer.stop()
            self.flush()

    def finish(self) -> None:
        """Sends all frames that wait, and nothing more. Waits until the front has them, within a bound."""
        if self._closed:
            return
        sock = self._stream.socket
        sock.settimeout(_END_S)
        try:
            sock.sendall(b"".join([*self._stream.unsent, *self._out]))
            self._stream.end_output()
        except OSError:
            return  # it is gone, or stands still
        finally:
            self._out = []

    # --- later

    def full(self, client: FrontClient) -> None:
        """Notes that the client has sent so much ahead that it may send nothing more for now."""
        if not self._checker.active:
            self._checker.start(self._check)
        self._full[client.number] = client

    def _check(self) -> None:
        full, self._full = self._full, {}
        for client in full.values():
            client.look_deeper()
            client.give_room()
        if not self._full:
            self._checker.stop()
