"""One client's conversation: bytes in, bytes out. Maps commands to engine calls; nothing else speaks both.

This room must not know sockets, gevent, clocks or durability: whoever owns the session feeds it bytes and time, sends
what it puts into `out`, and sees to it that what was promised there is kept first.
Invariant: while a reserve waits, nothing further of the input is executed; replies stand in the order of the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk._build import BUILD
from geventstalk.core.engine import (
    DEADLINE_SOON,
    DRAINING,
    INSERTED,
    RESERVED_JOB,
    Client,
    Engine,
    Tube,
)
from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, SECOND_NS, STATE_NAMES, Job, Tally
from geventstalk.wire import protocol as p

COMMAND_SLICE: Final = 128
"""Commands of one client that run before others get their turn."""
MOVE_SLICE: Final = 250
"""Jobs that one slice of a kick, a disconnect or of passing time moves: two or three milliseconds in pure Python."""
OUT_BYTES_MAX: Final = 1 << 18
"""With so many bytes of replies unsent, a client's further commands wait."""

_SHORT_INPUT: Final = 512
"""So much is cut at its first CRLF at less cost than searched: 3 % of a request's work."""
_FOR_EVER: Final = -1
_NO_COUNTS: Final = Tally()


class Service:
    """What all sessions of a server share. `facts` gives the statistics that are not of the engine, by their key."""

    def __init__(self, engine: Engine, max_job_bytes: int, facts: Callable[[], Mapping[str, object]]) -> None:
        self.engine = engine
        self.max_job_bytes = max_job_bytes
        self.facts = facts
        self.commands = [0] * p.COMMANDS  # how often each command was given, by its code


