"""The nodes that share a journal: the leader, the progress of each, and a change of the leader.

A thread reads the database, for one request at a time: an answer takes up to a lease when no node leads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import falcon
from gevent import get_hub
from gevent.lock import BoundedSemaphore

from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend, ClusterFault, ClusterView
from geventstalk.http.params import Fields, Parameters


class ClusterResource:
    """/api/v1/cluster"""

    on_standby = True
    """A standby answers, too: it takes the request to lead where the leader does not answer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._turn: Any = BoundedSemaphore()

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        Parameters(req).end()
        resp.media = self._ask(lambda cluster: cluster.status())

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        fields = Fields(req)
        node = fields.text("promote")
        fields.end()
        self._ask(lambda cluster: cluster.promote(node))
        self._backend.audit.record(who_sends(req), "promote", 1, detail=node)
        resp.media = self._ask(lambda cluster: cluster.status())

    def _ask(self, question: Callable[[ClusterView], Any]) -> Any:
        cluster = self._backend.cluster
        if cluster is None:
            raise falcon.HTTPNotFound(description="This server is no node of a cluster.")
        with self._turn:
            answer, fault = get_hub().threadpool.apply(_ask_in_thread, (question, cluster))
        if isinstance(fault, ClusterFault):
            raise falcon.HTTPServiceUnavailable(description=str(fault))
        if fault is not None:
            raise fault
        return answer


def _ask_in_thread(question: Callable[[ClusterView], Any], cluster: ClusterView) -> tuple[Any, Exception | None]:
    """Returns the answer, or the exception: one that leaves a thread of the pool ends the server."""
    try:
        return question(cluster), None
    except Exception as fault:
        return None, fault


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/cluster", ClusterResource(backend))
