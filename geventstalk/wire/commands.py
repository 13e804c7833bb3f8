"""What a client's commands do: verbs to engine calls, outcomes to replies. Nothing else speaks both.

This room must not know sockets, gevent, clocks or durability, nor how a command's bytes arrived.
Invariant: each command is answered once, at once or when its wait ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from io import BytesIO
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.ages import Search
from geventstalk.core.engine import DRAINING, INSERTED, UNFINISHED, Engine
from geventstalk.core.job import BURIED, DELAYED, DELETED, ID_MAX_BITS, READY, RESERVED, SECOND_NS, Job
from geventstalk.core.order import EMPTY
from geventstalk.core.timerwheel import NEVER
from geventstalk.core.tube import Client, Tube
from geventstalk.wire import protocol as p
from geventstalk.wire.protocol import (
    BURY,
    DELETE,
    IGNORE,
    KICK,
    KICK_JOB,
    LIST_TUBE_USED,
    LIST_TUBES,
    LIST_TUBES_WATCHED,
    PAUSE_TUBE,
    PEEK,
    PEEK_BURIED,
    PEEK_DELAYED,
    PEEK_READY,
    PUT,
    QUIT,
    RELEASE,
    RESERVE,
    RESERVE_JOB,
    RESERVE_WITH_TIMEOUT,
    STATS_JOB,
    STATS_TUBE,
    TOUCH,
    USE,
    WATCH,
)
from geventstalk.wire.stats import job_stats, server_stats, tube_stats

MOVE_SLICE: Final = 250
"""Jobs that one slice of a kick, a disconnect or of passing time moves: two or three milliseconds in pure Python."""

LIST_SLICE: Final = 256
"""Tubes that one slice of a list names. A longer list is written as the client reads it."""
_MEASURE_SLICE: Final = 10_000
"""Names whose lengths are added up in one slice: half a millisecond."""
LARGE_BODY: Final = 1 << 14
"""A body of this size or more is not copied into its reply: it stands behind the reply's first line."""

LARGE_PUT: Final = 1 << 20
"""A body of this size or more goes to the ledger in slices: to write as much at once takes several milliseconds."""

OUT_BYTES_MAX: Final = 1 << 18
"""With so many bytes of replies unsent, a client's further commands wait."""

SKIP_LINE: Final = -1
"""All up to the end of the line is to be thrown away."""

_PUTS_UNWATCHED: Final = 32
"""Puts between two looks at the memory, where it is limited."""

_QUICK_ID_MAX: Final = (1 << 62) - 1
"""The compiled build compares integers up to here directly, and others by a call."""
_FOR_EVER: Final = -1
# What an awaited body is for.
_FOR_RESERVE: Final = 1
_FOR_RESERVE_JOB: Final = 2
_FOR_PEEK: Final = 3

_NAMES_PER_UNIT: Final = 16
_STATS_UNITS: Final = 16
"""What the server's statistics take, with a unit for each other command."""
PART_UNITS: Final = 128
"""What a part of a large body takes: a slice of its own."""
_SEARCH_UNITS: Final = 128
"""What a slice of the search for the oldest jobs takes that is not at its end: a slice of its own."""
_SOME_STATS_UNITS: Final = 4
"""What the statistics of a job or a tube take."""


class Service:
    """What all sessions of a server share.

    `facts` gives the statistics that are not of the engine, by their key. `tell` is for the owner's log: it hears what
    the operator must know, and the exception, if there was one that should not have been.
    """

    def __init__(
        self,
        engine: Engine,
        max_job_bytes: int,
        facts: Callable[[], Mapping[str, object]],
        tell: Callable[[str, Exception | None], None] | None = None,
    ) -> None:
        self.engine = engine
        self.max_job_bytes = max_job_bytes
        self.facts = facts
        self.tell = tell if tell is not None else _raise_again
        self.out_bytes_max = OUT_BYTES_MAX  # whoever sends the replies lowers it while too many of them wait
        self.commands = [0] * p.COMMANDS  # how often each command was given, by its code; every session counts here
        self.free_until = _QUICK_ID_MAX  # a put whose job would get this id, or a later one, may be refused
        self.silent = False  # with Engine.held: nobody's commands are executed, whatever they are
        self.refuses = False  # puts, also while Engine.held; see refuse()
        self.unknown: Callable[[bytes], bytes] = _unknown  # the reply to a line that is no command
        self._has_memory: Callable[[], bool] | None = None
        self._refusing = False

    def watch_memory(self, has_memory: Callable[[], bool]) -> None:
        """Has puts refused while there is too little: `has_memory` is asked now and then."""
        self._has_memory = has_memory
        self.free_until = 0

    def refuse(self, refuses: bool) -> None:
        """Has all puts refused, or ends that. The owner tells the operator why."""
        self.refuses = refuses
        self.free_until = 0

    def refuses_puts(self) -> bool:
        """Whether there is no id left, or too little memory for what is there already. Says so once."""
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


