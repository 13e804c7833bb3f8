"""The selection of jobs for a command: ids, or a filter, of which the protocol alone can follow a part.

The grammar is the server's own. This module finds the parts that the protocol can do as well: tubes and states.
Invariant: an ambiguous word is refused.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from geventstalk import filters
from geventstalk.limits import is_tube_name

_ID_MAX: Final = (1 << 63) - 1


class BadSelection(Exception):
    """The words are no valid selection. The text is for the user."""


@dataclass(frozen=True)
class Selection:
    """Jobs by their ids, or by a filter.

    `tubes` are the filter's terms about tubes, `states` are those that its terms about states leave, and `names_states`
    says whether a term asks for states. `beyond` is the first term that the protocol alone cannot follow.
    """

    ids: tuple[int, ...] = ()
    filter: str = ""
    tubes: tuple[filters.Term, ...] = ()
    states: frozenset[str] = frozenset(filters.STATES)
    names_states: bool = False
    beyond: str | None = None

    def matching(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if all(_fits(name, term) for term in self.tubes)]

    @property
    def exact_tubes(self) -> tuple[str, ...] | None:
        """The only tubes that can match, if the filter names them."""
        if len(self.tubes) != 1 or self.tubes[0].negated or any("*" in name for name in self.tubes[0].names):
            return None
        return tuple(dict.fromkeys(self.tubes[0].names))


def _fits(name: str, term: filters.Term) -> bool:
    return any(matches(name, pattern) for pattern in term.names) != term.negated


def matches(name: str, pattern: str) -> bool:
    """Returns whether the name fits the pattern, in which `*` stands for anything."""
    return fnmatch.fnmatchcase(name, pattern)  # no name can hold `[` or `?`, and no pattern either


def parse(words: Sequence[str], *, bare_words: bool) -> Selection:
    """Reads ids, or the terms of a filter. `bare_words` says whether a word without a key may search bodies."""
    if words and all(word.isascii() and word.isdecimal() for word in words):
        ids = dict.fromkeys(int(word[:20]) for word in words)
        if min(ids) == 0 or max(ids) > _ID_MAX:
            raise BadSelection(f"ids go from 1 to {_ID_MAX}")
        return Selection(ids=tuple(ids))
    text = " ".join(words).strip()
    try:
        terms = filters.parse(text)
    except filters.FilterError as error:
        raise BadSelection(f"{str(error).rstrip('.')} (character {error.at + 1} of {text})") from None
    if not bare_words:
        _refuse_bare([text[term.begin : term.end] for term in terms])
    return _selection(text, terms)


def _selection(text: str, terms: Sequence[filters.Term]) -> Selection:
    states = frozenset(filters.STATES)
    for term in terms:
        if term.key == "state":
            states = states - set(term.names) if term.negated else states & set(term.names)
    beyond = [text[term.begin : term.end] for term in terms if term.key not in ("tube", "state")]
    tubes = tuple(term for term in terms if term.key == "tube")
    named = any(term.key == "state" and not term.negated for term in terms)
    return Selection(filter=text, tubes=tubes, states=states, names_states=named, beyond=beyond[0] if beyond else None)


def _refuse_bare(terms: Sequence[str]) -> None:
    if not terms:
        raise BadSelection("say which jobs, by ids or by terms such as tube:mail or state:buried")
    for term in terms:
        key, colon, _ = term.removeprefix("-").replace("<", ":").replace(">", ":").partition(":")
        if colon and key.lower() in filters.KEYS:
            continue
        if is_tube_name(term.encode("utf-8", "surrogateescape")):
            raise BadSelection(f"{term} could mean anything; write tube:{term}, or body:{term}, or ids alone")
        raise BadSelection(f"{term} could mean anything; write body:{term} to look for it")
