"""A life of a journal, in a process that is recorded: the real store over the real journal, and what it promises.

It says in marks, in the order of its system calls: `S n [id, facts]` what it found, `G n` started, `A n facts` a batch
begins, `C n` committed, `D n` on the device up to here, `E n` a clean end, `F text` given up. The facts of a batch are
those of the jobs that it changes. Exit code: 0 after a clean end, 74 after a failure that the journal told of. A life
that takes too long says where each of its threads is, and ends with 1.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Thread

from geventstalk.core.job import BURIED, DELAYED, DELETED, READY, SECOND_NS, Job, held_body
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from journal import Journal, JournalError
from tests.support.faults import backpressure, fetch, wants_compaction
from tests.support.forgetful import Forgetful
from tests.support.torture.recorder import mark

FAILED = 74
PERIOD_MS = 2
"""Of `-fMS` in a life: so short that some syncs fall into it."""
_FAR_S = 10**9
_TAKE_BYTES = 4096

Fact = tuple[str, int, int, int, int, int]
"""Tube, priority, state, delay, rank (order of burying, or deadline) and size of the body."""
Facts = dict[int, Fact]


@dataclass(frozen=True)
class Orders:
    """The orders for a life."""

    directory: str
    seed: int
    policy: str = "f0"
    first_batch: int = 0
    batches: int = 60
    segment_bytes: int = 1 << 15
    sizes: tuple[int, ...] = (0, 10, 200, 900)
    jobs: int = 60  # with more, deleting comes first
    batch_max: int = 12
    budget: int | None = None
    filler: str = ""  # a file on the same disk, in which another process takes and gives back room
    close: bool = True
    fault: str = ""  # one of canaries.py
    bound_s: float = 60.0  # on a busy machine a life takes 5 s
    forgets: bool = False  # bodies leave memory as soon as they can be read back

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Orders:
        values = json.loads(text)
        return cls(**{**values, "sizes": tuple(values["sizes"])})


def body_of(id: int, size: int) -> bytes:
    """Bytes that only this job has."""
    return (b"%016x" % (id * 0x9E3779B97F4A7C15 % 2**64) * (size // 16 + 1))[:size] + b"\r\n"


def fact_of(job: Job, tube: bytes, size: int) -> Fact:
    """Fails when the body is in memory and is not the one that was put."""
    if job.body is not None:
        assert held_body(job) == body_of(job.id, size), f"the body of job {job.id} is garbled"
    return tube.decode(), job.pri, job.state, job.delay_s, job.rank if job.state != READY else 0, size


def written(facts: dict[int, Fact | None], last: Facts) -> str:
    """With what a job was before it is deleted: a damaged journal may still show that."""
    return json.dumps([[id, fact, last[id]] if id in last else [id, fact] for id, fact in facts.items()])


class Keeper:
    """Jobs and the store that keeps them, without an engine: every change is drawn here."""

    def __init__(
        self,
        directory: str,
        policy: str,
        segment_bytes: int,
        budget: int | None = None,
        said: list[str] | None = None,
        accept_damage: bool = False,
        forgets: bool = False,
    ) -> None:
        period = {"f0": 0, "fms": PERIOD_MS, "F": None}[policy]
        journal = Journal(
            directory,
            segment_bytes=segment_bytes,
            budget=budget,
            allocate=policy == "f0",
            accept_damage=accept_damage,
            log=(lambda text: None) if said is None else said.append,
        )
        self.store = Store(journal, period, ClockOffset(0, 0))
        self.bodies = Forgetful(0) if forgets else None
        if self.bodies is not None:
            self.store.keep_bodies(self.bodies)
        self.jobs: dict[int, Job] = {}
        self.tubes: dict[int, bytes] = {}
        self.next_id = 0
        self.buryings = 0
        self.last: Facts = {}  # of the jobs that the batch deletes
        self._todo: list[tuple[str, int]] = []

    def replay(self) -> Facts:
        """Returns what is there. Raises JournalError when that is damaged."""
        for job, tube in self.store.replay():
            fetch(self.store, [job])
            self.jobs[job.id] = job
            self.tubes[job.id] = bytes(tube)
            if job.state == BURIED:
                self.buryings = max(self.buryings, job.rank)
        return {id: self.fact(id) for id in self.jobs}

    @property
    def high_water(self) -> int:
        """The highest id that was ever used, as a replay finds it."""
        return self.store._log.high_water

    def fact(self, id: int) -> Fact:
        job = self.jobs[id]
        if job.body is None:
            assert self.bodies is not None
            size = self.bodies.size_of(job)
        else:
            size = len(job.body)
        return fact_of(job, self.tubes[id], size - 2)

    def forget(self) -> None:
        """All bodies go that can be read back."""
        if self.bodies is not None:
            for job in self.jobs.values():
                if job.body is not None and self.bodies.reads_back(job.segment):
                    self.bodies.let_go_at_once(job)

    def start(self) -> None:
        self.next_id = self.store.start(self.find)

    def find(self, id: int) -> tuple[Job, bytes] | None:
        job = self.jobs.get(id)
        return None if job is None else (job, self.tubes[id])

    def batch(self, draw: random.Random, orders: Orders) -> dict[int, Fact | None]:
        """Draws some changes, says what will hold after them, and appends them."""
        self._todo = []
        self.last.clear()
        facts: dict[int, Fact | None] = {}
        live = dict.fromkeys(self.jobs)
        for _ in range(draw.randint(1, orders.batch_max)):
            word = self._word(draw, len(live), orders)
            size = draw.choice(orders.sizes)
            if word == "put" or not live:
                if not self.store.admits(size + 2, b"tube-0"):
                    continue
                id, word = self.next_id, "put"
                self._put(draw, id, size)
                live[id] = None
            else:
                id = draw.choice(list(live))
            self._todo.append((word, id))
            if word == "delete":
                del live[id]
                facts[id] = None
                self.last[id] = self.fact(id)
            else:
                self._change(draw, self.jobs[id], word)
                facts[id] = self.fact(id)
        return facts

    def _put(self, draw: random.Random, id: int, size: int) -> None:
        self.next_id += 1
        job = self.jobs[id] = Job(id, 0, 0, 0, 60)
        job.body = body_of(id, size)
        self.tubes[id] = b"tube-%d" % draw.randint(0, 2)

    def _word(self, draw: random.Random, live: int, orders: Orders) -> str:
        crowded = live > orders.jobs
        words = ["put", "delete", "bury", "release", "delay"]
        return draw.choices(words, [1, 6, 1, 1, 1] if crowded else [6, 3, 2, 2, 2])[0]

    def _change(self, draw: random.Random, job: Job, word: str) -> None:
        job.state, job.rank = READY, 0
        job.pri = draw.choice([0, 1, 1024, 2**32 - 1, job.id])
        if word == "bury":
            self.buryings += 1
            job.state, job.rank = BURIED, self.buryings
        elif word == "delay" or (word == "put" and draw.random() < 0.2):
            job.delay_s = draw.randint(1, 1000)
            job.state, job.rank = DELAYED, (_FAR_S + job.id) * SECOND_NS

    def append(self) -> None:
        """Hands the drawn changes to the store, in order."""
        for word, id in self._todo:
            job, tube = self.jobs[id], self.tubes[id]
            if word == "put":
                self.store.put(job, tube)
                if self.bodies is not None:
                    self.bodies.came(job)
            elif word == "delete":
                self.store.delete(job)
                if self.bodies is not None:
                    self.bodies.left(job)
                job.state = DELETED
                del self.jobs[id], self.tubes[id]
            else:
                self.store.change(job)

    def compact(self, slices: int) -> None:
        while slices and (wants_compaction(self.store) or self.store.settling):
            if wants_compaction(self.store):
                self.store.compact_slice(time.monotonic_ns())
            else:
                time.sleep(0.0003)  # the journal's own thread is at it
            slices -= 1


class Syncer:
    """One sync at a time, here or in a thread beside; says how far the device is."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread: Thread | None = None
        self._error: list[BaseException] = []

    def sync(self, batch: int, *, beside: bool) -> None:
        self.wait()
        point = self._store.sync_point()

        def run() -> None:
            try:
                if point is not None:
                    point.run()
                mark(f"D {batch}")
            except BaseException as error:
                self._error.append(error)

        if beside:
            self._thread = Thread(target=run)
            self._thread.start()
        else:
            run()
            self.wait()

    def sync_when_due(self, batch: int, draw: random.Random) -> None:
        due_ns = self._store.sync_due_ns
        if due_ns and time.monotonic_ns() >= due_ns:
            self.sync(batch, beside=draw.random() < 0.4)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error:
            raise self._error.pop()


