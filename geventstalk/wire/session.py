"""One client's input: bytes in, complete commands out to commands.py, in slices.

This room must not know sockets, gevent, clocks or durability: whoever owns the session feeds it bytes and time, sends
what it puts into `out`, and sees to it that what was promised there is kept first.
Invariant: while a reserve waits, nothing further of the input is executed; replies stand in the order of the commands.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk._build import BUILD
from geventstalk.core.job import Job
from geventstalk.core.tube import DEADLINE_SOON, RESERVED_JOB
from geventstalk.wire import protocol as p
from geventstalk.wire.commands import LARGE_PUT, SKIP_LINE, Commands
from geventstalk.wire.commands import MOVE_SLICE as MOVE_SLICE
from geventstalk.wire.commands import OUT_BYTES_MAX as OUT_BYTES_MAX
from geventstalk.wire.commands import Service as Service

COMMAND_SLICE: Final = 128
"""Units of work that one client has done before others get their turn. A plain command is one unit; what moves many
jobs, looks at many tubes or writes a long reply is more: see Engine.work.
"""

_JOIN_BYTES_MAX: Final = 1 << 17
"""Replies of more bytes do not leave in one piece: to copy them would take longer than another system call."""
_LINE_MAX: Final = p.LINE_BYTES_MAX - len(p.CRLF)
_SHORT_INPUT: Final = _LINE_MAX if BUILD == "pure" else -1
"""Interpreted, so much is cut at its first CRLF at less cost than searched. No line in it is too long."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Session(Commands):
    """One connection. Feed it with receive() and hang_up(), let it go on with run(), send and empty `out`.

    `unfinished` says that run() has more to do once others had their turn and `out` was sent; `held_up`, that run()
    can do that only once Engine.held is False; `closed`, that the connection ends once `out` is sent. After that call
    Engine.leave().
    """

    __slots__ = ("_at", "_inbox", "held_up", "unfinished", "unread")

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._inbox = b""  # empty when all of it is done with
        self._at = 0  # what of the inbox is done with; 0 when it is empty
        self.unfinished = False
        self.held_up = False
        self.unread = False  # after hang_up(): the owner has not read yet all that the client sent before
        service.engine.join(self)

    @property
    def pending_bytes(self) -> int:
        """Input that was received and not yet executed."""
        return len(self._inbox) - self._at

    def receive(self, data: bytes, now_ns: int) -> None:
        """Takes what the client sent and executes as much as one slice allows.

        An exception comes out of here, run(), hang_up() and leave() only when a change may be half made. Whoever owns
        the session then ends the process, or calls Engine.undo() and give_up().
        """
        if not self._inbox:
            self._inbox = data
        else:
            try:
                self._inbox = self._inbox[self._at :] + data
                self._at = 0
            except MemoryError as error:
                self._fail("input of a client is lost, its connection is closed", error)
                return
        self.run(now_ns)

    def hang_up(self, now_ns: int) -> None:
        """The client will send nothing more: a wait ends at once, complete commands run, then the connection closes.

        With `unread` set before, the connection stays open for what is still to be read; call again behind that.
        """
        self.eof = True
        if self.waiting:
            self._engine.stop_waiting(self)
            self._reply(p.R_TIMED_OUT)
        self.run(now_ns)

    def take_out(self) -> bytes:
        """The replies that stand, as one piece; they are the caller's to send now.

        Among many bytes it is only the first ones, so that a large body is never copied: call again while `out` lasts.
        """
        out = self.out
        if len(out) == 1:
            self.out = []
            self.out_bytes = 0
            return out[0]
        if self.out_bytes > _JOIN_BYTES_MAX:
            return self._take_some(out)
        self.out = []
        self.out_bytes = 0
        try:
            return b"".join(out)
        except MemoryError as error:
            self._fail("replies do not fit into memory, their connection is closed", error)
            self.take_out()
            return b""

    def _take_some(self, out: list[bytes]) -> bytes:
        """A large piece alone, or the small ones that stand before the next large one."""
        count = size = 0
        while count < len(out) and size + len(out[count]) <= _JOIN_BYTES_MAX:
            size += len(out[count])
            count += 1
        if not count:
            count, size = 1, len(out[0])
        data = out[0] if count == 1 else b"".join(out[:count])
        del out[:count]
        self.out_bytes -= size
        return data

    def give_up(self) -> None:
        """After an exception and Engine.undo(): what the client wanted is not done, and it is told so."""
        self._engine.stop_waiting(self)
        if not self.closed:
            self._say_goodbye()

    def leave(self, now_ns: int) -> bool:
        """The connection is gone. Gives back what it held, in slices: returns whether that is done."""
        if self.upload is not None:
            upload = self.upload
            self.upload = None
            self._engine.abandon_put(upload)
        self.stop_awaiting()
        return self._engine.leave(self, now_ns, MOVE_SLICE)

    def answer(self, outcome: int, job: Job | None) -> None:
        """The engine ends this client's wait."""
        if outcome == RESERVED_JOB:
            assert job is not None
            self._reserved(job)
        else:
            self._reply(p.R_DEADLINE_SOON if outcome == DEADLINE_SOON else p.R_TIMED_OUT)
        self.unfinished = len(self._inbox) > 0 or self._goes_on

    def run(self, now_ns: int) -> None:
        """Executes complete commands until one waits, the input or the slice is used up, or enough replies stand."""
        engine = self._engine
        out_bytes_max = self._service.out_bytes_max
        left = COMMAND_SLICE
        engine.work = 0
        self.unfinished = False
        try:
            while (self._inbox or self._goes_on) and not self.waiting and not self.closed:
                if left <= engine.work or self.out_bytes >= out_bytes_max:
                    self.unfinished = True
                    return
                if engine.held:
                    if self._service.refuses and self.upload is not None and not self._goes_on:
                        self._refuse_body(self.upload)
                    self.held_up = self._changes_next()
                    if self.held_up:
                        self.unfinished = True
                        return
                left -= 1
                engine.changing = False
                if self._goes_on:
                    if self._go_on(now_ns):
                        continue
                    self.unfinished = True
                    return
                if self.upload is not None:
                    if self._take_body(now_ns):
                        continue
                    break
                if self._skip_left:
                    if self._skip_some():
                        continue
                    break
                inbox, at = self._inbox, self._at
                if at or len(inbox) > _SHORT_INPUT:
                    end = p.line_end(inbox, at)
                    if end < 0:
                        self._shorten_line()
                        break
                    line = inbox[at:end]
                    self._done_up_to(end + 2)
                    if len(line) > _LINE_MAX:
                        self._reply(p.R_BAD_FORMAT)
                        continue
                else:
                    line, ending, rest = inbox.partition(p.CRLF)
                    if not ending:
                        self._shorten_line()
                        break
                    self._inbox = rest
                if self.trace is not None:
                    self.trace("<", line)
                try:
                    self._execute(line, now_ns)
                except p.UnknownCommand:
                    self._reply(self._service.unknown(line))
                except p.ProtocolError as error:
                    self._reply(error.reply)
                except MemoryError:
                    if engine.changing:
                        raise
                    self._reply(p.R_OUT_OF_MEMORY)
        except Exception as fault:  # not `error`: mypyc gives a name one type, and that is a ProtocolError's here
            if engine.changing:
                raise
            self._fail("a command failed in a way it must not, its connection is closed", fault)
        if self.eof and not self.waiting and not self.unread:
            self.closed = True

    def _fail(self, text: str, error: Exception) -> None:
        """Nothing is half done, but with this client it cannot go on."""
        self._say_goodbye()
        self._service.tell(text, error)

    def _say_goodbye(self) -> None:
        self.closed = True
        self.unfinished = False
        self.held_up = False
        self._goes_on = False
        self._reply(p.R_INTERNAL_ERROR)

    def _refuse_body(self, job: Job) -> None:
        """Ends a put whose body has not wholly come, or has come and is held."""
        self.upload = None
        self._body = None
        self._engine.abandon_put(job)
        self._skip(self._body_left, p.R_OUT_OF_MEMORY)

    def _changes_next(self) -> bool:
        """Whether what comes next may change something that survives a restart. While the service is silent: always.

        A large put that has begun is left to the ledger, which may need the end of that put before it can go on.
        """
        service = self._service
        if service.silent or service.refuses:
            plain = not self._goes_on and self.upload is None
            if plain and self._skip_left:
                return False
            if plain and service.refuses and p.is_put(self._inbox, self._at):
                return False
            if service.silent:
                return True
        if self._goes_on:
            return self._kick_left > 0
        if self.upload is not None:
            return self._body_left <= self.pending_bytes
        if self._skip_left:
            return False
        end = self._inbox.find(p.CRLF, self._at)
        return end >= 0 and p.is_change(self._inbox[self._at : end])

    def _done_up_to(self, at: int) -> None:
        """All of the inbox before this is done with."""
        if at < len(self._inbox):
            self._at = at
        else:
            self._inbox = b""
            self._at = 0

    # --- input that is not a command line

    def _shorten_line(self) -> None:
        """Without an end of line in sight, keeps no more of the input than a line may have."""
        if self.pending_bytes > p.LINE_BYTES_MAX - 1:
            self._skip_left = SKIP_LINE
            self._skip_line()

    def _skip_line(self) -> bool:
        """Throws away a line that is too long; returns whether all of it has come."""
        end = self._inbox.find(p.CRLF, self._at)
        if end < 0:
            self._inbox = b"\r" if self._inbox.endswith(b"\r") else b""
            self._at = 0
            return False
        self._done_up_to(end + 2)
        self._skip_left = 0
        self._reply(p.R_BAD_FORMAT)
        return True

    def _skip_some(self) -> bool:
        """Throws away a body that is refused, or a line; returns whether all of it has come."""
        if self._skip_left == SKIP_LINE:
            return self._skip_line()
        skipped = min(self._skip_left, self.pending_bytes)
        self._done_up_to(self._at + skipped)
        self._skip_left -= skipped
        if self._skip_left:
            return False
        self._reply(self._skip_reply)
        return True

    def _take_body(self, now_ns: int) -> bool:
        """Takes what has come of a put's body; returns whether that was all of it."""
        job = self.upload
        assert job is not None
        inbox, at, left = self._inbox, self._at, self._body_left
        size = len(inbox) - at
        if size > left:
            size = left
            part = inbox[at : at + left]
            self._at = at + left
        else:
            part = inbox[at:]
            self._inbox = b""
            self._at = 0
        if size < left or self._body is not None:
            self._body_left = left - size
            bodies = self._engine.bodies
            if bodies is not None and not bodies.claim(self._engine, job.id, size, left - size):
                self._refuse_body(job)
                return True
            try:
                if self._body is None:
                    self._body = BytesIO()
                self._body.write(part)
                if self._body_left:
                    return False
                part = self._body.getvalue()  # which copies nothing
                size = len(part)
                self._body = None
            except MemoryError:
                self._refuse_body(job)
                return True
        if not part.endswith(p.CRLF):
            self.upload = None
            self._engine.abandon_put(job)
            self._reply(p.R_EXPECTED_CRLF)
            return True
        if size < LARGE_PUT:
            self._finish_put(job, part, now_ns)
        else:
            self._begin_large_put(part, now_ns)
        return True
