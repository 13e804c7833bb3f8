"""Is a history linearizable? The search of Wing and Gong, with the memory of states seen that Lowe added.

A history is linearizable when each operation can be given one moment between its begin and its end, so that one after
the other they do what a model of one thing allows. An operation without an answer may have happened at any moment after
its begin, or never. So may what the server does by itself: it is an operation that no client has to see.
Pure: it knows no sockets, no clock, and not what the operations mean. It is for histories of one thing, with some tens
of operations: a caller with many things asks for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True)
class Step:
    """One operation. `ended` is None when it may have happened or not. `after` must have happened before it."""

    name: str
    begun: int
    ended: int | None
    after: tuple[int, ...] = ()


Model = Callable[[State, int], Iterable[State]]
"""Gives the states in which a step, by its number, may leave a state. None says that it cannot have happened then."""


class TooHard(Exception):
    """The search has looked at more states than it was allowed to."""


def ends(steps: Sequence[Step], initial: State, model: Model[State], limit: int = 200_000) -> set[State]:
    """The states that the thing may be in at the end. Empty when the history is not linearizable.

    Raises TooHard when more than `limit` states would have to be looked at.
    """
    must = sum(1 << number for number, step in enumerate(steps) if step.ended is not None)
    needs = [sum(1 << other for other in step.after) for step in steps]
    by_begin = sorted(range(len(steps)), key=lambda number: steps[number].begun)
    by_end = sorted((number for number, step in enumerate(steps) if step.ended is not None), key=_end_of(steps))
    seen: set[tuple[int, State]] = set()
    todo: list[tuple[int, State]] = [(0, initial)]
    found: set[State] = set()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        if len(seen) > limit:
            raise TooHard(f"{len(seen)} states for {len(steps)} operations")
        done, state = at
        if done & must == must:
            found.add(state)
        first_end = next((steps[number].ended for number in by_end if not done >> number & 1), None)
        for number in by_begin:
            if first_end is not None and steps[number].begun > first_end:
                break  # what has ended by then comes before it
            if done >> number & 1 or needs[number] & ~done:
                continue
            todo += [(done | 1 << number, following) for following in model(state, number)]
    return found


def _end_of(steps: Sequence[Step]) -> Callable[[int], int]:
    def end(number: int) -> int:
        ended = steps[number].ended
        return ended if ended is not None else 0

    return end
