"""The cost of commands, counted in quantities that a busy machine does not change.

System calls: one read and one write for each connection and turn, one commit for each turn, whatever the number of
commands. Bytecode instructions of the core: as many with one of a thing as with thousands of it. What hides in a single
instruction, such as a search through a list, shows only in processor time, which is compared with itself, coarsely.
`scripts/bench` measures speed; this sees to it that no change makes a command dearer unnoticed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from geventstalk.core import engine as engine_module
from geventstalk.core.operate import Operate
from geventstalk.rights import ALL, Limits, Proof, User
from geventstalk.wire.guarded import GuardedSession
from geventstalk.wire.session import Service, Session
from tests.support.clock import ManualClock
from tests.support.faults import strace_problem
from tests.support.process import GEVENTSTALK, ServerProcess
from tests.support.tracing import frames_traced
from tests.support.wire import Client

PUT = b"put 0 0 600 5\r\nhello\r\n"
RESERVE = b"reserve-with-timeout 0\r\n"

# System calls

needs_strace = pytest.mark.skipif(bool(strace_problem()), reason=strace_problem() or "strace works")
CLIENTS = 10
COMMANDS = 30
PIPELINE = 18
"""So many puts are shorter than what is asked for in one read after short pieces. What is longer takes another read."""
LOOP = {"epoll_wait", "epoll_pwait", "getpid"}
"""Calls of the event loop itself. It makes more of them while the server lingers, which costs no client anything."""
ALLOCATOR = {"brk", "madvise", "mmap", "munmap"}
"""Python's own: it takes an arena, or gives one back, at whatever command it comes to."""
LOOP_CALLS = 2
"""Those of a turn: its wait and a getpid."""
COMMIT_WRITES_MAX = 10
"""Pages and their headers that a commit of some small records writes."""
LONE_PUT_CALLS = 16
"""System calls of a put with `-f0` by one client: a read, a write, the locks of SQLite's index, the pages and their
headers, the sync, and the watermark."""
BODY_CALLS = 3
"""Those that a body of 10 kB takes beside: its write and its sync, and a read, as it comes in pieces."""
TURNS_MAX = 10
"""Turns that may belong to a stop, a burst, looks at what else there is, and the mark: half of one for each client."""
STOPPED = "--- stopped by SIGSTOP ---"
STOP_LIMIT_S = 30.0


class Traced:
    """A server under strace with clients. What it does between two marks is known by its system calls."""

    def __init__(self, directory: Path, policy: str) -> None:
        self._trace = directory / "trace"
        self._marks = 0
        journal = ["-b", str(directory / "journal"), policy] if policy else []
        self.server = ServerProcess(["strace", "-D", "-f", "-qq", "-o", str(self._trace), *GEVENTSTALK], journal)
        self.server.wait_ready()
        self.clients = [Client(self.server.connect()) for _ in range(CLIENTS)]
        for client in self.clients:
            client.put(b"the first")

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.stop()

    def count(self, work: Callable[[], None]) -> Counter[str]:
        """The main thread's system calls for a piece of work, without those of the marks around it."""
        marks = []
        for step in (None, work):
            if step is not None:
                step()
            self._marks += 1
            marks.append(f'"use mark-{self._marks}\\r')
            self.clients[0].ask(b"use mark-%d" % self._marks)
        text = self._trace.read_text(errors="replace")
        begun = text.index("\n", text.index(marks[0]))
        pattern = rf"^{self.server.pid} +(\w+)\("  # other threads prepare segments and the like, whenever they like
        calls = Counter(re.findall(pattern, text[begun : text.index(marks[1])], re.MULTILINE))
        calls.subtract(("read", "write"))  # of the second mark, and the reply to the first
        return +calls

    def at_once(self) -> None:
        """Every client puts a job, and the server finds all of them in one turn, because it was stopped meanwhile."""
        before = self._trace.read_text(errors="replace").count(STOPPED)
        os.kill(self.server.pid, signal.SIGSTOP)
        deadline = time.monotonic() + STOP_LIMIT_S
        # The state in /proc does not tell it from a stop at a system call, of which a traced process makes thousands.
        while self._trace.read_text(errors="replace").count(STOPPED) == before:
            assert time.monotonic() < deadline, "the server does not stop"
            time.sleep(0.001)
        for client in self.clients:
            client.send(PUT)
        os.kill(self.server.pid, signal.SIGCONT)
        for client in self.clients:
            assert client.reply().startswith(b"INSERTED ")


