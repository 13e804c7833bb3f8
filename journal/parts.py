"""Keys, the rows of a batch, and large payloads in parts: common to the formats of all kinds of logs. Pure."""

from __future__ import annotations

from struct import Struct
from typing import Final

PART: Final = 4
LAST: Final = 5
"""Kinds beside FULL, CHANGE and DELETE. A FULL record that is too large for a row becomes PART ... LAST. LAST begins
with the number of its PARTs. Other records may stand between them, but no PARTs of another key."""
KEY_MAX: Final = 2**63 - 1
LOST_KEYS: Final = 1 << 20
"""Keys that are skipped when damage was accepted. Perhaps only lost records knew that a key was used, and no key may be
used again. A segment of a usual size has fewer records than this."""

Entry = tuple[int, int, bytes]
"""A row of a batch: key, kind and payload."""


def split(key: int, payload: bytes, part_bytes: int, count: Struct) -> list[Entry]:
    """Returns a whole record that is too large for one row as PART ... LAST. `count` is the format of the number."""
    parts: list[Entry] = [(key, PART, payload[at : at + part_bytes]) for at in range(0, len(payload), part_bytes)]
    last = parts.pop()[2]
    parts.append((key, LAST, count.pack(len(parts)) + last))
    return parts
