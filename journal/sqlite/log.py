"""The journal of one directory: append, commit, sync, rotate, compact, replay, and room for all of it.

This room must not know SQL nor what a payload means. Not thread-safe: one thread calls it; the journal's own worker
thread creates, seals and removes segments meanwhile, and run() of a SyncPoint may be called anywhere.
Invariant: a segment with a record that a replay still needs is never removed, and one without is removed only after
everything that replaced it is on the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Final, NoReturn, TypeVar

from mypy_extensions import mypyc_attr

from journal.errors import JournalDamaged, JournalFailed, JournalFull, raise_failure
from journal.liveness import Liveness
from journal.sqlite.files import (
    ASIDE_SUFFIX,
    MISSING_SUFFIX,
    aside_numbers,
    disk_bytes,
    fsync_path,
    remove_files,
    remove_left_overs,
    segment_path,
    sync_files,
)
from journal.sqlite.format import CHANGE, DELETE, FULL, PAGE_BYTES, PART_BYTES, Row, row_bytes, split
from journal.sqlite.lock import DirectoryLock
from journal.sqlite.reader import SegmentReader
from journal.sqlite.replay import Found, Record, Replay
from journal.sqlite.space import BLOCK_BYTES, PIECE_BYTES, Space
from journal.sqlite.wal import WalFile
from journal.sqlite.watermark import Watermark
from journal.sqlite.worker import Worker
from journal.sqlite.writer import SegmentWriter, seal_left_over

_SCAN_KEYS: Final = 256
"""Keys of the oldest segment that one slice of compaction looks at."""
_MOVE_BYTES: Final = 1 << 17
"""Bytes that one slice of compaction moves, give or take a record."""
_SEAL_AT_END_BYTES: Final = 1 << 24
"""A larger WAL is left to the next start, so that a stop takes no longer than it may."""
_SEGMENT_BYTES_MIN: Final = 1 << 15
_CAPACITY_SHARE: Final = 32
"""A segment takes at most this share of the disk or budget, so that a small one can still rotate and compact."""
_RESERVE_KEY_BYTES: Final = 48
"""What deleting a key takes in the end, kept in the reserve for each live key."""
_HOLD_S: Final = 0.004
"""How long changes wait after a commit where the directory has outgrown its bound: less than anybody notices."""
_LONG_HOLD_S: Final = 0.1
"""The same where it is a segment or more too large, so that short waits are not enough: 25 times as long."""
_FULL_HOLD_S: Final = 5.0
"""The same on a full disk, where going on would be the end, and far beyond the bound."""
_BARE_SEGMENT_BYTES: Final = 6 * PAGE_BYTES
"""What a sealed segment takes beside its records, and those that are behind its last whole page."""
_SPARE_SEGMENTS: Final = 4
KEY_MAX: Final = 2**63 - 1
"""The largest integer of SQLite."""
_QUICK_KEY_MAX: Final = 2**62 - 1
"""Integers up to here are compared at once in the compiled build; a comparison with KEY_MAX would take a call."""
_AHEAD_MAX: Final = 1 << 23
"""Of a WAL at most so much is allocated at once."""
_LOST_KEYS: Final = 1 << 20
"""Keys that are skipped when damage was accepted, so that none is used again that only the damage knew."""
_INDEX_BYTES: Final = 1 << 15
"""SQLite's index of a WAL, which it keeps in a file as well."""
_INDEXES_MAX: Final = 5
"""WALs that may be open at once: the current one, the next, one being sealed, two that others look at."""
_NEW_SEGMENT_BYTES: Final = _INDEX_BYTES + 8 * PAGE_BYTES
"""What a segment takes on disk before it has any record."""
_CHANGE_BYTES: Final = row_bytes(64)
"""What a change of a key may add to what is live of it; callers keep their changes within that."""
_ADMIT_CHECK_EVERY: Final = 256
"""Puts between two looks at the disk; what others take of it meanwhile, the reserve covers."""


_T = TypeVar("_T")


