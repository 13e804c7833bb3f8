"""Reads figures for charts from the engine, every few seconds, as long as HTTP is served.

This module must not change the engine. A reading is taken between turns; tubes are read in slices. Invariant: the
memory for tubes is bounded by TUBES_MAX and BUSY_MAX.
"""

from __future__ import annotations

from typing import Final

from geventstalk.api_shapes import RATES
from geventstalk.core.engine import Engine
from geventstalk.core.figures import rates, totals
from geventstalk.core.job import SECOND_NS
from geventstalk.core.meter import EVENTS
from geventstalk.core.tube import Tube
from geventstalk.http.backend import Backend
from geventstalk.http.history import SPARK_STEP_NS, STEP_NS, TUBE_SERIES, Reading
from geventstalk.http.memory import resident_bytes
from geventstalk.http.slices import Pace, page

TUBES_MAX: Final = 2000
"""The most tubes with a sparkline: those with the most jobs."""
BUSY_MAX: Final = 500
"""The most tubes with charts, the busiest of late, in 16 kB each: 8 MB."""
_IDLE_JOBS: Final = 1_000_000
"""The number of jobs in a tube that count as much as one event in a second."""
_LOOK_EVERY_S: Final = 0.2
"""The interval between checks that the journal is replayed."""


class Sampler:
    """Reads figures. Call run() in a greenlet of its own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._spark_number = -1

    def run(self) -> None:
        """Takes samples until the server stops. A fault ends the charts, not the server."""
        backend = self._backend
        wait_s = 0.0
        try:
            while not backend.stopping.wait(wait_s):
                if not backend.replayed:
                    wait_s = _LOOK_EVERY_S
                    continue
                self.sample()
                now_ns = backend.now_ns()
                wait_s = (STEP_NS - now_ns % STEP_NS) / SECOND_NS
        except Exception as error:
            backend.log.error("the charts of HTTP end here", exc_info=error)

    def sample(self) -> None:
        """Takes a reading of the server, and, when it is time, of the tubes."""
        now_ns = self._backend.now_ns()
        self._backend.history.add(self._read(now_ns))
        number = now_ns // SPARK_STEP_NS
        if number != self._spark_number:
            self._spark_number = number
            self._read_tubes(number)
            self._read_busy()

    def _read(self, now_ns: int) -> Reading:
        engine, store = self._backend.engine, self._backend.turn.store
        journal_bytes = 0 if store is None else store.facts()["journal-bytes"]
        assert isinstance(journal_bytes, int)
        return Reading(
            now_ns,
            _counts(engine),
            (
                engine.ready_count,
                engine.reserved_count,
                engine.delayed_count,
                engine.buried_count,
                resident_bytes(),
                journal_bytes,
            ),
            (list(engine.queued.counts), list(engine.worked.counts)),
        )

    def _read_tubes(self, number: int) -> None:
        """Continues the sparklines of tubes with jobs, or with some that still show. Yields to other requests."""
        tubes, sparks, pace = self._backend.engine.tubes, self._backend.sparks, Pace(self._backend)

        def jobs(name: bytes) -> int | None:
            tube = tubes.get(name)
            count = 0 if tube is None else tube.jobs
            return count if count or sparks.has_shape(name) else None

        known = sparks.names()
        names = [*tubes, *[name for name in known if name not in tubes]]
        kept, _ = page(names, jobs, pace, True, 0, TUBES_MAX)
        for name in set(known).difference(kept):
            pace.step()
            sparks.forget(name)
        for name in kept:
            pace.step()
            tube = tubes.get(name)
            sparks.add(name, number, 0 if tube is None else tube.ready_count())

    def _read_busy(self) -> None:
        """Continues the charts of the busiest tubes. Yields to other requests.

        A tube that is gone keeps its chart until other tubes replace it, without the events since its last reading.
        """
        backend, charts, pace = self._backend, self._backend.tube_history, Pace(self._backend)
        tubes = backend.engine.tubes

        def rank(name: bytes) -> float | None:
            tube, now_ns = tubes.get(name), backend.now_ns()
            activity = 0.0 if tube is None else sum(rates(tube, now_ns)[len(EVENTS) :]) + tube.jobs / _IDLE_JOBS
            return charts.rank(name, activity, now_ns) or None

        known = charts.names()
        kept, _ = page([*tubes, *[name for name in known if name not in tubes]], rank, pace, True, 0, BUSY_MAX)
        for name in set(known).difference(kept):
            pace.step()
            charts.forget(name)
        for name in kept:
            pace.step()
            tube, at_ns = tubes.get(name), backend.now_ns()
            if tube is None:
                reading = Reading(at_ns, (0,) * len(RATES), (0,) * (len(TUBE_SERIES) - len(RATES)))
            else:
                jobs = (tube.ready_count(), tube.reserved, len(tube.delayed), len(tube.buried))
                reading = Reading(at_ns, _counts(tube), jobs)
            charts.add(name, rank(name) or 0.0, 0 if tube is None else tube.number, reading)


def _counts(of: Engine | Tube) -> tuple[int, ...]:
    happened = totals(of)
    return happened.put, happened.reserve, happened.delete, happened.timeout, happened.bury
