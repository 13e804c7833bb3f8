"""A made-up PostgreSQL with a synchronous replica: row locks, commits that hang, and states that a failover takes back.

A statement is a generator: it yields what it waits for (a lock, a stop on its way, the replica). What is committed here
but not on the replica is seen by no session yet, or, once its backend was ended or the server has crashed, by all.
Left out: tables of segments, DDL, reads that need several statements.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from journal.fence import MemberFacts, Told, View
from tests.support.simulation.cluster.world import World

LEADER, BEAT = "leader", "beat"


class Row(NamedTuple):
    """A row of the log. `token` is unlike that of any other row that was ever tried."""

    seq: int
    epoch: int
    token: int
    records: tuple[Any, ...]


@dataclass(frozen=True)
class Leader:
    epoch: int = 0
    node: str = ""
    address: str = ""
    incarnation: str = ""
    lease_ms: int = 0
    owed_ms: int = 0
    released: bool = False
    successor: str = ""


@dataclass
class State:
    """The content of the tables."""

    leader: Leader = Leader()
    beat: tuple[int, int] = (0, 0)
    transfer_to: str = ""
    members: dict[str, tuple[MemberFacts, int, int]] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    last: int = 0

    def apply(self, change: Change) -> None:
        for name, value in change.items():
            if name == "row":
                self.rows[value.seq] = value
                self.last = max(self.last, value.seq)
            elif name == "member":
                self.members[value[0].node] = value
            else:
                setattr(self, name, value)


Change = dict[str, Any]


class Lock(NamedTuple):
    name: str
    shared: bool
    limit_ns: int


class Linger(NamedTuple):
    pass


class Commit(NamedTuple):
    change: Change
    safely: bool


class LockTimeout(Exception):
    pass


class Ended(Exception):
    """The statement has failed, or its backend was ended: the client cannot know what came of it."""


Statement = Generator[Lock | Linger | Commit, None, Any]


@dataclass(eq=False)
class Backend:
    """One statement under way. `reply` is called with its result, or with None and False."""

    statement: Statement
    reply: Callable[[Any, bool], None]
    locks: list[tuple[str, bool]] = field(default_factory=list)
    waits_for: Lock | None = None
    waits_since: int = 0
    commits: Commit | None = None  # waits for the replica
    end_of_wal: int = 0
    over: bool = False


# Bug: A statement that lingered in the server went on after the server had died: an acknowledged delete came back, in
# the simulation itself (seed 218979386).
class Server:
    """One PostgreSQL."""

    def __init__(self, world: World, name: str, timeline: int, wal: list[Change], replicates: bool) -> None:
        self.world = world
        self.name = name
        self.timeline = timeline
        self.wal = wal
        self.state = State()
        for change in wal:
            self.state.apply(change)
        self.up = True
        self.failed = False  # it never comes back
        self.replicates = replicates
        self.replica_there = True
        self.replicated = len(wal)
        self.backends: list[Backend] = []
        self.sessions: dict[object, str] = {}  # the incarnations whose locks these sessions hold
        self.generation = 0  # another one after each crash

    def run(self, statement: Statement, reply: Callable[[Any, bool], None]) -> None:
        if self.up:
            backend = Backend(statement, reply)
            self.backends.append(backend)
            self._step(backend)

    def leave(self, session: object) -> None:
        """The session is over, and its lock is free."""
        self.sessions.pop(session, None)

    # --- on its way

    def _step(self, backend: Backend, error: Exception | None = None) -> None:
        if backend.over or not self.up:
            return  # a server that is gone does nothing more
        try:
            want = next(backend.statement) if error is None else backend.statement.throw(error)
        except StopIteration as end:
            self._finish(backend, end.value, True)
        except Ended:
            self._finish(backend, None, False)
        else:
            if isinstance(want, Lock):
                backend.waits_for, backend.waits_since = want, self.world.now_ns
                generation = self.generation
                self.world.after(want.limit_ns, lambda: self._time_out(backend, want, generation))
                self._grant()
            elif isinstance(want, Linger):
                self.world.after(self.world.lingers_ns(), lambda: self._step(backend))
            else:
                self._commit(backend, want)

    def _time_out(self, backend: Backend, lock: Lock, generation: int) -> None:
        if backend.waits_for is lock and generation == self.generation and not backend.over:
            backend.waits_for = None
            self._step(backend, LockTimeout())

    def holders(self, name: str, but: Backend | None = None) -> list[Backend]:
        return [each for each in self.backends if each is not but and any(lock[0] == name for lock in each.locks)]

    def _grant(self) -> None:
        """Gives locks to those that wait, first come first served."""
        for backend in sorted(self.backends, key=lambda each: each.waits_since):
            want = backend.waits_for
            if want is None or backend.over:
                continue
            others = [
                lock
                for each in self.backends
                if each is not backend
                for lock in each.locks
                if lock[0] == want.name and not (lock[1] and want.shared)
            ]
            queue = [
                each
                for each in self.backends
                if each is not backend and each.waits_for is not None and each.waits_for.name == want.name
                if each.waits_since < backend.waits_since and not (each.waits_for.shared and want.shared)
            ]
            if not others and not queue:
                backend.waits_for = None
                backend.locks.append((want.name, want.shared))
                self.world.after(0, partial(self._step, backend))

    def _commit(self, backend: Backend, commit: Commit) -> None:
        self.wal.append(commit.change)
        backend.end_of_wal = len(self.wal)
        if commit.safely and self.replicates:
            backend.commits = commit
            end, generation = len(self.wal), self.generation
            self.world.after(self.world.draw.randrange(100_000, 800_000), lambda: self.replicate(end, generation))
        else:
            self._show(backend, commit)

    def _show(self, backend: Backend, commit: Commit) -> None:
        backend.commits = None
        self.state.apply(commit.change)
        self._step(backend)

    def replicate(self, end: int, generation: int) -> None:
        """The replica has the log up to there, if it is there."""
        if not self.replica_there or generation != self.generation or not self.up:
            return
        self.replicated = max(self.replicated, end)
        for backend in list(self.backends):
            if backend.commits is not None and backend.end_of_wal <= self.replicated:
                self._show(backend, backend.commits)

    def _finish(self, backend: Backend, result: Any, done: bool) -> None:
        backend.over = True
        self.backends.remove(backend)
        self._grant()
        backend.reply(result, done)

    # --- faults

    def terminate(self, backend: Backend) -> None:
        """Ends a backend. One that waits for the replica has committed: from now on all see what may yet be lost."""
        if backend.over:
            return
        if backend.commits is not None:
            self.state.apply(backend.commits.change)
            backend.commits = None
        self._finish(backend, None, False)

    def crash(self) -> None:
        """All backends are gone. What they had committed is there for all to see, replicated or not."""
        for backend in list(self.backends):
            backend.over = True
        self.backends.clear()
        self.sessions.clear()
        self.generation += 1
        self.state = State()
        for change in self.wal:
            self.state.apply(change)

    def find_replica(self) -> None:
        self.replica_there = True
        self.replicate(len(self.wal), self.generation)

    # --- what the statements see

    def view(self) -> View:
        leader, state = self.state.leader, self.state
        return View(
            leader.epoch,
            leader.node,
            leader.address,
            leader.incarnation,
            leader.lease_ms,
            leader.owed_ms,
            state.beat,
            leader.released,
            leader.successor,
            state.transfer_to,
            leader.incarnation in self.sessions.values(),
            self.timeline,
            1,
        )

    # --- statements

    def look(self) -> Statement:
        yield Linger()
        return self.view()

    def claim(self, seen: View, mine: Leader, limit_ns: int, session: object) -> Statement:
        """Ends a writer that hangs with the old epoch, but none that waits for the replica."""
        yield Linger()
        for attempt in (1, 2):
            try:
                yield Lock(LEADER, False, limit_ns)
                break
            except LockTimeout:
                stuck = [each for each in self.holders(LEADER) if each.commits is None]
                if not stuck or attempt == 2:
                    raise Ended from None
                for backend in stuck:
                    self.terminate(backend)
        yield Linger()
        leader = self.state.leader
        if (leader.epoch, leader.incarnation) != (seen.epoch, seen.incarnation):
            return False
        yield Commit({"leader": mine}, True)
        self.sessions[session] = mine.incarnation
        return True

    def beat(
        self, epoch: int, incarnation: str, number: int, serves: bool, limit_ns: int, session: object
    ) -> Statement:
        yield Linger()
        try:
            yield Lock(LEADER, not serves, limit_ns)
            yield Lock(BEAT, False, limit_ns)
        except LockTimeout:
            raise Ended from None
        yield Linger()
        leader = self.state.leader
        if (leader.epoch, leader.incarnation) != (epoch, incarnation):
            return None
        change: Change = {"beat": (epoch, number)}
        if serves:
            change["leader"] = replace(leader, owed_ms=0)
        yield Commit(change, True)
        self.sessions[session] = incarnation
        return self.view()

    def confirm(self, incarnation: str, limit_ns: int) -> Statement:
        """Returns whether a commit is safe; at once no while an earlier one of that process waits."""
        yield Linger()
        name = f"commits of {incarnation}"
        if self.holders(name):
            return False
        yield Lock(name, False, limit_ns)
        yield Linger()
        yield Commit({}, True)
        return True

    def release(self, epoch: int, incarnation: str, successor: str, limit_ns: int) -> Statement:
        yield Linger()
        try:
            yield Lock(LEADER, False, limit_ns)
        except LockTimeout:
            raise Ended from None
        leader = self.state.leader
        if (leader.epoch, leader.incarnation) != (epoch, incarnation):
            return False
        yield Commit({"leader": replace(leader, released=True, successor=successor), "transfer_to": ""}, True)
        return True

    def request_transfer(self, node: str) -> Statement:
        yield Commit({"transfer_to": node}, True)
        return None

    def withdraw_transfer(self, node: str) -> Statement:
        yield Linger()
        if self.state.transfer_to == node:
            yield Commit({"transfer_to": ""}, True)
        return None

    def tell(self, facts: MemberFacts, mark: int, since_ns: int) -> Statement:
        """`mark` is of the process, 0 when it tells first; `since_ns` is when it told last."""
        before, now_ns = self.state.members.get(facts.node), self.world.now_ns
        mine = mark or now_ns
        yield Commit({"member": (facts, now_ns, mine)}, False)
        if not mark or before is None or before[2] == mark or before[1] <= since_ns:
            return mine, now_ns, Told(now_ns / 1e9)
        return mine, now_ns, Told(now_ns / 1e9, before[0].address, before[2] < mark)

    def members(self) -> Statement:
        yield Linger()
        now_ns = self.world.now_ns
        return [facts._replace(age_s=(now_ns - told) / 1e9) for facts, told, _ in self.state.members.values()]

    def read(self, first: int, most: int) -> Statement:
        yield Linger()
        rows = self.state.rows
        return [rows[seq] for seq in range(first, first + most) if seq in rows]

    def read_under(self, epoch: int, first: int, most: int) -> Statement:
        """As read(), but "fenced" where the epoch is another one.

        The claim of this epoch is on the replica. It waited for the rows of earlier epochs: what is seen beside it is
        there, too. What is seen without it may be taken back.
        """
        yield Linger()
        if self.state.leader.epoch != epoch:
            return "fenced"
        rows = self.state.rows
        return [rows[seq] for seq in range(first, first + most) if seq in rows]

    def insert(self, row: Row, behind: tuple[int, int] | None, limit_ns: int) -> Statement:
        """Adds a row under its epoch, right behind the row of that seq and token. "forked" when that is not there.

        Returns "done", "fenced", "forked", or "there" when the seq is taken.
        """
        yield Linger()
        try:
            yield Lock(LEADER, True, limit_ns)
        except LockTimeout:
            raise Ended from None
        yield Linger()
        if self.state.leader.epoch != row.epoch:
            return "fenced"
        if behind is not None:
            last = self.state.rows.get(behind[0])
            if behind[0] and (last is None or last.token != behind[1]):
                return "forked"
        if row.seq in self.state.rows:
            return "there"
        yield Commit({"row": row}, True)
        return "done"
