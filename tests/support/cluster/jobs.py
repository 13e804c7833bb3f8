"""A model of one job, and a judge of everything that clients saw of all jobs.

Nothing acknowledged is lost, nothing is invented, what was deleted does not come back, nobody is handed what somebody
else holds, no id is given twice, and two nodes never serve at the same time. The first four are one question for each
job: is its history linearizable? One thing is allowed beyond that, and counted: a change without an answer may have
been seen by others before it was committed, and a takeover may undo it. A put may not: no client is shown a job before
its put is safe, because its id may be another job's later. A hold ends with its connection: from the server's side at
any moment after the last reply that came over it, because a node that takes over knows of no holds. Imports nothing
of geventstalk.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

from tests.support.cluster.linear import Step, ends

NS = 1_000_000_000
EARLY_NS = NS // 10
"""By how much a delay may seem too short: nodes keep the end of a delay by the wall clock."""

ABSENT, READY, DELAYED, RESERVED, BURIED, GONE = "absent", "ready", "delayed", "reserved", "buried", "gone"
NOT_FOUND = "NOT_FOUND"
REFUSALS = frozenset({NOT_FOUND, "OUT_OF_MEMORY", "DRAINING"})
CHANGES = frozenset({"put", "delete", "release", "bury", "kick"})
"""The words whose answers promise something."""


@dataclass(slots=True)
class Operation:
    """One command of one connection. `reply` is the first word of its answer, "" when none came; then `ended` is 0."""

    connection: int
    word: str
    begun: int
    ended: int = 0
    reply: str = ""
    body: bytes = b""  # which names the job
    id: int = 0  # of the job, where it is known
    delay_ns: int = 0
    ttr_ns: int = 0

    def __str__(self) -> str:
        took = f"{(self.ended - self.begun) / 1e6:.1f} ms" if self.ended else "no answer"
        return f"[{self.begun / 1e9:.4f}, {took}] connection {self.connection}: {self.word} {self.id} {self.reply}"


def promises(operation: Operation) -> bool:
    """Returns whether it is a change that was acknowledged."""
    return bool(operation.ended) and operation.word in CHANGES and operation.reply not in REFUSALS


@dataclass(slots=True)
class Connection:
    """One connection. `node` and `epoch` are what the server said of itself at the beginning of it."""

    number: int
    address: str
    node: str = ""
    epoch: int = 0


class State(NamedTuple):
    """Where a job is. `since` is the number of the operation whose time runs: a delay, or a time to run.

    `safe` is where it was when a change of it was acknowledged last, and what a takeover may go back to: a change that
    is not committed yet is seen by others, such as the client that reserves the job. "" is where it is.
    """

    place: str
    holder: int = 0
    since: int = -1
    safe: str = ""
    safe_since: int = -1


START = State(ABSENT)


class Story:
    """The history of one job as steps: what clients did with it, and what may have happened by itself."""

    def __init__(
        self, operations: Iterable[Operation], last_of: dict[int, Operation], *, forgets: bool = False
    ) -> None:
        """`last_of` has each connection's last operation that was answered, be it about another job.

        With `forgets` a change without an answer that is no put may have been seen by others, and be undone.
        """
        self.operations = sorted(operations, key=lambda operation: operation.begun)
        self.steps: list[Step] = []
        self._acts: list[tuple[str, int]] = []
        self._until = inf
        for number, operation in enumerate(self.operations):
            self._add("client", number, operation.word, operation.begun, operation.ended or None)
        holders: dict[int, list[int]] = defaultdict(list)
        for number, operation in enumerate(self.operations):
            if operation.delay_ns and operation.reply != NOT_FOUND:
                self._add("due", number, "due", operation.begun + operation.delay_ns - EARLY_NS, None, (number,))
            if operation.ttr_ns and operation.word in ("reserve", "touch"):
                self._add("late", number, "late", operation.begun + operation.ttr_ns - EARLY_NS, None, (number,))
            if forgets and operation.word in CHANGES - {"put"} and not operation.ended:
                self._add("forget", number, "forget", operation.begun, None, (number,))
            if operation.word == "reserve":
                holders[operation.connection].append(number)
        for connection in holders:
            last = last_of[connection]
            answered = (
                number
                for number, operation in enumerate(self.operations)
                if operation.connection == connection and operation.ended
            )
            # Several holds of one connection may end with it; of each job it is one at most.
            self._add("drop", connection, "drop", last.begun, None, tuple(answered))

    def _add(
        self, kind: str, number: int, name: str, begun: int, ended: int | None, after: tuple[int, ...] = ()
    ) -> None:
        self.steps.append(Step(name, begun, ended, after))
        self._acts.append((kind, number))

    def model(self, state: State, step: int) -> list[State]:
        """The model of one job, for linear.ends()."""
        kind, number = self._acts[step]
        if self.steps[step].begun > self._until:
            return []
        if kind == "client":
            return _apply(state, self.operations[number], number)
        if kind == "forget":
            return [State(state.safe, since=state.safe_since)] if state.safe else []
        ready = state._replace(place=READY, holder=0, since=-1)
        if kind == "drop":
            return [ready] if state.place == RESERVED and state.holder == number else []
        place = DELAYED if kind == "due" else RESERVED
        return [ready] if state.place == place and state.since == number else []

    def ends(self, until: float = inf) -> set[State]:
        """Where the job may be at the end, or at a moment; empty when this cannot have happened."""
        self._until = until
        return ends(self.steps, START, self.model)


def _apply(state: State, operation: Operation, number: int) -> list[State]:
    """Returns what a client's operation makes of a state. Without an answer it has happened: it need not be applied."""
    place = state.place
    mine = place == RESERVED and state.holder == operation.connection
    failed = operation.reply == NOT_FOUND
    match operation.word:
        case "put":
            after = State(DELAYED, since=number) if operation.delay_ns else State(READY)
            possible = place == ABSENT
        case "reserve":
            after, possible = State(RESERVED, operation.connection, number), place == READY
        case "delete":
            after, possible = State(GONE), mine or place in (READY, DELAYED, BURIED)
        case "release":
            after = State(DELAYED, since=number) if operation.delay_ns else State(READY)
            possible = mine
        case "bury":
            after, possible = State(BURIED), mine
        case "touch":
            after, possible = State(RESERVED, operation.connection, number), mine
        case "kick":
            after, possible = State(READY), place in (BURIED, DELAYED)
        case "absent":  # at the end, when everything was taken out
            after, possible = state, place in (ABSENT, GONE)
        case word:
            raise ValueError(f"no such word: {word}")
    if failed:
        return [] if possible else [state]
    if not possible:
        return []
    if operation.word not in CHANGES:
        return [after._replace(safe=state.safe, safe_since=state.safe_since)]
    if operation.ended:
        return [after]
    if state.safe:
        return [after._replace(safe=state.safe, safe_since=state.safe_since)]
    held = place == RESERVED  # which a takeover does not know
    return [after._replace(safe=READY if held else place, safe_since=-1 if held else state.since)]


