"""Small disks of a given size, on a tmpfs where a test may mount one; and a process that fills such a disk."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

import pytest

KIB = 1024
CLONE_NEWNS, MS_PRIVATE_REC = 0x20000, 0x44000
_problems: list[str] = []
"""Why nothing may be mounted, as far as that is known."""


def keep_mounts_private() -> None:
    """From now on, what this process and its children mount ends with them; the rest of the machine never sees it.

    A mount that a killed process leaves under pytest's folder makes pytest's clean-up fail in the next run. Call it
    before the process has threads: each thread has a namespace of mounts. Without the right to mount it does nothing.
    In a chroot, whose root is no mount, the tests mount nothing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, MS_PRIVATE_REC, None) != 0:
        if ctypes.get_errno() != errno.EINVAL:
            raise OSError(ctypes.get_errno(), "cannot keep mounts private")
        _problems.append("the root of this process is no mount, so what is mounted would be seen by others")


@cache
def mount_problem() -> str:
    """Why no small disk can be mounted here; empty when one can."""
    if _problems:
        return _problems[0]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True, text=True, check=False
            )
        except OSError as error:
            return f"mount cannot be run: {error.strerror}"
        finally:
            unmount(folder)
        if done.returncode:
            return f"no tmpfs can be mounted: {done.stderr.strip()}"
    return ""


@contextmanager
def small_disk(folder: Path, size: int, *, inodes: int = 0) -> Iterator[Path]:
    """A disk of so many bytes, and of so many inodes if they are to be few; skips the test where it cannot be had."""
    if problem := mount_problem():
        pytest.skip(problem)
    folder.mkdir()
    options = f"size={size},nr_inodes={inodes}"  # 0 stands for no limit
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
        yield folder
    finally:
        unmount(folder)


def unmount(folder: Path | str) -> None:
    """The program may be stopped while a disk is being mounted."""
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


def free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def fill_up(path: Path) -> None:
    """Takes every block that is left, as another process may, and those that a server gives back meanwhile."""
    deadline = time.monotonic() + 30
    take_all(path)
    while free_bytes(path.parent):
        assert time.monotonic() < deadline, "the disk is never full"
        take_all(path)


def take_inodes(folder: Path) -> None:
    """Makes files until there is no inode left, as another process may."""
    with suppress(OSError):
        for number in count():
            (folder / f"file-{number}").touch(exist_ok=False)


def take_all(path: Path) -> None:
    """The same beside a process that may give some back meanwhile."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4 * KIB))
        except OSError:
            pass
