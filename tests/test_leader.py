"""A turn under a lease, over a networked log whose commits end when the test says so: which replies leave, and when."""

from __future__ import annotations

from collections.abc import Callable

from geventstalk.core.engine import NEVER
from geventstalk.core.operate import Operate
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.turn.leader import LeasedTurn
from geventstalk.turn.replies import Operation
from geventstalk.turn.tasks import Task, Wait
from geventstalk.wire.session import Service, Session
from journal.errors import JournalFailed
from journal.log import SyncPoint
from tests.support.clock import SECOND, ManualClock
from tests.test_turn import PUT, WALL_NS, FakeJournal, Wire

LEASE_NS = SECOND
PUT_WAIT_NS = 10 * SECOND


class Way(SyncPoint):
    """A commit on its way."""

    def __init__(self) -> None:
        self.over: Callable[[], None] | None = None

    def begin(self, over: Callable[[], None]) -> bool:
        self.over = over
        return True

    def run(self) -> None:
        raise AssertionError("no thread waits for a networked log, nor does the hub")

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        assert self.over is not None
        self.over()


class NetworkedJournal(FakeJournal):
    def __init__(self) -> None:
        super().__init__()
        self.held_until_ns = 0
        self.safe_after_commit = False
        self.ways: list[Way] = []

    def hold(self, until_ns: int) -> None:
        self.held_until_ns = until_ns

    def sync_point(self) -> SyncPoint | None:
        if not self.unsynced:
            return None
        self.unsynced = False
        self.ways.append(Way())
        return self.ways[-1]


class Node:
    """A node that leads, with its clients and tasks."""

    def __init__(self, put_wait_ns: int = PUT_WAIT_NS) -> None:
        self.clock = ManualClock()
        self.lease_until_ns = self.clock.ns + LEASE_NS
        self.engine = Operate(self.clock.ns)
        self.service = Service(self.engine, 65535, dict)
        self.failures: list[BaseException] = []
        self.told: list[str] = []
        self.turn = LeasedTurn(
            self.engine,
            lambda: self.clock.ns,
            lambda: WALL_NS + self.clock.ns,
            lambda: None,
            self.failures.append,
            self.service,
            lambda now_ns: now_ns < self.lease_until_ns,
            put_wait_ns,
        )
        self.turn.waits = self.told.append
        self.journal = NetworkedJournal()
        store = Store(self.journal, 50, ClockOffset(WALL_NS + self.clock.ns, self.clock.ns))
        self.turn.write_to(store)
        self.waits: dict[Task, Wait | None] = dict.fromkeys(self.turn.tasks())
        self.run()

    def renew(self) -> None:
        self.lease_until_ns = self.clock.ns + LEASE_NS
        self.turn.renewed.set()
        self.run()

    def run(self) -> None:
        """Resumes every task whose wait is over, until none is."""
        ran = True
        while ran and not self.failures:
            ran = False
            for task, wait in self.waits.items():
                if wait is None or (wait.flag is not None and wait.flag.is_set) or NEVER < wait.at_ns <= self.clock.ns:
                    try:
                        self.waits[task] = next(task, Wait())
                    except Exception as error:
                        self.turn.fail(error)
                        return
                    ran = True
            self.turn.end()

    def wait(self, seconds: float, *, renews: bool = False) -> None:
        """Time passes, in steps of a tenth of a second."""
        for _ in range(round(seconds * 10)):
            self.clock.pass_s(0.1)
            if renews:
                self.renew()
            self.run()

    def client(self) -> Wire:
        wire = Wire(Session(self.service))
        self.turn.join(wire)
        return wire

    def say(self, *words: tuple[Wire, bytes]) -> None:
        for wire, data in words:
            self.turn.step(wire, data)
        self.turn.end()
        self.run()

    def go_on(self, *wires: Wire) -> None:
        """Does what a connection does that was told to go on."""
        self.say(*[(wire, b"") for wire in wires if wire.session.unfinished])

    def arrive(self, error: BaseException | None = None) -> None:
        """The oldest commit that is on its way is there."""
        self.journal.ways.pop(0).end(error)
        self.run()


def test_a_reply_waits_for_the_commit_and_for_no_other_client() -> None:
    node = Node()
    one, two = node.client(), node.client()
    node.say((one, PUT))
    assert not one.sent and len(node.journal.ways) == 1
    node.say((two, b"list-tube-used\r\n"))
    assert two.take() == b"USING default\r\n"
    node.say((two, PUT), (one, b"list-tube-used\r\n"))
    assert len(node.journal.ways) == 1, "what comes meanwhile waits for the next one"
    node.arrive()
    assert one.take() == b"INSERTED 1\r\n" and not two.sent
    node.arrive()
    assert (one.take(), two.take()) == (b"USING default\r\n", b"INSERTED 2\r\n")
    assert not node.turn.gate.pieces and not node.journal.ways


