"""Users with rights on tubes, over HTTP: every route with every right beside a model, and nothing of others is told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import gevent
import pytest

from geventstalk.http.access import Who
from geventstalk.http.bulk import RUNNING_MAX
from geventstalk.http.events import USER_STREAMS_MAX, Events, Full
from geventstalk.http.scope import Scope
from geventstalk.http.tokens import UserTokens
from geventstalk.rights import ALL, LOOK, MANAGE, OPERATE, PUT, WORK, Access, Limits, Proof, User, hash_of
from geventstalk.wire.guarded import Usage
from tests.support.check import check
from tests.support.web import Inside, validate

TOKEN = "t" * 43
ADMIN = "a" * 43
SERVER_WIDE = {
    "/api/v1/connections",
    "/api/v1/connections/{number}",
    "/api/v1/users",
    "/api/v1/journal",
    "/api/v1/cluster",
    "/api/v1/policies",
    "/api/v1/policies/{name:path}",
    "/api/v1/schedules",
    "/api/v1/schedules/{name}",
    "/api/v1/reload",
    "/metrics",
}
"""What tells of all tubes, or changes the server."""


class World(Inside):
    """Jobs 1 to 4 of the tube t (ready, delayed, buried, reserved) and 5 of `own`; `web` is the user's client."""

    def __init__(self, rights: dict[str, int]) -> None:
        super().__init__()
        admin = User("admin", Proof(token=hash_of(ADMIN)), {"*": ALL | OPERATE})
        self.users = Access([User("u", Proof(token=hash_of(TOKEN)), rights), admin])
        self.access.add(UserTokens(lambda: self.users))
        self.token = TOKEN
        self.other = self.session(
            b"use t\r\nwatch t\r\n" + b"".join(b"put 5 %d 60 6\r\nSECRET\r\n" % delay for delay in (0, 99, 0, 0)),
            b"reserve-job 3\r\nbury 3 5\r\nreserve-job 4\r\nuse own\r\nput 5 0 60 3\r\nown\r\n",
        )

    def as_admin(self, method: str, path: str, body: object = None) -> Any:
        self.token = ADMIN
        try:
            return self.json(method, path, body)
        finally:
            self.token = TOKEN


# method, path, body; the right on t beside the right to look, and the status with it
ROUTES: list[tuple[str, str, object, int, int]] = [
    ("GET", "/tube?name=t", None, LOOK, 200),
    ("GET", "/tubes/t", None, LOOK, 200),
    ("PATCH", "/tube?name=t", {"pause_s": 9}, MANAGE, 200),
    *[("GET", f"/jobs/{id}", None, LOOK, 200) for id in range(1, 5)],
    ("GET", "/jobs/1/body", None, LOOK, 200),
    ("PATCH", "/jobs/1", {"pri": 9}, MANAGE, 200),
    ("PATCH", "/jobs/4", {"ttr_s": 9}, MANAGE, 200),
    ("PATCH", "/jobs/1", {"tube": "own"}, MANAGE, 200),
    *[("DELETE", f"/jobs/{id}", None, MANAGE, 204) for id in range(1, 5)],
    ("POST", "/jobs/3/kick", None, MANAGE, 200),
    ("POST", "/jobs/1/bury", None, MANAGE, 200),
    ("POST", "/jobs/4/release", None, MANAGE, 200),
    ("POST", "/jobs/1/kick", None, MANAGE, 409),
]


