"""The turn on a manual clock, over a store that fails as it is told: which replies leave, and when.

How steps, commits, syncs and deaths mix is the simulation's part; here stands what a case looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from geventstalk._build import BUILD
from geventstalk.core.bodies import Bodies
from geventstalk.core.engine import NEVER
from geventstalk.core.job import READY, Job
from geventstalk.core.jobtable import JobTable
from geventstalk.core.operate import Operate
from geventstalk.durable.records import ClockOffset, encode_whole
from geventstalk.durable.store import Store
from geventstalk.turn.maintenance import CATCH_UP_SLICES, REPACK_PAGES
from geventstalk.turn.replies import Channel, Operation
from geventstalk.turn.tasks import NEXT_TURN, Sync, Task, Wait
from geventstalk.turn.turn import Turn
from geventstalk.wire.session import MOVE_SLICE, Service, Session
from journal.log import FULL, Log, Row, SyncPoint
from tests.support.clock import SECOND, ManualClock
from tests.support.minimal_log import MinimalLog

PUT = b"put 0 0 60 1\r\nx\r\n"
WALL_NS = 1_700_000_000 * SECOND


class Wire(Channel):
    """A client's end that keeps what it was sent."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.sent = b""
        self.turns = 0

    def send(self, data: bytes) -> None:
        self.sent += data

    def goes_on(self) -> None:
        self.turns += 1

    def take(self) -> bytes:
        sent, self.sent = self.sent, b""
        return sent


class FakeSync(SyncPoint):
    def __init__(self, fails: BaseException | None, meanwhile: Callable[[], None]) -> None:
        self.fails = fails
        self.meanwhile = meanwhile

    def run(self) -> None:
        self.meanwhile()
        if self.fails is not None:
            raise self.fails


class FakeJournal(Log):
    """Everything a store asks of a log. What `..._fails` has is raised by the next append, commit or sync."""

    current = 1
    dirty = False
    settling = False
    behind = False
    catches_up = True

    def __init__(self) -> None:
        self.safe_after_commit = True
        self.appended = self.high_water = 0
        self.commit_fails: BaseException | None = None
        self.sync_fails: BaseException | None = None
        self.during_sync: Callable[[], None] = lambda: None
        self.append_fails: BaseException | None = None
        self.written: list[bytes] = []
        self.unsynced = False
        self.closed = False
        self.commits = 0
        self.slices = 0  # of catching up
        self.falls_behind_in = ""

    def admits(self, size: int) -> bool:
        return True

    def append(self, key: int, kind: int, payload: bytes) -> None:
        if self.append_fails is not None:
            raise self.append_fails
        self.written.append(payload)
        self.appended += 1
        self.dirty = True

    def commit(self) -> None:
        if self.commit_fails is not None:
            raise self.commit_fails
        self.dirty = False
        self.unsynced = True
        self.commits += 1

    def catch_up(self, payload_of: Callable[[int], bytes | None]) -> bool:
        self.slices += 1
        return self.catches_up

    def sync_point(self) -> SyncPoint | None:
        covered, self.unsynced = self.unsynced, False
        return FakeSync(self.sync_fails, self.during_sync) if covered else None

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        return iter(())

    def start(self) -> None:
        return

    def tend(self) -> None:
        self.behind |= self.falls_behind_in == "tend"

    def wants_compaction(self) -> bool:
        return self.falls_behind_in == "compact_slice" and not self.behind

    def compact_slice(self, payload_of: object) -> None:
        self.behind = True

    def close(self) -> None:
        self.closed = True


class Rig:
    """A turn with its clients."""

    def __init__(self, fsync_ms: int | None = None, *, durable: bool = True) -> None:
        self.clock = ManualClock()
        self.wall_step_ns = 0
        self.engine = Operate(self.clock.ns)
        self.service = Service(self.engine, 65535, dict)
        self.failures: list[BaseException] = []
        self.begun = 0
        self.turn = Turn(self.engine, lambda: self.clock.ns, self.wall_ns, self._begins, self.failures.append)
        self.journal = FakeJournal()
        if durable:
            self.turn.open(Store(self.journal, fsync_ms, ClockOffset(self.wall_ns(), self.clock.ns)))

    def wall_ns(self) -> int:
        return WALL_NS + self.clock.ns + self.wall_step_ns

    def _begins(self) -> None:
        self.begun += 1

    def client(self) -> Wire:
        wire = Wire(Session(self.service))
        self.turn.join(wire)
        return wire

    def say(self, *words: tuple[Wire, bytes | None]) -> None:
        """One turn in which these clients say something."""
        for wire, data in words:
            self.turn.step(wire, data)
        self.turn.end()


def go_on(task: Task) -> Wait:
    """Resumes a task until it waits for something that is not there yet."""
    wait = next(task)
    while wait.flag is not None and wait.flag.is_set:
        wait = next(task)
    return wait


def test_ages_that_contradict_ids_are_sorted_out_before_clients_come() -> None:
    rig = Rig(durable=False)
    epoch = ClockOffset(rig.wall_ns(), rig.clock.ns)
    records = []
    for id, age_s in enumerate((1, 9, 5), start=1):
        job = Job(id, 0, 0, 0, 1)
        job.state, job.body, job.created_ns = READY, b"x\r\n", rig.clock.ns - age_s * SECOND
        records.append((id, FULL, encode_whole(job, b"default", epoch)))
    rig.turn.open(Store(MinimalLog(records), None, epoch))
    assert rig.engine.ready_count == 3
    assert not rig.engine.unsorted and rig.engine.strays == [1]


