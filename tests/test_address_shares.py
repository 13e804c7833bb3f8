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
    shares = AddressShares(lambda: 8, logging.getLogger("shares"))
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