@mypyc_attr(allow_interpreted_subclasses=True)
class Session(Client):
    """One connection. Feed it with receive() and hang_up(), let it go on with run(), send and empty `out`.

    `unfinished` says that run() has more to do once others had their turn and `out` was sent; `closed`, that the
    connection ends once `out` is sent. After that call Engine.leave().
    """

    __slots__ = (
        "_at",
        "_body",
        "_body_left",
        "_inbox",
        "_kick_left",
        "_kicked",
        "_kicks_buried",
        "_service",
        "_skip_left",
        "_skip_line",
        "_skip_reply",
        "_upload",
        "closed",
        "eof",
        "out",
        "out_bytes",
        "trace",
        "unfinished",
    )

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service
        self._inbox = b""
        self._at = 0  # what of the inbox is done with
        self._upload: Job | None = None
        self._body = bytearray()
        self._body_left = 0
        self._skip_left = 0  # bytes still to be thrown away of a body that is refused
        self._skip_reply = p.R_JOB_TOO_BIG  # and what is said behind them
        self._skip_line = False  # within a line that is too long
        self._kick_left = 0
        self._kicked = 0
        self._kicks_buried = False
        self.out: list[bytes] = []
        self.out_bytes = 0
        self.unfinished = False
        self.eof = False
        self.closed = False
        self.trace: Callable[[str, bytes], None] | None = None
        service.engine.join(self)

    @property
    def pending_bytes(self) -> int:
        """Input that was received and not yet executed."""
        return len(self._inbox) - self._at

    def receive(self, data: bytes, now_ns: int) -> None:
        """Takes what the client sent and executes as much as one slice allows."""
        if self._at == len(self._inbox):
            self._inbox = data
        else:
            self._inbox = self._inbox[self._at :] + data
        self._at = 0
        if not self.waiting:
            self.run(now_ns)

    def hang_up(self, now_ns: int) -> None:
        """The client will send nothing more: a wait ends at once, complete commands run, then the connection closes."""
        self.eof = True
        if self.waiting:
            self._service.engine.stop_waiting(self)
            self._reply(p.R_TIMED_OUT)
        self.run(now_ns)

    def take_out(self) -> bytes:
        """All replies that stand, as one piece; they are the caller's to send now."""
        out = self.out
        data = out[0] if len(out) == 1 else b"".join(out)
        self.out = []
        self.out_bytes = 0
        return data

    def leave(self, now_ns: int) -> bool:
        """The connection is gone. Gives back what it held, in slices: returns whether that is done."""
        if self._upload is not None:
            self._service.engine.abandon_put(self._upload)
            self._upload = None
        return self._service.engine.leave(self, now_ns, MOVE_SLICE)

    def answer(self, outcome: int, job: Job | None) -> None:
        """The engine ends this client's wait."""
        if outcome == RESERVED_JOB:
            assert job is not None
            self._reply(p.reserved(job.id, job.body))
        else:
            self._reply(p.R_DEADLINE_SOON if outcome == DEADLINE_SOON else p.R_TIMED_OUT)
        self.unfinished = self._at < len(self._inbox)

    def run(self, now_ns: int) -> None:
        """Executes complete commands until one waits, the input or the slice is used up, or enough replies stand."""
        left = COMMAND_SLICE
        self.unfinished = False
        while not self.waiting and not self.closed:
            if left == 0 or self.out_bytes >= OUT_BYTES_MAX:
                self.unfinished = True
                return
            left -= 1
            if self._kick_left:
                if self._kick_slice(now_ns):
                    continue
                self.unfinished = True
                return
            if self._upload is not None:
                if self._take_body(now_ns):
                    continue
                break
            if self._skip_left and not self._skip_some():
                break
            if self._at == len(self._inbox):
                break
            if self._at == 0 and len(self._inbox) <= _SHORT_INPUT:
                line, ending, rest = self._inbox.partition(p.CRLF)
                if not ending:
                    self._shorten_line()
                    break
                self._inbox = rest
            else:
                end = self._inbox.find(p.CRLF, self._at)
                if end < 0:
                    self._shorten_line()
                    break
                line = self._inbox[self._at : end]
                self._at = end + 2
            if self._skip_line or len(line) > p.LINE_BYTES_MAX - 2:
                self._skip_line = False
                self._reply(p.R_BAD_FORMAT)
                continue
            if self.trace is not None:
                self.trace("<", line)
            try:
                self._execute(line, now_ns)
            except p.ProtocolError as error:
                self._reply(error.reply)
        if self.eof and not self.waiting:
            self.closed = True

    # --- input that is not a command line

    def _shorten_line(self) -> None:
        """Without an end of line in sight, keeps no more of the input than a line may have."""
        if self._skip_line or self.pending_bytes > p.LINE_BYTES_MAX - 1:
            self._skip_line = True
            self._inbox = b"\r" if self._inbox.endswith(b"\r") else b""
            self._at = 0

    def _skip(self, size: int, reply: bytes) -> None:
        """Has so many bytes of a refused body thrown away as they come, and then the client told why."""
        self._skip_left = size
        self._skip_reply = reply
        if not size:
            self._reply(reply)

    def _skip_some(self) -> bool:
        """Throws away a body that is refused; returns whether all of it has come."""
        skipped = min(self._skip_left, self.pending_bytes)
        self._at += skipped
        self._skip_left -= skipped
        if self._skip_left:
            return False
        self._reply(self._skip_reply)
        return True

    def _take_body(self, now_ns: int) -> bool:
        """Takes what has come of a put's body; returns whether that was all of it."""
        taken = min(self._body_left, self.pending_bytes)
        part = self._inbox[self._at : self._at + taken]
        self._at += taken
        self._body_left -= taken
        job = self._upload
        assert job is not None
        try:
            if self._body_left:
                self._body += part
                return False
            if self._body:
                self._body += part
                part = bytes(self._body)
                self._body = bytearray()
        except MemoryError:
            self._body = bytearray()
            self._upload = None
            self._service.engine.abandon_put(job)
            self._skip(self._body_left, p.R_OUT_OF_MEMORY)
            return True
        self._upload = None
        if not part.endswith(p.CRLF):
            self._service.engine.abandon_put(job)
            self._reply(p.R_EXPECTED_CRLF)
            return True
        outcome = self._service.engine.put(job, part, now_ns)
        if outcome == INSERTED:
            self._reply(p.inserted(job.id))
        else:
            self._reply(p.R_DRAINING if outcome == DRAINING else p.R_OUT_OF_MEMORY)
        return True

    # --- commands

    def _reply(self, reply: bytes) -> None:
        self.out.append(reply)
        self.out_bytes += len(reply)
        if self.trace is not None:
            self.trace(">", reply)

    def _count(self, code: int) -> None:
        self._service.commands[code] += 1

    def _execute(self, line: bytes, now_ns: int) -> None:
        code, arguments = p.command(line)
        engine = self._service.engine
        if code == p.PUT:
            self._put(arguments)
        elif code == p.RESERVE_WITH_TIMEOUT:
            timeout_s = p.timeout_argument(arguments)
            self._count(code)
            self._reserve(timeout_s, now_ns)
        elif code == p.DELETE:
            id = p.id_argument(arguments)
            self._count(code)
            self._reply(p.R_DELETED if engine.delete(self, id) else p.R_NOT_FOUND)
        elif code == p.RESERVE:
            self._count(code)
            self._reserve(_FOR_EVER, now_ns)
        elif code == p.RELEASE:
            id, pri, delay_s = p.release_arguments(arguments)
            self._count(code)
            done = engine.release(self, id, pri, delay_s, now_ns)
            self._reply(p.R_RELEASED if done else p.R_NOT_FOUND)
        elif code == p.BURY:
            id, pri = p.bury_arguments(arguments)
            self._count(code)
            self._reply(p.R_BURIED if engine.bury(self, id, pri) else p.R_NOT_FOUND)
        elif code == p.TOUCH:
            id = p.id_argument(arguments)
            self._count(code)
            self._reply(p.R_TOUCHED if engine.touch(self, id, now_ns) else p.R_NOT_FOUND)
        elif code == p.KICK:
            self._kick(p.kick_argument(arguments))
        elif code == p.KICK_JOB:
            id = p.id_argument(arguments)
            self._count(code)
            self._reply(p.R_KICKED if engine.kick_job(id, now_ns) else p.R_NOT_FOUND)
        elif code == p.RESERVE_JOB:
            id = p.id_argument(arguments)
            self._count(code)
            job = engine.reserve_job(self, id, now_ns)
            self._reply(p.R_NOT_FOUND if job is None else p.reserved(job.id, job.body))
        elif code == p.QUIT:
            self.closed = True
        elif code in (p.USE, p.WATCH, p.IGNORE, p.PAUSE_TUBE):
            self._tube_command(code, arguments, now_ns)
        else:
            self._look(code, arguments, now_ns)

    def _put(self, arguments: bytes) -> None:
        try:
            pri, delay_s, ttr_s, size = p.put_arguments(arguments)
        except p.BadFormat:
            size = p.put_size_with_garbage(arguments)
            if size >= 0:
                self._count(p.PUT)
            if size <= self._service.max_job_bytes:
                raise
            self._skip(size + 2, p.R_JOB_TOO_BIG)
            return
        self._count(p.PUT)
        if size > self._service.max_job_bytes:
            self._skip(size + 2, p.R_JOB_TOO_BIG)
            return
        self._upload = self._service.engine.open_put(self, pri, delay_s, max(ttr_s, 1))
        self._body_left = size + 2

    def _reserve(self, timeout_s: int, now_ns: int) -> None:
        engine = self._service.engine
        job = engine.reserve(self, now_ns)
        if job is not None:
            self._reply(p.reserved(job.id, job.body))
        elif engine.deadline_soon(self, now_ns):
            self._reply(p.R_DEADLINE_SOON)
        elif timeout_s == 0 or self.eof:
            self._reply(p.R_TIMED_OUT)
        else:
            engine.wait(self, now_ns, timeout_s)

    def _kick(self, bound: int) -> None:
        self._count(p.KICK)
        self._kicks_buried = len(self._used().buried) > 0
        self._kicked = 0
        self._kick_left = bound
        if not bound:
            self._reply(p.kicked(0))

    def _kick_slice(self, now_ns: int) -> bool:
        """Goes on with a kick. Returns whether it is done and answered."""
        limit = min(self._kick_left, MOVE_SLICE)
        kicked = self._service.engine.kick(self._used(), self._kicks_buried, limit, now_ns)
        self._kicked += kicked
        self._kick_left = self._kick_left - kicked if kicked == limit else 0
        if self._kick_left:
            return False
        self._reply(p.kicked(self._kicked))
        return True

    def _tube_command(self, code: int, arguments: bytes, now_ns: int) -> None:
        engine = self._service.engine
        if code == p.PAUSE_TUBE:
            name, delay_s = p.pause_arguments(arguments)
            self._count(code)
            if not p.is_tube_name(name):
                raise p.BadFormat
            self._reply(p.R_PAUSED if engine.pause(name, delay_s, now_ns) else p.R_NOT_FOUND)
            return
        name = p.name_argument(arguments)
        self._count(code)
        if code == p.USE:
            engine.use(self, name)
            self._reply(p.using(name))
        elif code == p.WATCH:
            self._reply(p.watching(engine.watch(self, name)))
        else:
            count = engine.ignore(self, name)
            self._reply(p.watching(count) if count else p.R_NOT_IGNORED)

    # --- commands that only look

    def _look(self, code: int, arguments: bytes, now_ns: int) -> None:
        engine = self._service.engine
        if code == p.PEEK:
            id = p.id_argument(arguments)
            self._count(code)
            self._found(engine.jobs.get(id))
        elif code == p.STATS_JOB:
            id = p.id_argument(arguments)
            self._count(code)
            job = engine.jobs.get(id)
            self._reply(p.R_NOT_FOUND if job is None else p.ok(p.yaml_map(self._job_stats(job, now_ns))))
        elif code == p.STATS_TUBE:
            name = p.name_argument(arguments)
            self._count(code)
            tube = engine.tubes.get(name)
            self._reply(p.R_NOT_FOUND if tube is None else p.ok(p.yaml_map(self._tube_stats(tube, now_ns))))
        else:
            self._count(code)
            self._look_around(code, now_ns)

    def _look_around(self, code: int, now_ns: int) -> None:
        engine = self._service.engine
        if code == p.PEEK_READY:
            self._found(engine.peek(self, READY))
        elif code == p.PEEK_DELAYED:
            self._found(engine.peek(self, DELAYED))
        elif code == p.PEEK_BURIED:
            self._found(engine.peek(self, BURIED))
        elif code == p.LIST_TUBES:
            self._reply(p.ok(p.yaml_list(engine.tubes)))
        elif code == p.LIST_TUBES_WATCHED:
            self._reply(p.ok(p.yaml_list([tube.name for tube in self.watched.values()])))
        elif code == p.LIST_TUBE_USED:
            self._reply(p.using(self._used().name))
        else:
            self._reply(p.ok(p.yaml_map(self._stats(now_ns))))

    def _found(self, job: Job | None) -> None:
        self._reply(p.R_NOT_FOUND if job is None else p.found(job.id, job.body))

    def _used(self) -> Tube:
        used = self.used
        assert used is not None
        return used

    def _job_stats(self, job: Job, now_ns: int) -> list[tuple[str, object]]:
        counts = _NO_COUNTS if job.tally is None else job.tally
        has_deadline = job.state == RESERVED or job.state == DELAYED
        return [
            ("id", job.id),
            ("tube", self._service.engine.tube_of(job).name),
            ("state", STATE_NAMES[job.state]),
            ("pri", job.pri),
            ("age", (now_ns - job.created_ns) // SECOND_NS),
            ("delay", job.delay_s),
            ("ttr", job.ttr_s),
            ("time-left", _seconds_until(job.rank, now_ns) if has_deadline else 0),
            ("file", job.segment),
            ("reserves", counts.reserves),
            ("timeouts", counts.timeouts),
            ("releases", counts.releases),
            ("buries", counts.buries),
            ("kicks", counts.kicks),
        ]

    def _tube_stats(self, tube: Tube, now_ns: int) -> list[tuple[str, object]]:
        return [
            ("name", tube.name),
            ("current-jobs-urgent", tube.urgent),
            ("current-jobs-ready", len(tube.ready)),
            ("current-jobs-reserved", tube.reserved),
            ("current-jobs-delayed", len(tube.delayed)),
            ("current-jobs-buried", len(tube.buried)),
            ("total-jobs", tube.total_jobs),
            ("current-using", tube.using),
            ("current-watching", len(tube.watchers)),
            ("current-waiting", self._service.engine.waiting_in(tube)),
            ("cmd-delete", tube.total_deletes),
            ("cmd-pause-tube", tube.total_pauses),
            ("pause", tube.pause_s),
            ("pause-time-left", max(0, _seconds_until(tube.paused_until_ns, now_ns))),
        ]

    def _stats(self, now_ns: int) -> list[tuple[str, object]]:
        engine, commands, facts = self._service.engine, self._service.commands, self._service.facts()
        upstream: list[tuple[str, object]] = [
            ("current-jobs-urgent", engine.urgent_count),
            ("current-jobs-ready", engine.ready_count),
            ("current-jobs-reserved", engine.reserved_count),
            ("current-jobs-delayed", engine.delayed_count),
            ("current-jobs-buried", engine.buried_count),
            *[(name, commands[code]) for name, code in _COUNTED],
            ("job-timeouts", engine.total_timeouts),
            ("total-jobs", engine.total_jobs),
            ("max-job-size", self._service.max_job_bytes),
            ("current-tubes", len(engine.tubes)),
            ("current-connections", len(engine.clients)),
            ("current-producers", engine.producer_count),
            ("current-workers", engine.worker_count),
            ("current-waiting", engine.waiting_count),
            ("total-connections", engine.total_clients),
            *[(key, facts[key]) for key in ("pid", "version", "rusage-utime", "rusage-stime")],
            ("uptime", (now_ns - engine.started_ns) // SECOND_NS),
            *[(key, facts[key]) for key in _BINLOG_KEYS],
            ("draining", "true" if engine.draining else "false"),
            *[(key, facts[key]) for key in ("id", "hostname", "os", "platform")],
        ]
        known = {key for key, _ in upstream}
        ours = [(key, value) for key, value in facts.items() if key not in known]
        return [*upstream, *ours, ("build", BUILD)]


def _seconds_until(deadline_ns: int, now_ns: int) -> int:
    """Whole seconds left. Commands that came together share one reading of the clock; time passes between them all
    the same, so right after `pause-tube a 10` there are 9 whole seconds left, as upstream says.
    """
    return (deadline_ns - now_ns - 1) // SECOND_NS


_COUNTED: Final = (
    ("cmd-put", p.PUT),
    ("cmd-peek", p.PEEK),
    ("cmd-peek-ready", p.PEEK_READY),
    ("cmd-peek-delayed", p.PEEK_DELAYED),
    ("cmd-peek-buried", p.PEEK_BURIED),
    ("cmd-reserve", p.RESERVE),
    ("cmd-reserve-with-timeout", p.RESERVE_WITH_TIMEOUT),
    ("cmd-delete", p.DELETE),
    ("cmd-release", p.RELEASE),
    ("cmd-use", p.USE),
    ("cmd-watch", p.WATCH),
    ("cmd-ignore", p.IGNORE),
    ("cmd-bury", p.BURY),
    ("cmd-kick", p.KICK),
    ("cmd-touch", p.TOUCH),
    ("cmd-stats", p.STATS),
    ("cmd-stats-job", p.STATS_JOB),
    ("cmd-stats-tube", p.STATS_TUBE),
    ("cmd-list-tubes", p.LIST_TUBES),
    ("cmd-list-tube-used", p.LIST_TUBE_USED),
    ("cmd-list-tubes-watched", p.LIST_TUBES_WATCHED),
    ("cmd-pause-tube", p.PAUSE_TUBE),
)
_BINLOG_KEYS: Final = (
    "binlog-oldest-index",
    "binlog-current-index",
    "binlog-records-migrated",
    "binlog-records-written",
    "binlog-max-size",
)
