"""The end of the process by signal: exit code 0, at once, whatever it is at; and what was acknowledged stays.

SIGUSR1 and SIGUSR2 are in test_server.py, except for what they must not do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.support import for_change
from tests.support.clients import Launch, Pump, burst, number, open_files, put_many, reserve_many, until
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.wire import Client

END_S = 5.0  # a tenth of a second mostly; on a slow machine whose disk takes 0.1 s for each fsync, some of these

STOPS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "HUP": signal.SIGHUP, "QUIT": signal.SIGQUIT}
all_stops = pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)


def ends(server: ServerProcess, stop: signal.Signals = signal.SIGTERM) -> None:
    """Sends the signal, also to a server that was stopped; it must end as it should."""
    begun = time.monotonic()
    server.process.send_signal(stop)
    server.process.send_signal(signal.SIGCONT)
    code = server.process.wait(30)
    took_s = time.monotonic() - begun
    print(f"ended after {took_s * 1e3:.0f} ms")
    assert code == 0
    assert took_s < END_S


@all_stops
def test_idle(launch: Launch, stop: signal.Signals) -> None:
    ends(launch(), stop)


@pytest.mark.slow
def test_with_a_journal_and_clients(launch: Launch, tmp_path: Path) -> None:
    server = launch("-b", str(tmp_path / "journal"))
    with Client(server.connect()) as client, Client(server.connect()) as waiting:
        waiting.send(b"watch t\r\nignore default\r\nreserve\r\n")
        id = client.put(b"x")
        ends(server)
        assert waiting.reply() + waiting.reply() == b"WATCHING 2\r\nWATCHING 1\r\n"
        assert waiting.at_end(), "no answer that is not true"
        assert client.at_end()
    with Client(launch("-b", str(tmp_path / "journal")).connect()) as client:
        assert client.ask(b"peek %d" % id) == b"FOUND %d 1\r\nx\r\n" % id


def test_a_second_signal_changes_nothing(launch_tcp: Launch, tmp_path: Path) -> None:
    server = launch_tcp("-b", str(tmp_path / "journal"))
    server.process.send_signal(signal.SIGTERM)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        with contextlib.suppress(ProcessLookupError):
            server.process.send_signal(stop)
    assert server.process.wait(30) == 0


@pytest.mark.slow
def test_a_thousand_connections_that_wait(launch: Launch) -> None:
    server = launch()
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(Client(server.connect()))
        clients = [stack.enter_context(Client(server.connect())) for _ in range(900)]
        for client in clients[:500]:
            client.send(b"reserve\r\n")
        for client in clients[500:]:
            client.send(b"put 0 0 60 10\r\nabc")
        until(lambda: number(control, "current-waiting") == 500, "all wait")
        ends(server)
        assert clients[0].at_end()
        assert clients[-1].at_end()


@pytest.mark.parametrize(("launch", "policy"), [("tcp", "-f0"), ("unix", "-f50"), ("tcp", "-F")], indirect=["launch"])
@pytest.mark.slow
def test_what_was_acknowledged_under_load_is_there_afterwards(launch: Launch, policy: str, tmp_path: Path) -> None:
    flags = ["-b", str(tmp_path / "journal"), "-s", "200000", policy]
    server = launch(*flags)
    pumps = [Pump(server, f"p{at}") for at in range(4)]
    until(lambda: all(len(pump.acknowledged) > 500 for pump in pumps), "all are at work")
    ends(server)
    for pump in pumps:
        pump.stop()
    with Client(launch(*flags).connect()) as client:
        still_there(client, pumps)


def still_there(client: Client, pumps: list[Pump]) -> None:
    """Every acknowledged put is there with its body; and nothing that was not put, or twice."""
    acknowledged = {id: body for pump in pumps for id, body in pump.acknowledged.items()}
    sent = {body for pump in pumps for body in pump.sent}
    ids = sorted(acknowledged)
    found = burst(client, [b"peek %d\r\n" % id for id in ids])
    wrong = [
        id
        for id, reply in zip(ids, found, strict=True)
        if reply != b"FOUND %d %d\r\n%b\r\n" % (id, len(acknowledged[id]), acknowledged[id])
    ]
    assert not wrong, f"{len(wrong)} of {len(ids)} jobs are lost or changed: {wrong[:10]}"
    count = number(client, "current-jobs-ready")
    bodies = {reply.partition(b"\r\n")[2][:-2] for reply in burst(client, [b"reserve-with-timeout 0\r\n"] * count)}
    assert len(bodies) == count, "a job is there twice"
    assert bodies <= sent


@pytest.mark.slow
def test_many_jobs_in_memory(launch_tcp: Launch, tmp_path: Path) -> None:
    """Taking them apart one by one would take longer."""
    server = launch_tcp("-b", str(tmp_path / "journal"), "-F")
    with Client(server.connect()) as client, Client(server.connect()) as worker:
        put_many(client, 100_000)
        reserve_many(worker, 20_000)
        ends(server)


@pytest.fixture(scope="module")
def long_journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal whose replay takes about a second."""
    folder = tmp_path_factory.mktemp("long") / "journal"
    server = ServerProcess(GEVENTSTALK, ["-b", str(folder), "-F"]).wait_ready()
    with Client(server.connect()) as client:
        put_many(client, 150_000)
    assert server.stop() == 0
    return folder


