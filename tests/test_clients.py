"""Real client libraries talk to the server: greenstalk and pystalk from here, others through tests/clients.

Every test runs against geventstalk and, where it is installed, against beanstalkd, which proves the test
right. The clients' own published test suites run as well, where the published package holds one.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import greenstalk
import pystalk
import pytest

from tests.clients.programs import HERE, PROGRAMS, STEPS, Program, fetch_sdist, node_modules
from tests.support.process import GEVENTSTALK, ROOT, ServerProcess, beanstalkd_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MAX_JOB_BYTES = 1 << 20
WAIT_LIMIT_S = 30.0
LATE_S = 5.0  # how much later than asked for is still in time: others may have the machine
EVERY_BYTE = bytes(range(256))
LARGE = EVERY_BYTE * (MAX_JOB_BYTES // 256)
BODIES = [b"", EVERY_BYTE, b"\xff\xfe\x80", b"two\r\nlines\r\n", b"put 0 0 1 1\r\n", LARGE]
NO_JOB = 2**64 - 1
LOST_TIMER = "beanstalkd loses the timer of a reserved job now and then: it stays reserved past its TTR"

whole_suites = pytest.mark.parametrize(
    "kind", ["geventstalk", pytest.param("beanstalkd", marks=pytest.mark.long)], indirect=True
)
"""On beanstalkd they show that the suites are right, which does not change with every change here."""

Starter = Callable[..., ServerProcess]
Green = greenstalk.Client[bytes]
ConnectGreen = Callable[..., Green]


@pytest.fixture(params=["geventstalk", "beanstalkd"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which server the test talks to."""
    return str(request.param)


@pytest.fixture
def start(kind: str, request: pytest.FixtureRequest) -> Starter:
    """Starts servers of that kind."""
    name = "start_server" if kind == "geventstalk" else "start_beanstalkd"
    starter: Starter = request.getfixturevalue(name)
    return starter


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """A journal and a limit for bodies that is not the default one."""
    (tmp_path / "journal").mkdir()
    return ["-b", str(tmp_path / "journal"), "-z", str(MAX_JOB_BYTES)]


@pytest.fixture
def server(start: Starter, flags: list[str]) -> ServerProcess:
    return start(*flags)


@pytest.fixture
def green(server: ServerProcess) -> Iterator[ConnectGreen]:
    """Connects greenstalk clients that use and watch one tube."""
    with ExitStack() as stack:

        def connect(tube: str = "jobs") -> Green:
            address = ("127.0.0.1", server.port)
            return stack.enter_context(greenstalk.Client(address, encoding=None, use=tube, watch=tube))

        yield connect


