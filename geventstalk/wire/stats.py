"""The statistics of a job, of a tube and of the server. Their keys stand in upstream's order.

This module must not change anything, and knows neither clients nor clocks.
Invariant: no number that is told is negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import mod, truediv
from typing import Final

from geventstalk._build import BUILD
from geventstalk.core.ages import NO_JOBS, Oldest
from geventstalk.core.engine import Engine
from geventstalk.core.figures import field_of, has_deadline, rates
from geventstalk.core.job import SECOND_NS, STATE_NAMES, Job, TaggedTally
from geventstalk.core.meter import EVENTS, PERCENTS, SPANS_S, quantiles
from geventstalk.core.rules import Group
from geventstalk.core.trail import EVENT_NAMES
from geventstalk.core.tube import Tube
from geventstalk.fields import FIELDS, SINCE, UNTIL, Field
from geventstalk.tags import REASONS, TOLD
from geventstalk.wire import protocol as p

_JOB_FIELDS: Final = [field for field in FIELDS if field.in_stats]


def job_stats(engine: Engine, job: Job, now_ns: int) -> list[tuple[str, object]]:
    return [
        ("id", job.id),
        ("tube", p.quoted(engine.tube_of(job).name)),
        ("state", STATE_NAMES[job.state]),
        *[(field.name, _told(job, field, now_ns)) for field in _JOB_FIELDS],
        *_tag_stats(job),
        *_events(engine, job, now_ns),
    ]


def _events(engine: Engine, job: Job, now_ns: int) -> list[tuple[str, object]]:
    """Returns the events of a job, where the policy of its tube keeps them: `put 9 s ago, reserved 2 s ago by 7`."""
    events = [] if engine.trails is None else engine.trails.events_of(job.id)
    told = []
    for each in events:
        by = f" by {each.client}" if each.client else ""
        told.append(f"{EVENT_NAMES[each.what]} {(now_ns - each.at_ns) // SECOND_NS} s ago{by}")
    return [("events", p.quoted(", ".join(told).encode()))] if told else []


def _tag_stats(job: Job) -> list[tuple[str, object]]:
    """Returns the last lines of stats-job for a job with tags. A tag that is not there is empty text, or 0."""
    tally = job.tally
    if not isinstance(tally, TaggedTally):
        return []
    tags = tally.tags
    return [
        ("idempotency-key", p.plain(tags.unique)),
        ("idempotency-ttl", tags.unique_s),
        ("group", p.plain(tags.group)),
        ("after-group", p.plain(tags.after)),
        ("concurrency-key", p.plain(tags.key)),
        ("concurrency-limit", tags.key_max),
        ("tries", tags.tries),
        ("tried", tally.tried),
        ("backoff", p.plain(b"" if tags.backoff is None else tags.backoff.text)),
        ("time-to-live", tags.ttl_s),
        ("dead-letter", p.plain(tags.dead)),
        ("origin", p.plain(tags.origin)),
        ("reason", p.spoken(tags.reason) if tally.why == TOLD else REASONS[tally.why]),
        ("note", p.plain(tags.note)),
    ]


def group_stats(group: Group) -> list[tuple[str, object]]:
    return [
        ("name", p.quoted(group.name)),
        ("pending", group.pending),
        ("buried", group.buried),
        ("complete", "false" if group.pending else "true"),
        ("waiting-jobs", len(group.waiting)),
    ]


def _told(job: Job, field: Field, now_ns: int) -> int:
    """A field as stats-job tells it: times in whole seconds."""
    if field.kind == UNTIL:
        return _seconds_until(job.rank, now_ns) if has_deadline(job) else 0
    value = field_of(job, field, now_ns)
    return value // SECOND_NS if field.kind == SINCE else value


def tube_stats(engine: Engine, tube: Tube, oldest: Oldest, now_ns: int) -> list[tuple[str, object]]:
    return [
        ("name", p.quoted(tube.name)),
        ("current-jobs-urgent", tube.urgent),
        ("current-jobs-ready", tube.ready_count()),
        ("current-jobs-reserved", tube.reserved),
        ("current-jobs-delayed", len(tube.delayed)),
        ("current-jobs-buried", len(tube.buried)),
        ("total-jobs", tube.total_jobs),
        ("current-using", tube.using),
        ("current-watching", len(tube.watchers)),
        ("current-waiting", engine.waiting_in(tube)),
        ("cmd-delete", tube.total_deletes),
        ("cmd-pause-tube", tube.total_pauses),
        ("pause", tube.pause_s),
        ("pause-time-left", _seconds_until(tube.paused_until_ns, now_ns)),
        *_figures(tube, oldest, now_ns),
    ]


def server_stats(
    engine: Engine,
    commands: list[tuple[str, int]],
    max_job_bytes: int,
    facts: Mapping[str, object],
    oldest: Oldest,
    now_ns: int,
) -> list[tuple[str, object]]:
    upstream: list[tuple[str, object]] = [
        ("current-jobs-urgent", engine.urgent_count),
        ("current-jobs-ready", engine.ready_count),
        ("current-jobs-reserved", engine.reserved_count),
        ("current-jobs-delayed", engine.delayed_count),
        ("current-jobs-buried", engine.buried_count),
        *commands,
        ("job-timeouts", engine.total_timeouts),
        ("total-jobs", engine.total_jobs),
        ("max-job-size", max_job_bytes),
        ("current-tubes", len(engine.tubes)),
        ("current-connections", len(engine.clients)),
        ("current-producers", engine.producer_count),
        ("current-workers", engine.worker_count),
        ("current-waiting", engine.waiting_count),
        ("total-connections", engine.total_clients),
        *[(key, p.quoted(facts[key])) for key in ("pid", "version", "rusage-utime", "rusage-stime")],
        ("uptime", max(0, now_ns - engine.started_ns) // SECOND_NS),
        *[(key, facts[key]) for key in _BINLOG_KEYS],
        ("draining", "true" if engine.draining else "false"),
        *[(key, p.quoted(facts[key])) for key in ("id", "hostname", "os", "platform")],
    ]
    known = {key for key, _ in upstream}
    ours = [(key, p.quoted(value)) for key, value in facts.items() if key not in known]
    return [*upstream, *_figures(engine, oldest, now_ns), *ours, ("build", BUILD)]


def _figures(of: Engine | Tube, oldest: Oldest, now_ns: int) -> list[tuple[str, object]]:
    """Returns the keys that stats and stats-tube share, behind upstream's."""
    values: list[object] = [*_NO_AGES]
    if oldest is not NO_JOBS:
        values = [0 if put_ns is None else max(0, now_ns - put_ns) // SECOND_NS for put_ns in oldest]
    for times in of.queued, of.worked:
        values += _NO_QUANTILES if times is None else map(truediv, quantiles(times.counts), _TO_SECONDS)
    values += rates(of, now_ns)
    return [*zip(_KEYS, map(mod, _FORMATS, values), strict=True)]


def _seconds_until(deadline_ns: int, now_ns: int) -> int:
    """Returns the whole seconds left; 0 for a deadline that has come and whose timer is still on its way.

    Commands that came together share one reading of the clock, but time passes between them. So right after
    `pause-tube a 10` there are 9 whole seconds left, as upstream says.
    """
    return max(0, deadline_ns - now_ns - 1) // SECOND_NS


_NO_AGES: Final = [0] * len(NO_JOBS)
_NO_QUANTILES: Final = [0] * len(PERCENTS)
_TO_SECONDS: Final = [SECOND_NS] * len(PERCENTS)
_AGES: Final = [f"oldest-{state}-age" for state in Oldest._fields]
_LATENCIES: Final = [f"{what}-p{percent}" for what in ("queued", "worked") for percent in PERCENTS]
_RATES: Final = [f"{event}-rate-{span_s // 60}m" for span_s in SPANS_S for event in EVENTS]
_KEYS: Final = (*_AGES, *_LATENCIES, *_RATES)
_FORMATS: Final = ["%d"] * len(_AGES) + ["%.6f"] * len(_LATENCIES) + ["%.3f"] * len(_RATES)
_BINLOG_KEYS: Final = (
    "binlog-oldest-index",
    "binlog-current-index",
    "binlog-records-migrated",
    "binlog-records-written",
    "binlog-max-size",
)
