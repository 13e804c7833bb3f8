"""The arithmetic of space: each formula at its edges, and the promises of sizing.py on random journals."""

from __future__ import annotations

import random

import pytest

from journal.sqlite.format import INDEX_BYTES, INSIDE_MAX, PAGE_BYTES, row_bytes, whole_bytes
from journal.sqlite.sizing import (
    AHEAD_MAX,
    BARE_SEGMENT_BYTES,
    BLOCK_BYTES,
    BOUND_BESIDE_BYTES,
    CAPACITY_SHARE,
    CHANGE_BYTES,
    COMMIT_BYTES,
    INDEXES_MAX,
    KEY_BYTES,
    LOOK_BYTES,
    MOVE_BYTES,
    NEW_SEGMENT_BYTES,
    OVERSIZE_BYTES,
    PIECE_BYTES,
    SEGMENT_BYTES_MIN,
    Held,
    Load,
    Sizing,
)

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TINY, USUAL, LARGE = 32 * KIB, 10 * MIB, GIB
ROUNDS = 300


def sizing_of(segment_bytes: int, capacity: int) -> Sizing:
    sizing = Sizing(segment_bytes)
    sizing.fit(capacity)
    return sizing


def random_sizing(chance: random.Random) -> tuple[Sizing, int]:
    """A journal of any size, and the disk or budget that it has."""
    capacity = int(2 ** chance.uniform(15, 42))
    return sizing_of(int(2 ** chance.uniform(12, 33)), capacity), capacity


def sizings(seed: int) -> list[tuple[random.Random, Sizing, int]]:
    chance = random.Random(seed)
    return [(chance, *random_sizing(chance)) for _ in range(ROUNDS)]


# --- sizes of segments


