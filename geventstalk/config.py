"""The settings: one list makes flags, YAML keys, environment names and help; `load` reads them from all sources.

It must not know click, sockets or the server, and it imports yaml only when a file is named: the port is not
open yet.
Every value of every source is validated, also one that a later source overrides, and nothing is bound before.
Order of the sources, each overriding those before it: default, file, environment, flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from geventstalk import config_values as values
from geventstalk.config_listeners import Listener, Tls, listen_address, listener
from geventstalk.config_policies import policies
from geventstalk.config_schedules import Schedule, schedules
from geventstalk.dsn import has_password, is_shared, without_password
from geventstalk.exits import EXIT_USAGE
from geventstalk.policies import Terms

ENV_PREFIX = "GEVENTSTALK_"
ENV_CONFIG = "GEVENTSTALK_CONFIG"

MAX_JOB_BYTES_CAP = 1_073_741_824  # as upstream
SEGMENT_BYTES_MIN = 4096  # upstream rounds a smaller file up to this page on disk

ENV_OF_JOB = ("GEVENTSTALK_ID", "GEVENTSTALK_TUBE", "GEVENTSTALK_TRIES")
"""`geventstalk work` sets these variables for the command of a job. The command may run this program again."""
# The build of the package and the commands for a running server read the others; none of them is a setting.
_ENV_IGNORED = frozenset({"GEVENTSTALK_COMPILE", "GEVENTSTALK_TOKEN", *ENV_OF_JOB})
# Kubernetes sets these in every pod beside a service called "geventstalk" or, say, "geventstalk-http". They are
# compiled when there is such a variable: a start without one opens its port sooner.
_ENV_OF_SERVICE_LINKS = r"GEVENTSTALK_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
_ENV_OF_PORTS = r"GEVENTSTALK_(\w+_)?PORT"
_SERVICE_LINK = r"(tcp|udp|sctp)://"

EVERY_IPV4 = "0.0.0.0"
_FSYNC_MS: int | None = 50
_FILE_BYTES_MAX = 1 << 20  # 100 times the example file; /dev/zero named by mistake must not fill the memory

Setting = TypeVar("Setting")


class ConfigError(Exception):
    """Options the program cannot run with; the text names the option and where it came from."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class CommandLine:
    """The words of the command line. `flags` holds the given options by key, as they were given."""

    flags: dict[str, object] = field(default_factory=dict)
    config: str | None = None
    check_config: bool = False


@dataclass(frozen=True)
class Option:
    """One setting as the command line, a file and the environment give it.

    `parse` takes text or a YAML value from a source and returns the setting; its ValueError is a
    text for the user. `negative` are flags without a value that stand for `negative_value`. One without flags is a
    key of the file alone.
    """

    key: str
    default: object
    flags: tuple[str, ...]
    kind: Literal["value", "list", "switch", "count"]
    metavar: str
    parse: Callable[[object], object]
    help: str
    negative: tuple[str, ...] = ()
    negative_value: str = ""
    negative_help: str = ""

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return ENV_PREFIX + self.key.upper()


def _option(
    default: Setting,
    flags: str,
    metavar: str,
    parse: Callable[[object], Setting],
    help: str,
    kind: Literal["value", "list", "switch", "count"] = "value",
    negative: tuple[str, str, str] = ("", "", ""),
) -> Setting:
    """Declares a setting. `negative` holds flags, their value and their help."""
    facts = {"flags": tuple(flags.split()), "metavar": metavar, "parse": parse, "help": help, "kind": kind}
    facts |= {"negative": tuple(negative[0].split()), "negative_value": negative[1], "negative_help": negative[2]}
    declared: Setting = field(default=default, metadata=facts)
    return declared


