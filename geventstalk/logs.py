"""The output of the process: log lines on stderr, one-line errors, and the trace of `-V` on stdout.

It must not know the server or the protocol. Every message becomes one line, so that no tube name or path can forge
another. A closed stream never stops the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    _TextHandler = logging.StreamHandler[TextIO]
else:
    _TextHandler = logging.StreamHandler  # Python 3.10 cannot subscript it

PROGRAM = "geventstalk"


def one_line(text: str) -> str:
    """Returns the text with every character that could end or disturb a line as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def make_logger(log_format: Literal["text", "json"] = "text", verbose: int = 0) -> logging.Logger:
    """Returns the program's logger, writing to stderr from level INFO, from `-VV` on also DEBUG.

    Another call replaces the handler, so the last call sets the format.
    """
    log = logging.getLogger(PROGRAM)
    handler = _StderrHandler()
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.DEBUG if verbose >= 2 else logging.INFO)
    return log


def print_error(text: str, log_format: Literal["text", "json"] = "text") -> None:
    """Writes the reason of an exit: `geventstalk: <text>` on stderr, or the same as a JSON log line."""
    if log_format == "json":
        make_logger("json").error(text)
        return
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{PROGRAM}: {one_line(text)}\n")
            sys.stderr.flush()


class Trace:
    """Prints events of connections to stdout, in the lines of upstream's `-V`.

    `wire` says whether to print commands, replies and jobs, too (`-VV`); check it before calling those four.
    """

    def __init__(self, stream: TextIO, wire: bool) -> None:
        self._stream = stream
        self.wire = wire

    def started(self) -> None:
        """Prints the pid."""
        self._print(f"pid {os.getpid()}")

    def bind(self, fd: int, address: str) -> None:
        """Prints a listening socket."""
        self._print(f"bind {fd} {one_line(address)}")

    def accept(self, fd: int) -> None:
        """Prints a new connection."""
        self._print(f"accept {fd}")

    def close(self, fd: int) -> None:
        """Prints the end of a connection."""
        self._print(f"close {fd}")

    def command(self, fd: int, name: str | bytes) -> None:
        """Prints the name of a command."""
        self._print(f"<{fd} command {_text(name)}")

    def reply(self, fd: int, line: str | bytes) -> None:
        """Prints a reply's first line, without its CRLF."""
        self._print(f">{fd} reply {_text(line)}")

    def job_in(self, fd: int, job_id: int) -> None:
        """Prints a job whose body was read."""
        self._print(f"<{fd} job {job_id}")

    def job_out(self, fd: int, job_id: int) -> None:
        """Prints a job whose body was sent."""
        self._print(f">{fd} job {job_id}")

    def _print(self, line: str) -> None:
        # A full disk or a reader that left costs trace lines, never the server.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()


def make_trace(verbose: int) -> Trace | None:
    """Returns the trace for this verbosity; None without -V, so that `if trace:` is the only cost."""
    if verbose < 1 or sys.stdout is None:
        return None
    return Trace(sys.stdout, wire=verbose >= 2)


def _text(value: str | bytes) -> str:
    return one_line(value.decode("ascii", "backslashreplace") if isinstance(value, bytes) else value)


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class _StderrHandler(_TextHandler):
    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def handleError(self, record: logging.LogRecord) -> None:
        """Does nothing: stderr itself failed, and there is no other place to say so."""


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{_timestamp(record)} {record.levelname} {one_line(record.getMessage())}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__()
        import json  # slow; only JSON needs it at a start

        self._encode = json.JSONEncoder().encode

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": _timestamp(record), "level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return self._encode(fields)
