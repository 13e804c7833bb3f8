"""Changes of all jobs that match a filter: counts, begins, shows and cancels them."""

from __future__ import annotations

from typing import Any, Final

import falcon

from geventstalk.filters import parse
from geventstalk.http.access import who_sends
from geventstalk.http.api.jobs import values_of
from geventstalk.http.backend import Backend
from geventstalk.http.bulk import RUNNING_MAX, BulkChange, BulkChanges, TooMany
from geventstalk.http.changes import ACTIONS, NO_RIGHT, Values
from geventstalk.http.params import Fields, Parameters, wrong
from geventstalk.rights import MANAGE

_JOBS_MAX: Final = 2**63 - 1
_END_S: Final = 5.0
"""The most time that a cancellation waits for the end of the change."""


class BulkListResource:
    """/api/v1/bulk"""

    of_tubes = ("GET", "HEAD", "POST")

    def __init__(self, backend: Backend, changes: BulkChanges) -> None:
        self._backend = backend
        self._changes = changes

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        Parameters(req).end()
        who = who_sends(req)
        resp.media = {"bulk": self._changes.latest_first(who, who.scope)}

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        fields = Fields(req)
        text = fields.text("filter")
        action = fields.choice("action", ACTIONS)
        values = _values(fields, action)
        limit = fields.integer("limit", least=1, most=_JOBS_MAX) if fields.has("limit") else None
        dry_run = fields.boolean("dry_run", False)
        fields.end()
        terms, who = parse(text), who_sends(req)
        if values.tube and not who.scope.may(values.tube, MANAGE):
            raise falcon.HTTPForbidden(description=NO_RIGHT)
        if dry_run:
            change = BulkChange(self._backend, who, text, terms, action, values, limit, 0, who.scope)
            change.count()
        else:
            try:
                change = self._changes.begin(who, text, terms, action, values, limit, who.scope)
            except TooMany:
                most = f"{RUNNING_MAX} works" if who.scope.rights is None else "Works"
                raise falcon.HTTPConflict(
                    description=f"{most} on many jobs are under way. Wait until one ends, or cancel one."
                ) from None
            resp.status = falcon.HTTP_202
            resp.location = f"/api/v1/bulk/{change.number}"
        resp.media = change.as_json()


class BulkResource:
    """/api/v1/bulk/{number}"""

    of_tubes = ("GET", "HEAD", "DELETE")

    def __init__(self, changes: BulkChanges) -> None:
        self._changes = changes

    def on_get(self, req: falcon.Request, resp: falcon.Response, number: str) -> None:
        Parameters(req).end()
        resp.media = self._find(req, number).as_json()

    def on_delete(self, req: falcon.Request, resp: falcon.Response, number: str) -> None:
        Parameters(req).end()
        change = self._find(req, number)
        change.cancel()
        change.over.wait(_END_S)
        resp.media = change.as_json()

    def _find(self, req: falcon.Request, text: str) -> BulkChange:
        if not text.isascii() or not text.isdecimal() or not 0 < len(text) < 20 or not int(text):
            raise wrong("a work has a number from 1 on")
        who = who_sends(req)
        change = self._changes.find(int(text), who, who.scope)
        if change is None:
            raise falcon.HTTPNotFound(description="There is no such work, or not any more.")
        return change


def _values(fields: Fields, action: str) -> Values:
    for name in ("tube", "pri", "delay_s", "ttr_s"):
        if fields.has(name) and (action, name == "tube") not in (("move", True), ("change", False)):
            raise wrong(f"{action} takes no {name}")
    if action == "move":
        return Values(tube=fields.tube("tube"))
    if action == "change":
        values = values_of(fields)
        if not values:
            raise wrong("nothing is to be changed: there is none of pri, delay_s, ttr_s")
        return values
    return Values()


def add(app: Any, backend: Backend) -> None:
    changes = BulkChanges(backend)
    app.add_route("/api/v1/bulk", BulkListResource(backend, changes))
    app.add_route("/api/v1/bulk/{number}", BulkResource(changes))
