"""Applies the records that another node writes to the log to this node's engine.

This module must not know gevent, sockets, databases or the lease: its owner reads the log and hands the records in.
Invariant: the engine is at any moment as a restart would make it from the records so far. So a node that is to lead
only has to begin to write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from geventstalk.core.engine import Engine
from geventstalk.core.mirror import Mirror
from geventstalk.durable.records import apply_change, decode_whole, fits, make_plausible
from geventstalk.durable.store import Store
from journal.errors import JournalDamaged
from journal.log import CHANGE, FULL, Row

_PROGRESS_MASK: Final = (1 << 13) - 1


class Follower:
    """load() comes first, then apply() for new records. Turn.write_to() makes the store the engine's ledger."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.applied = 0  # records
        self._engine = engine
        self._store = store
        self._mirror: Mirror | None = None

    def load(self, clock: Callable[[], int], progress: Callable[[int], None] = lambda records: None) -> None:
        """Loads the jobs that the log holds by now. Raises JournalError.

        `progress` gets the number of records or jobs so far now and then, and may let others have a turn.
        """
        engine = self._engine
        for count, (job, tube_name) in enumerate(self._store.replay(engine.jobs, progress), 1):
            now_ns = clock()
            make_plausible(job, now_ns)
            engine.restore(job, tube_name, now_ns)
            if not count & _PROGRESS_MASK:
                progress(count)
        engine.restored(clock())
        if engine.bodies is not None:
            engine.bodies.recount(engine.jobs)  # now, while no client waits for this node
        self._mirror = Mirror(engine)

    def apply(self, segment: int, rows: list[Row], now_ns: int) -> None:
        """Applies records of the other node, in its order. Raises JournalDamaged."""
        mirror, offset, unfit = self._mirror, self._store.offset, self._store.unfit
        assert mirror is not None, "load() comes first"
        engine = self._engine
        jobs = engine.jobs
        for _, key, kind, _, payload in rows:
            try:
                if kind == FULL:
                    job, name = decode_whole(key, payload, offset)
                    job.segment = segment
                    make_plausible(job, now_ns)
                    mirror.set(job, name, now_ns)
                    if unfit:
                        unfit.discard(key)
                elif kind == CHANGE:
                    changed = jobs.get(key)
                    if changed is None:
                        raise ValueError("it is a change of a job that is not there")
                    tube = engine.tube_of(changed)
                    if fits(payload, tube.name, changed.ttr_s):
                        mirror.lift(changed)
                        apply_change(changed, payload, offset)
                        make_plausible(changed, now_ns)
                        changed.since_ns = now_ns
                        mirror.place(changed, tube, now_ns)
                        if unfit:
                            unfit.discard(key)
                    else:
                        unfit.add(key)
                else:
                    gone = jobs.get(key)
                    if gone is not None:
                        mirror.remove(gone, now_ns)
                    else:
                        mirror.forget_mark(key)
            except ValueError as error:
                where = f"segment {segment}, job {key}"
                raise JournalDamaged(f"journal record is not a job's ({where}): {error}") from error
        if engine.rules is not None:
            engine.rules.due.clear()  # the other node does that; see Rules.find_due()
        self.applied += len(rows)
