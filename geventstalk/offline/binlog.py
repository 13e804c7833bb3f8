"""Reads beanstalkd's binlog: the bytes of its files in, jobs out. Version 7, and 5 of beanstalkd 1.4.6 and before.

This module must not know files or clocks: it takes bytes, and returns jobs with times in nanoseconds of the wall clock.
The jobs are those that beanstalkd would have after a restart, without its faults: a restart does not count as a
burying, and a torn rewrite of a job does not lose it. A torn record at the end of a file is normal after a crash
(`notes`); everything else that beanstalkd did not write is damage (`findings`), and the rest of that file is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from mmap import mmap
from struct import Struct
from typing import Final, NamedTuple

from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, SECOND_NS, U32_MAX, Job, Tally
from geventstalk.limits import TUBE_NAME_BYTES_MAX, is_tube_name

Data = bytes | mmap
ID_MAX: Final = 2**63 - 2
"""The largest id that an import takes. SQLite's integers end one later, so at least one more put finds an id."""
WALL_NS_MAX: Final = 8 * 10**18
"""The latest time that an import takes, in the year 2223. A put can name one 136 years from now, and 38 years are left
up to 2**63, by which the clock of a machine may be set wrong.
"""

_INVALID: Final = 0  # the state of a deleted job
_VERSION: Final = Struct("<i")
_CRLF: Final = b"\r\n"
_CHUNK: Final = 1 << 20


class _Layout(NamedTuple):
    """The record format of a version: length of the tube's name, the name, the fields, the body."""

    length: Struct
    fields: Struct
    unit_ns: int


_LAYOUTS: Final = {
    5: _Layout(Struct("<Q"), Struct("<QI4xqqi4xqq5IB"), 1000),
    7: _Layout(Struct("<i"), Struct("<QI4xqqi4xqq5IB3x"), 1),
}


class _Kept(NamedTuple):
    """A job without its body, and the place of its body."""

    job: Job
    tube: bytes
    data: Data
    body_at: int
    body_end: int


class _Torn(Exception):
    """The file ends within a record."""


class _Damaged(Exception):
    """These bytes are no record."""


