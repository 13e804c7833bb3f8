"""The program behind scripts/attack: hostile clients against one server, and what a sane client notices of them.

An attack is some bytes, a pace at which the bytes are sent, whether replies are read, and how long the connection
stays. One thread drives all connections. A prober, a process of its own, measures how long a single request waits,
first without the attacks and then beside the attacks.
Invariant: one seed decides what is sent; the load has a bound in connections and in time.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmark import servers
from scripts.benchmark.load import Client, LoadError, connect
from scripts.benchmark.prober import Waits, probing
from scripts.benchmark.servers import Server
from scripts.benchmark.soak import MIB, check, pick

BEANSTALK_CLIENTS = 300
HTTP_CLIENTS = 100
TLS_CLIENTS = 50
TUBES = 9
MEMORY_MAX_MIB = 32
MEMORY_BESIDE_MIB = 64
"""Memory that the attacks may take beside bodies: the limits of docs/operating.md for replies, lists and uploads."""
WAIT_MORE_MS = 10.0
HEALTH_S = 2.0
INTERVALS_MIN = 9
TOKEN = "the-token-of-an-operator"
FLAGS = ("-b", "{dir}/journal", "-s", "1000000", "--max-memory", f"{MEMORY_MAX_MIB}m", "--http-tokens", "{dir}/tokens")
PATHS = (
    b"/",
    b"/metrics",
    b"/healthz",
    b"/no",
    b"/api/v1/tubes?limit=1000",
    b"/api/v1/tube-groups",
    b"/api/v1/jobs?limit=1000&body=65536",
    b"/api/v1/jobs?filter=body:%2F(y%2By%2B)%2Bx%2F&limit=1000",
    b"/api/v1/jobs?filter=body:z+age%3E0s+-state:buried&descending=true",
    b"/api/v1/jobs?filter=" + b"(" * 2_001,
    b"/api/v1/jobs/1/body",
    b"/api/v1/connections?limit=1000&sort=reserved",
    b"/api/v1/history?range=1w",
    b"/api/v1/audit?limit=1000",
    b"/api/v1/journal",
    b"/api/v1/export",
    b"/api/v1/events?tubes=attack-1,attack-2",
)
FILTERS = ("state:ready", "state:ready body:/(y+y+)+x/", "state:delayed", "state:buried", "state:ready age>1s")
ACTIONS = ({"action": "kick"}, {"action": "bury"}, {"action": "delete"}, {"action": "move", "tube": "attack-0"})
"""Filters and actions of bulk work. None of the filters selects a job that the sane client holds."""

Draw = random.Random


def half_put(draw: Draw) -> bytes:
    size = draw.choice((100, 65_535))
    return b"use attack-%d\r\nput 0 0 60 %d\r\n" % (draw.randrange(TUBES), size) + b"x" * draw.randrange(size)


def oversized_put(draw: Draw) -> bytes:
    return b"put 0 0 60 4294967295\r\n" + b"put 0 0 1 1\r\n" * draw.randrange(50_000)


def many_tubes(draw: Draw) -> bytes:
    names = (b"watch %d%s\r\n" % (draw.getrandbits(60), b"t" * 180) for _ in range(2_000))
    return b"".join(names) + b"list-tubes-watched\r\nlist-tubes\r\n" * 30


def unread_replies(draw: Draw) -> bytes:
    return draw.choice((b"list-tubes\r\n", b"stats\r\n", b"peek-ready\r\n", b"stats-tube default\r\n")) * 2_000


def traffic(draw: Draw) -> bytes:
    body = b"y" * draw.choice((0, 1, 300, 20_000))
    put = b"use attack-%d\r\nput %d %d 9 %d\r\n%b\r\n"
    puts = b"".join(
        put % (draw.randrange(TUBES), draw.randrange(9), draw.randrange(2), len(body), body) for _ in range(9)
    )
    return puts + b"watch attack-1\r\nkick 4294967295\r\n" + b"reserve-with-timeout 0\r\n" * 5


def waiting(draw: Draw) -> bytes:
    return b"".join(b"watch attack-wait-%d\r\n" % number for number in range(200)) + b"reserve\r\n" * 50


def garbage(draw: Draw) -> bytes:
    return draw.choice((draw.randbytes(3_000), b"\r" * 3_000, b"a" * 500_000, b"\r\n" * 3_000, b"\0\r\n" * 999))


def hang_up(draw: Draw) -> bytes:
    return b""


def requests(draw: Draw) -> bytes:
    """Returns keep-alive requests, with the operator's token, a wrong one, or none."""
    token = draw.choice((f"Authorization: Bearer {TOKEN}\r\n", "Authorization: Bearer another-wrong-token\r\n", ""))
    return (b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (draw.choice(PATHS), token.encode())) * 30


