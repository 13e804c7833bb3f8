"""The audit: what is kept, what is written, and files that cannot be written."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from urllib.parse import urlencode

import pytest

from geventstalk.config import ConfigError
from geventstalk.http.access import Who
from geventstalk.http.audit import KEPT_MAX, Audit, check
from geventstalk.http.tokens import Tokens
from tests.support.clock import ManualClock
from tests.support.web import Inside

LOG = logging.getLogger("tests.audit")
OPERATOR = Who("operator", "admin", "127.0.0.1:5", "console")


def make(path: Path | str | None) -> Audit:
    audit = Audit(None if path is None else str(path), LOG)
    audit.unix_s = lambda: 5.5
    return audit


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_an_entry_has_everything(tmp_path: Path) -> None:
    audit = make(tmp_path / "a")
    heard: list[object] = []
    audit.listeners.append(heard.append)
    audit.record(OPERATOR, "delete", 7, tube="t", job=3, filter="state:buried", detail='a\n"b')
    (entry,) = audit.latest_first()
    assert entry == {
        "number": 1,
        "at": 5.5,
        "who": "operator",
        "role": "admin",
        "from": "127.0.0.1:5",
        "via": "console",
        "action": "delete",
        "tube": "t",
        "job": 3,
        "filter": "state:buried",
        "detail": 'a\n"b',
        "count": 7,
    }
    assert heard == [entry] == [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]


# Bug: An audit file with a deeply nested line stopped the start.
def test_memory_keeps_the_latest_and_a_start_brings_them_back(tmp_path: Path) -> None:
    path = tmp_path / "a"
    audit = make(path)
    for _ in range(KEPT_MAX + 5):
        audit.record(OPERATOR, "kick", 1)
    assert [entry["number"] for entry in audit.latest_first()] == list(range(KEPT_MAX + 5, 5, -1))
    with path.open("a") as file:
        file.write("[" * 100_000 + "\n")
        file.write('{"number": true}\nnull\n"x"\n{"number": 1e999, "at"')
    again = make(path)
    assert [entry["number"] for entry in again.latest_first()] == list(range(KEPT_MAX + 5, 5, -1))
    again.record(OPERATOR, "kick", 1)
    last, new = path.read_text().splitlines()[-2:]
    assert last == '{"number": 1e999, "at"' and json.loads(new)["number"] == KEPT_MAX + 6


def test_the_file_may_be_renamed_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    audit = make(path)
    audit.record(OPERATOR, "kick", 1)
    path.rename(tmp_path / "old")
    audit.record(OPERATOR, "kick", 1)
    path.unlink()
    audit.record(OPERATOR, "kick", 1)
    os.truncate(path, 0)
    audit.record(OPERATOR, "kick", 1)
    assert (numbers(tmp_path / "old"), numbers(path)) == ([1], [4])


def test_a_full_disk_stops_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    audit = make(path)
    audit.record(OPERATOR, "kick", 1)
    real, room = os.write, [20]

    def write(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        size = min(room[0], len(data))
        room[0] -= size
        return real(fd, data[:size])

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr("geventstalk.http.audit.os.write", write)
        for _ in range(3):
            audit.record(OPERATOR, "kick", 1)
        room[0] = 10000
        audit.record(OPERATOR, "kick", 1)
    assert [record.getMessage() for record in caplog.records] == [
        "the audit file cannot be written: there is no room; changes go on",
        "the audit file is written again; it misses 3 entries",
    ]
    lines = path.read_text().splitlines()
    assert (len(lines[1]), audit.missing) == (20, 3)
    assert [json.loads(line)["number"] for line in (lines[0], lines[2])] == [1, 5]
    assert len(list(audit.latest_first())) == 5


def test_a_flood_of_refused_tokens_is_told_seldom(caplog: pytest.LogCaptureFixture) -> None:
    audit = make(None)
    audit.record(OPERATOR, "kick", 1)
    for tenth_s in range(12_000):  # twenty minutes
        audit.refuse_token(Who("", "", f"10.0.0.{tenth_s % 7}:5", "api"), tenth_s * 100_000_000)
    assert audit.refused_tokens == 12_000
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 20 and lines[:2] == [
        "refused a token over HTTP from 10.0.0.0:5",
        "refused a token over HTTP from 10.0.0.5:5; 599 more since the last such line",
    ]
    kept = [
        (entry["who"], entry["role"], entry["from"], entry["action"], entry["count"]) for entry in audit.latest_first()
    ]
    assert kept[:-1] == [("", "", "10.0.0.1:5", "refuse token", 6000), ("", "", "10.0.0.0:5", "refuse token", 1)]


# Bug: A token that was guessed over HTTP left no trace, and a login none in the audit.
def test_logins_and_refused_tokens_leave_a_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geventstalk.http.access._GUESS_DELAY_S", 0)
    path, good, wrong = tmp_path / "tokens", "right" * 5, "wrong" * 5
    path.write_text(f"maria read {good}\n")
    path.chmod(0o600)
    clock = ManualClock()
    inside = Inside(tokens=Tokens(str(path), os.getuid()), clock=lambda: clock.ns)

    def told() -> list[tuple[str, str, str, str, int]]:
        audit = inside.backend.audit
        return [
            (each["who"], each["role"], each["via"], each["action"], each["count"]) for each in audit.latest_first()
        ]

    def login(token: str) -> int:
        return inside.send("POST", "/login", urlencode({"token": token}).encode(), {})[0]

    with caplog.at_level(logging.INFO):
        assert login(good) == 303
        assert login(wrong) == 403
        assert inside.send("GET", "/login", None, {"Authorization": f"Bearer {wrong}"})[0] == 401
        clock.pass_s(601)
        assert inside.status("GET", "/api/v1/server", Authorization=f"Bearer {wrong}") == 401
        assert inside.status("GET", "/api/v1/server", Authorization=f"Bearer {good}") == 200
        assert inside.status("GET", "/api/v1/server") == 401, "no token is no wrong one"
    assert told() == [
        ("", "", "api", "refuse token", 2),
        ("", "", "console", "refuse token", 1),
        ("maria", "read", "console", "log in", 1),
    ]
    assert inside.backend.audit.refused_tokens == 3 and caplog.text.count("refused a token over HTTP from") == 2
    assert wrong not in caplog.text and good not in caplog.text


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "no" / "file", tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"cannot write .* \(--audit\)"):
            Audit(str(path), LOG)
    for path in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(ConfigError, match=r"cannot write .* \(--audit\)"):
            check(str(path))
    check(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    make("/dev/null").record(OPERATOR, "kick", 1)


def test_the_api_gives_pages_that_match() -> None:
    inside = Inside()
    for number in range(1, 300):
        inside.backend.audit.record(OPERATOR, "kick" if number % 2 else "Delete", number, tube=f"t{number % 5}")
    inside.backend.audit.record(Who("local", "admin", "unix"), "drain", 1, detail="kick")

    def found(query: str) -> list[int]:
        return [entry["number"] for entry in inside.get(f"/audit?{query}")["entries"]]

    assert found("limit=3") == [300, 299, 298]
    assert found("before=298&limit=2") == [297, 296]
    assert found("match=delete%20T3&limit=2") == [298, 288]
    assert found("match=console") == [] and len(found("match=127.0.0.1&limit=1000")) == 299
    assert found("before=1") == [] and inside.get("/audit?limit=1")["file"] is None
    for wrong in ("before=0", "limit=1001", "match=" + "x" * 201, "who=operator"):
        assert inside.status("GET", f"/api/v1/audit?{wrong}") == 400
