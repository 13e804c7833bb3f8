"""The segments of one directory as they come and go: the current segment, the next, the sealed ones, and their room.

This module must not know records or keys, only how many live bytes a segment has. One thread calls it. The worker
thread creates, seals and removes segments meanwhile. Any thread may call run() of a SyncPoint.
Invariant: a segment is removed only after everything that replaced it is on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from journal.errors import JournalFailed, JournalFull
from journal.liveness import Liveness
from journal.log import SegmentState, SyncPoint
from journal.sqlite.files import (
    disk_bytes,
    fsync_path,
    lacks_descriptors,
    remove_files,
    segment_path,
    sync_files,
)
from journal.sqlite.format import DELETE, row_bytes
from journal.sqlite.replay import Found, uncounted
from journal.sqlite.sealed import FileSync, Sealed
from journal.sqlite.sizing import BARE_SEGMENT_BYTES, NEW_SEGMENT_BYTES, PIECE_BYTES, Held, Load, Sizing
from journal.sqlite.space import Space
from journal.sqlite.wal import WalFile
from journal.sqlite.watermark import Watermark
from journal.sqlite.worker import Worker
from journal.sqlite.writer import SegmentWriter

_T = TypeVar("_T")
_WAITING_MAX: Final = 10
"""No next segment is created while this many wait to be sealed. A device that keeps pace has a quarter of these
waiting. Each waiting segment keeps its descriptors open, so DESCRIPTORS_MAX follows from this."""
_OF_A_SEGMENT: Final = 5
"""Descriptors of a segment that is written, is the next one, or waits to be sealed: the database, its WAL, the index,
the WAL once more for its fsync, and the large payloads."""
_OF_THE_REST: Final = 12
"""Descriptors beside those: two that SQLite takes while a segment is made; four for the segment that compaction reads;
two for the locks; the watermark, the reserve, a directory while it is synced, and one that SQLite may take for a
moment."""
DESCRIPTORS_MIN: Final = _OF_A_SEGMENT * 2 + _OF_THE_REST
"""A journal works with this many descriptors: one segment is written, and one is either made or waits to be sealed."""
DESCRIPTORS_MAX: Final = _OF_A_SEGMENT * (_WAITING_MAX + 1) + _OF_THE_REST
"""A journal never uses more descriptors than this."""
_RECORD_BYTES: Final = 128
"""Bytes that a WAL takes for a small record beside its payload, at the most."""
_TRY_AGAIN_S: Final = 0.1
"""Work that found no room is not tried again before this time has passed, or before a segment has given room back. On a
full disk changes wait while the worker is at work: without a pause between attempts they would never go on."""
_FILLED_AT_ONCE_BYTES: Final = 1 << 30
"""With more free bytes than this no other process fills the disk before the worker has let the reserve grow."""


class Segments:
    """All segments of a directory. First adopt() what a replay found, then begin()."""

    def __init__(
        self,
        directory: str,
        sizing: Sizing,
        space: Space,
        worker: Worker,
        log: Callable[[str], None],
        *,
        allocate: bool,
        descriptors: int,
    ) -> None:
        """Raises ValueError when `descriptors` are fewer than DESCRIPTORS_MIN."""
        if descriptors < DESCRIPTORS_MIN:
            raise ValueError(f"a journal needs {DESCRIPTORS_MIN} descriptors, not {descriptors}")
        self.directory = directory
        self.sizing = sizing
        self.space = space
        self.worker = worker
        self.live = Liveness()
        self.sealed: list[Sealed] = []  # oldest first
        self.retiring = 0  # how many of the sealed segments the worker is removing
        self.writer: SegmentWriter | None = None
        self.next: SegmentWriter | None = None
        self.noted = False  # whether only the current segment says which segments are gone, or counts some that stay
        self.open_bytes = 0  # parts written of an unfinished large record; all its parts go to one segment
        self._uncounted: dict[int, int] = {}  # segments to their records, which the first segment of this process notes
        self._sealed_load: Load | None = None  # what the sealed segments hold at the most; None: not known
        self._commit_bytes = 0  # what a commit may take, by the last ones
        self._unsynced: list[WalFile] = []
        self._watermark: Watermark | None = None
        self._log = log
        self._allocate = allocate
        self._waiting_max = min(_WAITING_MAX, (descriptors - _OF_THE_REST) // _OF_A_SEGMENT - 1)
        self._replaced: list[str] = []  # segments that begin() removes, newest first
        self._made: list[SegmentWriter] = []  # the next segment, as soon as the worker has made it
        self._preparing = False
        self._refilling = False
        self._make_after_s = 0.0  # 0: nothing is known to keep the next segment from being made
        self._refill_after_s = 0.0
        self._retire_after_s = 0.0
        self._said_tight = False

    # --- from the start to the end

    def adopt(self, found: list[Found], live: Liveness, *, replaces_idle: bool) -> None:
        """Takes over the segments that a replay found. The new segment may replace the newest ones that are idle.

        Each start makes two segments. On a full disk, starts that are killed at once would leave no room for the next.
        """
        while replaces_idle and found[-1:] and found[-1].idle:
            self._replaced.append(found.pop().path)
        self.sealed += [Sealed.found(self.sizing, each) for each in found]
        self._uncounted = uncounted(found)
        self.live = live

    def begin(self, number: int, high_water: int, dead: list[int]) -> None:
        """Opens a new segment behind all others, which deletes the `dead` keys. Raises JournalFull or JournalFailed.

        Without room it leaves nothing behind: otherwise each start on a full disk would leave another segment.
        """
        self.sizing.fit(self.space.capacity(self.disk_bytes))
        fsync_path(self.directory)  # names that an earlier start made must not vanish while newer ones stay
        for replaced in self._replaced:  # newest first, each synced: a gap would count as a missing segment
            remove_files(replaced)
            fsync_path(self.directory)
        path = segment_path(self.directory, number)
        writer = self.writer = self.space.within(lambda: self._begun(path, number, high_water, dead), files=True)
        self._say_tight()
        # It must stay where it counts segments that no other segment counts. end() speaks of the last one.
        self.noted = any(each != self.sealed[-1].number for each in self._uncounted)
        for sealed in self.sealed:
            if not sealed.merged:
                sync_files(sealed.path)  # later records build on it, and the watermark says that it is there
        # What it notes of older segments counts as soon as the watermark speaks of it, and after an older segment is
        # sealed, only what it deletes says that these keys were never promised.
        sync_files(path)
        fsync_path(self.directory)  # and must not be lost with the segment's name
        try:
            self._watermark = self.space.within(lambda: Watermark(self.directory, number))
        except JournalFull:
            self.writer = None
            writer.discard()
            raise
        fsync_path(self.directory)
        self.space.refill(self.sizing.reserve(self.load), self.sizing.margin)
        self._say_tight()
        self.prepare()
        for sealed in self.sealed:
            if not sealed.merged:
                self.seal(sealed)
        if self.space.tight:
            self._refill()

    def _begun(self, path: str, number: int, high_water: int, dead: list[int]) -> SegmentWriter:
        """Creates a segment with its note and deletes. Raises JournalFull or JournalFailed, and leaves no file then."""
        writer = SegmentWriter(path, number, high_water, self._ahead())
        try:
            writer.before = self._uncounted
            writer.note(high_water, self.staying[0].number if self.staying else number)
            if dead:
                writer.append([(key, DELETE, b"") for key in dead])
        except BaseException:
            writer.discard()
            raise
        return writer

    def end(self, seal_bytes: int) -> None:
        """Syncs all commits, and seals the current segment unless its WAL is larger than `seal_bytes`."""
        writer = self.writer
        assert writer is not None
        self.guard().run()
        unused = writer.records == 0 and not self.noted and len(self.sealed) > self.retiring
        if not unused and writer.wal.size() <= seal_bytes:
            self.seal(Sealed(self.sizing, writer.path, writer.number, writer, writer.bytes))
        self.worker.close()
        if unused and self._watermark is not None:
            last = self.sealed[-1]
            self._watermark.end(last.number, last.records)
        for each in (self.next, writer if unused else None):
            if each is not None:  # newest first, each synced: after a crash a gap would count as a missing segment
                each.discard()
                fsync_path(self.directory)
        self.space.refill(self.sizing.reserve(self.load), 0)  # before others take what the last steps gave back

    def close(self) -> None:
        """Closes all files. Nothing is written any more."""
        for writer in (self.writer, *self._made, *(sealed.writer for sealed in self.sealed)):
            if writer is not None:
                writer.leave()
        if self._watermark is not None:
            self._watermark.close()

    # --- what there is

    @property
    def current(self) -> int:
        """The number of the segment that takes the next record."""
        assert self.writer is not None
        return self.writer.number

    @property
    def oldest(self) -> int:
        """The number of the oldest segment."""
        return self.sealed[0].number if self.sealed else self.current

    @property
    def staying(self) -> list[Sealed]:
        """Sealed segments that are not being removed."""
        return self.sealed[self.retiring :]

    @property
    def oldest_needed(self) -> int:
        """The number of the first segment that is not being removed."""
        return self.sealed[self.retiring].number if len(self.sealed) > self.retiring else self.current

    @property
    def disk_bytes(self) -> int:
        """Returns what the segments take on disk."""
        writer = self.writer
        return sum(sealed.bytes for sealed in self.sealed) + (disk_bytes(writer.path) if writer else 0)

    def is_merged(self, number: int) -> bool:
        """Returns whether a segment is sealed, all of it stands in its file, and it stays."""
        sealed, first = self.sealed, self.retiring
        if len(sealed) == first:
            return False
        # Their numbers ascend, mostly without gaps: the one with this number stands no further to the right.
        at = min(first + number - sealed[first].number, len(sealed) - 1)
        while at >= first and sealed[at].number > number:
            at -= 1
        return at >= first and sealed[at].number == number and sealed[at].ready and sealed[at].merged

    def states(self, most: int) -> list[SegmentState]:
        """Returns the newest segments that stay, at most this many, and the next one. Takes a microsecond for each."""
        live = self.live
        found = [
            SegmentState(sealed.number, "sealed", sealed.bytes, live.bytes_in(sealed.number), sealed.records)
            for sealed in self.staying[-most:]
        ]
        for writer, state in ((self.writer, "current"), (self.next, "spare")):
            if writer is not None:
                size = disk_bytes(writer.path)
                found.append(SegmentState(writer.number, state, size, live.bytes_in(writer.number), writer.records))
        return found[-most:]

    @property
    def load(self) -> Load:
        """Returns the load of the segments that stay. Takes a microsecond for each."""
        self._sealed_load = self.sizing.load(0, [self.held(sealed) for sealed in self.staying])
        return self._load()

    def _load(self) -> Load:
        """Returns the load, with that of sealed segments as it was last added up."""
        live, writer = self.live, self.writer
        held: list[Held] = []
        if writer is not None:
            alive = live.bytes_in(writer.number)
            standing = max(writer.bytes + writer.bodies.bytes, alive)  # what this turn has appended is not written yet
            unmerged = standing - writer.bodies.bytes
            held.append(Held(standing + BARE_SEGMENT_BYTES, alive, writer.row_max, unmerged))
        return self.sizing.load(live.keys, held, self._sealed_load)

    def held(self, sealed: Sealed) -> Held:
        """Returns the bytes of a sealed segment, and how many of them are live."""
        unmerged = 0 if sealed.merged else sealed.merge_bytes
        standing = sealed.bytes if sealed.merged else unmerged + sealed.body_bytes
        return Held(standing, self.live.bytes_in(sealed.number), sealed.row_max, unmerged)

    @property
    def full_at(self) -> int:
        """Returns the size at which the WAL or the `-bodies` file of a segment is full."""
        return self.sizing.full_at(self.space.tight)

    @property
    def full(self) -> bool:
        """Returns whether the current segment is full, and no large record is being written to it in parts."""
        assert self.writer is not None
        return self.writer.filled >= self.full_at and not self.open_bytes

    @property
    def overgrown(self) -> bool:
        """Returns whether the current segment is a quarter larger than full: the next segment is not ready yet."""
        assert self.writer is not None
        return self.writer.filled > self.full_at + self.full_at // 4 and not self.open_bytes

    @property
    def may_retire(self) -> bool:
        """Returns whether retire() may be tried. On a full disk each note waits for what the last note frees."""
        return not self.space.tight or (not self.retiring and time.monotonic() >= self._retire_after_s)

    @property
    def puts_off(self) -> bool:
        """Returns whether the next segment could not be made, and will be tried again."""
        return self._make_after_s > 0

    @property
    def excess(self) -> float:
        """By how many bytes the directory is too large, or its disk too full."""
        used = self.disk_bytes
        live = self.live.total_bytes + self.open_bytes
        capacity = self.space.capacity(used)
        return self.sizing.excess(capacity, used, self._unmerged, self._oversize, live, self.load)

    @property
    def near_bound(self) -> bool:
        """Returns whether the directory comes to its bound when the next segment is there and all others are sealed."""
        writer = self.writer
        assert writer is not None
        spare = disk_bytes(self.next.path) if self.next else NEW_SEGMENT_BYTES + self._ahead()
        late = max(0, writer.filled - writer.large_bytes - self.sizing.segment_limit)
        reserve = max(self.space.reserved, self.space.target)  # the worker may be about to let it grow
        taken = self.disk_bytes + self._unmerged + late - self._oversize + spare + reserve
        return self.sizing.near_bound(taken, self.live.total_bytes + self.open_bytes, self._commit_bytes)

    @property
    def _unmerged(self) -> int:
        """Returns the bytes of the segments that wait to be sealed: for a moment they take them twice."""
        return sum(sealed.bytes - sealed.body_bytes for sealed in self.sealed if not sealed.ready)

    @property
    def _oversize(self) -> int:
        """By how many bytes large records make segments too large that are being written, sealed or removed.

        Changes do not wait for these bytes: waiting would not make such segments smaller.
        """
        writer = self.writer
        assert writer is not None
        oversize = self._beyond(writer.filled, writer.large_bytes)
        for sealed in self.sealed[: self.retiring]:
            oversize += self._beyond(sealed.bytes, sealed.large_bytes)
        for sealed in self.staying:
            if not sealed.ready:
                oversize += self._beyond(sealed.bytes, sealed.large_bytes)
                oversize += self._beyond(sealed.bytes - sealed.body_bytes, sealed.large_bytes)
        return oversize

    def _beyond(self, bytes: int, large_bytes: int) -> int:
        """By how many of its bytes a segment is larger than full because of its large records."""
        return max(0, min(bytes - self.sizing.segment_limit, large_bytes))

    def left_for_puts(self, need: int) -> int:
        """Returns how many bytes puts may still take. May say fewer, but not fewer than `need` if they are there.

        Live bytes in sealed segments only become fewer, so what these segments need is not more than when it was last
        added up, as long as they are the same segments. It is added up anew only where that is not enough.
        """
        if self._sealed_load is not None:
            left = self._left_for_puts(self._load())
            if left >= need:
                return left
        return self._left_for_puts(self.load)

    def _left_for_puts(self, load: Load) -> int:
        """Returns the bytes that are left with this load.

        Before that, the reserve grows for the puts so far, where another process could fill the disk before the worker
        lets the reserve grow: puts may come faster than the worker works. The worker reads the target when it works, so
        earlier requests do not make the reserve smaller again.
        """
        space = self.space
        target = space.target = self.sizing.reserve(load)
        if (space.reserved < target or self._refilling) and space.free() < target + _FILLED_AT_ONCE_BYTES:
            space.refill_to_target(self.sizing.margin)
            if space.tight:
                return 0
        capacity = space.capacity(self.disk_bytes)
        return self.sizing.left_for_puts(capacity, self.live.total_bytes + self.open_bytes, load)

    def commit_took(self, records: int, payload_bytes: int) -> None:
        """Notes the records of a commit. Larger commits are forgotten by an eighth with each smaller one."""
        took = payload_bytes + _RECORD_BYTES * records
        self._commit_bytes = max(took, self._commit_bytes - self._commit_bytes // 8)

    def large_record(self, size: int) -> None:
        """Notes that the current segment takes a large record, or a part of one, of this many bytes."""
        assert self.writer is not None
        self.writer.large_bytes += row_bytes(size)

    # --- the device

    def written(self) -> None:
        """Something was committed to the current segment."""
        assert self.writer is not None
        if self.writer.wal not in self._unsynced:
            self._unsynced.append(self.writer.wal)

    def sync_point(self) -> FileSync | None:
        """Returns a sync of all commits that no earlier sync point covers; None when there are no such commits."""
        if not self._unsynced:
            return None
        point = self._sync_of(self._unsynced)
        self._unsynced = []
        return point

    def guard(self) -> FileSync:
        """A sync of all commits, in whatever thread it runs.

        The policy's own sync may be under way in another thread, and the worker may not have sealed the segments before
        the current one yet. So this sync asks the device again.
        """
        assert self.writer is not None
        return self._sync_of([*(sealed.wal for sealed in self.sealed if sealed.wal is not None), self.writer.wal])

    def _sync_of(self, files: list[WalFile]) -> FileSync:
        writer = self.writer
        assert writer is not None and self._watermark is not None
        return FileSync(files, self.worker.fail, self._watermark, writer.number, writer.records)

    # --- room

    def with_room(self, write: Callable[[], _T]) -> _T:
        """Does a write, with room from the reserve where the disk is full. Raises JournalFailed."""
        try:
            return self.space.within(write)
        except JournalFull as full:
            raise JournalFailed(str(full)) from full
        finally:
            self._say_tight()

    def tend_reserve(self) -> None:
        """Lets the reserve grow and shrink with the live keys, and fills it again when a full disk has room."""
        self._say_tight()
        space, sizing = self.space, self.sizing
        target = space.target = sizing.reserve(self.load)
        if self._refilling or time.monotonic() < self._refill_after_s:
            return
        if not space.tight:
            useful = abs(target - space.reserved) > sizing.segment_limit // 4
        elif space.reserved < target:
            useful = space.free() >= PIECE_BYTES
        else:
            useful = space.free() >= sizing.margin and space.takes_files()
        if useful:
            self._refill()

    def _refill(self) -> None:
        self._refilling = True
        refill = _Refill(self, self.sizing.margin)
        self.worker.submit(refill.work, refill.done)

    def hold_room(self) -> None:
        """Fills the reserve, on a full disk, with the bytes that a segment has just freed. Runs in the worker."""
        if self.space.tight:
            self.space.hold(self.space.target)

    def refilled(self, worked: bool) -> None:
        """The worker has filled the reserve as far as there is room. Segments that had to wait for room are sealed now.

        It may not have `worked` although the disk says that it has room: there are quotas, too.
        """
        self._refilling = False
        self._refill_after_s = 0.0 if worked else time.monotonic() + _TRY_AGAIN_S
        self._say_tight()
        room = self.space.free() + self.space.reserved
        for sealed in self.staying:
            if sealed.ready and not sealed.merged and sealed.merge_bytes + PIECE_BYTES < room:
                room -= sealed.merge_bytes
                self.seal(sealed)

    def _say_tight(self) -> None:
        if self.space.tight != self._said_tight:
            self._said_tight = self.space.tight
            what = "the disk has no inode left" if self.space.lacks_files else "the disk is full"
            full = f"{what}; puts are refused until there is room again"
            self._log(f"journal: {full if self._said_tight else 'there is room again; puts are accepted'}")

    def _ahead(self) -> int:
        """Returns how many bytes of a new segment's WAL are filled with zeros before anything is written."""
        if not self._allocate or self.space.tight:
            return 0
        used = self.disk_bytes
        return self.sizing.ahead(self.space.capacity(used), used, self.load)

    # --- segments come and go

    def prepare(self) -> None:
        """Has the worker create the next segment, so that rotation costs no time.

        A full disk, a lack of descriptors, and a device that does not keep pace only put it off.
        """
        waiting = sum(not sealed.ready for sealed in self.sealed)
        if self._preparing or self.next is not None or waiting >= self._waiting_max:
            return
        if time.monotonic() < self._make_after_s:
            return
        try:
            self.space.require_files()
        except JournalFull:
            return
        self._preparing = True
        make = _Make(self, self.current + 1, self._ahead())
        self._made = make.made
        self.worker.submit(make.work, make.done, urgent=True)

    def prepared(self, made: list[SegmentWriter]) -> None:
        """The worker has made the next segment, or could not."""
        self._preparing = False
        self.next = made[0] if made else None
        self._make_after_s = 0.0 if made else time.monotonic() + _TRY_AGAIN_S

    def rotate(self, high_water: int) -> bool:
        """The next segment takes over, if it is ready; otherwise asks for it. Returns whether it took over."""
        fresh, writer = self.next, self.writer
        assert writer is not None
        if fresh is None:
            self.prepare()
            return False
        self.next = None
        oldest = self.oldest_needed
        fresh.before = {writer.number: writer.records}
        self.with_room(lambda: fresh.note(high_water, oldest))
        self._unsynced.append(fresh.wal)
        self.writer = fresh
        self.noted = False
        sealed = Sealed(self.sizing, writer.path, writer.number, writer, writer.bytes)
        self.sealed.append(sealed)
        self._sealed_load = None
        self.seal(sealed)
        self.prepare()
        return True

    def seal(self, sealed: Sealed) -> None:
        """Has the worker merge a segment's WAL, or sync the WAL as it is when there is no room to merge."""
        sealed.ready = False
        seal = _Seal(self, sealed, self._log)
        self.worker.submit(seal.work, seal.done)

    def merged(self, sealed: Sealed) -> None:
        """The worker has merged a segment's WAL, or synced it."""
        sealed.ready = True
        sealed.bytes = disk_bytes(sealed.path)
        self._sealed_load = None
        if sealed.merged:
            self._room_came()
        if sealed.wal in self._unsynced:  # already on the device; under `-F` nothing else drops the entry
            self._unsynced.remove(sealed.wal)
        sealed.wal = None

    def retire(self, high_water: int, guard: SyncPoint) -> None:
        """Has the worker remove the oldest segments that hold nothing live, after `guard`, a sync of their successors.

        One note is for all of them. A note takes room, and only the removal gives room back. Where there is no room for
        the note, the segments stay for now.
        """
        victims = self._idle()
        self.retiring += len(victims)
        writer = self.writer
        assert writer is not None
        oldest = self.oldest_needed
        try:
            self.space.within(lambda: writer.note(high_water, oldest))
        except JournalFull:
            self.retiring -= len(victims)
            self._retire_after_s = time.monotonic() + _TRY_AGAIN_S
            return
        finally:
            self._say_tight()
        self.noted = True
        for victim in victims:
            retire = _Retire(self, victim, guard if victim is victims[0] else None)
            self.worker.submit(retire.work, retire.done)

    def _idle(self) -> list[Sealed]:
        """Returns the oldest segments that stay and hold nothing live, up to the first that the worker still uses."""
        idle = []
        for sealed in self.staying:
            if not sealed.ready or self.live.bytes_in(sealed.number):
                break
            idle.append(sealed)
        return idle

    def retired(self, victim: Sealed) -> None:
        """The worker has removed a segment."""
        self.retiring -= 1
        self.sealed.remove(victim)
        self.live.forget(victim.number)
        self._room_came()

    def _room_came(self) -> None:
        """A segment has given room back: work that found none may be tried again at once."""
        self._make_after_s = self._refill_after_s = self._retire_after_s = 0.0


