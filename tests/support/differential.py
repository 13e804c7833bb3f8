"""The same random commands to beanstalkd and to geventstalk; every reply is compared, byte for byte.

One seed decides everything that is sent. `Framing` knows where commands begin and end, hence how many replies are due,
so nothing waits for a time to pass; `Rules` keeps out what the two may answer differently, and differential.md says
why. Invariant: between two steps each command was answered by both servers, or waits in a reserve on both.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from tests.support.process import ServerProcess, beanstalkd_path
from tests.support.shapes import DISK, FRONT, FRONTS, MEMORY, THREE_FRONTS, Shape
from tests.support.wire import Client, ReplyReader, WireError, as_master, yaml_lines

LINE_BYTES_MAX = 224
UNREAD_BYTES_MAX, PIECE_BYTES = 100_000, 1_000
"""What is sent behind a reserve stays in the socket, which must have room for it and for each piece's overhead."""
PATIENCE_S = 5.0
"""How long a reply that only one server gave is awaited from the other."""
DELAY_STEP_S = 1000
"""Delays differ by more than a run takes, so that it is certain which of two jobs is due first."""
LARGE_S = 1000
"""Times of at least this many seconds do not end during a run."""
WINDOW_S, WINDOW_OPEN_S, STEP_GAP_S = 1.25, 0.17, 0.006
LATE_S = 0.04
WINDOWS, WINDOW_STEPS = 4, 12
"""While time matters, commands are sent in the first WINDOW_OPEN_S of every WINDOW_S, with a gap between them, and ask
for times of 1 or 2 s; a window must not open more than LATE_S behind its time. No two windows are near a whole number
of seconds apart, so nothing falls due while one is open, not even what began when something else fell due; and no two
things fall due at the same moment."""
SHRINK_S = 60.0
SHAPES = {"memory": MEMORY, "disk": DISK, "front": FRONT, "fronts": FRONTS, "three-fronts": THREE_FRONTS}
JOURNAL_BYTES = 1 << 16
"""Size of a journal's files, small enough that they rotate and are compacted in a run."""


class Excluded(Exception):
    """The two servers may answer this differently, for a reason in the list of exclusions."""


class Overrun(Exception):
    """This machine was too slow for a window of the part in which time matters."""


class Difference(Exception):
    """The servers answered differently."""


class Silence(Difference):
    """One of them did not answer at all."""


class Command(NamedTuple):
    """A complete command. `kind` is `reserve` for one that may wait, `quit`, or `plain`."""

    line: bytes
    kind: str
    watching: frozenset[bytes]


_NUMBERS = re.compile(rb"put  *(\d+)  *(\d+)  *(\d+)  *(\d+)(.*)", re.DOTALL)
_TIMEOUT = re.compile(rb" *(\d+)", re.DOTALL)
_NAME = re.compile(rb"(watch|ignore) ([A-Za-z0-9+/;.$_()][A-Za-z0-9+/;.$_()-]{0,199})")
U32_MAX, TIMEOUT_MAX = 2**32 - 1, 2**31 - 1


class Framing:
    """A server's view of one client's input: where commands end, which may wait, and on what tubes."""

    def __init__(self, max_job_bytes: int) -> None:
        self.max_job_bytes = max_job_bytes
        self.partial = b""
        self.body_left = 0
        self.uploading = False
        self.closed = False
        self.watching = frozenset([b"default"])
        self._put_line = b""

    @property
    def idle(self) -> bool:
        """Returns whether no command has been begun."""
        return not self.partial and not self.body_left

    def feed(self, data: bytes) -> list[Command]:
        """The commands that `data` completes; Excluded for what may not be sent."""
        commands = []
        while data and not self.closed:
            if self.body_left:
                taken = min(self.body_left, len(data))
                self.body_left -= taken
                data = data[taken:]
                if not self.body_left:
                    self.uploading = False
                    commands.append(Command(self._put_line, "plain", self.watching))
                continue
            line, end, rest = (self.partial + data).partition(b"\r\n")
            self.partial = b"" if end else line
            data = rest
            if end and (command := self._line(line)):
                commands.append(command)
        return commands

    def _line(self, line: bytes) -> Command | None:
        """The command that a line is, or None for a put, which is not complete without its body."""
        size = len(line) + 2
        if b"\r" in line:
            raise Excluded("a CR that no LF follows silences 1.12")
        if size > LINE_BYTES_MAX and size % LINE_BYTES_MAX == 1:
            raise Excluded("1.12 misses the end of a line of this length")
        kind = "plain"
        if size > LINE_BYTES_MAX or b"\0" in line:
            pass
        elif line.startswith(b"put "):
            if self._put(line):
                return None
        elif line.startswith(b"quit"):
            self.closed = True
            kind = "quit"
        elif line == b"reserve" or (line.startswith(b"reserve-with-timeout ") and self._waits(line[21:])):
            kind = "reserve"
        elif match := _NAME.fullmatch(line):
            changed = self.watching | {match[2]} if match[1] == b"watch" else self.watching - {match[2]}
            self.watching = changed or self.watching
        return Command(line, kind, self.watching)

    def _put(self, line: bytes) -> bool:
        """Returns whether a body is read after this line."""
        match = _NUMBERS.fullmatch(line)
        if not match or any(int(number) > U32_MAX for number in match.groups()[:4]):
            return False
        size = int(match[4])
        too_big = size > self.max_job_bytes
        if match[5] and not too_big:
            return False
        self._put_line = line
        self.uploading = not too_big
        self.body_left = size + 2
        return True

    def _waits(self, argument: bytes) -> bool:
        match = _TIMEOUT.match(argument)
        if not match or TIMEOUT_MAX < int(match[1]) < 2**63:
            raise Excluded("1.12 takes what 1.13 refuses here")
        return 0 < int(match[1]) <= TIMEOUT_MAX


