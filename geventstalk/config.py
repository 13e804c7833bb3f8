"""The options: one table that makes flags, YAML keys, environment names and help, and the settings they give.

It must not know click, sockets or the server, and it imports yaml only when a file is named: the port is not
open yet.
Every value of every source is validated, also one that a later source overrides, and nothing is bound before.
Order of the sources, each overriding those before it: default, file, environment, flag.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from geventstalk.exits import EXIT_USAGE

ENV_PREFIX = "GEVENTSTALK_"
ENV_CONFIG = "GEVENTSTALK_CONFIG"

MAX_JOB_BYTES_CAP = 1_073_741_824  # as upstream
SEGMENT_BYTES_MIN = 4096  # upstream rounds a smaller file up to this page on disk
SEGMENT_BYTES_CAP = 1 << 40
MAX_MEMORY_BYTES_MIN = 1 << 16
MAX_JOURNAL_BYTES_MIN = 1 << 20  # room for the segments that are there without any job
FSYNC_MS_CAP = (1 << 32) - 1
IO_PROCESSES_CAP = 64
AUTO_CORES_MIN = 4  # with fewer, the clients' processes need them more
AUTO_IO_PROCESSES_MAX = 3  # more than one engine can keep at work
TUBE_SERIES_CAP = 100_000  # ten megabytes at each scrape
VERBOSE_CAP = 100

# Read by the build of the package, and by the commands that ask a running server; they are no settings.
_ENV_IGNORED = frozenset({"GEVENTSTALK_COMPILE", "GEVENTSTALK_TOKEN"})
# What Kubernetes sets in every pod beside a service called "geventstalk" or, say, "geventstalk-http"; nobody configures
# the program so. They are compiled when there is such a variable: a start without one opens its port sooner.
_ENV_OF_SERVICE_LINKS = r"GEVENTSTALK_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
_ENV_OF_PORTS = r"GEVENTSTALK_(\w+_)?PORT"
_SERVICE_LINK = r"(tcp|udp|sctp)://"

_BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
SHARED = ("postgresql://", "postgres://")
"""How the place of a journal begins that several nodes share."""
_FSYNC_MS = 50
LEASE_S_MIN, LEASE_S_MAX = 0.2, 60.0  # within the shortest one, a busy machine may well stand still
WAIT_S_MAX = 3600.0
_SHOWN_CHARS = 100
_FILE_BYTES_MAX = 1 << 20  # 100 times the example file; /dev/zero named by mistake must not fill the memory


class ConfigError(Exception):
    """Options the program cannot run with; the text names the option and where it came from."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class Settings:
    """What the program runs with. The values here are the defaults."""

    listen: tuple[str, ...] = ()  # host names, addresses or unix:PATH; empty: all addresses of the host
    port: str = "11300"  # a number or the name of a service
    socket_mode: int | None = None  # of unix sockets; None: as the umask says
    socket_owner: str | None = None  # USER, USER:GROUP or :GROUP
    journal: str | None = None  # directory, or URL of PostgreSQL; None: jobs live in memory only
    fsync_ms: int | None = _FSYNC_MS  # 0: before every reply; None: never
    segment_bytes: int = 10_485_760
    compact: bool = True
    max_journal_bytes: int | None = None  # None: as much as the disk gives
    accept_damage: bool = False
    max_memory: int | None = None  # bytes of bodies in memory; None: as much as the system gives
    max_job_bytes: int = 65_535
    node: str | None = None  # None: name of the host, and port
    advertise: str | None = None  # HOST:PORT; None: the host's address towards the database, and the own port
    lease: float = 1.0  # seconds, as the other two
    put_wait: float = 10.0
    takeover_wait: float = 10.0
    user: str | None = None
    io_processes: int = 0
    http: tuple[str, ...] = ()  # HOST:PORT, [IPV6]:PORT or unix:PATH; empty: no HTTP
    http_tokens: str | None = None  # file
    http_host: tuple[str, ...] = ()  # further names that a request may call the server by, in lower case
    audit: str | None = None  # file; None: the latest changes are kept in memory only
    max_tube_series: int = 1000
    verbose: int = 0
    log_format: Literal["text", "json"] = "text"

    @property
    def shared(self) -> bool:
        """Whether the journal is one that several nodes share."""
        return self.journal is not None and self.journal.startswith(SHARED)

    @property
    def journal_shown(self) -> str | None:
        """The journal without a password, for people."""
        if self.journal is None or not self.shared:
            return self.journal
        from geventstalk.places import without_password  # here: most runs have none

        return without_password(self.journal)


