"""The API's resources, each answer against the document and against what the engine has."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any
from urllib.parse import quote, urlencode

import gevent
import pytest

from geventstalk.api_shapes import body_shape
from geventstalk.http import backend, slices
from geventstalk.http.api.tubes import words
from geventstalk.http.backend import SLICE_NS
from geventstalk.turn.replies import Channel
from tests.support.clock import ManualClock
from tests.support.web import Inside, puts


@pytest.fixture
def inside() -> Inside:
    return Inside()


def names(answer: Any) -> list[str]:
    return [tube["name"] for tube in answer["tubes"]]


# Tubes


def test_a_page_of_tubes_is_what_a_plain_sort_gives(inside: Inside, seed: int) -> None:
    rng = random.Random(seed)
    tubes = [f"t{number}.{rng.choice('abc')}" for number in range(1500)]
    client = inside.session(puts(tubes * 2))
    for tube in rng.sample(tubes, 300):
        client.receive(b"use %s\r\nput %d 0 60 1\r\nx\r\n" % (tube.encode(), rng.randrange(2000)), 0)
    while client.unfinished:
        client.run(0)
    engine = inside.engine
    for sort in ("name", "ready", "total", "watching", "waiting"):
        for descending in (False, True):
            counts: dict[str, Any] = {
                name.decode(): {
                    "name": name,
                    "ready": len(tube.ready),
                    "total": tube.total_jobs,
                    "watching": len(tube.watchers),
                    "waiting": 0,
                }[sort]
                for name, tube in engine.tubes.items()
                if b"a" in name
            }
            wanted = sorted(counts, key=lambda name: counts[name], reverse=descending)
            offset, limit = rng.randrange(len(wanted)), rng.randrange(1, 300)
            path = f"/tubes?match=A&sort={sort}&descending={str(descending).lower()}&offset={offset}&limit={limit}"
            answer = inside.json("GET", "/api/v1" + path)
            assert (answer["total"], names(answer)) == (len(wanted), wanted[offset : offset + limit])


def test_tubes_are_chosen_by_words_and_by_what_is_in_them(inside: Inside) -> None:
    client = inside.session(puts(["mail.in", "mail.out", "Thumb;nail"]))
    client.receive(b"use late\r\nput 5 100 60 1\r\nx\r\npause-tube mail.out 100\r\nwatch mail.in\r\n", 0)
    client.receive(b"reserve\r\nbury 1 0\r\nput 9999 0 60 1\r\ny\r\n", 0)

    def found(query: str) -> list[str]:
        return names(inside.json("GET", f"/api/v1/tubes?{query}"))

    assert found("match=mail") == ["mail.in", "mail.out"]
    assert found("match=MAIL%20out") == ["mail.out"]
    assert found("match=m*l*i") == ["mail.in"]
    assert found("match=%22") == []
    assert found("only=ready") == ["Thumb;nail", "late", "mail.out"]
    assert found("only=urgent") == ["Thumb;nail", "mail.out"]
    assert found("only=delayed") == ["late"]
    assert found("only=buried") == ["mail.in"]
    assert found("only=paused,ready") == ["mail.out"]
    assert found("only=no-consumer,ready") == ["Thumb;nail", "late", "mail.out"]
    assert found("prefix=mail.") == ["mail.in", "mail.out"] and found("prefix=ail") == []
    assert found("only=") == found("") == ["Thumb;nail", "default", "late", "mail.in", "mail.out"]


def test_tubes_whose_names_begin_alike_are_groups(inside: Inside) -> None:
    client = inside.session(
        puts(["mail.in", "mail.out", "mail.x-y", "mail-a", "a;b", "a;c", "x_", "x_y", ".a", ".b", "q"])
    )
    client.receive(b"reserve-job 1\r\nbury 1 0\r\n", 0)
    answer = inside.json("GET", "/api/v1/tube-groups")
    assert [(each["prefix"], each["tubes"]) for each in answer["groups"]] == [("mail.", 3), ("a;", 2), ("x_", 2)]
    assert answer["groups"][0]["jobs"] == {"urgent": 2, "ready": 2, "reserved": 0, "delayed": 0, "buried": 1}
    assert answer["total"] == 3
    for first in range(0, 120, 20):
        inside.session(puts([f"n{number // 2}.{number}" for number in range(first, first + 20)]))
    answer = inside.json("GET", "/api/v1/tube-groups")
    assert len(answer["groups"]) == 50 and answer["total"] == 63 and answer["groups"][0]["prefix"] == "mail."


@pytest.mark.parametrize(
    "query",
    [
        "sort=size",
        "only=ready,all",
        "limit=0",
        "limit=1001",
        "limit=x",
        "limit=%D9%A5",
        "limit=1_0",
        "offset=-1",
        "descending=1",
        "descending=",
        "match=a&match=b",
        "mach=a",
        "match=" + "x" * 201,
    ],
)
def test_what_is_asked_wrongly_is_a_problem(inside: Inside, query: str) -> None:
    status, headers, content = inside.ask("GET", f"/api/v1/tubes?{query}")
    assert (status, headers["content-type"]) == (400, "application/problem+json"), content


@pytest.mark.parametrize("text", ["a*" * 90 + "b", "*a" * 90 + "*b"])
def test_words_are_found_in_time_that_does_not_explode(text: str) -> None:
    assert not words(text)(b"a" * 200)
    assert words("a**b *")(b"xaxbx")


def test_one_tube_with_the_clients_that_use_and_watch_it(inside: Inside) -> None:
    producer = inside.session(b"use a/b\r\nput 7 0 60 3\r\nx\xff\n\r\nput 8 50 60 1\r\ny\r\nput 0 0 60 1\r\nz\r\n")
    worker = inside.session(b"watch a/b\r\nreserve-job 3\r\nbury 3 0\r\n")
    other = inside.session(b"watch c\r\nignore default\r\nreserve\r\n")
    for path in ("a/b", "a%2Fb"):
        tube = inside.json("GET", f"/api/v1/tubes/{path}")
        assert tube["name"] == "a/b" and tube["jobs"] == {
            "urgent": 1,
            "ready": 1,
            "reserved": 0,
            "delayed": 1,
            "buried": 1,
        }
        assert (tube["users"], tube["watchers"]) == ([producer.number], [worker.number])
        following = tube["next"]
        assert [following[state]["id"] for state in ("ready", "delayed", "buried")] == [1, 2, 3]
        assert following["ready"]["body"] == {"encoding": "base64", "data": "eP8K", "whole": True}
        assert following["buried"]["counts"]["buries"] == 1 and 49 < following["delayed"]["time_left_s"] <= 50
    tube = inside.json("GET", "/api/v1/tubes/c")
    assert (tube["waiting"], tube["users"], tube["watchers"]) == (1, [], [other.number])
    assert tube["next"] == {"ready": None, "delayed": None, "buried": None}
    assert inside.status("GET", "/api/v1/tubes/none") == 404
    assert inside.status("GET", "/api/v1/tubes/-a") == 400
    assert inside.status("GET", "/api/v1/tubes/" + quote("<b>")) == 400
    assert inside.status("GET", "/api/v1/tubes/") == 400


# Bug: The tubes . and .. had no address: browsers, curl and proxies remove these from a path.
@pytest.mark.parametrize(
    "name", [".", "..", "/", "//", "/../a", "a//b", "+", ";$()", "_-.$", "+%2B".replace("%", "/"), "0" * 200]
)
def test_each_tube_has_an_address(inside: Inside, name: str) -> None:
    inside.session(puts([name]))
    where = "/tube?" + urlencode({"name": name})
    assert inside.get(where)["name"] == name
    assert inside.json("PATCH", "/api/v1" + where, {"pause_s": 5})["paused_s"] == 5
    (entry,) = inside.backend.audit.latest_first()
    assert entry["tube"] == name
    assert inside.json("GET", "/api/v1/tubes/" + quote(name, safe=""))["paused_s"] == 5
    for wrong in ("", "?name=", "?name=a%20b", "?name=a&x=1", "?name=a&name=b"):
        assert inside.status("GET", "/api/v1/tube" + wrong) == 400
        assert inside.status("PATCH", "/api/v1/tube" + wrong, {"pause_s": 5}) == 400


def test_pausing_a_tube(inside: Inside) -> None:
    worker = inside.session(puts(["t"]) + b"watch t\r\n")
    tube = inside.json("PATCH", "/api/v1/tubes/t", {"pause_s": 100})
    assert tube["paused_s"] == 100 and 99 < tube["pause_left_s"] <= 100
    worker.take_out()
    worker.receive(b"reserve\r\n", 0)
    assert not worker.out
    tube = inside.json("PATCH", "/api/v1/tubes/t", {"pause_s": 0})
    assert (tube["paused_s"], tube["pause_left_s"]) == (0, 0)
    assert worker.take_out() == b"RESERVED 1 1\r\nx\r\n"
    assert inside.status("PATCH", "/api/v1/tubes/none", {"pause_s": 1}) == 404
    wrongs: list[Any] = [{}, {"pause_s": -1}, {"pause_s": 1 << 32}, {"pause_s": True}, {"pause_s": 1, "x": 1}, [], "x"]
    for wrong in wrongs:
        assert inside.status("PATCH", "/api/v1/tubes/t", wrong) == 400
    assert inside.status("PATCH", "/api/v1/tubes/t", {"pause_s": 1}, Content_Type="text/plain") == 415
    entries = [(entry["action"], entry["tube"], entry["detail"]) for entry in inside.backend.audit.latest_first()]
    assert entries == [("end pause", "t", None), ("pause", "t", "for 100 s")]


# Bug: Changes that waited for the journal took all connections of HTTP, and /healthz was not answered.
def test_changes_that_do_not_get_on_leave_room_for_looking(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait while the journal does not keep pace, and their connections with them."""
    monkeypatch.setattr(backend, "WAITING_MAX", 3)
    inside.engine.held = True
    ask = ("POST", "/api/v1/jobs", {"tube": "t", "body": "x"})
    waiting = [gevent.spawn(inside.status, *ask) for _ in range(3)]
    gevent.sleep(0)
    with gevent.Timeout(5):
        status, headers, _ = inside.ask(*ask)
    assert (status, headers["retry-after"]) == (503, "1")
    assert inside.status("GET", "/api/v1/tubes") == 200
    assert not any(each.ready() for each in waiting)
    inside.engine.held = False
    inside.turn.operations.run_some()
    assert [each.get(timeout=5) for each in waiting] == [201] * 3
    assert inside.status(*ask) == 201


