"""Jobs that match a filter, as JSON lines that `geventstalk import` reads."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from time import monotonic
from typing import Any, Final

import falcon

from geventstalk.core.job import Job
from geventstalk.durable.export import fields_of, header_of_export
from geventstalk.http.access import who_sends
from geventstalk.http.api.jobs import filter_of
from geventstalk.http.backend import Backend
from geventstalk.http.matcher import CRLF_BYTES
from geventstalk.http.params import Parameters
from geventstalk.http.search import Search, SearchFailed

_PIECE_BYTES: Final = 1 << 15
"""The bytes of a piece. A slow client has no more than that in memory."""
_ENCODED_BYTES: Final = 3 << 14
"""The bytes of a body that are encoded at once; a multiple of 3."""
_FIRST_S: Final = 1.0
"""An export that fails within this time gets a problem as its answer."""


class ExportResource:
    """GET /api/v1/export"""

    of_tubes = ("GET", "HEAD")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        _, terms = filter_of(asked)
        asked.end()
        pieces = self._pieces(
            Search(self._backend, terms, last=self._backend.engine.next_id - 1, scope=who_sends(req).scope)
        )
        first = next(pieces, b"")
        resp.content_type = "application/x-ndjson"
        resp.set_header("Content-Disposition", 'attachment; filename="jobs.jsonl"')
        resp.stream = _after(first, pieces)

    def _pieces(self, search: Search) -> Iterator[bytes]:
        """Yields the lines, some at a time. The first line has no `jobs`: their number is unknown."""
        backend = self._backend
        lines = [_json(header_of_export(None, backend.engine.next_id - 1)) + b"\n"]
        size = len(lines[0])
        soon = monotonic() + _FIRST_S
        for jobs in search.pages():
            for job, body in backend.with_bodies(jobs):
                if not search.still(job):
                    continue
                for part in self._line(job, body):
                    lines.append(part)
                    size += len(part)
                    if size >= _PIECE_BYTES:
                        yield b"".join(lines)
                        lines, size = [], 0
                    search.step()
            if size and monotonic() >= soon:
                yield b"".join(lines)
                lines, size = [], 0
                soon = monotonic() + _FIRST_S
        yield b"".join(lines)

    def _line(self, job: Job, body: bytes) -> Iterator[bytes]:
        """Yields one line, in parts. All but the body is read at once, and the body never changes."""
        offset_ns = round(self._backend.unix_s(0) * 1e9)
        name = self._backend.engine.tube_of(job).name
        yield _json(fields_of(job, name, lambda ns: ns + offset_ns))[:-1] + b',"body":"'
        end = len(body) - CRLF_BYTES
        for at in range(0, end, _ENCODED_BYTES):
            yield b64encode(body[at : min(end, at + _ENCODED_BYTES)])
        yield b'"}\n'


def _json(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


def _after(first: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    try:
        yield from pieces
    except SearchFailed as error:
        # Too late for a problem. The response has no end, so its client knows that it is incomplete.
        raise ConnectionAbortedError(str(error)) from None


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/export", ExportResource(backend))
