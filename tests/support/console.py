"""A server with tubes and jobs for tests of the console, and answers as wide as they can be.

`python -m tests.support.console` fills a server for a person to look at.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import suppress
from functools import cached_property
from typing import Any

from tests.support.clients import burst
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client

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
    """A server with HTTP, tubes and jobs, and its client. `worker` watches every tube and holds the reserved jobs."""

    def __init__(self, server: ServerProcess, http_port: int, tubes: int = 40, jobs: int = 400) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{http_port}"
        self.web = Web(http_port)
        self.client = Client(server.connect())
        self.states: dict[int, str] = {}
        names = [WORDS[at] if at < len(WORDS) else f"{WORDS[at % len(WORDS)]}.{at:05d}" for at in range(tubes)]
        self.watch(*names)
        for number in range(1, jobs + 1):
            self.states[number] = FATES[(number + number // 12) % len(FATES)]
        self.names = {number: names[number % min(tubes, 12)] for number in self.states}
        rng = random.Random(1)
        for number, state in self.states.items():
            text = BODIES[number % len(BODIES)]
            body = rng.randbytes(90) if number % 23 == 0 else text % number if b"%d" in text else text
            self.put(self.names[number], body, pri=10 * (number % 3), delay=3600 * (state == "delayed"))
        if not jobs:
            return
        held = [number for number, state in self.states.items() if state in ("reserved", "buried")]
        burst(self.worker, [b"reserve-job %d\r\n" % number for number in held])
        burst(self.worker, [b"bury %d 9\r\n" % number for number in held if self.states[number] == "buried"])

    @cached_property
    def worker(self) -> Client:
        return Client(self.server.connect())

    def put(self, tube: str, *bodies: bytes, pri: int = 9, delay: int = 0) -> list[int]:
        """Puts jobs. Returns their ids."""
        puts = [b"put %d %d 600 %d\r\n%b\r\n" % (pri, delay, len(body), body) for body in bodies]
        return [int(each.split()[1]) for each in burst(self.client, [b"use %b\r\n" % tube.encode(), *puts])[1:]]

    def watch(self, *tubes: str) -> None:
        if tubes:
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
        if "worker" in vars(self):
            self.worker.close()


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
