"""The server as a whole, and draining."""

from __future__ import annotations

from typing import Any

import falcon

from geventstalk.http import views
from geventstalk.http.access import who_sends
from geventstalk.http.backend import House
from geventstalk.http.params import Fields, Parameters


class Server:
    """/api/v1/server"""

    def __init__(self, house: House) -> None:
        self._house = house

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        Parameters(req).end()
        resp.media = views.whole(self._house)

    def on_patch(self, req: falcon.Request, resp: falcon.Response) -> None:
        fields = Fields(req)
        on = fields.boolean("draining")
        fields.end()
        self._house.drain(on)  # at once, as by a signal: also while the journal does not keep pace and errands wait
        self._house.audit.record(who_sends(req), "drain" if on else "end draining", 1)
        resp.media = views.whole(self._house)


def add(app: Any, house: House) -> None:
    """Gives the resources of this module their routes."""
    app.add_route("/api/v1/server", Server(house))
