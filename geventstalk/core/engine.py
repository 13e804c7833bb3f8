"""Tubes, jobs and waiting lines: every state transition and its counters; check.py proves them.

This room must not know clocks, sockets, the grammar or the journal: time comes in as monotonic integer nanoseconds,
changes go out to a ledger, answers to waiting clients through Client.answer(). No call here ever yields.
Whatever can be large takes a limit and says whether more is left, so that the caller can give others a turn.
Invariant: a job is in exactly one place, the one its state names, and no unpaused tube has both a ready job and a
waiting client, except between two slices of work that is not finished yet.
A change sets what is true (the fields of a job or a client, the job table) in its last step, by assignments that cannot
fail. An exception before that leaves only orders, lines, counters and timers wrong, which undo() makes anew.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
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
from geventstalk.core.tube import DEADLINE_MARGIN_NS, ID_BITS, ID_MASK, Client, Tube
from geventstalk.core.undo import rebuild

# Outcomes, named as on the wire. A waiting client's answer is one of the first three.
RESERVED_JOB: Final = 1
TIMED_OUT: Final = 2
DEADLINE_SOON: Final = 3
INSERTED: Final = 4
DRAINING: Final = 5
OUT_OF_MEMORY: Final = 6
UNFINISHED: Final = 7
"""The ledger has not yet taken all of a large body."""

_SERVE_SLICE: Final = 250
_SMALL_STEPS: Final = 16
"""So many small steps count as one unit of work, which is to move one job."""
_LOOKS: Final = 256
"""So many outdated entries of a line may be dropped for one job. After that the tube's timer goes on."""
_TUBE_STEPS: Final = 2
"""So many lines entered or left count as one unit of work. To leave a line may also end its tube."""
_LINES: Final = 512
"""A client enters so many lines in the call of wait(). Its timer enters the others later."""

