"""geventstalk/cluster/member.py step by step: what it asks for next, after answers that are rare or late.

What nodes do to each other is in test_cluster_simulation.py; here are the steps that few of its lives reach.
"""

from __future__ import annotations

from typing import Any

import pytest

from geventstalk.cluster.lease import MARGIN, MS_NS, Lease
from geventstalk.cluster.member import ACTIVE, BEATS, ENDED, LOOKS, SETTLED, STANDBY, Member
from geventstalk.cluster.wants import OPEN, REFUSED, Ask, LeadLog, MemberOwner, Probe, ReadOn, ResumeLog, ask
from geventstalk.turn.tasks import Wait
from journal.errors import JournalError, JournalForked, JournalLocked, JournalUnreachable
from journal.fence import Fence, FenceUnreachable, Identity, MemberFacts, Told, View

LEASE_MS = 1000
LOOK_MS = LEASE_MS // LOOKS
BEATS_MS = BEATS * LEASE_MS // MARGIN
NOBODY = View(0, "", "", "", 0, 0, (0, 0), True, "", "", False, 1, 1)
OTHER = View(4, "b", "b:1", "b.1", LEASE_MS, 0, (4, 7), False, "", "", True, 1, 1)


class Asked:
    """A want. As a tuple it would be equal to another kind of want with the same numbers."""

    def __init__(self, want: Any) -> None:
        self.want = want

    def __eq__(self, other: object) -> bool:
        return type(self.want) is type(other) and bool(self.want == other)

    def __repr__(self) -> str:
        return repr(self.want)

    def is_a(self, *kinds: Any) -> bool:
        """Returns whether it is of one of these types, or a call of one of these methods of the fence."""
        want = self.want
        return (want.method if isinstance(want, Ask) else type(want).__name__) in [kind.__name__ for kind in kinds]


ENDS = Asked(None)


class Stage(MemberOwner):
    """A member whose wants are answered by hand. Those that matter little are answered by themselves."""

    def __init__(self) -> None:
        self.now_ns = 5 * 10**9
        self.told = Told(0.0)  # what each telling is answered
        self.events: list[str] = []
        self.member = Member(Identity("a", "a:1", "a.1", LEASE_MS), lambda: self.now_ns, self)
        self.role, self.log, self.watch = self.member.tasks()
        self.asked = Asked(next(self.role))
        self.log_asked = Asked(next(self.log))
        next(self.watch)

    def later(self, ms: int) -> None:
        self.now_ns += ms * MS_NS

    def answers(self, answer: Any) -> Asked:
        """Answers what the role has asked for, and gives what it asks for next, beyond waits and tellings."""
        self.asked = self._send(self.role, answer)
        return self.asks()

    def asks(self) -> Asked:
        while self.asked.is_a(Wait, Fence.tell):
            if self.asked.is_a(Wait):
                self._wait(self.asked.want)
                self.asked = self._send(self.role, None)
            else:
                self.asked = self._send(self.role, self.told)
        return self.asked

    def log_answers(self, answer: Any) -> Asked:
        self.log_asked = self._send(self.log, answer)
        return self.log_asked

    def _wait(self, wait: Wait) -> None:
        if wait.flag is None or not wait.flag.is_set:
            assert wait.at_ns > 0, "it waits for nothing"
            self.now_ns = max(self.now_ns, wait.at_ns)

    def _send(self, task: Any, answer: Any) -> Asked:
        try:
            return Asked(task.throw(answer) if isinstance(answer, JournalError) else task.send(answer))
        except StopIteration:
            return ENDS

    def catch_up(self) -> None:
        """All of the log is read."""
        assert self.log_asked.is_a(ReadOn)
        assert self.log_answers(False).is_a(Wait)

    def lead_log(self, epoch: int) -> None:
        """The log is ready for the epoch that was claimed."""
        assert self.log_asked.is_a(Wait)
        assert self.log_answers(None) == ReadOn(), "it reads to the end after the claim, not before"
        assert self.log_answers(False) == LeadLog(epoch)
        assert self.log_answers(True).is_a(Wait)

    def own(self, epoch: int, **words: Any) -> View:
        """Returns what a look shows of this node."""
        return View(epoch, "a", "a:1", "a.1", LEASE_MS, 0, (epoch, 1), False, "", "", True, 1, 1)._replace(**words)

    # --- the owner

    def follows(self, view: View) -> None:
        self.events.append(f"follows {view.epoch}")

    def leads(self, epoch: int) -> None:
        self.events.append(f"leads {epoch}")

    def falls_silent(self) -> None:
        self.events.append("falls silent")

    def speaks_again(self) -> None:
        self.events.append("speaks again")

    def hands_over(self) -> None:
        self.events.append("hands over")

    def steps_down(self, why: str) -> None:
        self.events.append(f"steps down: {why}")

    def tells(self, text: str) -> None:
        self.events.append(text)


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    assert stage.asked == ask(Fence.look)
    stage.catch_up()
    return stage


