"""What a client's commands do: verbs to engine calls, outcomes to replies. Nothing else speaks both.

This room must not know sockets, gevent, clocks or durability, nor how a command's bytes arrived.
Invariant: each command is answered once, at once or when its wait ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.engine import Engine
from geventstalk.core.job import BURIED, DELAYED, READY, Job
from geventstalk.core.tube import Client, Tube
from geventstalk.wire import protocol as p
from geventstalk.wire.stats import job_stats, server_stats, tube_stats

MOVE_SLICE: Final = 250
"""Jobs that one slice of a kick, a disconnect or of passing time moves: two or three milliseconds in pure Python."""

_FOR_EVER: Final = -1


class Service:
    """What all sessions of a server share. `facts` gives the statistics that are not of the engine, by their key."""

    def __init__(self, engine: Engine, max_job_bytes: int, facts: Callable[[], Mapping[str, object]]) -> None:
        self.engine = engine
        self.max_job_bytes = max_job_bytes
        self.facts = facts
        self.commands = [0] * p.COMMANDS  # how often each command was given, by its code


@mypyc_attr(allow_interpreted_subclasses=True)
class Commands(Client):
    """A client and what it says, line by line. Its replies stand in `out`, `out_bytes` long, for the owner to send."""

    __slots__ = (
        "_body",
        "_body_left",
        "_kick_left",
        "_kicked",
        "_kicks_buried",
        "_service",
        "_skip_left",
        "_skip_reply",
        "_upload",
        "closed",
        "eof",
        "out",
        "out_bytes",
        "trace",
    )

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service
        self._upload: Job | None = None
        self._body = bytearray()
        self._body_left = 0
        self._skip_left = 0  # bytes still to be thrown away of a body that is refused
        self._skip_reply = p.R_JOB_TOO_BIG  # and what is said behind them
        self._kick_left = 0
        self._kicked = 0
        self._kicks_buried = False
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
            self._reply(p.R_NOT_FOUND if job is None else p.ok(p.yaml_map(job_stats(engine, job, now_ns))))
        elif code == p.STATS_TUBE:
            name = p.name_argument(arguments)
            self._count(code)
            tube = engine.tubes.get(name)
            self._reply(p.R_NOT_FOUND if tube is None else p.ok(p.yaml_map(tube_stats(engine, tube, now_ns))))
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
            service = self._service
            stats = server_stats(engine, service.commands, service.max_job_bytes, service.facts(), now_ns)
            self._reply(p.ok(p.yaml_map(stats)))

    def _found(self, job: Job | None) -> None:
        self._reply(p.R_NOT_FOUND if job is None else p.found(job.id, job.body))

    def _used(self) -> Tube:
        used = self.used
        assert used is not None
        return used
