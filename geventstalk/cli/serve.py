"""The server's command line: words to settings, settings to sockets, sockets to the server; exit codes.

It must not import gevent, nor the server before the sockets listen: clients may come 0.1 s after the start. A traceback
is printed with -VV only. Everything that takes time to import is imported where it is used.
"""

from __future__ import annotations

import importlib
import os
import signal
from typing import TYPE_CHECKING, Any, NoReturn

from geventstalk.cli.early import DRAIN_SIGNALS, drains, end, settle_stdout
from geventstalk.exits import EXIT_DAMAGE, EXIT_LOCKED, EXIT_OK, EXIT_UNEXPECTED, EXIT_USER, STOP_SIGNALS

if TYPE_CHECKING:
    import logging
    import socket
    from collections.abc import Mapping, Sequence

    import click

    from geventstalk.config import CommandLine, Option, Settings
    from geventstalk.http.site import Site
    from geventstalk.http.tokens import Tokens
    from geventstalk.serving.server import Server


class Unusable(Exception):
    """The journal cannot be used, as --check-config found."""

    def __init__(self, text: str, exit_code: int = EXIT_LOCKED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


_OF_A_START = 3
"""Descriptors that the start of another process takes."""
_EPILOG = (
    "BYTES may end in k, m or g, multiples of 1024. Each setting is also a key of the YAML file (max_job_bytes for "
    "--max-job-bytes) and an environment variable (GEVENTSTALK_MAX_JOB_BYTES). A flag overrides the environment, "
    "which overrides the file. GEVENTSTALK_LISTEN separates addresses by commas."
)


class StdoutError(Exception):
    """Help, the version or the answer of --check-config cannot be written."""

    exit_code = EXIT_DAMAGE


def run(arguments: Sequence[str], listeners: list[socket.socket]) -> int:
    """Serves with the settings of these words, and returns the exit code. Adds the sockets it opens to `listeners`."""
    from geventstalk import config, logs
    from geventstalk.serving import listen
    from geventstalk.serving.fd_limits import TooFewError

    settings = config.Settings()
    try:
        line = parse(arguments)
        if line is None:
            return EXIT_OK
        settings, warnings = config.load(line.flags, os.environ, line.config)
        log = logs.make_logger(settings.log_format, settings.verbose)
        for warning in warnings:
            log.warning("%s", warning)
        config.require_fitting(settings)
        if line.check_config:
            from geventstalk.cli.check_config import check

            check(settings, log, files_of(settings, line.config))
            _print("configuration is fine", after_name=":")
            return EXIT_OK
        _serve(settings, listeners, log, line)
    except (config.ConfigError, listen.ListenError, listen.UserError, TooFewError, Unusable, StdoutError) as error:
        logs.print_error(str(error), settings.log_format)
        listen.close_listeners(listeners)
        settle_stdout()
        return error.exit_code
    except Exception as error:  # its user gets one line
        if settings.verbose >= 2:
            import traceback

            traceback.print_exc()
        hint = "" if settings.verbose >= 2 else "; -VV shows where"
        logs.print_error(f"unexpected error: {type(error).__name__}: {error}{hint}", settings.log_format)
        listen.close_listeners(listeners)
        return EXIT_UNEXPECTED


def files_of(settings: Settings, config_file: str | None) -> dict[str, str | None]:
    """Returns by option each file that is read again while the server runs, or when a node of a cluster begins anew."""
    from geventstalk.config import ENV_CONFIG

    tokens = settings.http_tokens if settings.http else None
    begins_anew = settings.shared or settings.access is not None  # users can be taken away by a reload only
    read = (config_file or os.environ.get(ENV_CONFIG) or None) if begins_anew else None
    files = {"--http-tokens": tokens, "--access": settings.access, "--config": read}
    for address, tls in settings.certificates.items():
        for name, path in tls.files.items():
            files[f"tls {name} of {address}"] = path
    return files


def _serve(settings: Settings, listeners: list[socket.socket], log: logging.Logger, line: CommandLine) -> NoReturn:
    from geventstalk.cli import again
    from geventstalk.serving import listen

    left = again.taken_over(os.environ)
    served, http, tokens = _open(settings, listeners, log, files_of(settings, line.config), left)
    site = _site(settings, http, tokens, log)
    if settings.shared:
        from geventstalk.serving.clustered import ClusterServer

        node = ClusterServer(settings, served, log, site, left["seen"] if left else None)
        _follow_options(node, settings, line, log)
        code = node.run(drains if left is None or not left["drains"] else lambda: True)
        if node.begins_anew:
            again.begin_anew(served, http, node.environment(os.environ), drains=node.draining, seen=node.seen)
    else:
        from geventstalk.serving.server import Server

        server = Server(settings, served, log, site)
        _follow_options(server, settings, line, log)
        code = server.run(drains)
    for number in STOP_SIGNALS + DRAIN_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not turn a clean end into another
    listen.close_listeners(listeners)
    end(code)


def _follow_options(server: Server, settings: Settings, line: CommandLine, log: logging.Logger) -> None:
    """Has a reload read the file of settings, where there is one."""
    from geventstalk import config

    def load() -> Settings:
        found, _ = config.load(line.flags, os.environ, line.config)
        config.require_fitting(found)
        return found

    path = line.config or os.environ.get(config.ENV_CONFIG)
    if path:
        from geventstalk.serving.reload import Options

        server.reload.add(Options(path, settings, load, server.live.use, log))


def _open(
    settings: Settings,
    listeners: list[socket.socket],
    log: logging.Logger,
    files: Mapping[str, str | None],
    left: Mapping[str, Any] | None,
) -> tuple[list[socket.socket], list[socket.socket], Tokens | None]:
    """Returns the listening sockets of beanstalk and of HTTP, and the tokens. Becomes the user of the settings."""
    from geventstalk import logs
    from geventstalk.serving import fd_limits, listen

    if settings.journal is not None and holds_binlog(settings.journal):
        from geventstalk.cli.check_config import refuse_binlog

        refuse_binlog(settings.journal)
    fd_limits.raise_limit(log)  # before the sockets, which may be many
    links = settings.io_processes + _OF_A_START if settings.io_processes else 0
    fd_limits.require_some(1 + len(settings.http) + links)
    trace = logs.make_trace(settings.verbose)
    if trace:
        trace.started()
    if settings.user is not None:
        listen.require_readable(settings.user, files)
    tokens = _tokens(settings)
    check_certificates(settings)
    check_access(settings)
    served = listen.open_listeners(settings, log) if left is None else listen.take_over(left["served"])
    listeners.extend(served)
    http = listen.open_http_listeners(settings, log) if left is None else listen.take_over(left["http"])
    listeners.extend(http)
    fd_limits.require_some(0)
    if trace:
        for listener in listeners:
            trace.bind(listener.fileno(), listen.address_of(listener))
    if settings.user is not None:
        listen.drop_privileges(settings.user)
    return served, http, tokens


def check_certificates(settings: Settings) -> None:
    """Raises ConfigError when a listener cannot use its certificate."""
    if settings.certificates:
        from geventstalk.serving.tls import Certificate  # here: few servers have one, and ssl takes 10 ms

        for each in settings.certificates.values():
            Certificate(each)


def check_access(settings: Settings) -> None:
    """Raises ConfigError when the file of users cannot be used, and UserError."""
    if settings.access is not None:
        from geventstalk.serving.listen import user_id
        from geventstalk.serving.users import read_access  # here: most servers have none

        read_access(settings.access, user_id(settings))


def _tokens(settings: Settings) -> Tokens | None:
    if not settings.http or settings.http_tokens is None:
        return None
    from geventstalk.http.tokens import Tokens
    from geventstalk.serving.listen import user_id

    return Tokens(settings.http_tokens, user_id(settings))


def _site(settings: Settings, http: list[socket.socket], tokens: Tokens | None, log: logging.Logger) -> Site | None:
    """Loads the server and HTTP. Raises UserError where the user of the settings cannot read them."""
    from geventstalk.serving import listen

    try:
        importlib.import_module("geventstalk.serving.server")  # slow: gevent; clients wait in the backlog meanwhile

        if not http:
            return None
        from geventstalk.http.site import Site

        site = Site(settings, http, tokens, log)
        if settings.shared:
            from geventstalk.cli.nodes import Nodes

            site.cluster = Nodes(str(settings.journal))
        return site
    except ImportError as error:
        if settings.user is None:
            raise
        # Typically an installation below root's home, which that user may not enter.
        raise listen.UserError(f"user {settings.user} cannot load the server: {error}", EXIT_USER) from error


def holds_binlog(directory: str) -> bool:
    """Returns whether the directory holds files of beanstalkd."""
    try:
        return any(name[:7] == "binlog." and name[7:].isdecimal() for name in os.listdir(directory))
    except OSError:  # opening the journal says why
        return False


def parse(arguments: Sequence[str]) -> CommandLine | None:
    """Reads the words. Prints help or version when they ask for it, and returns None then.

    Raises ConfigError in upstream's words; a hint may follow.
    """
    import click

    from geventstalk.config import OPTIONS, CommandLine, ConfigError
    from geventstalk.logs import PROGRAM

    try:
        context = command_of_server().make_context(PROGRAM, list(arguments))
    except click.exceptions.Exit:
        return None
    except OSError as error:  # only help and version do anything beside reading words
        raise StdoutError(f"cannot write to stdout: {error.strerror}") from None
    except click.NoSuchOption as error:
        raise ConfigError(f"unknown flag: {error.option_name}{_hint(error.option_name, arguments)}") from None
    except click.BadOptionUsage as error:
        # click knows two such mistakes and tells them apart by text only.
        takes_value = error.option_name in _flags_with_value()
        problem = "flag requires an argument" if takes_value else "flag takes no argument"
        raise ConfigError(f"{problem}: {error.option_name}") from None
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None
    if context.args:
        raise ConfigError(f"unknown argument: {context.args[0]}{_hint(context.args[0], arguments)}")
    given = context.params
    absent = {"list": (), "count": 0}
    flags = {one.key: given[one.key] for one in OPTIONS if given[one.key] not in (None, absent.get(one.kind))}
    return CommandLine(flags, given["config"], bool(given["check_config"]))


def _hint(word: str, arguments: Sequence[str]) -> str:
    """Returns a hint for an unknown word, as the end of a sentence."""
    from geventstalk.cli.main import COMMANDS
    from geventstalk.config import OPTIONS, did_you_mean
    from geventstalk.logs import PROGRAM

    command = next((one for one in arguments if one in COMMANDS), None)
    if command is not None:
        return f"; a command is the first word: {PROGRAM} {command}"
    flags = [flag for option in OPTIONS for flag in (*option.flags, *option.negative) if flag.startswith("--")]
    return did_you_mean(word, flags if word.startswith("-") else COMMANDS) or f"; see {PROGRAM} --help"


def _flags_with_value() -> frozenset[str]:
    from geventstalk.config import OPTIONS

    options = [option for option in OPTIONS if option.kind in ("value", "list")]
    return frozenset({"--config"}.union(*(option.flags for option in options)))


def command_of_server() -> click.Command:
    import click

    from geventstalk.config import ENV_CONFIG, OPTIONS
    from geventstalk.logs import PROGRAM

    params: list[click.Parameter] = []
    for option in OPTIONS:
        params.extend(_click_options(option))
    read = f"Read settings from this YAML file [{ENV_CONFIG}]."
    check = "Say whether a server could start with these settings, and exit; nothing is changed."
    version = click.Option(["-v", "--version"], is_flag=True, is_eager=True, callback=_print_version)
    version.help = "Print the version and whether the core is compiled, and exit."
    params += [
        click.Option(["--config"], metavar="FILE", help=read),
        click.Option(["--check-config"], is_flag=True, help=check),
        version,
    ]
    return _command_class()(
        PROGRAM,
        params=params,
        help="A work queue server that speaks the beanstalk protocol. Without a COMMAND it serves.",
        epilog=_EPILOG,
        context_settings={"allow_extra_args": True, "help_option_names": ["-h", "--help"]},
    )


def _command_class() -> type[click.Command]:
    """Returns the server's command, whose help lists the other commands too."""
    import click

    class ServerCommand(click.Command):
        def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
            return ["[OPTIONS] | COMMAND ..."]

        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            from geventstalk.cli.program import (  # slow: help alone needs the other commands
                CLUSTER,
                LIVE,
                OFFLINE,
                USERS,
                leaves,
            )

            super().format_options(ctx, formatter)
            sections = {
                "Commands for a running server (each has its own --help)": LIVE,
                "For a journal": OFFLINE,
                "For a cluster of nodes": CLUSTER,
                "For users and their rights": USERS,
            }
            for title, names in sections.items():
                rows = [(words, command.get_short_help_str(limit=100)) for words, command in leaves(names)]
                with formatter.section(title):
                    formatter.write_dl(rows)

    return ServerCommand


def _click_options(option: Option) -> list[click.Option]:
    import click

    text = option.help
    if option.kind == "value" and option.default is not None:
        text += f" Default: {option.default}."
    if option.kind == "switch":
        pairs = [f"{on}/{off}" for on, off in zip(option.flags, option.negative, strict=True)]
        return [click.Option([*pairs, option.key], default=None, help=f"{text} {option.negative_help}")]
    if option.kind == "count":
        return [click.Option([*option.flags, option.key], count=True, help=text)]
    made = [
        click.Option(
            [*option.flags, option.key],
            type=click.UNPROCESSED,
            metavar=option.metavar,
            multiple=option.kind == "list",
            help=text,
        )
    ]
    if option.negative:
        made.append(
            click.Option(
                [*option.negative, option.key],
                is_flag=True,
                flag_value=option.negative_value,
                type=click.UNPROCESSED,
                help=option.negative_help,
            )
        )
    return made


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: Any) -> None:
    from geventstalk._build import BUILD
    from geventstalk._version import __version__

    if wanted and not context.resilient_parsing:
        _print(f"{__version__} ({BUILD})")
        context.exit()


def _print(text: str, after_name: str = "") -> None:
    import click

    from geventstalk.logs import PROGRAM

    try:
        click.echo(f"{PROGRAM}{after_name} {text}")
    except OSError as error:
        raise StdoutError(f"cannot write to stdout: {error.strerror}") from None
