"""Metrics: each statistic of the protocol under its name, histograms against what really happened, and promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from geventstalk.config import Settings
from geventstalk.core.meter import BOUNDS_NS
from geventstalk.http.access import Who
from tests.support.clock import ManualClock
from tests.support.process import ROOT, ServerProcess, free_port
from tests.support.web import Inside, Web, puts
from tests.support.wire import Client

Key = tuple[str, frozenset[tuple[str, str]]]

DOCS = ROOT / "docs" / "metrics.md"
BOUNDS = ("--max-journal-bytes", "20000000", "--max-memory", "1000000")
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
NOT_TOLD = {"features", "tags", "pid", "version", "id", "hostname", "os", "platform", "build", "name"}
"""Keys of statistics that are no figures. Version and build are labels of geventstalk_build_info."""
NAMES = {
    "job-timeouts": "beanstalkd_job_timeouts_total",
    "total-jobs": "beanstalkd_jobs_total",
    "max-job-size": "beanstalkd_max_job_size_bytes",
    "total-connections": "beanstalkd_connections_total",
    "uptime": "beanstalkd_uptime_seconds",
    "rusage-utime": "process_cpu_seconds_total",
    "rusage-stime": "process_cpu_seconds_total",
    "binlog-records-migrated": "beanstalkd_binlog_records_migrated_total",
    "binlog-records-written": "beanstalkd_binlog_records_written_total",
    "binlog-max-size": "beanstalkd_binlog_max_size_bytes",
}
TUBE_NAMES = {
    "total-jobs": "beanstalkd_tube_jobs_total",
    "pause": "beanstalkd_tube_pause_seconds",
    "pause-time-left": "beanstalkd_tube_pause_time_left_seconds",
}
MOVES = {"uptime", "rusage-utime", "rusage-stime", "pause-time-left"}
"""What changes between two readings."""
JOB_STATES = ("urgent", "ready", "reserved", "delayed", "buried")


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


def scrape(web: Web, accept: str = "") -> dict[Key, float]:
    """All samples. A name with the same labels twice, or a family that comes back, is an error."""
    status, headers, content = web.ask("GET", "/metrics", Accept=accept)
    assert status == 200
    text = content.decode()
    families: Any
    if accept == OPENMETRICS:
        assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
        families = cast(Any, openmetrics.text_string_to_metric_families)(text)  # it also checks what the format demands
    else:
        assert headers["content-type"].startswith("text/plain; version=0.0.4; charset=utf-8")
        families = cast(Any, text_string_to_metric_families)(text)  # which has no types
    found: dict[Key, float] = {}
    names = set()
    for family in families:
        assert family.name not in names and family.documentation.endswith((".", "0."))
        names.add(family.name)
        for sample in family.samples:
            at = key(sample.name, **sample.labels)
            assert at not in found, at
            found[at] = sample.value
    return found


def statistics(inside: Inside, command: bytes) -> dict[str, str]:
    session = inside.session(command)
    reply = session.take_out().decode()
    session.hang_up(time.monotonic_ns())
    session.leave(time.monotonic_ns())
    return {name: value.strip('"') for name, value in re.findall(r"^([a-z0-9-]+): (.*)$", reply, re.M)}


def metric_of(name: str, tube: str) -> Key | None:
    """The metric that says the same as a key of `stats`, or of `stats-tube`; None for a quantile or a rate."""
    labels = {"tube": tube} if tube else {}
    start = "beanstalkd_tube_" if tube else "beanstalkd_"
    if name.startswith("current-jobs-"):
        return key(start + "current_jobs", **labels, state=name.removeprefix("current-jobs-"))
    if name.startswith("cmd-"):
        return key(start + "commands_total", **labels, cmd=name.removeprefix("cmd-"))
    if re.fullmatch(r"(queued|worked)-p\d+|[a-z]+-rate-\d+m", name):
        return None  # histograms and counters tell more
    if found := re.fullmatch(r"oldest-(\w+)-age", name):
        return key(f"geventstalk_{'tube_' if tube else ''}oldest_job_age_seconds", **labels, state=found[1])
    known = (TUBE_NAMES if tube else NAMES).get(name)
    return key(known or start + name.replace("-", "_"), **labels)


def say(inside: Inside, lines: bytes) -> None:
    """A new client says many lines."""
    session = inside.session(lines)
    while session.unfinished:
        session.take_out()
        session.run(time.monotonic_ns())


def traffic(inside: Inside, random: Random, tubes: list[str]) -> None:
    """Some hundred random commands of some clients."""
    clients = [inside.session() for _ in range(6)]
    now_ns = time.monotonic_ns
    for _ in range(400):
        client = random.choice(clients)
        if client.waiting:
            continue
        tube = random.choice(tubes).encode()
        jobs = inside.engine.next_id
        number = random.randrange(1, jobs + 1)
        client.receive(
            random.choice(
                [
                    b"use %s\r\nput %d %d 60 2\r\nhi\r\n" % (tube, random.choice((0, 5000)), random.choice((0, 0, 9))),
                    b"watch %s\r\nreserve-with-timeout 0\r\n" % tube,
                    b"reserve-job %d\r\n" % number,
                    b"delete %d\r\n" % number,
                    b"release %d 5 0\r\n" % number,
                    b"bury %d 5\r\n" % number,
                    b"kick-job %d\r\n" % number,
                    b"pause-tube %s %d\r\n" % (tube, random.choice((0, 100))),
                    b"reserve\r\n",
                ]
            ),
            now_ns(),
        )
    inside.turn.end()


@pytest.mark.parametrize("accept", ["", OPENMETRICS], ids=["text", "openmetrics"])
def test_each_statistic_is_a_metric(seed: int, accept: str) -> None:
    random = Random(seed)
    tubes = ["default", "mail", "a/b;c.$_()+-", "Z"]
    inside = Inside()
    traffic(inside, random, tubes)
    inside.backend.audit.missing = 7
    metrics = scrape(inside, accept)
    assert metrics[key("geventstalk_audit_missing_total")] == 7
    # The questions count themselves, so `stats` comes behind, and its own two counters are looked at by themselves.
    told = 0
    for tube in ["", *(name.decode() for name in inside.engine.tubes)]:
        for name, value in statistics(inside, f"stats-tube {tube}\r\n".encode() if tube else b"stats\r\n").items():
            if name in NOT_TOLD or (name in ("current-connections", "total-connections", "cmd-stats") and not tube):
                continue
            if tube == "default" and name in ("current-using", "current-watching"):
                continue  # who asks uses and watches it
            at = metric_of(name, tube)
            if at is None:
                continue
            assert at in metrics, at
            told += 1
            if name.startswith("oldest-"):
                assert 0 <= float(value) - int(metrics[at]) <= 10, at
            elif name not in MOVES:
                assert metrics[at] == {"true": 1.0, "false": 0.0}.get(value) or metrics[at] == float(value), at
    assert told > 60
    assert metrics[key("beanstalkd_current_connections")] == 6
    assert metrics[key("beanstalkd_draining")] == 0


def test_histograms_count_what_happened() -> None:
    inside = Inside()
    session = inside.session(b"watch mail\r\nuse mail\r\n" + 3 * b"put 0 0 60 1\r\nx\r\n" + 3 * b"reserve\r\n")
    session.receive(b"delete 1\r\nrelease 2 0 0\r\nbury 3 0\r\n", time.monotonic_ns() + 70_000_000_000)
    inside.turn.end()
    metrics = scrape(inside)
    for name, labels, bounds in (
        ("geventstalk_reserved_to_end_seconds", {}, len(BOUNDS_NS)),
        ("geventstalk_tube_reserved_to_end_seconds", {"tube": "mail"}, 9),
    ):
        buckets = {
            float(dict(found)["le"]): value
            for (found_name, found), value in metrics.items()
            if found_name == name + "_bucket" and labels.items() <= dict(found).items()
        }
        assert len(buckets) == bounds + 1
        assert [buckets[end] for end in sorted(buckets)] == sorted(buckets.values())
        assert all(value == (3 if end > 70 else 0) for end, value in buckets.items())
        assert metrics[key(name + "_count", **labels)] == buckets[float("inf")] == 3
        assert 210 <= metrics[key(name + "_sum", **labels)] < 230
    assert metrics[key("geventstalk_tube_ready_to_reserved_seconds_count", tube="mail")] == 3
    events = {
        dict(labels)["event"]: value
        for (name, labels), value in metrics.items()
        if name.endswith("job_events_total") and "tube" not in dict(labels)
    }
    assert events == {"put": 3, "reserve": 3, "delete": 1, "release": 1, "bury": 1, "kick": 0, "timeout": 0}


def test_ages_are_those_of_the_oldest_jobs() -> None:
    clock = ManualClock()
    inside = Inside(clock=lambda: clock.ns)
    client = inside.session(b"use mail\r\nput 0 0 60 1\r\nx\r\nput 0 9000 60 1\r\nx\r\n")
    clock.pass_s(100.5)
    client.receive(b"use later\r\nput 0 0 60 1\r\nx\r\n", clock.ns)
    clock.pass_s(0.25)
    metrics = scrape(inside)
    wanted = {"mail": (100.75, 100.75, 0), "later": (0.25, 0, 0), "": (100.75, 100.75, 0)}
    for tube, ages in wanted.items():
        for state, age in zip(("ready", "delayed", "buried"), ages, strict=True):
            at = key("geventstalk_tube_oldest_job_age_seconds", tube=tube, state=state)
            assert metrics[at if tube else key("geventstalk_oldest_job_age_seconds", state=state)] == age


def test_refused_tokens_are_counted() -> None:
    inside = Inside()
    for _ in range(3):
        inside.backend.audit.refuse_token(Who("", "", "10.0.0.1:5", "api"), 0)
    assert scrape(inside)[key("geventstalk_http_tokens_refused_total")] == 3


def test_of_many_tubes_the_largest_are_told() -> None:
    inside = Inside(Settings(max_tube_series=5))
    say(inside, puts(f"tube-{number}" for number in range(300)) + puts(["big-a", "big-b", "big-c", "big-d"] * 3))
    metrics = scrape(inside)
    assert metrics[key("beanstalkd_current_tubes")] == 305
    assert metrics[key("beanstalkd_tube_series_truncated")] == 1
    told = Counter(dict(labels)["tube"] for name, labels in metrics if name == "beanstalkd_tube_current_jobs")
    assert len(told) == 5 and set(told.values()) == {5} and {"big-a", "big-b", "big-c", "big-d"} < told.keys()
    assert scrape(inside).keys() == metrics.keys()
    assert scrape(Inside())[key("beanstalkd_tube_series_truncated")] == 0
    assert "beanstalkd_tube_current_jobs" not in {name for name, _ in scrape(Inside(Settings(max_tube_series=0)))}


def test_thousands_of_tubes_are_written_in_short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Inside(Settings(max_tube_series=500))
    say(inside, puts(f"tube-{number}" for number in range(600)))
    stretches_ns: list[int] = []
    begun_ns = time.thread_time_ns()

    def yield_now() -> None:
        nonlocal begun_ns
        stretches_ns.append(time.thread_time_ns() - begun_ns)
        begun_ns = time.thread_time_ns()

    monkeypatch.setattr(inside.backend, "yield_now", yield_now)
    assert inside.ask("GET", "/metrics")[2].count(b"\nbeanstalkd_tube_jobs_total{") == 500
    print(f"{len(stretches_ns)} stretches, the longest {max(stretches_ns[1:]) / 1e6:.1f} ms")
    assert len(stretches_ns) > 10
    assert sorted(stretches_ns)[-3] < 10_000_000  # a collection of garbage may fall into one


def test_concurrent_scrapes_share_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Inside()
    first = inside.ask("GET", "/metrics")
    inside.session(b"put 0 0 60 1\r\nx\r\n")
    assert inside.ask("GET", "/metrics") == first
    now_ns = inside.backend.now_ns
    monkeypatch.setattr(type(inside.backend), "now_ns", property(lambda self: lambda: now_ns() + 10**9), raising=False)
    assert scrape(inside)[key("beanstalkd_jobs_total")] == 1


# Bug: /metrics kept an answer for each version that a header Accept named, for ever, and failed on a version that is no
# number.
@pytest.mark.parametrize(
    "accept",
    [
        OPENMETRICS + "; version=%s",
        "text/plain; version=%s",
        "text/plain; version=1.0.0; escaping=%s",
        "application/openmetrics-text; version=%s.9",
    ],
)
def test_whatever_is_asked_for_is_one_of_two_formats(accept: str) -> None:
    """Each that there is keeps its last answer."""
    inside = Inside()
    found = {inside.ask("GET", "/metrics", Accept=accept % word)[1]["content-type"] for word in "9876x\xe9"}
    assert len(found) == 1 and "\xe9" not in found.pop()


@pytest.mark.slow
def test_promtool_finds_nothing_to_say(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    port = free_port()
    journal = ("-b", str(tmp_path / "j"), "-f0", *BOUNDS)
    server = start_server("--http", str(port), "--io-processes", "1", *journal)
    with Client(server.connect()) as client:
        client.ask(b"watch mail")
        client.ask(b"use mail")
        client.send(20 * b"put 0 0 60 1\r\nx\r\n")
        for _ in range(20):
            client.reply()
        client.ask(b"reserve")
        client.ask(b"delete 1")
        web = Web(port)
        metrics = scrape(web, OPENMETRICS)
        content = web.ask("GET", "/metrics")[2]
    for name in ("bytes", "live_bytes", "budget_bytes", "disk_free_bytes", "segments", "replay_seconds"):
        assert metrics[key("geventstalk_journal_" + name)] > 0, name
    assert metrics[key("geventstalk_journal_writable")] == 1
    assert metrics[key("geventstalk_journal_puts_refused_total")] == 0
    assert metrics[key("geventstalk_journal_fsync_seconds_count")] >= 2
    assert metrics[key("geventstalk_journal_commit_records_sum")] >= 21
    assert metrics[key("geventstalk_journal_commit_records_bucket", le="+Inf")] >= 2
    for name in ("resident_memory_bytes", "open_fds", "cpu_seconds_total", "start_time_seconds"):
        assert metrics[key("process_" + name)] > 0, name
    assert metrics[key("geventstalk_front_processes")] == metrics[key("geventstalk_front_connections", front="1")] == 1
    assert metrics[key("geventstalk_front_restarts_total")] == 0
    assert metrics[key("geventstalk_front_cpu_seconds_total", front="1")] > 0
    assert metrics[key("geventstalk_front_resident_memory_bytes", front="1")] > 1_000_000
    assert metrics[key("geventstalk_memory_max_bytes")] == 1_000_000
    assert metrics[key("geventstalk_memory_bytes")] == 19 * (48 + 3)
    for name in ("jobs_on_disk", "bytes_on_disk", "loads_total", "puts_refused_total"):
        assert metrics[key("geventstalk_memory_" + name)] == 0, name
    # Those of a cluster are test_node.py's, those of TLS test_tls.py's, those of users test_rights.py's.
    assert set(re.findall(r"^\| `(?!geventstalk_(?:cluster|tls|user|policy)_)(\w+)`", DOCS.read_text(), re.M)) == {
        re.sub(r"_(bucket|count|sum)$", "", name) if "_seconds" in name or "_records" in name else name
        for name, _ in metrics
    }
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(["promtool", "check", "metrics"], input=content, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
