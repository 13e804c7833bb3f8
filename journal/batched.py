"""The batch of a log: the rows that append() adds until a commit writes them, with large payloads in parts.

This module must not know files or SQL: a derived class writes the batch, and counts what its rows take.
Invariant: append() does everything, or changes nothing, or ends the log.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, NoReturn

from mypy_extensions import mypyc_attr

from journal.liveness import Liveness
from journal.log import Log
from journal.parts import KEY_MAX, LAST, PART, Entry, split

_QUICK_KEY_MAX: Final = 2**62 - 1
"""The compiled build compares integers up to here directly. A comparison with KEY_MAX would take a call."""


@mypyc_attr(allow_interpreted_subclasses=True)
class BatchedLog(Log):
    """`part_bytes` is the size above which a payload is cut, `count` the format of the number in a LAST row."""

    live: Liveness
    """The live records."""

    def __init__(self, part_bytes: int, count: Struct, budget: int | None, log: Callable[[str], None]) -> None:
        self.records_written = 0
        self.appended = 0
        self.high_water = 0
        self._part_bytes = part_bytes
        self._count = count
        self._budget = budget
        self._log = log
        self._number = 0  # of the current segment; 0 before start() and after a failure
        self._batch: list[Entry] = []
        self._parts = 0  # how many parts of a large payload stand in the current segment, without their last
        self._open_bytes = 0  # what they take
        self._slack = 0  # bytes that puts may take before the log measures its free space again
        self._refusing = False

    @property
    def current(self) -> int:
        return self._number

    @property
    def dirty(self) -> bool:
        return bool(self._batch)

    @property
    def takes_parts(self) -> bool:
        return not self._parts and not self.short_of_room

    def append(self, key: int, kind: int, payload: bytes) -> None:
        number = self._number
        if not number:
            self._refuse()
        new = key > self.high_water
        if new and key > _QUICK_KEY_MAX and key > KEY_MAX:
            raise OverflowError(f"key {key} is larger than {KEY_MAX}")
        appended = self.appended + 1  # what may fail comes before the first change
        batch = self._batch
        before = len(batch)
        try:
            if len(payload) > self._part_bytes:
                batch += split(key, payload, self._part_bytes, self._count)
            else:
                batch.append((key, kind, payload))
            self._account(key, kind, len(payload), number)
        except BaseException as error:
            del batch[before:]
            if self.live.has_page(key):  # otherwise not even the first step was taken
                self._fail(error)
            raise
        self.appended = appended
        if new:
            self.high_water = key

    def append_part(self, key: int, part: bytes) -> None:
        if not self._number:
            self._refuse()
        self._batch.append((key, PART, part))
        self._parts += 1
        self._open_bytes += self._takes(len(part))
        self._count_large(len(part))
        self.appended += 1
        if key > self.high_water:
            self.high_water = key

    def append_last(self, key: int, last: bytes, *, moved: bool) -> None:
        number = self._number
        if not number:
            self._refuse()
        row = self._count.pack(self._parts) + last
        self._batch.append((key, LAST, row))
        try:
            self.live.whole(key, number, self._open_bytes + self._takes(len(row)))
        except BaseException as error:
            self._fail(error)
        self.drop_parts()
        self._count_large(len(row))
        self.appended += 1
        if moved:
            self._count_moved()

    def drop_parts(self) -> None:
        self._parts = 0
        self._open_bytes = 0

    def _say_refusing(self, refusing: bool) -> None:
        """Logs when refusing puts begins and ends, with the figures."""
        if refusing == self._refusing:
            return
        self._refusing = refusing
        self._log(
            f"journal: puts are {'refused: the journal is full' if refusing else 'accepted again'}; "
            f"{self.live.total_bytes} bytes of records count, the segments take {self.disk_bytes} of "
            f"{self._capacity()} bytes, and what is left is kept for changes, deletes and compaction"
        )

    # --- for the derived class

    @property
    def disk_bytes(self) -> int:
        """Returns what the segments take."""
        raise NotImplementedError

    def _takes(self, size: int) -> int:
        """Returns what a row with a payload of this size takes."""
        raise NotImplementedError

    def _account(self, key: int, kind: int, size: int, segment: int) -> None:
        """Counts a record with a payload of this size as live, and for the next commit. Does all or nothing."""
        raise NotImplementedError

    def _count_large(self, size: int) -> None:
        """Counts a row of a large payload for the next commit."""
        raise NotImplementedError

    def _count_moved(self) -> None:
        """Counts a large record that compaction has moved."""
        raise NotImplementedError

    def _capacity(self) -> int:
        """Returns the most bytes that the segments may take."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> NoReturn:
        """Ends the log: the batch is dropped, and append() and commit() raise from now on."""
        raise NotImplementedError

    def _refuse(self) -> NoReturn:
        """Raises the failure of the log."""
        raise NotImplementedError
