"""The real server over real sockets: who sends much, reads slowly, vanishes or waits; and what all that costs.

Each test has a server of its own, over TCP and over a unix socket. At its end that server must stop cleanly and must
have written nothing about an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geventstalk.core.operate import Operate
from geventstalk.serving.connection import AHEAD_BYTES_MAX, ALL_UNSENT_BYTES_MAX, OUT_BYTES_MIN, Unsent
from geventstalk.wire.session import OUT_BYTES_MAX, Service
from tests.support import for_change
from tests.support.clients import (
    CLOSERS,
    Launch,
    Probe,
    burst,
    cpu_s,
    cpu_share,
    fill,
    memory_bytes,
    number,
    open_files,
    probing,
    put_many,
    receive_all,
    receive_exactly,
    reserve_many,
    until,
    wakeups,
)
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.wire import Client, split_randomly

WORST_WORK_S = 0.05
"""What the server may do for others before it answers a client. A slice takes some 5 ms, it takes a few turns, and the
machine may be a slow one; all at once would take some tenths of a second."""
WORST_WALL_S = 5.0
IDLE_SHARE = 0.15
"""Of a core. What spins takes all that it gets: a third of one and more, also beside others."""

closers = pytest.mark.parametrize("close", CLOSERS.values(), ids=CLOSERS)


def journal_flags(tmp_path: Path, policy: str) -> list[str]:
    return [] if policy == "memory" else ["-b", str(tmp_path / "journal"), policy]


policies = pytest.mark.parametrize("policy", ["memory", "-f0", "-f50"])
# Each kind and each policy, not each with each: for tests that take long.
some_policies = pytest.mark.parametrize(
    ("launch", "policy"),
    for_change(
        [
            pytest.param("tcp", "memory"),
            pytest.param("unix", "-f0"),
            pytest.param("tcp", "-f50"),
            pytest.param("front", "memory"),
            pytest.param("front", "-f0"),
        ],
        2,
        4,
    ),
    indirect=["launch"],
)


on_tcp = pytest.mark.parametrize("launch", ["tcp", "front"], indirect=True)
# Much at once


def conversation(rounds: int) -> tuple[bytes, bytes]:
    """Commands for a fresh server, and exactly what it has to say."""
    commands, replies = [], []
    for id in range(1, rounds + 1):
        body = b"job %d\r\n" % id
        commands.append(b"put %d 0 60 %d\r\n%b\r\n" % (id % 3, len(body), body))
        commands.append(b"reserve-with-timeout 0\r\ndelete %d\r\nlist-tube-used\r\nnonsense\r\n" % id)
        replies.append(b"INSERTED %d\r\nRESERVED %d %d\r\n%b\r\n" % (id, id, len(body), body))
        replies.append(b"DELETED\r\nUSING default\r\nUNKNOWN_COMMAND\r\n")
    return b"".join(commands), b"".join(replies)


@policies
@pytest.mark.slow
def test_thousands_of_commands_in_one_packet(launch: Launch, policy: str, tmp_path: Path) -> None:
    server = launch(*journal_flags(tmp_path, policy))
    commands, replies = conversation(1000)
    with server.connect() as sock:
        sock.sendall(commands)
        assert receive_exactly(sock, len(replies)) == replies
        sock.sendall(b"list-tube-used\r\n")
        assert sock.recv(100) == b"USING default\r\n"


@some_policies
@pytest.mark.slow
def test_commands_split_oddly(launch: Launch, policy: str, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed).randint
    server = launch(*journal_flags(tmp_path, policy))
    commands, replies = conversation(300)
    with server.connect() as sock:
        for piece in split_randomly(commands, draw):
            sock.sendall(piece)
        assert receive_exactly(sock, len(replies)) == replies


@pytest.mark.slow
def test_who_sends_everything_before_reading_anything(launch: Launch) -> None:
    """Server and client would wait for each other if the server stopped reading for good while replies stand."""
    count = 100_000
    server = launch()
    with server.connect() as sock:
        sender = threading.Thread(target=sock.sendall, args=(b"list-tube-used\r\n" * count,))
        sender.start()
        until(lambda: bool(select.select([sock], [], [], 0)[0]), "some commands run")
        assert receive_exactly(sock, 15 * count) == b"USING default\r\n" * count
        sender.join()


@pytest.mark.slow
def test_big_bodies(launch: Launch) -> None:
    size = 10 * 1024 * 1024
    server = launch("-z", str(size))
    body = os.urandom(size)
    with Client(server.connect()) as client, Client(server.connect()) as other:
        assert client.put(body) == 1
        assert other.ask(b"peek 1") == b"FOUND 1 %d\r\n%b\r\n" % (size, body)
        assert other.ask(b"reserve") == b"RESERVED 1 %d\r\n%b\r\n" % (size, body)
        # Too big by one: thrown away as it comes, and what it consists of is never taken for commands.
        client.send(
            b"put 0 0 1 %d\r\n" % (size + 1) + b"delete 1\r\n" * ((size + 1) // 10) + b"x\r\n"[: (size + 1) % 10]
        )
        assert (size + 1) % 10 == 1, "the filling above is as long as announced"
        client.send(b"\r\n")
        assert client.reply() == b"JOB_TOO_BIG\r\n"
        client.sync()
        assert other.stats(b"stats-job 1")["state"] == "reserved"


@pytest.mark.slow
def test_a_thousand_connections_at_once(launch: Launch) -> None:
    count = 1000
    want_descriptors(count + 100)
    server = launch()
    with contextlib.ExitStack() as stack:
        clients = connect_many(stack, server, count)
        for client in clients:
            client.send(b"put 0 0 60 1\r\nx\r\nreserve\r\n")
        assert {client.reply() for client in clients} == {b"INSERTED %d\r\n" % id for id in range(1, count + 1)}
        assert {client.reply() for client in clients} == {b"RESERVED %d 1\r\nx\r\n" % id for id in range(1, count + 1)}
        assert number(clients[0], "current-connections") == count
        assert number(clients[0], "current-jobs-reserved") == count
    with Client(server.connect()) as client:
        until(lambda: number(client, "current-connections") == 1, "all connections are over")
        until(lambda: number(client, "current-jobs-ready") == count, "all jobs are back")
        assert number(client, "total-connections") == count + 2, "with the one that waited for the start"


def connect_many(stack: contextlib.ExitStack, server: ServerProcess, count: int) -> list[Client]:
    """This many clients at once; the server's backlog, which refuses on unix sockets, is not what is tested."""
    clients = []
    for at in range(count):
        clients.append(stack.enter_context(Client(server.connect())))
        if at % 500 == 499:
            clients[-1].sync()
    return clients


