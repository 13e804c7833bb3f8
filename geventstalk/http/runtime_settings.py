"""Policies and schedules that are made at run time, one resource for an entry of either.

This module must not know the engine's rules. Invariant: an entry is in use, and in the audit, once it is safe.
"""

from __future__ import annotations

from typing import Any

import falcon

from geventstalk.core.operate import DONE
from geventstalk.http.access import who_sends
from geventstalk.http.backend import Backend
from geventstalk.http.changes import NO_ROOM
from geventstalk.http.params import Fields, Parameters, wrong
from geventstalk.runtime_settings import Kind, TooLarge
from geventstalk.turn.operations import KeepSettings


class SettingResource:
    """PUT and DELETE of an entry: /api/v1/policies/{name} and /api/v1/schedules/{name}"""

    def __init__(self, backend: Backend, kind: Kind, noun: str) -> None:
        self._backend = backend
        self._kind = kind
        self._noun = noun

    def on_put(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        self._change(req, name, Fields(req).rest())
        resp.status = falcon.HTTP_204

    def on_delete(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        Parameters(req).end()
        self._change(req, name, None)
        resp.status = falcon.HTTP_204

    def _change(self, req: falcon.Request, name: str, entry: dict[str, Any] | None) -> None:
        backend, kind = self._backend, self._kind
        with backend.one_setting:
            try:
                text = backend.runtime_settings.text_with(kind, name, entry)
            except TooLarge as error:
                raise falcon.HTTPInsufficientStorage(description=f"{error}.") from None
            except KeyError:
                raise falcon.HTTPNotFound(description=f"No {self._noun} of this name was made at run time.") from None
            except ValueError as error:
                raise wrong(str(error)) from None
            keep = _Keep(backend.engine, text)
            backend.change(keep)
            if keep.outcome != DONE:
                raise falcon.HTTPInsufficientStorage(description=NO_ROOM)
            backend.use_runtime_settings()
        action = f"remove {self._noun}" if entry is None else f"set {self._noun}"
        backend.audit.record(who_sends(req), action, 1, detail=name)


class _Keep(KeepSettings):
    def done(self) -> None:
        pass

    def failed(self) -> None:
        pass