@pytest.mark.parametrize("rights", range(16))
def test_every_route_with_every_right(rights: int) -> None:
    for method, path, body, needs, status in ROUTES:
        world = World({"t": rights, "own": ALL})
        expected = 404 if not rights & LOOK else status if rights & needs else 403
        found = world.ask(method, f"/api/v1{path}", body)
        assert found[0] == expected, (method, path, rights, found)
        if expected == 404:
            absent = path.replace("=t", "=absent").replace("/tubes/t", "/tubes/absent")
            for id in range(1, 5):
                absent = absent.replace(f"/jobs/{id}", "/jobs/77")
            assert found == world.ask(method, f"/api/v1{absent}", body), "as for what does not exist"
        check(world.engine)
        untouched = World({})
        if method == "GET" or expected in (403, 404, 409):
            assert stand(world) == stand(untouched), (method, path)
    world = World({"t": rights, "own": ALL})
    assert world.status("PATCH", "/api/v1/jobs/5", {"tube": "t"}) == (200 if rights & MANAGE else 403)
    world = World({"t": rights, "own": ALL})
    put = {"tube": "t", "body": "x"}
    assert world.status("POST", "/api/v1/jobs", put) == (201 if rights & PUT else 403)
    dead = {"tube": "own", "body": "x", "tags": "tries:1 dead:t"}
    assert world.status("POST", "/api/v1/jobs", dead) == (201 if rights & PUT else 403)
    ids = {job["id"] for job in world.json("GET", "/api/v1/jobs?limit=100")["jobs"]}
    assert ids & {1, 2, 3, 4} == ({1, 2, 3, 4} if rights & LOOK else set()) and 5 in ids
    lines = world.ask("GET", "/api/v1/export")[2].splitlines()[1:]
    assert {json.loads(line)["id"] for line in lines} == ids
    names = {tube["name"] for tube in world.json("GET", "/api/v1/tubes")["tubes"]}
    assert names == ({"t", "own"} if rights & LOOK else {"own"})
    series = world.json("GET", "/api/v1/history?tube=t")["series"]["ready"]
    assert all(value is None for value in series) or rights & LOOK
    told = world.get("/session")
    assert told["role"] == "user" and set(told["rights"]["own"]) == {"put", "work", "look", "manage"}


def stand(world: World) -> list[tuple[Any, ...]]:
    """Returns what a change would show."""
    engine = world.engine
    jobs = [(j.id, engine.tube_of(j).name, j.state, j.pri, j.ttr_s) for j in engine.jobs if j.id < 6]
    return [*jobs, *[(tube.name, tube.pause_s) for tube in engine.tubes.values()]]


@pytest.mark.parametrize("rights", range(16))
@pytest.mark.parametrize("action", ["delete", "kick", "move", "change"])
def test_bulk_changes_touch_what_may_be_managed(rights: int, action: str) -> None:
    world = World({"t": rights, "own": ALL})
    request: dict[str, object] = {"filter": "", "action": action}
    if action == "move":
        request["tube"] = "own"
    if action == "change":
        request["pri"] = 77
    shown = {5, *(range(1, 5) if rights & LOOK else ())}
    managed = {5, *(range(1, 5) if rights & LOOK and rights & MANAGE else ())}
    counted = world.json("POST", "/api/v1/bulk", {**request, "dry_run": True})
    validate(counted, "/bulk", "post", 200)
    assert counted["matched"] == len(shown) and counted["jobs_before"] == 0
    assert {part["tube"] for part in counted["parts"]} <= {
        world.engine.tube_of(job(world, id)).name.decode() for id in managed
    }
    begun = world.json("POST", "/api/v1/bulk", request)
    done = end_of(world, begun["number"])
    fits = {"delete": {1, 2, 3, 4, 5}, "kick": {2, 3}, "move": {1, 2, 3, 5}, "change": {1, 2, 3, 5}}[action]
    assert done["done"] == len(managed & fits) and done["matched"] == len(shown)
    for id in range(1, 5):
        if id not in managed & fits:
            assert [each for each in stand(world) if each[0] == id] == [
                each for each in stand(World({})) if each[0] == id
            ]
    assert world.status("POST", "/api/v1/bulk", {"filter": "", "action": "move", "tube": "secret"}) == 403


def job(world: World, id: int) -> Any:
    found = world.engine.jobs.get(id)
    assert found is not None
    return found


def end_of(world: World, number: int) -> Any:
    for _ in range(200):
        found = world.json("GET", f"/api/v1/bulk/{number}")
        if found["state"] != "running":
            return found
        gevent.sleep(0.005)
    raise AssertionError(found)


def routes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for each in node:
        if each.resource is not None:
            yield each.uri_template, each.resource
        yield from routes(each.children)


def test_each_route_says_whom_it_is_for() -> None:
    """A route without a word is for those who may look at every tube."""
    world = World({"own": ALL})
    found = dict(routes(world.application._router._roots))
    assert len(found) > 25
    for path, resource in found.items():
        said = getattr(resource, "public", False) or hasattr(resource, "of_tubes")
        assert said != (path in SERVER_WIDE), path
    for path in SERVER_WIDE:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            status = world.status(method, re.sub(r"\{.*\}", "1", path), {} if method != "GET" else None)
            assert status in (403, 405), (method, path, status)
    assert world.status("PATCH", "/api/v1/server", {"draining": True}) == 403 and not world.engine.draining
    assert world.status("GET", "/api/v1/history") == 403


