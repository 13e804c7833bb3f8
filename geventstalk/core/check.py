"""The proof: what is always true of an engine, by a recount of everything.

This room must not change anything. It costs as much as the engine is large: it is for tests.
Invariant: whatever command, slice or end of a deadline came last, check() finds nothing wrong.
"""

from __future__ import annotations

from geventstalk.core.engine import DEADLINE_MARGIN_NS, NEVER, Engine
from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, URGENT_PRI_MAX
from geventstalk.core.order import EMPTY
from geventstalk.core.tube import ID_BITS, NUMBER_BITS, NUMBER_MASK, Client, Tube


def check(engine: Engine) -> None:
    """Asserts every invariant by a recount: O(everything), for tests."""
    engine.wheel.check()
    places = _places(engine)
    counted = dict.fromkeys((READY, RESERVED, BURIED, DELAYED), 0)
    urgent = 0
    for job in engine.jobs:
        assert job.state in counted and job.id < engine.next_id
        counted[job.state] += 1
        urgent += job.state == READY and job.pri <= URGENT_PRI_MAX
        assert places.pop((job.state, job.rank << ID_BITS | job.id)) == job.tube, "a job is not in its place"
        assert (job.state == RESERVED) == (job.holder != 0)
    assert not places, f"places name jobs that do not exist: {places}"
    assert counted[READY] == engine.ready_count and counted[RESERVED] == engine.reserved_count
    assert counted[BURIED] == engine.buried_count and counted[DELAYED] == engine.delayed_count
    assert urgent == engine.urgent_count == sum(tube.urgent for tube in engine.tubes.values())
    assert len(engine.tubes) == len(engine.tube_by_number)
    for tube in engine.tubes.values():
        _check_tube(engine, tube)
    for client in engine.clients.values():
        _check_client(engine, client)
    assert engine.waiting_count == sum(client.waiting for client in engine.clients.values())
    assert engine.producer_count == sum(client.producer for client in engine.clients.values())
    assert engine.worker_count == sum(client.worker for client in engine.clients.values())


def _places(engine: Engine) -> dict[tuple[int, int], int]:
    """Every entry of every heap as (state, entry) with its tube, each only once."""
    places: dict[tuple[int, int], int] = {}
    for tube in engine.tubes.values():
        for state, heap in ((READY, tube.ready), (DELAYED, tube.delayed), (BURIED, tube.buried)):
            for entry in heap.smallest(len(heap)):
                assert (state, entry) not in places
                places[state, entry] = tube.number
    for client in engine.clients.values():
        holding = [*client.reserved.values(), *client.leaving]
        held = [job for job in holding if job.holder == client.number]
        entries = sorted(job.rank << ID_BITS | job.id for job in held)
        assert entries == client.deadlines.smallest(len(held) + 1)
        assert len(held) == len(holding) or client.leaving
        for job in held:
            places[RESERVED, job.rank << ID_BITS | job.id] = job.tube
    return places


def _check_tube(engine: Engine, tube: Tube) -> None:
    assert engine.tube_by_number[tube.number] is tube
    placed = len(tube.ready) + len(tube.delayed) + len(tube.buried) + tube.reserved
    assert tube.jobs >= placed, "jobs that are uploaded count, so a tube may have more than are placed"
    assert tube.jobs or tube.using or tube.watchers or tube is engine.default
    stocked = len(tube.ready) > 0 and not tube.paused_until_ns
    assert stocked == (tube.number in engine.stocked)
    assert not (stocked and engine.waiting_in(tube)), "a ready job and a client that waits for it"
    first = tube.delayed.first()
    if first != EMPTY:
        assert tube.armed and tube.deadline_ns <= first >> ID_BITS
    if tube.paused_until_ns:
        assert tube.armed and tube.deadline_ns <= tube.paused_until_ns
    assert {entry & NUMBER_MASK for entry in tube.line} == tube.in_line and len(tube.line) == len(tube.in_line)
    for entry in tube.line:
        client = engine.clients.get(entry & NUMBER_MASK)
        assert client is None or entry >> NUMBER_BITS <= client.wait_number
    for number in tube.watchers:
        client = engine.clients[number]
        assert number in tube.in_line or not client.waiting


def _check_client(engine: Engine, client: Client) -> None:
    assert client.used is not None and engine.tubes[client.used.name] is client.used
    assert client.watched and all(client.number in tube.watchers for tube in client.watched.values())
    first = client.deadlines.first()
    if first != EMPTY:
        due_ns = (first >> ID_BITS) - (DEADLINE_MARGIN_NS if client.waiting else 0)
        assert client.armed and client.deadline_ns <= due_ns
    if client.waiting and client.wait_until_ns != NEVER:
        assert client.armed and client.deadline_ns <= client.wait_until_ns