def replaying(folder: Path, unix_path: str | None = None) -> ServerProcess:
    """A server in the middle of its replay."""
    server = ServerProcess(GEVENTSTALK, ["-b", str(folder)], unix_path=unix_path)
    until(lambda: any("segment-" in name for name in open_files(server.pid)), "it replays")
    return server


@pytest.mark.parametrize("stop", for_change([signal.SIGTERM, signal.SIGINT], 0), ids=lambda stop: stop.name)
@pytest.mark.slow
def test_during_a_long_replay(long_journal: Path, tmp_path: Path, stop: signal.Signals) -> None:
    server = replaying(long_journal, str(tmp_path / "s"))
    server.process.send_signal(signal.SIGSTOP)  # so that it is still at it, however slow this process is
    with server.connect() as sock:  # the port is open, and no server answers yet
        sock.sendall(b"list-tube-used\r\n")
        ends(server, stop)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b"", "it did not serve yet"
    assert not (tmp_path / "s").exists(), "its unix socket is gone"


@pytest.mark.parametrize("signals", for_change([["USR1"], ["USR1", "USR2"], ["USR2", "USR1"]], 1), ids="-".join)
@pytest.mark.slow
def test_drain_signals_during_a_long_replay_count(long_journal: Path, tmp_path: Path, signals: list[str]) -> None:
    """They were ignored: an operator who drained a server that had just been started was not heard."""
    server = replaying(long_journal, str(tmp_path / "s"))
    try:
        for name in signals:
            server.process.send_signal(signal.Signals[f"SIG{name}"])
            time.sleep(0.05)  # signals that are pending together have no order
        server.wait_ready()
        with Client(server.connect()) as client:
            drains = signals[-1] == "USR1"
            assert client.stats(b"stats")["draining"] == ("true" if drains else "false")
            reply = client.ask(b"put 0 0 60 1\r\nx")
            assert reply == b"DRAINING\r\n" if drains else reply.startswith(b"INSERTED ")
    finally:
        assert server.stop() == 0


def as_pid_1() -> list[str]:
    """The words that run a program as the first process of a pid namespace; skips where that is not allowed."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed")
    words = [unshare, "--fork", "--pid", "--kill-child"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        words = [unshare, "--user", "--map-root-user", *words[1:]]
        if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
            pytest.skip("pid namespaces are not allowed here")
    return words


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until(lambda: children.read_text().split(), "it has a child")
    return int(children.read_text().split()[0])


@pytest.mark.parametrize(
    ("when", "stop"),
    for_change(
        [
            pytest.param("starting", signal.SIGTERM),
            pytest.param("replaying", signal.SIGTERM),
            *(pytest.param("serving", stop) for stop in STOPS.values()),
        ],
        *(0, 1, 2),
    ),
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
@pytest.mark.slow
def test_as_pid_1(when: str, stop: signal.Signals, long_journal: Path) -> None:
    """The kernel drops signals for pid 1 that it does not handle; so it was with beanstalkd in a container."""
    flags = ["-b", str(long_journal)] if when == "replaying" else []
    server = ServerProcess([*as_pid_1(), *GEVENTSTALK], flags)
    try:
        child = child_of(server.pid)
        if when == "serving":
            server.wait_ready()
        elif when == "replaying":
            until(lambda: any("segment-" in name for name in open_files(child)), "it replays")
        else:
            # Before its first line runs nothing can help it; what counts is that it may come as early as that.
            until(lambda: handles(child, signal.SIGQUIT), "it has installed the last of its handlers")
        begun = time.monotonic()
        os.kill(child, stop)
        assert server.process.wait(30) == 0
        assert time.monotonic() - begun < END_S
    finally:
        server.kill()


def handles(pid: int, number: signal.Signals) -> bool:
    """Returns whether the process has installed a handler for the signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


@pytest.mark.slow
def test_signals_do_not_disturb_work(launch_tcp: Launch, tmp_path: Path) -> None:
    """Drain signals by the hundred while clients work: nothing is lost, nothing hangs."""
    server = launch_tcp("-b", str(tmp_path / "journal"), "-f0")
    with Client(server.connect()) as client:
        over = threading.Event()

        def shoot() -> None:
            while not over.wait(0.001):
                server.process.send_signal(signal.SIGUSR2)

        thread = threading.Thread(target=shoot)
        thread.start()
        try:
            put_many(client, 5_000)
        finally:
            over.set()
            thread.join()
        assert number(client, "current-jobs-ready") == 5_000