class Setting(NamedTuple):
    """The part of a run that a seed draws before the first step."""

    clients: int
    max_job_bytes: int
    drains: bool
    timed: bool
    journal: bool


class Step(NamedTuple):
    """The next action of one client or of all clients. The pieces of a `send` reach the servers one by one."""

    verb: str
    client: int = 0
    pieces: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        return f"{self.verb:10} {self.client} {' | '.join(repr(piece)[2:-1] for piece in self.pieces)}"


def _unread(port: int) -> set[int]:
    """Returns the ports of clients whose bytes the process behind this port has not read. See proc(5)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    mine = [(row[2], row[4]) for row in rows if int(row[1].partition(":")[2], 16) == port]
    return {int(peer.partition(":")[2], 16) for peer, queues in mine if int(queues.partition(":")[2], 16)}


class Side:
    """One client's connection to one of the servers."""

    def __init__(self, server: ServerProcess) -> None:
        self.sock = server.connect()
        self.sock.settimeout(None)
        limit = struct.pack("ll", int(PATIENCE_S), 0)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.reader = ReplyReader()
        self.replies: list[bytes] = []
        self.closed = False
        self.port = int(self.sock.getsockname()[1]) if self.sock.family == socket.AF_INET else 0

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except ConnectionError:
            pass  # that it is closed is seen when reading
        except BlockingIOError:
            raise Silence("a server does not read what it is sent") from None

    def read(self, *, wait: bool) -> bool:
        """Returns whether anything came, be it the end."""
        try:
            data = self.sock.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        self.closed = not data
        self.replies += self.reader.feed(data)
        return True


@dataclass
class Twin:
    """A client of both servers. `commands` are those that were sent and not yet answered.

    `held` are jobs that it reserved and did nothing about yet. `unread` is how many bytes the servers may have left in
    the socket, because the client waits.
    """

    number: int
    framing: Framing
    sides: tuple[Side, Side]
    commands: list[Command] = field(default_factory=list)
    half_closed: bool = False
    dead: bool = False
    has_reserved: bool = False
    held: list[int] = field(default_factory=list)
    unread: int = 0

    @property
    def waits(self) -> bool:
        """Returns whether it has sent a reserve that was not answered."""
        return any(command.kind == "reserve" for command in self.commands)

    @property
    def loaded(self) -> bool:
        """Returns whether something would run as soon as the reserve it waits in is answered."""
        first = next((number for number, command in enumerate(self.commands) if command.kind == "reserve"), None)
        return first is not None and (first + 1 < len(self.commands) or not self.framing.idle)

    def due(self, side: Side) -> str:
        """Returns what is still to come: `sure`, `maybe` when a reserve may wait, or nothing."""
        if side.closed:
            return ""
        if len(side.replies) < len(self.commands):
            waits = self.commands[len(side.replies)].kind == "reserve" and not self.half_closed
            return "maybe" if waits else "sure"
        return "sure" if self.half_closed else ""


# What time a command asks for: delay and ttr, delay, pause, timeout.
_TIMES = re.compile(
    rb"put  *\d+  *(\d+)  *(\d+)|release  *\d+  *\d+  *(\d+)|pause-tube.*?(\d+)$|reserve-with-timeout  *(\d+)"
)
_LOOK = re.compile(rb"(?:peek|stats-job)  *(\d+)")
_UNPAUSE = re.compile(rb"pause-tube.*[^0-9]0+$", re.DOTALL)
_WEIGHED = re.compile(rb"watch [^ ]+ [0-9]+$")
"""A watch with a weight, which is geventstalk's own. Pieces of lines may come to one by chance."""