# Work for the worker. Each piece is an object with two methods, and not a closure: mypyc keeps the last freed closure
# of each function for the next call. While mypyc lets go of what the closure held, which may close a file, the other
# thread may fill the closure again, and then loses what it has put in.


class _Make:
    """Makes the next segment."""

    def __init__(self, segments: Segments, number: int, ahead: int) -> None:
        self.made: list[SegmentWriter] = []
        self._segments = segments
        self._number = number
        self._ahead = ahead

    def work(self) -> None:
        directory = self._segments.directory
        made = self.made
        try:
            path, number, ahead = segment_path(directory, self._number), self._number, self._ahead
            made.append(self._segments.space.within(lambda: SegmentWriter(path, number, 0, ahead), files=True))
            fsync_path(directory)
        except JournalFull:
            return
        except JournalFailed as failure:
            if not lacks_descriptors(failure):
                raise
            while made:
                made.pop().discard()  # its directory is not synced: a loss of power could remove the segment

    def done(self) -> None:
        self._segments.prepared(self.made)


class _Seal:
    """Merges the WAL of a segment, or syncs the WAL as it is when there is no room to merge."""

    def __init__(self, segments: Segments, sealed: Sealed, log: Callable[[str], None]) -> None:
        self._segments = segments
        self._sealed = sealed
        self._log = log

    def work(self) -> None:
        sealed, log = self._sealed, self._log
        try:
            space = self._segments.space
            space.within(lambda: sealed.merge(log), sealed.merge_bytes, files=sealed.makes_files)
        except JournalFull:
            sealed.keep()  # until there is more room
        else:
            self._segments.hold_room()

    def done(self) -> None:
        self._segments.merged(self._sealed)


class _Retire:
    """Removes a segment, after a sync of all that replaced it. None: an earlier piece of work has done this sync."""

    def __init__(self, segments: Segments, victim: Sealed, guard: SyncPoint | None) -> None:
        self._segments = segments
        self._victim = victim
        self._guard = guard

    def work(self) -> None:
        if self._guard is not None:
            self._guard.run()
        self._victim.remove()
        self._segments.hold_room()
        # Before the next goes: after a crash a gap would count as missing. And before its payloads go: a loss of power
        # could bring a segment back, and its records would count as damaged.
        fsync_path(self._segments.directory)
        remove_files(self._victim.path)
        self._segments.hold_room()

    def done(self) -> None:
        self._segments.retired(self._victim)


class _Refill:
    """Fills the reserve."""

    def __init__(self, segments: Segments, margin: int) -> None:
        self._segments = segments
        self._margin = margin
        self._worked = False

    def work(self) -> None:
        self._worked = self._segments.space.refill_to_target(self._margin)

    def done(self) -> None:
        self._segments.refilled(self._worked)
