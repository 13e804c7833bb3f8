"""A page of liveness without packed memory, for the pure build. packed.py has the same interface."""

from __future__ import annotations

from array import array
from typing import Final

PAGE_KEYS: Final = 64
_ZEROS: Final = array("Q", bytes(8 * PAGE_KEYS))


class Page:
    """Two numbers for each key, `segment << 32 | bytes`: its whole record and its last change. 0 stands for none.

    `count` is how many keys have a whole record; the caller keeps it.
    """

    __slots__ = ("change", "count", "set_change", "set_whole", "whole")

    def __init__(self) -> None:
        wholes, changes = array("Q", _ZEROS), array("Q", _ZEROS)
        self.whole = wholes.__getitem__  # no call of Python on the way
        self.set_whole = wholes.__setitem__
        self.change = changes.__getitem__
        self.set_change = changes.__setitem__
        self.count = 0
