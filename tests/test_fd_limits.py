"""Few descriptors: a start that could serve no client is refused, and clients never take what the journal needs."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from geventstalk.serving import fd_limits
from geventstalk.serving.fd_limits import Descriptors, Share, TooFewError
from tests.support.clients import burst, number, put_many, until
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client

OWN = 6  # stdin, stdout, stderr, a listener, two of the event loop
LEAST_LIMIT = 30
LEAST, MOST = 22, 67  # of a journal; test_a_journal_stays_within_the_descriptors_that_it_was_given holds them


@contextlib.contextmanager
def server_with(limit: int, *flags: str, tmp_path: Path, also: str = "") -> Iterator[ServerProcess]:
    """A server with this many descriptors at most. `also` is done by the shell before."""
    few = ["bash", "-c", f'{also} ulimit -n {limit}; exec "$@"', "bash"]
    server = ServerProcess([*few, *GEVENTSTALK], flags, stderr=tmp_path / "log")
    try:
        yield server
    finally:
        server.stop()


def serves(server: ServerProcess, clients: int) -> None:
    """This many clients are served, those beyond wait, and come in when others leave."""
    server.wait_ready()
    with contextlib.ExitStack() as stack:
        inside = [stack.enter_context(Client(server.connect())) for _ in range(clients)]
        for client in inside:
            client.sync()
        waiting = stack.enter_context(Client(server.connect()))
        waiting.send(b"list-tube-used\r\n")
        assert number(inside[0], "current-connections") == clients
        assert not select.select([waiting.sock], [], [], 0.3)[0]
        inside[0].close()
        assert waiting.reply() == b"USING default\r\n"


@pytest.mark.parametrize(
    ("limit", "least", "most", "for_journal", "for_clients"),
    [
        (OWN + 2, 0, 0, 0, 1),
        (1000, 0, 0, 0, 1000 - OWN - 1),
        (OWN + 1 + LEAST + 1, LEAST, MOST, LEAST, 1),
        (64, LEAST, MOST, 28, 29),
        (OWN + 1 + 2 * MOST, LEAST, MOST, MOST, MOST),
        (1000, LEAST, MOST, MOST, 1000 - OWN - 1 - MOST),
    ],
)
def test_shares(
    monkeypatch: pytest.MonkeyPatch, limit: int, least: int, most: int, for_journal: int, for_clients: int
) -> None:
    monkeypatch.setattr(fd_limits, "_limit", lambda: limit)
    monkeypatch.setattr(fd_limits, "_open_count", lambda: OWN)
    shares = Descriptors(least, most)
    taken = 0
    while shares.take():
        taken += 1
    assert (shares.for_journal, taken) == (for_journal, for_clients)
    shares.give_back()
    assert (shares.take(), shares.take()) == (True, False)


@pytest.mark.parametrize(
    ("left", "kept", "clients"), [(1, 0, 1), (2, 1, 1), (15, 1, 14), (16, 2, 14), (128, 16, 112), (1000, 16, 984)]
)
def test_some_are_kept_back_for_http(monkeypatch: pytest.MonkeyPatch, left: int, kept: int, clients: int) -> None:
    monkeypatch.setattr(fd_limits, "_limit", lambda: OWN + 1 + left)
    monkeypatch.setattr(fd_limits, "_open_count", lambda: OWN)
    everything = Descriptors()
    called: list[None] = []
    share = Share(everything, 256, lambda: called.append(None))
    taken = 0
    while everything.take():
        taken += 1
    assert taken == clients
    assert [share.take() for _ in range(kept + 1)] == [True] * kept + [False]
    assert called, "those that rest may go for the next one"
    for _ in range(kept):
        share.give_back()
    assert not everything.take(), "what HTTP gives back of its own is no client's"
    everything.give_back()
    assert [share.take() for _ in range(kept)] == [True] * kept
    while share.take():
        pass
    if kept < left // 4:
        assert not everything.take(), "the clients' last one went to HTTP"


# Bug: /healthz and the console timed out.
@pytest.mark.slow
def test_clients_that_take_every_descriptor_do_not_lock_the_operator_out(tmp_path: Path) -> None:
    port = free_port()
    with server_with(60, "--http", str(port), tmp_path=tmp_path) as server, contextlib.ExitStack() as stack:
        control = stack.enter_context(Client(server.wait_ready().connect()))
        for _ in range(100):
            stack.enter_context(server.connect())
        until(lambda: number(control, "current-connections") >= 40, "they take what there is")
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(20):
            assert Web(port).status("GET", "/healthz") == 200


@pytest.mark.parametrize(("limit", "least"), [(OWN + 1, 0), (OWN + 1 + LEAST, LEAST), (3, 0)])
def test_nothing_is_left_to_a_client(monkeypatch: pytest.MonkeyPatch, limit: int, least: int) -> None:
    monkeypatch.setattr(fd_limits, "_limit", lambda: limit)
    monkeypatch.setattr(fd_limits, "_open_count", lambda: OWN)
    with pytest.raises(TooFewError, match=f"the limit of open files is {limit}, and with less than {OWN + least + 2} "):
        Descriptors(least, MOST)


@pytest.mark.parametrize(
    ("limit", "durable", "wanted"), [(5, False, 8), (7, False, 8), (7, True, 8), (8, True, 30), (29, True, 30)]
)
def test_a_start_without_a_descriptor_for_a_client_is_refused(
    tmp_path: Path, limit: int, durable: bool, wanted: int
) -> None:
    """It listened and accepted no client; without a descriptor for the event loop, libev ended the process."""
    flags = ["-b", str(tmp_path / "journal")] if durable else []
    with server_with(limit, *flags, tmp_path=tmp_path) as server:
        assert server.process.wait(60) == 71
    assert (tmp_path / "log").read_text() == (
        f"geventstalk: the limit of open files is {limit}, and with less than {wanted} no client can be served; "
        "raise ulimit -n or LimitNOFILE=\n"
    )
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize(("limit", "clients"), [(8, 1), (16, 9), (32, 25)])
@pytest.mark.slow
def test_without_a_journal_all_that_is_left_is_for_clients(tmp_path: Path, limit: int, clients: int) -> None:
    with server_with(limit, tmp_path=tmp_path) as server:
        serves(server, clients)
        assert server.stop() == 0


# Bug: With one descriptor too few the server listened and accepted no client: too many were kept back.
@pytest.mark.parametrize(
    ("limit", "clients", "sync"), [(30, 1, "-f0"), (30, 1, "-F"), (31, 2, "-f50"), (35, 6, "-f0"), (64, 29, "-F")]
)
@pytest.mark.slow
def test_a_busy_journal_goes_on_beside_clients_that_take_every_descriptor(
    tmp_path: Path, limit: int, clients: int, sync: str
) -> None:
    """With `ulimit -n 64` idle clients left it so few that the server ended: no segment could be created."""
    flags = ["-b", str(tmp_path / "journal"), "-s", "20000", sync]
    with server_with(limit, *flags, tmp_path=tmp_path) as server, contextlib.ExitStack() as stack:
        control = stack.enter_context(Client(server.wait_ready().connect()))
        control.sync()
        for _ in range(limit):  # most of them stay in the backlog
            stack.enter_context(server.connect())
        until(lambda: number(control, "current-connections") == clients, "they take what there is")
        put_many(control, 50, body=b"y" * 500)  # to be moved again and again
        while number(control, "binlog-current-index") <= 10:
            ids = put_many(control, 50, body=b"x" * 1000)
            assert set(burst(control, [b"delete %d\r\n" % id for id in ids])) == {b"DELETED\r\n"}
        assert number(control, "current-jobs-ready") == 50
        assert server.stop() == 0
    assert "few clients fit beside the journal" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("limit", "sync"), [(LEAST_LIMIT, "-f0"), pytest.param(31, "-F", marks=pytest.mark.long)])
@pytest.mark.slow
def test_bodies_are_read_beside_clients_that_take_every_descriptor(tmp_path: Path, limit: int, sync: str) -> None:
    """A body whose segment cannot be opened would be the end of the server."""
    flags = ["-b", str(tmp_path / "journal"), "-s", "32768", "--max-memory", "64k", sync]
    with server_with(limit, *flags, tmp_path=tmp_path) as server, contextlib.ExitStack() as stack:
        control = stack.enter_context(Client(server.wait_ready().connect()))
        control.sync()
        for _ in range(limit):  # most of them stay in the backlog
            stack.enter_context(server.connect())
        ids: list[int] = []
        while len(ids) < 200:
            ids += put_some(control)
        for _ in range(3):
            looked_at = burst(control, [b"peek %d\r\n" % id for id in ids])
            assert looked_at == [b"FOUND %d 1000\r\n%b\r\n" % (id, BODY) for id in ids]
            goes = ids[::3]  # so that there is something to compact
            assert set(burst(control, [b"delete %d\r\n" % id for id in goes])) == {b"DELETED\r\n"}
            ids = [id for id in ids if id not in goes]
            while len(ids) < 200:
                ids += put_some(control)
        assert number(control, "memory-loads") > 200
        assert server.stop() == 0, (tmp_path / "log").read_text()


BODY = b"x" * 1000


def put_some(client: Client) -> list[int]:
    """Puts 20 jobs; those that memory has room for come to something. Returns their ids."""
    replies = burst(client, [b"put 0 0 60 1000\r\n%b\r\n" % BODY] * 20)
    return [int(reply.split()[1]) for reply in replies if reply.startswith(b"INSERTED")]


@pytest.mark.slow
def test_many_listeners_and_what_was_inherited_are_counted(tmp_path: Path) -> None:
    """Also when inherited descriptors have high numbers and leave a gap."""
    paths = [tmp_path / f"s{number}" for number in range(5)]  # two descriptors each: the socket, and a pin of its file
    flags = [word for path in paths for word in ("-l", f"unix:{path}")]
    also = "exec 30</dev/null 35</dev/null 36</dev/null;"
    with server_with(40, *flags, tmp_path=tmp_path, also=also) as server:
        serves(server, 40 - OWN - 2 * len(paths) - 3 - 1)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.fspath(paths[-1]))
            client.settimeout(30)
            client.sendall(b"list-tube-used\r\n")
            assert client.recv(100) == b"USING default\r\n"
        assert server.stop() == 0


# Bug: The file of a unix socket stayed when no descriptor was left to pin it.
def test_more_listeners_than_descriptors_are_refused(tmp_path: Path) -> None:
    flags = [word for number in range(5) for word in ("-l", f"unix:{tmp_path}/s{number}")]
    for limit, said in [(10, "cannot listen on unix:"), (16, "with less than 18 no client can be served")]:
        with server_with(limit, *flags, tmp_path=tmp_path) as server:
            assert server.process.wait(60) in (71, 111)
        assert said in (tmp_path / "log").read_text()
        assert not list(tmp_path.glob("s*")), "their files are removed"
