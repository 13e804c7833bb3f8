"""The table of a job's fields: whatever tells of jobs, or chooses them, knows all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from geventstalk.core.engine import Engine
from geventstalk.core.job import Job, Tally
from geventstalk.durable.export import fields_of
from geventstalk.fields import COUNT, FIELDS, Field
from geventstalk.filters import NUMBERS, parse
from geventstalk.http.api import console, document
from geventstalk.http.matcher import Matcher
from geventstalk.wire.stats import job_stats

NOW_NS = 10**12


def job_with(field: Field, value: int) -> tuple[Engine, Job]:
    """An engine, and a reserved job of it with this value in the field's source."""
    engine = Engine(NOW_NS)
    job = Job(1, engine.default.number, 0, 0, 0)
    job.state, job.body, job.tally = 2, b"\r\n", Tally()
    setattr(job.tally if field.kind == COUNT else job, field.source, value)
    return engine, job


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_is_known_wherever_jobs_are_told_of_or_chosen(field: Field) -> None:
    engine, job = job_with(field, 7)
    told = dict(job_stats(engine, job, NOW_NS))
    assert (field.name in told) == field.in_stats
    assert (field.name in NUMBERS) == bool(field.says)
    if field.kind == COUNT:
        assert told[field.name] == fields_of(job, b"t", lambda ns: ns)[field.name] == 7
    shape = document.load()["components"]["schemas"]["Job"]["properties"]
    assert field.api in (shape["counts"]["properties"] if field.kind == COUNT else shape)
    assert (field.name in keys_of_the_console()) == bool(field.says)


def keys_of_the_console() -> dict[str, dict[str, Any]]:
    files = console.load()
    file = files.find(files.folder, "keys.js")
    assert file is not None
    keys: dict[str, dict[str, Any]] = json.loads(file.plain.partition(b" = ")[2].rstrip(b";\n"))
    return keys


def test_the_console_suggests_values_that_filters_take() -> None:
    for key, about in keys_of_the_console().items():
        for value in about["tries"]:
            parse(f"{key}{value}" if about["number"] else f"{key}:{value}")


@pytest.mark.parametrize("field", [field for field in FIELDS if field.says], ids=lambda field: field.name)
def test_a_filter_reads_the_field_itself(field: Field) -> None:
    for value, fits in ((NOW_NS, False), (5, True)) if field.source.endswith("_ns") else ((5, False), (9, True)):
        engine, job = job_with(field, value)
        assert (Matcher(parse(f"{field.name}>7"), engine, NOW_NS).sift([job]) == [job]) == fits
