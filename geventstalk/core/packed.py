"""Pairs of integers in order, for the compiled build: any of them can leave, and no single step takes long.

A pair is a rank and an id, which mean nothing here. plain.py has the same interface.
Entries stand sorted in runs of at most _RUN_MAX, in packed memory: 16 bytes for each, and no object. A run has space in
front and behind. A push or a discard finds its run and its place by bisection and moves entries of this run alone.
Nothing is put off, so no unlucky call has to catch up.
Invariant: runs are sorted, no run but an only one is empty, and a run's memory is no more than some times its entries.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

_EMPTY: Final = -1
_RUN_MAX: Final = 512
"""To insert into a full run moves 4 KB in the mean, which takes a third of a microsecond."""
_SPACE_MIN: Final = 4
_SPARSE_MIN: Final = 32
"""A run with space for more entries gives memory back, or joins a neighbour, when an eighth of it is used."""


@mypyc_attr(acyclic=True)
class _Run:
    """From `begin` up to `end` rank and id alternate in `items`. The rest of `items` has no meaning."""

    __slots__ = ("begin", "end", "items")

    def __init__(self, space: int) -> None:
        self.items: vec[i64] = vec[i64]([0] * (2 * space))
        self.begin: i64 = 0
        self.end: i64 = 0


@mypyc_attr(acyclic=True)
class Order:
    """Distinct pairs, smallest first. first() is O(1); for all else n matters as log n."""

    __slots__ = ("_head", "_runs", "_tail")

    def __init__(self) -> None:
        self._head = _Run(0)  # the first run: most orders never have another
        self._tail = self._head
        self._runs: list[_Run] | None = None  # all of them, when there is more than the first

    def __len__(self) -> int:
        runs = self._runs
        if runs is None:
            return int((self._head.end - self._head.begin) >> 1)
        return sum([int((run.end - run.begin) >> 1) for run in runs])

    def push(self, rank: i64, id: i64) -> None:
        """Adds a pair that is not there."""
        tail = self._tail
        items = tail.items
        end = tail.end
        if end > tail.begin and (rank < items[end - 2] or (rank == items[end - 2] and id < items[end - 1])):
            self._insert(rank, id)
            return
        if end == len(items):
            tail = self._with_space(tail)
            items = tail.items
            end = tail.end
        items[end] = rank
        items[end + 1] = id
        tail.end = end + 2

    def first(self) -> i64:
        """The id of the smallest entry, or EMPTY."""
        head = self._head
        begin = head.begin
        return head.items[begin + 1] if begin < head.end else _EMPTY

    def first_rank(self) -> i64:
        """The rank of the smallest entry, or EMPTY."""
        head = self._head
        begin = head.begin
        return head.items[begin] if begin < head.end else _EMPTY

    def pop(self) -> i64:
        """Removes the smallest entry and returns its id, or returns EMPTY."""
        head = self._head
        begin = head.begin
        if begin == head.end:
            return _EMPTY
        id = head.items[begin + 1]
        head.begin = begin + 2
        self._left(head, 0)
        return id

    def discard(self, rank: i64, id: i64) -> None:
        """Removes an entry that is there, wherever it stands."""
        at: i64 = 0
        run = self._head
        runs = self._runs
        if runs is not None:
            at = _run_of(runs, rank, id)
            run = runs[at]
        items = run.items
        end = run.end
        place = end - 2
        if items[place] != rank or items[place + 1] != id:
            place = _place_of(run, rank, id)
            assert place < end and items[place] == rank and items[place + 1] == id, "an entry is not there"
        if place - run.begin < end - place:
            while place > run.begin:
                items[place] = items[place - 2]
                items[place + 1] = items[place - 1]
                place -= 2
            run.begin = place + 2
        else:
            end -= 2
            while place < end:
                items[place] = items[place + 2]
                items[place + 1] = items[place + 3]
                place += 2
            run.end = end
        self._left(run, at)

    def clear(self) -> None:
        """Removes all entries."""
        if self._runs is not None:
            self._head = self._tail = _Run(0)
            self._runs = None
            return
        head = self._head
        head.begin = head.end
        self._left(head, 0)

    def smallest(self, count: int) -> list[int]:
        """The ids of up to `count` entries in order, without removing them. It looks at no more than it returns."""
        return [id for _, id in self.entries(count)]

    def entries(self, count: int) -> list[tuple[int, int]]:
        """Up to `count` entries in order, rank and id, without removing them. It looks at no more than it returns."""
        found: list[tuple[int, int]] = []
        left: i64 = count
        for run in self._runs or [self._head]:
            items = run.items
            place = run.begin
            end = min(run.end, place + 2 * left)
            left -= (end - place) >> 1
            while place < end:
                found.append((int(items[place]), int(items[place + 1])))
                place += 2
            if left <= 0:
                break
        return found

    def at_least(self, rank: i64, id: i64) -> i64:
        """The id of the smallest entry that is not below this pair; or EMPTY."""
        runs = self._runs
        at: i64 = 0 if runs is None else _run_of(runs, rank, id)
        run = self._head if runs is None else runs[at]
        place = _place_of(run, rank, id)
        if place < run.end:
            return run.items[place + 1]
        if runs is None or at + 1 == len(runs):
            return _EMPTY
        run = runs[at + 1]
        return run.items[run.begin + 1]

    def at_most(self, rank: i64, id: i64) -> i64:
        """The id of the largest entry that is not above this pair; or EMPTY."""
        runs = self._runs
        run = self._head if runs is None else runs[_run_of(runs, rank, id)]
        items = run.items
        place = _place_of(run, rank, id)
        if place < run.end and items[place] == rank and items[place + 1] == id:
            return id
        return items[place - 1] if place > run.begin else _EMPTY  # no run but the first begins above

    def check(self) -> None:
        """Asserts the invariants. O(n): for tests."""
        runs = self._runs
        if runs is None:
            assert self._head is self._tail
            runs = [self._head]
        else:
            assert len(runs) > 1 and runs[0] is self._head and runs[-1] is self._tail
            assert all(run.begin < run.end for run in runs)
        for run in runs:
            space = len(run.items)
            assert 0 <= run.begin <= run.end <= space <= 2 * _RUN_MAX
            assert not (run.begin | run.end | space) & 1
            needed = run is self._tail or space <= 2 * _SPARSE_MIN or run.end - run.begin > space >> 3
            assert needed, "memory that is not needed"
        entries = self.entries(len(self) + 1)
        assert entries == sorted(set(entries)) and len(entries) == len(self)

    def _insert(self, rank: i64, id: i64) -> None:
        """Adds a pair that does not come last."""
        at: i64 = 0
        run = self._head
        runs = self._runs
        if runs is not None:
            at = _run_of(runs, rank, id)
            run = runs[at]
        if run.end - run.begin == 2 * _RUN_MAX:
            run = self._split(at, rank, id)
        elif run.begin == 0 and run.end == len(run.items):
            _widen(run)
        items = run.items
        begin, end = run.begin, run.end
        place = _place_of(run, rank, id)
        if end == len(items) or (begin > 0 and place - begin < end - place):
            run.begin = begin - 2
            here = begin
            while here < place:
                items[here - 2] = items[here]
                items[here - 1] = items[here + 1]
                here += 2
            place -= 2
        else:
            run.end = end + 2
            here = end
            while here > place:
                here -= 2
                items[here + 2] = items[here]
                items[here + 3] = items[here + 1]
        items[place] = rank
        items[place + 1] = id

    def _with_space(self, tail: _Run) -> _Run:
        """Returns the last run, with space behind, or a new last run."""
        used, space = tail.end - tail.begin, len(tail.items)
        if used == 2 * _RUN_MAX or (space == 2 * _RUN_MAX and used > _RUN_MAX):
            new = _Run(_RUN_MAX)
            runs = self._runs
            if runs is None:
                self._runs = [tail, new]
            else:
                runs.append(new)
            self._tail = new
            return new
        if used > space >> 1 or not space:
            _widen(tail)
        else:
            items = tail.items
            begin = tail.begin
            here: i64 = 0
            while here < used:
                items[here] = items[begin + here]
                here += 1
            tail.begin = 0
            tail.end = used
        return tail

    def _split(self, at: i64, rank: i64, id: i64) -> _Run:
        """Makes two runs of one that is full. Returns the one that a pair belongs to."""
        runs = self._runs
        run = self._head if runs is None else runs[at]
        items = run.items
        half = _Run(_RUN_MAX)
        new = half.items
        middle = run.begin + _RUN_MAX
        here: i64 = 0
        while here < _RUN_MAX:
            new[here] = items[middle + here]
            here += 1
        if runs is None:
            self._runs = [run, half]
        else:
            runs.insert(at + 1, half)
        half.end = _RUN_MAX
        run.end = middle
        if run is self._tail:
            self._tail = half
        return run if rank < new[0] or (rank == new[0] and id < new[1]) else half

    def _left(self, run: _Run, at: i64) -> None:
        """After an entry has left a run: the run may be empty, or have memory that it does not need."""
        used, space = run.end - run.begin, len(run.items)
        if used and (space <= 2 * _SPARSE_MIN or used > space >> 3):
            return
        # The entry has left all the same, and the next one that does comes here again.
        try:  # noqa: SIM105  # suppress() takes memory, too
            self._tidy(run, at)
        except MemoryError:
            pass

    def _tidy(self, run: _Run, at: i64) -> None:
        used, space = run.end - run.begin, len(run.items)
        runs = self._runs
        if runs is not None:
            if not used:
                self._drop(runs, at)
                return
            for first in (at - 1, at):
                if first >= 0 and first + 1 < len(runs) and _used(runs[first]) + _used(runs[first + 1]) <= _RUN_MAX:
                    _join(runs[first], runs[first + 1])
                    self._drop(runs, first + 1)
                    return
        elif not used:
            run.begin = run.end = 0
            if space <= 2 * _SPARSE_MIN:
                return
        _resize(run, used)

    def _drop(self, runs: list[_Run], at: i64) -> None:
        """Removes an empty run; it is not the only one."""
        del runs[at]
        self._head = runs[0]
        self._tail = runs[-1]
        if len(runs) == 1:
            self._runs = None


def _run_of(runs: list[_Run], rank: i64, id: i64) -> i64:
    """The number of the run that a pair belongs to: the last one that does not begin above it, or the first."""
    low: i64 = 1
    high: i64 = len(runs)
    while low < high:
        middle = (low + high) >> 1
        run = runs[middle]
        found = run.items[run.begin]
        if found < rank or (found == rank and run.items[run.begin + 1] <= id):
            low = middle + 1
        else:
            high = middle
    return low - 1


def _place_of(run: _Run, rank: i64, id: i64) -> i64:
    """Returns where a pair is in a run, or would be."""
    items = run.items
    low = run.begin >> 1
    high = run.end >> 1
    while low < high:
        middle = (low + high) >> 1
        found = items[2 * middle]
        if found < rank or (found == rank and items[2 * middle + 1] < id):
            low = middle + 1
        else:
            high = middle
    return 2 * low


def _used(run: _Run) -> i64:
    return run.end - run.begin


def _join(run: _Run, after: _Run) -> None:
    """Moves the entries of the next run into this one."""
    used, more = run.end - run.begin, after.end - after.begin
    if run.end + more > len(run.items):
        _resize(run, used + more)
    items, others = run.items, after.items
    end, begin = run.end, after.begin
    here: i64 = 0
    while here < more:
        items[end + here] = others[begin + here]
        here += 1
    run.end = end + more


def _widen(run: _Run) -> None:
    """Makes space behind the entries of a run."""
    used = run.end - run.begin
    space: i64 = 2 * used
    if space > 2 * _RUN_MAX:
        space = 2 * _RUN_MAX
    if space < 2 * _SPACE_MIN:
        space = 2 * _SPACE_MIN
    _resize(run, space)


def _resize(run: _Run, space: i64) -> None:
    """Gives a run exactly this space, which is enough for its entries."""
    before = run.items
    begin = run.begin
    used = run.end - begin
    items = vec[i64]([0] * int(space))
    here: i64 = 0
    while here < used:
        items[here] = before[begin + here]
        here += 1
    run.items = items
    run.begin = 0
    run.end = used
