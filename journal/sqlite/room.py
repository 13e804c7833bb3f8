"""How much room a journal needs: all arithmetic of space, and nothing else. Pure: no files, no clock, no records.

Terms. Live bytes are those of the records that a replay still needs, as format.row_bytes() counts them. A WAL holds a
segment's records until the segment is sealed; then they move to the database file, and for a moment stand in both.
Compaction moves what is live out of the oldest segment, which takes room before it gives any back. The reserve is a
file of blocks that are given back when somebody else fills the disk.
Invariant: whatever was admitted can still be changed, moved and deleted in the room that is left.
"""

from __future__ import annotations

from typing import Final

from journal.sqlite.format import PAGE_BYTES, row_bytes

BLOCK_BYTES: Final = 4096
"""Disks give room in blocks of this size, nearly all of them; a reserve of whole blocks says what it takes."""
PIECE_BYTES: Final = 1 << 15
"""The smallest piece of the reserve that is given back at once: what the index of a WAL grows by, the largest single
step that SQLite takes beside a transaction itself."""
INDEX_BYTES: Final = 1 << 15
"""What SQLite's index of a WAL takes, and grows by, in a file of its own."""
INDEXES_MAX: Final = 5
"""WALs that may be open at once: the current one, the next, one being sealed, and two that others look at."""
BARE_SEGMENT_BYTES: Final = 6 * PAGE_BYTES
"""What a sealed segment takes beside its records: the schema with its roots takes four pages, the last page of records
is half empty on average, and there is an inner page of the tree for some two hundred others."""
NEW_SEGMENT_BYTES: Final = INDEX_BYTES + 8 * PAGE_BYTES
"""What a segment takes before it has any record: four pages in the database, as many in its WAL, and the index."""
SPARE_SEGMENTS: Final = 4
"""Segments that come and go beside those with live records: the current one, the next, one that is being sealed, and
one that is being moved."""
CHANGE_BYTES: Final = row_bytes(64)
"""What a change of a key may add to its live bytes; callers keep their changes within 64 bytes."""
KEY_BYTES: Final = 48
"""What deleting a key takes in the end, kept in the reserve for each live key: a record without payload takes 24 bytes
in its page, and once more when its segment is sealed."""
SEGMENT_BYTES_MIN: Final = 1 << 15
"""Smaller segments would hold less than what a segment takes by itself (NEW_SEGMENT_BYTES)."""
CAPACITY_SHARE: Final = 32
"""A segment takes at most this share of the disk or budget: the reserve takes about six segments, those that come and
go take four, so that two thirds of a small disk are left to records and their garbage."""
GARBAGE_SHARE: Final = 2
"""Compaction begins when the segments take this many times what is live in them, so at least half of what it reads is
garbage, and moving a byte frees another one."""
HOLD_SHARE: Final = 2.5
"""Changes wait for compaction when the directory takes this many times what is live, and three segments: compaction
begins at GARBAGE_SHARE, and the directory's bound is three times what is live."""
AHEAD_MAX: Final = 1 << 23
"""Of a WAL at most so much is filled with zeros in advance: some tens of milliseconds of writing on a usual device."""


