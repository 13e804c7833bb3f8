"""The API's document against the application: every operation is there, and each asks who sends it."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from geventstalk.http.tokens import Tokens
from tests.support.web import DOCUMENT, Inside, puts

READ, ADMIN = "read-token-0123456789", "admin-token-0123456789"
METHODS = ("get", "post", "put", "patch", "delete")
VALUES = {"tube": "default", "id": "1", "number": "1", "action": "kick", "name": "n"}
UNSAFE_BODIES: dict[str, Any] = {
    "/server": {"draining": True},
    "/tube": {"pause_s": 60},
    "/tubes/{tube}": {"pause_s": 60},
    "/jobs": {"tube": "t", "body": "x"},
    "/jobs/{id}": {"pri": 9},
    "/policies/{name}": {"tries": 1},
    "/schedules/{name}": {"cron": "@daily", "tube": "t"},
    "/bulk": {"filter": "", "action": "delete"},
}


OPERATIONS = [(path, method) for path, item in DOCUMENT["paths"].items() for method in item if method in METHODS]


def address(path: str) -> str:
    return "/api/v1" + re.sub(r"\{(\w+)\}", lambda found: VALUES[found[1]], path)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Inside:
    path = tmp_path_factory.mktemp("guarded") / "tokens"
    path.write_text(f"r read {READ}\na admin {ADMIN}\n")
    path.chmod(0o600)
    inside = Inside(tokens=Tokens(str(path), os.getuid()))
    inside.session(puts(["default"]))
    return inside


def state(inside: Inside) -> object:
    engine = inside.engine
    job = engine.jobs.get(1)
    return engine.draining, engine.next_id, job and (job.state, job.pri), engine.tubes[b"default"].pause_s


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_operation_authenticates_its_client(guarded: Inside, path: str, method: str) -> None:
    before = state(guarded)
    body = UNSAFE_BODIES.get(path) if method in ("post", "patch", "put") else None

    def status(token: str | None, **headers: str) -> int:
        guarded.token = token
        return guarded.status(method.upper(), address(path), body, **headers)

    assert status(None) == 401
    assert status(READ[:-1]) == 401
    if method == "get":
        assert status(READ, Sec_Fetch_Site="cross-site") == 403
    else:
        assert status(READ) == 403
        assert status(ADMIN, Origin="http://evil.example") == 403
        assert status(ADMIN, Sec_Fetch_Site="same-site") == 403
    assert state(guarded) == before


@pytest.mark.parametrize("path", list(DOCUMENT["paths"]))
def test_other_methods_are_not_allowed(guarded: Inside, path: str) -> None:
    guarded.token = ADMIN
    item = DOCUMENT["paths"][path]
    for method in METHODS:
        if method not in item:
            status, headers, _ = guarded.ask(method.upper(), address(path))
            assert status == 405
            assert {word.strip().lower() for word in headers["allow"].split(",")} >= {m for m in item if m in METHODS}


def test_the_document_is_handed_out_without_a_token(guarded: Inside) -> None:
    guarded.token = None
    assert guarded.json("GET", "/api/v1/openapi.json") == DOCUMENT
