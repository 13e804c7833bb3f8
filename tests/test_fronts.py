"""Front-end processes: the frames of their link, what their clients see, and what is left when one of them dies.

tests/test_server.py and tests/test_transcripts.py run a part of what they have over a front as well.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import logging
import os
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import gevent
import pytest
from gevent.event import Event

from geventstalk._build import BUILD
from geventstalk.config import ConfigError, Settings, require_fitting
from geventstalk.core.operate import Operate
from geventstalk.front.frames import (
    ACCEPT,
    CLIENTS_MAX,
    CLOSE,
    DATA,
    END,
    FRAME_BYTES_MAX,
    GONE,
    HELLO,
    IN_BYTES,
    MORE,
    OPEN,
    REFUSED,
    REPLY,
    TAKEN,
    Cutter,
    FrameError,
    count_frame,
    count_of,
    frame,
    head,
)
from geventstalk.front.front import ACCEPT_RETRY_S, CLOG_BYTES, Front
from geventstalk.serving.connection import Ahead, Unsent
from geventstalk.serving.fronts import Fronts
from geventstalk.serving.link import FrontClient, Link
from geventstalk.serving.runqueue import RunQueue
from geventstalk.turn.turn import Turn
from geventstalk.wire.session import Service, Session
from tests.support.clients import (
    Launch,
    Pump,
    cpu_share,
    fill,
    fronts_of,
    is_there,
    number,
    open_files,
    put_many,
    until,
)
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.wire import Client, WireError, split_randomly

# The frames


def cut(cutter: Cutter, stream: bytes) -> list[tuple[int, int, bytes]]:
    """The frames that are whole with these bytes."""
    cutter.feed(stream)
    found = []
    while cutter.take():
        found.append((cutter.client, int(cutter.kind), cutter.data))
    return found


@pytest.mark.long
def test_frames_come_out_as_they_went_in(seed: int) -> None:
    drawn = random.Random(seed)
    frames = [
        (drawn.getrandbits(32), drawn.randrange(1, 128), drawn.randbytes(drawn.choice((0, 1, 7, 8, 9, 300, 70_000))))
        for _ in range(200)
    ]
    stream = b"".join(frame(*one) for one in frames)
    cutter = Cutter()
    found = [one for piece in split_randomly(stream, drawn.randint) for one in cut(cutter, piece)]
    assert found == frames
    cutter = Cutter()
    few = [one for one in frames if len(one[2]) < 10][:20]
    bytewise = b"".join(frame(*one) for one in few)
    assert [one for at in range(len(bytewise)) for one in cut(cutter, bytewise[at : at + 1])] == few


def test_any_bytes_are_frames_or_are_refused(seed: int) -> None:
    drawn = random.Random(seed)
    refused = 0
    for _ in range(2000):
        cutter = Cutter()
        with contextlib.suppress(FrameError):
            for _ in range(3):
                for _, kind, data in cut(cutter, drawn.randbytes(drawn.randrange(40))):
                    assert kind < 256 and len(data) <= FRAME_BYTES_MAX
            continue
        refused += 1
    assert refused > 100


def test_a_frame_that_is_too_long_is_refused() -> None:
    with pytest.raises(FrameError, match=f"a frame of {FRAME_BYTES_MAX + 1} bytes"):
        cut(Cutter(), head(1, 1, FRAME_BYTES_MAX + 1))
    with pytest.raises(FrameError, match="a number of 3 bytes"):
        count_of(b"123")
    assert [count_of(data) for _, _, data in cut(Cutter(), count_frame(1, 2, 1 << 31))] == [1 << 31]


# The processes


def sockets_of(pid: int) -> int:
    return sum(name.startswith("socket:") for name in open_files(pid))


Start = Callable[..., ServerProcess]


def answers(client: Client) -> bool:
    try:
        client.sync()
    except (WireError, OSError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_clients_are_shared_out(start_server: Start, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "s") if kind == "unix" else None
    server = start_server("--io-processes", "2", unix_path=path, stderr=tmp_path / "log")
    fronts = fronts_of(server)
    assert len(fronts) == 2
    with contextlib.ExitStack() as stack, Client(server.connect()) as control:
        control.sync()
        # A front closes the socket of a client that has gone after the engine has counted that client.
        until(lambda: abs(sockets_of(fronts[0]) - sockets_of(fronts[1])) == 1, "the one from the start has gone")
        before = [sockets_of(pid) for pid in fronts]
        shares = [0, 0]
        while sum(shares) < 20 or min(shares) < 5:  # a front that has no processor for a while has fewer, for a while
            assert sum(shares) < 300, shares
            stack.enter_context(Client(server.connect())).sync()
            count = sum(shares) + 1
            assert number(control, "current-connections") == count + 1
            shares = [sockets_of(pid) - own for pid, own in zip(fronts, before, strict=True)]
            assert sum(shares) == count, shares
    assert server.stop() == 0
    assert not any(is_there(pid) for pid in fronts)


@pytest.mark.slow
def test_a_front_that_dies_takes_only_its_own_clients(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--io-processes", "2", stderr=tmp_path / "log")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(server.connect())) for _ in range(20)]
        put_many(clients[0], 20)
        clients[-1].sync()
        for client in clients:
            assert client.ask(b"reserve").startswith(b"RESERVED")
        victim = fronts_of(server)[0]
        os.kill(victim, signal.SIGKILL)
        left = [client for client in clients if answers(client)]
        assert 0 < len(left) < 20
        until(lambda: number(left[0], "current-jobs-reserved") == len(left), "what the others held is ready again")
        assert number(left[0], "current-jobs-ready") == 20 - len(left)
        assert number(left[0], "current-connections") == len(left)
        until(lambda: victim not in fronts_of(server) and len(fronts_of(server)) == 2, "another front is started")
        with Client(server.connect()) as new:
            assert new.ask(b"reserve").startswith(b"RESERVED")
    assert f"front-end process {victim} ended, with exit code -9" in (tmp_path / "log").read_text()
    assert server.stop() == 0


@pytest.mark.slow
def test_fronts_end_with_the_engine_and_leave_its_port(start_server: Start, tmp_path: Path) -> None:
    port = free_port()
    flags = ["--io-processes", "2", "-b", str(tmp_path / "journal")]
    server = start_server(*flags, port=port)
    fronts = fronts_of(server)
    with Client(server.connect()) as client:
        id = client.put(b"x")
        server.kill()
        assert client.at_end()
    until(lambda: not any(map(is_there, fronts)), "the fronts are gone")
    with Client(start_server(*flags, port=port).connect()) as client:
        assert client.ask(b"peek %d" % id) == b"FOUND %d 1\r\nx\r\n" % id


@pytest.mark.slow
def test_signals_to_all_processes_stop_the_engine_alone(start_server: Start) -> None:
    """A terminal and a service manager send them to fronts, too, which have to bring the last replies to clients."""
    server = start_server("--io-processes", "1")
    (front,) = fronts_of(server)
    with Client(server.connect()) as client:
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(front, one)
        client.sync()
        assert fronts_of(server) == [front]
        assert server.stop() == 0
        assert client.at_end()
    assert not is_there(front)


@pytest.mark.slow
def test_a_front_that_stands_still_does_not_outlive_the_engine(start_server: Start) -> None:
    server = start_server("--io-processes", "1")
    (front,) = fronts_of(server)
    os.kill(front, signal.SIGSTOP)
    begun = time.monotonic()
    assert server.stop() == 0
    assert not is_there(front)
    assert time.monotonic() - begun < 15


# Bug: The front kept the port.
@pytest.mark.slow
def test_a_front_that_stands_still_leaves_the_port_of_an_engine_that_was_killed(start_server: Start) -> None:
    server = start_server("--io-processes", "1")
    (front,) = fronts_of(server)
    os.kill(front, signal.SIGSTOP)
    server.kill()
    until(lambda: not is_there(front), "the front is gone")


def test_a_front_whose_engine_is_gone_already_ends() -> None:
    code = "from geventstalk.front.front import end_with; end_with(1 << 30); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Bug: /proc/PID/environ of a front showed the password of the database.
def test_a_front_is_told_no_secret_of_the_environment(start_server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "a secret")
    (front,) = fronts_of(start_server("--io-processes", "1"))
    names = {entry.partition(b"=")[0] for entry in Path(f"/proc/{front}/environ").read_bytes().split(b"\0") if entry}
    assert {name for name in names if not name.startswith((b"GLIBC_", b"LANG", b"LC_", b"LD_", b"MALLOC_"))} == {
        b"_GEVENTSTALK_PATH"
    }


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_while_fronts_die(start_server: Start, tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    server = start_server("--io-processes", "2", "-b", str(tmp_path / "journal"), stderr=tmp_path / "log")
    pumps: list[Pump] = []
    for round in range(3):
        pumps += [Pump(server, f"{round}-{at}") for at in range(4)]
        time.sleep(drawn.random() / 4)
        if fronts := fronts_of(server):
            os.kill(drawn.choice(fronts), signal.SIGKILL)
    for pump in pumps:
        pump.stop()
    acknowledged = {id: body for pump in pumps for id, body in pump.acknowledged.items()}
    assert acknowledged
    with Client(server.connect()) as control:
        until(lambda: number(control, "current-connections") == 1, "all are gone")
        for id, body in acknowledged.items():
            assert control.ask(b"peek %d" % id) == b"FOUND %d %d\r\n%b\r\n" % (id, len(body), body)


@pytest.mark.long
def test_who_finds_no_descriptor_waits(tmp_path: Path) -> None:
    few = ["bash", "-c", 'ulimit -n 30; exec "$@"', "bash"]
    server = ServerProcess([*few, *GEVENTSTALK], ["--io-processes", "1"], stderr=tmp_path / "log")
    try:
        server.wait_ready()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(Client(server.connect())) for _ in range(40)]
            for client in clients:
                client.send(b"list-tube-used\r\n")
            until(lambda: "cannot accept a connection" in (tmp_path / "log").read_text(), "the log says so")
            served = [client for client in clients if is_answered(client)]
            assert 10 < len(served) < 30
            assert cpu_share(fronts_of(server)[0], 0.5) < 0.15
            for client in served:
                client.close()
            late = [client for client in clients if client not in served]
            assert [late[at].reply() for at in range(10)] == [b"USING default\r\n"] * 10
    finally:
        assert server.stop() == 0
    assert (tmp_path / "log").read_text().count("cannot accept a connection: Too many open files") >= 1


def is_answered(client: Client) -> bool:
    client.sock.settimeout(0.3)
    try:
        return client.reply() == b"USING default\r\n"
    except WireError:
        return False
    finally:
        client.sock.settimeout(30)


@pytest.mark.slow
def test_the_api_shows_where_clients_come_from_and_hangs_up(start_server: Start, tmp_path: Path) -> None:
    port = free_port()
    server = start_server("--io-processes", "1", "--http", str(port), stderr=tmp_path / "log")

    def ask(method: str, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request(method, f"/api/v1/connections{path}")
            with connection.getresponse() as answer:
                text = answer.read()
                assert answer.status in (200, 204), text
                return json.loads(text) if text else None
        finally:
            connection.close()

    with Client(server.connect()) as client:
        client.send(b"reserve\r\n")
        until(lambda: any(one["waiting_s"] is not None for one in ask("GET", "")["connections"]), "it waits")
        client.send(b"list-tube-used\r\n" * 400)
        until(lambda: ask("GET", "")["connections"][0]["input_bytes"] == 400 * 16, "what it sent is shown")
        (shown,) = ask("GET", "")["connections"]
        host, client_port = client.sock.getsockname()
        assert f"{host}:{client_port}" in json.dumps(shown)
        assert f"127.0.0.1:{server.port}" in json.dumps(shown)
        ask("DELETE", f"/{shown['number']}")
        with contextlib.suppress(ConnectionError):
            while client.sock.recv(65536):
                pass
        assert ask("GET", "")["connections"] == []
    os.kill(fronts_of(server)[0], signal.SIGKILL)

    def restarts() -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            return connection.getresponse().read()

    until(lambda: b"\ngeventstalk_front_restarts_total 1.0\n" in restarts(), "it is told that another one was started")


@pytest.mark.slow
def test_a_client_that_never_reads_and_one_that_always_sends_leave_the_link_to_others(launch_front: Launch) -> None:
    """Without a window for each client, what the link holds would be theirs, and no other client would be answered."""
    server = launch_front("-z", "2000000")
    with Client(server.connect()) as control, contextlib.ExitStack() as stack:
        id = control.put(b"x" * 1_000_000)
        for _ in range(20):
            reader = stack.enter_context(Client(server.connect()))
            reader.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.send(b"peek %d\r\n" % id * 100)
        over = threading.Event()
        sender = stack.enter_context(Client(server.connect()))
        sender.sock.settimeout(0.2)

        def send() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    sender.sock.sendall(b"reserve-with-timeout 0\r\n" * 1000)  # it reads no reply

        thread = threading.Thread(target=send)
        thread.start()
        try:
            times = []
            for _ in range(200):
                begun = time.perf_counter()
                control.sync()
                times.append(time.perf_counter() - begun)
        finally:
            over.set()
            thread.join()
        assert sorted(times)[190] < 0.5
        assert number(control, "cmd-peek") < 20 * 100


@pytest.mark.slow
def test_the_ends_of_many_that_wait_with_much_sent_ahead_are_seen_at_once(start_server: Start, tmp_path: Path) -> None:
    """Each of them has sent more than it may, so its front reads nothing. To read on takes a second for each."""
    count = 30
    server = start_server("--io-processes", "1", unix_path=str(tmp_path / "s"))
    with contextlib.ExitStack() as stack, Client(server.connect()) as control:
        clients = [stack.enter_context(Client(server.connect())) for _ in range(count)]
        for client in clients:
            client.send(b"reserve\r\n")
        until(lambda: number(control, "current-waiting") == count, "all of them wait")
        for client in clients:
            fill(client.sock, b"list-tube-used\r\n" * 4096, 1 << 20)
            client.sock.shutdown(socket.SHUT_WR)
        begun = time.monotonic()
        until(lambda: number(control, "current-waiting") == 0, "none of them waits any more")
        assert time.monotonic() - begun < count / 2


def test_a_reset_while_replies_wait_is_the_end(launch_front: Launch) -> None:
    server = launch_front()
    with Client(server.connect()) as control:
        until(lambda: number(control, "current-connections") == 1, "the one that waited for the start has gone")
        id = control.put(b"x" * 60_000)
        slow = Client(server.connect())
        slow.send(b"peek %d\r\n" % id * 200)
        until(lambda: number(control, "cmd-peek") > 10, "some are answered")
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        slow.close()
        until(lambda: number(control, "current-connections") == 1, "it has gone")


# A front alone, of which the test is the engine


def fill_at_once(sock: socket.socket, piece: bytes) -> None:
    """Sends as much as the system takes now."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(piece)


