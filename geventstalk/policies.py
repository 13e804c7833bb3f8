"""Policies of tubes: what holds for jobs that are put into the tubes of a pattern.

This module must not know files, tubes or clients. A policy gives a put the tags that its client does not give, bounds
its numbers, and says how many and how large jobs may be. Invariant: what a policy gives a job is in the job's tags and
numbers from then on. So it outlives the process, and a changed policy counts for later puts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

from geventstalk import globs
from geventstalk.limits import U32_MAX
from geventstalk.tags import Tags, parse

ANY: Final = (0, U32_MAX)


class Terms(NamedTuple):
    """A policy as an operator gives it. `tags` are words of a put; each of the numbers has its least and its most."""

    tags: tuple[str, ...] = ()
    priority: tuple[int, int] = ANY
    delay: tuple[int, int] = ANY
    ttr: tuple[int, int] = ANY
    max_jobs: int = U32_MAX
    max_job_bytes: int = U32_MAX


@mypyc_attr(acyclic=True)
class Policy:
    """The terms of a pattern, as the engine asks for them."""

    __slots__ = ("_delay", "_priority", "_ttr", "_words", "max_job_bytes", "max_jobs", "tags")

    def __init__(self, terms: Terms) -> None:
        self._words = [word.encode() for word in terms.tags]
        self.tags = parse(b" ".join(self._words)) if self._words else None
        self._priority = terms.priority
        self._delay = terms.delay
        self._ttr = terms.ttr
        self.max_jobs = terms.max_jobs
        self.max_job_bytes = terms.max_job_bytes

    def tags_with(self, given: Tags) -> Tags:
        """Returns the tags of a put whose client gave these: all of them, and those of the policy beside them."""
        names = [word.partition(b":")[0] for word in given.text.split(b" ")]
        more = [word for word in self._words if word.partition(b":")[0] not in names]
        return parse(b" ".join([given.text, *more])) if more else given

    def priority_of(self, given: int) -> int:
        return min(max(given, self._priority[0]), self._priority[1])

    def delay_of(self, given: int) -> int:
        return min(max(given, self._delay[0]), self._delay[1])

    def ttr_of(self, given: int) -> int:
        return min(max(given, self._ttr[0]), self._ttr[1])


class Policies:
    """All policies of a server. The first pattern that fits the name of a tube counts."""

    def __init__(self, terms: Sequence[tuple[str, Terms]]) -> None:
        self.terms = terms
        self._policies = [(globs.parts_of(glob), Policy(each)) for glob, each in terms]

    def terms_of(self, tube_name: bytes) -> list[tuple[str, Terms]]:
        """Returns the pattern and the terms that count for a tube, if any do."""
        fitting = [(glob, terms) for glob, terms in self.terms if globs.fits(globs.parts_of(glob), tube_name)]
        return fitting[:1]

    def of(self, tube_name: bytes) -> Policy | None:
        """Returns the policy of a tube, None without one."""
        for parts, policy in self._policies:
            if globs.fits(parts, tube_name):
                return policy
        return None
