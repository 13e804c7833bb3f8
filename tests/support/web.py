"""Clients of HTTP: of a running server, and of the application in this process, which needs neither socket nor start.

What is tested inside stands on the real engine, turn and application; gevent's loop of this process ends the turns.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import Any

import falcon.testing
import gevent
from gevent import socket as gevent_socket
from jsonschema_rs import Draft202012Validator

from geventstalk.config import Settings
from geventstalk.core.operate import Operate
from geventstalk.http import app
from geventstalk.http.access import Access
from geventstalk.http.api.document import load
from geventstalk.http.backend import Backend
from geventstalk.http.site import Service as Site
from geventstalk.http.tokens import Tokens
from geventstalk.serving.reload import Reload
from geventstalk.turn.turn import Turn
from geventstalk.wire.session import Service, Session
from tests.support.wire import FACTS

DOCUMENT = load()
Answer = tuple[int, dict[str, str], bytes]


class Web:
    """A client of one server's HTTP. Each request has a connection of its own."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self.port = port
        self.token = token

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """Status, headers in lower case, content. A body is sent as JSON. `_` stands for `-` in names of headers."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token:
            sent["Authorization"] = f"Bearer {self.token}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        return self.send(method, path, data, sent)

    def send(self, method: str, path: str, data: Any, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        """The content of an answer that must be a good one."""
        status, _, content = self.ask(method, path, body, **headers)
        assert status < 300, (status, content)
        return json.loads(content)

    def status(self, method: str, path: str, body: object = None, **headers: str) -> int:
        return self.ask(method, path, body, **headers)[0]

    def get(self, path: str, where: str | None = None) -> Any:
        """The answer to a GET below /api/v1, held against the document; `where` is its path there when that differs."""
        answer = self.json("GET", "/api/v1" + path)
        validate(answer, where or path.partition("?")[0], "get", 200)
        return answer


class Inside(Web):
    """An engine with clients, and the application that looks at the engine, in this process."""

    def __init__(
        self,
        settings: Settings | None = None,
        tokens: Tokens | None = None,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        super().__init__(0)
        self._loop: Any = gevent.get_hub().loop
        self.clock = clock
        self.engine = Operate(clock())
        self.errors: list[BaseException] = []
        self.turn = Turn(
            self.engine, clock, time.time_ns, lambda: self._loop.run_callback(self._end), self.errors.append
        )
        self.service = Service(self.engine, 65535, lambda: FACTS)
        log = logging.getLogger("tests.http")
        self.backend = Backend(
            self.engine,
            self.service,
            self.turn,
            settings or Settings(),
            log,
            clock,
            time.time_ns,
            lambda: FACTS,
            self.drain,
        )
        self.backend.reload = self.reload = Reload(log)
        self.backend.commands = self.service.commands
        self.backend.audit.unix_s = time.time
        self.backend.replayed = True
        self.access = Access((), (), tokens, self.backend.audit, log)
        self.application = app.make(self.backend, self.access)
        self._client = falcon.testing.TestClient(self.application)

    def drain(self, on: bool) -> None:
        self.engine.draining = on

    def _end(self) -> None:
        """The end of a turn, and then what the task of operations does: further slices of theirs, in the next turn."""
        self.turn.end()
        if self.turn.operations.wanted.is_set:
            self.turn.operations.wanted.clear()
            self._loop.run_callback(self._go_on)

    def _go_on(self) -> None:
        if self.turn.operations.run_some():
            self.turn.operations.wanted.set()

    def session(self, *lines: bytes) -> Session:
        """A new client of the beanstalk port that has said these lines."""
        session = Session(self.service)
        for line in lines:
            session.receive(line, self.clock())
        return session

    def send(self, method: str, path: str, data: Any, headers: dict[str, str]) -> Answer:
        bare, _, query = path.partition("?")
        sent = {"Host": "localhost", **headers}
        result = self._client.simulate_request(method, bare, query_string=query, body=data, headers=sent)
        assert not self.errors
        return result.status_code, {name.lower(): value for name, value in result.headers.items()}, result.content


class Wired(Inside):
    """The application behind connections within this process."""

    def __init__(self, tokens: Tokens | None = None) -> None:
        super().__init__(tokens=tokens)
        self.site = Site(self.backend, self.application, self.backend.log)
        self.greenlets: list[Any] = []

    def connect(self) -> Any:
        ours, theirs = socket.socketpair()
        waiting = gevent_socket.socket(fileno=theirs.detach())
        self.greenlets.append(gevent.spawn(self.site.serve, waiting, "peer"))
        mine: Any = gevent_socket.socket(fileno=ours.detach())
        mine.settimeout(10)
        return mine

    def all_of(self, data: bytes, *, end: bool = False) -> bytes:
        """Everything that comes back until the server closes the connection; `end` closes the client's half first."""
        client = self.connect()
        client.sendall(data)
        if end:
            client.shutdown(socket.SHUT_WR)
        return read_all(client)

    def check(self) -> None:
        """All connections have ended, without an exception."""
        gevent.joinall(self.greenlets, timeout=10, raise_error=True)
        assert self.turn.others == 0


def read_all(client: Any) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65536):
            found += data
    client.close()
    return found


def cycles_of(run: Callable[[], object], times: int) -> dict[str, int]:
    """Returns what only a collection of garbage would let go of, and what each run leaves of that."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(times):
            run()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(type(each).__qualname__ for each in gc.garbage)
        gc.garbage.clear()
        return {name: count // times for name, count in left.items() if count >= times}
    finally:
        gc.set_debug(0)
        gc.enable()


def validate(answer: object, path: str, method: str, status: int) -> None:
    """Holds an answer against what the document says of this path."""
    found = DOCUMENT["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]
    Draft202012Validator({**found, "components": DOCUMENT["components"]}).validate(answer)


def puts(tubes: Iterable[str]) -> bytes:
    """Commands that put a job into each of these tubes."""
    return b"".join(b"use %s\r\nput 0 0 60 1\r\nx\r\n" % tube.encode() for tube in tubes)
