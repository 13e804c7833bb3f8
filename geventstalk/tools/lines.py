"""A job as a JSON object, and back: the lines of `export`, `import` and `dump`.

This room must not know files, journals or click: it is given lines and records, and gives objects and jobs. Whatever
stands in a line that was not written by `export`, reading it gives a job that the server can hold, or Unreadable.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from geventstalk.core.job import BURIED, DELAYED, READY, STATE_NAMES, U32_MAX, Job, Tally
from geventstalk.durable.records import Epoch, apply_change, decode_whole
from geventstalk.tools.binlog import TUBE_NAME
from journal.sqlite.format import CHANGE, FULL
from journal.sqlite.replay import Record

EXPORT_FORMAT: Final = "geventstalk-jobs"
EXPORT_VERSION: Final = 1
WALL: Final = Epoch(0, 0)
"""Nothing is timed here: the journal's wall clock stays what it is."""
_CRLF: Final = b"\r\n"
_I64_MAX: Final = 2**63 - 1
_COUNTS: Final = ("reserves", "timeouts", "releases", "buries", "kicks")
_STATES: Final = {STATE_NAMES[state]: state for state in (READY, DELAYED, BURIED)}


class Unreadable(Exception):
    """What was given to `import` is no export."""


def header_of(line: bytes) -> tuple[int | None, int]:
    """How many jobs follow, None when it does not say, and the highest id there ever was."""
    try:
        header = json.loads(line)
        if header["format"] != EXPORT_FORMAT:
            raise ValueError(f"format {header['format']}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Unreadable(f"line 1: not the first line of an export: {error}") from error
    if header.get("version") != EXPORT_VERSION:
        raise Unreadable(f"line 1: version {header.get('version')} of an export; {EXPORT_VERSION} can be read")
    jobs = None if header.get("jobs") is None else _number(header, "jobs", _I64_MAX, 1)
    return jobs, _number(header, "highest_id", _I64_MAX, 1, 0)


def job_of(line: bytes, number: int) -> tuple[Job, bytes]:
    """The job in a line, and the name of its tube. Raises Unreadable."""
    try:
        fields = json.loads(line)
        name = fields["tube"].encode("ascii")
        state = _STATES[fields.get("state", "ready")]
        body = base64.b64decode(fields["body"], validate=True)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"line {number}: not a job: {type(error).__name__}: {error}") from error
    if not TUBE_NAME.fullmatch(name):
        raise Unreadable(f"line {number}: no name for a tube: {name!r}")

    def of(key: str, most: int = U32_MAX, default: int | None = 0) -> int:
        return _number(fields, key, most, number, default)

    job = Job(of("id", _I64_MAX, None), 0, of("pri"), of("delay"), of("ttr", default=None))
    if not job.id:
        raise Unreadable(f"line {number}: 0 is no id")
    job.created_ns = of("created_ns", _I64_MAX)
    job.state = state
    if state == DELAYED:
        job.rank = of("deadline_ns", _I64_MAX, None)
    elif state == BURIED:
        job.rank = of("burying", _I64_MAX // 2)  # the next ones are counted up from it
    counts = [of(key) for key in _COUNTS]
    job.tally = Tally(*counts) if any(counts) else None
    job.body = body + _CRLF
    return job, name


def _number(fields: dict[str, Any], key: str, most: int, line: int, default: int | None = None) -> int:
    value = fields.get(key, default)
    if type(value) is not int or not 0 <= value <= most:
        raise Unreadable(f"line {line}: {key} is no number from 0 to {most}")
    return value


def export_of(record: Record, change: bytes | None) -> dict[str, object]:
    job, name = decode_whole(record.key, record.payload, WALL)
    if change is not None:
        apply_change(job, change, WALL)
    return {
        "id": job.id,
        "tube": name.decode("ascii"),
        **_changeable(job),
        "ttr": job.ttr_s,
        "created_ns": job.created_ns,
        "body": _text_of(job),
    }


def examine(record: Record) -> None:
    """Raises ValueError when a record is not a job's."""
    if record.kind == FULL:
        decode_whole(record.key, record.payload, WALL)
    elif record.kind == CHANGE:
        apply_change(Job(0, 0, 0, 0, 0), record.payload, WALL)


def facts_of(record: Record, bodies: bool) -> dict[str, object]:
    if record.kind == FULL:
        job, name = decode_whole(record.key, record.payload, WALL)
        facts = {"kind": "whole", "tube": name.decode("ascii", "backslashreplace"), **_changeable(job)}
        facts |= {"ttr": job.ttr_s, "created_ns": job.created_ns, "size": len(job.body) - len(_CRLF)}
        return {**facts, "body": _text_of(job)} if bodies else facts
    if record.kind == CHANGE:
        job = Job(record.key, 0, 0, 0, 0)
        apply_change(job, record.payload, WALL)
        return {"kind": "change", **_changeable(job)}
    return {"kind": "delete"}


def _changeable(job: Job) -> dict[str, object]:
    facts: dict[str, object] = {"state": STATE_NAMES[job.state], "pri": job.pri, "delay": job.delay_s}
    if job.state == DELAYED:
        facts["deadline_ns"] = job.rank
    elif job.state == BURIED:
        facts["burying"] = job.rank
    if job.tally is not None:
        facts |= {key: getattr(job.tally, key) for key in _COUNTS}
    return facts


def _text_of(job: Job) -> str:
    return base64.b64encode(job.body[: -len(_CRLF)]).decode("ascii")