@dataclass(frozen=True)
class CommandLine:
    """What the words of the command line say: `flags` holds the given options by key, as they were given."""

    flags: dict[str, object] = field(default_factory=dict)
    config: str | None = None
    check_config: bool = False


@dataclass(frozen=True)
class Option:
    """One setting: how the command line, a file and the environment give it, and how it is validated.

    `parse` takes what a source holds (text, or a YAML value) and returns the setting; its ValueError is a
    text for the user. `negative` are flags without a value that stand for `negative_value`.
    """

    key: str
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

    @property
    def default(self) -> object:
        """The setting when no source gives one."""
        return getattr(Settings(), self.key)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple, dict, set)):
        # Never its content: a few lines of YAML with aliases stand for gigabytes.
        return "a mapping" if isinstance(value, dict) else "a list"
    text = value if isinstance(value, str) else repr(value)
    if not text:
        return "(empty)"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _number(value: object, what: str, highest: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and re.fullmatch(r"[0-9]{1,40}", value):
        number = int(value)
    else:
        raise ValueError(f"invalid {what}: {_shown(value)}")
    if number < 0:
        raise ValueError(f"invalid {what}: {_shown(value)}")
    if number > highest:
        raise ValueError(f"invalid {what}: {_shown(value)}, the highest is {highest}")
    return number


def _max_job_bytes(value: object) -> int:
    return _number(value, "size", 10**40)  # capped later, with a warning, as upstream


def _segment_bytes(value: object) -> int:
    return _number(value, "size", SEGMENT_BYTES_CAP)


def _max_journal_bytes(value: object) -> int | None:
    if value is None:
        return None
    number = _number(value, "size", 1 << 60)
    if number < MAX_JOURNAL_BYTES_MIN:
        raise ValueError(f"invalid size: {_shown(value)}, the lowest is {MAX_JOURNAL_BYTES_MIN}")
    return number


def _max_memory(value: object) -> int | None:
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,40})([kmgKMG]?)", value) if isinstance(value, str) else None
    number = value if found is None else int(found[1]) << 10 * " kmg".index(found[2].lower() or " ")
    number = _number(number, "size", 1 << 60)
    if number < MAX_MEMORY_BYTES_MIN:
        raise ValueError(f"invalid size: {_shown(value)}, the lowest is {MAX_MEMORY_BYTES_MIN}")
    return number


def _verbose(value: object) -> int:
    return _number(value, "verbosity", VERBOSE_CAP)


def _fsync_ms(value: object) -> int | None:
    if value == "never":
        return None
    try:
        return _number(value, "size", FSYNC_MS_CAP)
    except ValueError as error:
        raise ValueError(f"{error}; give milliseconds or never") from None


def _port(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_+.-]*", value) and not value.isdecimal():
        return value
    return str(_number(value, "port", 65_535))


def _plain_text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"invalid {what}: {_shown(value)}")
    return value


def _journal(value: object) -> str | None:
    return None if value is None else _plain_text(value, "directory")


def _node(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[\w.:-]{1,100}", value, re.ASCII):
        raise ValueError(f"invalid name of a node: {_shown(value)}; it has up to 100 of a-z, A-Z, 0-9, ., :, _ and -")
    return value


def _advertise(value: object) -> str | None:
    if value is None:
        return None
    found = isinstance(value, str) and re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/@\0]+):([0-9]{1,5})", value)
    if not found or not 0 < int(found[2]) <= 65_535:
        raise ValueError(f"invalid address: {_shown(value)}; give HOST:PORT, where other nodes reach this one")
    return str(value)


