"""Changes that an operator makes to a job, by its id, whichever client holds it. state.py lists the parts of the
engine.

This module must not know operators, nor how many jobs an operation is about.
A worker from which a job is taken gets NOT_FOUND for it, as after the end of the job's ttr.
Invariant: that of engine.py. What the ledger alone may refuse comes before the first change of an order or a counter.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core import trail
from geventstalk.core.engine import _BURIED, _RELEASED, OUT_OF_MEMORY, UNFINISHED, Engine
from geventstalk.core.job import (
    BURIED,
    DELAYED,
    DELETED,
    READY,
    RESERVED,
    SECOND_NS,
    Job,
    TaggedTally,
    Tally,
    tags_of,
)
from geventstalk.core.tube import DEADLINE_MARGIN_NS, Client, Tube
from geventstalk.limits import U32_MAX
from geventstalk.tags import EXPIRED, TOLD, Tags, buried_for, kept_settings, moved_from

_Numbers = tuple[int, int, int, int, int]
"""State, rank, priority, delay and ttr of a job."""

# Outcomes, beside OUT_OF_MEMORY and UNFINISHED.
DONE: Final = 8
NOT_FOUND: Final = 9
WRONG_STATE: Final = 10
"""The job is in a state that does not allow this. Nothing has changed."""

SETTINGS_TUBE: Final = b"geventstalk.settings"
"""The name of the tube in the mark that keeps settings. The server makes no tube of this name for the mark."""
KEEP: Final = -1
"""A number that alter() leaves as it is."""
_PART_BYTES: Final = 1 << 18
"""Bytes of a large job that the ledger takes at once, see durable/large.py."""
_UNIT_BITS: Final = 10
"""To write a job anew takes a unit of work more than to change it, and one for each 2**10 bytes of its body. So a part
is a slice of its own, of a millisecond or two with its commit."""
_NO_CLIENT: Final = Client()
"""Stands for the holder of a job that is not reserved."""


class Operate(Engine):
    """The engine with the changes of an operator. Each call is at least one unit of `work`."""

    def kick_one(self, id: int, now_ns: int) -> int:
        """Makes a buried or delayed job ready."""
        self.work += 1
        job = self.jobs.get(id)
        if job is None:
            return NOT_FOUND
        return DONE if self.kick_job(id, now_ns) else WRONG_STATE

    def force_delete(self, id: int, now_ns: int) -> int:
        """Deletes a job in any state."""
        self.work += 1
        job = self.jobs.get(id)
        if job is None:
            return NOT_FOUND
        self.delete(self.clients.get(job.holder, _NO_CLIENT), id, now_ns)
        return DONE

    def force_release(self, id: int, now_ns: int) -> int:
        """Takes a reserved job from its worker and makes it ready. It keeps its priority."""
        self.work += 1
        job = self.jobs.get(id)
        if job is None:
            return NOT_FOUND
        if job.state != RESERVED:
            return WRONG_STATE
        tube = self._leave_place(job)
        self._place_ready(tube, job.pri, job, now_ns)
        self._record(job, tube, READY, job.pri, job.pri, 0, _RELEASED, now_ns)
        if tube.line.entries:
            self._serve(tube, now_ns, 1)
        return DONE

    def force_bury(self, id: int, now_ns: int) -> int:
        """Sets a ready, delayed or reserved job aside, at the end of its tube's buried jobs. It keeps its priority."""
        self.work += 1
        job = self.jobs.get(id)
        if job is None:
            return NOT_FOUND
        if job.state == BURIED:
            return WRONG_STATE
        tube = self._leave_place(job)
        if not tube.active:
            self._wake(tube, now_ns)
        rank = self._bury_number + 1
        self._bury_number = rank
        self._place_buried(tube, rank, job)
        self._record(job, tube, BURIED, rank, job.pri, job.delay_s, _BURIED, now_ns)
        return DONE

    def open_put_to(self, tube_name: bytes, pri: int, delay_s: int, ttr_s: int, now_ns: int) -> Job:
        """As open_put(), into any tube. prepare(), put() and abandon_put() go on with the job as with a client's.

        undo() forgets the job when it is not put yet.
        """
        self.changing = True
        tube = self._tube(tube_name)
        job = Job(self.next_id, tube.number, pri, delay_s, ttr_s)
        job.rank = pri
        job.created_ns = now_ns
        self.next_id += 1
        tube.jobs += 1
        return job

    # --- what the tags of a job want

    def settle(self, id: int, now_ns: int) -> int:
        """Does what is due for a job or a mark whose id Rules.due had.

        A job that had its tries, or whose time is over, goes to the tube that its tags name; without one it is buried
        after its tries, and deleted after its time. A job whose group is done is freed. A mark is forgotten. After
        UNFINISHED the caller does as after that of alter().
        """
        self.work += 1
        rules = self.rules_of_tags()
        job = self.jobs.get(id)
        if job is None:
            self._forget_mark(id, now_ns)
            return DONE
        tally = job.tally
        assert isinstance(tally, TaggedTally)
        why = rules.why_over(job)
        if not why:
            rules.frees(job, tally, now_ns)
            return DONE
        if tally.tags.dead:
            outcome = self._move_to_dead(job, tally, why, now_ns)
            if outcome in (DONE, UNFINISHED):
                return outcome
        elif why == EXPIRED:
            return self.force_delete(id, now_ns)
        tally.why = why
        return self.force_bury(id, now_ns)

    def _move_to_dead(self, job: Job, tally: TaggedTally, why: int, now_ns: int) -> int:
        before, before_why = tally.tags, tally.why
        tally.tags = moved_from(before, self.tube_of(job).name)
        tally.why = why
        outcome = OUT_OF_MEMORY
        try:
            outcome = self.alter(job.id, KEEP, KEEP, KEEP, before.dead, now_ns)
        finally:
            if outcome != DONE:
                tally.tags, tally.why = before, before_why
        self.rules_of_tags().grew(before, tally)
        return outcome

    def _forget_mark(self, id: int, now_ns: int) -> None:
        rules = self.rules_of_tags()
        mark = rules.marks.get(id)
        if mark is not None and mark.rank <= now_ns:
            self.changing = True
            if mark.segment:
                self.ledger.delete(mark)
            rules.drop_mark(id)

    def keep_settings(self, text: bytes, now_ns: int) -> int:
        """Keeps settings of the operator beside the jobs, in place of those before; b"" keeps none.

        They go wherever marks go: over restarts, to other nodes, into backups and exports. Rules.settings() has them.
        Returns DONE or OUT_OF_MEMORY.
        """
        rules = self.rules_of_tags()
        before = rules.marks.get(rules.settings_id)
        mark = Job(self.next_id, 0, 0, U32_MAX, 1)
        if text:
            tags = kept_settings(text)
            if not rules.takes(tags) or not self.ledger.admits(len(tags.text), SETTINGS_TUBE):
                return OUT_OF_MEMORY
            self.changing = True
            self.next_id += 1
            mark.state = DELETED
            mark.created_ns = now_ns
            mark.rank = now_ns + U32_MAX * SECOND_NS
            mark.body = b"\r\n"
            mark.tally = TaggedTally(tags)
            self.ledger.mark(mark, SETTINGS_TUBE)
        if before is not None:
            self.changing = True
            if before.segment:
                self.ledger.delete(before)
            rules.drop_mark(before.id)
        if text:
            rules.add_mark(mark, SETTINGS_TUBE)
        return DONE

    def explain(self, client: Client, id: int, reason: bytes) -> int:
        """Keeps why a client is about to bury a job that it holds, as a tag. Returns NOT_FOUND where it does not.

        After UNFINISHED the caller does as after that of alter().
        """
        self.work += 1
        job = client.reserved.get(id)
        if job is None:
            return NOT_FOUND
        tube = self.tube_of(job)
        tags = buried_for(tags_of(job), reason)
        if not self.rules_of_tags().takes(tags):
            return OUT_OF_MEMORY
        before = job.counts()
        job.tally = tally = _explained(before, tags)
        outcome = OUT_OF_MEMORY
        try:
            outcome = self._prepare(job, tube.name, job.ttr_s)
            if outcome == DONE:
                self.changing = True
                self.ledger.rewrite(job, tube.name)
        except MemoryError:
            outcome = OUT_OF_MEMORY
        finally:
            if outcome != DONE:
                job.tally = before
        if outcome == DONE:
            if isinstance(before, TaggedTally):
                self.rules_of_tags().grew(before.tags, tally)
            else:
                self.rules_of_tags().enter(job, tube)
        return outcome

    # --- other numbers, another tube

    def alter(self, id: int, pri: int, delay_s: int, ttr_s: int, tube_name: bytes, now_ns: int) -> int:
        """Gives a job another priority, delay, ttr or tube, all or nothing. KEEP, and b"" as name, leave it as it is.

        A delay begins now: it makes a ready job delayed, and a delay of 0 makes a delayed job ready. A buried job has
        none: WRONG_STATE. To a reserved job only a ttr can be given: it begins now. A tube that is not there is made;
        the order of burying, the counts and the age of the job stay, and no total counts it.

        After UNFINISHED the caller calls again with the same arguments, or calls abandon_alter(). A large job with
        another ttr or tube has that, and a job whose body the caller has to bring into memory first. Meanwhile the job
        is as it was.
        """
        self.work += 1
        job = self.jobs.get(id)
        if job is None:
            return NOT_FOUND
        before = self.tube_by_number[job.tube]
        name = tube_name or before.name
        if not can_alter(job.state, pri, delay_s, name != before.name):
            self.ledger.abandon_rewrite(job)
            return WRONG_STATE
        new = _altered(job, pri, delay_s, ttr_s, now_ns)
        anew = name != before.name or new[4] != job.ttr_s
        if anew:
            outcome = self._prepare(job, name, new[4])
            if outcome != DONE:
                return outcome
        if anew or job.state != RESERVED:  # to begin a ttr once more is no change that outlives the process
            try:
                self._tell(job, name, anew, new)
            except MemoryError:
                return OUT_OF_MEMORY
        if job.state == RESERVED:
            self._restart_ttr(self.clients[job.holder], job, new)
        elif name != before.name or new[0] != job.state or new[1] != job.rank:
            self._move(job, before, name, new, now_ns)
        else:
            _set(job, new)
        return DONE

    def abandon_alter(self, id: int) -> None:
        """After UNFINISHED: alter() is not called again."""
        job = self.jobs.get(id)
        if job is not None:
            self.ledger.abandon_rewrite(job)

    def _prepare(self, job: Job, name: bytes, ttr_s: int) -> int:
        """Has the ledger prepare to keep all of the job anew. Returns DONE when it has."""
        if job.body is None:
            return UNFINISHED
        self.work += 1 + (min(self.size_of(job), _PART_BYTES) >> _UNIT_BITS)
        try:
            taken = self.ledger.prepare_rewrite(job, name, ttr_s)
        except MemoryError:
            return OUT_OF_MEMORY
        return OUT_OF_MEMORY if taken is None else DONE if taken else UNFINISHED

    def _tell(self, job: Job, name: bytes, anew: bool, new: _Numbers) -> None:
        """Tells the ledger of a job with other numbers, and leaves the job as it was."""
        self.changing = True
        state, rank, pri, delay_s, ttr_s = job.state, job.rank, job.pri, job.delay_s, job.ttr_s
        try:
            _set(job, new)
            if anew:
                self.ledger.rewrite(job, name)
            else:
                self.ledger.change(job)
        finally:
            job.state = state
            job.rank = rank
            job.pri = pri
            job.delay_s = delay_s
            job.ttr_s = ttr_s

    def _restart_ttr(self, holder: Client, job: Job, new: _Numbers) -> None:
        self.changing = True
        deadline_ns = new[1]
        holder.deadlines.discard(job.rank, job.id)
        holder.deadlines.push(deadline_ns, job.id)
        self._arm(holder, deadline_ns - (DEADLINE_MARGIN_NS if holder.waiting else 0))
        _set(job, new)

    def _move(self, job: Job, before: Tube, name: bytes, new: _Numbers, now_ns: int) -> None:
        """Moves a job from one place to another, perhaps of another tube."""
        self._leave_place(job)
        tube = self._tube(name)
        if self.rules is not None and tube is not before:
            self.rules.moves(job, before, name)
        before.jobs -= 1
        tube.jobs += 1
        size = self.size_of(job)
        before.bytes -= size
        tube.bytes += size
        state, rank, pri, delay_s, ttr_s = new
        if state == READY:
            self._place_ready(tube, pri, job, now_ns)
        elif state == DELAYED:
            self._place_delayed(tube, rank, job.id)
        else:
            self._place_buried(tube, rank, job)
        since_ns = job.since_ns if state == job.state else now_ns
        job.state = state
        job.rank = rank
        job.pri = pri
        job.delay_s = delay_s
        job.ttr_s = ttr_s
        job.tube = tube.number
        job.since_ns = since_ns
        if self.trails is not None and tube is not before:
            self.note(tube, job, trail.MOVED, 0, now_ns)
        self._forget_if_unused(before)
        if state == READY and tube.line.entries:
            self._serve(tube, now_ns, 1)


