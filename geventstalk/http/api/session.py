"""The sender of the request, and its rights."""

from __future__ import annotations

from typing import Any

import falcon

from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend


class SessionResource:
    """GET /api/v1/session"""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        who = who_sends(req)
        csrf = None if who.session is None else who.session.csrf
        resp.media = {"role": who.role, "name": who.name, "csrf": csrf, "users": self._backend.guard is not None}


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/session", SessionResource(backend))
