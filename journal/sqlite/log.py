"""The log of one directory: append, commit, sync, replay, and admission. Rotation and compaction are elsewhere.

This module must not know SQL nor what a payload means. Not thread-safe: one thread calls it; the journal's own worker
thread creates, seals and removes segments meanwhile, and run() of a SyncPoint may be called anywhere.
Invariant: a segment with a record that a replay still needs is never removed, and one without is removed only after
everything that replaced it is on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from mypy_extensions import mypyc_attr

from journal.batched import BatchedLog
from journal.errors import JournalDamaged, raise_failure
from journal.liveness import Liveness
from journal.log import (
    CHANGE,
    DELETE,
    FULL,
    Facts,
    PayloadOf,
    Payloads,
    Record,
    Scan,
    SegmentState,
    SyncPoint,
    Wanted,
)
from journal.parts import LOST_KEYS
from journal.sqlite.compaction import Compaction
from journal.sqlite.files import acquit, aside_numbers, is_suspect, remove_files, remove_left_overs, suspect
from journal.sqlite.format import KEY_MAX as KEY_MAX
from journal.sqlite.format import PAGE_BYTES, PART_BYTES, PARTS, Row, row_bytes, whole_bytes
from journal.sqlite.lock import DirectoryLock
from journal.sqlite.payloads import SegmentPayloads
from journal.sqlite.repair import Damage
from journal.sqlite.replay import Replay
from journal.sqlite.segments import DESCRIPTORS_MAX, Segments
from journal.sqlite.sizing import NEW_SEGMENT_BYTES, Sizing
from journal.sqlite.space import Space
from journal.sqlite.worker import Worker

_SEAL_AT_END_BYTES: Final = 1 << 24
"""A stop leaves a larger WAL to the next start. A slow device takes a second to merge and sync 16 MB, and a stop may
not take much longer."""
_START_WAIT_S: Final = 5.0
"""A start on a full disk waits this long for sealing to give room back: about as long as a start may take."""
_ACCEPT_SHARE: Final = 64
"""With this share of the disk or budget left for puts, the log says that puts are accepted again. A smaller share may
be used up at once, and such lines would come again and again."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Journal(BatchedLog):
    """Opens and locks a directory. First exhaust replay(), then start(), then append and commit.

    `budget` is the largest size of the directory in bytes; None stands for as much as the disk gives. With
    `accept_damage` a damaged segment does not stop the start: its readable records are used, and repair() sets its file
    aside. `descriptors` is how many descriptors the journal may take, at least DESCRIPTORS_MIN.
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
        descriptors: int = DESCRIPTORS_MAX,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Raises JournalLocked when the directory cannot be used, JournalFailed when its reserve is another's file."""
        self.directory = directory
        super().__init__(PART_BYTES, PARTS, budget, log)
        self.safe_after_commit = True
        self.live = Liveness()
        self._accept_damage = accept_damage
        self._lock = DirectoryLock(directory)
        self.created = self._lock.created
        self._worker = Worker()
        self._sizing = Sizing(segment_bytes)
        try:
            self._space = Space(directory, budget)
        except BaseException:
            self._lock.close()
            raise
        self._segments = Segments(
            directory, self._sizing, self._space, self._worker, log, allocate=allocate, descriptors=descriptors
        )
        self._compaction = Compaction(self._segments, switched_on=compact)
        self._damage = Damage(directory)
        self._replay: Replay | None = None  # while it is not exhausted
        self._heads = False  # whether HEAD rows will do
        self._suspect = False  # whether the replay had to check everything because a server met damage
        self._unfinished: list[str] = []  # segments that were never complete, and hold nothing
        self._orphans: list[int] = []  # keys of which only changes are left; the start deletes them
        self._estimate = 0  # bytes of WAL that were surely written to the current segment
        self._estimated = 0  # the same at the last commit
        self._lost = False  # whether the directory did not answer a question; the next commit raises

    # --- start

    def replay(self) -> Iterator[Record]:
        """Yields each record of each segment, oldest first. Changes nothing. Raises JournalDamaged in the end."""
        for segment, rows in self.batches():
            for _, key, kind, _, payload in rows:
                yield Record(key, kind, payload, segment)

    def leave_payloads(self) -> None:
        self._heads = True

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        if self._space.free() < 2 * NEW_SEGMENT_BYTES:
            self._space.give_back(2 * NEW_SEGMENT_BYTES)  # even reading takes some: SQLite's index of a WAL
        replay = self._replay = Replay(self.directory)
        self._suspect = is_suspect(self.directory)
        replay.heads = self._heads and not self._accept_damage and not self._suspect
        self.live = replay.live
        yield from replay.batches()
        self._replay = None
        self.high_water = replay.high_water
        self._unfinished = replay.unfinished
        self._orphans = sorted(replay.orphans)
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
            self.high_water = min(self.high_water + LOST_KEYS, KEY_MAX)  # a damaged file may have held later ones
        self._damage.take(replay)
        sound = [found for found in replay.found if not found.damaged]
        self._segments.adopt(sound, self.live, replaces_idle=not replay.findings)

    def start(self) -> None:
        """Opens a new segment behind all others. Raises JournalFull or JournalFailed."""
        remove_left_overs(self.directory)
        for path in self._unfinished:
            remove_files(path)
        segments = self._segments
        numbers = [sealed.number for sealed in segments.sealed] + self._damage.numbers
        segments.begin(max([0, *numbers, *aside_numbers(self.directory)]) + 1, self.high_water, self._orphans)
        self._number = segments.current
        if self._budget is not None:
            self._log(
                f"journal: of {self._budget} bytes about {self._sizing.of_budget(self._budget)} are for the records of "
                f"jobs, which are larger than their bodies; the rest is for changes, deletes and compaction"
            )
        if self._space.tight:
            end = time.monotonic() + _START_WAIT_S
            while self._worker.busy and (left_s := end - time.monotonic()) > 0:
                self._worker.wait(left_s)  # before others take what sealing gives back
                self._worker.check()

    def repair(self, payload_of: PayloadOf) -> int:
        keys = self._damage.rewrite(self.live, payload_of, self.append)
        self.commit()
        self._damage.set_aside(self._guard, self._log)
        if self._suspect:
            acquit(self.directory)
        return keys

    # --- every turn

    @property
    def oldest(self) -> int:
        """The number of the oldest segment."""
        return self._segments.oldest

    @property
    def disk_bytes(self) -> int:
        """Returns what the segments take on disk."""
        return self._segments.disk_bytes

    @property
    def records_moved(self) -> int:
        """Returns how many records compaction appended anew."""
        return self._compaction.records_moved

    @property
    def dirty(self) -> bool:
        return bool(self._batch) or self._lost

    @property
    def short_of_room(self) -> bool:
        return self._space.tight

    def append_part(self, key: int, part: bytes) -> None:
        super().append_part(key, part)
        self._segments.open_bytes = self._open_bytes
        self._segments.large_record(len(part))

    def drop_parts(self) -> None:
        super().drop_parts()
        self._segments.open_bytes = 0

    def commit(self) -> None:
        try:
            self._commit()
            self._compaction.committed()
        except BaseException as error:
            self._fail(error)

    def _commit(self) -> None:
        self._worker.check()
        if self._batch:
            self._write_batch()

    def _write_batch(self) -> None:
        batch = self._batch
        segments = self._segments
        writer = segments.writer
        assert writer is not None
        self._batch = []
        segments.with_room(lambda: writer.append(batch))
        self.records_written += len(batch)
        segments.written()
        taken = self._estimate - self._estimated
        self._estimate += PAGE_BYTES // 2  # a commit writes at least one page, half of it anew on average
        self._estimated = self._estimate
        tight = self._space.tight
        if tight or self._estimate >= self._sizing.segment_limit // 2:
            segments.commit_took(len(batch), taken)
            if segments.full:
                self._rotate()
                self._compaction.suspect()
            elif tight:
                self._compaction.suspect()

    def _rotate(self) -> None:
        """The next segment takes over, once it is there."""
        if self._segments.rotate(self.high_water):
            self._number = self._segments.current
            self._estimate = self._estimated = 0

    def sync_point(self) -> SyncPoint | None:
        return self._segments.sync_point()

    def _guard(self) -> SyncPoint:
        """Returns a sync of everything that was committed, for work that must not happen before."""
        return self._segments.guard()

    # --- failure

    def _fail(self, error: BaseException) -> NoReturn:
        """Ends the journal: the batch is dropped, and append() and commit() raise from now on."""
        self._number = 0
        self._batch = []
        if isinstance(error, JournalDamaged):
            suspect(self.directory)
        self._worker.fail(error)
        raise_failure(error)

    def _lose(self, error: OSError) -> None:
        """The directory does not answer. The caller is in the middle of a change, so the commit fails instead."""
        self._worker.fail(error)
        self._lost = True

    def _refuse(self) -> NoReturn:
        self._worker.check()
        raise AssertionError("the journal is not started")

    # --- room

    def admits(self, size: int) -> bool:
        if self._space.tight:
            return False
        need = self._sizing.of_put(size)
        if self._slack < need:
            try:
                self._slack = self._sizing.granted(self._segments.left_for_puts(need), need)
                if self._slack < need:
                    self._say_refusing(True)
            except OSError as error:
                self._lose(error)
        if self._slack < need:
            return False
        self._slack -= need
        return True

    def _capacity(self) -> int:
        return self._space.capacity(self.disk_bytes)

    # --- reading back

    @property
    def tail(self) -> int:
        writer = self._segments.writer
        return 0 if writer is None else writer.records + len(self._batch)

    def reads_back(self, segment: int) -> bool:
        replay = self._replay
        if replay is not None:
            return not self._accept_damage and replay.is_sealed(segment)  # repair() may need what is damaged
        return self._segments.is_merged(segment)

    def seal_early(self, size: int) -> bool:
        if self._estimate < size or self._batch or self._parts or self._space.tight:
            return False
        number = self._number
        try:
            self._rotate()
            self._compaction.suspect()
        except BaseException as error:
            self._fail(error)
        return self._number != number

    def payloads(self, wanted: list[Wanted]) -> Payloads:
        return SegmentPayloads(self.directory, wanted)

    # --- keeping pace

    @property
    def behind(self) -> bool:
        return self._compaction.behind

    def catch_up(self, payload_of: PayloadOf) -> bool:
        if not self.behind:
            return False
        self.tend()
        moves = self.wants_compaction() and not (self._space.tight and self._worker.busy)
        if moves:
            self.compact_slice(payload_of)
        try:
            self._compaction.time_passes()
            self._compaction.judge()
        except BaseException as error:
            self._fail(error)
        if not moves and not self._worker.busy:
            self._compaction.let_go()
        return moves

    # --- compaction

    @property
    def settling(self) -> bool:
        """Returns whether the worker has something to do, to report or to try again, or the disk is full."""
        return self._worker.busy or self._space.tight or self._segments.puts_off

    def tend(self) -> None:
        """Hears from the worker, has it make the next segment, rotates where that was late, and sees to the reserve."""
        try:
            self._worker.check()
            segments = self._segments
            writer = segments.writer
            assert writer is not None
            if segments.next is None:
                segments.prepare()
            elif (
                not self._batch
                and segments.full
                and (segments.overgrown or writer.bytes + writer.bodies.bytes > self.live.bytes_in(writer.number))
            ):
                self._rotate()  # the next segment was late, and nothing is written now
                self._compaction.suspect()
            segments.tend_reserve()
            if self._refusing and not self._space.tight:
                share = self._space.capacity(segments.disk_bytes) // _ACCEPT_SHARE
                self._say_refusing(segments.left_for_puts(share) < share)
        except BaseException as error:
            self._fail(error)

    def wants_compaction(self) -> bool:
        """Returns whether sealed segments hold more garbage than live records, or one holds nothing live at all."""
        return self._compaction.is_wanted()

    def compact_slice(self, payload_of: PayloadOf) -> None:
        """Moves some live keys out of the oldest segment.

        A segment that holds nothing live any more is handed to the worker, which syncs what was moved and then removes
        the segment.
        """
        try:
            self._compaction.move_some(payload_of, self.append, self._commit, self._retire)
        except BaseException as error:
            self._fail(error)

    def scan(self) -> Scan | None:
        return self._compaction.scan()

    def scanned(self, scan: Scan) -> None:
        try:
            self._compaction.scanned(scan)
        except BaseException as error:
            self._fail(error)

    def moves_next(self) -> list[int]:
        return self._compaction.next_keys()

    def _retire(self) -> None:
        self._segments.retire(self.high_water, self._guard())

    # --- numbers and end

    def facts(self) -> Facts:
        segments = self._segments
        try:
            disk_bytes = segments.disk_bytes
        except OSError as error:
            self._lose(error)
            disk_bytes = 0
        return Facts(
            oldest=segments.oldest,
            current=segments.current,
            segment_bytes=self._sizing.segment_bytes,
            records_written=self.records_written,
            records_moved=self.records_moved,
            disk_bytes=disk_bytes,
            live_bytes=self.live.total_bytes,
        )

    def segments(self, most: int) -> list[SegmentState]:
        try:
            return self._segments.states(most)
        except OSError as error:
            self._lose(error)
            return []

    def close(self) -> None:
        """Commits, syncs and seals everything and gives the directory back. Raises JournalFailed."""
        try:
            if self._segments.writer is not None:
                self.commit()  # it may rotate
                self._segments.end(_SEAL_AT_END_BYTES)
            else:
                self._worker.close()
        except BaseException as error:
            self._worker.fail(error)  # it must not be at work on files that are another process's by then
            self.abandon()
            raise_failure(error)
        self._give_up_files()

    def abandon(self) -> None:
        """Closes the directory without writing anything more: after a failure nothing else is safe."""
        if self._worker.abandon():  # else the worker may still change files, and the end of the process frees the lock
            self._give_up_files()

    def _give_up_files(self) -> None:
        if self._replay is not None:
            self._replay.close()
        self._segments.close()
        self._lock.close()

    def _takes(self, size: int) -> int:
        return row_bytes(size)

    def _account(self, key: int, kind: int, size: int, segment: int) -> None:
        estimate = self._estimate + size
        if kind == FULL:
            if size > PART_BYTES:
                self._segments.large_record(size)
            self.live.whole(key, segment, whole_bytes(size))
        elif kind == CHANGE:
            self.live.change(key, segment, row_bytes(size))
        else:
            assert kind == DELETE
            self.live.delete(key)
        self._estimate = estimate

    def _count_large(self, size: int) -> None:
        self._estimate += size

    def _count_moved(self) -> None:
        self._compaction.records_moved += 1
