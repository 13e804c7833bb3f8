"""The maintenance of journal and memory beside the clients: compaction, catching up, bodies, rates.

A turn has one. This module must not know gevent, sockets, clocks, SQLite, nor channels and their replies: the owner of
the turn drives the tasks. Everything here runs without a pause from one yield to the next, so it needs no lock.
Invariant: a task does at most some milliseconds of work between two turns, reads and syncs in a thread only, and what
fails in one is the end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.bodies import Bodies
from geventstalk.core.job import DELETED
from geventstalk.core.operate import Operate
from geventstalk.core.order import EMPTY
from geventstalk.durable.reading import Reading
from geventstalk.durable.store import Store
from geventstalk.turn.tasks import NEXT_TURN, Flag, Task, Wait

CATCH_UP_SLICES: Final = 3
"""Slices of catching up in a turn, of up to a millisecond each: commands that only read are served in between."""
CATCH_UP_WAIT_NS: Final = 1_000_000
"""Catching up pauses for this long when the journal's own work has to get on first."""
DRAINED_MIN: Final = 256
"""With this many jobs fewer it may be worth while to give memory back."""
REPACK_PAGES: Final = 16
"""The pages of jobs that are moved in a slice: a millisecond, a few in the pure build."""
RATES_NS: Final = 5_000_000_000
"""The rates are brought up to date this often, as load averages are."""
RATES_SLICE: Final = 100
"""Tubes whose rates are brought up to date in one turn: a millisecond in pure Python."""
LACKING_NS: Final = 100_000_000
"""The time until a read is tried again that failed for a lack of descriptors, memory or disk space."""
HOUSEKEEPING_NS: Final = 50_000_000
"""Compaction begins this long after a write: garbage gathers, and a burst of writes is not disturbed."""


LookAhead = Generator[Wait, None, bool]


