"""Parsers of single settings: text, or a value of YAML, becomes what the program uses.

Each parser raises ValueError with a text for the user. This module must not know options, files or the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

MAX_MEMORY_BYTES_MIN = 1 << 16
MAX_JOURNAL_BYTES_MIN = 1 << 20  # room for the segments that are there without any job
SEGMENT_BYTES_CAP = 1 << 40
FSYNC_MS_CAP = (1 << 32) - 1
IO_PROCESSES_CAP = 64
AUTO_CORES_MIN = 4  # with fewer, the clients' processes need them more
AUTO_IO_PROCESSES_MAX = 3  # more than one engine can keep at work
TUBE_SERIES_CAP = 100_000  # ten megabytes at each scrape
VERBOSE_CAP = 100
NAME_COLORS = ("red", "orange", "green", "blue", "purple", "gray")  # style.css has each of them
LEASE_S_MIN, LEASE_S_MAX = 0.2, 60.0  # a busy machine may well stand still for longer than the shortest one
WAIT_S_MAX = 3600.0
_BYTES_CAP = 1 << 60
_SHOWN_CHARS = 100
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}

Setting = TypeVar("Setting")


def optional(parse: Callable[[object], Setting]) -> Callable[[object], Setting | None]:
    """Returns a parser that takes null of YAML, too."""
    return lambda value: None if value is None else parse(value)


def listed(parse: Callable[[object], Setting]) -> Callable[[object], tuple[Setting, ...]]:
    """Returns a parser of a list, or of a single value that stands for a list of one."""
    return lambda value: tuple(parse(one) for one in (value if isinstance(value, (list, tuple)) else (value,)))


def mapping(value: object, noun: str, parsers: Mapping[str, Callable[[object], Any]]) -> dict[str, Any]:
    """Parses each entry of a mapping of YAML."""
    if not isinstance(value, dict):
        raise ValueError(f"{noun} is {shown(value)}, and has to be a mapping of {', '.join(parsers)}")
    for key in value:
        if key not in parsers:
            raise ValueError(f"{noun} has no key {shown(key)}, but {', '.join(parsers)}")
    return {key: parsers[key](one) for key, one in value.items()}


def require(found: Mapping[str, Any], noun: str, *keys: str) -> None:
    """Raises ValueError when one of the keys of a mapping is missing."""
    for key in keys:
        if key not in found:
            raise ValueError(f"the key {key} of {noun} is missing")


def whole(noun: str, highest: int) -> Callable[[object], int]:
    """Returns a parser of whole numbers from 0 on."""
    return lambda value: _number(value, noun, highest)


def text(noun: str) -> Callable[[object], str]:
    """Returns a parser of text that is not empty."""
    return lambda value: _plain_text(value, noun)


def shown(value: object) -> str:
    """Returns a value as a message shows it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple, dict, set)):
        # Never its content: a few lines of YAML with aliases stand for gigabytes.
        return "a mapping" if isinstance(value, dict) else "a list"
    shown = value if isinstance(value, str) else repr(value)
    if not shown:
        return "(empty)"
    return shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "..."


def _number(value: object, noun: str, highest: int) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,40}", value) else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"invalid {noun}: {shown(value)}")
    if number > highest:
        raise ValueError(f"invalid {noun}: {shown(value)}, the highest is {highest}")
    return number


def _bytes(value: object, lowest: int, highest: int) -> int:
    found = re.fullmatch(r"([0-9]{1,40})([kmgKMG])", value) if isinstance(value, str) else None
    number = value if found is None else int(found[1]) << 10 * " kmg".index(found[2].lower())
    bytes = _number(number, "size", highest)
    if bytes < lowest:
        raise ValueError(f"invalid size: {shown(value)}, the lowest is {lowest}")
    return bytes


def _plain_text(value: object, noun: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"invalid {noun}: {shown(value)}")
    return value


def size(highest: int) -> Callable[[object], int]:
    """Returns a parser of bytes up to this number: 65536, 64k or 64K; also m and g, multiples of 1024."""
    return lambda value: _bytes(value, 0, highest)


def max_journal_bytes(value: object) -> int:
    return _bytes(value, MAX_JOURNAL_BYTES_MIN, _BYTES_CAP)


def max_memory(value: object) -> int:
    return _bytes(value, MAX_MEMORY_BYTES_MIN, _BYTES_CAP)


