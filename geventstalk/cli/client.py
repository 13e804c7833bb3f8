"""Shared by all commands for a running server: connections, exit codes, output.

Exit codes: 0 done; 1 refused, or nothing there; 5 usage; 69 the server cannot be reached, closed the connection or does
not answer in time; 76 the peer does not speak the protocol; 77 the server or its API wants another token, or the user
has no right to do that; 128 and the number of a signal.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from geventstalk import __version__
from geventstalk.cli.ending import Failed, Stopped
from geventstalk.cli.params import Number
from geventstalk.config import ConfigError, Settings, load
from geventstalk.config_listeners import TOKEN
from geventstalk.exits import EXIT_DAMAGE, EXIT_NONSENSE, EXIT_NOT_ALLOWED, EXIT_UNREACHABLE, EXIT_USAGE
from geventstalk.logs import PROGRAM, one_line
from geventstalk.remote import address
from geventstalk.remote.api import Api, BadAddress, field
from geventstalk.remote.errors import ClientError, Nonsense, NotAllowed, NotDone, Unreachable, WantsToken
from geventstalk.remote.protocol import Beanstalk
from geventstalk.stream import reason_of

if TYPE_CHECKING:
    import ssl

EXIT_NOTHING: Final = EXIT_DAMAGE
"""Nothing matched, or something could not be done."""
TIMEOUT_S: Final = 10.0
ENV_TOKEN: Final = "GEVENTSTALK_TOKEN"
_WITHOUT: Final = "none"
_EXITS: Final[dict[type[ClientError], int]] = {
    Unreachable: EXIT_UNREACHABLE,
    Nonsense: EXIT_NONSENSE,
    NotAllowed: EXIT_NOT_ALLOWED,
    WantsToken: EXIT_NOT_ALLOWED,
}


class Context:
    """The running server of a command. Connections are made when they are needed."""

    def __init__(self, listen: str | None, port: str | None, config: str | None, **options: Any) -> None:
        """Raises ConfigError."""
        flags: dict[str, object] = {}
        if listen is not None:
            flags["listen"] = (listen,)
        if port is not None:
            flags["port"] = port
        self._settings, _ = load(flags, os.environ, config)
        self._is_flagged: Final = bool(flags)
        self._tls_files: Final = [options[name] for name in ("tls_ca", "tls_cert", "tls_key")]
        self.wants_tls: Final = bool(options["tls"] or any(self._tls_files))
        self.json: Final[bool] = options["json"]
        self.timeout_s: Final[float] = options["timeout"]
        self._api_where: Final[str | None] = options["api"]
        self._token_file: Final[str | None] = options["token_file"]
        self._servers: list[Beanstalk] = []
        self._api: Api | None = None

    @functools.cached_property
    def address(self) -> address.Address:
        """Returns the address of the server's port. Raises ConfigError when the settings name none that fits."""
        return server_of(self._settings, tls=self.wants_tls)

    @property
    def is_named(self) -> bool:
        """Returns whether an option or a setting names an address that fits."""
        try:
            return self._is_flagged or self.address != server_of(Settings())
        except ConfigError:
            return False

    @property
    def server(self) -> Beanstalk:
        """The connection to the server's port."""
        return self._servers[0] if self._servers else self.another()

    def another(self) -> Beanstalk:
        """Opens one more connection to the port."""
        self._servers.append(Beanstalk(self.address, self.timeout_s, self.tls, self.token))
        return self._servers[-1]

    @functools.cached_property
    def tls(self) -> ssl.SSLContext | None:
        """Returns what --tls and the options beside it trust and show; None without them. Raises UsageError."""
        if not self.wants_tls:
            return None
        import ssl  # here: it takes 10 ms, and most commands do without TLS

        authorities, certificate, key = self._tls_files
        try:
            context = ssl.create_default_context(cafile=authorities)
        except OSError as error:
            raise click.UsageError(f"cannot use {authorities} as authority: {reason_of(error)}") from None
        if certificate is not None:
            try:
                context.load_cert_chain(certificate, key, password=lambda: "")  # OpenSSL would ask at the terminal
            except (OSError, ValueError) as error:
                raise click.UsageError(f"cannot use certificate {certificate}: {reason_of(error)}") from None
        elif key is not None:
            raise click.UsageError("--tls-key is the key of --tls-cert, which is missing")
        return context

    def find_api(self) -> Api | None:
        """Returns the API that --api names, or the one of the server's facts; None without one."""
        if self._api is None and self._api_where != _WITHOUT:
            where = self._api_where
            if where is None:
                found = address.of_api(self.server.facts.get("http", ""), self.address)
                where = None if found is None else str(found)
            if where is not None:
                self._api = Api(where, self.token(), self.timeout_s, f"{PROGRAM}-cli/{__version__}", self.tls)
        return self._api

    @property
    def token_of_worker(self) -> str:
        """Returns the token that a worker shows at each connection, without a question whether the server wants one.

        That is the token of --token-file, or with TLS and without a certificate the one of the environment. Raises
        UsageError where others could read the token.
        """
        if self._token_file is not None and not self.wants_tls and not self.address.is_unix:
            raise click.UsageError("a worker shows its --token-file over TLS or a unix socket only: --tls")
        wanted = self._token_file is not None or (self.wants_tls and self._tls_files[1] is None)
        return (self.token() or "") if wanted else ""

    def allowed_api(self, role: str, *, quiet: bool = False) -> Api | None:
        """Returns the API, or None where there is none that can be reached and no user named one; a note says so.

        Raises NotAllowed when the token may only read. The protocol must not be a way around that. The API itself
        refuses a user what the user's rights do not grant.
        """
        say = (lambda _text: None) if quiet else note
        api = self.find_api()
        if api is None:
            return None
        try:
            found = field(api.get("/session"), "role", str)
        except (Unreachable, Nonsense) as error:
            if self._api_where is not None or self._token_file is not None:
                raise
            say(f"{error}; this goes over the protocol alone")
            return None
        if found != "read" or role == "read":
            return api
        raise NotAllowed(f"the token for the API at {api.where} may only read; --api none does without the API")

    def need_api(self, what: str) -> Api:
        """Returns the API, or raises an error that says what needs it and what the server would need."""
        api = self.find_api()
        if api is not None:
            return api
        if self._api_where == _WITHOUT:
            raise NotDone(f"{what} needs the server's API, and --api none does without it")
        if self.server.facts.get("http"):
            said = self.server.facts["http"]
            raise NotDone(f"{what} needs the server's API, which listens at {said} on its own host; name it with --api")
        raise NotDone(f"{what} needs the server's API: start geventstalk with --http, or name its address with --api")

    def token(self) -> str | None:
        """Returns the token of --token-file or of the environment. Raises UsageError."""
        if self._token_file is None:
            return _word_of(os.environ.get(ENV_TOKEN, ""), f"${ENV_TOKEN}") or None
        try:
            with open(self._token_file, encoding="utf-8") as file:
                text = file.read(65536)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise click.UsageError(f"cannot read {self._token_file}: {why}") from None
        lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        # The last word, also of a line of the server's own file, NAME ROLE TOKEN.
        return _word_of(lines[0][-1] if lines else " ", self._token_file)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        if self._api is not None:
            self._api.close()

    # What commands print

    def write(self, fact: Mapping[str, object]) -> None:
        """Prints an object as a line of JSON."""
        click.echo(json.dumps(fact, separators=(",", ":")))

    def say(self, text: str) -> None:
        """Prints a sentence for people. --json prints objects only."""
        if not self.json:
            click.echo(one_line(text))


