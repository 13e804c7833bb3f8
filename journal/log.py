"""What a store needs of any log: keys with opaque payloads, appended, committed, synced, compacted and replayed.

This room must not know files, SQL or threads. journal/sqlite/log.py is one kind of log; a networked one may be another.
A log is opened, replayed to its end, started, and from then on one thread calls it. No method waits for a device or a
peer, save where its contract says so: whatever has to wait is done by the log's own thread or in SyncPoint.run().
Invariant: what a SyncPoint has covered survives everything; what commit() returned from survives the process, if
`safe_after_commit` says so; and after JournalFailed nothing of the last batch is ever written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

FULL: Final = 1
CHANGE: Final = 2
DELETE: Final = 3
"""The kinds of records. A key is its last FULL record, then the last CHANGE behind that; after DELETE it is nothing."""

Row = tuple[int, int, int, int, bytes]
"""A record as a replay gives it: its place, key, kind, a number of the log's own, and payload."""


class Record(NamedTuple):
    """A record as it was appended, and the number of the segment that holds it."""

    key: int
    kind: int
    payload: bytes
    segment: int


PayloadOf = Callable[[int], bytes | None]
"""Gives the current whole payload of a live key. None says that whoever is asked appends the key in parts; the log asks
again in its next slice."""


class Facts(NamedTuple):
    """A log's numbers, for statistics. `oldest` and `current` number its segments, whatever those are."""

    oldest: int
    current: int
    segment_bytes: int
    records_written: int
    records_moved: int
    disk_bytes: int
    live_bytes: int


@mypyc_attr(allow_interpreted_subclasses=True)
class SyncPoint:
    """Everything that was committed before this was made. Several may be under way, in any thread."""

    def run(self) -> None:
        """Waits until all of it survives the loss of power. To be called once.

        Raises JournalFailed: then nothing that waits for this may be promised, and the log takes nothing more.
        """
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Log:
    """First exhaust batches(), then start(), then append() and commit()."""

    safe_after_commit: bool
    """Whether what commit() returned from survives the end of this process. A networked log, whose commit is on its way
    then, says no: replies wait for a SyncPoint under every policy."""
    high_water: int
    """The largest key that was ever appended; keys are never used again."""
    appended: int
    """Counts records; two equal readings mean that nothing was appended between them."""

    # --- start

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        """Every record that still counts, oldest first: a segment, and some of its rows at a time. Changes nothing.

        CHANGE and DELETE come for live keys only. Raises JournalDamaged behind the last one, and may wait.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Ready to take records. May wait. Raises a JournalError."""
        raise NotImplementedError

    def heal(self, payload_of: PayloadOf) -> int:
        """Makes good what a replay found damaged and was told to accept. Returns how many keys were written anew.

        May wait. Raises a JournalError.
        """
        raise NotImplementedError

    # --- every turn

    @property
    def current(self) -> int:
        """The number of the segment that takes the next record."""
        raise NotImplementedError

    @property
    def dirty(self) -> bool:
        """Whether something was appended and not committed."""
        raise NotImplementedError

    def admits(self, size: int) -> bool:
        """Whether there is room for a new key with so many bytes, and for all that may still happen to all keys.

        Who appends a new key asks this first. Changes and deletes of live keys always find room.
        """
        raise NotImplementedError

    def append(self, key: int, kind: int, payload: bytes) -> None:
        """Adds a record to the batch. CHANGE and DELETE are for live keys only.

        Does all of it, or raises and has changed nothing; JournalFailed when the log is at its end, now or before.
        """
        raise NotImplementedError

    @property
    def takes_parts(self) -> bool:
        """Whether the parts of a large payload may begin now: one key at a time, and not on a full disk."""
        raise NotImplementedError

    @property
    def short_of_room(self) -> bool:
        """Whether the disk is full, so that parts that are under way must be dropped."""
        raise NotImplementedError

    def append_part(self, key: int, part: bytes) -> None:
        """Adds a part of a large payload to the batch, which counts only after append_last(). Raises as append()."""
        raise NotImplementedError

    def append_last(self, key: int, last: bytes) -> None:
        """Adds the last part: from now on all parts of the key together are its FULL record. Raises as append()."""
        raise NotImplementedError

    def drop_parts(self) -> None:
        """The parts that were appended since the last append_last() are garbage."""
        raise NotImplementedError

    def commit(self) -> None:
        """Has the batch written as a whole: after a crash all of it is there, or nothing.

        Raises JournalFailed, whatever went wrong: then nothing of the batch may be acknowledged, nothing of it is ever
        written later, and append() and commit() raise from now on. The failure of an earlier commit or sync, which
        only showed since, is raised here as well.
        """
        raise NotImplementedError

    def sync_point(self) -> SyncPoint | None:
        """Covers all that was committed and that no earlier point covers; None when there is nothing.

        The caller runs it wherever it may wait, and those who wait for an earlier commit wait for this one in order.
        """
        raise NotImplementedError

    # --- keeping pace

    @property
    def behind(self) -> bool:
        """Whether changes have to wait, because the log does not keep pace with them.

        Whoever appends then calls catch_up() again and again, and appends no changes meanwhile. The last parts of a
        large payload may still be appended.
        """
        raise NotImplementedError

    def catch_up(self, payload_of: PayloadOf) -> bool:
        """While `behind`: one slice of what helps, about a millisecond. Raises JournalFailed.

        Returns whether to call again at once; otherwise the log's own work has to get on, which takes milliseconds.
        """
        raise NotImplementedError

    # --- compaction

    @property
    def settling(self) -> bool:
        """Whether the log's own work is under way, so that wants_compaction() may change by itself."""
        raise NotImplementedError

    def tend(self) -> None:
        """Hears how the log's own work got on, and begins what has to be done next. To be called now and then.

        Raises JournalFailed, also for what failed in another thread.
        """
        raise NotImplementedError

    def wants_compaction(self) -> bool:
        """Whether compact_slice() has something worth doing. Only asks."""
        raise NotImplementedError

    def compact_slice(self, payload_of: PayloadOf) -> None:
        """Commits, and appends some live keys of the oldest segment anew; about a millisecond.

        Only while wants_compaction() is true. Raises JournalFailed.
        """
        raise NotImplementedError

    # --- numbers and end

    def facts(self) -> Facts:
        """The log's numbers."""
        raise NotImplementedError

    def close(self) -> None:
        """Commits and syncs everything and gives the log back. Waits. Raises JournalFailed."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Gives up after a failure: nothing more is written, and what is under way is waited for, some seconds."""
        raise NotImplementedError
