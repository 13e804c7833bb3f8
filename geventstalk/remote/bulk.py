"""Changes of many jobs over the protocol alone: one job after the other, each found anew.

Each function is an iterator that does a part of the work in each step, so that its caller can stop between two steps.
Invariant: a change never takes more jobs than there were at its beginning, so it ends even when clients go on putting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from geventstalk.remote.errors import Absent, ClientError, NotDone
from geventstalk.remote.protocol import PEEKS, Beanstalk, Facts
from geventstalk.remote.select import Selection
from geventstalk.remote.shapes import number

_KICK_AT_ONCE: Final = 500
_MISSES_MAX: Final = 1000
"""The most jobs in a row that may be gone before the command reaches them. Beyond it, workers are faster than the
command.
"""
_FAR_S: Final = (1 << 32) - 1

FITTING: Final = {
    "delete": ("ready", "delayed", "buried"),
    "kick": ("buried", "delayed"),
    "bury": ("ready", "delayed"),
    "move": ("ready", "delayed", "buried"),
}
"""The states out of which the protocol lets each action take a job of others."""


@dataclass(frozen=True)
class Part:
    """Jobs of one tube in one state, and how many there were at the beginning."""

    tube: str
    state: str
    jobs: int


@dataclass(frozen=True)
class Plan:
    """The jobs of an action, and how many more match but are reserved by others, beyond the reach of the protocol."""

    parts: tuple[Part, ...]
    held: int

    @property
    def jobs(self) -> int:
        return sum(part.jobs for part in self.parts)


@dataclass(frozen=True)
class Step:
    """The result of one step. `problem` says why a job was left alone."""

    done: int = 0
    failed: int = 0
    problem: str | None = None


def plan(server: Beanstalk, action: str, selection: Selection, target: str | None) -> Plan:
    """Returns the jobs of the action, without those of `target`. Raises NotDone when the protocol cannot do it."""
    states = _states(action, selection)
    exact = selection.exact_tubes
    names = selection.matching(server.tubes()) if exact is None else exact
    asks_for_held = "reserved" in selection.states and action != "kick"
    tubes = list(server.tube_stats(name for name in names if name != target))
    parts = [Part(tube["name"], state, number(tube, f"current-jobs-{state}")) for tube in tubes for state in states]
    held = sum(number(tube, "current-jobs-reserved") for tube in tubes) if asks_for_held else 0
    return Plan(tuple(part for part in parts if part.jobs), held)


def _states(action: str, selection: Selection) -> list[str]:
    if selection.beyond is not None:
        raise NotDone(f"the protocol alone cannot look for {selection.beyond}")
    states = [state for state in FITTING[action] if state in selection.states]
    if not states and selection.states:
        wanted = " or ".join(sorted(selection.states))
        raise NotDone(f"the protocol alone cannot {action} jobs that are {wanted}")
    return states


Target = Beanstalk | str | None
"""The tube that jobs move to: its name for a server that moves jobs, otherwise another connection that uses it."""


def change(server: Beanstalk, action: str, parts: Iterable[Part], most: int | None, target: Target) -> Iterator[Step]:
    """Changes at most `most` jobs."""
    for part in parts:
        wanted = part.jobs if most is None else min(part.jobs, most)
        for step in _part(server, action, part, wanted, target):
            most = None if most is None else most - step.done
            yield step


def _part(server: Beanstalk, action: str, part: Part, wanted: int, target: Target) -> Iterator[Step]:
    server.use(part.tube)
    if action == "kick" and part.state == "buried":
        return _kick(server, wanted)
    return _each(server, part, wanted, _one(action, target))


def _kick(server: Beanstalk, wanted: int) -> Iterator[Step]:
    # Without a buried job a kick takes delayed ones: so look before each kick.
    while wanted > 0 and server.peek_next("buried") is not None:
        kicked = server.kick(min(wanted, _KICK_AT_ONCE))
        wanted -= kicked
        yield Step(done=kicked)
        if not kicked:
            return


def _each(server: Beanstalk, part: Part, wanted: int, act: Callable[[Beanstalk, int], None]) -> Iterator[Step]:
    misses = 0
    while wanted > 0 and misses < _MISSES_MAX:
        found = server.peek_next(part.state)
        if found is None:
            return
        try:
            act(server, found[0])
        except Absent:
            misses += 1
            continue
        misses = 0
        wanted -= 1
        yield Step(done=1)
    if wanted > 0:
        raise NotDone(f"the next job of {part.tube} is gone each time: workers take it, or the user may not change it")


def change_ids(server: Beanstalk, action: str, ids: Iterable[int], target: Target) -> Iterator[Step]:
    act = _one(action, target)
    for id in ids:
        try:
            act(server, id)
        except Absent as error:
            yield Step(failed=1, problem=f"job {id}: {error}")
        else:
            yield Step(done=1)


def _one(action: str, target: Target) -> Callable[[Beanstalk, int], None]:
    if action == "move":
        if target is None:
            raise ValueError("a move needs a target")
        if isinstance(target, str):
            return lambda server, id: server.move(id, target)
        return lambda server, id: _move(server, id, target)
    return {"delete": Beanstalk.delete, "kick": Beanstalk.kick_job, "bury": _bury}[action]


def _facts(server: Beanstalk, id: int) -> Facts:
    for facts in server.job_stats([id]):
        return facts
    raise Absent("there is no such job")


def _bury(server: Beanstalk, id: int) -> None:
    facts = _facts(server, id)
    server.reserve(id)
    server.bury(id, number(facts, "pri"))


def _move(server: Beanstalk, id: int, target: Beanstalk) -> None:
    """Puts the job again and deletes the old one. A job that cannot be put stays as it was."""
    facts = _facts(server, id)
    if facts.get("state") not in PEEKS:
        raise Absent("a worker has reserved the job")
    buried = facts["state"] == "buried"
    pri, ttr_s = number(facts, "pri"), number(facts, "ttr")
    delay_s = number(facts, "time-left") if facts["state"] == "delayed" else 0
    body = server.reserve(id)
    try:
        # A buried job must not be ready in between, or a worker gets it.
        new, _ = target.put(body, pri, _FAR_S if buried else delay_s, ttr_s)
        if buried:
            with contextlib.suppress(Absent):  # a worker has reserved it meanwhile
                target.reserve(new)
                target.bury(new, pri)
    except BaseException:
        with contextlib.suppress(ClientError):
            server.bury(id, pri) if buried else server.release(id, pri, delay_s)
        raise
    try:
        server.delete(id)
    except Absent:
        raise NotDone(f"job {id} is there twice: its time to run was over before it could be deleted") from None
