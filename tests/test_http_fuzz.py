"""The API's document against a running server by schemathesis: bounds, wrong kinds, and random requests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clients import put_many
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.seeds import draw_seed
from tests.support.wire import Client

PROGRAM = """\
from requests.adapters import HTTPAdapter
from schemathesis.cli import schemathesis

send = HTTPAdapter.send

def send_and_take_some(self, request, stream=False, **others):
    answer = send(self, request, stream=True, **others)
    if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
        lines = answer.iter_lines()
        taken = [next(lines) for _ in range(5)]  # how long to wait, an empty line, and the first figures
        answer._content = b"\\n".join(taken)
        answer.close()
    return answer

HTTPAdapter.send = send_and_take_some
schemathesis()
"""
"""Schemathesis, which gets the beginning of a stream of events as an answer: a stream has no end."""

LIMIT_S = 5
"""How long requests are sent. All bounds of all operations come first, then what is random."""

CONFIG = """\
# What is too long for the head of a request is refused before it is looked at.
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 414, 415, 422, 428, 429, 431]

# Which fields go together, and what a filter, a cursor or a cron expression is, the document says in words. Another
# request may have had the server drain, which refuses puts.
[[operations]]
include-path-regex = "^/(jobs|bulk|export|policies|schedules)"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 503]
checks.positive_data_acceptance.enabled = false

# Clients that have gone within the last two seconds may still have their streams. A list of one empty name looks as an
# empty list does.
[[operations]]
include-path-regex = "^/events"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 503]
checks.negative_data_rejection.enabled = false
checks.positive_data_acceptance.enabled = false
"""


@pytest.mark.slow
def test_every_answer_is_one_that_the_document_allows(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    port = free_port()
    flags = ["--http", str(port), "-b", str(tmp_path / "j"), "--audit", str(tmp_path / "audit")]
    server = ServerProcess(GEVENTSTALK, flags, stderr=tmp_path / "log")
    try:
        server.wait_ready()
        with Client(server.connect()) as client:
            put_many(client, 100)
        done = fuzz(port, draw_seed(request.config), tmp_path)
        with Client(server.connect()) as client:  # the first one may have been closed on request
            assert client.ask(b"list-tube-used") == b"USING default\r\n"
    finally:
        code = server.stop()
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert code == 0 and "Traceback" not in (tmp_path / "log").read_text()


def fuzz(port: int, seed: int, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "schemathesis.toml").write_text(CONFIG)
    options = ["--phases=coverage,fuzzing", f"--max-time={LIMIT_S}", "--max-examples=10", f"--seed={seed % 2**31}"]
    options += ["--no-color", "--warnings=off", "--generation-database=none"]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "run", f"http://127.0.0.1:{port}/api/v1/openapi.json", *options],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
