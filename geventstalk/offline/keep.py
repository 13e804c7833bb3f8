"""Keeps a journal: a copy of it while its server runs, and what is intact of a damaged one written anew.

It must not know the engine, gevent or SQLite. What is written is complete before anything refers to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from geventstalk.dsn import is_shared, without_password
from geventstalk.offline.inspect import survey_all
from geventstalk.offline.lines import examine
from journal import JournalLocked, tools_for
from journal.tools import LogTools, rewrite


class Copied(NamedTuple):
    """What a backup has, and what is wrong with it."""

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
    survey = survey_all(target)
    return Copied(segments, survey.keys, survey.findings)


class Repaired(NamedTuple):
    """How many jobs there are, what was wrong, what was set aside under which name, which jobs are known to be lost."""

    jobs: int
    findings: list[str]
    aside: list[tuple[str, str]]
    lost: list[int]


def repair(directory: str, target: str | None, report: Callable[[list[str]], object]) -> Repaired:
    """Writes what is intact to the target; without one, makes the damage good where it is.

    A journal without findings is left as it is. `report` is given the findings before anything is written.
    """
    log = tools_for(directory)
    survey = log.survey(examine)
    try:
        with log.writing() if target is None else contextlib.nullcontext():
            for _ in survey.read():
                pass
            report(survey.findings)
            jobs = survey.keys
            aside: list[tuple[str, str]] = []
            if survey.findings:
                jobs, aside = _repair_to(log, target)
    finally:
        survey.close()
    return Repaired(jobs, survey.findings, aside, survey.lost)


def _repair_to(log: LogTools, target: str | None) -> tuple[int, list[tuple[str, str]]]:
    """Returns how many jobs there are then, and what was set aside under which name."""
    if target is None:
        return log.mend(examine)
    survey = log.survey(examine)
    try:
        copy = tools_for(target)
        copy.require_empty()
        with copy.writing():
            rewrite(survey, copy.builder())
        return survey.keys, []
    finally:
        survey.close()
