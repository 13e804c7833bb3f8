"""Clusters with one planted fault each, which the lives must find: the proof that they would find a real one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from geventstalk.cluster.lease import MS_NS, Lease
from geventstalk.cluster.member import READ_NS, Answer, Member
from geventstalk.cluster.wants import ReadOn, Steps, Want
from geventstalk.turn.leader import LeasedTurn
from geventstalk.turn.tasks import Flag, Task, Wait
from journal.errors import JournalError, JournalUnreachable
from journal.fence import View
from journal.log import DELETE
from tests.support.simulation.cluster.database import Backend, Row, Server, Statement
from tests.support.simulation.cluster.life import Parts
from tests.support.simulation.cluster.process import Process
from tests.support.simulation.cluster.whole import WholeProcess


class ServesOnAFreeLock(Member):
    """A failover of the database frees it, too."""

    def _is_gone(self, view: View) -> Answer:
        yield from ()
        return not view.locked


class TrustsAnyDoor(Member):
    """Also one that was never seen open: the address may be wrong."""

    def _note(self, view: View, sent_ns: int) -> None:
        super()._note(view, sent_ns)
        self._port_open = True


class TakesARefusalForAnEnd(Member):
    """Though the session is there, or was lost with all others."""

    def _is_gone(self, view: View) -> Answer:
        self._lock_seen = True
        return (yield from super()._is_gone(view._replace(locked=False)))


class _Eternal(Lease):
    def renew(self, sent_ns: int) -> None:
        self.ends_ns = 1 << 62


class NeverAsksTheLease(Member):
    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.lease = _Eternal(self.me.lease_ms)


class CountsFromTheAnswer(Member):
    def _renew(self, sent_ns: int) -> None:
        super()._renew(self._clock())


class DoesNotWait(Member):
    """For the lease of the node before."""

    def _claim(self, seen: View, silent: bool) -> Answer:
        claimed = yield from super()._claim(seen, silent)
        self._serve_ns = 0
        return claimed


class DoesNotLookAgain(Member):
    """After the claim: the node before may have had another heartbeat."""

    def _look_at_own(self) -> Generator[Want, Any, View | None]:
        yield from ()
        return self.view


class NeverClaims(Member):
    def _claim(self, seen: View, silent: bool) -> Answer:
        if seen.epoch:
            return False
        return (yield from super()._claim(seen, silent))


class DoesNotSeeTheCut(Member):
    def log_is_cut(self) -> None:
        return


class DoesNotReadToTheEnd(Member):
    def _read_log(self) -> Steps:
        while not self.epoch:
            try:
                more = yield ReadOn()
                self._caught_up = self._caught_up or not more
            except JournalUnreachable:
                pass
            yield Wait(self._log_flag, self._clock() + READ_NS)


class LeadsBehindAnything(Process):
    """It does not look whether the row that it read last is there, or the last one."""

    def _insert(self, row: Row, done: Callable[[Any, JournalError | None], None]) -> None:
        def insert(server: Server) -> Statement:
            last = server.state.last
            self.last = (last, server.state.rows[last].token if last else 0)
            return server.insert(row._replace(seq=last + 1), None, self.me.lease_ms * MS_NS)

        self.log.ask(insert, self.guarded(done))

    def _lead_log(self, epoch: int, done: Callable[..., None]) -> None:
        row = Row(0, epoch, self.life.token(), ())

        def inserted(result: str | None, error: JournalError | None) -> None:
            if result == "done":
                self.last = (self.last[0] + 1, row.token)
                self.cut = False
                done(True)
            else:
                done(None if error else False, error)

        self._insert(row, inserted)


class TrustsWhatItHasRead(Process):
    """A failover may have taken it back."""

    def _apply(self, row: Row) -> None:
        if row.seq > self.last[0]:
            super()._apply(row)

    def _read_on(self, done: Callable[..., None]) -> None:
        seq = self.last[0]

        def read(rows: list[Row] | None, error: JournalError | None) -> None:
            for row in rows or ():
                self._apply(row)
            done(None if rows is None else bool(rows), error)

        self.log.ask(lambda server: server.read(seq + 1, 4), self.guarded(read))


class SaysGoodbyeTooEarly(Process):
    """It still answers."""

    def hands_over(self) -> None:
        self.member.lease.revoke = lambda: None  # type: ignore[method-assign]  # the fault
        self.member.finish()


class WritesAnotherRowWhenItResumes(Process):
    """With what has gathered since; and takes a row that is there for its own."""

    def _resume_log(self, epoch: int, done: Callable[..., None]) -> None:
        if self.row is not None:
            self.row = self.row._replace(records=self.row.records + tuple(self.batch))
            self.batch = []
        super()._resume_log(epoch, done)

    def _insert(self, row: Row, done: Callable[[Any, JournalError | None], None]) -> None:
        super()._insert(row, lambda result, error: done("done" if result == "there" else result, error))


class ResumesWithoutAClaim(Member):
    def _claim_anew(self) -> Answer:
        yield from ()
        self._wants_epoch = False
        self._log_flag.set()
        return True


class TakesAWarningForSuccess(Server):
    """The wait for the replica was cancelled, and the statement says success."""

    def terminate(self, backend: Backend) -> None:
        if backend.commits is not None and not backend.over:
            self._show(backend, backend.commits)
        else:
            super().terminate(backend)


class RepliesWithoutTheLease(WholeProcess):
    def make_turn(self) -> LeasedTurn:
        turn = super().make_turn()
        turn._holds = lambda now_ns: True
        return turn


class RepliesBeforeTheCommitIsSafe(WholeProcess):
    def _release_replies(self) -> None:
        for way in self.shared.ways:
            way.seq = 0
        super()._release_replies()

    def _send_batch(self) -> None:
        super()._send_batch()
        self.soon(self._release_replies)


class _LooksNever(LeasedTurn):
    def keep_patience(self) -> Task:
        yield Wait(Flag())


# Bug: A turn that only misses this news looks for itself ten times a second, and no life found the fault.
class NeverSpeaksAgain(WholeProcess):
    """Its turn is not told that the lease holds again, and does not look by itself now and then."""

    turn_kind = _LooksNever

    def speaks_again(self) -> None:
        return


class AppliesNoDeletes(WholeProcess):
    """While it follows."""

    def apply(self, row: Row) -> None:
        super().apply(row._replace(records=tuple(each for each in row.records if each[1] != DELETE)))


CANARIES: dict[str, Parts] = {
    "serves on a free lock": Parts(member=ServesOnAFreeLock),
    "trusts any door": Parts(member=TrustsAnyDoor),
    "takes a refusal for an end": Parts(member=TakesARefusalForAnEnd),
    "never asks the lease": Parts(member=NeverAsksTheLease),
    "counts the lease from the answer": Parts(member=CountsFromTheAnswer),
    "does not wait for the lease before": Parts(member=DoesNotWait),
    "does not look again after the claim": Parts(member=DoesNotLookAgain),
    "never claims": Parts(member=NeverClaims),
    "does not see the cut": Parts(member=DoesNotSeeTheCut),
    "does not read to the end": Parts(member=DoesNotReadToTheEnd, process=LeadsBehindAnything),
    "trusts what it has read": Parts(process=TrustsWhatItHasRead, looks_behind=False),
    "says goodbye too early": Parts(process=SaysGoodbyeTooEarly),
    "resumes without a claim": Parts(member=ResumesWithoutAClaim, process=WritesAnotherRowWhenItResumes),
    "replies without the lease": Parts(process=RepliesWithoutTheLease),
    "replies before the commit is safe": Parts(process=RepliesBeforeTheCommitIsSafe),
    "applies no deletes": Parts(process=AppliesNoDeletes),
    "never speaks again": Parts(process=NeverSpeaksAgain),
    "takes a warning for success": Parts(server=TakesAWarningForSuccess),
}