@dataclass(frozen=True)
class Settings:
    """The settings of a run: the default of each, its flags, metavar, parser and help."""

    # fmt: off
    journal: str | None = _option(
        None, "-b --journal", "DIR", values.optional(values.text("directory")),
        "Keep jobs in a journal in this directory; without it they live in memory only. "
        "With postgresql://HOST/DATABASE nodes share a journal there: one serves, the others stand by.",
    )
    fsync_ms: int | None = _option(  # 0: before every reply; None: never
        _FSYNC_MS, "-f --fsync-ms", "MS", values.fsync_ms,
        "Sync the journal to the device every MS milliseconds; 0: before every reply; or never.",
        negative=(
            "-F --no-fsync", "never",
            "Never sync, the same as --fsync-ms never. Of several -f and -F the last one counts.",
        ),
    )
    listen: tuple[str, ...] = _option(
        (), "-l --listen", "ADDR", values.listed(values.listen_address),
        "Listen on this address, host name or unix:PATH; may be given several times. "
        "Default: 0.0.0.0, every IPv4 address of this host.",
        kind="list",
    )
    port: str = _option(
        "11300", "-p --port", "PORT", values.port,
        "Listen on this TCP port, a number up to 65535 or the name of a service; 0 takes a free one.",
    )
    socket_mode: int | None = _option(
        None, "--socket-mode", "MODE", values.optional(values.socket_mode),
        "Mode of each unix socket, such as 660; without it the umask decides.",
    )
    socket_owner: str | None = _option(
        None, "--socket-owner", "OWNER", values.optional(values.socket_owner),
        "Owner of each unix socket: USER, USER:GROUP or :GROUP; without it the user that starts the server.",
    )
    listeners: tuple[Listener, ...] = _option(
        (), "", "", values.listed(listener),
        "Addresses where clients are served on terms of their own, such as TLS.",
        kind="list",
    )
    policies: tuple[tuple[str, Terms], ...] = _option(
        (), "", "", policies,
        "What holds for jobs that are put into the tubes of a pattern.",
    )
    schedules: tuple[Schedule, ...] = _option(
        (), "", "", schedules,
        "Jobs that the server puts at the times of a cron expression.",
    )
    access: str | None = _option(
        None, "--access", "FILE", values.optional(values.text("file")),
        "YAML file of users and their rights, for listeners with an identity.",
    )
    tls_listen: str | None = _option(
        None, "--tls-listen", "ADDR:PORT", values.optional(listen_address),
        "Serve clients over TLS here: ADDR:PORT, unix:PATH, or PORT for 127.0.0.1. Without TLS the server then listens "
        "only where -l or -p says.",
    )
    tls_cert: str | None = _option(
        None, "--tls-cert", "FILE", values.optional(values.text("file")),
        "Certificate for --tls-listen, in PEM, with those between it and its authority.",
    )
    tls_key: str | None = _option(
        None, "--tls-key", "FILE", values.optional(values.text("file")),
        "Key of that certificate, in PEM and without a password, which other users must not be able to read.",
    )
    tls_client_ca: str | None = _option(
        None, "--tls-client-ca", "FILE", values.optional(values.text("file")),
        "Authorities in PEM: a client of --tls-listen needs a certificate that one of them has signed.",
    )
    user: str | None = _option(
        None, "-u --user", "USER", values.optional(values.text("user")),
        "Become this user, with its groups, once the sockets are open.",
    )
    io_processes: int = _option(
        0, "--io-processes", "N", values.io_processes,
        "Let N front-end processes do the socket work of clients, on further cores; or auto, by the number of "
        "cores. 0: the server's process does it itself.",
    )
    max_job_bytes: int = _option(
        65_535, "-z --max-job-bytes", "BYTES", values.size(10**40),  # capped with a warning
        f"Largest body of a job. Values above {MAX_JOB_BYTES_CAP} become that, with a warning.",
    )
    segment_bytes: int = _option(
        10_485_760, "-s --segment-bytes", "BYTES", values.size(values.SEGMENT_BYTES_CAP),
        f"Size of each journal file. Values below {SEGMENT_BYTES_MIN} become that, with a warning.",
    )
    compact: bool = _option(
        True, "-c --compact", "", values.switch,
        "Compact the journal: move the few jobs left in old files, so that the files can go.",
        kind="switch", negative=("-n --no-compact", "false", "With -n every journal file is kept."),
    )
    max_journal_bytes: int | None = _option(
        None, "--max-journal-bytes", "BYTES", values.optional(values.max_journal_bytes),
        "Most that the journal may take on disk; puts that have no room get OUT_OF_MEMORY.",
    )
    max_memory: int | None = _option(
        None, "--max-memory", "BYTES", values.optional(values.max_memory),
        "Most that the bodies of jobs may take in memory. With a journal in a directory the others stay there until "
        "they are needed; where that is not enough, and otherwise, puts get OUT_OF_MEMORY.",
    )
    accept_damage: bool = _option(
        False, "--accept-damage", "", values.switch,
        "Start with what a damaged journal still holds; damaged files are set aside, none is deleted.",
        kind="switch",
        negative=("--refuse-damage", "false", "With --refuse-damage, the default, a damaged journal is refused."),
    )
    node: str | None = _option(
        None, "--node", "NAME", values.optional(values.node),
        "Name of this node among those that share a journal. Default: the name of the host, and the port.",
    )
    advertise: str | None = _option(
        None, "--advertise", "HOST:PORT", values.optional(values.advertise),
        "Where the other nodes reach this one. Default: the address of this host towards the database.",
    )
    lease: float = _option(
        1.0, "--lease", "SECONDS", values.seconds("lease", values.LEASE_S_MIN, values.LEASE_S_MAX),
        "Time after a node's last heartbeat before another node may take over.",
    )
    put_wait: float = _option(
        10.0, "--put-wait", "SECONDS", values.seconds("wait", 0, values.WAIT_S_MAX),
        "Time after which puts get OUT_OF_MEMORY when the shared journal does not answer; all else goes on waiting.",
    )
    takeover_wait: float = _option(
        10.0, "--takeover-wait", "SECONDS", values.seconds("wait", 0, values.WAIT_S_MAX),
        "Time for which a new connection waits on a standby while no node leads. Then it is closed.",
    )
    http: tuple[str, ...] = _option(
        (), "--http", "ADDR:PORT", values.listed(values.http_address),
        "Serve the console, the API and /metrics over HTTP here: ADDR:PORT, unix:PATH, or PORT for 127.0.0.1; "
        "may be given several times. Other hosts reach it only with --http-tokens.",
        kind="list",
    )
    http_tokens: str | None = _option(
        None, "--http-tokens", "FILE", values.optional(values.text("file")),
        "Tokens for HTTP: a file of lines `NAME read|admin TOKEN`, which other users must not be able to read.",
    )
    http_cert: str | None = _option(
        None, "--http-cert", "FILE", values.optional(values.text("file")),
        "Certificate for HTTP, in PEM, with those between it and its authority: each address of --http but unix:PATH "
        "then speaks HTTPS.",
    )
    http_key: str | None = _option(
        None, "--http-key", "FILE", values.optional(values.text("file")),
        "Key of that certificate, in PEM and without a password, which other users must not be able to read.",
    )
    http_insecure: bool = _option(
        False, "--http-insecure", "", values.switch,
        "Serve other hosts over HTTP without TLS: eavesdroppers on the way read tokens and jobs.",
        kind="switch",
        negative=("--http-secure", "false", "With --http-secure, the default, they need --http-cert and --http-key."),
    )
    http_host: tuple[str, ...] = _option(
        (), "--http-host", "NAME", values.listed(values.http_host),
        "A further name by which HTTP requests may call this server, such as that of a proxy in front of it.",
        kind="list",
    )
    name: str | None = _option(
        None, "--name", "NAME", values.optional(values.name),
        "Name of this server on every page of the console. Default: the name of the host.",
    )
    name_color: str | None = _option(
        None, "--name-color", "COLOR", values.optional(values.name_color),
        f"Colour of the name on every page of the console: {', '.join(values.NAME_COLORS)}.",
    )
    audit: str | None = _option(  # None: the latest changes are kept in memory only
        None, "--audit", "FILE", values.optional(values.text("file")),
        "Append each change that is made over HTTP to this file: who, when, from where, what.",
    )
    max_tube_series: int = _option(
        1000, "--max-tube-series", "N", values.whole("number", values.TUBE_SERIES_CAP),
        "Most tubes that have series of their own in /metrics.",
    )
    verbose: int = _option(
        0, "-V --verbose", "", values.whole("verbosity", values.VERBOSE_CAP),
        "Print connections to stdout; twice: also commands, replies and jobs.",
        kind="count",
    )
    log_format: Literal["text", "json"] = _option(
        "text", "--log-format", "FORMAT", values.log_format,
        "Format of the log lines on stderr: text or json.",
    )
    # fmt: on

    @property
    def extra_listeners(self) -> tuple[Listener, ...]:
        """Returns the listeners beside those of `listen` and `port`."""
        if self.tls_listen is None or self.tls_cert is None or self.tls_key is None:
            return self.listeners
        return (*self.listeners, Listener(self.tls_listen, Tls(self.tls_cert, self.tls_key, self.tls_client_ca)))

    @property
    def node_listener(self) -> Listener | None:
        """Returns the listener to which other nodes connect with TLS."""
        return next((each for each in self.listeners if each.nodes), None)

    @property
    def http_tls(self) -> Tls | None:
        """Returns the files of HTTPS, None where HTTP has no TLS."""
        return None if self.http_cert is None or self.http_key is None else Tls(self.http_cert, self.http_key)

    @property
    def certificates(self) -> dict[str, Tls]:
        """Returns all files of certificates, by what they are for."""
        found = {each.address: each.tls for each in self.extra_listeners if each.tls is not None}
        return found | ({"HTTP": self.http_tls} if self.http and self.http_tls is not None else {})

    @property
    def plain_hosts(self) -> tuple[str | None, ...]:
        """Returns where `listen` has the server listen; None is every IPv4 address."""
        return self.listen or (() if self.extra_listeners else (None,))

    @property
    def shared(self) -> bool:
        """Returns whether several nodes share the journal."""
        return self.journal is not None and is_shared(self.journal)

    @property
    def journal_shown(self) -> str | None:
        """The journal without a password, for people."""
        return None if self.journal is None else without_password(self.journal)


