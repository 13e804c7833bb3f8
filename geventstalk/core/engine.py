"""The commands of clients on tubes and jobs, each in one call.

state.py lists the parts of the engine. This module must not know clocks, sockets, the grammar or the journal: time
comes in as monotonic integer nanoseconds, changes go out to a ledger, answers to waiting clients through
Client.answer(). No call here ever yields. Whatever can be large takes a limit and says whether more is left, so that
others have a turn.
Invariant: a change sets what is true (the fields of a job or a client, the job table) in its last step, by assignments
that cannot fail. An exception before that leaves only orders, lines, counters and timers wrong; undo() makes them anew.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core import trail
from geventstalk.core.due import Due
from geventstalk.core.job import (
    BURIED,
    CRLF_BYTES,
    DELAYED,
    DELETED,
    READY,
    RESERVED,
    SECOND_NS,
    Job,
    TaggedTally,
    tags_bytes,
    tags_of,
)
from geventstalk.core.order import EMPTY
from geventstalk.core.rules import Duplicate, Rules
from geventstalk.core.shares import Shares
from geventstalk.core.state import SMALL_STEPS, TUBE_STEPS
from geventstalk.core.timerwheel import NEVER as NEVER  # what next_deadline_ns() returns when nothing is to happen
from geventstalk.core.tube import Client, Tube
from geventstalk.core.undo import rebuild
from geventstalk.policies import Policy

ADMITTED: Final = 0
"""A put may go on. All other outcomes of a put are true."""
# Outcomes of a put, named as on the wire.
INSERTED: Final = 4
DRAINING: Final = 5
OUT_OF_MEMORY: Final = 6
UNFINISHED: Final = 7
"""The ledger has not yet taken all of a large body."""
TOO_BIG: Final = 11
"""The body is larger than jobs may be."""
DUPLICATE: Final = 12
"""There is a job with the same unique key: see Rules.duplicate."""
CYCLE: Final = 13
"""The job's group would wait for itself."""

_SERVE_SLICE: Final = 250
"""Jobs that a command hands out when it ends a pause. The tube's timer hands out the others."""

# What _record() counts.
_RELEASED: Final = 1
_BURIED: Final = 2
_KICKED: Final = 3


