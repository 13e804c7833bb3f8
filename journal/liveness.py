"""Which keys are live, in which segment their records stand, and how many bytes the records take.

This room must not know payloads or files. It takes sixteen bytes a key, in pages of sequential keys.
Invariant: the live bytes of a segment are those of the records that a replay still needs.
"""

from __future__ import annotations

from array import array
from typing import Final

_PAGE_BITS: Final = 6
"""Pages of 64 keys. One old key keeps its whole page: with larger pages, old keys among many short-lived ones would
cost more memory."""
_PAGE_KEYS: Final = 1 << _PAGE_BITS
_PAGE_MASK: Final = _PAGE_KEYS - 1
_BYTES_BITS: Final = 32
"""A number holds a segment and a size in 64 bits, 32 bits each: see SEGMENT_MAX in sqlite/format.py."""
_BYTES_MASK: Final = (1 << _BYTES_BITS) - 1
_ZEROS: Final = array("Q", bytes(8 * _PAGE_KEYS))


class _Page:
    """Two numbers for each key, `segment << 32 | bytes`: its whole record and its last change. 0 stands for none."""

    __slots__ = ("changes", "count", "wholes")

    def __init__(self) -> None:
        self.wholes = array("Q", _ZEROS)
        self.changes = array("Q", _ZEROS)
        self.count = 0


class Liveness:
    """Live keys and live bytes, in all and by segment."""

    def __init__(self) -> None:
        self.keys = 0
        self.total_bytes = 0
        self.change_bytes = 0  # the part of total_bytes that changes take; a whole record written anew replaces it
        # Nearly every record comes to and goes from the segment that was written last. To keep the live bytes of this
        # segment apart from the others saves 3 % of a durable put.
        self._segment = 0
        self._segment_bytes = 0
        self._others: dict[int, int] = {}
        self._pages: dict[int, _Page] = {}

    def whole(self, key: int, segment: int, size: int) -> None:
        """A whole record was written: all earlier records of the key are dead."""
        page = self._pages.get(key >> _PAGE_BITS)
        if page is None:
            page = self._pages[key >> _PAGE_BITS] = _Page()
        at = key & _PAGE_MASK
        wholes = page.wholes
        if wholes[at]:
            self._drop(page, at)
        else:
            page.count += 1
            self.keys += 1
        wholes[at] = segment << _BYTES_BITS | size
        self._grow(segment, size)

    def change(self, key: int, segment: int, size: int) -> None:
        """A change was written: the change before it is dead. Nothing happens for a key that is not live."""
        page = self._pages.get(key >> _PAGE_BITS)
        at = key & _PAGE_MASK
        if page is None or not page.wholes[at]:
            return
        before = page.changes[at]
        if before:
            self._shrink(before)
            self.change_bytes -= before & _BYTES_MASK
        self.change_bytes += size
        page.changes[at] = segment << _BYTES_BITS | size
        self._grow(segment, size)

    def delete(self, key: int) -> None:
        """The key and all its records are dead. Nothing happens for a key that is not live."""
        page = self._pages.get(key >> _PAGE_BITS)
        at = key & _PAGE_MASK
        if page is None or not page.wholes[at]:
            return
        self._drop(page, at)
        page.wholes[at] = 0
        page.count -= 1
        self.keys -= 1
        if not page.count:
            del self._pages[key >> _PAGE_BITS]

    def has_page(self, key: int) -> bool:
        """Whether there is a page for the key's numbers. The first whole() of a key makes the page before all else."""
        return (key >> _PAGE_BITS) in self._pages

    def segment_of(self, key: int) -> int:
        """The segment of the key's whole record; 0 when the key is not live."""
        page = self._pages.get(key >> _PAGE_BITS)
        return 0 if page is None else page.wholes[key & _PAGE_MASK] >> _BYTES_BITS

    def bytes_in(self, segment: int) -> int:
        """How many bytes are live in a segment."""
        return self._segment_bytes if segment == self._segment else self._others.get(segment, 0)

    def forget(self, segment: int) -> None:
        """The segment is gone, and nothing was live in it."""
        self._others.pop(segment, None)

    def keys_in(self, segment: int) -> list[int]:
        """The live keys whose whole record, or whose last change, stands in a segment. O(keys)."""
        return [
            number << _PAGE_BITS | at
            for number, page in self._pages.items()
            for at in range(_PAGE_KEYS)
            if page.wholes[at] and segment in (page.wholes[at] >> _BYTES_BITS, page.changes[at] >> _BYTES_BITS)
        ]

    def keys_in_any(self, segments: set[int]) -> set[int]:
        """The same as keys_in() for several segments at once. O(keys)."""
        return {
            number << _PAGE_BITS | at
            for number, page in self._pages.items()
            for at in range(_PAGE_KEYS)
            if page.wholes[at]
            and (page.wholes[at] >> _BYTES_BITS in segments or page.changes[at] >> _BYTES_BITS in segments)
        }

    def _drop(self, page: _Page, at: int) -> None:
        self._shrink(page.wholes[at])
        if page.changes[at]:
            self._shrink(page.changes[at])
            self.change_bytes -= page.changes[at] & _BYTES_MASK
            page.changes[at] = 0

    def _grow(self, segment: int, size: int) -> None:
        if segment != self._segment:
            if self._segment_bytes:  # otherwise the segment may be forgotten already
                self._others[self._segment] = self._segment_bytes
            self._segment = segment
            self._segment_bytes = self._others.pop(segment, 0)
        self._segment_bytes += size
        self.total_bytes += size

    def _shrink(self, record: int) -> None:
        size = record & _BYTES_MASK
        self.total_bytes -= size
        segment = record >> _BYTES_BITS
        if segment == self._segment:
            self._segment_bytes -= size
        else:
            self._others[segment] -= size
