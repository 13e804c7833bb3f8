"""Regular expressions over bodies, run by RE2: in time that grows with pattern times body, and in bounded memory.

This module must not know jobs. A pattern of ten characters can make a backtracking engine take hours, or all memory; a
time limit does not stop its inner loops. RE2 has no such pattern, and lets other threads run while it searches. It has
no lookaround and no backreferences. Invariant: a pattern is refused when it is read, in some milliseconds at the most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

try:
    import re2  # here, not at the first pattern: that would block other clients
except ImportError:  # there are no wheels of it for musl
    re2 = None

MEMORY_BYTES_MAX: Final = 1 << 20
"""RE2's memory for one pattern: its program, and its cache."""
_COST_MAX: Final = 3000
"""The most instructions of a pattern, about. Compiling this many takes up to 5 ms."""
_CLASS_COST: Final = 12
"""A dot, a class or a letter beyond ASCII: bodies are UTF-8, so each is several instructions."""
_PROPERTY_COST: Final = 1200
"""\\pL and the like are hundreds of ranges."""


class PatternError(Exception):
    """The pattern cannot be used; the text tells the user why."""


class Pattern:
    """A pattern. `matches` returns whether there is a match in bytes, or in a view of them. `cost` is the most a byte
    costs.
    """

    def __init__(self, text: str, ignore_case: bool) -> None:
        if re2 is None:
            raise PatternError(
                "This server has no regular expressions: the package google-re2 is not installed beside it."
            )
        if _cost(text) > _COST_MAX:
            raise PatternError("The regular expression is too large: it repeats too much.")
        options = re2.Options()
        options.max_mem = MEMORY_BYTES_MAX
        options.never_capture = True
        options.log_errors = False
        options.case_sensitive = not ignore_case
        try:
            compiled = re2.compile(text, options)
        except re2.error as error:
            raise PatternError(f"The regular expression cannot be used: {_reason(error)}.") from None
        finally:
            re2.purge()  # or the module keeps the last 128, with their caches
        self.cost: Final[int] = compiled.programsize
        self.matches: Final[Callable[[Any], bool]] = _matcher(compiled)


def _matcher(compiled: Any) -> Callable[[Any], bool]:
    """Returns the match function. re2's search() makes unused objects for groups, and takes three times as long."""
    try:
        match, anchor, nowhere = compiled._regexp.Match, re2._re2.RE2.Anchor.UNANCHORED, [(-1, -1)]
        match(anchor, b"", 0, 0)
    except (AttributeError, TypeError):
        return lambda data: compiled.search(data) is not None
    return lambda data: match(anchor, data, 0, len(data)) != nowhere


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)


def _cost(text: str) -> int:
    """Returns about how many instructions a pattern becomes, rather too many than too few."""
    open_groups = [0]
    last = at = 0
    while at < len(text):
        if text[at] == "(":
            open_groups.append(0)
            last = 0
            at += 1
        elif text[at] == ")" and len(open_groups) > 1:
            last = open_groups.pop()
            at += 1
        elif text[at] == "{" and (end := text.find("}", at)) > 0 and (times := _times(text[at + 1 : end])):
            last *= times - 1
            at = end + 1
        else:
            last, at = _atom(text, at)
        open_groups[-1] += last
    return sum(open_groups)


def _atom(text: str, at: int) -> tuple[int, int]:
    """Returns the cost of the character or class at a place, and its end."""
    if text[at] == "[":
        end = text.find("]", at + 2)
        inside = text[at + 1 : end if end > 0 else len(text)]
        properties = inside.count("\\p") + inside.count("\\P")
        return _CLASS_COST + len(inside) + _PROPERTY_COST * properties, at + len(inside) + 2
    if text[at] != "\\":
        return 1 if text[at].isascii() and text[at] != "." else _CLASS_COST, at + 1
    if text[at + 1 : at + 2] not in ("p", "P"):
        return _CLASS_COST, at + 2
    end = text.find("}", at + 2)
    return _PROPERTY_COST, end + 1 if text[at + 2 : at + 3] == "{" and end > 0 else at + 3


def _times(text: str) -> int:
    """Returns the most repetitions of a quantifier; 0 when it is none."""
    ends = text.split(",")
    if len(ends) > 2 or not all(end.isdecimal() and len(end) < 6 for end in ends if end) or not ends[0]:
        return 0
    return max(int(end) for end in ends if end) + 1
