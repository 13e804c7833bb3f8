"""All statistics for Prometheus, in its own text format and in OpenMetrics.

prometheus_client knows both formats, and writes a whole registry at once. That would block other clients with thousands
of tubes, so this module gives it small pieces of one family after the other. A name begins with `beanstalkd_` where
exporters of beanstalkd have the same figure, and with `geventstalk_` where they have none. Invariant: the figures of a
tube are of one time, and a name and its labels stand in one line only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Final

import gevent
from gevent.event import Event
from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from geventstalk._build import BUILD
from geventstalk._version import __version__
from geventstalk.core.ages import Oldest
from geventstalk.core.figures import totals
from geventstalk.core.job import SECOND_NS
from geventstalk.core.meter import BOUNDS_NS, Times
from geventstalk.core.tube import Tube
from geventstalk.durable.store import COMMIT_BOUNDS
from geventstalk.http import views
from geventstalk.http.backend import ACTIVE, REPLICATIONS, Backend, Failed
from geventstalk.http.memory import used_by
from geventstalk.http.slices import Pace, page
from geventstalk.wire.verbs import COUNTED

Line = tuple[str, dict[str, str], float]
"""The end of a name behind that of its family, labels, and a value."""

_PIECE: Final = 64
"""The number of lines that are written at once."""
_FRESH_NS: Final = SECOND_NS // 2
"""Scrapes within this time share one response."""
_TUBE_BOUNDS: Final = range(6, len(BOUNDS_NS) - 6, 3)
"""Every third bucket of a tube is written, from 1 ms to 4.7 hours: a thousand tubes have many lines."""
STATES: Final = ("urgent", "ready", "reserved", "delayed", "buried")


class Metrics:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._answers: dict[str, _Answer] = {}

    def answer(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics in the format of the header `Accept`, and their content type.

        Yields to other requests. Scrapes within 0.5 s share one response.
        """
        encode, content_type = choose_encoder(_known(accept))
        answer = self._answers.get(content_type)
        if answer is None or answer.is_old(self._backend.now_ns()):
            answer = self._answers[content_type] = _Answer()
            try:
                answer.data = b"".join(self._write(encode))
                answer.made_ns = self._backend.now_ns()
            finally:
                if not answer.data:
                    del self._answers[content_type]
                answer.over.set()
        answer.over.wait()
        if not answer.data:
            raise Failed  # its maker has logged the reason
        return answer.data, content_type

    def _write(self, encode: Callable[[_One], bytes]) -> Iterator[bytes]:
        pace = Pace(self._backend)
        for family in self._families(pace):
            begun = False
            lines = iter(family.lines)
            while True:
                metric = Metric(family.name, family.text, family.kind)
                for _, (end, labels, value) in zip(range(_PIECE), lines, strict=False):
                    metric.add_sample(family.name + end, labels, value)
                if begun and not metric.samples:
                    break
                text = encode(_One(metric)).removesuffix(_EOF)
                yield _without_head(text) if begun else text
                begun = True
                pace.step()
        if encode(_One(None)):
            yield _EOF

    # --- families

    def _families(self, pace: Pace) -> Iterator[_Family]:
        yield from self._of_server()
        yield from self._of_memory()
        yield from self._of_journal()
        yield from self._of_cluster()
        yield from self._of_process()
        yield from self._of_fronts()
        yield from self._of_addresses()
        yield from self._of_tls()
        yield from self._of_users()
        yield from self._of_policies()
        yield from self._of_tubes(pace)

    def _of_server(self) -> Iterator[_Family]:
        backend = self._backend
        ages = _ages({}, views.oldest(backend, None), backend.now_ns())
        engine, now_ns = backend.engine, backend.now_ns()
        jobs = views.jobs(engine)
        yield _gauge(
            "beanstalkd_current_jobs",
            "Jobs in each state. Urgent jobs are ready ones, too.",
            [("", {"state": state}, jobs[state]) for state in STATES],
        )
        yield _gauge("geventstalk_oldest_job_age_seconds", "Age of the oldest job in each state, or 0.", ages)
        yield _counter(
            "beanstalkd_commands",
            "Commands of each kind.",
            [("_total", {"cmd": key.removeprefix("cmd-")}, backend.commands[number]) for key, number in COUNTED],
        )
        yield _count("beanstalkd_jobs", "Jobs that were put.", engine.total_jobs)
        yield _count("beanstalkd_job_timeouts", "Reservations that a ttr ended.", engine.total_timeouts)
        yield _value("beanstalkd_max_job_size_bytes", "Largest body of a job.", backend.settings.max_job_bytes)
        yield _value("beanstalkd_current_tubes", "Tubes.", len(engine.tubes))
        yield _value("beanstalkd_current_connections", "Connections.", len(engine.clients))
        yield _value("beanstalkd_current_producers", "Connections that have put a job.", engine.producer_count)
        yield _value("beanstalkd_current_workers", "Connections that have reserved a job.", engine.worker_count)
        yield _value("beanstalkd_current_waiting", "Connections that wait for a job.", engine.waiting_count)
        yield _count("beanstalkd_connections", "Connections that have come.", engine.total_clients)
        yield _value("beanstalkd_uptime_seconds", "Time since the start.", (now_ns - engine.started_ns) / SECOND_NS)
        yield _value("beanstalkd_draining", "Whether puts are refused because the server drains.", engine.draining)
        yield _value("geventstalk_reload_refused", "Whether the last reload was refused.", backend.reload.refused)
        yield _counter("geventstalk_job_events", "What happened to jobs.", _events(totals(engine)._asdict()))
        yield _histogram(_QUEUED, "Time from ready to reserved.", _buckets({}, engine.queued, range(len(BOUNDS_NS))))
        yield _histogram(_WORKED, "Time from reserved to its end.", _buckets({}, engine.worked, range(len(BOUNDS_NS))))
        yield _value("geventstalk_http_connections", "Connections of HTTP.", backend.turn.others)
        refused = backend.audit.refused_tokens
        yield _count("geventstalk_http_tokens_refused", "Requests with a token that is not known.", refused)
        yield _count("geventstalk_audit_missing", "Changes that the audit file misses.", backend.audit.missing)
        yield _gauge(
            "geventstalk_build_info", "Version and build.", [("", {"version": __version__, "build": BUILD}, 1)]
        )

    def _of_memory(self) -> Iterator[_Family]:
        bodies = self._backend.engine.bodies
        if bodies is None:
            return
        yield _value("geventstalk_memory_max_bytes", "What bodies may take in memory.", bodies.max_bytes)
        yield _value("geventstalk_memory_bytes", "What bodies take in memory.", bodies.taken_bytes)
        yield _value("geventstalk_memory_jobs_on_disk", "Jobs whose body is in the journal only.", bodies.gone)
        yield _value("geventstalk_memory_bytes_on_disk", "Bytes of bodies in the journal only.", bodies.gone_bytes)
        yield _count("geventstalk_memory_loads", "Bodies that came back to memory.", bodies.fetched)
        yield _count("geventstalk_memory_puts_refused", "Puts whose body had no room in memory.", bodies.refused)

    def _of_journal(self) -> Iterator[_Family]:
        backend = self._backend
        facts = backend.facts()
        for key, name, text, kind in _BINLOG:
            number = facts[key]
            assert isinstance(number, int)
            yield (_count if kind == "counter" else _value)(name, text, number)
        store = backend.turn.store
        if store is None:
            return
        found = views.journal(backend)
        for name, text, value in (
            ("bytes", "What the journal takes on disk.", found["bytes"]),
            ("live_bytes", "Of it what jobs need.", found["live_bytes"]),
            ("dead_bytes", "Of it what compaction can give back.", found["dead_bytes"]),
            ("segments", "Segments.", len(store.segments(1 << 30))),
            ("writable", "Whether a put finds room.", found["writable"]),
            ("behind", "Whether changes wait until compaction has caught up.", store.behind),
            ("compacting", "Whether compaction has work.", found["compacting"]),
            ("replay_seconds", "How long the replay at the start took.", found["replay_s"]),
        ):
            yield _value(f"geventstalk_journal_{name}", text, value)
        if found["disk_free_bytes"] is not None:
            text = "What the disk of the journal has left."
            yield _value("geventstalk_journal_disk_free_bytes", text, found["disk_free_bytes"])
        if found["budget_bytes"] is not None:
            text = "What the journal may take on disk."
            yield _value("geventstalk_journal_budget_bytes", text, found["budget_bytes"])
        refused = found["refused_puts"]
        yield _count("geventstalk_journal_puts_refused", "Puts that found no room.", refused)
        yield _histogram(
            "geventstalk_journal_fsync_seconds",
            "Time that an fsync took.",
            _buckets({}, store.fsyncs, range(len(BOUNDS_NS))),
        )
        yield _histogram(
            "geventstalk_journal_commit_records",
            "Records in a commit.",
            [
                *_cumulative({}, [float(bound) for bound in COMMIT_BOUNDS], store.commit_sizes),
                ("_sum", {}, store.appended),
            ],
        )

    def _of_cluster(self) -> Iterator[_Family]:
        node = self._backend.node
        if node is None:
            return
        yield _value("geventstalk_cluster_active", "Whether this node leads and may answer.", node.role == ACTIVE)
        yield _value("geventstalk_cluster_epoch", "How often a node has claimed to lead.", node.epoch)
        yield _value("geventstalk_cluster_lag_records", "Records that this node has yet to take in.", node.lag)
        yield _gauge(
            "geventstalk_cluster_replication",
            "How the database replicates the log.",
            [("", {"mode": mode}, float(mode == node.replication)) for mode in REPLICATIONS],
        )
        text = "How far the wall clock of this host is ahead of the database's."
        yield _value("geventstalk_cluster_clock_ahead_seconds", text, node.clock_ahead_s)
        yield _value("geventstalk_cluster_passed_connections", "Connections passed through to a node.", node.passed)

    def _of_process(self) -> Iterator[_Family]:
        # It lists all descriptors, of which there may be many: not here.
        found: list[Metric] = gevent.get_hub().threadpool.apply(lambda: list(ProcessCollector(registry=None).collect()))
        for metric in found:
            lines = [(each.name.removeprefix(metric.name), each.labels, each.value) for each in metric.samples]
            yield _Family(metric.name, metric.documentation, metric.type, lines)

    def _of_addresses(self) -> Iterator[_Family]:
        if self._backend.shares is not None:
            text = "Connections closed at once because their address had three quarters of all."
            yield _counter("geventstalk_refused_connections", text, [("_total", {}, self._backend.shares.refused)])
            text = "Puts refused because their address had sent too much of bodies that were not complete."
            yield _counter("geventstalk_refused_uploads", text, [("_total", {}, self._backend.shares.refused_uploads)])

    def _of_tls(self) -> Iterator[_Family]:
        shakes = self._backend.handshakes
        if shakes is None:
            return
        results = (("done", shakes.done), ("failed", shakes.failed), ("refused", shakes.refused))
        yield _counter(
            "geventstalk_tls_handshakes",
            "TLS handshakes by result; refused ones found too many that were not finished.",
            [("_total", {"result": result}, count) for result, count in results],
        )
        yield _value("geventstalk_tls_handshakes_unfinished", "TLS handshakes under way.", shakes.unfinished)

    def _of_users(self) -> Iterator[_Family]:
        guard = self._backend.guard
        if guard is None:
            return
        usages = [({"user": name}, guard.usage_of(name)) for name in guard.users().users]

        open_ones: list[Line] = [("", labels, usage.connections) for labels, usage in usages]
        yield _gauge("geventstalk_user_connections", "Connections of each user.", open_ones)
        rules = self._backend.engine.rules
        counted = [name for name, user in guard.users().users.items() if user.quota is not None]
        owned = [({"user": name}, None if rules is None else rules.owned.get(name.encode())) for name in counted]
        for key, text in (("jobs", "Jobs of each user with a limit of them."), ("bytes", "The bytes of these jobs.")):
            taken: list[Line] = [("", labels, getattr(each, key, 0)) for labels, each in owned]
            yield _gauge(f"geventstalk_user_{'job_' * (key == 'bytes')}{key}", text, taken)
        for key, name, text in _OF_USERS:
            counts: list[Line] = [("_total", labels, getattr(usage, key)) for labels, usage in usages]
            yield _counter(f"geventstalk_user_{name}", text, counts)

    def _of_policies(self) -> Iterator[_Family]:
        policies = self._backend.engine.policies
        if policies is None:
            return
        for key, text in _OF_POLICIES:
            counts: list[Line] = [("_total", {"tubes": glob}, getattr(each, key)) for glob, each in policies.all]
            yield _counter(f"geventstalk_policy_puts_{key}", text, counts)

    def _of_fronts(self) -> Iterator[_Family]:
        fronts = self._backend.fronts
        if fronts is None:
            return
        seen = [({"front": str(place)}, clients, used_by(pid)) for place, pid, clients in fronts.seen()]
        yield _value("geventstalk_front_processes", "Front-end processes.", len(seen))
        text = "How often a front-end process ended and another one was started."
        yield _count("geventstalk_front_restarts", text, fronts.restarts)
        yield _gauge(
            "geventstalk_front_connections",
            "Connections of each front-end process.",
            [("", labels, clients) for labels, clients, _ in seen],
        )
        yield _counter(
            "geventstalk_front_cpu_seconds",
            "Processor time of each front-end process.",
            [("_total", labels, used.processor_s) for labels, _, used in seen if used is not None],
        )
        yield _gauge(
            "geventstalk_front_resident_memory_bytes",
            "Memory of each front-end process.",
            [("", labels, used.resident_bytes) for labels, _, used in seen if used is not None],
        )

    def _of_tubes(self, pace: Pace) -> Iterator[_Family]:
        engine, most = self._backend.engine, self._backend.settings.max_tube_series
        tubes = engine.tubes

        def size(name: bytes) -> int | None:
            tube = tubes.get(name)
            return None if tube is None else tube.total_jobs

        # The tubes with the most jobs since they began, a choice that rarely changes.
        names, count = page(list(tubes), size, pace, True, 0, most)
        truncated = count > most
        yield _value("beanstalkd_tube_series_truncated", "Whether there are tubes of which nothing is told.", truncated)
        names.sort()

        def each(lines: Callable[[dict[str, str], Tube], Iterable[Line]]) -> Iterator[Line]:
            for name in names:
                tube = tubes.get(name)
                if tube is not None:
                    yield from list(lines({"tube": name.decode("ascii")}, tube))

        yield _gauge("beanstalkd_tube_current_jobs", "Jobs in each state.", each(_tube_jobs))
        yield _gauge(
            "geventstalk_tube_oldest_job_age_seconds",
            "Age of the oldest job in each state, or 0.",
            each(self._tube_ages),
        )
        yield _counter(
            "beanstalkd_tube_jobs", "Jobs that were put.", each(_one("_total", lambda tube: tube.total_jobs))
        )
        yield _counter("beanstalkd_tube_commands", "Commands of two kinds.", each(_tube_commands))
        for name, text, figure in (
            ("using", "Connections that use it.", lambda tube: tube.using),
            ("watching", "Connections that watch it.", lambda tube: len(tube.watchers)),
            ("waiting", "Connections that wait for a job of it.", engine.waiting_in),
        ):
            yield _gauge(f"beanstalkd_tube_current_{name}", text, each(_one("", figure)))
        yield _gauge(
            "beanstalkd_tube_pause_seconds", "Length of its pause, or 0.", each(_one("", lambda tube: tube.pause_s))
        )
        yield _gauge(
            "beanstalkd_tube_pause_time_left_seconds", "What is left of its pause.", each(_one("", self._pause_left))
        )
        yield _counter("geventstalk_tube_job_events", "What happened to its jobs.", each(_tube_events))
        yield _histogram(
            "geventstalk_tube_ready_to_reserved_seconds",
            "Time from ready to reserved.",
            each(lambda labels, tube: _buckets(labels, tube.queued, _TUBE_BOUNDS)),
        )
        yield _histogram(
            "geventstalk_tube_reserved_to_end_seconds",
            "Time from reserved to its end.",
            each(lambda labels, tube: _buckets(labels, tube.worked, _TUBE_BOUNDS)),
        )

    def _tube_ages(self, labels: dict[str, str], tube: Tube) -> list[Line]:
        found = views.oldest(self._backend, tube)
        return _ages(labels, found, self._backend.now_ns())

    def _pause_left(self, tube: Tube) -> float:
        return max(0, tube.paused_until_ns - self._backend.now_ns()) / SECOND_NS if tube.pause_s else 0


