"""Computes the room that a journal needs: all arithmetic of space, and nothing else. Pure: no files, clock or records.

Terms. Live bytes are the bytes of the records that a replay still needs, as format.row_bytes() counts them. A WAL
holds a segment's records until the segment is sealed. Sealing copies the records to the database file, so for a moment
they stand in both. Compaction moves live records out of the oldest segment: it takes room before it gives room back.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from journal.sqlite.format import CELL_BYTES, INDEX_BYTES, PAGE_BYTES, row_bytes, whole_bytes

BLOCK_BYTES: Final = 4096
"""Nearly all file systems give room in blocks of this size. A reserve of whole blocks takes exactly its size."""
PIECE_BYTES: Final = INDEX_BYTES
"""The smallest piece of the reserve that is given back: the largest step that SQLite takes beside a transaction."""
INDEXES_MAX: Final = 5
"""WALs that may be open at once: the current one, the next, one being sealed, and two that others look at."""
BARE_SEGMENT_BYTES: Final = 6 * PAGE_BYTES
"""Bytes of a sealed segment beside its records. The schema with its roots takes four pages. The last page of records
is half empty on average. Each two hundred pages need an inner page of the tree."""
NEW_SEGMENT_BYTES: Final = INDEX_BYTES + 8 * PAGE_BYTES
"""Bytes of a segment without any record: four pages in the database, as many in its WAL, and the index."""
SPARE_SEGMENTS: Final = 4
"""Segments that come and go beside the segments with live records: the current one, the next, one that is being sealed,
and one that is being moved."""
CHANGE_BYTES: Final = row_bytes(64)
"""Bytes that a change of a key may add to its live bytes. Callers keep their changes within 64 bytes."""
COMMIT_BYTES: Final = 1 << 18
"""On a full disk, a commit has no more bytes of changes than this, and no more than one change of each key. These are
some 3,000 changes: a client makes 128 in a turn at the most."""
OVERSIZE_BYTES: Final = 1 << 20
"""One commit of puts, or a large row, makes a segment larger than full by this at the most, as far as moving it has
room in the reserve. Jobs of more bytes are written in parts, and these are not moved while the disk is full."""
KEY_BYTES: Final = 2 * CELL_BYTES
"""Bytes for deleting a key. The reserve has this much for each live key: a record without payload takes CELL_BYTES in
its page, and CELL_BYTES once more when its segment is sealed."""
LOOK_BYTES: Final = 1 << 17
"""The most bytes that puts take between two looks at the disk. These are some hundred small puts, and a look takes as
long as ten of them."""
SEGMENT_BYTES_MIN: Final = 1 << 15
"""The smallest segment. Half of this is the limit of its WAL: just more than BARE_SEGMENT_BYTES, so a smaller segment
would hold fewer bytes of records than it takes beside them."""
CAPACITY_SHARE: Final = 32
"""A WAL takes at most this share of the disk or budget. With 4 MB the reserve then takes five such shares, and the
segments that come and go take four. Records and their garbage keep nearly two thirds."""
MOVE_BYTES: Final = 1 << 17
"""The bytes that one slice of compaction moves, give or take a record. Writing them takes half a millisecond."""
GARBAGE_SHARE: Final = 2
"""Compaction begins when the segments take this many times their live bytes. So at least half of what compaction reads
is garbage, and moving a byte frees another byte."""
HOLD_SHARE: Final = 2.5
"""Changes wait for compaction when the directory takes this many times the live bytes, and three segments more. This is
half way between GARBAGE_SHARE, where compaction begins, and the directory's bound of three times the live bytes."""
BOUND_SHARE: Final = 3
"""The directory stays below this many times the live bytes, this many segments, and BOUND_BESIDE_BYTES."""
BOUND_BESIDE_BYTES: Final = 1_000_000 - INDEXES_MAX * INDEX_BYTES
"""Bytes of the directory beside those, however small the segments are, and beside the indexes of WALs: what the reserve
has for these indexes and for puts that are granted."""
AHEAD_MAX: Final = 1 << 23
"""The most of a WAL that is filled with zeros in advance: some tens of milliseconds of writing on a usual device."""


class Held(NamedTuple):
    """A segment: what it takes when it is sealed, how many of these bytes are live, and its largest row.

    `unmerged` is what its WAL takes once more when that is merged.
    """

    standing: int
    alive: int
    row: int
    unmerged: int = 0


class Load(NamedTuple):
    """The load of a journal's segments, as far as the reserve depends on it."""

    keys: int = 0
    least: int = 0  # the room that moving the live bytes of one segment takes, at the most
    lacking: int = 0  # what segments take more once their live records have been moved, added up
    surplus: int = 0  # what others take less then
    merging: int = 0  # what WALs that are larger than full take while they are merged


