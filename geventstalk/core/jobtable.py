"""All jobs of a server by their ids, in whatever state.

This room must not know what a job is for. Invariant: a page is there exactly while it holds a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from geventstalk.core.job import Job

_PAGE_BITS: Final = 6
_PAGE_SLOTS: Final = 1 << _PAGE_BITS
_PAGE_MASK: Final = _PAGE_SLOTS - 1


class _Page:
    __slots__ = ("count", "slots")

    def __init__(self) -> None:
        self.slots: list[Job | None] = [None] * _PAGE_SLOTS
        self.count = 0


class JobTable:
    """Jobs by id, in pages of 64 sequential ids.

    A dict of millions of entries stops everything while it is resized. The dict here has one entry for each page of 64
    ids. One old job keeps its whole page, so larger pages would cost memory when most jobs are short-lived.
    """

    __slots__ = ("_pages", "_spare")

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._spare = _Page()  # an empty page; where each job leaves before the next comes, each would make a page

    def __len__(self) -> int:
        return sum([page.count for page in self._pages.values()])

    def get(self, id: int) -> Job | None:
        page = self._pages.get(id >> _PAGE_BITS)
        return None if page is None else page.slots[id & _PAGE_MASK]

    def add(self, job: Job) -> None:
        """Adds a job whose id is not in the table."""
        number = job.id >> _PAGE_BITS
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = _Page() if self._spare.count else self._spare
        page.slots[job.id & _PAGE_MASK] = job
        page.count += 1

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
        page = self._pages[number]
        page.slots[id & _PAGE_MASK] = None
        page.count -= 1
        if not page.count:
            del self._pages[number]
            self._spare = page

    def recount(self) -> None:
        """Corrects pages and counts after an exception within add() or remove(). The slots are right already."""
        counts = {number: sum([job is not None for job in page.slots]) for number, page in self._pages.items()}
        for number, count in counts.items():
            self._pages[number].count = count
            if not count:
                del self._pages[number]
        self._spare = _Page()

    def __iter__(self) -> Iterator[Job]:
        return iter([job for page in self._pages.values() for job in page.slots if job is not None])

    def in_order(self) -> Iterator[Job]:
        """All jobs in order of id, without making a list. No job may be added or removed meanwhile."""
        for number in sorted(self._pages):
            for job in self._pages[number].slots:
                if job is not None:
                    yield job
