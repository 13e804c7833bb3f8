"""The policies of tubes, as the server uses them."""

from __future__ import annotations

from typing import Any

import falcon

from geventstalk.http.backend import Backend
from geventstalk.http.params import Parameters
from geventstalk.limits import U32_MAX
from geventstalk.policies import Terms


class PoliciesResource:
    """GET /api/v1/policies: all in their order, or with `tube` the one that counts there."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        tube = asked.tube("tube")
        asked.end()
        policies = self._backend.engine.policies
        if policies is None:
            found = []
        elif tube is None:
            found = [*policies.terms]
        else:
            found = policies.terms_of(tube)
        resp.media = {"policies": [_shown(glob, terms) for glob, terms in found]}


def _shown(glob: str, terms: Terms) -> dict[str, Any]:
    bounds = {"priority": terms.priority, "delay": terms.delay, "ttr": terms.ttr}
    return {
        "tubes": glob,
        "tags": list(terms.tags),
        **{key: {"min": least, "max": most} for key, (least, most) in bounds.items()},
        "max_jobs": None if terms.max_jobs == U32_MAX else terms.max_jobs,
        "max_job_bytes": None if terms.max_job_bytes == U32_MAX else terms.max_job_bytes,
    }


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/policies", PoliciesResource(backend))
