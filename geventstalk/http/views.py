"""The engine's objects as the API's JSON: the server, tubes, jobs, connections, the journal.

This module must not change the engine. Each function reads without a yield, so its result is of one time. Durations are
seconds; times are Unix time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from geventstalk._build import BUILD
from geventstalk._version import __version__
from geventstalk.api_shapes import body_shape
from geventstalk.core import figures
from geventstalk.core.ages import Oldest, Search
from geventstalk.core.bodies import Bodies
from geventstalk.core.engine import Engine
from geventstalk.core.figures import field_of, has_deadline, totals
from geventstalk.core.job import SECOND_NS, STATE_NAMES, Job, TaggedTally, held_body, reason_of
from geventstalk.core.meter import EVENTS, NO_TIMES, Times, quantiles
from geventstalk.core.trail import EVENT_NAMES
from geventstalk.core.tube import Tube
from geventstalk.durable.store import SegmentState
from geventstalk.fields import COUNT, FIELDS, REFERENCE, SINCE, UNTIL
from geventstalk.http.backend import ACTIVE, Backend
from geventstalk.http.memory import resident_bytes
from geventstalk.http.slices import Pace, page
from geventstalk.tags import without_reason as tags_without_reason
from geventstalk.trouble import CALM, Trouble, trouble
from geventstalk.turn.replies import Channel
from geventstalk.wire.guarded import GuardedSession

Json = dict[str, Any]

_CRLF: Final = b"\r\n"
_CHARACTER_BYTES_MAX: Final = 4
_NO_QUANTILES: Final[Json] = {"p50": None, "p95": None, "p99": None, "count": 0}
_MUCH: Final = 0.9
"""The share of the memory limit from which on it is a problem."""
_WATCHES_SHOWN: Final = 20
_NEEDY_SHOWN: Final = 2
"""The most tubes that the sentence about the work names."""


def oldest(backend: Backend, tube: Tube | None) -> Oldest:
    """Returns the oldest jobs of a tube, or with None of the server, for tube() or server(). May yield."""
    search = Search(backend.engine, tube)
    while (found := search.go_on()) is None:
        backend.yield_now()
    return found


def ages(found: Oldest, now_ns: int) -> Json:
    return {
        state: None if created_ns is None else max(0, now_ns - created_ns) / SECOND_NS
        for state, created_ns in found._asdict().items()
    }


def whole(backend: Backend) -> Json:
    """Returns the server as a whole, of the time when all tubes were read. Yields to other requests."""
    needy = _needy(backend)
    return server(backend, oldest(backend, None), needy)


def _needy(backend: Backend) -> str:
    """Returns a sentence about the tubes that need an operator, or "". Yields to other requests.

    Reads all tubes once a second at the most, and not for more than a tenth of the time.
    """
    if backend.node is not None and not backend.node.serves:
        return ""  # the consumers are at the node that leads
    now_ns, tubes = backend.now_ns(), backend.engine.tubes
    if now_ns < backend.needy_until_ns:
        return backend.needy

    def key(name: bytes) -> tuple[int, bytes] | None:
        tube = tubes.get(name)
        found = CALM if tube is None else trouble_of(backend, tube)
        return (-found.score, name) if found.why else None

    names, count = page(list(tubes), key, Pace(backend), False, 0, _NEEDY_SHOWN)
    worst = [f"{name.decode('ascii')}, {trouble_of(backend, tubes[name]).why}" for name in names if name in tubes]
    rest = f"; and {count - len(worst):,} more" if count > len(worst) else ""
    need = "tube needs" if count == 1 else "tubes need"
    backend.needy = f"{count:,} {need} attention: {'; '.join(worst)}{rest}" if worst else ""
    backend.needy_until_ns = now_ns + max(SECOND_NS, 10 * (backend.now_ns() - now_ns))
    return backend.needy


def trouble_of(backend: Backend, tube: Tube) -> Trouble:
    """Returns how much a tube needs an operator. Yields where it takes long to find its oldest job."""
    if not tube.jobs:
        return CALM
    found = oldest(backend, tube)
    now_ns = backend.now_ns()
    return _trouble(backend, tube, rates(tube, now_ns), ages(found, now_ns)["ready"])


def _trouble(backend: Backend, tube: Tube, per_second: dict[str, dict[str, float]], waits_s: float | None) -> Trouble:
    follows = backend.node is not None and not backend.node.serves
    return trouble(
        ready=tube.ready_count(),
        waits_s=waits_s or 0,
        consumers=1 if follows else len(tube.watchers),
        growth=growth(per_second),
        buried=len(tube.buried),
        bury_rate=per_second["bury"]["m1"],
        paused=tube.pause_s > 0,
    )


def server(backend: Backend, found: Oldest, needy: str) -> Json:
    """Returns the server as a whole, with its oldest jobs, and the sentence about tubes that need an operator."""
    engine, facts, now_ns = backend.engine, backend.facts(), backend.now_ns()
    problems = _problems(backend)
    if needy:
        problems.append(_problem("work", needy, "tubes"))
    return {
        "well": {"ok": not problems, "problems": problems},
        "version": __version__,
        "build": BUILD,
        "pid": os.getpid(),
        "hostname": _text(facts["hostname"]),
        "name": backend.settings.name or _text(facts["hostname"]),
        "name_color": backend.settings.name_color,
        "started": backend.unix_s(engine.started_ns),
        "uptime_s": (now_ns - engine.started_ns) / SECOND_NS,
        "now": backend.unix_s(now_ns),
        "draining": engine.draining,
        "listen": backend.listen,
        "http": backend.http,
        "jobs": jobs(engine),
        "ages": ages(found, now_ns),
        "latency": latency(engine),
        "rates": rates(engine, now_ns),
        "totals": totals(engine)._asdict(),
        "tubes": len(engine.tubes),
        "connections": {
            "open": len(engine.clients),
            "producers": engine.producer_count,
            "workers": engine.worker_count,
            "waiting": engine.waiting_count,
            "total": engine.total_clients,
        },
        "memory": {
            "resident_bytes": resident_bytes(),
            "limit_bytes": backend.memory_limit_bytes,
            "bodies": None if engine.bodies is None else memory_of(engine.bodies),
        },
        "journal": _journal_in_short(backend),
        "max_job_bytes": backend.settings.max_job_bytes,
        "node": node_of(backend),
    }


def limited(backend: Backend) -> Json:
    """Returns the server for a user who may not look at every tube: no figure tells of jobs, clients or memory."""
    found = server(backend, Oldest(None, None, None, None), "")
    blank = ("jobs", "ages", "rates", "totals", "tubes", "connections")
    return {
        **found,
        **{key: _blank(found[key]) for key in blank},
        "latency": dict.fromkeys(found["latency"], _NO_QUANTILES),
        "memory": {"resident_bytes": 0, "limit_bytes": None, "bodies": None},
        "journal": None,
        "listen": [],
        "http": [],
        "well": {"ok": True, "problems": []},
    }


def _blank(value: Any) -> Any:
    """Returns the same shape without figures."""
    if isinstance(value, dict):
        return {key: _blank(one) for key, one in value.items()}
    return None if value is None else 0


def node_of(backend: Backend) -> Json | None:
    """Returns this server's role among the nodes that share its journal; None for a server alone."""
    node = backend.node
    if node is None:
        return None
    return {"serves": node.serves, "role": node.role, "leader": node.leader, "epoch": node.epoch, "lag": node.lag}


