"""Tubes: a page of them, one of them, and pausing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import falcon

from geventstalk.core.ages import Oldest
from geventstalk.core.job import Job
from geventstalk.core.order import EMPTY, Order
from geventstalk.core.tube import Tube
from geventstalk.http import views
from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend
from geventstalk.http.changes import NO_RIGHT
from geventstalk.http.params import Fields, Parameters, tube_name
from geventstalk.http.slices import Pace, json_list, page
from geventstalk.rights import LOOK, MANAGE
from geventstalk.trouble import GROWS
from geventstalk.turn.replies import Operation

_LISTED_MAX: Final = 100
"""The most connections that are named as users or watchers of a tube."""
_BODY_BYTES: Final = 200
_GROUPS_MAX: Final = 50
_PREFIX: Final = re.compile(rb"[^./;_-]+[./;_-]")

_SORTS: Final[dict[str, Callable[[Tube], Any]]] = {
    "name": lambda tube: tube.name,
    "ready": lambda tube: tube.ready_count(),
    "reserved": lambda tube: tube.reserved,
    "delayed": lambda tube: len(tube.delayed),
    "buried": lambda tube: len(tube.buried),
    "watching": lambda tube: len(tube.watchers),
    "total": lambda tube: tube.total_jobs,
}
_ONLY: Final[dict[str, Callable[[Tube], object]]] = {
    "ready": lambda tube: tube.ready_count(),
    "delayed": lambda tube: tube.delayed.first() != EMPTY,
    "reserved": lambda tube: tube.reserved,
    "buried": lambda tube: tube.buried.first() != EMPTY,
    "paused": lambda tube: tube.pause_s,
    "no-consumer": lambda tube: not tube.watchers,
    "urgent": lambda tube: tube.urgent,
}


class Pause(Operation):
    """Pauses a tube, or ends its pause. `found` says whether there was such a tube."""

    def __init__(self, backend: Backend, name: bytes, seconds: int) -> None:
        self._backend = backend
        self._name = name
        self._seconds = seconds
        self.found = False

    def run(self, now_ns: int) -> bool:
        self.found = self._backend.engine.pause(self._name, self._seconds, now_ns)
        return True

    def done(self) -> None:
        pass

    def failed(self) -> None:
        pass


class TubesResource:
    """GET /api/v1/tubes"""

    of_tubes = ("GET", "HEAD")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sorts: dict[str, Callable[[Tube], Any]] = {
            **_SORTS,
            "waiting": backend.engine.waiting_in,
            "oldest_ready": self._oldest_ready,
            "put_rate": lambda tube: self._rates(tube)["put"]["m1"],
            "delete_rate": lambda tube: self._rates(tube)["delete"]["m1"],
            "growth": self._growth,
            "trouble": self._calm,
        }
        self._only: dict[str, Callable[[Tube], object]] = {
            **_ONLY,
            "growing": lambda tube: self._growth(tube) > GROWS,
        }

    def _rates(self, tube: Tube) -> dict[str, dict[str, float]]:
        return views.rates(tube, self._backend.now_ns())

    def _growth(self, tube: Tube) -> float:
        return views.growth(self._rates(tube))

    def _calm(self, tube: Tube) -> tuple[int, bytes]:
        """Returns a key for sorting: the worst tube has the smallest."""
        return -views.trouble_of(self._backend, tube).score, tube.name

    def _oldest_ready(self, tube: Tube) -> int:
        """Returns the age of the oldest ready job, -1 without one."""
        created_ns = views.oldest(self._backend, tube).ready
        return -1 if created_ns is None else self._backend.now_ns() - created_ns

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        matches = words(asked.text("match"))
        prefix = asked.text("prefix").encode()
        only = [self._only[name] for name in asked.choices("only", self._only)]
        sort = asked.choice("sort", self._sorts, "name")
        key = self._sorts[sort]
        descending = asked.boolean("descending")
        offset = asked.integer("offset", 0, 0, 10_000_000)
        limit = asked.integer("limit", 100, 1, 1000)
        spark = asked.boolean("spark")
        asked.end()
        tubes, scope = self._backend.engine.tubes, who_sends(req).scope

        def keep(name: bytes) -> Any | None:
            tube = tubes.get(name)
            if tube is None or not scope.looks(name):
                return None
            if not name.startswith(prefix) or not matches(name) or not all(holds(tube) for holds in only):
                return None
            return key(tube)

        pace = Pace(self._backend)
        names, total = page(list(tubes), keep, pace, descending, offset, limit)
        # A tube that has gone meanwhile is left out.
        shown = (self._view(tubes[name], spark) for name in names if name in tubes)
        resp.data = json_list("tubes", shown, pace, total=total)
        resp.content_type = falcon.MEDIA_JSON

    def _view(self, tube: Tube, spark: bool) -> views.Json:
        backend = self._backend
        found = views.oldest(backend, tube)
        now_ns = backend.now_ns()
        view = views.tube(backend, tube, now_ns, found)
        if spark:
            view["spark"] = backend.sparks.line(tube.name, now_ns)
        return view


class GroupsResource:
    """GET /api/v1/tube-groups: tubes whose names begin alike, up to and with the first separator."""

    of_tubes = ("GET", "HEAD")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        Parameters(req).end()
        tubes, pace = self._backend.engine.tubes, Pace(self._backend)
        scope = who_sends(req).scope
        groups: dict[bytes, Counter[str]] = {}
        for name in list(tubes):
            pace.step()
            found, tube = _PREFIX.match(name), tubes.get(name)
            if found is not None and tube is not None and scope.looks(name):
                sums = groups.setdefault(found[0], Counter())
                sums["tubes"] += 1
                sums.update(views.jobs_in(tube))
        large, total = page(groups.items(), lambda group: _rank(*group), pace, False, 0, _GROUPS_MAX)
        shown = (
            {"prefix": prefix.decode("ascii"), "tubes": sums.pop("tubes"), "jobs": dict(sums)} for prefix, sums in large
        )
        resp.data = json_list("groups", shown, pace, total=total)
        resp.content_type = falcon.MEDIA_JSON


def _rank(prefix: bytes, sums: Counter[str]) -> tuple[int, bytes] | None:
    """Returns a key for sorting: the group of the most tubes has the smallest. A tube alone is no group."""
    return (-sums["tubes"], prefix) if sums["tubes"] > 1 else None


class TubeResource:
    """/api/v1/tubes/{tube}, and /api/v1/tube?name=: browsers and proxies take `.`, `..` and `//` out of a path."""

    of_tubes = ("GET", "HEAD", "PATCH")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response, tube: str | None = None) -> None:
        name = _name(req, tube)
        self._require(req, name, LOOK)
        users = self._users(name)
        found = self._find(name)
        resp.media = self._whole(found, users, views.oldest(self._backend, found))

    def on_patch(self, req: falcon.Request, resp: falcon.Response, tube: str | None = None) -> None:
        name = _name(req, tube)
        fields = Fields(req)
        seconds = fields.integer("pause_s")
        fields.end()
        self._require(req, name, MANAGE)
        pause = Pause(self._backend, name, seconds)
        self._backend.change(pause)
        if not pause.found:
            raise _no_such_tube()
        detail = f"for {seconds} s" if seconds else None
        action = "pause" if seconds else "end pause"
        self._backend.audit.record(who_sends(req), action, 1, tube=name.decode("ascii"), detail=detail)
        found = self._find(name)
        oldest = views.oldest(self._backend, found)
        resp.media = views.tube(self._backend, found, self._backend.now_ns(), oldest)

    def _require(self, req: falcon.Request, name: bytes, right: int) -> None:
        """Raises HTTPError when the sender lacks this right on a tube, or when there is no tube to look at."""
        scope = who_sends(req).scope
        if not scope.looks(name):
            raise _no_such_tube()
        if not scope.may(name, right):
            self._find(name)
            raise falcon.HTTPForbidden(description=NO_RIGHT)

    def _find(self, name: bytes) -> Tube:
        tube = self._backend.engine.tubes.get(name)
        if tube is None:
            raise _no_such_tube()
        return tube

    def _users(self, name: bytes) -> list[int]:
        """Returns the numbers of the first connections that use the tube. The engine has no list of them."""
        found: list[int] = []
        pace = Pace(self._backend)
        clients = self._backend.engine.clients
        for number in list(clients):
            pace.step()
            client = clients.get(number)
            if client is not None and client.used is not None and client.used.name == name:
                found.append(number)
                if len(found) == min(_LISTED_MAX, client.used.using):
                    break
        return found

    def _firsts(self, tube: Tube) -> dict[str, Job | None]:
        """Returns the first job of each state, except reserved."""
        firsts = [(state, order.first()) for state, order in _orders(tube)]
        jobs = self._backend.engine.jobs
        return {state: None if first == EMPTY else jobs.get(first) for state, first in firsts}

    def _whole(self, tube: Tube, users: list[int], oldest: Oldest) -> views.Json:
        backend = self._backend
        bodies: dict[int, bytes] = {}
        while missing := [job for job in self._firsts(tube).values() if job and not job.body and job.id not in bodies]:
            bodies |= {job.id: body for job, body in backend.with_bodies(missing)}
        now_ns = backend.now_ns()
        following = {
            state: job and views.job(backend, job, now_ns, _BODY_BYTES, job.body or bodies[job.id])
            for state, job in self._firsts(tube).items()
        }
        watchers = [number for number, _ in zip(tube.watchers, range(_LISTED_MAX), strict=False)]
        return views.tube(backend, tube, now_ns, oldest) | {"next": following, "users": users, "watchers": watchers}


def _no_such_tube() -> falcon.HTTPError:
    return falcon.HTTPNotFound(description="There is no such tube.")


def _orders(tube: Tube) -> list[tuple[str, Order]]:
    return [("ready", tube.ready), ("delayed", tube.delayed), ("buried", tube.buried)]


def _name(req: falcon.Request, tube: str | None) -> bytes:
    """Returns the name of the tube, from the path or the query."""
    asked = Parameters(req)
    text = asked.text("name") if tube is None else tube
    asked.end()
    return tube_name(text)


def words(text: str) -> Callable[[bytes], bool]:
    """Returns a check for whether each of the words is in a name, in capitals or not; `*` stands for anything."""
    wanted = [word.encode("utf-8").lower().split(b"*") for word in text.split()]

    def matches(name: bytes) -> bool:
        lower = name.lower()
        for parts in wanted:
            at = 0
            for part in parts:
                at = lower.find(part, at)
                if at < 0:
                    return False
                at += len(part)
        return True

    return matches


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/tubes", TubesResource(backend))
    app.add_route("/api/v1/tube-groups", GroupsResource(backend))
    one = TubeResource(backend)
    app.add_route("/api/v1/tube", one)
    app.add_route("/api/v1/tubes/{tube:path}", one)
