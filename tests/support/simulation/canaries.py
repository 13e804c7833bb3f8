"""Servers with one planted fault each, which the simulation must find: the proof that it would find a real one."""

from __future__ import annotations

from collections.abc import Callable

from geventstalk.core.bodies import Bodies
from geventstalk.core.job import BURIED, DELETED, READY, Job
from geventstalk.core.tube import RESERVED_JOB
from geventstalk.durable.reading import Reading
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.turn.maintenance import Maintenance
from geventstalk.turn.queue import OperationQueue
from geventstalk.turn.replies import Channel
from geventstalk.turn.tasks import Task
from geventstalk.wire.commands import _FOR_PEEK
from journal import FULL, Journal, JournalError, SyncPoint
from tests.support.faulty_journal import FaultyJournal
from tests.support.forgetful import AwaitingSession
from tests.support.simulation.host import WatchedTurn
from tests.support.simulation.simulation import Parts


class RepliesBeforeCommit(WatchedTurn):
    def end(self) -> None:
        self.collect_served()
        touched, self._in_turn = self._in_turn, []
        self.flush(touched)
        super().end()


class RepliesBeforeSync(WatchedTurn):
    """Under -f0."""

    def flush_durably(self, touched: list[Channel]) -> None:
        for channel in touched:
            channel.in_turn = False
            if channel.session.out:
                channel.send(channel.session.take_out())


class RepliesAfterFailedCommit(WatchedTurn):
    def fail(self, error: BaseException) -> None:
        self.flush(list(self.channels.values()))
        super().fail(error)


class RepliesOutOfOrder(WatchedTurn):
    def release(self, pieces: int) -> None:
        self.gate._held[:pieces] = self.gate._held[:pieces][::-1]
        super().release(pieces)


class NeverSyncsWhenDue(WatchedTurn):
    """Under -fMS."""

    def tasks_of(self, store: Store) -> list[Task]:
        if store.syncs_when_due:
            return [self.maintenance.compact(store), self.backpressure(store)]
        return super().tasks_of(store)


class ForgetsToWakeTheClock(WatchedTurn):
    def arm(self) -> None:
        return


class ForgetsToArmTheTtr(WatchedTurn):
    def step(self, channel: Channel, data: bytes | None) -> None:
        super().step(channel, data)
        self.engine.wheel.cancel(channel.session)


class ForgetsToGoOn(WatchedTurn):
    """With what a client sent beyond one slice, or behind a reserve that waited."""

    def step(self, channel: Channel, data: bytes | None) -> None:
        super().step(channel, data)
        channel.session.unfinished = False

    def collect_served(self) -> None:
        for client in self.engine.served:
            self.channels[client.number].session.unfinished = False
        super().collect_served()


class ForgetsWhoWasServed(WatchedTurn):
    def collect_served(self) -> None:
        self.engine.served.clear()


class LosesRepliesWhenItStops(WatchedTurn):
    """Those that wait for a sync in the thread."""

    def finish(self) -> None:
        if self.syncs.under_way is not None:
            del self.gate._held[:1]
        super().finish()


class ForgetsWhoLeft(WatchedTurn):
    """With jobs that were reserved."""

    def leave(self, channel: Channel) -> None:
        if not channel.session.reserved:
            super().leave(channel)


class OperationsDoneBeforeCommit(WatchedTurn):
    def end(self) -> None:
        self.settle_operations()
        super().end()


class _OperationsDoneBeforeSync(OperationQueue):
    """Under -f0."""

    def settle(self, durably: bool) -> None:
        super().settle(False)


class OperationsDoneBeforeSync(WatchedTurn):
    queue = _OperationsDoneBeforeSync


class _ForgetsOperations(OperationQueue):
    """Those that have to wait, or need another slice."""

    def run_some(self) -> bool:
        return False


class ForgetsOperations(WatchedTurn):
    queue = _ForgetsOperations


class _LosesOperationsWhenItStops(OperationQueue):
    def give_up(self) -> None:
        return


