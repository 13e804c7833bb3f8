"""A whole server with --max-memory: backlogs far beyond it come in, survive, are looked at, and go out."""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.backlog import Backlog
from tests.support.clients import Launch, launcher, number, until
from tests.support.process import ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client

LIMIT = 200_000
FLAGS = ("--max-memory", str(LIMIT), "-s", "30000")
SIZE = 4000


@pytest.fixture
def launch(start_server: Callable[..., ServerProcess], tmp_path: Path) -> Iterator[Launch]:
    yield from launcher(start_server, tmp_path, unix=False)


def body_of(id: int) -> bytes:
    return random.Random(id).randbytes(SIZE // 2).hex().encode()


def fill(client: Client, count: int) -> dict[int, bytes]:
    """Puts this many jobs. While what was written last is not sealed, there may be no room for some moments."""
    jobs: dict[int, bytes] = {}
    refused = []

    def takes() -> bool:
        body = body_of(len(jobs))
        said = client.ask(b"put 0 0 100 %d\r\n%b" % (len(body), body))
        if said == b"OUT_OF_MEMORY\r\n":
            refused.append(said)
            return False
        jobs[int(said.split()[1])] = body
        return True

    while len(jobs) < count:
        until(takes, "there is room for another job")
        if not len(jobs) % 100:
            assert number(client, "memory-bytes") <= LIMIT
    return jobs


def take_all(client: Client, jobs: dict[int, bytes]) -> None:
    """Reserves and deletes all of them, and compares their bodies."""
    left = dict(jobs)
    while left:
        head, _, rest = client.ask(b"reserve-with-timeout 0").partition(b"\r\n")
        id = int(head.split()[1])
        assert head == b"RESERVED %d %d" % (id, SIZE) and rest == left.pop(id) + b"\r\n"
        assert client.ask(b"delete %d" % id) == b"DELETED\r\n"
    assert client.ask(b"reserve-with-timeout 0") == b"TIMED_OUT\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [pytest.param(end, marks=pytest.mark.long) for end in (ServerProcess.stop, ServerProcess.kill)],
    ids=["stop", "kill"],
)
def test_a_backlog_of_twenty_times_the_bound(
    launch: Launch, tmp_path: Path, end: Callable[[ServerProcess], object]
) -> None:
    flags = ("-b", str(tmp_path / "journal"), *FLAGS)
    server = launch(*flags)
    with Client(server.connect()) as client:
        jobs = fill(client, 20 * LIMIT // SIZE)
        assert number(client, "memory-bytes-on-disk") > 15 * LIMIT
        for id in [*jobs][::3]:
            assert client.ask(b"delete %d" % id) == b"DELETED\r\n"
            del jobs[id]
        for id in [*jobs][::50]:
            assert client.ask(b"peek %d" % id) == b"FOUND %d %d\r\n%b\r\n" % (id, SIZE, jobs[id])
    end(server)
    server = launch(*flags)
    with Client(server.connect()) as client:
        assert number(client, "current-jobs-ready") == len(jobs)
        assert number(client, "memory-jobs-on-disk") > len(jobs) / 2
        take_all(client, jobs)
        assert number(client, "memory-loads") > len(jobs) / 2
        assert number(client, "memory-bytes") == number(client, "memory-bytes-on-disk") == 0


@pytest.mark.long
def test_memory_stays_below_what_was_said_before(tmp_path: Path) -> None:
    """Twenty times the bound, which is far more than what the process may take beside it."""
    said: list[str] = []
    flags = ["-s", "2000000"]
    Backlog(tmp_path, jobs=40_000, size=10_000, max_memory=20 << 20, flags=flags, say=said.append).run()
    assert any("took all" in line for line in said), said


def found_ids(web: Web, text: str) -> list[int]:
    """All jobs that match a filter. On a busy machine they come in several answers."""
    ids: list[int] = []
    cursor = ""
    while True:
        found = web.json("GET", f"/api/v1/jobs?filter={text}&body=0&limit=1000{cursor}")
        ids += [job["id"] for job in found["jobs"]]
        if found["next"] is None:
            return ids
        cursor = f"&cursor={found['next']}"


@pytest.mark.slow
def test_over_http_all_bodies_are_there(launch: Launch, tmp_path: Path) -> None:
    port = free_port()
    server = launch("-b", str(tmp_path / "journal"), *FLAGS, "--http", str(port))
    web = Web(port)
    with Client(server.connect()) as client:
        jobs = fill(client, 400)
        gone = number(client, "memory-jobs-on-disk")
        assert gone > 300
        for id in [*jobs][::40]:
            status, _, content = web.ask("GET", f"/api/v1/jobs/{id}/body")
            assert (status, content) == (200, jobs[id])
            seen = web.json("GET", f"/api/v1/jobs/{id}")
            assert (seen["size"], seen["body"]["data"].encode()) == (SIZE, jobs[id])
        wanted = [*jobs][77]
        word = jobs[wanted][1000:1040].decode()
        for text in f'"{word}"', f"body:/{word[:-1]}./":
            assert found_ids(web, text) == [wanted], text
        assert found_ids(web, "size:4000") == [*jobs]
        status, _, content = web.ask("GET", "/api/v1/export")
        lines = [json.loads(line) for line in content.splitlines()]
        assert {line["id"]: base64.b64decode(line["body"]) for line in lines if "body" in line} == jobs
        assert number(client, "memory-loads") == 0, "what is only looked at over HTTP does not come back to memory"
        some = [*jobs][::20]
        for id in some:
            moved = web.json("PATCH", f"/api/v1/jobs/{id}", {"tube": "other", "ttr_s": 7})
            assert moved["body"]["data"].encode() == jobs[id]
        tube = web.json("GET", "/api/v1/tubes/default")
        assert tube["next"]["ready"]["body"]["data"].encode() == jobs[tube["next"]["ready"]["id"]][:200]
        client.ask(b"watch other")
        take_all(client, jobs)


@pytest.mark.slow
def test_a_copy_of_a_journal_whose_bodies_are_on_disk_is_whole(launch: Launch, tmp_path: Path) -> None:
    """A server without a bound takes over from one with a bound, and the other way round."""
    journal = str(tmp_path / "journal")
    server = launch("-b", journal, *FLAGS)
    with Client(server.connect()) as client:
        jobs = fill(client, 300)
    assert server.stop() == 0
    server = launch("-b", journal)
    with Client(server.connect()) as client:
        assert "memory-bytes" not in client.stats(b"stats")
        for id, body in jobs.items():
            assert client.ask(b"peek %d" % id) == b"FOUND %d %d\r\n%b\r\n" % (id, SIZE, body)
    assert server.stop() == 0
    server = launch("-b", journal, *FLAGS)
    with Client(server.connect()) as client:
        take_all(client, jobs)


def test_without_a_journal_puts_are_refused_beyond_the_bound(launch: Launch) -> None:
    server = launch("--max-memory", "64k")
    with Client(server.connect()) as client:
        said = [client.ask(b"put 0 0 100 4000\r\n" + b"x" * 4000).split()[0] for _ in range(20)]
        assert said == [b"INSERTED"] * 16 + [b"OUT_OF_MEMORY"] * 4
        assert client.ask(b"reserve").startswith(b"RESERVED 1 4000\r\n")
        assert client.ask(b"delete 1") == b"DELETED\r\n"
        assert client.ask(b"put 0 0 100 4000\r\n" + b"x" * 4000).startswith(b"INSERTED")
        stats = client.stats(b"stats")
        assert (stats["memory-max"], stats["memory-puts-refused"]) == ("65536", "4")


# Bug: A stop waited for ever for a body.
@pytest.mark.long
def test_a_device_that_does_not_answer_does_not_hold_up_the_end(launch: Launch, tmp_path: Path) -> None:
    """To open a pipe without a writer waits for ever, as a read from a lost device does."""
    server = launch("-b", str(tmp_path / "journal"), *FLAGS)
    with Client(server.connect()) as client:
        fill(client, 150)
        until(lambda: number(client, "memory-jobs-on-disk") > 50, "bodies leave memory")
        for segment in (tmp_path / "journal").glob("segment-*.db"):
            segment.unlink()
            os.mkfifo(segment)
        client.send(b"reserve\r\n")
        with Client(server.connect()) as other:
            assert other.ask(b"list-tube-used") == b"USING default\r\n", "no other client waits"
        server.process.terminate()
        assert server.process.wait(30) in (0, 74)