class Sizing:
    """The sizes of one journal, which follow from -s and from the disk or budget.

    The reserve is a file of allocated blocks. The blocks are given back when another process fills the disk. Invariant:
    whatever was admitted can still be changed, moved and deleted in the room that is left. On a full disk that is so as
    long as

        reserve >= least + lacking + 2 commit + 2 small segments + small segment + merging
                   + what is deleted and granted

    least           moving the live bytes of the segment that has most of them, before that segment goes
    lacking         what all segments take more once all their live records stand in small segments: each has its
                    own schema and indexes, and a record that was changed may be longer, so that fewer lie in a page
    2 commit        the largest commit stands in the WAL and, when that is sealed, in the database
    small segments  garbage that is not worth moving for yet, and that of the segment that is being written
    merging         the merge of a commit of puts that is larger than a segment: another process may take the blocks
                    that the merge frees
    """

    def __init__(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.segment_limit = segment_bytes // 2
        """The bytes at which a WAL is full. While a segment is sealed, its records stand in the WAL and in the
        database: together the two files take what -s says."""

    def fit(self, capacity: int) -> None:
        """Chooses small segments for a small disk: otherwise the journal could neither rotate nor compact there."""
        share = capacity // CAPACITY_SHARE
        self.segment_limit = min(max(self.segment_bytes // 2, SEGMENT_BYTES_MIN // 2), max(share, SEGMENT_BYTES_MIN))

    # --- sizes

    @property
    def small_segment(self) -> int:
        """Returns the bytes at which a WAL is full while the disk is full.

        A sixth of the usual limit: moving the live bytes of one large segment then gives room back several times on the
        way. Not less than the reserve gives back in its first two steps.
        """
        return min(self.segment_limit, max(self.segment_limit // 6, 3 * PIECE_BYTES))

    @property
    def margin(self) -> int:
        """Returns how much must be free beside the whole reserve before the disk counts as having room again.

        Two segments: with less, the next segment would fill the disk again.
        """
        return 2 * (self.segment_limit + NEW_SEGMENT_BYTES)

    def full_at(self, tight: bool) -> int:
        """Returns the bytes at which a WAL is full; `tight` says that the disk is full."""
        return self.small_segment if tight else self.segment_limit

    def merge_bytes(self, standing: int, written: int) -> int:
        """Returns the most that merging a WAL takes. `standing` is the size of the segment, `written` that of its
        records.

        An eighth is for inner pages, and for pages that records do not fill.
        """
        return min(standing, written + written // 8 + BARE_SEGMENT_BYTES)

    def moved_bytes(self, alive: int) -> int:
        """Returns what this many live bytes take once they stand in small segments, which compaction fills."""
        return alive + alive * BARE_SEGMENT_BYTES // self.small_segment

    def load(self, keys: int, segments: list[Held], others: Load | None = None) -> Load:
        """Adds up segments, and `others`.

        A segment with live records may have been filled by less than is counted here for a small one, so up to what it
        takes beside its records is no surplus: otherwise moving would begin again and again, and free nothing.
        """
        _, least, lacking, surplus, merging = others or Load()
        for held in segments:
            least = max(least, self.least(held))
            moved = self.moved_bytes(held.alive)
            lacking += max(0, moved - held.standing)
            surplus += max(0, held.standing - moved - (BARE_SEGMENT_BYTES if held.alive else 0))
            merging += max(0, held.unmerged - self.segment_limit)
        return Load(keys, least, lacking, surplus, merging)

    def least(self, held: Held) -> int:
        """Returns the disk space for moving the live bytes of a segment to small segments before the removal.

        These are the records and their new segments, the records once more that are being sealed, the next segment,
        and the index for reading. Records of different sizes fill their pages badly: moving may write twice their live
        bytes, but no more than stood there. What a large commit or large rows take beyond a segment is reserved up to
        OVERSIZE_BYTES.
        """
        return self._moving(max(held.alive, min(2 * held.alive, held.standing)), held.row)

    def barely(self, held: Held) -> int:
        """Returns the least disk space for a move: the records fill their new pages as densely as the old pages.

        On a full disk another process may have taken the blocks that a merge freed. Then less space is left than
        least() says. Compaction still moves records: each change uses more of the reserve, and only a move frees space.
        """
        return self._moving(held.alive, held.row)

    def _moving(self, alive: int, row: int) -> int:
        alive = min(alive, self.segment_limit + OVERSIZE_BYTES)
        sealing = min(alive, 2 * self.small_segment + min(row, OVERSIZE_BYTES))
        return self.moved_bytes(alive) + sealing + BARE_SEGMENT_BYTES + NEW_SEGMENT_BYTES + INDEX_BYTES

    def enough(self, load: Load) -> int:
        """Returns how much free space lets commits go on, on a full disk, before compaction has to move records.

        One more commit and one small segment fit before moving everything needs least() of each segment. A full segment
        is assumed in any case.
        """
        commit = min(load.keys * CHANGE_BYTES, COMMIT_BYTES)
        least = max(load.least, self.least(Held(self.segment_limit, self.segment_limit, 0)))
        return least + load.lacking + 2 * commit + self.small_segment + NEW_SEGMENT_BYTES

    def reserve(self, load: Load) -> int:
        """The room that is kept for the time when another process fills the disk: the inequality above."""
        size = self.enough(load) + 2 * self.small_segment + KEY_BYTES * load.keys + self._look_bytes + load.merging
        return size - size % BLOCK_BYTES

    # --- puts

    def of_put(self, size: int) -> int:
        """Returns the bytes that a put of this size needs: its record, a change, both again for moving, and its delete.

        The reserve has its change twice, for a commit that changes every key.
        """
        return GARBAGE_SHARE * (whole_bytes(size) + 2 * CHANGE_BYTES) + KEY_BYTES

    def left_for_puts(self, capacity: int, live: int, load: Load) -> int:
        """Returns how many bytes puts may still take, each counted as in of_put().

        The directory stays below GARBAGE_SHARE times the live bytes and the segments that come and go. All of that has
        to fit, also after each key was changed. A put counts its records only: a share of what is left is kept for what
        the segments take beside those records.
        """
        limit = self.segment_limit
        grown = live + load.keys * CHANGE_BYTES
        bare = grown * BARE_SEGMENT_BYTES // limit + SPARE_SEGMENTS * BARE_SEGMENT_BYTES
        coming = 2 * NEW_SEGMENT_BYTES + INDEXES_MAX * INDEX_BYTES
        around = SPARE_SEGMENTS * limit + coming + self.reserve(load)
        left = capacity - GARBAGE_SHARE * grown - bare - around
        records = GARBAGE_SHARE * limit
        return left * records // (records + max(BARE_SEGMENT_BYTES, self.moved_bytes(limit) - limit))

    def granted(self, left: int, need: int) -> int:
        """Returns how many bytes puts may take until the next look at the disk. `left` is what left_for_puts() says.

        At least what the next put needs, if that is left. Others may fill the disk before the next look.
        """
        return min(left, max(need, self._look_bytes))

    @property
    def _look_bytes(self) -> int:
        return min(LOOK_BYTES, self.segment_limit)

    def of_budget(self, budget: int) -> int:
        """Returns how many bytes of records an empty journal with this budget has room for."""
        return max(0, self.left_for_puts(budget, 0, Load()) // GARBAGE_SHARE)

    def ahead(self, capacity: int, used: int, load: Load) -> int:
        """Returns how many bytes of a new WAL are filled with zeros in advance.

        Never so many that the WAL is full. None where the segments that come and go hardly fit.
        """
        if capacity - used - self.reserve(load) < SPARE_SEGMENTS * self.segment_limit:
            return 0
        return min(self.segment_limit - 1, AHEAD_MAX)

    # --- compaction

    def excess(self, capacity: int, used: int, unmerged: int, oversize: int, live: int, load: Load) -> float:
        """Returns by how many bytes the directory is too large, or its disk too full. Above 0, changes wait.

        `unmerged` is the size of the segments that are being sealed: for a moment they take their bytes twice.
        `oversize` is what a large record adds to segments that are being written, sealed or removed.
        """
        room = capacity - used - self.reserve(load) - INDEXES_MAX * INDEX_BYTES
        too_large = used + unmerged - oversize - HOLD_SHARE * live - 3 * self.segment_limit
        return max(too_large, self.margin - room)

    def near_bound(self, taken: int, live: int, commit: int) -> bool:
        """Returns whether the directory, at this size, has less left below its bound than a turn may take.

        A turn has a slice of compaction, which writes MOVE_BYTES or half a WAL, and a commit. A commit takes what puts
        may take between two looks at the disk, or as much as the last ones. A sealed `commit` stands in two files.
        """
        bound = BOUND_SHARE * (live + 2 * self.segment_limit) + BOUND_BESIDE_BYTES
        return taken + min(MOVE_BYTES, self.segment_limit // 2) + max(self._look_bytes, 2 * commit) > bound

    def is_worth(self, standing: int, live: int, segments: int) -> bool:
        """Returns whether sealed segments hold more garbage than live records. `standing` is what all their files take.

        What a file takes beside its records is no garbage, as long as the live bytes need so many files.
        """
        needed = min(live // self.segment_limit + SPARE_SEGMENTS, segments)
        return standing > GARBAGE_SHARE * live + needed * BARE_SEGMENT_BYTES

    def is_worth_on_a_full_disk(self, load: Load, changes: int) -> bool:
        """Returns whether moving everything that is live frees a small segment. `changes` is the live bytes of changes.

        Garbage in the newest segment can be freed only after every older segment has been moved. Changes need no move:
        a record that is moved contains its change. What segments may take more then is in the reserve.
        """
        return load.surplus + changes > self.small_segment