class LosesOperationsWhenItStops(WatchedTurn):
    queue = _LosesOperationsWhenItStops


class _OperationsDoneAfterFailure(OperationQueue):
    def give_up(self) -> None:
        for operation in [*self._gate.operations, *self.finished]:
            operation.done()


class OperationsDoneAfterFailure(WatchedTurn):
    queue = _OperationsDoneAfterFailure


class ForgetsABodyThatHasCome(WatchedTurn):
    """Within the turn in which a client begins to wait for it."""

    def let_await(self, channel: Channel, job: Job) -> None:
        self._awaiting[channel.session.number] = channel


class _TakesBodiesThatCame(Maintenance):
    def take_bodies(self, bodies: Bodies, reading: Reading) -> None:
        self._begins()
        bodies.fetch_ended()
        for job in reading.jobs:
            body = reading.body_of(job)
            if body is not None:
                bodies.take(job, body)
                self._bodies_came()


class ForgetsABodyThatDoesNotCome(WatchedTurn):
    """Because its record has moved, or its job is gone."""

    kind = _TakesBodiesThatCame

    def let_awaiting_go_on(self) -> None:
        for number, channel in list(self._awaiting.items()):
            job = channel.session.awaited
            if job is None or job.body is not None:
                del self._awaiting[number]
                channel.goes_on()


class _TakesBodiesOfOthers(Maintenance):
    """All that a fetch brings is given to other jobs of the same fetch."""

    def take_bodies(self, bodies: Bodies, reading: Reading) -> None:
        found = reading._payloads.found
        if len(found) > 1 and len({len(payload) for payload in found.values()}) == 1:
            ids = list(found)
            found[ids[0]], found[ids[1]] = found[ids[1]], found[ids[0]]
        super().take_bodies(bodies, reading)


class TakesBodiesOfOthers(WatchedTurn):
    kind = _TakesBodiesOfOthers


class _ForgetsABodyThatFails(Maintenance):
    """It cannot be read, and a client waits for it."""

    def take_bodies(self, bodies: Bodies, reading: Reading) -> None:
        try:
            super().take_bodies(bodies, reading)
        except JournalError:
            bodies.fetch_ended()


class ForgetsABodyThatFails(WatchedTurn):
    kind = _ForgetsABodyThatFails


class _TellsOfAReservationThatEnded(AwaitingSession):
    """While its body was awaited."""

    def _awaits_body(self, job: Job, now_ns: int) -> bool:
        if self._await_for != _FOR_PEEK and job.body is not None and job.state != DELETED:
            self.stop_awaiting()
            self._reserved(job)
            return False
        return super()._awaits_body(job, now_ns)


class _TwiceServed(AwaitingSession):
    def answer(self, outcome: int, job: Job | None) -> None:
        super().answer(outcome, job)
        if outcome == RESERVED_JOB:
            super().answer(outcome, job)


class ReusesIds(Store):
    def start(self, find: Callable[[int], tuple[Job, bytes] | None]) -> int:
        super().start(find)
        return 1


class ForgetsReleases(Store):
    """Those without a delay."""

    def change(self, job: Job) -> None:
        if job.state != READY or job.tally is None or not job.tally.releases or job.tally.kicks:
            super().change(job)


class ForgetsTheOrderOfBurying(Store):
    def change(self, job: Job) -> None:
        rank = job.rank
        if job.state == BURIED:
            job.rank = 0
        super().change(job)
        job.rank = rank


class ForgetsDeletes(Store):
    def delete(self, job: Job) -> None:
        return


class ForgetsMoves(Store):
    """Tube and ttr are no part of a change."""

    def rewrite(self, job: Job, tube_name: bytes) -> None:
        self.change(job)


class KeepsMonotonicDeadlines(Store):
    def __init__(self, journal: Journal, fsync_ms: int | None, epoch: ClockOffset) -> None:
        super().__init__(journal, fsync_ms, ClockOffset(0, 0))


