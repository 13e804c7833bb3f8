"""The least that a log can be: what every log does, over records in memory, and nothing of what it may offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from journal.log import FULL, Facts, Log, Row, SyncPoint

Kept = tuple[int, int, bytes]
"""A record: its key, kind and payload."""


class MinimalLog(Log):
    """One segment, which a later log takes over by way of `records`. Nothing has to be synced."""

    def __init__(self, records: Iterable[Kept] = ()) -> None:
        self.safe_after_commit = True
        self.records = list(records)
        self.appended = 0
        self.high_water = max((key for key, _, _ in self.records), default=0)
        self._committed = len(self.records)
        self._parts = b""

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        yield 1, [(place, key, kind, 0, payload) for place, (key, kind, payload) in enumerate(self.records)]

    def start(self) -> None:
        return

    @property
    def current(self) -> int:
        return 1

    @property
    def dirty(self) -> bool:
        return len(self.records) > self._committed

    def admits(self, size: int) -> bool:
        return True

    def append(self, key: int, kind: int, payload: bytes) -> None:
        self.records.append((key, kind, payload))
        self.high_water = max(self.high_water, key)
        self.appended += 1

    @property
    def takes_parts(self) -> bool:
        return not self._parts

    def append_part(self, key: int, part: bytes) -> None:
        self._parts += part

    def append_last(self, key: int, last: bytes, *, moved: bool) -> None:
        self.append(key, FULL, self._parts + last)
        self._parts = b""

    def drop_parts(self) -> None:
        self._parts = b""

    def commit(self) -> None:
        self._committed = len(self.records)

    def sync_point(self) -> SyncPoint | None:
        return None

    def facts(self) -> Facts:
        size = sum(len(payload) for _, _, payload in self.records)
        return Facts(1, 1, size, self.appended, 0, size, size)

    def close(self) -> None:
        self.commit()

    def abandon(self) -> None:
        del self.records[self._committed :]
