"""The rules of tags: unique jobs, groups, limits of a key, tries and times; which ready jobs may be given out.

This module must not know commands, clocks or the journal. The engine asks it only about jobs with tags.
A ready job that may not be given out yet stands in the order `blocked` of its tube, the others in `ready`.
Invariant: for each key and limit a tube shows at most one job in `ready`, the first, and only while fewer jobs than the
limit are reserved. All of it follows from the fields of the jobs, but for marks, so that rebuild() makes it anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from geventstalk.core.job import READY, SECOND_NS, Job, TaggedTally, tags_of
from geventstalk.core.order import EMPTY, Order
from geventstalk.core.timerwheel import Timer
from geventstalk.core.tube import Tube
from geventstalk.tags import EXPIRED, TOLD, TRIED, Tags

if TYPE_CHECKING:
    from geventstalk.core.state import EngineState

FREE_SLICE: Final = 250
"""Jobs that a command frees when a group is done. Later slices free the others."""
_LANES_PER_UNIT: Final = 16
"""Lanes of a key that are looked at in one unit of work."""
_LINKS_MAX: Final = 10_000
"""Groups that a search for a cycle looks at: some milliseconds. A chain that is longer is refused."""
TAGS_BYTES: Final = 700
"""About the memory of the tags of a job, or of a mark, without their text, which takes up to twice its bytes."""
SHARED_BYTES: Final = 250
"""The same for a job whose tags are those of another job."""
KEY_BYTES: Final = 400
"""The same for a key of its own, with its lane."""
BYTES_MIN: Final = 1 << 22
"""Where memory has a bound, tags and marks may take a quarter of it beside bodies, and this in any case."""
_NO_JOB: Final = 0


class _Lane:
    """The ready jobs of a tube that share a key and its limit. `shown` is the one in the tube's `ready`, 0 for none."""

    __slots__ = ("most", "ready", "shown", "shown_rank", "tube")

    def __init__(self, tube: Tube, most: int) -> None:
        self.tube = tube
        self.most = most
        self.ready = Order()
        self.shown = _NO_JOB
        self.shown_rank = 0


class _Key:
    """The common state of the jobs of a key: how many are reserved, and the lanes of those that are ready."""

    __slots__ = ("lanes", "reserved")

    def __init__(self) -> None:
        self.reserved = 0
        self.lanes: dict[tuple[int, int], _Lane] = {}


class Group:
    """The jobs of a group that are not deleted: how many, and how many of them are buried.

    `waiting` holds the ids of ready jobs that wait for the group's end. `after` counts the groups for which members
    wait that are not freed.
    """

    __slots__ = ("after", "buried", "name", "pending", "waiting")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.pending = 0
        self.buried = 0
        self.waiting: dict[int, None] = {}
        self.after: dict[bytes, int] = {}


class Owned:
    """Counts the jobs of a user and the bytes of these jobs."""

    __slots__ = ("bytes", "jobs")

    def __init__(self) -> None:
        self.jobs = 0
        self.bytes = 0


class _Shared:
    """Tags that several jobs have, and how many jobs that are."""

    __slots__ = ("jobs", "tags")

    def __init__(self, tags: Tags) -> None:
        self.tags = tags
        self.jobs = 0


class Duplicate:
    """The job that stands where a put has another with the same key: its id, its state, and its priority if raised."""

    __slots__ = ("id", "pri", "state")

    def __init__(self, id: int, state: int, pri: int) -> None:
        self.id = id
        self.state = state
        self.pri = pri  # -1: it is as it was


