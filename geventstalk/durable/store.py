"""Durability: writes every change to the log in batches, and brings the jobs back after a restart.

This module must not know gevent, sockets or SQLite. It decides when a change is safe to acknowledge; the turn waits.
Invariant: a change survives the end of the process once commit() has returned, and the loss of power once a SyncPoint
that was made after that commit has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from geventstalk.core.bodies import Bodies
from geventstalk.core.job import DELETED, Job, Ledger, held_body, tags_bytes
from geventstalk.core.jobtable import JobTable
from geventstalk.core.meter import Times
from geventstalk.durable.large import LARGE_BYTES, MOVE, PART_BYTES, PUT, REWRITE, LargeRecord
from geventstalk.durable.reading import Reading, wanted_of
from geventstalk.durable.records import (
    WHOLE_BYTES,
    ClockOffset,
    Encoder,
    apply_change,
    decode_head,
    decode_whole,
    encode_change,
    encode_whole,
    fits,
    stamp_of,
)
from journal.errors import JournalDamaged
from journal.log import CHANGE, DELETE, FULL, HEAD, PAYLOAD_MAX, PAYLOAD_MIN, Log, Row, Scan, SyncPoint
from journal.log import SegmentState as SegmentState

ALWAYS: Final = 0
"""The fsync period of `-f0`: before each reply."""
MS_NS: Final = 1_000_000
COMMIT_BOUNDS: Final = tuple([1 << at for at in range(15)])
"""Commits are counted by their records, in the first of these classes that is not smaller."""
_MOVE_BYTES: Final = 1 << 17
"""Bytes of bodies that are read at once before they are moved. A slice of compaction moves as much."""
_PAGE_BITS: Final = 6
_PAGE_MASK: Final = (1 << _PAGE_BITS) - 1
_PROGRESS_MASK: Final = (1 << 15) - 1


class Store(Ledger):
    """The engine's ledger over a log. `fsync_ms` is None for never, 0 for before each reply, else a period."""

    def __init__(self, log: Log, fsync_ms: int | None, offset: ClockOffset) -> None:
        self._log = log
        self.bodies: Bodies | None = None  # those of the engine, when memory has a bound
        self._fsync_ms = fsync_ms
        self.offset = offset
        self._encoder = Encoder(offset)
        self._find: Callable[[int], tuple[Job, bytes] | None] = _nothing
        self.large_bytes = LARGE_BYTES  # tests make do with less
        self.part_bytes = PART_BYTES
        self._large: LargeRecord | None = None  # what is written in parts, by a put or by compaction
        self._rewritten: dict[int, int] = {}  # jobs that rewrite() wrote: a bit for each, 64 ids to an entry
        self.unfit: set[int] = set()  # jobs whose last change in the log does not fit what is left of them
        self._move_waits = False  # compaction has a large job to move, which comes before the next large put
        self._sync_due_ns = 0  # 0: nothing is committed that is not on the device
        self._refused = 0  # puts, for lack of space
        self._counted = 0  # records at the last commit
        self.fsyncs = Times()
        self.synced_ns = 0  # when the last sync ended, which the turn sets; 0 before the first one
        self.commits = 0
        self.commit_records_max = 0
        self.commit_sizes = [0] * (len(COMMIT_BOUNDS) + 1)  # how many commits in each class; the last one has no bound

    # --- the ledger

    def admits(self, body_bytes: int, tube_name: bytes) -> bool:
        if self._log.admits(WHOLE_BYTES + len(tube_name) + body_bytes):
            return True
        self._refused += 1
        return False

    def takes_puts(self) -> bool:
        """Returns whether a small put would be admitted now, without counting it."""
        return self._log.admits(WHOLE_BYTES)

    def put(self, job: Job, tube_name: bytes) -> None:
        large = self._large
        if large is not None and large.job is job:
            self._finish_large(large)
            return
        self._append_whole(job, tube_name)

    def _append_whole(self, job: Job, tube_name: bytes) -> None:
        payload = self._encoder.whole(job, tube_name)
        self._log.append(job.id, FULL, payload)
        job.segment = self._log.current
        if self.bodies is not None:
            try:
                self._stands(self.bodies, job, len(payload), self._log.tail)
            except MemoryError:
                return  # the record is there, whatever comes now: the body only stays in memory

    def _stands(self, bodies: Bodies, job: Job, size: int, place: int) -> None:
        """Notes where the whole record of a job, of this size, was written."""
        bodies.stands(job.id, place if PAYLOAD_MIN <= size <= PAYLOAD_MAX else 0, len(held_body(job)))

    def prepare(self, job: Job, tube_name: bytes) -> bool | None:
        if self._log.short_of_room:
            return None
        large = self._large
        if large is None:
            if not self._may_begin():
                return False
            large = self._begin(job, tube_name, job.ttr_s, PUT)
        if large.job is job:
            return self._append_part(large)
        self._hurry(large)
        return False

    def unprepare(self, job: Job) -> None:
        large = self._large
        if large is not None and large.job is job:
            self._end(large)
            self._log.drop_parts()

    def prepare_rewrite(self, job: Job, tube_name: bytes, ttr_s: int) -> bool | None:
        large = self._large
        if large is not None and large.purpose == REWRITE and large.job is job:
            if self._log.short_of_room:
                self.unprepare(job)
                return None
            return large.tube_name == tube_name and large.ttr_s == ttr_s and self._append_part(large)
        body_bytes = len(held_body(job))
        size = WHOLE_BYTES + len(tube_name) + tags_bytes(job) + body_bytes
        if body_bytes < self.large_bytes:
            return True if self._log.admits(size) else None
        if self._log.short_of_room:
            return None
        if large is not None:
            self._hurry(large)
            return False
        if not self._may_begin():
            return False
        if not self._log.admits(size):
            return None
        return self._append_part(self._begin(job, tube_name, ttr_s, REWRITE))

    def rewrite(self, job: Job, tube_name: bytes) -> None:
        page = job.id >> _PAGE_BITS
        self._rewritten[page] = self._rewritten.get(page, 0) | 1 << (job.id & _PAGE_MASK)
        large = self._large
        if large is not None and large.purpose == REWRITE and large.job is job:
            self._finish_large(large)
            return
        self._append_whole_anew(job, tube_name)

    def _append_whole_anew(self, job: Job, tube_name: bytes) -> None:
        bodies = self.bodies
        if bodies is not None:
            bodies.left(job)  # of what came() and left() count, the record is a part
        try:
            self._append_whole(job, tube_name)
        finally:
            if bodies is not None:
                bodies.came(job)

    def abandon_rewrite(self, job: Job) -> None:
        large = self._large
        if large is not None and large.purpose == REWRITE:
            self.unprepare(job)

    def has_begun(self, job: Job) -> bool:
        return self._large is not None and self._large.job is job

    def _may_begin(self) -> bool:
        """Returns whether a client or an operator may begin a large job, while there is none."""
        if self._move_waits or not self._log.takes_parts or self.behind:
            self._move_waits = False  # compaction had its turn to begin
            return False
        return True

    def _begin(self, job: Job, tube_name: bytes, ttr_s: int, purpose: int) -> LargeRecord:
        if self.bodies is not None and purpose != PUT:
            self.bodies.hold(job)
        large = self._large = LargeRecord(job, tube_name, ttr_s, self.offset, self.part_bytes, purpose)
        return large

    def _end(self, large: LargeRecord) -> None:
        """Ends a large record: no further part is to be written."""
        self._large = None
        if self.bodies is not None and large.purpose != PUT:
            self.bodies.let_be(large.job)

    def _hurry(self, large: LargeRecord) -> None:
        """Moves a part of the large record, for a caller that waits for its end.

        Compaction may sleep, or wait for the device, when it has moved half of a job. So the callers move the rest.
        """
        if large.purpose == MOVE and self._append_part(large):
            self._finish_large(large)

    def _append_part(self, large: LargeRecord) -> bool:
        """Writes the part that is due, unless it is the last. Returns whether only that is left."""
        if not large.is_last:
            self._log.append_part(large.job.id, large.part())
            large.advance()
        return large.is_last

    def _finish_large(self, large: LargeRecord) -> None:
        """Writes the last part, and the changes of the job since the first part."""
        job = large.job
        self._log.append_last(job.id, large.part(), moved=large.purpose == MOVE)
        self._end(large)
        bodies = self.bodies
        if bodies is not None:
            counts = large.purpose != PUT
            if counts:
                bodies.left(job)
            with suppress(MemoryError):  # the record is there all the same: the body only stays in memory
                self._stands(bodies, job, len(large.head) + len(held_body(job)), self._log.tail)
            if counts:
                bodies.came(job)
        job.segment = self._log.current
        change = encode_change(job, self.offset)
        if not large.head.startswith(change):
            self._log.append(job.id, CHANGE, change)  # in the same segment: it needs no stamp

    def change(self, job: Job) -> None:
        change = encode_change(job, self.offset)
        if self._rewritten and self._is_rewritten(job.id):
            change += stamp_of(self._found(job.id)[1], job.ttr_s)
        self._log.append(job.id, CHANGE, change)

    def _is_rewritten(self, id: int) -> bool:
        return self._rewritten.get(id >> _PAGE_BITS, 0) >> (id & _PAGE_MASK) & 1 != 0

    def delete(self, job: Job) -> None:
        self._log.append(job.id, DELETE, b"")
        if self._rewritten and self._is_rewritten(job.id):
            page = job.id >> _PAGE_BITS
            left = self._rewritten[page] & ~(1 << (job.id & _PAGE_MASK))
            if left:
                self._rewritten[page] = left
            else:
                del self._rewritten[page]
        if self._large is not None:
            self.unprepare(job)

    def retire(self, job: Job, mark: Job, tube_name: bytes) -> None:
        if not self._log.admits(WHOLE_BYTES + len(tube_name) + tags_bytes(mark)):
            self.delete(job)
            return
        if self._large is not None:
            self.unprepare(job)
        self.mark(mark, tube_name)

    def mark(self, mark: Job, tube_name: bytes) -> None:
        self._log.append(mark.id, FULL, encode_whole(mark, tube_name, self.offset))
        mark.segment = self._log.current

    # --- start

    def replay(
        self, jobs: JobTable | None = None, progress: Callable[[int], None] = lambda records: None
    ) -> Iterator[tuple[Job, bytes]]:
        """Yields every job of the journal, and the name of its tube, in order of id. Raises JournalDamaged.

        They stand in `jobs` by then. `progress` gets the number of records that were read now and then.
        """
        jobs = JobTable() if jobs is None else jobs
        names: list[bytes] = []
        numbers: dict[bytes, int] = {}  # until a job is in its tube, it knows the name's place in `names`
        count = 0
        for segment, rows in self._log.batches():
            self._replay_rows(segment, rows, jobs, names, numbers)
            before = count
            count += len(rows)
            if before ^ count > _PROGRESS_MASK:
                progress(count)
        for job in jobs.in_order():
            yield job, names[job.tube]

    def _replay_rows(
        self, segment: int, rows: list[Row], jobs: JobTable, names: list[bytes], numbers: dict[bytes, int]
    ) -> None:
        bodies, offset, unfit = self.bodies, self.offset, self.unfit
        readable = bodies is not None and self._log.reads_back(segment)
        for place, key, kind, length, payload in rows:
            try:
                if kind in (FULL, HEAD):
                    if bodies is not None and kind == HEAD:
                        job, name, body_bytes = decode_head(key, payload, length, offset)
                        self._leaves(bodies, jobs, key)
                        bodies.came_without(job, place, body_bytes)
                    else:
                        job, name = decode_whole(key, payload, offset)
                        if bodies is not None:
                            self._replayed(bodies, jobs, job, len(payload), place, readable)
                    job.segment = segment
                    number = numbers.get(name)
                    if number is None:
                        number = numbers[name] = len(names)
                        names.append(name)
                    job.tube = number
                    jobs.set(job)
                    unfit.discard(key)
                elif kind == CHANGE:
                    changed = jobs.get(key)
                    assert changed is not None, "the journal gives back changes of live keys only"
                    if fits(payload, names[changed.tube], changed.ttr_s):
                        apply_change(changed, payload, offset)
                        unfit.discard(key)
                    else:
                        unfit.add(key)
                else:
                    if bodies is not None:
                        self._leaves(bodies, jobs, key)
                    jobs.remove(key)
            except ValueError as error:
                where = f"segment {segment}, job {key}"
                raise JournalDamaged(f"journal record is not a job's ({where}): {error}") from error

    def _replayed(self, bodies: Bodies, jobs: JobTable, job: Job, size: int, place: int, readable: bool) -> None:
        """Notes a whole record of a replay. A body beyond the bound goes where it can be read back."""
        self._leaves(bodies, jobs, job.id)
        self._stands(bodies, job, size, place)
        bodies.came(job)
        if readable and bodies.held_bytes > bodies.max_bytes:
            bodies.let_go_at_once(job)

    def _leaves(self, bodies: Bodies, jobs: JobTable, id: int) -> None:
        before = jobs.get(id)
        if before is not None:
            bodies.left(before)
            before.state = DELETED

    def start(self, find: Callable[[int], tuple[Job, bytes] | None]) -> int:
        """Makes the log ready. `find` gives a job and its tube's name by id. Returns the first unused id."""
        self._find = find
        self._log.start()
        self._log.repair(self._whole_of)
        for id in sorted(self.unfit):
            found = find(id)
            if found is not None:  # otherwise compaction would take this change for the one that counts
                self._log.append(id, CHANGE, encode_change(found[0], self.offset))
        self.unfit.clear()
        return self._log.high_water + 1

    # --- every turn

    @property
    def dirty(self) -> bool:
        """True while there are changes that commit() has not written."""
        return self._log.dirty

    @property
    def appended(self) -> int:
        """The number of changes so far."""
        return self._log.appended

    @property
    def syncs_before_replies(self) -> bool:
        """True when a reply to a change has to wait for a SyncPoint."""
        return self._fsync_ms == ALWAYS or not self._log.safe_after_commit

    @property
    def syncs_here(self) -> bool:
        """True when a SyncPoint waits for a device only, and needs no thread when every client waits."""
        return self._log.safe_after_commit

    @property
    def syncs_when_due(self) -> bool:
        """True when a sync has to follow some time after a commit."""
        return self._fsync_ms is not None and self._fsync_ms != ALWAYS

    def follow_wall_clock(self, wall_clock: Callable[[], int], clock: Callable[[], int]) -> None:
        """Follows a step of the wall clock; called before each turn's first change."""
        if self.offset.follow(wall_clock, clock):
            self._encoder.forget()

    def commit(self, now_ns: int) -> None:
        """Writes all changes since the last commit in one transaction. Raises JournalFailed: then none is safe.

        Never waits. The caller reads `behind` afterwards.
        """
        self._log.commit()
        appended = self._log.appended
        records = appended - self._counted
        self._counted = appended
        self.commits += 1
        self.commit_records_max = max(self.commit_records_max, records)
        self.commit_sizes[min((max(records, 1) - 1).bit_length(), len(COMMIT_BOUNDS))] += 1
        self._want_sync(now_ns)

    @property
    def behind(self) -> bool:
        """True while changes have to wait until the journal has caught up with those that were committed.

        The caller then holds changes back and calls catch_up() repeatedly.
        """
        return self._log.behind

    def catch_up(self, now_ns: int) -> bool:
        """While `behind`: catches up for a millisecond at most. Raises JournalFailed.

        Returns whether to call again at once; otherwise another thread is at work, for some milliseconds.
        """
        moved = self._log.catch_up(self._payload_of)
        if moved:
            self._want_sync(now_ns)
        return moved

    def _want_sync(self, now_ns: int) -> None:
        if self._fsync_ms and not self._sync_due_ns:
            self._sync_due_ns = now_ns + self._fsync_ms * MS_NS

    @property
    def sync_due_ns(self) -> int:
        """Returns when the policy wants a sync; 0 when it wants none."""
        return self._sync_due_ns

    def sync_point(self) -> SyncPoint | None:
        """Returns the sync that is needed now, for the caller to run; None when everything is synced."""
        point = self._log.sync_point()
        self._sync_due_ns = 0
        return point

    def hold(self, until_ns: int) -> None:
        """Says whether more commits are expected soon, see Log.hold()."""
        self._log.hold(until_ns)

    def sync_took(self, took_ns: int) -> None:
        """Counts the time of a SyncPoint that has run."""
        self.fsyncs.add_here(took_ns)

    # --- compaction

    def tend(self) -> None:
        """Takes in the journal's work in threads, and begins the next. Raises JournalFailed."""
        self._log.tend()

    def wants_compaction(self) -> bool:
        """Returns whether compact_slice() has something to do. tend() comes before it."""
        return self._log.wants_compaction()

    @property
    def settling(self) -> bool:
        """True while segments are made, sealed or removed, so that wants_compaction() may change by itself."""
        return self._log.settling

    def scan(self) -> Scan | None:
        """Returns a scan to be run where it may wait, and given to scanned() before the next to_move()."""
        return self._log.scan()

    def scanned(self, scan: Scan) -> None:
        """Takes in the result of a scan. Raises JournalFailed, for damage too."""
        self._log.scanned(scan)

    def compact_slice(self, now_ns: int) -> None:
        """Commits, and moves some live jobs out of the oldest segment; about a millisecond. Raises JournalFailed."""
        self._log.compact_slice(self._payload_of)
        self._want_sync(now_ns)

    def _payload_of(self, id: int) -> bytes | None:
        """Returns the payload of a job that compaction moves.

        None when its body is not in memory, and while a large job is moved in parts, one with each call.
        """
        job, name = self._found(id)
        if job.body is None:
            return None  # to_move() has it read, and compaction asks again
        if len(job.body) < self.large_bytes:
            return self._whole_of(id)
        large = self._large
        if large is not None and large.job is job:
            if self._log.short_of_room:
                self.unprepare(job)
            else:
                self._hurry(large)
            return None
        if self._log.short_of_room and large is None:
            return self._whole_of(id)  # at once: on a full disk nothing may stay half written
        self._move_waits = large is not None
        if large is None and self._log.takes_parts:
            self._begin(job, name, job.ttr_s, MOVE)
        return None

    def _whole_of(self, id: int) -> bytes:
        """Returns the payload that the log is about to append. Until its segment is sealed the body is in memory."""
        job, name = self._found(id)
        payload = self._encoder.whole(job, name)
        bodies = self.bodies
        if bodies is not None and job.state != DELETED:  # the body of a mark does not count
            bodies.left(job)
            self._stands(bodies, job, len(payload), self._log.tail + 1)
            bodies.came(job)
        job.segment = self._log.current
        return payload

    def _found(self, id: int) -> tuple[Job, bytes]:
        found = self._find(id)
        assert found is not None, "the log asks for live keys only"
        return found

    # --- bodies that only the log has

    def seal_early(self, size: int) -> bool:
        """Seals the newest segment if it has this many bytes, so that its bodies can leave memory.

        Called between a commit and the next change. Returns whether sealing is under way. Raises JournalFailed.
        """
        return self._log.seal_early(size)

    def keep_bodies(self, bodies: Bodies) -> None:
        """Lets the engine's bodies leave memory where the log can give them back. Called before replay()."""
        self.bodies = bodies
        bodies.reads_back = self._log.reads_back
        self._log.leave_payloads()

    def reading(self, jobs: list[Job]) -> Reading:
        """Returns a reading of bodies that are not in memory."""
        assert self.bodies is not None
        return Reading(jobs, self.bodies, self._log.payloads(wanted_of(jobs, self.bodies)))

    def to_move(self) -> list[Job]:
        """Returns jobs that compaction moves next and whose bodies are not in memory: about as many as a slice moves.

        The caller has called wants_compaction(). It reads the bodies, or the slice ends where one is missing.
        """
        bodies = self.bodies
        if bodies is None or not bodies.gone:
            return []
        jobs: list[Job] = []
        size = 0
        for id in self._log.moves_next():
            job, _ = self._found(id)
            if job.body is None:
                jobs.append(job)
                size += bodies.size_of(job)
                if size >= _MOVE_BYTES:
                    break
        return jobs

    # --- numbers and end

    def facts(self) -> dict[str, object]:
        """Returns statistics by their key."""
        facts = self._log.facts()
        return {
            "binlog-oldest-index": facts.oldest,
            "binlog-current-index": facts.current,
            "binlog-records-migrated": facts.records_moved,
            "binlog-records-written": facts.records_written,
            "binlog-max-size": facts.segment_bytes,
            "journal-bytes": facts.disk_bytes,
            "journal-live-bytes": facts.live_bytes,
            "journal-puts-refused": self._refused,
        }

    def segments(self, most: int) -> list[SegmentState]:
        """Returns up to `most` of the log's newest segments."""
        return self._log.segments(most)

    def close(self) -> None:
        """Writes, syncs and seals everything. Raises JournalFailed."""
        self._log.close()

    def abandon(self) -> None:
        """Closes the log after a failure, and writes nothing more."""
        self._log.abandon()


def _nothing(id: int) -> tuple[Job, bytes] | None:
    raise AssertionError(f"job {id} is asked for before start()")
