"""Clients that remember: what they were promised, what they asked for in vain, and whether a killed server kept to it.

A command that was answered has happened. One that was not answered may have happened or not, but of one connection's
unanswered commands only the first ones, and each as a whole. Every job has the state that is certain and, behind
it, those that unanswered commands may have given it; after a restart it must be in one of them, and the histories go
on from there. At any time only one client may act on a job, so a job's history is a line and not a tree; every other
client may at most be handed the job, which proves that all before has happened. Imports nothing of geventstalk.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from tests.support.wire import Client, WireError

TTR_S = 3600
LONG_DELAYS_S = (1000, 2000, 100_000)
SHORT_DELAY_S = 1
CLOCK_SLACK_S = 1.5  # whole seconds on the wire, and the wall clock between two servers
POPULATION = 40  # jobs for each client; with more, deleting comes first
KICK_MAX = 5
COMMON = b"common"
_CHUNK = 100
_SIZES = (0, 1, 20, 20, 100, 300, 2000, 5000)
_LARGE = 30_000  # larger than the smallest segment

READY, DELAYED, BURIED = "ready", "delayed", "buried"


class Broken(AssertionError):
    """A server did what it must not: the message says with which job, and what was promised."""


@dataclass(eq=False)
class Command:
    """One command of one client. It began when it was sent and ended when it was answered, if it was."""

    client: int
    number: int
    line: bytes
    expected: bytes
    begun: float = 0.0
    ended: float = inf
    jobs: list[Job] = field(default_factory=list)
    happened: bool | None = None

    @property
    def word(self) -> str:
        return self.line.split(b" ", 1)[0].split(b"\r", 1)[0].decode()

    def before(self, other: Command) -> bool:
        """Returns whether this was surely executed earlier."""
        if self.client == other.client:
            return self.number < other.number
        return self.ended < other.begun


@dataclass(frozen=True)
class State:
    """The part of a job that a restart must bring back. `reserves` is a lower bound. `by` is the last command."""

    place: str
    pri: int
    delay: int
    by: Command = field(compare=False, repr=False)
    reserves: int = field(default=0, compare=False)
    releases: int = 0
    buries: int = 0
    kicks: int = 0


@dataclass(eq=False)
class Job:
    """A job from its put on. `pending` are the states behind the certain one, by commands without an answer."""

    body: bytes
    tube: bytes
    id: int = 0  # 0: not known
    certain: State | None = None
    pending: list[tuple[Command, State | None]] = field(default_factory=list)
    reserves: int = 0
    held: bool = False
    actor: int = -1  # the client that may act on it; -1: the one that is handed it

    @property
    def latest(self) -> State:
        """Returns what it will be when all that was sent has happened."""
        state = self.pending[-1][1] if self.pending else self.certain
        assert state is not None, "no client acts on a job that is gone"
        return state

    @property
    def gone(self) -> bool:
        return (self.pending[-1][1] if self.pending else self.certain) is None

    def settle(self, command: Command) -> None:
        """The command has happened, and all before it."""
        for at, (other, state) in enumerate(self.pending):
            if other is command:
                self.certain = state
                del self.pending[: at + 1]
                return

    def __str__(self) -> str:
        may = [f"{command.word}: {state}" for command, state in self.pending]
        return f"job {self.id} of {self.tube!r} ({len(self.body)} bytes): {self.certain}, perhaps {may}"


class Found(NamedTuple):
    """A job as a restarted server shows it, between two moments."""

    body: bytes
    stats: dict[str, str]
    asked: float
    told: float


class History:
    """The histories of all clients of one journal directory, over all lives of its server."""

    def __init__(self, seed: int, clients: int, *, bounded: bool = False) -> None:
        """With `bounded` memory a server may refuse a put."""
        self.random = random.Random(seed)
        self.clients = clients
        self.bounded = bounded
        self.counts: Counter[str] = Counter()
        self.doubts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._jobs: dict[bytes, Job] = {}  # by body
        self._ids: dict[int, Job] = {}
        self._dead: set[int] = set()
        self._number = 0
        self._first_id = 1  # of the life that runs or ran last
        self._puts = 0  # as many ids as that life may have given
        self._unanswered: list[Command] = []

    @property
    def ids(self) -> list[int]:
        """Of the jobs that are there."""
        return sorted(self._ids)

    # --- what clients ask for

    def plan(self, client: int, used: bytes) -> list[Command]:
        """The next commands of a client, to be sent together; `used` is the tube that it uses."""
        with self._lock:
            commands: list[Command] = []
            quiet = True  # no reserve so far, so it is known where the client's own jobs are
            for _ in range(self.random.choice((1, 3, 12))):
                command = self._draw(client, used, quiet)
                quiet = quiet and not command.word.startswith("reserve-with")
                commands.append(command)
            now = time.monotonic()
            for command in commands:
                command.begun = now
            self._unanswered += commands
            return commands

    def _draw(self, client: int, used: bytes, quiet: bool) -> Command:
        draw = self.random
        mine = [job for job in self._jobs.values() if job.actor == client and not job.gone]
        crowded = len(self._jobs) > POPULATION * self.clients
        if draw.random() < (0.08 if crowded else 0.35):
            return self._put(client, used)
        if draw.random() < 0.3:
            timeout = 1 if draw.random() < 0.01 else 0
            return self._command(client, b"reserve-with-timeout %d" % timeout, b"")
        buried = [job for job in mine if job.tube == used != COMMON and job.latest.place == BURIED and not job.held]
        if buried and draw.random() < 0.15:
            buried.sort(key=lambda job: job.latest.by.number)
            return self._kick_or_peek(client, buried)
        choice = [job for job in mine if job.held or job.latest.place != READY or quiet]
        choice = [job for job in choice if job.id and (job.held or not self._may_mature(job))]
        if not choice:
            return self._put(client, used) if not crowded else self._command(client, b"reserve-with-timeout 0", b"")
        return self._act(client, draw.choice(choice), crowded)

    def _act(self, client: int, job: Job, crowded: bool) -> Command:
        """Something with a job that the client may act on."""
        draw = self.random
        pri = draw.choice((0, 1, 500, 1023, 1024, 2**32 - 1))
        if draw.random() < (0.5 if crowded else 0.2) or (job.latest.place == READY and not job.held):
            command = self._command(client, b"delete %d" % job.id, b"DELETED\r\n")
            command.jobs.append(job)
            job.pending.append((command, None))
            return command
        if not job.held:
            if draw.random() < 0.5:
                command = self._command(client, b"kick-job %d" % job.id, b"KICKED\r\n")
                self._change(command, job, place=READY, kicks=job.latest.kicks + 1)
                self._let_go(job)
                return command
            body = b"RESERVED %d %d\r\n%b\r\n" % (job.id, len(job.body), job.body)
            command = self._command(client, b"reserve-job %d" % job.id, body)
            job.reserves += 1
            job.held = True
            self._change(command, job, place=READY)
            return command
        action = draw.random()
        if action < 0.2:
            return self._command(client, b"touch %d" % job.id, b"TOUCHED\r\n")
        job.held = False
        if action < 0.6:
            command = self._command(client, b"bury %d %d" % (job.id, pri), b"BURIED\r\n")
            self._change(command, job, place=BURIED, pri=pri, buries=job.latest.buries + 1)
            return command
        delay = draw.choice((0, 0, SHORT_DELAY_S, *LONG_DELAYS_S))
        command = self._command(client, b"release %d %d %d" % (job.id, pri, delay), b"RELEASED\r\n")
        place = DELAYED if delay else READY
        self._change(command, job, place=place, pri=pri, delay=delay, releases=job.latest.releases + 1)
        self._let_go(job)
        return command

    def _put(self, client: int, used: bytes) -> Command:
        draw = self.random
        self._puts += 1
        size = _LARGE if draw.random() < 0.004 else draw.choice(_SIZES)
        token = b"%d-%d-" % (client, self._number)
        body = token + token * (size // len(token))
        pri = draw.choice((0, 1, 1024, 2**32 - 1))
        delay = draw.choice((0, 0, 0, 0, SHORT_DELAY_S, *LONG_DELAYS_S))
        line = b"put %d %d %d %d\r\n%b" % (pri, delay, TTR_S, len(body), body)
        command = self._command(client, line, b"")
        job = self._jobs[body] = Job(body, used, actor=client)
        job.pending.append((command, State(DELAYED if delay else READY, pri, delay, command)))
        command.jobs.append(job)
        self._let_go(job)
        return command

    def _kick_or_peek(self, client: int, buried: list[Job]) -> Command:
        """Of a tube that no other client uses, in which these jobs are buried in this order."""
        first = buried[0]
        if self.random.random() < 0.3:
            reply = b"FOUND %d %d\r\n%b\r\n" % (first.id, len(first.body), first.body)
            return self._command(client, b"peek-buried", reply)
        bound = self.random.randint(1, KICK_MAX)
        command = self._command(client, b"kick %d" % bound, b"KICKED %d\r\n" % min(bound, len(buried)))
        for job in buried[:bound]:
            self._change(command, job, place=READY, kicks=job.latest.kicks + 1)
        return command

    def _command(self, client: int, line: bytes, expected: bytes) -> Command:
        self._number += 1
        return Command(client, self._number, line + b"\r\n", expected)

    def _change(self, command: Command, job: Job, **changes: Any) -> None:
        state = replace(job.latest, by=command, reserves=job.reserves, **changes)
        job.pending.append((command, state))
        command.jobs.append(job)

    def _let_go(self, job: Job) -> None:
        """Once it is ready, any client may get a job of the common tube."""
        if job.tube == COMMON and (job.latest.place == READY or self._may_mature(job)):
            job.actor = -1

    def _may_mature(self, job: Job) -> bool:
        return job.latest.place == DELAYED and job.latest.delay == SHORT_DELAY_S

    # --- what the server says

    def answered(self, command: Command, reply: bytes) -> None:
        """Raises Broken when it is not what had to be said."""
        with self._lock:
            self._unanswered.remove(command)
            command.ended = time.monotonic()
            command.happened = True
            self.counts[command.word] += 1
            word, _, rest = reply.partition(b" ")
            if command.word == "put":
                if reply == b"OUT_OF_MEMORY\r\n" and self.bounded:
                    self.counts["refused"] += 1
                    del self._jobs[command.jobs[0].body]
                    return
                if word != b"INSERTED":
                    raise Broken(f"a put was answered {reply!r}")
                self._name(command.jobs[0], int(rest))
            elif command.word == "reserve-with-timeout":
                if word == b"RESERVED":
                    self._delivered(command, reply)
                elif reply != b"TIMED_OUT\r\n":
                    raise Broken(f"a reserve was answered {reply!r}")
            elif reply != command.expected:
                about = ", ".join(map(str, command.jobs))
                raise Broken(f"{command.line!r} was answered {reply[:80]!r}, not {command.expected[:80]!r}: {about}")
            for job in command.jobs:
                job.settle(command)
                if job.certain is None and not job.pending and job.body in self._jobs:  # not deleted by its next holder
                    self._bury_for_ever(job)

    def _name(self, job: Job, id: int) -> None:
        """The job has this id: one that no other ever had."""
        if job.id == id:
            return
        other = self._ids.get(id)
        if job.id or other or id in self._dead:
            raise Broken(f"id {id} is given twice: {other or 'a job that was deleted'}, and {job}")
        if id < self._first_id:
            raise Broken(f"id {id} is given after {self._first_id - 1}: {job}")
        job.id = id
        self._ids[id] = job

    def _delivered(self, command: Command, reply: bytes) -> None:
        header, _, body = reply.partition(b"\r\n")
        body = body[:-2]
        id = int(header.split()[1])
        job = self._jobs.get(body)
        if job is None:
            about = self._ids.get(id) or ("was deleted" if id in self._dead else "was never put")
            raise Broken(f"job {id} is delivered with body {body[:40]!r}: {about}")
        self._name(job, id)
        if job.held or job.gone:
            raise Broken(f"delivered although {'held' if job.held else 'deleted'}: {job}")
        state = job.latest
        if state.place == BURIED or (state.place == DELAYED and command.ended < _due(state)[0] - CLOCK_SLACK_S):
            raise Broken(f"delivered although {state.place}: {job}")
        for other, _ in job.pending:
            other.happened = True
        job.certain = state
        job.pending.clear()
        job.held = True
        job.actor = command.client
        job.reserves += 1

    def _bury_for_ever(self, job: Job) -> None:
        del self._jobs[job.body]
        if job.id:
            del self._ids[job.id]
            self._dead.add(job.id)

    # --- after a restart

    def verify(self, client: Client, *, restarted: bool = True) -> None:
        """The server serves no other client, and without `restarted` it runs on. Raises Broken; changes nothing there.

        A server that runs on does not give the ids of half puts again. A WireError, when the server ends meanwhile,
        leaves the histories as they were.
        """
        begun = time.monotonic()
        found = self._look(client)
        totals = client.stats(b"stats")
        count = sum(int(totals[f"current-jobs-{place}"]) for place in (READY, DELAYED, BURIED, "reserved"))
        firsts = []
        for tube in [COMMON, *map(own_tube, range(self.clients))]:
            client.ask(b"use %b" % tube)
            reply = client.ask(b"peek-buried")
            firsts.append((tube, int(reply.split()[1]) if reply.startswith(b"FOUND") else 0))
        bodies = {seen.body: id for id, seen in found.items()}
        fates: list[tuple[Command, bool]] = []
        for job in list(self._jobs.values()):
            id = job.id or bodies.get(job.body, 0)
            fates += self._judge(job, found.pop(id, None) if id else None)
            if id and not job.id and not job.gone:
                self._name(job, id)
        if found:
            raise Broken(f"there are jobs that no client put: {found}")
        if count != len(self._jobs):
            raise Broken(f"there are {count} jobs, {len(self._jobs)} of them known")
        self.judge_order(self._unanswered, fates)
        for command in self._unanswered:
            command.ended = begun
        for tube, id in firsts:
            self._judge_buried(tube, id)
        self._unanswered.clear()
        end = self._first_id + self._puts
        self._first_id = max([0, *self._ids, *self._dead]) + 1
        self._puts = 0 if restarted else end - self._first_id

    def _look(self, client: Client) -> dict[int, Found]:
        """Every job there can be, by id."""
        ids = sorted({*self._ids, *(set(range(self._first_id, self._first_id + self._puts)) - self._dead)})
        found: dict[int, Found] = {}
        for at in range(0, len(ids), _CHUNK):
            part = ids[at : at + _CHUNK]
            asked = time.monotonic()
            client.send(b"".join(b"peek %d\r\nstats-job %d\r\n" % (id, id) for id in part))
            for id in part:
                peeked, stats = client.reply(), client.reply()
                if peeked != b"NOT_FOUND\r\n":
                    header, _, body = peeked.partition(b"\r\n")
                    if not header.startswith(b"FOUND %d " % id) or not stats.startswith(b"OK "):
                        raise Broken(f"job {id}: {peeked[:80]!r}, {stats[:80]!r}")
                    lines = stats.partition(b"\r\n")[2].decode().splitlines()[1:-1]
                    parsed = dict(line.split(": ", 1) for line in lines)
                    found[id] = Found(body[:-2], parsed, asked, time.monotonic())
        return found

    def _judge(self, job: Job, seen: Found | None) -> Iterator[tuple[Command, bool]]:
        """Settles a job as it was found. Yields which of its unanswered commands happened, as far as that shows."""
        states = [job.certain, *(state for _, state in job.pending)]
        fits = [at for at, state in enumerate(states) if _fits(job, state, seen)]
        if not fits:
            stats = "gone" if seen is None else seen.stats
            raise Broken(f"{job} came back as {stats}{'' if not seen or seen.body == job.body else ', garbled'}")
        for at, (command, _) in enumerate(job.pending, 1):
            if at <= fits[0]:
                yield command, True
            elif at > fits[-1]:
                yield command, False
        job.certain = states[fits[-1]]
        job.pending.clear()
        job.held = False
        if job.certain is None or seen is None:
            self._bury_for_ever(job)
            return
        job.reserves = int(seen.stats["reserves"])
        if job.tube == COMMON:
            stays = seen.stats["state"] != READY and not self._may_mature(job)
            job.actor = self.random.randrange(self.clients) if stays else -1
        if seen.stats["state"] == READY:
            job.certain = replace(job.certain, place=READY)

    def judge_order(self, unanswered: list[Command], fates: list[tuple[Command, bool]]) -> None:
        """Of one connection's unanswered commands only the first ones may have happened, each as a whole."""
        for command, happened in fates:
            if command.happened not in (None, happened):
                raise Broken(f"half of {command.line[:80]!r} happened: {', '.join(map(str, command.jobs))}")
            command.happened = happened
            self.doubts["happened" if happened else "did not happen"] += 1
        skipped: dict[int, Command] = {}
        for command in sorted(unanswered, key=lambda command: command.number):
            if command.happened is False and not (self.bounded and command.word == "put"):  # it may have been refused
                skipped.setdefault(command.client, command)
            elif command.happened and command.client in skipped:
                before = skipped[command.client].line
                raise Broken(f"{command.line[:80]!r} happened, {before[:80]!r} before it on its connection did not")

    def _judge_buried(self, tube: bytes, first: int) -> None:
        """No other buried job of the tube may surely have been buried before its first one."""
        buried = [
            job for job in self._jobs.values() if job.tube == tube and job.certain and job.certain.place == BURIED
        ]
        job = self._ids.get(first)
        if (job in buried) != bool(buried):
            raise Broken(f"first buried job of {tube!r} is {first}; buried are {[job.id for job in buried]}")
        for other in buried:
            if job is not None and job.latest.by is not other.latest.by and other.latest.by.before(job.latest.by):
                raise Broken(f"{job} is first of its buried tube, before {other}")

    def drain(self, client: Client) -> int:
        """Behind verify(), the last check: everything is kicked in order, reserved in order and deleted.

        Returns how many jobs there were. Raises Broken.
        """
        for tube in [COMMON, *map(own_tube, range(self.clients))]:
            client.ask(b"use %b" % tube)
            while (reply := client.ask(b"peek-buried")).startswith(b"FOUND "):
                id = int(reply.split()[1])
                self._judge_buried(tube, id)
                job = self._ids[id]
                job.certain = replace(job.latest, place=READY)
                if client.ask(b"kick 1") != b"KICKED 1\r\n":
                    raise Broken(f"cannot be kicked: {job}")
            self._judge_buried(tube, 0)
            client.ask(b"kick 1000000")
            client.ask(b"watch %b" % tube)
        expected = sorted((job.latest.pri, id) for id, job in self._ids.items())
        for _, id in expected:
            job = self._ids[id]
            reply = client.ask(b"reserve-with-timeout 0")
            if reply != b"RESERVED %d %d\r\n%b\r\n" % (id, len(job.body), job.body):
                raise Broken(f"{reply[:80]!r} instead of {job}")
            if client.ask(b"delete %d" % id) != b"DELETED\r\n":
                raise Broken(f"cannot be deleted: {job}")
            self._bury_for_ever(job)
        if (reply := client.ask(b"reserve-with-timeout 0")) != b"TIMED_OUT\r\n":
            raise Broken(f"{reply[:80]!r} after the last job")
        return len(expected)