def memory_of(bodies: Bodies) -> Json:
    """Returns the places of bodies, when memory has a bound for them."""
    return {
        "max_bytes": bodies.max_bytes,
        "bytes": bodies.taken_bytes,
        "jobs_on_disk": bodies.gone,
        "bytes_on_disk": bodies.gone_bytes,
        "loads": bodies.fetched,
        "refused_puts": bodies.refused,
    }


def _problem(about: str, text: str, page: str = "") -> Json:
    return {"about": about, "text": text, "page": page or about}


def _problems(backend: Backend) -> list[Json]:
    """Returns the problems of the server, its journal, or the nodes that share it, in sentences."""
    return [*_problems_of_server(backend), *_problems_of_node(backend), *_problems_of_journal(backend)]


def _problems_of_server(backend: Backend) -> Iterator[Json]:
    if backend.engine.draining:
        yield _problem("server", "The server is draining: it refuses puts.", "overview")
    limit = backend.memory_limit_bytes
    if limit is not None and resident_bytes() >= limit * _MUCH:
        yield _problem("server", "The memory is nearly used up.", "overview")
    if backend.engine.bodies is not None and backend.engine.bodies.is_full:
        yield _problem("server", "Memory has no room for more bodies: puts are refused.", "overview")


def _problems_of_node(backend: Backend) -> Iterator[Json]:
    node = backend.node
    if node is not None and not node.serves:
        leader = f"{node.leader} leads." if node.leader else "no node leads."
        yield _problem("nodes", f"This node stands by: {leader} Change nothing here.")
    elif node is not None and node.role != ACTIVE:
        yield _problem("nodes", "The database does not confirm that this node leads: replies wait.")