def _known(accept: str) -> str:
    """Returns a header `Accept` for one of two formats: an answer is kept for each."""
    for kind in accept.split(","):
        name = kind.partition(";")[0].strip().lower()
        if name == _OPENMETRICS:
            return name
        if name == "text/plain":
            break
    return ""


class _Answer:
    """An answer that is being made, or was made lately."""

    def __init__(self) -> None:
        self.data = b""
        self.made_ns = 0
        self.over: Event = Event()

    def is_old(self, now_ns: int) -> bool:
        return bool(self.made_ns) and now_ns - self.made_ns > _FRESH_NS


class _Family:
    """The lines of one name. They may be made while they are written."""

    def __init__(self, name: str, text: str, kind: str, lines: Iterable[Line]) -> None:
        self.name = name
        self.text = text
        self.kind = kind
        self.lines = lines


class _One:
    """A registry with one family, or with none, as prometheus_client writes it."""

    def __init__(self, metric: Metric | None) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return () if self._metric is None else (self._metric,)


_QUEUED: Final = "geventstalk_ready_to_reserved_seconds"
_WORKED: Final = "geventstalk_reserved_to_end_seconds"
_OPENMETRICS: Final = "application/openmetrics-text"
_EOF: Final = b"# EOF\n"
_OF_USERS: Final = (
    (
        "turned_away",
        "connections_refused",
        "Connections that were closed because their user had as many as it may have.",
    ),
    ("commands", "commands", "Commands of each user."),
    ("puts", "puts", "Puts of each user that its rights and limits allow."),
    ("waits", "puts_delayed", "Puts that waited because their user puts more a second than it may."),
    ("refused", "commands_refused", "Commands that a user has no right to, or that are above a limit."),
)
_OF_POLICIES: Final = (
    ("refused", "Puts that a limit of a policy refused."),
    ("delayed", "Puts that waited because of max_rate of a policy; over HTTP they are refused."),
)
_BINLOG: Final = (
    ("binlog-oldest-index", "beanstalkd_binlog_oldest_index", "Number of the oldest segment.", "gauge"),
    ("binlog-current-index", "beanstalkd_binlog_current_index", "Number of the segment being written.", "gauge"),
    ("binlog-records-migrated", "beanstalkd_binlog_records_migrated", "Records that compaction moved.", "counter"),
    ("binlog-records-written", "beanstalkd_binlog_records_written", "Records that were written.", "counter"),
    ("binlog-max-size", "beanstalkd_binlog_max_size_bytes", "Size of a segment.", "gauge"),
)


