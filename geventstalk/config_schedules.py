"""The key `schedules` of the settings' file: jobs that the server puts at times of its own.

This module must not know options or files. It imports what knows times of a day when there is a schedule only. The
parser raises ValueError with a text for the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone, tzinfo
from typing import Any, Final, NamedTuple

from geventstalk import config_values as values
from geventstalk.limits import U32_MAX, is_tube_name
from geventstalk.tags import parse_put

ONCE: Final = "once"
SKIP: Final = "skip"
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_ALIASES: Final = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_FIELDS: Final = 5
_UNIQUE: Final = b"idp:"
_BODY_BYTES_MAX: Final = 65_535
_ANY_MOMENT: Final = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Schedule(NamedTuple):
    """A job for each tick of a cron expression in a time zone. `missed` is about ticks while no server runs."""

    name: str
    cron: str
    tube: str
    zone: str = "UTC"
    body: str = ""
    priority: int = 65_536
    delay: int = 0
    ttr: int = 60
    tags: str = ""
    missed: str = SKIP


def schedules(value: object) -> tuple[Schedule, ...]:
    """Parses a mapping of names to schedules."""
    if not isinstance(value, dict):
        raise ValueError(f"schedules are {values.shown(value)}, and have to be a mapping of names")
    found = []
    for name, entry in value.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{values.shown(name)} is no name of a schedule: up to 100 letters, digits and _ . -")
        try:
            found.append(_schedule(name, entry))
        except ValueError as error:
            raise ValueError(f"schedule {name}: {error}") from None
    return tuple(found)


def _schedule(name: str, entry: object) -> Schedule:
    parsers: dict[str, Callable[[object], Any]] = {
        "cron": _cron,
        "tube": _tube,
        "zone": _zone,
        "body": _body,
        "priority": values.whole("priority", U32_MAX),
        "delay": values.whole("delay", U32_MAX),
        "ttr": values.whole("ttr", U32_MAX),
        "tags": _tags,
        "missed": _missed,
    }
    found = values.mapping(entry, "a schedule", parsers)
    values.require(found, "a schedule", "cron", "tube")
    return Schedule(name, **found)


def _cron(value: object) -> str:
    from cronsim import CronSim, CronSimError

    text = _ALIASES.get(value, value) if isinstance(value, str) else None
    if text is None or len(text.split()) != _FIELDS:
        raise ValueError(f"cron is {values.shown(value)}, and has to be minute, hour, day, month and day of the week")
    try:
        next(CronSim(text, _ANY_MOMENT))
    except (CronSimError, StopIteration) as error:
        raise ValueError(f"cron {values.shown(value)} never comes: {error}") from None
    return text


def zone_of(name: str) -> tzinfo:
    """Returns a time zone by its name. Raises ValueError."""
    if name == "UTC":
        return timezone.utc  # also where the host knows no zones
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(
            f"this host knows no time zone {values.shown(name)}: it is a name of tzdata, such as Europe/Berlin"
        ) from None


def _zone(value: object) -> str:
    name = values.text("zone")(value)
    zone_of(name)
    return name


def _tube(value: object) -> str:
    if not isinstance(value, str) or not is_tube_name(value.encode("utf-8", "surrogateescape")):
        raise ValueError(f"tube is {values.shown(value)}, which is no name of a tube")
    return value


def _body(value: object) -> str:
    if not isinstance(value, str) or len(value.encode("utf-8", "surrogateescape")) > _BODY_BYTES_MAX:
        raise ValueError(f"body is {values.shown(value)}, and has to be text of at most {_BODY_BYTES_MAX} bytes")
    return value


def _tags(value: object) -> str:
    try:
        text = " ".join(values.text("tags")(value).split())
        if parse_put(text.encode("ascii")).unique:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"tags are {values.shown(value)}, and have to be tags of a put other than {_UNIQUE.decode()}"
        ) from None
    return text


def _missed(value: object) -> str:
    if value not in (ONCE, SKIP):
        raise ValueError(f"missed is {values.shown(value)}, and has to be {ONCE} or {SKIP}")
    return str(value)
