"""The interface of a log. A log holds keys with opaque payloads. It appends, commits, syncs, compacts, replays.

This module must not know files, SQL or threads. journal/sqlite/log.py is one kind of log; a networked log may be
another. The owner of a log replays the log to its end, starts it, and from then on calls it from one thread. A method
waits for a device or a peer only where its contract says so. Other waiting is done in the log's own thread or
SyncPoint.run().
Invariant: records that a SyncPoint has covered survive everything. Records whose commit() has returned survive the end
of the process, if `safe_after_commit` says so. After JournalFailed nothing of the last batch is ever written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

from journal.errors import JournalError

FULL: Final = 1
CHANGE: Final = 2
DELETE: Final = 3
"""The kinds of records. A key's last FULL record counts, and the last CHANGE behind it. After DELETE nothing counts."""

Row = tuple[int, int, int, int, bytes]
"""A record as a replay gives it: its place, key, kind, a number for the log's own use, and payload."""


class Record(NamedTuple):
    """A record as it was appended, and the number of the segment that holds it."""

    key: int
    kind: int
    payload: bytes
    segment: int


PAYLOAD_MIN: Final = 201
"""A FULL record with a payload of this many bytes or more can be read back. Smaller ones may share rows."""
PAYLOAD_MAX: Final = 1 << 24
"""A FULL record with a larger payload cannot be read back: a copy of it would take the owner's thread too long."""

GROWN_BYTES: Final = 20
"""A FULL record that the log asks for again is at most this many bytes longer than the one before it."""

HEAD: Final = 7
"""The kind of a row that stands for a FULL record, and has no more than the first HEAD_BYTES of its payload. The fourth
number of the row is the length of the whole payload, which payloads() gives."""
HEAD_BYTES: Final = 256
UNCUT_MIN: Final = 0xC0
"""A payload that begins with this byte or a larger one stands in no HEAD row: its owner needs more than HEAD_BYTES."""

Wanted = tuple[int, int, int]
"""A FULL record that is to be read back: its segment, place and key."""

PayloadOf = Callable[[int], bytes | None]
"""Gives the current whole payload of a live key. None says that the owner has not read it back yet, or is appending
the key in parts. Then the log asks again in its next slice."""


class Facts(NamedTuple):
    """A log's numbers, for statistics. `oldest` and `current` are numbers of segments, whatever the log calls so."""

    oldest: int
    current: int
    segment_bytes: int
    records_written: int
    records_moved: int
    disk_bytes: int
    live_bytes: int


class SegmentState(NamedTuple):
    """One segment of a log that is open. `state` is `current`, `sealed` or `spare`: the next one, without records."""

    number: int
    state: str
    disk_bytes: int
    live_bytes: int
    records: int


