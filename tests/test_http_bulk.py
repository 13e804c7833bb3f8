"""Work on all jobs that match a filter: counted and done as a model does it, cancelled, and durable as it says."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gevent
import pytest

from geventstalk.core.engine import OUT_OF_MEMORY
from geventstalk.core.job import DELAYED, READY, STATE_NAMES, Job
from geventstalk.filters import parse
from geventstalk.http import bulk, changes
from tests.support.filters import holds, random_filter
from tests.support.process import ServerProcess, free_port
from tests.support.web import Inside, Web, validate
from tests.support.wire import Client
from tests.test_http_search import Stock

Start = Callable[..., ServerProcess]
FITS = {
    "delete": ("ready", "delayed", "reserved", "buried"),
    "kick": ("delayed", "buried"),
    "bury": ("ready", "delayed", "reserved"),
    "release": ("reserved",),
    "move": ("ready", "delayed", "buried"),
    "change": ("ready", "delayed", "buried"),
}


@pytest.fixture
def stock(seed: int) -> Stock:
    return Stock(random.Random(seed))


def begin(web: Web, text: str, action: str, **others: object) -> Any:
    answer = web.json("POST", "/api/v1/bulk", {"filter": text, "action": action, **others})
    validate(answer, "/bulk", "post", 200 if others.get("dry_run") else 202)
    return answer


def end_of(web: Web, work: Any, state: str = "done") -> Any:
    """The work when it is over."""
    deadline = time.monotonic() + 30
    while True:
        answer = web.get(f"/bulk/{work['number']}", "/bulk/{number}")
        if answer["state"] != "running":
            assert answer["state"] == state, answer
            return answer
        assert time.monotonic() < deadline
        gevent.sleep(0.002)


# Bug: A dry run also counted jobs whose state the action does not fit.
def test_every_action_does_what_the_model_does(stock: Stock) -> None:
    """To the jobs that match, and to no others; a job that it does not fit is left alone and counted, also before."""
    for number in range(30):
        while len(stock.engine.jobs) < 60:
            stock.put()
        for _ in range(40):
            stock.change()
        text = random_filter(stock.draw, stock.ids)
        if "age" in text or "since" in text:
            continue
        action = stock.draw.choice([*FITS])
        others: dict[str, Any] = {"tube": "target"} if action == "move" else {"pri": 77} if action == "change" else {}
        if action == "change" and stock.draw.random() < 0.3:
            others = {"ttr_s": 77}
        limit = stock.draw.choice((None, None, 3))
        if limit is not None:
            others["limit"] = limit
        terms, now_ns = parse(text), stock.backend.now_ns()
        matching = sorted(job.id for job in stock.engine.jobs if holds(stock.engine, job, terms, now_ns))
        before = {job.id: seen(stock, job) for job in stock.engine.jobs}
        fits = STATE_NAMES if "ttr_s" in others else FITS[action]
        fitting = [id for id in matching if before[id]["state"] in fits]
        if limit is not None and len(fitting) >= limit:
            fitting = fitting[:limit]
            matching = [id for id in matching if id <= fitting[-1]]
        numbers = (len(matching), len(matching) - len(fitting))
        counted = begin(stock, text, action, dry_run=True, **others)
        assert (counted["matched"], counted["failed"]) == numbers, (text, action)
        assert (counted["state"], counted["number"], counted["done"]) == ("dry-run", 0, 0)
        parts = Counter((str(before[id]["tube"]), str(before[id]["state"])) for id in fitting)
        shown = {(part["tube"], part["state"]): part["count"] for part in counted["parts"]}
        left = parts - Counter(shown)
        assert {part: parts[part] for part in shown} == shown and len(shown) == min(len(parts), 20)
        assert not left or max(left.values()) <= min(shown.values()), "the largest ones are shown"
        assert counted["parts_total"] == len(parts)
        assert {job.id: seen(stock, job) for job in stock.engine.jobs} == before
        work = end_of(stock, begin(stock, text, action, **others))
        assert (work["matched"], work["failed"], work["done"]) == (*numbers, len(fitting)), (text, action)
        assert work["jobs_before"] == len(before) and work["searched"] <= len(before)
        after = {job.id: seen(stock, job) for job in stock.engine.jobs}
        for id, was in before.items():
            if id not in fitting:
                assert after[id] == was
            elif action == "delete":
                assert id not in after
            elif action == "change":
                assert after[id] == {**was, **{name: 77 for name in others if name in was}}
            elif action == "move":
                assert after[id] == {**was, "tube": "target"}
            else:
                assert after[id]["state"] == ("buried" if action == "bury" else "ready")
        assert len(after) == len(before) - (len(fitting) if action == "delete" else 0), number


def seen(web: Inside, job: Job) -> dict[str, object]:
    tube = web.engine.tube_of(job).name.decode()
    return {"state": STATE_NAMES[job.state], "pri": job.pri, "ttr_s": job.ttr_s, "tube": tube}


def test_jobs_that_come_or_change_meanwhile_are_left_alone(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is put after the beginning is not touched, nor one that no longer matches when its turn comes."""
    for _ in range(300):
        stock.put(b"x", "mail")
    monkeypatch.setattr(bulk, "_BATCH_MAX", 10)
    real = stock.backend.carry_out
    moved: list[int] = []

    def change(operation: Any) -> None:
        stock.put(b"x", "mail")
        later = operation._ids[-1]
        if stock.job(later).state == READY:
            stock.say(stock.workers[0], b"reserve-job %d" % later)
            moved.append(later)
        real(operation)

    monkeypatch.setattr(stock.backend, "carry_out", change)
    work = end_of(stock, begin(stock, "tube:mail state:ready x", "delete"))
    assert moved and work["done"] == work["matched"] - len(moved) and work["failed"] == len(moved)
    left = {job.id for job in stock.engine.jobs}
    assert set(moved) <= left and {id for id in left if id > 300} == set(range(301, stock.engine.next_id))
    assert all(stock.job(id).state == DELAYED for id in left if id <= 300 and id not in moved)


