"""Compaction: when it is worth it, how live records leave the oldest segment, and when changes wait for it.

This module must not know SQL nor what a payload means. It works in slices of about a millisecond, in the owner's
thread; the keys of the segment that is being moved come over the link of segments.py, ahead of the slices.
Invariant: a segment is dropped only when it has no live record, and after all that replaced its own is safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from journal.liveness import Liveness
from journal.log import FULL, PayloadOf
from journal.postgres.replay import SegmentCount
from journal.postgres.segments import Tables
from journal.postgres.sizing import SPARE_SEGMENTS
from journal.postgres.writer import Writer

GARBAGE_SHARE: Final = 2
"""Compaction begins when the segments take this many times their live bytes, as in the SQLite kind."""
HOLD_SHARE: Final = 3
"""Changes wait when the segments take this many times the live bytes, and SPARE_SEGMENTS more."""
_MOVE_BYTES: Final = 1 << 17
_MOVE_KEYS: Final = 256
_PENDING_MAX: Final = 1 << 20
"""With this many bytes on their way nothing is moved: clients come first."""
_HOLD_S: Final = 0.02
"""Changes wait this long after a commit while the segments take too much."""


class Compaction:
    """Compacts the segments of one log."""

    def __init__(self, tables: Tables, writer: Writer, *, switched_on: bool) -> None:
        self.records_moved = 0
        self.live = Liveness()
        self.segments: list[SegmentCount] = []
        """Oldest first; the last one is written to."""
        self.disk_bytes = 0
        self.limit = 0
        """A segment is full when it has this many bytes."""
        self.budget: int | None = None
        self._tables = tables
        self._writer = writer
        self._on = switched_on
        self._victim = 0  # the segment that is being moved
        self._keys: list[int] = []  # of it, the next one last
        self._retiring = 0  # the segment that is to be dropped, once _upto is safe
        self._upto = 0
        self._dropping = False
        self._until_s = 0.0

    # --- is it worth it

    def is_wanted(self) -> bool:
        """Returns whether move_some() has something to do now."""
        segments = self.segments
        if not self._on or self._retiring or len(segments) < 2 or self._writer.cut or self._writer.fenced:
            return False
        victim = segments[0].number
        if not self.live.bytes_in(victim):
            return True
        if self._writer.pending_bytes > _PENDING_MAX:
            return False
        if self._victim == victim:
            return bool(self._keys) or self._tables.has_keys
        return self._is_worth()

    def _is_worth(self) -> bool:
        standing = self.disk_bytes - self.segments[-1].bytes
        return standing > GARBAGE_SHARE * self.live.total_bytes

    @property
    def too_large(self) -> bool:
        """Returns whether the segments take so much that changes have to wait for compaction."""
        if not self._on or len(self.segments) < 2:
            return False
        taken = self.disk_bytes + self._writer.pending_bytes
        if self.budget is not None and taken > self.budget - 2 * self.limit:
            return self._is_worth()
        # A large record makes its segment larger than the limit, and is no reason to wait.
        oversize = sum([max(0, each.bytes - self.limit) for each in (self.segments[0], self.segments[-1])])
        return taken > HOLD_SHARE * self.live.total_bytes + SPARE_SEGMENTS * self.limit + oversize

    # --- moving

    def move_some(
        self, payload_of: PayloadOf, append: Callable[[int, int, bytes], None], commit: Callable[[], None]
    ) -> None:
        """Runs one slice: appends live keys of the oldest segment again, or retires a segment without live keys."""
        commit()
        victim = self.segments[0].number
        if self.live.bytes_in(victim):
            if self._victim != victim:
                self._victim = victim
                self._keys = []
                self._tables.look_through(victim)
            self._move_keys(victim, payload_of, append)
            commit()
        if not self.live.bytes_in(victim):
            self._retiring = victim
            self._upto = self._writer.committed
            self._keys = []
            self.tend()

    def _move_keys(self, victim: int, payload_of: PayloadOf, append: Callable[[int, int, bytes], None]) -> None:
        left_bytes, left_keys = min(_MOVE_BYTES, max(self.limit // 2, 1)), _MOVE_KEYS
        segment_of = self.live.segment_of
        while left_bytes > 0 and left_keys > 0:
            if not self._keys:
                found = self._tables.take_keys()
                if found is None:
                    # Not in its rows, as far as they can be read: damage. Liveness knows the keys, and takes its time.
                    found = self.live.keys_in(victim)
                self._keys = found[::-1]
                if not found:
                    return
            key = self._keys[-1]
            left_keys -= 1
            if segment_of(key) == victim:
                payload = payload_of(key)
                if payload is not None:
                    append(key, FULL, payload)
                    left_bytes -= len(payload)
                    self.records_moved += 1
                elif segment_of(key) == victim:
                    return  # a large payload is moved in parts: the next slice asks for this key again
            self._keys.pop()

    # --- dropping

    @property
    def settling(self) -> bool:
        """Returns whether is_wanted() may change by itself, without commits and work on tables."""
        return self._retiring > 0

    def tend(self) -> None:
        """Has a segment dropped once all that replaced it is safe."""
        if not self._retiring or self._dropping or self._writer.safe < self._upto:
            return
        self._dropping = True
        following = self.segments[1]
        self._tables.drop(self._retiring, following.first or self._writer.next_seq, self._dropped)

    def _dropped(self) -> None:
        gone = self.segments.pop(0)
        self.disk_bytes -= gone.bytes
        self.live.forget(gone.number)
        self._retiring = 0
        self._victim = 0
        self._dropping = False

    # --- holding changes

    @property
    def behind(self) -> bool:
        """Returns whether changes have to wait."""
        return self._until_s > 0 and time.monotonic() < self._until_s

    def judge(self) -> None:
        """After a commit: decides whether changes wait, and how long."""
        self._until_s = time.monotonic() + _HOLD_S if self.too_large else 0.0

    def let_go(self) -> None:
        """Lets changes go on: compaction can do nothing more at the moment."""
        self._until_s = 0.0