def own_tube(client: int) -> bytes:
    """The tube that only this client uses and watches."""
    return b"own-%d" % client


def _due(state: State) -> tuple[float, float]:
    """When the delay of a delayed job ends, at the earliest and at the latest."""
    return state.by.begun + state.delay, state.by.ended + state.delay


def _fits(job: Job, state: State | None, seen: Found | None) -> bool:
    """Returns whether what was found is what this state would have become."""
    if state is None or seen is None:
        return state is None and seen is None
    stats = seen.stats
    numbers = [int(stats[key]) for key in ("pri", "delay", "ttr", "releases", "buries", "kicks", "timeouts")]
    if numbers != [state.pri, state.delay, TTR_S, state.releases, state.buries, state.kicks, 0]:
        return False
    # An unanswered reserve is recorded when its job is moved; another client's is known.
    if not state.reserves <= int(stats["reserves"]) <= job.reserves + 1:
        return False
    if stats["tube"].strip('"') != job.tube.decode() or seen.body != job.body:
        return False
    if state.place != DELAYED:
        return stats["state"] == state.place
    earliest, latest = _due(state)
    if stats["state"] == READY:
        return seen.told > earliest - CLOCK_SLACK_S
    left = int(stats["time-left"])
    on_time = earliest - CLOCK_SLACK_S <= seen.told + left + 1 and seen.asked + left <= latest + CLOCK_SLACK_S
    return stats["state"] == DELAYED and on_time


