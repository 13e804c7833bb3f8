"""A proxy in front of a server's HTTP that holds, breaks or edits what the API answers.

For what a server cannot be made to answer in a moment: late, wrong or malformed answers, and states that take long.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Edit = Callable[[Any], Any]


class Proxy(ThreadingHTTPServer):
    """Listens on 127.0.0.1 and passes all requests on to the HTTP port `target`. Call stop() at the end.

    `edits` change the JSON of good answers, by the resource: the first word of a path behind /api/v1. Those of `tube`
    and `job` change each tube and each job, wherever they are shown, and that of `*` every answer. Events have the
    edits of `server`, `tube` and `*`. `answers` stand in for the server's, by method and resource, and `spoilt`
    are the bytes that are sent instead, by method and path behind /api/v1; None is silence.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.target = 0
        self.begin_anew()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def begin_anew(self) -> None:
        """Nothing is held, broken or edited any more."""
        self.edits: dict[str, Edit] = {}
        self.answers: dict[tuple[str, str], Callable[[Any], Any]] = {}
        self.broken: set[str] = set()  # the resources for which each request is answered 500
        self.gates: dict[str, threading.Event] = {}  # requests for such a resource wait for it
        self.waiting = 0
        self.with_events = True
        self.spoilt: dict[tuple[str, str], bytes | None] = {}
        self.requests: list[tuple[str, str]] = []
        self.asked: list[tuple[str, str, Any]] = []  # method, path behind /api/v1, content or query

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def held(self, resource: str) -> Iterator[None]:
        """Answers of this resource wait until this is over. Who clears `gates` lets later ones through before."""
        gate = self.gates[resource] = threading.Event()
        try:
            yield
        finally:
            self.gates.pop(resource, None)
            gate.set()

    def wait_at_gate(self, resource: str) -> None:
        if gate := self.gates.get(resource):
            self.waiting += 1
            gate.wait(20)
            self.waiting -= 1

    def edited(self, resource: str, answer: Any) -> Any:
        for kind, many in (("tube", "tubes"), ("job", "jobs")):
            edit = self.edits.get(kind)
            if edit is not None and resource in (kind, many):
                answer = {**answer, many: [*map(edit, answer[many])]} if many in answer else edit(answer)
        for key in (resource, "*"):
            if key in self.edits and key != "tube":
                answer = self.edits[key](answer)
        return answer

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the browser went away

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        proxy, path = self.server, urlsplit(self.path).path
        proxy.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        api = path.removeprefix("/api/v1/")
        resource = api.partition("/")[0] if api != path else ""
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        content = json.loads(body) if resource and body else query
        proxy.asked.append((self.command, f"/{api}", content))
        if (self.command, f"/{api}") in proxy.spoilt:
            return self._spoil(proxy.spoilt[self.command, f"/{api}"])
        if resource == "events" and not (proxy.with_events and "events" not in proxy.broken):
            return self._problem(404, "Not Found", "Nothing is there.")
        if resource and resource != "events":
            proxy.wait_at_gate(resource)
        if resource in proxy.broken:
            return self._problem(500, "Internal Server Error", "The server has a fault.")
        found = proxy.answers.get((self.command, resource))
        if found is not None:
            return self._send(200, found(content))
        connection = http.client.HTTPConnection("127.0.0.1", proxy.target, timeout=30)
        try:
            left_out = "Accept-Encoding" if resource else ""
            headers = {name: text for name, text in self.headers.items() if name != left_out}
            connection.request(self.command, self.path, body or None, headers)
            self._pass_back(resource, connection.getresponse())
        finally:
            connection.close()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _spoil(self, answer: bytes | None) -> None:
        if answer is None:
            time.sleep(1)
        else:
            self.wfile.write(answer)

    def _pass_back(self, resource: str, answer: http.client.HTTPResponse) -> None:
        kind = answer.getheader("Content-Type") or ""
        if resource and answer.status < 300 and kind.startswith("application/json"):
            return self._send(answer.status, self.server.edited(resource, json.loads(answer.read())))
        self.send_response(answer.status)
        for name, text in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, text)
        self.end_headers()
        if not kind.startswith("text/event-stream"):
            self.wfile.write(answer.read())
            return
        with suppress(OSError, http.client.HTTPException, ValueError):
            while line := answer.readline():
                self.wfile.write(self._event(line))

    def _event(self, line: bytes) -> bytes:
        if not line.startswith(b'data: {"server"'):
            return line
        self.server.wait_at_gate("events")
        data = json.loads(line.removeprefix(b"data: "))
        server = self.server.edited("server", data["server"])
        tubes = self.server.edited("tubes", {"tubes": data["tubes"]})["tubes"]
        return b"data: %b\n" % json.dumps({"server": server, "tubes": tubes}).encode()

    def _problem(self, status: int, title: str, detail: str) -> None:
        self._send(status, {"title": title, "status": status, "detail": detail}, "application/problem+json")

    def _send(self, status: int, answer: Any, kind: str = "application/json") -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def patch(**values: Any) -> Edit:
    """Returns an edit that sets these keys."""
    return lambda answer: {**answer, **values}
