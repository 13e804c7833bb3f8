"""Connections of each address: no other host takes all of them."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from geventstalk.addresses import host_of
from geventstalk.serving.address_shares import AddressShares, network_of
from geventstalk.serving.memory import memory_bytes
from tests.support.clients import until
from tests.support.process import ServerProcess, free_port
from tests.support.wire import Client, WireError
from tests.test_proxied import header

LIMIT = 120
PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
from geventstalk.serving import address_shares
address_shares.network_of = lambda host: "" if host == "127.0.0.1" else host
from geventstalk.cli.main import main
sys.exit(main())
"""
Served = Callable[..., ServerProcess]


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("127.0.0.1", ""),
        ("127.8.9.10", ""),
        ("::ffff:127.0.0.1", ""),
        ("::1", ""),
        ("2001:db8:1:2:3:4:5:6", "20010db800010002"),
        ("2001:db8:1:2::", "20010db800010002"),
        ("2001:db8:1:3::", "20010db800010003"),
        ("fe80::7%eth0", "fe80000000000000"),
        ("", ""),
        ("process 7, user 0, group 0", ""),
    ],
)
def test_what_counts_as_one_address(host: str, wanted: str) -> None:
    assert network_of(host) == wanted


def test_the_host_of_an_address() -> None:
    assert [host_of(peer) for peer in ("192.0.2.7:1", "[2001:db8::7]:1", "process 7, user 0", "gone", "")] == [
        *("192.0.2.7", "2001:db8::7", "", "", ""),
    ]


def test_an_address_has_three_quarters(caplog: pytest.LogCaptureFixture) -> None:
    shares = AddressShares(lambda: 8, 100, logging.getLogger("shares"))
    assert [shares.enter("192.0.2.7") for _ in range(8)] == [True] * 6 + [False] * 2
    assert [shares.enter("127.0.0.1") for _ in range(9)] == [True] * 9
    assert shares.enter("192.0.2.8") and shares.refused == 2
    assert [each.getMessage() for each in caplog.records] == [
        "closed a connection of 192.0.2.7, which has 6: three quarters of all that there may be; "
        "for a minute no other one is told of"
    ]
    for _ in range(8):
        shares.leave("192.0.2.7")
    assert [shares.enter("192.0.2.7") for _ in range(7)] == [True] * 6 + [False]


def test_half_sent_bodies_of_an_address_have_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    shares = AddressShares(lambda: 8, 100, logging.getLogger("shares"))
    for host in ("192.0.2.7", "192.0.2.7", "192.0.2.8"):
        shares.enter(host)
    first, other = shares.of("192.0.2.7"), shares.of("192.0.2.8")
    assert shares.of("127.0.0.1") is None and first is not None and other is not None
    assert first.takes(0, 90) and first.takes(90, 60), "one body alone may be larger"
    assert not first.takes(0, 1) and other.takes(0, 90)
    first.gives_back(150)
    assert first.takes(0, 60) and first.takes(0, 40) and not first.takes(60, 1) and shares.refused_uploads == 2
    assert [each.getMessage() for each in caplog.records] == [
        "refused a put of 192.0.2.7, which has sent 150 bytes of bodies that are not complete; "
        "for a minute no other one is told of"
    ]
    shares.leave("192.0.2.7")
    assert shares.of("192.0.2.7") is first
    shares.leave("192.0.2.7")
    assert shares.of("192.0.2.7") is None


def test_the_memory_of_this_process() -> None:
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        total = int(file.readline().split()[1]) << 10
    assert 1 << 26 < memory_bytes() <= total


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Served]:
    """Starts a server with few descriptors, to which 127.0.0.2 is another host."""
    servers: list[ServerProcess] = []

    def run(*flags: str) -> ServerProcess:
        program = PROGRAM.format(limit=LIMIT)
        servers.append(ServerProcess([sys.executable, "-c", program], flags, stderr=tmp_path / "log"))
        return servers[-1].wait_ready()

    yield run
    for server in servers:
        assert server.stop() == 0


