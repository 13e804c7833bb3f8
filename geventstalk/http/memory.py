"""The memory that processes use, and the limit of this one."""

from __future__ import annotations

import os
import resource
from typing import Final, NamedTuple

_PAGE_BYTES: Final = resource.getpagesize()
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Used(NamedTuple):
    """The processor time and memory of a process."""

    processor_s: float
    resident_bytes: int


def used_by(pid: int) -> Used | None:
    """Returns None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Used((int(words[11]) + int(words[12])) / _TICKS, int(words[21]) * _PAGE_BYTES)


def resident_bytes() -> int:
    """Returns the memory that the process takes now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_limit_bytes() -> int | None:
    """Returns the lowest limit of the process's memory; None without a limit."""
    limits = [resource.getrlimit(resource.RLIMIT_AS)[0]]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, "rb") as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # no cgroup, or `max`
            continue
    known = [limit for limit in limits if 0 <= limit < 1 << 60]
    return min(known, default=None)
