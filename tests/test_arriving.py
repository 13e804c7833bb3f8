"""geventstalk/wire/arriving.py: a body in parts is the body, and takes hardly more memory than its bytes."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from geventstalk.wire.arriving import JOINED_MAX, Arriving


def bring(parts: list[bytes]) -> bytes:
    arriving = Arriving()
    for part in parts[:-1]:
        arriving.add(part)
    return arriving.end(parts[-1])


@pytest.mark.parametrize("size", [2, 5000, 100_000, JOINED_MAX, JOINED_MAX + 1, 2 * JOINED_MAX])
def test_the_parts_of_a_body_are_the_body(size: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        body = rng.randbytes(size)
        cuts = sorted(rng.sample(range(1, size), min(size - 1, rng.choice([1, 2, 40]))))
        parts = [body[begin:end] for begin, end in zip([0, *cuts], [*cuts, size], strict=True)]
        same = bring(parts) == body  # pytest would show both
        assert same


@pytest.mark.parametrize(
    ("part_bytes", "count"), [(2, 100_000), (4095, 500), (1 << 16, 32), (1 << 16, 512)], ids=lambda each: str(each)
)
def test_what_has_come_takes_its_bytes_of_memory(part_bytes: int, count: int) -> None:
    """Otherwise a client that sends a body in pieces of two bytes would take thirty times of what it has sent."""
    arriving = Arriving()
    gc.collect()
    tracemalloc.start()
    for number in range(count):
        arriving.add(bytes([number % 251]) * part_bytes)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < part_bytes * count * 1.2


def test_a_large_body_is_in_memory_once() -> None:
    arriving = Arriving()
    tracemalloc.start()
    for _ in range(1024):
        arriving.add(bytes(1 << 16))
    tracemalloc.reset_peak()
    body = arriving.end(b"\r\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(body) == (1 << 26) + 2 and peak < 1.2 * len(body)
