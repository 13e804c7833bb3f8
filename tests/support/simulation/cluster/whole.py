"""A process that is a whole server but for sockets: the real member, turn, store, engine, sessions and follower.

The log is made up: its rows go over the link of Process. Clients speak the protocol, one command at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

from geventstalk.cluster.wants import Steps
from geventstalk.core.engine import Engine
from geventstalk.core.job import BURIED, held_body
from geventstalk.core.operate import Operate
from geventstalk.durable.follow import Follower
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.turn.leader import LeasedTurn
from geventstalk.turn.replies import Channel
from geventstalk.wire.session import Service, Session
from journal.log import Log, SyncPoint
from journal.log import Row as JournalRow
from tests.support.check import check
from tests.support.simulation.cluster.database import Row
from tests.support.simulation.cluster.life import Fact
from tests.support.simulation.cluster.process import Process, Runner
from tests.support.simulation.cluster.world import MS_NS, require

WALL_NS = 1_700_000_000 * 10**9
CLIENTS = 3
TTR_S = 1000
SEGMENT = 1


class Way(SyncPoint):
    """Ends when the row with this number is safe."""

    def __init__(self, log: SimulatedLog, seq: int) -> None:
        self.seq = seq
        self._log = log
        self.over: Callable[[], None] = lambda: None

    def begin(self, over: Callable[[], None]) -> bool:
        self.over = over
        self._log.ways.append(self)
        self._log.process.soon(self._log.end_ways)
        return True

    def run(self) -> None:
        raise AssertionError("no thread may wait for a networked log")


class SimulatedLog(Log):
    """The part of a process's log that a store needs. The log is never compacted, and always takes puts."""

    def __init__(self, process: WholeProcess) -> None:
        self.safe_after_commit = False  # of an instance: the compiled class has a place for it, which hides the class's
        self.process = process
        self.high_water = 0
        self.appended = 0
        self.ways: deque[Way] = deque()
        self._batch: list[tuple[int, int, bytes]] = []
        self._committed = 0  # the number of the row that has, or will have, what was committed last
        self._covered = 0

    def batches(self) -> Iterator[tuple[int, list[JournalRow]]]:
        return iter(())

    def start(self) -> None:
        return

    @property
    def current(self) -> int:
        return SEGMENT

    @property
    def dirty(self) -> bool:
        return bool(self._batch)

    def admits(self, size: int) -> bool:
        return True

    def append(self, key: int, kind: int, payload: bytes) -> None:
        self._batch.append((key, kind, payload))
        self.high_water = max(self.high_water, key)
        self.appended += 1

    @property
    def takes_parts(self) -> bool:
        return True

    def commit(self) -> None:
        process = self.process
        process.batch += self._batch
        self._batch = []
        self._committed = process.last[0] + 1 + (process.row is not None)
        process._send_batch()

    def sync_point(self) -> SyncPoint | None:
        if self._committed == self._covered:
            return None
        self._covered = self._committed
        return Way(self, self._committed)

    def end_ways(self) -> None:
        while self.ways and self.ways[0].seq <= self.process.last[0]:
            self.ways.popleft().over()


class Talk(Channel):
    """A client and its connection. What it hears counts; what it asked for and did not hear may have happened."""

    def __init__(self, process: WholeProcess) -> None:
        super().__init__(Session(process.service))
        self.process = process
        self.life = process.life
        self.asked: tuple[str, int, bytes] | None = None
        self.held_jobs: list[int] = []
        self.buried: list[int] = []
        self.on = False  # whether it was told to go on since its last step

    def talk(self) -> None:
        """Asks for something."""
        if self.asked is not None:
            return
        draw = self.life.world.draw
        what = draw.choice(("put", "put", "reserve", "reserve", "delete", "bury", "release", "kick-job"))
        id = 0
        if what in ("delete", "bury", "release"):
            if not self.held_jobs:
                return
            id = self.held_jobs.pop(draw.randrange(len(self.held_jobs)))
        elif what == "kick-job":
            if not self.buried:
                return
            id = self.buried.pop()
        body = b""
        if what == "put":
            body = b"%d" % self.life.next_id()
            self.life.bodies.add(body)
        line = {
            "put": b"put 0 0 %d %d\r\n%b" % (TTR_S, len(body), body),
            "reserve": b"reserve-with-timeout 0",
            "release": b"release %d 0 0" % id,
            "bury": b"bury %d 0" % id,
        }.get(what, b"%b %d" % (what.encode(), id))
        if id:
            fact = self.life.facts.setdefault(id, Fact())
            fact.open += 1
            if what == "delete":
                fact.deleted = None
        self.asked = (what, id, body)
        self._step(line + b"\r\n")

    def _step(self, data: bytes) -> None:
        self.on = False
        self.process.turn.step(self, data)

    def goes_on(self) -> None:
        self.on = True
        self.process.soon(self._go_on)

    def _go_on(self) -> None:
        if self.on and self.session.unfinished and not self.session.out:
            self._step(b"")

    def send(self, data: bytes) -> None:
        """The client hears a reply."""
        asked, self.asked = self.asked, None
        require(asked is not None, "a reply to nothing:", data)
        assert asked is not None
        what, id, body = asked
        words = data.split()
        if words[0] == b"OUT_OF_MEMORY":
            require(what == "put", "a refusal of a", what)
            return  # it promises nothing, and may leave without a lease
        life = self.life
        life.leaves(self.process)
        if what == "put":
            require(words[0] == b"INSERTED", "a put got", data)
            id = int(words[1])
            require(id not in life.puts, "an id is used again:", id)
            life.facts.setdefault(id, Fact()).body = body
            life.puts.add(id)
        elif what == "reserve":
            if words[0] != b"TIMED_OUT":
                self._reserved(int(words[1]), data)
        else:
            expected = {"delete": b"DELETED", "bury": b"BURIED", "release": b"RELEASED", "kick-job": b"KICKED"}[what]
            if what == "kick-job" and words[0] == b"NOT_FOUND":
                return
            require(words[0] == expected, what, id, "got", data)
            if what == "bury":
                self.buried.append(id)
            fact = life.facts[id]
            fact.open -= 1
            fact.buried = what == "bury"
            if what == "delete":
                fact.deleted = True

    def _reserved(self, id: int, data: bytes) -> None:
        body = data.split(b"\r\n")[1]
        require(body in self.life.bodies, "a job that no client has put:", data)
        fact = self.life.facts.get(id)
        if fact is not None:
            require(fact.deleted is not True, "job", id, "is back after it was deleted")
            require(fact.body in (b"", body), "the body of job", id, "is another one")
        self.held_jobs.append(id)


