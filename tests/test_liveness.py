"""The table of live keys against a dict of dicts, and its pages at their edges."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from journal.liveness import Liveness

PAGE = 64  # keys of a page; nothing outside the table may notice


class Naive:
    """The same table, as slow and plain as can be: key to [segment, bytes] of its whole record and of its change."""

    def __init__(self) -> None:
        self.wholes: dict[int, tuple[int, int]] = {}
        self.changes: dict[int, tuple[int, int]] = {}

    def whole(self, key: int, segment: int, size: int) -> None:
        self.wholes[key] = (segment, size)
        self.changes.pop(key, None)

    def change(self, key: int, segment: int, size: int) -> None:
        if key in self.wholes:
            self.changes[key] = (segment, size)

    def delete(self, key: int) -> None:
        self.wholes.pop(key, None)
        self.changes.pop(key, None)

    def bytes_in(self, segment: int) -> int:
        return sum(size for held in (self.wholes, self.changes) for at, size in held.values() if at == segment)

    def keys_in(self, segment: int) -> list[int]:
        return [key for key in self.wholes if segment in (self.wholes[key][0], self.changes.get(key, (0, 0))[0])]

    def agrees(self, live: Liveness, segments: int) -> None:
        assert live.keys == len(self.wholes)
        assert live.total_bytes == sum(self.bytes_in(segment) for segment in range(1, segments + 1))
        for segment in range(1, segments + 1):
            assert live.bytes_in(segment) == self.bytes_in(segment), segment
            assert sorted(live.keys_in(segment)) == sorted(self.keys_in(segment)), segment


@pytest.mark.parametrize("round", range(4))
def test_random_histories_against_a_dict(seed: int, round: int) -> None:
    draw = random.Random(seed + round)
    live, naive = Liveness(), Naive()
    keys = [*range(1, 40), *range(PAGE - 3, PAGE + 3), 2**40, 2**63 - 1]
    segments = 6
    for step in range(2000):
        key, segment = draw.choice(keys), draw.randint(1, segments)
        size = draw.choice([24, 100, 65_600, 2**31])
        kind = draw.choice(["whole", "change", "change", "delete"])
        for table in (live, naive):
            if kind == "delete":
                table.delete(key)
            elif kind == "whole":
                table.whole(key, segment, size)
            else:
                table.change(key, segment, size)
        assert live.segment_of(key) == naive.wholes.get(key, (0, 0))[0]
        if not step % 100:
            naive.agrees(live, segments)
    naive.agrees(live, segments)


def test_changes_and_deletes_of_what_is_not_live_count_for_nothing() -> None:
    live = Liveness()
    live.change(1, 1, 50)
    live.delete(1)
    live.whole(2, 1, 50)
    live.delete(2)
    live.delete(2)
    live.change(2, 1, 50)
    assert (live.keys, live.total_bytes, live.bytes_in(1)) == (0, 0, 0)
    assert live.segment_of(1) == live.segment_of(2) == 0


def test_a_moved_key_pins_only_the_segment_it_moved_to() -> None:
    """As compaction does: the whole record anew, the change that stood elsewhere dead with the old one."""
    live = Liveness()
    live.whole(1, 1, 100)
    live.change(1, 2, 30)
    assert live.keys_in(1) == live.keys_in(2) == [1]
    live.whole(1, 3, 110)
    assert live.keys_in(1) == live.keys_in(2) == []
    assert live.keys_in(3) == [1]
    assert [live.bytes_in(segment) for segment in (1, 2, 3)] == [0, 0, 110]


def test_many_keys_that_came_and_went_leave_no_table_behind() -> None:
    live = Liveness()
    live.whole(1, 1, 50)
    for key in range(2, 20 * PAGE):
        live.whole(key, 1, 50)
        live.delete(key)
    assert len(live._pages) == 1
    assert (live.keys, live.total_bytes) == (1, 50)


def test_segments_that_came_and_went_leave_nothing_behind() -> None:
    """Also one that nothing was written behind before it went."""
    live = Liveness()
    for segment in range(1, 10):
        live.whole(1, segment, 50)
        live.whole(2, segment, 50)
        live.delete(2)
        if segment % 2:
            live.delete(1)
        for gone in range(1, segment + segment % 2):
            live.forget(gone)
    live.whole(1, 10, 50)
    assert live._others == {} and live.bytes_in(10) == live.total_bytes == 50


@pytest.mark.long
def test_a_lone_key_holds_on_to_little() -> None:
    """Keys that stay for long, each among thousands that went."""
    live = Liveness()
    count = 200
    tracemalloc.start()
    try:
        for key in range(count * 1024):
            live.whole(key, 1, 50)
            if key % 1024:
                live.delete(key)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{taken / count:.0f} bytes each")
    assert live.keys == count
    assert taken / count < 3000


def test_the_last_segments_that_there_can_be() -> None:
    live = Liveness()
    for segment in (2**31 - 1, 2**31, 2**32 - 1):
        live.whole(7, segment, 2**31)
        live.change(7, segment, 2**32 - 1)
        assert live.segment_of(7) == segment
        assert live.bytes_in(segment) == live.total_bytes == 2**31 + 2**32 - 1
        assert live.change_bytes == 2**32 - 1
        assert live.keys_in(segment) == [7]
        assert live.keys_in_any({segment}) == {7}
    live.delete(7)
    assert (live.keys, live.total_bytes, live.change_bytes) == (0, 0, 0)
