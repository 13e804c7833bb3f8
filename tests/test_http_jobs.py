"""Jobs over the API: finding, looking, putting, changing and exporting them, held against the document and a model."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from geventstalk.core.job import SECOND_NS, held_body
from geventstalk.filters import parse
from geventstalk.http.api import export, jobs
from geventstalk.offline.transfer import import_lines
from tests.support.filters import holds, random_filter
from tests.support.web import Inside, validate
from tests.test_http_search import Stock

MARKUP = b'<script>alert(1)</script>\x00"\\\xe2\x80\xa8</'


@pytest.fixture
def web() -> Inside:
    return Inside()


@pytest.fixture
def stock(seed: int) -> Stock:
    return Stock(random.Random(seed))


def pages(web: Inside, text: str, **others: object) -> list[dict[str, Any]]:
    """All jobs that match, page by page."""
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        more = "".join(f"&{name}={str(value).lower()}" for name, value in others.items())
        answer = web.get(f"/jobs?filter={quote(text)}{more}{cursor}", "/jobs")
        found += answer["jobs"]
        if answer["next"] is None:
            return found
        cursor = f"&cursor={answer['next']}"


def put(web: Inside, body: str = "x", tube: str = "mail", **others: object) -> Any:
    answer = web.json("POST", "/api/v1/jobs", {"tube": tube, "body": body, **others})
    validate(answer, "/jobs", "post", 201)
    return answer


def detail(web: Inside, method: str, path: str, body: object = None) -> tuple[int, str]:
    status, headers, content = web.ask(method, "/api/v1" + path, body)
    assert status >= 400 and headers["content-type"] == "application/problem+json", (status, content)
    return status, json.loads(content)["detail"]


def test_pages_hold_what_the_model_says(stock: Stock) -> None:
    """Random jobs in random states and random filters: the same ids, whatever the pages' size."""
    for _ in range(100):
        stock.put()
    for _ in range(300):
        stock.change()
    for _ in range(25):
        text = random_filter(stock.draw, stock.ids)
        if "age" in text or "since" in text:
            continue
        descending = stock.draw.random() < 0.5
        found = pages(stock, text, limit=stock.draw.choice((9, 40, 1000)), descending=descending)
        terms = parse(text)
        expected = sorted(
            job.id for job in stock.engine.jobs if holds(stock.engine, job, terms, stock.backend.now_ns())
        )
        assert [job["id"] for job in found] == (expected[::-1] if descending else expected), text