@pytest.fixture
def traced(tmp_path: Path, policy: str) -> Iterator[Traced]:
    running = Traced(tmp_path, policy)
    yield running
    running.close()


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize("policy", [""], ids=["memory"])
def test_a_command_takes_one_read_and_one_write_and_nothing_else(traced: Traced) -> None:
    client = traced.clients[0]

    def one_by_one() -> None:
        for _ in range(COMMANDS // 3):
            number = client.put(b"hello")
            assert client.ask(b"reserve-job %d" % number).startswith(b"RESERVED ")
            assert client.ask(b"delete %d" % number) == b"DELETED\r\n"

    def pipelined() -> None:
        client.send(PUT * PIPELINE)
        for _ in range(PIPELINE):
            assert client.reply().startswith(b"INSERTED ")

    calls = traced.count(one_by_one)
    assert (calls["read"], calls["write"]) == (COMMANDS, COMMANDS)
    assert calls.keys() <= {"read", "write", *LOOP, *ALLOCATOR}, calls

    calls = traced.count(pipelined)
    assert (calls["read"], calls["write"]) == (1, 1)
    assert calls.keys() <= {"read", "write", *LOOP, *ALLOCATOR}, calls


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["", "-F", "-f0"], ids=["memory", "F", "f0"])
def test_a_turn_takes_one_wait_and_one_commit_for_all_its_connections(traced: Traced, policy: str) -> None:
    calls = traced.count(traced.at_once)
    # Traced on a busy machine, a turn is longer than its share of time. Then a client is read once more.
    assert (calls["read"] <= CLIENTS + 1, calls["write"]) == (True, CLIENTS), calls
    assert calls["epoll_wait"] + calls["epoll_pwait"] <= TURNS_MAX, calls
    assert calls["fdatasync"] + calls["fsync"] == (1 if policy == "-f0" else 0), calls
    assert calls["pwrite64"] <= (COMMIT_WRITES_MAX if policy else 0), calls

    def one() -> None:
        traced.clients[1].put(b"hello")

    alone = traced.count(one)
    beside = calls.total() - 2 * CLIENTS
    assert beside <= 2 * alone.total() + TURNS_MAX * LOOP_CALLS, (calls, alone)


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["-f0"])
@pytest.mark.parametrize("body_bytes", [64, 10_000])
def test_a_lone_durable_put_takes_so_many_calls(traced: Traced, body_bytes: int) -> None:
    """The least of some puts: a page that is full, and a segment, take more now and then."""
    client = traced.clients[0]

    def put() -> None:
        client.put(b"x" * body_bytes)

    counts = [traced.count(put) for _ in range(8)]
    calls = min(counts, key=Counter.total)
    large = body_bytes > 64
    beside = sum(count for name, count in calls.items() if name not in LOOP | ALLOCATOR)
    assert beside <= LONE_PUT_CALLS + BODY_CALLS * large, calls


# Instructions of the core

FLAT = 1.3
"""How many times the instructions of a command may grow from one to thousands; a heap's are in C."""
FLAT_TIME = 6.0
"""The same for processor time, the least of many repetitions. A search through thousands costs a hundred times more."""
RIGHTS_COST = 1.37
"""How many times the instructions of a command a user's command may take."""
ROUNDS = 20
WARM_UPS = 6
"""One more than Python 3.12 needs, twice over."""
INSTRUCTIONS_MAX = 12_167
"""The most that a cycle and a handover may take. Before three verbs shared the beginning of an upload it was 12,131,
before counts of bytes in tubes and events of jobs 11,988, before tags 11,836, before latencies and bodies out of memory
11,212."""
COUNTED_ON = (3, 11)
is_pure = str(engine_module.__file__).endswith(".py")


