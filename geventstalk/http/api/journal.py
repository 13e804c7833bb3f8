"""The journal and its segments."""

from __future__ import annotations

from typing import Any, Final

import falcon

from geventstalk.http import views
from geventstalk.http.backend import Backend
from geventstalk.http.params import Parameters
from geventstalk.http.slices import Pace, json_list

_SEGMENTS_MAX: Final = 1000


class JournalResource:
    """GET /api/v1/journal"""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        Parameters(req).end()
        store = self._backend.turn.store
        found = views.journal(self._backend)
        segments = [] if store is None else store.segments(_SEGMENTS_MAX)
        resp.data = json_list("segments", map(views.segment, segments), Pace(self._backend), **found)
        resp.content_type = falcon.MEDIA_JSON


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/journal", JournalResource(backend))
