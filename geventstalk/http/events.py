"""Streams of server-sent events: the figures once a second, and events of the audit and of bulk changes.

This module must not know sockets: a stream is an iterator that the connection writes from. It sends a slow client the
newest state: newer figures replace those that the client has not taken. Invariant: events for all streams are made
once, and none without a stream. A stream takes bounded memory, and ends in bounded time when its client does not read,
may no longer read, or the server stops.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from functools import partial
from time import perf_counter_ns
from typing import Any, Final

import gevent
from gevent.event import Event

from geventstalk.core.job import SECOND_NS
from geventstalk.core.tube import Tube
from geventstalk.http import views
from geventstalk.http.access import Who, shows_entry
from geventstalk.http.backend import Backend
from geventstalk.http.slices import Pace

STREAMS_MAX: Final = 64
"""The most streams: a quarter of the connections of HTTP."""
USER_STREAMS_MAX: Final = 8
"""The most streams of one user with rights."""
PERIOD_NS: Final = SECOND_NS
_PERIOD_MAX_NS: Final = 2 * SECOND_NS
_SHARE: Final = 5
"""Making figures takes at most one part in this many of the time. Otherwise figures come less often, down to one in two
seconds: after three seconds of silence a page says that the server does not answer."""
HEARTBEAT_S: Final = 15.0
SLOW_NS: Final = 10 * SECOND_NS
"""The most time a client may take for one piece."""
CHECK_NS: Final = 5 * SECOND_NS
"""The interval between checks that a stream's client may still read."""
_PENDING_MAX: Final = 256
"""The most events that wait for a client. With more its stream ends, and the client connects again."""
_HELLO: Final = b"retry: 2000\n\n"
_HEARTBEAT: Final = b":\n\n"

Names = tuple[bytes, ...]


class Full(Exception):
    """There are too many streams."""


class Stream:
    """The stream of one client. Iterating it blocks the greenlet of its connection; close() must be called.

    `may_read` returns whether the client may still read, `hang_up` ends its connection. `who` may look at some tubes
    only.
    """

    def __init__(
        self, events: Events, names: Names, may_read: Callable[[int], bool], hang_up: Callable[[], None], who: Who
    ) -> None:
        self.who: Final = who
        self._names: Final = names
        self.may_read: Final = may_read
        self.hang_up: Final = hang_up
        self.checked_ns = events.backend.now_ns()
        self.sending_ns = 0  # the time since which the connection writes a piece; 0 while it does not
        self.over = False
        self._events = events
        self._begun = False
        self._pending: dict[Hashable, bytes] = {}
        self._wake: Event = Event()

    @property
    def names(self) -> Names:
        """The tubes that the client asked for and may look at now."""
        looks = self.who.scope.looks
        return self._names if self.who.scope.sees_all else tuple(name for name in self._names if looks(name))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> bytes:
        self.sending_ns = 0
        data = self._next()
        if self.over:
            raise StopIteration
        self.sending_ns = self._events.backend.now_ns()
        return data

    def _next(self) -> bytes:
        if not self._begun:
            self._begun = True
            return _HELLO + self._events.first_figures(self)
        while not self._pending:
            if self.over:
                return b""
            if not self._wake.wait(HEARTBEAT_S):
                return _HEARTBEAT
            self._wake.clear()
        self._events.backend.yield_now()  # all streams wake at once, and each has a piece to write
        data = b"".join(self._pending.values())
        self._pending.clear()
        return data

    def tell(self, key: Hashable, event: bytes) -> None:
        """Adds an event. It replaces one with the same key that still waits."""
        if self.over:
            return
        self._pending[key] = event
        self._wake.set()
        if len(self._pending) > _PENDING_MAX:
            self.end()

    def end(self) -> None:
        """Adds no more events. The stream ends when the client has taken the piece that is being written."""
        self.over = True
        self._pending.clear()
        self._wake.set()

    def close(self) -> None:
        """The connection writes no more of this stream."""
        self.end()
        self._events.leave(self)