class SyncPoint:
    """Everything that was committed before this was made. run() may be called once, in any thread."""

    def __init__(
        self,
        files: list[WalFile],
        failed: Callable[[BaseException], None],
        watermark: Watermark,
        segment: int,
        records: int,
    ) -> None:
        self._files = files
        self._failed = failed
        self._watermark = watermark
        self._segment = segment
        self._records = records

    def run(self) -> None:
        """Waits until all of it is on the device.

        Raises JournalFailed: then nothing waiting for it may be promised, and the journal takes nothing more.
        """
        try:
            for file in self._files:
                file.sync()
            self._watermark.advance(self._segment, self._records)
        except BaseException as error:
            self._failed(error)
            raise_failure(error)


class _Sealed:
    """A segment that is only read any more. `ready` once the worker has merged its WAL, or found no room to do so."""

    def __init__(self, path: str, number: int, writer: SegmentWriter | None = None, written: int = 0) -> None:
        self.path = path
        self.number = number
        self.ready = False
        self.bytes = disk_bytes(path)
        self.merge_bytes = min(self.bytes, written + written // 8 + _BARE_SEGMENT_BYTES)  # what that takes at most
        self.records = writer.records if writer else 0
        self._writer = writer  # of this process, until its WAL is merged
        self.wal = writer.wal if writer else None
        self._left_over: int | None = None  # records of one that a crash left with its WAL, until that is merged

    @classmethod
    def found(cls, found: Found) -> _Sealed:
        """As a replay found it."""
        sealed = cls(found.path, found.number, None, found.records << 32)
        sealed.records = found.records
        if os.path.exists(found.path + "-wal"):
            sealed._left_over = found.records
        else:
            sealed.ready = True
        return sealed

    @property
    def merged(self) -> bool:
        """Whether nothing stands in a WAL any more."""
        return self._writer is None and self._left_over is None

    @property
    def writer(self) -> SegmentWriter | None:
        """What writes to it in this process, until its WAL is merged."""
        return self._writer

    def merge(self, log: Callable[[str], None]) -> None:
        """Seals it, in the worker. Raises JournalFull, when it may be done later."""
        if self._writer is not None:
            self._writer.seal()
        elif self._left_over is not None:
            torn = seal_left_over(self.path, self._left_over)
            if torn:
                log(f"journal: {self.path} ended in a torn write of {torn} bytes, which nobody was told of")
        self._writer = None
        self._left_over = None

    def keep(self) -> None:
        """Instead of sealing it, in the worker: what it has gets to the device as it is."""
        self.merge_bytes += self.bytes  # it took more than was thought
        sync_files(self.path)

    def remove(self) -> None:
        """Unlinks it, in the worker."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None
        else:
            remove_files(self.path)
        self.wal = None


@mypyc_attr(allow_interpreted_subclasses=True)
class Journal:
    """Opens and locks a directory. First exhaust replay(), then start(), then append and commit.

    `budget` is the most the directory may come to, in bytes, None for as much as the disk gives. With `accept_damage`
    a damaged segment does not stop the start: what it still gives is used, and its file is set aside by heal().
    """

    def __init__(
        self,
        directory: str,
        *,
        segment_bytes: int,
        compact: bool = True,
        budget: int | None = None,
        allocate: bool = False,
        accept_damage: bool = False,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Raises JournalLocked when the directory cannot be had, JournalFailed when its reserve is another's file."""
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.compact = compact
        self.records_written = 0
        self.records_moved = 0
        self.appended = 0
        self.high_water = 0
        self.live = Liveness()
        self._allocate = allocate
        self._accept_damage = accept_damage
        self._log = log
        self._lock = DirectoryLock(directory)
        self.created = self._lock.created
        self._worker = Worker()
        try:
            self._space = Space(directory, budget)
        except BaseException:
            self._lock.close()
            raise
        self._sealed: list[_Sealed] = []  # oldest first
        self._damaged: list[Found] = []
        self._unfinished: list[str] = []  # segments that were never complete, and hold nothing
        self._orphans: list[int] = []
        self._missing: list[tuple[int, int]] = []
        self._writer: SegmentWriter | None = None
        self._next: SegmentWriter | None = None
        self._made: list[SegmentWriter] = []  # the next one as soon as the worker has it
        self._preparing = False
        self._batch: list[tuple[int, int, bytes]] = []
        self._estimate = 0  # bytes of WAL that were surely written to the current segment
        self._unsynced: list[WalFile] = []
        self._watermark: Watermark | None = None
        self._scanned_seq = 0
        self._victim: SegmentReader | None = None
        self._retiring = 0  # segments handed to the worker for removal
        self._segment_limit = segment_bytes // 2
        self._slack = 0
        self._admitted = 0
        self._said_tight = False
        self._refilling = False
        self._behind = False
        self._held_since_s = 0.0
        self._hold_s = 0.0
        self._failed = False
        self._noted = False  # the current segment alone knows which ones are gone

    # --- start

    def replay(self) -> Iterator[Record]:
        """Every record of every segment, oldest first; changes none. Raises JournalDamaged behind the last one."""
        for segment, rows in self.batches():
            for _, key, kind, _, payload in rows:
                yield Record(key, kind, payload, segment)

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        """As replay(), for who has millions of them: a segment, and some of its rows (seq, key, kind, crc, payload)."""
        if self._space.free() < 2 * _NEW_SEGMENT_BYTES:
            self._space.give_back(2 * _NEW_SEGMENT_BYTES)  # even reading takes some: SQLite's index of a WAL
        replay = Replay(self.directory)
        self.live = replay.live
        yield from replay.batches()
        self.high_water = replay.high_water
        self._unfinished = replay.unfinished
        for note in replay.notes:
            self._log(f"journal: {note}")
        for finding in replay.findings:
            self._log(f"journal: {finding}")
        if replay.findings and not self._accept_damage:
            raise JournalDamaged(
                f"the journal in {self.directory} is damaged ({len(replay.findings)} findings, "
                f"{self.live.keys} jobs intact); nothing was changed, --accept-damage starts without what is lost"
            )
        if replay.findings:
            self.high_water = min(self.high_water + _LOST_KEYS, KEY_MAX)  # a damaged file may have held later ones
        self._orphans = list(replay.orphans)
        self._missing = replay.missing
        for found in replay.found:
            if found.damaged:
                self._damaged.append(found)
            else:
                self._sealed.append(_Sealed.found(found))

    def start(self) -> None:
        """Opens a new segment behind all others. Raises JournalFull or JournalFailed."""
        remove_left_overs(self.directory)
        for path in self._unfinished:
            remove_files(path)
        numbers = [sealed.number for sealed in self._sealed] + [found.number for found in self._damaged]
        number = max([0, *numbers, *aside_numbers(self.directory), *(last for _, last in self._missing)]) + 1
        self._fit_segments()
        fsync_path(self.directory)  # of what a start left that died, nothing may go while what is made now stays
        path = segment_path(self.directory, number)
        writer = self._writer = self._space.within(lambda: SegmentWriter(path, number, self.high_water, self._ahead))
        oldest = self._oldest_needed()
        writer.before = self._unsealed()
        self._with_room(lambda: writer.note(self.high_water, oldest))
        for sealed in self._sealed:
            if not sealed.merged:
                sync_files(
                    sealed.path
                )  # what is built on it must not outlive it, and the watermark says that it is there
        self._watermark = Watermark(self.directory, number)
        fsync_path(self.directory)
        self._space.refill(self._reserve_target(), self._margin)
        self._say_tight()
        self._prepare()
        for sealed in self._sealed:
            if not sealed.merged:
                self._seal(sealed)
        if self._space.tight:
            self._refill()
            end = time.monotonic() + _FULL_HOLD_S
            while self._worker.busy and time.monotonic() < end:
                self._worker.wait(_FULL_HOLD_S)  # before others take what sealing gives back

    def heal(self, payload_of: Callable[[int], bytes | None]) -> int:
        """Makes accepted damage good: what damaged segments still say is written anew, then they are set aside.

        Returns how many keys there were. Nothing is deleted. Raises JournalFailed.
        """
        keys = 0
        for found in self._damaged:
            for key in self.live.keys_in(found.number):
                payload = payload_of(key)
                assert payload is not None, "a live key has a payload"
                self.append(key, FULL, payload)
                keys += 1
            for key in found.deleted:
                if not self.live.segment_of(key):
                    self.append(key, DELETE, b"")
        for key in self._orphans:
            self.append(key, DELETE, b"")
        self.commit()
        if self._damaged or self._missing:
            self._guard().run()
            self._set_aside()
        return keys

    def _set_aside(self) -> None:
        for found in self._damaged:
            for suffix in ("-wal", "-shm", ""):
                aside = found.path + ASIDE_SUFFIX + suffix
                if os.path.lexists(aside):
                    raise JournalFailed(f"cannot set {found.path} aside: {aside} exists")
        try:
            for found in self._damaged:
                for suffix in ("-wal", "-shm", ""):
                    if os.path.exists(found.path + suffix):
                        os.rename(found.path + suffix, found.path + ASIDE_SUFFIX + suffix)
                self._log(f"journal: {found.path} is set aside as {found.path + ASIDE_SUFFIX}")
            for first, last in self._missing:
                for number in range(first, last + 1):
                    mark = segment_path(self.directory, number) + MISSING_SUFFIX
                    os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise JournalFailed(f"cannot set damaged segments aside: {error.strerror}") from error
        fsync_path(self.directory)
        self._damaged = []
        self._missing = []

    # --- every turn

    @property
    def current(self) -> int:
        """The number of the segment that takes the next record."""
        assert self._writer is not None
        return self._writer.number

    @property
    def oldest(self) -> int:
        """The number of the oldest segment."""
        return self._sealed[0].number if self._sealed else self.current

    @property
    def dirty(self) -> bool:
        """Whether something was appended and not committed."""
        return bool(self._batch)

    def append(self, key: int, kind: int, payload: bytes) -> None:
        """Adds a record to the batch. CHANGE and DELETE are for live keys only.

        Whatever is raised, the batch is as it was. Raises JournalFailed when the journal has failed before or fails
        now; after anything else, such as MemoryError, the journal is as if nothing had been asked.
        """
        writer = self._writer
        assert writer is not None
        if self._failed:
            self._worker.check()
        new = key > self.high_water
        if new and key > _QUICK_KEY_MAX and key > KEY_MAX:
            raise OverflowError(f"key {key} is larger than SQLite's integers")
        appended = self.appended + 1  # what may fail comes before the first change
        estimate = self._estimate + len(payload)
        batch = self._batch
        before = len(batch)
        try:
            if len(payload) > PART_BYTES:
                batch += split(key, payload)
            else:
                batch.append((key, kind, payload))
            self._account(key, kind, payload, writer.number)
        except BaseException as error:
            del batch[before:]
            if self.live.has_page(key):  # otherwise not even the first step was taken
                self._fail(error)
            raise
        self.appended = appended
        self._estimate = estimate
        if new:
            self.high_water = key

    def commit(self) -> None:
        """Writes the batch in one transaction: from now on it survives the process. Never waits; see `behind`.

        Raises JournalFailed: then the journal takes nothing more, and nothing of the batch is ever written.
        """
        try:
            self._commit()
            if self._behind:
                self._held_since_s = time.monotonic()
                self._judge()
        except BaseException as error:
            self._fail(error)

    def _commit(self) -> None:
        self._worker.check()
        if self._batch:
            self._write_batch()

    def _write_batch(self) -> None:
        batch = self._batch
        writer = self._writer
        assert writer is not None
        self._batch = []
        self._with_room(lambda: writer.append(writer.rows(batch)))
        self.records_written += len(batch)
        if writer.wal not in self._unsynced:
            self._unsynced.append(writer.wal)
        self._estimate += PAGE_BYTES // 2  # a commit writes at least one page, half of it anew on average
        if self._estimate >= self._segment_limit // 2 or self._space.tight:
            self._rotate_if_full(writer)
            self._behind = self._behind or self._space.tight

    def on_progress(self, call: Callable[[], None]) -> None:
        """Has `call` called in another thread whenever some of the journal's own work is done, or has failed."""
        self._worker.on_progress = call

    def _fail(self, error: BaseException) -> NoReturn:
        """The end of the journal: what was appended is dropped, and append() and commit() raise from now on."""
        self._failed = True
        self._batch = []
        self._worker.fail(error)
        raise_failure(error)

    def sync_point(self) -> SyncPoint | None:
        """What is committed and not yet asked to be on the device; None when there is nothing."""
        if not self._unsynced:
            return None
        assert self._writer is not None and self._watermark is not None
        writer = self._writer
        point = SyncPoint(self._unsynced, self._worker.fail, self._watermark, writer.number, writer.records)
        self._unsynced = []
        return point

    # --- room

    def admits(self, size: int) -> bool:
        """Whether there is room for a new key of this payload and for all that may still happen to all keys.

        The directory stays below twice the live bytes and the segments that come and go: that is what has to fit.
        """
        if self._space.tight:
            return False
        need = 2 * (row_bytes(size) + _CHANGE_BYTES) + _RESERVE_KEY_BYTES
        self._admitted += 1
        if self._slack < need or self._admitted >= _ADMIT_CHECK_EVERY:
            self._admitted = 0
            grown = self.live.total_bytes + self.live.keys * _CHANGE_BYTES
            bare = (grown // self._segment_limit + _SPARE_SEGMENTS) * _BARE_SEGMENT_BYTES
            coming = 2 * _NEW_SEGMENT_BYTES + _INDEXES_MAX * _INDEX_BYTES
            around = _SPARE_SEGMENTS * self._segment_limit + coming + self._reserve_target()
            self._slack = self._space.capacity(self.disk_bytes) - 2 * grown - bare - around
        if self._slack < need:
            return False
        self._slack -= need
        return True

    def _reserve_target(self) -> int:
        """What is kept for the time when somebody else fills the disk.

        Room to seal and begin small segments, to move what is live in a large one, and to delete every key.
        """
        size = self._enough_room(self._segment_limit) + _NEW_SEGMENT_BYTES + _RESERVE_KEY_BYTES * self.live.keys
        return size - size % BLOCK_BYTES

    def _least_room(self, alive: int) -> int:
        """What moving so many live bytes to small segments takes before the one that they come from goes."""
        return alive + alive // 8 + 2 * self._small_segment + _NEW_SEGMENT_BYTES

    def _enough_room(self, alive: int) -> int:
        """With more than that, commits may go on on a full disk before anything has to be moved."""
        return self._least_room(alive) + self._small_segment + 2 * _NEW_SEGMENT_BYTES

    @property
    def _small_segment(self) -> int:
        """Segments are smaller while the disk is full."""
        return min(self._segment_limit, max(self._segment_limit // 6, 3 * PIECE_BYTES))

    @property
    def _margin(self) -> int:
        """What the disk must have beside the whole reserve before it counts as having room again."""
        return 2 * (self._segment_limit + _NEW_SEGMENT_BYTES)

    def _fit_segments(self) -> None:
        """Small segments on a small disk, so that it can rotate and compact at all.

        While one is sealed its records stand in the WAL and in the database: together they take what -s says.
        """
        share = self._space.capacity(self.disk_bytes) // _CAPACITY_SHARE
        self._segment_limit = min(max(self.segment_bytes // 2, _SEGMENT_BYTES_MIN // 2), max(share, _SEGMENT_BYTES_MIN))

    def _with_room(self, write: Callable[[], _T]) -> _T:
        """Does a write, with room from the reserve where the disk is full."""
        try:
            return self._space.within(write)
        except JournalFull as full:
            raise JournalFailed(str(full)) from full
        finally:
            self._say_tight()

    def _say_tight(self) -> None:
        if self._space.tight != self._said_tight:
            self._said_tight = self._space.tight
            full = "the disk is full; puts are refused until there is room again"
            self._log(f"journal: {full if self._said_tight else 'there is room again; puts are accepted'}")

    def _tend_reserve(self) -> None:
        """Lets the reserve grow and shrink with the live keys, and stand again when a full disk has room."""
        self._say_tight()
        space = self._space
        target = self._reserve_target()
        if self._refilling:
            return
        if not space.tight:
            useful = abs(target - space.reserved) > self._segment_limit // 4
        else:
            useful = space.free() >= (PIECE_BYTES if space.reserved < target else self._margin)
        if useful:
            self._refill()

    def _refill(self) -> None:
        space = self._space
        target = self._reserve_target()
        self._refilling = True

        def done() -> None:
            self._refilling = False
            self._say_tight()
            room = space.free() + space.reserved
            for sealed in self._sealed[self._retiring :]:
                if sealed.ready and not sealed.merged and sealed.merge_bytes + PIECE_BYTES < room:
                    room -= sealed.merge_bytes
                    self._seal(sealed)

        self._worker.submit(lambda: space.refill(target, self._margin), done)

    # --- segments come and go

    @property
    def _full_at(self) -> int:
        """Of how many bytes a WAL is full."""
        return self._small_segment if self._space.tight else self._segment_limit

    @property
    def _overgrown(self) -> bool:
        """Whether the current segment is beyond full, because the next one is not there yet."""
        assert self._writer is not None
        return self._writer.wal.size() > self._full_at + self._full_at // 4

    def _rotate_if_full(self, writer: SegmentWriter) -> None:
        if writer.wal.size() < self._full_at:
            return
        if self._next is None:
            self._prepare()
            self._behind = self._behind or self._overgrown
            return
        fresh = self._next
        self._next = None
        oldest = self._oldest_needed()
        fresh.before = {**self._unsealed(), writer.number: writer.records}
        self._with_room(lambda: fresh.note(self.high_water, oldest))
        self._unsynced.append(fresh.wal)
        self._writer = fresh
        self._noted = False
        self._estimate = 0
        sealed = _Sealed(writer.path, writer.number, writer, writer.bytes)
        self._sealed.append(sealed)
        self._seal(sealed)
        self._prepare()
        self._behind = True  # until it is judged

    def _unsealed(self) -> dict[int, int]:
        """Records of the segments that do not say it themselves so far, and of the last: it may be an older copy."""
        needed = self._sealed[self._retiring :]
        return {sealed.number: sealed.records for sealed in needed if not sealed.merged or sealed is needed[-1]}

    def _excess(self) -> float:
        """By how many bytes the directory is too large, or its disk too full: then commits wait for compaction."""
        if not self.compact:
            return 0
        used = self.disk_bytes
        room = self._space.capacity(used) - used - self._reserve_target() - _INDEXES_MAX * _INDEX_BYTES
        used += sum(sealed.bytes for sealed in self._sealed if not sealed.ready)  # being merged, they stand there twice
        return max(used - 2.5 * self.live.total_bytes - 3 * self._segment_limit, self._margin - room)

    def _seal(self, sealed: _Sealed) -> None:
        sealed.ready = False

        def work() -> None:
            try:
                self._space.within(lambda: sealed.merge(self._log), sealed.merge_bytes)
            except JournalFull:
                sealed.keep()  # as it is, until there is more room

        def done() -> None:
            sealed.ready = True
            sealed.bytes = disk_bytes(sealed.path)
            if sealed.wal in self._unsynced:  # it is on the device by now; under `-F` nobody else asks
                self._unsynced.remove(sealed.wal)
            sealed.wal = None

        self._worker.submit(work, done)

    @property
    def _ahead(self) -> int:
        """How many bytes a new segment's WAL is to have before anything is written; never so many that it is full."""
        used = self.disk_bytes
        spare = self._space.capacity(used) - used - self._reserve_target()
        if not self._allocate or self._space.tight or spare < _SPARE_SEGMENTS * self._segment_limit:
            return 0
        return min(self._segment_limit - 1, _AHEAD_MAX)

    def _prepare(self) -> None:
        """Has the worker create the next segment, so that rotation costs no time. A full disk only puts it off."""
        assert self._writer is not None
        if self._preparing or self._next is not None:
            return
        self._preparing = True
        number = self._writer.number + 1
        ahead = self._ahead
        made: list[SegmentWriter] = []
        self._made = made

        def work() -> None:
            try:
                path = segment_path(self.directory, number)
                made.append(self._space.within(lambda: SegmentWriter(path, number, 0, ahead)))
                fsync_path(self.directory)
            except JournalFull:
                return

        def done() -> None:
            self._preparing = False
            self._next = made[0] if made else None

        self._worker.submit(work, done, urgent=True)

    # --- compaction

    @property
    def disk_bytes(self) -> int:
        """What the segments take on disk."""
        writer = self._writer
        return sum(sealed.bytes for sealed in self._sealed) + (disk_bytes(writer.path) if writer else 0)

    @property
    def settling(self) -> bool:
        """Whether the worker has something to do or to report, or the disk is full."""
        return self._worker.busy or self._space.tight

    def wants_compaction(self) -> bool:
        """Whether compact_slice() has something worth doing: sealed segments hold more garbage than live records."""
        try:
            return self._look_after()
        except BaseException as error:
            self._fail(error)

    def _look_after(self) -> bool:
        self._worker.check()
        writer = self._writer
        assert writer is not None
        if self._next is None:
            self._prepare()
        elif not self._batch and (self._overgrown or writer.bytes > self.live.bytes_in(writer.number)):
            self._rotate_if_full(writer)  # it may have had to wait for the next one, and nobody writes now
        self._tend_reserve()
        if not self.compact or len(self._sealed) <= self._retiring or self._overgrown:
            return False
        if sum(not sealed.ready for sealed in self._sealed[-_SPARE_SEGMENTS:]) > 1:
            return False  # what is moved must not come faster than the worker seals
        if self._victim is not None and not self._space.tight:
            return True
        victim = self._sealed[self._retiring]
        if not victim.ready:
            return False
        alive = self.live.bytes_in(victim.number)
        if not alive:
            return True
        live = self.live.total_bytes
        # Of one that is being sealed, its WAL does not count: with one record a commit that is ten times what stays.
        standing = sum(each.bytes if each.ready else each.merge_bytes for each in self._sealed[self._retiring :])
        segments = min(live // self._segment_limit + _SPARE_SEGMENTS, len(self._sealed) - self._retiring)
        worth = standing > 2 * live + segments * _BARE_SEGMENT_BYTES
        if not self._space.tight:
            return worth
        # On a full disk any garbage is worth it, but only where there would be no room for the next segments otherwise:
        # to get at that of the newest segment all others have to be moved. Moving takes room before it gives any back.
        room = self._space.free() + self._space.reserved
        if room <= self._least_room(alive):
            return False
        if worth or room > self._enough_room(alive):
            return worth
        wholes = live - self.live.change_bytes
        gain = standing - wholes - (wholes // self._small_segment + _SPARE_SEGMENTS) * _BARE_SEGMENT_BYTES // 2
        return gain > min(wholes // 4, self._segment_limit)

    @property
    def behind(self) -> bool:
        """Whether changes have to wait, because garbage, or the next segment, does not keep up with them.

        Without that, the directory would outgrow its bound under a load that never pauses. Whoever calls commit() has
        to call catch_up() while this is true and append nothing meanwhile. It is true for some milliseconds after a
        commit, longer only where the device cannot follow and on a full disk.
        """
        if not self._behind:
            return False
        return (self._space.tight and self._worker.busy) or time.monotonic() - self._held_since_s < self._hold_s

    def catch_up(self, payload_of: Callable[[int], bytes | None]) -> bool:
        """While `behind`: compacts a slice here and now, or rotates. Never waits. Raises JournalFailed.

        Returns whether to call again at once; otherwise only the worker can help, and `on_progress` tells when it did.
        """
        if not self._behind:
            return False
        moves = self.wants_compaction() and not (self._space.tight and self._worker.busy)
        if moves:
            self.compact_slice(payload_of)
        try:
            self._judge()
        except BaseException as error:
            self._fail(error)
        if not moves and not self._worker.busy:
            self._behind = False  # there is nothing that could be done
        return moves

    def wait(self) -> None:
        """For who has nothing else to do while `behind`: waits some milliseconds for the worker."""
        self._worker.wait(_HOLD_S)

    def _judge(self) -> None:
        """Decides whether changes still have to wait, and how long after a commit."""
        writer = self._writer
        assert writer is not None
        excess = self._excess()
        late = self._next is None and self._overgrown
        if excess <= 0 and not late:
            self._behind = False
        elif self._space.tight or excess > self._margin:
            self._hold_s = _FULL_HOLD_S
        elif excess < self._segment_limit and writer.wal.size() < 2 * self._full_at:
            self._hold_s = _HOLD_S
        else:
            self._hold_s = _LONG_HOLD_S

    def compact_slice(self, payload_of: Callable[[int], bytes | None]) -> None:
        """Appends some live keys of the oldest segment anew, from their current whole payload, and commits.

        Only while wants_compaction() is true. A segment that holds nothing live any more is handed to the worker, which
        syncs what was moved and then removes it. One slice takes about a millisecond. Raises JournalFailed.
        """
        try:
            self._move_some(payload_of)
        except BaseException as error:
            self._fail(error)

    def _move_some(self, payload_of: Callable[[int], bytes | None]) -> None:
        self._commit()  # what is live must be so on disk before anything goes for being dead
        victim = self._sealed[self._retiring]
        if self.live.bytes_in(victim.number):
            if self._victim is None:
                self._victim = self._with_room(lambda: SegmentReader(victim.path))
                self._scanned_seq = 0
            moved_bytes = 0
            enough = min(_MOVE_BYTES, self._full_at // 2)
            for seq, key in self._victim.keys_after(self._scanned_seq, _SCAN_KEYS):
                self._scanned_seq = seq
                if self.live.segment_of(key) != victim.number:
                    continue
                payload = payload_of(key)
                assert payload is not None, "a live key has a payload"
                self.append(key, FULL, payload)
                self.records_moved += 1
                moved_bytes += len(payload)
                if moved_bytes >= enough:
                    break
            self._commit()
        if not self.live.bytes_in(victim.number):
            self._retire(victim)

    def _oldest_needed(self) -> int:
        """The first segment that is not on its way out."""
        return self._sealed[self._retiring].number if len(self._sealed) > self._retiring else self.current

    def _guard(self) -> SyncPoint:
        """A sync of all that was committed.

        The policy's own sync may be on its way in another thread, so this one asks again. Segments before the current
        one are sealed, and thereby synced, earlier in the worker's order.
        """
        assert self._writer is not None and self._watermark is not None
        writer = self._writer
        return SyncPoint([writer.wal], self._worker.fail, self._watermark, writer.number, writer.records)

    def _retire(self, victim: _Sealed) -> None:
        if self._victim is not None:
            self._victim.close()
            self._victim = None
        self._retiring += 1
        writer = self._writer
        assert writer is not None
        oldest = self._oldest_needed()
        self._with_room(lambda: writer.note(self.high_water, oldest))
        self._noted = True
        point = self._guard()

        def work() -> None:
            point.run()
            victim.remove()
            fsync_path(self.directory)

        def done() -> None:
            self._retiring -= 1
            self._sealed.remove(victim)
            self.live.forget(victim.number)

        self._worker.submit(work, done)

    # --- end

    def close(self) -> None:
        """Commits, syncs and seals everything and gives the directory back. Raises JournalFailed."""
        try:
            self._close()
        except BaseException as error:
            self._worker.fail(error)  # it must not be at work on files that are another process's by then
            self.abandon()
            raise_failure(error)
        self._give_up_files()

    def _close(self) -> None:
        if self._writer is not None:
            self.commit()  # it may rotate
        writer, unused = self._writer, False
        if writer is not None:
            self._guard().run()
            if self._victim is not None:
                self._victim.close()
            unused = writer.records == 0 and not self._noted and len(self._sealed) > self._retiring
            if not unused and writer.wal.size() <= _SEAL_AT_END_BYTES:
                self._seal(_Sealed(writer.path, writer.number, writer, writer.bytes))
        self._worker.close()
        for each in (self._next, writer if unused else None):
            if each is not None:  # the newest first, and for good: a gap in the numbers is a missing segment
                each.discard()
                fsync_path(self.directory)
        if writer is not None:
            self._space.refill(self._reserve_target(), 0)  # before others take what the last steps gave back

    def abandon(self) -> None:
        """Gives the directory back without writing anything more: after a failure nothing else is safe."""
        if self._worker.abandon():  # else the worker may still change files, and the end of the process frees the lock
            self._give_up_files()

    def _give_up_files(self) -> None:
        for writer in (self._writer, *self._made, *(sealed.writer for sealed in self._sealed)):
            if writer is not None:
                writer.leave()
        if self._victim is not None:
            self._victim.close()
        if self._watermark is not None:
            self._watermark.close()
        self._lock.close()

    def _account(self, key: int, kind: int, payload: bytes, segment: int) -> None:
        size = row_bytes(len(payload))
        if kind == FULL:
            self.live.whole(key, segment, size)
        elif kind == CHANGE:
            self.live.change(key, segment, size)
        else:
            assert kind == DELETE
            self.live.delete(key)
