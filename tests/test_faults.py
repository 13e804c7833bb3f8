"""Faults of beanstalkd that must not exist here, each by its name in the list of weaknesses, and shown to be absent."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clients import (
    Launch,
    burst,
    cpu_share,
    number,
    open_files,
    put_many,
    receive_exactly,
    reserve_many,
    until,
)
from tests.support.process import ServerProcess
from tests.support.wire import Client, WireError

IDLE_SHARE = 0.15  # of a core; what spins takes all that it gets, a third and more beside others
LATE_S = 5.0  # how much later than asked for is still in time: others may have the machine


@pytest.mark.slow
def test_w1_every_job_of_an_idle_connection_expires(launch: Launch) -> None:
    # Upstream forgets a connection's timer when its tick falls into the microsecond of the deadline: of 1000 jobs like
    # these, 12 to 119 stay reserved for as long as their owner is silent.
    count = 300
    server = launch()
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(Client(server.connect()))
        put_many(control, count, ttr=1)
        workers = [stack.enter_context(Client(server.connect())) for _ in range(count)]
        first_s = last_s = time.monotonic()
        for worker in workers:
            last_s = time.monotonic()
            assert worker.ask(b"reserve").startswith(b"RESERVED")
            time.sleep(0.002)
        early = number(control, "job-timeouts")
        assert early == 0 or time.monotonic() - first_s > 1, "none expires early"
        until(lambda: number(control, "job-timeouts") == count, "all expire")
        assert 1 <= time.monotonic() - last_s < 1 + LATE_S
        assert number(control, "current-jobs-reserved") == 0
        assert number(control, "current-jobs-ready") == count


@pytest.mark.parametrize("touched", [True, False], ids=["touched", "silent"])
@pytest.mark.slow
def test_w2_a_deadline_soon_does_not_cost_the_timer(launch_tcp: Launch, touched: bool) -> None:
    # Upstream answers DEADLINE_SOON and leaves the timeout of that reserve armed; when it ticks, the connection falls
    # out of the timers, and a job that was touched meanwhile stays reserved beyond its ttr.
    server = launch_tcp()
    with Client(server.connect()) as owner, Client(server.connect()) as control:
        owner.put(b"x", ttr=2)
        begun_s = time.monotonic()
        assert owner.ask(b"reserve").startswith(b"RESERVED 1 ")
        time.sleep(0.5)
        assert owner.ask(b"reserve-with-timeout 2") == b"DEADLINE_SOON\r\n"
        if touched:
            begun_s = time.monotonic()
            assert owner.ask(b"touch 1") == b"TOUCHED\r\n"
        until(lambda: control.stats(b"stats-job 1")["state"] == "ready", "it expires")
        assert 2 <= time.monotonic() - begun_s < 2 + LATE_S
        assert number(control, "timeouts", b"stats-job 1") == 1


@pytest.mark.slow
def test_w7_a_put_that_cannot_be_written_is_not_half_accepted(launch: Launch, tmp_path: Path) -> None:
    # Upstream answers BURIED when the write fails, leaves the job in two places, and the next reserve loops for ever.
    # Here such a put is refused and the server goes on, or nothing of that batch is answered and the process ends.
    flags = ["-b", str(tmp_path / "journal"), "-f50"]
    server = launch(*flags)
    with Client(server.connect()) as client, Client(server.connect()) as other:
        ids = put_many(client, 10, body=b"x" * 100)
        # From now on the kernel refuses to let a file grow (EFBIG).
        limit = max(path.stat().st_size for path in (tmp_path / "journal").glob("*-wal")) + 4096
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (limit, limit))
        client.send(b"put 0 0 60 60000\r\n%b\r\n" % (b"y" * 60000))
        try:
            reply = client.reply()
        except WireError:
            assert server.process.wait(30) == 74, (tmp_path / "log").read_text()
            assert other.at_end()
        else:
            assert reply == b"OUT_OF_MEMORY\r\n"
            assert client.ask(b"peek 11") == b"NOT_FOUND\r\n"
            assert other.ask(b"reserve-with-timeout 0").startswith(b"RESERVED 1 ")
            assert cpu_share(server.pid, 0.5) < IDLE_SHARE
            assert server.stop() == 0
    server = launch(*flags)
    with Client(server.connect()) as client:
        assert number(client, "current-jobs-ready") == len(ids)
        assert reserve_many(client, len(ids)) == ids
        assert client.ask(b"peek 11") == b"NOT_FOUND\r\n"
        assert client.ask(b"reserve-with-timeout 0") == b"TIMED_OUT\r\n"


@pytest.mark.slow
def test_w7_a_put_for_which_there_is_no_memory(launch_tcp: Launch) -> None:
    # The same without a journal: the job is refused, in no place at all, and all other clients are served.
    server = launch_tcp("-z", "1000000000")
    with Client(server.connect()) as other:
        other.put(b"before")
        taken = 1024 * int(
            next(
                line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if "VmSize" in line
            ).split()[1]
        )
        resource.prlimit(server.pid, resource.RLIMIT_AS, (taken + (64 << 20),) * 2)
        with Client(server.connect()) as client, contextlib.suppress(ConnectionError):
            client.send(b"put 0 0 60 400000000\r\n")
            for _ in range(400):
                client.send(b"y" * 1_000_000)
            client.send(b"\r\n")
            assert client.reply() in (b"OUT_OF_MEMORY\r\n", b"INTERNAL_ERROR\r\n")
        assert other.ask(b"peek 2") == b"NOT_FOUND\r\n"
        assert other.ask(b"reserve-with-timeout 0") == b"RESERVED 1 6\r\nbefore\r\n"
        assert other.ask(b"reserve-with-timeout 0") == b"TIMED_OUT\r\n"
        other.put(b"z" * 1_000_000)
        assert number(other, "current-jobs-ready") == 1


@pytest.mark.slow
def test_w12_ids_are_never_given_twice(launch_tcp: Launch, tmp_path: Path) -> None:
    # Upstream counts on from the largest id in the files that are left: put, delete, two restarts, and ids begin at 1.
    flags = ["-b", str(tmp_path / "journal")]
    seen: list[int] = []
    for stop in (ServerProcess.stop, ServerProcess.kill, ServerProcess.stop):
        server = launch_tcp(*flags)
        with Client(server.connect()) as client:
            seen.append(client.put(b"x"))
            assert client.ask(b"delete %d" % seen[-1]) == b"DELETED\r\n"
        stop(server)
        # Two starts that put nothing, so that nothing in the newest segments tells of an id.
        launch_tcp(*flags).kill()
        assert launch_tcp(*flags).stop() == 0
    assert seen == sorted(set(seen)), seen


def test_w13_an_upload_is_invisible(launch: Launch) -> None:
    # Upstream lets any client peek at a job whose body is still to come, and shows what that memory held before: the
    # bodies of jobs that were deleted.
    secret = b"s" * 56
    server = launch()
    with Client(server.connect()) as client, Client(server.connect()) as other:
        client.put(secret)
        client.ask(b"delete 1")
        client.send(b"put 0 0 60 56\r\nabc")
        until(lambda: number(other, "cmd-put") == 2, "its header is read")
        for command in (
            b"peek 2",
            b"reserve-job 2",
            b"delete 2",
            b"kick-job 2",
            b"touch 2",
            b"stats-job 2",
            b"peek-ready",
        ):
            assert other.ask(command) == b"NOT_FOUND\r\n", command
        client.send(b"." * 53 + b"\r\n")
        assert client.reply() == b"INSERTED 2\r\n"
        assert other.ask(b"peek 2") == b"FOUND 2 56\r\nabc%b\r\n" % (b"." * 53)


@pytest.mark.parametrize("waits", ["before", "meanwhile"])
@pytest.mark.long
def test_w14_a_stall_leaves_no_phantom_reservation(launch_tcp: Launch, waits: str) -> None:
    # Upstream, stopped while a client waits with a job whose ttr ends meanwhile, reserves the job for that client again
    # and tells it DEADLINE_SOON only: reserved by a client that does not know.
    server = launch_tcp()
    with Client(server.connect()) as owner, Client(server.connect()) as control:
        owner.put(b"x", ttr=2)
        assert owner.ask(b"reserve").startswith(b"RESERVED 1 ")
        if waits == "before":
            owner.send(b"reserve-with-timeout 4\r\n")
            until(lambda: number(control, "current-waiting") == 1, "it waits")
        server.process.send_signal(signal.SIGSTOP)
        if waits == "meanwhile":
            owner.send(b"reserve-with-timeout 4\r\n")
        time.sleep(2.2)
        server.process.send_signal(signal.SIGCONT)
        reply = owner.reply()
        told = reply == b"RESERVED 1 1\r\nx\r\n"
        assert told or reply == b"DEADLINE_SOON\r\n"
        if not told:
            until(lambda: control.stats(b"stats-job 1")["state"] == "ready", "what is overdue expires")
        job = control.stats(b"stats-job 1")
        assert job["state"] == ("reserved" if told else "ready"), "what the client was told is what is so"
        assert [job["reserves"], job["timeouts"]] == ["2" if told else "1", "1"]
        assert owner.ask(b"bury 1 0") == (b"BURIED\r\n" if told else b"NOT_FOUND\r\n")


def libfaketime() -> str:
    found = [os.environ.get("LIBFAKETIME", ""), *map(str, Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))]
    path = next((path for path in found if path and Path(path).exists()), None)
    if path is None:
        pytest.skip("libfaketime is not installed")
    return path


@pytest.mark.parametrize("jump", [pytest.param("-3600", marks=pytest.mark.long), "+3600"])
@pytest.mark.slow
def test_w15_the_wall_clock_may_jump(jump: str, start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    # Upstream counts delays, ttrs, timeouts and its fsync period by the wall clock: set back an hour, all of them stop
    # for an hour; set forward, all of them end at once.
    clock = tmp_path / "clock"
    clock.write_text("+0")
    fake = {
        "LD_PRELOAD": libfaketime(),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    server = start_server("-b", str(tmp_path / "journal"), "-f50", env=fake)
    with Client(server.connect()) as client, Client(server.connect()) as worker:
        begun_s = time.monotonic()
        client.put(b"delayed", delay=3)
        client.put(b"held", ttr=3, pri=1)
        client.ask(b"use paused")
        client.put(b"paused", pri=2)
        assert worker.ask(b"reserve").startswith(b"RESERVED 2 ")
        assert client.ask(b"pause-tube paused 3") == b"PAUSED\r\n"
        client.send(b"watch nothing\r\nignore default\r\nreserve-with-timeout 3\r\n")
        until(lambda: number(worker, "current-waiting") == 1, "it waits")
        clock.write_text(jump)
        age = wall_age(worker)
        stats = worker.stats(b"stats")
        states = [stats["current-jobs-delayed"], stats["current-jobs-reserved"], stats["current-waiting"]]
        assert states == ["1"] * 3 or time.monotonic() - begun_s > 3, "nothing ends before its time"
        assert client.reply() + client.reply() == b"WATCHING 2\r\nWATCHING 1\r\n"
        assert client.reply() == b"TIMED_OUT\r\n"
        assert 2.95 < time.monotonic() - begun_s < 3 + LATE_S
        until(lambda: number(worker, "current-jobs-ready") == 3, "the delay and the ttr end", LATE_S)
        assert number(worker, "job-timeouts") == 1
        assert worker.ask(b"watch paused") == b"WATCHING 2\r\n"
        assert burst(worker, [b"reserve-with-timeout 0\r\n"] * 3)[1].startswith(b"RESERVED 2 ")
        assert age <= LATE_S, "ages do not jump either"
    assert server.stop() == 0


def wall_age(client: Client) -> int:
    return number(client, "age", b"stats-job 1")


@pytest.mark.slow
def test_w34_the_limit_of_descriptors(launch: Launch, tmp_path: Path) -> None:
    # Upstream spins at 100 % of a core and writes 20 MB/s of errors when it has no descriptor left for a connection.
    server = launch()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Client(server.connect()))
        first.sync()
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (len(open_files(server.pid)) + 40, hard))
        clients = [stack.enter_context(Client(server.connect())) for _ in range(100)]
        until(lambda: "cannot accept" in (tmp_path / "log").read_text(), "it says so")
        assert cpu_share(server.pid) < IDLE_SHARE
        served = number(first, "current-connections")
        assert 2 <= served <= 42, "some were accepted, not all"
        assert first.put(b"x") == 1
        clients[0].sync()
        assert clients[0].ask(b"reserve") == b"RESERVED 1 1\r\nx\r\n"
        complaints = (tmp_path / "log").read_text().count("cannot accept")
        assert complaints == 1, (tmp_path / "log").read_text()
        # As connections end, those that waited at the door come in by themselves.
        for client in clients[:-5]:
            client.close()
        for client in clients[-5:]:
            client.sync()
        until(lambda: number(first, "current-connections") == 6, "those that left are gone")
        with Client(server.connect()) as late:
            assert late.ask(b"reserve") == b"RESERVED 1 1\r\nx\r\n"


@pytest.mark.parametrize("state", ["idle", "waiting", "uploading"])
@pytest.mark.slow
def test_w35_an_out_of_band_byte_costs_nothing(launch_tcp: Launch, state: str) -> None:
    # Upstream asks for urgent data and never takes it: one such byte, and it uses 100 % of a core until the next data.
    before = {"idle": b"", "waiting": b"reserve\r\n", "uploading": b"put 0 0 60 4\r\nab"}[state]
    after = {"idle": b"list-tube-used\r\n", "waiting": b"", "uploading": b"cd\r\n"}[state]
    reply = {"idle": b"USING default", "waiting": b"RESERVED 1 1", "uploading": b"INSERTED 1"}[state]
    server = launch_tcp()
    with Client(server.connect()) as client, Client(server.connect()) as control:
        client.sync()
        client.send(before)
        client.sock.send(b"!", socket.MSG_OOB)
        assert cpu_share(server.pid) < IDLE_SHARE
        if state == "waiting":
            control.put(b"x")
        client.send(after)
        assert client.reply().startswith(reply), "and it is no part of what was sent"


@pytest.mark.slow
def test_w35_a_half_closed_client_that_does_not_read_costs_nothing(launch: Launch) -> None:
    # Upstream is told again and again that the client half-closed, at 100 % of a core, as long as it does not read.
    server = launch()
    body = os.urandom(60_000)
    with server.connect() as silent, Client(server.connect()) as other:
        assert other.put(body) == 1
        silent.sendall(b"peek 1\r\n" * 300)
        silent.shutdown(socket.SHUT_WR)
        until(lambda: number(other, "cmd-peek") >= 2, "it is at work")
        assert cpu_share(server.pid) < IDLE_SHARE
        assert number(other, "cmd-peek") < 300, "and it does not fill its memory instead"
        expected = b"FOUND 1 60000\r\n%b\r\n" % body * 300
        assert receive_exactly(silent, len(expected)) == expected
        assert silent.recv(1) == b""
        until(lambda: number(other, "current-connections") == 1, "then it is over")


def test_w37_the_client_that_waits_longest_is_served_first(launch: Launch) -> None:
    # Upstream serves 7 clients in some other order, and of two that always wait one may get several jobs in a row.
    server = launch()
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(Client(server.connect()))
        waiting = []
        for _ in range(7):
            client = stack.enter_context(Client(server.connect()))
            client.send(b"reserve\r\n")
            waiting.append(client)
            until(lambda: number(control, "current-waiting") == len(waiting), "it waits")
        # The third one leaves the line, and the fourth one leaves it and comes back to its end.
        waiting.pop(2).close()
        until(lambda: number(control, "current-waiting") == 6, "it has left")
        for id in range(1, 21):
            assert control.put(b"x") == id
            client = waiting.pop(0)
            assert client.reply() == b"RESERVED %d 1\r\nx\r\n" % id
            client.send(b"delete %d\r\nreserve\r\n" % id)
            assert client.reply() == b"DELETED\r\n"
            waiting.append(client)
            until(lambda: number(control, "current-waiting") == 6, "it waits again")