class Hand:
    """A front-end process on a unix socket; in place of the engine's process there is the test."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "hand"))
        self.listener.listen(100)
        self.listener.setblocking(False)
        self.link, theirs = socket.socketpair()
        self.link.settimeout(30)
        fds = (theirs.fileno(), self.listener.fileno())
        code = "import sys; from geventstalk.front.front import main; main(sys.argv[1:])"
        self.process = subprocess.Popen([sys.executable, "-c", code, *map(str, fds), *more], pass_fds=fds)
        theirs.close()
        self._cutter = Cutter()
        assert self.hear() == [(0, HELLO, b"")]

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *exc: object) -> None:
        self.link.close()
        self.listener.close()
        try:
            assert self.process.wait(30) == 0
        finally:
            self.process.kill()

    def hear(self) -> list[tuple[int, int, bytes]]:
        """Some frames, at least one."""
        found: list[tuple[int, int, bytes]] = []
        while not found:
            data = self.link.recv(1 << 16)
            assert data, "the front has ended"
            found = cut(self._cutter, data)
        return found

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self.listener.getsockname())
        return sock

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """The front finds all that happens meanwhile at once and in this order."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_what_became_of_a_client_is_not_taken_for_news_of_the_next_one(tmp_path: Path) -> None:
    """The next one gets the descriptor, for which the system has told something of the first."""
    with Hand(tmp_path, "alone") as hand:
        hand.link.sendall(frame(0, ACCEPT))
        first = hand.connect()
        ((one, kind, _),) = hand.hear()
        assert kind == OPEN
        hand.link.sendall(frame(one, REPLY, b"unread"))
        until(lambda: bool(select.select([first], [], [], 0)[0]), "the reply has come")
        with hand.standing_still():
            hand.link.sendall(frame(one, CLOSE))
            second = hand.connect()
            first.close()
        ((two, kind, _),) = hand.hear()
        assert kind == OPEN and two != one
        second.send(b"stats\r\n")
        assert hand.hear() == [(two, DATA, b"stats\r\n")]
        second.close()
        assert hand.hear() == [(two, END, b"")]