@pytest.mark.parametrize("bodies_max", [None, 1000])
def test_a_log_that_offers_nothing_more_than_it_must_serves_clients(bodies_max: int | None) -> None:
    """Jobs are put whole and in parts, and a start brings back those that are left."""
    rig = Rig(durable=False)
    log = MinimalLog()
    store = Store(log, 50, ClockOffset(rig.wall_ns(), rig.clock.ns))
    store.large_bytes, store.part_bytes = 8, 4
    rig.engine.bodies = None if bodies_max is None else Bodies(bodies_max)
    rig.turn.open(store)
    tasks = rig.turn.tasks()
    one, two = rig.client(), rig.client()
    large = b"put 5 0 60 10\r\n0123456789\r\n"
    rig.say((one, PUT), (two, b"reserve\r\n"))
    for at in range(10):
        rig.say((one, b"" if at else large))
        for task in tasks:
            go_on(task)
    assert (one.take(), two.take()) == (b"INSERTED 1\r\nINSERTED 2\r\n", b"RESERVED 1 1\r\nx\r\n")
    rig.say((one, PUT), (two, b"bury 1 7\r\nreserve\r\ndelete 3\r\n"))
    assert (one.take(), two.take()) == (b"INSERTED 3\r\n", b"BURIED\r\nRESERVED 3 1\r\nx\r\nDELETED\r\n")
    again = Rig(durable=False)
    store = Store(MinimalLog(log.records), None, ClockOffset(again.wall_ns(), again.clock.ns))
    again.turn.open(store)
    assert (len(again.engine.jobs), again.engine.next_id) == (2, 4)
    three = again.client()
    again.say((three, b"peek-ready\r\npeek-buried\r\n"))
    assert three.take() == b"FOUND 2 10\r\n0123456789\r\nFOUND 1 1\r\nx\r\n"


def test_a_reply_leaves_at_the_end_of_the_turn() -> None:
    rig = Rig()
    one, two = rig.client(), rig.client()
    rig.turn.step(one, PUT)
    rig.turn.step(two, b"reserve\r\n")
    assert (one.sent, two.sent, rig.begun) == (b"", b"", 1)
    assert rig.journal.commits == 0
    rig.turn.end()
    assert rig.journal.commits == 1
    assert one.take() == b"INSERTED 1\r\n"
    assert two.take() == b"RESERVED 1 1\r\nx\r\n"
    assert (one.turns, two.turns) == (1, 1)


FAULTS = [MemoryError(), OverflowError("int too large"), ValueError("?"), OSError(5, "I/O error")]


PLACES = [(where, error) for where in ("append", "commit", "sync") for error in FAULTS]
PLACES.remove(("append", FAULTS[0]))  # a put that finds no memory is refused, see below


@pytest.mark.parametrize(("where", "error"), PLACES, ids=lambda value: getattr(type(value), "__name__", value))
def test_whatever_fails_in_the_journal_is_the_end(where: str, error: BaseException) -> None:
    """Only JournalError was: after anything else the batch was dropped and the next turn sent its replies."""
    rig = Rig(fsync_ms=0)
    one, two = rig.client(), rig.client()
    setattr(rig.journal, f"{where}_fails", error)
    rig.say((one, PUT), (two, PUT))
    assert rig.failures == [error]
    setattr(rig.journal, f"{where}_fails", None)
    rig.say((one, b"list-tube-used\r\n"), (two, b"list-tube-used\r\n"))
    rig.turn.finish()
    assert rig.failures == [error], "it is said once"
    assert not one.sent and not two.sent, "no reply leaves any more"
    assert not rig.journal.closed


def test_a_put_that_the_journal_has_no_memory_for_is_refused() -> None:
    """append() has kept nothing then, and the engine has not filed the job yet."""
    rig = Rig()
    one = rig.client()
    rig.journal.append_fails = MemoryError()
    rig.say((one, PUT))
    assert one.take() == b"OUT_OF_MEMORY\r\n"
    rig.journal.append_fails = None
    rig.say((one, PUT))
    assert one.take() == b"INSERTED 2\r\n"
    assert not rig.failures


def test_a_sync_that_fails_in_a_thread_is_the_end() -> None:
    rig = Rig(fsync_ms=0)
    one, _ = rig.client(), rig.client()
    syncs = rig.turn.tasks()[-1]
    wait = next(syncs)
    rig.say((one, PUT))
    assert wait.flag is not None and wait.flag.is_set
    rig.journal.sync_fails = MemoryError()
    sync = go_on(syncs).sync
    assert sync is not None
    sync.run()
    with pytest.raises(MemoryError):
        next(syncs)
    rig.turn.fail(MemoryError())  # as the driver of a task does
    rig.turn.finish()
    assert one.sent == b""


def test_a_failure_while_a_sync_is_under_way_ends_what_waits_for_it() -> None:
    """Nothing leaves the gate any more. A task that waited until it is empty would keep the event loop to itself."""
    rig = Rig(fsync_ms=0)
    one, other = rig.client(), rig.client()
    rig.client()
    syncs = rig.turn.tasks()[-1]
    next(syncs)
    rig.say((one, PUT))
    sync = go_on(syncs).sync
    assert sync is not None
    rig.journal.commit_fails = MemoryError()
    rig.say((other, PUT))
    assert rig.failures and rig.turn.gate.pieces
    sync.run()
    assert next(syncs, None) is None
    assert one.sent == b""


class HalfMade(Session):
    """Something fails in the middle of a change."""

    def receive(self, data: bytes, now_ns: int) -> None:
        self.reply(b"INSERTED 1\r\n")
        raise RuntimeError("in the middle")


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "journal"])
def test_a_failure_with_half_of_a_change_made(durable: bool) -> None:
    """Without a journal it is undone and its client goes; with one, the next start brings back what was promised."""
    rig = Rig(durable=durable)
    told: list[BaseException | None] = []
    rig.turn.tell = lambda text, error: told.append(error)
    one, other = Wire(HalfMade(rig.service)), rig.client()
    rig.turn.join(one)
    rig.say((other, PUT))
    other.take()
    rig.say((one, b"delete 1\r\n"))
    assert [str(error) for error in rig.failures or told] == ["in the middle"]
    assert bool(rig.failures) == durable
    assert one.take().endswith(b"" if durable else b"INTERNAL_ERROR\r\n") and one.session.closed != durable
    rig.say((other, b"peek 1\r\n"))
    assert other.take() == (b"" if durable else b"FOUND 1 1\r\nx\r\n")


