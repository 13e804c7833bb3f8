"""The sender of the request, and its rights."""

from __future__ import annotations

from typing import Any

import falcon

from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend
from geventstalk.rights import words_of


class SessionResource:
    """GET /api/v1/session"""

    of_tubes = ("GET", "HEAD")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        who = who_sends(req)
        csrf = None if who.session is None else who.session.csrf
        rights = who.scope.rights
        resp.media = {
            "role": who.role,
            "name": who.name,
            "csrf": csrf,
            "users": self._backend.guard is not None,
            "sees_all": who.scope.sees_all,
            "rights": None if rights is None else words_of(rights),
        }


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/session", SessionResource(backend))