@pytest.mark.parametrize("query", ["limit=1000", "sort=ready&offset=3000&limit=1000", "match=nothing"])
def test_others_have_a_turn_between_a_few_tubes(inside: Inside, monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    client = inside.session(puts(f"t{number}" for number in range(4000)))
    while client.unfinished:
        client.run(0)
    clock, yields = itertools.count(0, SLICE_NS // 4), itertools.count()
    yield_now = inside.backend.yield_now

    def counted() -> None:
        next(yields)
        yield_now()

    monkeypatch.setattr(slices, "perf_counter_ns", lambda: next(clock))
    monkeypatch.setattr(inside.backend, "yield_now", counted)
    answer = inside.json("GET", f"/api/v1/tubes?{query}")
    # A quarter of a slice passes with each look at the clock, and each tube has one look.
    assert next(yields) > 4001 // 5 + len(answer["tubes"]) // 5


def test_ages_and_the_tube_whose_ready_job_is_the_oldest(inside: Inside) -> None:
    client = inside.session(puts(["a", "b", "c"]) + b"use d\r\nput 0 100 60 1\r\nx\r\n")
    client.receive(b"use b\r\nput 0 0 60 1\r\nx\r\n", time.monotonic_ns())
    for id, seconds in ((1, 50), (2, 70), (3, 60), (4, 90), (5, 10)):
        job = inside.engine.jobs.get(id)
        assert job
        job.created_ns -= seconds * 1_000_000_000
    inside.engine.unsorted = True  # as after a start, with clocks that were wrong
    client.receive(b"reserve-job 4\r\nbury 4 0\r\n", time.monotonic_ns())
    ages = inside.json("GET", "/api/v1/server")["ages"]
    assert 70 <= ages["ready"] < 80 and 90 <= ages["buried"] < 100 and ages["reserved"] is ages["delayed"] is None
    tubes = inside.json("GET", "/api/v1/tubes?sort=oldest_ready&descending=true")["tubes"]
    assert [tube["name"] for tube in tubes] == ["b", "c", "a", "default", "d"]
    assert [tube["ages"]["ready"] and round(tube["ages"]["ready"], -1) for tube in tubes] == [70, 60, 50, None, None]
    assert 90 <= inside.json("GET", "/api/v1/tubes/d")["ages"]["buried"] < 100


# Bug: "All is well." was green with 1,584 jobs waiting and no worker; ten tubes with one old job each stood before a
# backlog of 158,700.
def test_the_worst_tubes_come_first_and_are_named_with_their_reason() -> None:
    """Ten tubes with one old job each once came before a backlog without a consumer, and all was said to be well."""
    clock = ManualClock()
    inside = Inside(clock=lambda: clock.ns)
    small = [f"old{at}" for at in range(10)]
    worker = inside.session(puts([*small, "mail"]))
    for _ in range(44):
        inside.session(puts(["invoices"] * 36))
    watching = b"".join(b"watch %s\r\n" % name.encode() for name in [*small, "mail"])
    inside.session(watching)
    assert inside.get("/server")["well"] == {"ok": True, "problems": []}, "a job that was just put is no trouble"
    for _ in range(140):
        clock.pass_s(5)
        inside.engine.settle_rates(clock.ns, 100)
    worker.receive(b"watch mail\r\nreserve\r\nbury 11 0\r\n", clock.ns)
    page = inside.get("/tubes?sort=trouble")
    assert names(page) == ["invoices", "mail", *small, "default"]
    assert page["tubes"][0]["trouble"]["why"] == "1,584 waiting and no consumer"
    told = inside.get("/server")["well"]["problems"]
    first = "invoices, 1,584 waiting and no consumer; mail, 1 buried, becoming more"
    assert told == [{"about": "work", "text": f"12 tubes need attention: {first}; and 10 more", "page": "tubes"}]


def test_rates_growth_and_the_tube_with_the_most_trouble(inside: Inside) -> None:
    worker = inside.session(puts(["calm", "grows", "grows", "old", "old"]) + b"watch old\r\nwatch calm\r\n")
    worker.receive(b"delete 1\r\n", time.monotonic_ns())
    old = inside.engine.jobs.get(4)
    assert old
    old.created_ns -= 3600 * 1_000_000_000
    page = inside.get("/tubes?sort=trouble")
    assert names(page) == ["old", "calm", "default", "grows"], "equals are ordered by their names"
    assert page["tubes"][0]["trouble"] == {"score": 39, "why": "2 waiting for 60 min"}
    tubes = {tube["name"]: tube for tube in page["tubes"]}
    assert tubes["grows"]["rates"]["put"]["m1"] == pytest.approx(2 / 60, rel=0.2)
    assert tubes["grows"]["growth"] == tubes["grows"]["rates"]["put"]["m1"] > tubes["grows"]["rates"]["put"]["m15"] > 0
    assert tubes["calm"]["growth"] == pytest.approx(0, abs=1e-3)
    assert names(inside.get("/tubes?sort=put_rate&descending=true&limit=2"))[0] in ("grows", "old")
    assert names(inside.get("/tubes?sort=delete_rate&descending=true&limit=1")) == ["calm"]
    assert names(inside.get("/tubes?sort=growth&limit=1")) in (["calm"], ["default"])
    assert names(inside.get("/tubes?only=growing")) == []
    worker.receive(b"use flood\r\n" + b"put 0 0 60 1\r\nx\r\n" * 20, time.monotonic_ns())
    assert names(inside.get("/tubes?only=growing")) == ["flood"]
    assert inside.get("/server")["rates"]["put"]["m1"] == pytest.approx(25 / 60, rel=0.2)
    inside.get("/tubes/flood", "/tubes/{tube}")


# Views


@pytest.mark.parametrize(
    ("data", "most", "encoding", "shown", "whole"),
    [
        (b"", 10, "text", "", True),
        (b"abc", 2, "text", "ab", False),
        ("aé".encode(), 3, "text", "aé", True),
        ("aé".encode(), 2, "text", "a", False),
        ("a😀".encode(), 4, "text", "a", False),
        ("😀".encode(), 0, "text", "", False),
        (b"a\xf0\x9f", 10, "base64", "YfCf", True),
        (b"a\xffbc", 3, "base64", "Yf9i", False),
        (b"a\xff", 1, "text", "a", False),
        (b"\xe2\x82xxxx", 5, "base64", "4oJ4eHg=", False),
        (b"\0\r\n", 10, "text", "\0\r\n", True),
    ],
)
def test_bodies_are_text_where_they_can(data: bytes, most: int, encoding: str, shown: str, whole: bool) -> None:
    assert body_shape(data + b"\r\n", len(data), most) == {"encoding": encoding, "data": shown, "whole": whole}


# Connections


class Deaf(Channel):
    def send(self, data: bytes) -> None:
        return

    def goes_on(self) -> None:
        return


def test_a_client_waits_since_its_wait_began_whatever_it_sent_when() -> None:
    """The first one since the second of two reserves that came together, the other although it went on sending."""
    clock = ManualClock()
    inside = Inside(clock=lambda: clock.ns)
    inside.backend.look_at = lambda channel: ("", "", 0, 0)
    first, other = Deaf(inside.session()), Deaf(inside.session(b"watch b\r\nignore default\r\n"))
    for channel in first, other:
        inside.turn.join(channel)
    inside.turn.step(first, b"reserve\r\nreserve\r\n")
    clock.pass_s(60)
    inside.turn.step(other, b"reserve\r\n")
    inside.session(b"put 0 0 60 1\r\nx\r\n")
    inside.turn.step(first, b"")
    clock.pass_s(5)
    inside.turn.step(other, b"list-tubes\r\n")
    listed = inside.get("/connections?sort=waiting&descending=true")["connections"]
    assert [(each["number"], each["waiting_s"]) for each in listed] == [(1, 5.0), (2, 5.0)]
    clock.pass_s(1)
    inside.turn.step(first, b"")
    inside.engine.stop_waiting(first.session)
    inside.turn.step(first, b"reserve\r\n")
    listed = inside.get("/connections?sort=waiting&descending=true")["connections"]
    assert [(each["number"], each["waiting_s"], each["idle_s"]) for each in listed] == [(2, 6.0, 1.0), (1, 0.0, 0.0)]
