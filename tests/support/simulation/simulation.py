"""One seed, one life of a server: what it and its clients do, when time passes, what fails, when it dies.

The seed draws the numbers of everything, among them the chances of everything (so some lives have no deletes, some
nothing but power losses), then each step. At the end nothing fails any more and all that was begun must come to its
end; then the server stops cleanly and starts once more. Nothing here depends on the time of day, on hashing or on ids
of objects, so a seed is the same life everywhere, as long as this package and Python's `random` stay as they are.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as count_from
from math import inf

import geventstalk.durable.store as store_module
from geventstalk.core.engine import Engine
from geventstalk.core.job import SECOND_NS
from geventstalk.durable.large import LARGE_BYTES
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from geventstalk.wire.session import MOVE_SLICE, Session
from journal import Journal, JournalError, JournalFull
from journal.log import PAYLOAD_MIN
from tests.support.faults import fetch
from tests.support.faulty_journal import Disk, FaultyJournal, worker_of
from tests.support.forgetful import AWAITS_JOB, AWAITS_LOOK, BEGINS_ANEW, AwaitingSession, Forgetful
from tests.support.simulation.clients import Habits, SimulatedClient
from tests.support.simulation.host import Connection, Greenlet, Host, Pause, WatchedTurn
from tests.support.simulation.operator import Operator
from tests.support.simulation.oracle import Oracle, Violation, kept_of, require

MS_NS = 1_000_000
WALL_NS = 1_700_000_000 * SECOND_NS
TRACE_LINES = 60
LAST_SECONDS = 200
UNLIMITED = 1 << 40
SMALL_BYTES = 1 << 14
"""What is live is surely so small that there is room for more."""
BARE_BYTES = 1 << 18
"""What some small segments take beside their records."""
FAIRNESS = 8
"""A task that is ready runs within this many picks. A real event loop passes over no greenlet at all."""
WITHOUT_TIME_MAX = 10_000
"""Pieces of work that are done while no time passes."""
SYNC_MS_MAX = 20
DEATHS_MAX = 3
"""This often in a row it dies, or fails, before it is up; then it comes up."""
LAG_NS = 5 * MS_NS


class ProcessDies(BaseException):
    """The process is gone, with all that is in its memory."""


@dataclass
class Parts:
    """The parts of a simulated server. A canary replaces a part by one that is broken."""

    turn: type[WatchedTurn] = WatchedTurn
    session: type[Session] = AwaitingSession
    store: type[Store] = Store
    journal: type[Journal] = FaultyJournal


@dataclass
class Scenario:
    """Everything about a life but its steps. `fsync_ms` is None for never; chances are per step or per call."""

    seed: int
    draw: random.Random = field(repr=False)
    habits: Habits = field(repr=False)
    fsync_ms: int | None
    steps: int
    clients: int
    segment_bytes: int
    compact: bool
    max_job_bytes: int
    slice_moves: int
    bytes_max: int
    budget: int | None
    dies: float
    dies_at_moment: float
    loses_power: float  # how likely a death is one of the machine
    stops: float
    commit_fails: float
    sync_fails: float
    disk_fills: float
    drains: float
    leaps: float
    worker_is_slow: float
    hangs_up: float
    operates: float
    large_bytes: int  # an operator and compaction write so large a job in parts of half the size
    operator_draw: random.Random = field(repr=False)
    memory: int | None  # this many bytes of bodies stay in memory, where others can be read back
    read_fails: float

    @staticmethod
    def drawn(seed: int) -> Scenario:
        draw = random.Random(seed)
        operator_draw = random.Random(f"the operator of {seed}")  # its own: lives without an operator are the same
        bytes_max, budget = draw.choice(
            ((UNLIMITED, None),) * 6 + ((1 << 20, None), (1 << 21, None), (UNLIMITED, 1 << 20))
        )
        limited = bytes_max < UNLIMITED or budget is not None
        max_job_bytes = draw.choice((300, 5000, 60_000, 60_000) if limited else (100, 300, 5000))
        habits = Habits.drawn(draw, max_job_bytes)
        memory_draw = random.Random(f"the memory of {seed}")  # its own, for the same reason
        memory = memory_draw.choice((None, None, 0, 0, 300, 3000))
        segments = (1 << 15, 1 << 16) if limited else (1 << 13, 1 << 14, 1 << 16, 1 << 20)
        return Scenario(
            seed=seed,
            draw=draw,
            habits=habits,
            fsync_ms=draw.choice((0, 0, 50, 50, 5, None)),
            steps=draw.choice((50, 100, 300, 800)),
            clients=draw.choice((1, 2, 3, 5, 8)),
            segment_bytes=min(draw.choice(segments), 1 << 20 if memory is None else 1 << 15),
            compact=draw.random() < 0.9,
            max_job_bytes=max_job_bytes,
            slice_moves=draw.choice((1, 2, MOVE_SLICE, MOVE_SLICE)),
            bytes_max=bytes_max,
            budget=budget,
            dies=draw.choice((0, 0.005, 0.02)),
            dies_at_moment=draw.choice((0, 0, 0.003, 0.02)),
            loses_power=draw.choice((0, 0.5, 1)),
            stops=draw.choice((0, 0, 0.01)),
            commit_fails=draw.choice((0, 0, 0, 0.05)),
            sync_fails=draw.choice((0, 0, 0, 0.05)),
            disk_fills=0 if bytes_max == UNLIMITED else 0.02,
            drains=draw.choice((0, 0, 0, 0.01)),
            leaps=draw.choice((0.02, 0.1, 0.2)),
            worker_is_slow=draw.choice((0, 0, 0.5, 0.9)),
            hangs_up=draw.choice((0, 0.01, 0.05)),
            operates=operator_draw.choice((0, 0, 0.05, 0.2)),
            large_bytes=operator_draw.choice((2000, 2000, 4000, LARGE_BYTES)),
            operator_draw=operator_draw,
            memory=memory,
            read_fails=memory_draw.choice((0, 0, 0.05)),
        )


@dataclass
class Task:
    """A greenlet and what it waits for. `number` orders those that wait for the same."""

    name: str
    greenlet: Greenlet
    wait: Pause


@dataclass
class Outcome:
    """The outcome of a life. `digest` is the same for the same seed; `trace` holds its last lines."""

    scenario: Scenario
    digest: str
    steps: int
    replies: int
    restarts: int
    trace: list[str]
    failure: str | None = None


class Simulation:
    """One life. run() raises Violation, or whatever the code under test raises; `trace` has the last lines then."""

    def __init__(self, seed: int, parts: Parts | None = None, show: Callable[[str], None] | None = None) -> None:
        self.parts = parts or Parts()
        self.scenario = Scenario.drawn(seed)
        self.draw = self.scenario.draw
        self.show = show
        self.trace_lines: deque[str] = deque(maxlen=TRACE_LINES)
        self.hash = hashlib.sha256()
        self.clock_ns = WALL_NS  # the wall clock; each process has a monotonic one that begins elsewhere
        self.offset_ns = 0
        self.step_number = 0
        self.restarts = 0
        self.promised = 0  # this much of the log must be there at the next start
        self.faults = True
        self.disk = Disk(self.draw, self.scenario.bytes_max)
        self.disk.committed = self._committed
        self.commits: deque[tuple[int, int]] = deque()  # when, and how much of the log
        self.oracle = Oracle(lambda: self.clock_ns, self._look, self.scenario.max_job_bytes)
        self.ids: list[int] = []
        self.clients: list[SimulatedClient] = []
        self.tasks: list[Task] = []
        self.operator = Operator(
            *(self.scenario.operator_draw, self.scenario.habits, self.oracle, self.ids, self.note),
            self.scenario.fsync_ms == 0,
            lambda: self.server.stopped or self.disk.failed,  # an operation fails alone when it cannot read a body
        )
        self.server: Host
        self.journal: Journal

    def run(self) -> None:
        try:
            if self.scenario.memory is not None:
                vars(store_module).update(PAYLOAD_MIN=1)  # small bodies leave memory, too: this journal groups none
            self.note(repr(self.scenario))
            with self._dying():
                self._start()
            for number in range(1, self.scenario.steps + 1):
                self.step_number = number
                self._guarded(self._step)
            self._end()
        finally:
            vars(store_module).update(PAYLOAD_MIN=PAYLOAD_MIN)
            self.disk.unmount()

    # --- the world of the server

    def now_ns(self) -> int:
        return self.clock_ns - self.offset_ns

    def wall_ns(self) -> int:
        return self.clock_ns

    def sync_ns(self) -> int:
        return self.draw.choice((0, 1, SYNC_MS_MAX)) * MS_NS

    def begin_sync(self) -> dict[int, int]:
        self.note("a sync begins")
        return self.disk.lengths()

    def run_sync(self, run: Callable[[], None], covers: dict[int, int]) -> None:
        self.disk.as_of = covers
        try:
            run()
        finally:
            self.disk.as_of = None
        self.note("a sync ends")

    def moment(self, name: str) -> None:
        if self.faults and self.draw.random() < self.scenario.dies_at_moment:
            raise ProcessDies(name)

    def advanced(self, done: bool) -> None:
        self.oracle.advanced(done)

    def spawn(self, name: str, greenlet: Greenlet) -> None:
        self.tasks.append(Task(name, greenlet, next(greenlet)))

    def leaves(self, connection: Connection, done: bool) -> None:
        number = connection.session.number
        if done:
            self.note(f"client {number} has left")
            self.oracle.left(number)
        else:
            self.oracle.leaving = number

    def steps(self, connection: Connection | None) -> None:
        self.oracle.steps(None if connection is None else self.oracle.views[connection.session.number])

    def trace(self, connection: Connection, direction: str, data: bytes) -> None:
        view = self.oracle.views[connection.session.number]
        view.half_closed = connection.read_all
        self.note(f"{direction}{view.number} {data[:60]!r}")
        if direction == "<":
            self.oracle.executes(view, data)
        elif direction in (AWAITS_JOB, AWAITS_LOOK):
            self.oracle.awaits(view, int(data), direction == AWAITS_LOOK)
        elif direction == BEGINS_ANEW:
            self.oracle.begins_anew(view)
        else:
            self.oracle.replies(view, data)

    def _look(self) -> Engine:
        return self.server.engine

    def _committed(self) -> None:
        self.commits.append((self.clock_ns, len(self.oracle.log)))
        self.note(f"committed up to change {len(self.oracle.log)}")

    def note(self, text: str) -> None:
        """A line of the trace."""
        line = f"{self.step_number:4} {(self.clock_ns - WALL_NS) / SECOND_NS:11.6f}  {text}"
        self.trace_lines.append(line)
        self.hash.update(line.encode())
        if self.show is not None:
            self.show(line)

    # --- starting and dying

    def _start(self) -> None:
        """A new process. On a full disk it may have to wait until others make room."""
        scenario = self.scenario
        self.tasks = []
        self.clients = []
        self.operator.open.clear()
        self.oracle.draining = False
        self.offset_ns = self.clock_ns - self.draw.randrange(1, 10**6) * SECOND_NS - self.draw.randrange(SECOND_NS)
        self._set_faults()
        try:
            self._open()
        except JournalFull as full:
            filled_for_good = not scenario.compact  # each start takes room, and nothing gives any back
            expected = self.disk.failed or not self.disk.takes_files or filled_for_good
            require(expected, "a full disk keeps the server from starting:", full)
            if filled_for_good:
                self.disk.bytes_max += 1 << 20
            self._others_take(0)
            self.disk.takes_files = True
            raise ProcessDies("without room") from full
        except JournalError as error:
            require(self.disk.failed, "the server does not start:", error)
            raise ProcessDies(f"while it starts: {error}") from error
        self.note(f"up with {len(self.server.engine.jobs)} jobs")
        self.server.start()
        for _ in range(scenario.clients):
            self._connect()

    def _open(self) -> None:
        scenario = self.scenario
        self.journal = self.parts.journal(
            self.disk.path,
            segment_bytes=scenario.segment_bytes,
            compact=scenario.compact,
            budget=scenario.budget,
            allocate=scenario.fsync_ms == 0,
            log=self.note,
        )
        store = self.parts.store(self.journal, scenario.fsync_ms, ClockOffset(self.clock_ns, self.now_ns()))
        if scenario.operates:
            store.large_bytes, store.part_bytes = scenario.large_bytes, scenario.large_bytes // 2
        parts = self.parts
        self.server = Host(self, scenario.max_job_bytes, scenario.slice_moves, parts.turn, parts.session)
        engine = self.server.engine
        if scenario.memory is not None:
            engine.bodies = Forgetful(scenario.memory)
        self.server.open_journal(store)
        fetch(store, engine.jobs)
        found = {job.id: kept_of(job, engine.tube_of(job).name, self._to_wall) for job in engine.jobs}
        self.oracle.recovered(found, self.promised, self.disk.scattered)
        self.commits.clear()  # a start may commit: what was found, and that is on the device by now
        if engine.bodies is not None:
            engine.bodies.make_room(engine, 0)
        self.disk.lost_in = inf

    def _to_wall(self, monotonic_ns: int) -> int:
        return monotonic_ns + self.offset_ns

    def _set_faults(self) -> None:
        scenario = self.scenario
        self.disk.commit_fails = scenario.commit_fails if self.faults else 0
        self.disk.sync_fails = scenario.sync_fails if self.faults else 0
        self.disk.read_fails = scenario.read_fails if self.faults else 0
        self.disk.moment = self.moment

    @contextmanager
    def _dying(self) -> Iterator[None]:
        try:
            yield
        except ProcessDies as death:
            self._die(str(death))

    def _guarded(self, step: Callable[[], None]) -> None:
        """Does a step, and what follows when the process dies or gives up in it."""
        with self._dying():
            step()
        if self.server.stopped:
            with self._dying():
                self.server.finish()
                raise ProcessDies("giving up")

    def fails(self, error: JournalError) -> None:
        """The server gives up. A full disk is no reason, unless others took even what was given back to it."""
        self.note(f"{error}; stopping")
        require(self.disk.failed, "the server gives up although nothing failed:", error)

    def _die(self, where: str) -> None:
        """The process is gone, and when the power is lost, too, what was not synced. It comes up again."""
        self.promised = len(self.oracle.log)
        faults = self.faults
        for deaths in count_from(1):
            self.faults = faults and deaths <= DEATHS_MAX
            self.restarts += 1
            power = self.draw.random() < self.scenario.loses_power
            self.note(f"{'POWER LOSS' if power else 'the process dies'} {where}")
            promised_of_power = self._promised_of_power()
            doubtful = power or self.disk.failed
            self.promised = min(self.promised, promised_of_power if doubtful else self.oracle.kept)
            if power:
                self.disk.lose_power()
            else:
                self.disk.lose_process()
            self.clock_ns += self.draw.choice((0, MS_NS, SECOND_NS, 20 * SECOND_NS))
            try:
                self._start()
                break
            except ProcessDies as death:
                where = str(death)
        self.faults = faults
        self._set_faults()

    def _promised_of_power(self) -> int:
        """Returns how much of the log must survive the loss of power now."""
        promised = self.oracle.synced
        if self.scenario.fsync_ms:
            period_ns = (self.scenario.fsync_ms + 2 * SYNC_MS_MAX) * MS_NS + LAG_NS
            promised = max([promised, *(upto for at, upto in self.commits if at + period_ns <= self.clock_ns)])
            self.oracle.synced = promised
        self.commits.clear()
        return promised

    def _stop(self) -> None:
        """A clean end, and a new start: everything that was executed is there, also after a loss of power."""
        self.note("the server stops")
        self.tasks = []
        self.server.stopped = True
        self.server.finish()
        if self.server.exit_code:
            raise ProcessDies("failing to stop")
        require(not self.disk.locked, "the directory is still locked")
        for client in self.clients:
            unsent = b"" if client.deaf else bytes(client.view.expected)
            require(not unsent, "a clean end keeps replies back from client", client.view.number, unsent)
        require(not self.operator.open, "a clean end keeps an operation's owner waiting:", self.operator.open)
        self.oracle.synced = self.oracle.kept = len(self.oracle.log)
        raise ProcessDies("after a clean end")

    # --- steps

    def _step(self) -> None:
        scenario, draw = self.scenario, self.draw
        self.clock_ns += draw.randrange(MS_NS // 10)
        self.oracle.room = scenario.bytes_max == UNLIMITED and scenario.budget is None
        if scenario.operates and scenario.operator_draw.random() < scenario.operates:
            self._operate()
        event = draw.random()
        for chance, act in (
            (scenario.dies, self._death),
            (scenario.stops, self._stop),
            (scenario.leaps, self._leap),
            (scenario.disk_fills, self._fill),
            (scenario.drains, self._drain),
        ):
            event -= chance
            if event < 0:
                act()
                return
        if not self.step_number % FAIRNESS:
            self._run_ready()
        elif draw.random() < 0.5:
            self._act(draw.choice(self.clients))
        else:
            ready = [task for task in self.tasks if task.wait.over(self.now_ns())]
            if ready:
                self._resume(draw.choice(ready))
        self._work()

    def _death(self) -> None:
        raise ProcessDies("between two steps")

    def _fill(self) -> None:
        """Others take all that is free of the disk, or all its inodes; or they give back what they have taken."""
        size = self.draw.choice((0, self.disk.free_bytes + self.disk.others_bytes))
        self._others_take(0 if size % 2 else size)
        self.disk.takes_files = not size % 2
        if size % 2:
            self.note("others take all inodes of the disk")

    def _others_take(self, size: int) -> None:
        self.disk.others_take(size)
        self.note(f"others take {size} bytes of the disk")

    def _drain(self) -> None:
        self.oracle.draining = self.server.engine.draining = not self.server.engine.draining
        self.note(f"draining: {self.oracle.draining}")

    def _operate(self) -> None:
        server = self.server
        server.turn.accept(self.operator.operation(server.engine, server.service))

    def _work(self) -> None:
        """The journal's worker does something, or not."""
        worker = worker_of(self.journal)
        if not worker.idle and not (self.faults and self.draw.random() < self.scenario.worker_is_slow):
            worker.turn()

    def _leap(self) -> None:
        """Time passes; whatever is due happens on the way."""
        self._pass(self.draw.choice((1, 10, 60, 500, 1000, 1000, 3000, 30_000)) * MS_NS)
        if self.draw.random() < 0.1 and not self.server.exit_code:
            self.oracle.compare(self.server.engine, self._to_wall)

    def _pass(self, span_ns: int) -> None:
        end_ns = self.clock_ns + span_ns
        while True:
            self._run_ready()
            if self.server.stopped:
                return
            wakes = [task.wait.at_ns for task in self.tasks if task.wait.at_ns is not None]
            wake_ns = min([end_ns, *(at_ns + self.offset_ns for at_ns in wakes)])
            if wake_ns >= end_ns:
                break
            self.clock_ns = max(self.clock_ns, wake_ns)
            self._work()
        self.clock_ns = max(self.clock_ns, end_ns)
        self._run_ready()
        self.note("time passed")

    def _run_ready(self) -> None:
        """Runs everything that can run until nothing can."""
        for count in count_from(1):
            require(count < WITHOUT_TIME_MAX, "the server goes on for ever")
            if self.server.stopped:
                break
            ready = [task for task in self.tasks if task.wait.over(self.now_ns())]
            if not ready:
                break
            self._resume(self.draw.choice(ready))

    def _resume(self, task: Task) -> None:
        try:
            task.wait = next(task.greenlet)
        except StopIteration:
            self.tasks.remove(task)

    # --- clients

    def _connect(self) -> None:
        number = self.server.engine.total_clients + 1
        view = self.oracle.join(number)
        client = SimulatedClient(self.draw, self.scenario.habits, self.oracle, view, self.ids)
        client.syncs_first = self.scenario.fsync_ms == 0
        client.heard = lambda data: self.note(f"client {number} hears {data[:60]!r}")
        client.connection = self.server.accept(client)
        self.clients.append(client)

    def _act(self, client: SimulatedClient) -> None:
        assert client.connection is not None
        if client.over:
            self.clients.remove(client)
            self._connect()
        elif client.connection.ended:
            return
        elif client.outgoing:
            client.send()
        elif self.draw.random() < self.scenario.hangs_up:
            self.note(f"client {client.view.number} goes")
            self.draw.choice((client.half_close, client.hang_up))()
        elif not client.view.waits or self.draw.random() < 0.1:
            client.talk()

    # --- the end

    def _end(self) -> None:
        """Nothing fails any more: everything that was begun comes to its end."""
        self.note("nothing fails any more")
        self.faults = False
        self._set_faults()
        self._others_take(0)
        self.disk.takes_files = True
        self.oracle.draining = self.server.engine.draining = False
        while True:
            before = self.restarts
            self._guarded(self._settle)
            if self.restarts == before:
                break  # else a fault from before came to light only now
        with self._dying():
            self._stop()
        self._pass(SECOND_NS)
        self.oracle.compare(self.server.engine, self._to_wall)

    def _settle(self) -> None:
        self._come_to_rest()
        if self.server.stopped:
            return
        for client in self.clients:
            self._require_answered(client)
        require(not self.operator.open, "operations never come to an end:", self.operator.open)
        there = {client.view.number for client in self.clients if not client.over}
        require(there >= self.server.engine.clients.keys(), "clients that are gone stay:", there)
        self._require_room()
        for segment in self.disk.segments.values() if self.scenario.fsync_ms is not None else ():
            require(not segment.unsynced_rows, "a commit was never synced")

    def _come_to_rest(self) -> None:
        while any(client.outgoing for client in self.clients):
            for client in self.clients:
                if client.outgoing and not client.over and not client.deaf:
                    client.send()
                else:
                    client.outgoing.clear()
            self._run_ready()
        while not worker_of(self.journal).idle:
            worker_of(self.journal).turn()
        for span_s, idle in ((1, False), (19, False), (30, True), (LAST_SECONDS, False)):
            moved = self.journal.records_moved
            self._pass(span_s * SECOND_NS)
            if self.server.stopped:
                return
            moved = self.journal.records_moved - moved
            require(not idle or moved <= self.journal.live.keys, "compaction never comes to an end")
            self.oracle.compare(self.server.engine, self._to_wall)

    def _require_room(self) -> None:
        """Garbage is gone, a budget kept, and a full disk forgotten."""
        scenario, disk, live = self.scenario, self.disk, self.journal.live.total_bytes
        if scenario.compact:
            bound = 3 * live + 3 * scenario.segment_bytes + BARE_BYTES
            require(
                disk.used_bytes <= bound, "the directory takes", disk.used_bytes, "bytes at rest, for", live, "live"
            )
            taken = disk.used_bytes + disk.reserved_bytes
            require(taken <= (scenario.budget or UNLIMITED), "the directory outgrows its budget:", taken)
        if live < SMALL_BYTES and (
            scenario.compact or scenario.bytes_max == UNLIMITED
        ):  # -n fills a small disk for good
            require(self.journal.admits(10), "there is room again, and puts are refused")

    def _require_answered(self, client: SimulatedClient) -> None:
        view = client.view
        if client.over or view.closing or view.waits or client.deaf:
            return
        whole = view.unanswered and not (client.connection is not None and client.connection.ended)
        require(not whole, "client", view.number, "was never answered:", view.unanswered and view.unanswered[0])
        require(not view.expected, "client", view.number, "was never sent:", bytes(view.expected))


def simulate(seed: int, parts: Parts | None = None, show: Callable[[str], None] | None = None) -> Outcome:
    """Lives one life. Whatever goes wrong in it is the outcome's `failure`, one line."""
    life = Simulation(seed, parts, show)
    failure = None
    try:
        life.run()
    except Violation as violation:
        failure = str(violation)
    except Exception as error:  # the code under test may fail in any way: all of them are findings
        failure = f"{type(error).__name__}: {error} ({_place(error)})"
    if failure is not None:
        life.note(f"VIOLATION: {failure}")
    return Outcome(
        life.scenario,
        life.hash.hexdigest(),
        life.step_number,
        life.oracle.checked,
        life.restarts,
        list(life.trace_lines),
        failure,
    )


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    return f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
