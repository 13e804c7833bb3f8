"""The commands beside the server as one group; runs one of them: signals, exit codes, one line for each error.

Only the command that runs is imported: commands for a journal take 0.1 s, those for a running server do not need them.
Exit codes: 0 fine, 1 damage or failure, 5 usage, or a library that is missing, 10 a place that is missing, locked or
not to be used, 69 a database that cannot be reached, 70 an unexpected error, which is a bug; 128 and the number of a
signal that ended it. `cli/client.py` has those of a server that cannot be reached.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence

import click

from geventstalk.cli.early import settle_stdout
from geventstalk.cli.ending import Failed, Stopped, signals
from geventstalk.exits import EXIT_DAMAGE, EXIT_LOCKED, EXIT_UNEXPECTED, EXIT_UNREACHABLE, EXIT_USAGE
from geventstalk.logs import PROGRAM, print_error

OFFLINE = {
    "journal": "journal:journal",
    "export": "export_jobs:export",
    "import": "import_jobs:import_jobs",
    "import-binlog": "import_binlog:import_binlog",
    "copy": "copy_jobs:copy",
}
"""The commands for a journal, and the module and function of each."""
LIVE = {
    "top": "client_top:top",
    "stats": "client_stats:stats",
    "tubes": "client_tubes:tubes",
    "jobs": "client_jobs:jobs",
    "job": "client_jobs:job",
    "connections": "client_stats:connections",
    "put": "client_put:put",
    "kick": "client_change:kick",
    "bury": "client_change:bury",
    "release": "client_change:release",
    "delete": "client_change:delete",
    "move": "client_change:move",
    "change": "client_alter:change",
    "flush": "client_change:flush",
    "pause": "client_tubes:pause",
    "drain": "client_drain:drain",
    "reload": "client_reload:reload",
    "policies": "client_policies:policies",
    "policy": "client_policies:policy",
    "schedule": "client_schedules:schedule",
    "schedules": "client_schedules:schedules",
    "watch": "client_watch:watch",
    "work": "work:work",
    "completion": "completion:completion",
    "help": "help_filters:help_filters",
}
"""The commands for a running server."""
CLUSTER = {"cluster": "cluster:cluster"}
"""The commands for nodes that share a journal in a database."""
USERS = {"token": "token:token"}
"""The command for the file of users."""
ALL = {**LIVE, **OFFLINE, **CLUSTER, **USERS}


class _Verbosity:
    """The number of -V that a command was given."""

    def __init__(self) -> None:
        self.level = 0


def main(arguments: list[str]) -> int:
    """Runs one of the commands with these words, the first of them its name. Returns the exit code."""
    verbosity = _Verbosity()
    try:
        with signals():
            return _run(arguments, verbosity)
    except click.ClickException as error:
        return _fail(_usage_text(error), EXIT_USAGE)
    except Failed as failed:
        return _fail(str(failed), failed.exit_code)
    except BrokenPipeError:
        return _without_stdout(128 + signal.SIGPIPE)  # what stdout still held
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _without_stdout(_fail(f"{error.strerror or error}{where}", EXIT_DAMAGE))
    except Stopped as stopped:
        return _without_stdout(128 + stopped.number)
    except MemoryError:
        return _without_stdout(_fail("out of memory; nothing was changed", EXIT_DAMAGE))
    except Exception as error:
        return _fail_by(error, verbosity.level)
    finally:
        settle_stdout()


def _run(arguments: list[str], verbosity: _Verbosity) -> int:
    _allow_many_files()
    code = make_group().main(arguments, prog_name=PROGRAM, standalone_mode=False, obj=verbosity)
    if sys.stdout is not None:
        sys.stdout.flush()
    return int(code or 0)


def _fail_by(error: Exception, verbosity: int) -> int:
    from geventstalk.offline.lines import Unreadable  # slow, with all of the journal
    from journal.errors import JournalError, JournalLocked, JournalUnreachable

    if isinstance(error, JournalLocked):
        return _fail(str(error), EXIT_LOCKED)
    if isinstance(error, ImportError) and error.name == "psycopg":
        return _fail(str(error), EXIT_USAGE)
    if isinstance(error, JournalUnreachable):
        return _fail(str(error), EXIT_UNREACHABLE)
    if isinstance(error, (JournalError, Unreadable)):
        return _fail(str(error), EXIT_DAMAGE)
    if verbosity >= 2:  # its user gets one line
        import traceback

        traceback.print_exception(error)
    hint = "" if verbosity >= 2 else "; -VV shows where"
    return _fail(f"unexpected error: {type(error).__name__}: {error}{hint}", EXIT_UNEXPECTED)


class _Commands(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(ALL)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return command(cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would end the process with exit code 1, as if the work had failed
            raise Stopped(signal.SIGPIPE) from None


def command(name: str) -> click.Command | None:
    """Returns the command of this name, with the options that every command has."""
    where = ALL.get(name)
    if where is None:
        return None
    module, _, attribute = where.partition(":")
    found: click.Command = getattr(importlib.import_module(f"geventstalk.cli.{module}"), attribute)
    for _, leaf in _leaves_of(name, found):
        if not any(parameter.name == "verbose" for parameter in leaf.params):
            leaf.params.append(_verbose_option())
    return found


def make_group(beside: Sequence[click.Parameter] = ()) -> click.Group:
    """Returns the commands as one group, with `beside` as the flags that a shell completes beside them."""
    return _Commands(
        PROGRAM,
        params=list(beside),
        help="Commands for a running server and for a journal. Without one of them, geventstalk is the server.",
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=False,
    )


def leaves(names: Iterable[str] = tuple(ALL)) -> Iterator[tuple[str, click.Command]]:
    """Returns every command that does something, with its words. Imports them all."""
    for name in names:
        found = command(name)
        if found is not None:
            yield from _leaves_of(name, found)


def _leaves_of(words: str, found: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(found, click.Group):
        for name, inner in found.commands.items():
            yield from _leaves_of(f"{words} {name}", inner)
    else:
        yield words, found


def _count_verbose(context: click.Context, _parameter: click.Parameter, level: int) -> None:
    verbosity = context.find_object(_Verbosity)
    if verbosity is not None:
        verbosity.level = level


def _verbose_option() -> click.Option:
    return click.Option(
        ["-V", "--verbose"],
        count=True,
        expose_value=False,
        callback=_count_verbose,
        is_eager=True,
        help="Given twice: show a traceback when something unexpected happens.",
    )


def _usage_text(error: click.ClickException) -> str:
    """Returns click's message as the rest of a line that begins with `geventstalk: `, and where help is."""
    text = error.format_message().rstrip(".")
    text = text[:1].lower() + text[1:]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        text += f"; see {error.ctx.command_path} --help"
    return text


def _without_stdout(code: int) -> int:
    """Returns the code. Discards what Python still holds for stdout, so that it does not fail again at the end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _fail(text: str, code: int) -> int:
    print_error(text)
    return code


def _allow_many_files() -> None:
    """Raises the limit of open files: a snapshot holds every segment open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