class Binlog:
    """The jobs of all files. The files are read one after the other, in the order of their numbers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.findings: list[str] = []
        self.high_water = 0
        """The largest id in any record, also of jobs long gone."""
        self._kept: dict[int, _Kept] = {}  # in the order of their first records

    def __len__(self) -> int:
        return len(self._kept)

    def read(self, name: str, data: Data) -> None:
        """Reads one file. `name` is for messages; `data` must stay until jobs() has ended."""
        if len(data) < _VERSION.size or _zeros(data, 0):
            self.notes.append(f"{name} has no records yet")
            return
        (version,) = _VERSION.unpack_from(data)
        layout = _LAYOUTS.get(version)
        if layout is None:
            self.findings.append(f"{name} has format version {version}; 5 and 7 can be read")
            return
        at = _VERSION.size
        try:
            while not _zeros(data, at, layout.length.size + layout.fields.size):
                at = self._record(data, at, layout)
            if not _zeros(data, at):
                raise _Damaged("bytes follow behind the last record")
        except _Torn as error:
            self.notes.append(f"{name} ends in a torn record at byte {at} of {len(data)}: {error}")
        except _Damaged as error:
            if _is_last(data, at, layout):
                self.notes.append(f"{name} ends in a torn record at byte {at} of {len(data)}: {error}")
            else:
                self.findings.append(f"{name} is damaged at byte {at}: {error}; the rest of the file is not read")

    def jobs(self) -> Iterator[tuple[Job, bytes]]:
        """Yields every job with the name of its tube, in the order in which beanstalkd restores them; one body at a
        time.

        Buried jobs are numbered in that order, which is the order of their kicks.
        """
        buryings = 0
        for job, tube, data, at, end in self._kept.values():
            if job.state == BURIED:
                buryings += 1
                job.rank = buryings
            job.body = data[at:end]
            yield job, tube
            job.body = b""

    def _record(self, data: Data, at: int, layout: _Layout) -> int:
        """Reads the record at a place. Returns its end."""
        name = _name(data, at, layout)
        length = len(name)
        at += layout.length.size + length
        if len(data) - at < layout.fields.size:
            raise _Torn("the job is cut off")
        if _zeros(data, at, layout.fields.size) and _zeros(data, at):  # not written yet
            raise _Torn("the job is cut off")
        if length and not is_tube_name(name):
            raise _Damaged(f"a tube cannot be called {name!r}")
        job, state, size = _decode(data, at, layout)
        if length and state == _INVALID:
            raise _Damaged(f"job {job.id} is deleted, and its record has a body")
        at += layout.fields.size
        if length:
            _require_body(data, at, size, job.id)
        self.high_water = max(self.high_water, job.id)
        self._take(job, state, _Kept(job, name, data, at, at + size) if length else None, size)
        return at + size if length else at

    def _take(self, job: Job, state: int, whole: _Kept | None, size: int) -> None:
        known = self._kept.get(job.id)
        if state == _INVALID:
            self._kept.pop(job.id, None)
        elif whole is not None:
            self._kept[job.id] = whole if known is None else whole._replace(tube=known.tube)
        elif known is not None:
            if known.body_end - known.body_at != size:
                raise _Damaged(f"the body of job {job.id} changes its size")
            self._kept[job.id] = known._replace(job=job)
        # Else its whole record was in a file that is gone: the job was deleted, or comes again later.


def _name(data: Data, at: int, layout: _Layout) -> bytes:
    """Returns the name of the tube in the record at a place; empty for a record without a body."""
    if len(data) - at < layout.length.size:
        raise _Torn("the length of the tube's name is cut off")
    (length,) = layout.length.unpack_from(data, at)
    if not 0 <= length <= TUBE_NAME_BYTES_MAX:
        raise _Damaged(f"a tube's name cannot have {length} bytes")
    at += layout.length.size
    if len(data) < at + length:
        raise _Torn("the name of the tube is cut off")
    return data[at : at + length]


def _require_body(data: Data, at: int, size: int, id: int) -> None:
    is_whole = len(data) - at >= size and data[at + size - 2 : at + size] == _CRLF
    if not is_whole and _zeros(data, at + size):
        raise _Torn("the body of the job is cut off")
    if not is_whole:
        raise _Damaged(f"the body of job {id} does not end with CRLF")


def _is_last(data: Data, at: int, layout: _Layout) -> bool:
    """Returns whether there are only zeros behind the fields of the record at a place: it is the last one written."""
    (length,) = layout.length.unpack_from(data, at)
    at += layout.length.size
    if 0 <= length <= TUBE_NAME_BYTES_MAX:
        at += length + layout.fields.size
    return _zeros(data, at)


def _decode(data: Data, at: int, layout: _Layout) -> tuple[Job, int, int]:
    """Returns the job in the fields at a place, the state they name, and the size of the body with its CRLF."""
    id, pri, delay, ttr, size, created, deadline, *counts, state = layout.fields.unpack_from(data, at)
    if not id:
        raise _Damaged("a record has the id 0")
    if state not in (_INVALID, READY, RESERVED, BURIED, DELAYED):
        raise _Damaged(f"job {id} has the unknown state {state}")
    delay_s, ttr_s = delay * layout.unit_ns // SECOND_NS, ttr * layout.unit_ns // SECOND_NS
    bounds = (
        (created * layout.unit_ns, WALL_NS_MAX), (deadline * layout.unit_ns, WALL_NS_MAX),
        (delay_s, U32_MAX), (ttr_s, U32_MAX), (id, ID_MAX),
    )  # fmt: skip
    if size < len(_CRLF) or not all(0 <= value <= most for value, most in bounds):
        raise _Damaged(f"job {id} has an id, a time or a size that no job can have")
    job = Job(id, 0, pri, delay_s, max(1, ttr_s))
    job.created_ns = created * layout.unit_ns
    job.state = READY if state == RESERVED else state
    if state == DELAYED:
        job.rank = deadline * layout.unit_ns
    if any(counts):
        job.tally = Tally(*counts)
    return job, state, size


def _zeros(data: Data, at: int, size: int | None = None) -> bool:
    """Returns whether there are only zeros from a place on, or up to the end of the data, or nothing at all."""
    end = len(data) if size is None else min(len(data), at + size)
    while at < end:
        upto = min(end, at + _CHUNK)
        if data[at:upto].count(0) != upto - at:
            return False
        at = upto
    return True
