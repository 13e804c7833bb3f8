"""Checks the simulated server, as its clients see it: every reply when it is made, and when it is sent.

It keeps its own naive account of all jobs and a log of everything that must outlive the process. After a crash, what is
found must be the state behind some entry of that log (a prefix of history), and behind all that was promised; what was
unanswered may or may not have happened. Times are the wall clock's.
It asks the engine in one case only: which of the things that are due have happened already is not promised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from geventstalk.core.engine import Engine
from geventstalk.core.job import (
    BURIED,
    DELAYED,
    READY,
    RESERVED,
    SECOND_NS,
    STATE_NAMES,
    Job,
    Tally,
    held_body,
    tags_of,
)
from tests.support.check import check

LINE_BYTES_MAX = 224
Counts = tuple[int, int, int, int, int]
"""Reserves, timeouts, releases, buries, kicks."""


class Violation(AssertionError):
    """The server did what it must not."""


def require(condition: object, text: str, *details: object) -> None:
    if not condition:
        raise Violation(" ".join([text, *map(str, details)]))


class Kept(NamedTuple):
    """The part of a job that outlives the process. `order` is that of burying, `deadline_ns` the wall clock's."""

    tube: bytes
    body: bytes
    ttr_s: int
    created_ns: int
    pri: int
    delay_s: int
    state: int
    deadline_ns: int
    order: int
    counts: Counts
    tags: bytes


@dataclass
class Record:
    """A job as it is now. `holder` is the number of a session."""

    id: int
    tube: bytes
    body: bytes
    ttr_s: int
    created_ns: int
    pri: int
    delay_s: int
    state: int = READY
    deadline_ns: int = 0
    order: int = 0
    holder: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * 5)
    tags: bytes = b""

    def kept(self) -> Kept:
        state = READY if self.state == RESERVED else self.state
        counts = (self.counts[0], self.counts[1], self.counts[2], self.counts[3], self.counts[4])
        deadline_ns = self.deadline_ns if state == DELAYED else 0
        order = self.order if state == BURIED else 0
        fixed = (self.tube, self.body, self.ttr_s, self.created_ns)
        return Kept(*fixed, self.pri, self.delay_s, state, deadline_ns, order, counts, self.tags)


RESERVES, TIMEOUTS, RELEASES, BURIES, KICKS = range(5)


@dataclass
class Command:
    """A command as a client sends it. `line` is without its CRLF; `body` is all that follows, with its end."""

    kind: str
    line: bytes
    body: bytes = b""
    id: int = 0
    pri: int = 0
    delay_s: int = 0
    seconds: int = -1  # ttr, timeout, pause
    bound: int = 0
    tube: bytes = b""
    tags: bytes = b""

    @property
    def wire(self) -> bytes:
        return self.line + b"\r\n" + self.body

    def __str__(self) -> str:
        return self.line.decode("latin-1")[:80]


class Change(NamedTuple):
    """An operator's change of a job, whichever client holds it. -1 and an empty name leave it as it is."""

    kind: str
    pri: int = -1
    delay_s: int = -1
    ttr_s: int = -1
    tube: bytes = b""


class Reply(NamedTuple):
    """A reply that was made: where it ends in what its client is to receive, and what it promises when it is sent."""

    end: int
    seen: int  # this much of the log it may have looked at
    changed: int  # this much of the log it stands for itself; 0 when it changed nothing