def test_a_job_is_shown_to_no_client_before_its_put_is_committed() -> None:
    """A takeover would forget it, and give its number to another job: a client that knows it would delete that job."""
    node = Node()
    one, two, three = node.client(), node.client(), node.client()
    node.say((three, b"reserve\r\n"))
    node.say((one, PUT), (two, b"peek 1\r\n"))
    node.say((two, b"list-tube-used\r\n"))
    assert not (one.sent or two.sent or three.sent)
    node.arrive()
    assert one.take() == b"INSERTED 1\r\n" and three.take().startswith(b"RESERVED 1 ")
    assert two.take().startswith(b"FOUND 1 ")
    node.say((one, PUT), (two, b"reserve-batch 9\r\n"))
    assert not two.sent
    node.arrive()
    assert two.take().startswith(b"RESERVED_BATCH 1\r\nRESERVED 2 ")
    node.say((two, b"peek 1\r\n"))
    assert two.take().startswith(b"FOUND 1 "), "nothing is on its way"


def test_the_only_client_waits_without_holding_the_event_loop() -> None:
    """Where all clients wait, a sync of files runs on the hub. That of a peer never does, however quick it was."""
    node = Node()
    one = node.client()
    for id in range(1, 20):
        node.say((one, PUT))
        node.arrive()
        assert one.take() == b"INSERTED %d\r\n" % id


def test_a_commit_that_fails_is_the_end() -> None:
    node = Node()
    one = node.client()
    node.say((one, PUT))
    error = JournalFailed("fenced out")
    node.arrive(error)
    assert node.failures == [error] and not one.sent


def test_without_the_lease_nothing_leaves() -> None:
    node = Node()
    one, two, three = node.client(), node.client(), node.client()
    node.say((one, PUT))
    node.arrive()
    one.take()
    node.say((three, b"watch empty\r\nignore default\r\nreserve-with-timeout 1\r\n"))
    three.take()
    node.clock.pass_s(1.0)
    node.say((one, b"list-tube-used\r\n"), (two, b"reserve\r\n"))
    node.wait(3.0)
    assert not one.sent and not two.sent and not three.sent
    assert node.engine.ready_count == 1, "the reserve was not executed, either"
    node.renew()
    node.go_on(one, two)
    node.run()
    assert one.take() == b"USING default\r\n" and two.take() == b"RESERVED 1 1\r\nx\r\n"
    assert three.take() == b"TIMED_OUT\r\n"


def test_what_stood_at_the_gate_when_the_lease_ended_leaves_in_order() -> None:
    node = Node()
    one = node.client()
    node.say((one, PUT))
    node.say((one, b"list-tube-used\r\n"))
    node.clock.pass_s(1.0)
    node.arrive()
    assert not one.sent, "the commit is there, the lease is not"
    node.say((one, b"list-tubes-watched\r\n"))
    node.wait(1.0)
    assert not one.sent
    node.renew()
    node.go_on(one)
    assert one.take() == b"INSERTED 1\r\nUSING default\r\nOK 14\r\n---\n- default\n\r\n"


def test_a_lease_that_ends_within_a_turn_is_seen_at_its_end() -> None:
    node = Node()
    one = node.client()
    node.turn.step(one, b"list-tube-used\r\n")
    node.clock.pass_s(1.0)
    node.turn.end()
    assert not one.sent
    node.renew()
    assert one.take() == b"USING default\r\n"


class Look(Operation):
    def __init__(self) -> None:
        self.outcome = ""
        self.ran = False

    def run(self, now_ns: int) -> bool:
        self.ran = True
        return True

    def done(self) -> None:
        self.outcome = "done"

    def failed(self) -> None:
        self.outcome = "failed"


def test_operations_wait_for_the_lease_too() -> None:
    node = Node()
    begun, later = Look(), Look()
    node.turn.accept(begun)
    node.clock.pass_s(1.0)
    node.turn.end()
    node.turn.accept(later)
    node.run()
    assert begun.ran and not begun.outcome and not later.ran
    node.renew()
    assert begun.outcome == later.outcome == "done"


def test_operations_are_given_up_where_the_node_does_not_lead_any_more() -> None:
    node = Node()
    look = Look()
    node.clock.pass_s(1.0)
    node.turn.accept(look)
    one = node.client()
    node.say((one, PUT))
    node.turn.step_down()
    node.renew()
    node.turn.finish()
    assert look.outcome == "failed" and not one.sent and not node.failures


