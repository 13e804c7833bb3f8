"""Selects, sorts and writes long lists in short slices. Other requests and clients have their turn between two slices.

This module must not know the items of the lists. Invariant: no slice takes longer than a millisecond or two, however
long the list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from heapq import merge
from time import perf_counter_ns
from typing import Any, Final, TypeVar

from geventstalk.http.backend import SLICE_NS, Backend

_T = TypeVar("_T")
_Entry = tuple[Any, int, _T]
_RUN: Final = 512
"""The number of entries that are sorted at once."""
_FIRST_MAX: Final = 2048
"""The most first entries that are kept in order while all are read."""


class Pace:
    """Call step() between pieces of work of less than a tenth of a millisecond each."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._end_ns = 0

    def step(self) -> bool:
        """Yields when a slice is over. Returns whether it did, so that everything may have changed."""
        if perf_counter_ns() < self._end_ns:
            return False
        self._backend.yield_now()
        self._end_ns = perf_counter_ns() + SLICE_NS
        return True


def page(
    things: Iterable[_T], key: Callable[[_T], Any | None], pace: Pace, descending: bool, offset: int, limit: int
) -> tuple[list[_T], int]:
    """Returns the things from `offset` on when things are sorted by their keys, and the number of all.

    `key` is called once for each thing, and returns None to leave it out. `things` must not change meanwhile.
    """
    wanted = offset + limit
    runs: list[list[_Entry[_T]]] = [[]]
    run: list[_Entry[_T]] = []
    count = 0
    for number, thing in enumerate(things):
        pace.step()
        found = key(thing)
        if found is None:
            continue
        count += 1
        # Equal keys stay in the order of the list, also when it goes down.
        run.append((found, -number if descending else number, thing))
        if len(run) == _RUN:
            _add(runs, run, wanted, descending)
            run = []
    _add(runs, run, wanted, descending)
    chosen: list[_T] = []
    for number, (_, _, thing) in enumerate(merge(*runs, reverse=descending)):
        if number >= wanted:
            break
        if number >= offset:
            chosen.append(thing)
        if not number % 16:
            pace.step()
    while runs:
        pace.step()
        runs.pop()  # one by one: freeing a hundred thousand entries at once takes ten milliseconds
    return chosen, count


def _add(runs: list[list[_Entry[_T]]], run: list[_Entry[_T]], wanted: int, descending: bool) -> None:
    """Adds entries to the sorted runs. For a page near the beginning there is one run, of the first entries alone."""
    run.sort(reverse=descending)
    if wanted > _FIRST_MAX:
        runs.append(run)
        return
    first = runs[0] + run
    first.sort(reverse=descending)
    del first[wanted:]
    runs[0] = first


def json_list(name: str, values: Iterable[object], pace: Pace, **others: object) -> bytes:
    """Returns a JSON object with this long list in it. `values` may be made while it is written."""
    pieces = []
    for value in values:
        pieces.append(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        pace.step()
    rest = json.dumps(others, ensure_ascii=False, separators=(",", ":"))[1:]
    return f'{{"{name}":[{",".join(pieces)}]{"," if others else ""}{rest}'.encode()
