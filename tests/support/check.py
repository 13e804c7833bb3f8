"""Proves what is always true of an engine, by a recount of everything: for tests.

Invariant: whatever command, slice or end of a deadline came last, check() finds nothing wrong.
"""

from __future__ import annotations

from collections import Counter

from geventstalk.core.engine import NEVER, Engine
from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, URGENT_PRI_MAX, TaggedTally
from geventstalk.core.meter import NO_TIMES, Rates, Times
from geventstalk.core.order import EMPTY, Order
from geventstalk.core.rules import Rules
from geventstalk.core.state import events
from geventstalk.core.tube import DEADLINE_MARGIN_NS, Client, Tube


def check(engine: Engine) -> None:
    """Asserts every invariant."""
    engine.wheel.check()
    if engine.bodies is not None:
        engine.bodies.check(engine.jobs)
    places = _places(engine)
    counted = dict.fromkeys((READY, RESERVED, BURIED, DELAYED), 0)
    urgent = 0
    in_tubes = dict.fromkeys(engine.tube_by_number, 0)
    for job in engine.jobs:
        in_tubes[job.tube] += engine.size_of(job)
        assert job.state in counted and job.id < engine.next_id
        assert job.body is not None or engine.bodies is not None
        counted[job.state] += 1
        urgent += job.state == READY and job.pri <= URGENT_PRI_MAX
        assert places.pop((job.state, job.rank, job.id)) == job.tube, "a job is not in its place"
        assert (job.state == RESERVED) == (job.holder != 0)
    assert not places, f"places name jobs that do not exist: {places}"
    assert counted[READY] == engine.ready_count and counted[RESERVED] == engine.reserved_count
    assert counted[BURIED] == engine.buried_count and counted[DELAYED] == engine.delayed_count
    assert urgent == engine.urgent_count == sum(tube.urgent for tube in engine.tubes.values())
    assert len(engine.tubes) == len(engine.tube_by_number)
    _check_times(engine.queued, [tube.queued for tube in engine.tubes.values()])
    _check_times(engine.worked, [tube.worked for tube in engine.tubes.values()])
    _check_measured(engine, engine.reserved_count)
    for tube in engine.tubes.values():
        _check_tube(engine, tube)
        assert tube.bytes == in_tubes[tube.number]
    _check_ages(engine)
    _check_rates(engine)
    if engine.rules is not None:
        _check_rules(engine, engine.rules)
    for client in engine.clients.values():
        _check_client(engine, client)
    assert engine.waiting_count == sum(client.waiting for client in engine.clients.values())
    assert engine.producer_count == sum(client.producer for client in engine.clients.values())
    assert engine.worker_count == sum(client.worker for client in engine.clients.values())
    assert engine.watch_count == sum(len(client.watched) for client in engine.clients.values())


def _places(engine: Engine) -> dict[tuple[int, int, int], int]:
    """Every entry of every heap as (state, rank, id) with its tube, each only once."""
    places: dict[tuple[int, int, int], int] = {}
    for tube in engine.tubes.values():
        blocked = Order() if tube.blocked is None else tube.blocked
        for state, heap in ((READY, tube.ready), (READY, blocked), (DELAYED, tube.delayed), (BURIED, tube.buried)):
            for rank, id in heap.entries(len(heap)):
                assert (state, rank, id) not in places
                places[state, rank, id] = tube.number
    for client in engine.clients.values():
        holding = [*client.reserved.values(), *client.leaving]
        held = [job for job in holding if job.holder == client.number]
        entries = sorted((job.rank, job.id) for job in held)
        assert entries == client.deadlines.entries(len(held) + 1)
        assert len(held) == len(holding) or client.leaving
        for job in held:
            places[RESERVED, job.rank, job.id] = job.tube
    return places


