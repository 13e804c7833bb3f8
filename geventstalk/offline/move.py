"""Copies a whole journal to another place, which may be of another kind.

It must not know the engine, gevent or SQLite, nor the kinds of journals. No server uses either place meanwhile.
Invariant: the target gets all of the jobs or nothing. It is read again and compared before the copy is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Final
from zlib import crc32

from geventstalk.offline.lines import Examined
from geventstalk.offline.transfer import Imported
from journal import JournalDamaged, Record, tools_for
from journal.errors import JournalUnreachable
from journal.tools import Builder, Examine, Survey

Step = Callable[[str, int, int], None]
"""Takes the progress: the name of the step, how many are done, and of how many; 0 where that is unknown."""

_EVERY: Final = 1000
"""The number of records between two reports of progress."""
_SUM_MASK: Final = (1 << 64) - 1


class _Seen:
    """A sum of jobs and marks that does not depend on their order, to compare two readings."""

    def __init__(self) -> None:
        self.records = 0
        self.sum = 0

    def add(self, record: Record, change: bytes | None) -> None:
        crc = crc32(record.payload, crc32(b"%d" % record.key))
        if change is not None:
            crc = crc << 32 | crc32(change, crc)
        self.records += 1
        self.sum = (self.sum + crc) & _SUM_MASK


def copy(source: str, target: str, judge: Callable[[list[str]], None], step: Step) -> Imported:
    """Copies every job with its state, counts and times, and the next id, to a place that has no log.

    `judge` gets the findings before anything is written, and may raise. Raises a JournalError.
    """
    origin, goal = tools_for(source), tools_for(target)
    goal.require_empty()
    with origin.without_writers():
        examined = Examined()
        survey = origin.survey(_counting("reading", examined, step))
        try:
            with goal.writing():
                goal.require_empty()
                builder = goal.builder()
                written = _write(survey, builder, judge, step)
                try:
                    found = _read_again(goal.survey(_counting("comparing", Examined(), step)), builder.high_water)
                except JournalUnreachable as error:
                    # Another attempt would be refused: the place is not empty any more, and its jobs are complete.
                    raise JournalUnreachable(f"{error}; all jobs were written, but not compared") from error
                if (found.records, found.sum) != (written.records, written.sum):
                    raise JournalDamaged(f"what was written to {goal.place} is not what was read: do not use it")
        finally:
            survey.close()
    return Imported(examined.jobs_in(survey), builder.high_water + 1)


def _write(survey: Survey, builder: Builder, judge: Callable[[list[str]], None], step: Step) -> _Seen:
    seen = _Seen()
    try:
        jobs = survey.live_records()
        first = next(jobs, None)
        judge(survey.findings)
        for record, change in chain([] if first is None else [first], jobs):
            builder.append(record.key, record.payload, change)
            seen.add(record, change)
            if not seen.records % _EVERY:
                step("writing", seen.records, survey.keys)
        builder.high_water = max(builder.high_water, survey.used_keys)
        builder.finish()
    except BaseException:
        builder.discard()
        raise
    return seen


def _read_again(survey: Survey, high_water: int) -> _Seen:
    """Raises JournalDamaged when there are findings, or when the next id is another one."""
    seen = _Seen()
    try:
        for record, change in survey.live_records():
            seen.add(record, change)
        if survey.findings or survey.used_keys != high_water:
            raise JournalDamaged((survey.findings or [f"the highest id is {survey.used_keys}, not {high_water}"])[0])
    finally:
        survey.close()
    return seen


def _counting(what: str, examined: Examined, step: Step) -> Examine:
    """Examines records, and reports the progress."""
    count = 0

    def examine(record: Record) -> None:
        nonlocal count
        examined(record)
        count += 1
        if not count % _EVERY:
            step(what, count, 0)

    return examine