@mypyc_attr(allow_interpreted_subclasses=True)
class SyncPoint:
    """Covers everything that was committed before it was made. Several may run at once, in any thread."""

    error: BaseException | None = None
    """The failure, once begin() has called `over`."""

    def begin(self, over: Callable[[], None]) -> bool:
        """Begins to wait without a thread, and calls `over` in the log's own thread when it ends. Called once.

        Returns False where this kind of log cannot do that: then the caller runs run() where it may wait.
        """
        return False

    def run(self) -> None:
        """Waits until everything that this covers survives a loss of power. The caller calls it once.

        Raises JournalFailed. Then nothing that waits for this may be promised, and the log takes nothing more.
        """
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Payloads:
    """Reads some FULL records back. run() waits for the device, in any thread; the rest is for the owner's thread.

    In the end each key is either in `found`, with a payload whose checksum is right, or in `failed`. A failure counts
    only while the owner still thinks that the record stands there: compaction moves records, and removes segments.
    When the system was `lacking` something, such as a descriptor, some keys are in neither: ask again somewhat later.
    """

    lacking: bool = False

    def __init__(self, wanted: list[Wanted]) -> None:
        self.wanted = wanted
        self.found: dict[int, bytes] = {}
        self.failed: dict[int, JournalError] = {}

    def run(self) -> None:
        """Called once. Raises no expected error."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Scan:
    """Looks for the keys that compaction moves next. run() waits for the device, in any thread; Log.scanned() follows.

    When the system was `lacking` something, it has found nothing: ask again somewhat later.
    """

    lacking: bool = False

    def run(self) -> None:
        """Called once. Raises no expected error."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Log:
    """The caller first exhausts batches(), then calls start(), and then append() and commit().

    A kind of log implements all methods of the first part, and those of the second part that it has something for.
    """

    safe_after_commit: bool
    """True when committed records survive the end of this process. False in a networked log: its commit may still be on
    its way. Then replies wait for a SyncPoint under every policy."""
    high_water: int
    """The largest key that was ever appended. No key is used again."""
    appended: int
    """The number of records that were appended. Two equal readings mean that nothing was appended between them."""

    # --- what every log does

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        """Every record that still counts, oldest first: each time a segment's number and some of its rows.

        CHANGE and DELETE come only for live keys. Changes nothing, and may wait. Raises JournalDamaged behind the last
        record.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Makes the log ready for append(). May wait. Raises a JournalError."""
        raise NotImplementedError

    @property
    def current(self) -> int:
        """The number of the segment that takes the next record."""
        raise NotImplementedError

    @property
    def dirty(self) -> bool:
        """Returns whether commit() has something to do: to write what was appended, or to raise a failure that showed
        since.
        """
        raise NotImplementedError

    def admits(self, size: int) -> bool:
        """Returns whether there is room for a new key with so many bytes, and for every later change and delete of all
        keys.

        The caller asks this before it appends a new key, or all of a live key anew. Changes and deletes of live keys
        always find room, and so does what the log itself asks for.
        """
        raise NotImplementedError

    def append(self, key: int, kind: int, payload: bytes) -> None:
        """Adds a record to the batch. CHANGE and DELETE are for live keys only.

        Does everything, or raises an exception and changes nothing. Raises JournalFailed when the log has failed.
        """
        raise NotImplementedError

    @property
    def takes_parts(self) -> bool:
        """Returns whether a payload may be appended in parts now: one key at a time, never on a full disk."""
        raise NotImplementedError

    def append_part(self, key: int, part: bytes) -> None:
        """Adds a part of a large payload to the batch. It counts only after append_last(). Raises as append() does."""
        raise NotImplementedError

    def append_last(self, key: int, last: bytes, *, moved: bool) -> None:
        """Adds the last part. From now on all parts of the key are its FULL record. Raises as append() does.

        `moved` says that compaction asked for this record.
        """
        raise NotImplementedError

    def drop_parts(self) -> None:
        """Makes the parts that were appended since the last append_last() garbage."""
        raise NotImplementedError

    def commit(self) -> None:
        """Writes the batch as a whole: after a crash all of it is there, or nothing.

        Raises JournalFailed, whatever went wrong, also for an earlier commit or sync whose failure only showed since.
        Then nothing of the batch may be acknowledged, nothing of it is ever written later, and append() and commit()
        raise JournalFailed from now on.
        """
        raise NotImplementedError

    def sync_point(self) -> SyncPoint | None:
        """Returns a point for the commits that no earlier point covers; None without any.

        The caller runs the point where it may wait. Replies leave in the order of their commits.
        """
        raise NotImplementedError

    def facts(self) -> Facts:
        """The log's numbers."""
        raise NotImplementedError

    def close(self) -> None:
        """Commits and syncs everything, and gives the log back. Waits. Raises JournalFailed."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Closes the log after a failure. Writes nothing more, and waits some seconds for the log's current work."""
        raise NotImplementedError

    # --- what a log may offer: without it the default holds

    def repair(self, payload_of: PayloadOf) -> int:
        """Repairs the damage that the replay found, if the log was told to accept damage.

        Returns how many keys were written anew. May wait. Raises a JournalError.
        """
        return 0

    def leave_payloads(self) -> None:
        """Before batches(): the owner makes do with HEAD rows, and has payloads read back when it needs them.

        batches() then gives FULL records, or HEAD where it can, and only in segments of which reads_back() is true.
        """

    def reads_back(self, segment: int) -> bool:
        """Returns whether payloads() can read the FULL records of a segment: it is sealed, and all of it is on the
        device.

        While a replay is under way, this says it of a segment whose rows were just given. Once it is true it stays so
        as long as the segment has live records.
        """
        return False

    @property
    def tail(self) -> int:
        """The place of the record that was appended last, in the segment `current`. 0: this log gives no payload back.

        Another append() or a commit() makes the place another record's.
        """
        return 0

    def seal_early(self, size: int) -> bool:
        """Has the segment `current` sealed although it is not full, if it has about this many bytes of records.

        The owner wants reads_back() to be true of it, and calls this between a commit and the next append(). Returns
        whether sealing is under way; otherwise the owner may call again. Raises JournalFailed.
        """
        return False

    def payloads(self, wanted: list[Wanted]) -> Payloads:
        """Returns the reading of these records, which have PAYLOAD_MIN to PAYLOAD_MAX bytes."""
        raise NotImplementedError

    @property
    def short_of_room(self) -> bool:
        """Returns whether the disk is full. Then the caller must drop the parts that it has appended."""
        return False

    @property
    def behind(self) -> bool:
        """Returns whether the log is behind, so that changes have to wait. The caller then calls catch_up() again and
        again, and appends no changes meanwhile. It may still append the last parts of a large payload.
        """
        return False

    def catch_up(self, payload_of: PayloadOf) -> bool:
        """Helps a log that is `behind`, for about a millisecond. Raises JournalFailed.

        Returns whether to call again at once. If not, the log's own work has to go on first, for some milliseconds.
        """
        return False

    def hold(self, until_ns: int) -> None:
        """Says at the end of each SyncPoint whether more commits are expected soon, which may share a write.

        A log that writes commits before a SyncPoint asks for that waits until this time of the monotonic clock, or
        until the next SyncPoint begins. 0: none are expected.
        """

    @property
    def settling(self) -> bool:
        """Returns whether the log's own work is not finished, so that wants_compaction() may change by itself."""
        return False

    def tend(self) -> None:
        """Takes in the results of the log's own work, and begins its next work. The caller calls this now and then.

        Raises JournalFailed, also for a failure in another thread.
        """

    def wants_compaction(self) -> bool:
        """Returns whether compact_slice() has something worth doing. Changes nothing."""
        return False

    def scan(self) -> Scan | None:
        """Returns what the next compact_slice() has to have read before; None when it has all that it needs.

        The caller calls this while wants_compaction() is true, runs the scan where it may wait, and gives it back.
        """
        return None

    def scanned(self, scan: Scan) -> None:
        """A scan has run. Raises JournalFailed, for damage too."""
        raise NotImplementedError

    def moves_next(self) -> list[int]:
        """Returns some of the keys for whose payloads the next compact_slice() asks, in that order, if they are known.

        The caller may call this while wants_compaction() is true, to have their payloads ready.
        """
        return []

    def compact_slice(self, payload_of: PayloadOf) -> None:
        """Commits, and appends some live keys of the oldest segment again. Takes about a millisecond.

        The caller calls this only while wants_compaction() is true. It does no more than what is ready for it: see
        scan(). Raises JournalFailed.
        """
        raise NotImplementedError

    def segments(self, most: int) -> list[SegmentState]:
        """Returns the newest segments, at most this many, in order of their numbers."""
        return []