@dataclass
class Verdict:
    """The faults by kind, with a line for each, and the counts."""

    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        """Returns whether all is well."""
        return not any(self.faults.values())

    def add(self, other: Verdict) -> None:
        for kind, lines in other.faults.items():
            self.faults[kind] += lines
        self.counts += other.counts

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return "\n".join([counts, *(f"{kind}: {line}" for kind, lines in self.faults.items() for line in lines[:20])])


FORGOTTEN = "jobs whose change others saw, and that was not acknowledged and is undone"
LOST, INVENTED, BACK, TWICE, IDS, WRONG, BOTH = (
    "lost",
    "invented",
    "came back",
    "two holders",
    "id given twice",
    "wrong answer",
    "two nodes served",
)


class Judge:
    """Keeps in mind which ids were ever given; each call judges a history that begins and ends without jobs."""

    def __init__(self) -> None:
        self._ids: dict[int, bytes] = {}
        self._open: dict[bytes, list[Operation]] = {}  # puts without an answer, which may still be on their way

    def judge(self, operations: list[Operation], connections: dict[int, Connection]) -> Verdict:
        """`operations` of all connections; behind the last of them the server was seen to hold no job."""
        verdict = Verdict()
        verdict.faults[BOTH] += served_at_once(operations, connections)
        jobs: dict[bytes, list[Operation]] = defaultdict(list)
        last_of: dict[int, Operation] = {}
        end = max((max(operation.begun, operation.ended) for operation in operations), default=0) + 1
        for operation in operations:
            if operation.ended:
                last = last_of.get(operation.connection)
                if last is None or operation.begun >= last.begun:
                    last_of[operation.connection] = operation
                verdict.counts[f"{operation.word} {operation.reply}"] += 1
            else:
                verdict.counts[f"{operation.word} without answer"] += 1
            if operation.body:
                jobs[operation.body].append(operation)
        verdict.counts["jobs"] = len(jobs)
        for body, history in jobs.items():
            self._judge(body, [*self._open.pop(body, []), *history], last_of, end, verdict)
        return verdict

    def _judge(
        self, body: bytes, history: list[Operation], last_of: dict[int, Operation], end: int, verdict: Verdict
    ) -> None:
        if not any(operation.word == "put" for operation in history):
            verdict.faults[INVENTED].append(f"no client put {body[:40]!r}: {_told(history)}")
            return
        ids = {operation.id for operation in history if operation.id}
        if len(ids) > 1:
            verdict.faults[INVENTED].append(f"one put, several ids {sorted(ids)}: {_told(history)}")
            return
        for id in ids:
            if self._ids.setdefault(id, body) != body:
                verdict.faults[IDS].append(f"{id}, to {self._ids[id][:40]!r} and to {body[:40]!r}")
        history = [operation for operation in history if operation.reply not in ("OUT_OF_MEMORY", "DRAINING")]
        nothing = Operation(0, "absent", end, end + 1, "OK", body)
        places = {state.place for state in Story([*history, nothing], last_of).ends()}
        if not places and (found := Story([*history, nothing], last_of, forgets=True).ends()):
            verdict.counts[FORGOTTEN] += 1
            places = {state.place for state in found}
        if not places:
            kind, line = explain(history, nothing, last_of)
            verdict.faults[kind].append(line)
        elif ABSENT in places:
            self._open[body] = [operation for operation in history if operation.word == "put" and not operation.ended]