@pytest.mark.parametrize(
    ("segment_bytes", "capacity", "limit"),
    [
        (USUAL, 100 * GIB, USUAL // 2),  # a large disk: what -s says
        (USUAL, 32 * 5 * MIB, USUAL // 2),  # the smallest disk that leaves -s as it is
        (USUAL, 32 * 5 * MIB - 32, USUAL // 2 - 1),
        (USUAL, 4 * MIB, 128 * KIB),  # a small budget: its share
        (USUAL, 0, SEGMENT_BYTES_MIN),  # no room at all: the least
        (LARGE, 32 * MIB, MIB),  # large segments shrink as well
        (LARGE, 32 * GIB, LARGE // 2),
        (TINY, 100 * GIB, TINY // 2),  # small segments are wanted
        (TINY, 0, TINY // 2),
        (1, 100 * GIB, SEGMENT_BYTES_MIN // 2),  # smaller ones would hold next to nothing
    ],
)
def test_segments_fit_to_their_disk(segment_bytes: int, capacity: int, limit: int) -> None:
    assert sizing_of(segment_bytes, capacity).segment_limit == limit


def test_before_the_disk_is_known_segments_are_what_was_asked_for() -> None:
    assert Sizing(USUAL).segment_limit == USUAL // 2


def test_segments_have_their_bounds_on_any_disk(seed: int) -> None:
    for _, sizing, capacity in sizings(seed):
        least = SEGMENT_BYTES_MIN
        assert SEGMENT_BYTES_MIN // 2 <= sizing.segment_limit <= max(sizing.segment_bytes // 2, SEGMENT_BYTES_MIN // 2)
        assert sizing.segment_limit <= max(least, capacity // CAPACITY_SHARE)
        assert sizing_of(sizing.segment_bytes, capacity * 2).segment_limit >= sizing.segment_limit


@pytest.mark.parametrize(
    ("limit", "small"),
    [(16 * KIB, 16 * KIB), (96 * KIB, 96 * KIB), (128 * KIB, 96 * KIB), (576 * KIB, 96 * KIB), (6 * MIB, MIB)],
)
def test_small_segments(limit: int, small: int) -> None:
    sizing = sizing_of(2 * limit, 100 * GIB)
    assert sizing.small_segment == small
    assert sizing.full_at(tight=True) == small
    assert sizing.full_at(tight=False) == limit


def test_a_small_segment_is_worth_its_own_bytes(seed: int) -> None:
    for _, sizing, _ in sizings(seed):
        assert BARE_SEGMENT_BYTES < sizing.small_segment <= sizing.segment_limit
        assert sizing.small_segment in (sizing.segment_limit, 3 * PIECE_BYTES) or sizing.small_segment > 3 * PIECE_BYTES


def test_the_margin_is_two_segments() -> None:
    assert sizing_of(USUAL, 100 * GIB).margin == 2 * (5 * MIB + 48 * KIB)
    assert sizing_of(TINY, 0).margin == 2 * (16 * KIB + 48 * KIB)


# --- what sealing and moving take


@pytest.mark.parametrize(
    ("standing", "written", "merged"),
    [
        (0, 0, 0),  # nothing stands there
        (MIB, 0, BARE_SEGMENT_BYTES),  # no records: the schema
        (MIB, 80 * KIB, 90 * KIB + BARE_SEGMENT_BYTES),
        (64 * KIB, 80 * KIB, 64 * KIB),  # never more than there is
    ],
)
def test_merging(standing: int, written: int, merged: int) -> None:
    assert sizing_of(USUAL, 100 * GIB).merge_bytes(standing, written) == merged


def database_bytes(written: int) -> int:
    """Returns the bytes of records in a sealed segment, page by page: schema, leaves of the tree and inner pages."""
    leaves = -(-written // PAGE_BYTES)
    return (4 + leaves + -(-leaves // 200)) * PAGE_BYTES


def test_a_merged_segment_takes_no_more_than_was_said(seed: int) -> None:
    for chance, sizing, _ in sizings(seed):
        written = row_bytes(chance.choice([0, 10, 200, 990, INSIDE_MAX, 5000, 65535])) * chance.randrange(1000)
        assert database_bytes(written) <= sizing.merge_bytes(1 << 62, written)
        assert sizing.merge_bytes(written, written) <= written, "what the segment takes is the most"


def test_moving_takes_room_for_what_is_moved_and_what_is_sealed() -> None:
    sizing = sizing_of(12 * MIB, 100 * GIB)
    small, bare = sizing.small_segment, BARE_SEGMENT_BYTES
    assert small == MIB
    assert sizing.moved_bytes(0) == 0
    assert sizing.moved_bytes(100) == 101
    assert sizing.moved_bytes(8 * MIB) == 8 * MIB + 8 * bare
    assert sizing_of(TINY, 0).moved_bytes(32 * KIB) == 32 * KIB + 2 * bare
    fixed = bare + NEW_SEGMENT_BYTES + INDEX_BYTES
    assert sizing.least(Held(0, 0, 0)) == fixed
    assert sizing.least(Held(MIB, MIB, 0)) == fixed + sizing.moved_bytes(MIB) + MIB
    assert sizing.least(Held(6 * MIB, 6 * MIB, 1000)) == fixed + sizing.moved_bytes(6 * MIB) + 2 * MIB + 1000
    assert sizing.least(Held(8 * MIB, 2 * MIB, 0)) == fixed + sizing.moved_bytes(4 * MIB) + 2 * MIB, "pages half empty"
    assert sizing.least(Held(3 * MIB, 2 * MIB, 0)) == fixed + sizing.moved_bytes(3 * MIB) + 2 * MIB
    assert sizing.barely(Held(3 * MIB, 2 * MIB, 0)) == fixed + sizing.moved_bytes(2 * MIB) + 2 * MIB
    most = sizing.least(Held(6 * MIB + OVERSIZE_BYTES, 6 * MIB + OVERSIZE_BYTES, OVERSIZE_BYTES))
    assert sizing.least(Held(GIB, GIB, GIB)) == most


def test_what_segments_lack_and_what_they_have_too_much_is_added_up() -> None:
    sizing = sizing_of(12 * MIB, 100 * GIB)
    assert sizing.load(7, []) == Load(7, 0, 0, 0)
    full, half, dead = Held(6 * MIB, 6 * MIB, 0), Held(6 * MIB, 3 * MIB, 0), Held(2 * MIB, 0, 0)
    load = sizing.load(3, [full, half, full, dead])
    assert load.lacking == 2 * (sizing.moved_bytes(6 * MIB) - 6 * MIB)
    assert load.surplus == 6 * MIB - sizing.moved_bytes(3 * MIB) - BARE_SEGMENT_BYTES + 2 * MIB
    assert load.least == sizing.least(full)


def test_the_reserve_is_what_the_inequality_says() -> None:
    for segment_bytes, capacity in ((TINY, 0), (USUAL, 4 * MIB), (USUAL, 100 * GIB), (LARGE, 100 * GIB)):
        sizing = sizing_of(segment_bytes, capacity)
        small, limit, new = sizing.small_segment, sizing.segment_limit, NEW_SEGMENT_BYTES
        look = min(LOOK_BYTES, limit)
        least = sizing.least(Held(limit, limit, 0))
        assert sizing.enough(Load()) == least + small + new
        larger = Load(1000, 2 * least, 5 * MIB, MIB)
        assert sizing.enough(larger) == 2 * least + 5 * MIB + 2000 * CHANGE_BYTES + small + new
        many = 50_000_000
        assert sizing.enough(Load(many)) == least + 2 * COMMIT_BYTES + small + new
        for load in (Load(), larger, Load(many)):
            bare = sizing.enough(load) + 2 * small + look + KEY_BYTES * load.keys
            assert bare - BLOCK_BYTES < sizing.reserve(load) <= bare


def test_the_reserve_is_of_whole_blocks_and_grows_with_the_keys(seed: int) -> None:
    for chance, sizing, _ in sizings(seed):
        keys = chance.choice([0, 1, 85, 86, chance.randrange(10**8)])
        assert sizing.reserve(Load(keys)) % BLOCK_BYTES == 0
        assert sizing.reserve(Load(keys, merging=MIB)) == sizing.reserve(Load(keys)) + MIB
        assert sizing.reserve(Load(keys)) <= sizing.reserve(Load(keys + 1)) <= sizing.reserve(Load(keys)) + BLOCK_BYTES


class FullDisk:
    """A disk that another process has filled: only the reserve is left."""

    def __init__(self, free: int) -> None:
        self.free = free

    def take(self, size: int) -> None:
        self.free -= size
        assert self.free >= 0, f"{-self.free} bytes are missing"

    def seal(self, written: int) -> None:
        """Records stand in the WAL and in the database for a moment. Then the WAL goes, and what a new segment took."""
        self.take(database_bytes(written))
        self.free += written + NEW_SEGMENT_BYTES


class Mover:
    """Copies live bytes to small segments, one after the other. Each is sealed as late as may be: when the one after it
    is full."""

    def __init__(self, disk: FullDisk, sizing: Sizing) -> None:
        self._disk = disk
        self._full = sizing.small_segment
        self._written = self._full  # the current segment is full
        self._sealing = 0

    def move(self, alive: int) -> None:
        while alive:
            if self._written == self._full:
                self._disk.take(NEW_SEGMENT_BYTES)  # the next segment is made before it is needed
                self._written = 0
            written = min(self._full - self._written, alive)
            self._disk.take(written)
            self._written += written
            alive -= written
            if self._written == self._full:
                if self._sealing:
                    self._disk.seal(self._sealing)
                self._sealing = self._full


def held(sizing: Sizing, chance: random.Random) -> Held:
    """A segment, which one commit may have made larger than full."""
    standing = chance.choice([sizing.segment_limit, chance.randrange(sizing.segment_limit + OVERSIZE_BYTES)])
    return Held(standing, chance.choice([standing, chance.randrange(standing + 1)]), 0)


def test_the_reserve_suffices_to_seal_rotate_move_and_delete(seed: int) -> None:
    """When the disk is full the current segment is full as well, and any other one may have to be moved."""
    for chance, sizing, _ in sizings(seed):
        segments = [held(sizing, chance) for _ in range(chance.randrange(5))]
        load = sizing.load(chance.choice([0, 1, 1000, chance.randrange(10**7)]), segments)
        disk = FullDisk(sizing.reserve(load) + BLOCK_BYTES - 1)  # it is rounded down to whole blocks
        disk.take(KEY_BYTES * load.keys)
        disk.take(NEW_SEGMENT_BYTES)
        disk.seal(sizing.small_segment)
        mover = Mover(disk, sizing)
        for each in segments:
            mover.move(each.alive)
            disk.free += each.standing


def test_moving_takes_no_more_than_was_said(seed: int) -> None:
    """With more than `enough` one commit and one small segment fill up first, and then everything is moved."""
    for chance, sizing, _ in sizings(seed):
        segments = [held(sizing, chance) for _ in range(chance.randrange(5))]
        load = sizing.load(chance.randrange(10_000), segments)
        disk = FullDisk(sizing.enough(load))
        disk.take(NEW_SEGMENT_BYTES)
        commit = min(COMMIT_BYTES, CHANGE_BYTES * load.keys)
        disk.take(commit)
        disk.seal(commit)
        disk.free -= commit  # the old garbage went, the new one stays
        mover = Mover(disk, sizing)
        for each in segments:
            mover.move(each.alive)
            disk.free += each.standing


# --- puts


@pytest.mark.parametrize("size", [0, 1, 200, 990, INSIDE_MAX, INSIDE_MAX + 1, 65535, 1 << 24, 1 << 30])
def test_a_put_has_to_find_its_record_a_change_and_its_delete_twice(size: int) -> None:
    record, change = whole_bytes(size), row_bytes(64)
    assert record >= row_bytes(size + 20)
    assert Sizing(USUAL).of_put(size) == 2 * record + 4 * change + KEY_BYTES
    assert KEY_BYTES >= 2 * 24


def test_left_for_puts_at_its_edges() -> None:
    sizing = sizing_of(USUAL, GIB)
    around = 4 * 5 * MIB + 2 * NEW_SEGMENT_BYTES + 5 * INDEX_BYTES + 4 * BARE_SEGMENT_BYTES + sizing.reserve(Load())
    files = GIB - around - sizing.left_for_puts(GIB, 0, Load())
    assert 0 < files < (GIB - around) // 100, "puts take files, too"
    assert sizing.left_for_puts(around, 0, Load()) == 0
    assert sizing.left_for_puts(around - MIB, 0, Load()) < 0
    assert sizing.left_for_puts(0, 0, Load()) < 0, "there is no disk"
    assert sizing.left_for_puts(GIB, GIB // 2, Load()) < 0, "it is full of records"
    assert sizing.left_for_puts(GIB, 0, Load(10_000_000)) < 0, "it is full of what keys may need"


def test_each_live_byte_and_key_leaves_less_to_puts(seed: int) -> None:
    for chance, sizing, capacity in sizings(seed):
        live, keys = chance.randrange(capacity), chance.randrange(10**6)
        left = sizing.left_for_puts(capacity, live, Load(keys))
        assert left <= capacity
        assert sizing.left_for_puts(capacity, live + PAGE_BYTES, Load(keys)) < left
        assert sizing.left_for_puts(capacity, live, Load(keys + 1)) < left
        assert sizing.left_for_puts(capacity + MIB, live, Load(keys)) > left


def admit(sizing: Sizing, capacity: int, chance: random.Random) -> tuple[int, int]:
    """Puts as many jobs as are admitted, as log.py does. Returns their live bytes, and how many they are."""
    live = keys = slack = 0
    most = 2 * max(1, capacity // chance.choice([20, 200, 1000]))
    for _ in range(2000):
        size = chance.randrange(most)
        need = sizing.of_put(size)
        if slack < need:
            slack = sizing.granted(sizing.left_for_puts(capacity, live, Load(keys)), need)
        if slack < need:
            break
        slack -= need
        live += row_bytes(size)
        keys += 1
    return live, keys


# Bug: Between two looks at the disk only the records of puts were counted, and small segments take as much again.
def test_what_was_admitted_fits(seed: int) -> None:
    """Also when each job is changed, and as many bytes are garbage as are live just before compaction begins."""
    full = 0
    for chance, sizing, capacity in sizings(seed):
        live, keys = admit(sizing, capacity, chance)
        full += keys > 0
        live += keys * CHANGE_BYTES
        records = 2 * live
        files = live // sizing.segment_limit * BARE_SEGMENT_BYTES
        coming = 4 * (sizing.segment_limit + BARE_SEGMENT_BYTES) + 2 * NEW_SEGMENT_BYTES + INDEXES_MAX * INDEX_BYTES
        needed = records + files + coming + sizing.reserve(Load(keys))
        assert not keys or needed <= capacity + BLOCK_BYTES, (capacity, sizing.segment_limit, needed)
    assert full > ROUNDS // 3


@pytest.mark.parametrize("segment_bytes", [TINY, USUAL])
def test_what_is_granted_at_a_time(segment_bytes: int) -> None:
    sizing = sizing_of(segment_bytes, 100 * GIB)
    most = min(LOOK_BYTES, sizing.segment_limit)
    assert sizing.granted(GIB, 100) == sizing.granted(GIB, most) == most
    assert sizing.granted(GIB, most + 1) == most + 1, "a large put fits at once, or never"
    assert sizing.granted(99, 100) == sizing.granted(99, 1) == 99
    assert sizing.granted(-1, 100) == -1


def test_what_was_granted_before_others_filled_the_disk_is_in_the_reserve(seed: int) -> None:
    for chance, sizing, _ in sizings(seed):
        left, put = sizing.granted(1 << 60, 1), chance.choice([1, 100, 5000])
        puts = left // sizing.of_put(put)
        bare = sizing.enough(Load(puts)) + 2 * sizing.small_segment
        assert sizing.reserve(Load(puts)) > bare + KEY_BYTES * puts + sizing.of_put(put) * puts - BLOCK_BYTES


def test_of_budget() -> None:
    assert sizing_of(USUAL, 0).of_budget(0) == 0
    assert sizing_of(USUAL, 512 * KIB).of_budget(512 * KIB) == 0, "all of it is for what comes and goes"
    sizing = sizing_of(USUAL, 10 * GIB)
    assert sizing.of_budget(10 * GIB) == sizing.left_for_puts(10 * GIB, 0, Load()) // 2
    assert 0.49 < sizing.of_budget(10 * GIB) / (10 * GIB) < 0.5


def test_a_budget_admits_about_what_was_said(seed: int) -> None:
    for _, sizing, capacity in sizings(seed):
        size = max(1, capacity // 1000)
        puts = sizing.left_for_puts(capacity, 0, Load()) // sizing.of_put(size)
        assert puts <= 0 or puts * row_bytes(size) <= sizing.of_budget(capacity)


@pytest.mark.parametrize("segment_limit", [16 * KIB, 5 * MIB, 8 * MIB, 64 * MIB])
def test_zeros_are_written_ahead_where_there_is_room(segment_limit: int) -> None:
    sizing = sizing_of(2 * segment_limit, 100 * GIB)
    load = Load(7)
    needed = sizing.reserve(load) + 4 * segment_limit
    assert sizing.ahead(needed, 0, load) == sizing.ahead(needed + 100, 100, load) == min(segment_limit - 1, AHEAD_MAX)
    assert (
        sizing.ahead(needed - 1, 0, load) == sizing.ahead(needed, 1, load) == sizing.ahead(needed, 0, Load(1000)) == 0
    )
    assert sizing.ahead(0, 0, load) == 0


# --- compaction


def test_excess_at_its_edges() -> None:
    sizing = sizing_of(USUAL, 100 * GIB)
    limit, live = sizing.segment_limit, 100 * MIB
    most = 250 * MIB + 3 * limit

    def excess(used: int, unmerged: int = 0, oversize: int = 0, capacity: int = 100 * GIB) -> float:
        return sizing.excess(capacity, used, unmerged, oversize, live, Load(1000))

    assert sizing.excess(100 * GIB, 0, 0, 0, 0, Load()) == -3 * limit
    assert excess(most) == 0
    assert excess(most + 1) == 1
    assert excess(most - 10, unmerged=11) == 1
    assert excess(most + 10, oversize=9) == 1
    full = most + sizing.reserve(Load(1000)) + 5 * INDEX_BYTES + sizing.margin
    assert excess(most, capacity=full) == 0
    assert excess(most, capacity=full - 1) == 1


# Bug: Commits of a thousand changes passed the bound by less than a percent: what a commit itself takes was not
# counted.
def test_near_the_bound_at_its_edges() -> None:
    live = 100 * MIB
    large, small = sizing_of(USUAL, 100 * GIB), sizing_of(2 * 64 * KIB, 100 * GIB)
    for sizing, commit, moved in ((large, LOOK_BYTES, MOVE_BYTES), (small, 64 * KIB, 32 * KIB)):
        most = 3 * live + 6 * sizing.segment_limit + BOUND_BESIDE_BYTES - moved - commit
        assert not sizing.near_bound(most, live, commit // 2)
        assert sizing.near_bound(most + 1, live, commit // 2)
        assert sizing.near_bound(most, live - 1, commit // 2)
        assert sizing.near_bound(most, live, commit // 2 + 1)


def test_where_nothing_is_in_excess_the_directory_keeps_its_bound(seed: int) -> None:
    """docs/journal.md says three times the live bytes and three segments: the rest is for what comes meanwhile."""
    held = 0
    for chance, sizing, capacity in sizings(seed):
        used, live, keys = chance.randrange(capacity), chance.randrange(capacity), chance.randrange(10**4)
        excess = sizing.excess(capacity, used, 0, 0, live, Load(keys))
        held += excess > 0
        if excess <= 0:
            assert used <= 2.5 * live + 3 * sizing.segment_limit
            assert used + sizing.reserve(Load(keys)) + sizing.margin <= capacity
    assert 0 < held < ROUNDS


def test_garbage_is_worth_moving_for_when_it_is_more_than_half() -> None:
    sizing = sizing_of(USUAL, 100 * GIB)
    bare, live = BARE_SEGMENT_BYTES, 50 * MIB
    needed = 10 + 4
    assert not sizing.is_worth(0, 0, 0)
    assert not sizing.is_worth(bare, 0, 1), "an empty segment is no garbage"
    assert sizing.is_worth(bare + 1, 0, 1)
    assert sizing.is_worth(5 * bare, 0, 5), "a fifth empty segment is"
    assert not sizing.is_worth(2 * live + needed * bare, live, 100)
    assert sizing.is_worth(2 * live + needed * bare + 1, live, 100)
    assert not sizing.is_worth(2 * live + 3 * bare, live, 3)
    assert sizing.is_worth(2 * live + 3 * bare + 1, live, 3)


def test_compaction_ends(seed: int) -> None:
    """After everything was moved there is nothing worth moving, and whatever is moved for frees as much again."""
    for chance, sizing, _ in sizings(seed):
        live = chance.randrange(50 * sizing.segment_limit)
        segments = -(-live // sizing.segment_limit)
        standing = live + segments * BARE_SEGMENT_BYTES
        assert not sizing.is_worth(standing, live, segments)
        standing = chance.randrange(4 * live + 1)
        if sizing.is_worth(standing, live, segments):
            assert standing - live > live


def test_what_a_full_disk_is_compacted_for() -> None:
    sizing = sizing_of(USUAL, 100 * GIB)
    small = sizing.small_segment
    assert not sizing.is_worth_on_a_full_disk(Load(), 0)
    assert not sizing.is_worth_on_a_full_disk(Load(surplus=small), 0)
    assert sizing.is_worth_on_a_full_disk(Load(surplus=small + 1), 0)
    assert not sizing.is_worth_on_a_full_disk(Load(surplus=small - MIB // 2), MIB // 2)
    assert sizing.is_worth_on_a_full_disk(Load(surplus=small - MIB // 2), MIB // 2 + 1)
    assert not sizing.is_worth_on_a_full_disk(Load(lacking=9 * small), small), "that is reserved"


def test_a_full_disk_without_garbage_is_left_alone(seed: int) -> None:
    """Also after everything has been moved to small segments, however these fill up."""
    for chance, sizing, _ in sizings(seed):
        full = chance.randrange(sizing.small_segment // 2, sizing.segment_limit + 1)
        segments = [Held(full + BARE_SEGMENT_BYTES, full, 0)] * chance.randrange(100)
        assert not sizing.is_worth_on_a_full_disk(sizing.load(0, segments), 0)
