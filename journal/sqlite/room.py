"""How much room a journal needs: all arithmetic of space, and nothing else. Pure: no files, no clock, no records.

Terms. Live bytes are the bytes of the records that a replay still needs, as format.row_bytes() counts them. A WAL
holds a segment's records until the segment is sealed. Sealing copies the records to the database file, so for a moment
they stand in both. Compaction moves live records out of the oldest segment: it takes room before it gives room back.
The reserve is a file of allocated blocks. The blocks are given back when somebody else fills the disk.
Invariant: whatever was admitted can still be changed, moved and deleted in the room that is left.
"""

from __future__ import annotations

from typing import Final

from journal.sqlite.format import CELL_BYTES, INDEX_BYTES, PAGE_BYTES, row_bytes

BLOCK_BYTES: Final = 4096
"""Nearly all file systems give room in blocks of this size. A reserve of whole blocks takes exactly its size."""
PIECE_BYTES: Final = INDEX_BYTES
"""The smallest piece of the reserve that is given back: the largest step that SQLite takes beside a transaction."""
INDEXES_MAX: Final = 5
"""WALs that may be open at once: the current one, the next, one being sealed, and two that others look at."""
BARE_SEGMENT_BYTES: Final = 6 * PAGE_BYTES
"""What a sealed segment takes beside its records. The schema with its roots takes four pages. The last page of records
is half empty on average. Each two hundred pages need an inner page of the tree."""
NEW_SEGMENT_BYTES: Final = INDEX_BYTES + 8 * PAGE_BYTES
"""What a segment takes before it has any record: four pages in the database, as many in its WAL, and the index."""
SPARE_SEGMENTS: Final = 4
"""Segments that come and go beside the segments with live records: the current one, the next, one that is being sealed,
and one that is being moved."""
CHANGE_BYTES: Final = row_bytes(64)
"""What a change of a key may add to its live bytes. Callers keep their changes within 64 bytes."""
KEY_BYTES: Final = 2 * CELL_BYTES
"""What deleting a key takes. The reserve has this much for each live key: a record without payload takes CELL_BYTES in
its page, and CELL_BYTES once more when its segment is sealed."""
LOOK_BYTES: Final = 1 << 17
"""Puts take at most so many bytes between two looks at the disk. These are some hundred small puts, and a look takes as
long as ten of them."""
SEGMENT_BYTES_MIN: Final = 1 << 15
"""The smallest segment. Half of this is the limit of its WAL: just more than BARE_SEGMENT_BYTES, so a smaller segment
would hold fewer bytes of records than it takes beside them."""
CAPACITY_SHARE: Final = 32
"""A WAL takes at most this share of the disk or budget. With 4 MB the reserve then takes five such shares, and the
segments that come and go take four. Records and their garbage keep nearly two thirds."""
GARBAGE_SHARE: Final = 2
"""Compaction begins when the segments take this many times their live bytes. So at least half of what compaction reads
is garbage, and moving a byte frees another byte."""
HOLD_SHARE: Final = 2.5
"""Changes wait for compaction when the directory takes this many times the live bytes, and three segments more. This is
half way between GARBAGE_SHARE, where compaction begins, and the directory's bound of three times the live bytes."""
BOUND_SHARE: Final = 3
"""The directory stays below so many times the live bytes, so many segments, and BOUND_BESIDE_BYTES."""
BOUND_BESIDE_BYTES: Final = (1 << 19) + LOOK_BYTES
"""What the directory may take beside those, however small the segments are: the indexes of WALs, what the reserve has
for them, and what it has for puts that are granted."""
AHEAD_MAX: Final = 1 << 23
"""At most so much of a WAL is filled with zeros in advance: some tens of milliseconds of writing on a usual device."""


