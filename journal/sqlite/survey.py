"""What an operator does to a journal: look through the journal, copy it, write it anew.

This room must not know SQL nor what a payload means. The caller hands in `examine`, which says whether a payload is
sound. Reading takes no lock and changes neither segment nor WAL, so a tool may read beside a running server. SQLite may
leave its index of a WAL (`-shm`) behind. Invariant: what a Snapshot gives back is a state that the journal was in.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, NamedTuple

from journal.errors import JournalDamaged, JournalError, JournalFailed, JournalLocked
from journal.liveness import Liveness
from journal.sqlite.files import (
    ASIDE_SUFFIX,
    MISSING_SUFFIX,
    NEW_SUFFIX,
    WATERMARK_NAME,
    aside_numbers,
    begun_paths,
    disk_bytes,
    fsync_path,
    read_watermark,
    remove_files,
    remove_left_overs,
    segment_path,
    segment_paths,
    write_watermark,
)
from journal.sqlite.format import CHANGE, DELETE, FULL, KEY_MAX, PART_BYTES, split
from journal.sqlite.heal import LOST_KEYS
from journal.sqlite.lock import LOCK_NAME
from journal.sqlite.reader import SegmentReader, join
from journal.sqlite.replay import Record, Replay, Source
from journal.sqlite.space import RESERVE_NAME
from journal.sqlite.wal import torn_bytes
from journal.sqlite.writer import SegmentWriter

SEGMENT_BYTES: Final = 10485760
"""The size of segments that tools write: the default of a server's -s."""
_ATTEMPTS: Final = 300
_PAUSE_S: Final = 0.1
"""How often a tool tries to open all segments at one moment, and the pause after each try: half a minute in all. A busy
server with small segments makes a new segment several times a second."""
_BATCH_ROWS: Final = 1000
_BATCH_BYTES: Final = 1 << 20
"""Rows and bytes that one transaction writes: enough that its fixed cost does not count, and little memory."""
_OURS: Final = re.compile(
    rf"{LOCK_NAME}|{WATERMARK_NAME}|{RESERVE_NAME}|lost\+found"
    rf"|segment-\d{{8,18}}\.db({re.escape(ASIDE_SUFFIX)}|{re.escape(NEW_SUFFIX)})?(-wal|-shm)?"
    rf"|segment-\d{{8,18}}\.db{re.escape(MISSING_SUFFIX)}"
)
_FILES_OF_AN_EMPTY_DIRECTORY: Final = {LOCK_NAME, "lost+found"}

Examine = Callable[[Record], None]
"""Raises ValueError when a record is not one that its owner writes."""


