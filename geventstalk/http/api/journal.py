"""The journal and its segments."""

from __future__ import annotations

from typing import Any, Final

import falcon

from geventstalk.http import views
from geventstalk.http.backend import House
from geventstalk.http.params import Parameters
from geventstalk.http.slices import Pace, json_list

_SEGMENTS_MAX: Final = 1000


class Journal:
    """GET /api/v1/journal"""

    def __init__(self, house: House) -> None:
        self._house = house

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        Parameters(req).end()
        store = self._house.turn.store
        found = views.journal(self._house)
        segments = [] if store is None else store.segments(_SEGMENTS_MAX)
        resp.data = json_list("segments", map(views.segment, segments), Pace(self._house), **found)
        resp.content_type = falcon.MEDIA_JSON


def add(app: Any, house: House) -> None:
    """Gives the resources of this module their routes."""
    app.add_route("/api/v1/journal", Journal(house))
