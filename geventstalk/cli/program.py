"""The commands beside the server as one group, and how one of them runs: signals, exit codes, one line for each error.

Exit codes: 0 fine, 1 damage or failure, 5 usage, 10 a directory that is missing, locked or not to be used; 128 and the
number of a signal that ended it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

import click

from geventstalk.cli.export_jobs import export
from geventstalk.cli.import_binlog import import_binlog
from geventstalk.cli.import_jobs import import_jobs
from geventstalk.cli.journal import journal
from geventstalk.cli.output import EXIT_DAMAGE
from geventstalk.tools.lines import Unreadable
from journal.errors import JournalError, JournalLocked

EXIT_USAGE: Final = 5
EXIT_DIRECTORY: Final = 10


class _Stopped(BaseException):
    """A signal asked for the end; what was begun is cleared away on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number


def main(arguments: list[str]) -> int:
    """Runs one of the commands with these words, the first of them the name of a command. Returns the exit code."""
    try:
        with _signals():
            _allow_many_files()
            code = _group.main(arguments, prog_name="geventstalk", standalone_mode=False)
            sys.stdout.flush()
            return int(code or 0)
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_USAGE)
    except JournalLocked as error:
        return _fail(str(error), EXIT_DIRECTORY)
    except (JournalError, Unreadable) as error:
        return _fail(str(error), EXIT_DAMAGE)
    except BrokenPipeError:
        # Nobody reads any more. What Python still holds for stdout must not fail a second time at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DAMAGE
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"{error.strerror or error}{where}", EXIT_DAMAGE)
    except _Stopped as stopped:
        return 128 + stopped.number
    except Exception as error:  # whatever it is, its user gets one line
        return _fail(f"unexpected error: {type(error).__name__}: {error}", EXIT_DAMAGE)


@click.group(name="geventstalk", no_args_is_help=False)
def _group() -> None:
    """Tools around the journal. Without one of these commands, geventstalk is the server."""


for _command in (journal, export, import_jobs, import_binlog):
    _group.add_command(_command)


def _fail(text: str, code: int) -> int:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"geventstalk: {line}\n")
        sys.stderr.flush()
    return code


def _allow_many_files() -> None:
    """A snapshot holds every segment open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Within, a signal to stop ends the command with its clean-up; one that the server would take for drain, too."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        raise _Stopped(number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
