"""The policies of tubes, as the server uses them."""

from __future__ import annotations

from typing import Any, Final

import falcon

from geventstalk.http.backend import Backend
from geventstalk.http.params import Parameters
from geventstalk.http.runtime_settings import SettingResource
from geventstalk.policies import LIMITS, Policy, Terms

_NO_TERMS: Final = Terms()


class PoliciesResource:
    """GET /api/v1/policies: all in their order, or with `tube` the one that counts there."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        tube = asked.tube("tube")
        asked.end()
        policies = self._backend.engine.policies
        found = [] if policies is None else policies.all if tube is None else policies.all_of(tube)
        settings = self._backend.runtime_settings
        resp.media = {"policies": [_shown(glob, policy, settings.entry("policies", glob)) for glob, policy in found]}


def _shown(glob: str, policy: Policy, entry: dict[str, Any] | None) -> dict[str, Any]:
    terms = policy.terms
    bounds = {"priority": terms.priority, "delay": terms.delay, "ttr": terms.ttr}
    return {
        "tubes": glob,
        "at_run_time": entry is not None,
        "entry": entry,
        "tags": list(terms.tags),
        **{key: {"min": least, "max": most} for key, (least, most) in bounds.items()},
        **{key: _limit(terms, key) for key in LIMITS},
        "pause": terms.pause,
        "keep": dict(zip(("jobs", "seconds"), terms.keep, strict=True)),
        "events": terms.events,
        "refused_puts": policy.refused,
        "delayed_puts": policy.delayed,
    }


def _limit(terms: Terms, key: str) -> int | None:
    most: int = getattr(terms, key)
    return None if most == getattr(_NO_TERMS, key) else most


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/policies", PoliciesResource(backend))
    app.add_route("/api/v1/policies/{name:path}", SettingResource(backend, "policies", "policy"))