class Room:
    """The sizes of one journal, which follow from -s and from the disk or budget."""

    def __init__(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.segment_limit = segment_bytes // 2
        """Of how many bytes a WAL is full. While a segment is sealed its records stand in the WAL and in the database:
        together they take what -s says."""

    def fit(self, capacity: int) -> None:
        """Small segments on a small disk, so that it can rotate and compact at all."""
        share = capacity // CAPACITY_SHARE
        self.segment_limit = min(max(self.segment_bytes // 2, SEGMENT_BYTES_MIN // 2), max(share, SEGMENT_BYTES_MIN))

    # --- sizes

    @property
    def small_segment(self) -> int:
        """Of how many bytes a WAL is full while the disk is: a sixth of the usual, so that moving what is live in one
        segment gives room back some times on the way; but not less than what the reserve gives back in three steps.
        """
        return min(self.segment_limit, max(self.segment_limit // 6, 3 * PIECE_BYTES))

    @property
    def margin(self) -> int:
        """What the disk must have beside the whole reserve before it counts as having room again: two segments, so
        that it is not full again with the next one."""
        return 2 * (self.segment_limit + NEW_SEGMENT_BYTES)

    def full_at(self, tight: bool) -> int:
        """Of how many bytes a WAL is full."""
        return self.small_segment if tight else self.segment_limit

    def merge_bytes(self, standing: int, written: int) -> int:
        """What merging a WAL with so many bytes of records takes at most; `standing` is all that the segment takes.

        An eighth is for inner pages and for pages that records do not fill.
        """
        return min(standing, written + written // 8 + BARE_SEGMENT_BYTES)

    def least(self, alive: int) -> int:
        """What moving so many live bytes to small segments takes before the segment that they come from goes.

        The bytes with an eighth for pages, the small segment that is written to and one that is being sealed, and the
        next one.
        """
        return alive + alive // 8 + 2 * self.small_segment + NEW_SEGMENT_BYTES

    def enough(self, alive: int) -> int:
        """With more than that, commits may go on on a full disk before anything has to be moved: one more small segment
        fits before."""
        return self.least(alive) + self.small_segment + 2 * NEW_SEGMENT_BYTES

    def reserve(self, keys: int) -> int:
        """What is kept for the time when somebody else fills the disk.

        Room to seal and begin small segments, to move what is live in a large one, and to delete every key.
        """
        size = self.enough(self.segment_limit) + NEW_SEGMENT_BYTES + KEY_BYTES * keys
        return size - size % BLOCK_BYTES

    # --- puts

    def of_put(self, size: int) -> int:
        """What a put of so many bytes has to find: its record and a change of it, both once more while they are moved,
        and its delete."""
        return GARBAGE_SHARE * (row_bytes(size) + CHANGE_BYTES) + KEY_BYTES

    def left_for_puts(self, capacity: int, live: int, keys: int) -> int:
        """What puts may still take. The directory stays below GARBAGE_SHARE times the live bytes and the segments that
        come and go: all of that has to fit, with a change of every key."""
        grown = live + keys * CHANGE_BYTES
        bare = (grown // self.segment_limit + SPARE_SEGMENTS) * BARE_SEGMENT_BYTES
        coming = 2 * NEW_SEGMENT_BYTES + INDEXES_MAX * INDEX_BYTES
        around = SPARE_SEGMENTS * self.segment_limit + coming + self.reserve(keys)
        return capacity - GARBAGE_SHARE * grown - bare - around

    def of_budget(self, budget: int) -> int:
        """How many bytes of records a budget has room for, all in all."""
        return max(0, self.left_for_puts(budget, 0, 0) // GARBAGE_SHARE)

    def ahead(self, capacity: int, used: int, keys: int) -> int:
        """How many bytes of a new WAL are filled in advance: never so many that the WAL is full, and none where the
        segments that come and go hardly fit."""
        if capacity - used - self.reserve(keys) < SPARE_SEGMENTS * self.segment_limit:
            return 0
        return min(self.segment_limit - 1, AHEAD_MAX)

    # --- compaction

    def excess(self, capacity: int, used: int, unmerged: int, oversize: int, live: int, keys: int) -> float:
        """By how many bytes the directory is too large, or its disk too full: then changes wait for compaction.

        Segments that are being sealed take their bytes twice for a moment: `unmerged` is what those take. Of segments
        that are written, sealed or removed, `oversize` is what a large record adds to their usual size.
        """
        room = capacity - used - self.reserve(keys) - INDEXES_MAX * INDEX_BYTES
        too_large = used + unmerged - oversize - HOLD_SHARE * live - 3 * self.segment_limit
        return max(too_large, self.margin - room)

    def is_worth(self, standing: int, live: int, segments: int) -> bool:
        """Whether sealed segments, so many bytes in so many files, hold more garbage than live records.

        What a file takes by itself is no garbage, up to as many files as the live bytes need.
        """
        needed = min(live // self.segment_limit + SPARE_SEGMENTS, segments)
        return standing > GARBAGE_SHARE * live + needed * BARE_SEGMENT_BYTES

    def is_worth_on_a_full_disk(self, standing: int, wholes: int) -> bool:
        """Whether moving everything that is live, `wholes` bytes without changes, would free enough.

        Garbage in the newest segment can be freed only after every older segment has been moved. A quarter of what has
        to be moved, or one segment, is enough. Changes go by themselves: a record that is moved contains them.
        """
        bare = (wholes // self.small_segment + SPARE_SEGMENTS) * BARE_SEGMENT_BYTES // 2
        return standing - wholes - bare > min(wholes // 4, self.segment_limit)