def _without_head(text: bytes) -> bytes:
    """Returns the samples alone, without the lines that describe them."""
    at = 0
    while text.startswith(b"#", at):
        at = text.index(b"\n", at) + 1
    return text[at:]


def _gauge(name: str, text: str, lines: Iterable[Line]) -> _Family:
    return _Family(name, text, "gauge", lines)


def _counter(name: str, text: str, lines: Iterable[Line]) -> _Family:
    return _Family(name, text, "counter", lines)


def _histogram(name: str, text: str, lines: Iterable[Line]) -> _Family:
    return _Family(name, text, "histogram", lines)


def _value(name: str, text: str, value: float) -> _Family:
    return _gauge(name, text, [("", {}, float(value))])


def _count(name: str, text: str, value: float) -> _Family:
    return _counter(name, text, [("_total", {}, value)])


def _one(end: str, figure: Callable[[Tube], float]) -> Callable[[dict[str, str], Tube], list[Line]]:
    return lambda labels, tube: [(end, labels, figure(tube))]


def _ages(labels: dict[str, str], found: Oldest, now_ns: int) -> list[Line]:
    return [("", labels | {"state": state}, age or 0) for state, age in views.ages(found, now_ns).items()]


def _tube_jobs(labels: dict[str, str], tube: Tube) -> Iterator[Line]:
    jobs = views.jobs_in(tube)
    for state in STATES:
        yield "", labels | {"state": state}, jobs[state]


