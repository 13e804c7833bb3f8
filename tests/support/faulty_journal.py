"""The real journal's code over a disk in memory that can fail: FaultyJournal, whose directory is a Disk.

Rotation, compaction, admission and replay are those of journal/sqlite/log.py and journal/sqlite/replay.py; replaced is
what they stand on: segment files, the lock, the room on the disk and the worker thread, whose work is done when turn()
says so.

The fault model.
- Process loss, at any moment between two pieces of work and at each call of moment(): what was committed stays.
- Power loss: each segment loses any number of its last transactions that no completed sync covers, each segment apart
  from the others, as files do. A segment whose name is not synced may vanish, one whose removal is not may come back.
  The watermark, which is never synced, is that of any moment before.
- A commit fails: an error is raised, the transaction is on the disk or it is not.
- A sync fails: an error is raised, and what it should have covered may be gone at the next start, as Linux does.
- The disk is full: commits, sealing and creating find no room until others give some back.
- The disk has no inode: nothing can be created until others give some back.
Nothing stronger: no transaction in parts (SQLite sees to that), no flipped bits, no sync that lies, no lost middle.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import inf
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from journal.errors import JournalDamaged, JournalFailed, JournalFull, JournalLocked
from journal.log import HEAD, HEAD_BYTES, Payloads, Wanted
from journal.sqlite.files import segment_path
from journal.sqlite.format import DELETE, FULL, INSIDE_MAX, LAST, PAGE_BYTES, PART, PARTS, row_bytes
from journal.sqlite.reader import SegmentReader, join
from journal.sqlite.replay import Replay, Source
from journal.sqlite.space import Space
from journal.sqlite.watermark import Watermark
from journal.sqlite.worker import Worker

Row = tuple[int, int, bytes]
"""Key, kind, payload."""


class Note(NamedTuple):
    """A note in a segment about those before it."""

    high_water: int
    oldest: int
    before: dict[int, int]


Transaction = list[Row] | Note

_FRAME_BYTES = PAGE_BYTES + 24
_EMPTY_BYTES = 4 * PAGE_BYTES
_WAL_HEAD_BYTES = 32
_STARTS_MAX = 4
"""A disk that stays full bears this many starts."""


class Segment:
    """A segment as the disk has it: the transactions in it, in order."""

    def __init__(self, number: int, high_water: int) -> None:
        self.number = number
        self.note = self._first_note = Note(high_water, 0, {})
        self.transactions: list[Transaction] = []
        self.synced = 0  # this many transactions are on the device
        self.doubtful = False  # a sync failed: what it should have covered is not there for sure
        self.sealed: int | None = None  # the number of records it was sealed with
        self.name_synced = False
        self.written_bytes = _WAL_HEAD_BYTES
        self.allocated_bytes = 0  # for the WAL, written or not
        self.file_bytes = _EMPTY_BYTES
        self.body_bytes = 0  # what the payloads take that stand outside

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.transactions if isinstance(rows, list) for row in rows]

    @property
    def rows_bytes(self) -> int:
        return sum(row_bytes(len(payload)) for _, _, payload in self.rows) - self.body_bytes

    @property
    def unsynced_rows(self) -> list[Row]:
        return [row for rows in self.transactions[self.synced :] if isinstance(rows, list) for row in rows]

    @property
    def wal_bytes(self) -> int:
        return max(self.written_bytes, self.allocated_bytes)

    @property
    def disk_bytes(self) -> int:
        return self.file_bytes + self.wal_bytes + self.body_bytes

    def grows_by(self, transaction: Transaction) -> int:
        """Returns the bytes that its files grow by when a transaction is added."""
        return outside_bytes(transaction) + max(0, self.written_bytes + transaction_bytes(transaction) - self.wal_bytes)

    def add(self, transaction: Transaction) -> None:
        """Commits it."""
        self.transactions.append(transaction)
        self.written_bytes += transaction_bytes(transaction)
        self.body_bytes += outside_bytes(transaction)
        if isinstance(transaction, Note):
            self.note = transaction

    def cut(self, kept: int) -> None:
        """Loses all transactions behind the first `kept`."""
        transactions = self.transactions[:kept]
        self.transactions = []
        self.body_bytes = 0
        self.written_bytes = _WAL_HEAD_BYTES
        self.note = self._first_note
        for each in transactions:
            self.add(each)
        self.synced = kept
        self.doubtful = False

    def seal(self) -> None:
        """Merges the WAL into the file and syncs that."""
        rows = self.rows
        self.synced = len(self.transactions)
        self.doubtful = False
        self.sealed = len(rows)
        self.written_bytes = self.allocated_bytes = 0
        self.file_bytes = _EMPTY_BYTES + self.rows_bytes


def outside_bytes(transaction: Transaction) -> int:
    """Returns what the payloads of a transaction take that stand outside."""
    rows = [] if isinstance(transaction, Note) else transaction
    return sum([len(payload) for _, _, payload in rows if len(payload) > INSIDE_MAX])


def transaction_bytes(transaction: Transaction) -> int:
    """Returns what a transaction takes in a WAL: whole pages, one at least."""
    if isinstance(transaction, Note):
        return _FRAME_BYTES
    inside = sum(row_bytes(len(payload)) for _, _, payload in transaction) - outside_bytes(transaction)
    return _FRAME_BYTES * (1 + inside // PAGE_BYTES)


class Disk:
    """The files that outlive the process. Give its `path` to a FaultyJournal as the directory.

    Chances are per call, 0 until set. `moment` hears of each point at which the process may die, and may raise.
    """

    mounted: ClassVar[dict[str, Disk]] = {}

    def __init__(self, draw: random.Random, bytes_max: int = 1 << 40) -> None:
        self.path = next(path for path in map("/memory/{}".format, count(1)) if path not in Disk.mounted)
        self.draw = draw
        self.bytes_max = bytes_max
        self.others_bytes = 0
        self.reserved_bytes = 0
        self.segments: dict[int, Segment] = {}
        self.removed: list[Segment] = []  # their removal is not synced
        self.watermarks = [(0, 0)]
        self.locked = False
        self.commit_fails = 0.0
        self.sync_fails = 0.0
        self.read_fails = 0.0  # of the records that are read back
        self.takes_files = True  # whether there are inodes left
        self.failed = False  # whether the process has seen a failure for which it may give up
        self.starved = False  # others took what the journal's reserve gave back, too, or there was none
        self.starts = 0  # since others filled the disk; each one takes some room
        self.lost_in: float = inf  # the first segment that lost something since this was last set
        self.moment: Callable[[str], None] = lambda name: None
        self.committed: Callable[[], None] = lambda: None
        self.as_of: dict[int, int] | None = None  # a sync that began earlier covers this much of each segment
        Disk.mounted[self.path] = self

    def unmount(self) -> None:
        """Forgets the disk; its path is free again."""
        del Disk.mounted[self.path]

    @staticmethod
    def of(path: str) -> Disk:
        """The disk that a path is on."""
        return Disk.mounted[path if path in Disk.mounted else os.path.dirname(path)]

    def segment(self, path: str) -> Segment:
        return self.segments[number_of(path)]

    @property
    def scattered(self) -> bool:
        """Returns whether something was lost while something later was not."""
        return any(number > self.lost_in and each.rows for number, each in self.segments.items())

    @property
    def used_bytes(self) -> int:
        return sum(each.disk_bytes for each in self.segments.values())

    @property
    def free_bytes(self) -> int:
        return max(0, self.bytes_max - self.others_bytes - self.reserved_bytes - self.used_bytes)

    def others_take(self, size: int) -> None:
        """Others have this much of the disk from now on."""
        more = size > self.others_bytes and (self.others_bytes > 0 or not self.reserved_bytes)
        self.starved = size > 0 and (self.starved or more)
        self.others_bytes = size
        self.starts = 0

    def take(self, size: int, what: str) -> None:
        """Raises JournalFull when there is no room for this many bytes more."""
        if size > self.free_bytes:
            self.failed |= self.starved
            raise JournalFull(f"{what}: no space left on device")

    def lengths(self) -> dict[int, int]:
        """Returns how many transactions each segment has: what a sync that begins now will cover."""
        return {number: len(each.transactions) for number, each in self.segments.items()}

    def lose_process(self) -> None:
        """The process is gone; what a failed sync should have covered may be, too."""
        self._end()
        for each in self.segments.values():
            if each.doubtful:
                self._lose_tail(each)

    def lose_power(self) -> None:
        """The machine is gone, and of what was not synced anything the fault model allows."""
        self._end()
        for each in self.removed:
            if self.draw.random() < 0.5:
                self.segments[each.number] = each
        self.removed = []
        for number in sorted(self.segments):
            each = self.segments[number]
            if not each.name_synced and self.draw.random() < 0.5:
                del self.segments[number]
                continue
            self._lose_tail(each)
            each.name_synced = True
        self.watermarks = [self.draw.choice(self.watermarks)]

    def _end(self) -> None:
        self.locked = self.failed = False
        self.starts += 1
        self.starved |= self.starts > _STARTS_MAX and self.others_bytes > 0

    def _lose_tail(self, segment: Segment) -> None:
        if segment.sealed is not None:
            return
        kept = self.draw.choice([segment.synced, len(segment.transactions), None])
        if kept is None:
            kept = self.draw.randint(segment.synced, len(segment.transactions))
        if kept < len(segment.transactions):
            self.lost_in = min(self.lost_in, segment.number)
        segment.cut(kept)


def number_of(path: str) -> int:
    """The number of a segment, from its path or that of its `-wal`."""
    return int(os.path.basename(path)[len("segment-") :].split(".")[0])


class _WalFile:
    def __init__(self, disk: Disk, segment: Segment) -> None:
        self._disk = disk
        self._segment = segment

    def size(self) -> int:
        return self._segment.wal_bytes

    def sync(self) -> None:
        disk, segment = self._disk, self._segment
        if segment.sealed is not None:
            return  # a descriptor of a WAL that is merged and gone
        disk.moment("before a sync")
        if disk.draw.random() < disk.sync_fails:
            segment.doubtful = disk.failed = True
            raise JournalFailed("fsync of the journal failed: Input/output error")
        covered = len(segment.transactions) if disk.as_of is None else disk.as_of.get(segment.number, 0)
        segment.synced = max(segment.synced, covered)
        disk.moment("after a sync")


class _SegmentWriter:
    def __init__(self, path: str, number: int, high_water: int, ahead: int = 0) -> None:
        self.path = path
        self.number = number
        self.before: dict[int, int] = {}
        self.records = 0
        self.bytes = self.large_bytes = self.row_max = 0
        self._disk = Disk.of(path)
        self._disk.moment("before a segment is made")
        if not self._disk.takes_files:
            raise JournalFull(f"cannot create journal segment {path}: no inode left on device")
        self._disk.take(2 * _EMPTY_BYTES, f"cannot create journal segment {path}")
        assert number not in self._disk.segments, "a segment is made twice"
        self._segment = self._disk.segments[number] = Segment(number, high_water)
        if ahead <= self._disk.free_bytes:
            self._segment.allocated_bytes = ahead
        self.wal = _WalFile(self._disk, self._segment)
        self._disk.moment("after a segment is made")

    @property
    def bodies(self) -> SimpleNamespace:
        return SimpleNamespace(bytes=self._segment.body_bytes)

    @property
    def filled(self) -> int:
        return max(self.wal.size(), self._segment.body_bytes)

    def append(self, batch: Sequence[Row]) -> None:
        disk, rows = self._disk, list(batch)
        assert self._segment.sealed is None, "a sealed segment is written to"
        disk.moment("before a commit")
        disk.take(self._segment.grows_by(rows), f"cannot write to journal segment {self.path}")
        if disk.draw.random() < disk.commit_fails:
            disk.failed = True
            if disk.draw.random() < 0.3:
                self._segment.add(rows)
            raise JournalFailed(f"cannot write to journal segment {self.path}: disk I/O error")
        self._segment.add(rows)
        self.records += len(rows)
        self.bytes += sum(row_bytes(len(payload)) for _, _, payload in rows) - outside_bytes(rows)
        self.row_max = max([self.row_max, *(len(payload) for _, _, payload in rows)])
        disk.committed()
        disk.moment("after a commit")

    def note(self, high_water: int, oldest: int) -> None:
        note = Note(high_water, oldest, self.before)
        self._disk.take(self._segment.grows_by(note), f"cannot write to journal segment {self.path}")
        self._segment.add(note)

    def discard(self, *, bodies: bool = True) -> None:
        _remove_files(self.path)

    def leave(self) -> None:
        """There is nothing to close."""

    def seal(self) -> None:
        _seal(self._disk, self._segment)


def _seal(disk: Disk, segment: Segment) -> None:
    disk.moment("before a segment is sealed")
    disk.take(segment.rows_bytes, f"cannot seal journal segment {segment.number}")
    segment.seal()
    disk.moment("after a segment is sealed")


def _seal_left_over(path: str, records: int) -> int:
    disk = Disk.of(path)
    _seal(disk, disk.segment(path))
    return 0


class _SegmentReader(SegmentReader):
    def __init__(self, path: str) -> None:
        self.path = path
        if number_of(path) not in Disk.of(path).segments:
            raise JournalFailed(f"cannot read {path}: it is gone")
        segment = Disk.of(path).segment(path)
        self.number = segment.number
        self.high_water, self.oldest, self.before = segment.note
        self.records = 0
        self.skipped = 0
        self.suspects = []
        self.hints_error = ""
        self.synced = 0
        self.torn = False
        self._rows = segment.rows
        self.alone = segment.sealed is not None
        self._expected = segment.sealed

    def rows(self, behind: int = 0) -> Iterator[Row]:
        for row in self._rows:
            self.records += 1
            yield row
        if self._expected is not None and self.records != self._expected:
            raise JournalDamaged(f"{self.path} was sealed with {self._expected} records and has {self.records}")

    def batches(self, heads: bool = False) -> Iterator[list[tuple[int, int, int, int, bytes]]]:
        cuts = heads and all(kind <= DELETE for _, kind, _ in self._rows)
        for key, kind, payload in join(self):
            if cuts and kind == FULL and len(payload) > HEAD_BYTES:
                yield [(self.records, key, HEAD, len(payload), payload[:HEAD_BYTES])]
            else:
                yield [(self.records, key, kind, 0, payload)]

    def keys_after(self, seq: int, limit: int) -> tuple[list[tuple[int, int]], int]:
        rows = self._rows[seq : seq + limit]
        found = [(at, key) for at, (key, kind, _) in enumerate(rows, seq + 1) if kind in (FULL, LAST)]
        return found, seq + len(rows)

    def close(self) -> None:
        self._rows = []


class _SegmentPayloads(Payloads):
    def __init__(self, directory: str, wanted: list[Wanted]) -> None:
        super().__init__(wanted)
        self._disk = Disk.of(directory)

    def run(self) -> None:
        self._disk.moment("before payloads are read back")
        for segment, place, key in self.wanted:
            found = self._disk.segments.get(segment)
            if found is None:
                self.failed[key] = JournalFailed(f"segment {segment} is gone")
                continue
            assert found.sealed is not None, "payloads are read back from sealed segments only"
            if self._disk.read_fails and self._disk.draw.random() < self._disk.read_fails:
                self._disk.failed = True
                self.failed[key] = JournalFailed(f"segment {segment} cannot be read: Input/output error")
                continue
            is_of, kind, payload = found.rows[place - 1]
            assert is_of == key and kind in (FULL, LAST), "a record is not where it should be"
            self.found[key] = payload if kind == FULL else _whole(found.rows, place)


def _whole(rows: list[Row], place: int) -> bytes:
    """Returns the payload of the record in parts of which the last stands at the place."""
    key, _, last = rows[place - 1]
    (count,) = PARTS.unpack_from(last)
    parts = [payload for of, kind, payload in rows[: place - 1] if (of, kind) == (key, PART)]
    assert len(parts) >= count, "a record lacks parts"
    return b"".join([*parts[len(parts) - count :], last[PARTS.size :]])


def _remove_files(path: str, *, bodies: bool = True) -> None:
    disk = Disk.of(path)
    if number_of(path) not in disk.segments:
        return
    disk.moment("before a segment is removed")
    segment = disk.segments.pop(number_of(path), None)
    if segment is not None and segment.name_synced:
        disk.removed.append(segment)
    disk.moment("after a segment is removed")


def _fsync_path(path: str) -> None:
    disk = Disk.of(path)
    assert path == disk.path, "only the directory"
    disk.moment("before the directory is synced")
    disk.removed = []
    for each in disk.segments.values():
        each.name_synced = True


def _sync_files(path: str) -> None:
    disk = Disk.of(path)
    _WalFile(disk, disk.segment(path)).sync()


def _disk_bytes(path: str) -> int:
    segment = Disk.of(path).segments.get(number_of(path))
    return 0 if segment is None else segment.disk_bytes


def _bodies_bytes(path: str) -> int:
    segment = Disk.of(path).segments.get(number_of(path))
    return 0 if segment is None else segment.body_bytes


class _Watermark(Watermark):
    def _open(self, path: str) -> int:
        self._disk = Disk.of(path)
        return 0

    def _write(self, segment: int, records: int) -> None:
        assert self._disk.segments[segment].name_synced, "the watermark speaks of a segment whose name may be lost"
        self._disk.watermarks.append((segment, records))

    def close(self) -> None:
        self._file = -1


class _Replay(Replay):
    """A replay of a Disk, from which no segment was ever set aside."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, _Source(directory))

    def _find_missing(self, first: int, last: int) -> None:
        self.findings.append(f"segments {first} to {last} are missing")