def _problems_of_journal(backend: Backend) -> Iterator[Json]:
    store = backend.turn.store
    if store is not None and not store.takes_puts():
        yield _problem("journal", "The journal has no room: puts are refused.")
    elif store is not None and store.behind:
        yield _problem("journal", "The journal does not keep pace: changes wait.")


def tube(backend: Backend, tube: Tube, now_ns: int, found: Oldest) -> Json:
    """Returns a tube, with its oldest jobs. Reads each of its watchers."""
    per_second = rates(tube, now_ns)
    waits = ages(found, now_ns)
    return {
        "name": tube.name.decode("ascii"),
        "jobs": jobs_in(tube),
        "ages": waits,
        "latency": latency(tube),
        "rates": per_second,
        "totals": totals(tube)._asdict(),
        "using": tube.using,
        "watching": len(tube.watchers),
        "waiting": backend.engine.waiting_in(tube),
        "paused_s": tube.pause_s,
        "pause_left_s": max(0, tube.paused_until_ns - now_ns) / SECOND_NS if tube.pause_s else 0,
        "growth": growth(per_second),
        "trouble": _trouble(backend, tube, per_second, waits["ready"])._asdict(),
    }


def jobs(engine: Engine) -> dict[str, int]:
    """Returns the number of jobs in each state. Urgent jobs are ready ones, too."""
    return {
        "urgent": engine.urgent_count,
        "ready": engine.ready_count,
        "reserved": engine.reserved_count,
        "delayed": engine.delayed_count,
        "buried": engine.buried_count,
    }


def jobs_in(tube: Tube) -> dict[str, int]:
    return {
        "urgent": tube.urgent,
        "ready": tube.ready_count(),
        "reserved": tube.reserved,
        "delayed": len(tube.delayed),
        "buried": len(tube.buried),
    }


def job(backend: Backend, job: Job, now_ns: int, body_bytes: int, data: bytes | None = None) -> Json:
    """Returns a job with at most `body_bytes` bytes of its body. `data` is that body, where it may not be in memory."""
    if data is None:
        data = held_body(job)
    numbers: Json = {"counts": {}}
    for field in FIELDS:
        value = field_of(job, field, now_ns)
        if field.kind == COUNT:
            numbers["counts"][field.api] = value
        elif field.kind == REFERENCE:
            numbers[field.api] = value or None
        elif field.kind == UNTIL and not has_deadline(job):
            numbers[field.api] = None
        else:
            numbers[field.api] = value / SECOND_NS if field.kind in (SINCE, UNTIL) else value
    return {
        "id": job.id,
        "tube": backend.engine.tube_of(job).name.decode("ascii"),
        "state": STATE_NAMES[job.state],
        "created": backend.unix_s(job.created_ns),
        "size": len(data) - len(_CRLF),
        **numbers,
        "tags": _tags(job),
        "events": _events(backend, job),
        "body": body_shape(data, len(data) - len(_CRLF), body_bytes),
    }


def _events(backend: Backend, job: Job) -> list[Json]:
    trails = backend.engine.trails
    found = [] if trails is None else trails.events_of(job.id)
    return [
        {"event": EVENT_NAMES[each.what], "at": backend.unix_s(each.at_ns), "connection": each.client or None}
        for each in found
    ]


def _tags(job: Job) -> Json | None:
    tally = job.tally
    if not isinstance(tally, TaggedTally):
        return None
    reason = reason_of(tally) if tally.why else None
    return {"text": tags_without_reason(tally.tags).decode("ascii"), "tried": tally.tried, "reason": reason}


def quantiles_of(times: Times | None) -> Json:
    """Returns quantiles of times, in seconds."""
    counts = NO_TIMES.counts if times is None else times.counts
    p50, p95, p99 = (each / SECOND_NS for each in quantiles(counts))
    count = sum(counts)
    return {"p50": p50, "p95": p95, "p99": p99, "count": count} if count else _NO_QUANTILES


def latency(of: Engine | Tube) -> Json:
    """Returns quantiles of how long jobs were ready, and how long they were reserved."""
    return {"queued": quantiles_of(of.queued), "worked": quantiles_of(of.worked)}