def _tube_commands(labels: dict[str, str], tube: Tube) -> list[Line]:
    return [
        ("_total", labels | {"cmd": "delete"}, tube.total_deletes),
        ("_total", labels | {"cmd": "pause-tube"}, tube.total_pauses),
    ]


def _tube_events(labels: dict[str, str], tube: Tube) -> Iterator[Line]:
    for end, event, value in _events(totals(tube)._asdict()):
        yield end, labels | event, value


def _events(counts: dict[str, int]) -> list[Line]:
    return [("_total", {"event": event}, count) for event, count in counts.items()]


def _buckets(labels: dict[str, str], times: Times | None, told: range) -> list[Line]:
    """Returns a histogram of times with the buckets of these numbers; None where nothing was timed."""
    if times is None:
        return []
    sums = list(accumulate(times.counts))
    ends = [BOUNDS_NS[at] / SECOND_NS for at in told]
    lines: list[Line] = [("_bucket", labels | {"le": str(end)}, sums[at]) for at, end in zip(told, ends, strict=True)]
    lines.append(("_bucket", labels | {"le": "+Inf"}, sums[-1]))
    return [*lines, ("_count", labels, sums[-1]), ("_sum", labels, times.sum_ns / SECOND_NS)]


def _cumulative(labels: dict[str, str], ends: list[float], counts: list[int]) -> list[Line]:
    """Returns a histogram without its sum. `counts` has one more than `ends`: of all that is longer."""
    sums = list(accumulate(counts))
    names = [*map(str, ends), "+Inf"]
    lines: list[Line] = [("_bucket", labels | {"le": le}, count) for le, count in zip(names, sums, strict=True)]
    return [*lines, ("_count", labels, sums[-1])]
