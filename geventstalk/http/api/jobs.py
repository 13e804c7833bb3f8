"""Jobs: a page of those that match a filter, one of them, its body, putting one, and changing one."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from typing import Any, Final

import falcon

from geventstalk.core.engine import DUPLICATE
from geventstalk.core.operate import KEEP
from geventstalk.filters import Term, parse
from geventstalk.http import views
from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend
from geventstalk.http.changes import BODY_BYTES, NO_RIGHT, OneChange, OnePut, Values, find, no_such_job
from geventstalk.http.matcher import CRLF_BYTES, ID_MAX
from geventstalk.http.params import Fields, Parameters, wrong
from geventstalk.http.search import Search
from geventstalk.http.slices import Pace
from geventstalk.rights import MANAGE, NO_LIMIT, PUT, User
from geventstalk.tags import Tags, parse_put
from geventstalk.wire.guarded import Usage, tags_for

_ID: Final = re.compile(r"[0-9]{1,19}")
_FILTER_TEXT_MAX: Final = 1 << 16
"""Longer than any filter: a filter that is too long gets a sentence of its own."""
_BODIES_BYTES_MAX: Final = 1 << 20
"""The bytes of bodies in one answer; then a page ends."""
_PRI: Final = 1 << 16
_TTR_S: Final = 60
_PIECE_BYTES: Final = 1 << 16
_ACTIONS: Final = ("kick", "bury", "release")


def filter_of(asked: Parameters) -> tuple[str, tuple[Term, ...]]:
    """Returns the filter of a request, as text and as terms. Raises FilterError."""
    text = asked.text("filter", most=_FILTER_TEXT_MAX)
    return text, parse(text)


class JobsResource:
    """/api/v1/jobs"""

    of_tubes = ("GET", "HEAD", "POST")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        _, terms = filter_of(asked)
        cursor = asked.optional("cursor", 40)
        limit = asked.integer("limit", 50, 1, 1000)
        descending = asked.boolean("descending")
        body_bytes = asked.integer("body", 200, 0, 65536)
        asked.end()
        at = None if cursor is None else _position(cursor)
        search = Search(self._backend, terms, descending, at, scope=who_sends(req).scope)
        jobs = self._page(search, limit, body_bytes)
        following = "null" if search.exhausted else f'"{search.position}"'
        resp.data = f'{{"jobs":[{",".join(jobs)}],"next":{following},"searched":{search.searched}}}'.encode()
        resp.content_type = falcon.MEDIA_JSON

    def _page(self, search: Search, limit: int, body_bytes: int) -> list[str]:
        """Returns the jobs' JSON. After a yield, a job is checked again."""
        shown: list[str] = []
        shown_bytes = 0
        for jobs in search.pages():
            for job, body in self._backend.with_bodies(jobs):
                if not search.still(job):
                    continue
                view = views.job(self._backend, job, self._backend.now_ns(), body_bytes, body)
                shown.append(json.dumps(view, ensure_ascii=False, separators=(",", ":")))
                shown_bytes += min(len(body), body_bytes)
                if len(shown) == limit or shown_bytes >= _BODIES_BYTES_MAX:
                    search.stop_behind(job)
                    return shown
                search.step()
            if search.is_long_enough:
                break
        return shown

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        fields = Fields(req)
        tube = fields.tube("tube")
        body = _body_of(fields)
        pri = fields.integer("pri", _PRI)
        delay_s = fields.integer("delay_s", 0)
        ttr_s = fields.integer("ttr_s", _TTR_S)
        tags = _tags_of(fields)
        fields.end()
        scope = who_sends(req).scope
        if not scope.may(tube, PUT) or (tags is not None and tags.dead and not scope.may(tags.dead, PUT)):
            raise falcon.HTTPForbidden(description="You have no right to put into this tube.")
        user = scope.user
        if user is not None and self._backend.guard is not None:
            usage = self._backend.guard.usage_of(user.name)
            self._require_within_limits(user, usage, len(body))
            delay_s, ttr_s = min(delay_s, user.limits.delay), min(ttr_s, max(user.limits.ttr, 1))
            if user.quota is not None:
                tags = tags_for(user, tags, len(body))
                self._require_within_quota(tags, user.quota, usage)
        self._require_a_turn(tube)
        put = OnePut(self._backend, tube, body, (pri, delay_s, ttr_s), tags)
        self._backend.change(put)
        put.require_done()
        if put.outcome == DUPLICATE:
            resp.media = put.after
            return
        self._backend.audit.record(who_sends(req), "put", 1, tube=tube.decode("ascii"), job=put.after["id"])
        resp.media = put.after
        resp.status = falcon.HTTP_201
        resp.location = f"/api/v1/jobs/{put.after['id']}"

    def _require_a_turn(self, tube: bytes) -> None:
        """Counts a put into a tube. Raises HTTPError when its policy gives no put a turn now."""
        policies = self._backend.engine.policies
        policy = None if policies is None else policies.of(tube)
        if policy is not None and not policy.takes_put(tube, self._backend.now_ns()):
            most = policy.terms.max_rate
            raise falcon.HTTPTooManyRequests(
                description=f"The tube's policy allows {most} puts a second.", retry_after=1
            )

    def _require_within_quota(self, tags: Tags, quota: tuple[int, int], usage: Usage) -> None:
        engine = self._backend.engine
        if not engine.rules_of_tags().is_within(tags, engine.quotas):
            usage.refused += 1
            jobs, size = (str(most) if most < NO_LIMIT else "any number of" for most in quota)
            raise falcon.HTTPInsufficientStorage(description=f"You may have {jobs} jobs with {size} bytes together.")

    def _require_within_limits(self, user: User, usage: Usage, size: int) -> None:
        """Counts a put of a user. Raises HTTPError above the user's limits."""
        if size > user.limits.job_bytes:
            usage.refused += 1
            raise falcon.HTTPContentTooLarge(description=f"Your jobs have at most {user.limits.job_bytes} bytes.")
        if not usage.takes_put(user, self._backend.now_ns()):
            usage.refused += 1
            raise falcon.HTTPTooManyRequests(
                description=f"You may put {user.limits.puts_per_second} jobs a second.", retry_after=1
            )
        usage.puts += 1