def test_a_page_ends_when_the_search_was_long_enough(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(300):
        stock.put(b"x", "mail")
    monkeypatch.setattr("geventstalk.http.search._WORK_NS", 0)
    first = stock.get("/jobs?filter=nothing", "/jobs")
    assert first["jobs"] == [] and first["next"] is not None and first["searched"] < 300
    assert len(pages(stock, "x", limit=1000)) == 300


def test_a_page_holds_no_more_than_a_mebibyte_of_bodies(web: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_BODIES_BYTES_MAX", 1000)
    for _ in range(10):
        put(web, "x" * 400)
    assert len(web.get("/jobs?body=400", "/jobs")["jobs"]) == 3
    assert len(web.get("/jobs?body=1", "/jobs")["jobs"]) == 10
    assert len(pages(web, "", body=400)) == 10


def test_a_job_is_what_was_put(web: Inside) -> None:
    job = put(web, "user 42 é", "log/1", pri=7, delay_s=60, ttr_s=9)
    assert {key: job[key] for key in ("tube", "state", "pri", "delay_s", "ttr_s", "size", "holder")} == {
        "tube": "log/1",
        "state": "delayed",
        "pri": 7,
        "delay_s": 60,
        "ttr_s": 9,
        "size": 10,
        "holder": None,
    }
    assert job["body"] == {"encoding": "text", "data": "user 42 é", "whole": True} and 59 < job["time_left_s"] <= 60
    assert web.get(f"/jobs/{job['id']}", "/jobs/{id}")["body"] == job["body"]
    short = web.get(f"/jobs/{job['id']}?body=4", "/jobs/{id}")
    assert short["body"] == {"encoding": "text", "data": "user", "whole": False}
    plain = put(web)
    assert (plain["pri"], plain["delay_s"], plain["ttr_s"], plain["state"]) == (65536, 0, 60, "ready")


def test_the_reason_of_a_bury(web: Inside) -> None:
    first, second = put(web), put(web, tags="note:n")
    web.session(
        *[b"watch mail\r\n", b"reserve\r\n", b"reserve\r\n"],
        *[b"bury %d 5 no: \xc3\xbc\r\n" % job["id"] for job in (first, second)],
    )
    for job, text in ((first, ""), (second, "note:n")):
        found = web.get(f"/jobs/{job['id']}", "/jobs/{id}")
        assert found["tags"]["text"] == text and found["tags"]["reason"] == "no: ü" and found["state"] == "buried"


def test_a_put_has_tags(web: Inside) -> None:
    job = put(web, tags="idp:k:60 tries:3")
    assert job["tags"] == {"text": "idp:k:60 tries:3", "tried": 0, "reason": None}
    assert put(web, "x" * 50_000, tags="grp:g")["tags"]["text"] == "grp:g"
    for body in ("y", "y" * 50_000):
        for state in ("ready", "buried"):
            again = web.json("POST", "/api/v1/jobs", {"tube": "mail", "body": body, "tags": "idp:k"})
            validate(again, "/jobs", "post", 200)
            assert again == {"id": job["id"], "state": state}
            web.json("POST", f"/api/v1/jobs/{job['id']}/{'bury' if state == 'ready' else 'kick'}")
    assert web.ask("DELETE", f"/api/v1/jobs/{job['id']}")[0] == 204
    again = web.json("POST", "/api/v1/jobs", {"tube": "mail", "tags": "idp:k"})
    validate(again, "/jobs", "post", 200)
    assert again == {"id": job["id"], "state": "deleted"}
    for wrong, why in (
        ("tries:0", "tags are wrong: a tag's number is from 1 to 4,294,967,295"),
        ("é:1", "tags hold a character that is not ASCII"),
        ("grp:a  aft:b", "tags are wrong: a word is no tag, or a tag stands twice"),
        ("from:a", "tags are wrong: no client can give this tag"),
    ):
        assert detail(web, "POST", "/jobs", {"tube": "a", "tags": wrong}) == (400, why)
    put(web, tags="grp:b")
    put(web, tags="grp:a aft:b")
    assert detail(web, "POST", "/jobs", {"tube": "a", "tags": "grp:b aft:a"}) == (
        409,
        "With this job, groups of jobs would wait for each other for ever.",
    )


def test_bytes_come_and_go_as_they_are(web: Inside) -> None:
    """Names and bodies that are markup, or no text at all, are data: the answer is JSON, and nothing sniffs it."""
    for data in (MARKUP, bytes(range(256)), b"", b"\r\n"):
        status, headers, content = web.ask(
            "POST", "/api/v1/jobs", {"tube": "a", "body_base64": base64.b64encode(data).decode()}
        )
        assert status == 201 and headers["content-type"] == "application/json"
        assert headers["x-content-type-options"] == "nosniff"
        job = json.loads(content)
        assert headers["location"] == f"/api/v1/jobs/{job['id']}"
        body = job["body"]
        shown = body["data"].encode() if body["encoding"] == "text" else base64.b64decode(body["data"])
        assert shown == data and body["whole"]
        status, headers, content = web.ask("GET", f"/api/v1/jobs/{job['id']}/body")
        assert (status, content, headers["content-type"]) == (200, data, "application/octet-stream")
        assert headers["content-disposition"] == f'attachment; filename="job-{job["id"]}"'
        assert headers["x-content-type-options"] == "nosniff" and headers["content-length"] == str(len(data))
    (found,) = pages(web, '"<script>alert(1)"')
    assert found["body"]["data"].encode() == MARKUP
    status, headers, content = web.ask("GET", f"/api/v1/jobs?filter={quote('<script>:1')}")
    assert (status, headers["content-type"]) == (200, "application/json")
    status, _, content = web.ask("GET", f"/api/v1/jobs?filter={quote('x<script>:1')}")
    assert (status, json.loads(content)["at"]) == (400, 0)


def test_a_large_body_is_given_in_pieces(web: Inside) -> None:
    data = random.Random(1).randbytes(60_000) * 1
    job = put(web, base64.b64encode(data).decode()[:60_000])
    assert web.ask("GET", f"/api/v1/jobs/{job['id']}/body")[2] == base64.b64encode(data)[:60_000]


def test_changing_one_job(web: Inside) -> None:
    worker = web.session()
    id = put(web)["id"]
    path = f"/jobs/{id}"

    def ask(method: str, action: str = "", body: object = None) -> Any:
        answer = web.json(method, "/api/v1" + path + action, body)
        validate(answer, "/jobs/{id}/{action}" if action else "/jobs/{id}", method.lower(), 200)
        return answer

    assert ask("POST", "/bury")["state"] == "buried"
    assert detail(web, "POST", path + "/bury") == (409, "The job is buried already.")
    assert detail(web, "PATCH", path, {"delay_s": 5})[0] == 409
    assert ask("POST", "/kick")["counts"]["kicks"] == 1
    assert detail(web, "POST", path + "/kick")[1].startswith("The job is ready. Only a buried")
    assert detail(web, "POST", path + "/release") == (409, "The job is ready. Only a reserved job can be released.")
    assert ask("PATCH", "", {"delay_s": 100, "pri": 5, "ttr_s": 77, "tube": "other"})["state"] == "delayed"
    job = web.get(path, "/jobs/{id}")
    assert (job["pri"], job["ttr_s"], job["tube"], job["delay_s"]) == (5, 77, "other", 100)
    assert ask("PATCH", "", {"delay_s": 0})["state"] == "ready"
    worker.receive(b"reserve-job %d\r\n" % id, web.backend.now_ns())
    assert web.get(path, "/jobs/{id}")["holder"] == worker.number
    assert detail(web, "PATCH", path, {"pri": 1})[1].startswith("The job is reserved. A reserved job takes a new ttr")
    assert ask("PATCH", "", {"ttr_s": 1000})["time_left_s"] > 900
    assert ask("POST", "/release")["state"] == "ready"
    worker.receive(b"reserve-job %d\r\n" % id, web.backend.now_ns())
    assert ask("POST", "/bury")["state"] == "buried"
    assert web.status("DELETE", "/api/v1" + path) == 204
    for method, action in (("GET", ""), ("GET", "/body"), ("DELETE", ""), ("POST", "/kick")):
        assert detail(web, method, path + action) == (404, "There is no such job.")
    assert detail(web, "PATCH", path, {"pri": 1}) == (404, "There is no such job.")
    entries = [
        (entry["action"], entry["job"], entry["tube"], entry["detail"]) for entry in web.backend.audit.latest_first()
    ]
    assert entries[::-1] == [
        ("put", id, "mail", None),
        ("bury", id, "mail", None),
        ("kick", id, "mail", None),
        ("change", id, "mail", "pri 5, delay 100, ttr 77, tube other"),
        ("change", id, "other", "delay 0"),
        ("change", id, "other", "ttr 1000"),
        ("release", id, "other", None),
        ("bury", id, "other", None),
        ("delete", id, "other", None),
    ]
    assert web.engine.total_deletes if hasattr(web.engine, "total_deletes") else True


WRONG: list[tuple[str, str, object, int]] = [
    ("GET", "/jobs?limit=0", None, 400),
    ("GET", "/jobs?limit=1001", None, 400),
    ("GET", "/jobs?cursor=x", None, 400),
    ("GET", "/jobs?cursor=-2", None, 400),
    ("GET", f"/jobs?cursor={2**63}", None, 400),
    ("GET", "/jobs?body=65537", None, 400),
    ("GET", "/jobs?descending=1", None, 400),
    ("GET", "/jobs?fliter=x", None, 400),
    ("GET", "/jobs?filter=a&filter=b", None, 400),
    ("GET", "/jobs?filter=" + "a" * 2001, None, 400),
    ("GET", "/jobs?filter=body:/(/", None, 400),
    ("GET", "/export?filter=nope:1", None, 400),
    ("GET", "/export?limit=1", None, 400),
    ("GET", "/jobs/0", None, 400),
    ("GET", "/jobs/x", None, 400),
    ("GET", f"/jobs/{2**63}", None, 400),
    ("GET", "/jobs/1", None, 404),
    ("GET", "/jobs/1?body=1048577", None, 400),
    ("POST", "/jobs/1/delete", None, 404),
    ("POST", "/jobs/1/kick?force=1", None, 400),
    ("PATCH", "/jobs/1", {}, 400),
    ("PATCH", "/jobs/1", {"pri": -1}, 400),
    ("PATCH", "/jobs/1", {"pri": 2**32}, 400),
    ("PATCH", "/jobs/1", {"tube": "-x"}, 400),
    ("PATCH", "/jobs/1", {"state": "ready"}, 400),
    ("PATCH", "/jobs/1", {"pri": 1}, 404),
    ("POST", "/jobs", {}, 400),
    ("POST", "/jobs", {"tube": "a b"}, 400),
    ("POST", "/jobs", {"tube": "a", "body": "x", "body_base64": "eA=="}, 400),
    ("POST", "/jobs", {"tube": "a", "body_base64": "e"}, 400),
    ("POST", "/jobs", {"tube": "a", "body_base64": "é"}, 400),
    ("POST", "/jobs", {"tube": "a", "body": "\ud800"}, 400),
    ("POST", "/jobs", {"tube": "a", "body": 5}, 400),
    ("POST", "/jobs", {"tube": "a", "delay_s": 2**32}, 400),
    ("POST", "/jobs", {"tube": "a", "body": "x" * 65536}, 413),
    ("POST", "/jobs", [], 400),
]


def test_what_is_wrong_is_a_problem(web: Inside) -> None:
    for method, path, body, status in WRONG:
        found, text = detail(web, method, path, body)
        assert (found, bool(text)) == (status, True), (method, path, body)
    assert web.engine.next_id == 1


def test_a_wrong_filter_says_where(web: Inside) -> None:
    status, _, content = web.ask("GET", "/api/v1/jobs?filter=tube:mail%20age%3E1x")
    assert status == 400
    problem = json.loads(content)
    assert problem["at"] == 14
    assert problem["detail"] == 'Filter, character 15: "1x" is no time; write 90s, 5min, 1.5h or 2d.'


def test_a_draining_server_takes_no_put(web: Inside) -> None:
    web.engine.draining = True
    assert detail(web, "POST", "/jobs", {"tube": "a"}) == (503, "The server is draining: it refuses puts.")
    assert not web.engine.tubes.get(b"a")


def test_a_body_too_large_for_a_pattern_is_a_problem(web: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    put(web, "a" * 1000)
    monkeypatch.setattr("geventstalk.http.search._COST_MAX", 1000)
    for path in ("/jobs?filter=body:/b/", "/export?filter=body:/b/"):
        assert detail(web, "GET", path)[0] == 422
    assert detail(web, "POST", "/bulk", {"filter": "body:/b/", "action": "delete", "dry_run": True})[0] == 422


# --- export


def lines_of(web: Inside, text: str = "") -> list[dict[str, Any]]:
    status, headers, content = web.ask("GET", f"/api/v1/export?filter={quote(text)}")
    assert status == 200 and headers["content-type"] == "application/x-ndjson"
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def test_an_export_is_what_import_reads(stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs in all states, a reserved one as a restart finds it, and one whose body is written in pieces."""
    for _ in range(80):
        stock.put()
    for _ in range(300):
        stock.change()
    stock.put(random.Random(2).randbytes(50_000), "mail")
    monkeypatch.setattr(export, "_ENCODED_BYTES", 3 << 8)
    monkeypatch.setattr(export, "_PIECE_BYTES", 1000)
    header, *lines = lines_of(stock)
    assert header == {"format": "geventstalk-jobs", "version": 1, "highest_id": stock.engine.next_id - 1}
    stream = io.BytesIO(stock.ask("GET", "/api/v1/export")[2])
    directory = str(tmp_path / "journal")
    assert import_lines(stream, directory).jobs == len(lines)
    again = {line["id"]: line for line in exported(directory)[1:]}
    for line in lines:
        job = stock.job(line["id"])
        assert base64.b64decode(line["body"]) == held_body(job)[:-2]
        assert {key: value for key, value in again[line["id"]].items() if not key.endswith("_ns")} == {
            key: value for key, value in line.items() if not key.endswith("_ns")
        }
        for key, ns in (("created_ns", job.created_ns), ("deadline_ns", job.rank)):
            if key in line:
                assert abs(line[key] - stock.backend.unix_s(ns) * SECOND_NS) < SECOND_NS
                assert abs(again[line["id"]][key] - line[key]) < SECOND_NS


def exported(directory: str) -> list[dict[str, Any]]:
    from geventstalk.offline.transfer import export as export_journal

    return [dict(line) for line in export_journal(directory, lambda findings: None)]


def test_an_export_of_a_filter_holds_no_job_that_came_later(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(200):
        stock.put()
    monkeypatch.setattr("geventstalk.http.search.SLICE_NS", 0)

    def yield_now() -> None:
        stock.put()
        stock.change()

    monkeypatch.setattr(stock.backend, "yield_now", yield_now)
    _, *lines = lines_of(stock, "tube:mail")
    ids = [line["id"] for line in lines]
    assert ids == sorted(set(ids)) and ids and max(ids) <= 200 < stock.engine.next_id


def test_an_export_that_fails_late_has_no_end(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(100):
        stock.put(b"x" * 500, "mail")
    stock.put(b"x" * 5000, "mail")
    monkeypatch.setattr("geventstalk.http.search._COST_MAX", 20_000)
    with pytest.raises(ConnectionAbortedError, match="too many for this regular expression"):
        stock.ask("GET", "/api/v1/export?filter=body:/x/")