# -f0


def let_sync(rig: Rig) -> None:
    """Does what a thread does under `-f0`, if there is something to sync."""
    store, pieces = rig.turn.store, rig.turn.gate.pieces
    assert store is not None
    if store.syncs_before_replies:
        rig.turn.syncs.run(store)
    rig.turn.release(pieces)
    rig.turn.awaited.clear()


def test_a_client_that_sends_on_is_one_client_at_the_gate() -> None:
    """It has several replies there. Taken for several clients, they had the hub wait for a slow device, with others
    there who could be served."""
    rig = Rig(fsync_ms=0)
    one, _, _ = rig.client(), rig.client(), rig.client()
    syncs = rig.turn.tasks()[-1]
    next(syncs)
    rig.say((one, PUT))
    sync = go_on(syncs).sync
    for _ in range(5):
        rig.say((one, PUT))
    assert rig.turn.gate.pieces == 6 and rig.turn.gate.clients == 1
    assert not rig.turn.all_clients_wait()
    assert sync is not None
    sync.run()
    wait = go_on(syncs)
    assert one.take() == b"INSERTED 1\r\n"
    assert wait.sync is not None, "the second sync is in a thread, too"
    wait.sync.run()
    go_on(syncs)
    assert one.take() == b"".join(b"INSERTED %d\r\n" % id for id in range(2, 7))


def test_a_client_with_a_reply_at_the_gate_and_a_reserve_is_one_client() -> None:
    rig = Rig(fsync_ms=0)
    one, _ = rig.client(), rig.client()
    rig.say((one, b"use other\r\n" + PUT + b"reserve\r\n"))
    assert (rig.turn.gate.clients, rig.engine.waiting_count) == (1, 1)
    assert not rig.turn.all_clients_wait()
    assert one.sent == b""


def test_when_all_clients_wait_the_sync_needs_no_thread() -> None:
    rig = Rig(fsync_ms=0)
    one, two = rig.client(), rig.client()
    rig.say((two, b"watch other\r\nignore default\r\n"))
    two.take()
    rig.say((one, PUT), (two, b"reserve\r\n"))
    assert one.take() == b"INSERTED 1\r\n"


@pytest.mark.parametrize("quick", [False, True])
def test_a_sync_is_in_a_thread_while_a_client_does_not_wait_for_it(quick: bool) -> None:
    """The last syncs were quick, so it ran where all clients are served; it took 300 ms, and they waited for it."""
    rig = Rig(fsync_ms=0)
    one, two = rig.client(), rig.client()
    assert rig.turn.store is not None
    for _ in range(100 if quick else 0):
        rig.turn.store.sync_took(1)
    rig.say((one, PUT))
    assert not one.take() and rig.turn.awaited.is_set
    rig.say((two, b"stats-job 1\r\n"))
    assert two.take().startswith(b"OK "), "it is served meanwhile"


@pytest.mark.parametrize("timeout_s", [0, 1, 2])
def test_a_sync_is_in_a_thread_while_a_client_waits_for_what_time_brings(timeout_s: int) -> None:
    """A worker whose wait may end before a slow sync does is not one who waits for the sync."""
    rig = Rig(fsync_ms=0)
    one, two = rig.client(), rig.client()
    rig.say((two, b"watch other\r\nignore default\r\n"))
    two.take()
    rig.clock.ns += 10_000_000
    rig.say((two, b"reserve-with-timeout %d\r\n" % timeout_s))
    rig.say((one, PUT))
    assert (one.take() == b"INSERTED 1\r\n") == (timeout_s == 2)
    assert rig.turn.awaited.is_set == (timeout_s < 2)


def test_clients_that_come_while_others_are_read_share_their_sync() -> None:
    rig = Rig(fsync_ms=0)
    clients = [rig.client() for _ in range(20)]
    for client in clients[:8]:
        rig.turn.step(client, PUT)
    assert rig.turn.gathers()
    for client in clients[8:10]:
        rig.turn.step(client, PUT)
    assert rig.turn.gathers(), "a look that finds an eighth pays"
    rig.turn.step(clients[10], PUT)
    assert not rig.turn.gathers(), "one that finds less does not"
    rig.turn.end()
    assert rig.turn.gate.clients == 11, "for one sync"


def test_a_turn_looks_for_more_clients_only_while_some_come() -> None:
    rig = Rig(fsync_ms=0)
    one, two, _ = rig.client(), rig.client(), rig.client()
    rig.turn.step(one, PUT)
    assert not rig.turn.gathers(), "it is alone"
    rig.turn.end()
    rig.say((one, PUT), (two, PUT))
    rig.turn.step(one, PUT)
    rig.turn.step(two, PUT)
    assert rig.turn.gathers()
    assert not rig.turn.gathers(), "no other client has come"
    rig.turn.end()
    rig = Rig(fsync_ms=0)
    for client in [rig.client(), rig.client()]:
        rig.turn.step(client, PUT)
    assert not rig.turn.gathers(), "all clients have come"
    for fsync_ms in (None, 50):
        rig = Rig(fsync_ms)
        for client in [rig.client(), rig.client(), rig.client()][:2]:
            rig.turn.step(client, PUT)
        assert not rig.turn.gathers(), "no reply waits for a sync"


SYNC_NS = 1_000_000