@pytest.fixture
def py(server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """Connects pystalk clients that use and watch one tube."""
    made: list[Any] = []

    def connect(tube: str = "jobs") -> Any:
        client = pystalk.BeanstalkClient("127.0.0.1", server.port, socket_timeout=2 * WAIT_LIMIT_S)
        made.append(client)
        client.use(tube)
        client.watch(tube)
        return client

    yield connect
    for client in made:
        client.close()


def until(condition: Callable[[], bool]) -> None:
    """Returns as soon as the condition holds; fails when it does not in time."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def status(error: pytest.ExceptionInfo[Any]) -> str:
    """The reply that a pystalk error stands for."""
    return str(error.value.message)


# greenstalk


def test_greenstalk_uses_watches_and_ignores(green: ConnectGreen) -> None:
    client = green("default")
    assert client.using() == "default"
    client.use("a")
    assert client.using() == "a"
    assert (client.watch("a"), client.watch("a"), client.watch("b")) == (2, 2, 3)
    assert client.watching() == ["default", "a", "b"]
    assert (client.ignore("default"), client.ignore("nowhere"), client.ignore("b")) == (2, 2, 1)
    with pytest.raises(greenstalk.NotIgnoredError):
        client.ignore("a")
    assert client.watching() == ["a"]
    assert sorted(client.tubes()) == ["a", "default"]
    for name in ("-leading-dash", "col:on", "x" * 201):
        with pytest.raises(greenstalk.BadFormatError):
            client.use(name)
    client.use("A-z0+/;.$_()" + "x" * 188)
    assert len(client.using()) == 200


def test_greenstalk_gets_the_smallest_priority_of_all_watched_tubes(green: ConnectGreen) -> None:
    producer, worker = green(), green()
    for tube, priority in (("a", 2**32 - 1), ("b", 1), ("a", 1024), ("b", 1023), ("a", 1)):
        producer.use(tube)
        producer.put(b"%s %d" % (tube.encode(), priority), priority=priority)
    worker.watch("a")
    worker.watch("b")
    assert worker.stats()["current-jobs-urgent"] == 3
    bodies = [worker.reserve(timeout=0).body for _ in range(5)]
    assert bodies == [b"b 1", b"a 1", b"b 1023", b"a 1024", b"a 4294967295"]


def test_greenstalk_waits_for_a_delayed_job(green: ConnectGreen) -> None:
    client = green()
    start = time.monotonic()
    job_id = client.put(b"later", delay=1)
    with pytest.raises(greenstalk.TimedOutError):
        client.reserve(timeout=0)
    assert client.peek_delayed().id == job_id
    assert client.reserve(timeout=10).id == job_id
    assert 1.0 <= time.monotonic() - start < 1.0 + LATE_S


def test_greenstalk_is_told_of_the_deadline_and_touches(green: ConnectGreen) -> None:
    client = green()
    start = time.monotonic()
    client.put(b"short", ttr=2)
    job = client.reserve()
    with pytest.raises(greenstalk.DeadlineSoonError):
        client.reserve()
    assert 1.0 <= time.monotonic() - start < 1.0 + LATE_S
    client.touch(job)
    with pytest.raises(greenstalk.DeadlineSoonError):
        client.reserve(timeout=30)
    assert 2.0 <= time.monotonic() - start < 2.0 + LATE_S
    client.delete(job)


def test_greenstalk_loses_a_job_whose_time_passed(green: ConnectGreen, kind: str) -> None:
    if kind == "beanstalkd":
        pytest.skip(LOST_TIMER)
    slow, other = green(), green()
    slow.put(b"again", ttr=1)
    start = time.monotonic()
    held = slow.reserve()
    job = other.reserve(timeout=10)
    assert job.id == held.id
    assert 1.0 <= time.monotonic() - start < 1.0 + LATE_S
    assert other.stats_job(job)["timeouts"] == 1
    assert other.stats()["job-timeouts"] == 1
    for command in (slow.touch, slow.release, slow.bury, slow.delete):
        with pytest.raises(greenstalk.NotFoundError):
            command(held)


def test_greenstalk_releases_buries_and_kicks(green: ConnectGreen) -> None:
    client = green()
    ids = [client.put(b"%d" % n, priority=10) for n in range(4)]
    jobs = [client.reserve() for _ in ids]
    client.release(jobs[0], priority=5, delay=100)
    stats = client.stats_job(jobs[0])
    assert (stats["state"], stats["pri"], stats["delay"], stats["releases"]) == ("delayed", 5, 100, 1)
    for n in (3, 1, 2):
        client.bury(jobs[n], priority=n)
    assert client.peek_buried().id == ids[3]
    assert client.kick(2) == 2  # those that were buried first; the delayed one stays while anything is buried
    assert client.peek_buried().id == ids[2]
    client.kick_job(ids[2])
    assert client.kick(10) == 1
    assert [client.reserve(timeout=0).id for _ in ids] == [ids[1], ids[2], ids[3], ids[0]]
    assert client.reserve_job(client.put(b"by id")).body == b"by id"
    with pytest.raises(greenstalk.NotFoundError):
        client.kick_job(ids[0])


def test_greenstalk_peeks(green: ConnectGreen) -> None:
    client = green()
    for peek in (client.peek_ready, client.peek_delayed, client.peek_buried):
        with pytest.raises(greenstalk.NotFoundError):
            peek()
    ready, late, later = client.put(b"r"), client.put(b"l", delay=50), client.put(b"L", delay=60)
    assert (client.peek_ready().id, client.peek_delayed().id) == (ready, late)
    assert client.peek(later).body == b"L"
    client.delete(later)
    with pytest.raises(greenstalk.NotFoundError):
        client.peek(later)


def test_greenstalk_parses_all_statistics(green: ConnectGreen, kind: str) -> None:
    client = green()
    client.delete(client.put(b"gone"))
    job_id = client.put(b"s", priority=3, delay=99, ttr=8)
    job = client.stats_job(job_id)
    assert set(job) == set(greenstalk.StatsJob.__annotations__)
    assert (job["id"], job["tube"], job["state"]) == (job_id, "jobs", "delayed")
    assert (job["pri"], job["delay"], job["ttr"]) == (3, 99, 8)
    assert 0 <= job["age"] <= LATE_S
    assert 98 - LATE_S <= job["time-left"] <= 98
    assert job["file"] >= 1
    tube = client.stats_tube("jobs")
    assert set(tube) >= set(greenstalk.StatsTube.__annotations__)  # ours come behind
    assert (tube["name"], tube["total-jobs"], tube["current-jobs-delayed"]) == ("jobs", 2, 1)
    assert (tube["current-using"], tube["current-watching"], tube["current-waiting"]) == (1, 1, 0)
    assert tube["cmd-delete"] == 1
    stats: dict[str, Any] = dict(client.stats())
    assert set(stats) >= set(greenstalk.Stats.__annotations__)
    for key, value_type in greenstalk.Stats.__annotations__.items():
        if value_type is int or getattr(value_type, "__forward_arg__", "") == "int":
            assert type(stats[key]) is int, key
    assert (stats["cmd-put"], stats["total-jobs"], stats["cmd-delete"], stats["cmd-stats"]) == (2, 2, 1, 1)
    assert (stats["max-job-size"], stats["draining"]) == (MAX_JOB_BYTES, "false")
    assert re.match(r"\d+(\.\d+)+", stats["version"])
    if kind == "geventstalk":
        assert '"' not in stats["hostname"] + stats["os"] + stats["platform"]


def test_greenstalk_pauses_a_tube(green: ConnectGreen) -> None:
    client = green()
    job_id = client.put(b"held")
    start = time.monotonic()
    client.pause_tube("jobs", 1)
    assert client.stats_tube("jobs")["pause"] == 1
    with pytest.raises(greenstalk.TimedOutError):
        client.reserve(timeout=0)
    assert client.reserve(timeout=10).id == job_id
    assert 1.0 <= time.monotonic() - start < 1.0 + LATE_S
    assert client.stats_tube("jobs")["cmd-pause-tube"] == 1
    with pytest.raises(greenstalk.NotFoundError):
        client.pause_tube("nowhere", 1)


def test_greenstalk_gets_errors_and_goes_on(green: ConnectGreen) -> None:
    client, other = green(), green()
    no_job = greenstalk.Job(NO_JOB, b"")
    held, any_state = (
        (client.touch, client.release, client.bury),
        (client.delete, client.kick_job, client.stats_job),
    )
    for command in (*held, *any_state):
        with pytest.raises(greenstalk.NotFoundError):
            command(no_job)
    for by_id in (client.peek, client.reserve_job):
        with pytest.raises(greenstalk.NotFoundError):
            by_id(NO_JOB)
    with pytest.raises(greenstalk.NotFoundError):
        client.stats_tube("nowhere")
    with pytest.raises(greenstalk.JobTooBigError):
        client.put(bytes(MAX_JOB_BYTES + 1))
    with pytest.raises(greenstalk.BadFormatError):
        client.peek(2**64)
    client.put(b"mine")
    job = client.reserve()
    for command in (other.delete, other.touch, other.release, other.bury):
        with pytest.raises(greenstalk.NotFoundError):
            command(job)
    with pytest.raises(greenstalk.NotFoundError):
        other.reserve_job(job.id)
    client.delete(job)


def test_greenstalk_gets_every_body_back(green: ConnectGreen) -> None:
    client = green()
    for body in BODIES:
        client.put(body)
        job = client.reserve(timeout=0)
        assert job.body == body
        client.delete(job)


def test_greenstalk_waiting_in_reserve_is_served_by_another(green: ConnectGreen) -> None:
    worker, producer = green(), green()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.reserve)
        until(lambda: producer.stats_tube("jobs")["current-waiting"] == 1)
        job_id = producer.put(b"served")
        assert waiting.result(WAIT_LIMIT_S).id == job_id
    worker.delete(job_id)


def test_greenstalk_leaves_and_its_job_comes_back(green: ConnectGreen) -> None:
    leaver, other = green(), green()
    job_id = leaver.put(b"kept")
    leaver.reserve()
    leaver.close()
    assert other.reserve(timeout=10).id == job_id
    assert other.stats_job(job_id)["reserves"] == 2


def test_greenstalk_puts_into_a_draining_server(server: ServerProcess, green: ConnectGreen) -> None:
    client = green()
    job_id = client.put(b"before")
    os.kill(server.pid, signal.SIGUSR1)
    until(lambda: client.stats()["draining"] == "true")
    with pytest.raises(greenstalk.DrainingError):
        client.put(b"after")
    client.delete(client.reserve(timeout=0))
    with pytest.raises(greenstalk.NotFoundError):
        client.peek(job_id)


def test_greenstalk_over_a_unix_socket(start: Starter, flags: list[str], tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    start(*flags, unix_path=path)
    with greenstalk.Client(path) as client:
        client.put("Grüße, 測試")
        assert client.reserve(timeout=0).body == "Grüße, 測試"


def test_greenstalk_finds_every_state_after_kill_9(start: Starter, flags: list[str]) -> None:
    server = start(*flags)
    with greenstalk.Client(("127.0.0.1", server.port), encoding=None) as client:
        ready, reserved, buried, delayed, gone = (client.put(b"%d" % n, priority=n) for n in range(5))
        client.release(client.reserve_job(delayed), priority=9, delay=100)
        client.bury(client.reserve_job(buried), priority=7)
        client.reserve_job(reserved)
        client.delete(gone)
        server.kill()
        with pytest.raises(ConnectionError):
            client.stats()
    start(*flags, port=server.port)
    with greenstalk.Client(("127.0.0.1", server.port), encoding=None) as client:
        states = {job_id: client.stats_job(job_id)["state"] for job_id in (ready, reserved, buried, delayed)}
        assert states == {ready: "ready", reserved: "ready", buried: "buried", delayed: "delayed"}
        assert client.stats_job(delayed)["pri"] == 9
        assert 40 <= client.stats_job(delayed)["time-left"] <= 100
        assert client.peek_buried().body == b"2"
        with pytest.raises(greenstalk.NotFoundError):
            client.peek(gone)
        assert client.put(b"new") == gone + 1
        assert [client.reserve(timeout=0).body for _ in range(2)] == [b"0", b"1"]


# pystalk


def test_pystalk_goes_a_whole_round(py: Callable[..., Any]) -> None:
    client = py()
    assert client.list_tubes() == ["default", "jobs"]
    for priority in (2**32 - 1, 1, 1024):
        client.put_job(f"p{priority}", pri=priority)
    jobs = list(client.reserve_iter())
    assert [job.job_data for job in jobs] == [b"p1", b"p1024", b"p4294967295"]
    client.release_job(jobs[0], pri=5, delay=100)
    client.bury_job(jobs[1], pri=7)
    client.bury_job(jobs[2], pri=7)
    assert client.peek_delayed().job_id == jobs[0].job_id
    assert client.peek_buried().job_id == jobs[1].job_id
    assert client.kick_jobs(1) == (b"KICKED", 1)
    client.kick_job(jobs[2])
    client.kick_job(jobs[0])
    assert [job.job_id for job in client.reserve_iter()] == [jobs[n].job_id for n in (0, 2, 1)]
    for job in jobs:
        client.delete_job(job)
    assert client.stats_tube("jobs")["cmd-delete"] == 3
    client.put_job_into("other", b"elsewhere")
    assert client.stats_tube("other")["current-jobs-ready"] == 1
    client.watch("other")
    client.ignore("jobs")
    assert client.reserve_job(0).job_data == b"elsewhere"


def test_pystalk_waits(py: Callable[..., Any]) -> None:
    client = py()
    start = time.monotonic()
    client.put_job(b"later", delay=1, ttr=1)
    job = client.reserve_job(10)
    assert 1.0 <= time.monotonic() - start < 1.0 + LATE_S
    with pytest.raises(pystalk.BeanstalkError) as error:
        client.reserve_job(10)  # a job with a TTR of one second is always near its deadline
    assert status(error) == "DEADLINE_SOON"
    client.pause_tube("jobs", 100)
    client.release_job(job)
    with pytest.raises(pystalk.BeanstalkError) as error:
        client.reserve_job(0)
    assert status(error) == "TIMED_OUT"
    client.unpause_tube("jobs")
    assert client.reserve_job(10).job_id == job.job_id


def test_pystalk_gets_every_body_back(py: Callable[..., Any]) -> None:
    client = py()
    for body in BODIES:
        client.put_job(body)
        job = client.reserve_job(0)
        assert job.job_data == body
        client.delete_job(job)


def test_pystalk_gets_errors_and_goes_on(py: Callable[..., Any]) -> None:
    client = py()
    held, any_state = (
        (client.release_job, client.bury_job),
        (client.delete_job, client.kick_job, client.stats_job),
    )
    for command in (*held, *any_state):
        with pytest.raises(pystalk.BeanstalkError) as error:
            command(NO_JOB)
        assert status(error) == "NOT_FOUND"
    for peek in (client.peek_ready, client.peek_delayed, client.peek_buried):
        with pytest.raises(pystalk.BeanstalkError) as error:
            peek()
        assert status(error) == "NOT_FOUND"
    with pytest.raises(pystalk.BeanstalkError) as error:
        client.put_job(bytes(MAX_JOB_BYTES + 1))
    assert status(error) == "JOB_TOO_BIG"
    with pytest.raises(pystalk.BeanstalkError) as error:
        client.use("col:on")
    assert status(error) == "BAD_FORMAT"
    assert client.ping() is True
    client.put_job(b"fits")


def test_pystalk_parses_all_statistics_as_yaml(py: Callable[..., Any], kind: str) -> None:
    client = py()
    _, job_id = client.put_job(b"s", pri=3, delay=9, ttr=8)
    job = client.stats_job(job_id)
    assert (job["id"], job["tube"], job["state"], job["pri"], job["ttr"]) == (job_id, "jobs", "delayed", 3, 8)
    assert client.stats_tube("jobs")["name"] == "jobs"
    stats = client.stats()
    assert (stats["draining"], stats["max-job-size"], stats["cmd-put"]) == (False, MAX_JOB_BYTES, 1)
    assert isinstance(stats["rusage-utime"], float)
    assert re.match(r"\d+(\.\d+)+", stats["version"])
    if kind == "geventstalk":  # beanstalkd 1.12 leaves these bare, and `os: #1 SMP` is then a comment
        assert all(isinstance(stats[key], str) for key in ("hostname", "os", "platform"))


@pytest.mark.parametrize("name", ["true", "null", "1", "1.5", "12e3", "0x10"])
def test_pystalk_reads_a_tube_name_that_looks_like_something_else(py: Callable[..., Any], kind: str, name: str) -> None:
    if kind == "beanstalkd":
        pytest.skip("quotes tube names in statistics only after version 1.12")
    client = py(name)
    _, job_id = client.put_job(b"x")
    assert client.stats_job(job_id)["tube"] == name
    assert client.stats_tube(name)["name"] == name


def test_pystalk_reconnects_by_itself_after_kill_9(start: Starter, flags: list[str]) -> None:
    server = start(*flags)
    client = pystalk.BeanstalkClient("127.0.0.1", server.port, socket_timeout=WAIT_LIMIT_S)
    client.use("jobs")
    client.watch("jobs")
    client.put_job(b"kept")
    server.kill()
    with pytest.raises((pystalk.BeanstalkError, OSError)):
        client.reserve_job(0)
    client.close()
    with pytest.raises(pystalk.BeanstalkError):
        client.stats()
    start(*flags, port=server.port)
    assert client.reserve_job(0).job_data == b"kept"
    client.put_job(b"into the same tube")
    assert client.stats_tube("jobs")["current-jobs-ready"] == 1
    client.close()


# other languages


@whole_suites
@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_client_of_another_language_goes_a_whole_round(server: ServerProcess, kind: str, program: Program) -> None:
    expected = {step: f"skip: {program.skips[step]}" if step in program.skips else "ok" for step in STEPS}
    results = program.run(server.port, MAX_JOB_BYTES)
    if kind == "beanstalkd" and results["expiry"] != "ok":
        print(LOST_TIMER)
        results["expiry"] = "ok"
    assert results == expected


# the clients' own test suites


def run_suite(command: list[str], cwd: Path, **environment: str) -> str:
    """Runs a test suite that is not ours; fails with what it printed."""
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, "the suite failed (see its output)"
    return done.stdout


@pytest.fixture
def program(kind: str, tmp_path: Path) -> str:
    """The server as one executable file, as test suites want it that start `beanstalkd` themselves."""
    reference = beanstalkd_path()
    if kind == "beanstalkd":
        return reference or pytest.skip("beanstalkd is not installed")
    path = tmp_path / "beanstalkd"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.join(GEVENTSTALK)} "$@"\n')
    path.chmod(0o755)
    return str(path)


PYSTALK_CONFTEST = """
import socket, subprocess, time, pytest

# The name that pytest had for ordinary fixtures at the time.
pytest.yield_fixture = pytest.fixture


class Popen(subprocess.Popen):
    # The suite sleeps for 0.25 s while the server starts. A busy machine takes longer, so this waits for the port.
    def __init__(self, command, **options):
        super().__init__(command, **options)
        deadline = time.monotonic() + 60
        while self.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", int(command[-1]))).close()
                return
            except OSError:
                time.sleep(0.01)


subprocess.Popen = Popen
"""


@pytest.mark.long
@whole_suites
def test_own_suite_of_pystalk(program: str, tmp_path: Path) -> None:
    """Of the last source distribution that holds it; the library it tests is the one installed here."""
    sha256 = "16133a39f4be69f59961397e35c8c8e6d99f8813dda8c90696e2ac0647f2a86e"
    suite = fetch_sdist("pystalk==0.5.1", sha256, tmp_path)
    (suite / "pytest.ini").write_text("[pytest]\n")
    (suite / "conftest.py").write_text(PYSTALK_CONFTEST)
    (suite / "pystalk").rename(suite / "pystalk-of-that-time")
    pytest_options = ["-c", "pytest.ini", "-p", "no:cacheprovider", "tests/integration"]
    command = [sys.executable, "-m", "pytest", *pytest_options]
    output = run_suite(command, suite, BEANSTALKD_PATH=program, PYTEST_ADDOPTS="")
    assert re.search(r"\b20 passed in", output)


@pytest.mark.long
@whole_suites
def test_own_suite_of_fivebeans(start: Starter) -> None:
    """As the npm package holds it; without one test that wants the Node.js of 2016, where `errno` was a text."""
    modules = node_modules()
    server = start()
    command = ["node", "--no-deprecation", str(modules / "mocha" / "bin" / "mocha.js"), "--exit"]
    command += ["--timeout", "8000", "--require", str(HERE / "node" / "port.js")]
    command += ["--grep", "emits the error event on failure", "--invert"]
    command += ["test/test-client.js", "test/test-worker.js"]
    output = run_suite(command, modules / "fivebeans", SERVER_PORT=str(server.port))
    assert re.search(r"\b44 passing\b", output)
    assert "failing" not in output