def fsync_ms(value: object) -> int | None:
    if value == "never":
        return None
    try:
        return _number(value, "size", FSYNC_MS_CAP)
    except ValueError as error:
        raise ValueError(f"{error}; give milliseconds or never") from None


def port(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_+.-]*", value) and not value.isdecimal():
        from socket import getservbyname  # here: hardly any start needs it

        try:
            getservbyname(value, "tcp")
        except OSError:
            raise ValueError(f"invalid port: {shown(value)}, which is no service of this host") from None
        return value
    return str(_number(value, "port", 65_535))


def node(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.:-]{1,100}", value, re.ASCII):
        raise ValueError(f"invalid name of a node: {shown(value)}; it has up to 100 of a-z, A-Z, 0-9, ., :, _ and -")
    return value


def name(value: object) -> str:
    # Printable: a character that turns the direction of the text would make it look like another server's.
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.strip()) == len(value) <= 60:
        raise ValueError(f"invalid name: {shown(value)}; give up to 60 printable characters")
    return value


def name_color(value: object) -> str:
    if value not in NAME_COLORS:
        raise ValueError(f"invalid colour: {shown(value)}, it is one of {', '.join(NAME_COLORS)}")
    return str(value)


def advertise(value: object) -> str:
    found = isinstance(value, str) and re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/@\0]+):([0-9]{1,5})", value)
    if not found or not 0 < int(found[2]) <= 65_535:
        raise ValueError(f"invalid address: {shown(value)}; give HOST:PORT, where other nodes reach this one")
    return str(value)


def seconds(noun: str, lowest: float, highest: float) -> Callable[[object], float]:
    """Returns a parser of seconds within these bounds."""

    def parse(value: object) -> float:
        number = None
        written = repr(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        if isinstance(written, str) and re.fullmatch(r"[0-9]{1,10}(\.[0-9]{1,10})?", written):
            number = float(written)
        if number is None or not lowest <= number <= highest:
            raise ValueError(f"invalid {noun}: {shown(value)}; give seconds from {lowest:g} to {highest:g}")
        return number

    return parse


def io_processes(value: object) -> int:
    if value == "auto":
        cores = len(os.sched_getaffinity(0))
        return 0 if cores < AUTO_CORES_MIN else min(cores // 2, AUTO_IO_PROCESSES_MAX)
    try:
        return _number(value, "number", IO_PROCESSES_CAP)
    except ValueError as error:
        raise ValueError(f"{error}; give a number or auto") from None


def listen_address(value: object) -> str:
    address = _plain_text(value, "address")
    if address == "unix:":
        raise ValueError(f"invalid address: {address}, the path is missing")
    return address


def socket_mode(value: object) -> int:
    if not isinstance(value, str) or not re.fullmatch("0?[0-7]{3}", value):
        raise ValueError(f"invalid mode: {shown(value)}; give three octal digits such as 660, in quotes in a file")
    return int(value, 8)


def socket_owner(value: object) -> str:
    owner = _plain_text(value, "owner")
    if not re.fullmatch(r"[^\s:]+(:[^\s:]+)?|:[^\s:]+", owner):
        raise ValueError(f"invalid owner: {shown(value)}; give USER, USER:GROUP or :GROUP")
    return owner


def http_address(value: object) -> str:
    return endpoint(value, "HTTP address")


def endpoint(value: object, noun: str) -> str:
    """Parses `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`; a port alone is one of 127.0.0.1."""
    address = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(address, str) and address.startswith("unix:") and "\0" not in address:
        if address == "unix:":
            raise ValueError(f"invalid {noun}: {address}, the path is missing")
        return address
    form = r"(?:(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/@\0]+):)?([0-9]{1,40})"
    found = re.fullmatch(form, address) if isinstance(address, str) else None
    if not found:
        raise ValueError(f"invalid {noun}: {shown(value)}; give ADDR:PORT, PORT or unix:PATH")
    return f"{found[1] or '127.0.0.1'}:{_number(found[2], 'port', 65_535)}"


def http_host(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", value):
        raise ValueError(f"invalid host name: {shown(value)}; give it without a port")
    return value.lower()


def switch(value: object) -> bool:
    found = value if isinstance(value, bool) else _BOOLEANS.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"invalid switch: {shown(value)}, it is true or false")
    return found


def log_format(value: object) -> Literal["text", "json"]:
    if value == "text":
        return "text"
    if value == "json":
        return "json"
    raise ValueError(f"invalid log format: {shown(value)}, it is text or json")
