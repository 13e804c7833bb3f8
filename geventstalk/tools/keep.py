"""Keeps a journal: a copy of it while its server runs, and what is intact of a damaged one written anew.

It must not know the engine, gevent or SQLite. What is written is complete before anything refers to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from geventstalk.tools.inspect import open_survey, survey_all
from journal.errors import JournalLocked
from journal.sqlite import survey as tools
from journal.sqlite.directory import require_readable, writing
from journal.sqlite.files import ASIDE_SUFFIX
from journal.sqlite.survey import Builder, list_segments, mend, next_number, require_empty, rewrite

__all__ = ["ASIDE_SUFFIX", "Copied", "Repaired", "backup", "repair"]


class Copied(NamedTuple):
    """What a backup has, and what is wrong with it."""

    segments: int
    jobs: int
    findings: list[str]


def backup(directory: str, target: str) -> Copied:
    """Copies a journal, also while its server runs, to a new or empty directory, and checks the copy."""
    require_readable(directory)
    if not list_segments(directory):
        raise JournalLocked(f"{directory} has no journal in it")
    require_empty(target)
    with writing(target):
        segments = tools.backup(directory, target)
    survey = survey_all(target)
    return Copied(segments, survey.keys, survey.findings)


class Repaired(NamedTuple):
    """How many jobs there are, what was wrong, which segments were set aside, and which jobs are known to be lost."""

    jobs: int
    findings: list[str]
    aside: list[str]
    lost: list[int]


def repair(directory: str, target: str | None, report: Callable[[list[str]], object]) -> Repaired:
    """Writes what is intact to the target; without one, makes the damage good where it is.

    A journal without findings is left as it is. `report` is given the findings before anything is written.
    """
    survey = open_survey(directory)
    try:
        with writing(directory) if target is None else contextlib.nullcontext():
            for _ in survey.read():
                pass
            report(survey.findings)
            jobs = survey.keys
            aside: list[str] = []
            if survey.findings:
                jobs, aside = _repair_to(directory, target)
    finally:
        survey.close()
    return Repaired(jobs, survey.findings, aside, survey.lost)


def _repair_to(directory: str, target: str | None) -> tuple[int, list[str]]:
    """Returns how many jobs there are then, and which segments were set aside."""
    survey = open_survey(directory)
    try:
        if target is not None:
            require_empty(target)
            with writing(target):
                rewrite(survey, Builder(target))
            return survey.keys, []
        oldest = min((number for number, _ in list_segments(directory)), default=0)
        aside = mend(survey, Builder(directory, first=next_number(directory), oldest=oldest))
        return survey.keys, aside
    finally:
        survey.close()
