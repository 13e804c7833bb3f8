"""One process of a node: the real member, a made-up log over a link, and a queue so simple that it can be judged.

The queue is what matters of a server here: puts and deletes are records, reservations are memory alone. Replies leave
in order, behind the commit that covers them, and while the lease holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from geventstalk.cluster.wants import SILENT, Ask, LeadLog, MemberOwner, Probe, ReadOn, ResumeLog, Steps, Want
from geventstalk.core.timerwheel import NEVER
from geventstalk.turn.tasks import Flag, Wait
from journal.errors import JournalError, JournalForked, JournalUnreachable
from journal.fence import Identity, Patience, View
from tests.support.simulation.cluster.database import Leader, Row, Server, Statement
from tests.support.simulation.cluster.links import Link
from tests.support.simulation.cluster.world import MS_NS, require

if TYPE_CHECKING:
    from tests.support.simulation.cluster.life import Life

READ_ROWS = 4
BATCH = 3


class Runner:
    """Drives one task of the member."""

    def __init__(self, process: Process, steps: Steps) -> None:
        self.process = process
        self.steps = steps
        self._waits = 0  # which wait, so that an old timer wakes no other one

    def step(self, answer: Any = None, error: JournalError | None = None) -> None:
        try:
            want: Want = self.steps.send(answer) if error is None else self.steps.throw(error)
        except StopIteration:
            return
        if isinstance(want, Wait):
            self._wait(want)
        else:
            self.process.do(want, self.process.guarded(self.step))

    def _wait(self, wait: Wait) -> None:
        self._waits += 1
        wake = partial(self._wake, self._waits, wait.flag)
        if wait.flag is not None:
            wait.flag.raised = lambda: self.process.soon(wake)
            if wait.flag.is_set:
                self.process.soon(wake)
        if wait.at_ns != NEVER:
            self.process.at_local(wait.at_ns, wake)

    def _wake(self, number: int, flag: Flag | None) -> None:
        if number == self._waits:
            self._waits += 1
            if flag is not None:
                flag.raised = None
            self.step()


class Process(MemberOwner):
    """From its start to its death. `node` and `host` outlive it, `incarnation` does not."""

    def __init__(self, life: Life, node: str, address: str, incarnation: str, offset_ns: int, rate: float) -> None:
        self.life = life
        self.world = life.world
        self.node = node
        self.rate = rate
        self.offset_ns = offset_ns
        self.alive = True
        self.frozen = False
        self._missed: deque[Callable[[], None]] = deque()
        lease_ms = self.world.scenario.lease_ms
        self.me = Identity(node, address, incarnation, lease_ms)
        self.member = life.parts.member(self.me, self.clock, self, lambda: self.last[0])
        deadline_ns = lease_ms * MS_NS
        self.fence = Link(self.world, node, life.servers, deadline_ns, True)
        self.log = Link(self.world, node, life.servers, 2 * deadline_ns, self.world.scenario.log_heeds_timeline)
        self.log.cut = self.guarded(self._log_is_cut)
        self._attempts = 0  # of heartbeats
        self._patience = Patience()
        self._told = [0, 0]  # the mark of what it tells, and when it did last
        # the log
        self.last = (0, 0)  # seq and token of the last row that was read, or surely written
        self.row: Row | None = None  # the one that is on its way
        self.cut = True
        self.batch: list[Any] = []  # records that gather meanwhile
        # the queue
        self.jobs: dict[int, bool] = {}  # whether a client holds it
        self.gate: deque[tuple[int, str, int]] = deque()  # what waits: for which seq, what it is, of which job
        self.finishing = False
        self.stops = False  # the process is to end for good

    def start(self) -> None:
        for steps in self.member.tasks():
            Runner(self, steps).step()

    # --- a processor that may stand still, and a clock of its own

    def clock(self) -> int:
        return self.offset_ns + int(self.world.now_ns * self.rate)

    def guarded(self, what: Callable[..., None]) -> Callable[..., None]:
        """Something that happens to this process, unless it is dead by then, and later while it is frozen."""

        def happens(*words: Any) -> None:
            if not self.alive:
                return
            if self.frozen:
                self._missed.append(partial(what, *words))
            else:
                what(*words)

        return happens

    def soon(self, what: Callable[[], None]) -> None:
        self.world.after(0, self.guarded(what))

    def at_local(self, at_ns: int, what: Callable[[], None]) -> None:
        self.world.at(int((at_ns - self.offset_ns) / self.rate) + 1, self.guarded(what))

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        missed, self._missed = self._missed, deque()
        for what in missed:
            self.soon(what)

    def die(self) -> None:
        self.alive = False
        self.fence.close()
        self.log.close()

    # --- what the member wants

    def do(self, want: Want, done: Callable[..., None]) -> None:
        match want:
            case Probe(address, incarnation):
                self._probe(address, incarnation, done)
            case ReadOn():
                self._read_on(done)
            case LeadLog(epoch):
                self._lead_log(epoch, done)
            case ResumeLog(epoch):
                self._resume_log(epoch, done)
            case Ask("confirm"):
                self._confirm(done)
            case Ask("tell"):
                self._ask_patiently(want, partial(self._has_told, done))
            case Ask("look"):
                self._ask_patiently(want, done)
            case _:
                assert isinstance(want, Ask)
                self.soon(lambda: self.life.stumble(self))
                self.fence.ask(partial(self._statement, want), done)

    def _statement(self, want: Ask, server: Server) -> Statement:
        limit_ns = self.me.lease_ms * MS_NS // 4
        me, session = self.me, self.fence.session
        match want:
            case Ask("claim", (seen, owed_ms)):
                mine = Leader(seen.epoch + 1, me.node, me.address, me.incarnation, me.lease_ms, owed_ms)
                return server.claim(seen, mine, limit_ns, session)
            case Ask("beat", (epoch,)):
                self._attempts += 1
                return server.beat(epoch, me.incarnation, self._attempts, False, limit_ns, session)
            case Ask("serve", (epoch,)):
                self._attempts += 1
                return server.beat(epoch, me.incarnation, self._attempts, True, limit_ns, session)
            case Ask("release", (epoch, successor)):
                return server.release(epoch, me.incarnation, successor, limit_ns)
            case Ask("withdraw_transfer", (node,)):
                return server.withdraw_transfer(node)
            case Ask("tell", (facts,)):
                return server.tell(facts, *self._told)
            case Ask("members"):
                return server.members()
            case _:
                assert want.method == "look"
                return server.look()

    def _ask_patiently(self, want: Ask, done: Callable[..., None]) -> None:
        begun_ns, lease_s = self.world.now_ns, self.me.lease_ms / 1000

        def answered(answer: Any, error: JournalError | None = None) -> None:
            self._patience.took((self.world.now_ns - begun_ns) / 1e9)
            done(answer, error)

        deadline_ns = int(self._patience.between(lease_s, 3 * lease_s) * 1e9)
        self.fence.ask(partial(self._statement, want), answered, deadline_ns)

    def _has_told(self, done: Callable[..., None], answer: Any, error: JournalError | None) -> None:
        if answer is not None:
            *self._told, answer = answer
        done(answer, error)

    def _confirm(self, done: Callable[..., None]) -> None:
        def confirmed(safe: bool | None, error: JournalError | None) -> None:
            done(None, error if safe is None else None if safe else JournalUnreachable("an earlier commit waits"))

        self.soon(lambda: self.life.stumble(self))
        limit_ns = self.me.lease_ms * MS_NS // 4
        self.fence.ask(lambda server: server.confirm(self.me.incarnation, limit_ns), confirmed)

    def _probe(self, address: str, incarnation: str, done: Callable[..., None]) -> None:
        node = address.partition(":")[0]
        found = self.life.probe(address, incarnation) if self.world.reaches(self.node, node) else SILENT
        after_ns = self.me.lease_ms * MS_NS // 10 if found == SILENT else 2 * self.world.hop_ns()
        self.world.after(after_ns, partial(done, found))

    # --- the log

    def _read_on(self, done: Callable[..., None]) -> None:
        """The row that was read last comes again: it has to be the same."""
        seq, token = self.last

        def read(rows: list[Row] | None, error: JournalError | None) -> None:
            if rows is None:
                done(None, error)
                return
            if seq and not (rows and rows[0].seq == seq and rows[0].token == token):
                done(None, JournalForked(f"row {seq} is not the one that was read"))
                return
            new = rows[1:] if seq else rows
            for row in new:
                self._apply(row)
            done(bool(new))

        self.log.ask(lambda server: server.read(max(seq, 1), READ_ROWS), self.guarded(read))

    def _apply(self, row: Row) -> None:
        require(row.seq == self.last[0] + 1, self.me.incarnation, "reads row", row.seq, "behind", self.last[0])
        self.last = (row.seq, row.token)
        self.apply(row)

    def apply(self, row: Row) -> None:
        """Another node has written it."""
        for kind, id in row.records:
            if kind == "put":
                self.jobs[id] = False
            elif kind == "delete":
                require(id in self.jobs, "job", id, "is deleted in the log, and was not there")
                del self.jobs[id]

    def _insert(self, row: Row, done: Callable[[Any, JournalError | None], None]) -> None:
        limit_ns = self.me.lease_ms * MS_NS
        behind = self.last if self.life.parts.looks_behind else None
        self.log.ask(lambda server: server.insert(row, behind, limit_ns), self.guarded(done))

    def _lead_log(self, epoch: int, done: Callable[..., None]) -> None:
        def inserted(row: Row, result: str | None, error: JournalError | None) -> None:
            if result == "done":
                self.last = (row.seq, row.token)
                self.cut = False
                done(True)
            elif result == "fenced":
                done(False)
            elif result in ("forked", "there"):
                done(None, JournalForked(f"row {row.seq}: {result}"))
            else:
                done(None, error)

        def looked(rows: list[Row] | None, error: JournalError | None) -> None:
            """The row of an attempt whose answer was lost may be there, and may be taken back: one more goes behind."""
            if rows is None:
                done(None, error)
                return
            for row in rows:
                if row.epoch == epoch and not row.records:
                    self.last = (row.seq, row.token)
            row = Row(self.last[0] + 1, epoch, self.life.token(), ())
            self._insert(row, partial(inserted, row))

        self.log.ask(lambda server: server.read(self.last[0] + 1, READ_ROWS), self.guarded(looked))

    def _resume_log(self, epoch: int, done: Callable[..., None]) -> None:
        """Looks for the row that was on its way. Where it is not, it is written again."""
        row = self.row

        def looked(rows: list[Row] | str | None, error: JournalError | None) -> None:
            if rows == "fenced":
                self.log.drop()  # a server that does not know the epoch may be the wrong one
                done(False)
                return
            if rows is None:
                done(None, error)
                return
            assert not isinstance(rows, str)
            seq, token = self.last
            if not (rows and (rows[0].seq, rows[0].token) == (seq, token)):
                done(None, JournalForked(f"row {seq} is lost"))
            elif row is not None and len(rows) > 1:
                if rows[1].token == row.token:
                    resumed("done", None)
                else:
                    done(None, JournalForked(f"row {row.seq} is another's"))
            elif row is not None:
                self.row = row._replace(epoch=epoch)
                self._insert(self.row, resumed)
            else:
                resumed("done", None)

        def resumed(result: str | None, error: JournalError | None) -> None:
            if result == "done":
                self.cut = False
                if row is not None:
                    self._committed()
                done(True)
                self._send_batch()
            elif result == "fenced":
                done(False)
            elif result is None:
                done(None, error)
            else:
                done(None, JournalForked(f"the row on its way: {result}"))

        self.log.ask(lambda server: server.read_under(epoch, self.last[0], 2), self.guarded(looked))

    def _send_batch(self) -> None:
        if self.cut or self.row is not None or not self.batch:
            return
        records, self.batch = tuple(self.batch), []
        row = self.row = Row(self.last[0] + 1, self.member.epoch, self.life.token(), records)

        def inserted(result: str | None, error: JournalError | None) -> None:
            if result == "done":
                self._committed()
                self._send_batch()
            else:
                self.cut = True
                if result == "fenced":
                    self.member.log_is_fenced()
                else:
                    self.member.log_is_cut()

        self._insert(row, inserted)

    def _committed(self) -> None:
        assert self.row is not None
        self.last = (self.row.seq, self.row.token)
        self.row = None
        self._release_replies()
        self._finish()

    def _log_is_cut(self) -> None:
        if not self.cut:
            self.cut = True
            self.member.log_is_cut()

    # --- the queue, and its clients

    def act(self) -> None:
        """A client asks for something. One that asks a frozen or a dead process, or a standby, gets no answer."""
        draw = self.world.draw
        if not self.alive or self.frozen or not self.member.serves or self.finishing:
            return
        free = [id for id, held in self.jobs.items() if not held]
        held = [id for id, held in self.jobs.items() if held]
        what = draw.choice(("put", "reserve", "reserve", "delete"))
        seq = 0
        if what == "put":
            id = self.life.next_id()
            self.jobs[id] = False
        elif what == "reserve" and free:
            id = draw.choice(free)
            self.jobs[id] = True
        elif what == "delete" and held:
            id = draw.choice(held)
            del self.jobs[id]
            self.life.deletes.add(id)
        else:
            return
        if what != "reserve":
            self.batch.append((what, id))
            seq = self.last[0] + 1 + (self.row is not None)
            self._send_batch()
        self.gate.append((seq, what, id))
        self._release_replies()

    def _release_replies(self) -> None:
        while self.gate and self.gate[0][0] <= self.last[0] and self.member.lease.holds(self.clock()):
            _, what, id = self.gate.popleft()
            self.life.replies(self, what, id)

    def _finish(self) -> None:
        """All is committed and sent, as far as it may be sent."""
        if self.finishing and self.row is None and not self.batch:
            self._release_replies()
            if not self.gate:
                self.member.finish()

    def judge(self) -> None:
        """Checks a process that serves. Raises Violation."""
        life, who = self.life, self.me.incarnation
        lost = life.puts - life.deletes - self.jobs.keys()
        require(not lost, who, "leads without the acknowledged jobs", sorted(lost))
        back = life.gone & self.jobs.keys()
        require(not back, who, "leads with the deleted jobs", sorted(back))
        jobs: set[int] = set()
        for row in self.rows():
            for kind, id in row.records:
                if kind == "put":
                    jobs.add(id)
                elif kind == "delete":
                    jobs.discard(id)
        if self.row is None and not self.batch:
            require(jobs == self.jobs.keys(), who, "leads with other jobs than the log has")

    def rows(self) -> list[Row]:
        """The log, up to what this process has read or written."""
        rows = self.life.primary.state.rows
        seq, token = self.last
        there = seq in rows and rows[seq].token == token
        require(there, self.me.incarnation, "leads behind a row that is not in the log")
        return [rows[seq] for seq in range(1, seq + 1)]

    # --- what the member tells

    def follows(self, view: View) -> None:
        self.world.note(f"{self.me.incarnation} follows {view.incarnation or 'no node'}, epoch {view.epoch}")

    def leads(self, epoch: int) -> None:
        self.world.note(f"{self.me.incarnation} leads, epoch {epoch}")
        self.life.begins_to_lead(self)

    def falls_silent(self) -> None:
        self.world.note(f"{self.me.incarnation} falls silent")

    def speaks_again(self) -> None:
        self.world.note(f"{self.me.incarnation} speaks again")
        self.soon(self._release_replies)
        self.soon(self._finish)

    def hands_over(self) -> None:
        self.world.note(f"{self.me.incarnation} hands over")
        self.finishing = True
        self.soon(self._finish)

    def steps_down(self, why: str) -> None:
        self.world.note(f"{self.me.incarnation} steps down: {why}")
        self.soon(lambda: self.life.ends(self))

    def tells(self, text: str) -> None:
        self.world.note(f"{self.me.incarnation}: {text}")
