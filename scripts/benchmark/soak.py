"""The program behind scripts/soak: a mixed workload at half load, for long, and a verdict whether anything grew.

One thread drives all connections in rounds of some pipelined commands; between them it waits, so that the server has
half of what it took without pauses, and a prober of its own measures what a single request waits.
Invariant: one seed decides which commands are sent; nothing but the replies decides how a round goes on.
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
JOBS_AIM = 5000
BATCH = 20
CALIBRATION_S = 5.0
PROBE_EVERY_S = 0.01
SAMPLE_EVERY_S = 60.0
SAMPLES_MIN = 9
MIB = 1 << 20


class Mixed:
    """Clients that do everything that clients do. A round is one client's part; rounds are drawn from one seed."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._estimate = 0  # jobs in the server, as far as puts and deletes tell
        self.commands = 0
        self._clients = [self._open() for _ in range(CONNECTIONS)]
        self.kinds = ((self._produce, 40), (self._work, 44), (self._look, 8), (self._kick, 4), (self._churn, 4))

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def round(self) -> None:
        """One client's turn."""
        draw = self._random
        (step,) = draw.choices([step for step, _ in self.kinds], [weight for _, weight in self.kinds])
        if step == self._produce and self._estimate > JOBS_AIM:
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
                client.chunk(int(words[-1]))
            replies.append(words)
        self.commands += len(commands)
        return replies

    def _expect(self, replies: list[list[bytes]], *words: bytes) -> None:
        for reply in replies:
            if reply[0] not in words:
                raise unexpected(b" ".join(reply))

    def _produce(self, which: int) -> None:
        draw = self._random
        puts = []
        for _ in range(draw.randint(1, BATCH)):
            body = b"x" * draw.choice((0, 10, 64, 300, 2000))
            delay_s = draw.choice((0, 0, 0, 0, 1, 2))
            ttr_s = draw.choice((1, 2, 60))
            puts.append(b"put %d %d %d %d\r\n%b\r\n" % (draw.randrange(2000), delay_s, ttr_s, len(body), body))
        use = b"use mixed-%d\r\n" % draw.randrange(TUBES)
        replies = self._ask(self._clients[which], [use, *puts])
        self._expect(replies, b"USING", b"INSERTED")
        self._estimate += len(puts)

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
                commands.append(b"release %d %d %d\r\n" % (id, draw.randrange(2000), draw.randrange(3)))
            elif fate == "bury":
                commands.append(b"bury %d 5\r\n" % id)
            elif fate == "touch":
                commands += [b"touch %d\r\n" % id, b"delete %d\r\n" % id]
        if commands:
            replies = self._ask(client, commands)
            self._expect(replies, b"DELETED", b"RELEASED", b"BURIED", b"TOUCHED", b"NOT_FOUND")  # its time may be over
            self._estimate -= sum(words[0] == b"DELETED" for words in replies)

    def _look(self, which: int) -> None:
        number = self._random.randrange(TUBES)
        commands = [b"stats-tube mixed-%d\r\n" % number, b"peek-ready\r\n", b"peek-delayed\r\n", b"peek-buried\r\n"]
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
class Reading:
    """What one interval showed."""

    minute: float
    commands_s: float
    rss_mib: float
    descriptors: int
    p50_ms: float
    p99_ms: float
    worst_ms: float
    journal_mib: float
    segments: int
    busy: float

    def __str__(self) -> str:
        return (
            f"{self.minute:6.1f} min {self.commands_s:8,.0f} commands/s  server {self.busy * 100:3.0f} % busy  "
            f"{self.rss_mib:6.1f} MiB  {self.descriptors:4d} descriptors  wait ms p50 {self.p50_ms:.2f} "
            f"p99 {self.p99_ms:.2f} worst {self.worst_ms:.1f}  journal {self.journal_mib:.1f} MiB in {self.segments}"
        )


class Soak:
    """Drives a server for so long and takes readings."""

    def __init__(self, server: Server, seed: int, seconds: float) -> None:
        self._server = server
        self._mixed = Mixed(server.port, seed)
        self._prober = Client(server.port)
        self._seconds = seconds
        self.readings: list[Reading] = []

    def run(self) -> None:
        pause_s = self._calibrate()
        begun = time.monotonic()
        every_s = min(SAMPLE_EVERY_S, self._seconds / SAMPLES_MIN)
        while (now := time.monotonic()) < begun + self._seconds:
            self.readings.append(self._interval(begun, min(now + every_s, begun + self._seconds), pause_s))
            print(self.readings[-1], flush=True)
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
        commands, cpu = self._mixed.commands, self._server.cpu_s()
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
        return Reading(
            minute=(now - begun) / 60,
            commands_s=(self._mixed.commands - commands) / (now - start),
            rss_mib=self._server.rss_bytes() / MIB,
            descriptors=self._server.descriptors(),
            p50_ms=statistics.median(waits),
            p99_ms=waits[int(len(waits) * 0.99)],
            worst_ms=waits[-1],
            journal_mib=sum(size_of(path) for path in files) / MIB,
            segments=sum(path.suffix == ".db" for path in files),
            busy=(self._server.cpu_s() - cpu) / (now - start),
        )


def size_of(path: Path) -> int:
    """Bytes of a file that may be removed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def faults(readings: Sequence[Reading]) -> list[str]:
    """What grew: the last third of the readings beside the first third, after the first reading."""
    third = max(1, (len(readings) - 1) // 3)
    first, last = readings[1 : 1 + third] or readings, readings[-third:]

    def grew(name: str, factor: float, more: float, middle: Callable[[list[float]], float] = statistics.median) -> str:
        before = middle([float(getattr(reading, name)) for reading in first])
        after = middle([float(getattr(reading, name)) for reading in last])
        return f"{name} grew from {before:.1f} to {after:.1f}" if after > factor * before + more else ""

    found = [
        grew("rss_mib", 1.05, 4),
        grew("descriptors", 1.0, 10),
        # The least, because others on the machine make a wait longer, and only the server makes all of them longer.
        grew("p50_ms", 1.5, 0.2, min),
        grew("p99_ms", 2.0, 2.0, min),
        grew("journal_mib", 1.5, 2),
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
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    build = pick(options.build)
    server_core, _ = servers.pin_load()
    print(f"{options.minutes:g} minutes, {build.name}, --seed {seed}, flags {' '.join(FLAGS)}", flush=True)
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="geventstalk-soak-", ignore_cleanup_errors=True) as directory:
        server = Server(build, FLAGS, core=server_core, directory=Path(directory))
        try:
            server.wait_ready()
            soak = Soak(server, seed, options.minutes * 60)
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
    print("verdict: " + ("FAILED" if found else "flat: memory, descriptors, latency and journal; the journal is clean"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