class Rules(Timer):
    """The rules of an engine's jobs. It is made for the first job with tags; its timer is for times that end."""

    def __init__(self, engine: EngineState) -> None:
        super().__init__()
        self._engine = engine
        self.groups: dict[bytes, Group] = {}
        self.marks: dict[int, Job] = {}  # of deleted jobs that are unique for a while longer
        self.settings_id = 0  # the mark that keeps settings of the operator
        self.mark_tubes: dict[int, bytes] = {}
        self.duplicate = Duplicate(0, 0, -1)  # of the last put that was one
        self.due: deque[int] = deque()  # ids of jobs and marks for settle()
        self.bytes = 0  # about what the tags of jobs and marks take
        self.loading = False  # jobs are restored, in order of their ids: members of a group may follow those that wait
        self.owned: dict[bytes, Owned] = {}  # by the user
        self.over_quota = False  # the last put with an owner was refused for its quota
        self._shared: dict[bytes, _Shared] = {}  # by their text; tags with a unique key are not shared
        self._unique: dict[bytes, int] = {}  # the job or the mark that a put with this key finds
        self._later: dict[bytes, dict[int, None]] = {}  # other jobs with the same key, which were moved together
        self._keys: dict[bytes, _Key] = {}
        self._over: dict[int, int] = {}  # why the time of ready jobs in their tube is over
        self._times = Order()  # when the times of ready jobs and of marks end, and their ids

    # --- a put

    def finds(self, tags: Tags, tube: Tube) -> int:
        """Returns the id of the job, or of the mark, with the same unique key in this tube; 0 for none."""
        return self._unique.get(_unique_key(tube.name, tags), _NO_JOB) if tags.unique else _NO_JOB

    def takes(self, tags: Tags) -> bool:
        """Returns whether memory has room for a job with these tags. A mark takes what its job took."""
        bodies = self._engine.bodies
        more = SHARED_BYTES if tags.text in self._shared else _bytes_of(tags)
        return bodies is None or self.bytes + more <= max(bodies.max_bytes // 4, BYTES_MIN)

    def is_within(self, tags: Tags, quotas: Mapping[bytes, tuple[int, int]]) -> bool:
        """Returns whether the owner may have another job with these tags. `quotas` has the most jobs and bytes."""
        quota = quotas.get(tags.owner)
        if quota is None:
            return True
        owned = self.owned.get(tags.owner)
        jobs, taken = (0, 0) if owned is None else (owned.jobs, owned.bytes)
        return jobs < quota[0] and taken + tags.owner_bytes <= quota[1]

    def closes_cycle(self, tags: Tags) -> bool:
        """Returns whether a group would wait for itself, if a job with these tags were put."""
        if not tags.group or not tags.after:
            return False
        seen = {tags.after}
        links = [tags.after]
        while links:
            name = links.pop()
            if name == tags.group or len(seen) > _LINKS_MAX:
                return True
            group = self.groups.get(name)
            if group is not None:
                following = [after for after in group.after if after not in seen]
                seen.update(following)
                links += following
        return False

    # --- jobs come and go

    def enter(self, job: Job, tube: Tube) -> None:
        """Takes in a job that gets its place next."""
        tally = job.tally
        if not isinstance(tally, TaggedTally):
            return
        self._share(tally)
        tags = tally.tags
        tally.freed = tally.freed or tally.reserves > 0
        if tags.owner:
            owned = self.owned.get(tags.owner)
            if owned is None:
                owned = self.owned[tags.owner] = Owned()
            owned.jobs += 1
            owned.bytes += tags.owner_bytes
        if tags.unique:
            self._take_key(_unique_key(tube.name, tags), job.id)
        if tags.group:
            group = self._group(tags.group)
            group.pending += 1
            if tags.after and not tally.freed:
                group.after[tags.after] = group.after.get(tags.after, 0) + 1

    def leave(self, job: Job, tube: Tube, now_ns: int) -> None:
        """Forgets a job that has left its place. Jobs that waited for it are freed."""
        tally = job.tally
        if not isinstance(tally, TaggedTally):
            return
        tags = tally.tags
        self._unshare(tags)
        if tags.owner:
            owned = self.owned[tags.owner]
            owned.jobs -= 1
            owned.bytes -= tags.owner_bytes
            if not owned.jobs:
                del self.owned[tags.owner]
        if tags.unique:
            self._leave_key(_unique_key(tube.name, tags), job.id)
        if tags.group:
            group = self.groups[tags.group]
            group.pending -= 1
            if tags.after and not tally.freed:
                _unlink(group, tags.after)
            if not group.pending:
                self._free(group, now_ns)

    def grew(self, before: Tags, tally: TaggedTally) -> None:
        """Hears that a job has other tags."""
        self._unshare(before)
        self._share(tally)

    def _share(self, tally: TaggedTally) -> None:
        """Counts the memory of a job's tags. Equal tags of several jobs become the same object."""
        tags = tally.tags
        if tags.unique:
            self.bytes += _bytes_of(tags)
            return
        shared = self._shared.get(tags.text)
        if shared is None:
            shared = self._shared[tags.text] = _Shared(tags)
            self.bytes += _bytes_of(tags)
        else:
            tally.tags = shared.tags
            self.bytes += SHARED_BYTES
        shared.jobs += 1

    def _unshare(self, tags: Tags) -> None:
        if tags.unique:
            self.bytes -= _bytes_of(tags)
            return
        shared = self._shared[tags.text]
        shared.jobs -= 1
        if shared.jobs:
            self.bytes -= SHARED_BYTES
        else:
            del self._shared[tags.text]
            self.bytes -= _bytes_of(tags)

    def moves(self, job: Job, before: Tube, name: bytes) -> None:
        """Follows a job from one tube to another, where other jobs may have its key."""
        tags = tags_of(job)
        if tags is not None and tags.unique:
            self._leave_key(_unique_key(before.name, tags), job.id)
            self._take_key(_unique_key(name, tags), job.id)

    def _take_key(self, key: bytes, id: int) -> None:
        if self._unique.setdefault(key, id) != id:
            self._later.setdefault(key, {})[id] = None

    def _leave_key(self, key: bytes, id: int) -> None:
        """Gives a key to the next job that has it, or sets it free."""
        later = self._later.get(key)
        if self._unique.get(key) != id:
            if later is not None:
                later.pop(id, None)
        elif later:
            self._unique[key] = min(later)
            del later[self._unique[key]]
        else:
            del self._unique[key]
        if later is not None and not later:
            del self._later[key]

    # --- places

    def place(self, job: Job, tube: Tube, pri: int, now_ns: int) -> bool:
        """Gives a job that turns ready its place in `ready` or `blocked`. Returns False for a job without tags."""
        tally = job.tally
        if not isinstance(tally, TaggedTally):
            return False
        tags, id = tally.tags, job.id
        if _is_tried(tally, tube):
            self._end(id, tube, pri, TRIED)
            return True
        if tags.after and not tally.freed:
            group = self._group(tags.after)
            if not tally.reserves and (group.pending or self.loading):
                group.waiting[id] = None
                tube.block(pri, id)
                return True
            self._forget_group(group)
            self._set_free(tally)
        self._open(job, tally, tube, pri, now_ns)
        return True

    def _end(self, id: int, tube: Tube, pri: int, why: int) -> None:
        """Keeps a job whose time in its tube is over from being handed out, until the job is settled."""
        self._over[id] = why
        tube.block(pri, id)
        self.due.append(id)

    def _open(self, job: Job, tally: TaggedTally, tube: Tube, pri: int, now_ns: int) -> None:
        """Lets a job be given out as soon as its key allows. From now on its time runs."""
        tags = tally.tags
        if tags.ttl_s and tube.name != tags.dead:
            begin_ns = now_ns
            if not (tally.reserves or tally.kicks or tags.after):  # so a restart does not begin anew
                begin_ns = job.created_ns + job.delay_s * SECOND_NS
            tally.until_ns = max(1, begin_ns + tags.ttl_s * SECOND_NS)
            self._times.push(tally.until_ns, job.id)
            self._arm()
        if not tags.key:
            self._show(tube, pri, job.id)
            return
        key = self._keys.get(tags.key)
        if key is None:
            key = self._keys[tags.key] = _Key()
        where = tube.number, tags.key_max
        lane = key.lanes.get(where)
        if lane is None:
            lane = key.lanes[where] = _Lane(tube, tags.key_max)
        lane.ready.push(pri, job.id)
        tube.block(pri, job.id)
        self._look_at_lane(key, lane)

    def displace(self, job: Job, tube: Tube) -> bool:
        """Takes a ready job out of its place. Returns False for a job without tags."""
        tally = job.tally
        if not isinstance(tally, TaggedTally):
            return False
        if self._is_shown(job, tally.tags, tube):
            tube.ready.discard(job.rank, job.id)
        else:
            tube.unblock(job.rank, job.id)
        tags, id = tally.tags, job.id
        self._stop_time(tally, id)
        if self._over.pop(id, 0):
            return True
        if tags.after and not tally.freed:
            group = self.groups[tags.after]
            del group.waiting[id]
            self._forget_group(group)
        elif tags.key:
            key = self._keys[tags.key]
            lane = key.lanes[tube.number, tags.key_max]
            _leave_lane(lane, job)
            self._look_at_lane(key, lane)
            self._forget_key(tags.key, key)
        return True

    def _stop_time(self, tally: TaggedTally, id: int) -> None:
        if tally.until_ns:
            self._times.discard(tally.until_ns, id)
            tally.until_ns = 0

    def _is_shown(self, job: Job, tags: Tags, tube: Tube) -> bool:
        if job.id in self._over:
            return False
        if tags.after:
            group = self.groups.get(tags.after)
            if group is not None and job.id in group.waiting:
                return False
        return not tags.key or self._keys[tags.key].lanes[tube.number, tags.key_max].shown == job.id

    def may_reserve(self, job: Job, tube: Tube) -> bool:
        """Returns whether a job that is not reserved may be, by its id."""
        tally = job.tally
        if not isinstance(tally, TaggedTally):
            return True
        tags = tally.tags
        if job.id in self._over or (job.state != READY and _is_tried(tally, tube)):
            return False
        if tags.after and not tally.freed:
            group = self.groups.get(tags.after)
            if group is not None and group.pending:
                return False
        key = self._keys.get(tags.key)
        return key is None or key.reserved < tags.key_max

    # --- reservations

    def backoff_s(self, job: Job, tube: Tube) -> int:
        """Returns the delay of a reserved job whose delivery ends without a delete; 0 for no delay."""
        tally = job.tally
        if not isinstance(tally, TaggedTally):
            return 0
        backoff = tally.tags.backoff
        if backoff is None or tube.name == tally.tags.dead or _is_tried(tally, tube):
            return 0
        return backoff.delay_s(job.id, tally.tried)

    def holds(self, job: Job) -> None:
        """Hears that a job is about to be reserved. It is in no place, or was just taken from its tube's `ready`.

        The delivery is kept when a tag limits deliveries, so that a crash does not bring one more.
        """
        tally = job.tally
        if not isinstance(tally, TaggedTally):
            return
        self._stop_time(tally, job.id)
        key = self._keys.get(tally.tags.key)
        lane = None if key is None else key.lanes.get((job.tube, tally.tags.key_max))
        if lane is not None and lane.shown == job.id:
            _leave_lane(lane, job)
        tally.tried += 1
        if tally.tags.tries and job.state == READY:  # a reserve of a job by its id is kept anyway
            tally.reserves += 1
            try:
                self._engine.ledger.change(job)
            except BaseException:
                tally.tried -= 1
                raise
            finally:
                tally.reserves -= 1
        if tally.why == TOLD:
            tally.why = 0  # its worker told why it buried the job another time
        self.reserved(tally)

    def reserved(self, tally: TaggedTally) -> None:
        """Counts a job that is reserved."""
        tags = tally.tags
        if tags.after and not tally.freed:
            self._set_free(tally)
        if tags.key:
            key = self._keys.get(tags.key)
            if key is None:
                key = self._keys[tags.key] = _Key()
            key.reserved += 1
            self._look_at_lanes(tags.key, key)

    def lets_go(self, job: Job) -> None:
        """Hears that a job is not reserved any more."""
        tags = tags_of(job)
        if tags is not None and tags.key:
            key = self._keys[tags.key]
            key.reserved -= 1
            self._look_at_lanes(tags.key, key)

    def _look_at_lanes(self, name: bytes, key: _Key) -> None:
        self._engine.work += len(key.lanes) // _LANES_PER_UNIT
        for lane in [*key.lanes.values()]:
            self._look_at_lane(key, lane)
        self._forget_key(name, key)

    def _look_at_lane(self, key: _Key, lane: _Lane) -> None:
        """Shows the first job of a lane if one more may be reserved, and no other."""
        tube = lane.tube
        first = lane.ready.first()
        if first == EMPTY:
            del key.lanes[tube.number, lane.most]
            return
        wanted = first if key.reserved < lane.most else _NO_JOB
        if lane.shown == wanted:
            return
        if lane.shown:
            tube.ready.discard(lane.shown_rank, lane.shown)
            tube.block(lane.shown_rank, lane.shown)
            if tube.ready.first() == EMPTY:
                self._engine.stocked.pop(tube.number, None)
        lane.shown = wanted
        if wanted:
            lane.shown_rank = lane.ready.first_rank()
            tube.unblock(lane.shown_rank, wanted)
            self._show(tube, lane.shown_rank, wanted)

    def _show(self, tube: Tube, pri: int, id: int) -> None:
        engine = self._engine
        tube.ready.push(pri, id)
        if not tube.paused_until_ns:
            engine.stocked[tube.number] = tube
        engine.arrivals += 1
        if tube.line.entries:
            engine.serve_soon(tube)

    def _forget_key(self, name: bytes, key: _Key) -> None:
        if not key.lanes and not key.reserved:
            self._keys.pop(name, None)

    # --- groups

    def _group(self, name: bytes) -> Group:
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = Group(name)
        return group

    def _forget_group(self, group: Group) -> None:
        if not group.pending and not group.waiting:
            self.groups.pop(group.name, None)

    def counts_buried(self, job: Job, difference: int) -> None:
        """Hears that a job is buried from now on (1), or not any more (-1)."""
        tags = tags_of(job)
        if tags is not None and tags.group:
            self.groups[tags.group].buried += difference

    def _free(self, group: Group, now_ns: int) -> None:
        """Frees a slice of the jobs that wait for a group which is done. settle() of the next one frees another."""
        waiting = group.waiting
        for _ in range(min(len(waiting), FREE_SLICE)):
            self._free_job(next(iter(waiting)), group, now_ns)
        if waiting:
            self.due.append(next(iter(waiting)))
        self._forget_group(group)

    def _free_job(self, id: int, group: Group, now_ns: int) -> None:
        job = self._engine.jobs.get(id)
        assert job is not None
        tally = job.tally
        assert isinstance(tally, TaggedTally)
        tube = self._engine.tube_by_number[job.tube]
        del group.waiting[id]
        tube.unblock(job.rank, id)
        self._set_free(tally)
        self._open(job, tally, tube, job.rank, now_ns)

    def frees(self, job: Job, tally: TaggedTally, now_ns: int) -> None:
        """Frees a slice of the jobs that wait for the same group as this one, if the group is done."""
        group = self.groups.get(tally.tags.after)
        if group is not None and not group.pending and job.id in group.waiting:
            self._engine.work += min(len(group.waiting), FREE_SLICE)
            self._free(group, now_ns)

    def _set_free(self, tally: TaggedTally) -> None:
        tally.freed = True
        if tally.tags.group:
            _unlink(self.groups[tally.tags.group], tally.tags.after)

    def loaded(self, now_ns: int) -> None:
        """All jobs are restored: those go on that wait for groups without members."""
        self.loading = False
        for group in [*self.groups.values()]:
            if not group.pending:
                self._free(group, now_ns)

    # --- marks of deleted jobs

    def add_mark(self, mark: Job, tube_name: bytes) -> None:
        """Keeps a key from being used until the time of the mark, its rank."""
        tally = mark.tally
        assert isinstance(tally, TaggedTally)
        self.bytes += _bytes_of(tally.tags)
        self.marks[mark.id] = mark
        self.mark_tubes[mark.id] = tube_name
        if tally.tags.settings:
            self.settings_id = max(self.settings_id, mark.id)
        self._mark_key(_unique_key(tube_name, tally.tags), mark.id)
        tally.until_ns = max(1, mark.rank)
        self._times.push(tally.until_ns, mark.id)
        self._arm()

    def _mark_key(self, key: bytes, id: int) -> None:
        """Has a put find this mark, and not a job with the same key that was moved to its tube."""
        job_id = self._unique.get(key)
        self._unique[key] = id
        if job_id is not None:
            self._take_key(key, job_id)

    def settings(self) -> bytes:
        """Returns the text that Operate.keep_settings() has kept; b"" when there is none."""
        mark = self.marks.get(self.settings_id)
        tags = None if mark is None else tags_of(mark)
        return b"" if tags is None else tags.settings

    def mark_of(self, id: int) -> tuple[Job, bytes] | None:
        """Returns a mark and the name of its tube."""
        mark = self.marks.get(id)
        return None if mark is None else (mark, self.mark_tubes[id])

    def drop_mark(self, id: int) -> None:
        """Forgets a mark."""
        mark = self.marks.pop(id)
        if id == self.settings_id:
            self.settings_id = 0
        tally = mark.tally
        assert isinstance(tally, TaggedTally)
        self.bytes -= _bytes_of(tally.tags)
        self._leave_key(_unique_key(self.mark_tubes.pop(id), tally.tags), id)
        self._stop_time(tally, id)

    # --- times

    def fire(self, now_ns: int, limit: int) -> int:
        """Ends the times that have come, of about `limit` jobs and marks at most. Returns how many."""
        fired = 0
        while fired < limit and EMPTY < self._times.first_rank() <= now_ns:
            id = int(self._times.first())
            fired += 1
            job = self._engine.jobs.get(id)
            if job is None:
                tally = self.marks[id].tally
                assert isinstance(tally, TaggedTally)
                self._times.discard(tally.until_ns, id)
                tally.until_ns = 0
                self.due.append(id)
                continue
            tube = self._engine.tube_by_number[job.tube]
            self.displace(job, tube)
            self._end(id, tube, job.rank, EXPIRED)
            if tube.ready.first() == EMPTY:
                self._engine.stocked.pop(tube.number, None)
        self._arm()
        return fired

    def _arm(self) -> None:
        if self._times.first() != EMPTY:
            self._engine._arm(self, self._times.first_rank())

    def find_due(self) -> None:
        """Searches for the jobs that settle() has to change, for a node that is to lead. Nothing was due before."""
        self.due.clear()
        self.due.extend(self._over)
        for id, mark in self.marks.items():
            tally = mark.tally
            assert isinstance(tally, TaggedTally)
            if not tally.until_ns:
                self.due.append(id)
        for group in self.groups.values():
            if not group.pending:
                self.due.append(next(iter(group.waiting)))

    def why_over(self, job: Job) -> int:
        """Returns why the time of a job in its tube is over, 0 when it is not."""
        return self._over.get(job.id, 0)

    # --- after an exception

    def rebuild(self) -> None:
        """Forgets everything but the marks. enter() follows for each job, then the orders and place() for each."""
        self.forget()
        self.bytes = 0
        self._shared = {}
        self.owned = {}
        self.groups = {}
        self._unique = {}
        self._later = {}
        self._keys = {}
        self._over = {}
        self._times = Order()
        self.due.clear()
        for id in [id for id in self.marks if self._engine.jobs.get(id) is not None]:
            del self.marks[id], self.mark_tubes[id]  # the delete that made it was not done
        for id, mark in self.marks.items():
            tally = mark.tally
            assert isinstance(tally, TaggedTally)
            self.bytes += _bytes_of(tally.tags)
            tally.until_ns = max(1, mark.rank)
            self._mark_key(_unique_key(self.mark_tubes[id], tally.tags), id)
            self._times.push(tally.until_ns, id)
        self._arm()


def _unique_key(tube_name: bytes, tags: Tags) -> bytes:
    return tube_name + b" " + tags.unique


def _bytes_of(tags: Tags) -> int:
    return TAGS_BYTES + 2 * len(tags.text) + (KEY_BYTES if tags.key else 0)


def _leave_lane(lane: _Lane, job: Job) -> None:
    lane.ready.discard(job.rank, job.id)
    if lane.shown == job.id:
        lane.shown = _NO_JOB


def _is_tried(tally: TaggedTally, tube: Tube) -> bool:
    """Returns whether a job has had all of its deliveries."""
    tags = tally.tags
    return tags.tries > 0 and tally.tried >= tags.tries and tube.name != tags.dead


def _unlink(group: Group, after: bytes) -> None:
    """Counts one member less of a group that waits for another."""
    left = group.after[after] - 1
    if left:
        group.after[after] = left
    else:
        del group.after[after]