KEYS = tuple(Option(key=each.name, default=each.default, **each.metadata) for each in fields(Settings))
OPTIONS = tuple(option for option in KEYS if option.flags)
_BY_KEY = {option.key: option for option in KEYS}
_BY_ENV = {option.env: option for option in OPTIONS}


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], config: str | None = None
) -> tuple[Settings, tuple[str, ...]]:
    """Returns the settings of this run, and warnings to print.

    `flags` holds what the command line gave, by key; `config` is the file it named. Raises ConfigError.
    """
    path = config if config is not None else environ.get(ENV_CONFIG)
    given: dict[str, Any] = {} if path is None else _from_file(path)
    given.update(_from_environment(environ))
    for key, value in flags.items():
        option = _BY_KEY[key]
        given[key] = _parsed(option, value, ", ".join(option.flags))
        if key == "journal" and is_shared(str(value)):
            _refuse_password(str(value))
    if "port" in given and not given.get("listen") and (given.get("listeners") or given.get("tls_listen")):
        given["listen"] = (EVERY_IPV4,)  # as -p alone says; without any of these three, TLS is all there is
    return _within_limits(replace(Settings(), **given))


def _refuse_password(journal: str) -> None:
    if has_password(journal):
        raise ConfigError(
            "a password on the command line can be read by every user of this host (-b, --journal); "
            f"give it in a password file, as {ENV_PREFIX}JOURNAL, in the file of --config or as PGPASSWORD"
        )