def two_were_answered(rig: Rig, took_ns: int = SYNC_NS) -> tuple[Task, Wire, Wire]:
    """Two clients had their changes synced in a thread, while a third was there."""

    def takes_time() -> None:
        rig.clock.ns += took_ns

    rig.journal.during_sync = takes_time
    one, two, _ = rig.client(), rig.client(), rig.client()
    syncs = rig.turn.tasks()[-1]
    next(syncs)
    rig.say((one, PUT), (two, PUT))
    sync = go_on(syncs).sync
    assert sync is not None
    sync.run()
    go_on(syncs)
    assert one.take() and two.take()
    return syncs, one, two


def test_a_sync_waits_for_clients_that_the_last_one_let_go_on() -> None:
    """Without that, two halves of the clients would take turns, and each would wait for the sync of the other."""
    rig = Rig(fsync_ms=0)
    syncs, one, two = two_were_answered(rig)
    rig.say((one, PUT))
    wait = next(syncs)
    assert wait.sync is None and wait.awake
    rig.say((two, PUT))
    assert wait.flag is rig.turn.returns.came and rig.turn.returns.came.is_set
    sync = go_on(syncs).sync
    assert sync is not None
    sync.run()
    go_on(syncs)
    assert one.take() and two.take(), "both had the same sync"
    assert not rig.turn.gate.pieces


def test_a_sync_waits_for_no_longer_than_the_last_one_took() -> None:
    rig = Rig(fsync_ms=0)
    syncs, one, _ = two_were_answered(rig)
    rig.say((one, PUT))
    wait = next(syncs)
    assert wait.at_ns == rig.clock.ns + SYNC_NS
    rig.clock.ns = wait.at_ns
    wait = next(syncs)
    assert wait.sync is not None
    wait.sync.run()
    go_on(syncs)
    assert one.take()


def test_after_a_very_slow_sync_the_next_one_waits_for_clients_for_milliseconds_only() -> None:
    rig = Rig(fsync_ms=0)
    syncs, one, _ = two_were_answered(rig, SECOND)
    rig.say((one, PUT))
    wait = next(syncs)
    assert wait.at_ns == rig.clock.ns + 5_000_000
    assert not wait.awake, "that is long enough to sleep"


def test_where_clients_do_not_come_back_at_once_no_sync_waits_for_them() -> None:
    """A worker sends its next change when it has done its job. Others must not pay for that each time."""
    rig = Rig(fsync_ms=0)
    syncs, one, two = two_were_answered(rig)
    waited = 0

    def next_sync() -> Sync:
        nonlocal waited
        wait = next(syncs)
        while wait.sync is None:
            if wait.awake:
                waited += 1
                rig.clock.ns = wait.at_ns
            wait = next(syncs)
        return wait.sync

    for _ in range(34):
        rig.say((one, PUT))
        sync = next_sync()
        rig.say((two, PUT))  # too late for this sync
        sync.run()
        next_sync().run()
        go_on(syncs)
        assert one.take() and two.take()
    assert waited in (2, 3), "after the first such wait 16 syncs wait for none, and then 32"


# Bug: The first sync after a pause counted as one that had waited in vain, and the next 16 waited for no client.
def test_a_pause_does_not_count_as_a_wait_that_did_not_pay() -> None:
    rig = Rig(fsync_ms=0)
    syncs, one, two = two_were_answered(rig)
    rig.clock.ns += SECOND
    rig.say((one, PUT), (two, PUT))
    wait = next(syncs)
    assert wait.sync is not None
    wait.sync.run()
    go_on(syncs)
    rig.clock.ns += SECOND
    rig.say((one, PUT))
    wait = next(syncs)
    assert wait.sync is not None, "the time for the other client is over"
    rig.say((two, PUT))
    wait.sync.run()
    assert go_on(syncs).awake, "and yet the next sync waits for the first client"


def test_a_wait_that_pays_ends_the_long_rests() -> None:
    rig = Rig(fsync_ms=0)
    syncs, one, two = two_were_answered(rig)
    rig.turn.returns._alone_next = 256  # as after some waits that did not pay
    rig.say((one, PUT))
    assert next(syncs).awake
    rig.say((two, PUT))
    assert go_on(syncs).sync is not None
    assert rig.turn.returns._alone_next == 16


def test_what_comes_behind_a_change_waits_with_it() -> None:
    rig = Rig(fsync_ms=0)
    one, two = rig.client(), rig.client()
    rig.say((one, PUT), (two, b"list-tube-used\r\n"))
    assert (one.take(), two.take()) == (b"", b"USING default\r\n")
    rig.say((one, b"list-tube-used\r\n"))
    assert one.take() == b""
    rig.turn.finish()
    assert one.take() == b"INSERTED 1\r\nUSING default\r\n"
    assert rig.journal.closed


# A journal that does not keep pace

HELD = {
    "delete": b"delete 1\r\n",
    "reserve-job": b"reserve-job 1\r\n",
    "release": b"release 1 0 0\r\n",
    "bury": b"bury 1 0\r\n",
    "kick": b"kick 1\r\n",
    "kick-job": b"kick-job 1\r\n",
    "delete-batch": b"delete-batch 1\r\n",
    "release-batch": b"release-batch 0 0 1\r\n",
    "bury-batch": b"bury-batch 0 1\r\n",
    "a put's body": PUT,
    "behind others": b"list-tube-used\r\ndelete 1\r\n",
    "at the end": b"delete 1\r\n",
}
GOES_ON = {
    "reserve": b"reserve\r\n",
    "reserve-batch": b"reserve-batch 9\r\n",
    "touch-batch": b"touch-batch 1\r\n",
    "touch": b"touch 1\r\n",
    "stats": b"stats-tube default\r\n",
    "a put's line": b"put 0 0 60 1\r\n",
    "some of a put's body": b"put 0 0 60 9\r\nxyz",
    "a mistake": b"delete\r\n",
    "a name": b"use delete\r\n",
    "no end of line": b"delete 1",
    "too long": b"delete 1" * 100,
    "refused": b"put 0 0 60 99999\r\n" + b"delete 1\r\n" * 3,
}


