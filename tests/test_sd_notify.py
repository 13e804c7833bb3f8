"""A server's messages to a service manager: when it serves, that it still runs, what it does, and that it stops."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geventstalk.serving.sd_notify import Manager
from tests.support.process import ServerProcess
from tests.support.wire import Client

PATIENCE_S = 30.0


class FakeManager:
    """The other end of sd_notify(3)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(PATIENCE_S)

    def hear(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().split("\n"))

    def hears_nothing(self) -> bool:
        self._socket.setblocking(False)
        try:
            return not self._socket.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(PATIENCE_S)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeManager]:
    made = FakeManager(str(tmp_path / "notify") if request.param == "path" else f"@geventstalk-test-{os.getpid()}")
    yield made
    made.close()


def test_a_server_is_ready_when_it_serves(manager: FakeManager, start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(env={**os.environ, "NOTIFY_SOCKET": manager.address})
    assert manager.hear() == {
        "READY": "1",
        "STATUS": "Serving: 0 connections; jobs: 0 ready, 0 reserved, 0 delayed, 0 buried",
    }
    with Client(server.connect()) as client:
        client.put(b"one")
        server.process.send_signal(10)  # SIGUSR1
        assert manager.hear()["STATUS"].startswith("Draining: 1 connections; jobs: 1 ready")
    server.stop()
    assert manager.hear() == {"STOPPING": "1", "STATUS": "stopped by SIGTERM"}
    assert manager.hears_nothing()


def test_the_watchdog_hears_that_the_event_loop_goes_round(
    manager: FakeManager, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server(env={**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000"})
    assert manager.hear()["READY"] == "1"
    for _ in range(3):
        assert manager.hear()["WATCHDOG"] == "1"
    os.kill(server.pid, 19)  # SIGSTOP: it hangs
    time.sleep(0.3)
    while not manager.hears_nothing():
        pass  # what was sent before
    time.sleep(0.5)
    assert manager.hears_nothing()
    os.kill(server.pid, 18)
    assert manager.hear()["WATCHDOG"] == "1"


def test_a_watchdog_of_another_process_is_none(manager: FakeManager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": "1", "HOME": "/"}
    assert Manager.of(environment).watchdog_s == 0
    assert environment == {"HOME": "/"}, "what this process starts is not meant"
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": str(os.getpid())}
    found = Manager.of(environment)
    assert found.watchdog_s == 0.2


def test_a_long_replay_asks_for_more_time(manager: FakeManager) -> None:
    teller = Manager(manager.address)
    teller.replaying(65536)
    assert manager.hear() == {
        "EXTEND_TIMEOUT_USEC": "60000000",
        "STATUS": "Replaying the journal: 65536 records so far",
    }


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/to/be/found", "@no-listener", "x" * 200])
def test_a_manager_that_does_not_listen_is_no_reason_to_stop(
    address: str, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server(env={**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000"})
    with Client(server.connect()) as client:
        client.put(b"one")
    assert server.stop() == 0


def test_a_manager_that_does_not_read_delays_no_client(manager: FakeManager) -> None:
    teller = Manager(manager.address)
    begun = time.monotonic()
    for _ in range(10_000):
        teller.runs("x" * 100)
    assert time.monotonic() - begun < PATIENCE_S
