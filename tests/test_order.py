"""Pairs of integers in order, any of which can leave: by cases, and against a sorted list."""

from __future__ import annotations

import random
import sys
from bisect import bisect_left
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geventstalk._build import BUILD
from geventstalk.core import packed, plain
from geventstalk.core.order import EMPTY
from geventstalk.core.order import Order as Chosen

LAST = 7 * (2**63 - 1) + 6
"""The greatest rank, and an id."""


class Order:
    """An order of plain numbers: a seventh of each is the rank, the remainder is the id."""

    kind: ClassVar[Any]

    def __init__(self) -> None:
        self.pairs = self.kind()
        self.check = self.pairs.check
        self.clear = self.pairs.clear

    def __len__(self) -> int:
        return len(self.pairs)

    def push(self, entry: int) -> None:
        self.pairs.push(*divmod(entry, 7))

    def discard(self, entry: int) -> None:
        self.pairs.discard(*divmod(entry, 7))

    def first(self) -> int:
        rank, id = self.pairs.first_rank(), self.pairs.first()
        assert (rank == EMPTY) == (id == EMPTY)
        return EMPTY if rank == EMPTY else rank * 7 + id

    def pop(self) -> int:
        entry = self.first()
        id = self.pairs.pop()
        assert id == (EMPTY if entry == EMPTY else entry % 7)
        return entry

    def smallest(self, count: int) -> list[int]:
        found = self.pairs.entries(count)
        assert [id for _, id in found] == self.pairs.smallest(count)
        return [rank * 7 + id for rank, id in found]


@pytest.fixture(scope="module", params=[packed.Order, plain.Order], ids=["packed", "plain"], autouse=True)
def kind(request: pytest.FixtureRequest) -> type:
    """Both classes, whichever build this is."""
    Order.kind = request.param
    assert isinstance(Order.kind, type)
    return Order.kind


@pytest.fixture
def many(kind: type) -> int:
    """A million, or what packed memory can do in a second of interpreted Python."""
    return 10_000 if kind is packed.Order and BUILD == "pure" else 1_000_000


def test_each_build_has_its_own(kind: type) -> None:
    assert (Chosen is kind) == ((kind is packed.Order) == (BUILD == "compiled"))


def contents(order: Order) -> list[int]:
    """Takes everything out, in order."""
    taken = []
    while (entry := order.pop()) != EMPTY:
        taken.append(entry)
    assert len(order) == 0 and order.first() == EMPTY
    return taken


def filled(*entries: int) -> Order:
    order = Order()
    for entry in entries:
        order.push(entry)
    return order


def test_empty() -> None:
    order = Order()
    assert len(order) == 0
    assert order.first() == EMPTY
    assert order.pop() == EMPTY
    assert order.smallest(10) == []


def test_order() -> None:
    order = filled(5, 1, LAST, 0, 3)
    assert order.first() == 0
    assert len(order) == 5
    assert order.smallest(3) == [0, 1, 3]
    assert len(order) == 5
    assert contents(order) == [0, 1, 3, 5, LAST]


def test_every_entry_can_leave() -> None:
    entries = [(7 * number) % 32 for number in range(32)]
    for gone in entries:
        order = filled(*entries)
        order.discard(gone)
        assert len(order) == 31
        assert order.first() == (1 if gone == 0 else 0)
        assert contents(order) == [entry for entry in range(32) if entry != gone]


def test_the_first_one_is_never_one_that_left() -> None:
    order = filled(*range(20))
    for gone in (3, 2, 1, 0):  # the top leaves last, and what left before must not surface
        order.discard(gone)
    assert order.first() == 4
    order = filled(*range(20))
    for gone in (1, 2, 3):
        order.discard(gone)
    assert order.pop() == 0
    assert order.first() == 4


def test_what_left_can_come_back() -> None:
    order = filled(*range(10))
    for _ in range(3):
        order.discard(5)
        assert len(order) == 9
        assert 5 not in order.smallest(10)
        order.push(5)
        assert len(order) == 10
    order.discard(0)
    order.push(0)
    assert contents(order) == list(range(10))


def test_the_only_entry_can_leave() -> None:
    order = filled(9)
    order.discard(9)
    assert len(order) == 0 and order.first() == EMPTY
    order.push(9)
    assert contents(order) == [9]


