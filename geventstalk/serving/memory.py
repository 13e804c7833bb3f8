"""Tells when memory ends where the address space of the process is limited (`ulimit -v`), and gives freed memory back
to the system, also that of objects that only hold each other.

This module must not know what memory is for. A process that has none left cannot even switch greenlets, so callers
stop taking more while there is still some.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import sys
import warnings
from contextlib import suppress
from time import monotonic, thread_time
from typing import Any

SPARE_BYTES = 1 << 24
"""With less than this there is no memory for new work: the rest is for the clients that are there."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_KEPT_BYTES = 1 << 24
"""With more than this free at its end, memory goes back to the system."""
_MAPPED_BYTES = 1 << 22
"""A larger piece goes back to the system as soon as it is freed."""
_NO_LIBRARY = (AttributeError, ImportError, MemoryError, OSError)
"""The errors by which a function of the C library is unavailable: another library, a Python without ctypes, or a system
that refuses what ctypes needs."""
YOUNG_MAX = 20_000
"""Looking at this many objects takes half a millisecond, and freeing all of them some milliseconds."""
_MANY = 2_000
"""Looking at this many objects takes a tenth of a millisecond; they take 300 kB."""
_LONG_S = 0.002
"""A look that takes longer is the last one at the objects that it has found in use."""
_LOOK_EVERY_S = 0.25
"""Time between two questions to the allocator: it walks through all of its free pieces for the answer."""


class Memory:
    """Ask is_left() now and then. `limited` says whether that is worth it."""

    def __init__(self) -> None:
        self.limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        self._asked_s = 0.0
        self._is_free = False
        self._allocator: Any = _allocator() if self.limited else None

    def is_left(self) -> bool:
        """Returns whether the system gives more, or the allocator has kept as much of what was given back to it."""
        try:
            mmap.mmap(-1, SPARE_BYTES).close()
        except OSError:
            return self._is_kept()
        return True

    def _is_kept(self) -> bool:
        now_s = monotonic()
        if self._allocator is not None and now_s >= self._asked_s + _LOOK_EVERY_S:
            self._asked_s = now_s
            # Twice as much: it is in pieces, and not every piece fits.
            self._is_free = self._allocator().free_bytes >= 2 * SPARE_BYTES
        return self._is_free


def memory_bytes() -> int:
    """Returns the memory that the process may have: that of the host, or less where a limit of it says so."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        found.append(limit)
    for folder in (_cgroup(), ""):
        with suppress(OSError, ValueError), open(f"/sys/fs/cgroup{folder}/memory.max", encoding="ascii") as file:
            found.append(int(file.read()))
    return min(found)


def _cgroup() -> str:
    """Returns the path of the process's control group (see cgroups(7), version 2), "" where there is none."""
    with suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            if line.startswith("0::/"):
                return line[3:].rstrip("\n")
    return ""


class Spare:
    """give_back() after much was freed, keep() before large bodies come and go."""

    def __init__(self) -> None:
        self._trim: Any = None
        self._keeps = False

    def keep(self) -> None:
        """Has the C library keep some memory that was freed. May be called often.

        Otherwise it gives the memory of a large body back, and the system clears each page anew for the next body.
        """
        if not self._keeps:
            self._keeps = True
            tune = _library("mallopt")
            tune(_M_TRIM_THRESHOLD, _KEPT_BYTES)
            tune(_M_MMAP_THRESHOLD, _MAPPED_BYTES)

    def give_back(self) -> None:
        """Gives free memory back: the C library takes a fifth of a millisecond for each mebibyte.

        Python keeps a mebibyte while any object lies in it. Useless objects stay there: names in the cache of types, to
        which gevent adds another copy whenever it asks a watcher for a method, and empty lists and the like that wait
        to be used again. A collection frees the latter; it looks at nothing else here.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has another name one day
            getattr(sys, "_clear_type_cache", int)()
        gc.freeze()
        gc.collect()
        if self._trim is None:
            self._trim = _library("malloc_trim")
        self._trim(0)


class Collector:
    """Frees objects that only a cycle holds. Libraries make them; the server's own objects have no cycles.

    A collector looks at the objects that were made since it last looked at everything or froze, and never for long: a
    look at a million jobs stops the server for 200 ms. When there are too many, jobs of the pure build above all, they
    are frozen: not looked at any more.
    """

    def begin(self) -> None:
        """Stops Python's own collections, and freezes the objects that are there."""
        gc.collect()
        gc.disable()
        gc.freeze()

    def look(self, least: int = 1) -> None:
        """Collects when there are this many more objects than at the last look. No other code may run meanwhile."""
        young = gc.get_count()[0]
        if young < least:
            return
        if young > YOUNG_MAX:
            gc.freeze()
            return
        begun_s = thread_time()
        gc.collect()
        if thread_time() - begun_s > _LONG_S:
            gc.freeze()  # of what is frozen, nothing takes time again

    def look_at_many(self) -> None:
        """Does what look() does when there are many objects."""
        self.look(_MANY)


def _library(name: str) -> Any:
    """Returns a function of glibc, or one that does nothing."""
    try:
        import ctypes

        return getattr(ctypes.CDLL(None), name)
    except _NO_LIBRARY:
        return _do_nothing


def _do_nothing(*values: int) -> int:
    return 0


def _allocator() -> Any:
    """Returns glibc's mallinfo2(); None where there is none."""
    try:
        import ctypes  # here, because nothing else needs it
    except _NO_LIBRARY:
        return None

    fields = (
        "all",
        "pieces",
        "fast_pieces",
        "mapped",
        "mapped_bytes",
        "unused",
        "fast_bytes",
        "used",
        "free_bytes",
        "top",
    )

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in fields]

    try:
        function = ctypes.CDLL(None).mallinfo2
    except _NO_LIBRARY:
        return None
    function.restype = Info
    return function