def require_fitting(settings: Settings) -> None:
    """Raises ConfigError when options do not go together."""
    _require_certificates(settings)
    _require_users(settings)
    if settings.shared:
        if not all(each.is_plain for each in settings.extra_listeners) and settings.node_listener is None:
            raise ConfigError(
                "with a journal in PostgreSQL a standby passes its clients on, so TLS, identities and proxies need TLS "
                "between the nodes: one of the listeners has to have nodes, the names in their certificates"
            )
        if settings.io_processes:
            raise ConfigError(
                "--io-processes does not go with a journal in PostgreSQL: a front-end process knows nothing of the "
                "lease of its node, after which no reply may leave"
            )
        if settings.fsync_ms not in (0, None, _FSYNC_MS):
            raise ConfigError(
                f"-f{settings.fsync_ms} is for files: with a journal in PostgreSQL each reply waits for its commit "
                "(-f0), or with -F the database does not wait for its disk"
            )
        return
    if settings.node_listener is not None:
        raise ConfigError("the nodes of a listener are for nodes that share a journal: -b postgresql://...")
    for key in ("node", "advertise", "lease", "put_wait", "takeover_wait"):
        if getattr(settings, key) != _BY_KEY[key].default:
            raise ConfigError(f"{_BY_KEY[key].flags[0]} is for nodes that share a journal: -b postgresql://...")