class Rig:
    """An engine with sessions and a clock that stands still."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.engine = Operate(self.clock.ns)
        self.service = Service(self.engine, 65535, dict)
        self.client = Session(self.service)

    def tell(self, session: Session, data: bytes) -> bytes:
        """Gives bytes to a session and returns what it answers."""
        session.receive(data, self.clock.ns)
        out = session.take_out()
        while session.unfinished:
            session.run(self.clock.ns)
            out += session.take_out()
        return out

    def others(self, count: int, data: bytes) -> list[Session]:
        """This many more clients that say something once; {n} stands for their number."""
        sessions = [Session(self.service) for _ in range(count)]
        for number, session in enumerate(sessions):
            self.tell(session, data.replace(b"{n}", b"%d" % number))
        return sessions


def jobs_ready(rig: Rig, count: int) -> None:
    rig.tell(rig.client, PUT * count)


def jobs_delayed(rig: Rig, count: int) -> None:
    rig.tell(rig.client, b"".join(b"put 0 %d 600 5\r\nhello\r\n" % (100 + n % 1000) for n in range(count)))


def jobs_buried(rig: Rig, count: int) -> None:
    rig.tell(rig.client, (PUT + b"reserve\r\n") * count)
    rig.tell(rig.client, b"".join(b"bury %d 0\r\n" % number for number in range(1, count + 1)))


def tubes(rig: Rig, count: int) -> None:
    rig.tell(rig.client, b"".join(b"use tube-%d\r\n%b" % (number, PUT) for number in range(count)))
    rig.tell(rig.client, b"use default\r\n")


def reservations(rig: Rig, count: int) -> None:
    rig.tell(rig.client, (PUT + b"reserve\r\n") * count)


def watched(rig: Rig, count: int) -> None:
    rig.tell(rig.client, b"".join(b"watch tube-%d\r\n" % number for number in range(count)))


def connections(rig: Rig, count: int) -> None:
    rig.others(count, b"use tube-{n}\r\n")


def waiting_elsewhere(rig: Rig, count: int) -> None:
    rig.others(count, b"watch tube\r\nignore default\r\nreserve\r\n")


CROWDS: dict[str, tuple[Callable[[Rig, int], None], int]] = {
    "ready jobs": (jobs_ready, 100_000),
    "delayed jobs": (jobs_delayed, 30_000),
    "buried jobs": (jobs_buried, 30_000),
    "tubes with a job": (tubes, 10_000),
    "reservations of one client": (reservations, 10_000),
    "watched tubes": (watched, 1_000),
    "connections": (connections, 10_000),
    "clients that wait in another tube": (waiting_elsewhere, 10_000),
}


def cycle(rig: Rig) -> None:
    """A job's usual life, with everything on the way that touches an order or a timer."""
    client = rig.client
    urgent = b"put %d 0 600 5\r\nhello\r\n"
    number = int(rig.tell(client, urgent % 0).split()[1])
    reserved = rig.tell(client, RESERVE)
    assert reserved.startswith(b"RESERVED ")
    taken = int(reserved.split()[1])
    for command, reply in (
        (b"touch %d", b"TOUCHED"),
        (b"release %d 0 0", b"RELEASED"),
        (b"reserve-job %d", b"RESERVED"),
        (b"bury %d 0", b"BURIED"),
        (b"kick-job %d", b"KICKED"),
        (b"delete %d", b"DELETED"),
    ):
        assert rig.tell(client, command % taken + b"\r\n").startswith(reply)
    rig.tell(client, PUT)
    rig.tell(client, b"put 0 10 600 5\r\nhello\r\n")
    rig.tell(client, b"delete %d\r\n" % (number + 2))
    rig.tell(client, b"peek-ready\r\nstats-tube handover\r\n")
    rig.engine.next_deadline_ns()


def handover(rig: Rig, worker: Session) -> None:
    """A worker waits, and another client puts a job for it."""
    assert rig.tell(worker, b"reserve\r\n") == b""
    rig.tell(rig.client, b"use handover\r\n" + PUT + b"use default\r\n")
    number = int(worker.take_out().split()[1])
    assert rig.tell(worker, b"delete %d\r\n" % number) == b"DELETED\r\n"


def instructions(work: Callable[[], object], folder: str = "") -> int:
    """Bytecode instructions that a piece of work executes in Python, in files of this folder.

    The count is taken when two in a row agree: Python 3.12 counts those of a function only when it was traced before.
    """
    last = 0
    for _ in range(WARM_UPS):
        count = instructions_once(work, folder)
        if count == last > 0:
            break
        last = count
    return last