def falls_behind(rig: Rig, client: Wire) -> Task:
    """A change after which the journal is behind. Returns the task that has it catch up."""
    store = rig.turn.store
    assert store is not None
    task = rig.turn.backpressure(store)
    wait = next(task)
    rig.journal.behind = True
    rig.say((client, PUT))
    let_sync(rig)
    assert client.take().startswith(b"INSERTED"), "what is committed need not wait"
    assert wait.flag is not None and wait.flag.is_set
    return task


@pytest.mark.parametrize("fsync_ms", [None, 0])
@pytest.mark.parametrize("name", HELD)
def test_changes_wait_until_the_journal_has_caught_up(name: str, fsync_ms: int | None) -> None:
    """The hub waited, for up to five seconds, and no client was served."""
    rig = Rig(fsync_ms)
    one, other = rig.client(), rig.client()
    task = falls_behind(rig, other)
    rig.say((one, HELD[name]))
    if name == "at the end":
        rig.say((one, None))
    appended, turns = rig.journal.appended, one.turns
    assert next(task).at_ns == NEXT_TURN
    for _ in range(5):
        rig.say((other, b"stats-job 1\r\n"))
        assert other.take().startswith(b"OK "), "all other clients are served"
        next(task)
    assert one.take() == (b"USING default\r\n" if name == "behind others" else b"")
    assert (rig.journal.appended, one.turns) == (appended, turns), "nothing changes, and no task asks all the time"
    rig.journal.behind = False
    next(task)
    assert one.turns == turns + 1
    rig.say((one, b""))
    let_sync(rig)
    assert one.take() and not one.session.unfinished
    assert one.session.closed == (name == "at the end")


def test_a_batch_under_way_waits_until_the_journal_has_caught_up() -> None:
    """The rest of a batch changes as much as its first slice."""
    rig = Rig()
    one, other = rig.client(), rig.client()
    rig.say((one, PUT * 999))
    for _ in range(20):
        rig.say((one, b""))
    rig.say((one, b"delete-batch" + b"".join(b" %d" % id for id in range(1, 1000)) + b"\r\n"))
    left = len(rig.engine.jobs)
    assert 0 < left < 999 and one.session.unfinished
    one.take()
    task = falls_behind(rig, other)
    rig.say((one, b""))
    assert len(rig.engine.jobs) == left + 1 and one.session.held_up
    rig.journal.behind = False
    next(task)
    for _ in range(20):
        rig.say((one, b""))
    assert one.take() == b"DELETED_BATCH 999 0\r\n"


@pytest.mark.parametrize("name", GOES_ON)
def test_what_is_no_change_does_not_wait_for_the_journal(name: str) -> None:
    rig = Rig()
    one, other = rig.client(), rig.client()
    falls_behind(rig, other)
    rig.say((one, GOES_ON[name]))
    assert not one.session.held_up and one.turns == 1


@pytest.mark.parametrize("where", ["tend", "compact_slice"])
def test_changes_wait_also_when_compaction_at_leisure_left_the_journal_behind(where: str) -> None:
    """Nothing had it catch up: a large put, which the journal takes only while it keeps pace, was never answered."""
    rig = Rig()
    store = rig.turn.store
    assert store is not None
    keeper, pace = rig.turn.maintenance.compact(store), rig.turn.backpressure(store)
    next(pace)
    while next(keeper).at_ns == NEVER:
        pass
    rig.journal.falls_behind_in = where
    next(keeper)
    assert rig.journal.behind and rig.engine.held and rig.turn.maintenance.late.is_set
    rig.journal.falls_behind_in, rig.journal.behind = "", False
    next(pace)
    assert not rig.engine.held


def test_a_client_that_came_in_the_turn_in_which_the_wait_ends_goes_on_at_once() -> None:
    rig = Rig()
    one, other = rig.client(), rig.client()
    task = falls_behind(rig, other)
    rig.turn.step(one, b"delete 1\r\n")
    rig.journal.behind = False
    next(task)
    rig.turn.end()
    assert one.turns == 1 and one.session.unfinished
    rig.say((one, b""))
    assert one.take() == b"DELETED\r\n"
    rig.journal.behind = True
    rig.say((other, PUT), (one, b"list-tube-used\r\n"))
    assert one.turns == 3, "the earlier wait is forgotten"


def test_a_held_client_that_is_gone_is_not_asked_to_go_on() -> None:
    rig = Rig()
    one, two, other = rig.client(), rig.client(), rig.client()
    task = falls_behind(rig, other)
    rig.say((one, b"delete 1\r\n"), (two, b"delete 1\r\n"))
    rig.turn.leave(one)
    turns = one.turns
    rig.journal.behind = False
    next(task)
    assert (one.turns, two.turns) == (turns, 1)


def test_a_sync_comes_in_time_while_changes_wait() -> None:
    """Upstream's promise of `-fMS` is the same on a full disk and on a slow one."""
    rig = Rig(fsync_ms=50)
    other = rig.client()
    syncs = rig.turn.tasks()[-1]
    wait = next(syncs)
    task = falls_behind(rig, other)
    assert wait.flag is not None and wait.flag.is_set
    due = next(syncs)
    assert due.at_ns == rig.clock.ns + 50_000_000
    rig.clock.ns = due.at_ns
    next(task)
    assert rig.engine.held
    sync = next(syncs).sync
    assert sync is not None
    sync.run()
    next(syncs)
    assert not rig.journal.unsynced and rig.engine.held
    rig.turn.syncs.written.clear()
    next(task)
    assert rig.turn.syncs.written.is_set, "what compaction moved is synced in time, too"


