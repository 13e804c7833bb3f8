"""A body that several reads bring, until all of it has come.

Its parts are joined once, at the end: a buffer that grows with each part is copied again and again. This module must
not know what a body is for.
Invariant: parts take a hundredth more memory than their bytes at the most, and a body above JOINED_MAX stands in memory
once.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

JOINED_MAX: Final = 1 << 22
"""While its parts are joined a body stands in memory twice. A larger one gathers in a buffer."""
_PART_MIN: Final = 1 << 12
"""A shorter part goes to a buffer: as an object it would take several times its bytes."""


class Arriving:
    """The parts of one body."""

    __slots__ = ("_buffer", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._buffer: BytesIO | None = None
        self._size = 0

    def add(self, part: bytes) -> None:
        """Takes the next part. Raises MemoryError, and may have taken it then."""
        self._size += len(part)
        if self._buffer is None and self._size <= JOINED_MAX and len(part) >= _PART_MIN:
            self._parts.append(part)
            return
        if self._buffer is None:
            self._buffer = BytesIO()
            self._buffer.writelines(self._parts)
            self._parts = []
        self._buffer.write(part)

    def end(self, part: bytes) -> bytes:
        """Takes the last part, and returns the body. Raises MemoryError, and may have taken it then."""
        if self._buffer is None and self._size + len(part) <= JOINED_MAX:
            self._parts.append(part)
            return b"".join(self._parts)
        self.add(part)
        assert self._buffer is not None
        return self._buffer.getvalue()  # which copies nothing