class Engine(Due):
    """All tubes, jobs and clients of a server."""

    # --- clients and tubes

    def join(self, client: Client) -> None:
        """Takes in a new client, which uses and watches the default tube."""
        self.total_clients += 1
        client.number = self.total_clients
        client.used = self.default
        self.default.using += 1
        self._watch(client, self.default)
        self.clients[client.number] = client

    def leave(self, client: Client, now_ns: int, limit: int) -> bool:
        """Ends the wait of a client that is gone, and makes up to `limit` of its jobs ready, in order of reservation.

        Returns whether the client is forgotten. The caller calls again until then.
        """
        client.gone = True
        self.stop_waiting(client)
        reserved, leaving, watched = client.reserved, client.leaving, client.watched
        steps = SMALL_STEPS * limit
        for _ in range(min(len(reserved), steps)):
            leaving.append(reserved.popitem()[1])
        if reserved:
            return False
        while leaving and limit > 0:
            limit -= 1
            job = leaving.pop()
            if job.holder == client.number:  # its ttr may have ended since the last slice
                self._give_back(job, now_ns)
        if leaving:
            return False
        for _ in range(min(len(watched), max(SMALL_STEPS, TUBE_STEPS * limit))):
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
        """Directs the client's puts, kicks and peeks to this tube, which is made if need be."""
        self.changing = True
        tube = self._tube(name)
        before = client.used
        assert before is not None
        tube.using += 1
        before.using -= 1
        client.used = tube
        self._forget_if_unused(before)

    def watch(self, client: Client, name: bytes) -> int:
        """Adds a tube to those that the client reserves from. Returns how many tubes the client watches now."""
        self.changing = True
        tube = self._tube(name)
        if tube.number not in client.watched:
            self._watch(client, tube)
        return len(client.watched)

    def unwatch(self, client: Client, name: bytes) -> None:
        """Ends the watch of a tube, which may be the client's only one."""
        tube = self.tubes.get(name)
        if tube is not None and client.watched.pop(tube.number, None) is not None:
            self.changing = True
            self._unwatch(client, tube)
            if client.shares is not None:
                client.shares.forget(tube.number)

    def ignore(self, client: Client, name: bytes) -> int:
        """Ends the watch of a tube. Returns how many tubes stay watched, or 0 when it is the only tube and stays."""
        tube = self.tubes.get(name)
        if tube is not None and tube.number in client.watched:
            if len(client.watched) == 1:
                return 0
            self.changing = True
            del client.watched[tube.number]
            self._unwatch(client, tube)
            if client.shares is not None:
                client.shares.forget(tube.number)
        return len(client.watched)

    def shares_of(self, client: Client) -> Shares:
        """Returns how the client shares its reserves among its tubes, made now when it did not say so yet."""
        shares = client.shares
        if shares is None:
            shares = client.shares = Shares()
        return shares

    def pause(self, name: bytes, delay_s: int, now_ns: int) -> bool:
        """Stops reserves from a tube for `delay_s` seconds; 0 ends a pause. Returns whether the tube exists.

        A tube that its policy pauses stays paused.
        """
        tube = self.tubes.get(name)
        if tube is None:
            return False
        self.changing = True
        tube.total_pauses += 1
        if tube.kept_paused:
            return True
        if delay_s:
            self._pause(tube, delay_s, now_ns)
        else:
            self._end_pause(tube, now_ns)
        return True

    def _end_pause(self, tube: Tube, now_ns: int) -> int:
        """Returns how many jobs clients get that wait for them."""
        self._unpause(tube)
        served = self._serve(tube, now_ns, _SERVE_SLICE)
        if served == _SERVE_SLICE:
            self._fall_behind(tube, now_ns)
        return served

    def settle_pause(self, tube: Tube, now_ns: int) -> None:
        """Begins or ends the pause of a tube whose policy may have changed."""
        if not self.keep_pause(tube) and tube.kept_paused:
            self.changing = True
            tube.kept_paused = False
            self.work += self._end_pause(tube, now_ns)

    # --- put

    def open_put(self, client: Client, pri: int, delay_s: int, ttr_s: int, now_ns: int) -> Job:
        """Begins a put. The job gets its id, its tube and, as upstream, its age now, before the body arrives."""
        self.changing = True
        tube = client.used
        assert tube is not None
        job = Job(self.next_id, tube.number, pri, delay_s, ttr_s)
        job.rank = pri
        job.created_ns = now_ns
        self.next_id += 1
        if not client.producer:
            self.becomes_producer(client)
        tube.jobs += 1
        return job

    def becomes_producer(self, client: Client) -> None:
        """Counts a client that has begun a put."""
        self.producer_count += not client.producer
        client.producer = True

    def abandon_put(self, job: Job) -> None:
        """Ends a put whose body did not arrive or was refused. The id is not used again."""
        self.changing = True
        self.ledger.unprepare(job)
        if self.bodies is not None:
            self.bodies.unclaim(job.id)
        tube = self.tube_by_number[job.tube]
        tube.jobs -= 1
        self._forget_if_unused(tube)

    def prepare(self, job: Job, body: bytes, now_ns: int) -> int:
        """Gives the ledger a slice of a large body that is complete, so that put() has little left to do.

        Returns INSERTED when the caller may call put(), and UNFINISHED when the caller has to call prepare() again.
        After any other outcome the caller has to call abandon_put(). Meanwhile no client sees the job.
        """
        tube = self.tube_by_number[job.tube]
        if not job.body:
            outcome = self._admit(job, body, tube, now_ns)
            if outcome != ADMITTED:
                return outcome
            self._begin(job, body, now_ns)
        try:
            taken = self.ledger.prepare(job, tube.name)
        except MemoryError:
            return OUT_OF_MEMORY
        if taken is None:
            return OUT_OF_MEMORY
        return INSERTED if taken else UNFINISHED

    def _admit(self, job: Job, body: bytes, tube: Tube, now_ns: int) -> int:
        """Returns ADMITTED when a job whose body is complete may come in, or the outcome that says why not.

        Each put asks here, a client's and an operator's, as it asks Service.admit() before its body comes. The body
        counts in memory from then on.
        """
        if self.draining:
            return DRAINING
        if self.policies is not None:
            outcome = self._apply_policy(job, len(body), tube)
            if outcome != ADMITTED:
                return outcome
        bodies = self.bodies
        if bodies is not None:
            bodies.unclaim(job.id)
            if not bodies.claim(self, job.id, len(body)):
                return OUT_OF_MEMORY
        if job.tally is None:
            return ADMITTED if self.ledger.admits(len(body), tube.name) else OUT_OF_MEMORY
        if not self.ledger.admits(len(body) + tags_bytes(job), tube.name):
            return OUT_OF_MEMORY
        return self._judge(job, tube, now_ns)

    def _judge_prepared(self, job: Job, tube: Tube, now_ns: int) -> int:
        """Returns the outcome for a large job that came in through prepare(): others came in meanwhile."""
        policy = self.policy_of(tube)
        if policy is not None and not _has_room(tube, policy, self.size_of(job)):
            return OUT_OF_MEMORY
        return ADMITTED if job.tally is None else self._judge(job, tube, now_ns)

    def _apply_policy(self, job: Job, body_bytes: int, tube: Tube) -> int:
        """Gives a new job what the policy of its tube says. Returns ADMITTED, TOO_BIG or OUT_OF_MEMORY."""
        policy = self.policy_of(tube)
        if policy is None:
            return ADMITTED
        if body_bytes - CRLF_BYTES > policy.max_job_bytes:
            policy.refused += 1
            return TOO_BIG
        if not _has_room(tube, policy, body_bytes):
            return OUT_OF_MEMORY
        job.rank = job.pri = policy.priority_of(job.pri)
        job.delay_s = policy.delay_of(job.delay_s)
        job.ttr_s = policy.ttr_of(job.ttr_s)
        if policy.tags is not None:
            tags = tags_of(job)
            job.tally = TaggedTally(policy.tags if tags is None else policy.tags_with(tags))
        return ADMITTED

    def _judge(self, job: Job, tube: Tube, now_ns: int) -> int:
        """Returns ADMITTED when the tags of a new job let it in, or DUPLICATE, CYCLE or OUT_OF_MEMORY.

        With DUPLICATE a smaller priority than that of the first job is given to the first one.
        """
        tally = job.tally
        assert isinstance(tally, TaggedTally)
        rules = self.rules_of_tags()
        id = rules.finds(tally.tags, tube)
        if id:
            first = self.jobs.get(id)
            if first is None:
                rules.duplicate = Duplicate(id, DELETED, -1)
                return DUPLICATE
            raises = job.pri < first.pri
            if raises:
                self._raise_priority(first, job.pri, now_ns)
            rules.duplicate = Duplicate(id, first.state, job.pri if raises else -1)
            return DUPLICATE
        if rules.closes_cycle(tally.tags):
            return CYCLE
        if tally.tags.owner:
            rules.over_quota = not rules.is_within(tally.tags, self.quotas)
            if rules.over_quota:
                return OUT_OF_MEMORY
        return ADMITTED if rules.takes(tally.tags) else OUT_OF_MEMORY

    def _raise_priority(self, job: Job, pri: int, now_ns: int) -> None:
        """Gives a job a smaller priority, in whatever state it is."""
        self.changing = True
        before = job.pri
        job.pri = pri
        try:
            self.ledger.change(job)
        finally:
            job.pri = before
        if job.state == READY:
            tube = self._leave_place(job)
            self._place_ready(tube, pri, job, now_ns)
            job.rank = pri
        job.pri = pri

    def _begin(self, job: Job, body: bytes, now_ns: int) -> None:
        """Sets the fields of a job that is in no place yet."""
        delay_s = job.delay_s
        if delay_s:
            job.state = DELAYED
            job.rank = now_ns + delay_s * SECOND_NS
        else:
            job.state = READY  # and its rank is its priority, since open_put()
        job.body = body

    def put(self, job: Job, body: bytes, now_ns: int) -> int:
        """Inserts a job whose body, with its CRLF, is complete.

        Returns INSERTED, DRAINING, OUT_OF_MEMORY or TOO_BIG; for a job with tags also DUPLICATE or CYCLE.
        """
        tube = self.tube_by_number[job.tube]
        # A job with a body came through prepare(): the ledger has most of it.
        outcome = self._judge_prepared(job, tube, now_ns) if job.body else self._admit(job, body, tube, now_ns)
        if outcome:
            self.abandon_put(job)
            return outcome
        if job.delay_s:
            self._begin(job, body, now_ns)
        else:  # the same without a call
            job.state = READY
            job.body = body
        self.changing = True
        try:
            self.ledger.put(job, tube.name)
        except MemoryError:
            self.abandon_put(job)
            self.changing = False
            return OUT_OF_MEMORY
        if not tube.active:
            self._wake(tube, now_ns)
        total, of_tube = self.total_jobs + 1, tube.total_jobs + 1
        tube.bytes += len(body)
        job.since_ns = now_ns
        if job.tally is not None:
            self.rules_of_tags().enter(job, tube)
        if job.delay_s:
            self._place_delayed(tube, job.rank, job.id)
        else:
            self._place_ready(tube, job.pri, job, now_ns)
        self.jobs.add(job)
        if self.bodies is not None:
            self.bodies.came(job)
        self.total_jobs = total
        tube.total_jobs = of_tube
        if self.trails is not None:
            self.note(tube, job, trail.PUT, 0, now_ns)
        if tube.line.entries and not job.delay_s:
            self._serve(tube, now_ns, 1)
        return INSERTED

    def restore(self, job: Job, tube_name: bytes, now_ns: int) -> None:
        """Gives a job of `jobs` its place. Its state is READY, BURIED or DELAYED; the last two have their rank set.

        A mark, which is DELETED, leaves `jobs`. restored() follows behind the last job.
        """
        if job.id >= self.next_id:
            self.next_id = job.id + 1
        else:
            self.unsorted = True
        if job.state == DELETED:
            self._restore_mark(job, tube_name)
            return
        tube = self._tube(tube_name)
        tube.jobs += 1
        tube.bytes += self.size_of(job)
        job.tube = tube.number
        if job.created_ns < self._restored_ns or self.total_jobs:
            self.unsorted = True
        self._restored_ns = job.created_ns
        if isinstance(job.tally, TaggedTally):
            self._rules_to_load().enter(job, tube)
        if job.state == BURIED:
            self._bury_number = max(self._bury_number, job.rank)
            self._place_buried(tube, job.rank, job)
            job.since_ns = now_ns
        elif job.state == DELAYED and job.rank > now_ns:
            self._place_delayed(tube, job.rank, job.id)
            job.since_ns = now_ns
        else:
            self._make_ready(job, tube, now_ns)

    def restored(self, now_ns: int) -> None:
        """Ends the restoring of jobs: those go on that wait for groups without members."""
        if self.rules is not None:
            self.rules.loaded(now_ns)

    def _restore_mark(self, mark: Job, tube_name: bytes) -> None:
        if self.bodies is not None:
            self.bodies.left(mark)
        self.jobs.remove(mark.id)
        mark.body = b"\r\n"
        self._rules_to_load().add_mark(mark, tube_name)

    def _rules_to_load(self) -> Rules:
        """Returns the rules while jobs are restored, until restored()."""
        rules = self.rules_of_tags()
        rules.loading = True
        return rules

    # --- reserve

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

    def reserve_job(self, client: Client, id: int, now_ns: int) -> Job | None:
        """Reserves the job with this id if it is ready, delayed or buried. Tube, watches and pauses do not matter."""
        job = self.jobs.get(id)
        if job is None or job.state == RESERVED:
            return None
        if self.rules is not None and not self.rules.may_reserve(job, self.tube_of(job)):
            return None
        if not client.worker:
            self._become_worker(client)
        before, rank, since_ns = job.state, job.rank, job.since_ns
        tube = self._leave_place(job)
        self._hold(client, job, tube, now_ns)
        if before != READY:
            try:
                self.ledger.change(job)  # after a crash every reserved job is ready
            except BaseException:
                self._hold_failed(job, tube, before, rank, since_ns)
                raise
        return job

    def _become_worker(self, client: Client) -> None:
        self.worker_count += 1
        client.worker = True

    # --- what a worker does with a job

    def delete(self, client: Client, id: int, now_ns: int) -> bool:
        """Deletes a job that the client holds or that no client holds. Returns whether there was such a job."""
        job = self.jobs.get(id)
        if job is None or (job.state == RESERVED and job.holder != client.number):
            return False
        self.changing = True
        if self.rules is None:
            self.ledger.delete(job)
            tube = self._leave_place(job)
        else:
            tube = self._leave_for_good(job, self.rules, now_ns)
        tube.jobs -= 1
        if not tube.active:
            self._wake(tube, now_ns)
        total, of_tube = self.total_deletes + 1, tube.total_deletes + 1
        if job.holder:
            self._measure_work(tube, now_ns - job.since_ns)
        self.total_deletes = total
        tube.total_deletes = of_tube
        if self.trails is not None:
            self.trails.ends(self.policy_of(tube), tube.name, job, now_ns)
        job.state = DELETED  # which is true from here on, whatever becomes of its place in the table
        job.holder = 0
        self.jobs.remove(id)
        body = job.body
        if body is not None:  # as size_of() does, without its call
            tube.bytes -= len(body)
        else:
            tube.bytes -= self.size_of(job)
        if self.bodies is not None:
            self.bodies.left(job)
        self._forget_if_unused(tube)
        return True

    def _leave_for_good(self, job: Job, rules: Rules, now_ns: int) -> Tube:
        """Writes to the ledger that a job ends, and takes the job out of its place. Returns its tube.

        A job whose key has to be unique for a while longer leaves a mark.
        """
        tube = self.tube_by_number[job.tube]
        mark = _mark_of(job, now_ns)
        if mark is None:
            self.ledger.delete(job)
        else:
            self.ledger.retire(job, mark, tube.name)
        self._leave_place(job)
        rules.leave(job, tube, now_ns)
        if mark is not None:
            rules.add_mark(mark, tube.name)
        return tube

    def release(self, client: Client, id: int, pri: int, delay_s: int, now_ns: int) -> bool:
        """Gives a job back with a new priority, at once or after a delay. Returns whether the client held it.

        Without a delay the job's backoff counts, where it has one.
        """
        job = client.reserved.get(id)
        if job is None:
            return False
        tube = self._leave_place(job)
        if self.rules is not None and not delay_s:
            delay_s = self.rules.backoff_s(job, tube)
        if delay_s:
            rank = now_ns + delay_s * SECOND_NS
            self._place_delayed(tube, rank, id)
            self._record(job, tube, DELAYED, rank, pri, delay_s, _RELEASED, now_ns)
        else:
            self._place_ready(tube, pri, job, now_ns)
            self._record(job, tube, READY, pri, pri, 0, _RELEASED, now_ns)
            if tube.line.entries:
                self._serve(tube, now_ns, 1)
        return True

    def bury(self, client: Client, id: int, pri: int, now_ns: int) -> bool:
        """Sets a job aside at the end of its tube's buried jobs. Returns whether the client held it."""
        job = client.reserved.get(id)
        if job is None:
            return False
        tube = self._leave_place(job)
        if not tube.active:
            self._wake(tube, now_ns)
        rank = self._bury_number + 1
        self._bury_number = rank
        self._place_buried(tube, rank, job)
        self._record(job, tube, BURIED, rank, pri, job.delay_s, _BURIED, now_ns)
        return True

    def touch(self, client: Client, id: int, now_ns: int) -> bool:
        """Starts the job's time to run again. Returns whether the client held the job."""
        job = client.reserved.get(id)
        if job is None:
            return False
        self.changing = True
        client.deadlines.discard(job.rank, id)
        deadline_ns = now_ns + job.ttr_s * SECOND_NS
        client.deadlines.push(deadline_ns, id)
        self._arm(client, deadline_ns)
        job.rank = deadline_ns
        return True

    def kick(self, tube: Tube, buried: bool, limit: int, now_ns: int) -> int:
        """Makes up to `limit` buried or delayed jobs of the tube ready, the first ones first. Returns how many."""
        heap = tube.buried if buried else tube.delayed
        kicked = 0
        while kicked < limit:
            first = heap.first()
            if first == EMPTY:
                break
            job = self.jobs.get(first)
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

    def _kick(self, job: Job, now_ns: int) -> None:
        if self.rules is not None:
            tally = job.tally
            if isinstance(tally, TaggedTally):
                tally.tried = 0  # a job that an operator wants once more has all of its tries again
                tally.why = 0
        tube = self._leave_place(job)
        self._place_ready(tube, job.pri, job, now_ns)
        self._record(job, tube, READY, job.pri, job.pri, job.delay_s, _KICKED, now_ns)
        if tube.line.entries:
            self._serve(tube, now_ns, 1)

    def _record(
        self, job: Job, tube: Tube, state: int, rank: int, pri: int, delay_s: int, what: int, now_ns: int
    ) -> None:
        """Sets the new fields of a job that has left its worker, tells the ledger, and counts. Does all or nothing."""
        tally = job.tally
        if tally is None:
            tally = job.counts()
        before = job.state, job.rank, job.pri, job.delay_s
        holder, since_ns = job.holder, job.since_ns
        if what == _RELEASED:
            total, of_tube = self.total_releases + 1, tube.total_releases + 1
            tally.releases += 1
        elif what == _BURIED:
            total, of_tube = self.total_buries + 1, tube.total_buries + 1
            tally.buries += 1
        else:
            total, of_tube = self.total_kicks + 1, tube.total_kicks + 1
            tally.kicks += 1
        job.state = state
        job.rank = rank
        job.pri = pri
        job.delay_s = delay_s
        job.holder = 0
        job.since_ns = now_ns
        try:
            self.ledger.change(job)
            if holder:
                self._measure_work(tube, now_ns - since_ns)
        except BaseException:
            job.state, job.rank, job.pri, job.delay_s = before
            job.holder, job.since_ns = holder, since_ns
            tally.releases -= what == _RELEASED
            tally.buries -= what == _BURIED
            tally.kicks -= what == _KICKED
            raise
        if self.trails is not None:
            event = trail.RELEASED if what == _RELEASED else trail.BURIED if what == _BURIED else trail.KICKED
            self.note(tube, job, event, holder, now_ns)
        if what == _RELEASED:
            self.total_releases = total
            tube.total_releases = of_tube
        elif what == _BURIED:
            self.total_buries = total
            tube.total_buries = of_tube
        else:
            self.total_kicks = total
            tube.total_kicks = of_tube

    # --- questions

    def tube_of(self, job: Job) -> Tube:
        """Returns the tube of a job that exists."""
        return self.tube_by_number[job.tube]

    def size_of(self, job: Job) -> int:
        """Returns the size of a job's body with its CRLF, in memory or not."""
        body = job.body
        if body is not None:
            return len(body)
        assert self.bodies is not None
        return self.bodies.size_of(job)

    def peek(self, client: Client, state: int) -> Job | None:
        """Returns the first READY, DELAYED or BURIED job of the tube that the client uses."""
        tube = client.used
        assert tube is not None
        order = tube.ready if state == READY else tube.delayed if state == DELAYED else tube.buried
        if state == READY and order.first() == EMPTY and tube.blocked is not None:
            order = tube.blocked
        first = order.first()
        return None if first == EMPTY else self.jobs.get(first)

    # --- after an exception

    def undo(self) -> None:
        """Undoes what is half done after an exception out of any call here. O(everything).

        A job that was handed out or given back before the exception stays so.
        """
        rebuild(self)
        if self.bodies is not None:
            uploads = [client.upload for client in self.clients.values()]
            self.bodies.recount(self.jobs, [job for job in uploads if job is not None])
        self.changing = False


def _mark_of(job: Job, now_ns: int) -> Job | None:
    """Returns the mark of a job that is to be deleted and whose key has to be unique for a while longer.

    Several jobs of a tube have one key when some of them were moved there. Each leaves a mark: its time is its own.
    """
    tags = tags_of(job)
    if tags is None or not tags.unique_s:
        return None
    mark = Job(job.id, 0, job.pri, 0, job.ttr_s)
    mark.state = DELETED
    mark.rank = now_ns + tags.unique_s * SECOND_NS
    mark.created_ns = job.created_ns
    mark.body = b"\r\n"
    mark.tally = TaggedTally(tags)
    return mark


def _has_room(tube: Tube, policy: Policy, body_bytes: int) -> bool:
    """Returns whether the limits of a policy let another job come in. Puts that wait or are uploaded do not count."""
    if not policy.room_for(body_bytes - CRLF_BYTES, tube.whole_jobs(), tube.body_bytes()):
        return True
    policy.refused += 1
    return False
