"""One client's input: bytes in, complete commands out to commands.py, in slices.

This room must not know sockets, gevent, clocks or durability: whoever owns the session feeds it bytes and time, sends
what it puts into `out`, and sees to it that what was promised there is kept first.
Invariant: while a reserve waits, nothing further of the input is executed; replies stand in the order of the commands.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.engine import DEADLINE_SOON, DRAINING, INSERTED, RESERVED_JOB
from geventstalk.core.job import Job
from geventstalk.wire import protocol as p
from geventstalk.wire.commands import MOVE_SLICE as MOVE_SLICE
from geventstalk.wire.commands import Commands
from geventstalk.wire.commands import Service as Service

COMMAND_SLICE: Final = 128
"""Commands of one client that run before others get their turn."""
OUT_BYTES_MAX: Final = 1 << 18
"""With so many bytes of replies unsent, a client's further commands wait."""

_SHORT_INPUT: Final = 512
"""So much is cut at its first CRLF at less cost than searched: 3 % of a request's work."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Session(Commands):
    """One connection. Feed it with receive() and hang_up(), let it go on with run(), send and empty `out`.

    `unfinished` says that run() has more to do once others had their turn and `out` was sent; `closed`, that the
    connection ends once `out` is sent. After that call Engine.leave().
    """

    __slots__ = ("_at", "_inbox", "_skip_line", "unfinished")

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._inbox = b""
        self._at = 0  # what of the inbox is done with
        self._skip_line = False  # within a line that is too long
        self.unfinished = False
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
