"""A real server behind a proxy that holds, breaks or edits what its API answers, for tests of the console.

For what a server cannot be made to show in a moment: answers that are late or wrong, a server that goes and comes back,
a reader's role, a node of a cluster, numbers as large as they can be. `python -m tests.support.console` fills a server
for a person to look at.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.clients import burst
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client

Edit = Callable[[Any], Any]
WORDS = [
    *("mail", "thumbs", "report", "invoice", "index", "crawl", "sync", "push", "export", "audit.log", "geo"),
    *("search", "cache", "video", "ocr"),
]
BODIES = (
    b'{"to": "user42@example.org", "template": "welcome", "tries": 2, "tags": ["new", "eu"]}',
    b"photo-%d.jpg",
    b"<img src=x onerror=alert(1)><script>alert(2)</script> %d",
    b"resize 1280x720 s3://bucket/uploads/2026/11/22/%d.png",
    b'{"invoice": %d, "lines": [{"sku": "A-1", "n": 3}, {"sku": "B-7", "n": 1}], "paid": false}',
)
FATES = ("ready",) * 6 + ("reserved",) + ("delayed",) * 2 + ("buried",) * 3
"""The states that jobs come into, in turns."""


class Filled:
    """A server with HTTP, tubes and jobs. `worker` watches every tube and holds the reserved jobs."""

    def __init__(self, server: ServerProcess, http_port: int, tubes: int = 40, jobs: int = 400) -> None:
        self.server = server
        self.web = Web(http_port)
        self.client = Client(server.connect())
        self.worker = Client(server.connect())
        self.states: dict[int, str] = {}
        names = [WORDS[at] if at < len(WORDS) else f"{WORDS[at % len(WORDS)]}.{at:05d}" for at in range(tubes)]
        burst(self.worker, [b"watch %b\r\n" % name.encode() for name in names])
        for number in range(1, jobs + 1):
            self.states[number] = FATES[(number + number // 12) % len(FATES)]
        self.names = {number: names[number % min(tubes, 12)] for number in self.states}
        rng = random.Random(1)
        for number, state in self.states.items():
            text = BODIES[number % len(BODIES)]
            body = rng.randbytes(90) if number % 23 == 0 else text % number if b"%d" in text else text
            self.put(self.names[number], body, pri=10 * (number % 3), delay=3600 * (state == "delayed"))
        held = [number for number, state in self.states.items() if state in ("reserved", "buried")]
        burst(self.worker, [b"reserve-job %d\r\n" % number for number in held])
        burst(self.worker, [b"bury %d 9\r\n" % number for number in held if self.states[number] == "buried"])

    def put(self, tube: str, body: bytes, *, pri: int = 9, delay: int = 0, count: int = 1) -> int:
        """Puts equal jobs. Returns the id of the last one."""
        put = b"put %d %d 600 %d\r\n%b\r\n" % (pri, delay, len(body), body)
        return int(burst(self.client, [b"use %b\r\n" % tube.encode(), *[put] * count])[-1].split()[1])

    def watch(self, *tubes: str) -> None:
        burst(self.worker, [b"watch %b\r\n" % tube.encode() for tube in tubes])

    def tube(self, name: str) -> dict[str, str]:
        return self.client.stats(b"stats-tube " + name.encode())

    def job(self, id: int) -> dict[str, str]:
        return {key: text.strip('"') for key, text in self.client.stats(b"stats-job %d" % id).items()}

    def first(self, state: str) -> int:
        """Returns the first job that came into this state."""
        return next(number for number, found in self.states.items() if found == state)

    def count(self, tube: str, state: str) -> int:
        return int(self.tube(tube)[f"current-jobs-{state}"])

    def close(self) -> None:
        self.client.close()
        self.worker.close()


class Proxy(ThreadingHTTPServer):
    """Listens on 127.0.0.1 and passes all requests on to the HTTP port `target`. Call stop() at the end.

    `edits` change the JSON of good answers, by the resource: the first word of a path behind /api/v1. Those of `tube`
    and `job` change each tube and each job, wherever they are shown, and that of `*` every answer. Events have the
    edits of `server`, `tube` and `*`. `answers` stand in for the server's, by method and resource.
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
        self.requests: list[tuple[str, str]] = []

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
        if resource == "events" and not (proxy.with_events and "events" not in proxy.broken):
            return self._problem(404, "Not Found", "Nothing is there.")
        if resource and resource != "events":
            proxy.wait_at_gate(resource)
        if resource in proxy.broken:
            return self._problem(500, "Internal Server Error", "The server has a fault.")
        found = proxy.answers.get((self.command, resource))
        if found is not None:
            return self._send(200, found(json.loads(body) if body else parse_qs(urlsplit(self.path).query)))
        connection = http.client.HTTPConnection("127.0.0.1", proxy.target, timeout=30)
        try:
            left_out = "Accept-Encoding" if resource else ""
            headers = {name: text for name, text in self.headers.items() if name != left_out}
            connection.request(self.command, self.path, body or None, headers)
            self._pass_back(resource, connection.getresponse())
        finally:
            connection.close()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

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


LONG_NAME = "a" * 60 + "." + "W" * 139
_MANY, _LONG_S = 2**32 - 1, 2.0**32
_LONG = {
    "address": "unix: " + "c" * 90, "by": "w" * 64, "detail": "d" * 200, "directory": "/" + "d" * 1000,
    "filter": f"tube:{LONG_NAME} body:{'y' * 400}", "from": "unix: " + "c" * 90, "listen": ["unix:/" + "p" * 100],
    "policy": "-f4294967295", "version": "0.2.0.dev1234+g0123456789abcdef.d20261122", "who": "w" * 64,
}  # fmt: skip
_KEPT = (
    *("at", "began", "created", "from", "id", "now", "number", "offset", "started", "status", "step_s", "to", "total"),
    *("failed", "pause_left_s", "paused_s"),
)
"""The keys of numbers that say where something is, or when it was."""


def widest(answer: Any, key: str = "") -> Any:
    """An edit: numbers and texts as long as a server lets them be, without a space in them."""
    if isinstance(answer, dict):
        return {name: widest(value, name) for name, value in answer.items()}
    if isinstance(answer, str) or key == "listen":
        return _LONG.get(key, answer)
    if isinstance(answer, list):
        return [widest(one, key) for one in answer]
    if isinstance(answer, bool) or answer is None or key in _KEPT:
        return answer
    return _LONG_S if isinstance(answer, float) else _MANY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tubes", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=400)
    options = parser.parse_args()
    port = free_port()
    server = ServerProcess(GEVENTSTALK, ["--http", str(port)]).wait_ready()
    filled = Filled(server, port, options.tubes, options.jobs)
    print(f"http://127.0.0.1:{port}", flush=True)
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
    filled.close()
    server.stop()


if __name__ == "__main__":
    main()