class _Pinned(SegmentReader):
    """A segment as it was when this object was made. It can be read any number of times."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            self.pin()
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        """Does nothing: the snapshot closes the segment, with release()."""

    def release(self) -> None:
        super().close()


class Snapshot(Source):
    """All segments of a directory at one moment, held open. A server may write and compact meanwhile.

    A state of a journal is all records up to some place in their order. So the newest segment is opened first: records
    that an older segment takes in meanwhile come before all records that the newer segment does not show yet.
    """

    def __init__(self, directory: str) -> None:
        """Raises JournalLocked when there is no such directory, or no journal in it."""
        self._readers: dict[str, _Pinned] = {}
        self._bytes: dict[str, int] = {}
        self._damage: dict[str, JournalError] = {}
        self._paths: list[tuple[int, str]] = []
        super().__init__(directory)
        if not list_segments(directory) and not os.path.exists(os.path.join(directory, WATERMARK_NAME)):
            raise JournalLocked(f"{directory} has no journal in it")
        try:
            self._take_all()
        except BaseException:
            self.close()
            raise

    def _take_all(self) -> None:
        directory = self.directory
        for _ in range(_ATTEMPTS):
            before = _fingerprint(directory)
            if self._take():
                return
            # Either a segment came or went meanwhile, or one is damaged. If nothing changes now, one is damaged.
            time.sleep(_PAUSE_S)
            if _fingerprint(directory) == before:
                return
            self.close()
        raise JournalError(f"the journal in {directory} changes faster than it can be opened")

    def paths(self) -> list[tuple[int, str]]:
        return self._paths

    def open(self, path: str) -> SegmentReader:
        if path in self._damage:
            raise self._damage[path]
        return self._readers[path]

    def bytes_of(self, path: str) -> int:
        """What a segment took on disk at that moment. The server may have removed it or merged its WAL since."""
        return self._bytes[path]

    def close(self) -> None:
        """Closes the files."""
        for reader in self._readers.values():
            reader.release()
        self._readers.clear()
        self._damage.clear()

    def _take(self) -> bool:
        self._paths = paths = segment_paths(self.directory)
        steady = paths == segment_paths(self.directory)  # a listing may miss what comes or goes meanwhile
        for _, path in reversed(paths):
            self._bytes[path] = disk_bytes(path)
            try:
                self._readers[path] = _Pinned(path)
            except JournalError as error:
                self._damage[path] = error
        return steady and not self._damage and all(os.path.exists(path) for _, path in paths)


class SegmentFacts(NamedTuple):
    """One segment. A replay needs its `live_bytes`. `torn_bytes` is the size of a write that a crash cut short."""

    number: int
    path: str
    records: int
    bytes: int
    live_bytes: int
    torn_bytes: int
    damaged: bool


class Survey:
    """One reading of a whole directory: what is wrong with the journal, and which records are live."""

    def __init__(self, directory: str, examine: Examine) -> None:
        """Raises JournalLocked when there is no such directory, or no journal in it."""
        self.directory = directory
        self.findings: list[str] = []
        self.notes: list[str] = []
        """Lines for the operator about what is no damage."""
        self.segments: list[SegmentFacts] = []
        self.live = Liveness()
        self.keys = 0
        self.high_water = 0
        """The largest key in any record, also in records of keys that are deleted."""
        self.damaged: dict[int, str] = {}
        """Number and path of each damaged segment."""
        self.missing: list[tuple[int, int]] = []
        """First and last number of each gap between the segments."""
        self.oldest = 0
        self.lost: list[int] = []
        """Keys that are known to be lost: a damaged record names them, or only their changes are left."""
        self._dead: list[int] = []
        self._examine = examine
        self._snapshot = Snapshot(directory)

    @property
    def used_keys(self) -> int:
        """No key up to this one may be used again. After damage it is larger: lost records may have had larger keys."""
        return min(self.high_water + (LOST_KEYS if self.findings else 0), KEY_MAX)

    def read(self) -> Iterator[Record]:
        """Every sound record that belongs to a key's history, oldest first. `findings` is complete after the last."""
        return (record for _, record in self._read())

    def live_records(self) -> Iterator[tuple[Record, bytes | None]]:
        """Each live key's whole record, in the order of the journal, with the payload of the key's last change.

        Reads the directory twice. Holds some 100 bytes for each key, and one whole payload at a time. `findings` and
        `high_water` are complete before the first record.
        """
        wholes: dict[int, int] = {}
        changes: dict[int, bytes] = {}
        for place, record in self._read():
            if record.kind == FULL:
                wholes[record.key] = place
                changes.pop(record.key, None)
            elif record.kind == CHANGE:
                changes[record.key] = record.payload
            else:
                wholes.pop(record.key, None)
                changes.pop(record.key, None)
        self.keys = len(wholes)
        for place, record in enumerate(Replay(self.directory, self._snapshot).records()):
            if record.kind == FULL and wholes.get(record.key) == place:
                yield record, changes.get(record.key)

    def at_risk(self) -> tuple[set[int], list[int]]:
        """Keys that need a damaged segment, and keys that would come back, or be in doubt, without that segment."""
        return self.live.keys_in_any(set(self.damaged)), self._dead

    def close(self) -> None:
        """Closes the files, and fills in `torn_bytes`, which can be asked only then."""
        self._snapshot.close()
        self.segments = [facts._replace(torn_bytes=torn_bytes(facts.path)) for facts in self.segments]

    def _read(self) -> Iterator[tuple[int, Record]]:
        replay = Replay(self.directory, self._snapshot)
        replay.keeps_deleted = True
        self.live = replay.live
        strange: set[int] = set()
        unsound: list[str] = []
        lost: set[int] = set()
        for place, record in enumerate(replay.records()):
            try:
                self._examine(record)
            except ValueError as error:
                strange.add(record.segment)
                unsound.append(f"segment {record.segment}: a record of job {record.key} is not a job's: {error}")
                if record.kind == FULL:
                    lost.add(record.key)
                continue
            if record.kind != CHANGE:
                lost.discard(record.key)
            elif record.key in lost:
                continue
            yield place, record
        self.findings = replay.findings + unsound
        self.notes = replay.notes
        self.high_water = replay.high_water
        self.keys = self.live.keys - len(lost)
        self.missing = replay.missing
        self.oldest = replay.oldest
        self.damaged = {each.number: each.path for each in replay.found if each.damaged or each.number in strange}
        gone = {key for key in replay.suspects if not self.live.segment_of(key)}
        self.lost = sorted(gone | replay.orphans | lost)
        deleted = {key for each in replay.found if each.number in self.damaged for key in each.deleted}
        self._dead = sorted({key for key in deleted if not self.live.segment_of(key)} | replay.orphans | lost)
        self.segments = []
        for found in replay.found:
            facts = (self._snapshot.bytes_of(found.path), self.live.bytes_in(found.number), 0, found.damaged)
            self.segments.append(SegmentFacts(found.number, found.path, found.records, *facts))


