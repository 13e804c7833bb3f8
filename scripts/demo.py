"""Shows that jobs survive `kill -9`: producers and workers go on while the server is killed and started again.

Every client notes what the server acknowledged. The end tells what was lost (an acknowledged job that is nowhere) and
what was invented (a job that no client put, or one that comes back after its delete was acknowledged). A command that
the kill left without an answer may have been carried out or not: the demo counts such commands and accepts both.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import greenstalk

ROOT = Path(__file__).resolve().parents[1]
TUBES = ("mail", "thumbnails", "reports")
WORKERS = 4
SEGMENT_BYTES = 1 << 20  # small, so that the journal rotates and compacts during the demo
LIMIT_S = 60.0  # for a start, an end, and for each half of the work
# greenstalk asserts that a reply is complete; the kill cuts some replies off.
BROKEN = (OSError, AssertionError)

Client = greenstalk.Client[bytes]


class Failed(Exception):
    """The demo cannot come to its end."""


class Ledger:
    """The notes of all clients. A job's body is its name. Threads only add to sets: the interpreter's lock suffices."""

    def __init__(self) -> None:
        self.sent: set[bytes] = set()
        self.put: set[bytes] = set()
        self.unanswered: set[bytes] = set()
        self.deleting: set[bytes] = set()
        self.deleted: set[bytes] = set()
        self.left: list[bytes] = []
        self.invented: list[str] = []

    def seen(self, name: bytes) -> None:
        """Notes a job that the server hands out. A job that must not exist is invented."""
        if name not in self.sent:
            self.invented.append(f"no client put {name[:40]!r}")
        elif name in self.deleted:
            self.invented.append(f"{name!r} comes back after its delete was acknowledged")

    def lost(self) -> list[str]:
        """Returns the jobs that were acknowledged, not deleted, and are not in the server at the end."""
        return [f"{name!r} was lost" for name in sorted(self.put - self.deleting - set(self.left))]


class Server:
    """A server process on a free port of 127.0.0.1 with a journal of its own. Each start is a new process."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self.journal, self.log = directory / "journal", directory / "server.log"
        self.journal.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        options = ["-l", "127.0.0.1", "-p", str(self.port), "-b", str(self.journal), "-s", str(SEGMENT_BYTES)]
        self._command = [*command, *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Starts the server. Returns the seconds until the server answers. Raises Failed."""
        begun = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while time.monotonic() < begun + LIMIT_S:
            self.check()
            with contextlib.suppress(*BROKEN), self.connect() as client:
                client.using()
                return time.monotonic() - begun
            time.sleep(0.01)
        raise Failed("the server does not answer")

    def connect(self, use: str = "default", watch: tuple[str, ...] = TUBES) -> Client:
        return greenstalk.Client(("127.0.0.1", self.port), encoding=None, use=use, watch=watch)

    def check(self) -> None:
        """Raises Failed when the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            words = " | ".join(self.log.read_text(errors="replace").splitlines()[-3:])
            raise Failed(f"the server ended by itself, exit code {self._process.returncode}; its last words: {words}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Clients:
    """Producers and workers, a thread each. A client whose connection breaks connects again."""

    def __init__(self, server: Server, ledger: Ledger, jobs: int) -> None:
        self._server, self._ledger = server, ledger
        self._over = threading.Event()
        share = jobs // len(TUBES)
        self._threads = [threading.Thread(target=self._produce, args=(tube, share), daemon=True) for tube in TUBES]
        self._threads += [threading.Thread(target=self._work, daemon=True) for _ in range(WORKERS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def done(self) -> bool:
        """Returns whether the producers have put all their jobs."""
        return not any(thread.is_alive() for thread in self._threads[: len(TUBES)])

    def _connections(self, use: str = "default") -> Iterator[Client]:
        """Yields a new connection each time that the one before has broken, until the demo is over."""
        while not self._over.is_set():
            with contextlib.suppress(*BROKEN), self._server.connect(use) as client:
                yield client
            time.sleep(0.02)

    def _produce(self, tube: str, jobs: int) -> None:
        names = iter([f"{tube} {number}".encode() for number in range(jobs)])
        for client in self._connections(tube):
            for name in names:
                self._ledger.sent.add(name)
                try:
                    client.put(name)
                except BROKEN:
                    self._ledger.unanswered.add(name)
                    break
                self._ledger.put.add(name)
            else:
                return

    def _work(self) -> None:
        for client in self._connections():
            with contextlib.suppress(*BROKEN):
                while not self._over.is_set():
                    with contextlib.suppress(greenstalk.TimedOutError):
                        self._work_on(client, client.reserve(timeout=1))

    def _work_on(self, client: Client, job: greenstalk.Job[bytes]) -> None:
        self._ledger.seen(job.body)
        self._ledger.deleting.add(job.body)
        client.delete(job)
        self._ledger.deleted.add(job.body)


class Demo:
    """One run. `while_down` is called between the kill and the next start: a test does damage there."""

    def __init__(
        self, jobs: int, command: list[str], while_down: Callable[[Server], None] = lambda server: None
    ) -> None:
        self._jobs, self._command, self._while_down = jobs, command, while_down
        self.ledger = Ledger()

    def run(self) -> int:
        """Returns the exit code: 0 when no job was lost and none was invented."""
        with tempfile.TemporaryDirectory(prefix="geventstalk-demo-") as directory:
            server = Server(self._command, Path(directory))
            try:
                self._play(server)
                faults = [*self.ledger.invented, *self.ledger.lost()]
            except (Failed, OSError, greenstalk.Error) as error:
                faults = [f"the demo did not come to its end: {error}"]
            finally:
                server.kill()
        for text in faults[:20]:
            print(f"FAULT: {text}")
        return 1 if faults else 0

    def _play(self, server: Server) -> None:
        ledger, begun = self.ledger, time.monotonic()
        after = server.start()
        print(f"server started on 127.0.0.1:{server.port}, answered after {after:.2f} s", flush=True)
        clients = Clients(server, ledger, self._jobs)
        try:
            self._wait(server, lambda: len(ledger.put) >= self._jobs // 2)
            server.kill()
            print(f"kill -9 with {len(ledger.put)} jobs put and {len(ledger.deleted)} done", flush=True)
            self._while_down(server)
            print(f"started again, answered after {server.start():.2f} s", flush=True)
            with server.connect() as client:
                self._wait(server, lambda: clients.done() and not waiting(client))
        finally:
            clients.stop()
        seconds = time.monotonic() - begun
        with server.connect() as client, contextlib.suppress(greenstalk.TimedOutError):
            while True:
                job = client.reserve(timeout=0)
                ledger.seen(job.body)
                ledger.left.append(job.body)
        for label, count in (
            ("put and acknowledged", len(ledger.put)),
            ("worked and deleted", len(ledger.deleted)),
            (
                "commands that the kill left without an answer",
                len(ledger.unanswered | ledger.deleting - ledger.deleted),
            ),
            ("lost", len(ledger.lost())),
            ("invented", len(ledger.invented)),
        ):
            print(f"{label}: {count}")
        print(f"{len(ledger.deleted) / seconds:.0f} jobs a second, {seconds:.1f} s in all", flush=True)

    def _wait(self, server: Server, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            server.check()
            if time.monotonic() > deadline:
                raise Failed(f"the clients were not done within {LIMIT_S:.0f} s")
            if sys.stdout.isatty():
                print(f"\r{len(self.ledger.put):,} put, {len(self.ledger.deleted):,} done ", end="", flush=True)
            time.sleep(0.05)


def waiting(client: Client) -> int:
    """Returns how many jobs are ready or reserved."""
    stats = client.stats()
    return int(stats["current-jobs-ready"]) + int(stats["current-jobs-reserved"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=20_000, metavar="N", help="how many jobs (default 20000)")
    parser.add_argument("--server", metavar="COMMAND", help="another server, e.g. beanstalkd (default: geventstalk)")
    options = parser.parse_args()
    if options.jobs < 10:
        parser.error("--jobs must be at least 10")
    command = shlex.split(options.server) if options.server else [sys.executable, "-m", "geventstalk"]
    try:
        return Demo(options.jobs, command).run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