def test_catching_up_rests_while_the_journal_itself_is_at_work() -> None:
    rig = Rig()
    other = rig.client()
    task = falls_behind(rig, other)
    rig.journal.catches_up = False
    assert next(task).at_ns > rig.clock.ns
    assert rig.journal.slices == 1
    rig.journal.catches_up = True
    assert next(task).at_ns == NEXT_TURN
    assert rig.journal.slices == 1 + CATCH_UP_SLICES
    rig.journal.behind = False
    wait = next(task)
    assert wait.flag is rig.turn.maintenance.late and not wait.flag.is_set
    rig.say((other, PUT))
    assert not rig.engine.held


# Clients that go


def test_who_leaves_gives_back_what_it_held_in_slices() -> None:
    rig = Rig()
    one, two = rig.client(), rig.client()
    task = rig.turn.tasks()[1]
    wait = next(task)
    for _ in range(8):
        rig.say((one, (PUT + b"reserve\r\n") * 60))
        rig.turn.step(one, b"")
        rig.say()
    held = len(one.session.reserved)
    assert held > 250
    rig.turn.leave(one)
    assert wait.flag is not None and wait.flag.is_set
    slices = 0
    while rig.turn.channels.keys() == {1, 2}:
        wait = next(task)
        assert wait.at_ns == NEXT_TURN
        slices += 1
    assert slices > held // 300
    rig.turn.end()
    assert rig.engine.ready_count == held
    assert two.session.number in rig.turn.channels


def test_many_clients_that_hold_little_leave_at_once() -> None:
    rig = Rig()
    wires = [rig.client() for _ in range(100)]
    for wire in wires:
        rig.turn.leave(wire)
    assert not rig.turn.channels


# Operations


class Kicks(Operation):
    """Kicks a job in each slice: that is a change, when it is buried. `heard` is what the turn said in the end."""

    def __init__(self, rig: Rig, slices: int = 1, work: int = 0, ids: tuple[int, ...] = (1,)) -> None:
        self.rig = rig
        self.left = slices
        self.work = work
        self.ids = ids
        self.ran = 0
        self.heard: list[str] = []
        self.commits = 0  # when it heard it
        self.fails: Exception | None = None
        self.then: Callable[[], None] = lambda: None

    def run(self, now_ns: int) -> bool:
        assert now_ns == self.rig.clock.ns
        for id in self.ids:
            self.rig.engine.kick_job(id, now_ns)
        self.rig.engine.work += self.work
        self.ran += 1
        self.left -= 1
        if self.fails is not None:
            raise self.fails
        return self.left <= 0

    def done(self) -> None:
        self._hear("done")

    def failed(self) -> None:
        self._hear("failed")

    def _hear(self, word: str) -> None:
        self.heard.append(word)
        self.commits = self.rig.journal.commits
        self.then()


def buried(rig: Rig, count: int = 1) -> Wire:
    """A client, and this many buried jobs."""
    one = rig.client()
    for id in range(1, count + 1):
        rig.say((one, PUT + b"reserve\r\nbury %d 0\r\n" % id))
    while rig.turn.gate.pieces:
        rig.turn.sync_here()
    one.take()
    return one


def operations(rig: Rig) -> Task:
    task = rig.turn.tasks()[2]
    next(task)
    return task


@pytest.mark.parametrize("fsync_ms", [None, 50])
def test_an_operation_is_done_when_its_change_is_committed(fsync_ms: int | None) -> None:
    rig = Rig(fsync_ms)
    one = buried(rig)
    operation = Kicks(rig)
    begun, commits = rig.begun, rig.journal.commits
    rig.turn.accept(operation)
    assert (operation.ran, operation.heard, rig.begun) == (1, [], begun + 1), (
        "it runs in this turn, which a commit ends"
    )
    rig.say((one, b"reserve\r\n"))
    assert (operation.heard, operation.commits) == (["done"], commits + 1)
    assert one.take() == b"RESERVED 1 1\r\nx\r\n"


def test_without_a_journal_an_operation_is_done_at_the_end_of_the_turn() -> None:
    rig = Rig(durable=False)
    buried(rig)
    operation = Kicks(rig)
    rig.turn.accept(operation)
    assert not operation.heard
    rig.turn.end()
    assert operation.heard == ["done"]


def test_the_slices_of_an_operation_run_one_a_turn() -> None:
    rig = Rig()
    task = operations(rig)
    operation = Kicks(rig, slices=3)
    rig.turn.accept(operation)
    assert rig.turn.operations.wanted.is_set
    rig.turn.end()
    for ran in (2, 3):
        assert not operation.heard
        assert go_on(task).at_ns == NEXT_TURN
        assert operation.ran == ran
        rig.turn.end()
    assert operation.heard == ["done"]
    assert go_on(task).flag is rig.turn.operations.wanted
    rig.turn.end()
    assert operation.ran == 3


def test_operations_share_what_a_turn_has_room_for() -> None:
    """Many small ones run in one turn, and a large one waits no longer for others than others for it."""
    rig = Rig()
    task = operations(rig)
    large = [Kicks(rig, slices=4, work=MOVE_SLICE) for _ in range(2)]
    small = [Kicks(rig) for _ in range(2 * MOVE_SLICE)]
    for operation in (*large, *small):
        rig.turn.accept(operation)
    assert [each.ran for each in large] == [1, 0] and not any(each.ran for each in small)
    rig.turn.end()
    turns = 0
    while not all(each.heard for each in (*large, *small)):
        before = sum(each.ran * (1 + each.work) for each in (*large, *small))
        go_on(task)
        rig.turn.end()
        assert 0 < sum(each.ran * (1 + each.work) for each in (*large, *small)) - before <= 2 * MOVE_SLICE
        turns += 1
        if turns == 6:
            assert all(each.ran >= 2 for each in large) and all(each.heard for each in small)
    assert turns <= 10


