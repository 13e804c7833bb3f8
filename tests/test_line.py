"""The waiting line of one tube, by cases and against a plain list."""

from __future__ import annotations

import random

from geventstalk.core.line import Line


def test_a_line_without_waiters() -> None:
    line = Line()
    assert not line.entries and len(line) == 0
    line.remove(7)
    assert line.waits() == {}


def test_first_come_first_served() -> None:
    line = Line()
    for client, wait in ((5, 3), (1, 1), (9, 2)):
        line.add(client, wait)
    assert line.waits() == {1: 1, 9: 2, 5: 3}
    assert line.take_first() == (1, 1)
    line.add(1, 8)
    assert line.take_first() == (9, 2)
    assert line.waits() == {5: 3, 1: 8}


def test_a_client_leaves_from_wherever_it_stands() -> None:
    line = Line()
    for client in range(1, 6):
        line.add(client, client)
    line.remove(3)
    line.remove(1)
    assert line.waits() == {2: 2, 4: 4, 5: 5}


def test_random_against_a_list(seed: int) -> None:
    draw = random.Random(seed)
    line, model = Line(), dict[int, int]()
    for wait in range(1, 3_000):
        client = draw.randrange(1, 40)
        first = min(model, key=lambda each: (model[each], each), default=0)
        assert len(line) == len(model)
        if client not in model:
            line.add(client, wait)
            model[client] = wait
        elif draw.random() < 0.4:
            line.remove(client)
            del model[client]
        else:
            assert line.take_first() == (first, model.pop(first))
            if draw.random() < 0.5:
                line.add(first, wait)
                model[first] = wait
    assert line.waits() == model
