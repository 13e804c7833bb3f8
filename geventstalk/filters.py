"""Parses filters such as `tube:mail state:buried age>1h "user 42"` into terms.

This module must not know jobs, gevent or HTTP. `tests/data/filters.json` holds examples. A position counts characters
(code points) from 0. Invariant: each bound is a whole number, of nanoseconds, of bytes, or as it stands.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from geventstalk.fields import COUNT, FIELDS, NUMBER, REFERENCE, SECONDS, SINCE
from geventstalk.limits import TUBE_NAME_BYTES_MAX, TUBE_NAME_CHARACTERS, U32_MAX

FILTER_CHARS_MAX: Final = 2000
PATTERN_CHARS_MAX: Final = 500
TERMS_MAX: Final = 50
STATES: Final = ("ready", "delayed", "reserved", "buried")
_I64_MAX: Final = 2**63 - 1
_SECOND_NS: Final = 10**9
_SHOWN_CHARS: Final = 40
_SPACE: Final = " \t\r\n"
_LONELY: Final = re.compile(r"[:=<>]|[<>]=|[<>]=?[0-9].*|:[A-Za-z0-9].*", re.DOTALL)
"""A word behind a key that a space cut off, such as `>1h`."""
_TUBE_CHARS: Final = frozenset(TUBE_NAME_CHARACTERS.decode("ascii") + "*")
_KEY: Final = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)(<=|>=|[:<>=])")
_NUMBER: Final = re.compile(r"([0-9]+)(?:\.([0-9]{1,3}))?([A-Za-z]*)")
_DECIMALS: Final = 1000
"""The parts of one that a number is counted in: it has three decimals at the most."""


class FilterError(Exception):
    """The filter cannot be understood. The text tells the user why; `at` is the place."""

    def __init__(self, text: str, at: int) -> None:
        super().__init__(text)
        self.at = at


class Kind(NamedTuple):
    """The numbers of a key: their units, the largest one, and the message for a malformed one."""

    units: dict[str, int]
    most: int
    most_shown: str
    wanted: str
    decimals: bool


_WHOLE: Final = {"": 1}
_TIME: Final = Kind(
    {
        "": _SECOND_NS,
        "ms": _SECOND_NS // 1000,
        "s": _SECOND_NS,
        "m": 60 * _SECOND_NS,
        "min": 60 * _SECOND_NS,
        "h": 3600 * _SECOND_NS,
        "d": 86400 * _SECOND_NS,
    },
    U32_MAX * _SECOND_NS,
    f"{U32_MAX}s",
    "is no time; write 90s, 5min, 1.5h or 2d",
    True,
)
_SIZE: Final = Kind(
    {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30},
    U32_MAX,
    str(U32_MAX),
    "is no size; write 500, 10k, 1.5M or 1G",
    True,
)
_COUNT: Final = Kind(_WHOLE, U32_MAX, str(U32_MAX), "is no whole number", False)
_NUMBER_OF: Final = Kind(_WHOLE, _I64_MAX, str(_I64_MAX), "is no whole number", False)

_KINDS: Final = {NUMBER: _COUNT, REFERENCE: _NUMBER_OF, COUNT: _COUNT, SECONDS: _TIME, SINCE: _TIME}
NUMBERS: Final = {field.name: _KINDS[field.kind] for field in FIELDS if field.says}
NUMBERS.update(id=_NUMBER_OF, size=_SIZE)
SAYS: Final = {
    "tube": "name of the tube; * stands for anything, several with commas",
    "state": "ready, reserved, delayed, buried; several with commas",
    "body": 'a word, "some words", or /a regular expression/',
    "id": "number of the job, or a range",
    "size": "bytes of the body",
    **{field.name: field.says for field in FIELDS if field.says},
}
"""Each key of a filter, as the command line and the console explain it."""
TRIES: Final[dict[str, tuple[str, ...]]] = {
    "state": STATES,
    "id": (":100..200",),
    "size": (">1k", ">64k"),
    **{field.name: field.tries or ((">0",) if field.kind == COUNT else ()) for field in FIELDS if field.says},
}
"""Values of a key with which the console suggests to begin."""
KEYS: Final = tuple(sorted(SAYS))


class Term(NamedTuple):
    """One condition. `names` are tubes or states; `ranges` are inclusive bounds, None where it is open."""

    key: str
    negated: bool
    begin: int
    end: int
    names: tuple[str, ...] = ()
    ranges: tuple[tuple[int | None, int | None], ...] = ()
    text: str | None = None
    pattern: str | None = None
    ignore_case: bool = False

    def as_json(self) -> dict[str, object]:
        """Returns the form of the examples. Bounds are strings: JavaScript's numbers are not exact enough."""
        found: dict[str, object] = {"key": self.key, "not": self.negated, "at": [self.begin, self.end]}
        if self.text is not None:
            found["text"] = self.text
        elif self.pattern is not None:
            found["pattern"] = self.pattern
            found["ignore_case"] = self.ignore_case
        elif self.names:
            found["any"] = list(self.names)
        else:
            found["any"] = [[None if end is None else str(end) for end in ends] for ends in self.ranges]
        return found


