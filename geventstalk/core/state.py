"""The state of the engine: the place of each job, the tubes and clients, and their counters.

The engine is one class in five modules, each derived from the one before: state, dispatch (which client gets a job),
due (deadlines), engine (the commands of clients), operate (the changes of an operator). This one must not know clocks.
Invariant: a job is in exactly one place, the one its state names, and each counter says how many are there. A method
takes a job out of its place, or gives a job a place. It changes orders and counters first, and the job's own fields
last, by assignments that cannot fail. Totals and times cannot be recounted, so they change in that last step, too.
engine.py says what an exception means.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core import trail
from geventstalk.core.bodies import Bodies
from geventstalk.core.job import (
    DELAYED,
    ID_MAX_BITS,
    READY,
    RESERVED,
    SECOND_NS,
    U32_MAX,
    URGENT_PRI_MAX,
    Job,
    Ledger,
    TaggedTally,
)
from geventstalk.core.jobtable import JobTable
from geventstalk.core.meter import Rates, Times
from geventstalk.core.order import EMPTY
from geventstalk.core.rules import Rules
from geventstalk.core.timerwheel import NEVER, Timer, TimerWheel
from geventstalk.core.trail import Trails
from geventstalk.core.tube import NO_ID, Client, Tube
from geventstalk.policies import Policies, Policy

SMALL_STEPS: Final = 16
"""Small steps that count as one unit of work. To move one job is one unit."""
TUBE_STEPS: Final = 2
"""Lines that are entered or left in one unit of work. A client that leaves a line may end the line's tube."""
DEFAULT_TUBE: Final = b"default"
TUBE_BYTES: Final = 1200
"""About the memory of a tube with its name, without its jobs."""
WATCH_BYTES: Final = 300
"""About the memory for one tube more that a client watches."""
TUBES_BYTES_MIN: Final = 1 << 22
"""Where memory has a bound, tubes and watch lists may take a quarter of it beside bodies, and this in any case."""


