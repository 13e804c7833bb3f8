"""Makes an engine whole again after an exception in the middle of a change.

The fields of jobs, clients and tubes, and the job table, are true. All that follows from them (orders, lines, counters,
timers, the existence of tubes) is thrown away and made anew.
Invariant: afterwards all invariants of the engine hold, and what was true is still true.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from geventstalk.core.job import (
    BURIED,
    DELAYED,
    DELETED,
    READY,
    RESERVED,
    URGENT_PRI_MAX,
    Job,
    TaggedTally,
)
from geventstalk.core.line import Line
from geventstalk.core.order import Order
from geventstalk.core.rules import Rules
from geventstalk.core.timerwheel import NEVER, TimerWheel
from geventstalk.core.tube import Client, Tube

if TYPE_CHECKING:
    from geventstalk.core.engine import Engine


def rebuild(engine: Engine) -> None:
    """Rebuilds the engine. After a MemoryError out of here it cannot be used any more."""
    engine.jobs.recount()
    for job in [job for job in engine.jobs.in_order() if job.state == DELETED]:
        engine.jobs.remove(job.id)
    engine.wheel = TimerWheel(engine.wheel.now_ns)
    for tube in [*engine.tubes.values(), *engine.tube_by_number.values()]:
        _empty(tube)
    for client in engine.clients.values():
        _stand_alone(client)
    _join_clients(engine)
    if engine.rules is not None:
        _enter_jobs(engine, engine.rules)
    _place_jobs(engine)
    _find_tubes(engine)
    events = {tube.number: tube for tube in engine.settling + engine.active}  # also of tubes that are gone
    engine.settling = []
    engine.active = [tube for tube in events.values() if tube.active]
    for tube in engine.tubes.values():
        _arm_tube(engine, tube)
    for client in engine.clients.values():
        engine._arm_client(client)


def _find_tubes(engine: Engine) -> None:
    """Keeps the tubes that something refers to."""
    tubes = {tube.number: tube for tube in [*engine.tube_by_number.values(), *engine.tubes.values()]}
    alive = [tube for tube in tubes.values() if tube.jobs or tube.using or tube.watchers or tube is engine.default]
    engine.tubes = {tube.name: tube for tube in alive}
    engine.tube_by_number = {tube.number: tube for tube in alive}
    engine.stocked = {tube.number: tube for tube in alive if tube.ready.first() >= 0 and not tube.paused_until_ns}


def _empty(tube: Tube) -> None:
    tube.forget()
    tube.ready = Order()
    tube.blocked = None
    tube.delayed = Order()
    tube.buried = Order()
    tube.line = Line()
    tube.watchers = {}
    tube.behind = False
    tube.using = tube.jobs = tube.bytes = tube.reserved = tube.urgent = 0
    tube.low_ready = tube.low_delayed = tube.low_reserved = tube.low_buried = 0


def _stand_alone(client: Client) -> None:
    client.forget()
    client.deadlines = Order()
    client.arrivals = NEVER
    holding: list[Job] = [*client.reserved.values(), *reversed(client.leaving)]
    client.reserved = {job.id: job for job in holding if job.holder == client.number and job.state == RESERVED}
    client.leaving = []


def _join_clients(engine: Engine) -> None:
    engine.waiting_count = engine.producer_count = engine.worker_count = engine.watch_count = 0
    for number, client in engine.clients.items():
        engine.waiting_count += client.waiting
        engine.producer_count += client.producer
        engine.worker_count += client.worker
        used = client.used
        if used is not None:
            used.using += 1
        upload = client.upload
        if upload is not None:
            if engine.jobs.get(upload.id) is None:
                engine.tube_by_number[upload.tube].jobs += 1
            else:
                client.upload = None  # its put was finished, all but this
        client.absent = {}
        engine.watch_count += len(client.watched)
        for tube in client.watched.values():
            tube.watchers[number] = client
            if client.waiting:
                tube.line.add(number, client.wait_number)
            else:
                client.absent[tube.number] = tube


def _enter_jobs(engine: Engine, rules: Rules) -> None:
    rules.rebuild()
    for job in engine.jobs.in_order():
        rules.enter(job, engine.tube_by_number[job.tube])


def _place_jobs(engine: Engine) -> None:
    engine.ready_count = engine.urgent_count = engine.reserved_count = 0
    engine.delayed_count = engine.buried_count = 0
    engine.low_ready = engine.low_delayed = engine.low_reserved = engine.low_buried = 0
    for job in engine.jobs.in_order():
        tube = engine.tube_by_number[job.tube]
        tube.jobs += 1
        tube.bytes += engine.size_of(job)
        rules = engine.rules
        if job.state == READY:
            if rules is None or not rules.place(job, tube, job.rank, engine.wheel.now_ns):
                tube.ready.push(job.rank, job.id)
            engine.ready_count += 1
            if job.pri <= URGENT_PRI_MAX:
                engine.urgent_count += 1
                tube.urgent += 1
        elif job.state == DELAYED:
            tube.delayed.push(job.rank, job.id)
            engine.delayed_count += 1
        elif job.state == BURIED:
            tube.buried.push(job.rank, job.id)
            engine.buried_count += 1
            if rules is not None:
                rules.counts_buried(job, 1)
        else:
            holder = engine.clients[job.holder]
            holder.deadlines.push(job.rank, job.id)
            holder.reserved.setdefault(job.id, job)
            engine.reserved_count += 1
            tube.reserved += 1
            if rules is not None and isinstance(job.tally, TaggedTally):
                rules.reserved(job.tally)


def _arm_tube(engine: Engine, tube: Tube) -> None:
    """Arms a tube for its first delay, the end of its pause, and for clients that wait beside a ready job."""
    moments = [tube.paused_until_ns] if tube.paused_until_ns else []
    if tube.delayed.first() >= 0:
        moments.append(tube.delayed.first_rank())
    if tube.number in engine.stocked and tube.line.entries:
        moments.append(0)
        tube.behind = True
    if moments:
        engine.wheel.add(tube, min(moments))