def parse(text: str) -> tuple[Term, ...]:
    """Returns the terms of a filter; none stands for all jobs. Raises FilterError."""
    if len(text) > FILTER_CHARS_MAX:
        raise FilterError(
            f"A filter has at most {FILTER_CHARS_MAX} characters; this one has {len(text)}.", FILTER_CHARS_MAX
        )
    for at, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            raise FilterError("Half of a character stands here.", at)
    return _Reader(text).terms()


def _quoted(text: str) -> str:
    return f'"{text}"' if len(text) <= _SHOWN_CHARS else f'"{text[:_SHOWN_CHARS]}..."'


class _Reader:
    """Reads a filter from its beginning to its end. `_at` is where it stands."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def terms(self) -> tuple[Term, ...]:
        terms: list[Term] = []
        while True:
            while self._next() in _SPACE and self._next():
                self._at += 1
            if not self._next():
                return tuple(terms)
            if len(terms) == TERMS_MAX:
                raise FilterError(f"A filter has at most {TERMS_MAX} terms.", self._at)
            terms.append(self._term())

    def _next(self) -> str:
        """Returns the next character; empty at the end."""
        return self._text[self._at : self._at + 1]

    def _word(self) -> str:
        """Returns all up to the next space."""
        begin = self._at
        while self._next() not in _SPACE:
            self._at += 1
        return self._text[begin : self._at]

    def _ends(self) -> bool:
        return not self._next() or self._next() in _SPACE

    def _term(self) -> Term:
        begin = self._at
        negated = self._next() == "-"
        if negated:
            self._at += 1
            if self._ends():
                raise FilterError("Nothing stands behind this -.", begin)
            if self._next() == "-":
                raise FilterError(
                    "A leading - negates a term; to look for two of them, put the text in quotes.", self._at
                )
        term = self._condition()
        return term._replace(negated=negated, begin=begin, end=self._at)

    def _condition(self) -> Term:
        begin = self._at
        if self._next() == '"':
            return self._body(text=self._quotes())
        found = _KEY.match(self._text, begin)
        if found is not None:
            key, sign = found[1].lower(), found[2]
            if key in KEYS:
                self._at = found.end()
                return self._keyed(key, sign, begin)
            if sign != "=":
                known = ", ".join(KEYS)
                raise FilterError(
                    f"There is no {_quoted(found[1])} to filter by, only {known}. To look for text, put it in quotes.",
                    begin,
                )
        word = self._word()
        if _LONELY.fullmatch(word):
            raise FilterError("A term has no spaces in it; write age>1h.", begin)
        if len(word) > 2 and word.startswith("/") and (word.endswith("/") or word[1:].lower().endswith("/i")):
            raise FilterError(
                "Write body: before a regular expression. To look for a text that begins with /, put it in quotes.",
                begin,
            )
        return self._body(text=word)

    def _keyed(self, key: str, sign: str, begin: int) -> Term:
        if sign == "=":
            raise FilterError(f"Write {key}: for {key}=. To look for this text, put it in quotes.", self._at - 1)
        if self._ends():
            written = self._text[begin : self._at]
            raise FilterError(f"Something is missing behind {_quoted(written)}.", self._at)
        if key in NUMBERS:
            return Term(key, False, 0, 0, ranges=self._ranges(key, sign))
        if sign != ":":
            raise FilterError(f"Behind {_quoted(key)} comes :, not {sign}.", self._at - len(sign))
        if key == "state":
            return Term(key, False, 0, 0, names=tuple(self._state(name, at) for name, at in self._list()))
        if key == "tube":
            return Term(key, False, 0, 0, names=tuple(self._tube(name, at) for name, at in self._list()))
        if self._next() == '"':
            return self._body(text=self._quotes())
        if self._next() == "/":
            return self._regular_expression()
        return self._body(text=self._word())

    def _body(self, text: str) -> Term:
        return Term("body", False, 0, 0, text=text)

    def _quotes(self) -> str:
        """Returns the text between two quotes, of which the first is next. A backslash quotes a quote and itself."""
        begin = self._at
        found: list[str] = []
        self._at += 1
        while self._next() != '"':
            if not self._next():
                raise FilterError("This quote is never closed.", begin)
            if self._next() == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\"):
                self._at += 1
            found.append(self._next())
            self._at += 1
        self._at += 1
        if not self._ends():
            raise FilterError("Put a space behind the closing quote.", self._at)
        if not found:
            raise FilterError("Nothing stands between these quotes.", begin)
        return "".join(found)

    def _regular_expression(self) -> Term:
        begin = self._at
        self._at += 1
        while self._next() != "/":
            self._at += 2 if self._next() == "\\" else 1
            if not self._next():
                raise FilterError("This regular expression is never closed; it ends with /.", begin)
        pattern = self._text[begin + 1 : self._at]
        if not pattern:
            raise FilterError("This regular expression is empty.", begin)
        if len(pattern) > PATTERN_CHARS_MAX:
            raise FilterError(f"A regular expression has at most {PATTERN_CHARS_MAX} characters.", begin)
        self._at += 1
        flags_at = self._at
        flags = self._word()
        if flags not in ("", "i"):
            raise FilterError("Behind the closing / comes i, or a space; write \\/ for a / within.", flags_at)
        return Term("body", False, 0, 0, pattern=pattern, ignore_case=flags == "i")

    def _list(self) -> list[tuple[str, int]]:
        """Returns the items between the commas of the next word, and the place of each."""
        found: list[tuple[str, int]] = []
        at = self._at
        for item in self._word().split(","):
            if not item:
                raise FilterError("Something is missing beside this comma.", min(at, self._at - 1))
            found.append((item, at))
            at += len(item) + 1
        return found

    @staticmethod
    def _state(name: str, at: int) -> str:
        if name.lower() not in STATES:
            raise FilterError(f"There is no state {_quoted(name)}, only {', '.join(STATES)}.", at)
        return name.lower()

    @staticmethod
    def _tube(name: str, at: int) -> str:
        if name.startswith("-"):
            raise FilterError("A tube's name does not begin with -.", at)
        for offset, character in enumerate(name):
            if character not in _TUBE_CHARS:
                raise FilterError("A tube's name does not have this character.", at + offset)
        if len(name) > TUBE_NAME_BYTES_MAX:
            raise FilterError(f"A tube's name has at most {TUBE_NAME_BYTES_MAX} characters.", at)
        return name

    def _ranges(self, key: str, sign: str) -> tuple[tuple[int | None, int | None], ...]:
        begin = self._at
        items = self._list()
        if sign == ":":
            return tuple(self._range(key, item, at) for item, at in items)
        if len(items) > 1:
            raise FilterError(f"A list comes behind :, not behind {sign}.", begin - len(sign))
        item = items[0][0]
        if ".." in item:
            raise FilterError(f"A range comes behind :, not behind {sign}.", begin - len(sign))
        value = self._number(key, item, begin)
        if sign == "<" and not value:
            raise FilterError("Nothing is less than 0.", begin)
        if sign.startswith("<"):
            return ((None, value if sign == "<=" else value - 1),)
        return ((value if sign == ">=" else value + 1, None),)

    def _range(self, key: str, item: str, at: int) -> tuple[int | None, int | None]:
        if ".." not in item:
            if key in ("age", "since"):
                raise FilterError(f"No job meets a time exactly; write {key}>1h, {key}<1h or {key}:1h..2h.", at)
            value = self._number(key, item, at)
            return value, value
        left, _, right = item.partition("..")
        if item == "..":
            raise FilterError("A range has an end; write 100..200, 100.. or ..200.", at)
        right_at = at + len(left) + 2
        least = self._number(key, left, at) if left else None
        most = self._number(key, right, right_at) if right else None
        if not least or most is None:
            return least, most
        if NUMBERS[key].decimals and _has_unit(left) != _has_unit(right):
            raise FilterError("Write a unit at both ends of the range, or at none.", at)
        if least > most:
            raise FilterError(f"{_quoted(item)} holds nothing: the smaller end comes first.", at)
        return least, most

    @staticmethod
    def _number(key: str, written: str, at: int) -> int:
        kind = NUMBERS[key]
        found = _NUMBER.fullmatch(written)
        unit = None if found is None else kind.units.get(found[3].lower())
        if found is None or unit is None or (found[2] is not None and not kind.decimals):
            raise FilterError(f"{_quoted(written)} {kind.wanted}.", at)
        thousandths = int(found[1]) * _DECIMALS + int((found[2] or "").ljust(3, "0"))
        value, rest = divmod(thousandths * unit, _DECIMALS)
        if rest:
            raise FilterError(f"{_quoted(written)} {kind.wanted}.", at)
        if value > kind.most:
            raise FilterError(f"{_quoted(written)} is too large; the most is {kind.most_shown}.", at)
        return value


def _has_unit(written: str) -> bool:
    return written[-1:].isalpha()
