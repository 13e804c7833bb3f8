"""The commands beside the server: look at a journal, back it up, repair it, move jobs in and out.

It must not know the engine, gevent or SQLite. What only reads takes no lock and changes no record; what writes holds
the lock of the directory that it writes to. Exit codes: 0 fine, 1 damage or failure, 5 usage, 10 a directory that is
missing, locked or not to be used; 128 and the number of a signal that ended it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import mmap
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import IO, Any, Final, NoReturn

import click
import yaml

from geventstalk.core.job import BURIED, DELAYED, READY, STATE_NAMES, U32_MAX, Job, Tally
from geventstalk.durable.records import Epoch, apply_change, decode_whole, encode_whole
from geventstalk.tools.binlog import TUBE_NAME, Binlog
from journal.errors import JournalDamaged, JournalError, JournalLocked
from journal.sqlite.files import fsync_path
from journal.sqlite.format import CHANGE, FULL
from journal.sqlite.lock import LOCK_NAME, DirectoryLock
from journal.sqlite.replay import Record
from journal.sqlite.tools import (
    Builder,
    Survey,
    backup,
    every_record,
    list_segments,
    next_number,
    require_empty,
    rewrite,
    set_aside,
    strangers,
)

COMMANDS: Final = ("journal", "import-binlog", "export", "import")
"""The first words of a command line that belong to main()."""
EXIT_DAMAGE: Final = 1
EXIT_USAGE: Final = 5
EXIT_DIRECTORY: Final = 10
EXPORT_FORMAT: Final = "geventstalk-jobs"
EXPORT_VERSION: Final = 1

_WALL: Final = Epoch(0, 0)
"""Nothing is timed here: the journal's wall clock stays what it is."""
_CRLF: Final = b"\r\n"
_I64_MAX: Final = 2**63 - 1
_BINLOG_NAME: Final = re.compile(r"binlog\.(\d{1,18})")
_COUNTS: Final = ("reserves", "timeouts", "releases", "buries", "kicks")
_STATES: Final = {STATE_NAMES[state]: state for state in (READY, DELAYED, BURIED)}


