"""The server as a whole: its figures, draining, and reading its files again."""

from __future__ import annotations

from typing import Any

import falcon

from geventstalk.config import ConfigError
from geventstalk.http import views
from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend
from geventstalk.http.params import Fields, Parameters


class ServerResource:
    """/api/v1/server"""

    of_tubes = ("GET", "HEAD")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        Parameters(req).end()
        resp.media = views.whole(self._backend) if who_sends(req).scope.sees_all else views.limited(self._backend)

    def on_patch(self, req: falcon.Request, resp: falcon.Response) -> None:
        fields = Fields(req)
        on = fields.boolean("draining")
        fields.end()
        self._backend.drain(on)  # at once, as by a signal, also while the journal is too slow and operations wait
        self._backend.audit.record(who_sends(req), "drain" if on else "end draining", 1)
        resp.media = views.whole(self._backend)


class ReloadResource:
    """POST /api/v1/reload"""

    on_standby = True  # the files are those of this node

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        Fields(req).end()
        reload = self._backend.reload
        try:
            reload.run()
        except ConfigError as error:
            raise falcon.HTTPConflict(description=f"Nothing is reloaded: {error}.") from None
        self._backend.audit.record(who_sends(req), "reload", 1)
        resp.media = {"files": reload.files, "at_restart": reload.at_restart}


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/server", ServerResource(backend))
    app.add_route("/api/v1/reload", ReloadResource(backend))