# Bug: A front kept 16 KB and more of each client in memory.
@pytest.mark.slow
def test_an_engine_that_does_not_read_holds_clients_back(tmp_path: Path) -> None:
    with Hand(tmp_path, "alone") as hand, hand.connect() as client:
        hand.link.sendall(frame(0, ACCEPT))
        ((number, _, _),) = hand.hear()
        hand.link.sendall(count_frame(number, MORE, 1 << 30))
        sent = fill(client, b"x" * 65536, 16 << 20)
        assert CLOG_BYTES < sent < (2 << 20), "all of it would be in the memory of the front"
        came = 0
        while came < sent:
            came += sum(len(data) for _, kind, data in hand.hear() if kind == DATA)
        assert came == sent


# Bug: A short command waited behind up to 17 MB that others had sent, which was tens of milliseconds of work.
def test_a_short_command_overtakes_clients_that_send_much(tmp_path: Path) -> None:
    with Hand(tmp_path, "alone") as hand, contextlib.ExitStack() as stack:
        hand.link.sendall(frame(0, ACCEPT))
        clients = [stack.enter_context(hand.connect()) for _ in range(9)]
        numbers: list[int] = []
        while len(numbers) < len(clients):
            numbers += [number for number, kind, _ in hand.hear() if kind == OPEN]
        for number in numbers:
            hand.link.sendall(count_frame(number, MORE, 1 << 30))
        *heavy, light = clients
        for client in heavy:
            fill(client, b"x" * 65536, 1 << 20)
        light.sendall(b"stats\r\n")
        before = 0
        came = dict.fromkeys(numbers, 0)
        while not came[numbers[-1]]:
            for number, kind, data in hand.hear():
                assert kind == DATA
                came[number] += len(data)
            before = sum(came.values())
        assert before < 1 << 20
        while sum(came.values()) < 4 << 20:
            for client in heavy:
                fill_at_once(client, b"x" * 65536)
            for number, _, data in hand.hear():
                came[number] += len(data)
        del came[numbers[-1]]
        assert min(came.values()) * 3 > max(came.values()), "some of them are read from more often than others"