class View:
    """One conversation."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.used = b"default"
        self.watched = {b"default": None}
        self.unanswered: deque[Command] = deque()  # in the order sent
        self.running: Command | None = None
        self.began_ns = 0
        self.turn = 0  # orders the beginnings of reserves
        self.half_closed = False
        self.closing = False
        self.replies: deque[Reply] = deque()
        self.expected = bytearray()  # made and not yet received
        self.made = 0
        self.received = 0
        self.answered: list[tuple[Command, bytes]] = []
        self.awaits = 0  # the job whose body the reply waits for
        self.awaited = b""  # that body
        self.decided = 0  # this much of the log is what that command changed
        self.slack_ns = 0  # a reserve that begins anew waits for whole seconds

    @property
    def waits(self) -> bool:
        return self.running is not None and self.running.kind.startswith("reserve") and not self.awaits


class Oracle:
    """Call its methods as things happen; each raises Violation when they must not. `look` finds the engine."""

    def __init__(self, wall_ns: Callable[[], int], look: Callable[[], Engine], max_job_bytes: int) -> None:
        self.wall_ns = wall_ns
        self.look = look
        self.max_job_bytes = max_job_bytes
        self.jobs: dict[int, Record] = {}
        self.log: list[tuple[int, Kept | None]] = []
        self.kept = 0  # this much of the log must survive the process
        self.synced = 0  # and this much the loss of power
        self.told: dict[int, int] = {}  # ids that were told to a client, and where in the log their puts are
        self.views: dict[int, View] = {}
        self.pauses: dict[bytes, int] = {}
        self.uploads: dict[bytes, int] = {}
        self.draining = False
        self.room = True  # whether a put must find room
        self.slicing = False  # the engine has not finished what is due
        self.stepping: View | None = None  # whose commands are executed now
        self.leaving = 0  # whose jobs are given back now
        # Replies to others, and whether they wait for a body, made before the one that caused them.
        self._served: list[tuple[View, bytes, bool]] = []
        self._order = 0
        self._turn = 0
        self.checked = 0

    # --- conversations

    def join(self, number: int) -> View:
        view = self.views[number] = View(number)
        return view

    def left(self, number: int) -> None:
        """The connection is over, and what the client held is given back."""
        self.leaving = 0
        running = self.views.pop(number).running
        if running is not None and running.kind == "put":
            self.uploads[running.tube] -= 1  # its body never came
        for job in self.jobs.values():
            if job.state == RESERVED and job.holder == number:
                job.state, job.holder = READY, 0
        self._tidy()

    def executes(self, view: View, line: bytes) -> None:
        """The session begins with a line."""
        require(view.running is None, "a command begins before the one ahead of it is answered:", line)
        require(not view.closing, "a command is executed behind quit:", line)
        require(view.unanswered, "a line is executed that no client sent:", line)
        command = view.unanswered[0]
        require(line == command.line, "commands are executed out of order:", line, "instead of", command.line)
        view.running = command
        view.began_ns = self.wall_ns()
        view.slack_ns = 0
        self._turn += 1
        view.turn = self._turn
        if command.kind == "quit":
            view.closing = True
        elif command.kind == "put":
            command.tube = view.used
            self.uploads[view.used] = self.uploads.get(view.used, 0) + 1
        elif command.kind in ("kick", "kick-job", "reserve-job", "stats-job"):
            for job in self.jobs.values():
                self._settle_if_seen(job)

    def steps(self, view: View | None) -> None:
        """Commands of a client are executed from now on; None: that was all for now."""
        self._pass_on()
        self.stepping = view

    def replies(self, view: View, reply: bytes) -> None:
        """The session makes a reply; it is not sent yet.

        Who is served by a command of another hears of it before that other does, so those replies are put off.
        """
        self._decided(view, reply, False)

    def awaits(self, view: View, id: int, peeks: bool) -> None:
        """The session knows which job the reply has to show, and makes the reply when the body is in memory."""
        job = self.jobs.get(id)
        body = b"" if job is None else job.body
        self._decided(view, b"%b %d %d\r\n%b" % (b"FOUND" if peeks else b"RESERVED", id, len(body) - 2, body), True)

    def begins_anew(self, view: View) -> None:
        """The reservation has ended while its body was awaited: the session executes the command once more."""
        job = self.jobs.get(view.awaits)
        if job is not None:
            self._settle_if_seen(job)
            require(job.state != RESERVED or job.holder != view.number, "a reservation is forgotten: job", job.id)
        view.awaits = 0
        view.slack_ns = SECOND_NS
        self._turn += 1
        view.turn = self._turn

    def _decided(self, view: View, reply: bytes, awaits: bool) -> None:
        if self.stepping is not None and view is not self.stepping:
            self._served.append((view, reply, awaits))
        else:
            self._reply(view, reply, awaits)
            self._pass_on()

    def _pass_on(self, id: int = 0) -> None:
        """Goes on with replies that were put off; with an id, only with that of the client that got this job."""
        while self._served and (not id or self._served[0][1].startswith(b"RESERVED %d " % id)):
            self._reply(*self._served.pop(0))

    def _reply(self, view: View, reply: bytes, awaits: bool) -> None:
        command = view.running or (view.unanswered[0] if view.unanswered else None)
        require(command is not None, "a reply to nothing:", reply)
        assert command is not None
        require(view.running or len(command.line) > LINE_BYTES_MAX - 2, "a reply to nothing:", reply)
        before = len(self.log)
        word, _, rest = reply.partition(b"\r\n")
        self.checked += 1
        if view.awaits:
            require(not awaits, "two bodies are awaited for one reply:", view.awaits, word)
            self._on_awaited(view, word.decode(), rest)
        else:
            getattr(self, "_on_" + command.kind.replace("-", "_"))(view, command, word.decode(), rest)
        if awaits:
            view.awaits, view.awaited = int(word.split()[1]), rest
            view.decided = len(self.log) if len(self.log) > before else view.decided
            return
        view.unanswered.popleft()
        view.running = None
        view.answered.append((command, word))
        view.expected += reply
        view.made += len(reply)
        changed = len(self.log) if len(self.log) > before else view.decided
        view.decided = 0
        view.replies.append(Reply(view.made, len(self.log), changed))

    def receives(self, view: View, data: bytes, syncs_first: bool) -> None:
        """The server sends bytes: from now on what they say is a promise."""
        due = bytes(view.expected)
        require(due.startswith(data), "replies are sent out of order:", data[:80], "instead of", due[:80])
        del view.expected[: len(data)]
        view.received += len(data)
        while view.replies and view.replies[0].end <= view.received:
            reply = view.replies.popleft()
            self.kept = max(self.kept, reply.seen)
            if syncs_first:
                self.synced = max(self.synced, reply.changed)

    # --- replies to each kind of command

    def _on_awaited(self, view: View, word: str, rest: bytes) -> None:
        """Checks a reply that was decided earlier, now that the body is there. A ttr begins when the client is told.

        A job that was looked at may be gone by now: it was there when the command was executed.
        """
        awaited, view.awaits = view.awaits, 0
        job = self.jobs.get(awaited)
        if word == "NOT_FOUND":
            require(job is None, "a job is there that was not found:", job)
            return
        require(awaited == int(word.split()[1]), "another job is shown than was decided:", word)
        require(rest == view.awaited, "a body is not as it was put: job", awaited)
        if word.startswith("RESERVED"):
            require(job is not None, "a job is told of that is gone:", word)
            assert job is not None
            self._settle_if_seen(job)
            require(job.state == RESERVED and job.holder == view.number, "a reservation has ended that is told:", word)
            job.deadline_ns = self.wall_ns() + job.ttr_s * SECOND_NS

    def _on_put(self, view: View, command: Command, word: str, rest: bytes) -> None:
        self.uploads[command.tube] -= 1
        if not command.body.endswith(b"\r\n"):
            require(word == "EXPECTED_CRLF", "a body without its end got", word)
        elif len(command.body) - 2 > self.max_job_bytes:
            require(word == "JOB_TOO_BIG", "a body that is too big got", word)
        elif word == "OUT_OF_MEMORY":
            require(not self.room, "a put finds no room although there is some")
        elif self.draining:
            require(word == "DRAINING", "while draining a put got", word)
        else:
            require(word.startswith("INSERTED "), "a put got", word)
            self._inserted(view, command, int(word.split()[1]))
        self._tidy()

    def _inserted(self, view: View, command: Command, id: int) -> None:
        require(id not in self.told and id not in self.jobs, "an id is used again:", id)
        now_ns = self.wall_ns()
        ttr_s = max(command.seconds, 1)
        job = Record(id, command.tube, command.body, ttr_s, view.began_ns, command.pri, command.delay_s)
        job.tags = command.tags
        if command.delay_s:
            job.state, job.deadline_ns = DELAYED, now_ns + command.delay_s * SECOND_NS
        self.jobs[id] = job
        self._note(job)
        self.told[id] = len(self.log)

    def _on_reserve(self, view: View, command: Command, word: str, rest: bytes) -> None:
        now_ns = self.wall_ns()
        if word == "TIMED_OUT":
            over = command.seconds >= 0 and now_ns >= view.began_ns + command.seconds * SECOND_NS
            require(over or view.half_closed, "a reserve timed out too early")
            best = min(self._ready_for(view), default=None)
            require(best is None or self.slicing or self._unpausing(), "a reserve timed out with a job ready:", best)
            return
        if word == "DEADLINE_SOON":
            held = [job for job in self.jobs.values() if job.state == RESERVED and job.holder == view.number]
            require(any(job.deadline_ns - SECOND_NS <= now_ns for job in held), "no deadline is soon")
            return
        job = self._reserved(view, word, rest)
        require(job.tube in view.watched, "a job of a tube that is not watched:", job.id)
        require(self.pauses.get(job.tube, 0) <= now_ns, "a job of a paused tube:", job.id)
        tubes = view.watched if view is self.stepping else (job.tube,)
        for other in self._ready_for(view):
            if other[1] != job.id and self.jobs[other[1]].tube in tubes:
                require((job.pri, job.id) < other, "job", job.id, "is reserved before", other[1])
        if not (self.slicing or self._unpausing()):
            for each in self.views.values():
                first = each.waits and each is not view and each.turn < view.turn and job.tube in each.watched
                require(
                    not first or each.half_closed or each.number == self.leaving,
                    "client",
                    view.number,
                    "is served before",
                    each.number,
                )

    def _on_reserve_job(self, view: View, command: Command, word: str, rest: bytes) -> None:
        job = self.jobs.get(command.id)
        if word == "NOT_FOUND":
            held = job is not None and job.state == RESERVED
            require(job is None or held, "reserve-job does not find", command.id)
            return
        require(job is not None and job.id == int(word.split()[1]), "reserve-job found", word)
        assert job is not None
        was = job.state
        self._reserved(view, word, rest)
        if was in (DELAYED, BURIED):
            self._note(job)

    def _reserved(self, view: View, word: str, rest: bytes) -> Record:
        require(word.startswith("RESERVED "), "a reserve got", word)
        job = self.jobs.get(int(word.split()[1]))
        require(job is not None, "a job that does not exist is reserved:", word)
        assert job is not None
        require(rest == job.body, "a body is not as it was put: job", job.id)
        now_ns = self.wall_ns()
        if job.state == RESERVED and job.holder != self.leaving:
            require(job.deadline_ns <= now_ns, "job", job.id, "has two holders")
            job.counts[TIMEOUTS] += 1
        elif job.state != RESERVED and view.running is not None and view.running.kind == "reserve":
            due = job.state == DELAYED and job.deadline_ns <= now_ns
            require(job.state == READY or due, "a", STATE_NAMES[job.state], "job is reserved:", job.id)
        job.state, job.holder, job.deadline_ns = RESERVED, view.number, now_ns + job.ttr_s * SECOND_NS
        job.counts[RESERVES] += 1
        return job

    def _on_delete(self, view: View, command: Command, word: str, rest: bytes) -> None:
        job = self.jobs.get(command.id)
        if word == "NOT_FOUND":
            others = job is not None and job.state == RESERVED and job.holder != view.number
            require(job is None or others, "delete does not find", command.id)
            return
        require(word == "DELETED" and job is not None, "delete of", command.id, "got", word)
        assert job is not None
        self._settle_if_due(job, view)
        require(job.state != RESERVED or job.holder == view.number, "the job of another is deleted:", job.id)
        del self.jobs[job.id]
        self.log.append((job.id, None))
        self._tidy()

    def _on_release(self, view: View, command: Command, word: str, rest: bytes) -> None:
        job = self._own(view, command, word, "RELEASED")
        if job is not None:
            job.pri, job.delay_s = command.pri, command.delay_s
            job.counts[RELEASES] += 1
            job.state, job.holder = (DELAYED if command.delay_s else READY), 0
            job.deadline_ns = self.wall_ns() + command.delay_s * SECOND_NS
            self._note(job)

    def _on_bury(self, view: View, command: Command, word: str, rest: bytes) -> None:
        job = self._own(view, command, word, "BURIED")
        if job is not None:
            self._order += 1
            job.pri, job.state, job.holder, job.order = command.pri, BURIED, 0, self._order
            job.counts[BURIES] += 1
            self._note(job)

    def _on_touch(self, view: View, command: Command, word: str, rest: bytes) -> None:
        job = self._own(view, command, word, "TOUCHED")
        if job is not None:
            job.deadline_ns = self.wall_ns() + job.ttr_s * SECOND_NS

    def _own(self, view: View, command: Command, word: str, done: str) -> Record | None:
        """The job that a holder's command was done to, None when it was not found."""
        job = self.jobs.get(command.id)
        held = job is not None and job.state == RESERVED and job.holder == view.number
        if word == "NOT_FOUND":
            require(
                job is None or not held or job.deadline_ns <= self.wall_ns(), command.kind, "does not find", command.id
            )
            return None
        require(word == done and held, command.kind, "of", command.id, "got", word)
        return job

    def _on_kick_job(self, view: View, command: Command, word: str, rest: bytes) -> None:
        job = self.jobs.get(command.id)
        if word == "NOT_FOUND":
            kickable = job is not None and job.state in (BURIED, DELAYED)
            due = job is not None and job.state == DELAYED and job.deadline_ns <= self.wall_ns()
            require(not kickable or due, "kick-job does not find", command.id)
            return
        require(word == "KICKED" and job is not None and job.state in (BURIED, DELAYED), "kick-job got", word)
        assert job is not None
        self._kick(job)

    def _on_kick(self, view: View, command: Command, word: str, rest: bytes) -> None:
        there = [job for job in self.jobs.values() if job.tube == view.used]
        buried = sorted((job.order, job.id) for job in there if job.state == BURIED)
        delayed = sorted((job.deadline_ns, job.id) for job in there if job.state == DELAYED)
        kicked = (buried or delayed)[: command.bound]
        require(word == f"KICKED {len(kicked)}", "a kick of", len(kicked), "jobs got", word)
        for _, id in kicked:
            self._kick(self.jobs[id])
            self._pass_on(id)

    def _kick(self, job: Record) -> None:
        job.counts[KICKS] += 1
        job.state = READY
        self._note(job)

    def _on_pause_tube(self, view: View, command: Command, word: str, rest: bytes) -> None:
        exists = self._exists(command.tube)
        require(word == ("PAUSED" if exists else "NOT_FOUND"), "pause-tube got", word)
        if exists:
            self.pauses[command.tube] = self.wall_ns() + command.seconds * SECOND_NS

    def _on_use(self, view: View, command: Command, word: str, rest: bytes) -> None:
        require(word == f"USING {command.tube.decode()}", "use got", word)
        view.used = command.tube
        self._tidy()

    def _on_watch(self, view: View, command: Command, word: str, rest: bytes) -> None:
        view.watched[command.tube] = None
        require(word == f"WATCHING {len(view.watched)}", "watch got", word)

    def _on_ignore(self, view: View, command: Command, word: str, rest: bytes) -> None:
        if list(view.watched) == [command.tube]:
            require(word == "NOT_IGNORED", "ignore got", word)
            return
        view.watched.pop(command.tube, None)
        require(word == f"WATCHING {len(view.watched)}", "ignore got", word)
        self._tidy()

    def _on_peek(self, view: View, command: Command, word: str, rest: bytes) -> None:
        job = self.jobs.get(command.id)
        if job is None:
            require(word == "NOT_FOUND", "peek at no job got", word)
        else:
            require(word == f"FOUND {job.id} {len(job.body) - 2}" and rest == job.body, "peek got", word)

    def _on_stats_job(self, view: View, command: Command, word: str, rest: bytes) -> None:
        job = self.jobs.get(command.id)
        if job is None:
            require(word == "NOT_FOUND", "stats-job of no job got", word)
            return
        require(word.startswith("OK "), "stats-job got", word)
        lines = rest.decode().removesuffix("\n\r\n").split("\n")[1:]
        said = dict(line.split(": ", 1) for line in lines)
        names = ("reserves", "timeouts", "releases", "buries", "kicks")
        known = {"id": job.id, "tube": f'"{job.tube.decode()}"', "pri": job.pri, "delay": job.delay_s, "ttr": job.ttr_s}
        known |= dict(zip(names, job.counts, strict=True)) | {"state": STATE_NAMES[job.state]}
        wrong = {key: (said.get(key), value) for key, value in known.items() if said.get(key) != str(value)}
        require(not wrong, "stats-job says otherwise of", job.id, wrong)

    def _on_look(self, view: View, command: Command, word: str, rest: bytes) -> None:
        """Commands whose content other tests compare."""
        require(word.split()[0] in ("OK", "FOUND", "NOT_FOUND", "USING"), f"{command} got", word)

    def _on_wrong(self, view: View, command: Command, word: str, rest: bytes) -> None:
        require(word in ("BAD_FORMAT", "UNKNOWN_COMMAND"), f"{command} got", word)

    # --- an operator

    def put_by_operator(self, view: View, command: Command, word: str) -> None:
        self._on_put(view, command, word, b"")

    def looks_at(self, id: int) -> None:
        """An operator is about to change a job: what is due and has happened to it by now counts."""
        job = self.jobs.get(id)
        if job is not None:
            self._settle_if_seen(job)

    def changed_by_operator(self, id: int, change: Change, word: str) -> None:
        job = self.jobs.get(id)
        if job is None:
            require(word == "NOT_FOUND", change.kind, "of no job got", word)
            return
        if word == "OUT_OF_MEMORY":
            anew = change.kind == "alter" and (change.ttr_s >= 0 or change.tube)
            require(anew and not self.room, change.kind, "finds no room although there is some")
            return
        expected = "DONE" if self._fits(job, change) else "WRONG_STATE"
        require(word == expected, change.kind, "of a", STATE_NAMES[job.state], "job", id, "got", word)
        if word != "DONE":
            return
        if change.kind == "delete":
            del self.jobs[id]
            self.log.append((id, None))
        elif change.kind == "kick":
            self._kick(job)
        elif change.kind == "release":
            job.state, job.holder, job.delay_s = READY, 0, 0
            job.counts[RELEASES] += 1
            self._note(job)
        elif change.kind == "bury":
            self._order += 1
            job.state, job.holder, job.order = BURIED, 0, self._order
            job.counts[BURIES] += 1
            self._note(job)
        else:
            self._alter(job, change)
        self._tidy()

    def _fits(self, job: Record, change: Change) -> bool:
        if change.kind == "kick":
            return job.state in (BURIED, DELAYED)
        if change.kind == "release":
            return job.state == RESERVED
        if change.kind == "bury":
            return job.state != BURIED
        if change.kind == "alter" and job.state == RESERVED:
            return change.pri < 0 and change.delay_s < 0 and change.tube in (b"", job.tube)
        return change.kind != "alter" or job.state != BURIED or change.delay_s < 0

    def _alter(self, job: Record, change: Change) -> None:
        was = job.ttr_s
        if change.pri >= 0:
            job.pri = change.pri
        if change.ttr_s >= 0:
            job.ttr_s = max(change.ttr_s, 1)
            if job.state == RESERVED:
                job.deadline_ns = self.wall_ns() + job.ttr_s * SECOND_NS
        if change.delay_s >= 0:
            job.delay_s = change.delay_s
            job.state = DELAYED if change.delay_s else READY
            job.deadline_ns = self.wall_ns() + change.delay_s * SECOND_NS
        job.tube = change.tube or job.tube
        if job.state != RESERVED or job.ttr_s != was:
            self._note(job)

    # --- time

    def advanced(self, done: bool) -> None:
        """The engine let happen what is due; `done` says that this was all."""
        self.slicing = not done
        if done:
            now_ns = self.wall_ns()
            self.pauses = {tube: until_ns for tube, until_ns in self.pauses.items() if until_ns > now_ns}
            for job in self.jobs.values():
                self._settle_if_due(job)

    def _settle_if_due(self, job: Record, but: View | None = None) -> None:
        """Makes a job ready whose time has come; one that `but` holds is still its own."""
        if job.state in (DELAYED, RESERVED) and job.deadline_ns <= self.wall_ns():
            if job.state == RESERVED:
                if but is not None and job.holder == but.number:
                    return
                job.counts[TIMEOUTS] += 1
            job.state, job.holder = READY, 0

    def _settle_if_seen(self, job: Record) -> None:
        """The same, if it has happened."""
        if job.state in (DELAYED, RESERVED) and job.deadline_ns <= self.wall_ns():
            real = self.look().jobs.get(job.id)
            if real is not None and real.state == READY:
                self._settle_if_due(job)

    def _unpausing(self) -> bool:
        """Returns whether a pause has ended and those who waited for that may not be served yet."""
        return any(until_ns <= self.wall_ns() for until_ns in self.pauses.values())

    def _ready_for(self, view: View) -> Iterable[tuple[int, int]]:
        """Priority and id of what is surely ready in the tubes that a client watches and that are not paused."""
        for job in self.jobs.values():
            if job.state == READY and job.tube in view.watched and job.tube not in self.pauses:
                yield job.pri, job.id

    # --- tubes

    def _exists(self, tube: bytes) -> bool:
        if tube == b"default" or self.uploads.get(tube):
            return True
        if any(view.used == tube or tube in view.watched for view in self.views.values()):
            return True
        return any(job.tube == tube for job in self.jobs.values())

    def _tidy(self) -> None:
        """A pause ends with its tube."""
        for tube in [tube for tube in self.pauses if not self._exists(tube)]:
            del self.pauses[tube]

    # --- what is kept

    def _note(self, job: Record) -> None:
        self.log.append((job.id, job.kept()))

    def recovered(self, found: dict[int, Kept], promised: int, scattered: bool) -> None:
        """The server is up again with these jobs; this much of the log was promised to be there.

        With `scattered` losses each job has a moment of its own, at which it was as it is found.
        """
        now_ns = self.wall_ns()
        state: dict[int, Kept] = {}
        wrong = set(found)
        never = set(found)  # jobs that were never as they are found
        cuts: list[int] = []  # entries that change nothing leave it open which one it is
        nearest = len(found) + len(self.log) + 1
        misses = ""
        for cut in range(len(self.log) + 1):
            if cut:
                id, kept = self.log[cut - 1]
                if kept is None:
                    state.pop(id, None)
                else:
                    state[id] = kept
                same = kept is None if id not in found else kept is not None and _same(kept, found[id], now_ns)
                (wrong.discard if same else wrong.add)(id)
            if cut < promised:
                continue
            never = never & wrong if cut > promised else set(wrong)
            if not wrong and _same_order(state, found):
                cuts.append(cut)
            elif len(wrong) < nearest:
                nearest = len(wrong)
                misses = f"at change {cut} {_difference(state, found, wrong)}"
        if scattered and not cuts and not never:
            self.told = {id: 0 for id, at in self.told.items() if at <= promised or id in found}
            self.log = list(found.items())
            return self._go_on_from(len(found), found)
        whole = f"{promised} of {len(self.log)} changes were promised; then"
        require(cuts, "what is found after the restart is no moment of history:", whole, misses)
        self.told = {id: at for id, at in self.told.items() if at <= cuts[0]}
        self._go_on_from(cuts[-1], found)

    def _go_on_from(self, cut: int, found: dict[int, Kept]) -> None:
        """Goes on from the jobs that were found. They are on the device by now."""
        del self.log[cut:]
        self.kept = self.synced = cut
        self.jobs = {}
        orders = {id: kept.order for id, kept in self.log if kept is not None}  # the server's numbers may be others
        for id, kept in sorted(found.items()):
            fixed = (kept.tube, kept.body, kept.ttr_s, kept.created_ns)
            order = orders.get(id, kept.order)
            job = Record(id, *fixed, kept.pri, kept.delay_s, kept.state, kept.deadline_ns, order)
            job.counts = list(kept.counts)
            job.tags = kept.tags
            self.jobs[id] = job
            self._order = max(self._order, order)
        self.views = {}
        self.pauses = {}
        self.uploads = {}
        self.slicing = False
        self.stepping = None
        self.leaving = 0
        self._served = []

    # --- at rest

    def compare(self, engine: Engine, to_wall: Callable[[int], int]) -> None:
        """Nothing is due any more: the engine has what we have, and no client waits for what is there."""
        check(engine)
        now_ns = self.wall_ns()
        require({job.id for job in engine.jobs} == set(self.jobs), "jobs differ")
        for id, job in self.jobs.items():
            real = engine.jobs.get(id)
            assert real is not None
            require(real.body in (None, job.body), "job", id, "has another body")
            require(real.state == job.state, "job", id, "is", STATE_NAMES[real.state], "not", STATE_NAMES[job.state])
            numbers = engine.tube_of(real).name, real.pri, real.delay_s, real.ttr_s
            require(numbers == (job.tube, job.pri, job.delay_s, job.ttr_s), "job", id, "has other numbers:", numbers)
            require(_tags(real) == job.tags, "job", id, "has other tags:", _tags(real))
            require(real.holder == (job.holder if job.state == RESERVED else 0), "job", id, "has another holder")
            if job.state in (RESERVED, DELAYED):
                require(to_wall(real.rank) == job.deadline_ns, "job", id, "has another deadline")
                require(job.deadline_ns > now_ns, "job", id, "is overdue")
        for view in self.views.values():
            if view.waits:
                assert view.running is not None
                best = min(self._ready_for(view), default=None)
                require(best is None, "client", view.number, "waits although there is a job:", best)
                until_ns = view.began_ns + view.running.seconds * SECOND_NS + view.slack_ns
                require(view.running.seconds < 0 or until_ns > now_ns, "client", view.number, "waits too long")