def test_an_operation_that_done_brings_is_of_the_next_turn() -> None:
    rig = Rig()
    buried(rig, 2)
    first, second = Kicks(rig), Kicks(rig, ids=(2,))
    first.then = lambda: rig.turn.accept(second)
    rig.turn.accept(first)
    rig.turn.end()
    assert first.heard == ["done"] and second.ran == 1 and not second.heard, "its change is not committed"
    rig.turn.end()
    assert second.heard == ["done"] and second.commits == first.commits + 1


@pytest.mark.parametrize("begun", [False, True])
def test_operations_wait_until_the_journal_has_caught_up(begun: bool) -> None:
    """But not those that have to end a large job before the journal can go on."""
    rig = Rig()
    buried(rig)
    task = operations(rig)
    pace = falls_behind(rig, rig.client())
    operation = Kicks(rig, slices=2)
    operation.begun = begun
    other = Kicks(rig)
    rig.turn.accept(operation)
    rig.turn.accept(other)
    for _ in range(3):
        go_on(task)
        rig.turn.end()
    assert (operation.ran, other.ran) == (2 if begun else 0, 0)
    assert go_on(task).flag is rig.turn.operations.wanted, "no task asks all the time"
    rig.journal.behind = False
    next(pace)
    assert begun or rig.turn.operations.wanted.is_set
    go_on(task)
    rig.turn.end()
    go_on(task)
    rig.turn.end()
    assert (operation.heard, other.heard) == (["done"], ["done"])


def test_a_durable_operation_waits_for_the_sync_in_its_place_among_the_replies() -> None:
    rig = Rig(fsync_ms=0)
    one, two = buried(rig), rig.client()
    syncs = rig.turn.tasks()[-1]
    next(syncs)
    heard: list[str] = []
    operation, late, idle = Kicks(rig), Kicks(rig, ids=(2,)), Kicks(rig, ids=())
    operation.then = lambda: heard.append(f"{one.take()!r} {two.take()!r}")
    rig.say((one, PUT))
    rig.turn.accept(operation)
    rig.turn.accept(idle)
    rig.turn.end()
    rig.say((two, PUT + b"reserve\r\nreserve\r\nbury 2 0\r\n"))
    assert idle.heard == ["done"], "it changed nothing"
    sync = go_on(syncs).sync
    assert sync is not None
    rig.turn.accept(late)
    rig.turn.end()
    sync.run()
    assert not operation.heard
    wait = go_on(syncs)
    assert operation.heard == ["done"]
    assert heard == [repr(b"INSERTED 2\r\n") + " " + repr(b"")], "what was held before it is sent, and nothing else"
    assert not late.heard, "its change came after this sync began"
    assert wait.sync is not None
    wait.sync.run()
    go_on(syncs)
    assert late.heard == ["done"] and not rig.turn.gate.pieces


def test_a_slow_sync_for_an_operation_is_in_a_thread() -> None:
    """When no client is there, or all wait, there are still those who sent the operation, or others like them."""
    rig = Rig(fsync_ms=0)
    one = buried(rig)
    operation = Kicks(rig)
    rig.turn.accept(operation)
    rig.say((one, PUT))
    assert not operation.heard and not one.take() and rig.turn.awaited.is_set
    rig.turn.finish()
    assert operation.heard == ["done"] and one.take() == b"INSERTED 2\r\n"


def test_a_sync_is_in_a_thread_while_there_are_guests() -> None:
    rig = Rig(fsync_ms=0)
    one = rig.client()
    rig.turn.others = 1
    rig.say((one, PUT))
    assert not one.take() and rig.turn.awaited.is_set


def test_a_sync_for_an_operation_is_in_a_thread() -> None:
    rig = Rig(fsync_ms=0)
    buried(rig)
    operation = Kicks(rig)
    rig.turn.accept(operation)
    rig.turn.end()
    assert not operation.heard and rig.turn.awaited.is_set and rig.journal.unsynced


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "journal"])
@pytest.mark.parametrize("changes", [False, True])
def test_an_operation_that_raises_is_as_a_client_whose_change_is_half_made(durable: bool, changes: bool) -> None:
    rig = Rig(durable=durable)
    told: list[BaseException | None] = []
    rig.turn.tell = lambda text, error: told.append(error)
    one = buried(rig, 2)
    waits, bad = Kicks(rig, slices=2), Kicks(rig, ids=(2,) if changes else ())
    bad.fails = RuntimeError("in the middle")
    rig.turn.accept(waits)
    rig.turn.accept(bad)
    rig.turn.end()
    fatal = durable and changes
    assert [str(error) for error in rig.failures] == (["in the middle"] if fatal else [])
    assert [str(error) for error in told] == ([] if fatal else ["in the middle"])
    assert bad.heard == ["failed"]
    assert waits.heard == (["failed"] if fatal else [])
    rig.say((one, b"stats-job 1\r\n"))
    assert one.take().startswith(b"" if fatal else b"OK ") and rig.turn.failed == fatal


@pytest.mark.parametrize("where", ["commit", "sync"])
def test_no_operation_is_done_that_the_journal_lost(where: str) -> None:
    rig = Rig(fsync_ms=0)
    one = buried(rig, 2)
    at_the_gate, finished, unfinished = Kicks(rig), Kicks(rig, ids=(2,)), Kicks(rig, slices=2)
    rig.turn.accept(at_the_gate)
    rig.turn.end()
    rig.turn.accept(finished)
    rig.turn.accept(unfinished)
    setattr(rig.journal, f"{where}_fails", OSError(5, "I/O error"))
    rig.say((one, PUT))
    rig.turn.finish()
    assert len(rig.failures) == 1
    assert at_the_gate.heard == finished.heard == unfinished.heard == ["failed"]
    late = Kicks(rig)
    rig.turn.accept(late)
    assert late.heard == ["failed"] and not late.ran


