"""The commands beside the server as one group, and how one of them runs: signals, exit codes, one line for each error.

Exit codes: 0 fine, 1 damage or failure, 5 usage, 10 a directory that is missing, locked or not to be used, 70 an
unexpected error, which is a bug; 128 and the number of a signal that ended it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import click

from geventstalk.cli.export_jobs import export
from geventstalk.cli.import_binlog import import_binlog
from geventstalk.cli.import_jobs import import_jobs
from geventstalk.cli.journal import journal
from geventstalk.exits import EXIT_DAMAGE, EXIT_LOCKED, EXIT_UNEXPECTED, EXIT_USAGE
from geventstalk.logs import PROGRAM, print_error
from geventstalk.tools.lines import Unreadable
from journal.errors import JournalError, JournalLocked


class _Stopped(BaseException):
    """A signal asked for the end; what was begun is cleared away on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Verbosity:
    """How often -V was given to a command."""

    def __init__(self) -> None:
        self.level = 0


def main(arguments: list[str]) -> int:
    """Runs one of the commands with these words, the first of them the name of a command. Returns the exit code."""
    verbosity = _Verbosity()
    try:
        with _signals():
            _allow_many_files()
            code = group.main(arguments, prog_name=PROGRAM, standalone_mode=False, obj=verbosity)
            if sys.stdout is not None:
                sys.stdout.flush()
            return int(code or 0)
    except click.ClickException as error:
        return _fail(_usage_text(error), EXIT_USAGE)
    except JournalLocked as error:
        return _fail(str(error), EXIT_LOCKED)
    except (JournalError, Unreadable) as error:
        return _fail(str(error), EXIT_DAMAGE)
    except BrokenPipeError:
        return _without_stdout(EXIT_DAMAGE)  # nobody reads any more, and nobody needs to be told
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _without_stdout(_fail(f"{error.strerror or error}{where}", EXIT_DAMAGE))
    except _Stopped as stopped:
        return _without_stdout(128 + stopped.number)
    except MemoryError:
        return _without_stdout(_fail("out of memory; nothing was changed", EXIT_DAMAGE))
    except Exception as error:  # whatever it is, its user gets one line
        if verbosity.level >= 2:
            traceback.print_exc()
        hint = "" if verbosity.level >= 2 else "; -VV shows where"
        return _fail(f"unexpected error: {type(error).__name__}: {error}{hint}", EXIT_UNEXPECTED)


@click.group(name=PROGRAM, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
def group() -> None:
    """Commands that look after a journal. Without one of them, geventstalk is the server."""


for _command in (journal, export, import_jobs, import_binlog):
    group.add_command(_command)


def leaves(parent: click.Group = group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its words."""
    for name, command in parent.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{before}{name} ")
        else:
            yield before + name, command


def _count_verbose(context: click.Context, _parameter: click.Parameter, level: int) -> None:
    verbosity = context.find_object(_Verbosity)
    if verbosity is not None:
        verbosity.level = level


for _, _leaf in leaves():
    _option = click.Option(
        ["-V", "--verbose"],
        count=True,
        expose_value=False,
        callback=_count_verbose,
        is_eager=True,
        help="Given twice: show a traceback when something unexpected happens.",
    )
    _leaf.params.append(_option)


def _usage_text(error: click.ClickException) -> str:
    """click's message as one that goes on after `geventstalk: `, and where help is."""
    text = error.format_message().rstrip(".")
    text = text[:1].lower() + text[1:]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        text += f"; see {error.ctx.command_path} --help"
    return text


def _without_stdout(code: int) -> int:
    """Returns the code. What Python still holds for stdout goes nowhere, so that it does not fail again at the end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _fail(text: str, code: int) -> int:
    print_error(text)
    return code


def _allow_many_files() -> None:
    """A snapshot holds every segment open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Within, a signal to stop ends the command with its clean-up. SIGUSR1 and SIGUSR2 are for servers."""

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