@pytest.mark.slow
def test_a_front_says_once_why_it_cannot_accept_and_only_while_a_client_waits(tmp_path: Path) -> None:
    with Hand(tmp_path, "alone") as hand, contextlib.ExitStack() as stack:
        pid = hand.process.pid
        own = len(open_files(pid)) + 4
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (own + 3, own + 100))
        with hand.standing_still():
            hand.link.sendall(frame(0, ACCEPT))
            clients = [stack.enter_context(hand.connect()) for _ in range(2)]
        numbers: list[int] = []
        while len(numbers) < 2:
            for number, kind, _ in hand.hear():
                assert kind == OPEN
                numbers.append(number)
        hand.link.settimeout(0.3)
        with pytest.raises(TimeoutError):
            hand.hear()
        hand.link.settimeout(30)
        waits = stack.enter_context(hand.connect())
        assert hand.hear() == [(0, REFUSED, b"Too many open files")]
        assert hand.hear() == [(0, REFUSED, b"")]
        clients[0].close()
        while (found := hand.hear()) == [(0, REFUSED, b"")] or found == [(numbers[0], END, b"")]:
            hand.link.sendall(frame(numbers[0], CLOSE))
        assert found[-1][1] == OPEN
        waits.close()


# Bug: A client that the system gave to a front without room waited until another client came.
@pytest.mark.slow
def test_who_waits_at_a_front_without_room_is_accepted_by_another(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--io-processes", "2", stderr=tmp_path / "log")
    full = fronts_of(server)[0]
    hard = resource.prlimit(full, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(full, resource.RLIMIT_NOFILE, (1, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(Client(server.connect())).sync()
            time.sleep(1.5 * ACCEPT_RETRY_S)  # then the front looks again, and is the first to be told
    assert (tmp_path / "log").read_text().count("cannot accept a connection: Too many open files") == 1


# Bug: A front ended after four billion clients.
@pytest.mark.skipif(BUILD == "compiled", reason="takes what no other process may have")
def test_numbers_of_clients_come_again_after_all_others() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        front = Front(theirs, [], True)
        front._by_number = dict.fromkeys((CLIENTS_MAX, 1, 2), None)  # type: ignore[assignment]  # as good as clients here
        front._last_number = CLIENTS_MAX - 2
        assert [front._next_number() for _ in range(3)] == [CLIENTS_MAX - 1, 3, 4]


def test_however_much_short_commands_there_are_clients_that_send_much_have_their_turns() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ours, theirs = socket.socketpair()
    with listener, ours, theirs, contextlib.ExitStack() as stack:
        front = Front(theirs, [listener], True)
        for _ in range(3):
            stack.enter_context(socket.create_connection(listener.getsockname())).sendall(b"x" * 100)
            assert front._accept_one(listener, False)
        clients = [(client, select.EPOLLIN) for client in front._by_fd.values()]
        front._out_bytes = CLOG_BYTES
        for turn in range(1, 4):
            front._attend_heavy(clients)
            assert sum(client.room < IN_BYTES for client, _ in clients) == turn
        for client, _ in clients:
            front._drop(client)


# Bug: What had gathered while the engine did not read stayed in the front until something else happened there.
def test_what_gathers_while_the_engine_does_not_read_follows_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.setblocking(False)
        front = Front(theirs, [], True)
        front._epoll.register(front._link_fd, select.EPOLLIN)
        for size in (1 << 20, CLOG_BYTES):
            front._say(bytes(size))
            if not front._link.unsent:
                front._flush()
        left = (1 << 20) + CLOG_BYTES
        while left:
            left -= len(ours.recv(1 << 16))
            front._attend_link(select.EPOLLOUT)
        assert not front._out and not front._link.unsent


# Bug: A client for which epoll had no memory ended its front.
@pytest.mark.skipif(BUILD == "compiled", reason="takes what no other process may have")
def test_a_client_for_whom_the_system_has_no_memory_is_lost_alone(tmp_path: Path) -> None:
    class Full:
        def register(self, fd: int, mask: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    listener = socket.create_server(("127.0.0.1", 0))
    ours, theirs = socket.socketpair()
    with listener, ours, theirs, socket.create_connection(listener.getsockname()) as client:
        front = Front(theirs, [listener], True)
        front._epoll = Full()  # type: ignore[assignment]  # as much of it as is used here
        assert front._accept_one(listener, False)
        front._flush()
        assert [kind for _, kind, _ in cut(Cutter(), ours.recv(4096))] == [OPEN, GONE]
        assert client.recv(1) == b""


# Starting them


def unused(*_words: Any) -> Any:
    raise AssertionError("no client comes")


def shared(service: Service) -> tuple[Ahead, Unsent, RunQueue]:
    """Returns what the clients of a server share."""
    loop = gevent.get_hub().loop

    def begins() -> None:
        loop.run_callback(turn.end)

    turn = Turn(service.engine, time.monotonic_ns, time.time_ns, begins, unused)
    return Ahead(), Unsent(service), RunQueue(loop, turn)


def make_fronts(count: int, fails: Callable[[str], None]) -> Fronts:
    loop = gevent.get_hub().loop

    def link(sock: socket.socket, fronts: Fronts) -> Link:
        return Link(sock, loop, unused, unused, unused, *shared(Service(Operate(0), 100, dict)), unused, fronts)

    return Fronts(count, [], link, logging.getLogger("tests.fronts"), fails)


@pytest.mark.skipif(BUILD == "compiled", reason="takes what no other process may have")
def test_a_front_that_is_far_ahead_waits_for_the_others() -> None:
    said: list[tuple[int, int]] = []
    fronts = make_fronts(2, unused)

    class Told:
        def __init__(self, number: int) -> None:
            self.number, self.clients, self.to_accept = number, dict[int, None](), 0
            self.greeted = True

        def say(self, frame: bytes) -> None:
            ((client, kind, data),) = cut(Cutter(), frame)
            assert (client, kind) == (0, MORE)
            said.append((self.number, count_of(data)))

    first, second = links = [Told(1), Told(2)]
    fronts._links = links  # type: ignore[assignment]  # as much of a link as came() needs

    def come(link: Told) -> None:
        link.clients[len(link.clients)] = None
        fronts.came(link)  # type: ignore[arg-type]  # the same

    for _ in range(6):
        come(first)
    assert said == [(1, 1)] * 4, "the fifth one is too many"
    come(second)
    assert said[4:] == [(2, 1)]
    come(second)
    assert said[5:] == [(1, 2), (2, 1)], "the other one has caught up"
    for _ in range(2):
        come(first)
    assert len(said) == 7
    with gevent.Timeout(20):
        while len(said) == 7:
            gevent.sleep(0.001)
    assert said[7:] == [(1, 2)], "it does not wait for ever"
    second.greeted = False
    for _ in range(6):
        come(first)
    assert said[8:] == [(1, 1)] * 6, "nor for one that may never be ready"
    fronts._links = [None, None]
    fronts.finish()


# Bug: A number of the wrong length in a frame ended the server.
def test_a_front_that_talks_nonsense_loses_its_link_and_nothing_else() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    service = Service(Operate(0), 100, dict)
    gone: list[int] = []

    def come(link: Link, number: int, peer: str, own_end: str) -> FrontClient:
        return FrontClient(link, number, Session(service), peer, own_end)

    def go(client: FrontClient) -> None:
        gone.append(client.number)

    fronts = make_fronts(2, unused)
    loop = gevent.get_hub().loop
    link = Link(ours, loop, come, go, unused, *shared(service), unused, fronts)
    with theirs, gevent.Timeout(20):
        theirs.sendall(frame(7, OPEN, b"peer\nend") + frame(8, OPEN, b"peer\nend") + frame(8, TAKEN, b"abc"))
        link.over.wait()
        while len(gone) < 2:
            gevent.sleep(0.001)
        assert sorted(gone) == [7, 8]
        assert theirs.recv(100) == b""
    fronts.finish()


def test_fronts_that_do_not_start_are_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    fronts = make_fronts(1, said.append)
    fronts.start()
    with gevent.Timeout(20):
        while not said:
            gevent.sleep(0.01)
    assert said == ["a front-end process ended at once, with exit code 1"]
    fronts.finish()


def test_nodes_of_a_cluster_have_no_fronts() -> None:
    require_fitting(Settings(io_processes=2))
    with pytest.raises(ConfigError, match="--io-processes does not go with a journal in PostgreSQL"):
        require_fitting(Settings(io_processes=2, journal="postgresql://host/base"))


class Ended:
    """A process that has ended."""

    pid = 1
    returncode = 0

    def poll(self) -> int:
        return 0


class NoLink:
    """A link to nothing, which is over when a test says so."""

    def __init__(self, sock: socket.socket, owner: object) -> None:
        self.over = Event()
        self.clients: dict[int, object] = {}
        sock.close()


@pytest.mark.skipif(BUILD == "compiled", reason="a link of its kind only is taken there")
def test_without_memory_to_start_a_front_again_the_server_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A MemoryError there ended the greenlet that watches over the front, and with it the server."""
    outcomes: list[object] = [Ended(), MemoryError(), Ended(), Ended()]
    links: list[NoLink] = []

    def start(*_: object, **__: object) -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, MemoryError):
            raise outcome
        return outcome

    def link(sock: socket.socket, owner: object) -> NoLink:
        if len(outcomes) == 1:
            raise MemoryError
        links.append(NoLink(sock, owner))
        return links[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("geventstalk.serving.fronts.RESTART_S", 0.001)
    watched = Fronts(1, [], cast(Any, link), logging.getLogger("fronts"), pytest.fail)
    watched.start()
    watched.greeted(cast(Any, links[0]))
    links[0].over.set()
    with gevent.Timeout(30):
        while len(links) < 2:
            gevent.sleep(0.001)
    gevent.killall(watched._keepers)
    assert caplog.messages[1:] == ["cannot start a front-end process: Cannot allocate memory"] * 2
