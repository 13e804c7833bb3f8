"""Computes the room that a log in a database needs: all arithmetic of a budget, and nothing else. Pure.

Terms. Live bytes are the bytes of the records that a replay still needs, as format.record_bytes() counts them.
Invariant: whatever was admitted can still be changed, moved and deleted in the room that is left.
"""

from __future__ import annotations

from typing import Final

from journal.postgres.format import ENTRY, record_bytes

SEGMENT_BYTES_MIN: Final = 1 << 12
SPARE_SEGMENTS: Final = 4
"""Segments that come and go: the current one, the next, one that is being moved, and one that waits for its end."""
_SMALL_SEGMENT_BYTES: Final = 1 << 16
_BUDGET_SHARE: Final = 32
"""A segment takes at most this share of the budget."""
_CHANGE_BYTES: Final = record_bytes(64)
"""Bytes that a change of a key may take. Callers keep their changes within 64 bytes."""
_KEY_BYTES: Final = 2 * (ENTRY.size + 8)
"""Bytes that deleting a key takes, with its share of rows."""


def segment_limit(segment_bytes: int, budget: int | None) -> int:
    """Returns the bytes at which a segment is full: few where the budget is small."""
    if budget is not None:
        segment_bytes = min(segment_bytes, max(budget // _BUDGET_SHARE, _SMALL_SEGMENT_BYTES))
    return max(segment_bytes, SEGMENT_BYTES_MIN)


def of_put(size: int) -> int:
    """Returns the bytes that a put of this size needs: its record, a change, both again for moving, and its delete."""
    return 2 * (record_bytes(size) + _CHANGE_BYTES) + _KEY_BYTES


def left_for_puts(budget: int, limit: int, live: int, keys: int) -> int:
    """Returns how many bytes puts may take with this many live bytes and keys, each counted as in of_put().

    The segments stay below twice the live bytes and those that come and go, also after each key was changed. An eighth
    is for what the database adds to rows.
    """
    grown = live + keys * _CHANGE_BYTES
    around = SPARE_SEGMENTS * limit + keys * _KEY_BYTES
    return (budget - around) * 7 // 8 - 2 * grown


def of_budget(budget: int, limit: int) -> int:
    """Returns how many bytes of records an empty log with this budget has room for."""
    return max(0, left_for_puts(budget, limit, 0, 0) // 2)


def granted(left: int, need: int, limit: int) -> int:
    """Returns how many bytes puts may take until the next look at the segments. `left` is what left_for_puts() says."""
    return min(left, max(need, limit // 4))
