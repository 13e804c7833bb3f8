"""A page of liveness in packed memory, for the compiled build. plain.py has the same interface."""

from __future__ import annotations

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

PAGE_KEYS: Final = 64


@mypyc_attr(acyclic=True)
class Page:
    """Two numbers for each key, `segment << 32 | bytes`: its whole record and its last change. 0 stands for none.

    `count` is how many keys have a whole record; the caller keeps it. The numbers have 63 bits and a sign here, which
    shifts take along: a segment is what stands above bit 32, cut to 32 bits.
    """

    __slots__ = ("_numbers", "count")

    def __init__(self) -> None:
        self._numbers: vec[i64] = vec[i64]([0] * (2 * PAGE_KEYS))
        self.count = 0

    def whole(self, at: i64) -> i64:
        return self._numbers[2 * at]

    def set_whole(self, at: i64, number: i64) -> None:
        self._numbers[2 * at] = number

    def change(self, at: i64) -> i64:
        return self._numbers[2 * at + 1]

    def set_change(self, at: i64, number: i64) -> None:
        self._numbers[2 * at + 1] = number
