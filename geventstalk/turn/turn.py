"""One turn: sessions execute what their clients sent, one commit covers all of it, and then the replies leave.

Changes of an operator go the same way, as operations: see queue.py. This module must not know gevent, sockets,
clocks or SQLite: its owner hands in the clocks, calls end() when every client that is ready had its step, and drives
the tasks. Everything here runs without a pause from one yield to the next, so it needs no lock. Invariants: no reply
leaves and no operation is done before the commit that covers it, and under `-f0` not before the sync that covers it;
after a failure no reply leaves at all. The hub never waits for a device: a thread reads and syncs files, and a slice
whose data is not there yet ends and comes again. The hub may append rows and commit them without a sync, and under
`-f0` it runs a sync for which every client waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.core.ages import find_strays
from geventstalk.core.bodies import Bodies
from geventstalk.core.engine import NEVER
from geventstalk.core.job import DELETED, Job
from geventstalk.core.operate import Operate
from geventstalk.durable.records import make_plausible
from geventstalk.durable.store import Store
from geventstalk.turn.maintenance import Maintenance
from geventstalk.turn.queue import OperationQueue
from geventstalk.turn.replies import Channel, Operation, ReplyGate
from geventstalk.turn.returns import Returns
from geventstalk.turn.syncs import Syncs
from geventstalk.turn.tasks import NEXT_TURN, Flag, Task, Wait
from geventstalk.wire.session import MOVE_SLICE, Session

_LOOK_PAYS: Final = 8
"""A look for more clients has to find an eighth as many as there are: it takes much less than the rest of a turn."""
SHARE_NS: Final = 1_000_000
"""When a turn lasts longer, clients that ask for much have to wait for a later turn."""
LITTLE_WORK: Final = 16
"""A client whose last step took more commands, or other units of work, asks for much."""
PASSES_MAX: Final = 8
"""Clients that ask for much go on for SHARE_NS up to this many times, or a tenth of their cost would be the commit."""
_SOON_NS: Final = 1_000_000_000
"""Work that is due later can wait until the end of a sync, however slow."""
_GATHERED_MAX: Final = 256
"""A turn with this many clients looks for no more clients: the fixed cost of the turn is already small for each."""
_TELL_FULL_NS: Final = 60_000_000_000
"""Refused puts for want of memory are logged no more often than this."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Turn:
    """`begins` is called when a turn begins: end() has to follow soon. `fails` is called once, with what failed."""

    def __init__(
        self,
        engine: Operate,
        clock: Callable[[], int],
        wall_clock: Callable[[], int],
        begins: Callable[[], None],
        fails: Callable[[BaseException], None],
    ) -> None:
        self.engine = engine
        self.store: Store | None = None
        self.failed = False
        self.syncs = Syncs(clock)
        self.maintenance = Maintenance(engine, clock, self.begin, self.let_awaiting_go_on, self.syncs.written)
        self.channels: dict[int, Channel] = {}
        self.gate = ReplyGate()
        self.operations = OperationQueue(engine, clock, self.gate, self.begin, self._undo, self._say)
        self.returns = Returns()
        self.tell: Callable[[str, BaseException | None], None] = _tell_nothing
        self.move_slice = MOVE_SLICE
        self.others = 0  # what the owner serves beside these clients: while there are some, no sync is run here
        self.pressure = 0  # for how many times SHARE_NS the turn has lasted
        self._press_ns = 0  # when it has lasted once more; 0 before its first step
        self._has_light = False  # whether a client had a step that asks for little
        self._passes = 0  # how often lasts() said yes in this turn
        self._clock = clock
        self._wall_clock = wall_clock
        self._begins = begins
        self._fails = fails
        self._under_way = False
        self._in_turn: list[Channel] = []
        self._gathered = 0  # how many of them there were at the last look for more of them
        self._leaving: deque[Channel] = deque()
        self._held_up: dict[int, Channel] = {}  # whose next command is a change, while Engine.held
        self._awaiting: dict[int, Channel] = {}  # whose reply has to show a body that is not in memory
        self._leave_budget = MOVE_SLICE  # what clients that go may still give back within this turn
        self._over = False  # whether finish() has ended the last turn
        self._told_full = False  # whether the operator knows that memory has no room for bodies
        self._tell_full_ns = 0  # before this time the operator does not hear of it again
        self._armed_ns = NEVER  # when the task of the clock wakes by itself
        self.earlier = Flag()  # something is due earlier than that
        self.gone = Flag()  # clients are gone and have to give back what they held
        self.awaited = Flag()  # replies wait for a sync

    def open(self, store: Store, progress: Callable[[int], None] = lambda records: None) -> None:
        """Brings the jobs of a journal back, and has every change written there. Raises JournalError."""
        engine = self.engine
        now_ns = self._clock()
        if engine.bodies is not None:
            store.keep_bodies(engine.bodies)
        for job, tube_name in store.replay(engine.jobs, progress):
            make_plausible(job, now_ns)
            engine.restore(job, tube_name, now_ns)
        engine.restored(now_ns)
        if engine.unsorted:
            find_strays(engine)
        self.write_to(store)
        if engine.bodies is not None:
            engine.bodies.recount(engine.jobs)

    def write_to(self, store: Store) -> None:
        """From now on every change is written there. The engine has all of its jobs. Raises JournalError."""
        engine = self.engine
        engine.next_id = max(engine.next_id, store.start(self._find))
        engine.ledger = store
        self.store = self.operations.store = store
        if engine.rules is not None:
            engine.rules.find_due()

    def _find(self, id: int) -> tuple[Job, bytes] | None:
        engine = self.engine
        job = engine.jobs.get(id)
        if job is not None:
            return job, engine.tube_of(job).name
        return None if engine.rules is None else engine.rules.mark_of(id)

    def tasks(self) -> list[Task]:
        """Returns the tasks that run beside the clients, from the start on."""
        keeps = self.maintenance
        tasks = [self.keep_time(), self.let_go(), self.operations.run_all(), keeps.keep_rates(), keeps.trim_memory()]
        store = self.store
        return tasks if store is None else tasks + self.tasks_of(store)

    def tasks_of(self, store: Store) -> list[Task]:
        """Those of them that keep the journal."""
        tasks = [self.maintenance.compact(store), self.backpressure(store)]
        if store.syncs_before_replies:
            tasks.append(self.sync_for_replies(store))
        elif store.syncs_when_due:
            tasks.append(self.syncs.when_due(store))
        if store.bodies is not None:
            tasks.append(self.maintenance.keep_bodies(store, store.bodies))
        return tasks

    # --- clients

    def join(self, channel: Channel) -> None:
        """A client has come."""
        channel.joined_ns = channel.heard_ns = self._clock()
        self.channels[channel.session.number] = channel

    def step(self, channel: Channel, data: bytes | None) -> None:
        """Gives bytes to a session. b"" lets the session go on, and None is the end of the client's input."""
        if not self._under_way:
            self.begin()
        session = channel.session
        store = self.store
        before = 0 if store is None else store.appended
        now_ns = self._clock()
        if now_ns >= self._press_ns:
            self._press(now_ns)
        try:
            if data is None:
                session.hang_up(now_ns)
            elif data:
                channel.heard_ns = now_ns
                session.receive(data, now_ns)
            else:
                session.run(now_ns)
        except Exception as error:
            self._change_failed(channel, error)
        if session.unfinished or self.engine.work + len(session.out) > LITTLE_WORK:
            channel.heavy = True
        elif data:  # otherwise it is the rest of something
            channel.heavy = False
        if not channel.heavy:
            self._has_light = True
        if store is not None and store.appended != before:
            channel.changed = True
        if not channel.in_turn:
            channel.in_turn = True
            self._in_turn.append(channel)

    def is_pressed(self) -> bool:
        """Returns whether the turn lasts for so long that clients that ask for much have to wait."""
        now_ns = self._clock()
        if now_ns >= self._press_ns:
            self._press(now_ns)
        return self.pressure > 0

    def lasts(self) -> bool:
        """Returns whether the owner should let more clients that ask for much go on before it calls end(), and then ask
        again.

        No other client waits for the end of this turn. Input is read in between, and may be that of a client that does.
        """
        self._passes += 1
        if self._has_light or self.operations.ran or self.failed or self.engine.served or self._passes > PASSES_MAX:
            return False
        self.pressure = self._press_ns = 0
        return True

    def _press(self, now_ns: int) -> None:
        if self._press_ns:
            self.pressure += 1
        self._press_ns = now_ns + SHARE_NS

    def _change_failed(self, channel: Channel, error: Exception) -> None:
        """Closes the connection of a client whose change failed, where the change can be undone."""
        if self._undo(error, channel.session):
            self.tell("a change failed and is undone, its connection is closed", error)

    def _undo(self, error: Exception, session: Session | None = None) -> bool:
        """Undoes a change that may be half made. Returns whether it could: a journal may have half of it.

        With a session, its client goes.
        """
        if self.store is not None:
            self.fail(error)
            return False
        try:
            self.engine.undo()
            if session is not None:
                session.give_up()
        except Exception as second:
            second.__context__ = error
            self.fail(second)
            return False
        return True

    def _say(self, text: str, error: BaseException | None) -> None:
        self.tell(text, error)

    def leave(self, channel: Channel) -> None:
        """A client is gone, and its channel takes nothing more. Its jobs are given back, now or by let_go()."""
        cost = _cost_of_leaving(channel)
        self._held_up.pop(channel.session.number, None)
        self._awaiting.pop(channel.session.number, None)
        try:
            if cost <= self._leave_budget and not self._leaving:
                self._leave_budget -= cost
                if self.give_back(channel):
                    return
            self.engine.stop_waiting(channel.session)
        except Exception as error:
            self.fail(error)  # a change may be half made
            return
        self._leaving.append(channel)
        self.gone.set()

    # --- operations

    def accept(self, operation: Operation) -> None:
        """Takes an operation. Its first slice runs now or in a later turn: see OperationQueue.accept().

        The further slices run one a turn.
        """
        if self.failed or self._over:
            operation.failed()
        else:
            self.operations.accept(operation)

    # --- from the beginning of a turn to its end

    def begin(self) -> None:
        """Something happens that a commit and replies must follow."""
        if not self._under_way:
            self._under_way = True
            if self.store is not None:
                self.store.follow_wall_clock(self._wall_clock, self._clock)
            self._begins()

    def end(self) -> None:
        """Commits the changes, and sends the replies that need not wait any longer."""
        self._under_way = False
        self.pressure = self._press_ns = self._passes = 0
        self._has_light = False
        self._leave_budget = MOVE_SLICE
        if self.failed or self._over:
            return
        now_ns = self._clock()
        try:
            self.collect_served()
            self.commit(now_ns)
            if self.engine.active:
                self.maintenance.busy.set()
            if self.operations.ran:
                self.settle_operations()
            if self.engine.rules is not None and self.engine.rules.due:
                self.operations.do_what_tags_want()
            touched, self._in_turn = self._in_turn, []
            self.flush(touched)
            self.arm()
            if self.engine.bodies is not None:
                self.look_at_memory(self.engine.bodies, now_ns)
        except Exception as error:
            self.fail(error)

    def look_at_memory(self, bodies: Bodies, now_ns: int) -> None:
        """Has wanted bodies fetched, frees memory for others, and tells the operator when memory is full."""
        seal_at = bodies.seal_at()
        if seal_at and self.store is not None and self.store.seal_early(seal_at):
            self.maintenance.grown.set()
        refused = bodies.refused_text()
        if bodies.turn_ends():
            self.maintenance.missing.set()
        if refused and not self._told_full and now_ns >= self._tell_full_ns:
            self._told_full = True
            self._tell_full_ns = now_ns + _TELL_FULL_NS
            self.tell(f"puts are refused: {refused}", None)
        elif self._told_full and not bodies.is_full:
            self._told_full = False
            self.tell("puts are accepted again: memory has room for bodies", None)

    def commit(self, now_ns: int) -> None:
        """Commits the changes of all clients in this turn, in one transaction. Any exception is the end."""
        store = self.store
        if store is not None and store.dirty:
            store.commit(now_ns)
            self.syncs.written.set()
            self.maintenance.grown.set()
            self.maintenance.heed(store)

    def collect_served(self) -> None:
        """Clients whose wait ended in this turn have replies, too."""
        served = self.engine.served
        if served:
            tagged = self.engine.rules is not None  # a delivery may have been written down
            for client in served:
                channel = self.channels.get(client.number)
                if channel is not None and tagged:
                    channel.changed = True
                if channel is not None and not channel.in_turn:
                    channel.in_turn = True
                    self._in_turn.append(channel)
            served.clear()

    def settle_operations(self) -> None:
        """The operations that were finished in this turn are done, or wait at the gate."""
        self.operations.settle(self.store is not None and self.store.syncs_before_replies)

    def flush(self, touched: list[Channel]) -> None:
        """The replies of these clients leave, or wait at the gate."""
        store = self.store
        if store is not None and store.syncs_before_replies:
            self.flush_durably(touched)
            return
        held = self.engine.held
        for channel in touched:
            channel.in_turn = False
            session = channel.session
            while session.out:
                channel.send(session.take_out())
            if session.awaited is not None:
                self.let_await(channel, session.awaited)
            elif held and session.held_up:
                self._held_up[session.number] = channel
            else:
                channel.goes_on()

    def flush_durably(self, touched: list[Channel]) -> None:
        """Holds replies to changes until a sync, under `-f0`, and the replies behind them."""
        held = self.engine.held
        for channel in touched:
            channel.in_turn = False
            session = channel.session
            while session.out:
                data = session.take_out()
                if channel.changed or channel.held:
                    channel.changed = False
                    self.gate.hold(channel, data)
                else:
                    channel.send(data)
            if session.awaited is not None:
                self.let_await(channel, session.awaited)
            elif held and session.held_up:
                self._held_up[session.number] = channel
            else:
                channel.goes_on()
        if self.gate.clients >= self.returns.expected:
            self.returns.came.set()
        if (self.gate.clients or self.gate.operations) and not self.awaited.is_set and not self.sync_here():
            self.awaited.set()

    def let_await(self, channel: Channel, job: Job) -> None:
        """Lets the client go on when the body of this job is there. A fetch may have brought it within this turn."""
        if job.body is not None or job.state == DELETED:
            channel.goes_on()
        else:
            self._awaiting[channel.session.number] = channel

    def sync_here(self) -> bool:
        """Syncs without a thread when every client waits for the sync. Returns whether it did.

        Handing a sync to a thread and back takes as long as a quick sync. But the next sync may be a slow one, and then
        clients would wait that have no change to be synced. A networked log needs no thread, and its sync takes as long
        as its peer likes.
        """
        store = self.store
        assert store is not None
        if not store.syncs_here or not self.all_clients_wait():
            return False
        pieces = self.gate.pieces
        self.syncs.run(store)
        self.release(pieces)
        return True

    def gathers(self) -> bool:
        """Returns whether, under `-f0`, the owner should look for more input before it calls end(), and then ask again.

        Clients whose replies have just left send their next changes while others of this turn are still read. Without
        another look they would wait for a sync of their own, and each sync would be that of half the clients. A look
        does not wait for input. A client that is alone in a turn does not wait for a look.
        """
        store = self.store
        if store is None or not store.syncs_before_replies or self.failed:
            return False
        came, before = len(self._in_turn), self._gathered
        looks = 1 < came < min(len(self.channels), _GATHERED_MAX) and (came - before) * _LOOK_PAYS >= came
        self._gathered = came if looks else 0
        return looks

    def all_clients_wait(self) -> bool:
        """Returns whether each client waits for a sync, or for a job that nothing brings before. An operator may do
        more.
        """
        gate, waiting = self.gate, self.engine.waiting_count
        if gate.operations or self.others:
            return False
        if waiting and NEVER != self.engine.next_deadline_ns() <= self._clock() + _SOON_NS:
            return False
        if gate.clients + waiting < len(self.channels):
            return False
        return gate.clients + waiting - gate.clients_that_also_wait() >= len(self.channels)

    def release(self, pieces: int) -> None:
        """Lets this many of the replies at the gate leave: a sync that began after they came has ended."""
        if not self.failed:
            until_ns = self.returns.expect(self.gate.clients, self._clock(), self.syncs.took_ns)
            if self.store is not None:
                self.store.hold(until_ns)
            self.gate.release(pieces)

    def arm(self) -> None:
        """Wakes the clock when something is due earlier than it knows."""
        deadline_ns = self.engine.next_deadline_ns()
        if deadline_ns != NEVER and (self._armed_ns == NEVER or deadline_ns < self._armed_ns):
            self.earlier.set()

    # --- tasks

    def keep_time(self) -> Task:
        """Ends times that are over, in slices, and sleeps until the next deadline."""
        while True:
            done = self.advance()
            deadline_ns = self.engine.next_deadline_ns()
            if self.engine.served:
                self.begin()
            if not done:
                yield Wait(at_ns=NEXT_TURN)
                continue
            self._armed_ns = deadline_ns
            self.earlier.clear()
            yield Wait(self.earlier, deadline_ns)

    def advance(self) -> bool:
        """Runs one slice of what is due. Returns whether that was all."""
        engine = self.engine
        done = engine.advance(self._clock(), self.move_slice)
        if engine.active:
            self.maintenance.busy.set()
        if engine.rules is not None and engine.rules.due:
            self.operations.do_what_tags_want()
        return done

    def let_go(self) -> Task:
        """Gives back what clients held that are gone: each in its turn, slice by slice."""
        while True:
            yield Wait(self.gone)
            self.gone.clear()
            while self._leaving:
                left = MOVE_SLICE
                while self._leaving and left > 0:
                    channel = self._leaving.popleft()
                    left -= _cost_of_leaving(channel)
                    if not self.give_back(channel):
                        self._leaving.append(channel)
                        break
                yield Wait(at_ns=NEXT_TURN)

    def give_back(self, channel: Channel) -> bool:
        """Gives back a slice of what a client held. Returns whether that was all, and nothing is left of the client."""
        self.begin()
        done = channel.session.leave(self._clock())
        if done:
            del self.channels[channel.session.number]
        return done

    def backpressure(self, store: Store) -> Task:
        """Catches up while the journal is behind, a few slices a turn, and then wakes clients that had to wait."""
        while True:
            yield Wait(self.maintenance.late)
            self.maintenance.late.clear()
            while store.behind:
                yield from self.maintenance.catch_up(store)
            self.let_changes_go_on()

    def let_changes_go_on(self) -> None:
        """The hold has ended: clients that wait for that go on."""
        self.engine.held = False
        self.operations.wake()
        for channel in self._in_turn:  # flush() lets these go on
            channel.session.held_up = False
        held_up, self._held_up = self._held_up, {}
        for channel in held_up.values():
            channel.session.held_up = False
            channel.goes_on()

    def let_awaiting_go_on(self) -> None:
        """Lets clients go on whose body is there, or will not come."""
        self.operations.wake()
        for number, channel in list(self._awaiting.items()):
            job = channel.session.awaited
            if job is None or job.body is not None or job.state == DELETED:
                del self._awaiting[number]
                channel.goes_on()

    def sync_for_replies(self, store: Store) -> Task:
        """Under `-f0`: a sync for all replies that wait, then one for those that came meanwhile.

        In a thread, or for a networked log without one, and then under every policy.
        """
        while True:
            yield Wait(self.awaited)
            yield from self.await_returns()
            if not self.sync_here():
                pieces = self.gate.pieces  # they stay there: the server may stop while the sync is under way
                yield from self.syncs.wait(store)
                yield from self.await_lease()
                if self.failed:
                    return  # the gate stays as it is: to look at it again and again would keep the process from its end
                self.release(pieces)
            if not self.gate.pieces:
                self.awaited.clear()

    def await_lease(self) -> Task:
        """Waits until replies may leave, also those without a change. Here they may at once."""
        return iter(())

    def await_returns(self) -> Task:
        """Waits a moment for the clients that the last sync let go on, so that they share the next sync."""
        returns, gate = self.returns, self.gate
        missing = returns.expected - gate.clients
        waited = False
        while gate.clients < returns.expected and not self.all_clients_wait():
            wait = returns.wait(self._clock())
            if wait is None:
                if waited:
                    returns.waited(missing, returns.expected - gate.clients)
                return
            waited = True
            yield wait
        if waited:
            returns.waited(missing, 0)

    # --- the end

    def fail(self, error: BaseException) -> None:
        """Nothing is certain any more: from now on no reply leaves. The first failure counts."""
        if not self.failed:
            self.failed = self.maintenance.stopped = True
            self._fails(error)
            self.operations.give_up()

    def finish(self) -> None:
        """The clean end: commits, syncs, and sends everything that is true by then. No task may run any more.

        A turn that begins later has no end: its changes are neither written nor answered.
        """
        store = self.store
        try:
            if not self.failed and store is not None:
                self.syncs.take_last(store)
            self.end()
            self._over = True
            if self.failed:
                return
            if store is not None:
                self.syncs.run(store)
                self.release(self.gate.pieces)
                store.close()
            self.operations.give_up()
        except Exception as error:
            self.fail(error)


def _cost_of_leaving(channel: Channel) -> int:
    """Returns how many moves a client takes that leaves."""
    session = channel.session
    return 1 + len(session.reserved) + len(session.watched)


def _tell_nothing(text: str, error: BaseException | None) -> None:
    return
