"""The protocol's limits on numbers and names, each stated once for all modules.

This module must not import anything of ours.
"""

from __future__ import annotations

from typing import Final

U32_BITS: Final = 32
U64_BITS: Final = 64
U32_MAX: Final = 2**U32_BITS - 1
"""The largest priority, delay, time to run and size."""
U64_MAX: Final = 2**U64_BITS - 1
"""The largest id that a command may name."""
TUBE_NAME_BYTES_MAX: Final = 200
TUBE_NAME_CHARACTERS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-+/;.$_()"


def is_tube_name(name: bytes) -> bool:
    """1 to 200 characters of the allowed set, the first of them not `-`."""
    if not 0 < len(name) <= TUBE_NAME_BYTES_MAX or name.startswith(b"-"):
        return False
    return not name.translate(None, TUBE_NAME_CHARACTERS)
