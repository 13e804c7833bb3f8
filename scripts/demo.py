"""Shows geventstalk at work: producers and workers go on while the server is killed with kill -9 and started again.

Every client notes in one ledger what it was promised, so at the end it can be said for certain what was lost (a put
that was acknowledged, and the job is nowhere) and what was invented (a job that nobody put, or that comes back after
it was done). Delivery is at least once: what a client asked for and got no answer to, because the server died, may
or may not have happened, and is counted apart.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import greenstalk
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
TUBES = ("mail", "thumbnails", "reports")
WORKERS = 4
SEGMENT_BYTES = 1 << 20  # a tenth of the default, so that the journal rotates and compacts while it is watched
TTR_S = 600  # longer than the demo: no job may change hands because its time ran out
AHEAD = 2000  # jobs that producers may be ahead of the workers, so that half-way is half-way for both
EARLY_S = 0.05  # by how much a wall clock may be adjusted between a delay's beginning and its end
TRACEBACK = "Traceback (most recent call last)"
RESTART_LIMIT_S = 20.0
REPLY_LIMIT_S = 30.0
STANDSTILL_S = 30.0
SHOWN_FAULTS = 20

WORK, RETRY, BURY = "work", "retry", "bury"

Client = greenstalk.Client[bytes]
# What greenstalk raises when the server is gone: it asserts that a line is complete, and one may be cut off.
BROKEN = (OSError, AssertionError)


# The plan: which jobs there will be


@dataclass(frozen=True)
class Plan:
    """One job to put. `fate` is what a worker does with it: work it, hand it back once and then work it, bury it."""

    number: int
    tube: str
    priority: int
    delay: int
    fate: str
    payload: bytes


def make_plan(jobs: int, seed: int) -> list[Plan]:
    """The jobs of one demo, the same for the same seed."""
    rng = random.Random(seed)
    plan = []
    for number in range(jobs):
        priority = rng.choice((0, 10, 1024, rng.randrange(2**32)))
        delay = rng.choice((1, 2, 3)) if rng.random() < 0.1 else 0
        fate = rng.choices((WORK, RETRY, BURY), weights=(93, 5, 2))[0]
        payload = rng.randbytes(rng.randrange(300))
        plan.append(Plan(number, TUBES[number % len(TUBES)], priority, delay, fate, payload))
    return plan


# The ledger: what is known for certain


@dataclass
class Entry:
    """What the clients know of one put. A life of the server lasts from a start to its end; lives count from 1."""

    name: str
    body: bytes
    fate: str
    due: float
    job_id: int | None = None  # from the acknowledgement
    unanswered: bool = False
    deliveries: int = 0
    life: int = 0  # of the last delivery
    held: bool = False
    in_doubt: str | None = None  # the last command that would give the job away and was not answered
    settled: str | None = None  # "worked" or "buried", acknowledged
    settled_in: int = 0
    found: bool = False  # in the server at the end

    @property
    def arrived(self) -> bool:
        """Whether the server is known to have had it."""
        return self.job_id is not None or self.deliveries > 0 or self.found


class Ledger:
    """The notes of all clients: each is made before a command is sent, or after its reply.

    A name stands for one put and is the first word of the job's body; a put that is tried again gets another name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: dict[str, Entry] = {}
        self.ids: dict[int, str] = {}
        self.acknowledged = 0
        self.settled = 0
        self.redelivered = 0
        self.invented: list[str] = []
        self.complaints: list[str] = []

    def putting(self, plan: Plan, attempt: int) -> bytes:
        """A put is about to be sent. Returns the body to send."""
        name = f"{plan.number}.{attempt}"
        body = name.encode() + b" " + plan.payload
        with self._lock:
            self.entries[name] = Entry(name, body, plan.fate, due=time.monotonic() + plan.delay)
        return body

    def put(self, body: bytes, job_id: int) -> None:
        """The put was acknowledged."""
        with self._lock:
            entry = self.entries[name_of(body)]
            entry.job_id = job_id
            self.acknowledged += 1
            other = self.ids.setdefault(job_id, entry.name)
            if other != entry.name:
                self.complaints.append(f"id {job_id} was given to the jobs {other} and {entry.name}")

    def put_unanswered(self, body: bytes) -> None:
        """The connection broke before the answer: the job may be there or not."""
        with self._lock:
            self.entries[name_of(body)].unanswered = True

    def delivered(self, job_id: int, body: bytes, life: int) -> Entry | None:
        """A job was reserved. None when it is not to be worked: nobody put it, or this note comes a life late."""
        now = time.monotonic()
        with self._lock:
            entry = self._known(job_id, body)
            if entry is None:
                return None
            entry.deliveries += 1
            if life < entry.life:
                return None
            if entry.settled and life >= entry.settled_in:
                self.invented.append(f"job {entry.name} came back after it was {entry.settled}")
            if entry.held and life == entry.life:
                self.complaints.append(f"job {entry.name} was given to two workers at once")
            if entry.in_doubt != "release" and now < entry.due - EARLY_S:
                self.complaints.append(f"job {entry.name} came {entry.due - now:.3f} s too early")
            self.redelivered += entry.held or entry.in_doubt is not None
            entry.life, entry.held, entry.in_doubt = life, True, None
            return entry

    def leaving(self, entry: Entry, command: str, delay: int = 0) -> None:
        """A command is about to be sent that gives the job away: `release`, `delete` or `bury`."""
        with self._lock:
            entry.held, entry.in_doubt, entry.due = False, command, time.monotonic() + delay

    def left(self, entry: Entry, settled: str | None = None) -> None:
        """That command was acknowledged; `settled` says what the job is when it is done with."""
        with self._lock:
            entry.in_doubt = None
            if settled:
                self.settled += entry.settled is None
                entry.settled, entry.settled_in = settled, entry.life

    def found(self, job_id: int, body: bytes, state: str) -> None:
        """The job was in the server at the end, `ready` or `buried`."""
        with self._lock:
            entry = self._known(job_id, body)
            if entry is None:
                return
            if entry.found:
                self.invented.append(f"job {entry.name} is there twice at the end")
            entry.found = True
            buried = entry.settled == "buried" or (entry.settled is None and entry.in_doubt == "bury")
            if state == "buried" and buried:
                return
            if entry.settled:
                self.invented.append(f"job {entry.name} was {entry.settled}, and is {state} at the end")
            else:
                self.complaints.append(f"job {entry.name} is {state} at the end, and no worker got it")

    def complain(self, text: str) -> None:
        """Anything else that must not happen."""
        with self._lock:
            self.complaints.append(text)

    def lost(self) -> list[str]:
        """Jobs that the server had, and that were neither worked nor are there; known when all was found().

        A job whose delete got no answer was worked all the same: it is gone, or it was delivered again.
        """
        gone = [entry for entry in self.entries.values() if entry.arrived and not entry.found]
        return [entry.name for entry in gone if entry.settled != "worked" and entry.in_doubt != "delete"]

    def count(self, condition: Callable[[Entry], object]) -> int:
        """How many puts are so."""
        return sum(1 for entry in self.entries.values() if condition(entry))

    def _known(self, job_id: int, body: bytes) -> Entry | None:
        entry = self.entries.get(name_of(body))
        if entry is None or entry.body != body:
            self.invented.append(f"job {job_id} was never put: {body[:40]!r}")
            return None
        if entry.job_id not in (None, job_id):
            self.invented.append(f"job {entry.name} came as {job_id}, but its put was told {entry.job_id}")
        return entry