def kept_of(job: Job, tube: bytes, to_wall: Callable[[int], int]) -> Kept:
    """A job as it is found after a restart."""
    tally = job.tally or Tally()
    counts = (tally.reserves, tally.timeouts, tally.releases, tally.buries, tally.kicks)
    deadline_ns = to_wall(job.rank) if job.state == DELAYED else 0
    order = job.rank if job.state == BURIED else 0
    fixed = (tube, held_body(job), job.ttr_s, to_wall(job.created_ns))
    return Kept(*fixed, job.pri, job.delay_s, job.state, deadline_ns, order, counts, _tags(job))


def _tags(job: Job) -> bytes:
    tags = tags_of(job)
    return b"" if tags is None else tags.text


def _same(kept: Kept, found: Kept, now_ns: int) -> bool:
    """Returns whether a job is as it was kept. Counters that no record holds may be there or not."""
    if kept.state == DELAYED and kept.deadline_ns <= now_ns:
        kept = kept._replace(state=READY, deadline_ns=0)
    if any(one > other for one, other in zip(kept.counts, found.counts, strict=True)):
        return False
    return kept._replace(order=0, counts=found.counts) == found._replace(order=0)


def _same_order(state: dict[int, Kept], found: dict[int, Kept]) -> bool:
    def order(jobs: dict[int, Kept]) -> list[tuple[bytes, int, int]]:
        buried = sorted((kept.tube, kept.order, id) for id, kept in jobs.items() if kept.state == BURIED)
        return [(tube, 0, id) for tube, _, id in buried]

    return order(state) == order(found)


def _difference(state: dict[int, Kept], found: dict[int, Kept], wrong: set[int]) -> str:
    if not wrong:
        return "the order of burying is lost"
    id = min(wrong)
    return f"job {id} was {state.get(id)} and is {found.get(id)}"