class WholeProcess(Process):
    """As Process, with the real server's parts in place of the simple queue."""

    turn_kind: type[LeasedTurn] = LeasedTurn

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.engine = Operate(self.clock())
        self.service = Service(self.engine, 65535, dict)
        self.turn = self.make_turn()
        self.shared = SimulatedLog(self)
        self.store = Store(self.shared, 0, ClockOffset(self.wall_clock(), self.clock()))
        self.follower = Follower(self.engine, self.store)
        self.talks: list[Talk] = []

    def make_turn(self) -> LeasedTurn:
        wait_ns = 3 * self.me.lease_ms * MS_NS
        lease = self.member.lease
        clocks = (self.clock, self.wall_clock)
        return self.turn_kind(self.engine, *clocks, self._begins, _fails, self.service, lease.holds, wait_ns)

    def wall_clock(self) -> int:
        return WALL_NS + self.world.now_ns

    def start(self) -> None:
        self.follower.load(self.clock)
        self._drive(self.turn.tasks())
        super().start()

    def _drive(self, tasks: list[Any]) -> None:
        for task in tasks:
            Runner(self, cast("Steps", task)).step()

    def _begins(self) -> None:
        self.soon(self._end_turn)

    def _end_turn(self) -> None:
        self.turn.end()

    # --- the log

    def apply(self, row: Row) -> None:
        self.store.follow_wall_clock(self.wall_clock, self.clock)
        rows: list[JournalRow] = [(0, key, kind, 0, payload) for key, kind, payload in row.records]
        self.follower.apply(SEGMENT, rows, self.clock())
        for key, _, _ in row.records:
            self.shared.high_water = max(self.shared.high_water, key)

    def _release_replies(self) -> None:
        self.shared.end_ways()

    def _finish(self) -> None:
        """Others than hands_over() need not look."""

    def hands_over(self) -> None:
        super().hands_over()
        self._finish_in_time()

    def _finish_in_time(self) -> None:
        """Looks again and again whether all is committed and sent, as a server that stops does."""
        turn = self.turn
        busy = self.row is not None or self.batch or self.shared.dirty or turn.gate.pieces or self.shared.ways
        if not busy and not any(talk.session.out for talk in self.talks):
            self.member.finish()
        elif not self.member.has_ended():
            self.world.after(MS_NS, self.guarded(self._finish_in_time))

    # --- clients

    def act(self) -> None:
        if not self.alive or self.frozen or not self.member.serves or self.finishing:
            return
        draw = self.world.draw
        if len(self.talks) < CLIENTS:
            talk = Talk(self)
            self.talks.append(talk)
            self.turn.join(talk)
        draw.choice(self.talks).talk()

    def leads(self, epoch: int) -> None:
        super().leads(epoch)
        self.turn.write_to(self.store)
        self._drive(self.turn.tasks_of(self.store))

    def speaks_again(self) -> None:
        super().speaks_again()
        self.turn.renewed.set()

    def steps_down(self, why: str) -> None:
        self.turn.step_down()
        super().steps_down(why)

    def judge(self) -> None:
        who = self.me.incarnation
        check(self.engine)
        jobs = self.engine.jobs
        for id, fact in self.life.facts.items():
            job = jobs.get(id)
            if fact.deleted is True:
                require(job is None, who, "leads with the deleted job", id)
            elif fact.deleted is False and fact.body:
                require(job is not None, who, "leads without the acknowledged job", id)
                assert job is not None
                require(job.body == fact.body + b"\r\n", who, "leads with another body of job", id)
                if not fact.open:
                    require((job.state == BURIED) == fact.buried, who, "leads with job", id, "in another state")
        if self.row is None and not self.batch and not self.shared.dirty:
            require(_told(self.engine) == _told(self._replayed()), who, "leads with other jobs than the log has")

    def _replayed(self) -> Engine:
        """Returns what a new node makes of the log."""
        engine = Operate(self.clock())
        store = Store(SimulatedLog(self), 0, ClockOffset(self.wall_clock(), self.clock()))
        follower = Follower(engine, store)
        follower.load(self.clock)
        for row in self.rows():
            rows: list[JournalRow] = [(0, key, kind, 0, payload) for key, kind, payload in row.records]
            follower.apply(SEGMENT, rows, self.clock())
        return engine


def _told(engine: Engine) -> list[tuple[int, bytes, bool]]:
    return sorted((job.id, held_body(job), job.state == BURIED) for job in engine.jobs)


def _fails(error: BaseException) -> None:
    raise error
