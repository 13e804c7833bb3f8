"""A job as a JSON object, and back: the lines of `export`, `import` and `dump`.

This module must not know files, journals or click: it takes lines and records, and returns objects and jobs. Any line,
also one that `export` has not written, becomes a job that the server can hold, or raises Unreadable.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from geventstalk.core.job import (
    BURIED,
    DELAYED,
    DELETED,
    READY,
    SECOND_NS,
    STATE_NAMES,
    U32_MAX,
    Job,
    TaggedTally,
    Tally,
    held_body,
)
from geventstalk.durable.export import EXPORT_FORMAT, EXPORT_VERSION, changeable_fields_of, fields_of
from geventstalk.durable.records import ClockOffset, apply_change, decode_whole, fits
from geventstalk.fields import COUNTS
from geventstalk.limits import is_tube_name
from geventstalk.offline.binlog import WALL_NS_MAX
from geventstalk.tags import REASONS, parse
from journal import CHANGE, FULL, Record
from journal.tools import Survey

WALL: Final = ClockOffset(0, 0)
"""No offset: an export keeps the journal's wall clock."""
_CRLF: Final = b"\r\n"
_I64_MAX: Final = 2**63 - 1
"""The last id that a server gives. Its job can be exported, so it can be imported; puts find no id behind it."""
_BODY_BYTES_MAX: Final = 1 << 30
"""As with -z. A server holds each body in memory."""
LINE_BYTES_MAX: Final = (_BODY_BYTES_MAX + 2) // 3 * 4 + (1 << 16)
"""The size of the largest body in base64, and room for the fields of a job several times over."""
HEADER_BYTES_MAX: Final = 1 << 16
_SHOWN_CHARS: Final = 60
_STATES: Final = {STATE_NAMES[state]: state for state in (READY, DELAYED, BURIED, DELETED)}


class Unreadable(Exception):
    """The input of `import` is no export."""


def header_of(line: bytes) -> tuple[int | None, int]:
    """Returns the number of jobs that follow, None when the line does not say, and the highest id there ever was."""
    fields = _object_of(line, 1, "the first line of an export")
    if fields.get("format") != EXPORT_FORMAT:
        raise Unreadable(f"line 1: not the first line of an export: format is not {EXPORT_FORMAT}")
    version = fields.get("version")
    if type(version) is not int or version != EXPORT_VERSION:
        raise Unreadable(f"line 1: this export has version {_shown(version)}; only {EXPORT_VERSION} can be read")
    jobs = None if fields.get("jobs") is None else _number(fields, "jobs", _I64_MAX, 1)
    return jobs, _number(fields, "highest_id", _I64_MAX, 1, default=0)


