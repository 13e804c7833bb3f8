"""Figures over time, of the server or of a tube."""

from __future__ import annotations

import json
from typing import Any

import falcon

from geventstalk.core.job import SECOND_NS
from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend
from geventstalk.http.history import RANGES, SERIES, TUBE_RANGES, TUBE_SERIES
from geventstalk.http.params import Parameters
from geventstalk.http.slices import Pace


class HistoryResource:
    """GET /api/v1/history"""

    of_tubes = ("GET", "HEAD")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        name = asked.choice("range", RANGES, "15m")
        tube = asked.tube("tube")
        asked.end()
        scope = who_sends(req).scope
        if tube is None and not scope.sees_all:
            raise falcon.HTTPForbidden(description="This is for users who may look at every tube.")
        if tube is not None and not scope.looks(tube):
            tube = b""  # none has this name
        backend, pace = self._backend, Pace(self._backend)
        pace.step()
        names: tuple[str, ...]
        if tube is None:
            names, (step_ns, size) = SERIES, RANGES[name]
            end_ns, columns = backend.history.series(name, backend.now_ns())
        else:
            names, (step_ns, size) = TUBE_SERIES, TUBE_RANGES[name]
            end_ns, columns = backend.tube_history.series(tube, name, backend.now_ns())
        head = {
            "step_s": step_ns / SECOND_NS,
            "from": backend.unix_s(end_ns - size * step_ns),
            "to": backend.unix_s(end_ns),
        }
        pieces = []
        for series, column in zip(names, columns, strict=True):
            pace.step()
            pieces.append(f'"{series}":{json.dumps(column, separators=(",", ":"))}')
        resp.data = f'{json.dumps(head)[:-1]},"series":{{{",".join(pieces)}}}}}'.encode()
        resp.content_type = falcon.MEDIA_JSON


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/history", HistoryResource(backend))