def rates(of: Engine | Tube, now_ns: int) -> dict[str, dict[str, float]]:
    """Returns how many jobs a second were put, reserved and so on, over a minute and over fifteen."""
    found = figures.rates(of, now_ns)
    return {
        event: {"m1": minute, "m15": quarter}
        for event, minute, quarter in zip(EVENTS, found, found[len(EVENTS) :], strict=False)
    }


def growth(per_second: dict[str, dict[str, float]]) -> float:
    """Returns how many more jobs a second came than left, over a minute."""
    return per_second["put"]["m1"] - per_second["delete"]["m1"]


def user_of(channel: Channel) -> str | None:
    """Returns the name of the client's user, None where the client is no user's."""
    client = channel.session
    user = client.user if isinstance(client, GuardedSession) else None
    return None if user is None else user.name


def connection(backend: Backend, channel: Channel, now_ns: int) -> Json:
    """Returns a client of the beanstalk port."""
    client = channel.session
    address, listener, output_bytes, queued_bytes = backend.look_at(channel)
    return {
        "number": client.number,
        "user": user_of(channel),
        "address": address,
        "listener": listener,
        "connected": backend.unix_s(channel.joined_ns),
        "idle_s": (now_ns - channel.heard_ns) / SECOND_NS,
        "uses": client.used.name.decode("ascii") if client.used else "",
        "watches": [tube.name.decode("ascii") for tube in islice(client.watched.values(), _WATCHES_SHOWN)],
        "watching": len(client.watched),
        "reserved": len(client.reserved),
        "waiting_s": (now_ns - client.wait_since_ns) / SECOND_NS if client.waiting else None,
        "held_up": client.held_up and backend.engine.held,
        "input_bytes": client.pending_bytes + queued_bytes,
        "output_bytes": output_bytes,
        "producer": client.producer,
        "worker": client.worker,
    }


def journal(backend: Backend) -> Json:
    """Returns the journal without its segments. For a server without a journal, the answer says so."""
    settings, store = backend.settings, backend.turn.store
    found: Json = {
        "directory": settings.journal_shown
        if settings.shared or not settings.journal
        else os.path.abspath(settings.journal),
        "policy": None,
        "bytes": 0,
        "live_bytes": 0,
        "dead_bytes": 0,
        "budget_bytes": settings.max_journal_bytes,
        "disk_free_bytes": None,
        "writable": True,
        "compacting": False,
        "moved": 0,
        "refused_puts": 0,
        "replay_s": backend.replay_s,
        "last_fsync": None,
        "fsyncs": _NO_QUANTILES,
        "commits": {"count": 0, "records": 0, "records_max": 0},
    }
    if store is None or settings.journal is None:
        return found
    facts = store.facts()
    size, live = facts["journal-bytes"], facts["journal-live-bytes"]
    assert isinstance(size, int) and isinstance(live, int)
    return found | {
        "policy": _policy(settings.fsync_ms),
        "bytes": size,
        "live_bytes": live,
        "dead_bytes": max(0, size - live),
        "disk_free_bytes": None if settings.shared else free_bytes(settings.journal),
        "writable": store.takes_puts(),
        "compacting": store.wants_compaction(),
        "moved": facts["binlog-records-migrated"],
        "refused_puts": facts["journal-puts-refused"],
        "last_fsync": backend.unix_s(store.synced_ns) if store.synced_ns else None,
        "fsyncs": quantiles_of(store.fsyncs),
        "commits": {"count": store.commits, "records": store.appended, "records_max": store.commit_records_max},
    }


def segment(state: SegmentState) -> Json:
    return {
        "number": state.number,
        "state": state.state,
        "bytes": state.disk_bytes,
        "live_bytes": state.live_bytes,
        "records": state.records,
    }


def _journal_in_short(backend: Backend) -> Json | None:
    """Returns the facts of the journal for the overview."""
    if backend.turn.store is None:
        return None
    found = journal(backend)
    names = ("policy", "bytes", "budget_bytes", "disk_free_bytes", "last_fsync", "writable")
    return {name: found[name] for name in names} | {"fsync_p99_s": found["fsyncs"]["p99"]}


def _policy(fsync_ms: int | None) -> str:
    return "-F" if fsync_ms is None else f"-f{fsync_ms}"


def free_bytes(directory: str) -> int:
    """Returns the free bytes of this directory's disk; 0 when they are unknown."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
