"""Counts and measurements of the engine, for statistics, metrics and the API.

This module must not change anything that can be seen, and knows neither clocks nor formats.
Invariant: no reading takes longer than its docstring says, however much there is to read.
"""

from __future__ import annotations

from typing import NamedTuple

from geventstalk.core.engine import Engine
from geventstalk.core.job import DELAYED, RESERVED, Job
from geventstalk.core.meter import NO_RATES
from geventstalk.core.state import events
from geventstalk.core.tube import Tube
from geventstalk.fields import COUNT, SINCE, UNTIL, Field


class Totals(NamedTuple):
    """Counts of what happened to jobs, since the server or the tube began."""

    put: int
    reserve: int
    delete: int
    release: int
    bury: int
    kick: int
    timeout: int


def has_deadline(job: Job) -> bool:
    """Returns whether a job waits for the end of its delay or of its ttr."""
    return job.state == RESERVED or job.state == DELAYED


def field_of(job: Job, field: Field, now_ns: int) -> int:
    """Returns a field of a job; times that pass are in nanoseconds, and never negative."""
    if field.kind == COUNT:
        return 0 if job.tally is None else int(getattr(job.tally, field.source))
    value = int(getattr(job, field.source))
    if field.kind == SINCE:
        return max(0, now_ns - value)
    if field.kind == UNTIL:
        return max(0, value - now_ns) if has_deadline(job) else 0
    return value


def rates(of: Engine | Tube, now_ns: int) -> list[float]:
    """Returns how many of each of meter.EVENTS come in a second: over one minute, then over fifteen."""
    return NO_RATES if of.rates is None else of.rates.now(events(of), now_ns)


def totals(of: Engine | Tube) -> Totals:
    """Returns those of the server, with former tubes, or of one tube. O(1)."""
    queued = of.queued
    return Totals(
        of.total_jobs,
        of.reserved_unready + (0 if queued is None else queued.count()),
        of.total_deletes,
        of.total_releases,
        of.total_buries,
        of.total_kicks,
        of.total_timeouts,
    )