class Traffic:
    """All clients at work in threads, until the server goes or stop() is called.

    Clients that are `apart` use and watch their own tubes only. So one whose connection breaks, which a server that
    goes on takes for its end, has nothing that another may be handed before verify().
    """

    def __init__(self, history: History, connect: Callable[[], Client], *, apart: bool = False) -> None:
        self._history = history
        self._connect = connect
        self._apart = apart
        self.turns = [0] * history.clients
        """How often each client has had all its replies."""
        self._over = threading.Event()
        self._together = threading.Barrier(history.clients)
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(history.clients)]
        for thread in self._threads:
            thread.start()

    @property
    def at_work(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    @property
    def left(self) -> list[int]:
        """The clients that are still at work."""
        return [number for number, thread in enumerate(self._threads) if thread.is_alive()]

    def stop(self) -> None:
        """Has the clients wait for their last replies, as far as they come. Raises Broken for what they saw."""
        self._over.set()
        self.join()

    def join(self) -> None:
        """Waits for the clients after the server has gone. Raises Broken for what they saw."""
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _run(self, number: int) -> None:
        try:
            with self._connect() as client:
                self._work(number, client)
        except TimeoutError as error:
            self._failures.append(Broken(f"client {number}: the server takes nothing: {error}"))
        except (ConnectionError, threading.BrokenBarrierError):
            pass
        except WireError as error:
            if not str(error).startswith("closed"):
                self._failures.append(Broken(f"client {number}: {error}"))
        except BaseException as error:  # handed to the thread that asked for it
            self._failures.append(error)
        finally:
            self._together.abort()

    def _work(self, number: int, client: Client) -> None:
        own = own_tube(number)
        for tube in (own,) if self._apart else (own, COMMON):
            client.ask(b"watch %b" % tube)
        client.ask(b"ignore default")
        turn = 0
        while not self._over.is_set():
            used = COMMON if turn % 2 and not self._apart else own
            client.ask(b"use %b" % used)
            commands = self._history.plan(number, used)
            client.send(b"".join(command.line for command in commands))
            for command in commands:
                self._history.answered(command, client.reply())
            turn += 1
            self.turns[number] = turn
        self._together.wait()  # no client is handed what another holds while there are replies to come
