"""How much memory the process takes, and how much it may take."""

from __future__ import annotations

import resource
from typing import Final

_PAGE_BYTES: Final = resource.getpagesize()


def resident_bytes() -> int:
    """The memory that the process takes now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_limit_bytes() -> int | None:
    """The least of what limits the memory of the process; None without a limit."""
    limits = [resource.getrlimit(resource.RLIMIT_AS)[0]]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, "rb") as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # no cgroup, or `max`
            continue
    known = [limit for limit in limits if 0 <= limit < 1 << 60]
    return min(known, default=None)