class EngineState:
    """All tubes and jobs of a server, and each job's place. Counters are per process, as upstream."""

    def __init__(self, now_ns: int, ledger: Ledger | None = None) -> None:
        self.ledger = ledger if ledger is not None else Ledger()
        self.jobs = JobTable()
        self.bodies: Bodies | None = None  # None: memory has no bound, and every job has its body
        self.rules: Rules | None = None  # None: no job has had tags yet
        self.policies: Policies | None = None  # None: no tube has a policy
        self.trails: Trails | None = None  # None: no policy wants to know what happens to jobs
        self.quotas: dict[bytes, tuple[int, int]] = {}  # the most jobs, and bytes of them, of users that have a limit
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
        self.watch_count = 0  # of how many tubes each client watches, the sum
        self.total_jobs = 0
        self.total_deletes = 0
        self.total_releases = 0
        self.total_buries = 0
        self.total_kicks = 0
        self.total_timeouts = 0
        self.reserved_unready = 0
        self.total_clients = 0
        self.active: list[Tube] = []  # those with events since rates were settled
        self.settling: list[Tube] = []  # those of them whose rates are still to be settled
        self.rates = Rates(now_ns)
        self.queued = Times()  # these two, and the totals above, are those of all tubes, also of tubes that are gone
        self.worked = Times()
        self.low_ready = self.low_delayed = self.low_reserved = self.low_buried = NO_ID
        self.unsorted = False  # whether there may be strays that ages.py has not found yet
        self.strays: list[int] = []  # their ids in order of age, also of those that are gone
        self.stray_ids: set[int] = set()
        self.wheel = TimerWheel(now_ns)
        self.tube_by_number: dict[int, Tube] = {}
        self.stocked: dict[int, Tube] = {}  # unpaused tubes with ready jobs, by number
        self._tube_number = 0
        self._names: list[bytes] = []  # of all tubes, at the last tube_names()
        self._named = 0, 0  # the last number of a tube, and how many tubes there were then
        self._wait_number = 0
        self._bury_number = 0
        self._restored_ns = -(1 << ID_MAX_BITS)  # when the last job of the journal was put
        self.default = self._tube(DEFAULT_TUBE)

    # --- from place to place

    def _leave_place(self, job: Job) -> Tube:
        """Takes the job out of its place; the caller gives it a new one. Returns its tube."""
        self.changing = True
        tube = self.tube_by_number[job.tube]
        state = job.state
        if state == RESERVED:
            holder = self.clients[job.holder]
            if job.id in holder.reserved:  # leave() may have taken the job to `leaving`
                del holder.reserved[job.id]
            if holder.reserved or holder.leaving:
                holder.deadlines.discard(job.rank, job.id)
            else:
                holder.deadlines.clear()  # most workers hold one job; this makes a delete a tenth cheaper
            self.reserved_count -= 1
            tube.reserved -= 1
            if self.rules is not None:
                self.rules.lets_go(job)
        elif state == READY:
            if self.rules is None or not self.rules.displace(job, tube):
                tube.ready.discard(job.rank, job.id)
            self._left_ready(tube, job.pri)
        elif state == DELAYED:
            tube.delayed.discard(job.rank, job.id)
            self.delayed_count -= 1
        else:
            tube.buried.discard(job.rank, job.id)
            self.buried_count -= 1
            if self.rules is not None:
                self.rules.counts_buried(job, -1)
        return tube

    def _take_first(self, tube: Tube) -> Job:
        """Takes the first ready job out of its place. There is one."""
        job = self.jobs.get(tube.ready.pop())
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

    def _place_ready(self, tube: Tube, pri: int, job: Job, now_ns: int) -> None:
        """Places a ready job. When it is completely ready, the caller serves the tube's line."""
        id = job.id
        if self.rules is None or not self.rules.place(job, tube, pri, now_ns):
            tube.ready.push(pri, id)
            if not tube.paused_until_ns:
                self.stocked[tube.number] = tube
        if id < tube.low_ready:
            tube.low_ready = id
        if id < self.low_ready:
            self.low_ready = id
        self.arrivals += 1
        self.ready_count += 1
        if pri <= URGENT_PRI_MAX:
            self.urgent_count += 1
            tube.urgent += 1

    def _place_delayed(self, tube: Tube, deadline_ns: int, id: int) -> None:
        tube.delayed.push(deadline_ns, id)
        if id < tube.low_delayed:
            tube.low_delayed = id
        if id < self.low_delayed:
            self.low_delayed = id
        self.delayed_count += 1
        self._arm(tube, deadline_ns)

    def _place_buried(self, tube: Tube, number: int, job: Job) -> None:
        """Places a buried job. The number of the burying orders the tube's buried jobs."""
        id = job.id
        tube.buried.push(number, id)
        if self.rules is not None:
            self.rules.counts_buried(job, 1)
        if id < tube.low_buried:
            tube.low_buried = id
        if id < self.low_buried:
            self.low_buried = id
        self.buried_count += 1

    def _hold(self, client: Client, job: Job, tube: Tube, now_ns: int) -> None:
        """Reserves a job that is in no place for a client; the job's state still names its last place."""
        if not tube.active:
            self._wake(tube, now_ns)
        tally = job.tally
        if tally is None:
            tally = job.counts()
        if self.rules is not None:
            self.rules.holds(job)
        if self.trails is not None:
            self.note(tube, job, trail.RESERVED, client.number, now_ns)
        id = job.id
        client.reserved[id] = job
        if id < tube.low_reserved:
            tube.low_reserved = id
        if id < self.low_reserved:
            self.low_reserved = id
        self.reserved_count += 1
        tube.reserved += 1
        deadline_ns = now_ns + job.ttr_s * SECOND_NS
        client.deadlines.push(deadline_ns, id)
        if client.slot < 0 or deadline_ns < client.deadline_ns:  # as _arm() does, without its call
            self.wheel.add(client, deadline_ns)
        reserves = tally.reserves + 1
        if job.state == READY:
            queued = tube.queued
            if queued is None:
                queued = tube.queued = Times()
            queued.add(now_ns - job.since_ns, self.queued)
        else:
            unready = tube.reserved_unready + 1
            self.reserved_unready += 1
            tube.reserved_unready = unready
        tally.reserves = reserves
        job.state = RESERVED
        job.holder = client.number
        job.rank = deadline_ns
        job.since_ns = now_ns

    def _hold_failed(self, job: Job, tube: Tube, state: int, rank: int, since_ns: int) -> None:
        """Undoes _hold() after a failure behind it; undo() gives the job its place."""
        if state == READY:
            assert tube.queued is not None
            tube.queued.take_back(job.since_ns - since_ns, self.queued)
        else:
            self.reserved_unready -= 1
            tube.reserved_unready -= 1
        job.state, job.rank, job.since_ns = state, rank, since_ns
        job.holder = 0
        tally = job.counts()
        tally.reserves -= 1
        if isinstance(tally, TaggedTally):
            tally.tried -= 1

    def _measure_work(self, tube: Tube, ns: int) -> None:
        """Counts the time for which a job was reserved, wholly or not at all."""
        worked = tube.worked
        if worked is None:
            worked = tube.worked = Times()
        worked.add(ns, self.worked)

    def serve_soon(self, tube: Tube) -> None:
        """Leaves it to the tube's timer, which fires at once, to serve the clients that wait for a job of the tube."""
        self._arm(tube, self.wheel.now_ns)
        tube.behind = True

    def rules_of_tags(self) -> Rules:
        """Returns the rules, made now when no job had tags yet."""
        rules = self.rules
        if rules is None:
            rules = self.rules = Rules(self)
        return rules

    # --- rates

    def _wake(self, tube: Tube, now_ns: int) -> None:
        """Makes a tube active: the first event since its rates were settled."""
        if not self.active and not self.settling:
            self.rates.fade(now_ns)
        if tube.rates is None:
            tube.rates = Rates(now_ns)
        else:
            tube.rates.fade(now_ns)
        self.active.append(tube)
        tube.active = True

    def settle_rates(self, now_ns: int, limit: int) -> bool:
        """Takes the events of up to `limit` tubes into the rates. Returns whether that was all.

        Called every few seconds while there are `active` tubes.
        """
        if not self.settling:
            self.settling, self.active = self.active, []
        settling = self.settling
        for _ in range(min(limit, len(settling))):
            tube = settling[-1]
            rates = tube.rates
            assert rates is not None
            rates.settle(events(tube), now_ns)
            tube.active = False
            settling.pop()
        if settling:
            return False
        self.rates.settle(events(self), now_ns)
        return True

    # --- timers

    def _arm(self, timer: Timer, deadline_ns: int) -> None:
        """Makes the timer fire at this deadline or earlier.

        A timer that fires too early is armed again. So a worker's timer is armed once a time to run, not once a job.
        """
        if timer.slot < 0 or deadline_ns < timer.deadline_ns:
            self.wheel.add(timer, deadline_ns)

    # --- tubes come and go

    def _tube(self, name: bytes) -> Tube:
        tube = self.tubes.get(name)
        if tube is None:
            self._tube_number = self._free_number(self._tube_number + 1)
            tube = Tube(self._tube_number, name)
            self.tubes[name] = tube
            self.tube_by_number[tube.number] = tube
            if self.policies is not None and self.policies.pauses:
                self.keep_pause(tube)
        return tube

    def policy_of(self, tube: Tube) -> Policy | None:
        """Returns the policy of a tube, None without one."""
        policies = self.policies
        if policies is None:
            return None
        if tube.policies is not policies:
            tube.policy = policies.of(tube.name)
            tube.policies = policies
        return tube.policy

    def note(self, tube: Tube, job: Job, what: int, client: int, now_ns: int) -> None:
        """Records what happens to a job, where the policy of its tube says so. `trails` are there."""
        trails = self.trails
        assert trails is not None
        trails.note(self.policy_of(tube), job.id, what, client, now_ns)

    def keep_pause(self, tube: Tube) -> bool:
        """Pauses a tube whose policy says so. Returns whether the policy pauses it."""
        policy = self.policy_of(tube)
        if policy is None or not policy.terms.pause:
            return False
        if not tube.kept_paused:
            tube.kept_paused = True
            self._pause(tube, U32_MAX, self.wheel.now_ns)
        return True

    def _pause(self, tube: Tube, delay_s: int, now_ns: int) -> None:
        until_ns = now_ns + delay_s * SECOND_NS
        self._arm(tube, until_ns)
        self.stocked.pop(tube.number, None)
        tube.paused_until_ns = until_ns
        tube.pause_s = delay_s

    def takes_tubes(self) -> bool:
        """Returns whether memory has room for another tube, or for a client that watches one tube more."""
        if self.bodies is None:
            return True
        watches = self.watch_count - len(self.clients)  # to watch one tube is a part of a connection
        most = max(self.bodies.max_bytes // 4, TUBES_BYTES_MIN)
        return len(self.tubes) * TUBE_BYTES + watches * WATCH_BYTES < most

    def tube_names(self) -> list[bytes]:
        """Returns the names of all tubes, in order of creation. Calls share the list while no tube comes or goes."""
        now = self._tube_number, len(self.tubes)
        if self._named != now:
            self._names = [*self.tubes]
            self._named = now
        return self._names

    def _free_number(self, number: int) -> int:
        """Returns this number for a tube, or the next free one. They begin again after 2**32 - 1."""
        while number > U32_MAX or number in self.tube_by_number:
            number = 1 if number > U32_MAX else number + 1
        return number

    def _watch(self, client: Client, tube: Tube) -> None:
        client.arrivals = NEVER
        client.absent[tube.number] = tube
        tube.watchers[client.number] = client
        client.watched[tube.number] = tube
        self.watch_count += 1

    def _unwatch(self, client: Client, tube: Tube) -> None:
        """Makes the tube and the client forget each other. The caller has taken the tube out of `client.watched`."""
        client.arrivals = NEVER
        self.watch_count -= 1
        client.absent.pop(tube.number, None)
        tube.line.remove(client.number)
        del tube.watchers[client.number]
        self._forget_if_unused(tube)

    def _forget_if_unused(self, tube: Tube) -> None:
        """Ends a tube without jobs, users and watchers, with its counters and its pause. `default` never ends."""
        if tube.jobs or tube.using or tube.watchers or tube is self.default:
            return
        self.wheel.cancel(tube)
        del self.tubes[tube.name]
        del self.tube_by_number[tube.number]


def events(of: EngineState | Tube) -> list[int]:
    """Returns how often each of meter.EVENTS has come."""
    queued = of.queued
    reserves = of.reserved_unready if queued is None else of.reserved_unready + queued.count()
    return [of.total_jobs, reserves, of.total_deletes, of.total_timeouts, of.total_buries]
