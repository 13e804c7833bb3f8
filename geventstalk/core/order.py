"""Pairs of integers in order, a rank and an id each.

Compiled, they stand in packed memory. Interpreted, that would take a step of Python for each entry that moves.
"""

from __future__ import annotations

from typing import Final

from geventstalk._build import BUILD

if BUILD == "compiled":
    from geventstalk.core.packed import Order as Order
else:
    from geventstalk.core.plain import Order as Order  # type: ignore[assignment]  # same interface; the tests run on both

EMPTY: Final = -1
"""The result of first(), first_rank() and pop() for an empty order; ranks and ids are never negative."""