def name_of(body: bytes) -> str:
    """The name of a put, from its job's body."""
    return body.partition(b" ")[0].decode("ascii", "replace")


# The server


class ServerError(Exception):
    """The server cannot be started, or ended when nobody told it to."""


class Over(Exception):
    """The demo ends: a thread has nothing more to do."""


class Server:
    """A server process on a free port of 127.0.0.1, its journal in a directory of its own."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self.journal = directory / "journal"
        self.journal.mkdir()
        self.log = directory / "server.log"
        self.life = 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address: tuple[str, int] = probe.getsockname()
        host, port = self.address
        self._command = [*command, "-l", host, "-p", str(port), "-b", str(self.journal), "-s", str(SEGMENT_BYTES)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Begins the next life. Returns after how many seconds the server answered."""
        # Counted before anybody can connect, so a client that asks after it is connected is never told too little.
        self.life += 1
        begun = time.monotonic()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        while time.monotonic() < begun + RESTART_LIMIT_S:
            self.check()
            with contextlib.suppress(OSError), self.connect() as client:
                client.using()
                return time.monotonic() - begun
            time.sleep(0.01)
        raise ServerError(f"the server did not answer within {RESTART_LIMIT_S:.0f} s{self._said()}")

    def connect(self, use: str = "default", watch: tuple[str, ...] = ("default",)) -> Client:
        """A new client. Raises OSError while there is no server."""
        connection = socket.create_connection(self.address, REPLY_LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return greenstalk.Client(connection, encoding=None, use=use, watch=watch)
        except BaseException:
            connection.close()
            raise

    def check(self) -> None:
        """Raises ServerError when the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise ServerError(f"the server ended by itself, exit code {self._process.returncode}{self._said()}")

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """SIGTERM. Returns the exit code. Raises ServerError when the server goes on, or ever wrote a traceback."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(RESTART_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"the server did not end within {RESTART_LIMIT_S:.0f} s after SIGTERM") from error
        said = self.log.read_text(errors="replace")
        if TRACEBACK in said:
            raise ServerError(f"the server wrote a traceback:\n{said[said.index(TRACEBACK) :]}")
        return code

    def _said(self) -> str:
        text = self.log.read_text(errors="replace").strip()
        return "; its last words: " + " | ".join(text.splitlines()[-3:]) if text else ""


# The clients


class Crew:
    """Producers and workers, a thread each, which connect again by themselves when the server is gone."""

    def __init__(self, server: Server, ledger: Ledger, plan: list[Plan]) -> None:
        self._server = server
        self._ledger = ledger
        self._over = threading.Event()
        self._producers = [
            self._thread(f"producer {n}", self._produce, tube, [job for job in plan if job.tube == tube])
            for n, tube in enumerate(TUBES, 1)
        ]
        self._workers = [self._thread(f"worker {n}", self._work) for n in range(1, WORKERS + 1)]

    def start(self) -> None:
        for thread in (*self._producers, *self._workers):
            thread.start()

    def produced(self) -> bool:
        """Whether all producers are done."""
        return not any(thread.is_alive() for thread in self._producers)

    def finish(self) -> None:
        """Ends all threads."""
        self._over.set()
        for thread in (*self._producers, *self._workers):
            if thread.ident is not None:  # it was started
                thread.join(REPLY_LIMIT_S)

    def _thread(self, name: str, work: Callable[..., None], *args: object) -> threading.Thread:
        def guarded() -> None:
            try:
                with contextlib.suppress(Over):
                    work(*args)
            except (greenstalk.Error, ServerError) as error:
                self._ledger.complain(f"{name} gave up: {type(error).__name__} {error}")

        return threading.Thread(target=guarded, name=name, daemon=True)

    def _connect(self, **tubes: Any) -> tuple[Client, int]:
        """A new client and the life of the server it is connected to; waits while there is no server."""
        deadline = time.monotonic() + RESTART_LIMIT_S
        while time.monotonic() < deadline:
            if self._over.is_set():
                raise Over
            with contextlib.suppress(*BROKEN):
                return self._server.connect(**tubes), self._server.life
            time.sleep(0.02)
        raise ServerError("nobody answers")

    def _reconnect(self, client: Client, life: int, **tubes: Any) -> tuple[Client, int]:
        client.close()
        fresh, next_life = self._connect(**tubes)
        if next_life == life:
            self._ledger.complain("a connection broke although the server was not killed")
        return fresh, next_life

    def _produce(self, tube: str, plan: list[Plan]) -> None:
        client, life = self._connect(use=tube)
        for job in plan:
            for attempt in itertools.count():
                while self._ledger.acknowledged - self._ledger.settled > AHEAD and not self._over.is_set():
                    time.sleep(0.002)
                if self._over.is_set():
                    return client.close()
                body = self._ledger.putting(job, attempt)
                try:
                    job_id = client.put(body, job.priority, job.delay, TTR_S)
                except BROKEN:
                    self._ledger.put_unanswered(body)
                    client, life = self._reconnect(client, life, use=tube)
                else:
                    self._ledger.put(body, job_id)
                    break
        client.close()

    def _work(self) -> None:
        client, life = self._connect(watch=TUBES)
        while not self._over.is_set():
            try:
                job = client.reserve(timeout=1)
                entry = self._ledger.delivered(job.id, job.body, life)
                if entry is None:
                    client.delete(job)
                else:
                    self._give_away(client, job, entry)
            except greenstalk.TimedOutError:
                continue
            except greenstalk.NotFoundError:
                self._ledger.complain(f"{threading.current_thread().name} lost a job that it had reserved")
            except BROKEN:
                client, life = self._reconnect(client, life, watch=TUBES)
        client.close()

    def _give_away(self, client: Client, job: greenstalk.Job[bytes], entry: Entry) -> None:
        if entry.fate == BURY:
            self._ledger.leaving(entry, "bury")
            client.bury(job)
            self._ledger.left(entry, "buried")
        elif entry.fate == RETRY and entry.deliveries == 1:
            delay = job.id % 2
            self._ledger.leaving(entry, "release", delay)
            client.release(job, priority=job.id, delay=delay)
            self._ledger.left(entry)
        else:
            self._ledger.leaving(entry, "delete")
            client.delete(job)
            self._ledger.left(entry, "worked")


def collect(server: Server, ledger: Ledger) -> None:
    """Tells the ledger of every job that is still in the server."""
    with server.connect(watch=TUBES) as client:
        while _take(client, ledger, "ready"):
            pass
        for tube in TUBES:
            client.use(tube)
            while client.kick(1000):
                while _take(client, ledger, "buried"):
                    pass


def _take(client: Client, ledger: Ledger, state: str) -> bool:
    try:
        job = client.reserve(timeout=0)
    except greenstalk.TimedOutError:
        return False
    ledger.found(job.id, job.body, state)
    client.delete(job)
    return True


# What is seen


class Screen:
    """Bars on a terminal, lines elsewhere."""

    def __init__(self, jobs: int) -> None:
        self._console = Console(highlight=False)
        self._jobs = jobs
        self._shown = 0
        self._bars = Progress(
            TextColumn("{task.description:<6}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._put = self._bars.add_task("put", total=jobs)
        self._done = self._bars.add_task("done", total=jobs)

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def say(self, text: str, style: str = "") -> None:
        """One line of what happens."""
        if self._console.is_terminal:
            self._bars.console.print(Text(text, style), soft_wrap=True)
        else:
            print(text, flush=True)

    def progress(self, put: int, done: int) -> None:
        """How far it is."""
        self._bars.update(self._put, completed=put)
        # A put that got no answer and was tried again may be there twice.
        self._bars.update(self._done, completed=done, total=max(self._jobs, done))
        if not self._console.is_terminal and done * 10 // self._jobs > self._shown:
            self._shown = done * 10 // self._jobs
            print(f"put {put} of {self._jobs}, done {done}", flush=True)

    def summary(self, rows: list[tuple[str, int, str]]) -> None:
        """The result: what, how many, and whether that is good or bad."""
        if not self._console.is_terminal:
            for label, number, _ in rows:
                print(f"{label}: {number}")
            return
        table = Table(box=box.ROUNDED, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for label, number, style in rows:
            table.add_row(label, f"{number:,}", style=style)
        self._console.print(table)


def summary(ledger: Ledger) -> list[tuple[str, int, str]]:
    """The rows of the result. The last three must be 0."""
    lost = len(ledger.lost())
    rows = [
        ("put and acknowledged", ledger.acknowledged, ""),
        ("put, unanswered because of the kill, and tried again", ledger.count(lambda e: e.unanswered), ""),
        ("  of these in the server all the same", ledger.count(lambda e: e.unanswered and e.arrived), ""),
        ("worked and deleted", ledger.count(lambda e: e.settled == "worked"), ""),
        ("worked, delete unanswered", ledger.count(lambda e: not e.settled and e.in_doubt == "delete"), ""),
        ("buried, and there at the end", ledger.count(lambda e: e.found and e.settled != "worked"), ""),
        (
            "handed back by a worker and delivered again",
            ledger.count(lambda e: e.fate == RETRY and e.deliveries > 1),
            "",
        ),
        ("in a worker's hands at the kill and delivered again", ledger.redelivered, ""),
    ]
    for label, number in (("lost", lost), ("invented", len(ledger.invented)), ("other faults", len(ledger.complaints))):
        rows.append((label, number, "bold red" if number else "bold green"))
    return rows


# The demo


@dataclass
class Demo:
    """One run. `while_down` is called between the kill and the next start: a test does damage there."""

    jobs: int
    seed: int
    keep: bool = False
    command: list[str] = field(default_factory=lambda: [sys.executable, "-m", "geventstalk"])
    while_down: Callable[[Server], None] = lambda server: None
    ledger: Ledger = field(default_factory=Ledger)

    def run(self) -> int:
        """Returns the exit code: 0 only when nothing was lost, nothing invented and nothing else was wrong."""
        directory = Path(tempfile.mkdtemp(prefix="geventstalk-demo-"))
        server = Server(self.command, directory)
        screen = Screen(self.jobs)
        crew = Crew(server, self.ledger, make_plan(self.jobs, self.seed))
        try:
            failure = self._attempt(server, crew, screen)
        except BaseException:  # Ctrl-C
            if not self.keep:
                shutil.rmtree(directory)
            raise
        faults = [*self.ledger.complaints, *self.ledger.invented]
        if failure:  # nobody has counted what is left, so there is nothing to sum up
            faults.insert(0, failure)
        else:
            faults += [f"job {name} was lost" for name in self.ledger.lost()]
            screen.summary(summary(self.ledger))
        for text in faults[:SHOWN_FAULTS]:
            screen.say(f"FAULT: {text}", "red")
        if self.keep or faults:
            screen.say(f"journal and log are kept in {directory}")
        else:
            shutil.rmtree(directory)
        return 1 if faults else 0

    def _attempt(self, server: Server, crew: Crew, screen: Screen) -> str | None:
        """Plays, and ends all threads and the server in any case. Returns why it could not come to its end."""
        try:
            with screen:
                self._play(server, crew, screen)
        except (ServerError, OSError, greenstalk.Error) as error:
            return f"the demo did not come to its end: {error}"
        finally:
            crew.finish()
            server.kill()
        return None

    def _play(self, server: Server, crew: Crew, screen: Screen) -> None:
        begun = time.monotonic()
        after = server.start()
        screen.say(f"server started on {server.address[0]}:{server.address[1]}, answered after {after:.2f} s")
        screen.say(f"{len(TUBES)} producers, {WORKERS} workers, {self.jobs} jobs, --seed {self.seed}")
        crew.start()
        self._watch(server, crew, screen, lambda: self.ledger.acknowledged >= self.jobs // 2)
        server.kill()
        put, done = self.ledger.acknowledged, self.ledger.settled
        screen.say(f"kill -9 with {put} jobs put and {done} done", "bold yellow")
        self.while_down(server)
        screen.say(f"started again, answered after {server.start():.2f} s", "bold yellow")
        with server.connect() as client:
            self._watch(server, crew, screen, lambda: crew.produced() and is_empty(client))
        seconds = time.monotonic() - begun
        crew.finish()
        server.kill()
        after = server.start()
        screen.say(f"all done; kill -9 once more, started again, answered after {after:.2f} s", "bold yellow")
        collect(server, self.ledger)
        code = server.stop()
        if code not in (0, -signal.SIGTERM):
            self.ledger.complain(f"the server ended with exit code {code} after SIGTERM")
        screen.say(f"{self.jobs / seconds:.0f} jobs a second, {seconds:.1f} s in all")

    def _watch(self, server: Server, crew: Crew, screen: Screen, reached: Callable[[], bool]) -> None:
        """Returns when `reached`; raises ServerError when the server ends, or nothing moves for too long."""
        moved, before = time.monotonic(), (0, 0)
        while not reached():
            server.check()
            now = (self.ledger.acknowledged, self.ledger.settled)
            screen.progress(*now)
            if now != before:
                moved, before = time.monotonic(), now
            elif time.monotonic() > moved + STANDSTILL_S:
                raise ServerError(f"nothing moved for {STANDSTILL_S:.0f} s")
            time.sleep(0.02)
        screen.progress(self.ledger.acknowledged, self.ledger.settled)


def is_empty(client: Client) -> bool:
    """Whether no job is ready, delayed or reserved."""
    stats = client.stats()
    return not stats["current-jobs-ready"] + stats["current-jobs-delayed"] + stats["current-jobs-reserved"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=20_000, metavar="N", help="how many jobs (default 20000)")
    parser.add_argument("--seed", type=int, metavar="N", help="repeats a run's jobs (default: drawn, and printed)")
    parser.add_argument("--keep", action="store_true", help="keep journal and log also when all is well")
    parser.add_argument("--server", metavar="COMMAND", help="another server, e.g. beanstalkd (default: geventstalk)")
    parser.add_argument(
        "--cluster", action="store_true", help="two nodes on two servers of PostgreSQL; one of each dies"
    )
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    demo: Any
    if options.cluster:
        from demo_cluster import Demo as ClusterDemo  # it needs what the tests need

        demo = ClusterDemo(seed, lambda text: print(text, flush=True), keep=options.keep)
    else:
        demo = Demo(options.jobs, seed, options.keep)
        if options.server:
            demo.command = shlex.split(options.server)
    try:
        return demo.run()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
