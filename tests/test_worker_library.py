"""Workers: the library, the command `geventstalk work`, with our server and with beanstalkd."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import geventstalk.worker as worker_module
from geventstalk.client import Client, ConnectionLost, InternalError, Job, NotFound
from geventstalk.exits import EXIT_NOT_ALLOWED
from geventstalk.worker import Attempt, Backoff, Bury, Policy, Retry, Tasks, Worker
from tests.support.clients import until
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.test_cli import run

Starter = Callable[..., ServerProcess]


@pytest.fixture(params=["start_server", "start_beanstalkd"])
def address(request: pytest.FixtureRequest) -> str:
    start: Starter = request.getfixturevalue(request.param)
    return f"127.0.0.1:{start().port}"


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, use="t", watch=["t"]) as made:
        yield made


def worker(address: str, handler: Callable[[Attempt], None], policy: Policy = Policy()) -> Worker:  # noqa: B008
    return Worker(handler, ["t"], address, lambda attempt: policy)


def all_of(at: Worker) -> None:
    """Has a worker do all that there is to do."""
    with at:
        while at.work_once():
            pass


def test_a_backoff_grows_to_its_limit() -> None:
    assert [Backoff(2, 3, 40).after(tries) for tries in (0, 1, 2, 3, 4, 10**9)] == [2, 2, 6, 18, 40, 40]
    assert Backoff(0, 2, 5).after(3) == 0
    assert [Backoff(first, 3.0, 40).after(10**9) for first in (0.5, 0)] == [40, 0]


def test_what_becomes_of_a_job(address: str, client: Client) -> None:
    seen: list[Attempt] = []

    def handler(attempt: Attempt) -> None:
        seen.append(attempt)
        body = attempt.job.body
        if body == b"fails":
            raise OSError("no")
        if body == b"retry":
            raise Retry(100)
        if body == b"bury":
            raise Bury("never")

    ids = {body: client.put(body, priority=7, ttr=9) for body in ("done", "retry", "bury", "fails")}
    all_of(worker(address, handler, Policy(2, Backoff(0, 1, 0))))
    with pytest.raises(NotFound):
        client.stats_job(ids["done"])
    stats = {body: client.stats_job(id) for body, id in ids.items() if body != "done"}
    assert {body: stats[body]["state"] for body in stats} == {"retry": "delayed", "bury": "buried", "fails": "buried"}
    if "bury-text" in str(client.stats().get("features")):
        assert (stats["bury"]["reason"], stats["fails"]["reason"]) == ("never", "OSError: no")
    assert stats["retry"]["delay"] == 100 and stats["fails"]["reserves"] == 2
    assert all(found["pri"] == 7 for found in stats.values()), "a job keeps its priority"
    assert (seen[0].tube, seen[0].ttr_s, seen[0].tries) == ("t", 9, 1)


@pytest.mark.parametrize("delay_s", [-1, 1.5, 1 << 40])
def test_a_wrong_delay_of_a_task_ends_no_worker(address: str, client: Client, delay_s: int) -> None:
    def handler(attempt: Attempt) -> None:
        raise Retry(delay_s)

    id = client.put("x")
    at = worker(address, handler)
    with at:
        assert at.work_once()
    assert client.stats_job(id)["delay"] == min(max(0, int(delay_s)), (1 << 32) - 1)


def test_a_server_with_a_fault_ends_no_worker(
    address: str, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The job is done again when its time is over, and later jobs are done at once."""
    at = worker(address, lambda attempt: None)
    delete, reserve, faults = at._client.delete, at._client.reserve_with_timeout, ["delete", "reserve"]

    def fails_once(what: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(number: int, **options: int) -> object:
            if what in faults:
                faults.remove(what)
                raise InternalError("the server answers INTERNAL_ERROR")
            return method(number, **options)

        return call

    monkeypatch.setattr(at._client, "delete", fails_once("delete", delete))
    monkeypatch.setattr(at._client, "reserve_with_timeout", fails_once("reserve", reserve))
    monkeypatch.setattr(worker_module, "_LOOK_S", 0)
    ids = [client.put("x"), client.put("y")]
    thread = threading.Thread(target=at.run)
    thread.start()
    until(lambda: states(client, ids[0]) == ["reserved"] and not states(client, ids[1]), "the worker has ended")
    at.stop()
    thread.join(30)
    assert not faults and "stays reserved" in caplog.text and "trying again" in caplog.text


def test_a_job_that_is_about_to_go_back_keeps_no_worker_busy(
    address: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = worker(address, lambda attempt: None)
    delete, reserve = at._client.delete, at._client.reserve_with_timeout
    reserves: list[int] = []

    def fails_once(id: int, **options: int) -> None:
        monkeypatch.setattr(at._client, "delete", delete)
        raise InternalError("the server answers INTERNAL_ERROR")

    def count(timeout_s: int) -> Job:
        reserves.append(timeout_s)
        return reserve(timeout_s)

    monkeypatch.setattr(at._client, "delete", fails_once)
    monkeypatch.setattr(at._client, "reserve_with_timeout", count)
    id = client.put("x", ttr=1)
    with at:
        while states(client, id):
            at.work_once()
    assert len(reserves) < 6 and at.done == 2


def test_a_long_job_is_touched(address: str, client: Client) -> None:
    id = client.put("x", ttr=1)
    left: list[object] = []

    def handler(attempt: Attempt) -> None:
        time.sleep(2.5)
        left.append(client.stats_job(id)["state"])

    at = worker(address, handler)
    all_of(at)
    assert left == ["reserved"] and (at.done, at.failed) == (1, 0)
    with pytest.raises(NotFound):
        client.stats_job(id)


def test_a_job_is_touched_for_so_long_only(start_server: Starter) -> None:
    """Not with beanstalkd, which loses the timer of a reserved job now and then."""
    address = f"127.0.0.1:{start_server().port}"
    seen: list[object] = []
    with Client(address, use="t", watch=["t"]) as client:
        id = client.put("x", ttr=1)

        def handler(attempt: Attempt) -> None:
            seen.append(client.reserve_with_timeout(30).id)

        all_of(worker(address, handler, Policy(timeout_s=0.1)))
        assert seen == [id] and client.stats_job(id)["timeouts"] == 1, "another worker may have it"


def test_a_worker_stops_after_its_job(address: str, client: Client) -> None:
    begun = threading.Event()

    def handler(attempt: Attempt) -> None:
        begun.set()
        time.sleep(0.3)

    ids = [client.put("x"), client.put("y")]
    at = worker(address, handler)
    thread = threading.Thread(target=at.run)
    thread.start()
    assert begun.wait(10)
    at.stop()
    thread.join(10)
    assert not thread.is_alive() and client.stats_job(ids[1])["state"] == "ready"


def test_tasks_are_put_and_run(address: str, client: Client) -> None:
    tasks = Tasks(address)
    calls: list[object] = []

    @tasks.task(tube="t", tries=1)
    def send(to: str, *, copies: int = 1) -> int:
        """Sends."""
        calls.append((to, copies))
        return copies

    @tasks.task(tube="t", tries=5, backoff=Backoff(0, 1, 0), name="other")
    def fails() -> None:
        calls.append("fails")
        raise ValueError

    assert send("here", copies=3) == 3 and send.__doc__ == "Sends." and tasks.tubes == ["t"]
    first, second = send.put("ann", copies=2), fails.put()
    third = send.put_with(priority=1, delay=0, ttr=5)("bob")
    assert json.loads(client.peek(first).body) == {"task": "send", "args": ["ann"], "kwargs": {"copies": 2}}
    bodies = ["{", "[]", "{}", '{"task":"none","args":[],"kwargs":{}}', "\xff", "[" * 50_000]
    bodies += [
        '{"task":"other","args":"","kwargs":{}}',
        '{"task":"other","args":[],"kwargs":[]}',
        '{"task":[],"args":[]}',
    ]
    nonsense = [client.put(body) for body in bodies]
    all_of(Worker(tasks.run, tasks.tubes, address, tasks.policy_of))
    assert calls[:3] == [("here", 3), ("bob", 1), ("ann", 2)] and calls.count("fails") == 5
    assert [client.stats_job(id)["state"] for id in (second, *nonsense)] == ["buried"] * 10
    for id in (first, third):
        with pytest.raises(NotFound):
            client.stats_job(id)
    with pytest.raises(ValueError, match="already"):
        tasks.task(name="send")(lambda: None)
    with pytest.raises(TypeError):
        send.put(object())  # type: ignore[arg-type]
    tasks.close()


_FORK = """
import os, sys, threading
from geventstalk.worker import Tasks

tasks = Tasks(sys.argv[1])
put = tasks.task(tube="t", name="n")(lambda value: value).put
put("parent")
tasks._lock.acquire()  # as by another thread, in the middle of its put
child = os.fork()
if not child:
    put("child")
    tasks.close()
    os._exit(0)
tasks._lock.release()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), put("parent"))
"""


def test_a_fork_has_a_connection_of_its_own(address: str, client: Client) -> None:
    done = subprocess.run([sys.executable, "-c", _FORK, address], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 3\n", "")
    assert [client.peek(id).body[20:].partition(b"]")[0] for id in (1, 2, 3)] == [b'"parent"', b'"child"', b'"parent"']


def test_puts_go_into_the_tubes_of_their_tasks_from_threads(address: str, client: Client) -> None:
    tasks = Tasks(address)
    made = [tasks.task(tube=f"t{number}", name=f"n{number}")(lambda value: value) for number in range(3)]

    def put_all() -> None:
        for value in range(50):
            made[value % 3].put(value)

    threads = [threading.Thread(target=put_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.stats()["current-connections"] == 2, "all threads share a connection"
    tasks.close()
    tasks.close()
    assert [client.stats_tube(f"t{number}")["current-jobs-ready"] for number in range(3)] == [68, 68, 64]
    for number in range(3):
        client.use(f"t{number}")
        assert f'"task":"n{number}"' in client.peek_ready().body.decode()
    made[1].put("again")
    tasks.close()


def test_a_worker_waits_for_a_server_that_is_away(start_server: Starter, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    server = start_server(unix_path=path)
    done = threading.Event()
    at = worker(f"unix:{path}", lambda attempt: done.set())
    thread = threading.Thread(target=at.run)
    thread.start()
    server.kill()
    start_server(unix_path=path)
    with Client(f"unix:{path}", use="t") as client:
        client.put("x")
        assert done.wait(30)
    at.stop()
    thread.join(30)


@pytest.mark.parametrize("at", ["work", "stats-job"])
def test_a_job_of_a_server_that_began_anew_is_left_alone(
    start_server: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Without a journal its ids begin again: what was done was another job."""
    path = str(tmp_path / "socket")
    server = start_server(unix_path=path)
    address = f"unix:{path}"

    def begin_anew() -> None:
        server.kill()
        start_server(unix_path=path)
        with Client(address, use="t") as client:
            assert client.put("another") == 1

    done: list[bytes] = []

    def handler(attempt: Attempt) -> None:
        done.append(attempt.job.body)
        if at == "work":
            begin_anew()

    with Client(address, use="t") as client:
        client.put("one")
    with worker(address, handler) as one:
        if at == "stats-job":
            stats_job = one._client.stats_job

            def late_stats_job(id: int) -> object:
                begin_anew()
                return stats_job(id)

            monkeypatch.setattr(one._client, "stats_job", late_stats_job)
            assert one.work_once() and not done
        else:
            with pytest.raises(ConnectionLost):
                one.work_once()
            assert done == [b"one"]
        assert (one.done, one.failed) == (0, 0)
        with Client(address, use="t") as client:
            assert client.peek_ready() == Job(1, b"another")


# --- the command


@pytest.fixture
def working(address: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def begin(*words: str, **options: str) -> subprocess.Popen[str]:
        port = address.rpartition(":")[2]
        command = [*GEVENTSTALK, "work", "-p", port, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        begun.append(subprocess.Popen(command, text=True, **pipes, **options))  # type: ignore[call-overload]
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()  # a command that was left running holds the other end


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_a_command_runs_for_each_job(
    working: Callable[..., subprocess.Popen[str]], client: Client, address: str, tmp_path: Path
) -> None:
    """The command puts a job for the next worker."""
    chain = shlex.join([*GEVENTSTALK, "put", "-p", address.rpartition(":")[2], "next", "x"])
    script = (
        f'cat > "$OUT/$GEVENTSTALK_ID.$GEVENTSTALK_TUBE.$GEVENTSTALK_TRIES"; test "$GEVENTSTALK_ID" != 2 && {chain}'
    )
    os.environ["OUT"] = str(tmp_path)
    try:
        begun = working("--tries", "2", "--backoff", "0", "-j", "2", "t", "--", "sh", "-c", script)
    finally:
        del os.environ["OUT"]
    body = bytes(range(256)) * 200
    assert [client.put(body, ttr=5), client.put("b")] == [1, 2]
    until(lambda: "buried" in states(client, 2), "the job that fails is not buried")
    until(lambda: not states(client, 1), "the job is not deleted")
    code, out, err = ended(begun)
    assert (code, out) == (0, "put job 3 into next\ndone: 1, failed: 2\n")
    assert "job 2 of t is buried after try 2: RuntimeError: exit code 1" in err
    assert (tmp_path / "1.t.1").read_bytes() == body and (tmp_path / "2.t.2").read_bytes() == b"b"
    assert client.stats_tube("next")["current-jobs-ready"] == 1


def states(client: Client, id: int) -> list[object]:
    try:
        return [client.stats_job(id)["state"]]
    except NotFound:
        return []


def test_a_module_of_tasks_is_run(
    working: Callable[..., subprocess.Popen[str]], client: Client, tmp_path: Path
) -> None:
    (tmp_path / "reports.py").write_text(
        "from geventstalk.worker import Tasks\n"
        "tasks = Tasks()\n"
        "@tasks.task(tube='t')\n"
        "def report(text):\n"
        "    open('made', 'w').write(text)\n"
    )
    begun = working("reports:tasks", cwd=str(tmp_path))
    client.put('{"task":"report","args":["x"],"kwargs":{}}')
    until((tmp_path / "made").exists, "the task is not run")
    until(lambda: not states(client, 1), "the job is not deleted")
    assert ended(begun)[:2] == (0, "done: 1, failed: 0\n")


def test_a_second_signal_ends_at_once(working: Callable[..., subprocess.Popen[str]], client: Client) -> None:
    begun = working("t", "--", "sleep", "20")
    client.put("x")
    until(lambda: states(client, 1) == ["reserved"], "the job is not reserved")
    begun.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert begun.poll() is None
    begun.send_signal(signal.SIGTERM)
    assert begun.wait(10) == 128 + signal.SIGTERM
    until(lambda: states(client, 1) == ["ready"], "the job does not go back")


def test_a_module_names_its_server_unless_the_command_does(client: Client, address: str, tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text(
        "from geventstalk.worker import Tasks\n"
        f"tasks = Tasks('{address}')\n"
        "@tasks.task(tube='t')\n"
        "def report():\n"
        "    pass\n"
    )
    port = address.rpartition(":")[2]
    listener = {"address": "127.0.0.1:1", "tls": {"certificate": "c", "key": "k"}}
    (tmp_path / "tls").write_text(json.dumps({"listeners": [listener]}))  # where only the Tasks could connect
    cases: list[tuple[list[str], str]] = [
        ([], ""),
        (["-p", "1"], ""),
        (["-p", port], ""),
        ([], "1"),
        ([], port),
        (["--config", "tls"], ""),
    ]
    for words, variable in cases:
        client.put('{"task":"report","args":[],"kwargs":{}}')
        environment = {**os.environ, **({"GEVENTSTALK_PORT": variable} if variable else {})}
        command = [*GEVENTSTALK, "work", *words, "there"]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE) as process:
            if "1" in (*words, variable):
                assert process.stderr is not None and "cannot connect" in process.stderr.readline()
                assert client.stats_tube("t")["current-jobs-ready"] == 1
                client.delete(client.peek_ready().id)
            else:
                until(lambda: client.stats_tube("t")["cmd-delete"] == client.stats_tube("t")["total-jobs"], "not done")
            process.kill()


def test_a_server_that_refuses_the_worker_is_one_line(start_server: Starter, tmp_path: Path) -> None:
    users = {"mailer": {"unix_user": os.getuid(), "rights": {"mail": "work"}}}
    path = tmp_path / "access"
    path.write_text(json.dumps({"users": users}))
    path.chmod(0o600)
    listeners = [{"address": f"unix:{tmp_path}/{name}", "identity": [name]} for name in ("token", "unix_user")]
    (tmp_path / "settings").write_text(json.dumps({"listeners": listeners, "access": str(path)}))
    start_server("--config", str(tmp_path / "settings"))
    for name, says in (("token", "UNAUTHORIZED"), ("unix_user", "FORBIDDEN to watch")):
        code, out, err = run("work", "-l", f"unix:{tmp_path}/{name}", "-j", "3", "other", "--", "true")
        assert (code, out, err.count("\n")) == (EXIT_NOT_ALLOWED, "", 1) and says in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no_such_module"], "there is no Python module no_such_module"),
        (["t", "--", "./no-such-command", "-x"], "there is no command ./no-such-command"),
        (["json"], "json names no Tasks"),
        (["json:loads"], "json:loads names no Tasks"),
        (["-j", "0", "t", "--", "true"], "0"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], says: str) -> None:
    code, out, err = run("work", *words)
    assert code == 5 and out == "" and says in err and err.count("\n") == 1


def test_the_library_needs_nothing_of_the_server() -> None:
    program = (
        "import sys; import geventstalk.worker; print([m for m in sys.modules if m.startswith(('gevent.', 'click'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