def list_segments(directory: str) -> list[tuple[int, str]]:
    """Number and path of every segment that was ever complete, oldest first.

    Raises JournalLocked when the directory cannot be read.
    """
    try:
        return begun_paths(segment_paths(directory), read_watermark(directory))
    except OSError as error:
        raise JournalLocked(f"cannot use journal directory {directory}: {error.strerror}") from error


def next_number(directory: str) -> int:
    """A number for a segment that no segment has or ever had. Raises JournalLocked."""
    numbers = [number for number, _ in list_segments(directory)]
    return max([0, *numbers, *aside_numbers(directory), read_watermark(directory)[0]]) + 1


def every_record(directory: str, complain: Callable[[str], None]) -> Iterator[tuple[int, Record]]:
    """Each intact record, also dead ones, with its place in its segment. Calls `complain` for what cannot be read."""
    snapshot = Snapshot(directory)
    try:
        for number, path in snapshot.paths():
            try:
                reader = snapshot.open(path)
                for key, kind, payload in join(reader):
                    yield reader.records, Record(key, kind, payload, number)
                if reader.skipped:
                    complain(f"{path} has {reader.skipped} damaged records, which are left out")
            except JournalDamaged as error:
                complain(str(error))
    finally:
        snapshot.close()


class Builder:
    """Writes whole segments: a new journal, or new segments behind those of an old journal.

    Until finish() has returned, the directory's watermark names a record that does not exist. So a server refuses an
    unfinished journal. The caller holds the directory's lock.
    """

    def __init__(
        self,
        directory: str,
        *,
        first: int = 1,
        high_water: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        oldest: int = 0,
    ) -> None:
        """`oldest` is the first segment that is still needed; 0 stands for the first segment written here.

        Raises JournalFailed.
        """
        self.directory = directory
        self.high_water = high_water
        self._segment_bytes = segment_bytes
        self._first = first
        self._oldest = oldest or first
        self._writers: list[SegmentWriter] = []
        self._batch: list[tuple[int, int, bytes]] = []
        self._batch_bytes = 0
        remove_left_overs(directory)
        self._watermark_before = read_watermark(directory)
        path = os.path.join(directory, WATERMARK_NAME)
        with _failing(f"cannot create {path}"):
            self._watermark = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, key: int, payload: bytes, change: bytes | None = None) -> None:
        """Adds a whole record of a key, and its last change; both are there or neither. Raises a JournalError."""
        if self._batch_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_ROWS:
            self._write()
        self._batch += split(key, payload) if len(payload) > PART_BYTES else [(key, FULL, payload)]
        self._batch_bytes += len(payload)
        if change is not None:
            self._batch.append((key, CHANGE, change))
            self._batch_bytes += len(change)

    def delete(self, key: int) -> None:
        """Adds a record that a key is gone. Raises a JournalError."""
        if len(self._batch) >= _BATCH_ROWS:
            self._write()
        self._batch.append((key, DELETE, b""))

    def finish(self) -> None:
        """Everything, and the high water with it, is on the device and valid. Raises a JournalError."""
        self._write()
        last = self._writers[-1]
        last.note(self.high_water, self._oldest)
        last.seal()
        self._mark(last.number, last.records)
        os.close(self._watermark)
        fsync_path(self.directory)

    def discard(self) -> None:
        """Removes what was written. The directory is as it was."""
        for writer in self._writers:
            writer.discard()
        if self._watermark_before[0]:
            self._mark(*self._watermark_before)
        else:
            os.unlink(os.path.join(self.directory, WATERMARK_NAME))
        os.close(self._watermark)

    def _write(self) -> None:
        writer = self._writers[-1] if self._writers else None
        if writer is None or writer.wal.size() >= self._segment_bytes:
            if writer is not None:
                writer.seal()
            number = self._first + len(self._writers)
            self._mark(number + 1, 1)
            writer = SegmentWriter(segment_path(self.directory, number), number, self.high_water)
            self._writers.append(writer)
            writer.note(self.high_water, self._oldest)
        writer.append(writer.rows(self._batch))
        if self._batch:
            self.high_water = max(self.high_water, *(key for key, _, _ in self._batch))
        self._batch = []
        self._batch_bytes = 0

    def _mark(self, segment: int, records: int) -> None:
        with _failing("cannot write the journal's watermark"):
            write_watermark(self._watermark, segment, records)
            os.fsync(self._watermark)


