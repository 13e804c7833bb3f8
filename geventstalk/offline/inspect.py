"""Checks and describes a journal: its damage, its records, its segments.

It must not know the engine, gevent or SQLite. Reading takes no lock and changes no record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from geventstalk.core.job import BURIED, DELAYED, DELETED, READY, STATE_NAMES, Job
from geventstalk.durable.records import apply_change, decode_whole
from geventstalk.offline.lines import WALL, Examined, facts_of
from journal import CHANGE, FULL, Record, tools_for
from journal.tools import Survey


class Checked(NamedTuple):
    findings: list[str]
    notes: list[str]
    segments: int
    records: int
    jobs: int


def check(directory: str) -> Checked:
    """Reads all of a journal."""
    examined = Examined()
    survey = survey_all(directory, examined)
    notes = survey.notes + tools_for(directory).strangers()
    records = sum(facts.records for facts in survey.segments)
    return Checked(survey.findings, notes, len(survey.segments), records, examined.jobs_in(survey))


def open_survey(directory: str, examined: Examined) -> Survey:
    """Returns a survey of the records that this process may read; its caller closes it. Raises JournalLocked."""
    return tools_for(directory).survey(examined)


def survey_all(directory: str, examined: Examined) -> Survey:
    """Returns a survey that has read everything and has closed all files."""
    survey = open_survey(directory, examined)
    try:
        for _ in survey.read():
            pass
    finally:
        survey.close()
    return survey


def dump(directory: str, bodies: bool, complain: Callable[[str], None]) -> Iterator[dict[str, object]]:
    """Writes every record, dead ones too, in the order they were written, as an object. Reports damage."""
    for seq, record in tools_for(directory).every_record(complain):
        facts: dict[str, object] = {"segment": record.segment, "seq": seq, "id": record.key}
        try:
            facts |= facts_of(record, bodies)
        except ValueError as error:
            complain(f"segment {record.segment}: record {seq} is not a job's: {error}")
            continue
        yield facts


def stats(directory: str) -> tuple[dict[str, object], list[str]]:
    """Returns the segments and jobs of a journal, and its damage."""
    survey = open_survey(directory, Examined())
    try:
        tubes = _count(survey.read())
    finally:
        survey.close()
    names = {state: STATE_NAMES[state] for state in (READY, DELAYED, BURIED)}
    size = sum(facts.bytes for facts in survey.segments)
    summary = {
        "segments": [
            {
                "number": facts.number,
                "records": facts.records,
                "bytes": facts.bytes,
                "live-bytes": facts.live_bytes,
                "dead-bytes": max(0, facts.bytes - facts.live_bytes),
                "damaged": facts.damaged,
            }
            for facts in survey.segments
        ],
        "bytes": size,
        "live-bytes": survey.live_bytes,
        "dead-bytes": max(0, size - survey.live_bytes),
        "jobs": sum(sum(counts.values()) for counts in tubes.values()),
        "highest-id": survey.high_water,
        "tubes": {
            name.decode("ascii", "backslashreplace"): {names[state]: counts[state] for state in names}
            for name, counts in sorted(tubes.items())
        },
    }
    return summary, survey.findings


def _count(records: Iterable[Record]) -> dict[bytes, dict[int, int]]:
    """Counts the jobs of each tube in each state. Takes about 100 bytes a live job."""
    tubes: list[bytes] = []
    number_of: dict[bytes, int] = {}
    places: dict[int, int] = {}
    dummy = Job(0, 0, 0, 0, 0)
    for record in records:
        if record.kind == FULL:
            job, name = decode_whole(record.key, record.payload, WALL)
            number = number_of.setdefault(name, len(tubes))
            if number == len(tubes):
                tubes.append(name)
            places[record.key] = number << 8 | job.state
        elif record.kind == CHANGE:
            apply_change(dummy, record.payload, WALL)
            places[record.key] = places[record.key] & ~0xFF | dummy.state
        else:
            places.pop(record.key, None)
    counts: dict[bytes, dict[int, int]] = {}
    for place in places.values():
        if place & 0xFF != DELETED:  # which is the mark of a job, for its key
            of_tube = counts.setdefault(tubes[place >> 8], {READY: 0, DELAYED: 0, BURIED: 0})
            of_tube[place & 0xFF] += 1
    return counts