def test_puts_are_refused_when_the_lease_stays_away() -> None:
    node = Node()
    one, two = node.client(), node.client()
    node.say((two, PUT))
    node.clock.pass_s(1.0)
    node.say((one, PUT))
    node.wait(PUT_WAIT_NS / SECOND - 0.5)
    node.go_on(one)
    assert not one.sent and node.told == ["the lease"]
    node.wait(1.0)
    node.go_on(one)
    assert one.take() == b"OUT_OF_MEMORY\r\n", "which promises nothing"
    node.say((one, PUT + b"list-tube-used\r\n"), (two, PUT))
    assert one.take() == b"OUT_OF_MEMORY\r\n", "what is no put waits on"
    assert not two.sent, "a client has its replies in order"
    node.arrive()
    node.renew()
    node.wait(0.2, renews=True)
    node.go_on(one, two)
    assert one.take() == b"USING default\r\n" and two.take() == b"INSERTED 1\r\nOUT_OF_MEMORY\r\n"
    assert node.told == ["the lease", ""]
    node.say((one, PUT))
    node.arrive()
    assert one.take() == b"INSERTED 2\r\n"


def test_puts_are_refused_when_a_commit_does_not_arrive() -> None:
    node = Node()
    one, two, three = node.client(), node.client(), node.client()
    node.say((one, PUT))
    node.wait(5.0, renews=True)
    node.say((two, PUT))
    assert node.told == ["a commit"] and not two.sent
    node.wait(6.0, renews=True)
    node.say((three, PUT + b"list-tube-used\r\n"))
    assert three.take() == b"OUT_OF_MEMORY\r\nUSING default\r\n"
    node.arrive()
    node.wait(0.1, renews=True)
    node.arrive()
    node.wait(0.2, renews=True)
    assert (one.take(), two.take(), node.told) == (b"INSERTED 1\r\n", b"INSERTED 2\r\n", ["a commit", ""])
    node.say((three, PUT))
    node.arrive()
    assert three.take() == b"INSERTED 3\r\n"


def test_a_commit_waits_for_clients_that_the_last_one_let_go_on() -> None:
    node = Node()
    one, two = node.client(), node.client()
    node.say((one, PUT))
    node.say((two, PUT))
    node.clock.pass_s(0.002)
    node.arrive()
    assert one.take() and not two.sent
    assert not node.journal.ways, "the second commit waits for the first client"
    assert node.journal.held_until_ns == node.clock.ns + 2_000_000, "as long as the last commit took"
    node.say((one, PUT))
    node.arrive()
    assert one.take() and two.take()
    node.say((one, PUT))
    node.clock.pass_s(0.002)
    node.run()
    node.arrive()
    assert one.take(), "it has waited long enough"
    assert not node.journal.held_until_ns, "and after that no more are expected"


# Bug: With --put-wait 0 all puts were refused.
def test_without_any_patience_puts_are_refused_only_while_something_waits() -> None:
    """As long as nothing had waited for 0 s, all puts were refused for ever."""
    node = Node(put_wait_ns=0)
    one, two = node.client(), node.client()
    node.wait(1.0, renews=True)
    node.say((one, PUT))
    node.wait(0.2, renews=True)
    node.say((two, PUT))
    assert two.take() == b"OUT_OF_MEMORY\r\n"
    node.arrive()
    assert one.take() == b"INSERTED 1\r\n"
    node.wait(0.2, renews=True)
    node.say((two, PUT))
    node.arrive()
    assert two.take() == b"INSERTED 2\r\n"


def test_a_put_whose_journal_is_behind_is_refused_too() -> None:
    node = Node()
    one, two = node.client(), node.client()
    node.journal.behind, node.journal.catches_up = True, False
    node.say((one, PUT))
    node.say((two, PUT + b"list-tube-used\r\n"))
    node.wait(5.0, renews=True)
    assert not two.sent and two.session.held_up
    node.wait(6.0, renews=True)
    node.go_on(two)
    assert two.take() == b"OUT_OF_MEMORY\r\nUSING default\r\n"


def test_a_put_whose_body_has_half_come_is_refused_with_all_of_it() -> None:
    node = Node()
    one = node.client()
    node.say((one, b"put 0 0 60 5\r\nhe"))
    node.clock.pass_s(1.0)
    node.say((one, b"l"))
    node.wait(11.0)
    node.say((one, b"lo\r\nput 0 0 60 1\r\nx\r\n"))
    node.go_on(one)
    assert one.take() == b"OUT_OF_MEMORY\r\nOUT_OF_MEMORY\r\n"


def test_the_tasks_of_a_node_that_only_waits_do_not_spin() -> None:
    node = Node()
    one = node.client()
    node.say((one, PUT))
    node.clock.pass_s(1.0)
    node.run()
    assert all(wait is not None and (wait.flag is None or not wait.flag.is_set) for wait in node.waits.values())
    assert node.engine.next_deadline_ns() == NEVER