def want_descriptors(count: int) -> None:
    """Lets this process, and the servers it starts, have this many; skips the test where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        pytest.skip(f"no more than {hard} descriptors are allowed here, and it takes {count}")
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


@pytest.mark.slow
def test_thousands_of_half_sent_commands(launch: Launch) -> None:
    want_descriptors(2200)
    server = launch()
    with contextlib.ExitStack() as stack:
        liners = connect_many(stack, server, 1000)
        putters = connect_many(stack, server, 1000)
        for client in liners:
            client.send(b"list-tub")
        for client in putters:
            client.send(b"put 0 0 60 10\r\n01234")
        with probing(server) as probes:
            until(lambda: len(probes) > 20, "other clients are served")
        assert cpu_share(server.pid, 0.5) < IDLE_SHARE
        for client in liners:
            client.send(b"e-used\r\n")
        for client in putters:
            client.send(b"56789\r\n")
        assert {client.reply() for client in liners} == {b"USING default\r\n"}
        assert {client.reply() for client in putters} == {b"INSERTED %d\r\n" % id for id in range(1, 1001)}


@pytest.mark.slow
def test_connections_leave_nothing_behind(launch_tcp: Launch) -> None:
    """The server collects no cycles while it runs, so what a connection was must go by itself."""
    server = launch_tcp()

    def come_and_go(count: int) -> None:
        for _ in range(count):
            with Client(server.connect()) as client:
                client.send(b"watch a\r\nput 0 0 60 1\r\nx\r\nreserve\r\nnonsense\r\nput 0 0 60 10\r\nhalf")
                assert client.reply() == b"WATCHING 2\r\n"
        with Client(server.connect()) as client:
            until(lambda: number(client, "current-connections") == 1, "all connections are over")
            replies = burst(client, [b"reserve-with-timeout 0\r\n"] * count)
            burst(client, [b"delete %b\r\n" % reply.split()[1] for reply in replies])

    come_and_go(500)
    before, files = memory_bytes(server.pid), len(open_files(server.pid))
    come_and_go(2000)
    growth = memory_bytes(server.pid) - before
    print(f"grown by {growth} bytes")
    assert growth < 1_000_000, "500 bytes a connection"
    until(lambda: len(open_files(server.pid)) <= files, "the last descriptors are closed")


# Waiting clients


@pytest.mark.slow
def test_a_waiting_client_is_served_by_another_ones_put(launch: Launch) -> None:
    server = launch()
    with Client(server.connect()) as worker, Client(server.connect()) as producer:
        worker.send(b"watch t\r\nignore default\r\nreserve\r\n")
        assert [worker.reply(), worker.reply()] == [b"WATCHING 2\r\n", b"WATCHING 1\r\n"]
        until(lambda: number(producer, "current-waiting") == 1, "the worker waits")
        begun = time.monotonic()
        producer.ask(b"use t")
        producer.put(b"work")
        assert worker.reply() == b"RESERVED 1 4\r\nwork\r\n"
        assert time.monotonic() - begun < 5
        # The same through each other way in which a job turns ready.
        worker.send(b"release 1 0 1\r\nreserve\r\nbury 1 0\r\nreserve\r\n")
        assert worker.reply() == b"RELEASED\r\n"
        assert worker.reply() == b"RESERVED 1 4\r\nwork\r\n", "its delay ended"
        assert worker.reply() == b"BURIED\r\n"
        assert producer.ask(b"kick 1") == b"KICKED 1\r\n"
        assert worker.reply() == b"RESERVED 1 4\r\nwork\r\n", "it was kicked"


@closers
def test_a_waiting_client_vanishes(launch: Launch, close: Callable[[socket.socket], None]) -> None:
    server = launch()
    with Client(server.connect()) as control, Client(server.connect()) as second:
        first = server.connect()
        first.sendall(b"watch t\r\nreserve\r\n")
        until(lambda: number(control, "current-waiting") == 1, "the first one waits")
        second.send(b"watch t\r\nreserve\r\n")
        assert second.reply() == b"WATCHING 2\r\n"
        until(lambda: number(control, "current-waiting") == 2, "the second one waits")
        close(first)
        until(lambda: number(control, "current-waiting") == 1, "the first one has gone")
        until(lambda: number(control, "current-connections") == 2, "its connection has gone")
        assert number(control, "current-workers") == 1
        assert number(control, "current-watching", b"stats-tube t") == 1
        control.ask(b"use t")
        id = control.put(b"x")
        assert second.reply() == b"RESERVED %d 1\r\nx\r\n" % id
        assert number(control, "reserves", b"stats-job %d" % id) == 1


@closers
@pytest.mark.slow
def test_a_job_that_meets_a_vanishing_client_goes_to_the_next(
    launch: Launch, close: Callable[[socket.socket], None], seed: int
) -> None:
    random_delay = random.Random(seed)
    server = launch()
    with Client(server.connect()) as control:
        for round in range(1, 41):
            first = server.connect()
            first.sendall(b"reserve\r\n")
            second = Client(server.connect())
            until(lambda: number(control, "current-waiting") == 1, "the first one waits")
            second.send(b"reserve\r\n")
            until(lambda: number(control, "current-waiting") == 2, "the second one waits")
            # Whichever of the two the server sees first, and even if it sees both in one turn:
            if random_delay.random() < 0.5:
                close(first)
                control.put(b"x")
            else:
                control.send(b"put 0 0 60 1\r\nx\r\n")
                close(first)
                assert control.reply() == b"INSERTED %d\r\n" % round
            with second:
                assert second.reply() == b"RESERVED %d 1\r\nx\r\n" % round
                assert second.ask(b"delete %d" % round) == b"DELETED\r\n"
            until(lambda: number(control, "current-connections") == 1, "both have gone")


@pytest.mark.parametrize(
    ("launch", "limit", "close"),
    [
        ("tcp", 1 << 20, "close"),
        ("tcp", 1 << 20, "reset"),
        # More than the server and the kernel take. TCP holds a FIN back until all before it was read; so not "close".
        ("tcp", 1 << 30, "reset"),
        ("unix", 1 << 30, "close"),
        ("front", 1 << 20, "close"),
        ("front", 1 << 30, "reset"),
    ],
    indirect=["launch"],
)
@pytest.mark.slow
def test_a_waiting_client_with_much_behind_its_reserve_vanishes(launch: Launch, limit: int, close: str) -> None:
    server = launch()
    with Client(server.connect()) as control:
        vanishing = server.connect()
        vanishing.sendall(b"watch t\r\nreserve\r\n")
        until(lambda: number(control, "current-waiting") == 1, "it waits")
        assert fill(vanishing, b"list-tube-used\r\n" * 4096, limit) > 1 << 18, "more than the server takes in"
        assert cpu_share(server.pid, 0.5) < IDLE_SHARE
        assert number(control, "current-waiting") == 1
        CLOSERS[close](vanishing)
        until(lambda: number(control, "current-waiting") == 0, "it does not wait any more")
        until(lambda: number(control, "current-connections") == 1, "its connection has gone")
        assert number(control, "current-workers") == 0
        assert b"t\n" not in control.ask(b"list-tubes").split(b"- ")
        control.put(b"x")
        assert control.ask(b"reserve-with-timeout 0").startswith(b"RESERVED"), "the job goes to who is there"


@pytest.mark.slow
def test_what_a_waiting_client_sent_is_run_once_it_is_served(launch: Launch) -> None:
    """Also beyond what the server takes in while it waits; in order, nothing lost."""
    count = 60_000
    server = launch()
    with Client(server.connect()) as control, server.connect() as sock:
        sock.sendall(b"reserve\r\n")
        until(lambda: number(control, "current-waiting") == 1, "it waits")
        sender = threading.Thread(target=sock.sendall, args=(b"list-tube-used\r\n" * count + b"quit\r\n",))
        sender.start()
        time.sleep(0.2)  # so much that the server has stopped reading
        assert number(control, "cmd-list-tube-used") <= 1, "nothing behind a reserve that waits is run"
        control.put(b"x")
        assert receive_all(sock) == b"RESERVED 1 1\r\nx\r\n" + b"USING default\r\n" * count
        sender.join()


# Half-closed connections (SPEC 3.5)


def half_close(server: ServerProcess, commands: bytes) -> bytes:
    """Sends, half-closes at once, and returns everything up to the server's own close."""
    with server.connect() as sock:
        sock.sendall(commands)
        sock.shutdown(socket.SHUT_WR)
        return receive_all(sock)


