"""The servers that are measured, as child processes on a core of their own, and what the system knows about them.

Invariant: a server runs on the first core and everything that loads it on the last, so neither takes time from the
other; every server that was started is ended by its own pid.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmark.load import Client, LoadError

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
TRACEBACK = "Traceback (most recent call last)"
REFERENCE = "beanstalkd"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Build:
    """A server that can be started: its name in tables, the command without flags, the folder to start it in."""

    name: str
    command: tuple[str, ...]
    cwd: Path


def beanstalkd() -> Build | None:
    """The reference: $BEANSTALKD, or beanstalkd from PATH; None when there is none."""
    path = os.environ.get("BEANSTALKD") or shutil.which("beanstalkd")
    return Build(REFERENCE, (path,), Path("/")) if path else None


def pure(python: str) -> Build:
    """This tree as it is, run by an interpreter that has what it needs."""
    return Build("pure", (python, "-m", "geventstalk"), ROOT)


def compiled(python: str) -> Build:
    """Returns what is installed in the environment of an interpreter."""
    return Build("compiled", (python, "-m", "geventstalk"), Path("/"))


def surroundings() -> dict[str, str]:
    """The environment for a build: without PYTHONPATH, which would put this tree before what is installed."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def is_compiled(build: Build) -> bool:
    """Returns whether the core of a build of geventstalk is machine code. Raises OSError when it cannot be started."""
    question = "import geventstalk.core.engine as e; print(e.__file__)"
    command = [build.command[0], "-c", question]
    run = subprocess.run(command, cwd=build.cwd, env=surroundings(), capture_output=True, text=True, check=False)
    if run.returncode:
        raise OSError(run.stderr.strip().splitlines()[-1] if run.stderr.strip() else "it cannot be imported")
    return not run.stdout.strip().endswith(".py")


def pin_load() -> tuple[int, int]:
    """Pins this process to the last core it may use, and raises its limit of descriptors. Returns both cores."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    return cores[0], cores[-1]


class Server:
    """A running server on 127.0.0.1. `flags` may hold {dir}, the journal's directory."""

    def __init__(
        self, build: Build, flags: tuple[str, ...] = (), *, core: int | None = None, directory: Path | None = None
    ) -> None:
        self.build = build
        self.directory = directory
        self.port = free_port()
        words = [flag.replace("{dir}", str(directory)) for flag in flags]
        command = [*build.command, "-l", "127.0.0.1", "-p", str(self.port), *words]
        own = os.sched_getaffinity(0)
        self.started_s = time.monotonic()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # open for as long as the server runs
        try:
            if core is not None:
                os.sched_setaffinity(0, {core})  # a child begins where its parent is
            self._process = subprocess.Popen(
                command,
                cwd=build.cwd,
                env=surroundings(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
            )
        finally:
            os.sched_setaffinity(0, own)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> float:
        """Returns once a command is answered: the seconds since the start. Raises LoadError when that does not come."""
        while time.monotonic() < self.started_s + START_LIMIT_S:
            if self._process.poll() is not None:
                raise LoadError(f"{self.build.name} ended at start with exit code {self._process.returncode}")
            with contextlib.suppress(OSError), Client(self.port) as client:
                client.ask(b"list-tube-used\r\n", b"USING default")
                return time.monotonic() - self.started_s
            time.sleep(0.005)
        raise LoadError(f"{self.build.name} did not answer within {START_LIMIT_S:.0f} s")

    def pids(self) -> list[int]:
        """The server's process, and its front-end processes in the order of their start."""
        return [self.pid, *sorted(map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()))]

    def cpu_s(self) -> float:
        """Seconds of processor time that its threads have used."""
        return cpu_s(self.pid)

    def rss_bytes(self) -> int:
        """Memory that it has in RAM."""
        return rss_bytes(self.pid)

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """kill -9, and wait for the end. Raises LoadError when the server had written a traceback."""
        self._process.kill()
        self._process.wait(STOP_LIMIT_S)
        self._read()

    def stop(self) -> int:
        """SIGTERM, and wait for the end; kill -9 when that does not come. Returns the exit code.

        Raises LoadError when the server had written a traceback.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._read()
        return int(self._process.returncode)

    def _read(self) -> None:
        if self._said.closed:
            return
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        self._said.close()
        if TRACEBACK in said:
            raise LoadError(f"{self.build.name} wrote a traceback:\n{said[said.index(TRACEBACK) :][:3000]}")


@contextlib.contextmanager
def serving(build: Build, flags: tuple[str, ...] = (), *, core: int | None = None) -> Iterator[Server]:
    """A server that answers, in a journal's directory of its own if its flags name one; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="geventstalk-bench-", ignore_cleanup_errors=True) as directory:
        server = Server(build, flags, core=core, directory=Path(directory))
        try:
            server.wait_ready()
            yield server
        finally:
            server.kill()


def cpu_s(pid: int) -> float:
    """Seconds of processor time that the threads of a process have used."""
    used_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread may end meanwhile
            used_ns += int((task / "schedstat").read_text().split()[0])
    return used_ns / 1e9


@dataclass(frozen=True)
class Spent:
    """Processor time that a process has used: all of it in seconds, and two shares in ticks of the system's clock."""

    all_s: float
    user: int
    system: int

    def since(self, before: Spent) -> tuple[float, float]:
        """Seconds that it has used since then, and those in user space, of which the ticks tell the share."""
        user, system = self.user - before.user, self.system - before.system
        spent_s = self.all_s - before.all_s
        return spent_s, spent_s * user / max(1, user + system)


def spent(pid: int) -> Spent:
    """Returns what a process has used by now."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Spent(cpu_s(pid), int(words[11]), int(words[12]))


def rss_bytes(pid: int) -> int:
    """Memory that a process has in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def descriptors(pid: int) -> int:
    """Returns how many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine() -> str:
    """This machine in one line."""
    model = "unknown processor"
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES / 2**30
    system = os.uname()
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB, {system.sysname} {system.release}, Python {python}"
