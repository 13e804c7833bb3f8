"""Clients of the beanstalk port: a page of them, one of them, and ending one."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import falcon
from gevent import sleep

from geventstalk.http import views
from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend
from geventstalk.http.params import Parameters, wrong
from geventstalk.http.slices import Pace, json_list, page
from geventstalk.turn.replies import Channel

_END_S: Final = 2.0
"""The most time that the answer waits for the end of a connection."""


class ConnectionsResource:
    """GET /api/v1/connections"""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sorts: dict[str, Callable[[Channel], Any]] = {
            "number": lambda channel: channel.session.number,
            "address": lambda channel: backend.look_at(channel)[0],
            "reserved": lambda channel: len(channel.session.reserved),
            # The client that waits the longest comes last, as with the other figures.
            "waiting": lambda channel: -channel.session.wait_since_ns if channel.session.waiting else -(1 << 63),
            "connected": lambda channel: channel.joined_ns,
        }

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        key = self._sorts[asked.choice("sort", self._sorts, "number")]
        descending = asked.boolean("descending")
        name = asked.tube("tube")
        user = asked.text("user", "", 64)
        offset = asked.integer("offset", 0, 0, 10_000_000)
        limit = asked.integer("limit", 100, 1, 1000)
        asked.end()
        channels = self._backend.turn.channels
        tubes = self._backend.engine.tubes

        def keep(number: int) -> Any | None:
            channel = channels.get(number)
            if channel is None or channel.session.gone:
                return None
            if user and views.user_of(channel) != user:
                return None
            if name is not None:
                tube = tubes.get(name)
                client = channel.session
                if tube is None or (client.used is not tube and tube.number not in client.watched):
                    return None
            return key(channel)

        pace = Pace(self._backend)
        numbers, total = page(list(channels), keep, pace, descending, offset, limit)
        shown = (self._view(channels[number]) for number in numbers if number in channels)
        resp.data = json_list("connections", shown, pace, total=total)
        resp.content_type = falcon.MEDIA_JSON

    def _view(self, channel: Channel) -> views.Json:
        return views.connection(self._backend, channel, self._backend.now_ns())


class ConnectionResource:
    """/api/v1/connections/{number}"""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response, number: str) -> None:
        Parameters(req).end()
        resp.media = views.connection(self._backend, self._find(number), self._backend.now_ns())

    def on_delete(self, req: falcon.Request, resp: falcon.Response, number: str) -> None:
        Parameters(req).end()
        channel = self._find(number)
        address = self._backend.look_at(channel)[0]
        self._backend.hang_up(channel)
        end_s = monotonic() + _END_S
        while channel.session.number in self._backend.turn.channels and monotonic() < end_s:
            sleep(0.002)
        self._backend.audit.record(who_sends(req), "close connection", 1, detail=f"{channel.session.number}, {address}")
        resp.status = falcon.HTTP_204

    def _find(self, text: str) -> Channel:
        if not text.isascii() or not text.isdecimal() or len(text) > 19 or not 0 < int(text) < 1 << 63:
            raise wrong("a connection has a number from 1 on")
        channel = self._backend.turn.channels.get(int(text))
        if channel is None or channel.session.gone:
            raise falcon.HTTPNotFound(description="There is no such connection.")
        return channel


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/connections", ConnectionsResource(backend))
    app.add_route("/api/v1/connections/{number}", ConnectionResource(backend))
