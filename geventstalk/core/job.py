"""A job, its states and its numeric limits, and the ledger that hears of every change to one.

This module must not know where jobs are kept, clocks, or how anything is written down.
Invariant: `rank` is the key that orders a job in the place its state names.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i32, i64, mypyc_attr, u8

from geventstalk._build import BUILD
from geventstalk.limits import U32_MAX as U32_MAX
from geventstalk.limits import U64_MAX as U64_MAX
from geventstalk.tags import REASONS, TOLD, Tags

UPLOADING: Final = 0
READY: Final = 1
RESERVED: Final = 2
BURIED: Final = 3
DELAYED: Final = 4
DELETED: Final = 5

STATE_NAMES: Final = ("invalid", "ready", "reserved", "buried", "delayed", "deleted")

ID_MAX_BITS: Final = 63
"""Ids end at 2**63 - 1, because SQLite's integers do."""
URGENT_PRI_MAX: Final = 1023
"""A ready job of this priority or a smaller number counts as urgent."""
SECOND_NS: Final = 1_000_000_000
CRLF_BYTES: Final = 2
"""A body in memory ends in CRLF. The size in a put does not count these bytes."""


SMALL_BYTES: Final = 512 - 33
"""The C library allocates larger bodies, and gives back the pages between those that stay; Python the smaller ones."""
TAGS_HEAD_BYTES: Final = 7
"""Bytes that the tags of a job take in its record beside their text: a TaggedTally's numbers, and the text's length."""
_BIAS: Final = 1 << 31
"""Subtracted from unsigned numbers of 32 bits: mypyc knows signed ones only."""


@mypyc_attr(acyclic=True)
class Tally:
    """The counts of a job, and the number of the client that has it reserved. Most jobs of a backlog need none."""

    __slots__ = ("buries", "holder", "kicks", "releases", "reserves", "timeouts")

    def __init__(
        self, reserves: int = 0, timeouts: int = 0, releases: int = 0, buries: int = 0, kicks: int = 0
    ) -> None:
        self.reserves: i64 = reserves
        self.timeouts: i64 = timeouts
        self.releases: i64 = releases
        self.buries: i64 = buries
        self.kicks: i64 = kicks
        self.holder: i64 = 0

    def numbers(self) -> tuple[int, int, int, int, int]:
        """Returns the counts in the order of fields.COUNTS, which is that of the constructor."""
        return self.reserves, self.timeouts, self.releases, self.buries, self.kicks


@mypyc_attr(acyclic=True)
class TaggedTally(Tally):
    """The tally of a job that has tags, from its put on.

    `tried` counts the deliveries since the put or the last kick, for the tag `tries`. `why` says which tag ended the
    job's time in its tube, 0 for none. `freed` says that the job waits for no group any more, and `until_ns` when the
    time ends in which it has to be reserved, 0 for never.
    """

    __slots__ = ("freed", "tags", "tried", "until_ns", "why")

    def __init__(
        self, tags: Tags, reserves: int = 0, timeouts: int = 0, releases: int = 0, buries: int = 0, kicks: int = 0
    ) -> None:
        super().__init__(reserves, timeouts, releases, buries, kicks)
        self.tags = tags
        self.tried: i64 = 0
        self.why: u8 = 0
        self.freed = False
        self.until_ns: i64 = 0