def live(orders: Orders) -> None:
    """The life itself. Raises JournalError when the journal gives up."""
    keeper = Keeper(orders.directory, orders.policy, orders.segment_bytes, orders.budget, forgets=orders.forgets)
    store = keeper.store
    found = keeper.replay()
    batch = orders.first_batch
    mark(f"S {batch} {json.dumps([keeper.high_water, list(found.items())])}")
    keeper.start()
    mark(f"G {batch}")
    draw = random.Random(orders.seed)
    syncer = Syncer(store)
    leisure = draw.choice([0.1, 0.5, 0.9])
    try:
        for _ in range(orders.batches):
            batch += 1
            fill(orders.filler, draw)
            facts = keeper.batch(draw, orders)
            mark(f"A {batch} {written(facts, keeper.last)}")
            keeper.append()
            store.commit(time.monotonic_ns())
            mark(f"C {batch}")
            if orders.policy == "f0":
                syncer.sync(batch, beside=draw.random() < 0.4)
            backpressure(store, partial(syncer.sync_when_due, batch, draw))
            syncer.sync_when_due(batch, draw)
            keeper.forget()
            if draw.random() < leisure:
                keeper.compact(draw.choice([1, 3, 20]))
        syncer.wait()
        if orders.close:
            store.close()
            mark(f"E {batch}")
    except JournalError:
        with suppress(JournalError):
            syncer.wait()
        store.abandon()
        raise


def fill(path: str, draw: random.Random) -> None:
    """Acts on a small disk as other processes do, between two turns."""
    if not path or draw.random() > 0.15:
        return
    if draw.random() < 0.4:
        Path(path).write_bytes(b"")
        return
    with suppress(OSError), open(path, "ab", buffering=0) as file:
        for _ in range(draw.choice([4, 64, 10**6])):
            file.write(bytes(_TAKE_BYTES))


def main(arguments: Iterable[str]) -> int:
    """The process."""
    (text,) = arguments
    orders = Orders.of(text)
    faulthandler.dump_traceback_later(orders.bound_s, exit=True)
    if orders.fault:
        from tests.support.torture.canaries import plant

        plant(orders.fault)
    try:
        live(orders)
    except JournalError as error:
        mark(f"F {type(error).__name__}: {error}")
        return FAILED
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    code = main(sys.argv[1:])
    os._exit(code)  # nothing else may touch the files
