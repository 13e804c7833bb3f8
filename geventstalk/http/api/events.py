"""Server-sent events."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import falcon

from geventstalk.http.access import Access, who_sends
from geventstalk.http.backend import Backend
from geventstalk.http.events import STREAMS_MAX, Events, Full, Names
from geventstalk.http.params import Parameters, tube_name, wrong
from geventstalk.http.wire import LINE_BYTES_MAX

TUBES_MAX: Final = 200
_UNSENT_BYTES: Final = 1 << 16
"""The bytes that the kernel keeps for a client that does not read, or twice as many."""


class EventsResource:
    """GET /api/v1/events"""

    of_tubes = ("GET", "HEAD")

    def __init__(self, events: Events, access: Access) -> None:
        self._events = events
        self._access = access

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        names = _names(asked.text("tubes", most=LINE_BYTES_MAX))
        asked.end()
        may_read = partial(self._access.still_knows, req, who_sends(req))
        connection = req.env["geventstalk.connection"]
        connection.keep_unsent(_UNSENT_BYTES)
        try:
            stream = self._events.join(names, may_read, connection.hang_up, who_sends(req))
        except Full:
            why = f"There are {STREAMS_MAX} streams of events already."
            raise falcon.HTTPServiceUnavailable(description=why, retry_after=5) from None
        resp.stream = stream
        resp.content_type = "text/event-stream"
        resp.set_header("X-Accel-Buffering", "no")  # a proxy must not wait for more


def _names(text: str) -> Names:
    names = [tube_name(name) for name in text.split(",") if name]
    if len(names) > TUBES_MAX:
        raise wrong(f"tubes has more than {TUBES_MAX} names")
    return tuple(dict.fromkeys(names))


def add(app: Any, backend: Backend, access: Access) -> None:
    app.add_route("/api/v1/events", EventsResource(Events(backend), access))
