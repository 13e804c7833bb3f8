"""Brings ready jobs and waiting clients together: the search among watched tubes, and the waiting lines.

This module must not know commands, nor when a wait or a ttr ends. state.py lists the parts of the engine.
Invariant: no unpaused tube has both a ready job and a waiting client, except between two slices of unfinished work.
Then the tube is `behind`, and its timer is armed.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from typing import Final

from mypy_extensions import i64

from geventstalk.core.job import READY, SECOND_NS, Job
from geventstalk.core.order import EMPTY
from geventstalk.core.shares import Shares
from geventstalk.core.state import SMALL_STEPS, TUBE_STEPS, EngineState
from geventstalk.core.timerwheel import NEVER
from geventstalk.core.tube import DEADLINE_MARGIN_NS, RESERVED_JOB, Client, Tube

_LOOKS: Final = 256
"""The most outdated entries that a search for a waiting client drops. Then the tube's timer continues the search."""
_LINES: Final = 512
"""Lines that wait() enters. The client's timer enters the others later."""
_SCAN_MAX: Final = 64
"""A client with more tubes looks at all of them once, and then only at those that may have changed."""


class Dispatch(EngineState):
    """Brings ready jobs and clients together."""

    # --- the search

    def _best_tube(self, client: Client) -> Tube | None:
        """Returns the watched, unpaused tube with the smallest first job. Searches the smaller of two sets."""
        watched = client.watched
        if len(watched) == 1:
            for number in watched:
                return self.stocked.get(number)
        if client.shares is not None and client.shares.mode:
            return self._shared_tube(client, client.shares)
        stocked = self.stocked
        few, many = (watched, stocked) if len(watched) <= len(stocked) else (stocked, watched)
        if len(few) > _SCAN_MAX:
            if client.arrivals == self.arrivals:
                return self._best_candidate(client)
            client.arrivals = self.arrivals
            client.candidates = []
            self.work += len(few) // SMALL_STEPS
        best: Tube | None = None
        best_pri: i64 = 0
        best_id: i64 = 0
        for number, tube in few.items():
            if number in many:
                pri, id = tube.ready.first_rank(), tube.ready.first()
                if best is None or pri < best_pri or (pri == best_pri and id < best_id):
                    best, best_pri, best_id = tube, pri, id
        return best

    def _shared_tube(self, client: Client, shares: Shares) -> Tube | None:
        """Returns the watched, unpaused tube with ready jobs whose turn it is."""
        stocked = self.stocked
        tubes = [tube for number, tube in client.watched.items() if number in stocked]
        self.work += len(client.watched) // SMALL_STEPS
        return shares.choose(tubes) if tubes else None

    def _best_candidate(self, client: Client) -> Tube | None:
        """Does what _best_tube() does, for a client that has looked at all tubes since a job last became ready.

        So a tube's first job can only have been replaced by a later one. A heap of the first jobs of that time shows
        which tube to look at again.
        """
        heap, stocked = client.candidates, self.stocked
        if not heap:
            heap = [_candidate(tube) for number, tube in client.watched.items() if number in stocked]
            heapify(heap)
            client.candidates = heap
            self.work += len(client.watched) // SMALL_STEPS
        steps = 0
        best: Tube | None = None
        while heap and best is None:
            id, tube = heap[0][1:]
            steps += 1
            if tube.number not in stocked:
                heappop(heap)
            elif tube.ready.first() != id:
                heapreplace(heap, _candidate(tube))
            else:
                best = tube
        self.work += steps // SMALL_STEPS
        return best

    # --- a job turns ready

    def _make_ready(self, job: Job, tube: Tube, now_ns: int) -> None:
        """Makes a job ready that is in no place. The ledger is not told."""
        pri = job.pri
        self._place_ready(tube, pri, job, now_ns)
        if job.holder:
            self._measure_work(tube, now_ns - job.since_ns)
        job.state = READY
        job.rank = pri
        job.holder = 0
        job.since_ns = now_ns
        if tube.line.entries:
            self._serve(tube, now_ns, 1)

    def _serve(self, tube: Tube, now_ns: int, limit: int) -> int:
        """Hands up to `limit` ready jobs of a tube that is not paused to its line, first come, first served.

        Returns how many jobs were handed over.
        """
        line = tube.line
        served = 0
        looks = _LOOKS
        while served < limit and line.entries and tube.number in self.stocked:
            number, wait_number = line.take_first()
            client = self.clients[number]
            if not client.waiting:
                client.absent[tube.number] = tube
            elif client.wait_number != wait_number:
                line.add(number, client.wait_number)
            else:
                client.absent[tube.number] = tube
                self._hand_over(tube, client, now_ns)
                served += 1
                continue
            looks -= 1
            if not looks:
                self._fall_behind(tube, now_ns)
                break
        return served

    def _hand_over(self, tube: Tube, client: Client, now_ns: int) -> None:
        """Reserves the tube's first job for a waiting client, and answers. After an exception the job is ready."""
        job = self._take_first(tube)
        since_ns = job.since_ns
        self._hold(client, job, tube, now_ns)
        try:
            self._answer(client, RESERVED_JOB, job)
        except BaseException:
            self._hold_failed(job, tube, READY, job.pri, since_ns)
            raise

    def _answer(self, client: Client, outcome: int, job: Job | None) -> None:
        """Ends a wait with this answer. After an exception the client still waits."""
        self.served.append(client)
        self.waiting_count -= 1
        client.waiting = False
        try:
            client.answer(outcome, job)
        except BaseException:
            client.waiting = True
            raise

    def _fall_behind(self, tube: Tube, now_ns: int) -> None:
        """Leaves work that one slice cannot do to the tube's timer."""
        self._arm(tube, now_ns)
        tube.behind = True

    # --- waiting

    def wait(self, client: Client, now_ns: int, timeout_s: int) -> None:
        """Puts the client at the end of the line of each watched tube. A `timeout_s` of -1 means for ever.

        The wait ends through Client.answer(), or silently through stop_waiting().
        """
        self.changing = True
        wait_number = self._wait_number + 1
        self._wait_number = wait_number
        absent = client.absent
        lines = min(len(absent), _LINES)
        for _ in range(lines):
            absent.popitem()[1].line.add(client.number, wait_number)
        if lines > TUBE_STEPS:
            self.work += lines // TUBE_STEPS
            if absent:
                self._arm(client, now_ns)  # _stand_in_more_lines() enters the others
        until_ns = NEVER
        if timeout_s >= 0:
            until_ns = now_ns + timeout_s * SECOND_NS
            self._arm(client, until_ns)
        first_ns = client.deadlines.first_rank()
        if first_ns != EMPTY:
            self._arm(client, first_ns - DEADLINE_MARGIN_NS)
        self.waiting_count += 1
        client.wait_number = wait_number
        client.wait_since_ns = now_ns
        client.wait_until_ns = until_ns
        client.waiting = True

    def _stand_in_more_lines(self, client: Client, now_ns: int, limit: int) -> int:
        """Enters lines that wait() left over. A client whose tube has a ready job is served at once.

        Returns the units of work.
        """
        lines = min(len(client.absent), TUBE_STEPS * limit)
        for _ in range(lines):
            tube = client.absent.popitem()[1]
            tube.line.add(client.number, client.wait_number)
            if tube.number in self.stocked:
                self._serve(tube, now_ns, 1)
                if not client.waiting:
                    break
        return 1 + lines // TUBE_STEPS

    def stop_waiting(self, client: Client) -> None:
        """Ends the wait of a client without an answer, if it waits."""
        if client.waiting:
            self.changing = True
            client.waiting = False
            self.waiting_count -= 1

    def deadline_soon(self, client: Client, now_ns: int) -> bool:
        """Returns whether a job of the client has no more time left than the margin before its deadline."""
        first_ns = client.deadlines.first_rank()
        return first_ns != EMPTY and now_ns >= first_ns - DEADLINE_MARGIN_NS

    def waiting_in(self, tube: Tube) -> int:
        """Returns how many clients wait for a job of this tube. Looks at each watcher, and counts that as work."""
        waiting = 0
        for client in tube.watchers.values():
            waiting += client.waiting
        self.work += len(tube.watchers) // SMALL_STEPS
        return waiting


def _candidate(tube: Tube) -> tuple[int, int, Tube]:
    """Returns a tube's entry in such a heap: priority and id of its first job, and the tube."""
    return tube.ready.first_rank(), tube.ready.first(), tube