class Events:
    """All streams, and the greenlet that makes the figures for them while there are any."""

    def __init__(self, backend: Backend) -> None:
        self.backend: Final = backend
        self.streams: set[Stream] = set()
        self._figures: _Figures | None = None
        self._told = 0
        self._runs = False
        backend.audit.listeners.append(self._tell_audit)
        backend.bulk_listeners.append(self._tell_bulk)

    def join(self, names: Names, may_read: Callable[[int], bool], hang_up: Callable[[], None], who: Who) -> Stream:
        """Adds a stream, which also has the figures of the tubes with these names. Raises Full."""
        own = sum(stream.who.name == who.name for stream in self.streams) if who.role == "user" else 0
        if len(self.streams) >= STREAMS_MAX or own >= USER_STREAMS_MAX:
            raise Full
        stream = Stream(self, names, may_read, hang_up, who)
        self.streams.add(stream)
        if self.backend.stopping.is_set():
            stream.end()
        elif not self._runs:
            self._runs = True
            gevent.spawn(self._run)
        return stream

    def leave(self, stream: Stream) -> None:
        self.streams.discard(stream)

    def tell(self, kind: str, value: object, key: Hashable, shows: Callable[[Who], bool]) -> None:
        """Adds an event to all streams to whose clients it may be shown. Does not yield.

        It replaces one of the same kind and key that still waits.
        """
        if not self.streams:
            return
        if key is None:
            self._told += 1
            key = self._told
        event = _event(kind, _json(value))
        for stream in self.streams:
            if shows(stream.who):
                stream.tell((kind, key), event)

    def _tell_audit(self, entry: dict[str, Any]) -> None:
        self.tell("audit", entry, None, partial(shows_entry, entry))

    def _tell_bulk(self, bulk: dict[str, Any]) -> None:
        self.tell("bulk", bulk, bulk["number"], lambda who: who.scope.sees_all or bulk["by"] == who.name)

    # --- figures

    def first_figures(self, stream: Stream) -> bytes:
        """Returns the present figures, or some of less than a period ago. Yields to other requests."""
        pace = Pace(self.backend)
        pace.step()
        figures = self._figures
        if figures is None or self.backend.now_ns() - figures.made_ns >= PERIOD_NS:
            figures = self._figures = _Figures(self.backend, views.whole(self.backend))
        return figures.event(stream, pace)

    def _run(self) -> None:
        period_ns = PERIOD_NS
        begun_ns = perf_counter_ns()
        try:
            while True:
                wait_ns = begun_ns + period_ns - perf_counter_ns()
                if self.backend.stopping.wait(max(0, wait_ns) / SECOND_NS) or not self.streams:
                    break
                begun_ns = perf_counter_ns()
                self._tell_figures()
                took_ns = perf_counter_ns() - begun_ns
                period_ns = min(max(PERIOD_NS, _SHARE * took_ns), _PERIOD_MAX_NS)
        except Exception as error:
            self.backend.log.error("the streams of events end here", exc_info=error)
        finally:
            self._runs = False
            self._figures = None
            for stream in self.streams:
                stream.end()

    def _tell_figures(self) -> None:
        pace = Pace(self.backend)
        pace.step()
        figures = self._figures = _Figures(self.backend, views.whole(self.backend))
        for stream in list(self.streams):
            pace.step()
            if self._lasts(stream):
                stream.tell("figures", figures.event(stream, pace))

    def _lasts(self, stream: Stream) -> bool:
        """Ends the stream of a client that does not read, or may not. Returns whether it goes on."""
        now_ns = self.backend.now_ns()
        if stream.sending_ns and now_ns - stream.sending_ns > SLOW_NS:
            stream.end()
            stream.hang_up()
        elif now_ns - stream.checked_ns > CHECK_NS:
            stream.checked_ns = now_ns
            if not stream.may_read(now_ns):
                stream.end()
        return not stream.over


class _Figures:
    """The figures of one time, and the events made of them: the server's, those of tubes, and whole ones."""

    def __init__(self, backend: Backend, server: views.Json) -> None:
        self.made_ns: Final = backend.now_ns()
        self._backend = backend
        self._server = {True: _json(server)}  # by whether the client may look at every tube
        self._tubes: dict[bytes, str] = {}
        self._events: dict[tuple[bool, Names], bytes] = {}

    def event(self, stream: Stream, pace: Pace) -> bytes:
        """Returns the event with the figures of the stream's tubes. Tubes that do not exist are left out."""
        names, all_seen = stream.names, stream.who.scope.sees_all
        event = self._events.get((all_seen, names))
        if event is None:
            tubes = ",".join(filter(None, [self._tube(name, pace) for name in names]))
            server = self._server.get(all_seen)
            if server is None:
                server = self._server[all_seen] = _json(views.limited(self._backend))
            event = self._events[all_seen, names] = _event("figures", f'{{"server":{server},"tubes":[{tubes}]}}')
        return event

    def _tube(self, name: bytes, pace: Pace) -> str:
        found = self._tubes.get(name)
        if found is None:
            pace.step()
            tube = self._backend.engine.tubes.get(name)
            found = "" if tube is None else self._view(tube)
            self._tubes[name] = found
        return found

    def _view(self, tube: Tube) -> str:
        oldest = views.oldest(self._backend, tube)
        return _json(views.tube(self._backend, tube, self._backend.now_ns(), oldest))


def _json(value: object) -> str:
    """Returns JSON on one line, as events need it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _event(kind: str, data: str) -> bytes:
    return f"event: {kind}\ndata: {data}\n\n".encode()