class _Stopped(BaseException):
    """A signal asked for the end; what was begun is cleared away on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Unreadable(Exception):
    """What was given to `import` is no export."""


def main(arguments: list[str]) -> int:
    """Runs one of the commands with these words, the first of them one of COMMANDS. Returns the exit code."""
    try:
        with _signals():
            _allow_many_files()
            code = _group.main(arguments, prog_name="geventstalk", standalone_mode=False)
            sys.stdout.flush()
            return int(code or 0)
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_USAGE)
    except JournalLocked as error:
        return _fail(str(error), EXIT_DIRECTORY)
    except (JournalError, _Unreadable) as error:
        return _fail(str(error), EXIT_DAMAGE)
    except BrokenPipeError:
        # Nobody reads any more. What Python still holds for stdout must not fail a second time at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DAMAGE
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"{error.strerror or error}{where}", EXIT_DAMAGE)
    except _Stopped as stopped:
        return 128 + stopped.number
    except Exception as error:  # whatever it is, its user gets one line
        return _fail(f"unexpected error: {type(error).__name__}: {error}", EXIT_DAMAGE)


@click.group(name="geventstalk", no_args_is_help=False)
def _group() -> None:
    """Tools around the journal. Without one of these commands, geventstalk is the server."""


@_group.group(name="journal", no_args_is_help=False)
def _journal() -> None:
    """Look at a journal, back it up, repair it."""


# --- journal check, dump, stats


@_journal.command(name="check")
@click.argument("directory", metavar="DIR")
def _check(directory: str) -> int:
    """Read all of a journal, and say what is wrong with it."""
    survey = Survey(directory, _examine)
    try:
        for _ in survey.read():
            pass
    finally:
        survey.close()
    for finding in survey.findings:
        click.echo(f"finding: {finding}")
    for facts in survey.segments:
        if facts.torn_bytes:
            click.echo(f"note: {facts.path} ends in a torn write of {facts.torn_bytes} bytes, which nobody was told of")
    for name, what in strangers(directory):
        click.echo(f"note: {name} {what}")
    records = sum(facts.records for facts in survey.segments)
    counts = f"{len(survey.segments)} segments, {records} records, {survey.keys} jobs"
    click.echo(f"{counts}, {len(survey.findings)} findings")
    return EXIT_DAMAGE if survey.findings else 0


@_journal.command(name="dump")
@click.option("--bodies/--no-bodies", default=True, help="Whether the jobs' bodies are shown, in base64.")
@click.argument("directory", metavar="DIR")
def _dump(directory: str, bodies: bool) -> int:
    """Print every record, dead ones too, in the order they were written: one JSON object a line."""
    findings: list[str] = []
    with _output() as write:
        for seq, record in every_record(directory, findings.append):
            facts: dict[str, object] = {"segment": record.segment, "seq": seq, "id": record.key}
            try:
                facts |= _facts_of(record, bodies)
            except ValueError as error:
                findings.append(f"segment {record.segment}: record {seq} is not a job's: {error}")
                continue
            write(facts)
    return _report(findings)


@_journal.command(name="stats")
@click.argument("directory", metavar="DIR")
def _stats(directory: str) -> int:
    """Print what a journal consists of, as YAML: segments, live and dead bytes, jobs by tube and state."""
    survey = Survey(directory, _examine)
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
        "live-bytes": survey.live.total_bytes,
        "dead-bytes": max(0, size - survey.live.total_bytes),
        "jobs": survey.keys,
        "highest-id": survey.high_water,
        "tubes": {
            name.decode("ascii", "backslashreplace"): {names[state]: counts[state] for state in names}
            for name, counts in sorted(tubes.items())
        },
    }
    click.echo(yaml.safe_dump(summary, sort_keys=False), nl=False)
    return _report(survey.findings)


def _count(records: Iterable[Record]) -> dict[bytes, dict[int, int]]:
    """How many jobs each tube has in each state. About 100 bytes a live job."""
    tubes: list[bytes] = []
    number_of: dict[bytes, int] = {}
    places: dict[int, int] = {}
    dummy = Job(0, 0, 0, 0, 0)
    for record in records:
        if record.kind == FULL:
            job, name = decode_whole(record.key, record.payload, _WALL)
            number = number_of.setdefault(name, len(tubes))
            if number == len(tubes):
                tubes.append(name)
            places[record.key] = number << 8 | job.state
        elif record.kind == CHANGE:
            apply_change(dummy, record.payload, _WALL)
            places[record.key] = places[record.key] & ~0xFF | dummy.state
        else:
            places.pop(record.key, None)
    counts: dict[bytes, dict[int, int]] = {}
    for place in places.values():
        of_tube = counts.setdefault(tubes[place >> 8], {READY: 0, DELAYED: 0, BURIED: 0})
        of_tube[place & 0xFF] += 1
    return counts


# --- journal backup, repair


@_journal.command(name="backup")
@click.argument("directory", metavar="DIR")
@click.argument("target", metavar="TARGET")
def _backup(directory: str, target: str) -> int:
    """Copy a journal, also while its server runs, to a new or empty directory, and check the copy."""
    if not list_segments(directory):
        raise JournalLocked(f"{directory} has no journal in it")
    require_empty(target)
    with _writing(target):
        segments = backup(directory, target)
    survey = Survey(target, _examine)
    try:
        for _ in survey.read():
            pass
    finally:
        survey.close()
    click.echo(f"copied {segments} segments with {survey.keys} jobs to {target}")
    return _report(survey.findings)


@_journal.command(name="repair")
@click.option("--in-place", is_flag=True, help="Write to DIR itself, and set its segments aside there.")
@click.argument("directory", metavar="DIR")
@click.argument("target", metavar="[TARGET]", required=False)
def _repair(directory: str, target: str | None, in_place: bool) -> int:
    """Write what is intact in a damaged journal to TARGET, a new or empty directory. DIR is not changed."""
    if (target is None) != in_place:
        raise click.UsageError("give a TARGET, or --in-place")
    survey = Survey(directory, _examine)
    try:
        with _writing(directory) if target is None else contextlib.nullcontext():
            for _ in survey.read():
                pass
            _report(survey.findings)
            if not survey.findings:
                click.echo(f"nothing to repair: {survey.keys} jobs")
                return 0
            keys = _repair_to(directory, target)
    finally:
        survey.close()
    click.echo(f"wrote {keys} jobs to {target or directory}")
    return 0


def _repair_to(directory: str, target: str | None) -> int:
    survey = Survey(directory, _examine)
    try:
        if target is not None:
            require_empty(target)
            with _writing(target):
                rewrite(survey, Builder(target))
            return survey.keys
        segments = list_segments(directory)
        rewrite(survey, Builder(directory, first=next_number(directory)))
        set_aside([path for _, path in segments])
        return survey.keys
    finally:
        survey.close()


# --- export, import


@_group.command(name="export")
@click.option("--accept-damage", is_flag=True, help="Export what is intact in a damaged journal.")
@click.argument("directory", metavar="DIR")
def _export(directory: str, accept_damage: bool) -> int:
    """Print every job as a JSON object, one a line, behind a line that says how many there are."""
    survey = Survey(directory, _examine)
    try:
        found = survey.live_records()
        first = next(found, None)
        _refuse_damage(survey.findings, accept_damage)
        with _output() as write:
            write(
                {
                    "format": EXPORT_FORMAT,
                    "version": EXPORT_VERSION,
                    "jobs": survey.keys,
                    "highest_id": survey.used_keys,
                }
            )
            if first is not None:
                write(_export_of(*first))
            for record, change in found:
                write(_export_of(record, change))
    finally:
        survey.close()
    return 0


@_group.command(name="import")
@click.argument("directory", metavar="DIR")
def _import(directory: str) -> int:
    """Read what `export` printed from standard input into a journal that has no jobs yet."""
    lines = enumerate(sys.stdin.buffer, 1)
    expected, high_water = _header_of(next(lines, (1, b""))[1])
    jobs = (_job_of(line, number) for number, line in lines)
    count, next_id = _fill(directory, jobs, high_water, expected)
    click.echo(f"imported {count} jobs into {directory}; the next id is {next_id}")
    return 0


def _header_of(line: bytes) -> tuple[int | None, int]:
    """How many jobs follow, None when it does not say, and the highest id there ever was."""
    try:
        header = json.loads(line)
        if header["format"] != EXPORT_FORMAT:
            raise ValueError(f"format {header['format']}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _Unreadable(f"line 1: not the first line of an export: {error}") from error
    if header.get("version") != EXPORT_VERSION:
        raise _Unreadable(f"line 1: version {header.get('version')} of an export; {EXPORT_VERSION} can be read")
    jobs = None if header.get("jobs") is None else _number(header, "jobs", _I64_MAX, 1)
    return jobs, _number(header, "highest_id", _I64_MAX, 1, 0)


def _job_of(line: bytes, number: int) -> tuple[Job, bytes]:
    """The job in a line, and the name of its tube. Raises _Unreadable."""
    try:
        fields = json.loads(line)
        name = fields["tube"].encode("ascii")
        state = _STATES[fields.get("state", "ready")]
        body = base64.b64decode(fields["body"], validate=True)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _Unreadable(f"line {number}: not a job: {type(error).__name__}: {error}") from error
    if not TUBE_NAME.fullmatch(name):
        raise _Unreadable(f"line {number}: no name for a tube: {name!r}")

    def of(key: str, most: int = U32_MAX, default: int | None = 0) -> int:
        return _number(fields, key, most, number, default)

    job = Job(of("id", _I64_MAX, None), 0, of("pri"), of("delay"), of("ttr", default=None))
    if not job.id:
        raise _Unreadable(f"line {number}: 0 is no id")
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
        raise _Unreadable(f"line {line}: {key} is no number from 0 to {most}")
    return value


def _export_of(record: Record, change: bytes | None) -> dict[str, object]:
    job, name = decode_whole(record.key, record.payload, _WALL)
    if change is not None:
        apply_change(job, change, _WALL)
    return {
        "id": job.id,
        "tube": name.decode("ascii"),
        **_changeable(job),
        "ttr": job.ttr_s,
        "created_ns": job.created_ns,
        "body": _text_of(job),
    }


# --- import-binlog


@_group.command(name="import-binlog")
@click.option("--accept-damage", is_flag=True, help="Import what can be read of a damaged binlog.")
@click.argument("binlog_directory", metavar="BINLOGDIR")
@click.argument("directory", metavar="DIR")
def _import_binlog(binlog_directory: str, directory: str, accept_damage: bool) -> int:
    """Read the binlog of a beanstalkd that is stopped into a journal that has no jobs yet."""
    if os.path.exists(directory) and os.path.exists(binlog_directory) and os.path.samefile(binlog_directory, directory):
        raise click.UsageError("BINLOGDIR and DIR are the same directory")
    with contextlib.ExitStack() as held:
        _lock_binlog(binlog_directory, held)
        files = _binlog_files(binlog_directory)
        log = Binlog()
        before = files[0][0]
        for number, path in files:
            if number > before + 1:
                log.findings.append(f"binlog.{before + 1} is missing")
            before = number
            log.read(os.path.basename(path), _map(path, held))
        for note in log.notes:
            click.echo(f"note: {note}", err=True)
        _refuse_damage(log.findings, accept_damage)
        count, next_id = _fill(directory, log.jobs(), log.high_water, len(log))
    click.echo(f"imported {count} jobs from {len(files)} files into {directory}; the next id is {next_id}")
    return 0


def _lock_binlog(directory: str, held: contextlib.ExitStack) -> None:
    """Keeps beanstalkd from starting on the directory while it is read. Raises JournalLocked when one runs on it."""
    path = os.path.join(directory, LOCK_NAME)
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
    """The file's content, without reading it into memory."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return b""  # which cannot be mapped
        return held.enter_context(contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


# --- what several of them do


def _fill(directory: str, jobs: Iterable[tuple[Job, bytes]], high_water: int, expected: int | None) -> tuple[int, int]:
    """Writes jobs to a journal that has none, all or nothing. Returns how many, and the next id."""
    with _writing(directory):
        if list_segments(directory):
            high_water = max(high_water, _require_no_jobs(directory))
        builder = Builder(directory, first=next_number(directory), high_water=high_water)
        ids: set[int] = set()
        try:
            for job, name in jobs:
                if job.id in ids:
                    raise _Unreadable(f"job {job.id} is there twice")
                ids.add(job.id)
                builder.append(job.id, encode_whole(job, name, _WALL))
            if expected is not None and len(ids) != expected:
                raise _Unreadable(f"there are {len(ids)} jobs where {expected} were announced")
            builder.finish()
        except BaseException:
            builder.discard()
            raise
    return len(ids), builder.high_water + 1


def _require_no_jobs(directory: str) -> int:
    """Raises JournalLocked when a journal has jobs. Returns the highest id it ever had."""
    survey = Survey(directory, _examine)
    try:
        for _ in survey.read():
            pass
    finally:
        survey.close()
    if survey.findings:
        raise JournalDamaged(f"the journal in {directory} is damaged: {survey.findings[0]}")
    if survey.keys:
        raise JournalLocked(f"the journal in {directory} has {survey.keys} jobs already")
    return survey.high_water


@contextlib.contextmanager
def _writing(directory: str) -> Iterator[None]:
    """Holds a directory's lock. A directory that was made for this goes again when it fails."""
    lock = DirectoryLock(directory)
    try:
        yield
        fsync_path(os.path.dirname(os.path.abspath(directory)))
    except BaseException:
        if lock.created:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, LOCK_NAME))
                os.rmdir(directory)
        raise
    finally:
        lock.close()