class Room:
    """The sizes of one journal, which follow from -s and from the disk or budget."""

    def __init__(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.segment_limit = segment_bytes // 2
        """A WAL of so many bytes is full. While a segment is sealed, its records stand in the WAL and in the database:
        together the two files take what -s says."""

    def fit(self, capacity: int) -> None:
        """Chooses small segments for a small disk: otherwise the journal could neither rotate nor compact there."""
        share = capacity // CAPACITY_SHARE
        self.segment_limit = min(max(self.segment_bytes // 2, SEGMENT_BYTES_MIN // 2), max(share, SEGMENT_BYTES_MIN))

    # --- sizes

    @property
    def small_segment(self) -> int:
        """While the disk is full, a WAL of so many bytes is full.

        A sixth of the usual limit: moving the live bytes of one large segment then gives room back several times on the
        way. Not less than the reserve gives back in its first two steps.
        """
        return min(self.segment_limit, max(self.segment_limit // 6, 3 * PIECE_BYTES))

    @property
    def margin(self) -> int:
        """How much must be free beside the whole reserve before the disk counts as having room again.

        Two segments: with less, the next segment would fill the disk again.
        """
        return 2 * (self.segment_limit + NEW_SEGMENT_BYTES)

    def full_at(self, tight: bool) -> int:
        """A WAL of so many bytes is full; `tight` says that the disk is full."""
        return self.small_segment if tight else self.segment_limit

    def merge_bytes(self, standing: int, written: int) -> int:
        """The most that merging a WAL takes. `standing` is what the whole segment takes, `written` its records.

        An eighth is for inner pages, and for pages that records do not fill.
        """
        return min(standing, written + written // 8 + BARE_SEGMENT_BYTES)

    def least(self, alive: int) -> int:
        """The room that moving so many live bytes to small segments takes before their old segment goes.

        The bytes themselves, an eighth for pages, the small segment that is being written, the small segment that is
        being sealed, and the next segment.
        """
        return alive + alive // 8 + 2 * self.small_segment + NEW_SEGMENT_BYTES

    def enough(self, alive: int) -> int:
        """With more room than this, commits go on on a full disk before compaction has to move anything.

        One more small segment fits before the move needs least().
        """
        return self.least(alive) + self.small_segment + 2 * NEW_SEGMENT_BYTES

    def reserve(self, keys: int) -> int:
        """The room that is kept for the time when somebody else fills the disk.

        It suffices to seal and begin segments, to move the live bytes of a large segment, to delete every key, and for
        the puts that were granted before anybody saw that the disk is full.
        """
        size = self.enough(self.segment_limit) + NEW_SEGMENT_BYTES + KEY_BYTES * keys + self._look_bytes
        return size - size % BLOCK_BYTES

    # --- puts

    def of_put(self, size: int) -> int:
        """The room that a put of so many bytes needs: its record, a change, both again for moving, and its delete."""
        return GARBAGE_SHARE * (row_bytes(size) + CHANGE_BYTES) + KEY_BYTES

    def left_for_puts(self, capacity: int, live: int, keys: int) -> int:
        """How many bytes puts may still take, each counted as in of_put().

        The directory stays below GARBAGE_SHARE times the live bytes and the segments that come and go. All of that has
        to fit, also after each key was changed. A put counts its records only: a share of what is left is kept for what
        the segments take beside those records.
        """
        limit = self.segment_limit
        grown = live + keys * CHANGE_BYTES
        bare = grown * BARE_SEGMENT_BYTES // limit + SPARE_SEGMENTS * BARE_SEGMENT_BYTES
        coming = 2 * NEW_SEGMENT_BYTES + INDEXES_MAX * INDEX_BYTES
        around = SPARE_SEGMENTS * limit + coming + self.reserve(keys)
        left = capacity - GARBAGE_SHARE * grown - bare - around
        records = GARBAGE_SHARE * limit
        return left * records // (records + BARE_SEGMENT_BYTES)

    def granted(self, left: int, need: int) -> int:
        """How many bytes puts may take until somebody looks at the disk again. `left` is what left_for_puts() says.

        At least what the next put needs, if that is left. Others may fill the disk before the next look.
        """
        return min(left, max(need, self._look_bytes))

    @property
    def _look_bytes(self) -> int:
        return min(LOOK_BYTES, self.segment_limit)

    def of_budget(self, budget: int) -> int:
        """How many bytes of records an empty journal with this budget has room for."""
        return max(0, self.left_for_puts(budget, 0, 0) // GARBAGE_SHARE)

    def ahead(self, capacity: int, used: int, keys: int) -> int:
        """How many bytes of a new WAL are filled with zeros in advance.

        Never so many that the WAL is full. None where the segments that come and go hardly fit.
        """
        if capacity - used - self.reserve(keys) < SPARE_SEGMENTS * self.segment_limit:
            return 0
        return min(self.segment_limit - 1, AHEAD_MAX)

    # --- compaction

    def excess(self, capacity: int, used: int, unmerged: int, oversize: int, live: int, keys: int) -> float:
        """By how many bytes the directory is too large, or its disk too full. Above 0, changes wait for compaction.

        `unmerged` is the size of the segments that are being sealed: for a moment they take their bytes twice.
        `oversize` is what a large record adds to segments that are being written, sealed or removed.
        """
        room = capacity - used - self.reserve(keys) - INDEXES_MAX * INDEX_BYTES
        too_large = used + unmerged - oversize - HOLD_SHARE * live - 3 * self.segment_limit
        return max(too_large, self.margin - room)

    def near_bound(self, taken: int, live: int, commit: int) -> bool:
        """Whether the directory, which takes so many bytes, has less left below its bound than a turn may take.

        A turn has a slice of compaction, which writes half a WAL at the most, and a commit. A commit takes what puts
        may take between two looks at the disk, or as much as the last ones. A sealed `commit` stands in two files.
        """
        bound = BOUND_SHARE * (live + 2 * self.segment_limit) + BOUND_BESIDE_BYTES
        return taken + self.segment_limit // 2 + max(self._look_bytes, 2 * commit) > bound

    def is_worth(self, standing: int, live: int, segments: int) -> bool:
        """Whether sealed segments hold more garbage than live records. `standing` is what all their files take.

        What a file takes beside its records is no garbage, as long as the live bytes need so many files.
        """
        needed = min(live // self.segment_limit + SPARE_SEGMENTS, segments)
        return standing > GARBAGE_SHARE * live + needed * BARE_SEGMENT_BYTES

    def is_worth_on_a_full_disk(self, standing: int, wholes: int) -> bool:
        """Whether moving everything that is live would free enough. `wholes` is the live bytes without changes.

        Garbage in the newest segment can be freed only after every older segment has been moved. To free a quarter of
        the moved bytes, or one small segment, is enough: there may not be room for more garbage than that between
        enough() and least(). Changes need no move: a record that is moved contains its change.
        """
        bare = (wholes // self.small_segment + SPARE_SEGMENTS) * BARE_SEGMENT_BYTES // 2
        return standing - wholes - bare > min(wholes // 4, self.small_segment)