def test_a_work_that_is_over_keeps_no_job(stock: Stock) -> None:
    """A hundred works are kept, and each could keep a page of large jobs that are deleted."""
    bodies = [stock.job(stock.put(b"%d" % number, "mail")).body for number in range(20)]
    work = end_of(stock, begin(stock, "tube:mail", "delete", limit=3))
    assert (work["done"], work["searched"]) == (3, 20)
    stock.say(stock.workers[0], b"".join(b"delete %d\r\n" % job.id for job in list(stock.engine.jobs)))
    assert not len(stock.engine.jobs)
    bodies.append(bytes(bytearray(b"of no job")))
    assert len({sys.getrefcount(body) for body in bodies}) == 1


def test_cancelling(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(200):
        stock.put(b"x", "mail")
    monkeypatch.setattr(bulk, "_BATCH_MAX", 1)
    work = begin(stock, "", "delete")
    while stock.get(f"/bulk/{work['number']}", "/bulk/{number}")["done"] < 66:
        gevent.sleep(0)
    answer = stock.json("DELETE", f"/api/v1/bulk/{work['number']}")
    validate(answer, "/bulk/{number}", "delete", 200)
    assert answer["state"] == "cancelled" and 66 <= answer["done"] < 200
    assert len(stock.engine.jobs) == 200 - answer["done"] and answer["error"] is None
    again = stock.json("DELETE", f"/api/v1/bulk/{work['number']}")
    assert again == answer
    assert end_of(stock, begin(stock, "", "delete"))["done"] == 200 - answer["done"]


def test_only_some_are_under_way_and_only_some_are_kept(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(200):
        stock.put(b"x", "mail")
    monkeypatch.setattr(bulk, "_BATCH_MAX", 1)
    monkeypatch.setattr(bulk, "KEPT_MAX", 6)
    under_way = [begin(stock, "", "bury") for _ in range(4)]
    status, _, content = stock.ask("POST", "/api/v1/bulk", {"filter": "", "action": "bury"})
    assert status == 409 and json.loads(content)["detail"].startswith("4 works on many jobs are under way.")
    for work in under_way:
        end_of(stock, work)
    last = [end_of(stock, begin(stock, "nothing", "kick"))["number"] for _ in range(4)]
    kept = stock.get("/bulk")["bulk"]
    assert [work["number"] for work in kept] == [*last[::-1], 4, 3]
    for path, status in (("/bulk/1", 404), ("/bulk/0", 400), ("/bulk/x", 400)):
        assert stock.status("GET", "/api/v1" + path) == stock.status("DELETE", "/api/v1" + path) == status


def test_a_work_stops_where_there_is_no_room(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(50):
        stock.put(b"x", "mail")
    real = changes.change_of

    def change_of(*what: Any) -> Callable[[int, int], int]:
        do = real(*what)
        return lambda id, now_ns: OUT_OF_MEMORY if id == 31 else do(id, now_ns)

    monkeypatch.setattr(bulk, "change_of", change_of)
    work = end_of(stock, begin(stock, "", "move", tube="other"), "failed")
    assert work["error"] == "There is no room for it: memory or the journal is full."
    assert (work["done"], work["failed"], work["tube"]) == (30, 1, "other")


def test_listeners_and_the_audit_hear_of_it(stock: Stock) -> None:
    heard: list[dict[str, Any]] = []
    stock.backend.bulk_listeners.append(heard.append)
    for _ in range(30):
        stock.put(b"x", "mail")
    end_of(stock, begin(stock, "tube:mail", "change", pri=5, ttr_s=9))
    gevent.sleep(0)
    assert heard[-1]["state"] == "done" and heard[-1]["done"] == 30
    last, first = list(stock.backend.audit.latest_first())
    assert (first["action"], first["filter"], first["count"]) == ("begin bulk change", "tube:mail", 0)
    assert (last["action"], last["filter"], last["count"]) == ("bulk change", "tube:mail", 30)
    assert last["detail"] == "work 1: done; pri 5, ttr 9" and last["who"] == "local"


def test_what_is_wrong_is_a_problem(stock: Stock) -> None:
    for body in (
        {},
        {"filter": ""},
        {"filter": "", "action": "explode"},
        {"filter": "", "action": "move"},
        {"filter": "", "action": "move", "tube": "a b"},
        {"filter": "", "action": "move", "tube": "a", "pri": 1},
        {"filter": "", "action": "change"},
        {"filter": "", "action": "change", "tube": "a"},
        {"filter": "", "action": "delete", "pri": 1},
        {"filter": "", "action": "delete", "limit": 0},
        {"filter": "", "action": "delete", "dry_run": 1},
        {"filter": "nope:1", "action": "delete"},
        {"filter": "body:/(/", "action": "delete"},
        {"filter": 5, "action": "delete"},
        {"filter": "\ud800", "action": "delete"},
    ):
        status, headers, _ = stock.ask("POST", "/api/v1/bulk", body)
        assert (status, headers["content-type"]) == (400, "application/problem+json"), body
    assert stock.get("/bulk") == {"bulk": []}


def test_a_fault_ends_the_work_and_not_the_server(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    stock.put(b"x", "mail")
    work = begin(stock, "", "delete")
    monkeypatch.setattr("geventstalk.http.search.Search.pages", lambda search: iter([[None]]))
    assert end_of(stock, work, "failed")["error"] == "The server has a fault; its log says which."


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["-F", "-f0"])
def test_what_was_reported_done_is_durable(start_server: Start, tmp_path: Path, policy: str) -> None:
    """Killed in the middle: what was counted as done is done after the restart."""
    count = 2000
    arguments = ["-b", str(tmp_path / "journal"), policy]
    port = free_port()
    server = start_server("--http", str(port), *arguments)
    with Client(server.connect()) as client:
        client.send(b"use mail\r\n" + b"put 0 0 60 1\r\nx\r\n" * count)
        for _ in range(count + 1):
            client.reply()
    web = Web(port)
    moving = begin(web, "id<=1000", "move", tube="other")
    deleting = begin(web, "id>1000", "delete")
    deadline = time.monotonic() + 20
    while True:
        moved, deleted = (web.get(f"/bulk/{work['number']}", "/bulk/{number}") for work in (moving, deleting))
        if (moved["done"] and deleted["done"]) or time.monotonic() > deadline:
            break
    server.kill()
    again = free_port()
    start_server("--http", str(again), *arguments)
    web = Web(again)
    there = begin(web, "tube:other id<=1000", "delete", dry_run=True)["matched"]
    left = begin(web, "tube:mail id>1000", "delete", dry_run=True)["matched"]
    assert moved["done"] <= there <= 1000 and left <= 1000 - deleted["done"]
    assert begin(web, "", "delete", dry_run=True)["matched"] == 1000 + left
    assert web.get(f"/jobs?filter={quote('tube:other')}&limit=1", "/jobs")["jobs"][0]["id"] == 1