def _check_tube(engine: Engine, tube: Tube) -> None:
    assert engine.tube_by_number[tube.number] is tube
    _check_measured(tube, tube.reserved)
    placed = tube.ready_count() + len(tube.delayed) + len(tube.buried) + tube.reserved
    assert tube.jobs >= placed, "jobs that are uploaded count, so a tube may have more than are placed"
    assert tube.jobs or tube.using or tube.watchers or tube is engine.default
    stocked = len(tube.ready) > 0 and not tube.paused_until_ns
    assert stocked == (tube.number in engine.stocked)
    for order in (tube.ready, tube.blocked, tube.delayed, tube.buried):
        if order is not None:
            order.check()
    first_ns = tube.delayed.first_rank()
    if first_ns != EMPTY:
        assert tube.armed and tube.deadline_ns <= first_ns
    if tube.paused_until_ns:
        assert tube.armed and tube.deadline_ns <= tube.paused_until_ns
    assert tube.armed or not tube.behind
    waits = tube.line.waits()
    for number, wait_number in waits.items():
        assert number in tube.watchers and wait_number <= engine.clients[number].wait_number
    for number, client in tube.watchers.items():
        assert engine.clients[number] is client and client.watched[tube.number] is tube
        assert (number in waits) != (tube.number in client.absent)
        in_line = client.waiting and number in waits
        assert tube.behind or not (stocked and in_line), "a ready job and a client that waits for it"


def _check_rules(engine: Engine, rules: Rules) -> None:
    """Which ready jobs may be given out, recounted from the fields of all jobs."""
    tagged = [(job, tally) for job in engine.jobs.in_order() if isinstance(tally := job.tally, TaggedTally)]
    shared = Counter(tally.tags.text for _, tally in tagged if not tally.tags.unique)
    assert {text: each.jobs for text, each in rules._shared.items()} == dict(shared)
    pending = Counter(tally.tags.group for _, tally in tagged if tally.tags.group)
    buried = Counter(tally.tags.group for job, tally in tagged if tally.tags.group and job.state == BURIED)
    reserved = Counter(tally.tags.key for job, tally in tagged if tally.tags.key and job.state == RESERVED)
    assert {name: group.pending for name, group in rules.groups.items() if group.pending} == dict(pending)
    assert {name: group.buried for name, group in rules.groups.items() if group.buried} == dict(buried)
    waiting = {id: name for name, group in rules.groups.items() for id in group.waiting}
    lanes: dict[tuple[int, bytes, int], list[tuple[int, int]]] = {}
    shown = {(tube.number, id) for tube in engine.tubes.values() for id in tube.ready.smallest(len(tube.ready))}
    for job, tally in tagged:
        tags, is_shown = tally.tags, (job.tube, job.id) in shown
        if job.state != READY:
            assert job.id not in waiting and not rules.why_over(job)
        elif rules.why_over(job):
            assert not is_shown
        elif job.id in waiting:
            assert waiting[job.id] == tags.after and not tally.freed and not is_shown
        elif tags.key:
            lanes.setdefault((job.tube, tags.key, tags.key_max), []).append((job.rank, job.id))
        else:
            assert is_shown, "a ready job that nothing blocks is not given out"
        if job.state == READY and tags.tries and tally.tried >= tags.tries and tags.dead != engine.tube_of(job).name:
            assert rules.why_over(job), "a job that had its tries may be given out"
    for (tube, key, most), jobs in lanes.items():
        first = min(jobs)[1] if reserved[key] < most else 0
        assert {id for _, id in jobs if (tube, id) in shown} == ({first} if first else set()), (key, most)
    keys: dict[bytes, set[int]] = {}
    for job, tally in tagged:
        if tally.tags.unique:
            keys.setdefault(engine.tube_of(job).name + b" " + tally.tags.unique, set()).add(job.id)
    for unique, id in rules._unique.items():
        assert id in rules.marks or id in keys[unique]
    assert set(keys) <= set(rules._unique), "a key is free although a job has it"


