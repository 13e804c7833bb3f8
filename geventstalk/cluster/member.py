"""One node among several that share a log: whether it follows, claims, leads, or must end. The owner drives the tasks.

This module must not know gevent, sockets, SQL, clocks or randomness: time comes from the owner's monotonic clock, and
all else is asked for (geventstalk/cluster/wants.py). Nothing here trusts a clock of another node, a session's lock, or
that an answer came in time.
Invariant: this node serves only while its lease holds, under an epoch that is surely its own, after it has read all
that earlier epochs wrote, and after every lease of an earlier node has run out or that node is known to be silent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final

from geventstalk.cluster.lease import MARGIN, MS_NS, Lease
from geventstalk.cluster.troubles import BEAT, CLAIM, COMMIT, COPIES, LOG, LOOK, NAME, Troubles
from geventstalk.cluster.wants import (
    OPEN,
    REFUSED,
    Ask,
    LeadLog,
    MemberOwner,
    Probe,
    ReadOn,
    ResumeLog,
    Steps,
    Want,
    ask,
)
from geventstalk.turn.tasks import Flag, Wait
from journal.errors import JournalForked, JournalLocked, JournalUnreachable
from journal.fence import Fence, Identity, MemberFacts, Told, View

STARTING: Final = "starting"
STANDBY: Final = "standby"
CLAIMING: Final = "taking over"
ACTIVE: Final = "active"
SILENT: Final = "silent"
LEAVING: Final = "handing over"
ENDED: Final = "ended"
"""The roles, as an operator reads them."""

READ_NS: Final = 8 * MS_NS
"""A follower reads on after this time: much shorter than a takeover, much longer than a commit."""
LOOK_NS_MIN: Final = 10 * MS_NS
LOOK_NS_MAX: Final = 250 * MS_NS
LOOKS: Final = 50
"""The number of looks of a follower in a lease, within these bounds."""
BEATS: Final = 2
"""The number of missing heartbeats after which a follower looks for the reason: whether the leader is there, and
whether the database confirms commits. In the time of as many more heartbeats the leader falls silent by itself."""
RETRIES: Final = 20
"""The number of retries in a lease of a statement that did not reach the database."""
PATIENCE: Final = 10
"""The number of leases that a claim waits for a log that cannot be reached. Then another node may try."""
FRESH: Final = 3
"""A node counts as absent when it has told nothing for this many leases."""
NAMESAKES: Final = 2
"""Another process with the name of this node surely lives when it has told this many times in a row. Of a process that
has ended, at most one statement was still on its way."""
SETTLED: Final = 8
"""A process that has told this many times owns the name of its node. Before, it leaves the name to another process."""

Answer = Generator[Want, Any, bool]
"""A part of a task that says yes or no."""


class Member:
    """`place` gives the number of the last record that this node has read or written.

    The owner drives all tasks until each ends. When one of them raises an exception, the process must end: whatever the
    member did not expect of the log or of the database is the owner's to report.
    """

    def __init__(
        self, me: Identity, clock: Callable[[], int], owner: MemberOwner, place: Callable[[], int] = lambda: 0
    ) -> None:
        self.me = me
        self.lease = Lease(me.lease_ms)
        self.role = STARTING
        self.epoch = 0  # which is this node's own, once it has claimed
        self.view: View | None = None
        self.view_ns = 0  # when the question was asked that the view answers
        self._clock = clock
        self._owner = owner
        self._place = place
        self._lease_ns = me.lease_ms * MS_NS
        self._look_ns = min(max(self._lease_ns // LOOKS, LOOK_NS_MIN), LOOK_NS_MAX)
        self._retry_ns = self._lease_ns // RETRIES
        self._beat_ns = self._lease_ns // MARGIN
        # what was seen of others; these moments are those at which an answer was received
        self._epoch_ns = 0  # since when the epoch is the last one
        self._changed_ns = 0  # since when the epoch and its heartbeat are what they are
        self._confirmed_ns: int | None = None  # when a commit was confirmed that was asked for while they stood still
        self._released_ns = 0  # since when it has said goodbye
        self._port_open = False  # whether the process that leads was seen to listen at its address
        self._lock_seen = False  # whether its session was seen in the database, and no look has failed since
        self._probe_ns = 0  # when to probe that node again
        self._probe_rest_ns = self._look_ns
        self._tell_ns = 0  # when to tell of this node again
        self._tells = self._namesakes = 0  # how often it has told, and has found that a namesake told since
        self._troubles = Troubles(clock, owner.tells)
        self._serve_ns = 0  # when the leases of earlier nodes have run out, once this node has claimed
        self._silent = False  # whether the owner was told that the lease has run out
        self._old_request = False  # whether the request was there before this node led
        # between the tasks
        self._stirred = Flag()  # for keep_role(): something below has changed
        self._log_flag = Flag()  # for keep_log(): there is an epoch, or the end
        self._watch_flag = Flag()  # for keep_watch(): the lease was renewed, or this is the end
        self._caught_up = False  # whether all of the log was read once
        self._ready = False  # whether the log can be written under the epoch
        self._cuts = 0  # how often its link was cut
        self._wants_epoch = False  # whether the log needs a newer one, for its link was cut
        self._log_lost_ns: int | None = None  # since when the log cannot be reached
        self._fenced = False  # whether the log has found another epoch
        self._asked_to_leave = False
        self._successor: str | None = None  # the node that is to follow, once this node hands over
        self._finished = False

    def tasks(self) -> list[Steps]:
        """Returns the tasks that run from the start on."""
        return [self.keep_role(), self.keep_log(), self.keep_watch()]

    # --- for the owner

    def has_ended(self) -> bool:
        """Returns whether this process may never answer again."""
        return self.role == ENDED

    @property
    def serves(self) -> bool:
        """Returns whether clients are served here, or wait here for the lease."""
        return self.role in (ACTIVE, SILENT, LEAVING)

    def whom(self, now_ns: int) -> str | None:
        """Returns the address of the node that leads, if a follower knows it surely enough to pass clients on."""
        view = self.view
        if view is None or self.role not in (STARTING, STANDBY) or now_ns - self.view_ns > self._lease_ns:
            return None
        leads = view.epoch > 0 and not view.released and view.incarnation != self.me.incarnation
        return view.address if leads and view.address not in ("", self.me.address) else None  # "": a command leads

    def leave(self) -> None:
        """Asks the member to end. A node that leads hands over first. The end comes as steps_down()."""
        self._asked_to_leave = True
        self._stirred.set()

    def finish(self) -> None:
        """Called after hands_over(), when everything that was taken is committed and sent. Nothing more is sent."""
        self._finished = True
        self._stirred.set()

    def log_is_cut(self) -> None:
        """The log's link has broken during a write. What was on its way may have arrived or not."""
        self._cuts += 1
        if self._ready:
            self._ready = False
            self._wants_epoch = True
            self._stirred.set()

    def log_is_fenced(self) -> None:
        """The log was not written, for the epoch is another one."""
        self._ready = False
        self._fenced = True
        self._stirred.set()

    # --- the role

    def keep_role(self) -> Steps:
        """Follows until this node has an epoch, prepares to serve, and leads."""
        if (yield from self._follow()) and (yield from self._prepare()):
            yield from self._lead()

    def _follow(self) -> Answer:
        """Looks, and claims when no node leads. Returns whether it has claimed; otherwise the member has ended."""
        while True:
            self._stirred.clear()
            if self._asked_to_leave:
                yield from self._tell(ENDED)
                return self._end("asked to leave")
            sent_ns = self._clock()
            view = yield from self._look()
            if self.has_ended():
                return False
            if view is not None:
                if self._caught_up and self._wait_no_longer(view, sent_ns):
                    silent = view.released or not view.epoch or view.incarnation == self.me.incarnation
                else:
                    if self._doubts(view, sent_ns):
                        yield from self._confirm()  # first, for a probe takes time
                    if not self._caught_up or not (yield from self._is_gone(view)):
                        yield from self._tell_now_and_then()
                        yield Wait(self._stirred, self._clock() + self._look_ns)
                        continue
                    silent = True
                claimed = yield from self._claim(view, silent)
                if claimed or self.has_ended():
                    return claimed
            yield Wait(self._stirred, self._clock() + self._retry_ns)

    def _look(self) -> Generator[Want, Any, View | None]:
        """Returns None when the database does not answer, or has lost an epoch: then the member has ended."""
        sent_ns = self._clock()
        try:
            view: View = yield ask(Fence.look)
        except JournalUnreachable as error:
            self._troubles.begin(LOOK, error)
            self._confirmed_ns = None
            self._lock_seen = False  # where the database has lost this session, it may have lost all
            return None
        self._troubles.end(LOOK)
        self._note(view, sent_ns)
        return None if self.has_ended() else view

    def _note(self, view: View, sent_ns: int) -> None:
        """Takes a view in. The moments that count are those of its arrival: then it was true, or has been."""
        now_ns = self._clock()
        seen, self.view, self.view_ns = self.view, view, sent_ns
        if view.replication != ("" if seen is None else seen.replication):
            self._owner.tells(COPIES[view.replication])
        if seen is None or (seen.epoch, seen.incarnation) != (view.epoch, view.incarnation):
            lower = seen is not None and view.epoch < seen.epoch
            if lower and (view.incarnation != self.me.incarnation or view.epoch < self.epoch):
                self._end(f"the database has lost epoch {seen.epoch if seen else 0}, its last is {view.epoch}")
                return
            self._epoch_ns = now_ns
            self._changes(now_ns)
            self._troubles.forget(CLAIM)  # there is nothing to claim any more
            if seen is None or seen.incarnation != view.incarnation or seen.address != view.address:
                self._port_open = self._lock_seen = False
                self._probe_ns = 0
                self._probe_rest_ns = self._look_ns
        elif seen.beat != view.beat:
            self._changes(now_ns)
        news = seen is None or (seen.epoch, seen.incarnation, seen.released) != (
            view.epoch,
            view.incarnation,
            view.released,
        )
        lasted = seen is None or seen.session == view.session  # if not, the database may have lost all sessions
        self._lock_seen = view.locked or (lasted and self._lock_seen)
        if news and view.released:
            self._released_ns = now_ns
        if news and self.role in (STARTING, STANDBY):
            self._owner.follows(view)

    def _changes(self, now_ns: int) -> None:
        """Something of the node that leads has been committed."""
        self._changed_ns = now_ns
        self._confirmed_ns = None
        self._troubles.end(COMMIT)

    def _wait_no_longer(self, view: View, sent_ns: int) -> bool:
        """Returns whether it is time for this node to claim, by the view of a look that was sent at this moment."""
        if not view.epoch or view.incarnation == self.me.incarnation:
            return True  # no node has led; or a claim of this node has come through whose answer was lost
        if view.released:
            mine = view.successor in ("", self.me.node)
            return mine or sent_ns - self._released_ns >= view.lease_ms * MS_NS
        if self._confirmed_ns is None or sent_ns - self._confirmed_ns < _heartbeats_ns(view):
            return False
        return sent_ns - self._changed_ns >= view.lease_ms * MS_NS

    def _doubts(self, view: View, sent_ns: int) -> bool:
        """Returns whether the heartbeat has stood still for so long that the node looks for the reason."""
        if view.released or self._confirmed_ns is not None:
            return False
        return sent_ns - self._changed_ns >= _heartbeats_ns(view)

    def _confirm(self) -> Steps:
        """Asks the database to confirm a commit of this node. Otherwise no heartbeat can come through either.

        A look is a read and says nothing of commits. When commits hang, all nodes would claim as soon as commits work
        again.
        """
        try:
            yield ask(Fence.confirm)
        except JournalUnreachable as error:
            self._troubles.begin(COMMIT, error)
            return
        self._troubles.end(COMMIT)
        self._confirmed_ns = self._clock()

    def _is_gone(self, view: View) -> Answer:
        """Returns whether the process that leads has surely ended: its port was open, and refuses now that its lock is
        free.

        Neither sign is enough alone. A port also refuses behind a gateway, or where a service has no address for a
        moment. A session also ends when only the connection breaks, or the database ends. A port at which another
        process answers, or none, proves nothing. No commit has to be confirmed before: there is no process that needs
        time for a heartbeat, and the claim is a commit itself.
        """
        now_ns = self._clock()
        if view.released or view.address in ("", self.me.address):
            return False
        if self._port_open and view.locked:
            self._probe_rest_ns = self._look_ns
            self._probe_ns = 0
            return False
        if now_ns < self._probe_ns:
            return False
        found: str = yield Probe(view.address, view.incarnation)
        self._probe_ns = self._clock() + self._probe_rest_ns
        self._probe_rest_ns = min(2 * self._probe_rest_ns, self._lease_ns // 2)
        if self._port_open:
            return found == REFUSED and self._lock_seen
        self._port_open = found == OPEN
        if self._port_open:
            self._probe_ns = 0
        return False

    def _claim(self, seen: View, silent: bool) -> Answer:
        """Claims the next epoch. `silent` says that the process of the epoch that was seen never answers again.

        When the answer is lost, the next look shows whether the claim came through. Then this node claims once more,
        because only an answer says that the epoch survives a failover of the database.
        """
        owed_ms = seen.owed_ms if silent else max(seen.owed_ms, seen.lease_ms)
        try:
            claimed: bool = yield ask(Fence.claim, seen, max(owed_ms, 1))  # 0 says that this node serves
        except JournalUnreachable as error:
            self._troubles.begin(CLAIM, error)
            self._confirmed_ns = None
            return False
        claimed_ns = self._clock()
        self._troubles.end(CLAIM)
        if not claimed:
            return False
        self.role = CLAIMING
        self.epoch = seen.epoch + 1
        # No earlier node can have a heartbeat any more: its last one was before its successor's claim was seen.
        since_ns = self._epoch_ns if silent else self._changed_ns
        if owed_ms and not silent:
            view = yield from self._look_at_own()
            if view is None:
                return False
            if view.beat != seen.beat:
                since_ns = claimed_ns  # the old node had another heartbeat just before the claim
        self._serve_ns = since_ns + owed_ms * MS_NS
        return True

    def _look_at_own(self) -> Generator[Want, Any, View | None]:
        """A look at this node's epoch. None when the member has ended, for the epoch is another node's."""
        while True:
            view = yield from self._look()
            if self.has_ended():
                return None
            if view is not None:
                if view.incarnation == self.me.incarnation:
                    return view
                self._lose(view)
                return None
            yield Wait(self._stirred, self._clock() + self._retry_ns)
            self._stirred.clear()

    # --- between the claim and serving

    def _prepare(self) -> Answer:  # noqa: C901 - each branch is one state of a claim
        """Has the log read to its end and waits the earlier leases out. Returns whether this node serves now."""
        self._log_flag.set()
        beat_ns = self._clock() + self._beat_ns  # the claim was one; another would hold up what the log commits
        while not self._asked_to_leave:
            self._stirred.clear()
            now_ns = self._clock()
            ready = self._ready and now_ns >= self._serve_ns
            if self._fenced:
                self._fenced = False
                if not (yield from self._check_epoch()):
                    return False
            elif self._wants_epoch:
                if not (yield from self._claim_anew()):
                    if self.has_ended():
                        return False
                    yield Wait(at_ns=self._clock() + self._retry_ns)
            elif ready or now_ns >= beat_ns:
                reached = yield from self._beat(ask(Fence.serve, self.epoch) if ready else ask(Fence.beat, self.epoch))
                if self.has_ended():
                    return False
                if self.lease.holds(self._clock()):
                    return self._begin()
                beat_ns = now_ns + self._beat_ns if reached else self._clock() + self._retry_ns
                if not reached:
                    yield Wait(at_ns=beat_ns)
            elif self._log_lost_ns is not None and now_ns - self._log_lost_ns > PATIENCE * self._lease_ns:
                yield from self._say_goodbye("", "the log cannot be reached")
                return False
            else:
                yield Wait(self._stirred, min(beat_ns, self._serve_ns) if now_ns < self._serve_ns else beat_ns)
        yield from self._say_goodbye("", "asked to leave")
        return False

    def _begin(self) -> bool:
        self.role = ACTIVE
        self._old_request = self.view is not None and self.view.transfer_to == "*"
        self._owner.leads(self.epoch)
        self._watch_flag.set()
        return True

    def _beat(self, want: Ask) -> Answer:
        """One heartbeat. Returns whether it succeeded; if not, ask has_ended()."""
        sent_ns = self._clock()
        try:
            view: View | None = yield want
        except JournalUnreachable as error:
            self._troubles.begin(BEAT, error)
            return False
        self._troubles.end(BEAT)
        if view is None or view.incarnation != self.me.incarnation:
            yield from self._check_epoch()
            return False
        self._note(view, sent_ns)
        if self.serves or want.method == "serve":
            self._renew(sent_ns)
        return True

    def _renew(self, sent_ns: int) -> None:
        lapsed = not self.lease.holds(self._clock())
        self.lease.renew(sent_ns)
        if lapsed and self.serves and self.lease.holds(self._clock()):
            self._silent = False
            if self.role == SILENT:
                self.role = ACTIVE
            self._owner.speaks_again()
        self._watch_flag.set()

    def _check_epoch(self) -> Answer:
        """Another part has found an epoch that is not this node's. Returns whether the epoch is this node's after all.

        Then a claim whose answer was lost came through late, and one more claim makes the epoch certain.
        """
        if (yield from self._look_at_own()) is None:
            return False
        self._wants_epoch = True
        return True

    # --- leading

    def _lead(self) -> Steps:
        """Keeps the lease, obeys requests, and gives the log a newer epoch when its link was cut."""
        beat_ns = self._clock() + self._beat_ns
        while not self._finished:
            self._stirred.clear()
            if self._asked_to_leave and self._successor is None:
                self._hand_over("")
            now_ns = self._clock()
            if self._fenced:
                self._fenced = False
                yield from self._check_epoch()
            elif now_ns >= beat_ns:
                reached = yield from self._beat(ask(Fence.beat, self.epoch))
                beat_ns = now_ns + self._beat_ns if reached else self._clock() + self._retry_ns
                if reached:
                    yield from self._heed_request()
                    yield from self._tell_now_and_then()
            elif self._wants_epoch:
                if not (yield from self._claim_anew()) and not self.has_ended():
                    yield Wait(at_ns=min(beat_ns, self._clock() + self._retry_ns))
            else:
                yield Wait(self._stirred, beat_ns)
            if self.has_ended():
                return
        yield from self._say_goodbye(self._successor or "", "handed over")

    def _claim_anew(self) -> Answer:
        """Claims a newer epoch of this node, so that no statement that is on its way to the log can come late."""
        view = yield from self._look()
        if view is None:
            return False
        if view.incarnation != self.me.incarnation:
            return self._lose(view)
        try:
            claimed: bool = yield ask(Fence.claim, view, view.owed_ms)
        except JournalUnreachable as error:
            self._troubles.begin(CLAIM, error)
            return False
        self._troubles.end(CLAIM)
        if claimed:
            self.epoch = view.epoch + 1
            self._wants_epoch = False
            self._log_flag.set()
        return claimed

    def _heed_request(self) -> Steps:
        """An operator wants another node to lead: the one that is named, or the one that has read most."""
        view, me = self.view, self.me
        if view is None or not view.transfer_to or self._successor is not None:
            self._old_request = False
            return
        try:
            successor = ""
            if view.transfer_to != me.node and not (self._old_request and view.transfer_to == "*"):
                members: list[MemberFacts] = yield ask(Fence.members)
                there = [
                    each
                    for each in members
                    if each.role == STANDBY and each.node != me.node and view.transfer_to in ("*", each.node)
                    if each.age_s * 1000 < FRESH * me.lease_ms
                ]
                successor = max(there, key=lambda each: (each.place, each.node)).node if there else ""
                if not there:
                    self._owner.tells(f"asked to hand over to {view.transfer_to}, which is no standby that is there")
            if successor:
                self._hand_over(successor)
            else:
                yield ask(Fence.withdraw_transfer, view.transfer_to)
        except JournalUnreachable as error:
            self._troubles.begin(LOOK, error)

    def _hand_over(self, successor: str) -> None:
        self._successor = successor
        self.role = LEAVING
        self._owner.hands_over()

    # --- the end

    def _say_goodbye(self, successor: str, why: str) -> Steps:
        """Ends the lease, and tells the other nodes, which need not wait for its end then."""
        self.lease.revoke()
        until_ns = self._clock() + self._lease_ns
        while True:
            try:
                yield ask(Fence.release, self.epoch, successor)
                break
            except JournalUnreachable as error:
                self._troubles.begin(BEAT, error)
            if self._clock() >= until_ns:
                break  # the lease would have run out by now
            yield Wait(at_ns=self._clock() + self._retry_ns)
        yield from self._tell(ENDED)
        self._end(why)

    def _lose(self, view: View) -> bool:
        return self._end(f"{view.node or 'no node'} leads, epoch {view.epoch}")

    def _end(self, why: str) -> bool:
        """Returns False."""
        if not self.has_ended():
            self.lease.revoke()
            self.role = ENDED
            for flag in (self._stirred, self._log_flag, self._watch_flag):
                flag.set()
            self._owner.steps_down(why)
        return False

    # --- beside the role

    def keep_log(self) -> Steps:
        """Reads on while others write, then has the log written under this node's epoch, again after each cut."""
        try:
            yield from self._read_log()
            writes = False
            while not self.has_ended():
                self._log_flag.clear()
                epoch, cuts = self.epoch, self._cuts
                if self._ready:
                    yield Wait(self._log_flag)
                    continue
                try:
                    held: bool = yield (ResumeLog if writes else LeadLog)(epoch)
                except JournalUnreachable as error:
                    self._lose_log(error)
                    if writes:
                        self._wants_epoch = True  # the next attempt needs its own
                        self._stirred.set()
                        yield Wait(self._log_flag)
                    else:
                        yield Wait(self._log_flag, self._clock() + self._retry_ns)
                    continue
                self._find_log()
                writes = writes or held
                self._ready = held and cuts == self._cuts
                self._wants_epoch = held and not self._ready
                self._fenced = not held
                self._stirred.set()
                yield Wait(self._log_flag)
        except JournalForked as error:
            self._end(str(error))

    def _read_log(self) -> Steps:
        """Until all is read that was written before this node's epoch."""
        while not self.has_ended():
            claimed = self.epoch  # first this, then the question: what it does not bring was not written
            try:
                more: bool = yield ReadOn()
            except JournalUnreachable as error:
                self._lose_log(error)
                yield Wait(at_ns=self._clock() + self._retry_ns)
                continue
            self._find_log()
            if more:
                continue
            if not self._caught_up:
                self._caught_up = True
                if self.role == STARTING:
                    self.role = STANDBY
                    self._tell_ns = 0  # a node that wants to hand over to this one need not wait
                    if self.view is not None:
                        self._owner.follows(self.view)  # its manager waits for a standby, and no news may come
                self._stirred.set()
            if claimed:
                return
            yield Wait(self._log_flag, self._clock() + READ_NS)

    def _lose_log(self, error: JournalUnreachable) -> None:
        if self._log_lost_ns is None:
            self._log_lost_ns = self._clock()
        self._troubles.begin(LOG, error)

    def _find_log(self) -> None:
        self._log_lost_ns = None
        self._troubles.end(LOG)

    def keep_watch(self) -> Steps:
        """Tells the owner when the lease has run out, also while an answer of the database is awaited."""
        while not self.has_ended():
            self._watch_flag.clear()
            if not self.serves or self._silent:
                yield Wait(self._watch_flag)
            elif self.lease.holds(self._clock()):
                yield Wait(self._watch_flag, self.lease.ends_ns)
            else:
                self._silent = True
                if self.role == ACTIVE:
                    self.role = SILENT
                self._owner.falls_silent()

    def _tell_now_and_then(self) -> Steps:
        if self._clock() >= self._tell_ns:
            yield from self._tell(self.role)

    def _tell(self, role: str) -> Steps:
        """Has others know of this node. They lead without knowing."""
        self._tell_ns = self._clock() + self._lease_ns
        me, view = self.me, self.view
        epoch = self.epoch or (0 if view is None else view.epoch)
        try:
            told: Told = yield ask(Fence.tell, MemberFacts(me.node, me.address, role, epoch, self._place(), 0.0))
        except JournalUnreachable as error:
            self._troubles.begin(LOOK, error)
            return
        self._tells += 1
        if told.namesake:
            self._meet(told, role)
        else:
            self._namesakes = 0
            self._troubles.end(NAME)

    def _meet(self, told: Told, role: str) -> None:
        """Another process has told under the name of this node. Raises JournalLocked in the second one of a name.

        That is the one which began later and is still at its start, or which follows the other one. A node that leads
        never ends for its name.
        """
        self._namesakes += 1
        if self._namesakes < NAMESAKES:
            return
        me = self.me
        other = f"another process is node {me.node} as well, at {told.namesake}: give each its own name (--node)"
        led = self.view is not None and self.view.node == me.node
        if role in (STARTING, STANDBY) and self._tells <= SETTLED and (told.older or led):
            raise JournalLocked(other)
        self._troubles.begin(NAME, other)


def _heartbeats_ns(view: View) -> int:
    """In which the node that leads has BEATS heartbeats, when all is well."""
    return BEATS * view.lease_ms * MS_NS // MARGIN
