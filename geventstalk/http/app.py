"""The WSGI application: middleware, the routes of all resources, problems as in RFC 9457.

Each module of http/api has `add(app, backend)`, which gives its resources their routes. A resource with `public = True`
needs no token. Resources raise falcon's HTTPError: its description becomes the detail of a problem, which people read.
Invariant: for any exception of a handler, the client gets a problem without the exception's text.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Final

import falcon

from geventstalk.filters import FilterError
from geventstalk.http.access import SECURITY_HEADERS, Access
from geventstalk.http.api import (
    audit,
    bulk,
    cluster,
    connections,
    console,
    document,
    done,
    events,
    export,
    health,
    history,
    jobs,
    journal,
    login,
    metrics,
    policies,
    schedules,
    server,
    session,
    tubes,
    users,
)
from geventstalk.http.backend import Backend, Busy, Failed
from geventstalk.http.search import SearchFailed
from geventstalk.http.wire import Refused

_RESOURCES: Final = (
    audit,
    bulk,
    cluster,
    connections,
    console,
    document,
    done,
    export,
    health,
    history,
    jobs,
    journal,
    metrics,
    policies,
    schedules,
    server,
    session,
    tubes,
    users,
)


def make(backend: Backend, access: Access) -> falcon.App[falcon.Request, falcon.Response]:
    app = falcon.App(middleware=[_Middleware(backend, access)])
    app.req_options.strip_url_path_trailing_slash = False
    app.req_options.auto_parse_qs_csv = False
    app.req_options.keep_blank_qs_values = True
    app.resp_options.secure_cookies_by_default = False
    app.set_error_serializer(_write_problem)
    app.add_error_handler(Failed, _change_failed)
    app.add_error_handler(Busy, _too_many_changes)
    app.add_error_handler(FilterError, _filter_wrong)
    app.add_error_handler(SearchFailed, _search_failed)
    app.add_error_handler(Refused, _refuse)
    app.add_error_handler(Exception, _Fault(backend).handle)
    for module in _RESOURCES:
        module.add(app, backend)
    events.add(app, backend, access)
    login.add(app, backend, access)
    return app


class _Middleware:
    """The middleware that every request and every response passes."""

    def __init__(self, backend: Backend, access: Access) -> None:
        self._backend = backend
        self._access = access

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._access.require_known_host(req)

    def process_resource(
        self, req: falcon.Request, resp: falcon.Response, resource: object, params: dict[str, Any]
    ) -> None:
        if getattr(resource, "public", False):
            return
        self._access.require_own_page(req)
        who = self._access.identify(req, self._backend.now_ns())
        self._access.require(who, req, getattr(resource, "of_tubes", ()))
        req.context.who = who
        if not self._backend.replayed:
            raise falcon.HTTPServiceUnavailable(description="The journal is being replayed.", retry_after=1)
        node = self._backend.node
        changes = req.method not in ("GET", "HEAD", "OPTIONS")
        if node is not None and not node.serves and changes and not getattr(resource, "on_standby", False):
            leader = f"{node.leader} leads" if node.leader else "no node leads"
            raise falcon.HTTPServiceUnavailable(description=f"This node stands by: {leader}.", retry_after=1)

    def process_response(
        self, req: falcon.Request, resp: falcon.Response, resource: object, req_succeeded: bool
    ) -> None:
        for name, value in SECURITY_HEADERS.items():
            resp.set_header(name, value)
        if resp.get_header("Cache-Control") is None:
            resp.set_header("Cache-Control", "no-store")


def phrase(status: int) -> str:
    return HTTPStatus(status).phrase


def problem(status: int, detail: str | None, **others: object) -> bytes:
    content: dict[str, object] = {"type": "about:blank", "title": phrase(status), "status": status, **others}
    if detail:
        content["detail"] = detail
    return json.dumps(content).encode()


def _write_problem(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    resp.data = problem(error.status_code, error.description)
    resp.content_type = "application/problem+json"


# Handlers of errors answer and raise nothing: an exception out of one is part of a cycle with the frames of falcon that
# catch it, and with all of the request.


def _answer(resp: falcon.Response, status: int, detail: str, **others: object) -> None:
    resp.status = status
    resp.data = problem(status, detail, **others)
    resp.content_type = "application/problem+json"


def _filter_wrong(req: falcon.Request, resp: falcon.Response, error: FilterError, params: dict[str, Any]) -> None:
    _answer(resp, 400, f"Filter, character {error.at + 1}: {error}", at=error.at)


def _search_failed(req: falcon.Request, resp: falcon.Response, error: SearchFailed, params: dict[str, Any]) -> None:
    _answer(resp, 422, str(error))


def _change_failed(req: falcon.Request, resp: falcon.Response, error: Failed, params: dict[str, Any]) -> None:
    _answer(resp, 500, "The change was given up; how far it came is unknown.")


def _too_many_changes(req: falcon.Request, resp: falcon.Response, error: Busy, params: dict[str, Any]) -> None:
    resp.set_header("Retry-After", "1")
    _answer(resp, 503, "Too many changes wait already; this one was not begun.")


def _refuse(req: falcon.Request, resp: falcon.Response, refused: Refused, params: dict[str, Any]) -> None:
    """Refuses a malformed body, and closes: the end of the body is unknown."""
    resp.set_header("Connection", "close")
    _answer(resp, refused.status or 400, refused.why)


class _Fault:
    """Answers an unexpected exception: the log gets the exception, the client does not, and the server goes on.

    No handler changes jobs itself. Operations of the turn do, and the turn handles their failures.
    """

    def __init__(self, backend: Backend) -> None:
        self._log = backend.log

    def handle(self, req: falcon.Request, resp: falcon.Response, error: Exception, params: dict[str, Any]) -> None:
        self._log.error("a request failed: %s %s", req.method, req.path, exc_info=error)
        _answer(resp, 500, "The server has a fault; its log says which.")
