"""An exception in the middle of a change: at every call, at every allocation, and in the ledger.

A scene is set, and a command fails at its first point, then at its second, and so on until it gets through. After each
failure the owner does what a server without a journal does: Engine.undo() where a change may be half made. Then
check() must find the engine whole, and the command must have happened wholly or not at all.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any

import pytest

from geventstalk._build import BUILD
from geventstalk.core import engine as engine_module
from geventstalk.core.engine import OUT_OF_MEMORY
from geventstalk.core.figures import Totals, totals
from geventstalk.core.job import Job, Ledger
from geventstalk.core.meter import NO_TIMES, Times
from geventstalk.core.operate import DONE, KEEP, Operate
from geventstalk.core.tube import Tube
from geventstalk.turn.operations import Put
from geventstalk.wire.commands import LARGE_BODY
from geventstalk.wire.session import Service, Session
from tests.support import for_change
from tests.support.alone import alone
from tests.support.check import check
from tests.support.clock import SECOND, ManualClock
from tests.support.tracing import frames_traced
from tests.support.wire import FACTS

PACKAGE = os.path.dirname(os.path.dirname(engine_module.__file__))
POINTS_MAX = 3_000
CLEAN_ENOUGH = 15
LAST_STEPS = [("meter.py", "add"), ("state.py", "_measure_work"), ("jobtable.py", "add")]
MANY = 1000
TOTALS = (
    "total_jobs",
    "total_deletes",
    "total_releases",
    "total_buries",
    "total_kicks",
    "total_timeouts",
    "reserved_unready",
)


class Planted(Exception):
    """An exception that a test raises where nothing should fail."""


class Scene:
    """Clients and jobs in all states. One client waits in tube `w`, one in `p`, which is paused, and one is idle."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.clock = ManualClock()
        self.told: list[str] = []
        self.engine = Operate(self.clock.ns, ledger)
        self.service = Service(self.engine, 1 << 20, lambda: FACTS, lambda text, error: self.told.append(text))
        self.a, self.b, self.waiting, self.paused, self.idle = [Session(self.service) for _ in range(5)]
        self.say(self.idle, b"watch empty\r\nignore default\r\n")
        self.say(self.a, b"put 5 0 60 1\r\na\r\nput 2000 0 60 1\r\nb\r\nput 5 9 60 1\r\nc\r\nput 5 0 60 1\r\nd\r\n")
        self.say(self.a, b"put 5 0 1 1\r\ne\r\nreserve\r\nreserve\r\nreserve\r\nbury 1 7\r\nwatch x\r\nuse x\r\n")
        self.say(self.b, b"put 7 0 60 1\r\nf\r\nreserve\r\nuse w\r\n")
        self.say(self.a, b"use lone\r\nput 9 0 60 1\r\nh\r\nuse x\r\n")
        self.say(self.waiting, b"watch w\r\nignore default\r\nreserve\r\n")
        self.say(
            self.paused, b"use p\r\nput 1 0 60 1\r\ng\r\npause-tube p 3\r\nwatch p\r\nignore default\r\nreserve\r\n"
        )
        self.clock.pass_ns(SECOND // 1000)
        self.tubes = [*self.engine.tubes.values()]
        for tube in self.engine.active:
            for of in tube, self.engine:
                has_done_much(of)
        self.before = pasts(self)
        check(self.engine)

    def say(self, session: Session, data: bytes) -> bytes:
        session.receive(data, self.clock.ns)
        while session.unfinished:
            session.run(self.clock.ns)
        return session.take_out()

    def settle(self) -> None:
        """Lets happen what is due, as the owner's clock does."""
        for _ in range(1_000):
            if self.engine.advance(self.clock.ns, 250):
                return
        raise AssertionError("advance() never comes to an end")


def has_done_much(of: Operate | Tube) -> None:
    """All that it counts is so large that the next number takes memory."""
    for name in TOTALS:
        setattr(of, name, getattr(of, name) + MANY)
    of.queued, of.worked = of.queued or Times(), of.worked or Times()
    for times in of.queued, of.worked:
        times.counts = [count + MANY for count in times.counts]
    of.worked.counts[0] += MANY  # of the jobs that were reserved while they were not ready


def pasts(scene: Scene) -> tuple[list[int], list[int]]:
    """All that was counted and measured: of the server, and of all tubes together, also of those that are gone."""
    tubes = {tube.number: tube for tube in [*scene.tubes, *scene.engine.tubes.values()]}
    return past(scene.engine), [sum(numbers) for numbers in zip(*map(past, tubes.values()), strict=True)]


def past(of: Operate | Tube) -> list[int]:
    queued, worked = of.queued or NO_TIMES, of.worked or NO_TIMES
    return [*totals(of), queued.sum_ns, *queued.counts, worked.sum_ns, *worked.counts]


def truth(scene: Scene) -> dict[int, tuple[Any, ...]]:
    """Of each job what a client can see of it."""
    return {
        job.id: (
            scene.engine.tube_of(job).name,
            job.body,
            *(job.state, job.rank, job.holder, job.pri, job.delay_s),
            *([0] * 5 if job.tally is None else numbers(job)),
            job.ttr_s,
        )
        for job in scene.engine.jobs
    }


def numbers(job: Job) -> list[int]:
    tally = job.counts()
    return [tally.reserves, tally.timeouts, tally.releases, tally.buries, tally.kicks]


def clients(scene: Scene) -> list[tuple[Any, ...]]:
    return [
        (
            number,
            client.used and client.used.name,
            [tube.name for tube in client.watched.values()],
            sorted(client.reserved),
            client.waiting,
        )
        for number, client in scene.engine.clients.items()
    ]


def receive(who: str, data: bytes) -> Callable[[Scene], object]:
    return lambda scene: scene.say(getattr(scene, who), data)


def time_passes(scene: Scene) -> None:
    scene.clock.pass_ns(4 * SECOND)
    scene.settle()


def leave(scene: Scene) -> None:
    while not scene.a.leave(scene.clock.ns):
        pass


def alter(
    id: int, *, pri: int = KEEP, delay_s: int = KEEP, ttr_s: int = KEEP, tube: bytes = b""
) -> Callable[[Scene], object]:
    return lambda scene: scene.engine.alter(id, pri, delay_s, ttr_s, tube, scene.clock.ns)


def put_to(tube: bytes, body: bytes) -> Callable[[Scene], object]:
    return lambda scene: Put(scene.engine, scene.service, tube, body, 5, 0, 60).run(scene.clock.ns)


FORCE: dict[str, Callable[[Scene], object]] = {
    "kick by an operator": lambda scene: scene.engine.kick_one(3, scene.clock.ns),
    "delete by force": lambda scene: scene.engine.force_delete(5, scene.clock.ns),
    "delete the last by force": lambda scene: scene.engine.force_delete(7, scene.clock.ns),
    "release by force": lambda scene: scene.engine.force_release(6, scene.clock.ns),
    "bury reserved": lambda scene: scene.engine.force_bury(4, scene.clock.ns),
    "bury ready": lambda scene: scene.engine.force_bury(2, scene.clock.ns),
    "bury delayed": lambda scene: scene.engine.force_bury(3, scene.clock.ns),
    "other pri": alter(2, pri=3),
    "other pri of a buried job": alter(1, pri=3),
    "delay of a ready job": alter(2, delay_s=7, pri=3),
    "no delay any more": alter(3, delay_s=0, pri=1),
    "other ttr": alter(3, ttr_s=7),
    "other ttr of a reserved job": alter(4, ttr_s=7),
    "move to one who waits": alter(2, pri=1, ttr_s=9, tube=b"w"),
    "move delayed to a new tube": alter(3, pri=2, delay_s=5, ttr_s=7, tube=b"fresh"),
    "move buried to a paused tube": alter(1, pri=3, tube=b"p"),
    "move the last of a tube": alter(7, delay_s=3, tube=b"x"),
    "put to one who waits": put_to(b"w", b"new"),
    "put to a new tube": put_to(b"fresh", b"x" * 2 * LARGE_BODY),
}
"""What an operator does."""

CHANGES: dict[str, Callable[[Scene], object]] = {
    **FORCE,
    "put": receive("a", b"put 5 0 60 3\r\nnew\r\n"),
    "put delayed": receive("a", b"put 5 2 60 3\r\nnew\r\n"),
    "put for one who waits": receive("b", b"put 5 0 60 3\r\nnew\r\n"),
    "put large": receive("b", b"put 5 0 60 %d\r\n%b\r\n" % (2 * LARGE_BODY, b"x" * 2 * LARGE_BODY)),
    "put in pieces": lambda scene: [scene.say(scene.a, piece) for piece in (b"put 5 0 60 3\r\n", b"n", b"ew\r\n")],
    "reserve": receive("b", b"reserve\r\n"),
    "reserve and wait": receive("idle", b"reserve-with-timeout 2\r\n"),
    "reserve-job": receive("a", b"reserve-job 3\r\n"),
    "delete": receive("a", b"delete 4\r\n"),
    "delete ready": receive("a", b"delete 2\r\n"),
    "release": receive("a", b"release 4 3 0\r\n"),
    "release delayed": receive("a", b"release 4 3 2\r\n"),
    "bury": receive("a", b"bury 4 3\r\n"),
    "touch": receive("a", b"touch 4\r\n"),
    "kick": receive("a", b"use default\r\nkick 10\r\n"),
    "kick-job": receive("a", b"kick-job 3\r\n"),
    "use": receive("a", b"use somewhere\r\n"),
    "watch": receive("a", b"watch somewhere\r\n"),
    "ignore": receive("a", b"ignore x\r\n"),
    "pause": receive("a", b"pause-tube default 5\r\n"),
    "unpause": receive("a", b"pause-tube p 0\r\n"),
    "time": time_passes,
    "leave": leave,
    "hang up": lambda scene: scene.waiting.hang_up(scene.clock.ns),
    "join": lambda scene: Session(scene.service),
    "look": receive("a", b"stats\r\nstats-tube default\r\nstats-job 4\r\nlist-tubes\r\npeek 3\r\npeek-ready\r\n"),
}


def recover(scene: Scene, session: Session | None) -> None:
    """Does what an owner without a journal does after an exception out of a session or of advance()."""
    scene.engine.undo()
    if session is not None and session.number in scene.engine.clients:
        session.give_up()


def who_failed(name: str, scene: Scene) -> Session | None:
    if name in ("time", "join", "leave", *FORCE):
        return None
    if name == "reserve and wait":
        return scene.idle
    return scene.b if name in ("put for one who waits", "put large", "reserve") else scene.a


@cache
def expected(name: str) -> tuple[dict[int, tuple[Any, ...]], dict[int, tuple[Any, ...]]]:
    """All jobs before a command, and after it."""
    scene = Scene()
    before = truth(scene)
    CHANGES[name](scene)
    return before, truth(scene)


def is_whole(old: dict[int, tuple[Any, ...]], new: dict[int, tuple[Any, ...]], scene: Scene) -> None:
    """Each job is as it was before the command, or as the command leaves it."""
    now = truth(scene)
    for id in old.keys() | new.keys() | now.keys():
        found = now.get(id)
        if found not in (old.get(id), new.get(id)):
            # A job that is handed over is first ready: the handing over is a change of its own.
            handed = new.get(id)
            assert found is not None and handed is not None and handed[4] and not found[4], (id, old.get(id), found)
            assert found[:2] == handed[:2] and found[5:7] == handed[5:7]


def is_counted(old: dict[int, tuple[Any, ...]], scene: Scene) -> None:
    """The totals of the server and of its tubes count all events of jobs; times are measured in both."""
    now = truth(scene)
    (server, tubes), (server_before, tubes_before) = pasts(scene), scene.before
    more = [after - before for after, before in zip(server, server_before, strict=True)]
    assert more == [after - before for after, before in zip(tubes, tubes_before, strict=True)]
    happened = [sum(now[id][at] - (old[id][at] if id in old else 0) for id in now) for at in range(7, 12)]
    reserves, timeouts, releases, buries, kicks = happened
    put, deleted = len(now.keys() - old.keys()), len(old.keys() - now.keys())
    assert Totals(*more[:7]) == Totals(put, reserves, deleted, releases, buries, kicks, timeouts)


def survives(name: str, scene: Scene) -> None:
    """After whatever went wrong the engine is whole, and serves every client that can be served."""
    check(scene.engine)
    is_whole(*expected(name), scene)
    is_counted(expected(name)[0], scene)
    scene.settle()
    check(scene.engine)
    for _, client in sorted(scene.engine.clients.items()):
        assert isinstance(client, Session)
        while not client.leave(scene.clock.ns):
            pass
    check(scene.engine)
    scene.engine.advance(scene.clock.ns + 100_000 * SECOND, 10_000)
    check(scene.engine)
    assert scene.engine.ready_count + scene.engine.buried_count == len(scene.engine.jobs)
    assert len(scene.engine.clients) == 0 and scene.engine.waiting_count == 0
    assert sum(tube.jobs for tube in scene.engine.tubes.values()) == len(scene.engine.jobs), "an upload still counts"


class Closed(Ledger):
    """It fails before anything has changed."""

    def admits(self, body_bytes: int, tube_name: bytes) -> bool:
        if body_bytes > 3:
            raise Planted
        return True


# Bug: The put stayed counted in its tube for ever, and the tube never ended.
def test_a_put_that_fails_before_it_changed_anything_leaves_no_tube_behind() -> None:
    scene = Scene(Closed())
    scene.say(scene.idle, b"use brief\r\nput 0 0 60 9\r\n123456789\r\n")
    assert scene.told and scene.idle.closed
    check(scene.engine)
    assert scene.idle.leave(scene.clock.ns)
    check(scene.engine)
    assert b"brief" not in scene.engine.tubes


# Bug: An exception in the middle of a change left counters, orders and timers that disagree: a put, a delete or a
# reservation stayed counted, and was counted twice later.
@pytest.mark.slow
@pytest.mark.skipif(BUILD == "compiled", reason="calls of compiled code cannot be traced")
@pytest.mark.parametrize("event", ["call", pytest.param("return", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", for_change(CHANGES, *range(1, len(CHANGES), 3)))
def test_an_exception_at_every_call(name: str, event: str) -> None:
    for point in range(POINTS_MAX):
        scene = Scene()
        if not fails_at(event, point, scene, name):
            assert point > 3, "nothing was tried"
            return
        survives(name, scene)
    raise AssertionError("it never gets through")


def fails_at(event: str, point: int, scene: Scene, name: str) -> bool:
    """Runs a command with an exception at one call, or return, of our packages. Returns whether it came to that."""
    count = 0
    planted = False

    def trace(frame: FrameType, kind: str, argument: Any) -> Any:
        nonlocal count, planted
        if not frame.f_code.co_filename.startswith(PACKAGE) or planted:
            return None
        frame.f_trace_lines = False
        if kind == event and not (kind == "return" and is_last_step(frame)):
            count += 1
            if count > point:
                planted = True
                raise Planted
        return trace

    try:
        with frames_traced(trace):
            CHANGES[name](scene)
    except Planted:
        recover(scene, who_failed(name, scene))
    return planted


# Bug: A collection of garbage ended a suspended task of an earlier test, and the exception was planted in that task.
def test_no_garbage_is_collected_while_calls_are_traced() -> None:
    seen: list[str] = []

    def suspended(ring: list[Any]) -> Iterator[None]:
        yield

    ring: list[Any] = []
    ring.append(suspended(ring))
    next(ring[0])
    del ring
    before = gc.get_threshold()
    try:
        with frames_traced(lambda frame, kind, _: seen.append(frame.f_code.co_name)):
            gc.set_threshold(1)
            made: list[Any] = [[] for _ in range(100)]
    finally:
        gc.set_threshold(*before)
    assert made and suspended.__name__ not in seen


def is_last_step(frame: FrameType) -> bool:
    """Returns whether a call belongs to the last step of a change: between it and the assignments nothing can fail."""
    return (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name) in LAST_STEPS


def nomemory() -> Any:
    """CPython's own means to have allocations fail; not every build of it has that."""
    try:
        return importlib.import_module("_testcapi")
    except ImportError:
        return None


# Bug: The scene lacked its facts, so stats failed always and the test beside this one proved nothing.
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_disturbed_does_not_fail(name: str) -> None:
    """Of the tool: otherwise every allocation would seem to matter."""
    scene = Scene()
    CHANGES[name](scene)
    assert not scene.told
    survives(name, scene)


# Bug: A MemoryError between the job table and the ledger left a job that no client could delete.
@pytest.mark.slow
@pytest.mark.skipif(BUILD == "compiled", reason="mypyc ends the process when there is no memory for an integer")
@pytest.mark.skipif(nomemory() is None, reason="this Python has no _testcapi")
@pytest.mark.parametrize("name", for_change(CHANGES, *range(0, len(CHANGES), 3)))
def test_no_memory_at_every_allocation(name: str) -> None:
    alone(lambda: fail_at_every_allocation(name))


def fail_at_every_allocation(name: str) -> None:
    capi, work = nomemory(), CHANGES[name]
    clean = 0
    for point in range(1, POINTS_MAX):
        scene = Scene()
        half_made = False
        capi.set_nomemory(point, point + 1)
        try:
            work(scene)
        except MemoryError:
            half_made = True
        finally:
            capi.remove_mem_hooks()
        if half_made:
            recover(scene, who_failed(name, scene))
        survives(name, scene)
        clean = 0 if half_made or scene.told else clean + 1
        if clean == CLEAN_ENOUGH:  # CPython gets along without some allocations, so that one success is not the end
            return
    raise AssertionError("it never gets through")


class Failing(Ledger):
    """A ledger whose calls fail from a certain one on, having kept nothing."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def put(self, job: Job, tube_name: bytes) -> None:
        self.fail()

    def change(self, job: Job) -> None:
        self.fail()

    def delete(self, job: Job) -> None:
        self.fail()

    def rewrite(self, job: Job, tube_name: bytes) -> None:
        self.fail()

    def fail(self) -> None:
        if self.error is not None:
            raise self.error


TOLD = [
    *FORCE,
    "put",
    "put delayed",
    "reserve-job",
    "delete",
    "release",
    "release delayed",
    "bury",
    "kick",
    "kick-job",
]


@pytest.mark.parametrize("name", TOLD)
def test_a_ledger_that_fails(name: str) -> None:
    ledger = Failing()
    scene = Scene(ledger)
    before = truth(scene), clients(scene)
    ledger.error = Planted()
    with pytest.raises(Planted):
        CHANGES[name](scene)
    scene.engine.undo()
    check(scene.engine)
    assert truth(scene) == before[0]
    is_counted(before[0], scene)
    ledger.error = None
    scene.a.give_up()
    assert scene.a.take_out().endswith(b"INTERNAL_ERROR\r\n")


@pytest.mark.parametrize("name", ["put", "put delayed"])
def test_a_ledger_without_memory_refuses_a_put(name: str) -> None:
    ledger = Failing()
    scene = Scene(ledger)
    before = truth(scene), clients(scene)
    ledger.error = MemoryError()
    assert CHANGES[name](scene) == b"OUT_OF_MEMORY\r\n"
    assert not scene.engine.changing
    assert (truth(scene), clients(scene)) == before
    check(scene.engine)
    ledger.error = None
    assert scene.say(scene.a, b"put 0 0 1 1\r\nx\r\n").startswith(b"INSERTED ")


@pytest.mark.parametrize("name", ["move to one who waits", "move the last of a tube", "other ttr"])
def test_a_ledger_without_memory_for_a_job_anew_leaves_it_as_it_is(name: str) -> None:
    ledger = Failing()
    scene = Scene(ledger)
    before = truth(scene), clients(scene), [*scene.engine.tubes]
    ledger.error = MemoryError()
    assert CHANGES[name](scene) == OUT_OF_MEMORY
    check(scene.engine)
    assert (truth(scene), clients(scene), [*scene.engine.tubes]) == before
    ledger.error = None
    assert CHANGES[name](scene) == DONE


def test_undo_of_nothing_changes_nothing() -> None:
    scene = Scene()
    before = truth(scene), clients(scene), scene.engine.next_deadline_ns()
    scene.engine.undo()
    check(scene.engine)
    assert (truth(scene), clients(scene), scene.engine.next_deadline_ns()) == before


def test_what_only_looks_is_answered_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts are the server's; when they fail, nothing has changed."""

    def fail() -> dict[str, object]:
        raise Planted

    scene = Scene()
    scene.service.facts = fail
    assert scene.say(scene.a, b"delete 4\r\nstats\r\ndelete 2\r\n") == b"DELETED\r\nINTERNAL_ERROR\r\n"
    assert scene.a.closed and len(scene.told) == 1
    assert scene.engine.jobs.get(2) is not None, "nothing is executed behind it"
    check(scene.engine)


def test_without_memory_for_a_look_the_connection_lives_on() -> None:
    def fail() -> dict[str, object]:
        raise MemoryError

    scene = Scene()
    scene.service.facts = fail
    assert scene.say(scene.a, b"stats\r\ndelete 4\r\n") == b"OUT_OF_MEMORY\r\nDELETED\r\n"
    assert not scene.a.closed and not scene.told