def test_a_clean_end_is_the_end_of_operations() -> None:
    rig = Rig(fsync_ms=0)
    buried(rig)
    at_the_gate, finished, unfinished = Kicks(rig), Kicks(rig), Kicks(rig, slices=2)
    rig.turn.accept(at_the_gate)
    rig.turn.end()
    rig.turn.accept(finished)
    rig.turn.accept(unfinished)
    rig.turn.finish()
    assert (at_the_gate.heard, finished.heard, unfinished.heard) == (["done"], ["done"], ["failed"])
    late = Kicks(rig)
    rig.turn.accept(late)
    assert late.heard == ["failed"] and not late.ran and not rig.failures


def test_after_the_end_the_journal_is_left_alone() -> None:
    """The event loop goes round while the last replies leave, and ends a turn that began late: here with a put."""
    rig = Rig(fsync_ms=0)
    one = rig.client()
    rig.turn.finish()
    assert rig.journal.closed
    rig.journal.commit_fails = OSError(9, "closed")
    rig.say((one, PUT))
    assert not rig.failures and not one.sent


# The wall clock


# Bug: An age could be negative.
def test_a_step_of_the_wall_clock_is_followed() -> None:
    """The deadline of a put made after the clock was corrected was computed from the clock at start."""
    rig = Rig()
    one = rig.client()
    rig.say((one, PUT))
    rig.wall_step_ns = 3600 * SECOND
    rig.clock.ns += SECOND
    rig.say((one, b"put 0 10 60 1\r\nx\r\n"))
    payload = rig.journal.written[-1]
    assert int.from_bytes(payload[9:17], "little") == rig.wall_ns() + 10 * SECOND
    # A ready job's head is kept for the next one of the same moment.
    rig.say((one, PUT))
    head = rig.journal.written[-1]
    rig.wall_step_ns = 0
    rig.say((one, PUT))
    created = [int.from_bytes(each[21:29], "little") for each in (head, rig.journal.written[-1])]
    assert created[0] - created[1] == 3600 * SECOND


def test_what_two_readings_of_the_clocks_take_is_no_step() -> None:
    rig = Rig()
    one = rig.client()
    rig.wall_step_ns = 3_000_000
    rig.say((one, b"put 0 10 60 1\r\nx\r\n"))
    payload = rig.journal.written[-1]
    assert int.from_bytes(payload[9:17], "little") == rig.wall_ns() + 10 * SECOND - 3_000_000


def test_a_task_waits_for_what_it_says() -> None:
    rig = Rig(durable=False)
    clock = rig.turn.tasks()[0]
    wait = next(clock)
    assert wait.at_ns == NEVER
    one = rig.client()
    rig.say((one, b"put 0 5 60 1\r\nx\r\n"))
    assert wait.flag is not None and wait.flag.is_set
    assert rig.clock.ns < next(clock).at_ns


@pytest.mark.parametrize(("left", "moves"), [(0, True), (1000, True), (1200, False), (1900, None)])
def test_when_jobs_are_gone_their_memory_is_given_back(left: int, moves: bool | None) -> None:
    """Looked at with the rates. Those that are left are moved where they are few, in slices."""
    rig = Rig(durable=False)
    given: list[int] = []
    rig.turn.maintenance.give_memory_back = lambda: given.append(rig.engine.jobs.count)
    rates, lean = rig.turn.tasks()[3:5]
    next(rates)
    assert next(lean).flag is rig.turn.maintenance.drained
    one = rig.client()
    for _ in range(2100):
        rig.say((one, PUT))
    go_on(rates)
    rig.clock.pass_s(5)
    go_on(rates)
    assert not rig.turn.maintenance.drained.is_set and rig.engine.jobs.most > 2000
    for number in range(1, 2101 - left):
        rig.say((one, b"delete %d\r\n" % number))
    go_on(rates)
    rig.clock.pass_s(5)
    go_on(rates)
    assert rig.turn.maintenance.drained.is_set == (moves is not None)
    if moves is None:
        return
    places = {job.id: id(job) for job in rig.engine.jobs}
    slices = 0
    while not given:
        wait = next(lean)
        slices += wait.at_ns == NEXT_TURN
    assert slices == (-(-len(rig.engine.jobs._pages) // REPACK_PAGES) if moves else 0)
    assert given == [left] and rig.engine.jobs.most == left
    stayed = [job.id for job in rig.engine.jobs if places[job.id] == id(job)]
    assert len(stayed) < left if moves and left else len(stayed) == left
    assert not rig.turn.maintenance.drained.is_set


@pytest.mark.skipif(BUILD == "compiled", reason="methods of compiled classes cannot be replaced")
def test_without_memory_to_move_jobs_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(durable=False)

    def repack(self: JobTable, id: int, pages: int) -> int:
        raise MemoryError

    monkeypatch.setattr(JobTable, "repack", repack)
    lean = rig.turn.tasks()[4]
    rig.turn.maintenance.drained.set()
    assert go_on(lean).flag is rig.turn.maintenance.drained


def test_without_memory_to_give_memory_back_nothing_ends() -> None:
    rig = Rig(durable=False)

    def give_back() -> None:
        raise MemoryError

    rig.turn.maintenance.give_memory_back = give_back
    lean = rig.turn.tasks()[4]
    rig.turn.maintenance.drained.set()
    assert go_on(lean).at_ns == NEXT_TURN
    assert go_on(lean).flag is rig.turn.maintenance.drained
