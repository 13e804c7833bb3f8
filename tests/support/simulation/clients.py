"""Simulated clients: each draws what it sends, in what pieces, and when it goes. They see nothing but their replies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.simulation.host import Connection
from tests.support.simulation.oracle import LINE_BYTES_MAX, Command, Oracle, View

PRIORITIES = (0, 1, 1, 2, 3, 1023, 1024, 4294967295)
DELAYS = (0, 0, 0, 0, 1, 2, 5, 60)
TTRS = (0, 1, 2, 10, 120, 120)
TIMEOUTS = (0, 0, 1, 1, 2, 10)
PAUSES = (0, 1, 1, 3, 20)

KINDS = (
    *("put", "put", "put", "put", "reserve", "reserve", "reserve-for-ever", "reserve-job", "delete", "delete"),
    *("release", "release", "bury", "bury", "touch", "kick", "kick-job", "pause-tube", "use", "watch", "ignore"),
    *("peek", "stats-job", "look", "wrong", "quit"),
)
OF_A_JOB = ("reserve-job", "touch", "kick-job", "peek", "stats-job")
OF_A_TUBE = ("use", "watch", "ignore")
HOLDERS = ("delete", "release", "bury", "touch")
"""What one does with a job that one holds; the first also with others."""


@dataclass
class Habits:
    """The habits that all clients of a run share. `weights` has the likelihood of each kind of command."""

    tubes: Sequence[bytes]
    weights: dict[str, float]
    body_bytes: int
    max_job_bytes: int
    pipeline: int  # at most this many commands at once
    own: float  # how likely a client deals with a job that it was given itself
    wrong_bodies: float
    tagged: float

    @staticmethod
    def drawn(draw: random.Random, max_job_bytes: int) -> Habits:
        likes: dict[str, float] = {}
        for kind in KINDS:
            likes[kind] = likes.get(kind, 0) + draw.choice((0, 0.2, 1, 1, 3))
        for kind in draw.sample(
            ("reserve", "release", "bury", "delete", "kick", "reserve-job"), draw.choice((0, 1, 2))
        ):
            likes[kind] = 8
        likes["put"] += 1
        likes["quit"] = min(likes["quit"], 0.05)
        likes["reserve-for-ever"] *= 0.5
        tubes = [b"default", b"t", b"u", b"work"][: draw.choice((1, 1, 2, 4))]
        body = draw.choice((5, 40, 40, max_job_bytes))
        pipeline, own, tagged = draw.choice((1, 2, 5, 20)), draw.choice((0.5, 0.9, 0.97)), draw.choice((0, 0, 0.1, 0.7))
        return Habits(tubes, likes, body, max_job_bytes, pipeline, own, 0.03, tagged)


@dataclass(eq=False)
class SimulatedClient:
    """One client from its connecting to its end. `ids` are those that any client was told."""

    draw: random.Random
    habits: Habits
    oracle: Oracle
    view: View
    ids: list[int]
    outgoing: bytearray = field(default_factory=bytearray)
    held: list[int] = field(default_factory=list)
    connection: Connection | None = None
    deaf: bool = False
    over: bool = False
    _incoming: bytes = b""
    syncs_first: bool = False
    heard: Callable[[bytes], None] = lambda data: None

    # --- the peer of a connection

    def deliver(self, data: bytes) -> bool:
        if self.deaf:
            return False
        self.heard(data)
        self.oracle.receives(self.view, data, self.syncs_first)
        self._incoming += data
        self._read()
        return True

    def disconnect(self) -> None:
        self.over = True

    # --- acting

    def talk(self) -> None:
        """Decides on some commands and has their bytes ready to send."""
        for _ in range(self.draw.randint(1, self.habits.pipeline)):
            self.say(self._draw_command())

    def say(self, command: Command) -> None:
        self.view.unanswered.append(command)
        self.outgoing += command.wire

    def send(self) -> None:
        """Sends a piece of what is ready, or all of it."""
        assert self.connection is not None
        size = len(self.outgoing)
        if self.draw.random() < 0.4:
            size = self.draw.randint(1, size)
        self.connection.inbox.append(bytes(self.outgoing[:size]))
        del self.outgoing[:size]

    def half_close(self) -> None:
        """Sends nothing more, and reads on."""
        assert self.connection is not None
        self.outgoing.clear()
        self.connection.ended = True

    def hang_up(self) -> None:
        """Is gone; what it sent last may be lost with it."""
        assert self.connection is not None
        if self.draw.random() < 0.5:
            self.connection.inbox.clear()
        self.half_close()
        self.deaf = True
        self.over = True

    # --- reading

    def _read(self) -> None:
        """Takes whole replies from what has come, to learn which jobs it holds and which ids there are."""
        while True:
            line, end, rest = self._incoming.partition(b"\r\n")
            if not end:
                return
            words = line.split()
            if words[0] in (b"RESERVED", b"FOUND", b"OK"):
                size = int(words[-1]) + 2
                if len(rest) < size:
                    return
                rest = rest[size:]
            if words[0] == b"RESERVED":
                self.held.append(int(words[1]))
            elif words[0] == b"INSERTED":
                self.ids.append(int(words[1]))
            self._incoming = rest

    # --- drawing

    def _draw_command(self) -> Command:
        likes = self.habits.weights
        if self.held and self.draw.random() < 0.5:
            likes = {kind: likes[kind] + 0.01 for kind in HOLDERS}
        kind = self.draw.choices(list(likes), list(likes.values()))[0]
        if kind in HOLDERS[1:] and not self.held and self.draw.random() < self.habits.own:
            kind = "reserve"  # first it needs a job
        if kind in OF_A_JOB:
            id = self._id()
            return Command(kind, b"%b %d" % (kind.encode(), id), id=id)
        if kind in OF_A_TUBE:
            tube = self._tube()
            return Command(kind, kind.encode() + b" " + tube, tube=tube)
        drawn: Command = getattr(self, "_draw_" + kind.replace("-", "_"))()
        return drawn

    def _tube(self) -> bytes:
        return self.draw.choice(self.habits.tubes)

    def _id(self) -> int:
        if self.held and self.draw.random() < self.habits.own:
            at = self.draw.randrange(len(self.held))
            return self.held[at] if self.draw.random() < 0.2 else self.held.pop(at)
        if self.ids and self.draw.random() < 0.95:
            return self.draw.choice(self.ids[-20:])
        return self.draw.choice((0, 1, len(self.ids) + 1, 2**64 - 1))

    def _draw_put(self) -> Command:
        draw = self.draw
        pri, delay_s, ttr_s = draw.choice(PRIORITIES), draw.choice(DELAYS), draw.choice(TTRS)
        size = draw.randint(0, self.habits.body_bytes)
        end = b"\r\n"
        if draw.random() < self.habits.wrong_bodies:
            size, end = draw.choice(((size, b"xx"), (self.habits.max_job_bytes + draw.randint(1, 50), end)))
        body = (b"%d." % draw.randrange(10**9) * (size // 2 + 1))[:size] + end
        line = b"put %d %d %d %d" % (pri, delay_s, ttr_s, size)
        command = Command("put", line, body, 0, pri, delay_s, ttr_s)
        if draw.random() < self.habits.tagged:
            command.tags = self._draw_tags()
            command.line += b" " + command.tags
        return command

    def _draw_tags(self) -> bytes:
        """Returns tags that leave every reply as it is. A unique key leaves a mark when its job is deleted."""
        draw = self.draw
        words = (b"note:n%d", b"con:k%d:4294967295", b"grp:g%d", b"idp:u%d", b"idp:u%d:60", b"dead:d%d")
        drawn = [word % draw.randrange(10**9) for word in draw.sample(words, draw.randint(1, 3))]
        if draw.random() < 0.3:
            drawn.append(b"tries:4294967295 ttl:4294967295")
        names = [word.split(b":")[0] for word in drawn]
        return b" ".join(word for at, word in enumerate(drawn) if names.index(names[at]) == at)

    def _draw_reserve(self) -> Command:
        seconds = self.draw.choice(TIMEOUTS)
        return Command("reserve", b"reserve-with-timeout %d" % seconds, seconds=seconds)

    def _draw_reserve_for_ever(self) -> Command:
        return Command("reserve", b"reserve")

    def _draw_delete(self) -> Command:
        id = self._id()
        if id in self.ids and self.draw.random() < 0.7:
            self.ids.remove(id)  # most likely it is gone
        return Command("delete", b"delete %d" % id, id=id)

    def _draw_release(self) -> Command:
        id, pri, delay_s = self._id(), self.draw.choice(PRIORITIES), self.draw.choice(DELAYS)
        return Command("release", b"release %d %d %d" % (id, pri, delay_s), id=id, pri=pri, delay_s=delay_s)

    def _draw_bury(self) -> Command:
        id, pri = self._id(), self.draw.choice(PRIORITIES)
        return Command("bury", b"bury %d %d" % (id, pri), id=id, pri=pri)

    def _draw_kick(self) -> Command:
        bound = self.draw.choice((0, 1, 2, 3, 100))
        return Command("kick", b"kick %d" % bound, bound=bound)

    def _draw_pause_tube(self) -> Command:
        tube, seconds = self._tube(), self.draw.choice(PAUSES)
        return Command("pause-tube", b"pause-tube %s %d" % (tube, seconds), seconds=seconds, tube=tube)

    def _draw_look(self) -> Command:
        tube = self._tube()
        lines = (
            b"peek-ready",
            b"peek-delayed",
            b"peek-buried",
            b"list-tubes",
            b"list-tube-used",
            b"stats-tube " + tube,
        )
        return Command("look", self.draw.choice(lines))

    def _draw_wrong(self) -> Command:
        lines = (
            b"",
            b"nonsense",
            b"put",
            b"put 1 2 3",
            b"delete",
            b"delete x",
            b"bury 1",
            b"kick",
            b"use -t",
            b"\0\xff",
        )
        return Command("wrong", self.draw.choice((*lines, b"delete " + b"1" * LINE_BYTES_MAX)))

    def _draw_quit(self) -> Command:
        return Command("quit", b"quit")
