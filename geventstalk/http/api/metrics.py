"""The metrics that Prometheus scrapes."""

from __future__ import annotations

from typing import Any

import falcon

from geventstalk.http.backend import Backend
from geventstalk.http.metrics import Metrics


class MetricsResource:
    """GET /metrics"""

    def __init__(self, backend: Backend) -> None:
        self._metrics = Metrics(backend)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data, resp.content_type = self._metrics.answer(req.get_header("Accept") or "")


def add(app: Any, backend: Backend) -> None:
    app.add_route("/metrics", MetricsResource(backend))
