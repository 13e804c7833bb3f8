"""Patterns of names of tubes, in which * stands for any characters.

This module must not know what the patterns are for. Invariant: to match takes time in proportion to the name, whatever
the pattern.
"""

from __future__ import annotations

from typing import Final

from geventstalk.limits import TUBE_NAME_CHARACTERS

_CHARACTERS: Final = {*TUBE_NAME_CHARACTERS.decode(), "*"}


def is_glob(text: object) -> bool:
    """Returns whether a value is a pattern that fits some name."""
    return isinstance(text, str) and bool(text) and _CHARACTERS.issuperset(text)


def parts_of(glob: str) -> list[bytes]:
    """Returns the texts between the asterisks of a pattern."""
    return glob.encode().split(b"*")


def fits(parts: list[bytes], tube: bytes) -> bool:
    """Returns whether a name has these parts in order, the first at its beginning and the last at its end."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return tube == first
    end = len(tube) - len(last)
    if not tube.startswith(first) or not tube.endswith(last) or end < len(first):
        return False
    at = len(first)
    for part in parts[1:-1]:
        at = tube.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True