@pytest.mark.parametrize("policy", for_change(["memory", "-f0", "-f50"], 1))
@pytest.mark.parametrize(
    ("commands", "replies"),
    [
        (b"", b""),
        (b"list-tube-used", b""),
        (b"list-tube-used\r", b""),
        (b"put 0 0 1 5\r\nabc", b""),
        (b"put 0 0 1 5\r\nabcde\r", b""),
        (b"put 0 0 1 70000\r\nabc", b""),
        (b"x" * 1000, b""),
        (b"list-tube-used\r\nput 0 0 1 1\r\na\r\ndelete 1\r\nlist", b"USING default\r\nINSERTED 1\r\nDELETED\r\n"),
        (b"reserve\r\n", b"TIMED_OUT\r\n"),
        (b"reserve-with-timeout 100\r\n", b"TIMED_OUT\r\n"),
        (b"reserve\r\nreserve\r\nlist-tube-used\r\nres", b"TIMED_OUT\r\nTIMED_OUT\r\nUSING default\r\n"),
        (b"put 0 0 9 1\r\na\r\nreserve\r\nreserve\r\n", b"INSERTED 1\r\nRESERVED 1 1\r\na\r\nTIMED_OUT\r\n"),
        (b"put 0 0 1 1\r\na\r\nreserve\r\nreserve\r\n", b"INSERTED 1\r\nRESERVED 1 1\r\na\r\nDEADLINE_SOON\r\n"),
        (b"quit\r\nlist-tube-used\r\n", b""),
    ],
)
def test_half_close_behind_commands(
    shared_server: Callable[[str], ServerProcess], policy: str, commands: bytes, replies: bytes
) -> None:
    server = shared_server(policy)
    with Client(server.connect()) as control:
        stats = control.stats(b"stats")
        # Job ids are those of a fresh server: here they count on from what other cases have used.
        last = int(control.put(b""))
        assert control.ask(b"delete %d" % last) == b"DELETED\r\n"
        shift = {b"INSERTED 1": b"INSERTED %d", b"RESERVED 1 ": b"RESERVED %d ", b"delete 1": b"delete %d"}
        for fresh, pattern in shift.items():
            commands = commands.replace(fresh, pattern % (last + 1))
            replies = replies.replace(fresh, pattern % (last + 1))
        assert half_close(server, commands) == replies
        until(
            lambda: number(control, "current-connections") == int(stats["current-connections"]),
            "the connection has gone",
        )
        after = control.stats(b"stats")
        assert [after["current-waiting"], after["current-workers"]] == ["0", "0"]
        assert [after["current-jobs-reserved"], after["current-tubes"]] == ["0", "1"]
        if int(after["current-jobs-ready"]):
            job = control.stats(b"stats-job %d" % (last + 1))
            assert [job["state"], job["reserves"], job["releases"], job["timeouts"]] == ["ready", "1", "0", "0"]
            assert control.ask(b"delete %d" % (last + 1)) == b"DELETED\r\n"
        assert number(control, "current-jobs-ready") == 0