def rewrite(survey: Survey, builder: Builder) -> None:
    """Writes what is live in one journal to another. Raises a JournalError; what was written is removed then."""
    try:
        for record, change in survey.live_records():
            builder.append(record.key, record.payload, change)
        builder.high_water = max(builder.high_water, survey.used_keys)
        builder.finish()
    except BaseException:
        builder.discard()
        raise


def mend(survey: Survey, builder: Builder) -> list[str]:
    """Makes damage good in place: what needs a damaged segment is written anew, and only then that is set aside.

    Sound segments stay as they are. Returns the paths that were set aside. Raises a JournalError.
    """
    try:
        records = survey.live_records()
        first = next(records, None)  # from here on the survey knows all
        moving, dead = survey.at_risk()
        for record, change in chain([first] if first else [], records):
            if record.key in moving:
                builder.append(record.key, record.payload, change)
        for key in dead:
            builder.delete(key)
        builder.high_water = max(builder.high_water, survey.used_keys)
        builder.finish()
    except BaseException:
        builder.discard()
        raise
    aside = [path for _, path in sorted(survey.damaged.items())]
    set_aside(aside)
    _mark_missing(survey.directory, survey.missing)
    return aside


def _mark_missing(directory: str, missing: list[tuple[int, int]]) -> None:
    """Notes that the loss of these segments is known. Raises JournalFailed."""
    with _failing("cannot note that segments are missing"):
        for first, last in missing:
            for number in range(first, last + 1):
                mark = segment_path(directory, number) + MISSING_SUFFIX
                os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    fsync_path(directory)


def set_aside(paths: list[str]) -> None:
    """Renames segments, in this order, so that no replay reads them any more. Raises JournalFailed."""
    for path in paths:
        if os.path.exists(path + ASIDE_SUFFIX):
            raise JournalFailed(f"cannot set {path} aside: {path + ASIDE_SUFFIX} exists")
    with _failing("cannot set a segment aside"):
        for path in paths:
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path + suffix, path + ASIDE_SUFFIX + suffix)
    if paths:
        fsync_path(os.path.dirname(paths[0]) or ".")


def strangers(directory: str) -> list[tuple[str, str]]:
    """Names of files that no replay reads, and what they are."""
    found = []
    for name in sorted(os.listdir(directory)):
        if name.startswith("segment-") and name.endswith(ASIDE_SUFFIX):
            found.append((name, "was set aside"))
        elif name.startswith("segment-") and name.endswith(MISSING_SUFFIX):
            found.append((name, "stands for a segment whose loss was accepted"))
        elif not _OURS.fullmatch(name):
            found.append((name, "does not belong to a journal"))
    return found


def require_empty(directory: str) -> None:
    """Raises JournalLocked when a directory, if it is there at all, has more in it than a lock."""
    try:
        left = set(os.listdir(directory)) - _FILES_OF_AN_EMPTY_DIRECTORY
    except FileNotFoundError:
        return
    except OSError as error:
        raise JournalLocked(f"cannot use directory {directory}: {error.strerror}") from error
    if left:
        raise JournalLocked(f"{directory} is not empty: it has {min(left)}")


