"""The schedules of the server, and their ticks."""

from __future__ import annotations

from typing import Any

import falcon

from geventstalk.http.backend import Backend, PlanView
from geventstalk.http.params import Parameters
from geventstalk.http.runtime_settings import SettingResource
from geventstalk.runtime_settings import RuntimeSettings


class SchedulesResource:
    """GET /api/v1/schedules"""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        Parameters(req).end()
        schedules, settings = self._backend.schedules, self._backend.runtime_settings
        resp.media = {"schedules": [] if schedules is None else [_shown(plan, settings) for plan in schedules.plans]}


def _shown(plan: PlanView, settings: RuntimeSettings) -> dict[str, Any]:
    schedule = plan.schedule
    entry = settings.entry("schedules", schedule.name)
    last = {"tick": plan.last_s, "outcome": plan.outcome, "job": plan.job or None} if plan.last_s else None
    return {
        "name": schedule.name,
        "at_run_time": entry is not None,
        "entry": entry,
        "cron": schedule.cron,
        "zone": schedule.zone,
        "tube": schedule.tube,
        "missed": schedule.missed,
        "next": plan.next_s,
        "last": last,
    }


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/schedules", SchedulesResource(backend))
    app.add_route("/api/v1/schedules/{name}", SettingResource(backend, "schedules", "schedule"))
