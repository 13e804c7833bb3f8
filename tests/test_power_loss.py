"""Loss of power: a driver's system calls are recorded, and the directory is rebuilt as it may be found at any moment.

What a completed fsync covers is there, of the rest any part (tests/support/faults.py has the model). Whatever comes
back must be read without a finding, hold all that was promised, and nothing that was not written.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from journal import Journal
from tests.support import for_change
from tests.support.faults import (
    Life,
    Model,
    Recording,
    check_life,
    check_power_loss,
    fold,
    read,
    read_sound,
    run_driver,
    strace_problem,
)

pytestmark = pytest.mark.skipif(bool(strace_problem()), reason=strace_problem() or "strace works")

LIVES = 2
POINTS = 20


@pytest.mark.parametrize("sync_share", for_change([1.0, 0.3, 0.03], 2), ids=["f0", "f-short", "f-long"])
@pytest.mark.slow
def test_what_was_synced_survives_the_loss_of_power(tmp_path: Path, seed: int, times: int, sync_share: float) -> None:
    """The first life finds an empty directory, the second what a kill or a clean end left, both synced by then."""
    draw = random.Random(seed)
    directory = tmp_path / "journal"
    directory.mkdir()
    before: Model = {}
    for number in range(1, LIVES + 1):
        recording = Recording(directory)
        life = Life(
            str(directory),
            seed + number,
            number=number,
            batches=60,
            segment_bytes=8192,
            sync_share=sync_share,
            close=draw.random() < 0.5,
        )
        told = recording.record(life, tmp_path / "trace")
        assert told.committed == life.batches, told
        assert len(recording.moments) > 20, "nothing was recorded"
        for count, point in enumerate(recording.points(draw, POINTS * times)):
            into = tmp_path / f"lost-{number}-{count}"
            into.mkdir()
            recording.rebuild(point, draw, into)
            check_power_loss(before, life, recording.told(point), read(into))
            if not count % 16:
                goes_on(into, seed + count)
        found = read_sound(directory)
        check_life(before, life, told, found)
        before = found.model


def goes_on(directory: Path, seed: int) -> None:
    """The journal that was found is like any other: a life in it, with its end and a clean start, loses nothing."""
    before = read_sound(directory).model
    for starts in range(3):  # what one start excuses and changes is the next one's to judge
        journal = Journal(str(directory), segment_bytes=8192)
        assert fold(journal.replay()) == before
        journal.start()
        while journal.settling:  # what was left over is sealed
            journal.tend()
            time.sleep(0.0001)
        if starts == 1:
            journal.close()
        else:
            journal.abandon()
    life = Life(str(directory), seed, number=9, batches=10, segment_bytes=8192)
    told = run_driver(life)
    assert told.ended, told
    check_life(before, life, told, read_sound(directory))


def test_the_recording_is_what_happened(tmp_path: Path, seed: int) -> None:
    """Of the tool: with nothing lost, the rebuilt directory is the one that was recorded."""
    directory = tmp_path / "journal"
    directory.mkdir()
    recording = Recording(directory)
    life = Life(str(directory), seed, batches=20, segment_bytes=8192)
    told = recording.record(life, tmp_path / "trace")
    assert recording.told(recording.length) == told
    into = tmp_path / "whole"
    into.mkdir()
    recording.rebuild(recording.length, _KeepsAll(seed), into)
    ours = {path.name: path.read_bytes() for path in into.iterdir() if path.name != "reserve"}
    real = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "reserve"}
    assert ours.keys() == real.keys()
    assert ours == real


class _KeepsAll(random.Random):
    """Draws the fate in which nothing is lost."""

    def random(self) -> float:
        return 0.0

    def choice(self, seq):  # type: ignore[no-untyped-def]  # as random.Random's
        return max(seq)

    def randint(self, a: int, b: int) -> int:
        return b
