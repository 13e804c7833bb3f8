"""A client of the protocol: its replies, the job whose body a reply waits for, and commands that take several slices.

This module must not know sockets, gevent, clocks or durability, nor how a command's bytes arrive. verbs.py holds what
each command does. Invariant: each command is answered once, at once or when its wait ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.engine import (
    ADMITTED,
    CYCLE,
    DRAINING,
    DUPLICATE,
    INSERTED,
    OUT_OF_MEMORY,
    TOO_BIG,
    UNFINISHED,
)
from geventstalk.core.job import DELETED, ID_MAX_BITS, RESERVED, SECOND_NS, STATE_NAMES, Job
from geventstalk.core.operate import Operate
from geventstalk.core.timerwheel import NEVER
from geventstalk.core.tube import Client, Tube
from geventstalk.wire import protocol as p
from geventstalk.wire.arriving import Arriving

MOVE_SLICE: Final = 250
"""The jobs that a slice of a kick, a disconnect or of passing time moves: two or three milliseconds in pure Python."""

LARGE_BODY: Final = 1 << 14
"""A body of this size or more is not copied into its reply: it stands behind the reply's first line."""

LARGE_PUT: Final = 1 << 20
"""A body of this size or more goes to the ledger in slices: to write as much at once takes several milliseconds."""

OUT_BYTES_MAX: Final = 1 << 18
"""Unsent bytes of replies from which a client's further commands wait."""

SKIP_LINE: Final = -1
"""Stands for all bytes up to the end of the line."""

VERBS_MAX: Final = 64
"""A bound of the number of verbs."""

_PUTS_UNWATCHED: Final = 32
"""Puts between two looks at the memory, where it is limited."""

_QUICK_ID_MAX: Final = (1 << 62) - 1
"""The compiled build compares integers up to here directly, and others by a call."""
FOR_EVER: Final = -1
REFUSALS: Final = {
    DRAINING: p.R_DRAINING,
    OUT_OF_MEMORY: p.R_OUT_OF_MEMORY,
    TOO_BIG: p.R_JOB_TOO_BIG,
    CYCLE: p.R_BAD_FORMAT,
}
"""The replies to puts that are not admitted, by their outcome."""
# What an awaited body is for.
_FOR_RESERVE: Final = 1
_FOR_RESERVE_JOB: Final = 2
_FOR_PEEK: Final = 3

PART_UNITS: Final = 128
"""The work of a part of a large body: a slice of its own."""


@mypyc_attr(allow_interpreted_subclasses=True)
class UploadShare:
    """Bytes of bodies that clients of one address have begun to send. This one has no bound."""

    def takes(self, before: int, more: int) -> bool:
        """Counts more bytes of a body of which this many count already. Returns whether they may come."""
        return True

    def gives_back(self, size: int) -> None:
        """Ends the count of a body of which this many bytes count: it is whole, or its put has ended."""