def explain(history: list[Operation], nothing: Operation, last_of: dict[int, Operation]) -> tuple[str, str]:
    """Why a history is impossible: the kind of fault, and the first operation that nothing explains."""
    story = _told([*history, nothing])
    answered = sorted((o for o in [*history, nothing] if o.ended), key=lambda operation: operation.ended)
    before: set[State] = {START}
    for operation in answered:
        part = [o for o in history if o.begun <= operation.ended and (not o.ended or o.ended <= operation.ended)]
        # What ends later may have happened already.
        part += [
            Operation(o.connection, o.word, o.begun, 0, o.reply, o.body, o.id, o.delay_ns, o.ttr_ns)
            for o in history
            if o.ended > operation.ended and o.begun <= operation.ended
        ]
        if operation is nothing:
            return LOST, story
        after = Story(part, last_of, forgets=True).ends(operation.ended)
        if not after:
            places = {state.place for state in before}
            if operation.word == "reserve" and places <= {GONE}:
                return BACK, f"{operation} is impossible: {story}"
            if operation.word == "reserve" and places <= {RESERVED, GONE}:
                return TWICE, f"{operation} is impossible: {story}"
            return WRONG, f"{operation} is impossible after {sorted(places)}: {story}"
        before = after
    return WRONG, story


def _told(history: list[Operation]) -> str:
    return "".join(f"\n    {operation}" for operation in sorted(history, key=lambda operation: operation.begun))


def served_at_once(operations: list[Operation], connections: dict[int, Connection]) -> list[str]:
    """Answers of a node to what was asked after another node of a later epoch had answered.

    Each connection belongs to one node for all its life, and a node that has led and leads again has new connections.
    """
    first: dict[tuple[int, str], int] = {}
    for operation in operations:
        connection = connections.get(operation.connection)
        if operation.ended and connection is not None and connection.epoch:
            key = (connection.epoch, connection.node)
            first[key] = min(first.get(key, operation.ended), operation.ended)
    faults = []
    for operation in operations:
        connection = connections.get(operation.connection)
        if not operation.ended or connection is None or not connection.epoch:
            continue
        for (epoch, node), ended in first.items():
            if epoch > connection.epoch and node != connection.node and operation.begun > ended:
                who = f"{connection.node} of epoch {connection.epoch}"
                later = (operation.begun - ended) / 1e6
                faults.append(f"{who} answered, {later:.1f} ms after {node} of epoch {epoch} had: {operation}")
            if epoch == connection.epoch and node != connection.node:
                faults.append(f"both {node} and {connection.node} served epoch {epoch}: {operation}")
    return faults


def gaps(operations: Iterable[Operation]) -> list[tuple[int, int]]:
    """From one acknowledged change to the next: (when the first was answered, ns until the next one was)."""
    moments = sorted(operation.ended for operation in operations if promises(operation))
    return [(before, after - before) for before, after in pairwise(moments)]


def longest_gap(gaps: Iterable[tuple[int, int]], begun: int, ended: int) -> int:
    """The longest gap in ns that has something of the time between two moments."""
    return max((length for at, length in gaps if at <= ended and at + length >= begun), default=0)