_SCAN_MAX: Final = 64
"""With more tubes than this, a client's next reserve looks again only at tubes whose first job may have changed."""
_RELEASED: Final = 1
_BURIED: Final = 2
_KICKED: Final = 3

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
        self.held = False  # the ledger does not keep pace: clients make no changes until this is False again
        self.changing = False  # whether a change began since the caller set this to False
        self.arrivals = 0  # how often a tube got a ready job, or was unpaused with one
        self.work = 0  # units of work beyond one a command, since the caller set this to 0
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
        client.used = self.default
        self.default.using += 1
        self._watch(client, self.default)
        self.clients[client.number] = client

    def leave(self, client: Client, now_ns: int, limit: int) -> bool:
        """The client is gone. It stops waiting, and up to `limit` of its jobs become ready, in order of reservation.

        Returns whether all is done. Call again until it is.
        """
        client.gone = True
        self.stop_waiting(client)
        reserved, leaving, watched = client.reserved, client.leaving, client.watched
        steps = _SMALL_STEPS * limit
        for _ in range(min(len(reserved), steps)):
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
        for _ in range(min(len(watched), max(_SMALL_STEPS, _TUBE_STEPS * limit))):
            self._unwatch(client, watched.popitem()[1])
        if watched:
            return False
        self.wheel.cancel(client)
        del self.clients[client.number]
        self.producer_count -= client.producer
        self.worker_count -= client.worker
        used = client.used
        assert used is not None
        client.used = None
        used.using -= 1
        self._forget_if_unused(used)
        return True

    def use(self, client: Client, name: bytes) -> None:
        """The client's puts, kicks and peeks go to this tube, which comes into being when it does not exist."""
        self.changing = True
        tube = self._tube(name)
        before = client.used
        assert before is not None
        tube.using += 1
        before.using -= 1
        client.used = tube
        self._forget_if_unused(before)

    def watch(self, client: Client, name: bytes) -> int:
        """The client reserves from this tube, too. Returns how many tubes the client watches now."""
        self.changing = True
        tube = self._tube(name)
        if tube.number not in client.watched:
            self._watch(client, tube)
        return len(client.watched)

    def ignore(self, client: Client, name: bytes) -> int:
        """The client stops watching a tube. Returns how many are left, or 0 when the only tube stays watched."""
        tube = self.tubes.get(name)
        if tube is not None and tube.number in client.watched:
            if len(client.watched) == 1:
                return 0
            self.changing = True
            del client.watched[tube.number]
            self._unwatch(client, tube)
        return len(client.watched)

    def pause(self, name: bytes, delay_s: int, now_ns: int) -> bool:
        """Nobody reserves from the tube for `delay_s` seconds; 0 ends a pause. Returns whether the tube exists."""
        tube = self.tubes.get(name)
        if tube is None:
            return False
        self.changing = True
        tube.total_pauses += 1
        if delay_s:
            until_ns = now_ns + delay_s * SECOND_NS
            self._arm(tube, until_ns)
            self.stocked.pop(tube.number, None)
            tube.paused_until_ns = until_ns
            tube.pause_s = delay_s
        else:
            self._unpause(tube)
            if self._serve(tube, now_ns, _SERVE_SLICE) == _SERVE_SLICE:
                self._fall_behind(tube, now_ns)
        return True

    # --- put

    def open_put(self, client: Client, pri: int, delay_s: int, ttr_s: int) -> Job:
        """A put has begun. Its id and its tube are settled now, before the body arrives."""
        self.changing = True
        tube = client.used
        assert tube is not None
        job = Job(self.next_id, tube.number, pri, delay_s, ttr_s)
        job.rank = pri
        self.next_id += 1
        if not client.producer:
            self.producer_count += 1
            client.producer = True
        tube.jobs += 1
        return job

    def abandon_put(self, job: Job) -> None:
        """The body did not arrive or was refused. The id is not used again."""
        self.changing = True
        self.ledger.unprepare(job)
        tube = self.tube_by_number[job.tube]
        tube.jobs -= 1
        self._forget_if_unused(tube)

    def prepare(self, job: Job, body: bytes, now_ns: int) -> int:
        """The body is complete and large. The ledger takes a slice of the body, so that put() has little left to do.

        Returns INSERTED when the caller may call put(), and UNFINISHED when it has to call prepare() again. After
        DRAINING or OUT_OF_MEMORY it has to call abandon_put(). Meanwhile nobody sees the job.
        """
        tube = self.tube_by_number[job.tube]
        if not job.body:
            if self.draining:
                return DRAINING
            if not self.ledger.admits(len(body), tube.name):
                return OUT_OF_MEMORY
            self._begin(job, body, now_ns)
        try:
            taken = self.ledger.prepare(job, tube.name)
        except MemoryError:
            return OUT_OF_MEMORY
        if taken is None:
            return OUT_OF_MEMORY
        return INSERTED if taken else UNFINISHED

    def _begin(self, job: Job, body: bytes, now_ns: int) -> None:
        """Fills the job with what its put says. The job is in no place yet."""
        delay_s = job.delay_s
        job.created_ns = now_ns
        if delay_s:
            job.state = DELAYED
            job.rank = now_ns + delay_s * SECOND_NS
        else:
            job.state = READY  # and its rank is its priority, since open_put()
        job.body = body

    def put(self, job: Job, body: bytes, now_ns: int) -> int:
        """The body (with its CRLF) is complete. Returns INSERTED, DRAINING or OUT_OF_MEMORY."""
        tube = self.tube_by_number[job.tube]
        if not job.body:  # otherwise prepare() has begun, and the ledger holds most of it
            if self.draining or not self.ledger.admits(len(body), tube.name):
                self.abandon_put(job)
                return DRAINING if self.draining else OUT_OF_MEMORY
            self._begin(job, body, now_ns)
        self.changing = True
        try:
            self.ledger.put(job, tube.name)
        except MemoryError:
            self.abandon_put(job)
            self.changing = False
            return OUT_OF_MEMORY
        self.total_jobs += 1
        tube.total_jobs += 1
        if job.delay_s:
            self._place_delayed(tube, job.rank, job.id)
            self.jobs.add(job)
        else:
            self._place_ready(tube, job.pri, job.id)
            self.jobs.add(job)
            if tube.line.entries:
                self._serve(tube, now_ns, 1)
        return INSERTED

    def restore(self, job: Job, tube_name: bytes, now_ns: int) -> None:
        """Gives a job of `jobs` its place. Its state is READY, BURIED or DELAYED; the last two have their rank set."""
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
            self._place_delayed(tube, job.rank, job.id)
        else:
            self._make_ready(job, tube, now_ns)

    # --- reserve and wait

    def reserve(self, client: Client, now_ns: int) -> Job | None:
        """Reserves the ready job of the smallest (pri, id) in the watched tubes that are not paused."""
        if not client.worker:
            self._become_worker(client)
        tube = self._best_tube(client)
        if tube is None:
            return None
        self.changing = True
        job = self._take_first(tube)
        self._hold(client, job, tube, now_ns)
        return job

    def deadline_soon(self, client: Client, now_ns: int) -> bool:
        """Whether a job of the client has no more time left than the margin before its deadline."""
        first = client.deadlines.first()
        return first != EMPTY and now_ns >= (first >> ID_BITS) - DEADLINE_MARGIN_NS

    def wait(self, client: Client, now_ns: int, timeout_s: int) -> None:
        """Stands the client at the end of the line of each tube it watches; `timeout_s` of -1 is for ever.

        The wait ends through Client.answer(), or silently through stop_waiting().
        """
        self.changing = True
        wait_number = self._wait_number + 1
        self._wait_number = wait_number
        absent = client.absent
        lines = min(len(absent), _LINES)
        for _ in range(lines):
            absent.popitem()[1].line.add(client.number, wait_number)
        if lines > _TUBE_STEPS:
            self.work += lines // _TUBE_STEPS
            if absent:
                self._arm(client, now_ns)  # it goes on with the other lines
        until_ns = NEVER
        if timeout_s >= 0:
            until_ns = now_ns + timeout_s * SECOND_NS
            self._arm(client, until_ns)
        first = client.deadlines.first()
        if first != EMPTY:
            self._arm(client, (first >> ID_BITS) - DEADLINE_MARGIN_NS)
        self.waiting_count += 1
        client.wait_number = wait_number
        client.wait_until_ns = until_ns
        client.waiting = True

    def stop_waiting(self, client: Client) -> None:
        """The client stops waiting and gets no answer. Nothing happens when the client does not wait."""
        if client.waiting:
            self.changing = True
            client.waiting = False
            self.waiting_count -= 1

    def reserve_job(self, client: Client, id: int, now_ns: int) -> Job | None:
        """Reserves the job with this id if it is ready, delayed or buried. Tube, watches and pauses do not matter."""
        job = self.jobs.get(id)
        if job is None or job.state == RESERVED:
            return None
        if not client.worker:
            self._become_worker(client)
        before, rank = job.state, job.rank
        tube = self._leave_place(job)
        self._hold(client, job, tube, now_ns)
        if before != READY:
            try:
                self.ledger.change(job)  # so that a crash brings it back ready, as every reserved job
            except BaseException:
                job.state, job.rank = before, rank
                job.holder = 0
                job.counts().reserves -= 1
                raise
        return job

    # --- what a worker does with a job

    def delete(self, client: Client, id: int) -> bool:
        """Deletes a job that the client holds or that nobody holds. Returns whether there was such a job."""
        job = self.jobs.get(id)
        if job is None or (job.state == RESERVED and job.holder != client.number):
            return False
        self.changing = True
        self.ledger.delete(job)
        tube = self._leave_place(job)
        tube.jobs -= 1
        tube.total_deletes += 1
        self.jobs.remove(id)
        job.state = DELETED
        job.holder = 0
        self._forget_if_unused(tube)
        return True

    def release(self, client: Client, id: int, pri: int, delay_s: int, now_ns: int) -> bool:
        """Gives a job back with a new priority, at once or after a delay. Returns whether the client held it."""
        job = client.reserved.get(id)
        if job is None:
            return False
        tube = self._leave_place(job)
        if delay_s:
            rank = now_ns + delay_s * SECOND_NS
            self._place_delayed(tube, rank, id)
            self._record(job, DELAYED, rank, pri, delay_s, _RELEASED)
        else:
            self._place_ready(tube, pri, id)
            self._record(job, READY, pri, pri, 0, _RELEASED)
            if tube.line.entries:
                self._serve(tube, now_ns, 1)
        return True

    def bury(self, client: Client, id: int, pri: int) -> bool:
        """Sets a job aside at the end of its tube's buried jobs. Returns whether the client held it."""
        job = client.reserved.get(id)
        if job is None:
            return False
        tube = self._leave_place(job)
        rank = self._bury_number + 1
        self._bury_number = rank
        tube.buried.push(rank << ID_BITS | id)
        self.buried_count += 1
        self._record(job, BURIED, rank, pri, job.delay_s, _BURIED)
        return True

    def touch(self, client: Client, id: int, now_ns: int) -> bool:
        """Starts the job's ttr anew. Returns whether the client held it."""
        job = client.reserved.get(id)
        if job is None:
            return False
        self.changing = True
        client.deadlines.discard(job.rank << ID_BITS | id)
        job.rank = self._start_ttr(client, job, now_ns)
        return True

    def kick(self, tube: Tube, buried: bool, limit: int, now_ns: int) -> int:
        """Makes up to `limit` buried or delayed jobs of the tube ready, the first ones first. Returns how many."""
        heap = tube.buried if buried else tube.delayed
        kicked = 0
        while kicked < limit:
            first = heap.first()
            if first == EMPTY:
                break
            job = self.jobs.get(first & ID_MASK)
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
        """The first READY, DELAYED or BURIED job of the tube that the client uses. The job stays in its place."""
        tube = client.used
        assert tube is not None
        first = (tube.ready if state == READY else tube.delayed if state == DELAYED else tube.buried).first()
        return None if first == EMPTY else self.jobs.get(first & ID_MASK)

    # --- time

    def next_deadline_ns(self) -> int:
        """When advance() is due, or NEVER. Nothing has to happen before that time."""
        return self.wheel.next_ns()

    def advance(self, now_ns: int, limit: int) -> bool:
        """Ends ttrs, delays, pauses and waits that are due: about `limit` of them at most.

        Returns whether everything due was done. The rest is due at once.
        """
        self.wheel.allowance = _SMALL_STEPS * limit
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
        """Ends a pause, serves the clients that waited for its end, ends delays. Returns how many jobs moved."""
        moved = 0
        if tube.paused_until_ns:
            if tube.paused_until_ns <= now_ns:
                self._unpause(tube)
            else:
                self._arm(tube, tube.paused_until_ns)
        tube.behind = False
        moved += self._serve(tube, now_ns, limit)
        delayed = tube.delayed
        while moved < limit and delayed.first() != EMPTY and delayed.first() >> ID_BITS <= now_ns:
            job = self.jobs.get(delayed.first() & ID_MASK)
            assert job is not None
            self._make_ready(job, self._leave_place(job), now_ns)
            moved += 1
        if moved >= limit:
            self._fall_behind(tube, now_ns)
        if delayed.first() != EMPTY:
            self._arm(tube, delayed.first() >> ID_BITS)
        return moved

    def _client_due(self, client: Client, now_ns: int, limit: int) -> int:
        """Takes overdue jobs away, then ends a wait that has to end. Returns how many jobs moved.

        The order matters: a client that waits may get its own expired job again.
        """
        moved = 0
        deadlines = client.deadlines
        while moved < limit and deadlines.first() != EMPTY and deadlines.first() >> ID_BITS <= now_ns:
            job = self.jobs.get(deadlines.first() & ID_MASK)
            assert job is not None
            tally = job.counts()
            tube = self._leave_place(job)
            self._place_ready(tube, job.pri, job.id)
            self.total_timeouts += 1
            tally.timeouts += 1
            job.state = READY
            job.rank = job.pri
            job.holder = 0
            if tube.line.entries:
                self._serve(tube, now_ns, 1)
            moved += 1
        if client.waiting and client.absent and moved < limit:
            moved += self._stand_in_more_lines(client, now_ns, limit - moved)
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
        if client.waiting and client.absent:
            self._arm(client, now_ns)
        return moved

    def _stand_in_more_lines(self, client: Client, now_ns: int, limit: int) -> int:
        """Enters more of the lines that wait() began with. The client is served when one of the tubes has a job now.

        Returns how many units of work it did.
        """
        lines = min(len(client.absent), _TUBE_STEPS * limit)
        for _ in range(lines):
            tube = client.absent.popitem()[1]
            tube.line.add(client.number, client.wait_number)
            if tube.number in self.stocked:
                self._serve(tube, now_ns, 1)
                if not client.waiting:
                    break
        return 1 + lines // _TUBE_STEPS

    def _fall_behind(self, tube: Tube, now_ns: int) -> None:
        """The tube's timer will go on with the work that one slice could not do."""
        self._arm(tube, now_ns)
        tube.behind = True

    def _unpause(self, tube: Tube) -> None:
        if tube.ready.first() != EMPTY:
            self.stocked[tube.number] = tube
            self.arrivals += 1
        tube.paused_until_ns = 0
        tube.pause_s = 0

    # --- transitions: orders and counters first, the job's own fields last

    def _leave_place(self, job: Job) -> Tube:
        """Takes the job out of the place that its state names. The caller gives it a new place. Returns its tube."""
        self.changing = True
        tube = self.tube_by_number[job.tube]
        state = job.state
        if state == RESERVED:
            holder = self.clients[job.holder]
            holder.reserved.pop(job.id, None)  # it may be among those that are leaving
            if holder.reserved or holder.leaving:
                holder.deadlines.discard(job.rank << ID_BITS | job.id)
            else:
                holder.deadlines.clear()  # most workers hold one job: without its entry, a delete is a tenth cheaper
            self.reserved_count -= 1
            tube.reserved -= 1
        elif state == READY:
            tube.ready.discard(job.rank << ID_BITS | job.id)
            self._left_ready(tube, job.pri)
        elif state == DELAYED:
            tube.delayed.discard(job.rank << ID_BITS | job.id)
            self.delayed_count -= 1
        else:
            tube.buried.discard(job.rank << ID_BITS | job.id)
            self.buried_count -= 1
        return tube

    def _take_first(self, tube: Tube) -> Job:
        """Takes the first ready job of a tube that has ready jobs out of its place."""
        job = self.jobs.get(tube.ready.pop() & ID_MASK)
        assert job is not None
        self._left_ready(tube, job.pri)
        return job

    def _left_ready(self, tube: Tube, pri: int) -> None:
        self.ready_count -= 1
        if pri <= URGENT_PRI_MAX:
            self.urgent_count -= 1
            tube.urgent -= 1
        if tube.ready.first() == EMPTY:
            self.stocked.pop(tube.number, None)

    def _make_ready(self, job: Job, tube: Tube, now_ns: int) -> None:
        """A job that is in no place becomes ready. The ledger is not told."""
        pri = job.pri
        self._place_ready(tube, pri, job.id)
        job.state = READY
        job.rank = pri
        job.holder = 0
        if tube.line.entries:
            self._serve(tube, now_ns, 1)

    def _place_ready(self, tube: Tube, pri: int, id: int) -> None:
        """The caller has to serve those who wait in line, when the job is completely ready."""
        tube.ready.push(pri << ID_BITS | id)
        if not tube.paused_until_ns:
            self.stocked[tube.number] = tube
        self.arrivals += 1
        self.ready_count += 1
        if pri <= URGENT_PRI_MAX:
            self.urgent_count += 1
            tube.urgent += 1

    def _place_delayed(self, tube: Tube, deadline_ns: int, id: int) -> None:
        tube.delayed.push(deadline_ns << ID_BITS | id)
        self.delayed_count += 1
        self._arm(tube, deadline_ns)

    def _hold(self, client: Client, job: Job, tube: Tube, now_ns: int) -> None:
        """The client reserves a job that is in no place."""
        tally = job.counts()
        client.reserved[job.id] = job
        self.reserved_count += 1
        tube.reserved += 1
        deadline_ns = self._start_ttr(client, job, now_ns)
        tally.reserves += 1
        job.state = RESERVED
        job.holder = client.number
        job.rank = deadline_ns

    def _start_ttr(self, client: Client, job: Job, now_ns: int) -> int:
        """Places the job among the client's deadlines. Returns the new deadline, for the caller to set as its rank."""
        deadline_ns = now_ns + job.ttr_s * SECOND_NS
        client.deadlines.push(deadline_ns << ID_BITS | job.id)
        self._arm(client, deadline_ns)
        return deadline_ns

    def _record(self, job: Job, state: int, rank: int, pri: int, delay_s: int, what: int) -> None:
        """Sets the new values of a job that nobody holds any more, and tells the ledger. Does both or neither."""
        tally = job.counts()
        before = job.state, job.rank, job.pri, job.delay_s, job.holder
        counts = tally.releases, tally.buries, tally.kicks
        if what == _RELEASED:
            tally.releases += 1
        elif what == _BURIED:
            tally.buries += 1
        else:
            tally.kicks += 1
        job.state = state
        job.rank = rank
        job.pri = pri
        job.delay_s = delay_s
        job.holder = 0
        try:
            self.ledger.change(job)
        except BaseException:
            job.state, job.rank, job.pri, job.delay_s, job.holder = before
            tally.releases, tally.buries, tally.kicks = counts
            raise

    def _kick(self, job: Job, now_ns: int) -> None:
        tube = self._leave_place(job)
        self._place_ready(tube, job.pri, job.id)
        self._record(job, READY, job.pri, job.pri, job.delay_s, _KICKED)
        if tube.line.entries:
            self._serve(tube, now_ns, 1)

    def _become_worker(self, client: Client) -> None:
        self.worker_count += 1
        client.worker = True

    # --- waiting lines

    def _best_tube(self, client: Client) -> Tube | None:
        """The watched, unpaused tube whose first ready job is the smallest. Searches the smaller of two sets."""
        watched = client.watched
        if len(watched) == 1:
            for number in watched:
                return self.stocked.get(number)
        stocked = self.stocked
        few, many = (watched, stocked) if len(watched) <= len(stocked) else (stocked, watched)
        if len(few) > _SCAN_MAX:
            if client.arrivals == self.arrivals:
                return self._best_candidate(client)
            client.arrivals = self.arrivals
            client.candidates = []
            self.work += len(few) // _SMALL_STEPS
        best: Tube | None = None
        best_entry = 0
        for number, tube in few.items():
            if number in many:
                entry = tube.ready.first()
                if best is None or entry < best_entry:
                    best, best_entry = tube, entry
        return best

    def _best_candidate(self, client: Client) -> Tube | None:
        """The same for a client that has looked at all tubes, when no job has become ready since.

        A tube's first job can only have been replaced by a later job. So a heap with the first job of each tube shows
        which tube to look at again.
        """
        heap, stocked = client.candidates, self.stocked
        if not heap:
            heap = [(tube.ready.first(), tube) for number, tube in client.watched.items() if number in stocked]
            heapify(heap)
            client.candidates = heap
            self.work += len(client.watched) // _SMALL_STEPS
        steps = 0
        best: Tube | None = None
        while heap and best is None:
            entry, tube = heap[0]
            steps += 1
            if tube.number not in stocked:
                heappop(heap)
            elif tube.ready.first() != entry:
                heapreplace(heap, (tube.ready.first(), tube))
            else:
                best = tube
        self.work += steps // _SMALL_STEPS
        return best

    def _serve(self, tube: Tube, now_ns: int, limit: int) -> int:
        """Hands the tube's ready jobs, unless it is paused, to those who wait for them: first come, first served."""
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
        """The tube's first job goes to a client that waits, and the client hears of it; or else it stays ready."""
        job = self._take_first(tube)
        self._hold(client, job, tube, now_ns)
        try:
            self._answer(client, RESERVED_JOB, job)
        except BaseException:
            job.state = READY
            job.rank = job.pri
            job.holder = 0
            job.counts().reserves -= 1
            raise

    def _answer(self, client: Client, outcome: int, job: Job | None) -> None:
        """Ends a wait; or else it goes on."""
        self.served.append(client)
        self.waiting_count -= 1
        client.waiting = False
        try:
            client.answer(outcome, job)
        except BaseException:
            client.waiting = True
            raise

    def _arm(self, timer: Timer, deadline_ns: int) -> None:
        """Sees to it that the timer fires at the latest then. One that fires too early finds out and is armed anew.

        So a worker's timer is armed once a ttr, not once a job.
        """
        if timer.slot < 0 or deadline_ns < timer.deadline_ns:
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
        client.arrivals = NEVER
        client.absent[tube.number] = tube
        tube.watchers[client.number] = client
        client.watched[tube.number] = tube

    def _unwatch(self, client: Client, tube: Tube) -> None:
        """The tube is no longer among those the client watches: neither knows the other any more."""
        client.arrivals = NEVER
        client.absent.pop(tube.number, None)
        tube.line.remove(client.number)
        del tube.watchers[client.number]
        self._forget_if_unused(tube)

    def _forget_if_unused(self, tube: Tube) -> None:
        """A tube ends with its last job, user and watcher, and its counters and pause with it. `default` never ends."""
        if tube.jobs or tube.using or tube.watchers or tube is self.default:
            return
        self.wheel.cancel(tube)
        del self.tubes[tube.name]
        del self.tube_by_number[tube.number]

    def waiting_in(self, tube: Tube) -> int:
        """How many clients wait for a job of this tube. It looks at each watcher, and counts that as work."""
        waiting = 0
        for client in tube.watchers.values():
            waiting += client.waiting
        self.work += len(tube.watchers) // _SMALL_STEPS
        return waiting

    # --- after an exception

    def undo(self) -> None:
        """After an exception out of any call here: what was half done is not done, and all else is as it was.

        It takes as long as the engine is large. A job that was handed over, or given back, before the exception came
        stays so.
        """
        rebuild(self)
        self.changing = False