class _Source(Source):
    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.watermark = Disk.of(directory).watermarks[-1]

    def paths(self) -> list[tuple[int, str]]:
        return [(number, segment_path(self.directory, number)) for number in sorted(Disk.of(self.directory).segments)]

    def open(self, path: str) -> SegmentReader:
        return _SegmentReader(path)

    def begun(self, paths: list[tuple[int, str]]) -> list[tuple[int, str]]:
        return paths


class _Lock:
    def __init__(self, directory: str) -> None:
        self._disk = Disk.of(directory)
        self.created = not self._disk.segments
        if self._disk.locked:
            raise JournalLocked(f"journal directory {directory} is in use by another process")
        self._disk.locked = True

    def close(self) -> None:
        self._disk.locked = False


class _Space(Space):
    def __init__(self, directory: str, budget: int | None) -> None:
        self._disk = Disk.of(directory)
        self._budget = budget
        self._lock = Lock()
        self._wanted = False
        self.reserved = self._disk.reserved_bytes
        self.target = 0
        self.tight = self.lacks_files = False

    def free(self) -> int:
        return self._disk.free_bytes

    def takes_files(self) -> bool:
        return self._disk.takes_files

    def _resize(self, size: int) -> bool:
        if size - self.reserved > self.free():
            return False
        self.reserved = self._disk.reserved_bytes = size
        return True


