"""The server's statistics in the shapes of the API (http/openapi.yaml), so that `--json` says the same either way.

This module must not send requests. Invariant: a fact that the server does not tell is left out, never made up; a
malformed number is an error.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from geventstalk.api_shapes import RATES, body_shape
from geventstalk.fields import COUNTS, FIELDS, NUMBER, SECONDS, SINCE
from geventstalk.filters import STATES
from geventstalk.remote.errors import Nonsense
from geventstalk.remote.protocol import Facts

Shape = dict[str, Any]

_TOTALS: Final = {"total-jobs": "put", "cmd-delete": "delete", "cmd-release": "release", "cmd-bury": "bury"}
_MEMORY: Final = {
    "max": "max_bytes",
    "bytes": "bytes",
    "jobs-on-disk": "jobs_on_disk",
    "bytes-on-disk": "bytes_on_disk",
    "loads": "loads",
    "puts-refused": "refused_puts",
}


def number(facts: Facts, key: str) -> int:
    """Returns a whole number of the statistics. Raises Nonsense."""
    text = facts.get(key, "")
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 20:
        raise Nonsense(f"the server's statistics have no number for {key}")
    return int(text)


def _figures(facts: Facts) -> Shape:
    """Returns the facts that geventstalk tells beyond beanstalkd: ages of the oldest jobs, quantiles of jobs' times,
    rates.
    """
    shape: Shape = {}
    if "oldest-ready-age" in facts:
        there = {state: number(facts, f"current-jobs-{state}") > 0 for state in STATES}
        shape["ages"] = {state: number(facts, f"oldest-{state}-age") if there[state] else None for state in STATES}
    if "queued-p50" in facts:
        # 0 stands for no job yet: the least time that is told is a microsecond.
        shape["latency"] = {
            part: {quantile: _decimal(facts, f"{part}-{quantile}") or None for quantile in ("p50", "p95", "p99")}
            for part in ("queued", "worked")
        }
    if "put-rate-1m" in facts:
        shape["rates"] = {
            event: {"m1": _decimal(facts, f"{event}-rate-1m"), "m15": _decimal(facts, f"{event}-rate-15m")}
            for event in RATES
        }
    return shape


def _decimal(facts: Facts, key: str) -> float:
    """Returns a number of the statistics. Raises Nonsense."""
    text = facts.get(key, "")
    if not text.isascii() or not text.replace(".", "", 1).isdecimal() or len(text) > 30:  # nan, inf, -1, 1e9
        raise Nonsense(f"the server's statistics have no number for {key}")
    return float(text)


def tube(facts: Facts, *, asker_in: str) -> Shape:
    """Returns a tube from its stats-tube, without the connection that asked, which uses and watches one tube."""
    shape: Shape = {"name": facts["name"], "jobs": _jobs(facts)}
    shape["totals"] = {name: number(facts, key) for key, name in _TOTALS.items() if key in facts}
    for key in ("using", "watching", "waiting"):
        asker = facts["name"] == asker_in and key != "waiting"
        shape[key] = max(0, number(facts, f"current-{key}") - asker)
    shape["paused_s"] = number(facts, "pause")
    shape["pause_left_s"] = number(facts, "pause-time-left")
    return shape | _figures(facts)


def server(facts: Facts) -> Shape:
    """Returns the server from its stats, without the connection that asked."""
    reserves = number(facts, "cmd-reserve") + number(facts, "cmd-reserve-with-timeout")
    totals = {name: number(facts, key) for key, name in _TOTALS.items()}
    shape: Shape = {
        "version": facts.get("version", ""),
        "pid": number(facts, "pid"),
        "hostname": facts.get("hostname", ""),
        "uptime_s": number(facts, "uptime"),
        "draining": facts.get("draining") == "true",
        "jobs": _jobs(facts),
        "totals": {**totals, "reserve": reserves, "timeout": number(facts, "job-timeouts")},
        "tubes": number(facts, "current-tubes"),
        "connections": {
            "open": max(0, number(facts, "current-connections") - 1),
            "producers": number(facts, "current-producers"),
            "workers": number(facts, "current-workers"),
            "waiting": number(facts, "current-waiting"),
            "total": number(facts, "total-connections"),
        },
        "max_job_bytes": number(facts, "max-job-size"),
    }
    if "build" in facts:
        shape["build"] = facts["build"]
    if "memory-max" in facts:
        shape["memory"] = {"bodies": {name: number(facts, f"memory-{key}") for key, name in _MEMORY.items()}}
    return shape | _figures(facts)


_TAGS: Final = (
    ("idp", "idempotency-key", "idempotency-ttl", "0"),
    ("grp", "group", "", ""),
    ("aft", "after-group", "", ""),
    ("con", "concurrency-key", "concurrency-limit", "1"),
    ("tries", "tries", "", ""),
    ("backoff", "backoff", "", ""),
    ("ttl", "time-to-live", "", ""),
    ("dead", "dead-letter", "", ""),
    ("from", "origin", "", ""),
    ("note", "note", "", ""),
)
"""Each tag, the keys of stats-job with its value and with a number behind that, and the number that is left out."""


def job(facts: Facts, body: bytes | None, most: int) -> Shape:
    """Returns a job from its stats-job, with at most `most` bytes of its body."""
    state = facts.get("state", "")
    shape: Shape = {"id": number(facts, "id"), "tube": facts.get("tube", ""), "state": state}
    for field in FIELDS:
        if field.in_stats and field.kind in (NUMBER, SECONDS, SINCE):
            shape[field.api] = max(0, number(facts, field.name))
    left = max(0, number(facts, "time-left"))
    shape["time_left_s"] = left if state in ("delayed", "reserved") else None
    shape["counts"] = {name: number(facts, name) for name in COUNTS}
    shape["tags"] = _tags(facts)
    if body is not None:
        shape["size"] = len(body)
        shape["body"] = body_shape(body, len(body), most)
    return shape


def _tags(facts: Facts) -> Shape | None:
    """Returns the tags of a job as the API has them; None for a job without."""
    if "tried" not in facts:
        return None
    words = []
    for tag, key, behind, default in _TAGS:
        value, more = facts.get(key, ""), facts.get(behind, default)
        if value not in ("", "0"):
            words.append(f"{tag}:{value}" if more == default else f"{tag}:{value}:{more}")
    reason = facts.get("reason", "none").replace('\\"', '"').replace("\\\\", "\\")
    return {"text": " ".join(words), "tried": number(facts, "tried"), "reason": None if reason == "none" else reason}


def checked_job(answer: Any) -> Shape:
    """Returns a job from an answer of the API. Raises Nonsense where a field that is shown is missing."""
    try:
        known = all(isinstance(answer[key], int) for key in ("id", "pri", "delay_s", "ttr_s", "size"))
        known &= isinstance(answer["age_s"], (int, float)) and isinstance(answer["body"]["whole"], bool)
        known &= isinstance(answer["time_left_s"], (int, float, type(None)))
        known &= isinstance(answer["tube"], str) and answer["state"] in STATES
        known &= all(isinstance(answer["counts"][name], int) for name in COUNTS)
        tags = answer["tags"]
        known &= tags is None or (isinstance(tags["text"], str) and isinstance(tags["tried"], int))
        known &= tags is None or isinstance(tags["reason"], (str, type(None)))
        body_bytes(answer["body"])
    except (KeyError, TypeError, ValueError, AttributeError):
        known = False
    if not known:
        raise Nonsense("what answers is not the API of geventstalk: a job of it is none")
    return dict(answer)


def body_bytes(shape: Mapping[str, Any]) -> bytes:
    data = str(shape["data"])
    return (
        base64.b64decode(data, validate=True)
        if shape["encoding"] == "base64"
        else data.encode("utf-8", "surrogatepass")
    )


def _jobs(facts: Facts) -> Shape:
    return {state: number(facts, f"current-jobs-{state}") for state in ("urgent", *STATES)}