def changes(draw: Draw) -> bytes:
    """Returns keep-alive requests of the operator that put jobs and begin work on many jobs, some of them malformed."""
    pieces = []
    for _ in range(20):
        path, body = draw.choice(
            (
                ("jobs", {"tube": f"attack-{draw.randrange(TUBES)}", "body": "y" * draw.choice((0, 300, 70_000))}),
                (
                    "bulk",
                    {
                        "filter": f"tube:attack-* {draw.choice(FILTERS)}",
                        **draw.choice(ACTIONS),
                        "dry_run": draw.random() < 0.5,
                    },
                ),
            )
        )
        content = json.dumps(body).encode()
        content = draw.choice((content, content, content, content[:-1], b"[" * 20_000, b'{"tube":"\\ud800"}'))
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        kind = "Content-Type: application/json\r\n"
        pieces.append(f"{head}{kind}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return b"".join(pieces)


def half_handshake(draw: Draw) -> bytes:
    """Returns the first bytes of TLS connections that never go on, all of the first message or less."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(
            ssl.MemoryBIO(), sent, server_hostname="localhost"
        ).do_handshake()
    hello = sent.read()
    return hello[: draw.choice((1, 5, 100, len(hello)))] + draw.choice((b"", b"", draw.randbytes(2_000)))


def bad_head(draw: Draw) -> bytes:
    size = draw.choice((10, 1_000, 15_000))
    line = draw.choice(
        (b"X:" + b" " * size + b"\x01", b"X: a" + b" \t" * size + b"b", b"A" * size, b"X" * size + b": y")
    )
    return b"GET / HTTP/1.1\r\nHost: localhost\r\n" + line + draw.choice((b"\r\n\r\n", b"\r\n", b"\n\n", b""))


def bad_body(draw: Draw) -> bytes:
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    bodies = (
        b"zz\r\n",
        b"5\r\nabc",
        b"ffffffffffff\r\nx",
        b"1\r\na\r\n" * 20_000,
        b"5;" + b"e" * 9_000 + b"\r\nabcde\r\n",
    )
    half = b"Content-Length: 500\r\n\r\ntoken="
    return head + draw.choice(
        (*(chunked + body for body in bodies), half, b"Content-Length: -1\r\n\r\n", b"\r\ntoken=x")
    )


BEANSTALK = (half_put, oversized_put, many_tubes, unread_replies, traffic, waiting, garbage, hang_up)
HTTP = (requests, changes, bad_head, bad_body, garbage, hang_up)
TLS = (half_handshake, garbage, hang_up)


@dataclass
class Hostile:
    """One connection of an attack: what is left to send, and how the connection behaves."""

    sock: socket.socket
    data: memoryview
    pace: int
    reads: bool
    end_s: float

    def step(self, now: float) -> bool:
        """Sends a piece and reads what there is. Returns False once the connection is over."""
        try:
            if self.data:
                self.data = self.data[self.sock.send(self.data[: self.pace]) :]
            while self.reads:
                if not self.sock.recv(1 << 16):
                    return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        return now < self.end_s


@dataclass
class Attackers:
    """As many connections to a port as are wanted, each with an attack that the seed draws."""

    port: int
    attacks: tuple[Callable[[Draw], bytes], ...]
    wanted: int
    draw: Draw
    open: list[Hostile] = field(default_factory=list)
    sent: int = 0

    def step(self) -> None:
        """Gives each connection its piece, and replaces one connection in ten at most of those that are over."""
        now = time.monotonic()
        left = [hostile for hostile in self.open if hostile.step(now) or hostile.sock.close()]
        self.open = left
        for _ in range(min(self.wanted - len(left), self.wanted // 10)):
            attack = self.draw.choice(self.attacks)
            data = memoryview(attack(self.draw))
            pace, reads = self.draw.choice((1, 1_000, 1 << 20)), self.draw.random() < 0.5
            stay_s = 0.0 if attack is hang_up else self.draw.choice((0.2, 2.0, 20.0))
            with contextlib.suppress(OSError):  # the server closes what is too much
                self.open.append(Hostile(connect(self.port), data, pace, reads, now + stay_s))
                self.sent += 1

    def close(self) -> None:
        for hostile in self.open:
            hostile.sock.close()


@dataclass(frozen=True)
class Reading:
    """The figures of one interval."""

    rss_mib: float
    descriptors: int
    threads: int
    health_s: float
    attacks: int

    def __str__(self) -> str:
        return (
            f"{self.rss_mib:6.1f} MiB {self.descriptors:4d} descriptors {self.threads} threads"
            f"  /healthz {self.health_s:.2f} s at most  {self.attacks:,} attacks"
        )


class Attack:
    """Drives the attacks against a server and takes readings."""

    def __init__(self, server: Server, http_port: int, tls_port: int, seed: int) -> None:
        draw = Draw(seed)
        self._server, self._http_port = server, http_port
        self._groups = (
            Attackers(server.port, BEANSTALK, BEANSTALK_CLIENTS, draw),
            Attackers(http_port, HTTP, HTTP_CLIENTS, draw),
            Attackers(tls_port, TLS, TLS_CLIENTS, draw),
        )

    def run(self, seconds: float) -> tuple[Waits, Waits, list[Reading]]:
        """Returns the waits without and with the attacks, and the readings. Raises LoadError."""
        intervals = max(INTERVALS_MIN, round(seconds / 60))
        with probing(self._server.port, *self._server.pids()) as calm:
            time.sleep(min(20.0, seconds / 5))
        readings = []
        with probing(self._server.port, *self._server.pids()) as attacked, Client(self._server.port) as sane:
            sane.burst([b"watch attack-%d\r\n" % number for number in range(TUBES)], b"WATCHING")
            for _ in range(intervals):
                readings.append(self._interval(sane, seconds / intervals))
                print(readings[-1], flush=True)
        for group in self._groups:
            group.close()
        return calm, attacked, readings

    def _interval(self, sane: Client, seconds: float) -> Reading:
        end = time.monotonic() + seconds
        health_s, next_look = 0.0, 0.0
        while (now := time.monotonic()) < end:
            for group in self._groups:
                group.step()
            if now >= next_look:
                next_look = now + 1.0
                health_s = max(health_s, self._health())
                self._tidy(sane)
        pid = self._server.pid
        figures = sum(map(servers.rss_bytes, self._server.pids())) / MIB, servers.descriptors(pid), servers.threads(pid)
        return Reading(*figures, health_s, sum(group.sent for group in self._groups))

    def _health(self) -> float:
        """Returns how long /healthz takes on a new connection. Raises LoadError without an answer."""
        begun = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=30.0)
        try:
            connection.request("GET", "/healthz", headers={"Host": "localhost"})
            if connection.getresponse().status != 200:
                raise LoadError("/healthz says that the server is not well")
        except (OSError, http.client.HTTPException) as error:
            raise LoadError(f"/healthz does not answer: {error!r}") from error
        finally:
            connection.close()
        return time.monotonic() - begun

    @staticmethod
    def _tidy(sane: Client) -> None:
        """Takes the jobs that the attacks have put and deletes them, so that what grows is not the queue."""
        ids = [b""]
        while ids:
            ids.clear()
            sane.sock.sendall(b"reserve-with-timeout 0\r\n" * 100)
            for _ in range(100):
                word, *numbers = sane.line().split()
                if word == b"RESERVED":
                    sane.chunk(int(numbers[1]))
                    ids.append(numbers[0])
            sane.burst([b"delete %b\r\n" % id for id in ids], b"DELETED")


def faults(calm: Waits, attacked: Waits, readings: Sequence[Reading], memory_mib: float) -> list[str]:
    """Returns what an operator would complain about; the server may take `memory_mib` of memory."""
    found = []
    third = max(1, len(readings) // 3)
    first, last = readings[:third], readings[-third:]
    worst = max(reading.rss_mib for reading in readings)
    if attacked.net_p999_ms > calm.net_p999_ms + WAIT_MORE_MS:
        found.append(f"a sane client waited {attacked.net_p999_ms:.1f} ms (p99.9), {calm.net_p999_ms:.1f} ms without")
    if max(reading.health_s for reading in readings) > HEALTH_S:
        found.append(f"/healthz took {max(reading.health_s for reading in readings):.1f} s")
    if worst > memory_mib:
        found.append(f"memory reached {worst:.0f} MiB, {memory_mib:.0f} is the bound")
    if min(reading.rss_mib for reading in last) > 1.1 * max(reading.rss_mib for reading in first) + 4:
        found.append(f"memory grew from {first[-1].rss_mib:.0f} to {last[-1].rss_mib:.0f} MiB")
    if min(reading.threads for reading in last) > max(reading.threads for reading in first) + 2:
        found.append(f"threads grew from {first[-1].threads} to {last[-1].threads}")
    return found


def attack(server: Server, http_port: int, tls_port: int, seed: int, seconds: float) -> list[str]:
    """Attacks a server that answers. Returns the faults that it shows."""
    bound_mib = server.rss_bytes() / MIB + MEMORY_MAX_MIB + MEMORY_BESIDE_MIB
    try:
        calm, attacked, readings = Attack(server, http_port, tls_port, seed).run(seconds)
    except (LoadError, OSError) as error:
        return [str(error)]
    for name, waits in (("without", calm), ("with", attacked)):
        print(
            f"{name} attacks: {waits.requests:,} requests of a sane client; the server's part of a wait p99.9"
            f" {waits.net_p999_ms:.2f} ms, worst {waits.net_worst_ms:.1f}; all of a wait p50 {waits.p50_ms:.2f} ms"
        )
    return faults(calm, attacked, readings, bound_mib)


def make_certificate(cert: Path, key: Path) -> None:
    """Makes a certificate that signs itself. Needs openssl."""
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*request, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/attack", description="Hostile clients, and what a sane one notices.")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="how long (default 10)")
    parser.add_argument("--seed", type=int, help="repeats what is sent (default: drawn, and printed)")
    parser.add_argument("--build", choices=("pure", "compiled"), default="compiled")
    parser.add_argument("--io-processes", metavar="N", help="front-end processes, as the server's option")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    http_port, tls_port = servers.free_port(), servers.free_port()
    flags: tuple[str, ...] = (*FLAGS, "--http", f"127.0.0.1:{http_port}", "--tls-listen", f"127.0.0.1:{tls_port}")
    flags += ("--tls-cert", "{dir}/cert", "--tls-key", "{dir}/key")
    if options.io_processes is not None:
        flags += ("--io-processes", options.io_processes)
    build = pick(options.build)
    core, _ = servers.pin_load()
    print(f"{options.minutes:g} minutes, {build.name}, --seed {seed}, flags {' '.join(flags)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="geventstalk-attack-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        (directory / "journal").mkdir()
        (directory / "tokens").write_text(f"operator admin {TOKEN}\n")
        (directory / "tokens").chmod(0o600)
        make_certificate(directory / "cert", directory / "key")
        server = Server(build, flags, core=core, directory=directory)
        found = []
        try:
            server.wait_ready()
            found = attack(server, http_port, tls_port, seed, options.minutes * 60)
        except (LoadError, KeyboardInterrupt) as error:
            found.append(str(error) or "interrupted")
        finally:
            code = server.stop()
        if code != 0:
            found.append(f"the server ended with exit code {code}")
        found += [complaint for complaint in [check(build, directory / "journal")] if complaint]
    for fault in found:
        print(f"FAULT: {fault}")
    print("verdict: " + ("FAILED" if found else "nothing grew, and a sane client hardly waited longer"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