def _require_certificates(settings: Settings) -> None:
    if settings.tls_listen is None:
        for key in ("tls_cert", "tls_key", "tls_client_ca"):
            if getattr(settings, key) is not None:
                raise ConfigError(f"{_BY_KEY[key].flags[0]} is for --tls-listen, which is missing")
    elif settings.tls_cert is None or settings.tls_key is None:
        raise ConfigError("--tls-listen needs --tls-cert and --tls-key")
    if (settings.http_cert is None) != (settings.http_key is None):
        raise ConfigError("--http-cert and --http-key need each other")
    if settings.http_tls is not None and not settings.http:
        raise ConfigError("--http-cert is for --http, which is missing")


def _require_users(settings: Settings) -> None:
    """Raises ConfigError when users are asked for and not there, or there and not asked for."""
    asks = any(each.identity for each in settings.listeners)
    if asks and settings.access is None:
        raise ConfigError("a listener has an identity, so the users have to be in a file: --access FILE")
    if settings.access is not None and not asks:
        raise ConfigError("--access is for listeners with an identity, and there is none")


def _within_limits(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    warnings = []
    if settings.max_job_bytes > MAX_JOB_BYTES_CAP:
        settings = replace(settings, max_job_bytes=MAX_JOB_BYTES_CAP)
        warnings.append(f"maximum job size was set to {MAX_JOB_BYTES_CAP}")
    if settings.segment_bytes < SEGMENT_BYTES_MIN:
        settings = replace(settings, segment_bytes=SEGMENT_BYTES_MIN)
        warnings.append(f"size of journal files was set to {SEGMENT_BYTES_MIN}")
    return settings, tuple(warnings)


def _parsed(option: Option, value: object, origin: str) -> object:
    try:
        return option.parse(value)
    except ValueError as error:
        raise ConfigError(f"{error} ({origin})") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence that suggests a known name; empty where none is near."""
    from difflib import get_close_matches  # slow to import, and only a mistake needs it

    close = get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    given: dict[str, object] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name == ENV_CONFIG or name in _ENV_IGNORED:
            continue
        option = _BY_ENV.get(name)
        if re.fullmatch(_ENV_OF_SERVICE_LINKS, name):
            continue
        if re.fullmatch(_ENV_OF_PORTS, name) and re.match(_SERVICE_LINK, text):
            continue
        if option is None:
            raise ConfigError(f"unknown environment variable: {name}{did_you_mean(name, _BY_ENV)}")
        value = text.split(",") if option.kind == "list" else text
        given[option.key] = _parsed(option, value, f"environment variable {name}")
    return given


def _from_file(path: str) -> dict[str, object]:
    given: dict[str, object] = {}
    for key, value, line in _read_yaml(path):
        option = _BY_KEY.get(key)
        if option is None:
            raise ConfigError(f"unknown key: {key}{did_you_mean(key, _BY_KEY)} ({path}, line {line})")
        if key in given:
            raise ConfigError(f"key given twice: {key} ({path}, line {line})")
        given[key] = _parsed(option, value, f"{key} in {path}, line {line}")
    return given


def _read_yaml(path: str) -> Iterator[tuple[str, object, int]]:
    """Yields each key of the file, its value and the number of its line."""
    import yaml  # here: most runs have no file, and it takes 15 ms

    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise ConfigError(f"{path} is no file of settings: it is larger than {_FILE_BYTES_MAX} bytes")
        # The node tree knows lines and doubled keys, which the finished dict has lost.
        root = yaml.compose(content, yaml.SafeLoader)
        found = yaml.safe_load(content)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_yaml_problem(error)}") from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # SafeLoader lets these out when a date or an explicit tag does not fit its text.
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if found is None:
        return  # an empty file, or comments only
    if root is None or not isinstance(found, dict):
        raise ConfigError(f"{path} does not hold keys and values")
    for key_node, _ in root.value:
        key = key_node.value if isinstance(key_node.value, str) else "(not text)"
        yield key, found.get(key), key_node.start_mark.line + 1


def _yaml_problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {problem}" if mark else " ".join(problem.split())
