"""The heap from which any entry can leave: by cases, and against a sorted list."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from geventstalk.core.heap import EMPTY, Heap


def contents(heap: Heap) -> list[int]:
    """Takes everything out, in order."""
    taken = []
    while (entry := heap.pop()) != EMPTY:
        taken.append(entry)
    assert len(heap) == 0 and heap.first() == EMPTY
    return taken


def filled(*entries: int) -> Heap:
    heap = Heap()
    for entry in entries:
        heap.push(entry)
    return heap


def test_empty() -> None:
    heap = Heap()
    assert len(heap) == 0
    assert heap.first() == EMPTY
    assert heap.pop() == EMPTY
    assert heap.smallest(10) == []


def test_order() -> None:
    heap = filled(5, 1, 2**100, 0, 3)
    assert heap.first() == 0
    assert len(heap) == 5
    assert heap.smallest(3) == [0, 1, 3]
    assert len(heap) == 5
    assert contents(heap) == [0, 1, 3, 5, 2**100]


def test_every_entry_can_leave() -> None:
    entries = [(7 * number) % 32 for number in range(32)]
    for gone in entries:
        heap = filled(*entries)
        heap.discard(gone)
        assert len(heap) == 31
        assert heap.first() == (1 if gone == 0 else 0)
        assert contents(heap) == [entry for entry in range(32) if entry != gone]


def test_the_first_one_is_never_one_that_left() -> None:
    heap = filled(*range(20))
    for gone in (3, 2, 1, 0):  # the top leaves last, and what left before must not surface
        heap.discard(gone)
    assert heap.first() == 4
    heap = filled(*range(20))
    for gone in (1, 2, 3):
        heap.discard(gone)
    assert heap.pop() == 0
    assert heap.first() == 4


def test_what_left_can_come_back() -> None:
    heap = filled(*range(10))
    for _ in range(3):
        heap.discard(5)
        assert len(heap) == 9
        assert 5 not in heap.smallest(10)
        heap.push(5)
        assert len(heap) == 10
    heap.discard(0)
    heap.push(0)
    assert contents(heap) == list(range(10))


def test_the_only_entry_can_leave() -> None:
    heap = filled(9)
    heap.discard(9)
    assert len(heap) == 0 and heap.first() == EMPTY
    heap.push(9)
    assert contents(heap) == [9]


def test_leaves_no_room_to_those_who_left() -> None:
    """A tube whose jobs are all taken by id must not keep an entry for each of them."""
    heap = filled(*range(10_000))
    for gone in range(1, 10_000):
        heap.discard(gone)
    assert len(heap) == 1
    assert len(heap._entries) + len(heap._gone) < 200
    assert contents(heap) == [0]


def test_random_against_a_sorted_list(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        heap, model = Heap(), list[int]()
        grows = draw.uniform(0.3, 0.7)
        for _ in range(1_000):
            choice = draw.random()
            if choice < grows or not model:
                entry = draw.randrange(400) << 64 | draw.randrange(3)
                if entry not in model:
                    heap.push(entry)
                    model.append(entry)
                    model.sort()
            elif choice < grows + 0.2:
                assert heap.pop() == model.pop(0)
            else:
                heap.discard(model.pop(draw.randrange(len(model))))
            assert len(heap) == len(model)
            assert heap.first() == (model[0] if model else EMPTY)
        assert heap.smallest(len(model)) == model
        assert contents(heap) == model


@settings(deadline=None, database=None, print_blob=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30))))
def test_any_sequence(steps: list[tuple[bool, int]]) -> None:
    """Each step pushes an entry that is not there, or discards one that is."""
    heap, model = Heap(), set[int]()
    for pops, entry in steps:
        if pops:
            assert heap.pop() == min(model, default=EMPTY)
            model.discard(min(model, default=EMPTY))
        elif entry in model:
            heap.discard(entry)
            model.remove(entry)
        else:
            heap.push(entry)
            model.add(entry)
        assert heap.first() == min(model, default=EMPTY)
        assert len(heap) == len(model)
    assert contents(heap) == sorted(model)