class JobResource:
    """/api/v1/jobs/{id}"""

    of_tubes = ("GET", "HEAD", "PATCH", "DELETE")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:
        asked = Parameters(req)
        body_bytes = asked.integer("body", BODY_BYTES, 0, 1 << 20)
        asked.end()
        for job, body in self._backend.with_bodies([find(self._backend, _id(id), who_sends(req).scope)]):
            resp.media = views.job(self._backend, job, self._backend.now_ns(), body_bytes, body)
            return
        raise no_such_job()

    def on_patch(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:
        number = _id(id)
        fields = Fields(req)
        values = values_of(fields)
        if fields.has("tube"):
            values.tube = fields.tube("tube")
        fields.end()
        if values.tube and not who_sends(req).scope.may(values.tube, MANAGE):
            find(self._backend, number, who_sends(req).scope)
            raise falcon.HTTPForbidden(description=NO_RIGHT)
        if not values:
            raise wrong("nothing is to be changed: there is none of pri, delay_s, ttr_s, tube")
        change = self._change(req, number, "change", values)
        resp.media = change.after

    def on_delete(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:
        self._change(req, _id(id), "delete", Values())
        resp.status = falcon.HTTP_204

    def _change(self, req: falcon.Request, id: int, action: str, values: Values) -> OneChange:
        return change(self._backend, req, id, action, values)


class BodyResource:
    """GET /api/v1/jobs/{id}/body"""

    of_tubes = ("GET", "HEAD")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_get(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:
        Parameters(req).end()
        job = find(self._backend, _id(id), who_sends(req).scope)
        resp.content_type = "application/octet-stream"
        resp.set_header("Content-Disposition", f'attachment; filename="job-{job.id}"')
        for _, body in self._backend.with_bodies([job]):
            resp.set_stream(self._pieces(body), len(body) - CRLF_BYTES)
            return
        raise no_such_job()

    def _pieces(self, body: bytes) -> Iterator[bytes]:
        pace = Pace(self._backend)
        end = len(body) - CRLF_BYTES
        for at in range(0, end, _PIECE_BYTES):
            yield body[at : min(end, at + _PIECE_BYTES)]
            pace.step()


class ActionResource:
    """POST /api/v1/jobs/{id}/{action}"""

    of_tubes = ("POST",)

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def on_post(self, req: falcon.Request, resp: falcon.Response, id: str, action: str) -> None:
        Parameters(req).end()
        number = _id(id)
        if action not in _ACTIONS:
            raise falcon.HTTPNotFound(description=f"A job has no {action[:20]}, only {', '.join(_ACTIONS)}.")
        resp.media = change(self._backend, req, number, action, Values()).after


def change(backend: Backend, req: falcon.Request, id: int, action: str, values: Values) -> OneChange:
    """Changes a job, and returns when that is safe. Raises HTTPError."""
    scope = who_sends(req).scope
    job = find(backend, id, scope, MANAGE)
    bodies = dict(backend.with_bodies([] if action == "delete" else [job]))
    one = OneChange(backend, id, action, values, bodies.get(job, b""), scope)
    backend.change(one)
    one.require_done()
    backend.audit.record(who_sends(req), action, 1, tube=one.before["tube"], job=id, detail=str(values) or None)
    return one


def values_of(fields: Fields) -> Values:
    """Returns the new numbers of a job."""
    pri, delay_s, ttr_s = (fields.integer(name) if fields.has(name) else KEEP for name in ("pri", "delay_s", "ttr_s"))
    return Values(pri, delay_s, ttr_s)


def _tags_of(fields: Fields) -> Tags | None:
    text = fields.text("tags", "")
    try:
        return parse_put(text.encode("ascii")) if text else None
    except UnicodeEncodeError:
        raise wrong("tags hold a character that is not ASCII") from None
    except ValueError as error:
        raise wrong(f"tags are wrong: {error}") from None


def _body_of(fields: Fields) -> bytes:
    if not fields.has("body_base64"):
        try:
            return fields.text("body", "").encode("utf-8")
        except UnicodeEncodeError:
            raise wrong("body holds half of a character") from None
    if fields.has("body"):
        raise wrong("there are both body and body_base64")
    try:
        return b64decode(fields.text("body_base64").encode("ascii"), validate=True)
    except ValueError:
        raise wrong("body_base64 is not base64") from None


def _id(text: str) -> int:
    if not _ID.fullmatch(text) or not 0 < int(text) <= ID_MAX:
        raise wrong(f"a job has a number from 1 to {ID_MAX}")
    return int(text)


def _position(cursor: str) -> int:
    if not re.fullmatch(r"-1|[0-9]{1,19}", cursor) or int(cursor) > ID_MAX:
        raise wrong("cursor is not what an answer gave as next")
    return int(cursor)


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/jobs", JobsResource(backend))
    app.add_route("/api/v1/jobs/{id}", JobResource(backend))
    app.add_route("/api/v1/jobs/{id}/body", BodyResource(backend))
    app.add_route("/api/v1/jobs/{id}/{action}", ActionResource(backend))
