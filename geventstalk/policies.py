"""Policies of tubes: what holds for jobs that are put into the tubes of a pattern.

This module must not know files, tubes or clients. A policy gives a put the tags that its client does not give, bounds
its numbers, says how many and how large jobs may be, and how many may come in a second. Invariant: what a policy gives
a job is in the job's tags and numbers from then on. So it outlives the process, and a changed policy counts for later
puts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

from geventstalk import globs
from geventstalk.limits import U32_MAX
from geventstalk.tags import Tags, parse

ANY: Final = (0, U32_MAX)
NO_LIMIT: Final = 1 << 53
LIMITS: Final = ("max_jobs", "max_job_bytes", "max_bytes", "max_rate")
"""The terms that bound a tube, where they are given."""
SECOND_NS: Final = 1_000_000_000
_TUBES_MIN: Final = 4096
"""The number of tubes whose next turns a policy keeps before it forgets those that are past."""


class Terms(NamedTuple):
    """A policy as an operator gives it. `tags` are words of a put; each of the numbers has its least and its most.

    Each tube has at most `max_jobs` jobs, whose bodies have at most `max_bytes` together, and gets at most `max_rate`
    puts a second. With `pause` no job is handed out. `keep` says how many done
    jobs stay visible, or for how many seconds; `events`, that jobs tell what has happened to them.
    """

    tags: tuple[str, ...] = ()
    priority: tuple[int, int] = ANY
    delay: tuple[int, int] = ANY
    ttr: tuple[int, int] = ANY
    max_jobs: int = U32_MAX
    max_job_bytes: int = U32_MAX
    max_bytes: int = NO_LIMIT
    max_rate: int = NO_LIMIT
    pause: bool = False
    keep: tuple[int, int] = (0, 0)
    events: bool = False


@mypyc_attr(acyclic=True)
class Policy:
    """The terms of a pattern, as the engine asks for them.

    `refused` counts puts that a limit refused, `delayed` those that had to wait for their turn.
    """

    __slots__ = (
        "_delay",
        "_due_ns",
        "_max_bytes",
        "_max_jobs",
        "_priority",
        "_step_ns",
        "_tidy_at",
        "_ttr",
        "_words",
        "delayed",
        "max_job_bytes",
        "refused",
        "tags",
        "terms",
    )

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._words = [word.encode() for word in terms.tags]
        self.tags = parse(b" ".join(self._words)) if self._words else None
        self._priority = terms.priority
        self._delay = terms.delay
        self._ttr = terms.ttr
        self._max_jobs = terms.max_jobs
        self.max_job_bytes = terms.max_job_bytes
        self._max_bytes = terms.max_bytes
        self._step_ns = 0 if terms.max_rate == NO_LIMIT else SECOND_NS // terms.max_rate
        self._due_ns: dict[bytes, int] = {}  # by tube: when the next put has its turn, if puts come evenly
        self._tidy_at = _TUBES_MIN
        self.refused = 0
        self.delayed = 0

    def tags_with(self, given: Tags) -> Tags:
        """Returns the tags of a put with these tags of its client: all of them, and the other tags of the policy."""
        names = [word.partition(b":")[0] for word in given.text.split(b" ")]
        more = [word for word in self._words if word.partition(b":")[0] not in names]
        return parse(b" ".join([given.text, *more])) if more else given

    def turn_of_put(self, tube: bytes, now_ns: int) -> int:
        """Takes the next turn of a put into a tube. Returns when that is, `now_ns` at the earliest.

        A tube without puts for a while may have those of one second at once.
        """
        if not self._step_ns:
            return now_ns
        due_ns = max(self._due_ns.get(tube, 0), now_ns)
        if len(self._due_ns) >= self._tidy_at:
            self._due_ns = {name: each for name, each in self._due_ns.items() if each > now_ns}
            self._tidy_at = max(_TUBES_MIN, 2 * len(self._due_ns))  # so a put pays for few tubes
        self._due_ns[tube] = due_ns + self._step_ns
        return max(now_ns, due_ns - SECOND_NS + self._step_ns)

    def takes_put(self, tube: bytes, now_ns: int) -> bool:
        """Takes the turn of a put if that is now. Returns whether it is."""
        before = self._due_ns.get(tube, 0)
        if self.turn_of_put(tube, now_ns) <= now_ns:
            return True
        self._due_ns[tube] = before
        self.delayed += 1
        return False

    def room_for(self, size: int, jobs: int, taken: int) -> str:
        """Returns "" when a body fits into a tube with these jobs and bytes, otherwise the limit that it exceeds."""
        if jobs >= self._max_jobs:
            return f"{self._max_jobs} jobs"
        return f"{self._max_bytes} bytes" if taken + size > self._max_bytes else ""

    def priority_of(self, given: int) -> int:
        return min(max(given, self._priority[0]), self._priority[1])

    def delay_of(self, given: int) -> int:
        return min(max(given, self._delay[0]), self._delay[1])

    def ttr_of(self, given: int) -> int:
        return min(max(given, self._ttr[0]), self._ttr[1])


class Policies:
    """All policies of a server. The first pattern that fits the name of a tube counts."""

    def __init__(self, terms: Sequence[tuple[str, Terms]]) -> None:
        self.all = [(glob, Policy(each)) for glob, each in terms]
        self.trails = any(each.events or each.keep != (0, 0) for _, each in terms)
        self.pauses = any(each.pause for _, each in terms)
        self._patterns = [globs.parts_of(glob) for glob, _ in terms]

    def all_of(self, tube_name: bytes) -> list[tuple[str, Policy]]:
        """Returns the pattern and the policy that count for a tube, if any do."""
        for at, parts in enumerate(self._patterns):
            if globs.fits(parts, tube_name):
                return [self.all[at]]
        return []

    def of(self, tube_name: bytes) -> Policy | None:
        """Returns the policy of a tube, None without one."""
        found = self.all_of(tube_name)
        return found[0][1] if found else None