@pytest.fixture(scope="module", params=["tcp", "unix", "front"])
def shared_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], ServerProcess]]:
    """A server for each journal policy, used by many short cases that clean up behind themselves."""
    servers: dict[str, ServerProcess] = {}

    def get(policy: str) -> ServerProcess:
        if policy not in servers:
            folder = tmp_path_factory.mktemp("s")
            path = str(folder / "s") if request.param == "unix" else None
            flags = ["--io-processes", "1"] if request.param == "front" else []
            servers[policy] = ServerProcess(GEVENTSTALK, flags + journal_flags(folder, policy), unix_path=path)
        return servers[policy].wait_ready()

    yield get
    assert [server.stop() for server in servers.values()] == [0] * len(servers)


def test_half_close_while_waiting(launch: Launch) -> None:
    server = launch()
    with Client(server.connect()) as control, server.connect() as sock:
        sock.sendall(b"put 0 0 60 1\r\nx\r\nreserve\r\nreserve\r\nlist-tube-used\r\nlist-tu")
        until(lambda: number(control, "current-waiting") == 1, "it waits")
        sock.shutdown(socket.SHUT_WR)
        assert receive_all(sock) == b"INSERTED 1\r\nRESERVED 1 1\r\nx\r\nTIMED_OUT\r\nUSING default\r\n"
        until(lambda: number(control, "current-connections") == 1, "its connection has gone")
        assert control.stats(b"stats-job 1")["state"] == "ready"


@some_policies
@pytest.mark.slow
def test_half_close_behind_thousands_of_commands(launch: Launch, policy: str, tmp_path: Path) -> None:
    server = launch(*journal_flags(tmp_path, policy))
    commands, replies = conversation(3000)
    with server.connect() as sock:

        def send() -> None:
            sock.sendall(commands)
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        assert receive_all(sock) == replies
        sender.join()