def _examine(record: Record) -> None:
    """Raises ValueError when a record is not a job's."""
    if record.kind == FULL:
        decode_whole(record.key, record.payload, _WALL)
    elif record.kind == CHANGE:
        apply_change(Job(0, 0, 0, 0, 0), record.payload, _WALL)


def _facts_of(record: Record, bodies: bool) -> dict[str, object]:
    if record.kind == FULL:
        job, name = decode_whole(record.key, record.payload, _WALL)
        facts = {"kind": "whole", "tube": name.decode("ascii", "backslashreplace"), **_changeable(job)}
        facts |= {"ttr": job.ttr_s, "created_ns": job.created_ns, "size": len(job.body) - len(_CRLF)}
        return {**facts, "body": _text_of(job)} if bodies else facts
    if record.kind == CHANGE:
        job = Job(record.key, 0, 0, 0, 0)
        apply_change(job, record.payload, _WALL)
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


def _refuse_damage(findings: list[str], accept: bool) -> None:
    _report(findings)
    if findings and not accept:
        raise JournalDamaged(f"{len(findings)} findings; nothing was written, --accept-damage takes what is intact")


def _report(findings: list[str]) -> int:
    """Says what was found, on stderr. Returns the exit code for it."""
    for finding in findings:
        click.echo(f"finding: {finding}", err=True)
    return EXIT_DAMAGE if findings else 0


@contextlib.contextmanager
def _output() -> Iterator[Callable[[dict[str, object]], None]]:
    """A function that writes an object as a line of JSON to stdout."""
    stream: IO[str] = sys.stdout
    encode = json.JSONEncoder(separators=(",", ":")).encode

    def write(facts: dict[str, object]) -> None:
        stream.write(encode(facts) + "\n")

    yield write
    stream.flush()


def _fail(text: str, code: int) -> int:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"geventstalk: {line}\n")
        sys.stderr.flush()
    return code


def _allow_many_files() -> None:
    """A snapshot holds every segment open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Within, a signal to stop ends the command with its clean-up; one that the server would take for drain, too."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        raise _Stopped(number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
