"""A heap of integers from which any entry can leave.

This room must not know what its entries mean: callers pack their order into an integer, high bits first.
Entries that leave from the middle stay in the array, named in `_gone`, until they surface or outnumber the rest, so
that leaving is O(1) and the work is done by the C heap of the standard library.
Invariant: every entry of `_gone` is in `_entries`, and the smallest entry is never gone.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

EMPTY: Final = -1
"""What first() and pop() return when nothing is there; entries are never negative."""

_PRUNE_AT: Final = 64


class Heap:
    """Distinct non-negative integers, smallest first. push and pop are O(log n); first, discard and len are O(1)."""

    __slots__ = ("_entries", "_gone")

    def __init__(self) -> None:
        self._entries: list[int] = []
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries) - len(self._gone)

    def push(self, entry: int) -> None:
        """Adds an entry that is not in the heap now."""
        if self._gone and entry in self._gone:
            self._gone.discard(entry)  # it never left the array: it is live again where it stands
        else:
            heappush(self._entries, entry)

    def first(self) -> int:
        """The smallest entry, or EMPTY."""
        return self._entries[0] if self._entries else EMPTY

    def pop(self) -> int:
        """Removes and returns the smallest entry, or returns EMPTY."""
        entries = self._entries
        if not entries:
            return EMPTY
        entry = heappop(entries)
        if self._gone:
            self._surface()
        return entry

    def discard(self, entry: int) -> None:
        """Removes an entry that is in the heap, wherever it stands."""
        entries = self._entries
        if entries[0] == entry:
            heappop(entries)
            if self._gone:
                self._surface()
        elif entries[-1] == entry:
            entries.pop()
        else:
            self._gone.add(entry)
            if len(self._gone) > _PRUNE_AT and 2 * len(self._gone) > len(entries):
                self._prune()

    def clear(self) -> None:
        """Removes all entries."""
        self._entries.clear()
        if self._gone:
            self._gone.clear()

    def smallest(self, count: int) -> list[int]:
        """Up to `count` entries in order, without removing them. O(n): for tests and checks."""
        return sorted(entry for entry in self._entries if entry not in self._gone)[:count]

    def _surface(self) -> None:
        """Drops what is gone from the top, so that the first entry is a live one."""
        entries, gone = self._entries, self._gone
        while entries and entries[0] in gone:
            gone.discard(heappop(entries))

    def _prune(self) -> None:
        """Rebuilds the array from the live entries. Paid for by the entries that left since the last time."""
        gone = self._gone
        self._entries = [entry for entry in self._entries if entry not in gone]
        self._gone = set()
        heapify(self._entries)
