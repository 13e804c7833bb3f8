"""The API's own description, as JSON."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

import falcon
import yaml

from geventstalk.fields import COUNT, FIELDS
from geventstalk.http.backend import Backend

_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load() -> dict[str, Any]:
    """Returns the document of openapi.yaml, with the counts of a job."""
    text = files("geventstalk.http").joinpath("openapi.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.load(text, _FAST_LOADER)
    counts = [field.api for field in FIELDS if field.kind == COUNT]
    properties = {name: {"type": "integer"} for name in counts}
    document["components"]["schemas"]["Job"]["properties"]["counts"] |= {"required": counts, "properties": properties}
    return document


@functools.cache
def as_json() -> bytes:
    """Returns the document as it is served."""
    return json.dumps(load()).encode()


class DocumentResource:
    """GET /api/v1/openapi.json"""

    public = True

    def __init__(self) -> None:
        self._content = as_json()  # at the start: later it would block other clients

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = self._content
        resp.content_type = falcon.MEDIA_JSON


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/openapi.json", DocumentResource())
