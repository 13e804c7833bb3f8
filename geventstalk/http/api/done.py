"""The jobs of a tube that are done, where a policy keeps them visible."""

from __future__ import annotations

from typing import Any, Final

import falcon

from geventstalk.api_shapes import body_shape
from geventstalk.core.job import SECOND_NS
from geventstalk.core.trail import BODY_BYTES, DONE_MAX, Done
from geventstalk.http import views
from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend
from geventstalk.http.params import Parameters, wrong

_LIMIT: Final = 100


class DoneResource:
    """GET /api/v1/done: those of a tube, the last one first. The tube itself may be gone."""

    of_tubes = ("GET", "HEAD")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        name, limit = asked.tube("tube"), asked.integer("limit", _LIMIT, 1, DONE_MAX)
        asked.end()
        if name is None:
            raise wrong("tube is missing")
        engine = self._backend.engine
        trails, policies = engine.trails, engine.policies
        found: list[Done] = []
        if trails is not None and policies is not None and who_sends(req).scope.looks(name):
            found = trails.done_in(name, policies.of(name), self._backend.now_ns())
        resp.media = {"done": [self._shown(each) for each in found[:limit]], "total": len(found)}

    def _shown(self, done: Done) -> views.Json:
        return {
            "id": done.id,
            "created": self._backend.unix_s(done.put_ns),
            "ended": self._backend.unix_s(done.ended_ns),
            "waited_s": (done.begun_ns - done.put_ns) / SECOND_NS,
            "ran_s": (done.ended_ns - done.begun_ns) / SECOND_NS,
            "reserves": done.reserves,
            "size": done.size,
            "body": body_shape(done.body, done.size, BODY_BYTES),
        }


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/done", DoneResource(backend))