@pytest.mark.slow
def test_half_close_with_much_behind_a_reserve_that_waits(launch: Launch) -> None:
    """TIMED_OUT, and then all that was sent before the end is run, however much of it the server had not read."""
    server = launch()
    with Client(server.connect()) as control, server.connect() as sock:
        sock.sendall(b"reserve\r\n")
        until(lambda: number(control, "current-waiting") == 1, "it waits")
        # Not so much that the window closes: the end of what was sent would stay behind it, unseen.
        taken = fill(sock, b"list-tube-used\r\n" * 256, (1 << 18) + (1 << 14))
        assert taken > 1 << 18, "more than the server takes in"
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(10)
        assert receive_all(sock) == b"TIMED_OUT\r\n" + b"USING default\r\n" * (taken // 16)


@pytest.mark.slow
def test_half_close_during_a_kick(launch: Launch) -> None:
    count = 20_000
    server = launch()
    with Client(server.connect()) as control:
        put_many(control, count, delay=1000)
        assert half_close(server, b"kick %d\r\nlist-tube-used\r\n" % count) == b"KICKED %d\r\nUSING default\r\n" % count
        assert number(control, "current-jobs-ready") == count


# Slow readers


def unread_peeks(server: ServerProcess, count: int) -> tuple[socket.socket, bytes]:
    """A client that asked for a body of 60 kB many times and has read nothing; and what it will read."""
    body = os.urandom(60_000)
    with Client(server.connect()) as client:
        id = client.put(body)
    sock = server.connect()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sock.sendall(b"peek %d\r\n" % id * count)
    return sock, b"FOUND %d 60000\r\n%b\r\n" % (id, body) * count


@some_policies
@pytest.mark.slow
def test_slow_readers(launch: Launch, policy: str, tmp_path: Path) -> None:
    server = launch(*journal_flags(tmp_path, policy))
    before = memory_bytes(server.pid)
    with contextlib.ExitStack() as stack:
        slow = [unread_peeks(server, 300) for _ in range(10)]
        for sock, _ in slow:
            stack.enter_context(sock)
        with probing(server) as probes:
            time.sleep(0.3)
        growth = memory_bytes(server.pid) - before
        print(f"grown by {growth} bytes")
        assert growth < 20_000_000, "that is 180 MB of replies, and not all of them at once"
        report(probes, "slow readers")
        assert cpu_share(server.pid, 0.5) < IDLE_SHARE
        for sock, replies in slow:
            assert receive_exactly(sock, len(replies)) == replies
            sock.sendall(b"list-tube-used\r\n")
            assert sock.recv(100) == b"USING default\r\n"


@closers
def test_a_slow_reader_vanishes(launch: Launch, close: Callable[[socket.socket], None]) -> None:
    server = launch()
    with Client(server.connect()) as control:
        sock, _ = unread_peeks(server, 300)
        sock.sendall(b"put 0 0 60 1\r\nx\r\n" * 100)
        until(lambda: number(control, "cmd-peek") >= 2, "some of it was run")
        close(sock)
        until(lambda: number(control, "current-connections") == 1, "its connection has gone")


# Fairness: no client makes another wait


def report(probes: list[Probe], what: str) -> None:
    walls, works = sorted(probe.wall_s for probe in probes), sorted(probe.work_s for probe in probes)
    median_ms, worst_ms, work_ms = walls[len(walls) // 2] * 1e3, walls[-1] * 1e3, works[-1] * 1e3
    print(
        f"{what}: {len(probes)} answers, median {median_ms:.1f} ms, worst {worst_ms:.1f} ms, "
        f"of which the server worked {work_ms:.1f} ms at most"
    )
    assert works[-1] < WORST_WORK_S, what
    assert walls[-1] < WORST_WALL_S, what


@some_policies
@pytest.mark.slow
def test_a_client_that_puts_without_end_starves_no_other(launch: Launch, policy: str, tmp_path: Path) -> None:
    server = launch(*journal_flags(tmp_path, policy))
    piece = b"put 0 0 60 10\r\n0123456789\r\n" * 4000
    received = 0
    over = threading.Event()
    with server.connect() as sock:

        def send() -> None:
            while not over.is_set():
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)

        def receive() -> None:
            nonlocal received
            while data := sock.recv(1 << 20):
                received += data.count(b"\n")

        threads = [threading.Thread(target=send), threading.Thread(target=receive)]
        for thread in threads:
            thread.start()
        with probing(server) as probes:
            time.sleep(0.7)
            until(lambda: received > 1000, "it puts without end")
        over.set()
        for thread in threads:
            thread.join()
    report(probes, f"{received} puts")


@pytest.mark.long
def test_kicking_200_000_jobs_stops_no_other_client(launch_tcp: Launch) -> None:
    count = 200_000
    server = launch_tcp()
    with Client(server.connect(20)) as client:
        put_many(client, count, delay=1000)
        with probing(server) as probes:
            assert client.ask(b"kick %d" % count) == b"KICKED %d\r\n" % count
        report(probes, "kick of 200,000")
        assert number(client, "current-jobs-ready") == count


@pytest.mark.slow
def test_a_disconnect_with_20_000_reservations_stops_no_other_client(launch_tcp: Launch) -> None:
    count = 20_000
    server = launch_tcp()
    with Client(server.connect(20)) as control:
        put_many(control, count)
        worker = Client(server.connect(20))
        reserve_many(worker, count)
        with probing(server) as probes:
            worker.close()
            until(lambda: number(control, "current-jobs-ready") == count, "all jobs are back")
        report(probes, "disconnect with 20,000")
        assert number(control, "current-jobs-reserved") == 0


@pytest.mark.slow
def test_50_000_delays_that_end_together_stop_no_client(launch_tcp: Launch) -> None:
    count = 50_000
    server = launch_tcp()
    with Client(server.connect(20)) as control:
        begun = time.monotonic()
        put_many(control, count // 10, delay=1000)
        delay_s = max(2, math.ceil(20 * (time.monotonic() - begun)))  # twice as long as putting them takes
        begun = time.monotonic()
        put_many(control, count, delay=delay_s)
        assert number(control, "current-jobs-ready") == 0 or time.monotonic() - begun > delay_s, "none is ready early"
        # Stopped until the last one is due, the server finds all of them due at once.
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(delay_s)
        server.process.send_signal(signal.SIGCONT)
        with probing(server) as probes:
            until(lambda: number(control, "current-jobs-ready") == count, "all are ready")
        report(probes, "50,000 delays")


# The sockets themselves


def servers_sockets(pid: int) -> Iterator[socket.socket]:
    """Duplicates of the connections that the server has accepted."""
    libc = ctypes.CDLL(None, use_errno=True)
    PIDFD_GETFD = 438
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                continue
            fd = libc.syscall(PIDFD_GETFD, process, int(name), 0)
            if fd < 0:
                pytest.skip(f"pidfd_getfd is not allowed here: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=fd) as sock:
                if sock.type == socket.SOCK_STREAM and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield sock
    finally:
        os.close(process)


def test_accepted_tcp_sockets_have_keep_alive_and_no_delay(launch_tcp: Launch) -> None:
    server = launch_tcp()
    with Client(server.connect()) as client:
        client.sync()
        until(lambda: number(client, "current-connections") == 1, "the one that waited for the start has gone")
        found = [
            (
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
            )
            for sock in servers_sockets(server.pid)
            if sock.family == socket.AF_INET and sock.getpeername() == client.sock.getsockname()
        ]
    assert found == [(1, 1)]


@pytest.mark.slow
def test_an_idle_server_costs_nothing(launch_tcp: Launch, tmp_path: Path) -> None:
    """Without a journal and with one, under each policy: nothing is asked again and again."""
    servers = {
        policy: launch_tcp() if not policy else launch_tcp("-b", str(tmp_path / policy), policy)
        for policy in ("", "-f0", "-f50", "-F")
    }
    with contextlib.ExitStack() as stack:
        for server in servers.values():
            clients = [stack.enter_context(Client(server.connect())) for _ in range(50)]
            for client in clients[:25]:
                client.send(b"watch t\r\nignore default\r\nreserve-with-timeout 1000\r\n")
            put_many(clients[-1], 100, body=b"x")
            put_many(clients[-1], 100, body=b"x", delay=1000)
            reserve_many(clients[-1], 50)
        time.sleep(0.5)  # what -f50 and the journal owe

        def quiet() -> bool:
            woken = [wakeups(server.pid) for server in servers.values()]
            time.sleep(0.2)
            return woken == [wakeups(server.pid) for server in servers.values()]

        until(quiet, "nothing is owed any more")
        before = [(cpu_s(server.pid), wakeups(server.pid)) for server in servers.values()]
        time.sleep(2)
        after = [(cpu_s(server.pid), wakeups(server.pid)) for server in servers.values()]
    for policy, (cpu_before, wakeups_before), (cpu_after, wakeups_after) in zip(servers, before, after, strict=True):
        share, woken = (cpu_after - cpu_before) / 2, wakeups_after - wakeups_before
        print(f"{policy or 'memory'}: {share:.1%} of a core, woken {woken} times")
        assert share < IDLE_SHARE, policy
        assert woken < 10, policy


def test_draining_by_signal(launch: Launch) -> None:
    server = launch()
    with Client(server.connect()) as client:
        assert client.put(b"before") == 1
        server.process.send_signal(signal.SIGUSR1)
        until(lambda: client.stats(b"stats")["draining"] == "true", "it drains")
        assert client.ask(b"put 0 0 60 1\r\nx") == b"DRAINING\r\n"
        assert client.ask(b"reserve") == b"RESERVED 1 6\r\nbefore\r\n"
        assert client.ask(b"release 1 0 0") == b"RELEASED\r\n"
        with Client(server.connect()) as other:
            assert other.ask(b"put 0 0 60 1\r\nx") == b"DRAINING\r\n", "new connections are taken, their puts are not"
            assert other.ask(b"delete 1") == b"DELETED\r\n"
        server.process.send_signal(signal.SIGUSR2)
        until(lambda: client.stats(b"stats")["draining"] == "false", "it drains no more")
        assert client.put(b"after") == 4, "an id is spent on each put that was refused"


# At the limit of descriptors; test_faults.py has the plain case


@pytest.mark.slow
def test_the_journal_goes_on_at_the_limit_of_descriptors(launch_tcp: Launch, tmp_path: Path) -> None:
    """Connections must not take the descriptors that segments come and go with."""
    server = launch_tcp("-b", str(tmp_path / "journal"), "-s", "20000")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Client(server.connect()))
        put_many(first, 100, body=b"x" * 100)
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        # So high that what is left to the journal is enough on a slow device, too, where segments wait to be sealed.
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (len(open_files(server.pid)) + 260, hard))
        others = [stack.enter_context(Client(server.connect())) for _ in range(300)]
        others[0].sync()
        deadline = time.monotonic() + 60
        rounds = 0
        while rounds < 20 or number(first, "binlog-current-index") <= 5:
            assert time.monotonic() < deadline, "no segments come"
            ids = put_many(first, 100, body=b"y" * 500)
            assert burst(first, [b"delete %d\r\n" % id for id in ids]) == [b"DELETED\r\n"] * 100
            time.sleep(0.05)  # so that segments are sealed, made and removed in between
            rounds += 1
        assert number(first, "current-jobs-ready") == 100
        for other in others[:280]:
            other.close()
        for other in others[280:]:
            other.sync()


def test_the_trace_of_vv(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """Commands by their name, replies by their first line, and the jobs between, as upstream's -VV."""
    log = tmp_path / "log"
    server = start_server("-VV", stderr=log)
    with Client(server.connect()) as client:
        client.put(b"one")
        assert client.ask(b"peek 1") == b"FOUND 1 3\r\none\r\n"
        assert client.ask(b"delete 7") == b"NOT_FOUND\r\n"
    lines = [line[:1] + line.partition(" ")[2] for line in log.read_text().splitlines() if line[:1] in "<>"]
    wanted = [
        *("<command put", "<job 1", ">reply INSERTED 1"),
        *("<command peek", ">reply FOUND 1 3", ">job 1"),
        *("<command delete", ">reply NOT_FOUND"),
    ]
    assert lines[-len(wanted) :] == wanted


@pytest.mark.parametrize("close", [CLOSERS["close"], CLOSERS["reset"]], ids=["close", "reset"])
@pytest.mark.slow
def test_clients_that_go_with_replies_unread_leave_no_channel_behind(
    launch_tcp: Launch, close: Callable[[socket.socket], None]
) -> None:
    """Hundreds stayed for ever, and each swallowed a job. It took a write that fails while the client is read."""
    want_descriptors(700)
    server = launch_tcp()
    with Client(server.connect()) as control:
        for round in range(6):
            socks = [server.connect() for _ in range(300)]
            for sock in socks:
                sock.sendall(b"stats\r\nreserve\r\n")
            time.sleep(0.003 * (round % 3))
            for sock in socks:
                close(sock)
            until(lambda: number(control, "current-connections") == 1, "all have gone")
        assert number(control, "current-waiting") == 0


@on_tcp
@pytest.mark.slow
def test_what_many_clients_send_ahead_takes_little_memory(launch: Launch) -> None:
    """Each of them may send a lot behind a reserve that waits; all together took 180 MB."""
    count = 400
    want_descriptors(count + 100)
    server = launch()
    with contextlib.ExitStack() as stack:
        clients = connect_many(stack, server, count)
        before = memory_bytes(server.pid)
        for client in clients:
            client.send(b"watch t\r\nignore default\r\nreserve\r\n")
            assert [client.reply(), client.reply()] == [b"WATCHING 2\r\n", b"WATCHING 1\r\n"]
            fill(client.sock, b"list-tube-used\r\n" * 4096, 1 << 19)
        with Client(server.connect()) as control:
            until(lambda: number(control, "current-waiting") == count, "all of them wait")
            growth = memory_bytes(server.pid) - before
            print(f"grown by {growth / 1e6:.0f} MB")
            assert growth < 40_000_000, "8 MB for all of them, 4 KB for each, and as much again while it is read"
            control.ask(b"use t")
            control.put(b"x")
            assert clients[0].reply().startswith(b"RESERVED 1 1")
            assert clients[0].reply() == b"USING default\r\n", "what was sent ahead is executed"


@on_tcp
@pytest.mark.slow
def test_clients_that_vanish_behind_a_waiting_reserve_are_gone_at_once(launch: Launch) -> None:
    """All that the system had taken of each was read first: for ten seconds, and up to 6 MB for each of them."""
    count = 150
    want_descriptors(count + 100)
    server = launch()
    with contextlib.ExitStack() as stack, Client(server.connect()) as control:
        clients = connect_many(stack, server, count)
        for client in clients:
            client.send(b"watch t\r\nignore default\r\nreserve\r\n")
        until(lambda: number(control, "current-waiting") == count, "all of them wait")
        for client in clients:
            fill(client.sock, b"list-tube-used\r\n" * 4096, 4_000_000)
        before = memory_bytes(server.pid)
        peak = 0
        for client in clients:
            client.close()  # with replies unread, so this is a reset

        def gone() -> bool:
            nonlocal peak
            peak = max(peak, memory_bytes(server.pid))
            return number(control, "current-connections") == 1

        until(gone, "all have gone")
        print(f"grown by {(peak - before) / 1e6:.0f} MB")
        assert peak - before < 10_000_000
        assert number(control, "current-waiting") == 0


# A front finds one such client a second.
@pytest.mark.parametrize(
    ("launch", "count"), [("tcp", 20), pytest.param("front", 5, marks=pytest.mark.long)], indirect=["launch"]
)
@pytest.mark.slow
def test_the_end_of_a_client_is_seen_behind_more_than_the_system_takes(launch: Launch, count: int) -> None:
    """TCP tells of an end only when all input before it has room. Such clients stayed for ever."""
    server = launch()
    with contextlib.ExitStack() as stack, Client(server.connect()) as control:
        clients = connect_many(stack, server, count)
        for client in clients:
            client.send(b"watch t\r\nignore default\r\nreserve\r\n")
            assert [client.reply(), client.reply()] == [b"WATCHING 2\r\n", b"WATCHING 1\r\n"]
            fill(client.sock, b"list-tube-used\r\n" * 4096, 1 << 22)
        until(lambda: number(control, "current-waiting") == count, "all of them wait")
        before = memory_bytes(server.pid)
        for client in clients[1:]:
            client.close()
        until(lambda: number(control, "current-connections") == 2, "they are gone", 60)
        growth = memory_bytes(server.pid) - before
        print(f"grown by {growth / 1e6:.0f} MB")
        assert growth < 40_000_000, "one after the other, not all at once"
        control.ask(b"use t")
        control.put(b"x")
        assert clients[0].reply().startswith(b"RESERVED 1 1")
        assert clients[0].reply() == b"USING default\r\n"


@pytest.mark.slow
def test_what_was_sent_behind_a_waiting_reserve_is_executed_after_the_end_of_the_input(launch: Launch) -> None:
    """More than is read while the reserve waits. The reserve ends, later ones do not wait, and nothing is lost."""
    count = AHEAD_BYTES_MAX // 16 + 3000
    server = launch()
    with Client(server.connect()) as client:
        client.send(b"reserve\r\n" + b"list-tube-used\r\n" * count + b"reserve\r\nlist-tubes-watched\r\n")
        client.sock.shutdown(socket.SHUT_WR)
        expected = b"TIMED_OUT\r\n" + b"USING default\r\n" * count + b"TIMED_OUT\r\nOK 14\r\n---\n- default\n\r\n"
        assert receive_all(client.sock) == expected


@pytest.mark.slow
def test_unread_replies_take_little_memory(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """Each client may leave 256 KB unread, and a turn makes half of that; for all of them together it was 130 MB."""
    count, peeks = 400, 1500
    want_descriptors(count + 100)
    server = start_server(unix_path=str(tmp_path / "s"))
    with contextlib.ExitStack() as stack, Client(server.connect()) as control:
        body = os.urandom(1000)
        assert control.put(body) == 1
        clients = connect_many(stack, server, count)
        clients[-1].sync()
        before = memory_bytes(server.pid)
        for client in clients:
            client.send(b"peek 1\r\n" * peeks)
        seen: list[int] = []

        def stands_still() -> bool:
            seen.append(number(control, "cmd-peek"))
            time.sleep(0.05)
            return seen[-1] >= 100 * count and len(set(seen[-10:])) == 1

        until(stands_still, "all sockets are full")
        growth = memory_bytes(server.pid) - before
        print(f"grown by {growth / 1e6:.0f} MB, {seen[-1]} peeks")
        assert growth < 40_000_000, "8 MB for all of them, as much again in a turn, 4 KB and the input for each"
        reply = b"FOUND 1 1000\r\n%b\r\n" % body
        for client in (clients[0], clients[count // 2], clients[-1]):
            assert receive_exactly(client.sock, peeks * len(reply)) == reply * peeks, "nothing is lost"
        assert control.put(b"x") == 2


def test_the_share_of_a_client_falls_while_all_together_make_too_much() -> None:
    service = Service(Operate(0), 100, dict)
    unsent = Unsent(service)
    assert service.out_bytes_max == OUT_BYTES_MAX
    for _ in range(3):
        unsent.made(ALL_UNSENT_BYTES_MAX - 1)
        assert service.out_bytes_max > OUT_BYTES_MIN
        unsent.made(1)
        assert service.out_bytes_max == OUT_BYTES_MIN, "for the rest of the turn"
        unsent.turn_ends()
    assert service.out_bytes_max == OUT_BYTES_MAX // 8, "in the next turn the same for all"
    large = bytes(1 << 20)
    for _ in range(64):
        unsent.leave(large)
    assert service.out_bytes_max == OUT_BYTES_MIN
    for _ in range(64):
        unsent.take(memoryview(large)[5:].obj)
    for _ in range(3):
        unsent.made(10_000)
        unsent.turn_ends()
    assert service.out_bytes_max == OUT_BYTES_MAX


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "journal"])
@pytest.mark.slow
def test_puts_are_refused_before_there_is_no_memory_at_all(tmp_path: Path, durable: bool) -> None:
    """The server ended when it had nothing left for a read, and without a journal all jobs were gone."""
    limited = ["sh", "-c", 'ulimit -v 200000; exec "$@"', "sh"]
    flags = ["-b", str(tmp_path / "journal"), "-F"] if durable else []
    server = ServerProcess([*limited, *GEVENTSTALK], flags, unix_path=str(tmp_path / "s"), stderr=tmp_path / "log")
    try:
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(Client(server.wait_ready().connect()))
            put = b"put 0 0 60 60000\r\n" + b"x" * 60_000 + b"\r\n"
            ids = []
            while (reply := client.ask(put[:-2])).startswith(b"INSERTED"):
                ids.append(int(reply.split()[1]))
            assert reply == b"OUT_OF_MEMORY\r\n"
            for _ in range(50):
                other = stack.enter_context(Client(server.connect()))
                assert other.ask(put[:-2]) == b"OUT_OF_MEMORY\r\n"
            assert number(client, "current-jobs-ready") == len(ids)
            assert set(burst(client, [b"delete %d\r\n" % id for id in ids])) == {b"DELETED\r\n"}
            until(lambda: client.ask(put[:-2]).startswith(b"INSERTED"), "there is memory again")
    finally:
        assert server.stop() == 0
    assert (tmp_path / "log").read_text().count("there is hardly any memory left") == 1