@mypyc_attr(allow_interpreted_subclasses=True)
class Maintenance:
    """The tasks, and what they are woken by.

    `begins` is called before bodies change, and a commit and replies follow. `bodies_came` is called when some bodies
    have come, or will not come. `written` is set when there is something to sync.
    """

    def __init__(
        self,
        engine: Operate,
        clock: Callable[[], int],
        begins: Callable[[], None],
        bodies_came: Callable[[], None],
        written: Flag,
    ) -> None:
        self.stopped = False  # after a failure, no task changes anything
        self.give_memory_back: Callable[[], None] = _nothing_to_give
        self.busy = Flag()  # something happened to jobs that the rates do not know
        self.drained = Flag()  # there are far fewer jobs than there were
        self.grown = Flag(True)  # there may be something to compact
        self.late = Flag()  # the journal does not keep pace
        self.missing = Flag()  # there are bodies to fetch
        self._engine = engine
        self._clock = clock
        self._begins = begins
        self._bodies_came = bodies_came
        self._written = written

    # --- figures and memory

    def keep_rates(self) -> Task:
        """Brings the rates up to date in slices while there are events. Sleeps while there are none."""
        while True:
            yield Wait(self.busy)
            yield Wait(at_ns=self._clock() + RATES_NS)
            self.busy.clear()
            while not self._engine.settle_rates(self._clock(), RATES_SLICE):
                yield Wait(at_ns=NEXT_TURN)
            if self._engine.active:
                self.busy.set()
            jobs = self._engine.jobs
            if jobs.most - jobs.count >= max(DRAINED_MIN, jobs.most >> 3):
                self.drained.set()

    def trim_memory(self) -> Task:
        """Gives back the memory of jobs that are gone. Where most are gone, moves those that are left, in slices."""
        while True:
            yield Wait(self.drained)
            self.drained.clear()
            jobs = self._engine.jobs
            scattered = 2 * jobs.count <= jobs.most
            jobs.most = jobs.count
            at = 0 if scattered else EMPTY
            with suppress(MemoryError):  # what could not be given back now is used again, or goes next time
                while at != EMPTY:
                    at = jobs.repack(at, REPACK_PAGES)
                    yield Wait(at_ns=NEXT_TURN)
                self.give_memory_back()

    def keep_bodies(self, store: Store, bodies: Bodies) -> Task:
        """Fetches bodies that a client waits for, or will soon, in a thread."""
        while True:
            yield Wait(self.missing)
            self.missing.clear()
            while jobs := bodies.next_fetch(self._engine):
                reading = store.reading(jobs)
                yield Wait(work=reading)
                if self.stopped:
                    return
                self.take_bodies(bodies, reading)
                yield Wait(at_ns=self._clock() + LACKING_NS if reading.lacking else NEXT_TURN)
            self._bodies_came()

    def take_bodies(self, bodies: Bodies, reading: Reading) -> None:
        """Bodies have come. Raises JournalDamaged or JournalFailed for one that cannot be had although it is there."""
        self._begins()
        bodies.fetch_ended()
        for job in reading.jobs:
            body = reading.body_of(job)
            if body is not None:
                bodies.take(job, body)
            elif job.state != DELETED:
                bodies.want(job)
        bodies.keep_bound(self._engine)
        self._bodies_came()

    # --- compaction

    def compact(self, store: Store) -> Task:
        """Compacts in slices, one a turn, while there is something to compact; sleeps while nothing is written."""
        while True:
            if not store.settling:
                self.grown.clear()
                yield Wait(self.grown)
            yield Wait(at_ns=self._clock() + HOUSEKEEPING_NS)
            while self.wants_compaction(store):
                if (yield from self.look_ahead(store)):
                    yield Wait(at_ns=self._clock() + LACKING_NS)
                if self.stopped or not self.wants_compaction(store):
                    break
                store.compact_slice(self._clock())
                self._written.set()
                self.heed(store)
                yield Wait(at_ns=NEXT_TURN)
                self.keep_bound(store)
            self.keep_bound(store)

    def look_ahead(self, store: Store) -> LookAhead:
        """Has a thread read what the next slice of compaction needs. Returns whether the system lacked something.

        The slice follows at once, before what was read can leave memory again.
        """
        scan = store.scan()
        if scan is not None:
            yield Wait(work=scan)
            if self.stopped:
                return False
            store.scanned(scan)
        lacking = scan is not None and scan.lacking
        jobs = store.to_move()
        if jobs and store.bodies is not None:
            reading = store.reading(jobs)
            yield Wait(work=reading)
            if self.stopped:
                return False
            for job in reading.jobs:
                body = reading.body_of(job)
                if body is not None:
                    store.bodies.take(job, body)
            lacking = lacking or reading.lacking
        return lacking

    def keep_bound(self, store: Store) -> None:
        """Segments may have been sealed: what was put, or moved, can leave memory."""
        if store.bodies is not None:
            store.bodies.keep_bound(self._engine)

    def wants_compaction(self, store: Store) -> bool:
        """Returns whether there is something to compact, now that the journal's own work was looked at."""
        store.tend()
        self.heed(store)
        return store.wants_compaction()

    def heed(self, store: Store) -> None:
        """Holds changes back when the journal is behind, whatever has filled it."""
        if store.behind:
            self._engine.held = True
            self.late.set()

    def catch_up(self, store: Store) -> Task:
        """Lets a journal that is behind catch up: a few slices in a turn."""
        for _ in range(CATCH_UP_SLICES):
            lacking = False
            store.tend()
            if store.wants_compaction():
                lacking = yield from self.look_ahead(store)
                if self.stopped:
                    return
            progress = store.catch_up(self._clock())
            if progress:
                self._written.set()
            if lacking or not progress:
                yield Wait(at_ns=self._clock() + CATCH_UP_WAIT_NS)
            self.keep_bound(store)
            if not progress or not store.behind:
                return
        yield Wait(at_ns=NEXT_TURN)


def _nothing_to_give() -> None:
    return