def _word_of(text: str, where: str) -> str:
    """Returns a token, or nothing. Raises UsageError for characters that no token has."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise click.UsageError(f"{where} holds no token")
    return text


def server_of(settings: Settings, *, tls: bool = False) -> address.Address:
    """Returns where a command on the server's host reaches the server: of several addresses the first that fits.

    Raises ConfigError when none fits.
    """
    if settings.listen or not settings.extra_listeners:
        return address.of_server(settings.listen, settings.port)
    fits = [each for each in settings.extra_listeners if (each.tls is not None) == tls and not each.proxy]
    if not fits:
        also = "" if tls else "--tls, or "
        raise ConfigError(
            f"the server of these settings listens with TLS or behind proxies only: give {also}an address"
        )
    found = min(fits, key=lambda each: each.identity == (TOKEN,) or bool(each.nodes))
    host, _, port = found.address.rpartition(":")
    is_unix = found.address.startswith(address.UNIX)
    return address.of_server((found.address,) if is_unix else (host.strip("[]"),), port)


def note(text: str) -> None:
    click.echo(f"note: {one_line(text)}", err=True)


def client_command(name: str) -> Callable[[Callable[..., int]], click.Command]:
    """Makes a command of a function whose first argument is a Context and which returns the exit code."""

    def decorate(function: Callable[..., int]) -> click.Command:
        @functools.wraps(function)
        def run(**words: Any) -> int:
            try:
                context = Context(**{name: words.pop(name) for name in SHARED})
            except ConfigError as error:
                raise Failed(str(error), EXIT_USAGE) from None
            try:
                return function(context, **words)
            except ConfigError as error:  # the settings name no address that fits
                raise Failed(str(error), EXIT_USAGE) from None
            except ClientError as error:
                raise Failed(str(error), exit_code(error)) from None
            except BadAddress as error:
                raise click.UsageError(str(error)) from None
            except BrokenPipeError:
                raise
            except OSError as error:  # servers and files have errors of their own
                raise Failed(f"cannot write to stdout: {error.strerror or error}", EXIT_DAMAGE) from None
            finally:
                context.close()

        command = click.command(name=name)(run)
        command.params += _OPTIONS
        return command

    return decorate


def exit_code(error: ClientError) -> int:
    return _EXITS.get(type(error), EXIT_NOTHING)


_OPTIONS: Final = [
    click.Option(["-l", "--listen"], metavar="ADDR", help="Address of the server, or unix:PATH. Default: 127.0.0.1."),
    click.Option(["-p", "--port"], metavar="PORT", help="Port of the server. Default: 11300."),
    click.Option(["--config"], metavar="FILE", type=click.Path(), help="Take the server's address from its settings."),
    click.Option(["--api"], metavar="URL", help="Address of the API: URL, HOST:PORT, unix:PATH, or none."),
    click.Option(
        ["--token-file"],
        metavar="FILE",
        type=click.Path(),
        help=f"File with the token of a user or of the API. Otherwise ${ENV_TOKEN}.",
    ),
    click.Option(["--tls"], is_flag=True, help="Speak TLS to the server."),
    click.Option(
        ["--tls-ca"],
        metavar="FILE",
        type=click.Path(),
        help="The same, and trust the authorities in this PEM file in place of those of the system.",
    ),
    click.Option(
        ["--tls-cert"], metavar="FILE", type=click.Path(), help="The same, and show this certificate, in PEM."
    ),
    click.Option(["--tls-key"], metavar="FILE", type=click.Path(), help="The certificate's key, if not beside it."),
    click.Option(
        ["--timeout"],
        metavar="SECONDS",
        type=Number(0.01, 86400),
        default=TIMEOUT_S,
        help=f"Give up when an answer takes longer. Default: {TIMEOUT_S:g}.",
    ),
    click.Option(["--json"], is_flag=True, help="Print lines of JSON."),
]
SHARED: Final = [str(option.name) for option in _OPTIONS]
"""The names of the options of each command, which Context takes."""


def interactive() -> bool:
    """Returns whether there is a terminal to ask on."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def confirm(question: str, yes: bool) -> None:
    """Asks before harm. Raises Failed when the answer is no, UsageError when there is no terminal to ask on."""
    if yes:
        return
    if not interactive():
        raise click.UsageError("no terminal to ask on; --yes does it without a question, --dry-run only counts")
    try:
        agreed = click.confirm(one_line(question), default=False, err=True)
    except click.Abort:
        agreed = False
    except Stopped:
        click.echo(err=True)  # what follows begins on a line of its own
        raise
    if not agreed:
        raise Failed("nothing was done", EXIT_NOTHING)


def plural(count: int, noun: str) -> str:
    """Returns `1 job`, `1,204 jobs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def names(tubes: Iterable[str]) -> str:
    """Returns the first names, and how many more there are."""
    known = list(tubes)
    more = f" and {plural(len(known) - 3, 'more tube')}" if len(known) > 3 else ""
    return ", ".join(known[:3]) + more