@pytest.fixture
def leader() -> Stage:
    """A node that leads under epoch 1."""
    stage = Stage()
    stage.catch_up()
    assert stage.answers(NOBODY) == ask(Fence.claim, NOBODY, 1)
    assert stage.answers(True) == ask(Fence.beat, 1)
    stage.lead_log(1)
    assert stage.answers(stage.own(1)) == ask(Fence.serve, 1)
    assert stage.answers(stage.own(1)) == ask(Fence.beat, 1)
    assert stage.events == ["follows 0", "leads 1"] and stage.member.role == ACTIVE
    stage.events.clear()
    return stage


def follow(stage: Stage, view: View, ms: int) -> Asked:
    """Looks show the same for this long. Gives what is asked then; probes find the port open, commits are confirmed."""
    end_ns = stage.now_ns + ms * MS_NS
    asked = stage.asked
    while stage.now_ns < end_ns and asked.is_a(Fence.look, Probe, Fence.confirm):
        asked = stage.answers(view if asked.is_a(Fence.look) else OPEN if asked.is_a(Probe) else None)
    return asked


def doubt(stage: Stage, view: View) -> None:
    """Looks show the same until the node asks whether commits are confirmed."""
    while stage.asked != ask(Fence.confirm):
        assert stage.asked.is_a(Fence.look, Probe), stage.asked
        stage.answers(view if stage.asked.is_a(Fence.look) else OPEN)


# --- the lease