QUERIES = (
    "/tubes", "/tubes?sort=trouble&spark=true", "/tubes?match=secret", "/tubes?prefix=sec", "/tube-groups", "/jobs",
    "/jobs?descending=true&limit=1", "/jobs?filter=body:/SEC/", "/jobs?filter=state:ready", "/jobs?filter=id:1..4",
    "/jobs?filter=-tube:own", "/export", "/export?filter=body:SECRET", "/bulk", "/bulk/1", "/audit",
    "/audit?match=kick", "/server", "/session", "/history?tube=own", "/jobs/1", "/jobs/1/body", "/jobs/4", "/journal",
    "/connections", "/users", "/policies", "/schedules",
)  # fmt: skip


def test_nothing_of_others_is_told() -> None:
    world = World({"own": ALL})
    secret = world.session(
        b"use secret.tube\r\n" + 3 * b"put 5 0 60 6\r\nSECRET\r\n" + b"use secret.b\r\nput 0 0 9 1\r\nx\r\n"
    )
    assert secret.used is not None
    world.as_admin("POST", "/api/v1/jobs/3/kick")
    number = world.as_admin("POST", "/api/v1/bulk", {"filter": "tube:secret.tube", "action": "bury"})["number"]
    for query in QUERIES:
        for method in ("GET", "HEAD"):
            status, headers, content = world.ask(method, f"/api/v1{query}")
            told = f"{status} {headers} {content.decode()}"
            assert "SECRET" not in told and "secret" not in told.replace("match=secret", ""), (query, told)
    assert world.status("GET", f"/api/v1/bulk/{number}") == world.status("GET", "/api/v1/bulk/99") == 404
    assert world.status("DELETE", f"/api/v1/bulk/{number}") == 404
    for path in ("/tube?name={}", "/tubes/{}", "/history?tube={}", "/jobs?filter=tube:{}", "/export?filter=tube:{}"):
        for method in ("GET", "PATCH"):
            body = {"pause_s": 1} if method == "PATCH" else None
            there, absent = (
                world.ask(method, f"/api/v1{path.format(quote(name))}", body) for name in ("secret.tube", "absent")
            )
            same = [json.dumps(moment_free(each[2])) for each in (there, absent)]
            assert there[0] == absent[0] and same[0] == same[1], (path, there, absent)
    server = world.get("/server")
    assert not any(server["jobs"].values()) and server["tubes"] == 0 and server["connections"]["open"] == 0
    assert world.json("GET", "/api/v1/jobs")["searched"] == 1, "the number of others' jobs is not told"
    assert world.json("GET", "/api/v1/jobs?filter=body:none")["searched"] == 0


def moment_free(content: bytes) -> Any:
    try:
        found = json.loads(content)
    except ValueError:
        return content.decode()
    return (
        {key: value for key, value in found.items() if key not in ("from", "to")} if isinstance(found, dict) else found
    )


def test_the_audit_shows_the_own_entries_and_those_of_visible_tubes() -> None:
    world = World({"own": ALL, "t": LOOK})
    world.as_admin("POST", "/api/v1/jobs/3/kick")
    world.as_admin("PATCH", "/api/v1/server", {"draining": False})
    world.as_admin("POST", "/api/v1/jobs", {"tube": "hidden", "body": "x"})
    assert world.status("DELETE", "/api/v1/jobs/5") == 204
    entries = world.get("/audit")["entries"]
    assert [(entry["who"], entry["action"], entry["tube"]) for entry in entries] == [
        ("u", "delete", "own"),
        ("admin", "kick", "t"),
    ]


