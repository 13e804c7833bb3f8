"""No silent end: whatever comes out of a greenlet, a callback or a thread is logged once and ends the process.

Faults are planted by a program that replaces a method and then starts the server; a compiled method cannot be replaced.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from geventstalk._build import BUILD
from tests.support.process import TRACEBACK, ServerProcess
from tests.support.wire import Client, WireError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BUILD == "compiled", reason="a compiled method cannot be replaced"),
]

PROGRAM = """
import sys, threading
{plant}
from geventstalk.cli.main import main
sys.exit(main())
"""
BREAKS = """
def breaks(*arguments, **options):
    raise {error}
"""
READ = "from geventstalk.serving.connection import Connection\nConnection._read = breaks"
ADVANCE = "from geventstalk.core.engine import Engine\nEngine.advance = breaks"
DRAIN = "from geventstalk.serving.server import Server\nServer.drain = breaks"
ACCEPT = "from geventstalk.serving.acceptor import Acceptor\nAcceptor.do_read = breaks"
LINK = "from geventstalk.serving.link import FrontClient\nFrontClient.receive = breaks"
KEEP = "from geventstalk.serving.fronts import Fronts\nFronts._keep = breaks"
END = "from geventstalk.serving.busy_poll import BusyPoll\nBusyPoll.turn_ends = breaks"
LEAVE = "from geventstalk.wire.session import Session\nSession.leave = breaks"
THREAD = """
from geventstalk.serving.acceptor import Acceptor
start = Acceptor.start
Acceptor.start = lambda acceptor: (start(acceptor), threading.Thread(target=breaks).start())
"""
COMMIT = "from geventstalk.durable.store import Store\nStore.commit = breaks"
SYNC = "from journal.sqlite.sealed import FileSync\nFileSync.run = breaks"
COMPACTION = "from geventstalk.durable.store import Store\nStore.wants_compaction = breaks"

UNEXPECTED = 'ZeroDivisionError("planted")'


def start(tmp_path: Path, plant: str, error: str, *flags: str) -> ServerProcess:
    program = PROGRAM.format(plant=BREAKS.format(error=error) + plant)
    server = ServerProcess([sys.executable, "-c", program], flags, stderr=tmp_path / "log")
    server.log.expects = "planted"
    return server


def end_of(server: ServerProcess, tmp_path: Path, *, signaled: bool = False) -> tuple[int, str]:
    """Talks to the server until it ends; the exit code, and what it said."""
    if signaled:
        server.wait_ready()
        server.process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 60
    while server.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, WireError):
            sock = server.connect(1.0)
            with Client(sock) as client:
                client.send(b"put 0 0 60 1\r\nx\r\n")
                sock.shutdown(socket.SHUT_WR)
                client.reply()
        time.sleep(0.02)
    return server.process.wait(1), (tmp_path / "log").read_text()


# Bug: gevent printed an exception of a greenlet or a callback, and the server went on without it. Without a journal the
# message said that nothing acknowledged was lost, though all jobs were.
@pytest.mark.parametrize("durable", [False, True], ids=["memory", "journal"])
@pytest.mark.parametrize(
    ("plant", "code"),
    [(READ, 70), (DRAIN, 70), (ACCEPT, 70), (LINK, 70), (KEEP, 70), (END, 70), (THREAD, 70), (ADVANCE, 0), (LEAVE, 0)],
    ids=[
        *("a connection", "a signal", "an acceptor", "a link", "who keeps fronts", "a callback", "a thread"),
        *("the clock", "a client that goes"),
    ],
)
def test_what_must_not_happen_ends_the_process(tmp_path: Path, plant: str, code: int, durable: bool) -> None:
    """Where no code is given a change may be half made: with a journal that is 74, and the next start replays."""
    flags = ["-b", str(tmp_path / "journal")] if durable else []
    flags += ["--io-processes", "1"] if plant in (LINK, KEEP) else []
    found, text = end_of(start(tmp_path, plant, UNEXPECTED, *flags), tmp_path, signaled=plant == DRAIN)
    assert found == (code or (74 if durable else 70)), text
    assert text.encode().count(TRACEBACK) == 1, text
    assert "stopping" in text
    promise, loss = "nothing since the last commit was acknowledged", "all jobs are lost, because there is no journal"
    assert (promise in text) is (found == 74), text
    assert (loss in text) is (not code and not durable), text


@pytest.mark.parametrize("error", [UNEXPECTED, 'MemoryError("planted")'], ids=["a bug", "memory"])
@pytest.mark.parametrize("plant", [COMMIT, SYNC], ids=["commit", "sync"])
@pytest.mark.parametrize("policy", ["-f0", "-f50"])
def test_whatever_the_journal_raises_ends_the_process(tmp_path: Path, plant: str, error: str, policy: str) -> None:
    found, text = end_of(start(tmp_path, plant, error, "-b", str(tmp_path / "journal"), policy), tmp_path)
    assert found == 74, text
    assert text.count("stopping") == 1, text


def test_compaction_that_fails_ends_the_process(tmp_path: Path) -> None:
    found, text = end_of(start(tmp_path, COMPACTION, UNEXPECTED, "-b", str(tmp_path / "journal")), tmp_path)
    assert found == 74, text
    assert text.count("stopping") == 1, text
