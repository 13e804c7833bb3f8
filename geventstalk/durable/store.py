"""Durability: hears of every change, writes it to the journal in batches, and brings the jobs back after a restart.

This room must not know gevent, sockets or SQLite. It decides when something is safe to acknowledge; who waits for that,
and where, is the server's business. Invariant: what commit() returned from survives the end of the process, and what
was committed before a SyncPoint that has run survives the loss of power.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from geventstalk.core.job import Job, Ledger
from geventstalk.core.jobtable import JobTable
from geventstalk.durable.large import LARGE_BYTES, LargeRecord
from geventstalk.durable.records import WHOLE_BYTES, Encoder, Epoch, apply_change, decode_whole, encode_change
from journal.errors import JournalDamaged
from journal.log import CHANGE, DELETE, FULL, Log, SyncPoint

ALWAYS: Final = 0
"""The fsync period of `-f0`: before each reply."""
MS_NS: Final = 1_000_000
QUICK_SYNC_NS: Final = MS_NS
_UNKNOWN_SYNC_NS: Final = 10 * MS_NS
"""How long an fsync is thought to take at first."""
_PROGRESS_MASK: Final = (1 << 15) - 1


class Store(Ledger):
    """The engine's ledger over a log. `fsync_ms` is None for never, 0 for before each reply, else a period."""

    def __init__(self, log: Log, fsync_ms: int | None, epoch: Epoch) -> None:
        self._log = log
        self._fsync_ms = fsync_ms
        self._epoch = epoch
        self._encoder = Encoder(epoch)
        self._find: Callable[[int], tuple[Job, bytes] | None] = _nothing
        self._large: LargeRecord | None = None  # what is written in parts, by a put or by compaction
        self._move_waits = False  # compaction has a large job to move, which comes before the next large put
        self._sync_due_ns = 0  # 0: nothing is committed that is not on the device
        self._sync_ns = _UNKNOWN_SYNC_NS
        self._refused = 0  # puts, for want of room

    # --- the ledger

    def admits(self, body_bytes: int, tube_name: bytes) -> bool:
        if self._log.admits(WHOLE_BYTES + len(tube_name) + body_bytes):
            return True
        self._refused += 1
        return False

    def put(self, job: Job, tube_name: bytes) -> None:
        large = self._large
        if large is not None and large.job is job:
            self._finish_large(large)
            return
        self._log.append(job.id, FULL, self._encoder.whole(job, tube_name))
        job.segment = self._log.current

    def prepare(self, job: Job, tube_name: bytes) -> bool | None:
        large = self._large
        if large is None:
            if self._log.short_of_room:
                return None
            if self._move_waits or not self._log.takes_parts or self.behind:
                self._move_waits = False  # compaction had its turn to begin
                return False
            large = self._large = LargeRecord(job, tube_name, self._epoch)
        elif large.job is not job:
            return False
        elif self._log.short_of_room:
            return None
        return self._append_part(large)

    def unprepare(self, job: Job) -> None:
        large = self._large
        if large is not None and large.job is job:
            self._large = None
            self._log.drop_parts()

    def _append_part(self, large: LargeRecord) -> bool:
        """Returns whether only the last part is left."""
        if not large.is_last:
            self._log.append_part(large.job.id, large.part())
            large.advance()
        return large.is_last

    def _finish_large(self, large: LargeRecord) -> None:
        """The last part, and what has changed since the first one was written."""
        job = large.job
        self._log.append_last(job.id, large.part())
        self._large = None
        job.segment = self._log.current
        change = encode_change(job, self._epoch)
        if not large.head.startswith(change):
            self._log.append(job.id, CHANGE, change)

    def change(self, job: Job) -> None:
        self._log.append(job.id, CHANGE, encode_change(job, self._epoch))

    def delete(self, job: Job) -> None:
        self._log.append(job.id, DELETE, b"")
        if self._large is not None:
            self.unprepare(job)

    # --- start

    def replay(
        self, jobs: JobTable | None = None, progress: Callable[[int], None] = lambda records: None
    ) -> Iterator[tuple[Job, bytes]]:
        """Every job that the journal kept, with the name of its tube, in order of id. Raises JournalDamaged.

        They stand in `jobs` by then. `progress` hears now and then how many records have been read.
        """
        jobs = JobTable() if jobs is None else jobs
        names: list[bytes] = []
        numbers: dict[bytes, int] = {}  # until a job is in its tube, it knows the name's place in `names`
        count = 0
        for segment, rows in self._log.batches():
            for _, key, kind, _, payload in rows:
                try:
                    if kind == FULL:
                        job, name = decode_whole(key, payload, self._epoch)
                        job.segment = segment
                        number = numbers.get(name)
                        if number is None:
                            number = numbers[name] = len(names)
                            names.append(name)
                        job.tube = number
                        jobs.set(job)
                    elif kind == CHANGE:
                        changed = jobs.get(key)
                        assert changed is not None, "the journal gives back changes of live keys only"
                        apply_change(changed, payload, self._epoch)
                    else:
                        jobs.remove(key)
                except ValueError as error:
                    where = f"segment {segment}, job {key}"
                    raise JournalDamaged(f"journal record is not a job's ({where}): {error}") from error
            before = count
            count += len(rows)
            if before ^ count > _PROGRESS_MASK:
                progress(count)
        for job in jobs.in_order():
            yield job, names[job.tube]

    def start(self, find: Callable[[int], tuple[Job, bytes] | None]) -> int:
        """Ready to write. `find` gives a job and its tube's name by id. Returns the first id that was never used."""
        self._find = find
        self._log.start()
        self._log.heal(self._whole_of)
        return self._log.high_water + 1

    # --- every turn

    @property
    def dirty(self) -> bool:
        """Whether something happened that commit() has not written yet."""
        return self._log.dirty

    @property
    def appended(self) -> int:
        """Counts changes; two equal readings mean that nothing changed between them."""
        return self._log.appended

    @property
    def syncs_before_replies(self) -> bool:
        """Whether a reply to a change has to wait for a SyncPoint."""
        return self._fsync_ms == ALWAYS or not self._log.safe_after_commit

    @property
    def syncs_when_due(self) -> bool:
        """Whether a sync has to follow some time after a commit."""
        return self._fsync_ms is not None and self._fsync_ms != ALWAYS

    def follow_wall_clock(self, wall_clock: Callable[[], int], clock: Callable[[], int]) -> None:
        """Has the journal's times follow a step of the wall clock; to be called before each turn's first change."""
        if self._epoch.follow(wall_clock, clock):
            self._encoder.forget()

    def commit(self, now_ns: int) -> None:
        """Writes all changes since the last time in one transaction. Raises JournalFailed: then none is safe.

        Never waits. The caller asks `behind` afterwards.
        """
        self._log.commit()
        self._want_sync(now_ns)

    @property
    def behind(self) -> bool:
        """Whether changes have to wait until the journal has caught up with those that were committed.

        The caller then holds changes back and calls catch_up() again and again.
        """
        return self._log.behind

    def catch_up(self, now_ns: int) -> bool:
        """While `behind`: does what can be done here and now, a millisecond at the most. Raises JournalFailed.

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
        """When the policy wants a sync of what was committed; 0 when it wants none."""
        return self._sync_due_ns

    def sync_point(self) -> SyncPoint | None:
        """What is to be synced now, by the caller, wherever it may wait; None when there is nothing."""
        point = self._log.sync_point()
        self._sync_due_ns = 0
        return point

    def sync_took(self, took_ns: int) -> None:
        """A SyncPoint has run, and took so long. Slow ones are forgotten by an eighth with each that is quicker."""
        self._sync_ns = max(took_ns, self._sync_ns - self._sync_ns // 8)

    @property
    def syncs_quickly(self) -> bool:
        """Whether, by the last ones, a SyncPoint takes less than a millisecond."""
        return self._sync_ns < QUICK_SYNC_NS

    # --- compaction

    def tend(self) -> None:
        """Hears how the journal's own work got on, and begins what has to be done next. Raises JournalFailed."""
        self._log.tend()

    def wants_compaction(self) -> bool:
        """Whether compact_slice() has something to do. Only asks: tend() comes before it."""
        return self._log.wants_compaction()

    @property
    def settling(self) -> bool:
        """Whether segments are being made, sealed or removed, so that wants_compaction() may change by itself."""
        return self._log.settling

    def compact_slice(self, now_ns: int) -> None:
        """Commits, and moves some live jobs out of the oldest segment; about a millisecond. Raises JournalFailed."""
        self._log.compact_slice(self._payload_of)
        self._want_sync(now_ns)

    def _payload_of(self, id: int) -> bytes | None:
        """The payload of a job that compaction moves; None while a large job is moved in parts, one with each call."""
        job, name = self._found(id)
        if len(job.body) < LARGE_BYTES:
            return self._whole_of(id)
        large = self._large
        if large is not None and large.job is job:
            if self._log.short_of_room:
                self.unprepare(job)
            elif self._append_part(large):
                self._finish_large(large)
            return None
        if self._log.short_of_room and large is None:
            return self._whole_of(id)  # at once: on a full disk nothing may stay half written
        self._move_waits = large is not None
        if large is None and self._log.takes_parts:
            self._large = LargeRecord(job, name, self._epoch)
        return None

    def _whole_of(self, id: int) -> bytes:
        job, name = self._found(id)
        job.segment = self._log.current
        return self._encoder.whole(job, name)

    def _found(self, id: int) -> tuple[Job, bytes]:
        found = self._find(id)
        assert found is not None, "the log asks for live keys only"
        return found

    # --- numbers and end

    def facts(self) -> dict[str, object]:
        """Statistics by their key."""
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

    def close(self) -> None:
        """Writes, syncs and seals everything. Raises JournalFailed."""
        self._log.close()

    def abandon(self) -> None:
        """Gives up after a failure, writing nothing more."""
        self._log.abandon()


def _nothing(id: int) -> tuple[Job, bytes] | None:
    raise AssertionError(f"job {id} is asked for before start()")
