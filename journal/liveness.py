"""Which keys are live, in which segment their records stand, and how many bytes the records take.

This module must not know payloads or files. It takes sixteen bytes a key, in pages of sequential keys.
Invariant: the live bytes of a segment are those of the records that a replay still needs.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

if __file__.endswith(".so"):
    from journal.packed import Page as Page
else:
    from journal.plain import Page as Page  # type: ignore[assignment]  # same interface; the tests run on both

_PAGE_BITS: Final = 6
"""Pages of 64 keys. One old key keeps its whole page: with larger pages, old keys among many short-lived ones would
cost more memory."""
_PAGE_KEYS: Final = 1 << _PAGE_BITS
_PAGE_MASK: Final = _PAGE_KEYS - 1
_BYTES_BITS: Final = 32
"""A number holds a segment and a size in 64 bits, 32 bits each: see SEGMENT_MAX in sqlite/format.py."""
_BYTES_MASK: Final = (1 << _BYTES_BITS) - 1


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
        self._pages: dict[int, Page] = {}
        self._last = -1  # the number of a page that is there, which most of what happens is about, or -1
        self._last_page = Page()

    def _page(self, number: int) -> Page | None:
        if number == self._last:
            return self._last_page
        page = self._pages.get(number)
        if page is not None:
            self._last = number
            self._last_page = page
        return page

    def whole(self, key: int, segment: int, size: int) -> None:
        """A whole record was written: all earlier records of the key are dead."""
        number = key >> _PAGE_BITS
        page = self._page(number)
        if page is None:
            page = self._pages[number] = Page()
        at: i64 = key & _PAGE_MASK
        if page.whole(at):
            self._drop(page, at)
        else:
            page.count += 1
            self.keys += 1
        page.set_whole(at, _record(segment, size))
        self._grow(segment, size)

    def change(self, key: int, segment: int, size: int) -> None:
        """A change was written: the change before it is dead. Nothing happens for a key that is not live."""
        page = self._page(key >> _PAGE_BITS)
        at: i64 = key & _PAGE_MASK
        if page is None or not page.whole(at):
            return
        before = page.change(at)
        if before:
            self._shrink(before)
            self.change_bytes -= before & _BYTES_MASK
        self.change_bytes += size
        page.set_change(at, _record(segment, size))
        self._grow(segment, size)

    def delete(self, key: int) -> None:
        """The key and all its records are dead. Nothing happens for a key that is not live."""
        number = key >> _PAGE_BITS
        page = self._page(number)
        at: i64 = key & _PAGE_MASK
        if page is None or not page.whole(at):
            return
        self._drop(page, at)
        page.set_whole(at, 0)
        page.count -= 1
        self.keys -= 1
        if not page.count:
            del self._pages[number]
            self._last = -1

    def has_page(self, key: int) -> bool:
        """Returns whether there is a page for the key's numbers. The first whole() of a key makes the page before
        anything else.
        """
        return (key >> _PAGE_BITS) in self._pages

    def segment_of(self, key: int) -> int:
        """The segment of the key's whole record; 0 when the key is not live."""
        page = self._pages.get(key >> _PAGE_BITS)
        return 0 if page is None else _segment(page.whole(key & _PAGE_MASK))

    def bytes_in(self, segment: int) -> int:
        """Returns how many bytes are live in a segment."""
        return self._segment_bytes if segment == self._segment else self._others.get(segment, 0)

    def forget(self, segment: int) -> None:
        """Forgets a segment that is gone, and in which nothing was live."""
        self._others.pop(segment, None)

    def keys_in(self, segment: int) -> list[int]:
        """Returns the live keys whose whole record, or whose last change, stands in a segment. O(keys)."""
        return [
            number << _PAGE_BITS | at
            for number, page in self._pages.items()
            for at in range(_PAGE_KEYS)
            if page.whole(at) and segment in (_segment(page.whole(at)), _segment(page.change(at)))
        ]

    def keys_in_any(self, segments: set[int]) -> set[int]:
        """The same as keys_in() for several segments at once. O(keys)."""
        return {
            number << _PAGE_BITS | at
            for number, page in self._pages.items()
            for at in range(_PAGE_KEYS)
            if page.whole(at) and (_segment(page.whole(at)) in segments or _segment(page.change(at)) in segments)
        }

    def _drop(self, page: Page, at: i64) -> None:
        self._shrink(page.whole(at))
        change = page.change(at)
        if change:
            self._shrink(change)
            self.change_bytes -= change & _BYTES_MASK
            page.set_change(at, 0)

    def _grow(self, segment: int, size: int) -> None:
        if segment != self._segment:
            if self._segment_bytes:  # otherwise the segment may be forgotten already
                self._others[self._segment] = self._segment_bytes
            self._segment = segment
            self._segment_bytes = self._others.pop(segment, 0)
        self._segment_bytes += size
        self.total_bytes += size

    def _shrink(self, record: i64) -> None:
        size = record & _BYTES_MASK
        self.total_bytes -= size
        segment = _segment(record)
        if segment == self._segment:
            self._segment_bytes -= size
        else:
            self._others[segment] -= size


def _record(segment: i64, size: i64) -> i64:
    return segment << _BYTES_BITS | size


def _segment(record: i64) -> int:
    return int(record >> _BYTES_BITS & _BYTES_MASK)