class Service:
    """The state that all sessions of a server share.

    `facts` gives the statistics that are not of the engine, by their key. `tell` logs text for the
    operator, with the exception if one was unexpected.
    """

    def __init__(
        self,
        engine: Operate,
        max_job_bytes: int,
        facts: Callable[[], Mapping[str, object]],
        tell: Callable[[str, Exception | None], None] | None = None,
    ) -> None:
        self.engine = engine
        self.max_job_bytes = max_job_bytes
        self.facts = facts
        self.tell = tell if tell is not None else _raise_again
        self.out_bytes_max = OUT_BYTES_MAX  # lower while too many replies of all clients wait
        self.commands = [0] * VERBS_MAX  # how often each command was given, by Verb.number; every session counts here
        self.free_until = _QUICK_ID_MAX  # a put whose job would get this id, or a later one, may be refused
        self.silent = False  # with Engine.held: no commands are executed, whatever they are
        self.refuses = False  # puts, also while Engine.held; see refuse()
        self.unknown: Callable[[bytes], bytes] = _unknown  # the reply to a line that is no command
        self.drain: Callable[[bool], None] = self._drain  # refuses puts from now on, or ends that
        # Resumes a client after this many nanoseconds, or now: resets `suspended`, and has run() called.
        self.suspend: Callable[[Commands, int], None] = _not_at_all
        self.resume: Callable[[Commands], None] = _wake
        self.share_of: Callable[[Commands], UploadShare | None] = _no_share  # None: nothing bounds it
        self._has_memory: Callable[[], bool] | None = None
        self._refusing = False

    def _drain(self, on: bool) -> None:
        self.engine.draining = on

    def watch_memory(self, has_memory: Callable[[], bool]) -> None:
        """Refuses puts while `has_memory`, which is called now and then, returns False."""
        self._has_memory = has_memory
        self.free_until = 0

    def refuse(self, refuses: bool) -> None:
        """Refuses all puts, or ends that. The caller tells the operator why."""
        self.refuses = refuses
        self.free_until = 0

    def admit(self, size: int) -> int:
        """Returns ADMITTED when a put of a body of this size may begin, or the outcome that says why not.

        Once its body is complete, a put asks Engine.put() or Engine.prepare() as well.
        """
        if size > self.max_job_bytes:
            return TOO_BIG
        if self.engine.next_id >= self.free_until and self._refuses_puts():
            return OUT_OF_MEMORY
        return ADMITTED

    def _refuses_puts(self) -> bool:
        """Returns whether no id is left, or too little memory for what is there already. Logs it once."""
        if self.refuses:
            return True
        next_id = self.engine.next_id
        why = ""
        if next_id >> ID_MAX_BITS:
            why = "no job ids are left below 2**63: every put is refused with OUT_OF_MEMORY"
        elif self._has_memory is not None and not self._has_memory():
            why = "there is hardly any memory left: puts are refused with OUT_OF_MEMORY"
        else:
            self.free_until = min(next_id + _PUTS_UNWATCHED, 1 << ID_MAX_BITS)
        if why and not self._refusing:
            self.tell(why, None)
        self._refusing = why != ""
        return self._refusing


def _not_at_all(client: Commands, ns: int) -> None:
    client.suspended = False


def _wake(client: Commands) -> None:
    client.suspended = False


def _no_share(client: Commands) -> UploadShare | None:
    return None


def _unknown(line: bytes) -> bytes:
    return p.R_UNKNOWN_COMMAND


def _raise_again(text: str, error: Exception | None) -> None:
    if error is not None:
        raise error


class LongCommand:
    """A command that takes several slices, and what is left of it. `changes` says that a slice may change jobs."""

    changes: bool = False

    def go_on(self, client: Commands, now_ns: int) -> bool:
        """Runs a slice. Returns whether the command is done and answered.

        It may set `client.awaited`: then the next slice runs when that body has come, or earlier.
        """
        raise NotImplementedError

    def answered(self, client: Commands, outcome: int, job: Job | None) -> bool:
        """Hears, where the command waits for a job, how the wait has ended. Returns whether the command is answered."""
        raise NotImplementedError

    def stop(self, client: Commands) -> None:
        """Releases what the command keeps for its further slices; there are none."""


class _Suspended(LongCommand):
    """Holds a put whose body is not read before its turn."""

    def go_on(self, client: Commands, now_ns: int) -> bool:
        return not client.suspended

    def stop(self, client: Commands) -> None:
        client.service.resume(client)


