"""A filter's terms as checks of jobs: cheap ones first, for a list of jobs at once; bodies last, one by one.

This module must not know gevent or HTTP, and never yields: jobs must not change within a call. Invariant: sift() and
the checks of bodies together are the terms. No sieve holds the matcher: the server has no collector of cycles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final

from geventstalk.core.engine import Engine
from geventstalk.core.job import BURIED, DELAYED, READY, RESERVED, SECOND_NS, Job
from geventstalk.fields import COUNT, FIELDS, SECONDS, SINCE
from geventstalk.filters import FilterError, Term
from geventstalk.http.patterns import Pattern, PatternError

ID_MAX: Final = 2**63 - 1
CRLF_BYTES: Final = 2
_STATES: Final = {"ready": READY, "delayed": DELAYED, "reserved": RESERVED, "buried": BURIED}

Sieve = Callable[[list[Job]], list[Job]]
Ranges = list[tuple[int, int]]

_INFINITE: Final = 2**64
_GLOBS_A_SLICE: Final = 1024
"""The number of globs that are compared with a name in one or two milliseconds."""


class Matcher:
    """The checks. `words` and `patterns` are texts that bodies must have (True) or must not have (False).

    `ids` are the ranges of ids, `tubes` the names of tubes, None for any.
    """

    def __init__(self, terms: Iterable[Term], engine: Engine, now_ns: int) -> None:
        """Raises FilterError for a regular expression that cannot be used."""
        self.ids: Ranges = [(0, ID_MAX)]
        self.tubes: frozenset[bytes] | None = None
        self.states = frozenset(_STATES.values())
        self.words: list[tuple[bytes, bool]] = []
        self.patterns: list[tuple[Pattern, bool]] = []
        self.at_once = _GLOBS_A_SLICE  # how many jobs may be sifted before a yield
        self._engine = engine
        self._now_ns = now_ns
        self._sieves: list[Sieve] = []
        wanted: list[tuple[Glob, bool]] = []
        numbers: list[Term] = []
        for term in terms:
            yes = not term.negated
            if term.key == "state":
                named = frozenset(_STATES[name] for name in term.names)
                self.states = self.states & named if yes else self.states - named
            elif term.key == "tube":
                wanted.append((Glob(term.names), yes))
            elif term.text is not None:
                self.words.append((term.text.encode("utf-8"), yes))
            elif term.pattern is not None:
                self.patterns.append((_pattern(term), yes))
            elif term.key == "id":
                self.ids = _meet(self.ids, _ranges(term))
            else:
                numbers.append(term)
        self._add_sieves(wanted, sorted(numbers, key=lambda term: _ORDER.index(term.key)))

    def _add_sieves(self, wanted: list[tuple[Glob, bool]], numbers: list[Term]) -> None:
        if self.ids != [(0, ID_MAX)]:
            self._sieves.append(_sieve(lambda jobs: [job.id for job in jobs], self.ids))
        if len(self.states) < len(_STATES):
            self._sieves.append(_state_sieve(self.states))
        if wanted:
            self.at_once //= max(1, sum(glob.count for glob, _ in wanted))
            self._add_tubes(wanted)
        self._sieves += map(self._number_sieve, numbers)

    def sift(self, jobs: list[Job]) -> list[Job]:
        """Returns the jobs that pass all checks but those of bodies, in the same order."""
        for sieve in self._sieves:
            if not jobs:
                break
            jobs = sieve(jobs)
        return jobs

    # --- sieves

    def _add_tubes(self, wanted: list[tuple[Glob, bool]]) -> None:
        """Adds the terms about tubes. A verdict about a tube's number stays true: no number is used again."""
        engine = self._engine  # not its tubes: undo() makes their table anew

        def judge(number: int) -> bool:
            name = engine.tube_by_number[number].name
            return all(glob.matches(name) is yes for glob, yes in wanted)

        verdicts = _Verdicts(judge)
        self._sieves.append(lambda jobs: [job for job in jobs if verdicts[job.tube]])
        for glob, yes in wanted:
            if yes and glob.names is not None:
                self.tubes = glob.names if self.tubes is None else self.tubes & glob.names

    def _number_sieve(self, term: Term) -> Sieve:
        ranges = _ranges(term)
        if term.key == "size":
            size_of = self._engine.size_of
            return _sieve(lambda jobs: [size_of(job) - CRLF_BYTES for job in jobs], ranges)
        field, now_ns = _FIELDS[term.key], self._now_ns
        value_of = attrgetter(field.source)
        if field.kind == COUNT:
            return _sieve(lambda jobs: [0 if (tally := job.tally) is None else value_of(tally) for job in jobs], ranges)
        if field.kind == SECONDS:  # bounds are nanoseconds
            ranges = [(-(-least // SECOND_NS), most // SECOND_NS) for least, most in ranges]
        elif field.kind == SINCE:  # jobs know the time; a future one counts as now
            ranges = [(now_ns - most, now_ns - least if least else _INFINITE) for least, most in reversed(ranges)]
        return _sieve(lambda jobs: map(value_of, jobs), ranges)


_FIELDS: Final = {field.name: field for field in FIELDS if field.says}
_ORDER: Final = sorted([*_FIELDS, "size"], key=lambda name: _FIELDS[name].kind if name in _FIELDS else SECONDS)
"""The cheapest first."""


class Glob:
    """Names in which a `*` stands for anything; `count` of them have one. `names` are all, None when one has a `*`."""

    def __init__(self, names: Iterable[str]) -> None:
        plain = [name.encode("ascii") for name in names]
        self._parts = [name.split(b"*") for name in plain if b"*" in name]
        self._plain = frozenset(name for name in plain if b"*" not in name)
        self.names = None if self._parts else self._plain
        self.count: Final = len(self._parts)

    def matches(self, name: bytes) -> bool:
        """Returns whether the name is one of them, in time that grows with the length of the names only."""
        return name in self._plain or any(_fits(name, parts) for parts in self._parts)


def _fits(name: bytes, parts: list[bytes]) -> bool:
    first, last = parts[0], parts[-1]
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in parts[1:-1]:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


class _Verdicts(dict[int, bool]):
    """Verdicts about tubes, by number. A missing one is computed."""

    def __init__(self, judge: Callable[[int], bool]) -> None:
        self._judge = judge

    def __missing__(self, number: int) -> bool:
        verdict = self[number] = self._judge(number)
        return verdict


def _pattern(term: Term) -> Pattern:
    assert term.pattern is not None
    try:
        return Pattern(term.pattern, term.ignore_case)
    except PatternError as error:
        raise FilterError(str(error), term.begin) from None


def _ranges(term: Term) -> Ranges:
    """Returns the numbers in one of the term's ranges, or outside of all of them: in order, without touching."""
    found: Ranges = []
    for least, most in sorted((least or 0, _INFINITE if most is None else most) for least, most in term.ranges):
        if found and least <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], most)
        else:
            found.append((least, most))
    return _outside(found) if term.negated else found


def _outside(ranges: Ranges) -> Ranges:
    begins = [0, *(most + 1 for _, most in ranges)]
    ends = [*(least - 1 for least, _ in ranges), _INFINITE]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin <= end]


def _meet(ours: Ranges, theirs: Ranges) -> Ranges:
    """Returns the numbers in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in ours for c, d in theirs)
    return [(least, most) for least, most in pairs if least <= most]


def _state_sieve(states: frozenset[int]) -> Sieve:
    return lambda jobs: [job for job in jobs if job.state in states]


def _sieve(values: Callable[[list[Job]], Iterable[int]], ranges: Ranges) -> Sieve:
    if len(ranges) == 1:
        ((least, most),) = ranges
        return lambda jobs: [job for job, value in zip(jobs, values(jobs), strict=True) if least <= value <= most]
    begins = [begin for begin, _ in ranges]
    ends = [-_INFINITE, *(end for _, end in ranges)]
    return lambda jobs: [
        job for job, value in zip(jobs, values(jobs), strict=True) if value <= ends[bisect_right(begins, value)]
    ]