class TurnWorker(Worker):
    """The journal's worker without a thread: it does one piece of work when told to."""

    def __init__(self) -> None:
        super().__init__()
        self._work: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()

    def submit(self, work: Callable[[], None], done: Callable[[], None], *, urgent: bool = False) -> None:
        self._open += 1
        if urgent:
            self._work.appendleft((work, done))
        else:
            self._work.append((work, done))

    @property
    def idle(self) -> bool:
        """Returns whether turn() has nothing to do."""
        return not self._work

    def turn(self) -> None:
        """Does the next piece of work; after a failure none any more."""
        work, done = self._work.popleft()
        if self._failure is not None:
            return
        try:
            work()
            self._done.append(done)
        except Exception as error:  # what is no Exception is the death of the process
            self.fail(error)

    def wait(self, timeout_s: float) -> None:
        if self._work and not self._done and self._failure is None:
            self.turn()
        self._report()

    def close(self) -> None:
        while self._work:
            self.turn()
        self.check()

    def abandon(self) -> bool:
        self.fail(JournalFailed("the journal was given up"))
        self._work.clear()
        return True


def worker_of(journal: Any) -> TurnWorker:
    """The worker of a FaultyJournal."""
    worker = journal._worker
    assert isinstance(worker, TurnWorker)
    return worker