@mypyc_attr(allow_interpreted_subclasses=True)
class Commands(Client):
    """A client, as its verbs see it. Its replies stand in `out`, `out_bytes` long, for the owner to send.

    `awaited` is a job that the reply to its last command has to show, and whose body is not in memory. When the body
    has come, the owner calls run(). `suspended` says that nothing is executed until
    the owner resumes the client: see Service.suspend.
    """

    __slots__ = (
        "_await_for",
        "_body",
        "_goes_on",
        "_put_body",
        "_share",
        "_shared_bytes",
        "_skip_left",
        "_skip_reply",
        "awaited",
        "body_left",
        "closed",
        "counts",
        "engine",
        "eof",
        "going",
        "out",
        "out_bytes",
        "service",
        "shows_job",
        "suspended",
        "trace",
    )

    def __init__(self, service: Service) -> None:
        super().__init__()
        self.service = service
        self.engine = service.engine
        self.counts = service.commands
        self._body: Arriving | None = None  # what has come of a body that takes several reads
        self._put_body = b""  # all of a large body that the ledger has not wholly taken yet
        self._share: UploadShare | None = None  # of the address of the client, while `_body` counts there
        self._shared_bytes = 0
        self.body_left = 0
        self._skip_left = 0  # bytes still to be thrown away of a body that is refused, or SKIP_LINE
        self._skip_reply = p.R_JOB_TOO_BIG  # and what is said behind them
        self._goes_on = False  # a command that takes several slices is under way: a put, a kick, statistics or a list
        self.going: LongCommand | None = None  # what goes on, but for a put and an awaited body
        self.awaited: Job | None = None
        self._await_for = 0
        self.out: list[bytes] = []
        self.out_bytes = 0
        self.shows_job = False  # whether a reply in `out` hands out a job, or tells the id of one
        self.suspended = False
        self.eof = False
        self.closed = False
        self.trace: Callable[[str, bytes], None] | None = None

    def own_stats(self) -> list[tuple[str, object]]:
        """Returns statistics of the client's user, which stand at the end of those of the server."""
        return []

    def begin_upload(self, job: Job, size: int, now_ns: int) -> None:
        """The body of this job comes next. Policies may delay the put."""
        self.upload = job
        self.body_left = size + 2
        if self.engine.policies is not None:
            self.pace(now_ns)

    def pace(self, now_ns: int) -> None:
        """Has a put that has begun wait for its turn, where its tube gets as many puts as its policy allows."""
        upload = self.upload
        assert upload is not None
        tube = self.engine.tube_by_number[upload.tube]
        policy = self.engine.policy_of(tube)
        if policy is None:
            return
        ns = policy.turn_of_put(tube.name, now_ns) - now_ns
        if ns > 0:
            policy.delayed += 1
            self.suspended = True
            self.begin(_Suspended())
            self.service.suspend(self, ns)

    def skip(self, size: int, reply: bytes) -> None:
        """Discards this many bytes of a refused body as they come, and then replies."""
        self._skip_left = size
        self._skip_reply = reply
        if not size:
            self.reply(reply)

    def reply(self, reply: bytes) -> None:
        if self.trace is not None:
            self.trace(">", reply)
        self.out_bytes += len(reply)
        self.out.append(reply)

    def pass_on(self, piece: bytes) -> None:
        """Appends a piece of a reply that has begun."""
        self.out_bytes += len(piece)
        self.out.append(piece)

    def reply_in_pieces(self, pieces: list[bytes]) -> None:
        if self.trace is not None:
            self.trace(">", b"".join(pieces))
        self.out_bytes += sum([len(piece) for piece in pieces])
        self.out += pieces

    def _reserved(self, job: Job) -> None:
        """Replies with a job that is reserved for the client already: nothing here may need much memory."""
        if self.engine.bodies is not None:
            self.engine.bodies.handed_out(job)
        body = job.body
        if body is None:
            self._await(job, _FOR_RESERVE)
            return
        self.shows_job = True
        if len(body) < LARGE_BODY:
            self.reply(p.reserved(job.id, body))
        else:
            self.reply_in_pieces([p.reserved_line(job.id, body), body])

    def reserve(self, timeout_s: int, now_ns: int) -> None:
        engine = self.engine
        job = engine.reserve(self, now_ns)
        if job is not None:
            if job.body is None:  # see _awaits_body()
                self.wait_until_ns = NEVER if timeout_s < 0 else now_ns + timeout_s * SECOND_NS
            self._reserved(job)
        elif engine.deadline_soon(self, now_ns):
            self.reply(p.R_DEADLINE_SOON)
        elif timeout_s == 0 or self.eof:
            self.reply(p.R_TIMED_OUT)
        else:
            engine.wait(self, now_ns, timeout_s)

    def begin(self, going: LongCommand) -> None:
        """Has a command go on in slices of its own."""
        self.going = going
        self._goes_on = True

    def begin_with(self, going: LongCommand, now_ns: int) -> None:
        """Runs the first slice of a command now, and has it go on if that is not all."""
        if not going.go_on(self, now_ns):
            self.begin(going)

    def _go_on(self, now_ns: int) -> bool:
        """Goes on with a command that takes several slices. Returns whether it is done and answered."""
        going = self.going
        if going is not None:
            if going.go_on(self, now_ns):
                self.going = None
                self._goes_on = self.awaited is not None  # the body of a job that the reply shows
        elif self.awaited is not None:
            self._goes_on = self._awaits_body(self.awaited, now_ns)
        else:
            self._goes_on = not self._put_slice(now_ns)
        return not self._goes_on

    def end_wait(self, outcome: int, job: Job | None) -> None:
        """Ends the wait of a command that goes on."""
        going = self.going
        assert going is not None
        if going.answered(self, outcome, job):
            self.going = None
            self._goes_on = False

    # --- a body that is not in memory

    def _await(self, job: Job, what_for: int) -> None:
        """Puts the answer off until the body of this job is in memory."""
        bodies = self.engine.bodies
        assert bodies is not None
        bodies.wait_for(job)
        self.awaited = job
        self._await_for = what_for
        self._goes_on = True

    def stop_awaiting(self) -> None:
        """Ends the client's wait for a body, if there is one."""
        job = self.awaited
        if job is not None:
            self.awaited = None
            bodies = self.engine.bodies
            assert bodies is not None
            bodies.let_be(job)

    def _awaits_body(self, job: Job, now_ns: int) -> bool:
        """Answers if the body has come. Returns whether the client still waits for one.

        If the reservation has ended meanwhile, the command begins anew, and perhaps awaits another body. The ttr begins
        with the answer: how long the body took is not the client's time.
        """
        engine, what_for = self.engine, self._await_for
        if what_for != _FOR_PEEK and (job.state != RESERVED or job.holder != self.number):
            self.stop_awaiting()
            if what_for == _FOR_RESERVE:
                until_ns = self.wait_until_ns
                timeout_s = FOR_EVER if until_ns == NEVER else max(0, until_ns - now_ns + SECOND_NS - 1) // SECOND_NS
                self.reserve(timeout_s, now_ns)
            else:
                self.reserve_job(job.id, now_ns)
        elif job.body is not None:
            self.stop_awaiting()
            if what_for == _FOR_PEEK:
                self.found(job)
            else:
                engine.touch(self, job.id, now_ns)
                self._reserved(job)
        elif job.state == DELETED:
            self.stop_awaiting()
            self.reply(p.R_NOT_FOUND)
        elif engine.bodies is not None:
            engine.bodies.want(job)
        return self.awaited is not None

    def reserve_job(self, id: int, now_ns: int) -> None:
        job = self.engine.reserve_job(self, id, now_ns)
        if job is None:
            self.reply(p.R_NOT_FOUND)
            return
        self._reserved(job)
        if self.awaited is not None:
            self._await_for = _FOR_RESERVE_JOB

    def _begin_large_put(self, body: bytes, now_ns: int) -> None:
        """Gives a complete body of LARGE_PUT bytes or more to the ledger in slices."""
        self._put_body = body
        self._goes_on = not self._put_slice(now_ns)

    def _put_slice(self, now_ns: int) -> bool:
        job = self.upload
        assert job is not None
        body = self._put_body
        outcome = self.engine.prepare(job, body, now_ns)
        if outcome == UNFINISHED:
            self.engine.work += PART_UNITS
            return False
        self._put_body = b""
        if outcome == INSERTED:
            self._finish_put(job, body, now_ns)
        else:
            self.upload = None
            self.engine.abandon_put(job)
            self._refuse(outcome)
        return True

    def _finish_put(self, job: Job, body: bytes, now_ns: int) -> None:
        outcome = self.engine.put(job, body, now_ns)
        self.upload = None  # after an exception it is still an upload, unless the job table has it
        if outcome == INSERTED:
            self.reply(p.inserted(job.id))
        else:
            self._refuse(outcome)

    def _refuse(self, outcome: int) -> None:
        """Replies to a put that stores nothing."""
        if outcome != DUPLICATE:
            self.reply(REFUSALS[outcome])
            return
        rules = self.engine.rules
        assert rules is not None
        first = rules.duplicate
        self.shows_job = True
        self.reply(p.duplicate(first.id, STATE_NAMES[first.state], first.pri))

    def found(self, job: Job | None) -> None:
        if job is None:
            self.reply(p.R_NOT_FOUND)
            return
        body = job.body
        if body is None:
            self._await(job, _FOR_PEEK)
            return
        self.shows_job = True
        if len(body) < LARGE_BODY:
            self.reply(p.found(job.id, body))
        else:
            self.reply_in_pieces([p.found_line(job.id, body), body])

    def used_tube(self) -> Tube:
        used = self.used
        assert used is not None
        return used