def _unknown(line: bytes) -> bytes:
    return p.R_UNKNOWN_COMMAND


def _raise_again(text: str, error: Exception | None) -> None:
    if error is not None:
        raise error


@mypyc_attr(allow_interpreted_subclasses=True)
class Commands(Client):
    """A client and what it says, line by line. Its replies stand in `out`, `out_bytes` long, for the owner to send.

    `awaited` is a job that the reply to its last command has to show, and whose body is not in memory. The owner lets
    the client go on when the body has come.
    """

    __slots__ = (
        "_await_for",
        "_body",
        "_body_left",
        "_counts",
        "_engine",
        "_goes_on",
        "_kick_left",
        "_kicked",
        "_kicks_buried",
        "_list",
        "_list_bytes",
        "_listed",
        "_measured",
        "_put_body",
        "_search",
        "_service",
        "_skip_left",
        "_skip_reply",
        "_stats_of",
        "awaited",
        "closed",
        "eof",
        "out",
        "out_bytes",
        "trace",
    )

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service
        self._engine = service.engine
        self._counts = service.commands
        self._body: BytesIO | None = None  # what has come of a body that takes several reads
        self._put_body = b""  # all of a large body that the ledger has not wholly taken yet
        self._body_left = 0
        self._skip_left = 0  # bytes still to be thrown away of a body that is refused, or SKIP_LINE
        self._skip_reply = p.R_JOB_TOO_BIG  # and what is said behind them
        self._goes_on = False  # a command that takes several slices is under way: a put, a kick, statistics or a list
        self._list: list[bytes] = []  # the names of a list that goes on
        self._list_bytes = 0  # what the text of those takes that were measured
        self._listed = -1  # how many of them are written; -1 while they are measured
        self._measured = 0  # how many of them are
        self._kick_left = 0
        self._kicked = 0
        self._kicks_buried = False
        self._search: Search | None = None  # for statistics that go on
        self._stats_of: Tube | None = None  # the tube they are of, None for the server's
        self.awaited: Job | None = None
        self._await_for = 0
        self.out: list[bytes] = []
        self.out_bytes = 0
        self.eof = False
        self.closed = False
        self.trace: Callable[[str, bytes], None] | None = None

    def _skip(self, size: int, reply: bytes) -> None:
        """Has so many bytes of a refused body thrown away as they come, and then the client told why."""
        self._skip_left = size
        self._skip_reply = reply
        if not size:
            self._reply(reply)

    def _reply(self, reply: bytes) -> None:
        if self.trace is not None:
            self.trace(">", reply)
        self.out_bytes += len(reply)
        self.out.append(reply)

    def _pass_on(self, piece: bytes) -> None:
        """A piece of a reply that has begun."""
        self.out_bytes += len(piece)
        self.out.append(piece)

    def _reply_in_pieces(self, pieces: list[bytes]) -> None:
        if self.trace is not None:
            self.trace(">", b"".join(pieces))
        self.out_bytes += sum([len(piece) for piece in pieces])
        self.out += pieces

    def _reserved(self, job: Job) -> None:
        """Tells the client of a job that is reserved for it by now: nothing here may need much memory."""
        if self._engine.bodies is not None:
            self._engine.bodies.handed_out(job)
        body = job.body
        if body is None:
            self._await(job, _FOR_RESERVE)
        elif len(body) < LARGE_BODY:
            self._reply(p.reserved(job.id, body))
        else:
            self._reply_in_pieces([p.reserved_line(job.id, body), body])

    def _execute(self, line: bytes, now_ns: int) -> None:
        code, arguments = p.command(line)
        engine = self._engine
        if code == PUT:
            self._put(arguments, now_ns)
        elif code == RESERVE_WITH_TIMEOUT:
            timeout_s = p.timeout_argument(arguments)
            self._counts[code] += 1
            self._reserve(timeout_s, now_ns)
        elif code == DELETE:
            id = p.id_argument(arguments)
            self._counts[code] += 1
            self._reply(p.R_DELETED if engine.delete(self, id, now_ns) else p.R_NOT_FOUND)
        elif code == RESERVE:
            self._counts[code] += 1
            self._reserve(_FOR_EVER, now_ns)
        elif code == RELEASE:
            id, pri, delay_s = p.release_arguments(arguments)
            self._counts[code] += 1
            done = engine.release(self, id, pri, delay_s, now_ns)
            self._reply(p.R_RELEASED if done else p.R_NOT_FOUND)
        elif code == BURY:
            id, pri = p.bury_arguments(arguments)
            self._counts[code] += 1
            self._reply(p.R_BURIED if engine.bury(self, id, pri, now_ns) else p.R_NOT_FOUND)
        elif code == TOUCH:
            id = p.id_argument(arguments)
            self._counts[code] += 1
            self._reply(p.R_TOUCHED if engine.touch(self, id, now_ns) else p.R_NOT_FOUND)
        elif code == KICK:
            self._kick(p.kick_argument(arguments))
        elif code == KICK_JOB:
            id = p.id_argument(arguments)
            self._counts[code] += 1
            self._reply(p.R_KICKED if engine.kick_job(id, now_ns) else p.R_NOT_FOUND)
        elif code == RESERVE_JOB:
            id = p.id_argument(arguments)
            self._counts[code] += 1
            self._reserve_job(id, now_ns)
        elif code in (USE, WATCH, IGNORE, PAUSE_TUBE):
            self._tube_command(code, arguments, now_ns)
        elif code == QUIT:
            self.closed = True
        else:
            self._look(code, arguments, now_ns)

    def _put(self, arguments: bytes, now_ns: int) -> None:
        try:
            pri, delay_s, ttr_s, size = p.put_arguments(arguments)
        except p.BadFormat:
            size = p.put_size_with_garbage(arguments)
            if size >= 0:
                self._counts[PUT] += 1
            if size <= self._service.max_job_bytes:
                raise
            self._skip(size + 2, p.R_JOB_TOO_BIG)
            return
        self._counts[PUT] += 1
        if size > self._service.max_job_bytes:
            self._skip(size + 2, p.R_JOB_TOO_BIG)
            return
        if self._engine.next_id >= self._service.free_until and self._service.refuses_puts():
            self._skip(size + 2, p.R_OUT_OF_MEMORY)
            return
        self.upload = self._engine.open_put(self, pri, delay_s, ttr_s or 1, now_ns)
        self._body_left = size + 2

    def _reserve(self, timeout_s: int, now_ns: int) -> None:
        engine = self._engine
        job = engine.reserve(self, now_ns)
        if job is not None:
            if job.body is None:  # see _awaits_body()
                self.wait_until_ns = NEVER if timeout_s < 0 else now_ns + timeout_s * SECOND_NS
            self._reserved(job)
        elif engine.deadline_soon(self, now_ns):
            self._reply(p.R_DEADLINE_SOON)
        elif timeout_s == 0 or self.eof:
            self._reply(p.R_TIMED_OUT)
        else:
            engine.wait(self, now_ns, timeout_s)

    def _kick(self, bound: int) -> None:
        self._counts[KICK] += 1
        self._kicks_buried = self._used().buried.first() != EMPTY
        self._kicked = 0
        self._kick_left = bound
        self._goes_on = bound > 0
        if not bound:
            self._reply(p.kicked(0))

    def _go_on(self, now_ns: int) -> bool:
        """Goes on with a command that takes several slices. Returns whether it is done and answered."""
        if self.awaited is not None:
            self._goes_on = self._awaits_body(self.awaited, now_ns)
        elif self._put_body:
            self._goes_on = not self._put_slice(now_ns)
        elif self._kick_left:
            self._goes_on = not self._kick_slice(now_ns)
        elif self._search is not None:
            self._goes_on = not self._stats_slice(self._search, self._stats_of, now_ns)
            if not self._goes_on:
                self._search = self._stats_of = None
        else:
            self._goes_on = not self._list_slice()
        return not self._goes_on

    # --- a body that is not in memory

    def _await(self, job: Job, what_for: int) -> None:
        """The command is answered when the body of this job is in memory."""
        bodies = self._engine.bodies
        assert bodies is not None
        bodies.wait_for(job)
        self.awaited = job
        self._await_for = what_for
        self._goes_on = True

    def stop_awaiting(self) -> None:
        """The client does not wait for a body any more, if it did."""
        job = self.awaited
        if job is not None:
            self.awaited = None
            bodies = self._engine.bodies
            assert bodies is not None
            bodies.let_be(job)

    def _awaits_body(self, job: Job, now_ns: int) -> bool:
        """Answers if the body has come. Returns whether the client still waits for one.

        A reservation that has ended meanwhile is none: then the command begins anew, and perhaps awaits another body.
        The ttr begins when the client is told of the job. How long the body took is not the client's time.
        """
        engine, what_for = self._engine, self._await_for
        if what_for != _FOR_PEEK and (job.state != RESERVED or job.holder != self.number):
            self.stop_awaiting()
            if what_for == _FOR_RESERVE:
                until_ns = self.wait_until_ns
                timeout_s = _FOR_EVER if until_ns == NEVER else max(0, until_ns - now_ns + SECOND_NS - 1) // SECOND_NS
                self._reserve(timeout_s, now_ns)
            else:
                self._reserve_job(job.id, now_ns)
        elif job.body is not None:
            self.stop_awaiting()
            if what_for == _FOR_PEEK:
                self._found(job)
            else:
                engine.touch(self, job.id, now_ns)
                self._reserved(job)
        elif job.state == DELETED:
            self.stop_awaiting()
            self._reply(p.R_NOT_FOUND)
        elif engine.bodies is not None:
            engine.bodies.want(job)
        return self.awaited is not None

    def _reserve_job(self, id: int, now_ns: int) -> None:
        job = self._engine.reserve_job(self, id, now_ns)
        if job is None:
            self._reply(p.R_NOT_FOUND)
            return
        self._reserved(job)
        if self.awaited is not None:
            self._await_for = _FOR_RESERVE_JOB

    def _begin_large_put(self, body: bytes, now_ns: int) -> None:
        """All of a body of LARGE_PUT bytes or more is there. It goes to the ledger in slices."""
        self._put_body = body
        self._goes_on = not self._put_slice(now_ns)

    def _put_slice(self, now_ns: int) -> bool:
        job = self.upload
        assert job is not None
        body = self._put_body
        outcome = self._engine.prepare(job, body, now_ns)
        if outcome == UNFINISHED:
            self._engine.work += PART_UNITS
            return False
        self._put_body = b""
        if outcome == INSERTED:
            self._finish_put(job, body, now_ns)
        else:
            self.upload = None
            self._engine.abandon_put(job)
            self._reply(p.R_DRAINING if outcome == DRAINING else p.R_OUT_OF_MEMORY)
        return True

    def _finish_put(self, job: Job, body: bytes, now_ns: int) -> None:
        outcome = self._engine.put(job, body, now_ns)
        self.upload = None  # after an exception it is still an upload, unless the job table has it
        if outcome == INSERTED:
            self._reply(p.inserted(job.id))
        else:
            self._reply(p.R_DRAINING if outcome == DRAINING else p.R_OUT_OF_MEMORY)

    def _kick_slice(self, now_ns: int) -> bool:
        limit = min(self._kick_left, MOVE_SLICE)
        kicked = self._engine.kick(self._used(), self._kicks_buried, limit, now_ns)
        self._engine.work += kicked
        self._kicked += kicked
        self._kick_left = self._kick_left - kicked if kicked == limit else 0
        if self._kick_left:
            return False
        self._reply(p.kicked(self._kicked))
        return True

    def _begin_list(self, names: Collection[bytes]) -> None:
        """Answers with the names as they are now, however long it takes the client to read them."""
        if len(names) <= LIST_SLICE:
            self._engine.work += len(names) // _NAMES_PER_UNIT
            self._reply(p.ok(p.yaml_list(names)))
            return
        self._list = self._engine.tube_names() if names is self._engine.tubes else [*names]
        self._list_bytes = len(p.YAML_HEAD)
        self._measured = 0
        self._listed = -1
        self._goes_on = True

    def _list_slice(self) -> bool:
        names, at = self._list, self._listed
        self._engine.work += LIST_SLICE // _NAMES_PER_UNIT
        if at < 0:
            end = min(self._measured + _MEASURE_SLICE, len(names))
            self._list_bytes += p.yaml_names_bytes(names[self._measured : end])
            self._measured = end
            if end == len(names):
                self._reply(p.ok_line(self._list_bytes))
                self._pass_on(p.YAML_HEAD)
                self._listed = 0
            return False
        self._listed = at + LIST_SLICE
        self._pass_on(p.yaml_names(names[at : self._listed]))
        if self._listed < len(names):
            return False
        self._pass_on(p.CRLF)
        self._list = []
        return True

    def _tube_command(self, code: int, arguments: bytes, now_ns: int) -> None:
        engine = self._engine
        if code == PAUSE_TUBE:
            name, delay_s = p.pause_arguments(arguments)
            self._counts[code] += 1
            if not p.is_tube_name(name):
                raise p.BadFormat
            self._reply(p.R_PAUSED if engine.pause(name, delay_s, now_ns) else p.R_NOT_FOUND)
            return
        name = p.name_argument(arguments)
        self._counts[code] += 1
        if engine.bodies is not None and not self._has_room_for(name, code):
            self._reply(p.R_OUT_OF_MEMORY)
        elif code == USE:
            engine.use(self, name)
            self._reply(p.using(name))
        elif code == WATCH:
            self._reply(p.watching(engine.watch(self, name)))
        else:
            count = engine.ignore(self, name)
            self._reply(p.watching(count) if count else p.R_NOT_IGNORED)

    def _has_room_for(self, name: bytes, code: int) -> bool:
        """Whether the client may use or watch this tube. Only what takes memory is refused."""
        engine = self._engine
        if code == IGNORE:
            return True
        tube = engine.tubes.get(name)
        if tube is not None and (code == USE or tube.number in self.watched):
            return True
        return engine.takes_tubes()

    # --- commands that only look

    def _look(self, code: int, arguments: bytes, now_ns: int) -> None:
        engine = self._engine
        if code == PEEK:
            id = p.id_argument(arguments)
            self._counts[code] += 1
            self._found(engine.jobs.get(id))
        elif code == STATS_JOB:
            id = p.id_argument(arguments)
            self._counts[code] += 1
            engine.work += _SOME_STATS_UNITS
            job = engine.jobs.get(id)
            self._reply(p.R_NOT_FOUND if job is None else p.ok(p.yaml_map(job_stats(engine, job, now_ns))))
        elif code == STATS_TUBE:
            name = p.name_argument(arguments)
            self._counts[code] += 1
            tube = engine.tubes.get(name)
            if tube is None:
                self._reply(p.R_NOT_FOUND)
            else:
                self._begin_stats(tube, now_ns)
        else:
            self._counts[code] += 1
            self._look_around(code, now_ns)

    def _look_around(self, code: int, now_ns: int) -> None:
        engine = self._engine
        if code == PEEK_READY:
            self._found(engine.peek(self, READY))
        elif code == PEEK_DELAYED:
            self._found(engine.peek(self, DELAYED))
        elif code == PEEK_BURIED:
            self._found(engine.peek(self, BURIED))
        elif code == LIST_TUBES:
            self._begin_list(engine.tubes)
        elif code == LIST_TUBES_WATCHED:
            self._begin_list([tube.name for tube in self.watched.values()])
        elif code == LIST_TUBE_USED:
            self._reply(p.using(self._used().name))
        else:
            self._begin_stats(None, now_ns)

    def _begin_stats(self, tube: Tube | None, now_ns: int) -> None:
        """Answers with the statistics of a tube, or of the server, once it is known which jobs are the oldest ones."""
        search = Search(self._engine, tube)
        if not self._stats_slice(search, tube, now_ns):
            self._search = search
            self._stats_of = tube
            self._goes_on = True

    def _stats_slice(self, search: Search, tube: Tube | None, now_ns: int) -> bool:
        engine = self._engine
        oldest = search.go_on()
        if oldest is None:
            engine.work += _SEARCH_UNITS
            return False
        if tube is None:
            engine.work += _STATS_UNITS
            service = self._service
            stats = server_stats(engine, service.commands, service.max_job_bytes, service.facts(), oldest, now_ns)
            self._reply(p.ok(p.yaml_map(stats)))
        elif engine.tube_by_number.get(tube.number) is tube:
            engine.work += _SOME_STATS_UNITS
            self._reply(p.ok(p.yaml_map(tube_stats(engine, tube, oldest, now_ns))))
        else:
            self._reply(p.R_NOT_FOUND)
        return True

    def _found(self, job: Job | None) -> None:
        if job is None:
            self._reply(p.R_NOT_FOUND)
            return
        body = job.body
        if body is None:
            self._await(job, _FOR_PEEK)
        elif len(body) < LARGE_BODY:
            self._reply(p.found(job.id, body))
        else:
            self._reply_in_pieces([p.found_line(job.id, body), body])

    def _used(self) -> Tube:
        used = self.used
        assert used is not None
        return used