def backup(directory: str, target: str) -> int:
    """Copies a journal, also while its server runs, into an empty directory whose lock the caller holds.

    The copy is the journal as it was at some moment between begin and end. Returns the number of segments. Raises
    JournalDamaged when a segment cannot be read, and JournalFailed; the copy is then removed.

    A sealed segment never changes, so those are copied at leisure. Then the directory is listed again: whatever was
    live in a segment that is gone by now stands in one of the rest. That rest, newest first for the reason that
    Snapshot gives, is small; when one of it goes away before it was copied, all this begins again.
    """
    path = os.path.join(target, WATERMARK_NAME)
    with _failing(f"cannot create {path}"):
        watermark = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    copy = _Copy(directory, target, watermark)
    try:
        copy.run()
        _copy_asides(directory, target)
        copy.mark()
        fsync_path(target)
    except BaseException:
        for number in copy.records:
            remove_files(segment_path(target, number))
        os.unlink(path)
        raise
    finally:
        os.close(watermark)
    return len(copy.records)


class _Copy:
    """The segments of a backup. `records` has how many there are in each that was copied."""

    def __init__(self, directory: str, target: str, watermark: int) -> None:
        self.records: dict[int, int] = {}
        self._directory = directory
        self._target = target
        self._file = watermark
        self._synced = read_watermark(directory)

    def run(self) -> None:
        """Raises JournalDamaged or JournalFailed."""
        failed_on = None
        for _ in range(_ATTEMPTS):
            before = _fingerprint(self._directory)
            if self._round(strict=before == failed_on):
                return
            failed_on = before
            time.sleep(_PAUSE_S)
        raise JournalFailed(f"the journal in {self._directory} changes faster than it can be copied")

    def mark(self) -> None:
        """Notes in the copy how far it goes, or how far the original should go and does not."""
        last = max(self.records)
        segment, records = self._synced
        if segment <= last and records <= self.records.get(segment, records):
            segment, records = last, self.records[last]
        self._write_watermark(segment, records)

    def _round(self, *, strict: bool) -> bool:
        """Copies what is not copied yet. Returns whether that is a whole; with `strict` it is, or raises."""
        for number, path in list_segments(self._directory):
            if number not in self.records:
                self._copy(number, path, sealed=True)
        listed = list_segments(self._directory)
        whole = listed == list_segments(self._directory)
        unsealed = [(number, path) for number, path in reversed(listed) if number not in self.records]
        for number, path in unsealed:
            self._copy(number, path, strict=strict)
        if whole and listed and all(number in self.records and os.path.exists(path) for number, path in listed):
            for number in self.records.keys() - {number for number, _ in listed}:
                self._drop(number)
            return True
        for number, _ in unsealed:
            self._drop(number)
        return False

    def _copy(self, number: int, path: str, *, strict: bool = False, sealed: bool = False) -> None:
        """Copies a segment, with `sealed` only if it is. With `strict` it must be readable."""
        # As with a Builder: the beginning of a copy must not pass for the whole.
        self._write_watermark(max(number, *self.records, 0) + 1, 1)
        copy = segment_path(self._target, number)
        try:
            reader = SegmentReader(path)
        except JournalError:
            if strict:  # else it may just be gone
                raise
            return
        try:
            if reader.sealed or not sealed:
                self.records[number] = reader.copy_to(copy)
        except BaseException as error:
            remove_files(copy)
            if strict or not isinstance(error, JournalDamaged):
                raise
        finally:
            reader.close()

    def _drop(self, number: int) -> None:
        if self.records.pop(number, None) is not None:
            remove_files(segment_path(self._target, number))

    def _write_watermark(self, segment: int, records: int) -> None:
        with _failing("cannot write the watermark of the copy"):
            write_watermark(self._file, segment, records)
            os.fsync(self._file)


def _copy_asides(directory: str, target: str) -> None:
    """Segments that were set aside belong to the journal: without them their numbers would seem to be missing."""
    for name in os.listdir(directory):
        if name.startswith("segment-") and (ASIDE_SUFFIX in name or MISSING_SUFFIX in name):
            with _failing(f"cannot copy {name}"):
                shutil.copy(os.path.join(directory, name), os.path.join(target, name))
            fsync_path(os.path.join(target, name))


def _fingerprint(directory: str) -> set[tuple[str, int, int]]:
    """What changes when anybody does anything to the segments."""
    found = set()
    for entry in os.scandir(directory):
        if entry.name.startswith("segment-") and not entry.name.endswith("-shm"):
            with contextlib.suppress(FileNotFoundError):
                facts = entry.stat()
                found.add((entry.name, facts.st_size, facts.st_mtime_ns))
    return found


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalFailed(f"{what}: {error.strerror}") from error