def test_rights_that_are_taken_away_are_gone_at_once() -> None:
    world = World({"t": ALL, "own": ALL})
    scope = Scope(lambda: world.users.users.get("u"))
    who = Who("u", "user", "", scope=scope)
    events = Events(world.backend)
    stream = events.join((b"t", b"own"), lambda now_ns: True, lambda: None, who)
    assert [tube["name"] for tube in figures(next(stream))["tubes"]] == ["t", "own"]
    assert figures(events.first_figures(stream))["server"]["tubes"] == 0
    world.backend.audit.record(who, "kick", 1, tube="t")
    world.backend.audit.record(Who("x", "admin", ""), "kick", 1, tube="t")
    world.backend.audit.record(Who("x", "admin", ""), "kick", 1, tube="hidden")
    world.backend.audit.record(Who("x", "admin", ""), "bulk kick", 1, filter="tube:t")
    assert next(stream).count(b"event: audit") == 2
    world.users = Access([User("u", Proof(token=hash_of(TOKEN)), {"own": ALL})])
    assert [tube["name"] for tube in figures(events.first_figures(stream))["tubes"]] == ["own"]
    world.backend.audit.record(Who("x", "admin", ""), "kick", 1, tube="t")
    world.backend.audit.record(Who("x", "admin", ""), "kick", 1, tube="own")
    assert next(stream).count(b"event: audit") == 1
    assert world.status("GET", "/api/v1/jobs/1") == 404
    world.users = Access([])
    assert figures(events.first_figures(stream))["tubes"] == [] and not scope.may(b"own", WORK)
    for _ in range(USER_STREAMS_MAX - 1):
        events.join((), lambda now_ns: True, lambda: None, who)
    with pytest.raises(Full):
        events.join((), lambda now_ns: True, lambda: None, who)
    events.join((), lambda now_ns: True, lambda: None, Who("u", "admin", ""))


def figures(piece: bytes) -> Any:
    return json.loads(piece.rpartition(b"data: ")[2])


def test_a_user_that_may_look_at_every_tube_sees_the_whole_server() -> None:
    world = World({"*": LOOK, "own": ALL})
    assert world.get("/server")["jobs"]["ready"] == 2
    assert world.status("GET", "/metrics") == 200 and world.status("GET", "/api/v1/journal") == 200
    assert world.status("DELETE", "/api/v1/jobs/1") == 403 and world.status("DELETE", "/api/v1/jobs/5") == 204
    assert world.status("PATCH", "/api/v1/server", {"draining": True}) == 403
    assert world.get("/session")["sees_all"] is True


def test_bulk_changes_of_users_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"own": ALL})
    monkeypatch.setattr("geventstalk.http.bulk.spawn", lambda *words: None)
    order = {"filter": "", "action": "kick"}
    assert world.status("POST", "/api/v1/bulk", order) == 202
    assert world.status("POST", "/api/v1/bulk", order) == 409, "one at a time"
    for _ in range(RUNNING_MAX - 1):
        world.as_admin("POST", "/api/v1/bulk", order)


class Counted:
    """The part of serving/guard.py that counts."""

    def __init__(self, users: Access) -> None:
        self._users = users
        self._usage = Usage()

    def users(self) -> Access:
        return self._users

    def usage_of(self, name: str) -> Usage:
        return self._usage


def test_limits_of_a_user_hold_over_http() -> None:
    world = World({})
    limits = Limits(puts_per_second=1, puts_burst=2, job_bytes=4)
    world.users = Access([User("u", Proof(token=hash_of(TOKEN)), {"own": ALL}, limits)])
    counted = world.backend.guard = Counted(world.users)
    statuses = [
        world.status("POST", "/api/v1/jobs", {"tube": "own", "body": body}) for body in ("12345", "1", "2", "3")
    ]
    assert statuses == [413, 201, 201, 429]
    assert (counted.usage_of("u").puts, counted.usage_of("u").refused) == (2, 2)
    gevent.sleep(1.1)
    assert world.status("POST", "/api/v1/jobs", {"tube": "own", "body": "4"}) == 201, "a refused put takes no turn"


def test_the_jobs_of_a_user_are_counted_over_http() -> None:
    world = World({})
    limits = Limits(jobs=3, bytes=5, ttr=30, delay=7)
    world.users = Access([User("u", Proof(token=hash_of(TOKEN)), {"own": ALL}, limits)])
    world.backend.guard = Counted(world.users)
    world.backend.engine.quotas = {b"u": (3, 5)}
    job = {"tube": "own", "body": "12", "ttr_s": 60, "delay_s": 9}
    first = world.json("POST", "/api/v1/jobs", job)
    assert (first["ttr_s"], first["delay_s"]) == (30, 7)
    bodies = ("1234", "123", "", "")
    assert [world.status("POST", "/api/v1/jobs", job | {"body": body}) for body in bodies] == [507, 201, 201, 507]
    assert world.status("DELETE", f"/api/v1/jobs/{first['id']}") == 204
    assert world.status("POST", "/api/v1/jobs", job) == 201