def test_the_neighbours_of_any_number(seed: int) -> None:
    draw = random.Random(seed)
    order = Order()
    entries: list[int] = []
    for count in (0, 1, 3, 600, 3000):
        for entry in draw.sample(range(10_000), count):
            if entry not in entries:
                order.push(entry)
                entries.append(entry)
        for entry in draw.sample(entries, len(entries) // 3):
            order.discard(entry)
            entries.remove(entry)
        entries.sort()
        for at in [0, 10_000, *draw.sample(range(10_001), 300)]:
            place = bisect_left(entries, at)
            assert order.pairs.at_least(*divmod(at, 7)) == (entries[place] % 7 if place < len(entries) else EMPTY)
            place = bisect_left(entries, at + 1)
            assert order.pairs.at_most(*divmod(at, 7)) == (entries[place - 1] % 7 if place else EMPTY)


# Bug: A pop behind a million entries that had left took a second.
@pytest.mark.slow
@pytest.mark.parametrize("upwards", [True, False])
def test_nothing_is_left_of_a_million_that_left(upwards: bool, many: int) -> None:
    """In order or not: entries that come after them do not find their places."""
    order = filled(*range(many + 2))
    for gone in range(1, many + 1) if upwards else range(many, 0, -1):
        order.discard(gone)
    order.check()
    assert len(order.pairs._runs or []) <= 2
    assert order.pop() == 0
    assert order.pop() == many + 1
    assert order.pop() == EMPTY


@pytest.mark.slow
def test_no_run_grows(seed: int, many: int) -> None:
    """So that no push, pop or discard moves more than a run, whatever came before it."""
    draw = random.Random(seed)
    numbers = draw.sample(range(1_000_000), many // 20)
    order = filled(*numbers)
    order.check()
    for gone in draw.sample(numbers, many // 25):
        order.discard(gone)
    order.check()
    assert order.smallest(5) == order.smallest(50_000)[:5]
    order.clear()
    order.check()
    assert contents(order) == []


@pytest.mark.slow
def test_random_against_a_sorted_list(seed: int, many: int) -> None:
    draw = random.Random(seed)
    for _ in range(20 if many > 10_000 else 4):
        order, model = Order(), list[int]()
        grows = draw.uniform(0.3, 0.9)
        for _ in range(5_000):
            choice = draw.random()
            if choice < grows or not model:
                entry = draw.randrange(4_000) * 7 + draw.randrange(3)
                if (at := bisect_left(model, entry)) == len(model) or model[at] != entry:
                    order.push(entry)
                    model.insert(at, entry)
            elif choice < grows + 0.2:
                assert order.pop() == model.pop(0)
            else:
                order.discard(model.pop(draw.randrange(len(model))))
            assert len(order) == len(model)
            assert order.first() == (model[0] if model else EMPTY)
        order.check()
        assert order.smallest(len(model)) == model
        assert contents(order) == model


@settings(deadline=None, database=None, print_blob=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30))))
def test_any_sequence(steps: list[tuple[bool, int]]) -> None:
    """Each step pushes an entry that is not there, or discards one that is."""
    order, model = Order(), set[int]()
    for pops, entry in steps:
        if pops:
            assert order.pop() == min(model, default=EMPTY)
            model.discard(min(model, default=EMPTY))
        elif entry in model:
            order.discard(entry)
            model.remove(entry)
        else:
            order.push(entry)
            model.add(entry)
        assert order.first() == min(model, default=EMPTY)
        assert len(order) == len(model)
    assert contents(order) == sorted(model)


def memory(order: Order) -> int:
    """The integers for which there is room."""
    runs = order.pairs._runs or [order.pairs._head]
    if Order.kind is packed.Order:
        return sum(len(run.items) for run in runs)
    return sum(sys.getsizeof(run) - sys.getsizeof([]) for run in runs) // 8


# Bug: Few entries that stayed of many kept all runs of an order.
@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 3, 100])
def test_memory_is_given_back(kept: int) -> None:
    """Entries leave from the front or from everywhere: few entries have the memory of few."""
    for step in (1, 10_000 // kept):
        order = filled(*range(10_000))
        for gone in range(10_000):
            if gone % step if step > 1 else gone < 10_000 - kept:
                order.discard(gone)
        order.check()
        assert len(order) in (kept, kept + 1)
        assert memory(order) <= 64 * len(order.pairs._runs or [1]) + 16 * kept
        if Order.kind is packed.Order:
            assert len(order.pairs._runs or [1]) <= 3, "runs of few entries become one"
    for _ in range(2):
        order = filled(*range(500))
        while order.pop() != EMPTY:
            order.check()
        assert memory(order) <= 64


def test_an_entry_back_at_the_front_moves_no_other(kind: type) -> None:
    """A release after a reserve: there is room in front. Otherwise it moves all of a run."""
    if kind is plain.Order:
        pytest.skip("the C library moves them")
    order = filled(*range(700, 1200))
    head = order.pairs._head
    behind = head.end
    for back in (False, True, True, False):
        entry = order.pop()
        order.push(entry - back)
        assert head is order.pairs._head and head.end == behind


@pytest.mark.skipif(BUILD != "compiled", reason="interpreted, it takes memory for each step")
def test_an_entry_leaves_although_there_is_no_memory_to_tidy_up(kind: type) -> None:
    if kind is plain.Order:
        pytest.skip("the C library gives memory back")
    starve = pytest.importorskip("_testcapi")
    pairs = packed.Order()
    for id in range(200):
        pairs.push(0, id)
    left = 200
    starve.set_nomemory(0)
    try:
        while left > 1:
            pairs.pop()
            left -= 1
    finally:
        starve.remove_mem_hooks()
    assert len(pairs) == 1 and pairs.pop() == 199
