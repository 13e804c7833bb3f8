"""A job too large to be written at once, on its way to the log part by part.

Invariant: the parts in order are the whole record as it was when the first part was made. A change of the job after
that is a record of its own.
"""

from __future__ import annotations

from typing import Final

from geventstalk.core.job import Job, held_body
from geventstalk.durable.records import ClockOffset, encode_head

LARGE_BYTES: Final = 1 << 20
"""A job with a larger body is written in parts. To write it at once would take several milliseconds."""
PART_BYTES: Final = 1 << 18
"""The bytes that one slice writes: checksum, copy and SQLite take a millisecond for them."""


PUT: Final = 0
REWRITE: Final = 1
MOVE: Final = 2


class LargeRecord:
    """A job, and the part of its record that is due.

    `purpose` is PUT, MOVE when compaction moves the job, or REWRITE when it gets this tube and ttr in the end.
    """

    __slots__ = ("_at", "_end", "_part_bytes", "head", "job", "purpose", "ttr_s", "tube_name")

    def __init__(
        self, job: Job, tube_name: bytes, ttr_s: int, offset: ClockOffset, part_bytes: int, purpose: int
    ) -> None:
        self.job = job
        self.tube_name = tube_name
        self.ttr_s = ttr_s
        self.purpose = purpose
        self.head = encode_head(job, tube_name, ttr_s, offset)
        self._at = 0
        self._end = part_bytes
        self._part_bytes = part_bytes

    @property
    def is_last(self) -> bool:
        """True when the part that is due is the last one."""
        return self._end >= len(held_body(self.job))

    def part(self) -> bytes:
        """Returns the part that is due."""
        piece = held_body(self.job)[self._at : self._end]
        return self.head + piece if not self._at else piece

    def advance(self) -> None:
        """Goes to the next part."""
        self._at = self._end
        self._end += self._part_bytes
