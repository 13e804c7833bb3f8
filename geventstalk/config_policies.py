"""The key `policies` of the settings' file: what holds for jobs that are put into the tubes of a pattern.

This module must not know options or files. The parser raises ValueError with a text for the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from geventstalk import config_values as values
from geventstalk.globs import is_glob
from geventstalk.limits import U32_MAX, is_tube_name
from geventstalk.policies import NO_LIMIT, Terms
from geventstalk.tags import parse

_BACKOFF: Final = ("first", "factor", "limit", "jitter")
_BOUNDS: Final = ("min", "max")
_UNITS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
DONE_MAX: Final = 10_000
"""Done jobs of all tubes together that stay visible."""


def policies(value: object) -> tuple[tuple[str, Terms], ...]:
    """Parses a mapping of patterns to policies, in their order."""
    if not isinstance(value, dict):
        raise ValueError(f"policies are {values.shown(value)}, and have to be a mapping of patterns of tubes")
    found = []
    for glob, entry in value.items():
        if not is_glob(glob):
            raise ValueError(f"{values.shown(glob)} is no pattern of tubes: a name, with * for any characters")
        try:
            found.append((glob, _terms(entry)))
        except ValueError as error:
            raise ValueError(f"policy of {glob}: {error}") from None
    return tuple(found)


def _terms(entry: object) -> Terms:
    parsers: dict[str, Callable[[object], Any]] = {
        "tries": lambda value: f"tries:{_number(value, 'tries')}",
        "dead_letter": _dead_letter,
        "backoff": _backoff,
        "expires": lambda value: f"ttl:{_number(value, 'expires')}",
        "priority": _bounds,
        "delay": _bounds,
        "ttr": lambda value: _bounds(value, 1),
        "max_jobs": lambda value: _number(value, "max_jobs", 0),
        "max_job_bytes": lambda value: _number(value, "max_job_bytes", 0),
        "max_bytes": lambda value: _number(value, "max_bytes", 0, NO_LIMIT - 1),
        "max_rate": lambda value: _number(value, "max_rate"),
        "pause": values.switch,
        "keep": _keep,
        "events": values.switch,
    }
    found = values.mapping(entry, "a policy", parsers)
    tags = [found.pop(key) for key in ("tries", "dead_letter", "backoff", "expires") if key in found]
    given: Mapping[str, object] = entry if isinstance(entry, Mapping) else {}
    if "dead_letter" in given and not {"tries", "expires"} & set(given):
        raise ValueError("dead_letter is for jobs with tries, or that expire, and there is neither")
    return Terms(tuple(tags), **found)


def _number(value: object, noun: str, least: int = 1, most: int = U32_MAX) -> int:
    number = values.whole(noun, most)(value)
    if number < least:
        raise ValueError(f"{noun} is {number}, and has to be at least {least}")
    return number


def _dead_letter(value: object) -> str:
    if not isinstance(value, str) or not is_tube_name(value.encode("utf-8", "surrogateescape")):
        raise ValueError(f"dead_letter is {values.shown(value)}, which is no name of a tube")
    return f"dead:{value}"


def _backoff(value: object) -> str:
    """Parses seconds, a list of them, or a mapping, and returns the tag."""
    if isinstance(value, dict):
        numbers = values.mapping(value, "a backoff", {key: lambda one: one for key in _BACKOFF})
        values.require(numbers, "a backoff", "first")
        given = [numbers.get(key, default) for key, default in zip(_BACKOFF, (1, 1, U32_MAX, 0), strict=True)]
        first, factor, limit = (_number(each, "backoff") for each in given[:3])
        jitter = _number(given[3], "jitter", 0, 100)
        text = f"{first}:{factor}:{limit}" + (f":{jitter}" if jitter else "")
    else:
        text = ";".join(str(_number(each, "backoff")) for each in (value if isinstance(value, list) else [value]))
    tag = f"backoff:{text}"
    parse(tag.encode())
    return tag


def _keep(value: object) -> tuple[int, int]:
    """Parses a number of done jobs, or a time such as 90s, 15min, 2h or 1d."""
    if isinstance(value, str):
        number, unit = value.rstrip("abcdefghijklmnopqrstuvwxyz"), value.lstrip("0123456789")
        if number.isdecimal() and unit in _UNITS:
            return 0, _number(int(number) * _UNITS[unit], "keep")
        raise ValueError(f"keep is {values.shown(value)}, and has to be a number of jobs, or a time such as 15min")
    return _number(value, "keep", 1, DONE_MAX), 0


def _bounds(value: object, least: int = 0) -> tuple[int, int]:
    found = values.mapping(value, "a bound", dict.fromkeys(_BOUNDS, lambda one: _number(one, "a bound", least)))
    lowest, highest = found.get("min", least), found.get("max", U32_MAX)
    if lowest > highest:
        raise ValueError(f"min is {lowest}, and max is {highest}")
    return lowest, highest
