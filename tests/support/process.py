"""Servers as child processes: geventstalk and, where it is installed, Debian's beanstalkd.

Every server listens on 127.0.0.1 or on a unix socket, is stopped by its own pid, and is bounded in time by its caller.
What a server writes to stderr is always read: a traceback there is an error unless the test declared it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tests.support.prefork import Process, forker

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

GEVENTSTALK = [sys.executable, "-m", "geventstalk"]
TRACEBACK = b"Traceback (most recent call last)"
ROOT = Path(__file__).resolve().parents[2]


def hand_down_no_ignored_signal() -> None:
    """Handles, by doing nothing, the signals that this process ignores, as those of `nohup` or of a shell's `&` do.

    What it starts would ignore them as well; a signal that is handled has its usual meaning there.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # those subprocess resets itself
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def beanstalkd_path() -> str | None:
    """Path of the reference server: $BEANSTALKD, or `beanstalkd` from PATH; None when there is none."""
    return os.environ.get("BEANSTALKD") or shutil.which("beanstalkd")


_reserved: deque[socket.socket] = deque(maxlen=64)
"""Sockets that keep the latest ports from other processes. A test uses a few; a new one closes the oldest."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that no other test gets, although other tests look for one at the same time.

    A bound socket keeps it. A server may bind it all the same, because both allow that their address is used again and
    this one does not listen. The permission comes after the bind, so that the bind finds a free port.
    """
    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if len(_reserved) == _reserved.maxlen:
        _reserved.popleft().close()
    _reserved.append(probe)
    return int(probe.getsockname()[1])


class TracebackFound(AssertionError):
    """A server wrote a traceback that its test had not declared."""


class Log:
    """The file that takes a server's stderr, and what of it is not read yet.

    `expects` is a text that every traceback must hold; None when there must not be any.
    """

    def __init__(self, path: Path | None) -> None:
        self.expects: str | None = None
        # Open for as long as the server runs.
        self.file = tempfile.TemporaryFile() if path is None else path.open("ab+")  # noqa: SIM115
        self._at = self.file.seek(0, os.SEEK_END)

    def check(self) -> None:
        """Reads what is new. Raises TracebackFound."""
        text = os.pread(self.file.fileno(), 1 << 26, self._at)
        self._at += len(text)
        if TRACEBACK in text and (self.expects is None or self.expects.encode() not in text):
            said = text[text.index(TRACEBACK) - min(200, text.index(TRACEBACK)) :]
            raise TracebackFound(f"a server wrote a traceback:\n{said.decode(errors='replace')[-6000:]}")


_unread: list[ServerProcess] = []
"""The servers whose end no test has seen yet."""


# Bug: Clients that were reset stayed for ever, and a traceback on stderr was the only sign; no test read stderr.
def check_logs() -> None:
    """Reads what all servers wrote to stderr since the last time. Raises TracebackFound."""
    for server in list(_unread):
        if server.process.poll() is None:
            server.log.check()
        else:
            server.read_log()


class ServerProcess:
    """A running server. `command` is the program with its leading words, `args` the flags after `-l`/`-p`.

    `python -m` is forked, see prefork.py, unless the server is to be `fresh` or needs an environment of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        args: Sequence[str] = (),
        *,
        unix_path: str | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stderr: Path | None = None,
        fresh: bool = False,
    ) -> None:
        self.unix_path = unix_path
        self.host = host
        self.port = 0 if unix_path else (port or free_port())
        where = ["-l", f"unix:{unix_path}"] if unix_path else ["-l", host, "-p", str(self.port)]
        environment = {**os.environ, **(env or {})}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
        self.log = Log(stderr)
        words = [*command, *where, *args]
        with open(os.devnull, "r+b") as nothing:
            files = [nothing.fileno(), (self.log.file if stderr else nothing).fileno(), self.log.file.fileno()]
            self.process: Process
            if fresh or env or words[:2] != GEVENTSTALK[:2]:
                self.process = subprocess.Popen(
                    words, cwd=cwd, env=environment, stdin=files[0], stdout=files[1], stderr=files[2]
                )
            else:
                self.process = forker(str(ROOT)).start(words, str(cwd or os.getcwd()), environment, files)
        _unread.append(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self, timeout_s: float = 30.0) -> socket.socket:
        """A new connected stream socket with a timeout on each operation."""
        if self.unix_path:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.settimeout(timeout_s)
            try:
                client.connect(self.unix_path)
            except OSError:
                client.close()
                raise
            return client
        client = socket.create_connection((self.host, self.port), timeout=timeout_s)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> ServerProcess:
        """Returns once the server answers a command (not only accepts); fails when it exits or stays silent."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended at start with exit code {self.process.returncode}")
            try:
                with self.connect(timeout_s=max(0.1, deadline - time.monotonic())) as client:
                    client.sendall(b"list-tube-used\r\n")
                    if client.recv(64).startswith(b"USING"):
                        return self
            except OSError:
                time.sleep(0.01)
        raise RuntimeError("server did not answer in time")

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        self.read_log()

    def stop(self) -> int:
        """SIGTERM, and wait for the end; kill -9 when that does not come. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(STOP_TIMEOUT_S)
        self.read_log()
        return code

    def read_log(self) -> None:
        """Reads the last of the log of a server that has ended. Raises TracebackFound."""
        if self in _unread:
            _unread.remove(self)
        if not self.log.file.closed:
            try:
                self.log.check()
            finally:
                self.log.file.close()