def _fake_os() -> SimpleNamespace:
    """Stands for what sealed.py asks of the system. Anything else that it might ask one day is missing here."""
    return SimpleNamespace(
        path=SimpleNamespace(
            exists=lambda path: path.endswith("-wal") and Disk.of(path).segment(path).sealed is None,
        ),
    )


def _copy(name: str, **replaced: object) -> ModuleType:
    """A copy of a module of journal/sqlite of its own, on the modules of this file."""
    spec = importlib.util.find_spec(f"journal.sqlite.{name}")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for each, fake in replaced.items():
        assert hasattr(module, each), f"journal/sqlite/{name}.py no longer uses {each}"
        setattr(module, each, fake)
    return module


def _load() -> ModuleType:
    clock = SimpleNamespace(monotonic=count(0, 0.003).__next__)
    sealed = _copy(
        "sealed",
        bodies_bytes=_bodies_bytes,
        disk_bytes=_disk_bytes,
        os=_fake_os(),
        remove_files=_remove_files,
        seal_left_over=_seal_left_over,
        sync_files=_sync_files,
    )
    segments = _copy(
        "segments",
        Sealed=sealed.Sealed,
        SegmentWriter=_SegmentWriter,
        Watermark=_Watermark,
        disk_bytes=_disk_bytes,
        fsync_path=_fsync_path,
        remove_files=_remove_files,
        sync_files=_sync_files,
        time=clock,
    )
    compaction = _copy("compaction", SegmentReader=_SegmentReader, time=clock)
    return _copy(
        "log",
        Compaction=compaction.Compaction,
        DirectoryLock=_Lock,
        Replay=_Replay,
        SegmentPayloads=_SegmentPayloads,
        Segments=segments.Segments,
        Space=_Space,
        Worker=TurnWorker,
        aside_numbers=lambda directory: [],
        remove_files=_remove_files,
        remove_left_overs=lambda directory: None,
        time=clock,
    )


if TYPE_CHECKING:
    from journal import Journal

    FaultyJournal = Journal
else:
    FaultyJournal = _load().Journal
