"""All jobs of a server by their ids, in whatever state.

Invariant: a page is there while it holds a job; the newest page always is.
"""

from __future__ import annotations

from collections.abc import Iterator
from sys import getrefcount
from typing import Final

from mypy_extensions import i64

from geventstalk.core.job import Job
from geventstalk.core.order import EMPTY, Order

_PAGE_BITS: Final = 6
_PAGE_SLOTS: Final = 1 << _PAGE_BITS
_PAGE_MASK: Final = _PAGE_SLOTS - 1
_FREE_LISTS: Final = 100
"""More than the 80 freed lists that Python keeps for later lists, wherever they lie."""


class _Page:
    __slots__ = ("count", "slots")

    def __init__(self) -> None:
        self.slots: list[Job | None] = [None] * _PAGE_SLOTS
        self.count = 0


class JobTable:
    """Jobs by id, in pages of 64 sequential ids.

    A dict of millions of entries stops everything while it is resized; this one has an entry for each page. One old job
    keeps its whole page, so larger pages would cost memory when most jobs are short-lived. The newest page stays while
    it is empty: where each job leaves before the next comes, each would make a page.
    """

    __slots__ = ("_newest", "_newest_page", "_numbers", "_pages", "_spare", "count", "most")

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._numbers = Order()  # the same pages, in order, all of rank 0
        self._newest = -1
        self._newest_page: _Page | None = None  # most of what happens is to the newest jobs: found without the dict
        self._spare: _Page | None = None  # an empty one, for the next
        self.count: i64 = 0
        self.most: i64 = 0  # about how many there have been at once, since the caller set it to `count`

    def __len__(self) -> int:
        return int(self.count)

    def get(self, id: int) -> Job | None:
        number = id >> _PAGE_BITS
        page = self._newest_page if number == self._newest else self._pages.get(number)
        return None if page is None else page.slots[id & _PAGE_MASK]

    def add(self, job: Job) -> None:
        """Adds a job whose id is not in the table."""
        number = job.id >> _PAGE_BITS
        page = self._newest_page if number == self._newest else self._pages.get(number)
        if page is None:
            page = self._add_page(number)
        page.slots[job.id & _PAGE_MASK] = job
        page.count += 1
        self.count += 1

    def _add_page(self, number: int) -> _Page:
        if self.count > self.most:
            self.most = self.count
        before = self._newest
        if number > before >= 0 and not self._pages[before].count:
            self._drop_page(before)
        spare = self._spare
        page = _Page() if spare is None else spare
        self._spare = None
        self._pages[number] = page
        self._numbers.push(0, number)
        if number > before:
            self._newest = number
            self._newest_page = page
        return page

    def _drop_page(self, number: int) -> None:
        self._spare = self._pages.pop(number)
        self._numbers.discard(0, number)

    def set(self, job: Job) -> None:
        """Adds a job, or replaces the job with the same id."""
        page = self._pages.get(job.id >> _PAGE_BITS)
        at = job.id & _PAGE_MASK
        if page is None or page.slots[at] is None:
            self.add(job)
        else:
            page.slots[at] = job

    def remove(self, id: int) -> None:
        """Removes the job with an id that is in the table."""
        number = id >> _PAGE_BITS
        page = self._newest_page if number == self._newest else self._pages[number]
        assert page is not None
        page.slots[id & _PAGE_MASK] = None
        page.count -= 1
        self.count -= 1
        if not page.count and number != self._newest:
            self._drop_page(number)

    def recount(self) -> None:
        """Corrects pages and counts after an exception within add() or remove(). The slots are right already."""
        pages = {number: page for number, page in sorted(self._pages.items()) if any(page.slots)}
        numbers = Order()
        for number, page in pages.items():
            page.count = sum([job is not None for job in page.slots])
            numbers.push(0, number)
        self._newest = max(pages, default=-1)
        self._newest_page = pages.get(self._newest)
        self.count = sum([page.count for page in pages.values()])
        self._pages = pages
        self._numbers = numbers
        self._spare = None

    def __iter__(self) -> Iterator[Job]:
        return iter([job for page in self._pages.values() for job in page.slots if job is not None])

    def in_order(self) -> Iterator[Job]:
        """Yields all jobs in order of id. No job may be added or removed meanwhile."""
        for number in sorted(self._pages):
            for job in self._pages[number].slots:
                if job is not None:
                    yield job

    # --- some of the jobs; jobs may come and go between two calls

    def up_from(self, id: int) -> list[Job]:
        """Returns up to 64 jobs of this id and later ones, in order; no job lies between them."""
        first = id >> _PAGE_BITS
        number = self._numbers.at_least(0, first)
        while number != EMPTY:
            slots = self._pages[number].slots
            found = [job for job in (slots[id & _PAGE_MASK :] if number == first else slots) if job is not None]
            if found:
                return found
            number = self._numbers.at_least(0, number + 1)
        return []

    def down_from(self, id: int) -> list[Job]:
        """Returns up to 64 jobs of this id and earlier ones, the latest first; no job lies between them."""
        first = id >> _PAGE_BITS
        number = self._numbers.at_most(0, first)
        while number != EMPTY:
            slots = self._pages[number].slots
            found = [job for job in (slots[: (id & _PAGE_MASK) + 1] if number == first else slots) if job is not None]
            if found:
                found.reverse()
                return found
            if not number:
                break
            number = self._numbers.at_most(0, number - 1)
        return []

    # --- memory

    def repack(self, id: int, pages: int) -> int:
        """Moves jobs into other memory, those of some pages from this id on. Returns where to go on, or EMPTY.

        Python gives a mebibyte back when nothing lies in it any more. Where few jobs are left of many, each may hold
        one. Moved, they lie side by side. A job with other references stays where it is.
        Raises MemoryError; then the page under way is as it was.
        """
        aside: list[object] = [[] for _ in range(_FREE_LISTS)]  # with what is freed here: the next pages would take it
        number = int(self._numbers.at_least(0, id >> _PAGE_BITS))
        while number != EMPTY and pages > 0:
            pages -= 1
            before = self._pages[number]
            aside.append(before)
            page = _Page()
            for at in range(_PAGE_SLOTS):
                page.slots[at] = _moved(before.slots, at)
            page.count = before.count
            del self._pages[number]  # with its key
            try:
                self._pages[number] = page
            except MemoryError:
                aside.clear()
                self._pages[number] = page
            if number == self._newest:
                self._newest_page = page
            number = int(self._numbers.at_least(0, number + 1))
        self._spare = None
        return EMPTY if number == EMPTY else number << _PAGE_BITS


def _holders(slots: list[Job | None], at: int) -> int:
    """Returns the references to a job of a page, as seen from here."""
    return getrefcount(slots[at])


_PAGE_ALONE: Final = _holders([Job(0, 0, 0, 0, 0)], 0)
"""The result of _holders() for a job that only its page refers to."""


def _moved(slots: list[Job | None], at: int) -> Job | None:
    if slots[at] is None or _holders(slots, at) != _PAGE_ALONE:
        return slots[at]
    job = slots[at]
    assert job is not None
    return job.moved()
