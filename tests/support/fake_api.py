"""A stand-in for the server's API (http/openapi.yaml): jobs in a dict, and answers that a test may spoil.

`spoil` maps a method and a path to what is sent instead of an answer. Every request is kept in `asked`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class FakeApi:
    """The state of the stand-in. `role` is who asks. A bulk runs until it was looked at `looks` times."""

    def __init__(self) -> None:
        self.jobs: dict[int, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.spoil: dict[tuple[str, str], bytes | None] = {}
        self.role = "admin"
        self.looks = 2
        self.page = 3
        self.port = 0
        self.bulk: dict[str, Any] = {}

    def add(self, count: int, tube: str = "mail", state: str = "ready") -> None:
        counts = dict.fromkeys(("reserves", "timeouts", "releases", "buries", "kicks"), 0)
        for id in range(len(self.jobs) + 1, len(self.jobs) + count + 1):
            self.jobs[id] = {
                "id": id, "tube": tube, "state": state, "pri": 1, "age_s": 7.5, "time_left_s": None, "size": 1,
                "delay_s": 0, "ttr_s": 60, "counts": dict(counts), "tags": None,
                "body": {"encoding": "text", "data": f"body {id}", "whole": True},
            }  # fmt: skip

    def answer(self, method: str, path: str, query: dict[str, str], content: Any) -> tuple[int, Any]:
        parts = path.split("/")[1:]
        if parts[0] == "session":
            return 200, {"role": self.role, "name": "local", "csrf": None}
        if parts[0] == "tube":
            return 200, {"totals": {"put": len(self.jobs), "delete": 0}}
        if parts[0] == "bulk":
            return self._bulk(method, content)
        if len(parts) == 1:
            return 200, self._page(query)
        job = self.jobs.get(int(parts[1]))
        if job is None:
            return 404, {"title": "Not Found", "status": 404, "detail": f"There is no job {parts[1]}."}
        if method == "DELETE":
            del self.jobs[job["id"]]
            return 204, None
        if method == "PATCH":
            job.update(content)
        elif method == "POST":
            job["state"] = {"kick": "ready", "bury": "buried"}[parts[2]]
        return 200, job

    def _page(self, query: dict[str, str]) -> dict[str, Any]:
        down = query.get("descending") == "true"
        ids = sorted(self.jobs, reverse=down)
        if "cursor" in query:
            ids = [id for id in ids if (id < int(query["cursor"]) if down else id > int(query["cursor"]))]
        shown = ids[: min(self.page, int(query["limit"]))]
        following = str(shown[-1]) if len(ids) > len(shown) else None
        return {"jobs": [self.jobs[id] for id in shown], "next": following, "searched": len(shown)}

    def _bulk(self, method: str, content: Any) -> tuple[int, Any]:
        if method == "POST":
            matched = min(len(self.jobs), content.get("limit", 1 << 60))
            state = "dry-run" if content.get("dry_run") else "running"
            self.bulk = {"number": 1, "state": state, "matched": matched, "done": 0, "failed": 0, "searched": 0}
            self.bulk |= {"jobs_before": len(self.jobs), "error": None, "left": self.looks}
            return 200 if state == "dry-run" else 202, self.bulk
        if method == "DELETE":
            self.bulk |= {"state": "cancelled"}
        elif self.bulk["left"] > 0:
            self.bulk |= {"left": self.bulk["left"] - 1, "searched": 1, "done": 1}
        else:
            self.bulk |= {"state": "done", "searched": len(self.jobs), "done": self.bulk["matched"]}
        return 200, self.bulk


@contextmanager
def fake_api() -> Iterator[FakeApi]:
    """A stand-in that listens on a port of 127.0.0.1."""
    fake = FakeApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            url = urlsplit(self.path)
            path = url.path.removeprefix("/api/v1")
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = json.loads(data) if data else None
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            fake.asked.append((self.command, path, content if content is not None else query))
            if (self.command, path) in fake.spoil:
                spoilt = fake.spoil[self.command, path]
                if spoilt is None:
                    time.sleep(1)
                else:
                    self.wfile.write(spoilt)
                self.close_connection = True
                return
            status, answer = fake.answer(self.command, path, query, content)
            text = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_DELETE = _serve

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that is stopped leaves
                super().handle_error(request, client_address)

    with Server(("127.0.0.1", 0), Handler) as server:
        fake.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join(30)