class Rules:
    """Which input may be sent, given what all clients have sent before. Each rule is an exclusion of the list."""

    def __init__(self, twins: Sequence[Twin]) -> None:
        self.twins = twins
        self.known: set[int] = set()
        self.timed = False
        self.short_reservations: set[int] = set()

    def admit(self, twin: Twin, data: bytes) -> bool:
        """Returns whether both servers must answer alike when this client sends `data` now."""
        after = copy.copy(twin)
        after.framing = copy.copy(twin.framing)
        try:
            new = after.framing.feed(data)
        except Excluded:
            return False
        after.commands = twin.commands + new
        others = [other for other in self.twins if other is not twin and not other.dead]
        return (
            (not after.waits or twin.unread + len(data) < UNREAD_BYTES_MAX)
            and self._one_waiter_a_tube(new, others)
            and self._one_at_a_time(twin, after, len(new), others)
            and self._uploads_unseen(after, others)
            and not any(_UNPAUSE.match(command.line) for command in after.commands[:-1])
            and not any(_WEIGHED.match(command.line) for command in new)
            and all(self._time_is_clear(command.line) for command in new)
            and (not self.timed or self._wait_is_clear(twin, after, new, others))
        )

    def _one_waiter_a_tube(self, new: list[Command], others: list[Twin]) -> bool:
        taken = {tube for other in others for command in other.commands for tube in _waiting(command)}
        return not any(taken & _waiting(command) for command in new)

    def _one_at_a_time(self, twin: Twin, after: Twin, new: int, others: list[Twin]) -> bool:
        if not any(other.loaded for other in others):
            return True
        begun = after.framing.uploading and (new > 0 or not twin.framing.uploading)
        return new + begun <= 1 and not after.loaded

    def _uploads_unseen(self, after: Twin, others: list[Twin]) -> bool:
        exposed = any(other.framing.uploading or other.loaded for other in others)
        for command in after.commands:
            exposed = exposed or command.kind == "reserve"
            match = _LOOK.match(command.line) if exposed else None
            if match and int(match[1]) not in self.known:
                return False
        return True

    def _time_is_clear(self, line: bytes) -> bool:
        match = _TIMES.match(line)
        if not match:
            return True
        put_delay, ttr, release_delay, *rest = (None if value is None else int(value) for value in match.groups())
        short = (0, 1, 2) if self.timed else (0,)
        delays = [value for value in (put_delay, release_delay) if value is not None]
        others = [value for value in (ttr, *rest) if value is not None]
        return (
            all(value in short or value % DELAY_STEP_S == 0 for value in delays)
            and all(value in short or value >= LARGE_S for value in others)
            and (self.timed or ttr != 0)
        )

    def _wait_is_clear(self, twin: Twin, after: Twin, new: list[Command], others: list[Twin]) -> bool:
        if twin.waits or not after.framing.idle or len(new) != 1:
            return False
        if new[0].kind == "reserve":
            return not twin.has_reserved and not self.short_reservations
        return not (new[0].line.startswith(b"reserve-job") and any(other.waits for other in others))


def _waiting(command: Command) -> frozenset[bytes]:
    return command.watching if command.kind == "reserve" else frozenset()


# Comparing

_FREE = frozenset(("pid", "version", "rusage-utime", "rusage-stime", "uptime", "id", "hostname", "os", "platform"))
_FREE_WITH_JOURNAL = frozenset(
    (
        "file",
        "binlog-oldest-index",
        "binlog-current-index",
        "binlog-records-migrated",
        "binlog-records-written",
    )
)
_FLOORED = frozenset(("age", "time-left", "pause-time-left"))


def alike(line: bytes, reference: bytes, ours: bytes, *, journal: bool = False) -> bool:
    """Returns whether two replies to a command say the same, but for what the specification lets differ."""
    return reference == ours or not differences(line, reference, ours, journal=journal)


def differences(line: bytes, reference: bytes, ours: bytes, *, journal: bool = False) -> str:
    """In what two different replies differ in earnest; empty when in nothing."""
    if not reference.startswith(b"OK ") or not ours.startswith(b"OK "):
        return f"{reference!r} and {ours!r}"
    theirs, mine = yaml_lines(as_master(reference)), yaml_lines(ours)
    if line.startswith(b"list-tubes"):
        first = mine[0] == "- default" or line != b"list-tubes"
        return "" if sorted(theirs) == sorted(mine) and first else f"{theirs} and {mine}"
    if theirs and theirs[-1].startswith(("platform: ", "pause-time-left: ")):
        mine = mine[: len(theirs)]  # keys of our own come after upstream's
    free = (_FREE if line == b"stats" else frozenset()) | (_FREE_WITH_JOURNAL if journal else frozenset())
    wrong = [
        f"{a} and {b}"
        for a, b in zip_longest(theirs, mine, fillvalue="nothing")
        if a != b and not _may_differ(a, b, free)
    ]
    return "; ".join(wrong)


def _may_differ(theirs: str, mine: str, free: frozenset[str]) -> bool:
    key, _, value = theirs.partition(": ")
    our_key, _, our_value = mine.partition(": ")
    if key != our_key:
        return False
    if key in _FLOORED:
        return abs(int(value) - int(our_value)) <= 1
    return key in free


# Running


