"""Pairs of integers in order, for the pure build: any of them can leave, and no single step takes long.

A pair is a rank and an id, which mean nothing here, in one integer with the rank in its high bits. packed.py has the
same interface. Entries stand sorted in runs of at most _RUN_MAX. A push or a discard finds its run by bisection and
moves entries of this run alone, all in C. Nothing is put off, so no unlucky call has to catch up.
Invariant: runs are sorted, no run but an only one is empty, and each entry of a run is at least the run's start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Final

_EMPTY: Final = -1
_ID_BITS: Final = 64
_ID_MASK: Final = (1 << _ID_BITS) - 1
_NONE: Final[list[int]] = []
_RUN_MAX: Final = 512
"""To take the first entry of a full run moves 4 KB, which is less work than the call that does it."""


class Order:
    """Distinct pairs, smallest first. first() is O(1); for all else n matters as log n, in C."""

    __slots__ = ("_head", "_runs", "_starts", "_tail")

    def __init__(self) -> None:
        self._head: list[int] = []  # the first run: most orders never have another
        self._tail = self._head
        self._runs: list[list[int]] | None = None  # all of them, when there is more than the first
        self._starts: list[int] = _NONE  # where each begins: a lower bound, which stays right when entries leave

    def __len__(self) -> int:
        runs = self._runs
        return len(self._head) if runs is None else sum([len(run) for run in runs])

    def push(self, rank: int, id: int) -> None:
        """Adds a pair that is not there."""
        entry = rank << _ID_BITS | id
        tail = self._tail
        if tail and entry < tail[-1]:
            self._insert(entry)
        elif len(tail) < _RUN_MAX:
            tail.append(entry)
        else:
            runs = self._all_runs()
            self._tail = [entry]
            runs.append(self._tail)
            self._starts.append(entry)

    def first(self) -> int:
        """The id of the smallest entry, or EMPTY."""
        return self._head[0] & _ID_MASK if self._head else _EMPTY

    def first_rank(self) -> int:
        """The rank of the smallest entry, or EMPTY."""
        return self._head[0] >> _ID_BITS if self._head else _EMPTY

    def pop(self) -> int:
        """Removes the smallest entry and returns its id, or returns EMPTY."""
        head = self._head
        if not head:
            return _EMPTY
        entry = head.pop(0)
        if not head and head is not self._tail:
            self._drop(0)
        return entry & _ID_MASK

    def discard(self, rank: int, id: int) -> None:
        """Removes an entry that is there, wherever it stands."""
        entry = rank << _ID_BITS | id
        runs = self._runs
        if runs is None:
            run, at = self._head, 0
        else:
            at = bisect_right(self._starts, entry) - 1
            run = runs[at]
        if run[-1] == entry:
            run.pop()
        else:
            place = bisect_left(run, entry)
            assert run[place] == entry, "an entry is not there"
            del run[place]
        if runs is not None and not run:
            self._drop(at)

    def clear(self) -> None:
        """Removes all entries."""
        if self._runs is None:
            self._head.clear()
        else:
            self._head = self._tail = []
            self._runs = None
            self._starts = _NONE

    def smallest(self, count: int) -> list[int]:
        """The ids of up to `count` entries in order, without removing them. It looks at no more than it returns."""
        return [entry & _ID_MASK for entry in self._first(count)]

    def entries(self, count: int) -> list[tuple[int, int]]:
        """Up to `count` entries in order, rank and id, without removing them. It looks at no more than it returns."""
        return [(entry >> _ID_BITS, entry & _ID_MASK) for entry in self._first(count)]

    def _first(self, count: int) -> list[int]:
        found: list[int] = []
        for run in self._runs or [self._head]:
            if len(found) >= count:
                break
            found += run[: count - len(found)]
        return found

    def at_least(self, rank: int, id: int) -> int:
        """The id of the smallest entry that is not below this pair; or EMPTY."""
        least = rank << _ID_BITS | id
        runs, at = self._runs_at(least)
        run = runs[at]
        place = bisect_left(run, least)
        if place < len(run):
            return run[place] & _ID_MASK
        return runs[at + 1][0] & _ID_MASK if at + 1 < len(runs) else _EMPTY

    def at_most(self, rank: int, id: int) -> int:
        """The id of the largest entry that is not above this pair; or EMPTY."""
        most = rank << _ID_BITS | id
        runs, at = self._runs_at(most)
        run = runs[at]
        place = bisect_right(run, most)
        if place:
            return run[place - 1] & _ID_MASK
        return runs[at - 1][-1] & _ID_MASK if at else _EMPTY

    def _runs_at(self, entry: int) -> tuple[list[list[int]], int]:
        """All runs, and which of them an entry belongs to."""
        runs = self._runs
        return ([self._head], 0) if runs is None else (runs, bisect_right(self._starts, entry) - 1)

    def check(self) -> None:
        """Asserts the invariants. O(n): for tests."""
        runs = self._runs
        if runs is None:
            assert self._head is self._tail and len(self._head) <= _RUN_MAX
            assert self._head == sorted(set(self._head))
            return
        assert runs[0] is self._head and runs[-1] is self._tail and len(runs) == len(self._starts)
        assert len(runs) == 1 or all(runs)
        assert self._starts[0] == _EMPTY and self._starts == sorted(self._starts)
        assert all(start <= run[0] for start, run in zip(self._starts, runs, strict=True) if run)
        entries = [entry for run in runs for entry in run]
        assert entries == sorted(set(entries)) and all(len(run) <= _RUN_MAX for run in runs)

    def _insert(self, entry: int) -> None:
        at = 0
        run = self._head
        runs = self._runs
        if runs is not None:
            at = bisect_right(self._starts, entry) - 1
            run = runs[at]
        if len(run) == _RUN_MAX:
            half = self._split(at)
            if entry >= half[0]:
                run = half
        insort(run, entry)

    def _split(self, at: int) -> list[int]:
        """Makes two runs of one. Returns the second."""
        runs = self._all_runs()
        run = runs[at]
        half = run[_RUN_MAX // 2 :]
        del run[_RUN_MAX // 2 :]
        runs.insert(at + 1, half)
        self._starts.insert(at + 1, half[0])
        self._tail = runs[-1]
        return half

    def _all_runs(self) -> list[list[int]]:
        runs = self._runs
        if runs is None:
            runs = self._runs = [self._head]
            self._starts = [_EMPTY]
        return runs

    def _drop(self, at: int) -> None:
        """Removes a run that is empty; it is not the only one."""
        runs = self._all_runs()
        del runs[at]
        del self._starts[at]
        self._starts[0] = _EMPTY
        self._head = runs[0]
        self._tail = runs[-1]
        if len(runs) == 1:
            self._runs = None
            self._starts = _NONE
