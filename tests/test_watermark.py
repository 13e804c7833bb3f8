"""The file that says how far a journal is synced: several threads move it, and it moves forward only."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from journal.sqlite.files import read_watermark
from journal.sqlite.watermark import Watermark


# Bug: A sync that ended late wrote an older mark over a newer one: damage of acknowledged records then passed for a
# torn tail.
def test_it_never_goes_back(tmp_path: Path) -> None:
    watermark = Watermark(str(tmp_path), 6)
    assert read_watermark(str(tmp_path)) == (6, 0)
    for said, stands in [
        ((6, 3), (6, 3)),
        ((8, 28), (8, 28)),
        ((6, 10), (8, 28)),
        ((8, 27), (8, 28)),
        ((9, 0), (9, 0)),
    ]:
        watermark.advance(*said)
        assert read_watermark(str(tmp_path)) == stands
    watermark.close()


def test_threads_leave_the_largest(tmp_path: Path, seed: int) -> None:
    """The thread that asks last is not the one that writes last: each has a part of all positions, in any order."""
    draw = random.Random(seed)
    positions = [(segment, records) for segment in range(1, 40) for records in range(50)]
    draw.shuffle(positions)
    watermark = Watermark(str(tmp_path), 1)
    seen: list[tuple[int, int]] = []

    def run(part: list[tuple[int, int]]) -> None:
        for position in part:
            watermark.advance(*position)

    threads = [threading.Thread(target=run, args=(positions[at::4],)) for at in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = read_watermark(str(tmp_path))
        if found != (0, 0):  # else it was read while it was written
            seen.append(found)
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    assert read_watermark(str(tmp_path)) == max(positions)
    watermark.close()


def test_what_a_start_finds_belongs_to_segments_that_were_read(tmp_path: Path) -> None:
    Watermark(str(tmp_path), 99).close()
    watermark = Watermark(str(tmp_path), 3)
    assert read_watermark(str(tmp_path)) == (3, 0)
    watermark.close()


def test_after_its_last_word_it_says_nothing(tmp_path: Path) -> None:
    """A sync that ends later speaks of a segment that is gone."""
    watermark = Watermark(str(tmp_path), 3)
    watermark.end(2, 17)
    watermark.advance(3, 1)
    watermark.close()
    watermark.end(1, 1)
    assert read_watermark(str(tmp_path)) == (2, 17)
