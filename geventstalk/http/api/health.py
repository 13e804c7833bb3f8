"""Liveness and readiness of the server, for load balancers, which have no token."""

from __future__ import annotations

from typing import Any

import falcon

from geventstalk.durable.store import Store
from geventstalk.http.backend import ACTIVE, Backend


class AliveResource:
    """GET /healthz: the event loop goes round."""

    public = True

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.text = "ok\n"
        resp.content_type = falcon.MEDIA_TEXT


class ReadyResource:
    """GET /readyz: the journal is replayed and takes puts, and the server is neither draining nor stopping.

    A node of a cluster is also ready when it stands by and another one leads. With `?role=active` or `?role=standby` it
    is ready only in that role; a server alone is active. A reload that was refused is said, and changes nothing.
    """

    public = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        backend = self._backend
        why = why_not_ready(backend)
        role = ACTIVE if backend.node is None else backend.node.role
        wanted = req.get_param("role")
        if why is None and wanted is not None and wanted != role:
            why = f"the role of this node is: {role}"
        if why is not None:
            resp.status = falcon.HTTP_503
        text = "ok" if backend.node is None else f"ok: {role}"
        if backend.reload.refused:
            text += "; the last reload was refused, see the log"
        resp.text = f"{why or text}\n"
        resp.content_type = falcon.MEDIA_TEXT


def why_not_ready(backend: Backend) -> str | None:
    """Returns why the server is not ready; None when it is."""
    if not backend.replayed:
        return "the journal is being replayed"
    if backend.turn.failed or backend.stopping.is_set():
        return "the server is stopping"
    node = backend.node
    if node is not None and not node.serves:
        return None if node.leader else "no node leads"
    if node is not None and node.role != ACTIVE:
        return f"the role of this node is: {node.role}"
    return "the server is draining" if backend.engine.draining else _why_no_puts(backend.turn.store)


def _why_no_puts(store: Store | None) -> str | None:
    if store is not None and not store.takes_puts():
        return "the journal has no room for puts"
    return "the journal does not keep pace" if store is not None and store.behind else None


def add(app: Any, backend: Backend) -> None:
    app.add_route("/healthz", AliveResource())
    app.add_route("/readyz", ReadyResource(backend))
