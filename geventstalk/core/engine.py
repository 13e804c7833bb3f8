"""Tubes, jobs and waiting lines: every state transition and its counters; check.py proves them.

This room must not know clocks, sockets, the grammar or the journal: time comes in as monotonic integer nanoseconds,
changes go out to a ledger, answers to waiting clients through Client.answer(). No call here ever yields.
Whatever can be large takes a limit and says whether more is left, so that the caller can give others a turn.
Invariant: a job is in exactly one place, the one its state names, and no unpaused tube has both a ready job and a
waiting client, except between two slices of work that is not finished yet.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from geventstalk.core.job import (
    BURIED,
    DELAYED,
    DELETED,
    READY,
    RESERVED,
    SECOND_NS,
    URGENT_PRI_MAX,
    Job,
    Ledger,
)
from geventstalk.core.jobtable import JobTable
from geventstalk.core.order import EMPTY
from geventstalk.core.timerwheel import NEVER as NEVER  # what next_deadline_ns() returns when nothing is to happen
from geventstalk.core.timerwheel import Timer, TimerWheel
from geventstalk.core.tube import ID_BITS, ID_MASK, NUMBER_BITS, NUMBER_MASK, Client, Tube

# Outcomes, named as on the wire. A waiting client's answer is one of the first three.
RESERVED_JOB: Final = 1
TIMED_OUT: Final = 2
DEADLINE_SOON: Final = 3
INSERTED: Final = 4
DRAINING: Final = 5
OUT_OF_MEMORY: Final = 6

DEADLINE_MARGIN_NS: Final = SECOND_NS
"""A reserve is refused with DEADLINE_SOON when a job of the client has no more time left than this."""

_LINE_PRUNE_AT: Final = 64
_SERVE_SLICE: Final = 250
_GATHER_PER_MOVE: Final = 16
"""To put a job of a client that is gone into line takes a small part of what it takes to give it back."""

_MOVES_PER_JOB: Final = 16
"""To move a timer from slot to slot takes a small part of what it takes to move a job."""

DEFAULT_TUBE: Final = b"default"


class Engine:
    """All tubes, jobs and clients of a server. Counters are per process, as upstream."""

    def __init__(self, now_ns: int, ledger: Ledger | None = None) -> None:
        self.ledger = ledger if ledger is not None else Ledger()
        self.jobs = JobTable()
        self.next_id = 1
        self.tubes: dict[bytes, Tube] = {}  # in order of creation
        self.clients: dict[int, Client] = {}
        self.served: list[Client] = []  # clients answered since the caller emptied this list
        self.draining = False
        self.started_ns = now_ns
        self.ready_count = 0
        self.urgent_count = 0
        self.reserved_count = 0
        self.delayed_count = 0
        self.buried_count = 0
        self.waiting_count = 0
        self.producer_count = 0
        self.worker_count = 0
        self.total_jobs = 0
        self.total_timeouts = 0
        self.total_clients = 0
        self.wheel = TimerWheel(now_ns)
        self.tube_by_number: dict[int, Tube] = {}
        self.stocked: dict[int, Tube] = {}  # unpaused tubes with ready jobs, by number
        self._tube_number = 0
        self._wait_number = 0
        self._bury_number = 0
        self.default = self._tube(DEFAULT_TUBE)

    # --- clients and tubes

    def join(self, client: Client) -> None:
        """A new client: it uses and watches the default tube."""
        self.total_clients += 1
        client.number = self.total_clients
        self.clients[client.number] = client
        client.used = self.default
        self.default.using += 1
        self._watch(client, self.default)

    def leave(self, client: Client, now_ns: int, limit: int) -> bool:
        """The client is gone: it stops waiting and up to `limit` of its jobs go ready, in the order it reserved them.

        Returns whether that is done; call again until it is.
        """
        self.stop_waiting(client)
        reserved, leaving = client.reserved, client.leaving
        for _ in range(min(len(reserved), _GATHER_PER_MOVE * limit)):
            leaving.append(reserved.popitem()[1])
        if reserved:
            return False
        while leaving and limit > 0:
            limit -= 1
            job = leaving.pop()
            if job.holder == client.number:  # its ttr may have ended since the last slice
                self._make_ready(job, self._leave_place(job), now_ns)
        if leaving:
            return False
        self.wheel.cancel(client)
        self.producer_count -= client.producer
        self.worker_count -= client.worker
        del self.clients[client.number]
        used = client.used
        assert used is not None
        client.used = None
        used.using -= 1
        self._forget_if_unused(used)
        for tube in list(client.watched.values()):
            del tube.watchers[client.number]
            self._forget_if_unused(tube)
        client.watched.clear()
        client.absent.clear()
        return True

    def use(self, client: Client, name: bytes) -> None:
        """The client's puts, kicks and peeks go to this tube, which comes into being when it does not exist."""
        tube = self._tube(name)
        before = client.used
        assert before is not None
        tube.using += 1
        before.using -= 1
        client.used = tube
        self._forget_if_unused(before)

    def watch(self, client: Client, name: bytes) -> int:
        """Adds a tube to those the client reserves from. Returns how many it watches now."""
        tube = self._tube(name)
        if tube.number not in client.watched:
            self._watch(client, tube)
        return len(client.watched)

    def ignore(self, client: Client, name: bytes) -> int:
        """Takes a tube away. Returns how many are watched now, or 0 when it is the only one and therefore stays."""
        tube = self.tubes.get(name)
        if tube is not None and tube.number in client.watched:
            if len(client.watched) == 1:
                return 0
            del client.watched[tube.number]
            del tube.watchers[client.number]
            self._forget_if_unused(tube)
        return len(client.watched)

    def pause(self, name: bytes, delay_s: int, now_ns: int) -> bool:
        """Nobody reserves from the tube for `delay_s` seconds; 0 ends a pause. Returns whether the tube exists."""
        tube = self.tubes.get(name)
        if tube is None:
            return False
        tube.total_pauses += 1
        tube.pause_s = delay_s
        if delay_s:
            tube.paused_until_ns = now_ns + delay_s * SECOND_NS
            self.stocked.pop(tube.number, None)
            self._arm(tube, tube.paused_until_ns)
        else:
            self._unpause(tube)
            if self._serve(tube, now_ns, _SERVE_SLICE) == _SERVE_SLICE:
                self._arm(tube, now_ns)  # the rest of those who wait are served through the timer
        return True

    # --- put

    def open_put(self, client: Client, pri: int, delay_s: int, ttr_s: int) -> Job:
        """A put has begun: its id and its tube are settled now, although the body is still to come."""
        if not client.producer:
            client.producer = True
            self.producer_count += 1
        tube = client.used
        assert tube is not None
        tube.jobs += 1
        job = Job(self.next_id, tube.number, pri, delay_s, ttr_s)
        self.next_id += 1
        return job

    def abandon_put(self, job: Job) -> None:
        """The body did not arrive or was refused; the id stays spent."""
        tube = self.tube_by_number[job.tube]
        tube.jobs -= 1
        self._forget_if_unused(tube)

    def put(self, job: Job, body: bytes, now_ns: int) -> int:
        """The body (with its CRLF) is complete. Returns INSERTED, DRAINING or OUT_OF_MEMORY."""
        tube = self.tube_by_number[job.tube]
        if self.draining or not self.ledger.admits(len(body), tube.name):
            self.abandon_put(job)
            return DRAINING if self.draining else OUT_OF_MEMORY
        job.body = body
        job.created_ns = now_ns
        self.jobs.add(job)
        self.total_jobs += 1
        tube.total_jobs += 1
        if job.delay_s:
            self._make_delayed(job, tube, now_ns + job.delay_s * SECOND_NS)
            self.ledger.put(job, tube.name)
        else:
            # The ledger hears of the job before it is handed to somebody who waits: what it keeps is a ready job.
            job.state = READY
            self.ledger.put(job, tube.name)
            self._make_ready(job, tube, now_ns)
        return INSERTED

    def restore(self, job: Job, tube_name: bytes, now_ns: int) -> None:
        """Gives a job of `jobs` its place. Its state is READY, or BURIED or DELAYED with the rank set."""
        tube = self._tube(tube_name)
        tube.jobs += 1
        job.tube = tube.number
        if job.id >= self.next_id:
            self.next_id = job.id + 1
        if job.state == BURIED:
            self._bury_number = max(self._bury_number, job.rank)
            tube.buried.push(job.rank << ID_BITS | job.id)
            self.buried_count += 1
        elif job.state == DELAYED and job.rank > now_ns:
            self._make_delayed(job, tube, job.rank)
        else:
            self._make_ready(job, tube, now_ns)

    # --- reserve and wait

    def reserve(self, client: Client, now_ns: int) -> Job | None:
        """Reserves the ready job of the smallest (pri, id) in the watched tubes that are not paused."""
        self._become_worker(client)
        tube = self._best_tube(client)
        if tube is None:
            return None
        job = self._take_first(tube)
        self._hold(client, job, tube, now_ns)
        return job

    def deadline_soon(self, client: Client, now_ns: int) -> bool:
        """Whether a job that the client holds has no more than the margin left."""
        first = client.deadlines.first()
        return first != EMPTY and now_ns >= (first >> ID_BITS) - DEADLINE_MARGIN_NS

    def wait(self, client: Client, now_ns: int, timeout_s: int) -> None:
        """Stands the client at the end of the line of each tube it watches; `timeout_s` of -1 is for ever.

        The wait ends through Client.answer(), or silently through stop_waiting().
        """
        client.waiting = True
        self.waiting_count += 1
        self._wait_number += 1
        client.wait_number = self._wait_number
        entry = self._wait_number << NUMBER_BITS | client.number
        for tube in client.absent:
            if client.number not in tube.in_line and tube.number in client.watched:
                self._line_up(tube, entry)
        client.absent.clear()
        client.wait_until_ns = NEVER if timeout_s < 0 else now_ns + timeout_s * SECOND_NS
        if client.wait_until_ns != NEVER:
            self._arm(client, client.wait_until_ns)
        first = client.deadlines.first()
        if first != EMPTY:
            self._arm(client, (first >> ID_BITS) - DEADLINE_MARGIN_NS)

    def stop_waiting(self, client: Client) -> None:
        """The client no longer waits; it gets no answer. Nothing happens when it does not wait."""
        if client.waiting:
            client.waiting = False
            self.waiting_count -= 1

    def reserve_job(self, client: Client, id: int, now_ns: int) -> Job | None:
        """Reserves this very job, when it is ready, delayed or buried; tube, watches and pauses do not matter."""
        job = self.jobs.get(id)
        if job is None or job.state == RESERVED:
            return None
        self._become_worker(client)
        before = job.state
        tube = self._leave_place(job)
        self._hold(client, job, tube, now_ns)
        if before != READY:
            self.ledger.change(job)  # so that a crash brings it back ready, as every reserved job
        return job

    # --- what a worker does with a job

    def delete(self, client: Client, id: int) -> bool:
        """Deletes a job that the client holds or that nobody holds. Returns whether there was one."""
        job = self.jobs.get(id)
        if job is None or (job.state == RESERVED and job.holder != client.number):
            return False
        tube = self._leave_place(job)
        job.state = DELETED
        self.jobs.remove(id)
        tube.jobs -= 1
        tube.total_deletes += 1
        self.ledger.delete(job)
        self._forget_if_unused(tube)
        return True

    def release(self, client: Client, id: int, pri: int, delay_s: int, now_ns: int) -> bool:
        """Gives a job back with a new priority, at once or after a delay. Returns whether the client held it."""
        job = client.reserved.get(id)
        if job is None:
            return False
        tube = self._leave_place(job)
        job.pri = pri
        job.delay_s = delay_s
        job.counts().releases += 1
        if delay_s:
            self._make_delayed(job, tube, now_ns + delay_s * SECOND_NS)
            self.ledger.change(job)
        else:
            job.state = READY
            self.ledger.change(job)
            self._make_ready(job, tube, now_ns)
        return True

    def bury(self, client: Client, id: int, pri: int) -> bool:
        """Sets a job aside at the end of its tube's buried jobs. Returns whether the client held it."""
        job = client.reserved.get(id)
        if job is None:
            return False
        tube = self._leave_place(job)
        job.pri = pri
        job.counts().buries += 1
        self._bury_number += 1
        job.state = BURIED
        job.rank = self._bury_number
        tube.buried.push(job.rank << ID_BITS | job.id)
        self.buried_count += 1
        self.ledger.change(job)
        return True

    def touch(self, client: Client, id: int, now_ns: int) -> bool:
        """Starts the job's ttr anew. Returns whether the client held it."""
        job = client.reserved.get(id)
        if job is None:
            return False
        client.deadlines.discard(job.rank << ID_BITS | job.id)
        self._start_ttr(client, job, now_ns)
        return True

    def kick(self, tube: Tube, buried: bool, limit: int, now_ns: int) -> int:
        """Makes up to `limit` buried (else delayed) jobs of the tube ready, first ones first. Returns how many."""
        heap = tube.buried if buried else tube.delayed
        kicked = 0
        while kicked < limit and heap.first() != EMPTY:
            job = self.jobs.get(heap.first() & ID_MASK)
            assert job is not None
            self._kick(job, now_ns)
            kicked += 1
        return kicked

    def kick_job(self, id: int, now_ns: int) -> bool:
        """Makes this job ready. Returns whether it was buried or delayed."""
        job = self.jobs.get(id)
        if job is None or (job.state != BURIED and job.state != DELAYED):
            return False
        self._kick(job, now_ns)
        return True

    def tube_of(self, job: Job) -> Tube:
        """The tube of a job that exists."""
        return self.tube_by_number[job.tube]

    def peek(self, client: Client, state: int) -> Job | None:
        """The first READY, DELAYED or BURIED job of the tube that the client uses, left where it is."""
        tube = client.used
        assert tube is not None
        first = (tube.ready if state == READY else tube.delayed if state == DELAYED else tube.buried).first()
        return None if first == EMPTY else self.jobs.get(first & ID_MASK)

    # --- time

    def next_deadline_ns(self) -> int:
        """When advance() is due: never later than anything that is to happen, or NEVER."""
        return self.wheel.next_ns()

    def advance(self, now_ns: int, limit: int) -> bool:
        """Lets happen what is due: ttrs, delays, pauses, timeouts of waiting; about `limit` of them at most.

        Returns whether everything due was done. What was left is due at once.
        """
        self.wheel.allowance = _MOVES_PER_JOB * limit
        while limit > 0:
            timer = self.wheel.pop_due(now_ns)
            if timer is None:
                return self.wheel.allowance > 0
            if isinstance(timer, Tube):
                limit -= 1 + self._tube_due(timer, now_ns, limit)
            else:
                assert isinstance(timer, Client)
                limit -= 1 + self._client_due(timer, now_ns, limit)
        return False

    def _tube_due(self, tube: Tube, now_ns: int, limit: int) -> int:
        """Ends the pause, serves those who waited for that, matures delays. Returns how many jobs moved."""
        moved = 0
        if tube.paused_until_ns:
            if tube.paused_until_ns <= now_ns:
                self._unpause(tube)
            else:
                self._arm(tube, tube.paused_until_ns)
        moved += self._serve(tube, now_ns, limit)
        delayed = tube.delayed
        while moved < limit and delayed.first() != EMPTY and delayed.first() >> ID_BITS <= now_ns:
            job = self.jobs.get(delayed.first() & ID_MASK)
            assert job is not None
            self._make_ready(job, self._leave_place(job), now_ns)
            moved += 1
        if moved >= limit:
            self._arm(tube, now_ns)
        elif delayed.first() != EMPTY:
            self._arm(tube, delayed.first() >> ID_BITS)
        return moved

    def _client_due(self, client: Client, now_ns: int, limit: int) -> int:
        """Takes overdue jobs away, then ends a wait that has to end. Returns how many jobs moved.

        In this order: a client whose own job has just expired may be the one that gets it again.
        """
        moved = 0
        deadlines = client.deadlines
        while moved < limit and deadlines.first() != EMPTY and deadlines.first() >> ID_BITS <= now_ns:
            job = self.jobs.get(deadlines.first() & ID_MASK)
            assert job is not None
            job.counts().timeouts += 1
            self.total_timeouts += 1
            self._make_ready(job, self._leave_place(job), now_ns)
            moved += 1
        if client.waiting and moved < limit:
            if self.deadline_soon(client, now_ns):
                self._answer(client, DEADLINE_SOON, None)
            elif client.wait_until_ns != NEVER and client.wait_until_ns <= now_ns:
                self._answer(client, TIMED_OUT, None)
        first = deadlines.first()
        if first != EMPTY:
            margin = DEADLINE_MARGIN_NS if client.waiting else 0
            self._arm(client, (first >> ID_BITS) - margin)
        if client.waiting and client.wait_until_ns != NEVER:
            self._arm(client, client.wait_until_ns)
        return moved

    def _unpause(self, tube: Tube) -> None:
        tube.paused_until_ns = 0
        tube.pause_s = 0
        if len(tube.ready):
            self.stocked[tube.number] = tube

    # --- transitions

    def _leave_place(self, job: Job) -> Tube:
        """Takes the job out of the place its state names; the caller puts it into another. Returns the job's tube."""
        tube = self.tube_by_number[job.tube]
        state = job.state
        if state == RESERVED:
            holder = self.clients[job.holder]
            job.holder = 0
            holder.reserved.pop(job.id, None)  # it may be among those that are leaving
            if holder.reserved or holder.leaving:
                holder.deadlines.discard(job.rank << ID_BITS | job.id)
            else:
                holder.deadlines.clear()  # most workers hold one job: without its entry, a delete is a tenth cheaper
            self.reserved_count -= 1
            tube.reserved -= 1
        elif state == READY:
            tube.ready.discard(job.rank << ID_BITS | job.id)
            self._left_ready(tube, job)
        elif state == DELAYED:
            tube.delayed.discard(job.rank << ID_BITS | job.id)
            self.delayed_count -= 1
        else:
            tube.buried.discard(job.rank << ID_BITS | job.id)
            self.buried_count -= 1
        return tube

    def _take_first(self, tube: Tube) -> Job:
        """Takes the tube's first ready job out of its place; there is one."""
        job = self.jobs.get(tube.ready.pop() & ID_MASK)
        assert job is not None
        self._left_ready(tube, job)
        return job

    def _left_ready(self, tube: Tube, job: Job) -> None:
        self.ready_count -= 1
        if job.pri <= URGENT_PRI_MAX:
            self.urgent_count -= 1
            tube.urgent -= 1
        if not len(tube.ready):
            self.stocked.pop(tube.number, None)

    def _make_ready(self, job: Job, tube: Tube, now_ns: int) -> None:
        job.state = READY
        job.rank = job.pri
        tube.ready.push(job.pri << ID_BITS | job.id)
        self.ready_count += 1
        if job.pri <= URGENT_PRI_MAX:
            self.urgent_count += 1
            tube.urgent += 1
        if not tube.paused_until_ns:
            self.stocked[tube.number] = tube
            if tube.line:
                self._serve(tube, now_ns, 1)

    def _make_delayed(self, job: Job, tube: Tube, deadline_ns: int) -> None:
        job.state = DELAYED
        job.rank = deadline_ns
        tube.delayed.push(deadline_ns << ID_BITS | job.id)
        self.delayed_count += 1
        self._arm(tube, deadline_ns)

    def _hold(self, client: Client, job: Job, tube: Tube, now_ns: int) -> None:
        job.state = RESERVED
        job.holder = client.number
        job.counts().reserves += 1
        client.reserved[job.id] = job
        self.reserved_count += 1
        tube.reserved += 1
        self._start_ttr(client, job, now_ns)

    def _start_ttr(self, client: Client, job: Job, now_ns: int) -> None:
        job.rank = now_ns + job.ttr_s * SECOND_NS
        client.deadlines.push(job.rank << ID_BITS | job.id)
        self._arm(client, job.rank)

    def _kick(self, job: Job, now_ns: int) -> None:
        tube = self._leave_place(job)
        job.counts().kicks += 1
        job.state = READY
        self.ledger.change(job)
        self._make_ready(job, tube, now_ns)

    def _become_worker(self, client: Client) -> None:
        if not client.worker:
            client.worker = True
            self.worker_count += 1

    # --- waiting lines

    def _best_tube(self, client: Client) -> Tube | None:
        """The watched, unpaused tube whose first ready job is the smallest; looks at the smaller of two sets."""
        watched = client.watched
        stocked = self.stocked
        few, many = (watched, stocked) if len(watched) <= len(stocked) else (stocked, watched)
        best: Tube | None = None
        best_entry = 0
        for number, tube in few.items():
            if number in many:
                entry = tube.ready.first()
                if best is None or entry < best_entry:
                    best, best_entry = tube, entry
        return best

    def _serve(self, tube: Tube, now_ns: int, limit: int) -> int:
        """Hands ready jobs of an unpaused tube to those who wait for them, first come, first served."""
        served = 0
        while served < limit and not tube.paused_until_ns and len(tube.ready):
            client = self._first_in_line(tube)
            if client is None:
                break
            heappop(tube.line)
            tube.in_line.discard(client.number)
            client.absent.append(tube)
            job = self._take_first(tube)
            self._hold(client, job, tube, now_ns)
            self._answer(client, RESERVED_JOB, job)
            served += 1
        return served

    def _answer(self, client: Client, outcome: int, job: Job | None) -> None:
        self.stop_waiting(client)
        self.served.append(client)
        client.answer(outcome, job)

    def _line_up(self, tube: Tube, entry: int) -> None:
        tube.in_line.add(entry & NUMBER_MASK)
        heappush(tube.line, entry)
        if len(tube.line) > _LINE_PRUNE_AT + 2 * len(tube.watchers):
            tube.line = [entry for entry in tube.line if entry & NUMBER_MASK in tube.watchers]
            tube.in_line = {entry & NUMBER_MASK for entry in tube.line}
            heapify(tube.line)

    def _first_in_line(self, tube: Tube) -> Client | None:
        """The client that has waited longest for this tube; its entry is then the first of the line."""
        line = tube.line
        while line:
            entry = line[0]
            number = entry & NUMBER_MASK
            client = self.clients.get(number)
            if client is None or tube.number not in client.watched or not client.waiting:
                heappop(line)
                tube.in_line.discard(number)
                if client is not None and tube.number in client.watched:
                    client.absent.append(tube)
            elif client.wait_number != entry >> NUMBER_BITS:
                heapreplace(line, client.wait_number << NUMBER_BITS | number)
            else:
                return client
        return None

    def _arm(self, timer: Timer, deadline_ns: int) -> None:
        """Sees to it that the timer fires at the latest then. One that fires too early finds out and is armed anew.

        So a worker's timer is armed once a ttr, not once a job.
        """
        if not timer.armed or deadline_ns < timer.deadline_ns:
            self.wheel.add(timer, deadline_ns)

    # --- tubes come and go

    def _tube(self, name: bytes) -> Tube:
        tube = self.tubes.get(name)
        if tube is None:
            self._tube_number += 1
            tube = Tube(self._tube_number, name)
            self.tubes[name] = tube
            self.tube_by_number[tube.number] = tube
        return tube

    def _watch(self, client: Client, tube: Tube) -> None:
        client.watched[tube.number] = tube
        tube.watchers[client.number] = None
        client.absent.append(tube)
        if len(client.absent) > _LINE_PRUNE_AT + 2 * len(client.watched):
            client.absent = list(client.watched.values())  # grown by watching and ignoring without ever waiting

    def _forget_if_unused(self, tube: Tube) -> None:
        """A tube ends with its last job, user and watcher, and its counters and pause with it. `default` never ends."""
        if tube.jobs or tube.using or tube.watchers or tube is self.default:
            return
        self.wheel.cancel(tube)
        del self.tubes[tube.name]
        del self.tube_by_number[tube.number]

    def waiting_in(self, tube: Tube) -> int:
        """How many clients wait for a job of this tube. O(watchers)."""
        return sum(self.clients[number].waiting for number in tube.watchers)