def instructions_once(work: Callable[[], object], folder: str) -> int:
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return local

    with frames_traced(enter):
        work()
    return count


def least_time_ns(work: Callable[[], object]) -> int:
    """The least processor time of some repetitions."""
    least = 1 << 62
    for _ in range(ROUNDS):
        begun = time.thread_time_ns()
        work()
        least = min(least, time.thread_time_ns() - begun)
    return least


def costs(crowd: Callable[[Rig, int], None], count: int) -> tuple[int, int]:
    """Instructions, and nanoseconds, of a cycle and a handover with this many of a thing around them."""
    work = life(crowd, count)
    return instructions(work), least_time_ns(work)


def life(crowd: Callable[[Rig, int], None], count: int) -> Callable[[], None]:
    """A cycle and a handover with this many of a thing around them."""
    rig = Rig()
    crowd(rig, count)
    (worker,) = rig.others(1, b"watch handover\r\nignore default\r\n")

    def work() -> None:
        cycle(rig)
        handover(rig, worker)

    return work


@pytest.mark.slow
@pytest.mark.parametrize("name", CROWDS)
def test_a_command_costs_the_same_among_thousands(name: str) -> None:
    crowd, count = CROWDS[name]
    few, few_ns = costs(crowd, 1)
    many, many_ns = costs(crowd, count)
    print(f"{name}: 1: {few} instructions, {few_ns} ns; {count}: {many} instructions, {many_ns} ns")
    if is_pure:
        assert few > 1000  # they are really counted
        assert many <= FLAT * few
    assert many_ns <= FLAT_TIME * few_ns


@pytest.mark.skipif(not is_pure or sys.version_info[:2] != COUNTED_ON, reason="another Python takes other instructions")
def test_commands_take_no_more_instructions_than_they_did() -> None:
    """Where it fails for a good reason, INSTRUCTIONS_MAX grows in the commit that says the reason."""
    count = instructions(life(jobs_ready, 1), os.path.dirname(os.path.dirname(engine_module.__file__)))
    print(f"{count} instructions")
    assert 0 < count <= INSTRUCTIONS_MAX


@pytest.mark.skipif(not is_pure or sys.version_info[:2] != COUNTED_ON, reason="another Python takes other instructions")
@pytest.mark.parametrize("limits", [Limits(), Limits(puts_per_second=10**9, puts_burst=10**9, reserved=100)])
def test_rights_cost_little(limits: Limits) -> None:
    """The core alone: with sockets, a fifth of these instructions are some hundredths of a command's time."""
    rig = Rig()
    user = User("u", Proof(), {"*": ALL}, limits)

    def life_of(client: Session) -> int:
        def work() -> None:
            number = rig.tell(client, PUT).split()[1]
            assert rig.tell(client, RESERVE).startswith(b"RESERVED")
            assert rig.tell(client, b"delete %b\r\n" % number) == b"DELETED\r\n"

        return instructions(work)

    plain, guarded = life_of(rig.client), life_of(GuardedSession(rig.service, user, None))
    print(f"{plain} instructions, for a user {guarded}")
    assert 0 < guarded <= RIGHTS_COST * plain


@pytest.mark.slow
def test_a_handover_costs_the_same_among_thousands_of_waiting_clients() -> None:
    """The job goes to the first of the line, who stands at its end again afterwards."""

    def cost(count: int) -> tuple[int, int]:
        rig = Rig()
        waiting = rig.others(count, b"reserve\r\n")
        turn = iter(waiting * 100)

        def work() -> None:
            rig.tell(rig.client, PUT)
            worker = next(turn)
            number = int(worker.take_out().split()[1])
            assert rig.tell(worker, b"delete %d\r\nreserve\r\n" % number) == b"DELETED\r\n"

        return instructions(work), least_time_ns(work)

    few, few_ns = cost(1)
    many, many_ns = cost(10_000)
    if is_pure:
        assert many <= FLAT * few
    assert many_ns <= FLAT_TIME * few_ns


def test_the_counting_of_instructions_sees_a_loop() -> None:
    def loop(rounds: int) -> None:
        for _ in range(rounds):
            pass

    assert instructions(lambda: loop(1000)) > instructions(lambda: loop(10)) + 1000