class Pair:
    """Both servers with their clients: performs steps and compares what comes of them."""

    def __init__(self, servers: tuple[ServerProcess, ServerProcess], drawn: Setting) -> None:
        self.servers = servers
        self.drawn = drawn
        self.controls = [Client(server.connect()) for server in servers]
        self._has_fronts = "--io-processes" in str(servers[1].process.args)
        self.twins: list[Twin] = []
        self.rules = Rules(self.twins)
        self.live: list[int] = []
        self.ttrs: dict[int, int] = {}
        self._windows = 0
        self._opened_at = 0.0
        for number in range(drawn.clients):
            self.twins.append(self._connect(number))

    def close(self) -> None:
        for twin in self.twins:
            for side in twin.sides:
                side.sock.close()
        for control in self.controls:
            control.close()

    def may(self, step: Step) -> bool:
        """Returns whether a step makes sense now and keeps to the rules."""
        twin = self.twins[step.client]
        match step.verb:
            case "send":
                return not (twin.dead or twin.half_closed) and self.rules.admit(twin, b"".join(step.pieces))
            case "half-close":
                return not (twin.dead or self.rules.timed)
            case "reconnect":
                return not twin.loaded  # of what a client sent before it vanished, either server may run less
        return True

    def perform(self, step: Step) -> None:
        """Takes a step on both servers; Difference when they do not answer alike."""
        twin = self.twins[step.client]
        match step.verb:
            case "send":
                self._send(twin, step.pieces)
            case "half-close":
                twin.half_closed = True
                for side in twin.sides:
                    side.sock.shutdown(socket.SHUT_WR)
                self._settle(quiet=True)
            case "reconnect":
                twin.commands.clear()
                for side in twin.sides:
                    side.sock.close()
                    side.closed = True
                self._settle(quiet=True)
                self.twins[step.client] = self._connect(step.client)
            case "drain":
                for server in self.servers:
                    server.process.send_signal(signal.SIGUSR1)
                self._settle(quiet=True)
            case "window":
                self._open_window()
        if self.rules.timed and step.verb != "window":
            time.sleep(STEP_GAP_S)
        if self.late:
            raise Overrun

    @property
    def late(self) -> bool:
        """Returns whether time matters, and the window has been open for too long."""
        return self.rules.timed and time.monotonic() - self._opened_at > WINDOW_OPEN_S

    def _connect(self, number: int) -> Twin:
        twin = Twin(number, Framing(self.drawn.max_job_bytes), (Side(self.servers[0]), Side(self.servers[1])))
        for side in twin.sides:
            side.send(b"sync\r\n")
            if not side.read(wait=True) or side.replies.pop() != b"UNKNOWN_COMMAND\r\n":
                raise Difference("a new connection is not served")
        return twin

    def _send(self, twin: Twin, pieces: Sequence[bytes]) -> None:
        for number, piece in enumerate(pieces):
            if number:
                self._barrier(1)
            twin.commands += twin.framing.feed(piece)
            twin.unread = twin.unread + len(piece) + PIECE_BYTES if twin.waits else 0
            for side in twin.sides:
                side.send(piece)
        self._settle(quiet=not twin.framing.idle or twin.waits)

    def _open_window(self) -> None:
        """Sleeps until the next window opens, then lets beanstalkd see what it lost sight of."""
        self.rules.timed = True
        self.rules.short_reservations.clear() if self._windows % 2 else None
        now = time.monotonic()
        self._opened_at = self._opened_at + WINDOW_S if self._windows else now  # by the plan, so that nothing adds up
        time.sleep(max(0.0, self._opened_at - now))
        if time.monotonic() - self._opened_at > LATE_S:
            raise Overrun
        self._windows += 1
        for twin in self.twins:
            if not twin.dead and not twin.waits and twin.framing.idle:
                self._send(twin, (b"sync\r\n",))
        self._settle(quiet=True)

    # Knowing that everything due has come

    def _await_fronts(self) -> None:
        """Returns when our server has read what clients sent, also in processes that a busy machine holds up."""
        ports = {twin.sides[1].port for twin in self.twins if not twin.waits and not twin.sides[1].closed}
        end_s = time.monotonic() + PATIENCE_S
        while ports & _unread(self.servers[1].port) and time.monotonic() < end_s:
            time.sleep(0.0005)

    def _barrier(self, turns: int) -> None:
        """Returns when both servers have gone around their event loop, so that they saw all there was to see."""
        if self._has_fronts:
            self._await_fronts()
        for _ in range(turns):
            for control in self.controls:
                control.send(b"sync\r\n")
            for control in self.controls:
                if control.reply() != b"UNKNOWN_COMMAND\r\n":
                    raise Difference("the control connection is out of step")

    def _settle(self, *, quiet: bool) -> None:
        """Collects every reply that is due. `quiet`: something was sent that may cause none."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._collect_sure()
            waiting = [(twin, side) for twin in self.twins for side in twin.sides if twin.due(side) == "maybe"]
            if waiting or quiet:
                quiet = False
                self._barrier(3)
                came = [side.read(wait=False) for _, side in waiting]
                if any(came):
                    continue
            wrong = [twin for twin in self.twins if twin.commands and not self._even(twin)]
            if not wrong:
                break
            if time.monotonic() > deadline:
                raise Silence(self._report(wrong[0]))
            time.sleep(0.002)
        for twin in self.twins:
            self._compare(twin)

    def _collect_sure(self) -> None:
        for twin in self.twins:
            for side in twin.sides:
                while twin.due(side) == "sure":
                    if not side.read(wait=True):
                        raise Silence(f"no reply in {PATIENCE_S:.0f} s\n{self._report(twin)}")

    def _even(self, twin: Twin) -> bool:
        theirs, ours = twin.sides
        return len(theirs.replies) == len(ours.replies) and theirs.closed == ours.closed

    def _compare(self, twin: Twin) -> None:
        theirs, ours = twin.sides
        if not self._even(twin):
            raise Difference(self._report(twin))
        for reference, reply in zip(theirs.replies, ours.replies, strict=True):
            line = twin.commands.pop(0).line if twin.commands else b"nothing"
            if not alike(line, reference, reply, journal=self.drawn.journal) or line == b"nothing":
                raise Difference(self._disagreement(twin, line, reference, reply))
            self._learn(twin, line, reply)
        theirs.replies.clear()
        ours.replies.clear()
        if theirs.closed:
            if theirs.reader.pending != ours.reader.pending:
                raise Difference(self._report(twin))
            twin.dead = True
            twin.commands.clear()

    def _report(self, twin: Twin) -> str:
        """The first command of a client on whose answer the servers do not agree."""
        commands = [command.line for command in twin.commands]
        for line, theirs, ours in zip_longest(commands, *map(self._said, twin.sides), fillvalue=b""):
            if not alike(line, theirs, ours, journal=self.drawn.journal):
                return self._disagreement(twin, line, theirs, ours)
        return f"client {twin.number}: the ends differ"

    def _disagreement(self, twin: Twin, line: bytes, theirs: bytes, ours: bytes) -> str:
        wrong = differences(line, theirs, ours, journal=self.drawn.journal)
        return f"client {twin.number} asked {line!r}; beanstalkd and geventstalk answer {wrong}"

    def _said(self, side: Side) -> list[bytes]:
        return [*side.replies, *([b"(closes)"] if side.closed else []), *filter(None, [side.reader.pending])]

    def _learn(self, twin: Twin, line: bytes, reply: bytes) -> None:
        """Keeps what the next commands are drawn from."""
        words = reply.split(b" ", 2)
        if words[0] == b"INSERTED":
            id = int(words[1])
            self.live.append(id)
            self.rules.known.add(id)
            self.ttrs[id] = int(line.split()[3])
        elif words[0] in (b"DELETED\r\n", b"RELEASED\r\n", b"BURIED\r\n"):
            id = int(line.split()[1])
            if words[0] == b"DELETED\r\n" and id in self.live:
                self.live.remove(id)
            if id in twin.held:
                twin.held.remove(id)
        elif words[0] == b"RESERVED":
            id = int(words[1])
            twin.has_reserved = True
            twin.held.append(id)
            if self.ttrs.get(id, 0) < LARGE_S:
                self.rules.short_reservations.add(id)


class Generator:
    """Draws steps. The seed also draws how likely each kind is, so that seeds differ in character."""

    def __init__(self, rng: random.Random, max_job_bytes: int) -> None:
        self.rng = rng
        self.max_job_bytes = max_job_bytes
        self.tubes = [b"default", b"a", b"b", b"c-d", b"e" * 200][: rng.randint(2, 5)]
        self.priorities = rng.sample([0, 1, 2, 1023, 1024, U32_MAX], 3)
        self.delays = list(range(DELAY_STEP_S, 4000 * DELAY_STEP_S, DELAY_STEP_S))
        rng.shuffle(self.delays)
        self.makers: list[Callable[[], bytes]] = [
            self.put,
            self.reserve,
            self.of_held,
            self.of_job,
            self.kick,
            self.look,
            self.statistics,
            self.tube,
            self.specialise,
            self.pause,
            self.malformed,
        ]
        likely = (8, 6, 4, 4, 1, 1, 1, 1, 1, 1, 1)
        self.weights = [weight * rng.choice((1, 2, 4)) for weight in likely]
        self.batch = rng.choice((1, 1, 3, 8))
        self.pieces = rng.choice((0.0, 0.05, 0.3))
        self.interrupt = rng.choice((0.0, 0.05, 0.2))
        self.live: list[int] = []
        self.held: list[int] = []
        self.rests: dict[int, bytes] = {}
        self.timed = False
        self.single = False

    def step(self, pair: Pair) -> Step:
        """The next step, one that the rules allow."""
        self.live = pair.live
        self.timed = pair.rules.timed
        loaded = [twin.number for twin in pair.twins if twin.loaded]
        self.single = bool(loaded)
        if loaded and not self.timed and self.rng.random() < 0.05:
            return Step("half-close", loaded[0])
        for _ in range(40):
            client = self._client(pair)
            self.held = pair.twins[client].held
            if pair.twins[client].dead:
                self.rests.pop(client, None)
                return Step("reconnect", client)
            step = self._attempt(client)
            if pair.may(step):
                return step
            self.rests.pop(client, None)
        half_close = Step("half-close", client)
        return half_close if pair.may(half_close) else Step("reconnect", client)

    def counters(self, pair: Pair) -> Step:
        """Asks for `stats`, from a client that can."""
        able = [twin.number for twin in pair.twins if not (twin.waits or twin.dead or twin.half_closed)]
        return Step("send", able[0], (b"stats\r\n",)) if able else Step("reconnect")

    def _client(self, pair: Pair) -> int:
        """Any, but seldom one that waits: what it sends has to wait as well."""
        while True:
            client = self.rng.randrange(len(pair.twins))
            if not pair.twins[client].waits or self.rng.random() < 0.1:
                return client

    def _attempt(self, client: int) -> Step:
        draw = self.rng.random()
        if draw < 0.005:
            return Step("reconnect", client)
        if draw < 0.01:
            return Step("half-close", client)
        if self.timed:
            return Step("send", client, (self.command(),))
        data = self.rests.pop(client, b"") or (self.command() if self.single else self._batch())
        if self.rng.random() < self.interrupt and len(data) > 1 and not self.single:
            cut = self.rng.randrange(1, len(data))
            self.rests[client] = data[cut:]
            data = data[:cut]
        return Step("send", client, tuple(self._cut(data)))

    def _batch(self) -> bytes:
        """Some commands in one go; little behind a reserve that may wait."""
        data = b""
        if len(self.live) > 60:
            data = b"".join(b"delete %d\r\n" % id for id in self.rng.sample(self.live, 3))
        for _ in range(self.rng.randint(1, self.batch)):
            data += self.command()
            if data.endswith((b"\nreserve\r\n", b" %d\r\n" % LARGE_S)) and self.rng.random() < 0.8:
                break
        return data

    def _cut(self, data: bytes) -> Iterator[bytes]:
        while len(data) > 1 and self.rng.random() < self.pieces:
            cut = self.rng.randrange(1, len(data))
            yield data[:cut]
            data = data[cut:]
        yield data

    def command(self) -> bytes:
        """One command with its CRLF, mostly well-formed."""
        if self.timed:
            often = (self.put, self.reserve, self.reserve, self.of_held)
            return self.rng.choice((*often, *often, self.of_job, self.look, self.statistics, self.tube, self.pause))()
        return self.rng.choices(self.makers, self.weights)[0]()

    def pri(self) -> int:
        return self.rng.choice(self.priorities)

    def delay(self) -> int:
        """0, or a delay that the last thousands of jobs did not have."""
        if self.rng.random() < 0.6:
            return 0
        if self.timed and self.rng.random() < 0.8:
            return self.rng.choice((1, 2))
        self.delays.append(self.delays.pop(0))
        return self.delays[-1]

    def ttr(self) -> int:
        if self.timed and self.rng.random() < 0.7:
            return self.rng.choice((0, 1, 2))
        return self.rng.choice((LARGE_S, 5000, U32_MAX))

    def id(self) -> int:
        draw = self.rng.random()
        if draw < 0.85 and self.live:
            return self.rng.choice(self.live[-12:] if draw < 0.5 else self.live)
        highest = self.live[-1] if self.live else 1
        return self.rng.choice((0, highest + 1, highest + 2, self.rng.randint(1, highest), 2**64 - 1))

    def put(self) -> bytes:
        rng = self.rng
        size = rng.choice((0, 1, 2, 5, 12, self.max_job_bytes if self.max_job_bytes < 1000 else 300))
        body = bytes(rng.choice(b"ab\0\r\n 1") for _ in range(size))
        if rng.random() < 0.3:
            body = (b"delete 1\r\nreserve\r\nx\r\n" * 20)[:size]
        announced, end, draw = size, b"\r\n", rng.random()
        if draw < 0.03:
            announced = max(0, size + rng.choice((-2, -1, 1, 2)))
        elif draw < 0.06:
            end = rng.choice((b"\n\r", b"xx", b"\r", b"x\r\n", b"\rx"))
        elif draw < 0.09:
            announced = self.max_job_bytes + rng.choice((1, 2, 50))
            body = bytes(rng.choice(b"ab\r\n ") for _ in range(announced))
        elif draw < 0.091:
            announced = U32_MAX
        header = b"put %d %d %d %d\r\n" % (self.pri(), self.delay(), self.ttr(), announced)
        return header + body + end

    def reserve(self) -> bytes:
        draw = self.rng.random()
        if draw < 0.2:
            return b"reserve\r\n"
        if draw < 0.3:
            long = self.rng.choice((1, 2)) if self.timed else self.rng.choice((LARGE_S, TIMEOUT_MAX))
            return b"reserve-with-timeout %d\r\n" % long
        if draw < 0.4:
            return b"reserve-job %d\r\n" % self.id()
        return self.rng.choice((b"reserve-with-timeout 0\r\n",) * 9 + (b"reserve-with-timeout  0 x\r\n",))

    def of_job(self) -> bytes:
        """Something to a job that most likely exists, in whatever state."""
        return self._to(self.id())

    def of_held(self) -> bytes:
        """Something to a job that this client has most likely reserved."""
        return self._to(self.rng.choice(self.held) if self.held else self.id())

    def _to(self, id: int) -> bytes:
        return self.rng.choice(
            (
                b"delete %d\r\n" % id,
                b"delete %d\r\n" % id,
                b"release %d %d %d\r\n" % (id, self.pri(), self.delay()),
                b"bury %d %d\r\n" % (id, self.pri()),
                b"touch %d\r\n" % id,
                b"kick-job %d\r\n" % id,
                b"reserve-job %d\r\n" % id,
            )
        )

    def kick(self) -> bytes:
        odd = (b"-1", b"+2", b"2x", b"\t1", b"4294967297", b"18446744073709551616", b"x", b"1 2")
        return b"kick %b\r\n" % self.rng.choice((b"0", b"1", b"2", b"3", b"9", b"100", self.rng.choice(odd)))

    def look(self) -> bytes:
        id = self.id()
        return self.rng.choice(
            (b"peek %d\r\n" % id, b"stats-job %d\r\n" % id, b"peek-ready\r\n", b"peek-delayed\r\n", b"peek-buried\r\n")
        )

    def statistics(self) -> bytes:
        which = (b"stats", b"stats-tube %b" % self.name(), b"list-tubes", b"list-tubes-watched", b"list-tube-used")
        return self.rng.choice(which) + b"\r\n"

    def name(self) -> bytes:
        return self.rng.choice(self.tubes if self.rng.random() < 0.97 else [b"-x", b"x:y", b"f" * 201, b"nothing"])

    def tube(self) -> bytes:
        return self.rng.choice((b"use ", b"watch ", b"watch ", b"ignore ")) + self.name() + b"\r\n"

    def specialise(self) -> bytes:
        """Watches one tube only, so that several clients can wait, each on its own."""
        name = self.rng.choice(self.tubes)
        others = b"".join(b"ignore %b\r\n" % other for other in self.tubes if other != name)
        return b"watch %b\r\n%b" % (name, others)

    def pause(self) -> bytes:
        long = self.rng.choice((1, 2)) if self.timed else LARGE_S
        return b"pause-tube %b %d\r\n" % (self.name(), self.rng.choice((0, 0, long)))

    def malformed(self) -> bytes:
        rng = self.rng
        draw = rng.random()
        if draw < 0.2:
            verbs = b"| |put|put |peek|reservex|STATS|quit|quitx|stats-job|list|peek-readyx|pause-tube".split(b"|")
            return rng.choice(verbs) + b"\r\n"
        if draw < 0.3:
            size = LINE_BYTES_MAX * rng.choice((1, 1, 1, 2)) + rng.choice((-1, 0, 2, 3, 100))
            return self.command()[:-2].ljust(size - 2, b"x") + b"\r\n"
        line = bytearray(rng.choice((self.put, self.of_job, self.kick, self.look, self.tube, self.pause))())
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(line))
            junk = rng.choice(b" \t\0\n-+0123456789abx:\xff")
            if draw < 0.6:
                line[at] = junk
            elif draw < 0.8:
                line.insert(at, junk)
            elif len(line) > 1:
                del line[at]
        return bytes(line)


@dataclass
class Outcome:
    """The outcome of a run of one seed. `difference` is empty when there is none."""

    seed: int
    steps: int = 0
    difference: str = ""
    overrun: bool = False
    history: list[Step] = field(default_factory=list)


Commands = tuple[Sequence[str], Sequence[str]]
"""The two programs to compare, with their arguments; the reference comes first."""


def programs(max_job_bytes: int, shape: Shape = MEMORY) -> Commands:
    """beanstalkd and geventstalk with this limit; WireError where beanstalkd is not installed."""
    reference = beanstalkd_path()
    if reference is None:
        raise WireError("beanstalkd is not installed")
    limit = ["-z", str(max_job_bytes)]
    return [reference, *limit], [*shape.command, *shape.flags, *limit]


def setting(rng: random.Random, *, journal: bool = False) -> Setting:
    """Draws a setting; one seed in ten drains, three end with a part in which time matters, three keep a journal.

    With `journal` all of them keep one.
    """
    kind = rng.random()
    limit = rng.choice((65535, 65535, 40))
    keeps = rng.random() < 0.3 or journal
    return Setting(rng.randint(2, 5), limit, drains=kind < 0.1, timed=kind > 0.7, journal=keeps)


@contextmanager
def running(commands: Commands, drawn: Setting) -> Iterator[Pair]:
    """Both servers on unix sockets, whose bytes are there as soon as they are sent."""
    with tempfile.TemporaryDirectory() as folder:
        servers: list[ServerProcess] = []
        try:
            for number, command in enumerate(commands):
                data = Path(folder, f"data{number}")
                data.mkdir()
                journal = ["-b", str(data), "-F", "-s", str(JOURNAL_BYTES)] if drawn.journal else []
                servers.append(ServerProcess(command, journal, unix_path=str(Path(folder, str(number)))))
            ready = servers[0].wait_ready(), servers[1].wait_ready()
            pair = Pair(ready, drawn)
            try:
                yield pair
            finally:
                pair.close()
        finally:
            for server in servers:
                server.kill()


def run_seed(
    seed: int,
    steps: int,
    commands: Callable[[int], Commands] = programs,
    *,
    timed: bool | None = None,
    journal: bool = False,
) -> Outcome:
    """Runs one seed for this many steps, then a part in which time matters when the seed or `timed` says so."""
    rng = random.Random(seed)
    drawn = setting(rng, journal=journal)
    if timed is not None:
        drawn = drawn._replace(timed=timed, drains=drawn.drains and not timed)
    generator = Generator(rng, drawn.max_job_bytes)

    def draw(pair: Pair) -> Iterator[Step]:
        for number in range(steps):
            if drawn.drains and number == steps * 9 // 10:
                yield Step("drain")
            yield generator.step(pair)
        if drawn.timed:
            for twin in list(pair.twins):
                if twin.loaded:
                    yield Step("half-close", twin.number)
                yield Step("reconnect", twin.number)
            yield Step("send", 0, (b"".join(b"delete %d\r\n" % id for id in pair.live),))
            for _ in range(WINDOWS):
                yield Step("window")
                for _ in range(WINDOW_STEPS):
                    yield generator.step(pair)
                yield generator.counters(pair)

    return _run(seed, drawn, draw, commands(drawn.max_job_bytes))


def replay(
    seed: int, history: Sequence[Step], commands: Callable[[int], Commands] = programs, *, journal: bool = False
) -> Outcome:
    """Runs given steps instead of drawn ones; those that make no sense any more are left out."""
    drawn = setting(random.Random(seed), journal=journal)

    def draw(pair: Pair) -> Iterator[Step]:
        return (step for step in history if pair.may(step))

    return _run(seed, drawn, draw, commands(drawn.max_job_bytes))


def _run(seed: int, drawn: Setting, draw: Callable[[Pair], Iterator[Step]], commands: Commands) -> Outcome:
    outcome = Outcome(seed)
    with running(commands, drawn) as pair:
        try:
            for step in draw(pair):
                outcome.history.append(step)
                outcome.steps += 1
                pair.perform(step)
        except Overrun:
            outcome.overrun = True
        except (Difference, WireError) as difference:
            # On a machine that slow, something may fall due between the answers of the two; silence is a difference.
            outcome.overrun = pair.late and not isinstance(difference, Silence | WireError)
            outcome.difference = "" if outcome.overrun else str(difference)
    return outcome


def shrink(outcome: Outcome, commands: Callable[[int], Commands] = programs, *, journal: bool = False) -> Outcome:
    """Leaves out steps as long as a difference remains, for at most SHRINK_S."""
    deadline = time.monotonic() + SHRINK_S
    size = len(outcome.history) // 2
    while size:
        at = 0
        while at < len(outcome.history) and time.monotonic() < deadline:
            fewer = outcome.history[:at] + outcome.history[at + size :]
            attempt = replay(outcome.seed, fewer, commands, journal=journal)
            if attempt.difference:
                outcome = attempt
            else:
                at += size
        size //= 2
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the seeds that the arguments name; the exit code is 1 when there was a difference."""
    parser = argparse.ArgumentParser(
        prog="scripts/differential", description="Random commands to beanstalkd and to geventstalk, compared."
    )
    parser.add_argument("--seeds", type=int, default=50, help="how many seeds to run (default 50)")
    parser.add_argument("--steps", type=int, default=4000, help="steps of each seed (default 4000)")
    parser.add_argument("--first", type=int, default=None, help="first seed (default: drawn)")
    parser.add_argument("--seed", type=int, default=None, help="run this one seed only")
    parser.add_argument("--jobs", type=int, default=2, help="seeds that run at once (default 2)")
    parser.add_argument("--no-shrink", action="store_true", help="report a difference as it was found")
    parser.add_argument(
        "--shape", choices=SHAPES, default="memory", help="bodies on disk, or clients behind so many fronts"
    )
    options = parser.parse_args(arguments)
    if beanstalkd_path() is None:
        parser.exit(5, "scripts/differential: beanstalkd is not installed; $BEANSTALKD may name it\n")
    first = random.SystemRandom().randrange(10**6) if options.first is None else options.first
    seeds = range(first, first + options.seeds) if options.seed is None else [options.seed]
    shape = SHAPES[options.shape]
    run = partial(run_seed, steps=options.steps, commands=partial(programs, shape=shape), journal=shape.disk)
    started = time.monotonic()
    steps = different = overruns = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for done, outcome in enumerate(pool.map(run, seeds), 1):
            steps += outcome.steps
            overruns += outcome.overrun
            different += bool(outcome.difference)
            if outcome.difference:
                _print_difference(outcome, options)
            elif sys.stderr.isatty():
                print(f"\r{done} of {len(seeds)} seeds, {steps} steps ", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    print(
        f"{len(seeds)} seeds from {seeds[0]}, {steps} steps, {different} with differences, "
        f"{overruns} cut short by a slow machine, {seconds:.0f} s"
    )
    return 1 if different else 0


def _print_difference(outcome: Outcome, options: argparse.Namespace) -> None:
    print(f"seed {outcome.seed}, step {outcome.steps}: {outcome.difference}\nthe last steps:")
    _print_steps(outcome.history[-20:])
    if not options.no_shrink:
        shape = SHAPES[options.shape]
        small = shrink(outcome, partial(programs, shape=shape), journal=shape.disk)
        print(f"shrunk to {len(small.history)} steps: {small.difference}")
        _print_steps(small.history[-40:])
    print(
        f"to see it again: scripts/differential --seed {outcome.seed} --steps {options.steps} "
        f"--shape {options.shape}\n",
        flush=True,
    )


def _print_steps(steps: Sequence[Step]) -> None:
    for step in steps:
        text = str(step)
        print(f"   {text}" if len(text) < 300 else f"   {text[:280]}... ({len(text)} characters)")


if __name__ == "__main__":
    sys.exit(main())
