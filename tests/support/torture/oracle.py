"""Checks what a loss left: for each moment, the states that each job may have, by the output of the process until then.

A job may have any of the states that it got since the last batch that was promised, or the one it had by then. Batches
count over all lives of a directory. What a start found is promised once it has started.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from tests.support.torture.life import Fact, Facts
from tests.support.torture.recorder import MARK, Call


class Violation(AssertionError):
    """A fact that was promised is wrong."""


class Oracle:
    """The histories of all jobs of one directory."""

    def __init__(self, facts: Facts | None = None) -> None:
        """`facts` are promised from the beginning."""
        self._entries: dict[int, list[tuple[int, Fact | None]]] = {}
        for id, fact in (facts or {}).items():
            self._entries[id] = [(0, fact)]
        self._begun: list[tuple[int, int]] = []  # moment and batch
        self._promised: list[tuple[int, int]] = []
        self._committed: list[tuple[int, int]] = []
        self._passing: set[tuple[int, Fact]] = set()  # what a job was before it was deleted in the same batch
        self.batch = 0
        self.ended = False
        self.failure = ""

    def play(self, calls: Iterable[Call], later: int) -> None:
        """Adds what a process said. Raises Violation when what it found at its start was not what it had to be."""
        self.ended = False
        self.failure = ""
        for call in calls:
            if call.call != MARK:
                continue
            word, _, rest = call.data.decode().partition(" ")
            moment = call.begun + later
            if word == "F":
                self.failure = rest
                continue
            number, _, text = rest.partition(" ")
            self.batch = max(self.batch, int(number))
            if word == "S":
                highest, facts = json.loads(text)
                self._restart(int(number), highest, _facts(facts), moment)
            elif word == "A":
                for id, fact, *last in json.loads(text):
                    self._entries.setdefault(id, []).append((int(number), tuple(fact) if fact else None))
                    self._passing.update((id, tuple(each)) for each in last)
                self._begun.append((moment, int(number)))
            elif word == "C":
                self._committed.append((moment, int(number)))
            else:
                self.ended = self.ended or word == "E"
                self._committed.append((moment, int(number)))
                self._promised.append((moment, int(number)))

    def _restart(self, number: int, highest: int, found: Facts, moment: int) -> None:
        """Only the process was lost: everything committed is there."""
        self.check(found, highest, moment, killed=True)
        for id in [id for id in self._entries if id > highest]:
            del self._entries[id]  # of a batch that did not happen; the id is used anew
        for id, entries in self._entries.items():
            if entries[-1][1] != found.get(id):
                entries.append((number, found.get(id)))
        self._begun.append((moment, number))

    def check(self, found: Facts, high_water: int, moment: int, *, killed: bool = False) -> None:
        """Fails when this may not be what is found after a loss at this moment: of power, or of the process alone."""
        promised = _last(self._committed if killed else self._promised, moment)
        begun = max(promised, _last(self._begun, moment))
        highest = 0
        for id, entries in self._entries.items():
            at = bisect_right(entries, promised, key=_batch)
            base = entries[at - 1][1] if at else None
            fact = found.get(id)
            if at:
                highest = max(highest, id)
            if fact == base or any(batch <= begun and fact == other for batch, other in entries[at:]):
                continue
            may = [base, *(other for batch, other in entries[at:] if batch <= begun)]
            raise Violation(f"job {id} is {fact}, may be {may} (batch {promised} promised, {begun} begun)")
        if unknown := found.keys() - self._entries.keys():
            raise Violation(f"jobs {sorted(unknown)[:5]} never were")
        if high_water < highest:
            raise Violation(f"the highest id is {high_water}, but {highest} was promised")

    @property
    def commits(self) -> list[int]:
        """The moments at which something was committed."""
        return [moment for moment, _ in self._committed]

    def ever(self, id: int) -> set[Fact | None]:
        """All that a job ever was."""
        return {fact for _, fact in self._entries.get(id, [])} | {fact for key, fact in self._passing if key == id}


def _facts(facts: list[tuple[int, list[Any]]]) -> Facts:
    return {id: (fact[0], fact[1], fact[2], fact[3], fact[4], fact[5]) for id, fact in facts}


def _batch(entry: tuple[int, Fact | None]) -> int:
    return entry[0]


def _last(marks: list[tuple[int, int]], moment: int) -> int:
    at = bisect_right(marks, moment, key=lambda each: each[0])
    return max((number for _, number in marks[:at]), default=0)