def _seconds(value: object, what: str, lowest: float, highest: float) -> float:
    number = None
    text = repr(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    if isinstance(text, str) and re.fullmatch(r"[0-9]{1,10}(\.[0-9]{1,10})?", text):
        number = float(text)
    if number is None or not lowest <= number <= highest:
        raise ValueError(f"invalid {what}: {_shown(value)}; give seconds from {lowest:g} to {highest:g}")
    return number


def _lease(value: object) -> float:
    return _seconds(value, "lease", LEASE_S_MIN, LEASE_S_MAX)


def _wait(value: object) -> float:
    return _seconds(value, "wait", 0, WAIT_S_MAX)


def _io_processes(value: object) -> int:
    if value == "auto":
        cores = len(os.sched_getaffinity(0))
        return 0 if cores < AUTO_CORES_MIN else min(cores // 2, AUTO_IO_PROCESSES_MAX)
    try:
        return _number(value, "number", IO_PROCESSES_CAP)
    except ValueError as error:
        raise ValueError(f"{error}; give a number or auto") from None


def _user(value: object) -> str | None:
    return None if value is None else _plain_text(value, "user")


def _listen(value: object) -> tuple[str, ...]:
    addresses = value if isinstance(value, (list, tuple)) else (value,)
    for address in addresses:
        if _plain_text(address, "address") == "unix:":
            raise ValueError(f"invalid address: {address}, the path is missing")
    return tuple(addresses)


def _socket_mode(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch("0?[0-7]{3}", value):
        raise ValueError(f"invalid mode: {_shown(value)}; give three octal digits such as 660, in quotes in a file")
    return int(value, 8)


def _socket_owner(value: object) -> str | None:
    if value is None:
        return None
    if not re.fullmatch(r"[^\s:]+(:[^\s:]+)?|:[^\s:]+", _plain_text(value, "owner")):
        raise ValueError(f"invalid owner: {_shown(value)}; give USER, USER:GROUP or :GROUP")
    return str(value)


def _http(value: object) -> tuple[str, ...]:
    return tuple(_http_address(one) for one in (value if isinstance(value, (list, tuple)) else (value,)))


def _http_address(value: object) -> str:
    """`HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`; a port alone is one of 127.0.0.1."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and text.startswith("unix:") and "\0" not in text:
        if text == "unix:":
            raise ValueError(f"invalid HTTP address: {text}, the path is missing")
        return text
    found = isinstance(text, str) and re.fullmatch(r"(?:(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/@\0]+):)?([0-9]{1,40})", text)
    if not found:
        raise ValueError(f"invalid HTTP address: {_shown(value)}; give ADDR:PORT, PORT or unix:PATH")
    return f"{found[1] or '127.0.0.1'}:{_number(found[2], 'port', 65_535)}"


def _http_host(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, (list, tuple)) else (value,)
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name):
            raise ValueError(f"invalid host name: {_shown(name)}; give it without a port")
    return tuple(name.lower() for name in names)


def _file(value: object) -> str | None:
    return None if value is None else _plain_text(value, "file")


def _max_tube_series(value: object) -> int:
    return _number(value, "number", TUBE_SERIES_CAP)


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    raise ValueError(f"invalid switch: {_shown(value)}, it is true or false")


def _log_format(value: object) -> str:
    if value not in ("text", "json"):
        raise ValueError(f"invalid log format: {_shown(value)}, it is text or json")
    return str(value)


OPTIONS: tuple[Option, ...] = (
    Option(
        key="journal",
        flags=("-b", "--journal"),
        kind="value",
        metavar="DIR",
        parse=_journal,
        help="Keep jobs in a journal in this directory; without it they live in memory only. "
        "With postgresql://HOST/DATABASE nodes share a journal there: one serves, the others stand by.",
    ),
    Option(
        key="fsync_ms",
        flags=("-f", "--fsync-ms"),
        kind="value",
        metavar="MS",
        parse=_fsync_ms,
        help="Sync the journal to the device every MS milliseconds; 0: before every reply; or never.",
        negative=("-F", "--no-fsync"),
        negative_value="never",
        negative_help="Never sync, the same as --fsync-ms never. Of several -f and -F the last one counts.",
    ),
    Option(
        key="listen",
        flags=("-l", "--listen"),
        kind="list",
        metavar="ADDR",
        parse=_listen,
        help="Listen on this address, host name or unix:PATH; may be given several times. "
        "Default: 0.0.0.0, every IPv4 address of this host.",
    ),
    Option(
        key="port",
        flags=("-p", "--port"),
        kind="value",
        metavar="PORT",
        parse=_port,
        help="Listen on this TCP port, a number up to 65535 or the name of a service; 0 takes a free one.",
    ),
    Option(
        key="socket_mode",
        flags=("--socket-mode",),
        kind="value",
        metavar="MODE",
        parse=_socket_mode,
        help="Mode of each unix socket, such as 660; without it the umask decides.",
    ),
    Option(
        key="socket_owner",
        flags=("--socket-owner",),
        kind="value",
        metavar="OWNER",
        parse=_socket_owner,
        help="Owner of each unix socket: USER, USER:GROUP or :GROUP; without it the user that starts the server.",
    ),
    Option(
        key="user",
        flags=("-u", "--user"),
        kind="value",
        metavar="USER",
        parse=_user,
        help="Become this user, with its groups, once the sockets are open.",
    ),
    Option(
        key="io_processes",
        flags=("--io-processes",),
        kind="value",
        metavar="N",
        parse=_io_processes,
        help="Let N front-end processes do the socket work of clients, on further cores; or auto, by the number of "
        "cores. 0: the server's process does it itself.",
    ),
    Option(
        key="max_job_bytes",
        flags=("-z", "--max-job-bytes"),
        kind="value",
        metavar="BYTES",
        parse=_max_job_bytes,
        help=f"Largest body of a job. Values above {MAX_JOB_BYTES_CAP} become that, with a warning.",
    ),
    Option(
        key="segment_bytes",
        flags=("-s", "--segment-bytes"),
        kind="value",
        metavar="BYTES",
        parse=_segment_bytes,
        help=f"Size of each journal file. Values below {SEGMENT_BYTES_MIN} become that, with a warning.",
    ),
    Option(
        key="compact",
        flags=("-c", "--compact"),
        kind="switch",
        metavar="",
        parse=_switch,
        help="Compact the journal: move the few jobs left in old files, so that the files can go.",
        negative=("-n", "--no-compact"),
        negative_value="false",
        negative_help="With -n every journal file is kept.",
    ),
    Option(
        key="max_journal_bytes",
        flags=("--max-journal-bytes",),
        kind="value",
        metavar="BYTES",
        parse=_max_journal_bytes,
        help="Most that the journal may take on disk; puts that have no room get OUT_OF_MEMORY.",
    ),
    Option(
        key="max_memory",
        flags=("--max-memory",),
        kind="value",
        metavar="BYTES",
        parse=_max_memory,
        help="Most that the bodies of jobs may take in memory, such as 256m; k, m and g are multiples of 1024. With a "
        "journal in a directory the others stay there until they are needed; where that is not enough, and otherwise, "
        "puts get OUT_OF_MEMORY.",
    ),
    Option(
        key="accept_damage",
        flags=("--accept-damage",),
        kind="switch",
        metavar="",
        parse=_switch,
        help="Start with what a damaged journal still holds; damaged files are set aside, none is deleted.",
        negative=("--refuse-damage",),
        negative_value="false",
        negative_help="With --refuse-damage, the default, a damaged journal is refused.",
    ),
    Option(
        key="node",
        flags=("--node",),
        kind="value",
        metavar="NAME",
        parse=_node,
        help="Name of this node among those that share a journal. Default: the name of the host, and the port.",
    ),
    Option(
        key="advertise",
        flags=("--advertise",),
        kind="value",
        metavar="HOST:PORT",
        parse=_advertise,
        help="Where the other nodes reach this one. Default: the address of this host towards the database.",
    ),
    Option(
        key="lease",
        flags=("--lease",),
        kind="value",
        metavar="SECONDS",
        parse=_lease,
        help="For how long a node that is not heard of may still be serving; until then no other takes over from it.",
    ),
    Option(
        key="put_wait",
        flags=("--put-wait",),
        kind="value",
        metavar="SECONDS",
        parse=_wait,
        help="When the shared journal does not answer for so long, puts get OUT_OF_MEMORY; all else goes on waiting.",
    ),
    Option(
        key="takeover_wait",
        flags=("--takeover-wait",),
        kind="value",
        metavar="SECONDS",
        parse=_wait,
        help="So long a new connection waits on a standby while no node leads. Then it is closed.",
    ),
    Option(
        key="http",
        flags=("--http",),
        kind="list",
        metavar="ADDR:PORT",
        parse=_http,
        help="Serve the console, the API and /metrics over HTTP here: ADDR:PORT, unix:PATH, or PORT for 127.0.0.1; "
        "may be given several times. Other hosts reach it only with --http-tokens.",
    ),
    Option(
        key="http_tokens",
        flags=("--http-tokens",),
        kind="value",
        metavar="FILE",
        parse=_file,
        help="Who may use HTTP: a file of lines `NAME read|admin TOKEN`, which nobody else may read.",
    ),
    Option(
        key="http_host",
        flags=("--http-host",),
        kind="list",
        metavar="NAME",
        parse=_http_host,
        help="A further name by which HTTP requests may call this server, such as that of a proxy in front of it.",
    ),
    Option(
        key="audit",
        flags=("--audit",),
        kind="value",
        metavar="FILE",
        parse=_file,
        help="Append each change that is made over HTTP to this file: who, when, from where, what.",
    ),
    Option(
        key="max_tube_series",
        flags=("--max-tube-series",),
        kind="value",
        metavar="N",
        parse=_max_tube_series,
        help="Most tubes that have series of their own in /metrics.",
    ),
    Option(
        key="verbose",
        flags=("-V", "--verbose"),
        kind="count",
        metavar="",
        parse=_verbose,
        help="Print connections to stdout; twice: also commands, replies and jobs.",
    ),
    Option(
        key="log_format",
        flags=("--log-format",),
        kind="value",
        metavar="FORMAT",
        parse=_log_format,
        help="Format of the log lines on stderr: text or json.",
    ),
)

_BY_KEY = {option.key: option for option in OPTIONS}
_BY_ENV = {option.env: option for option in OPTIONS}


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], config: str | None = None
) -> tuple[Settings, tuple[str, ...]]:
    """The settings of this run, and warnings to print.

    `flags` holds what the command line gave, by key; `config` is the file it named. Raises ConfigError.
    """
    path = config if config is not None else environ.get(ENV_CONFIG)
    values: dict[str, Any] = {}
    if path is not None:
        values.update(_from_file(path))
    values.update(_from_environment(environ))
    for key, value in flags.items():
        option = _BY_KEY[key]
        values[key] = _parsed(option, value, ", ".join(option.flags))
        if key == "journal" and str(value).startswith(SHARED):
            _refuse_password(str(value))
    return _within_limits(replace(Settings(), **values))


def _refuse_password(journal: str) -> None:
    from geventstalk.places import has_password  # here: most runs have none

    if has_password(journal):
        raise ConfigError(
            "a password on the command line can be read by everybody on this host (-b, --journal); "
            f"give it in a password file, as {ENV_PREFIX}JOURNAL, in the file of --config or as PGPASSWORD"
        )


def require_fitting(settings: Settings) -> None:
    """Raises ConfigError when options do not go together."""
    if settings.shared:
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
    given = [
        key
        for key in ("node", "advertise", "lease", "put_wait", "takeover_wait")
        if getattr(settings, key) != getattr(Settings, key)
    ]
    if given:
        raise ConfigError(f"{_BY_KEY[given[0]].flags[0]} is for nodes that share a journal: -b postgresql://...")


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
    """What the name may be a slip for, as the end of a sentence; nothing where none is near."""
    from difflib import get_close_matches  # slow to import, and only a mistake needs it

    close = get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
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
        values[option.key] = _parsed(option, value, f"environment variable {name}")
    return values


def _from_file(path: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value, line in _read_yaml(path):
        option = _BY_KEY.get(key)
        if option is None:
            raise ConfigError(f"unknown key: {key}{did_you_mean(key, _BY_KEY)} ({path}, line {line})")
        if key in values:
            raise ConfigError(f"key given twice: {key} ({path}, line {line})")
        values[key] = _parsed(option, value, f"{key} in {path}, line {line}")
    return values


def _read_yaml(path: str) -> Iterator[tuple[str, object, int]]:
    """Each key of the file, its value and the number of its line."""
    import yaml  # here: most runs have no file, and it takes 15 ms

    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise ConfigError(f"{path} is no file of settings: it is larger than {_FILE_BYTES_MAX} bytes")
        # The node tree knows lines and doubled keys, which the finished dict has lost.
        root = yaml.compose(content, yaml.SafeLoader)
        values = yaml.safe_load(content)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_yaml_problem(error)}") from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # SafeLoader lets these out when a date or an explicit tag does not fit its text.
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if values is None:
        return  # an empty file, or comments only
    if root is None or not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold keys and values")
    for key_node, _ in root.value:
        key = key_node.value if isinstance(key_node.value, str) else "(not text)"
        yield key, values.get(key), key_node.start_mark.line + 1


def _yaml_problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {problem}" if mark else " ".join(problem.split())
