"""Room on a disk and the reserve of real blocks, on a tmpfs of a few hundred kilobytes where one may be mounted."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

from journal.space import RESERVE_NAME, Space

KIB = 1024


@cache
def mount_problem() -> str:
    """Why no small disk can be mounted here; empty when one can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True, text=True, check=False
            )
        except OSError as error:
            return f"mount cannot be run: {error.strerror}"
        if done.returncode:
            return f"no tmpfs can be mounted: {done.stderr.strip()}"
        subprocess.run(["umount", folder], check=True)
    return ""


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes; skips the test where it cannot be had."""
    if problem := mount_problem():
        pytest.skip(problem)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def fill_up(path: Path) -> None:
    """What another process may do: takes every block that is left."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4 * KIB))
        except OSError:
            pass
    assert free_bytes(path.parent) == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk of so many bytes."""
    with ExitStack() as stack:
        yield lambda size: stack.enter_context(small_disk(tmp_path / "disk", size))


def test_the_reserve_is_of_real_blocks(disk: Callable[[int], Path]) -> None:
    folder = disk(512 * KIB)
    before = free_bytes(folder)
    space = Space(str(folder), None)
    assert space.free() == before
    assert space.resize(200 * KIB)
    assert space.reserved == 200 * KIB
    assert free_bytes(folder) == before - 200 * KIB
    assert (folder / RESERVE_NAME).stat().st_blocks * 512 >= 200 * KIB
    assert space.resize(100 * KIB)
    assert free_bytes(folder) == before - 100 * KIB
    assert space.give_back() and not space.give_back()
    assert free_bytes(folder) == before and space.reserved == 0


def test_a_reserve_that_finds_no_room_stays_as_it_was(disk: Callable[[int], Path]) -> None:
    folder = disk(512 * KIB)
    space = Space(str(folder), None)
    assert space.resize(100 * KIB)
    before = free_bytes(folder)
    assert not space.resize(600 * KIB)
    assert space.reserved == 100 * KIB
    assert (folder / RESERVE_NAME).stat().st_size == 100 * KIB
    assert free_bytes(folder) == before, "the attempt keeps no blocks"


def test_what_is_given_back_others_can_use(disk: Callable[[int], Path]) -> None:
    folder = disk(256 * KIB)
    space = Space(str(folder), None)
    assert space.resize(64 * KIB)
    fill_up(folder / "filler")
    assert space.give_back(), "giving back needs no room itself"
    assert free_bytes(folder) == 64 * KIB
    fill_up(folder / "filler")
    assert not space.resize(4 * KIB)
    (folder / "filler").unlink()
    assert space.resize(64 * KIB)


def test_a_reserve_of_an_earlier_life_counts(disk: Callable[[int], Path]) -> None:
    folder = disk(256 * KIB)
    assert Space(str(folder), None).resize(64 * KIB)
    fill_up(folder / "filler")
    space = Space(str(folder), None)
    assert space.reserved == 64 * KIB
    assert space.give_back()
    assert free_bytes(folder) == 64 * KIB


def test_capacity_is_the_disks_or_the_budget(disk: Callable[[int], Path]) -> None:
    folder = disk(512 * KIB)
    space = Space(str(folder), None)
    size = free_bytes(folder)
    assert space.capacity(0) == size
    assert space.resize(64 * KIB)
    assert space.capacity(0) == size, "the reserve is room, too"
    assert space.capacity(10 * KIB) == size + 10 * KIB, "and so is what the journal takes by itself"
    assert Space(str(folder), 100 * KIB).capacity(0) == 100 * KIB
    assert Space(str(folder), 10 * size).capacity(0) == size, "a budget beyond the disk's is none"


def test_a_directory_that_is_gone_makes_no_reserve(tmp_path: Path) -> None:
    assert not Space(str(tmp_path / "gone"), None).resize(4 * KIB)
