"""JobTable: jobs by id in pages, which come and go with their jobs."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest

from geventstalk._build import BUILD
from geventstalk.core.job import U64_MAX, Job
from geventstalk.core.jobtable import JobTable
from geventstalk.core.order import EMPTY

PAGE = 64


def job(id: int) -> Job:
    return Job(id, 1, 0, 0, 1)


def test_empty() -> None:
    table = JobTable()
    assert len(table) == 0
    assert list(table) == []
    for id in (0, 1, PAGE, U64_MAX):
        assert table.get(id) is None


def test_borders_of_pages() -> None:
    table = JobTable()
    jobs = {id: job(id) for id in (0, 1, PAGE - 1, PAGE, 2 * PAGE - 1, 2 * PAGE, 2**32, 2**63 - 1)}
    for one in jobs.values():
        table.add(one)
    assert len(table) == len(jobs)
    for id, one in jobs.items():
        assert table.get(id) is one
    for id in (2, PAGE + 1, 3 * PAGE, 2**32 + 1, U64_MAX - 1):
        assert table.get(id) is None
    for id in jobs:
        table.remove(id)
        assert table.get(id) is None
    assert len(table) == 0


def test_keeps_no_page_without_jobs() -> None:
    """Ids only grow; a server that has seen a billion jobs must not keep a page for each 64 of them."""
    table = JobTable()
    for id in range(1, 20 * PAGE):
        table.add(job(id))
        table.remove(id)
    assert len(table) == 0 and len(table._pages) <= 1
    table.add(job(5))
    assert [one.id for one in table] == [5]


# Bug: Each old job kept a page of 1,024 ids (25 KB) among millions that had gone.
@pytest.mark.long
def test_a_lone_job_holds_on_to_little() -> None:
    """Jobs that stay for long, each among thousands that went."""
    table = JobTable()
    count = 200
    tracemalloc.start()
    try:
        for id in range(count * 1024):
            table.add(job(id))
            if id % 1024:
                table.remove(id)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{taken / count:.0f} bytes each")
    assert len(table) == count
    assert taken / count < 2000


def test_iterating_survives_changes() -> None:
    table = JobTable()
    for id in range(3 * PAGE):
        table.add(job(id))
    for one in table:
        table.remove(one.id)
    assert len(table) == 0


@pytest.mark.parametrize("slots", [1, 2, PAGE])
def test_random_against_a_dict(seed: int, slots: int) -> None:
    """With few jobs in a page, pages come and go all the time."""
    draw = random.Random(seed)
    table, model = JobTable(), dict[int, Job]()
    for _ in range(5_000):
        id = draw.randrange(3) * PAGE + draw.randrange(slots)
        if id in model:
            table.remove(id)
            del model[id]
        else:
            model[id] = job(id)
            table.add(model[id])
        assert len(table) == len(model)
        assert table.get(id) is model.get(id)
        assert all(page.count or number == max(table._pages) for number, page in table._pages.items())
        table._numbers.check()
        assert table._numbers.smallest(len(model) + 1) == sorted(table._pages)
    assert {one.id: one for one in table} == model


def test_a_look_from_any_id_on(seed: int) -> None:
    """Page by page, up and down, all jobs from an id on come in order, whatever the gaps."""
    draw = random.Random(seed)
    table = JobTable()
    ids = sorted(
        {
            draw.choice((draw.randrange(300), draw.randrange(2000) * PAGE, 2**50 + draw.randrange(99)))
            for _ in range(900)
        }
    )
    draw.shuffle(ids)
    for id in ids:
        table.add(job(id))
    for id in ids[600:]:
        table.remove(id)
    left = sorted(ids[:600])
    for start in [0, 1, PAGE, 2**50, 2**63 - 1, *draw.sample(ids, 50)]:
        up: list[int] = []
        at = start
        while found := table.up_from(at):
            assert len({one.id // PAGE for one in found}) == 1
            up += [one.id for one in found]
            at = up[-1] + 1
        assert up == [id for id in left if id >= start]
        down: list[int] = []
        at = start
        while at >= 0 and (found := table.down_from(at)):
            down += [one.id for one in found]
            at = down[-1] - 1
        assert down == [id for id in reversed(left) if id <= start]


def test_a_recount_leaves_what_is_true() -> None:
    table = JobTable()
    for id in (1, 5 * PAGE, 9 * PAGE, 9 * PAGE + 1):
        table.add(job(id))
    table._pages[9].count = 7
    table._pages[5].slots[0] = None
    table._numbers.discard(0, 9)
    table.recount()
    assert [one.id for one in table.up_from(0)] == [1]
    assert [one.id for one in table.up_from(2)] == [9 * PAGE, 9 * PAGE + 1]
    assert table.up_from(9 * PAGE + 2) == [] and len(table) == 3
    for id in (1, 9 * PAGE, 9 * PAGE + 1):
        table.remove(id)
    table.add(job(20 * PAGE))
    assert list(table._pages) == [20]


def facts(one: Job) -> tuple[object, ...]:
    return (
        one.id,
        one.tube,
        one.pri,
        one.delay_s,
        one.ttr_s,
        one.rank,
        one.state,
        one.body,
        one.since_ns,
        one.created_ns,
    )


class StarvedOnce(dict[int, Any]):
    """Pages, without memory for the first new one."""

    starved = True

    def __setitem__(self, number: int, page: Any) -> None:
        if self.starved and number not in self:
            self.starved = False
            raise MemoryError
        super().__setitem__(number, page)


@pytest.mark.skipif(BUILD == "compiled", reason="a compiled table asks no class of ours for memory")
def test_without_memory_for_a_page_no_job_is_lost_in_a_repack() -> None:
    table = JobTable()
    for number in range(500):
        table.add(job(number))
    pages = table._pages = StarvedOnce(table._pages)
    assert table.repack(0, 100) == EMPTY
    assert not pages.starved and [one.id for one in table.in_order()] == list(range(500))


def test_repacked_jobs_are_the_same_in_another_place(seed: int) -> None:
    draw = random.Random(seed)
    table = JobTable()
    for number in range(2000):
        table.add(job(number))
    for number in draw.sample(range(2000), 1700):
        table.remove(number)
    for one in table:
        one.body = b"x" * draw.choice((1, 100, 5000))
        one.rank, one.state = draw.randrange(2**40), draw.randrange(1, 5)
    del one
    left = {one.id: facts(one) for one in table}
    places = {one.id: id(one) for one in table}
    held = [found for number in [*left][:20] if (found := table.get(number)) is not None]
    assert (table.count, table.most) == (300, 1984)
    at, slices = 0, 0
    while at != EMPTY:
        before = at
        at = table.repack(at, 4)
        slices += 1
        assert at == EMPTY or before < at
        table.add(job(3000 + slices))  # others go on meanwhile
        table.remove(3000 + slices)
    assert slices == -(-len(table._pages) // 4)
    assert {one.id: facts(one) for one in table} == left and len(table) == 300
    assert all(table.get(one.id) is one for one in held), "a reference to it is left"
    stayed = {one.id for one in table if id(one) == places[one.id]}
    assert len(stayed) < 40  # some took the places of others
    assert sorted(left) == [one.id for one in table.in_order()]
    for number in left:
        table.remove(number)
    assert len(table) == table.count == 0


def test_the_most_jobs_at_once() -> None:
    table = JobTable()
    for id in range(640):
        table.add(job(id))
    for id in range(640):
        table.remove(id)
    table.add(job(1000))
    assert (table.count, table.most) == (1, 576)
    table.recount()
    assert table.count == 1