def is_served(sock: socket.socket) -> bool:
    try:
        return Client(sock).ask(b"list-tube-used") == b"USING default\r\n"
    except (OSError, WireError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--io-processes", "1"]], ids=["one process", "a front"])
def test_one_host_leaves_room_for_others(start: Served, tmp_path: Path, flags: list[str]) -> None:
    server = start(*flags)
    with ExitStack() as held:

        def come(host: str) -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", server.port), 20, (host, 0))
            return held.enter_context(sock)

        greedy = [come("127.0.0.2") for _ in range(LIMIT)]
        served = [sock for sock in greedy if is_served(sock)]
        assert LIMIT // 2 < len(served) < LIMIT - 20
        assert is_served(come("127.0.0.3")) and is_served(come("127.0.0.1"))
        assert not is_served(come("127.0.0.2"))
        assert (tmp_path / "log").read_text().count("closed a connection of 127.0.0.2, which has") == 1
        for sock in greedy:
            sock.close()
        until_served(lambda: come("127.0.0.2"))


def until_served(come: Callable[[], socket.socket]) -> None:
    for _ in range(100):
        if is_served(come()):
            return
    raise AssertionError("connections that have ended still count")


@pytest.mark.slow
def test_behind_a_proxy_the_address_that_it_tells_counts(start: Served, tmp_path: Path) -> None:
    port = free_port()
    settings = tmp_path / "s.yaml"
    settings.write_text(f"listeners: [{{address: '127.0.0.1:{port}', proxy: [127.0.0.0/8]}}]\n")
    start("--config", str(settings))
    with ExitStack() as held:

        def come(host: str) -> socket.socket:
            sock = held.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            sock.sendall(header(host))
            return sock

        served = [sock for sock in [come("203.0.113.7") for _ in range(LIMIT)] if is_served(sock)]
        assert LIMIT // 2 < len(served) < LIMIT - 20
        assert is_served(come("203.0.113.8"))


@pytest.mark.parametrize("flags", [[], ["--io-processes", "1"]], ids=["one process", "a front"])
def test_one_host_leaves_memory_for_the_uploads_of_others(start: Served, tmp_path: Path, flags: list[str]) -> None:
    """With 4 MB of memory for bodies, half of it is an address's for what it has begun to send."""
    server = start("--max-memory", "4m", "-z", "3m", *flags)
    part = b"put 0 0 60 300000\r\n" + b"x" * 250_000
    with ExitStack() as held:

        def come(host: str) -> Client:
            sock = socket.create_connection(("127.0.0.1", server.port), 20, (host, 0))
            return held.enter_context(Client(sock))

        def ask_of(client: Client) -> dict[str, str]:
            return client.stats(b"stats")

        looks = come("127.0.0.1")
        greedy = [come("127.0.0.2") for _ in range(14)]
        for each in greedy:
            each.send(part)
        until(lambda: 1_500_000 < int(ask_of(looks)["memory-bytes"]) <= 2_000_000 + 65_536, "as much as may be")
        for host in ("127.0.0.1", "127.0.0.3"):
            other = come(host)
            other.send(part)
            other.send(b"x" * 50_000 + b"\r\n")
            assert other.reply().startswith(b"INSERTED ")
        for each in greedy:
            each.send(b"x" * 50_000 + b"\r\n")
        replies = [each.reply().split()[0] for each in greedy]
        assert set(replies) == {b"INSERTED", b"OUT_OF_MEMORY"} and replies.count(b"INSERTED") >= 5
        assert (tmp_path / "log").read_text().count("refused a put of 127.0.0.2, which has sent") == 1
        assert greedy[0].ask(b"put 0 0 60 1\r\nx").startswith(b"INSERTED "), "nothing counts for the address any more"
        assert looks.ask(b"flush-tube default").startswith(b"FLUSHED ")
        large = come("127.0.0.2")
        large.send(b"put 0 0 60 2500000\r\n" + b"x" * 2_500_000 + b"\r\n")
        assert large.reply().startswith(b"INSERTED "), "a single body may be larger"
        for each in (come("127.0.0.2"), come("127.0.0.2")):
            each.send(part)
            each.close()
        until(lambda: int(ask_of(looks)["memory-bytes"]) < 2_600_000, "uploads of clients that went do not count")
