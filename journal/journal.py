"""The journal of one directory: append, commit, sync, rotate, compact, replay.

This room must not know SQL nor what a payload means. Not thread-safe: one thread calls it; the journal's own worker
thread creates, seals and removes segments meanwhile, and run() of a SyncPoint may be called anywhere.
Invariant: a segment with a record that a replay still needs is never removed, and one without is removed only after
everything that replaced it is on the device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from journal.errors import JournalDamaged, JournalFull
from journal.liveness import Liveness
from journal.lock import DirectoryLock
from journal.segment import (
    CHANGE,
    DELETE,
    FULL,
    PART,
    PART_BYTES,
    ROW_BYTES,
    Row,
    SegmentReader,
    SegmentWriter,
    WalFile,
    disk_bytes,
    fsync_path,
    remove_files,
)
from journal.worker import Worker

_NAME: Final = re.compile(r"segment-(\d{8,})\.db")
_SCAN_KEYS: Final = 512
"""Keys of the oldest segment that one slice of compaction looks at."""
_MOVE_BYTES: Final = 1 << 18
"""Bytes that one slice of compaction moves, give or take a record."""


class Record(NamedTuple):
    """What a replay gives back, in the order it was appended. `segment` is where it stands."""

    key: int
    kind: int
    payload: bytes
    segment: int


class SyncPoint:
    """Everything that was committed before this was made. run() may be called once, in any thread."""

    def __init__(self, files: list[WalFile]) -> None:
        self._files = files

    def run(self) -> None:
        """Waits until all of it is on the device. Raises JournalFailed: then nothing waiting for it may be promised."""
        for file in self._files:
            file.sync()


class _Sealed:
    """A segment that is only read any more. `ready` once the worker has merged its WAL."""

    def __init__(self, path: str, number: int) -> None:
        self.path = path
        self.number = number
        self.ready = False
        self.bytes = disk_bytes(path)


class Journal:
    """Opens and locks a directory. First exhaust replay(), then start(), then append and commit."""

    def __init__(self, directory: str, *, segment_bytes: int, compact: bool = True) -> None:
        """Raises JournalLocked when the directory cannot be had."""
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.compact = compact
        self.records_written = 0
        self.appended = 0
        self.records_moved = 0
        self.high_water = 0
        self.live = Liveness()
        self._lock = DirectoryLock(directory)
        self.created = self._lock.created
        self._worker = Worker()
        self._sealed: list[_Sealed] = []  # oldest first
        self._writer: SegmentWriter | None = None
        self._next: SegmentWriter | None = None
        self._preparing = False
        self._batch: list[Row] = []
        self._estimate = 0  # bytes of WAL that were surely written to the current segment
        self._unsynced: list[WalFile] = []
        self._scanned_seq = 0
        self._victim: SegmentReader | None = None
        self._retiring = 0  # segments handed to the worker for removal

    # --- start

    def segments(self) -> list[tuple[int, str]]:
        """Number and path of every segment in the directory, oldest first."""
        found = [(int(match[1]), name) for name in os.listdir(self.directory) if (match := _NAME.fullmatch(name))]
        return [(number, os.path.join(self.directory, name)) for number, name in sorted(found)]

    def replay(self) -> Iterator[Record]:
        """Every record of every segment, oldest first. Raises JournalDamaged; nothing on disk is changed."""
        for number, path in self.segments():
            reader = SegmentReader(path)
            if reader.number != number:
                raise JournalDamaged(f"{path} says that it is segment {reader.number}")
            self.high_water = max(self.high_water, reader.high_water)
            parts: list[bytes] = []
            for key, kind, payload in reader.rows():
                self.high_water = max(self.high_water, key)
                if kind == PART:
                    parts.append(payload)
                    continue
                if parts:
                    payload = b"".join([*parts, payload])
                    parts = []
                self._account(key, kind, payload, number)
                yield Record(key, kind, payload, number)
            sealed = _Sealed(path, number)
            if os.path.exists(path + "-wal"):
                self._seal(sealed, reader.seal)
            else:
                reader.close()
                sealed.ready = True
            self._sealed.append(sealed)

    def start(self) -> None:
        """Opens a new segment behind all others. Raises JournalFull or JournalFailed."""
        number = self._sealed[-1].number + 1 if self._sealed else 1
        self._writer = SegmentWriter(self._path(number), number, self.high_water)
        self._unsynced.append(self._writer.wal)
        fsync_path(self.directory)
        self._prepare()

    # --- every turn

    @property
    def current(self) -> int:
        """The number of the segment that takes the next record."""
        assert self._writer is not None
        return self._writer.number

    @property
    def oldest(self) -> int:
        return self._sealed[0].number if self._sealed else self.current

    @property
    def dirty(self) -> bool:
        """Whether something was appended and not committed."""
        return bool(self._batch)

    def append(self, key: int, kind: int, payload: bytes) -> None:
        """Adds a record to the batch. CHANGE and DELETE are for live keys only."""
        writer = self._writer
        assert writer is not None
        self._account(key, kind, payload, writer.number)
        self.appended += 1
        if len(payload) > PART_BYTES:
            last = (len(payload) - 1) // PART_BYTES * PART_BYTES
            for at in range(0, last, PART_BYTES):
                self._batch.append(writer.row(key, PART, payload[at : at + PART_BYTES]))
            payload = payload[last:]
        self._batch.append(writer.row(key, kind, payload))
        self._estimate += len(payload)
        if key > self.high_water:
            self.high_water = key

    def commit(self) -> None:
        """Writes the batch in one transaction: from now on it survives the process. Raises JournalFailed."""
        self._worker.check()
        rows = self._batch
        if not rows:
            return
        writer = self._writer
        assert writer is not None
        self._batch = []
        writer.append(rows)
        self.records_written += len(rows)
        if writer.wal not in self._unsynced:
            self._unsynced.append(writer.wal)
        self._estimate += 1024  # a commit writes at least one page of 2 KiB, half of it anew on average
        if self._estimate >= self.segment_bytes // 2:
            self._rotate_if_full(writer)

    def sync_point(self) -> SyncPoint | None:
        """What is committed and not yet asked to be on the device; None when there is nothing."""
        if not self._unsynced:
            return None
        point = SyncPoint(self._unsynced)
        self._unsynced = []
        return point

    # --- segments come and go

    def _rotate_if_full(self, writer: SegmentWriter) -> None:
        if writer.wal.size() < self.segment_bytes or self._next is None:
            return
        fresh = self._next
        self._next = None
        fresh.set_high_water(self.high_water)
        self._unsynced.append(fresh.wal)
        self._writer = fresh
        self._estimate = 0
        sealed = _Sealed(writer.path, writer.number)
        self._sealed.append(sealed)
        self._seal(sealed, writer.seal)
        self._prepare()

    def _seal(self, sealed: _Sealed, work: Callable[[], None]) -> None:
        def done() -> None:
            sealed.ready = True
            sealed.bytes = disk_bytes(sealed.path)

        self._worker.submit(work, done)

    def _prepare(self) -> None:
        """Has the worker create the next segment, so that rotation costs no time. A full disk only puts it off."""
        assert self._writer is not None
        if self._preparing or self._next is not None:
            return
        self._preparing = True
        number = self._writer.number + 1
        made: list[SegmentWriter] = []

        def work() -> None:
            try:
                made.append(SegmentWriter(self._path(number), number, 0))
                fsync_path(self.directory)
            except JournalFull:
                return

        def done() -> None:
            self._preparing = False
            self._next = made[0] if made else None

        self._worker.submit(work, done)

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, f"segment-{number:08d}.db")

    # --- compaction

    @property
    def disk_bytes(self) -> int:
        """What the segments take on disk."""
        writer = self._writer
        return sum(sealed.bytes for sealed in self._sealed) + (disk_bytes(writer.path) if writer else 0)

    def wants_compaction(self) -> bool:
        """Whether compact_slice() has something worth doing: sealed segments hold more garbage than live records."""
        self._worker.check()
        if self._next is None:
            self._prepare()
        if not self.compact or len(self._sealed) <= self._retiring:
            return False
        if self._victim is not None:
            return True
        victim = self._sealed[self._retiring]
        if not victim.ready:
            return False
        standing = sum(sealed.bytes for sealed in self._sealed[self._retiring :])
        return not self.live.by_segment.get(victim.number) or standing > 2 * self.live.total_bytes

    @property
    def settling(self) -> bool:
        """Whether the worker has something to do or to report."""
        return self._worker.busy

    def compact_slice(self, payload_of: Callable[[int], bytes | None]) -> None:
        """Appends some live keys of the oldest segment anew, from their current whole payload, and commits.

        A segment that holds nothing live any more is handed to the worker, which syncs what was moved and then
        removes it. One slice takes about a millisecond. Raises JournalFailed.
        """
        victim = self._sealed[self._retiring]
        if self.live.by_segment.get(victim.number):
            if self._victim is None:
                self._victim = SegmentReader(victim.path)
                self._scanned_seq = 0
            moved_bytes = 0
            for seq, key in self._victim.keys_after(self._scanned_seq, _SCAN_KEYS):
                self._scanned_seq = seq
                if self.live.segment_of(key) != victim.number:
                    continue
                payload = payload_of(key)
                assert payload is not None, "a live key has a payload"
                self.append(key, FULL, payload)
                self.records_moved += 1
                moved_bytes += len(payload)
                if moved_bytes >= _MOVE_BYTES:
                    break
            self.commit()
        if not self.live.by_segment.get(victim.number):
            self._retire(victim)

    def _retire(self, victim: _Sealed) -> None:
        if self._victim is not None:
            self._victim.close()
            self._victim = None
        self._retiring += 1
        # The policy's own sync may be on its way in another thread, so this one asks again for what guards the unlink.
        # Segments before the current one are sealed, and thereby synced, earlier in the worker's order.
        assert self._writer is not None
        point = SyncPoint([self._writer.wal])

        def work() -> None:
            point.run()
            remove_files(victim.path)
            fsync_path(self.directory)

        def done() -> None:
            self._retiring -= 1
            self._sealed.remove(victim)
            self.live.by_segment.pop(victim.number, None)

        self._worker.submit(work, done)

    # --- end

    def close(self) -> None:
        """Commits, syncs and seals everything and gives the directory back. Raises JournalFailed."""
        try:
            if self._writer is not None:
                self.commit()
                self._worker.submit(self._writer.seal, lambda: None)
                if self._victim is not None:
                    self._victim.close()
            self._worker.close()
            if self._next is not None:
                self._next.discard()
        finally:
            self._lock.close()

    def abandon(self) -> None:
        """Gives the directory back without writing anything more: after a failure nothing else is safe."""
        self._worker.abandon()
        self._lock.close()

    def _account(self, key: int, kind: int, payload: bytes, segment: int) -> None:
        size = len(payload) + ROW_BYTES
        if kind == FULL:
            self.live.whole(key, segment, size)
        elif kind == CHANGE:
            self.live.change(key, segment, size)
        else:
            assert kind == DELETE
            self.live.delete(key)