def job_of(line: bytes, number: int) -> tuple[Job, bytes]:
    """Returns the job in a line, and the name of its tube. Raises Unreadable."""
    fields = _object_of(line, number, "a job")
    name = _text(fields, "tube", number).encode("ascii", "replace")  # a "?" is in no name
    if not is_tube_name(name):
        raise Unreadable(f"line {number}: tube is not a name that a tube can have: {_shown(fields['tube'])}")
    state = fields.get("state", "ready")
    if not isinstance(state, str) or state not in _STATES:
        raise Unreadable(f"line {number}: state is {_shown(state)}, and not one of {', '.join(_STATES)}")
    try:
        body = base64.b64decode(_text(fields, "body", number), validate=True)
    except ValueError as error:
        raise Unreadable(f"line {number}: body is not base64: {error}") from None
    if len(body) > _BODY_BYTES_MAX:
        raise Unreadable(f"line {number}: body has {len(body)} bytes; {_BODY_BYTES_MAX} is the most")

    def of(key: str, most: int = U32_MAX, least: int = 0, default: int | None = 0) -> int:
        return _number(fields, key, most, number, least, default)

    # A ttr of 0 becomes 1, as with put.
    job = Job(of("id", _I64_MAX, 1, None), 0, of("pri"), of("delay"), max(1, of("ttr", default=None)))
    job.created_ns = of("created_ns", WALL_NS_MAX)
    job.state = _STATES[state]
    if job.state in (DELAYED, DELETED):
        job.rank = of("deadline_ns", WALL_NS_MAX, default=None)
        if "delay" not in fields:
            # A server takes no deadline for true that is later than the delay allows.
            job.delay_s = min(U32_MAX, max(0, -((job.created_ns - job.rank) // SECOND_NS)))
    elif job.state == BURIED:
        job.rank = of("burying", _I64_MAX // 2)  # the next buryings are counted up from it
    counts = [of(key) for key in COUNTS]
    if "tags" in fields or job.state == DELETED:
        job.tally = _tagged(fields, counts, of("tried"), number)
    elif any(counts):
        job.tally = Tally(*counts)
    job.body = body + _CRLF
    return job, name


def _tagged(fields: dict[str, Any], counts: list[int], tried: int, number: int) -> TaggedTally:
    try:
        tally = TaggedTally(parse(_text(fields, "tags", number).encode("ascii")), *counts)
    except ValueError:
        raise Unreadable(f"line {number}: tags are not words that tags can be: {_shown(fields['tags'])}") from None
    tally.tried = tried
    reason = fields.get("reason", REASONS[0])
    if reason not in REASONS:
        raise Unreadable(f"line {number}: reason is {_shown(reason)}, and not one of {', '.join(REASONS)}")
    tally.why = REASONS.index(reason)
    return tally


def _object_of(line: bytes, number: int, what: str) -> dict[str, Any]:
    if not line.strip():
        raise Unreadable(f"line {number}: not {what}: it is empty")
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise Unreadable(f"line {number}: not {what}: no JSON: {error.msg} at character {error.colno}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8; a number of thousands of digits; nested too deeply
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise Unreadable(f"line {number}: not {what}: no JSON: {reason}") from None
    if not isinstance(fields, dict):
        raise Unreadable(f"line {number}: not {what}: no JSON object")
    return fields


def _text(fields: dict[str, Any], key: str, line: int) -> str:
    value = fields.get(key)
    if value is None:
        raise Unreadable(f"line {line}: {key} is missing")
    if not isinstance(value, str):
        raise Unreadable(f"line {line}: {key} is not text")
    return value


def _number(fields: dict[str, Any], key: str, most: int, line: int, least: int = 0, default: int | None = None) -> int:
    value = fields.get(key, default)
    if value is None:
        raise Unreadable(f"line {line}: {key} is missing")
    if type(value) is not int or not least <= value <= most:
        raise Unreadable(f"line {line}: {key} is {_shown(value)}, and not a whole number from {least} to {most}")
    return value


def _shown(value: object) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def export_of(record: Record, change: bytes | None) -> dict[str, object]:
    job, name = decode_whole(record.key, record.payload, WALL)
    if change is not None and fits(change, name, job.ttr_s):
        apply_change(job, change, WALL)
    return {**fields_of(job, name, _as_it_is), "body": _text_of(job)}


class Examined:
    """Examines the records of a survey, and counts its jobs. Marks of unique keys and of settings are no jobs."""

    def __init__(self) -> None:
        self._marks: set[int] = set()

    def __call__(self, record: Record) -> None:
        """Raises ValueError when a record is not a job's."""
        if record.kind == FULL:
            job, _ = decode_whole(record.key, record.payload, WALL)
            if job.state == DELETED:
                self._marks.add(record.key)
        elif record.kind == CHANGE:
            apply_change(Job(0, 0, 0, 0, 0), record.payload, WALL)
        else:
            self._marks.discard(record.key)

    def jobs_in(self, survey: Survey) -> int:
        """Returns the number of live jobs of a survey that has read everything."""
        return survey.keys - len(self._marks.difference(survey.lost))


def facts_of(record: Record, bodies: bool) -> dict[str, object]:
    if record.kind == FULL:
        job, name = decode_whole(record.key, record.payload, WALL)
        facts = {
            "kind": "whole",
            "tube": name.decode("ascii", "backslashreplace"),
            **changeable_fields_of(job, _as_it_is),
        }
        facts |= {"ttr": job.ttr_s, "created_ns": job.created_ns, "size": len(held_body(job)) - len(_CRLF)}
        return {**facts, "body": _text_of(job)} if bodies else facts
    if record.kind == CHANGE:
        job = Job(record.key, 0, 0, 0, 0)
        apply_change(job, record.payload, WALL)
        return {"kind": "change", **changeable_fields_of(job, _as_it_is)}
    return {"kind": "delete"}


def _as_it_is(ns: int) -> int:
    return ns


def _text_of(job: Job) -> str:
    return base64.b64encode(held_body(job)[: -len(_CRLF)]).decode("ascii")