@mypyc_attr(acyclic=True)
class Job:
    """One job. `body` includes its trailing CRLF; None stands for one that only the ledger has, see bodies.py.

    delay and ttr are the seconds the client gave.

    `rank` is the priority of a ready job, the deadline (monotonic ns) of a delayed or reserved one, and the number of
    its burying for a buried one. `holder` is the number of the client that has it reserved, 0 for none. `segment`
    is the journal segment that holds its whole record, 0 for none. `tube` is a number too: this module knows no tubes.
    `created_ns` is when its put began, `since_ns` when it came into its state, or to this process.

    Compiled, a job takes 96 bytes beside its body, of which 93 are used. Fields that few jobs need belong in the tally.
    """

    __slots__ = (
        "_delay_s",
        "_holder",
        "_pri",
        "_segment",
        "_ttr_s",
        "_tube",
        "body",
        "created_ns",
        "id",
        "rank",
        "since_ns",
        "state",
        "tally",
    )

    def __init__(self, id: int, tube: int, pri: int, delay_s: int, ttr_s: int) -> None:
        self.id: i64 = id
        self.rank: i64 = 0
        self.created_ns: i64 = 0
        self.since_ns: i64 = 0
        self.body: bytes | None = b""
        self.tally: Tally | None = None
        self._tube: i32 = 0
        self._pri: i32 = 0
        self._delay_s: i32 = 0
        self._ttr_s: i32 = 0
        self._segment: i32 = 0
        self.state: u8 = UPLOADING
        self.tube = tube
        self.pri = pri
        self.delay_s = delay_s
        self.ttr_s = ttr_s
        self.segment = 0
        self.holder = 0

    @property
    def tube(self) -> int:
        return int(self._tube) + _BIAS

    @tube.setter
    def tube(self, number: int) -> None:
        self._tube = number - _BIAS

    @property
    def pri(self) -> int:
        return int(self._pri) + _BIAS

    @pri.setter
    def pri(self, pri: int) -> None:
        self._pri = pri - _BIAS

    @property
    def delay_s(self) -> int:
        return int(self._delay_s) + _BIAS

    @delay_s.setter
    def delay_s(self, delay_s: int) -> None:
        self._delay_s = delay_s - _BIAS

    @property
    def ttr_s(self) -> int:
        return int(self._ttr_s) + _BIAS

    @ttr_s.setter
    def ttr_s(self, ttr_s: int) -> None:
        self._ttr_s = ttr_s - _BIAS

    @property
    def segment(self) -> int:
        return int(self._segment) + _BIAS

    @segment.setter
    def segment(self, number: int) -> None:
        self._segment = number - _BIAS

    @property
    def holder(self) -> int:
        tally = self.tally
        return 0 if tally is None else tally.holder

    @holder.setter
    def holder(self, number: int) -> None:
        tally = self.tally
        if tally is not None:
            tally.holder = number
        elif number:
            self.counts().holder = number

    def counts(self) -> Tally:
        """Returns the job's tally, made now when it had none."""
        tally = self.tally
        if tally is None:
            tally = self.tally = Tally()
        return tally

    def moved(self) -> Job:
        """Returns the same job in other memory, and what belongs to it, but for a large body."""
        job = Job(self.id, self.tube, self.pri, self.delay_s, self.ttr_s)
        job.rank = self.rank
        job.created_ns = self.created_ns
        job.since_ns = self.since_ns
        job.segment = self.segment
        job.state = self.state
        body = self.body
        job.body = body if body is None or len(body) > SMALL_BYTES else bytes(memoryview(body))
        tally = self.tally
        if isinstance(tally, TaggedTally):
            job.tally = tally
        elif tally is not None:
            job.tally = Tally(*tally.numbers())
        job.holder = self.holder
        return job


if BUILD == "pure":
    # Interpreted, the getters and setters would be calls, and a call can fail in the middle of a change. Plain slots.
    for _name in ("tube", "pri", "delay_s", "ttr_s", "segment", "holder"):
        setattr(Job, _name, vars(Job)[f"_{_name}"])


def reason_of(tally: TaggedTally) -> str:
    """Returns why a job's time in its tube ended, or why its worker buried it; `none` when neither happened."""
    return tally.tags.reason.decode("utf-8", "replace") if tally.why == TOLD else REASONS[tally.why]


def tags_of(job: Job) -> Tags | None:
    """Returns the tags of a job, None when it has none."""
    tally = job.tally
    return tally.tags if isinstance(tally, TaggedTally) else None


def tags_bytes(job: Job) -> int:
    """Returns how many bytes a job's tags add to its whole record, at most."""
    tally = job.tally
    return TAGS_HEAD_BYTES + len(tally.tags.text) if isinstance(tally, TaggedTally) else 0


def held_body(job: Job) -> bytes:
    """Returns the body of a job that has it in memory."""
    body = job.body
    assert body is not None, "a body is asked for that is not in memory"
    return body


@mypyc_attr(allow_interpreted_subclasses=True)
class Ledger:
    """Hears of every change of a job that must outlive the process. This one keeps nothing: jobs live in memory only.

    The engine calls it before any client is told of the change. When a call raises, the ledger has kept nothing of it.
    """

    def admits(self, body_bytes: int, tube_name: bytes) -> bool:
        """Returns whether a job of this size fits, with all that may still happen to it."""
        return True

    def put(self, job: Job, tube_name: bytes) -> None:
        """Keeps all of a new job."""

    def prepare(self, job: Job, tube_name: bytes) -> bool | None:
        """Keeps a slice of a large job, before its put(). Returns whether put() may follow; else it is called again.

        None says that the job does not fit after all. A slice takes about a millisecond.
        """
        return True

    def unprepare(self, job: Job) -> None:
        """Gives up the put() of this job, whether it was prepared or not."""

    def prepare_rewrite(self, job: Job, tube_name: bytes, ttr_s: int) -> bool | None:
        """Does and returns what prepare() does, before a rewrite() of a job with this tube and ttr."""
        return True

    def rewrite(self, job: Job, tube_name: bytes) -> None:
        """Keeps a job anew whose tube or ttr changed, and perhaps more. prepare_rewrite() returned True."""

    def abandon_rewrite(self, job: Job) -> None:
        """Gives up the rewrite() of this job, whether it was prepared or not."""

    def has_begun(self, job: Job) -> bool:
        """Returns whether prepare() or prepare_rewrite() has kept a part of the job, but not all."""
        return False

    def change(self, job: Job) -> None:
        """Keeps the state, priority, delay, order and counts of a job."""

    def delete(self, job: Job) -> None:
        """Forgets a job."""

    def mark(self, mark: Job, tube_name: bytes) -> None:
        """Keeps a mark, as retire() does."""

    def retire(self, job: Job, mark: Job, tube_name: bytes) -> None:
        """Forgets a job, and keeps a mark of it, DELETED and without a body.

        The mark has a segment afterwards when it outlives the process. Then delete() ends it, in time.
        """
