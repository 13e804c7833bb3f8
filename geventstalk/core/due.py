"""Ends ttrs, delays, pauses and waits when their time has come.

This module must not read a clock: time comes in as an argument. state.py lists the parts of the engine.
Invariant: whatever has to happen at some moment has a timer that is armed for that moment or earlier. A timer that
fires too early finds nothing due and is armed anew.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core import trail
from geventstalk.core.dispatch import Dispatch
from geventstalk.core.job import DELAYED, READY, RESERVED, SECOND_NS, Job
from geventstalk.core.order import EMPTY
from geventstalk.core.timerwheel import NEVER
from geventstalk.core.tube import DEADLINE_MARGIN_NS, DEADLINE_SOON, TIMED_OUT, Client, Tube

_TIMER_STEPS: Final = 4
"""Timers that may change their slot in the wheel for each unit of work of a slice. The pure build takes 1.4 us for
each, and a slice of 250 units should stay below 2 ms."""


class Due(Dispatch):
    """The part of the engine with the deadlines."""

    def next_deadline_ns(self) -> int:
        """Returns when advance() is due, or NEVER."""
        return self.wheel.next_ns()

    def advance(self, now_ns: int, limit: int) -> bool:
        """Ends ttrs, delays, pauses and waits that are due: about `limit` of them at most.

        Returns whether everything that is due was done. If not, next_deadline_ns() says that the rest is due at once.
        """
        self.wheel.allowance = _TIMER_STEPS * limit
        while limit > 0:
            timer = self.wheel.pop_due(now_ns)
            if timer is None:
                return self.wheel.allowance > 0
            if isinstance(timer, Tube):
                limit -= 1 + self._tube_due(timer, now_ns, limit)
            elif isinstance(timer, Client):
                limit -= 1 + self._client_due(timer, now_ns, limit)
            else:
                assert self.rules is not None
                limit -= 1 + self.rules.fire(now_ns, limit)
        return False

    def _tube_due(self, tube: Tube, now_ns: int, limit: int) -> int:
        """Ends the tube's pause, serves its waiting clients, ends its delays. Returns how many jobs moved."""
        moved = 0
        if tube.paused_until_ns:
            if tube.paused_until_ns <= now_ns:
                self._unpause(tube)
            else:
                self._arm(tube, tube.paused_until_ns)
        tube.behind = False
        moved += self._serve(tube, now_ns, limit)
        delayed = tube.delayed
        while moved < limit and EMPTY < delayed.first_rank() <= now_ns:
            job = self.jobs.get(delayed.first())
            assert job is not None
            self._make_ready(job, self._leave_place(job), now_ns)
            moved += 1
        if moved >= limit:
            self._fall_behind(tube, now_ns)
        if delayed.first() != EMPTY:
            self._arm(tube, delayed.first_rank())
        return moved

    def _client_due(self, client: Client, now_ns: int, limit: int) -> int:
        """Takes overdue jobs away from the client, then ends its wait if the wait is over. Returns how many jobs moved.

        The order matters: a client that waits may get its own expired job again.
        """
        moved = 0
        deadlines = client.deadlines
        while moved < limit and EMPTY < deadlines.first_rank() <= now_ns:
            job = self.jobs.get(deadlines.first())
            assert job is not None
            self._time_out(job, now_ns)
            moved += 1
        if client.waiting and client.absent and moved < limit:
            moved += self._stand_in_more_lines(client, now_ns, limit - moved)
        if client.waiting and moved < limit:
            if self.deadline_soon(client, now_ns):
                self._answer(client, DEADLINE_SOON, None)
            elif client.wait_until_ns != NEVER and client.wait_until_ns <= now_ns:
                self._answer(client, TIMED_OUT, None)
        self._arm_client(client)
        if client.waiting and client.absent:
            self._arm(client, now_ns)
        return moved

    def _time_out(self, job: Job, now_ns: int) -> None:
        """Takes a job from its worker, at the end of its ttr, and makes it ready, or delays it by its backoff."""
        tally = job.counts()
        holder = job.holder
        tube = self._leave_place(job)
        delay_s = 0 if self.rules is None else self.rules.backoff_s(job, tube)
        if not delay_s:
            self._place_ready(tube, job.pri, job, now_ns)
        if not tube.active:
            self._wake(tube, now_ns)
        total, of_tube, timeouts = self.total_timeouts + 1, tube.total_timeouts + 1, tally.timeouts + 1
        if delay_s:
            self._set_back(job, tube, delay_s, now_ns)
        else:
            self._measure_work(tube, now_ns - job.since_ns)
            job.state = READY
            job.rank = job.pri
            job.holder = 0
            job.since_ns = now_ns
        self.total_timeouts = total
        tube.total_timeouts = of_tube
        tally.timeouts = timeouts
        if self.trails is not None:
            self.note(tube, job, trail.TIMED_OUT, holder, now_ns)
        if tube.line.entries and not delay_s:
            self._serve(tube, now_ns, 1)

    def _give_back(self, job: Job, now_ns: int) -> None:
        """Takes a job from a worker that is gone, and makes it ready, or delays it by its backoff."""
        holder = job.holder
        tube = self._leave_place(job)
        delay_s = 0 if self.rules is None else self.rules.backoff_s(job, tube)
        if self.trails is not None:
            self.note(tube, job, trail.HUNG_UP, holder, now_ns)
        if delay_s:
            self._set_back(job, tube, delay_s, now_ns)
        else:
            self._make_ready(job, tube, now_ns)

    def _set_back(self, job: Job, tube: Tube, delay_s: int, now_ns: int) -> None:
        """Delays a job that has left its worker, and writes the change to the ledger. Does all or nothing."""
        rank, before = now_ns + delay_s * SECOND_NS, (job.rank, job.delay_s, job.holder, job.since_ns)
        self._place_delayed(tube, rank, job.id)
        job.state = DELAYED
        job.rank = rank
        job.delay_s = delay_s
        job.holder = 0
        job.since_ns = now_ns
        try:
            self.ledger.change(job)
            self._measure_work(tube, now_ns - before[3])
        except BaseException:
            job.state = RESERVED
            job.rank, job.delay_s, job.holder, job.since_ns = before
            raise

    def _arm_client(self, client: Client) -> None:
        """Arms its timer for its first deadline, with the margin while it waits, and for the end of its wait."""
        first_ns = client.deadlines.first_rank()
        if first_ns != EMPTY:
            self._arm(client, first_ns - (DEADLINE_MARGIN_NS if client.waiting else 0))
        if client.waiting and client.wait_until_ns != NEVER:
            self._arm(client, client.wait_until_ns)

    def _unpause(self, tube: Tube) -> None:
        if tube.ready.first() != EMPTY:
            self.stocked[tube.number] = tube
            self.arrivals += 1
        tube.paused_until_ns = 0
        tube.pause_s = 0
