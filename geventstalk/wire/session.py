"""One client's input: bytes in, complete commands to the verbs, in slices.

This module must not know sockets, gevent, clocks or durability: the session's owner feeds it bytes and time, sends
`out`, and keeps what is promised there before.
Invariant: while a reserve waits, nothing further of the input is executed; replies stand in the order of the commands.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk._build import BUILD
from geventstalk.core.job import Job
from geventstalk.core.tube import DEADLINE_SOON, RESERVED_JOB, TIMED_OUT
from geventstalk.wire import protocol as p
from geventstalk.wire.arriving import Arriving
from geventstalk.wire.commands import LARGE_PUT, SKIP_LINE, Commands
from geventstalk.wire.commands import MOVE_SLICE as MOVE_SLICE
from geventstalk.wire.commands import OUT_BYTES_MAX as OUT_BYTES_MAX
from geventstalk.wire.commands import Service as Service
from geventstalk.wire.verbs import body_behind, changes, find, is_put, line_max

COMMAND_SLICE: Final = 128
"""Units of work of one client before others get their turn. A plain command is one unit; one that moves many jobs,
looks at many tubes or writes a long reply is more: see Engine.work."""

_JOIN_BYTES_MAX: Final = 1 << 17
"""Replies of more bytes leave in several pieces: to copy them would take longer than another system call."""
_LINE_MAX: Final = p.LINE_BYTES_MAX - len(p.CRLF)
_SHORT_INPUT: Final = _LINE_MAX if BUILD == "pure" else -1
"""Interpreted, to cut input of this size at its first CRLF costs less than to search it. No line in it is too long."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Session(Commands):
    """One connection. The owner calls receive(), hang_up() and run(), sends and empties `out`, and calls leave() last.

    `unfinished` says that run() has more to do once others had their turn and `out` was sent; `held_up`, that run()
    can do that only once Engine.held is False; `closed`, that the connection ends once `out` is sent.
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

        An exception comes out of here, run(), hang_up() and leave() only when a change may be half made. The owner then
        ends the process, or calls Engine.undo() and give_up().
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
        """Handles the end of the input: ends a wait, runs complete commands, then closes the connection.

        With `unread` set before, the connection stays open for the input that is still to be read. The owner calls
        again behind that.
        """
        self.eof = True
        if self.waiting:
            self.engine.stop_waiting(self)
            self.answer(TIMED_OUT, None)
        self.run(now_ns)

    def take_out(self) -> bytes:
        """Returns the replies in `out` as one piece, which the caller has to send.

        Of many bytes the piece is only the first ones, so that a large body is never copied: the caller calls again
        while there is `out`.
        """
        out = self.out
        if len(out) == 1:
            self.out = []
            self.out_bytes = 0
            self.shows_job = False
            return out[0]
        if self.out_bytes > _JOIN_BYTES_MAX:
            return self._take_some(out)
        self.out = []
        self.out_bytes = 0
        self.shows_job = False
        try:
            return b"".join(out)
        except MemoryError as error:
            self._fail("replies do not fit into memory, their connection is closed", error)
            self.take_out()
            return b""

    def _take_some(self, out: list[bytes]) -> bytes:
        """Returns a large piece alone, or the small ones before the next large one."""
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
        """Tells the client, after an exception and Engine.undo(), that its command is not done."""
        self.engine.stop_waiting(self)
        if not self.closed:
            self._say_goodbye()

    def leave(self, now_ns: int) -> bool:
        """Gives back, in slices, what the connection of a client held that is gone. Returns whether that is done."""
        if self.upload is not None:
            upload = self.upload
            self.upload = None
            self._end_share()
            self.engine.abandon_put(upload)
        if self.going is not None:
            self.going.stop(self)
            self.going = None
        self.stop_awaiting()
        return self.engine.leave(self, now_ns, MOVE_SLICE)

    def answer(self, outcome: int, job: Job | None) -> None:
        """Replies to the reserve whose wait the engine ends."""
        if self._goes_on:
            self.end_wait(outcome, job)
        elif outcome == RESERVED_JOB:
            assert job is not None
            self._reserved(job)
        else:
            self.reply(p.R_DEADLINE_SOON if outcome == DEADLINE_SOON else p.R_TIMED_OUT)
        self.unfinished = self._inbox != b"" or self._goes_on

    def run(self, now_ns: int) -> None:
        """Executes complete commands until one waits, the input or the slice is used up, or enough replies stand."""
        engine = self.engine
        out_bytes_max = self.service.out_bytes_max
        left = COMMAND_SLICE
        engine.work = 0
        self.unfinished = False
        try:
            while (self._inbox or self._goes_on) and not self.waiting and not self.closed:
                if left <= engine.work or self.out_bytes >= out_bytes_max or (engine.held and self._is_held_up()):
                    self.unfinished = True
                    return
                left -= 1
                engine.changing = False
                if self._goes_on:
                    goes_on = self._go_on(now_ns)
                elif self.upload is not None:
                    goes_on = self._take_body(now_ns)
                elif self._skip_left:
                    goes_on = self._skip_some()
                else:
                    goes_on = self._take_command(now_ns)
                if not goes_on:
                    self.unfinished = self._goes_on
                    break
        except Exception as error:
            if engine.changing:
                raise
            self._fail("a command failed in a way it must not, its connection is closed", error)
        if self.eof and not self.unfinished and not self.waiting and not self.unread:
            self.closed = True

    def _take_command(self, now_ns: int) -> bool:
        """Executes the command that comes next; returns whether all of its line has come."""
        inbox, at = self._inbox, self._at
        if at or len(inbox) > _SHORT_INPUT:
            end = p.line_end(inbox, at)
            if end < 0:
                self._shorten_line()
                return False
            line = inbox[at:end]
            self._done_up_to(end + 2)
            if len(line) > _LINE_MAX and len(line) > line_max(line):
                self.skip(body_behind(line), p.R_BAD_FORMAT)
                return True
        else:
            line, ending, rest = inbox.partition(p.CRLF)
            if not ending:
                self._shorten_line()
                return False
            self._inbox = rest
        if self.trace is not None:
            self.trace("<", line)
        try:
            verb, arguments = find(line)
            verb.run(self, arguments, now_ns)
        except p.UnknownCommand:
            self.reply(self.service.unknown(line))
        except p.ProtocolError as error:
            self.reply(error.reply)
        except MemoryError:
            if self.engine.changing:
                raise
            self.reply(p.R_OUT_OF_MEMORY)
        return True

    def _fail(self, text: str, error: Exception) -> None:
        """Closes a connection that cannot go on; nothing is half done."""
        self._say_goodbye()
        self.service.tell(text, error)

    def _say_goodbye(self) -> None:
        self.closed = True
        self.unfinished = False
        self.held_up = False
        self._goes_on = False
        self.reply(p.R_INTERNAL_ERROR)

    def _refuse_body(self, job: Job) -> None:
        """Ends a put whose body has not wholly come, or has come and is held."""
        self.upload = None
        self._body = None
        self._end_share()
        self.engine.abandon_put(job)
        self.skip(self.body_left, p.R_OUT_OF_MEMORY)

    def _is_held_up(self) -> bool:
        """Returns whether the next command is a change that has to wait. A put that is refused ends before."""
        if self.service.refuses and self.upload is not None and not self._goes_on:
            self._refuse_body(self.upload)
        self.held_up = self._changes_next()
        return self.held_up

    def _changes_next(self) -> bool:
        """Returns whether what comes next may change what survives a restart; while the service is silent, True.

        A large put that has begun goes on: the ledger may need its end before it can go on itself.
        """
        service = self.service
        if service.silent or service.refuses:
            plain = not self._goes_on and self.upload is None
            if plain and self._skip_left:
                return False
            if plain and service.refuses and is_put(self._inbox, self._at):
                return False
            if service.silent:
                return True
        if self._goes_on:
            return self.going is not None and self.going.changes
        if self.upload is not None:
            return self.body_left <= self.pending_bytes
        if self._skip_left:
            return False
        end = self._inbox.find(p.CRLF, self._at)
        return end >= 0 and changes(self._inbox[self._at : end])

    def _done_up_to(self, at: int) -> None:
        """Notes that the inbox before this is done with."""
        if at < len(self._inbox):
            self._at = at
        else:
            self._inbox = b""
            self._at = 0

    # --- input that is not a command line

    def _shorten_line(self) -> None:
        """Cuts input without an end of line to the bytes that a line may have."""
        pending = self.pending_bytes
        if pending > _LINE_MAX + 1:
            begin = self._inbox[self._at : self._at + 2 * p.LINE_BYTES_MAX]
            if pending > line_max(begin) + 1:
                self.body_left = body_behind(begin)
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
        self.skip(self.body_left, p.R_BAD_FORMAT)
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
        self.reply(self._skip_reply)
        return True

    def _claim_share(self, size: int) -> bool:
        """Counts bytes of a body that takes several reads for the client's address. Returns whether they may come."""
        if self._body is None:
            self._share = self.service.share_of(self)
        share = self._share
        if share is None:
            return True
        takes = share.takes(self._shared_bytes, size)
        self._shared_bytes += size * takes
        return takes

    def _end_share(self) -> None:
        share = self._share
        if share is not None:
            share.gives_back(self._shared_bytes)
            self._share = None
            self._shared_bytes = 0

    def _take_body(self, now_ns: int) -> bool:
        """Takes the bytes of a put's body that have come. Returns whether that was all of the body."""
        job = self.upload
        assert job is not None
        inbox, at, left = self._inbox, self._at, self.body_left
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
            self.body_left = left - size
            bodies = self.engine.bodies
            takes = bodies is None or bodies.claim(self.engine, job.id, size, left - size)
            if not takes or not self._claim_share(size):
                self._refuse_body(job)
                return True
            try:
                if self._body is None:
                    self._body = Arriving()
                if self.body_left:
                    self._body.add(part)
                    return False
                part = self._body.end(part)
                size = len(part)
                self._body = None
                self._end_share()
            except MemoryError:
                self._refuse_body(job)
                return True
        if not part.endswith(p.CRLF):
            self.upload = None
            self.engine.abandon_put(job)
            self.reply(p.R_EXPECTED_CRLF)
            return True
        if size < LARGE_PUT:
            self._finish_put(job, part, now_ns)
        else:
            self._begin_large_put(part, now_ns)
        return True
