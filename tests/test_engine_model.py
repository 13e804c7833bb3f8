"""The engine against the naive queue of support/model.py, in random conversations that hypothesis draws and shrinks.

After every step the two agree about each outcome, about who was answered what and in which order, about every job,
tube, client and counter; and the engine proves its invariants. Where things fall due at one moment the engine may
take them in any order: then it must agree with the model in one of the possible orders.

--long makes it search for minutes; --seed repeats a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, cast

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from geventstalk.core.ages import Search
from geventstalk.core.bodies import Bodies
from geventstalk.core.engine import DRAINING, INSERTED, UNFINISHED, Engine
from geventstalk.core.figures import totals
from geventstalk.core.job import (
    BURIED,
    DELAYED,
    DELETED,
    READY,
    RESERVED,
    STATE_NAMES,
    Job,
    Ledger,
    Tally,
    held_body,
)
from geventstalk.core.meter import NO_TIMES, UNIT_NS
from geventstalk.core.operate import DONE, KEEP, NOT_FOUND, WRONG_STATE, Operate
from geventstalk.core.timerwheel import NEVER
from geventstalk.core.tube import DEADLINE_SOON, RESERVED_JOB, TIMED_OUT, Client, Tube
from tests.support.check import check
from tests.support.clock import SECOND, ManualClock
from tests.support.forgetful import Forgetful
from tests.support.model import Answer, Happening, Model, ModelPast, ModelTube

EXTENTS = [(50, 50), pytest.param(5_000, 100, marks=pytest.mark.long)]
"""Examples, and steps of each."""
LONG_LIMIT_S = 3600
"""The long ones take some minutes each on an idle core."""
ORDERS_MAX = 5
"""Of more happenings at one moment than this the orders are too many to try."""

WORDS = {
    RESERVED_JOB: "RESERVED",
    TIMED_OUT: "TIMED_OUT",
    DEADLINE_SOON: "DEADLINE_SOON",
    INSERTED: "INSERTED",
    DRAINING: "DRAINING",
    DONE: "DONE",
    NOT_FOUND: "NOT_FOUND",
    WRONG_STATE: "WRONG_STATE",
}
BODY = b"body\r\n"
TUBES = ("default", "t", "u")
NAMES = ("a", "b", "c", "d")

tubes = st.sampled_from(TUBES)
names = st.sampled_from(NAMES)
indices = st.integers(0, 7)
priorities = st.sampled_from((0, 1, 2, 1023, 1024))
delays = st.sampled_from((0, 0, 0, 1, 2, 3, 30))
ttrs = st.sampled_from((1, 1, 2, 3, 10))
bounds = st.integers(0, 4)
forces = st.sampled_from(("kick", "delete", "release", "bury"))
kept_or = partial(st.one_of, st.just(KEEP), st.just(KEEP))
limits = st.sampled_from((1, 2, 3, 1000))


class Listener(Client):
    def __init__(self, name: str, answers: list[Answer]) -> None:
        super().__init__()
        self.name = name
        self.answers = answers

    def answer(self, outcome: int, job: Job | None) -> None:
        self.answers.append((self.name, WORDS[outcome], 0 if job is None else job.id))


class EngineAndModel(RuleBasedStateMachine):
    """Clients are drawn by name, jobs by index; a client that waits or has gone takes part in nothing but time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.moments = {self.clock.ns % SECOND}
        self.engine = Operate(self.clock.ns)
        self.model = Model()
        self.answers: list[Answer] = []
        self.clients: dict[str, Listener] = {}
        self.leaving: list[Listener] = []
        self.uploads: list[tuple[Job, int]] = []
        self.joined = 0
        for name in NAMES[:3]:
            self._join(name)

    # --- drawing

    def _idle(self, name: str) -> Listener:
        """A client that can give a command now, if need be another one; it takes a moment that no other command had.

        With assume() hypothesis would throw the whole conversation away, and in the end nearly all of them.
        """
        ready = [each for each in (name, *NAMES) if each in self.clients and not self.clients[each].waiting]
        if not ready:
            ready = [name if name in self.clients else min(self.clients)]
            self.stop_waiting(ready[0])
        self._tick()
        client = self.clients[ready[0]]
        return client

    def _tick(self) -> int:
        """So that no two commands have deadlines at the same moment, unless one of them moved several jobs."""
        self.clock.pass_ns(1)
        while self.clock.ns % SECOND in self.moments:
            self.clock.pass_ns(1)
        self.moments.add(self.clock.ns % SECOND)
        self._settle()
        return self.clock.ns

    def _id(self, index: int) -> int:
        """One of the last jobs, which may be gone."""
        return max(self.engine.next_id - 1 - index, 0)

    def _held(self, name: str, index: int) -> int:
        """One of the client's jobs, or with a high index any job."""
        held = [job.id for job in self.model.held_by(name)]
        return held[index] if index < len(held) else self._id(index)

    def _join(self, name: str) -> None:
        self.joined += 1
        self.clients[name] = Listener(f"{name}{self.joined}", self.answers)
        self.engine.join(self.clients[name])
        self.model.join(self.clients[name].name)

    # --- commands

    @rule(name=names, pri=priorities, delay_s=delays, ttr_s=ttrs)
    def put(self, name: str, pri: int, delay_s: int, ttr_s: int) -> None:
        client = self._idle(name)
        job = self.engine.open_put(client, pri, delay_s, ttr_s, self.clock.ns)
        id = self.model.open_put(client.name, pri, delay_s, ttr_s, self.clock.ns)
        assert job.id == id
        self._finish_put(job, id)

    @rule(name=names, pri=priorities, ttr_s=ttrs, count=st.integers(2, 4))
    def put_several(self, name: str, pri: int, ttr_s: int, count: int) -> None:
        for _ in range(count):
            self.put(name, pri, 0, ttr_s)

    @rule(name=names, pri=priorities, delay_s=delays, ttr_s=ttrs)
    def begin_put(self, name: str, pri: int, delay_s: int, ttr_s: int) -> None:
        client = self._idle(name)
        job = self.engine.open_put(client, pri, delay_s, ttr_s, self.clock.ns)
        self.uploads.append((job, self.model.open_put(client.name, pri, delay_s, ttr_s, self.clock.ns)))

    @precondition(lambda self: self.uploads)
    @rule(index=indices, complete=st.booleans())
    def end_put(self, index: int, complete: bool) -> None:
        job, id = self.uploads.pop(index % len(self.uploads))
        if complete:
            self._tick()
            self._finish_put(job, id)
        else:
            self.engine.abandon_put(job)
            self.model.abandon_put(id)

    def _finish_put(self, job: Job, id: int) -> None:
        outcome = self.engine.put(job, BODY, self.clock.ns)
        assert WORDS[outcome] == self.model.put(id, self.clock.ns)

    @rule(name=names, timeout_s=st.sampled_from((-1, -1, 0, 1, 2, 5)))
    def reserve(self, name: str, timeout_s: int) -> None:
        client = self._idle(name)
        now_ns = self.clock.ns
        word, id = self.model.reserve(client.name, timeout_s, now_ns)
        job = self.engine.reserve(client, now_ns)
        if job is not None:
            assert (word, id) == ("RESERVED", job.id)
        elif self.engine.deadline_soon(client, now_ns):
            assert word == "DEADLINE_SOON"
        elif timeout_s == 0:
            assert word == "TIMED_OUT"
        else:
            assert word == "WAITING"
            self.engine.wait(client, now_ns, timeout_s)

    @rule(timeout_s=st.sampled_from((-1, -1, 2)))
    def everybody_reserves(self, timeout_s: int) -> None:
        for name in NAMES:
            if name in self.clients and not self.clients[name].waiting:
                self.reserve(name, timeout_s)

    @rule(name=names, count=st.integers(2, 4))
    def take_several(self, name: str, count: int) -> None:
        for _ in range(count):
            self.reserve(name, 0)

    @rule(name=names)
    def stop_waiting(self, name: str) -> None:
        client = self.clients.get(name)
        if client is None or not client.waiting:
            return
        self.engine.stop_waiting(client)
        self.model.stop_waiting(client.name)

    @rule(name=names, index=indices)
    def reserve_job(self, name: str, index: int) -> None:
        client = self._idle(name)
        id = self._id(index)
        job = self.engine.reserve_job(client, id, self.clock.ns)
        assert (job is not None) == self.model.reserve_job(client.name, id, self.clock.ns)

    @rule(name=names, index=indices)
    def delete(self, name: str, index: int) -> None:
        client = self._idle(name)
        id = self._id(index)
        assert self.engine.delete(client, id, self.clock.ns) == self.model.delete(client.name, id, self.clock.ns)

    @rule(name=names, index=indices, pri=priorities, delay_s=delays)
    def release(self, name: str, index: int, pri: int, delay_s: int) -> None:
        client = self._idle(name)
        id, now_ns = self._held(client.name, index), self.clock.ns
        done = self.engine.release(client, id, pri, delay_s, now_ns)
        assert done == self.model.release(client.name, id, pri, delay_s, now_ns)

    @rule(name=names, index=indices, pri=priorities)
    def bury(self, name: str, index: int, pri: int) -> None:
        client = self._idle(name)
        id = self._held(client.name, index)
        assert self.engine.bury(client, id, pri, self.clock.ns) == self.model.bury(client.name, id, pri, self.clock.ns)

    @rule(name=names, index=indices)
    def touch(self, name: str, index: int) -> None:
        client = self._idle(name)
        id = self._held(client.name, index)
        assert self.engine.touch(client, id, self.clock.ns) == self.model.touch(client.name, id, self.clock.ns)

    @rule(name=names, bound=bounds, limit=limits)
    def kick(self, name: str, bound: int, limit: int) -> None:
        client = self._idle(name)
        tube = client.used
        assert tube is not None
        buried, left = len(tube.buried) > 0, bound
        while (kicked := self.engine.kick(tube, buried, min(limit, left), self.clock.ns)) and left:
            left -= kicked
        assert bound - left == self.model.kick(client.name, bound, self.clock.ns)

    @rule(index=indices)
    def kick_job(self, index: int) -> None:
        self._tick()
        id = self._id(index)
        assert self.engine.kick_job(id, self.clock.ns) == self.model.kick_job(id, self.clock.ns)

    # --- what an operator does

    @rule(tube=tubes, pri=priorities, delay_s=delays, ttr_s=ttrs, complete=st.booleans())
    def operator_puts(self, tube: str, pri: int, delay_s: int, ttr_s: int, complete: bool) -> None:
        self._tick()
        job = self.engine.open_put_to(tube.encode(), pri, delay_s, ttr_s, self.clock.ns)
        id = self.model.open_put_to(tube, pri, delay_s, ttr_s, self.clock.ns)
        assert job.id == id
        if complete:
            self._finish_put(job, id)
        else:
            self.engine.abandon_put(job)
            self.model.abandon_put(id)

    @rule(index=indices, what=forces)
    def operator_forces(self, index: int, what: str) -> None:
        now_ns = self._tick()
        id = self._id(index)
        if what == "kick":
            outcome, word = self.engine.kick_one(id, now_ns), self.model.kick_one(id, now_ns)
        elif what == "delete":
            outcome, word = self.engine.force_delete(id, now_ns), self.model.force_delete(id, now_ns)
        elif what == "release":
            outcome, word = self.engine.force_release(id, now_ns), self.model.force_release(id, now_ns)
        else:
            outcome, word = self.engine.force_bury(id, now_ns), self.model.force_bury(id, now_ns)
        assert WORDS[outcome] == word

    def _fetch(self, id: int) -> None:
        """Brings the body of a job into memory."""
        raise AssertionError("all bodies are in memory")

    @rule(
        index=indices,
        pri=kept_or(priorities),
        delay_s=kept_or(delays),
        ttr_s=kept_or(ttrs),
        tube=st.one_of(st.just(""), tubes, st.just("fresh")),
    )
    def operator_alters(self, index: int, pri: int, delay_s: int, ttr_s: int, tube: str) -> None:
        now_ns = self._tick()
        id = self._id(index)
        outcome = self.engine.alter(id, pri, delay_s, ttr_s, tube.encode(), now_ns)
        if outcome == UNFINISHED:
            self._fetch(id)
            outcome = self.engine.alter(id, pri, delay_s, ttr_s, tube.encode(), now_ns)
        assert WORDS[outcome] == self.model.alter(id, pri, delay_s, ttr_s, tube, now_ns)

    @rule(name=names, state=st.sampled_from((READY, DELAYED, BURIED)))
    def peek(self, name: str, state: int) -> None:
        client = self._idle(name)
        job = self.engine.peek(client, state)
        assert (0 if job is None else job.id) == self.model.peek(client.name, STATE_NAMES[state])

    @rule(tube=st.sampled_from(("", "", *TUBES)))
    def look_at_ages(self, tube: str) -> None:
        if tube and tube.encode() not in self.engine.tubes:
            return
        search = Search(self.engine, self.engine.tubes[tube.encode()] if tube else None)
        states = ("ready", "delayed", "reserved", "buried")
        assert search.go_on() == tuple(self.model.oldest(tube, state) for state in states)

    @rule(name=names, tube=tubes)
    def use(self, name: str, tube: str) -> None:
        client = self._idle(name)
        self.engine.use(client, tube.encode())
        self.model.use(client.name, tube)

    @rule(name=names, tube=tubes)
    def watch(self, name: str, tube: str) -> None:
        client = self._idle(name)
        assert self.engine.watch(client, tube.encode()) == self.model.watch(client.name, tube)

    @rule(name=names, tube=tubes)
    def ignore(self, name: str, tube: str) -> None:
        client = self._idle(name)
        assert self.engine.ignore(client, tube.encode()) == self.model.ignore(client.name, tube)

    @rule(tube=tubes, delay_s=st.sampled_from((0, 1, 2, 5)))
    def pause(self, tube: str, delay_s: int) -> None:
        self._tick()
        now_ns = self.clock.ns
        assert self.engine.pause(tube.encode(), delay_s, now_ns) == self.model.pause(tube, delay_s, now_ns)
        self._settle()

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.engine.draining = self.model.draining = on

    # --- clients come and go

    @rule(name=names)
    def join(self, name: str) -> None:
        if name not in self.clients:
            self._join(name)

    @rule(name=names, limit=limits)
    def disconnect(self, name: str, limit: int) -> None:
        if name not in self.clients or len(self.clients) == 1:
            return
        self._tick()
        client = self.clients.pop(name)
        if not self._leave(client, limit):
            self.leaving.append(client)

    @precondition(lambda self: self.leaving)
    @rule(limit=limits)
    def disconnect_further(self, limit: int) -> None:
        self._tick()
        if self._leave(self.leaving[0], limit):
            self.leaving.pop(0)

    def _leave(self, client: Listener, limit: int) -> bool:
        before = len(held_by(client))
        done = self.engine.leave(client, self.clock.ns, limit)
        given = before - len(held_by(client))
        assert given <= limit
        self.model.give_back(client.name, given, self.clock.ns)
        if done:
            self.model.forget(client.name)
        return done

    # --- time

    @rule(ns=st.sampled_from((0, 1, 1000, 2**20, SECOND // 2, SECOND)))
    def time_passes(self, ns: int) -> None:
        self._walk_to(self.clock.ns + ns)

    @precondition(lambda self: self.model.deadlines())
    @rule(index=indices, ns=st.sampled_from((-1, 0, 1)))
    def time_comes_to_a_deadline(self, index: int, ns: int) -> None:
        deadlines = self.model.deadlines()
        self._walk_to(deadlines[index % len(deadlines)] + ns)

    @precondition(lambda self: self.model.deadlines())
    @rule(count=st.integers(1, 4), ns=st.sampled_from((-1, 0, 1)))
    def time_comes_to_the_next_deadlines(self, count: int, ns: int) -> None:
        for _ in range(count):
            if moments := [moment for moment in self.model.deadlines() if moment > self.clock.ns]:
                self._walk_to(moments[0] + ns)

    @precondition(lambda self: self.model.held_by(self.clients[min(self.clients)].name))
    @rule(timeout_s=st.sampled_from((-1, 1, 2, 5)), ns=st.sampled_from((-1, 0, 1)))
    def a_holder_waits_until_its_deadline(self, timeout_s: int, ns: int) -> None:
        name = min(self.clients)
        if not self.clients[name].waiting:
            self.reserve(name, timeout_s)
        held = self.model.held_by(self.clients[name].name)
        if held:
            self._walk_to(min(job.deadline_ns for job in held) + ns)

    @rule(seconds=st.sampled_from((1, 2, 3, 10, 100)))
    def everything_stalls(self, seconds: int) -> None:
        """The clock jumps, and all that should have happened meanwhile happens now."""
        now_ns = self.clock.ns + seconds * SECOND + 1
        if self._decidable(now_ns):
            self.clock.to(now_ns)
            self._settle()
        else:
            self._walk_to(now_ns)

    def _walk_to(self, end_ns: int) -> None:
        """From deadline to deadline, as an unhurried server does."""
        while (moments := self.model.deadlines()) and moments[0] <= end_ns:
            self.clock.to(moments[0])
            self._settle()
        self.clock.to(end_ns)
        self._settle()

    def _decidable(self, now_ns: int) -> bool:
        return len(self.model.due(now_ns)) <= ORDERS_MAX or not self.model.waiting()

    def _settle(self) -> None:
        """Everything due happens in both."""
        now_ns = self.clock.ns
        due = self.model.due(now_ns)
        next_ns = self.engine.next_deadline_ns()
        assert not due or (next_ns != NEVER and next_ns <= now_ns), "the engine would be called too late"
        limit = 1 if len(due) == 1 else 1000
        for _ in range(1_000):
            if self.engine.advance(now_ns, limit):
                break
        else:
            raise AssertionError("advance() never comes to an end")
        if len(due) < 2 or not self.model.waiting():
            for happening in due:
                self.model.happen(happening, now_ns)
            return
        model = self._in_some_order(self.model, due, now_ns)
        assert model is not None, f"no order of {due} gives the engine's answers {self.answers}"
        self.model = model

    def _in_some_order(self, model: Model, due: list[Happening], now_ns: int) -> Model | None:
        """The model after all that is due, in an order that gives the engine's answers and jobs; None without one.

        An order is given up at the first other answer: all orders of eight would take minutes.
        """
        if not due:
            return model if model.answers == self.answers and jobs_of(model) == jobs_of_engine(self.engine) else None
        for place, happening in enumerate(due):
            further = deepcopy(model)
            further.happen(happening, now_ns)
            if further.answers == self.answers[: len(further.answers)]:
                found = self._in_some_order(further, due[:place] + due[place + 1 :], now_ns)
                if found is not None:
                    return found
        return None

    # --- agreement

    @invariant()
    def the_engine_is_sound(self) -> None:
        check(self.engine)

    @invariant()
    def they_agree(self) -> None:
        assert self.answers == self.model.answers
        served = [client.name for client in self.engine.served if isinstance(client, Listener)]
        assert served == [name for name, _, _ in self.answers]
        self.engine.served.clear()
        self.answers.clear()
        self.model.answers.clear()
        assert jobs_of_engine(self.engine) == jobs_of(self.model)
        assert tubes_of_engine(self.engine) == tubes_of(self.model)
        assert clients_of_engine(self.engine) == clients_of(self.model)
        assert totals_of_engine(self.engine) == totals_of(self.model)

    @invariant()
    def nothing_is_overlooked(self) -> None:
        next_ns = self.engine.next_deadline_ns()
        moments = self.model.deadlines()
        assert not moments or (next_ns != NEVER and next_ns <= moments[0])


class Shelf(Ledger):
    """Keeps the bodies that leave memory, and gives them back."""

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self.place = 0

    def put(self, job: Job, tube_name: bytes) -> None:
        self.place += 1
        self.bodies.stands(job.id, self.place, len(held_body(job)))
        job.segment = 1  # 0 is none

    def prepare_rewrite(self, job: Job, tube_name: bytes, ttr_s: int) -> bool | None:
        self.bodies.take(job, BODY)
        return True

    def rewrite(self, job: Job, tube_name: bytes) -> None:
        self.bodies.left(job)
        self.put(job, tube_name)
        self.bodies.came(job)


class EngineWithBodiesOnDisk(EngineAndModel):
    """After each step every body has left memory; some are on their way back."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies = self.engine.bodies = Forgetful(0)
        self.bodies.reads_back = lambda segment: True
        self.engine.ledger = Shelf(self.bodies)
        self.wanted: list[Job] = []

    @rule(index=indices)
    def somebody_wants_a_body(self, index: int) -> None:
        job = self.engine.jobs.get(self._id(index))
        if job is not None and job.body is None:
            self._want(job)

    def _want(self, job: Job) -> None:
        self.bodies.wait_for(job)
        self.wanted.append(job)

    def _fetch(self, id: int) -> None:
        job = self.engine.jobs.get(id)
        assert job is not None and job.body is None
        self._want(job)
        self._come()

    @rule()
    def bodies_come(self) -> None:
        """Also those of jobs that are gone by now."""
        self._come()

    def _come(self) -> None:
        fetched = self.bodies.next_fetch(self.engine)
        self.bodies.fetch_ended()
        for job in fetched:
            self.bodies.take(job, BODY)
        for job in self.wanted:
            assert job.body is not None or job.state == DELETED
            self.bodies.let_be(job)
        self.wanted.clear()

    @invariant()
    def bodies_leave(self) -> None:
        self.bodies.make_room(self.engine, 0)
        there = [job.id for job in self.engine.jobs if job.body is not None]
        assert set(there) <= {job.id for job in self.wanted}
        assert self.bodies.gone == self.engine.jobs.count - len(there)


# --- both sides as plain data


def jobs_of_engine(engine: Engine) -> list[tuple[Any, ...]]:
    found = []
    names = {client.number: client.name for client in engine.clients.values() if isinstance(client, Listener)}
    for job in sorted(engine.jobs, key=lambda job: job.id):
        tally = job.tally or Tally()
        counts = tally.reserves, tally.timeouts, tally.releases, tally.buries, tally.kicks
        deadline = job.rank if job.state in (RESERVED, DELAYED) else 0
        place = engine.tube_of(job).name.decode(), STATE_NAMES[job.state], names.get(job.holder, ""), deadline
        found.append((job.id, *place, job.pri, job.delay_s, job.ttr_s, job.since_ns, *counts))
    return found


def jobs_of(model: Model) -> list[tuple[Any, ...]]:
    found = []
    for job in sorted(model.jobs, key=lambda job: job.id):
        if job.state == "uploading":
            continue
        counts = job.reserves, job.timeouts, job.releases, job.buries, job.kicks
        deadline = job.deadline_ns if job.state in ("reserved", "delayed") else 0
        place = job.tube, job.state, job.holder, deadline
        found.append((job.id, *place, job.pri, job.delay_s, job.ttr_s, job.since_ns, *counts))
    return found


def tubes_of_engine(engine: Engine) -> list[tuple[Any, ...]]:
    def ids(tube: Tube) -> list[list[int]]:
        heaps = (tube.ready, tube.delayed, tube.buried)
        return [heap.smallest(len(heap)) for heap in heaps]

    return [
        (
            (name.decode(), *ids(tube)),
            (tube.urgent, tube.reserved, tube.jobs, tube.using, len(tube.watchers), engine.waiting_in(tube)),
            (tube.total_pauses, tube.pause_s),
            tube.paused_until_ns,
            past_of_engine(tube),
        )
        for name, tube in engine.tubes.items()
    ]


def tubes_of(model: Model) -> list[tuple[Any, ...]]:
    def ids(tube: ModelTube) -> list[list[int]]:
        return [[job.id for job in model.jobs_in(tube.name, state)] for state in ("ready", "delayed", "buried")]

    def current(tube: ModelTube) -> tuple[int, ...]:
        return (
            sum(job.pri < 1024 for job in model.jobs_in(tube.name, "ready")),
            len(model.jobs_in(tube.name, "reserved")),
            sum(job.tube == tube.name for job in model.jobs),
            sum(client.used == tube.name for client in model.clients),
            sum(tube.name in client.watched for client in model.clients),
            sum(tube.name in client.watched for client in model.waiting()),
        )

    return [
        (
            (tube.name, *ids(tube)),
            current(tube),
            (tube.pauses, tube.pause_s),
            tube.paused_until_ns if tube.paused else 0,
            past_of(tube.past),
        )
        for tube in model.tubes
    ]


def past_of_engine(of: Engine | Tube) -> tuple[Any, ...]:
    queued, worked = of.queued or NO_TIMES, of.worked or NO_TIMES
    return totals(of), queued.counts, queued.sum_ns, worked.counts, worked.sum_ns


def past_of(past: ModelPast) -> tuple[Any, ...]:
    def counts(times_ns: list[int]) -> list[int]:
        ends = [UNIT_NS * 2**at for at in range(len(NO_TIMES.counts))]
        found = [0] * len(ends)
        for ns in times_ns:
            found[next(at for at, end in enumerate(ends) if ns < end)] += 1
        return found

    return past.totals(), counts(past.queued), sum(past.queued), counts(past.worked), sum(past.worked)


def held_by(client: Client) -> list[int]:
    """The ids of its jobs in order of reservation, also while they are given back."""
    return [*client.reserved, *[job.id for job in reversed(client.leaving) if job.holder == client.number]]


def clients_of_engine(engine: Engine) -> list[tuple[Any, ...]]:
    return [
        (
            client.name,
            client.used.name.decode() if client.used else "",
            [tube.name.decode() for tube in client.watched.values()],
            held_by(client),
            client.waiting,
            client.producer,
            client.worker,
        )
        for client in engine.clients.values()
        if isinstance(client, Listener)
    ]


def clients_of(model: Model) -> list[tuple[Any, ...]]:
    return [
        (
            client.name,
            client.used,
            client.watched,
            [job.id for job in model.held_by(client.name)],
            client.waits_since > 0,
            client.producer,
            client.worker,
        )
        for client in model.clients
    ]


def totals_of_engine(engine: Engine) -> tuple[int, ...]:
    states = engine.ready_count, engine.reserved_count, engine.delayed_count, engine.buried_count
    who = engine.waiting_count, engine.producer_count, engine.worker_count, len(engine.clients), engine.total_clients
    return (*states, engine.urgent_count, *who, engine.next_id, *past_of_engine(engine))


def totals_of(model: Model) -> tuple[int, ...]:
    states = [sum(job.state == state for job in model.jobs) for state in ("ready", "reserved", "delayed", "buried")]
    urgent = sum(job.state == "ready" and job.pri < 1024 for job in model.jobs)
    who = (
        len(model.waiting()),
        sum(client.producer for client in model.clients),
        sum(client.worker for client in model.clients),
        len(model.clients),
        model.total_clients,
    )
    return (*states, urgent, *who, model.next_id, *past_of(model.past))


@pytest.mark.slow
@pytest.mark.timeout(LONG_LIMIT_S)
@pytest.mark.parametrize("machine", [EngineAndModel, EngineWithBodiesOnDisk], ids=["memory", "disk"])
@pytest.mark.parametrize("examples, steps", EXTENTS)
def test_engine_and_model_agree(seed: int, examples: int, steps: int, machine: type[RuleBasedStateMachine]) -> None:
    # A cast, because the hypothesis that still supports Python 3.10 has no types here.
    cast(Callable[..., None], run_state_machine_as_test)(
        hypothesis.seed(seed)(machine),
        settings=settings(
            max_examples=examples if machine is EngineAndModel else examples // 2,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


def wander(draw: random.Random, steps: int) -> None:
    """One long conversation. Hypothesis finds what is small and odd; this does in bulk what clients mostly do.

    Which commands are frequent is drawn for each conversation anew, and a backlog stays small, so that clients wait.
    """
    machine = EngineAndModel()

    def put() -> None:
        if machine.engine.ready_count < 4 or draw.random() < 0.05:
            machine.put(name(), pri(), delay(), ttr())

    def name() -> str:
        return draw.choice(NAMES)

    def pri() -> int:
        return draw.choice((0, 1, 2, 1023, 1024))

    def delay() -> int:
        return draw.choice((0, 0, 0, 1, 2, 30))

    index = partial(draw.choice, (0, 0, 0, 0, 1, 2, 4))
    ttr = partial(draw.choice, (1, 1, 2, 3, 10))
    tube = partial(draw.choice, TUBES)
    ns = partial(draw.choice, (-1, 0, 1))
    limit = partial(draw.choice, (1, 2, 1000))
    kept_or = partial(draw.choice, (False, False, True))
    moves: dict[Callable[[], object], int] = {
        put: 16,
        lambda: machine.put_several(name(), pri(), ttr(), draw.randrange(2, 5)): 1,
        lambda: machine.begin_put(name(), pri(), delay(), ttr()): 1,
        lambda: machine.uploads and machine.end_put(index(), draw.random() < 0.8): 1,
        lambda: machine.reserve(name(), draw.choice((-1, -1, -1, 0, 2, 5))): 16,
        lambda: machine.everybody_reserves(draw.choice((-1, 2))): 6,
        lambda: machine.stop_waiting(name()): 1,
        lambda: machine.reserve_job(name(), index()): 3,
        lambda: machine.delete(name(), index()): 5,
        lambda: machine.release(name(), index(), pri(), delay()): 6,
        lambda: machine.bury(name(), index(), pri()): 5,
        lambda: machine.touch(name(), index()): 4,
        lambda: machine.kick(name(), draw.randrange(5), limit()): 5,
        lambda: machine.kick_job(index()): 2,
        lambda: machine.operator_puts(tube(), pri(), delay(), ttr(), draw.random() < 0.9): 1,
        lambda: machine.operator_forces(index(), draw.choice(("kick", "delete", "release", "bury"))): 5,
        lambda: machine.operator_alters(
            *(index(), pri() if kept_or() else KEEP, delay() if kept_or() else KEEP, ttr() if kept_or() else KEEP),
            tube() if kept_or() else "",
        ): 5,
        lambda: machine.peek(name(), draw.choice((READY, DELAYED, BURIED))): 1,
        lambda: machine.look_at_ages(draw.choice(("", "", *TUBES))): 6,
        lambda: machine.use(name(), tube()): 2,
        lambda: machine.watch(name(), tube()): 5,
        lambda: machine.ignore(name(), tube()): 3,
        lambda: machine.pause(tube(), draw.choice((0, 0, 1, 2))): 2,
        lambda: machine.drain(draw.random() < 0.1): 1,
        lambda: machine.join(name()): 4,
        lambda: machine.disconnect(name(), limit()): 2,
        lambda: machine.leaving and machine.disconnect_further(limit()): 3,
        lambda: machine.time_passes(draw.choice((0, 1, 2**20, SECOND // 2, SECOND))): 3,
        lambda: machine.model.deadlines() and machine.time_comes_to_a_deadline(index(), ns()): 4,
        lambda: machine.time_comes_to_the_next_deadlines(draw.randrange(1, 4), ns()): 4,
        lambda: machine.a_holder_waits_until_its_deadline(draw.choice((-1, 1, 2)), ns()): 2,
        lambda: machine.everything_stalls(draw.choice((1, 2, 3))): 1,
    }
    weights = [weight * draw.choice((0, 1, 1, 1, 1, 3)) for weight in moves.values()]
    for move in draw.choices([*moves], weights, k=steps):
        move()
        machine.the_engine_is_sound()
        machine.they_agree()
        machine.nothing_is_overlooked()


@pytest.mark.slow
@pytest.mark.timeout(LONG_LIMIT_S)
@pytest.mark.parametrize("walks", [15, pytest.param(1_000, marks=pytest.mark.long)])
def test_engine_and_model_agree_at_length(seed: int, walks: int) -> None:
    draw = random.Random(seed)
    for _ in range(walks):
        wander(draw, 300)
