"""The audit: changes, logins and wrong tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import falcon

from geventstalk.http.access import shows_entry, who_sends
from geventstalk.http.audit import Entry
from geventstalk.http.backend import Backend
from geventstalk.http.params import Parameters
from geventstalk.http.slices import Pace, json_list


class AuditResource:
    """GET /api/v1/audit"""

    of_tubes = ("GET", "HEAD")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        words = asked.text("match").lower().split()
        before = asked.integer("before", (1 << 63) - 1, 1, (1 << 63) - 1)
        limit = asked.integer("limit", 100, 1, 1000)
        asked.end()
        pace = Pace(self._backend)
        audit, who = self._backend.audit, who_sends(req)
        shown = [entry for entry in audit.latest_first() if shows_entry(entry, who)]
        entries = _select(shown, words, before, limit, pace)
        resp.data = json_list("entries", entries, pace, file=audit.path if who.scope.sees_all else None)
        resp.content_type = falcon.MEDIA_JSON


def _select(entries: Iterable[Entry], words: list[str], before: int, limit: int, pace: Pace) -> Iterator[Entry]:
    for entry in entries:
        pace.step()
        if entry["number"] < before and all(word in _text_of(entry) for word in words):
            yield entry
            limit -= 1
            if not limit:
                return


def _text_of(entry: Entry) -> str:
    return "\n".join(str(entry.get(name) or "") for name in ("who", "action", "filter", "tube", "from")).lower()


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/audit", AuditResource(backend))
