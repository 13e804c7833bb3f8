"""The users of the file of --access: their rights and limits, and what they have done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import falcon

from geventstalk.core.rules import Owned
from geventstalk.http.backend import Backend
from geventstalk.http.params import Parameters
from geventstalk.http.slices import Pace, json_list, page
from geventstalk.http.views import Json, user_of
from geventstalk.rights import NO_LIMIT, Access, User, words_of
from geventstalk.wire.guarded import Usage


class UsersResource:
    """GET /api/v1/users"""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sorts: dict[str, Callable[[Usage], int]] = {
            "connections": lambda usage: usage.connections,
            "commands": lambda usage: usage.commands,
            "puts": lambda usage: usage.puts,
            "refused": lambda usage: usage.refused + usage.turned_away,
        }

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        asked = Parameters(req)
        sort = asked.choice("sort", ("name", *self._sorts), "name")
        descending = asked.boolean("descending")
        offset = asked.integer("offset", 0, 0, 10_000_000)
        limit = asked.integer("limit", 100, 1, 1000)
        asked.end()
        backend, guard = self._backend, self._backend.guard
        users = Access([]).users if guard is None else guard.users().users
        pace = Pace(backend)

        def key(name: str) -> Any:
            assert guard is not None
            return name if sort == "name" else self._sorts[sort](guard.usage_of(name))

        names, total = page(list(users), key, pace, descending, offset, limit)
        reserved = self._reserved(pace)
        rules = self._backend.engine.rules
        owned = {} if rules is None else rules.owned
        shown = (
            _shown(users[name], guard.usage_of(name), reserved[name], owned.get(name.encode()))
            for name in names
            if guard is not None
        )
        resp.data = json_list("users", shown, pace, total=total)
        resp.content_type = falcon.MEDIA_JSON

    def _reserved(self, pace: Pace) -> Counter[str]:
        """Returns how many jobs the connections of each user hold. Yields to other requests."""
        found: Counter[str] = Counter()
        channels = self._backend.turn.channels
        for number in list(channels):
            pace.step()
            channel = channels.get(number)
            name = None if channel is None else user_of(channel)
            if channel is not None and name is not None:
                found[name] += len(channel.session.reserved)
        return found


def _shown(user: User, usage: Usage, reserved: int, owned: Owned | None) -> Json:
    proof = user.proof
    shown_by = {
        "certificate": proof.certificate,
        "unix_user": proof.uid,
        "address": [str(network) for network in proof.networks] or None,
        "token": True if proof.token is not None else None,
    }
    return {
        "name": user.name,
        "shown_by": {key: value for key, value in shown_by.items() if value is not None},
        "rights": words_of(user.rights),
        "limits": {key: most for key, most in user.limits._asdict().items() if most < NO_LIMIT},
        "connections": usage.connections,
        "reserved": reserved,
        "commands": usage.commands,
        **({} if user.quota is None else {"jobs": owned.jobs if owned else 0, "bytes": owned.bytes if owned else 0}),
        "puts": usage.puts,
        "delayed_puts": usage.waits,
        "refused_commands": usage.refused,
        "refused_connections": usage.turned_away,
    }


def add(app: Any, backend: Backend) -> None:
    app.add_route("/api/v1/users", UsersResource(backend))
