"""Moves jobs in and out: from a journal to JSON lines, and to a journal from those or from beanstalkd's binlog.

It must not know the engine, gevent or SQLite. An import is all or nothing, and only into a journal without jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Final, NamedTuple

from geventstalk.core.job import DELETED, Job
from geventstalk.durable.export import header_of_export
from geventstalk.durable.records import encode_whole
from geventstalk.offline.binlog import ID_MAX, Binlog
from geventstalk.offline.inspect import open_survey, survey_all
from geventstalk.offline.lines import (
    HEADER_BYTES_MAX,
    LINE_BYTES_MAX,
    WALL,
    Examined,
    Unreadable,
    export_of,
    header_of,
    job_of,
)
from journal import JournalDamaged, JournalLocked, tools_for

_BINLOG_NAME: Final = re.compile(r"binlog\.(\d{1,18})")
_BINLOG_LOCK: Final = "lock"
"""beanstalkd locks this file while it runs."""


class Imported(NamedTuple):
    """The number of jobs and of files, and the next id."""

    jobs: int
    next_id: int
    files: int = 0

    @property
    def what_follows(self) -> str:
        """Returns a sentence with the id of the next put."""
        if self.next_id > ID_MAX + 1:
            return "no id is left, and every put will be refused"
        return f"the next id is {self.next_id}"


def export(directory: str, judge: Callable[[list[str]], None]) -> Iterator[dict[str, object]]:
    """Yields the header, then each job, as objects. `judge` gets the findings before that, and may raise."""
    survey = open_survey(directory, Examined())
    try:
        found = survey.live_records()
        first = next(found, None)
        judge(survey.findings)
        yield header_of_export(survey.keys, survey.used_keys)
        if first is not None:
            yield export_of(*first)
        for record, change in found:
            yield export_of(record, change)
    finally:
        survey.close()


def import_lines(stream: IO[bytes], directory: str) -> Imported:
    """Reads the output of `export` into a journal that has no jobs yet."""
    header = stream.readline(HEADER_BYTES_MAX + 1)
    if len(header) > HEADER_BYTES_MAX:
        raise Unreadable("line 1: not the first line of an export: it has no end")
    expected, high_water = header_of(header)
    jobs = (job_of(line, number) for number, line in enumerate(_lines(stream), 2))
    return Imported(*_fill(directory, jobs, high_water, expected))


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    number = 1
    while line := stream.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise Unreadable(f"line {number}: longer than {LINE_BYTES_MAX} bytes, which no job is")
        yield line


def import_binlog(binlogs: str, directory: str, judge: Callable[[list[str], list[str]], None]) -> Imported:
    """Reads the binlog of a beanstalkd that is stopped into a journal that has no jobs yet.

    `judge` gets the notes and the findings before anything is written, and may raise.
    """
    with contextlib.ExitStack() as held:
        _lock_binlog(binlogs, held)
        files = _binlog_files(binlogs)
        log = Binlog()
        before = files[0][0]
        for number, path in files:
            if number > before + 1:
                log.findings.append(f"binlog.{before + 1} is missing")
            before = number
            log.read(os.path.basename(path), _map(path, held))
        judge(log.notes, log.findings)
        if log.high_water > ID_MAX:
            raise JournalDamaged(f"the highest id is {log.high_water}; ids end at {ID_MAX}, and nothing was imported")
        count, next_id = _fill(directory, log.jobs(), log.high_water, len(log))
    return Imported(count, next_id, len(files))


def _lock_binlog(directory: str, held: contextlib.ExitStack) -> None:
    """Keeps beanstalkd from starting on the directory meanwhile. Raises JournalLocked when one runs on it."""
    path = os.path.join(directory, _BINLOG_LOCK)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # a copy of the files alone
    except OSError as error:
        raise JournalLocked(f"cannot open {path}: {error.strerror}") from error
    held.callback(os.close, file)
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        raise JournalLocked(f"{directory} is in use by another process: stop beanstalkd first") from error


def _binlog_files(directory: str) -> list[tuple[int, str]]:
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise JournalLocked(f"cannot use binlog directory {directory}: {error.strerror}") from error
    found = sorted((int(match[1]), name) for name in names if (match := _BINLOG_NAME.fullmatch(name)))
    if not found:
        raise JournalLocked(f"{directory} has no binlog in it")
    return [(number, os.path.join(directory, name)) for number, name in found]


def _map(path: str, held: contextlib.ExitStack) -> bytes | mmap.mmap:
    """Maps the file's content, which is not read into memory."""
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise JournalDamaged(f"{path} is not a file")
        if not facts.st_size:
            return b""  # which cannot be mapped
        return held.enter_context(contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


def _fill(directory: str, jobs: Iterable[tuple[Job, bytes]], high_water: int, expected: int | None) -> tuple[int, int]:
    """Writes jobs to a journal that has none, all or nothing. Returns their number, and the next id."""
    log = tools_for(directory)
    with log.writing():
        if log.exists():
            high_water = max(high_water, _require_no_jobs(directory))
        builder = log.builder(high_water)
        ids: set[int] = set()
        marks = 0
        try:
            for job, name in jobs:
                if job.id in ids:
                    raise Unreadable(f"job {job.id} comes twice")
                ids.add(job.id)
                marks += job.state == DELETED
                builder.append(job.id, encode_whole(job, name, WALL))
            if expected is not None and len(ids) != expected:
                raise Unreadable(f"the first line announces {expected} jobs, and {len(ids)} follow")
            builder.finish()
        except BaseException:
            builder.discard()
            raise
    return len(ids) - marks, builder.high_water + 1


def _require_no_jobs(directory: str) -> int:
    """Raises JournalLocked when a journal has jobs. Returns the highest id it ever had."""
    examined = Examined()
    survey = survey_all(directory, examined)
    if survey.findings:
        raise JournalDamaged(f"the journal in {directory} is damaged: {survey.findings[0]}")
    if survey.keys:
        jobs = examined.jobs_in(survey)
        what = f"{jobs} jobs" if jobs else "settings or unique keys"
        raise JournalLocked(f"the journal in {directory} has {what} already")
    return survey.high_water
