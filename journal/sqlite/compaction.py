"""Compaction: when to compact, how live records leave the oldest segment, and when changes wait for compaction.

This module must not know what a payload means. It works in slices of about a millisecond, in the thread that commits,
which reads no segment: a Scan does that, wherever its owner runs it.
Invariant: a segment is removed only when it has no live record, and after all records that replaced its own are
committed. A segment with live records of which a scan to its end finds none is damaged.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from typing import Final

from journal.errors import JournalDamaged, JournalError
from journal.log import FULL, PayloadOf, Scan
from journal.sqlite.files import lacks_descriptors
from journal.sqlite.reader import SegmentReader
from journal.sqlite.sealed import Sealed
from journal.sqlite.segments import Segments
from journal.sqlite.sizing import MOVE_BYTES, SPARE_SEGMENTS

_SCAN_ROWS: Final = 1024
"""Rows of the oldest segment that one scan looks at, or keys in them. Most rows may be changes and deletes."""
_SLICE_KEYS: Final = 256
"""Keys that one slice looks at. Most of them may be dead."""
_HOLD_S: Final = 0.004
"""Changes wait this long after a commit when the directory has outgrown its bound."""
_LONG_HOLD_S: Final = 0.1
"""Changes wait this long when the directory is a segment or more too large. Compaction then moves more than a usual
turn writes."""
_FULL_HOLD_S: Final = 5.0
"""Changes wait this long on a full disk, where a change could end the process, and when the directory is at its bound.
A device that answers has done all that the worker has to do before."""
_STEP_S: Final = 0.002
"""The most of this time that counts between two looks. Other work of the process in between does not count: in that
time compaction could not work."""


class VictimScan(Scan):
    """Looks for keys of whole records behind record `behind` of a segment. It opens the segment for itself."""

    def __init__(self, segments: Segments, victim: Sealed, behind: int) -> None:
        self.number = victim.number
        self.behind = behind
        self.seen = behind
        self.found: list[tuple[int, int]] = []
        self.error: JournalError | None = None
        self._path = victim.path
        self._space = segments.space

    def run(self) -> None:
        try:
            with closing(self._space.within(self._open)) as reader:
                self.found, self.seen = reader.keys_after(self.behind, _SCAN_ROWS)
        except MemoryError:
            self.lacking = True
        except JournalError as error:
            self.lacking = not isinstance(error, JournalDamaged) and lacks_descriptors(error)
            self.error = error

    def _open(self) -> SegmentReader:
        return SegmentReader(self._path)


class Compaction:
    """Compacts the segments of one directory."""

    def __init__(self, segments: Segments, *, switched_on: bool) -> None:
        self.records_moved = 0
        self._segments = segments
        self._on = switched_on
        self._victim = 0  # the number of the segment that is being moved; 0 for none
        self._scanned_seq = 0  # up to which of its records it is scanned
        self._keys: deque[int] = deque()  # those that were found, and not looked at yet
        self._scanned = False  # whether nothing follows them
        self._behind = False
        self._hold_s = 0.0  # how long changes wait after a commit
        self._held_s = 0.0  # how long they have waited since
        self._seen_s = 0.0  # when that was seen last

    # --- is it worth it

    def is_wanted(self) -> bool:
        """Returns whether move_some() has something worth doing."""
        segments = self._segments
        staying = segments.staying
        if not self._on or not staying:
            return False
        tight = segments.space.tight
        victim = staying[0]
        alive = segments.live.bytes_in(victim.number)
        if not alive and victim.ready:
            return segments.may_retire
        if segments.overgrown:
            return False
        if sum(not sealed.ready for sealed in segments.sealed[-SPARE_SEGMENTS:]) > 1:
            return False  # compaction must not write segments faster than the worker seals them
        if self._victim and not tight:
            return True
        if not victim.ready:
            return False
        # Ignore the WAL of a segment while it is being sealed. With one record per commit the WAL is ten times larger
        # than the data that remains.
        standing = sum(each.standing for each in staying)
        worth = segments.sizing.is_worth(standing, segments.live.total_bytes, len(staying))
        return self._is_worth_on_a_full_disk(worth) if tight else worth

    def _is_worth_on_a_full_disk(self, worth: bool) -> bool:
        """On a full disk, compact only if the next segments would not fit otherwise. Then any garbage counts."""
        segments = self._segments
        sizing, live = segments.sizing, segments.live
        left = segments.space.free() + segments.space.reserved
        victim = segments.staying[0]
        if left <= sizing.barely(segments.held(victim)):
            return False
        load = segments.load
        if worth or left > sizing.enough(load):
            return worth
        return sizing.is_worth_on_a_full_disk(load, live.change_bytes)

    # --- moving

    def move_some(
        self,
        payload_of: PayloadOf,
        append: Callable[[int, int, bytes], None],
        commit: Callable[[], None],
        retire: Callable[[], None],
    ) -> None:
        """Runs one slice: appends live keys of the oldest segment again, or retires a segment without live keys."""
        segments = self._segments
        commit()  # a dead record may be removed only after its successor is on disk
        victim = segments.sealed[segments.retiring]
        if segments.live.bytes_in(victim.number):
            self._move_keys(victim, payload_of, append)
            commit()
        if not segments.live.bytes_in(victim.number):
            self._forget()
            retire()

    def _move_keys(self, victim: Sealed, payload_of: PayloadOf, append: Callable[[int, int, bytes], None]) -> None:
        segments = self._segments
        self._begin(victim)
        left = min(MOVE_BYTES, segments.full_at // 2)
        for _ in range(_SLICE_KEYS):
            if not self._keys or left <= 0:
                break
            key = self._keys[0]
            if segments.live.segment_of(key) == victim.number:
                payload = payload_of(key)
                if payload is not None:
                    append(key, FULL, payload)
                    left -= len(payload)
                    self.records_moved += 1
                elif segments.live.segment_of(key) == victim.number:
                    return  # not read back yet, or moved in parts: the next slice asks for this key again
            self._keys.popleft()
        if self._scanned and not self._keys and segments.live.bytes_in(victim.number):
            keys = segments.live.keys_in(victim.number)
            raise JournalDamaged(f"{victim.path} lacks {len(keys)} records that count, such as that of key {keys[0]}")

    def _begin(self, victim: Sealed) -> None:
        if self._victim != victim.number:
            self._forget()
            self._victim = victim.number

    def _forget(self) -> None:
        self._victim = self._scanned_seq = 0
        self._scanned = False
        self._keys.clear()

    def scan(self) -> Scan | None:
        """Returns the scan that has to run before the next slice; None when the slice has something to do without."""
        segments = self._segments
        victim = segments.sealed[segments.retiring]
        self._begin(victim)
        if self._keys or self._scanned or not segments.live.bytes_in(victim.number):
            return None
        return VictimScan(segments, victim, self._scanned_seq)

    def scanned(self, scan: Scan) -> None:
        """A scan has run. Two may have been under way for the same: the first one counts."""
        assert isinstance(scan, VictimScan)
        if (scan.number, scan.behind) != (self._victim, self._scanned_seq) or self._keys or scan.lacking:
            return
        if scan.error is not None:
            raise scan.error
        self._scanned = scan.seen == scan.behind
        self._scanned_seq = scan.seen
        self._keys.extend([key for _, key in scan.found])

    def next_keys(self) -> list[int]:
        """Returns the live keys that the next slice looks at, if they are scanned."""
        live, victim = self._segments.live, self._victim
        return [key for key in islice(self._keys, _SLICE_KEYS) if live.segment_of(key) == victim]

    # --- holding changes

    @property
    def behind(self) -> bool:
        """Returns whether changes have to wait, see Log.behind. Without a suspicion the question costs nothing."""
        if not self._behind:
            return False
        segments = self._segments
        if segments.space.tight and segments.worker.busy:
            return True
        return self._held_s < self._hold_s

    def suspect(self) -> None:
        """Has the next commit decide whether changes have to wait."""
        if not self._behind:
            self._behind = True
            self._hold()

    def _hold(self) -> None:
        self._held_s = 0.0
        self._seen_s = time.monotonic()

    def committed(self) -> None:
        """A commit is over. If changes have to wait, the time of their wait begins now, or goes on."""
        if self._behind:
            if self._held_s >= self._hold_s:
                self._hold()
            self.judge()

    def time_passes(self) -> None:
        """To be called again and again while changes wait."""
        now_s = time.monotonic()
        self._held_s += min(now_s - self._seen_s, _STEP_S)
        self._seen_s = now_s

    def judge(self) -> None:
        """Decides whether changes still have to wait, and how long after a commit."""
        segments = self._segments
        sizing = segments.sizing
        excess = segments.excess if self._on else 0
        late = segments.next is None and segments.overgrown
        near_bound = self._on and segments.near_bound
        if excess <= 0 and not late and not near_bound:
            self._behind = False
        elif segments.space.tight or excess > sizing.margin or near_bound:
            self._hold_s = _FULL_HOLD_S
        elif excess < sizing.segment_limit and not self._far_too_large():
            self._hold_s = _HOLD_S
        else:
            self._hold_s = _LONG_HOLD_S

    def _far_too_large(self) -> bool:
        segments = self._segments
        assert segments.writer is not None
        return segments.writer.filled >= 2 * segments.full_at

    def let_go(self) -> None:
        """Lets changes go on: compaction can do nothing more at the moment."""
        self._behind = False
