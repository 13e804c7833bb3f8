"""Copies a journal while its server runs, and writes the intact records of a damaged one anew.

It must not know the engine, gevent or SQLite. A file is complete before anything refers to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from geventstalk.dsn import is_shared, without_password
from geventstalk.offline.inspect import survey_all
from geventstalk.offline.lines import Examined
from journal import JournalLocked, tools_for
from journal.tools import LogTools, rewrite


class Copied(NamedTuple):
    """The jobs of a backup, and its damage."""

    segments: int
    jobs: int
    findings: list[str]


def backup(directory: str, target: str) -> Copied:
    """Copies a journal, also while its server runs, to a new or empty directory, and checks the copy."""
    if is_shared(target):
        raise JournalLocked(
            f"{without_password(target)}: a backup goes to a directory; copy brings a journal to a database"
        )
    segments = tools_for(directory).backup(target)
    examined = Examined()
    survey = survey_all(target, examined)
    return Copied(segments, examined.jobs_in(survey), survey.findings)


class Repaired(NamedTuple):
    """The number of jobs, the damage, the files set aside and their new names, the jobs that are known to be lost."""

    jobs: int
    findings: list[str]
    aside: list[tuple[str, str]]
    lost: list[int]


def repair(directory: str, target: str | None, report: Callable[[list[str]], object]) -> Repaired:
    """Writes the intact records to the target; without one, repairs the journal in place.

    A journal without findings is left as it is. `report` gets the findings before anything is written.
    """
    log = tools_for(directory)
    examined = Examined()
    survey = log.survey(examined)
    try:
        with log.writing() if target is None else contextlib.nullcontext():
            for _ in survey.read():
                pass
            report(survey.findings)
            jobs = examined.jobs_in(survey)
            aside: list[tuple[str, str]] = []
            if survey.findings:
                if target is None:
                    aside = log.mend(examined)
                else:
                    jobs = _rewritten(log, target)
    finally:
        survey.close()
    return Repaired(jobs, survey.findings, aside, survey.lost)


def _rewritten(log: LogTools, target: str) -> int:
    """Writes the intact records to the target. Returns the number of jobs."""
    examined = Examined()
    survey = log.survey(examined)
    try:
        copy = tools_for(target)
        copy.require_empty()
        with copy.writing():
            rewrite(survey, copy.builder())
        return examined.jobs_in(survey)
    finally:
        survey.close()