def _check_ages(engine: Engine) -> None:
    """The bounds hold, and with them, ids and strays the oldest jobs are found."""
    strays = {id: job for id in engine.strays if (job := engine.jobs.get(id)) is not None}
    assert {*engine.strays} == engine.stray_ids
    assert [*strays.values()] == sorted(strays.values(), key=lambda job: job.created_ns)
    oldest: dict[tuple[int, int], tuple[int, int | None]] = {}  # by tube, 0 for all, and state: it and the first
    for job in engine.jobs.in_order():
        tube = engine.tube_of(job)
        for place in (0, job.state), (tube.number, job.state):
            put_ns, first_ns = oldest.get(place, (job.created_ns, None))
            if job.id not in strays and first_ns is None:
                first_ns = job.created_ns
            oldest[place] = min(put_ns, job.created_ns), first_ns
        if job.id not in strays:
            assert job.id >= max(lows(engine)[job.state], lows(tube)[job.state])
    for (number, state), (put_ns, first_ns) in oldest.items():
        found = [job.created_ns for job in strays.values() if job.state == state and number in (0, job.tube)]
        assert engine.unsorted or put_ns == min(found + ([] if first_ns is None else [first_ns]))
    for tube in engine.tubes.values():
        assert tube.reserved == sum(job.state == RESERVED and job.tube == tube.number for job in engine.jobs)


def _check_rates(engine: Engine) -> None:
    """Each tube whose rates lack events is active, and will be settled."""
    active = [tube.number for tube in engine.active + engine.settling]
    assert len(active) == len(set(active))
    for tube in engine.tubes.values():
        assert tube.active == (tube.number in active)
        assert tube.active or not any(events(tube)) or (tube.rates and is_settled(tube.rates, events(tube)))
    assert active or is_settled(engine.rates, events(engine))


def is_settled(rates: Rates, counts: list[int]) -> bool:
    """Returns whether no event has come since the last settle()."""
    return [*rates._seen] == counts


def lows(of: Engine | Tube) -> dict[int, int]:
    """The bounds by state."""
    return {READY: of.low_ready, DELAYED: of.low_delayed, RESERVED: of.low_reserved, BURIED: of.low_buried}


def _check_times(total: Times, parts: list[Times | None]) -> None:
    """The total holds what these tubes hold, and what former tubes held."""
    there = [part for part in parts if part is not None]
    assert total.sum_ns >= sum(part.sum_ns for part in there)
    assert all(part.sum_ns >= 0 and min(part.counts) >= 0 for part in there)
    for at, count in enumerate(total.counts):
        assert count >= sum(part.counts[at] for part in there)
    assert not any(NO_TIMES.counts) and not NO_TIMES.sum_ns


def _check_measured(of: Engine | Tube, reserved: int) -> None:
    """Each reservation was measured when it began, if the job was ready, and when it ended."""
    queued, worked = of.queued or NO_TIMES, of.worked or NO_TIMES
    assert of.reserved_unready + queued.count() == worked.count() + reserved


def _check_client(engine: Engine, client: Client) -> None:
    assert client.used is not None and engine.tubes[client.used.name] is client.used
    assert client.watched or client.gone or client._blind  # type: ignore[attr-defined]  # a user without rights
    assert all(tube.watchers[client.number] is client for tube in client.watched.values())
    assert client.absent.keys() <= client.watched.keys()
    if client.arrivals == engine.arrivals and client.candidates:
        known = {tube.number: (pri, id) for pri, id, tube in client.candidates}
        stocked = client.watched.keys() & engine.stocked.keys()
        assert all(known[number] <= engine.stocked[number].ready.entries(1)[0] for number in stocked)
    assert client.armed or not (client.waiting and client.absent)
    first_ns = client.deadlines.first_rank()
    if first_ns != EMPTY:
        due_ns = first_ns - (DEADLINE_MARGIN_NS if client.waiting else 0)
        assert client.armed and client.deadline_ns <= due_ns
    if client.waiting and client.wait_until_ns != NEVER:
        assert client.armed and client.deadline_ns <= client.wait_until_ns