def _explained(before: Tally, tags: Tags) -> TaggedTally:
    """Returns the tally of a job with these tags, one of which tells why it is buried."""
    tally = TaggedTally(tags, *before.numbers())
    tally.holder = before.holder
    tally.why = TOLD
    if isinstance(before, TaggedTally):
        tally.tried = before.tried
        tally.freed = before.freed
        tally.until_ns = before.until_ns
    return tally


def can_alter(state: int, pri: int, delay_s: int, moves: bool) -> bool:
    """Returns whether a job in this state can be altered so."""
    if state == RESERVED:
        return pri == KEEP and delay_s == KEEP and not moves
    return state != BURIED or delay_s == KEEP


def _altered(job: Job, pri: int, delay_s: int, ttr_s: int, now_ns: int) -> _Numbers:
    """Returns the numbers that a job is to have."""
    state, rank = job.state, job.rank
    if pri == KEEP:
        pri = job.pri
    if ttr_s == KEEP:
        ttr_s = job.ttr_s
    else:
        ttr_s = ttr_s or 1
        if state == RESERVED:
            rank = now_ns + ttr_s * SECOND_NS
    if delay_s > 0:
        state, rank = DELAYED, now_ns + delay_s * SECOND_NS
    elif delay_s == 0 or state == READY:
        state, rank = READY, pri
    return state, rank, pri, job.delay_s if delay_s == KEEP else delay_s, ttr_s


def _set(job: Job, numbers: _Numbers) -> None:
    job.state, job.rank, job.pri, job.delay_s, job.ttr_s = numbers
