"""Starts servers of tests as forks of one process that has imported the product.

An interpreter with the product's modules takes 0.1 s of processor time to start, with HTTP 0.25 s, and a run of all
tests starts a thousand servers. A fork takes a tenth of that. From there on it is as `python -m` would have it: its
arguments, environment, directory, standard streams, exit code and end.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

_ORDER_BYTES_MAX = 1 << 17


class Process(Protocol):
    """The part of a Popen that tests of servers use."""

    args: Any
    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...


class Fork:
    """A forked process, as a Popen. Its parent, which keeps its exit code until it is asked, is the Forker's."""

    def __init__(self, args: Sequence[str], pid: int, forker: Forker) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._forker = forker

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forker.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # another thread has just polled
                end = os.pidfd_open(self.pid)
                try:
                    if not select.select([end], [], [], timeout)[0]:
                        assert timeout is not None
                        raise subprocess.TimeoutExpired(list(self.args), timeout)
                finally:
                    os.close(end)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Forker:
    """The process that forks, one for each process of tests. It ends with this one, and its forks with it."""

    def __init__(self, root: str) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.prefork", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=root, env=os.environ | {"PYTHONPATH": root}, pass_fds=[theirs.fileno()]
            )
        atexit.register(self.end)

    def ask(self, order: dict[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:  # tests ask from several threads
            socket.send_fds(self._socket, [json.dumps(order).encode()], files)
            answer = self._socket.recv(_ORDER_BYTES_MAX)
        assert answer, "the process that forks has ended"
        return json.loads(answer)

    def end(self) -> None:
        """Ends the process and all of its forks."""
        self._socket.close()
        self._process.wait()

    def start(self, args: Sequence[str], cwd: str, environment: dict[str, str], files: Sequence[int]) -> Fork:
        """Starts `python -m` with the words behind that. `files` become its stdin, stdout and stderr."""
        order = {"args": list(args), "cwd": cwd, "environment": environment}
        return Fork(args, self.ask(order, files), self)


@cache
def forker(root: str) -> Forker:
    return Forker(root)


def serve(orders: socket.socket) -> None:
    """Forks on order. Returns in a fork, when that has become what was ordered."""
    codes: dict[int, int | None] = {}  # exit codes of all forks
    while True:
        message, files, _, _ = socket.recv_fds(orders, _ORDER_BYTES_MAX, 3)
        if not message:
            for pid in (pid for pid, code in codes.items() if code is None):
                os.kill(pid, signal.SIGKILL)
            return
        order = json.loads(message)
        answer: int | None
        if "ended" in order:
            pid = order["ended"]
            if codes[pid] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
            answer = codes[pid]
        else:
            answer = os.fork()
            if not answer:
                orders.close()
                become(order, files)
                return
            codes[answer] = None
        for file in files:
            os.close(file)
        orders.send(json.dumps(answer).encode())


def become(order: dict[str, Any], files: Sequence[int]) -> None:
    """Does what `python -m` does. Raises SystemExit."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    _, _, module, *words = order["args"]
    sys.orig_argv[:] = order["args"]
    sys.argv[:] = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    modules = "cli.serve cli.again config_schedules http.site remote.api serving.clustered serving.server serving.tls"
    for name in (*(f"geventstalk.{module}" for module in modules.split()), "click", "runpy", "tests.support.shapes"):
        importlib.import_module(name)
    gc.freeze()  # a fork's first collection of garbage looks at none of this, so that its memory stays shared
    with socket.socket(fileno=int(sys.argv[1])) as given:
        serve(given)