class CompactionDropsAKey(FaultyJournal):
    def compact_slice(self, payload_of: Callable[[int], bytes | None]) -> None:
        self._drops = True
        super().compact_slice(payload_of)
        self._drops = False

    def append(self, key: int, kind: int, payload: bytes) -> None:
        super().append(key, kind, payload)
        if getattr(self, "_drops", False) and kind == FULL and not key % 3:
            self._batch.pop()


class CompactionRemovesBeforeItSyncs(FaultyJournal):
    def _guard(self) -> SyncPoint:
        point = super()._guard()
        vars(point)["_files"] = []
        return point


class NeverCompacts(FaultyJournal):
    def wants_compaction(self) -> bool:
        super().wants_compaction()
        return False


class CompactsForEver(FaultyJournal):
    def wants_compaction(self) -> bool:
        return super().wants_compaction() or any(self.live.bytes_in(each.number) for each in self._segments.sealed[:1])


class AdmitsEverything(FaultyJournal):
    def admits(self, size: int) -> bool:
        return True


class NeverAdmitsAgain(FaultyJournal):
    _full = False

    def admits(self, size: int) -> bool:
        self._full = self._full or not super().admits(size)
        return not self._full


class KeepsItsReserve(FaultyJournal):
    """On a full disk, too."""

    def start(self) -> None:
        super().start()
        self._space._give_back = lambda size: False  # type: ignore[method-assign]  # the fault


CANARIES: dict[str, Parts] = {
    "replies before commit": Parts(turn=RepliesBeforeCommit),
    "replies before sync": Parts(turn=RepliesBeforeSync),
    "replies after a failed commit": Parts(turn=RepliesAfterFailedCommit),
    "replies out of order": Parts(turn=RepliesOutOfOrder),
    "never syncs when due": Parts(turn=NeverSyncsWhenDue),
    "forgets to wake the clock": Parts(turn=ForgetsToWakeTheClock),
    "forgets to arm the ttr": Parts(turn=ForgetsToArmTheTtr),
    "forgets to go on": Parts(turn=ForgetsToGoOn),
    "forgets who was served": Parts(turn=ForgetsWhoWasServed),
    "loses replies when it stops": Parts(turn=LosesRepliesWhenItStops),
    "forgets who left": Parts(turn=ForgetsWhoLeft),
    "operations are done before commit": Parts(turn=OperationsDoneBeforeCommit),
    "operations are done before sync": Parts(turn=OperationsDoneBeforeSync),
    "forgets operations": Parts(turn=ForgetsOperations),
    "loses operations when it stops": Parts(turn=LosesOperationsWhenItStops),
    "operations are done after a failure": Parts(turn=OperationsDoneAfterFailure),
    "forgets moves": Parts(store=ForgetsMoves),
    "forgets a body that has come": Parts(turn=ForgetsABodyThatHasCome),
    "forgets a body that does not come": Parts(turn=ForgetsABodyThatDoesNotCome),
    "takes bodies of others": Parts(turn=TakesBodiesOfOthers),
    "forgets a body that fails": Parts(turn=ForgetsABodyThatFails),
    "tells of a reservation that ended": Parts(session=_TellsOfAReservationThatEnded),
    "serves a waiter twice": Parts(session=_TwiceServed),
    "reuses ids": Parts(store=ReusesIds),
    "forgets releases": Parts(store=ForgetsReleases),
    "forgets the order of burying": Parts(store=ForgetsTheOrderOfBurying),
    "forgets deletes": Parts(store=ForgetsDeletes),
    "keeps monotonic deadlines": Parts(store=KeepsMonotonicDeadlines),
    "compaction drops a key": Parts(journal=CompactionDropsAKey),
    "compaction removes before it syncs": Parts(journal=CompactionRemovesBeforeItSyncs),
    "never compacts": Parts(journal=NeverCompacts),
    "compacts for ever": Parts(journal=CompactsForEver),
    "admits everything": Parts(journal=AdmitsEverything),
    "never admits again": Parts(journal=NeverAdmitsAgain),
    "keeps its reserve": Parts(journal=KeepsItsReserve),
}
