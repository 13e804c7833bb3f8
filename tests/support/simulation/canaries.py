"""Servers with one planted fault each, which the simulation must find: the proof that it would find a real one."""

from __future__ import annotations

from collections.abc import Callable

from geventstalk.core.engine import RESERVED_JOB
from geventstalk.core.job import BURIED, READY, Job
from geventstalk.durable.records import Epoch
from geventstalk.durable.store import Store
from geventstalk.wire.session import Session
from journal import FULL, Journal, JournalError
from journal.sqlite.log import SyncPoint
from tests.support.faulty_journal import FaultyJournal
from tests.support.simulation.server import Connection, Greenlet, SimulatedServer, Wait
from tests.support.simulation.simulation import Parts


class RepliesBeforeCommit(SimulatedServer):
    def end_turn(self) -> None:
        self.collect_served()
        touched, self.touched = self.touched, []
        self.flush(touched)
        super().end_turn()


class RepliesBeforeSync(SimulatedServer):
    """Under -f0."""

    def flush_durably(self, touched: list[Connection]) -> None:
        for connection in touched:
            connection.touched = False
            if connection.session.out:
                connection.send(connection.session.take_out())


class RepliesAfterFailedCommit(SimulatedServer):
    def fail(self, error: JournalError) -> None:
        touched = list(self.connections.values())
        self.flush(touched)
        super().fail(error)


class RepliesOutOfOrder(SimulatedServer):
    def release(self, held: list[tuple[Connection, bytes]]) -> None:
        super().release(held[::-1])


class NeverSyncsWhenDue(SimulatedServer):
    """Under -fMS."""

    def sync_when_due(self) -> Greenlet:
        yield Wait()


class ForgetsToWakeTheClock(SimulatedServer):
    def arm(self, now_ns: int) -> None:
        return


class ForgetsToArmTheTtr(SimulatedServer):
    def step(self, connection: Connection, data: bytes | None) -> None:
        super().step(connection, data)
        self.engine.wheel.cancel(connection.session)


class ForgetsToGoOn(SimulatedServer):
    """With what a client sent beyond one slice, or behind a reserve that waited."""

    def step(self, connection: Connection, data: bytes | None) -> None:
        super().step(connection, data)
        connection.session.unfinished = False

    def collect_served(self) -> None:
        for client in self.engine.served:
            self.connections[client.number].session.unfinished = False
        super().collect_served()


class ForgetsWhoWasServed(SimulatedServer):
    def collect_served(self) -> None:
        self.engine.served.clear()


class LosesRepliesWhenItStops(SimulatedServer):
    """Those that wait for a sync in the thread."""

    def finish(self) -> None:
        if self.syncing is not None:
            del self.held[:1]
        super().finish()


class _TwiceServed(Session):
    def answer(self, outcome: int, job: Job | None) -> None:
        super().answer(outcome, job)
        if outcome == RESERVED_JOB:
            super().answer(outcome, job)


class ServesAWaiterTwice(SimulatedServer):
    session_type = _TwiceServed


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


class KeepsMonotonicDeadlines(Store):
    def __init__(self, journal: Journal, fsync_ms: int | None, epoch: Epoch) -> None:
        super().__init__(journal, fsync_ms, Epoch(0, 0))


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
        point._files = []
        return point


class NeverCompacts(FaultyJournal):
    def wants_compaction(self) -> bool:
        super().wants_compaction()
        return False


class CompactsForEver(FaultyJournal):
    def wants_compaction(self) -> bool:
        return super().wants_compaction() or any(self.live.bytes_in(each.number) for each in self._sealed[:1])


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
        self._space.give_back = lambda size: False  # type: ignore[method-assign]  # the fault


CANARIES: dict[str, Parts] = {
    "replies before commit": Parts(server=RepliesBeforeCommit),
    "replies before sync": Parts(server=RepliesBeforeSync),
    "replies after a failed commit": Parts(server=RepliesAfterFailedCommit),
    "replies out of order": Parts(server=RepliesOutOfOrder),
    "never syncs when due": Parts(server=NeverSyncsWhenDue),
    "forgets to wake the clock": Parts(server=ForgetsToWakeTheClock),
    "forgets to arm the ttr": Parts(server=ForgetsToArmTheTtr),
    "forgets to go on": Parts(server=ForgetsToGoOn),
    "forgets who was served": Parts(server=ForgetsWhoWasServed),
    "loses replies when it stops": Parts(server=LosesRepliesWhenItStops),
    "serves a waiter twice": Parts(server=ServesAWaiterTwice),
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