def test_a_lease_ends_a_margin_early_from_when_the_heartbeat_was_sent() -> None:
    lease = Lease(LEASE_MS)
    assert not lease.holds(0)
    lease.renew(100 * MS_NS)
    end_ns = (100 + LEASE_MS - LEASE_MS // MARGIN) * MS_NS
    assert lease.holds(end_ns - 1) and not lease.holds(end_ns)
    lease.renew(50 * MS_NS)
    assert lease.holds(end_ns - 1), "an older heartbeat takes nothing away"
    lease.revoke()
    lease.renew(200 * MS_NS)
    assert not lease.holds(0)


def test_an_answer_that_comes_late_gives_no_lease(leader: Stage) -> None:
    leader.later(5000)
    assert leader.answers(leader.own(1)) == ask(Fence.beat, 1)
    assert not leader.member.lease.holds(leader.now_ns - 4000)
    assert leader.answers(leader.own(1)) == ask(Fence.beat, 1)
    assert leader.member.lease.holds(leader.now_ns) and leader.events == ["speaks again"]


# --- to claim


def test_a_heartbeat_that_stands_still_for_a_lease_is_followed_by_a_claim(stage: Stage) -> None:
    begun_ns = stage.now_ns
    assert follow(stage, OTHER, 2 * LEASE_MS) == ask(Fence.claim, OTHER, LEASE_MS)
    assert LEASE_MS * MS_NS <= stage.now_ns - begun_ns < (LEASE_MS + 2 * LOOK_MS) * MS_NS
    assert stage.answers(True) == ask(Fence.look), "the other may have had a heartbeat just before the claim"
    assert stage.answers(stage.own(5, beat=OTHER.beat)) == ask(Fence.beat, 5)
    stage.lead_log(5)
    assert stage.answers(stage.own(5)) == ask(Fence.serve, 5)


def test_a_heartbeat_just_before_the_claim_is_waited_out(stage: Stage) -> None:
    assert follow(stage, OTHER, 2 * LEASE_MS) == ask(Fence.claim, OTHER, LEASE_MS)
    claimed_ns = stage.now_ns
    stage.answers(True)
    assert stage.answers(stage.own(5, beat=(4, 8))) == ask(Fence.beat, 5)
    stage.lead_log(5)
    asked = stage.asked
    while asked == ask(Fence.beat, 5):
        asked = stage.answers(stage.own(5))
    assert asked == ask(Fence.serve, 5) and stage.now_ns - claimed_ns >= LEASE_MS * MS_NS


def test_a_look_that_took_long_is_no_silence_of_the_other(stage: Stage) -> None:
    stage.answers(OTHER)
    asked = stage.asks()
    if asked.is_a(Probe):
        asked = stage.answers(OPEN)
    assert asked == ask(Fence.look)
    stage.later(3 * LEASE_MS)  # the answer is on its way for this long
    assert stage.answers(OTHER) != ask(Fence.claim, OTHER, LEASE_MS)


# --- to claim after the database confirmed nothing


def test_while_no_commit_is_confirmed_a_heartbeat_that_stands_still_proves_nothing(stage: Stage) -> None:
    """The replica is frozen for 1.2 leases. Looks succeed meanwhile; the node that leads is well."""
    stage.answers(OTHER)
    begun_ns = stage.now_ns
    doubt(stage, OTHER)
    assert BEATS_MS <= (stage.now_ns - begun_ns) // MS_NS <= BEATS_MS + LOOK_MS
    stage.later(LEASE_MS * 8 // 10)  # the answer comes when the replica is back
    stage.answers(None)
    assert follow(stage, OTHER, BEATS_MS - 2 * LOOK_MS).is_a(Fence.look, Probe)
    for beat in range(8, 12):
        assert follow(stage, OTHER._replace(beat=(4, beat)), LEASE_MS // 2).is_a(Fence.look, Probe)


def test_a_node_that_is_silent_though_commits_are_confirmed_again_is_followed(stage: Stage) -> None:
    stage.answers(OTHER)
    doubt(stage, OTHER)
    stage.later(3 * LEASE_MS)
    confirmed_ns = stage.now_ns
    stage.answers(None)
    assert follow(stage, OTHER, LEASE_MS) == ask(Fence.claim, OTHER, LEASE_MS)
    assert 0 <= stage.now_ns - confirmed_ns - BEATS_MS * MS_NS < 2 * LOOK_MS * MS_NS


def test_looks_go_on_while_no_commit_is_confirmed(stage: Stage) -> None:
    """Others are passed on to the node that leads, and it is told once. The leader may have died meanwhile."""
    stage.answers(OTHER)
    begun_ns = stage.now_ns
    while stage.now_ns - begun_ns < 9 * LEASE_MS * MS_NS:
        doubt(stage, OTHER)
        assert stage.member.whom(stage.now_ns) == "b:1"
        stage.answers(FenceUnreachable("commits wait for the replica"))
    assert [line for line in stage.events if "commit" in line] == [
        "the database of the cluster confirms no commit: commits wait for the replica"
    ]
    doubt(stage, OTHER)
    stage.answers(None)
    assert stage.events[-1] == "the database of the cluster confirms commits again"
    assert follow(stage, OTHER, LEASE_MS) == ask(Fence.claim, OTHER, LEASE_MS)


def test_a_heartbeat_says_that_commits_are_confirmed_again(stage: Stage) -> None:
    stage.answers(OTHER)
    doubt(stage, OTHER)
    stage.answers(FenceUnreachable("commits wait for the replica"))
    follow(stage, OTHER._replace(beat=(4, 8)), LOOK_MS)
    assert stage.events[-1] == "the database of the cluster confirms commits again"


@pytest.mark.parametrize("fails", [Fence.claim, Fence.look])
def test_what_was_confirmed_before_the_database_failed_counts_no_more(stage: Stage, fails: type) -> None:
    stage.answers(OTHER)
    doubt(stage, OTHER)
    stage.answers(None)
    while not stage.asked.is_a(fails):
        stage.answers(OTHER if stage.asked.is_a(Fence.look) else OPEN)
    stage.later(LEASE_MS)
    stage.answers(FenceUnreachable("no answer"))
    begun_ns = stage.now_ns
    doubt(stage, OTHER)
    stage.answers(None)
    assert follow(stage, OTHER, LEASE_MS) == ask(Fence.claim, OTHER, LEASE_MS)
    assert stage.now_ns - begun_ns >= BEATS_MS * MS_NS


def test_what_was_confirmed_before_a_heartbeat_says_nothing_of_the_time_behind_it(stage: Stage) -> None:
    stage.answers(OTHER)
    doubt(stage, OTHER)
    stage.answers(None)
    begun_ns = stage.now_ns
    doubt(stage, OTHER._replace(beat=(4, 8)))
    assert stage.now_ns - begun_ns >= BEATS_MS * MS_NS


def test_who_is_gone_is_followed_without_a_commit_that_is_confirmed(stage: Stage) -> None:
    """No other node is there that needs time for a heartbeat."""
    stage.answers(OTHER)
    doubt(stage, OTHER)
    gone = OTHER._replace(locked=False)
    asked = stage.answers(FenceUnreachable("commits wait for the replica"))
    while not asked.is_a(Fence.claim):
        asked = stage.answers(
            gone if asked.is_a(Fence.look) else REFUSED if asked.is_a(Probe) else FenceUnreachable("commits wait")
        )
    assert asked == ask(Fence.claim, gone, 1)


def test_no_heartbeat_holds_up_the_commits_of_a_takeover(stage: Stage) -> None:
    """The claim was a commit itself. A heartbeat behind it made the log's first one wait, and with it all clients."""
    assert stage.answers(NOBODY) == ask(Fence.claim, NOBODY, 1)
    begun_ns = stage.now_ns
    stage.asked = stage._send(stage.role, True)
    assert stage.asked.is_a(Wait)
    stage.lead_log(1)
    assert stage.asks() == ask(Fence.serve, 1) and stage.now_ns - begun_ns < LEASE_MS * MS_NS // MARGIN


def test_a_takeover_that_takes_long_has_heartbeats(stage: Stage) -> None:
    assert stage.answers(NOBODY) == ask(Fence.claim, NOBODY, 1)
    begun_ns = stage.now_ns
    for beats in range(1, 4):
        assert stage.answers(True if beats == 1 else stage.own(1)) == ask(Fence.beat, 1)
        assert abs(stage.now_ns - begun_ns - beats * LEASE_MS * MS_NS // MARGIN) < 50 * MS_NS


# --- to claim sooner, or not at all


def test_what_a_node_that_never_served_owed_is_owed_by_the_next(stage: Stage) -> None:
    """It had claimed from one whose lease may still run. That it is gone says nothing of that one."""
    never_served = OTHER._replace(owed_ms=LEASE_MS)
    asked = stage.answers(never_served)
    begun_ns = stage.now_ns
    assert asked == Probe("b:1", "b.1") and stage.answers(OPEN) == ask(Fence.look)
    assert stage.answers(never_served._replace(locked=False)) == Probe("b:1", "b.1")
    assert stage.answers(REFUSED) == ask(Fence.claim, never_served._replace(locked=False), LEASE_MS)
    assert stage.answers(True) == ask(Fence.beat, 5)
    stage.lead_log(5)
    asked = stage.asked
    while asked == ask(Fence.beat, 5):
        asked = stage.answers(stage.own(5, owed_ms=LEASE_MS))
    assert asked == ask(Fence.serve, 5) and stage.now_ns - begun_ns >= (LEASE_MS - 50) * MS_NS


def test_a_node_that_is_gone_is_waited_for_no_longer(stage: Stage) -> None:
    asked = stage.answers(OTHER)
    assert asked == Probe("b:1", "b.1") and stage.answers(OPEN) == ask(Fence.look)
    gone = OTHER._replace(locked=False)
    assert stage.answers(gone) == Probe("b:1", "b.1")
    begun_ns = stage.now_ns
    assert stage.answers(REFUSED) == ask(Fence.claim, gone, 1)
    assert stage.answers(True) == ask(Fence.beat, 5)
    stage.lead_log(5)
    assert stage.answers(stage.own(5, owed_ms=1)) == ask(Fence.serve, 5)
    assert stage.now_ns - begun_ns < LEASE_MS * MS_NS // 2


def test_a_door_that_was_never_open_proves_nothing(stage: Stage) -> None:
    unlocked = OTHER._replace(locked=False)
    assert stage.answers(unlocked) == Probe("b:1", "b.1")
    asked = stage.answers(REFUSED)
    begun_ns = stage.now_ns
    while not asked.is_a(Fence.claim):
        asked = stage.answers(unlocked if asked.is_a(Fence.look) else REFUSED)
    assert asked == ask(Fence.claim, unlocked, LEASE_MS) and stage.now_ns - begun_ns >= LEASE_MS * MS_NS * 9 // 10


def probes_until_it_claims(stage: Stage, *views: View | FenceUnreachable) -> Asked:
    """Looks find these, and the last of them from then on. The port was open, and refuses now."""
    assert stage.answers(OTHER) == Probe("b:1", "b.1") and stage.answers(OPEN) == ask(Fence.look)
    found = list(views)
    asked = stage.asked
    while not asked.is_a(Fence.claim):
        answer = found.pop(0) if len(found) > 1 and asked.is_a(Fence.look) else found[0]
        asked = stage.answers(answer if asked.is_a(Fence.look) else REFUSED if asked.is_a(Probe) else None)
    return asked


def test_a_port_that_refuses_proves_nothing_while_the_session_is_there(stage: Stage) -> None:
    """Behind a gateway, or where a service has no address, a node that lives is refused. It answered for a lease."""
    begun_ns = stage.now_ns
    assert probes_until_it_claims(stage, OTHER) == ask(Fence.claim, OTHER, LEASE_MS)
    assert stage.now_ns - begun_ns >= LEASE_MS * MS_NS


def test_a_lock_that_was_lost_with_all_others_proves_nothing(stage: Stage) -> None:
    """The database was away for this node, too: it may have lost each session."""
    begun_ns = stage.now_ns
    unlocked = OTHER._replace(locked=False)
    asked = probes_until_it_claims(stage, FenceUnreachable("the database starts"), unlocked)
    assert asked == ask(Fence.claim, unlocked, LEASE_MS) and stage.now_ns - begun_ns >= LEASE_MS * MS_NS


def test_a_lock_that_was_lost_with_the_session_of_this_node_proves_nothing(stage: Stage) -> None:
    """No look has failed: the database crashed while something else was asked, or nothing was."""
    begun_ns = stage.now_ns
    unlocked = OTHER._replace(locked=False, session=2)
    assert probes_until_it_claims(stage, unlocked) == ask(Fence.claim, unlocked, LEASE_MS)
    assert stage.now_ns - begun_ns >= LEASE_MS * MS_NS


def test_a_claim_whose_answer_was_lost_is_claimed_again(stage: Stage) -> None:
    """A failover of the database may take back what a look showed, and another node gets the same epoch."""
    assert stage.answers(NOBODY) == ask(Fence.claim, NOBODY, 1)
    assert stage.answers(FenceUnreachable("no answer")) == ask(Fence.look)
    mine = stage.own(1, owed_ms=1)
    assert stage.answers(mine) == ask(Fence.claim, mine, 1)
    assert stage.answers(True) == ask(Fence.beat, 2)


def test_a_released_epoch_belongs_to_its_successor_for_a_lease(stage: Stage) -> None:
    for_another = OTHER._replace(released=True, successor="c")
    begun_ns = stage.now_ns
    assert follow(stage, for_another, 2 * LEASE_MS) == ask(Fence.claim, for_another, 1)
    assert stage.now_ns - begun_ns >= LEASE_MS * MS_NS


def test_a_node_that_has_not_read_the_log_claims_nothing() -> None:
    stage = Stage()
    for _ in range(200):
        assert stage.answers(NOBODY) == ask(Fence.look)
    stage.catch_up()
    assert stage.answers(NOBODY) == ask(Fence.claim, NOBODY, 1)


def test_a_lower_epoch_means_that_the_database_has_lost_something(stage: Stage) -> None:
    stage.answers(OTHER)
    stage.answers(OPEN)
    assert stage.answers(OTHER._replace(epoch=3)) is ENDS
    assert stage.events[-1] == "steps down: the database has lost epoch 4, its last is 3"


# --- to lead


def test_no_node_leads_on_an_answer_slower_than_the_lease(stage: Stage) -> None:
    stage.answers(NOBODY)
    stage.answers(True)
    stage.lead_log(1)
    assert stage.answers(stage.own(1)) == ask(Fence.serve, 1)
    stage.later(LEASE_MS)
    assert stage.answers(stage.own(1)) == ask(Fence.serve, 1)
    assert stage.events == ["follows 0"]
    assert stage.answers(stage.own(1)) == ask(Fence.beat, 1)
    assert stage.events == ["follows 0", "leads 1"]


def test_a_node_that_is_fenced_out_steps_down(leader: Stage) -> None:
    assert leader.answers(None) == ask(Fence.look)
    assert leader.answers(OTHER) is ENDS
    assert leader.events == ["steps down: b leads, epoch 4"]
    assert leader.member.role == ENDED and not leader.member.lease.holds(leader.now_ns - 10**9)
    assert leader.log_answers(None) is ENDS and leader._send(leader.watch, None) is ENDS


def test_the_log_goes_on_under_a_newer_epoch_after_each_cut(leader: Stage) -> None:
    leader.member.log_is_cut()
    leader.answers(leader.own(1))  # the heartbeat that was under way
    while leader.asked != ask(Fence.look):
        leader.answers(leader.own(1))
    assert leader.answers(leader.own(1)) == ask(Fence.claim, leader.own(1), 0)
    leader.answers(True)
    assert leader.member.epoch == 2
    assert leader.log_answers(None) == ResumeLog(2)
    leader.log_answers(JournalUnreachable("cut again"))
    while leader.asked != ask(Fence.look):
        leader.answers(leader.own(2))
    assert leader.answers(leader.own(2)).is_a(Fence.claim)
    leader.answers(True)
    assert leader.log_answers(None) == ResumeLog(3)


def test_a_cut_while_the_log_resumes_is_not_forgotten(leader: Stage) -> None:
    leader.member.log_is_cut()
    while leader.asked != ask(Fence.look):
        leader.answers(leader.own(1))
    leader.answers(leader.own(1))
    leader.answers(True)
    assert leader.log_answers(None) == ResumeLog(2)
    leader.member.log_is_cut()  # the link it has just made, before the answer is heard
    leader.log_answers(True)
    while leader.asked != ask(Fence.look):
        leader.answers(leader.own(2))
    assert leader.answers(leader.own(2)).is_a(Fence.claim)


# Bug: A node stepped down because a failover of the database took back a claim of its own.
def test_a_claim_of_its_own_that_was_taken_back_is_no_reason_to_end(leader: Stage) -> None:
    leader.member.log_is_cut()
    while leader.asked != ask(Fence.look):
        leader.answers(leader.own(1))
    leader.answers(leader.own(1))
    leader.answers(FenceUnreachable("no answer"))
    while leader.asked != ask(Fence.look):
        leader.answers(FenceUnreachable("still none"))
    assert leader.answers(leader.own(2)).is_a(Fence.claim)  # it came through, and then the database failed over
    leader.answers(FenceUnreachable("cut"))
    while leader.asked != ask(Fence.look):
        leader.answers(FenceUnreachable("cut"))
    assert leader.answers(leader.own(1)) == ask(Fence.claim, leader.own(1), 0)


def test_what_the_database_has_lost_ends_a_node(leader: Stage) -> None:
    leader.member.log_is_cut()
    while leader.asked != ask(Fence.look):
        leader.answers(leader.own(1))
    leader.answers(leader.own(1))
    leader.answers(True)
    leader.log_answers(None)
    leader.log_answers(JournalForked("row 7 is lost"))
    assert leader.events == ["steps down: row 7 is lost"] and leader.member.role == ENDED


def test_silence_is_told_and_its_end(leader: Stage) -> None:
    leader._send(leader.watch, None)
    leader.later(LEASE_MS)
    leader._send(leader.watch, None)
    assert leader.events == ["falls silent"]
    leader.answers(FenceUnreachable("no answer"))
    leader.answers(leader.own(1))
    assert leader.events[-1] == "speaks again" and leader.member.role == ACTIVE


# Bug: Each node logged four times a second that the database was away and back.
def test_what_fails_is_told_once_though_something_else_succeeds(leader: Stage) -> None:
    """A primary that has no replica yet: looks succeed, heartbeats do not. It was four lines a second."""
    leader.member.log_is_cut()
    begun_ns = leader.now_ns
    while leader.now_ns - begun_ns < 65_000 * MS_NS:
        if leader.asked == ask(Fence.beat, 1):
            leader.later(250)
            leader.answers(FenceUnreachable("commits wait for the replica"))
        elif leader.asked == ask(Fence.look):
            leader.answers(leader.own(1))
        else:
            assert leader.asked.is_a(Fence.claim)
            leader.later(250)
            leader.answers(FenceUnreachable("commits wait for the replica"))
    beats = [line for line in leader.events if "heartbeat" in line]
    claims = [line for line in leader.events if "claim" in line]
    assert len(beats) == len(claims) == 3, "at once, after 10 seconds, after 20 more"
    while leader.asked != ask(Fence.beat, 1):
        leader.answers(leader.own(1) if leader.asked == ask(Fence.look) else FenceUnreachable("no"))
    leader.answers(leader.own(1))
    assert leader.events[-2] == "the database of the cluster takes heartbeats again"
    assert leader.events[-1] == "speaks again"


def test_a_standby_that_cannot_claim_says_so_once(stage: Stage) -> None:
    follow(stage, OTHER, 2 * LEASE_MS)
    for _ in range(20):
        assert stage.asked == ask(Fence.claim, OTHER, LEASE_MS)
        stage.answers(FenceUnreachable("commits wait for the replica"))
        follow(stage, OTHER, 2 * LEASE_MS)
    assert len([line for line in stage.events if "claim" in line]) == 1


# --- two processes of one name


def moving(stage: Stage, view: View, told: Told, leases: int) -> None:
    """The node that leads has its heartbeats for this long. Each telling is answered so."""
    stage.told = told
    for _ in range(MARGIN * leases):
        seen = OTHER if stage.member.view is None else stage.member.view
        follow(stage, view._replace(beat=(view.epoch, seen.beat[1] + 1)), LEASE_MS // MARGIN)


OLDER, YOUNGER = Told(0.0, "b:1", True), Told(0.0, "b:1", False)


def test_the_second_process_of_a_name_ends_at_its_start(stage: Stage) -> None:
    with pytest.raises(JournalLocked, match="another process is node a as well, at b:1: give each its own name"):
        moving(stage, OTHER, OLDER, SETTLED)


def test_the_first_process_of_a_name_says_so_and_goes_on(stage: Stage) -> None:
    moving(stage, OTHER, YOUNGER, 4)
    said = [line for line in stage.events if "two processes are one node" in line]
    assert len(said) == 1 and "b:1" in said[0] and stage.member.role == STANDBY
    moving(stage, OTHER, Told(0.0), 2)
    assert stage.events[-1] == "no other process has the name of this node any more"


def test_who_follows_a_node_of_its_own_name_ends_though_it_began_first(stage: Stage) -> None:
    with pytest.raises(JournalLocked):
        moving(stage, OTHER._replace(node="a"), YOUNGER, SETTLED)


def test_a_node_that_has_its_name_keeps_it_from_one_that_comes_back(stage: Stage) -> None:
    """The other one was away from the database for days, and has begun first."""
    moving(stage, OTHER, Told(0.0), SETTLED + 1)
    moving(stage, OTHER, OLDER, 4)
    assert stage.member.role == STANDBY


def test_what_a_process_sent_before_its_end_is_no_second_process(stage: Stage) -> None:
    """One statement of the process before, which was killed, came late."""
    for _ in range(3):
        moving(stage, OTHER, OLDER, 1)
        moving(stage, OTHER, Told(0.0), 2)
    assert stage.member.role == STANDBY and not any("two processes" in line for line in stage.events)


def test_a_node_that_leads_does_not_end_for_its_name(leader: Stage) -> None:
    leader.told = OLDER
    for _ in range(5 * SETTLED):
        leader.answers(leader.own(1))
    assert leader.member.role == ACTIVE
    assert len([line for line in leader.events if "two processes are one node" in line]) == 1


# --- to hand over


def facts(node: str, place: int, role: str = STANDBY, age_s: float = 0.5) -> MemberFacts:
    return MemberFacts(node, f"{node}:1", role, 1, place, age_s)


def test_a_request_for_any_is_for_the_standby_that_has_read_most(leader: Stage) -> None:
    assert leader.answers(leader.own(1, transfer_to="*")) == ask(Fence.members)
    there = [facts("a", 99, ACTIVE), facts("b", 7), facts("c", 9), facts("d", 90, age_s=60), facts("e", 80, ENDED)]
    leader.answers(there)
    assert leader.events == ["hands over"]
    leader.member.finish()
    while leader.asked.is_a(Fence.beat):
        leader.answers(leader.own(1))
    assert leader.asked == ask(Fence.release, 1, "c")
    assert not leader.member.lease.holds(leader.now_ns)
    leader.answers(True)
    assert leader.events == ["hands over", "steps down: handed over"]


@pytest.mark.parametrize("node", ["gone", "*"])
def test_a_request_for_a_node_that_is_not_there_is_taken_back(leader: Stage, node: str) -> None:
    assert leader.answers(leader.own(1, transfer_to=node)) == ask(Fence.members)
    assert leader.answers([facts("a", 9, ACTIVE), facts("gone", 9, age_s=60)]) == ask(Fence.withdraw_transfer, node)
    assert leader.answers(None) == ask(Fence.beat, 1)
    assert leader.member.role == ACTIVE


def test_a_request_for_the_node_that_leads_is_fulfilled(leader: Stage) -> None:
    assert leader.answers(leader.own(1, transfer_to="a")) == ask(Fence.withdraw_transfer, "a")


def test_a_request_for_another_node_is_fulfilled_by_a_takeover(stage: Stage) -> None:
    """The node before has died of it. To hand over once more would make it a circle."""
    stage.answers(NOBODY)
    stage.answers(True)
    stage.lead_log(1)
    stage.answers(stage.own(1, transfer_to="*"))
    assert stage.answers(stage.own(1, transfer_to="*")) == ask(Fence.beat, 1)
    assert stage.answers(stage.own(1, transfer_to="*")) == ask(Fence.withdraw_transfer, "*")


def test_a_goodbye_is_tried_for_a_lease(leader: Stage) -> None:
    leader.member.leave()
    leader.answers(leader.own(1))
    assert leader.events == ["hands over"]
    leader.member.finish()
    while leader.asked.is_a(Fence.beat):
        leader.answers(leader.own(1))
    begun_ns = leader.now_ns
    while leader.asked == ask(Fence.release, 1, ""):
        leader.answers(FenceUnreachable("no answer"))
    assert leader.asked is ENDS and leader.member.role == ENDED
    assert LEASE_MS * MS_NS <= leader.now_ns - begun_ns < 2 * LEASE_MS * MS_NS


# Bug: On a busy machine a standby had read the log after it had looked, and never told its service manager that it was
# ready. On an idle cluster the manager then ended the node.
def test_the_owner_hears_of_a_standby_that_has_read_the_log_after_its_look() -> None:
    stage = Stage()
    stage.answers(OTHER)
    assert stage.events == ["follows 4"] and stage.member.role != STANDBY
    stage.catch_up()
    assert stage.events == ["follows 4"] * 2 and stage.member.role == STANDBY
