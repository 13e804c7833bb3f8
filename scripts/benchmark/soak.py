"""The program behind scripts/soak: a mixed workload at half load, for long, and a verdict whether anything grew.

One thread drives all connections in rounds of some pipelined commands; between them it waits, so that the server has
half of what it took without pauses, and a prober of its own measures what a single request waits.
Priorities rise with every job, so that none stays for ever and, where memory has a bound, most come from the disk.
Invariant: one seed decides which commands are sent; nothing but the replies decides how a round goes on. Each body that
comes is the one that was put.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmark import environment, servers
from scripts.benchmark.load import Client, LoadError, unexpected
from scripts.benchmark.servers import Build, Server

FLAGS = ("-b", "{dir}", "-f50", "-s", "200000")
CONNECTIONS = 30
TUBES = 10
JOBS = 5000
BATCH = 20
CALIBRATION_S = 5.0
PROBE_EVERY_S = 0.01
SAMPLE_EVERY_S = 60.0
SAMPLES_MIN = 9
MIB = 1 << 20
FLAT = "flat: memory, descriptors, threads, latency and journal; every body was right; the journal is clean"


class Mixed:
    """Clients that do everything that clients do. A round is one client's part; rounds are drawn from one seed.

    There are some `jobs` in the server from the first round on. With `bounded` memory it may refuse a put.
    """

    def __init__(self, port: int, seed: int, jobs: int, bounded: bool = False) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._jobs = jobs
        self._bounded = bounded
        self.bodies: dict[int, bytes] = {}  # of the jobs that are in the server
        self._puts = 0
        self._last = 1  # the latest job
        self.commands = 0
        self._clients = [self._open() for _ in range(CONNECTIONS)]
        self.kinds = ((self._produce, 40), (self._work, 44), (self._look, 8), (self._kick, 4), (self._churn, 4))
        while len(self.bodies) < jobs:
            self._produce(self._random.randrange(CONNECTIONS))

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def round(self) -> None:
        """One client's turn."""
        draw = self._random
        (step,) = draw.choices([step for step, _ in self.kinds], [weight for _, weight in self.kinds])
        if step == self._produce and len(self.bodies) > self._jobs:
            step = self._work
        step(draw.randrange(CONNECTIONS))

    def _open(self) -> Client:
        client = Client(self._port)
        watched = self._random.sample(range(TUBES), 3)
        self._ask(client, [b"watch mixed-%d\r\n" % number for number in watched])
        return client

    def _ask(self, client: Client, commands: Sequence[bytes]) -> list[list[bytes]]:
        """Sends all commands at once. Returns the words of the first line of each reply."""
        client.sock.sendall(b"".join(commands))
        replies = []
        for _ in commands:
            words = client.line().split()
            if words[0] in (b"RESERVED", b"FOUND", b"OK"):
                data = client.chunk(int(words[-1]))
                if words[0] != b"OK" and data != self.bodies.get(int(words[1]), data):
                    raise LoadError(f"job {int(words[1])} came with the body {data[:40]!r} of {len(data)} bytes")
            replies.append(words)
        self.commands += len(commands)
        return replies

    def _expect(self, replies: list[list[bytes]], *words: bytes) -> None:
        for reply in replies:
            if reply[0] not in words:
                raise unexpected(b" ".join(reply))

    def _produce(self, which: int) -> None:
        draw = self._random
        bodies = []
        puts = []
        for _ in range(draw.randint(1, BATCH)):
            size = draw.choice((0, 10, 64, 300, 2000))
            body = (b"%x." % draw.getrandbits(64) * (size // 2 + 1))[:size]
            delay_s = draw.choice((0, 0, 0, 0, 1, 2))
            ttr_s = draw.choice((1, 2, 60))
            bodies.append(body)
            puts.append(b"put %d %d %d %d\r\n%b\r\n" % (self._priority(), delay_s, ttr_s, len(body), body))
        use = b"use mixed-%d\r\n" % draw.randrange(TUBES)
        using, *replies = self._ask(self._clients[which], [use, *puts])
        self._expect([using], b"USING")
        self._expect(replies, b"INSERTED", *([b"OUT_OF_MEMORY"] if self._bounded else []))
        for words, body in zip(replies, bodies, strict=True):
            if words[0] == b"INSERTED":
                self._last = int(words[1])
                self.bodies[self._last] = body

    def _priority(self) -> int:
        """Jobs leave in about the order in which they come."""
        self._puts += 1
        return self._puts + self._random.randrange(self._jobs)

    def _work(self, which: int) -> None:
        client = self._clients[which]
        draw = self._random
        taken = self._ask(client, [b"reserve-with-timeout 0\r\n"] * draw.randint(1, BATCH))
        self._expect(taken, b"RESERVED", b"TIMED_OUT", b"DEADLINE_SOON")
        commands = []
        for words in taken:
            if words[0] != b"RESERVED":
                continue
            (fate,) = draw.choices(("delete", "release", "bury", "touch", "forget"), (85, 6, 4, 4, 1))
            id = int(words[1])
            if fate == "delete":
                commands.append(b"delete %d\r\n" % id)
            elif fate == "release":
                commands.append(b"release %d %d %d\r\n" % (id, self._priority(), draw.randrange(3)))
            elif fate == "bury":
                commands.append(b"bury %d 5\r\n" % id)
            elif fate == "touch":
                commands += [b"touch %d\r\n" % id, b"delete %d\r\n" % id]
        if commands:
            replies = self._ask(client, commands)
            self._expect(replies, b"DELETED", b"RELEASED", b"BURIED", b"TOUCHED", b"NOT_FOUND")  # its time may be over
            for command, words in zip(commands, replies, strict=True):
                if words[0] == b"DELETED" and self.bodies.pop(int(command.split()[1]), None) is None:
                    raise LoadError(f"{command!r} is answered twice")

    def _look(self, which: int) -> None:
        number = self._random.randrange(TUBES)
        commands = [b"stats-tube mixed-%d\r\n" % number, b"peek-ready\r\n", b"peek-delayed\r\n", b"peek-buried\r\n"]
        commands += [b"peek %d\r\n" % self._random.randint(max(1, self._last - 2 * self._jobs), self._last)] * 2
        replies = self._ask(self._clients[which], [*commands, b"list-tubes\r\n", b"stats\r\n"])
        self._expect(replies, b"OK", b"FOUND", b"NOT_FOUND")

    def _kick(self, which: int) -> None:
        number = self._random.randrange(TUBES)
        self._expect(
            self._ask(self._clients[which], [b"use mixed-%d\r\n" % number, b"kick 50\r\n"]), b"USING", b"KICKED"
        )

    def _churn(self, which: int) -> None:
        """A client goes away, with what it has reserved."""
        self._ask(self._clients[which], [b"reserve-with-timeout 0\r\n"] * 3)
        self._clients[which].close()
        self._clients[which] = self._open()


@dataclass(frozen=True)
class Process:
    """The resources of one process of the server at a moment, and how busy it was."""

    pid: int
    rss_mib: float
    descriptors: int
    threads: int
    busy: float

    def __str__(self) -> str:
        return (
            f"{self.busy * 100:3.0f} % {self.rss_mib:6.1f} MiB {self.descriptors:4d} descriptors {self.threads} threads"
        )


@dataclass(frozen=True)
class Reading:
    """The figures of one interval. The first process is the engine's, the others are fronts."""

    minute: float
    commands_s: float
    processes: tuple[Process, ...]
    p50_ms: float
    p99_ms: float
    worst_ms: float
    journal_mib: float
    segments: int
    memory: dict[str, int]
    """The figures of `stats` about bodies in memory, without "memory-"; empty without a bound."""

    def __str__(self) -> str:
        memory = self.memory and (
            f"  bodies {self.memory['bytes'] / MIB:.2f} MiB, on disk {self.memory['bytes-on-disk'] / MIB:.1f} MiB; "
            f"{self.memory['loads']} came back, {self.memory['puts-refused']} puts refused"
        )
        processes = "; front ".join(map(str, self.processes))
        return (
            f"{self.minute:6.1f} min {self.commands_s:8,.0f} commands/s  server {processes}"
            f"  wait ms p50 {self.p50_ms:.2f} p99 {self.p99_ms:.2f} worst {self.worst_ms:.1f}"
            f"  journal {self.journal_mib:.1f} MiB in {self.segments}{memory or ''}"
        )


class Soak:
    """Drives a server for this long and takes readings."""

    def __init__(self, server: Server, seed: int, seconds: float, jobs: int) -> None:
        self._server = server
        self._prober = Client(server.port)
        self._mixed = Mixed(server.port, seed, jobs, bounded="memory-max" in self._statistics())
        self._seconds = seconds
        self._used_s: dict[int, float] = {}
        self.readings: list[Reading] = []

    def run(self) -> None:
        """Raises LoadError when the server answers what it must not, or does not have the jobs that it must have."""
        pause_s = self._calibrate()
        begun = time.monotonic()
        every_s = min(SAMPLE_EVERY_S, self._seconds / SAMPLES_MIN)
        while (now := time.monotonic()) < begun + self._seconds:
            self.readings.append(self._interval(begun, min(now + every_s, begun + self._seconds), pause_s))
            print(self.readings[-1], flush=True)
        statistics = self._statistics()
        jobs = sum(statistics[f"current-jobs-{state}"] for state in ("ready", "reserved", "delayed", "buried"))
        if jobs != len(self._mixed.bodies):
            raise LoadError(f"the server has {jobs} jobs, not {len(self._mixed.bodies)}")
        self._mixed.close()
        self._prober.close()

    def _calibrate(self) -> float:
        """Goes as fast as it can for a while. Returns how long a round takes on average when half of that is wanted."""
        rounds = 0
        begun = time.monotonic()
        while time.monotonic() < begun + min(CALIBRATION_S, self._seconds / 3):
            self._mixed.round()
            rounds += 1
        return 2 * (time.monotonic() - begun) / rounds

    def _interval(self, begun: float, end: float, round_s: float) -> Reading:
        start = now = due = probe_due = time.monotonic()
        commands = self._mixed.commands
        self._used_s = {pid: servers.cpu_s(pid) for pid in self._server.pids()}
        waits: list[float] = []
        while now < end:
            if now >= probe_due:
                asked = time.perf_counter()
                self._prober.ask(b"list-tube-used\r\n", b"USING")
                waits.append((time.perf_counter() - asked) * 1000)
                probe_due = now + PROBE_EVERY_S
            elif now >= due:
                self._mixed.round()
                due = max(due + round_s, now - 1.0)  # a pause of the machine is made up for, within limits
            else:
                time.sleep(min(due, probe_due) - now)
            now = time.monotonic()
        waits.sort()
        files = list(self._server.directory.iterdir()) if self._server.directory else []
        said = self._statistics()
        return Reading(
            minute=(now - begun) / 60,
            commands_s=(self._mixed.commands - commands) / (now - start),
            processes=tuple(self._process(pid, now - start) for pid in self._server.pids()),
            p50_ms=statistics.median(waits),
            p99_ms=waits[int(len(waits) * 0.99)],
            worst_ms=waits[-1],
            journal_mib=sum(size_of(path) for path in files) / MIB,
            segments=sum(path.suffix == ".db" for path in files),
            memory={name.removeprefix("memory-"): said[name] for name in said if name.startswith("memory-")},
        )

    def _process(self, pid: int, seconds: float) -> Process:
        return Process(
            pid=pid,
            rss_mib=servers.rss_bytes(pid) / MIB,
            descriptors=servers.descriptors(pid),
            threads=servers.threads(pid),
            busy=(servers.cpu_s(pid) - self._used_s.get(pid, 0.0)) / seconds,
        )

    def _statistics(self) -> dict[str, int]:
        """The whole numbers among the server's statistics."""
        size = int(self._prober.ask(b"stats\r\n", b"OK").split()[1])
        pairs = (line.partition(": ") for line in self._prober.chunk(size).decode().splitlines())
        return {name: int(value) for name, _, value in pairs if value.isdigit()}


def size_of(path: Path) -> int:
    """Bytes of a file that may be removed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def faults(readings: Sequence[Reading]) -> list[str]:
    """Returns what grew: the last third of the readings beside the first third, after the first reading."""
    third = max(1, (len(readings) - 1) // 3)
    first, last = readings[1 : 1 + third] or readings, readings[-third:]

    def grew(
        name: str,
        value: Callable[[Reading], float],
        factor: float,
        more: float,
        middle: Callable[[list[float]], float] = statistics.median,
    ) -> str:
        before, after = middle([value(reading) for reading in first]), middle([value(reading) for reading in last])
        return f"{name} grew from {before:.1f} to {after:.1f}" if after > factor * before + more else ""

    found = []
    for at in range(min(len(reading.processes) for reading in readings)):
        whose = f" of front {at}" if at else ""
        found += [
            grew(f"memory{whose}", lambda reading: reading.processes[at].rss_mib, 1.05, 4),  # noqa: B023
            grew(f"descriptors{whose}", lambda reading: reading.processes[at].descriptors, 1.0, 10),  # noqa: B023
            grew(f"threads{whose}", lambda reading: reading.processes[at].threads, 1.0, 2),  # noqa: B023
        ]
    found += [
        # The least, because others on the machine make a wait longer, and only the server makes all of them longer.
        grew("p50", lambda reading: reading.p50_ms, 1.5, 0.2, min),
        grew("p99", lambda reading: reading.p99_ms, 2.0, 2.0, min),
        grew("journal", lambda reading: reading.journal_mib, 1.5, 2),
    ]
    if len({tuple(process.pid for process in reading.processes) for reading in readings}) > 1:
        found.append("processes did not stay the same")
    found += [
        f"bodies took {memory['bytes']} bytes of memory, and {memory['max']} is the bound"
        for memory in [reading.memory for reading in readings]
        if memory and memory["bytes"] > memory["max"]
    ]
    return [fault for fault in found if fault]


def check(build: Build, directory: Path) -> str:
    """Runs `geventstalk journal check`. Returns its last line when it complains, otherwise nothing."""
    command = [*build.command, "journal", "check", str(directory)]
    run = subprocess.run(
        command, cwd=build.cwd, env=servers.surroundings(), capture_output=True, text=True, check=False
    )
    lines = (run.stdout + run.stderr).strip().splitlines() or ["it says nothing"]
    print(f"journal check: {lines[-1]}")
    return "" if run.returncode == 0 else f"journal check ended with {run.returncode}: {lines[-1]}"


def pick(name: str) -> Build:
    """The build to soak: the compiled one where it can be made, unless the pure one is asked for."""
    if name == "compiled" and (made := environment.make()) is not None:
        return made
    return servers.pure(sys.executable)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description="A long mixed workload, and whether anything grew."
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="how long (default 10)")
    parser.add_argument("--seed", type=int, help="repeats the commands of a run (default: drawn, and printed)")
    parser.add_argument("--build", choices=("pure", "compiled"), default="compiled")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"how many stay in it (default {JOBS})")
    parser.add_argument("--io-processes", metavar="N", help="front-end processes, as the server's option")
    parser.add_argument("--max-memory", metavar="BYTES", help="bound of bodies in memory, as the server's option")
    options = parser.parse_args(argv)
    flags = FLAGS
    if options.io_processes is not None:
        flags += ("--io-processes", options.io_processes)
    if options.max_memory is not None:
        flags += ("--max-memory", options.max_memory)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    build = pick(options.build)
    server_core, _ = servers.pin_load()
    print(
        f"{options.minutes:g} minutes, {build.name}, --seed {seed}, {options.jobs} jobs, flags {' '.join(flags)}",
        flush=True,
    )
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="geventstalk-soak-", ignore_cleanup_errors=True) as directory:
        server = Server(build, flags, core=server_core, directory=Path(directory))
        try:
            server.wait_ready()
            soak = Soak(server, seed, options.minutes * 60, options.jobs)
            soak.run()
            found += faults(soak.readings)
        except (LoadError, OSError) as error:
            found.append(str(error))
        except KeyboardInterrupt:
            found.append("interrupted")
        finally:
            code = server.stop()
        if code != 0:
            found.append(f"the server ended with exit code {code}")
        found += [complaint for complaint in [check(build, Path(directory))] if complaint]
    for fault in found:
        print(f"FAULT: {fault}")
    print("verdict: " + ("FAILED" if found else FLAT))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
