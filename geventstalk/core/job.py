"""A job, its states and its numeric limits, and the ledger that hears of every change to one.

This room must not know where jobs are kept, what time it is, or how anything is written down.
Invariant: `rank` is the key that orders a job in the place its state names.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from geventstalk.limits import U32_MAX as U32_MAX
from geventstalk.limits import U64_MAX as U64_MAX

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


@mypyc_attr(acyclic=True)
class Tally:
    """How often a job was reserved, timed out, released, buried and kicked. Most jobs in a backlog have none."""

    __slots__ = ("buries", "kicks", "releases", "reserves", "timeouts")

    def __init__(
        self, reserves: int = 0, timeouts: int = 0, releases: int = 0, buries: int = 0, kicks: int = 0
    ) -> None:
        self.reserves = reserves
        self.timeouts = timeouts
        self.releases = releases
        self.buries = buries
        self.kicks = kicks


@mypyc_attr(acyclic=True)
class Job:
    """One job. `body` includes its trailing CRLF; delay and ttr are the seconds the client gave.

    `rank` is the priority of a ready job, the deadline (monotonic ns) of a delayed or reserved one, and the number of
    its burying for a buried one. `holder` is the number of the client that has it reserved, 0 for nobody. `segment`
    is the journal segment that holds its whole record, 0 for none. `tube` is a number too: this room knows no tubes.
    `created_ns` is when its put began, `since_ns` when it came into its state, or to this process.
    """

    __slots__ = (
        "body",
        "created_ns",
        "delay_s",
        "holder",
        "id",
        "pri",
        "rank",
        "segment",
        "since_ns",
        "state",
        "tally",
        "ttr_s",
        "tube",
    )

    def __init__(self, id: int, tube: int, pri: int, delay_s: int, ttr_s: int) -> None:
        self.id = id
        self.tube = tube
        self.pri = pri
        self.delay_s = delay_s
        self.ttr_s = ttr_s
        self.body = b""
        self.created_ns = 0
        self.since_ns = 0
        self.state: int = UPLOADING
        self.rank = 0
        self.holder = 0
        self.segment = 0
        self.tally: Tally | None = None

    def counts(self) -> Tally:
        """The job's tally, made now when it had none."""
        tally = self.tally
        if tally is None:
            tally = self.tally = Tally()
        return tally


@mypyc_attr(allow_interpreted_subclasses=True)
class Ledger:
    """Hears of every change of a job that must outlive the process. This one keeps nothing: jobs live in memory only.

    The engine calls it before anybody is told of the change. When a call raises, the ledger has kept nothing of it.
    """

    def admits(self, body_bytes: int, tube_name: bytes) -> bool:
        """Whether there is room for a job of this size and for all that may still happen to it."""
        return True

    def put(self, job: Job, tube_name: bytes) -> None:
        """The job is new: all of it must be kept."""

    def prepare(self, job: Job, tube_name: bytes) -> bool | None:
        """Before the put() of a large job: keeps a slice of it. Returns whether put() may follow; else call again.

        None says that there is no room for it after all. A slice takes about a millisecond.
        """
        return True

    def unprepare(self, job: Job) -> None:
        """The put() of this job does not come, whether it was prepared or not."""

    def prepare_rewrite(self, job: Job, tube_name: bytes, ttr_s: int) -> bool | None:
        """Before a rewrite() of a job, which is to have this tube and ttr by then. Answers as prepare()."""
        return True

    def rewrite(self, job: Job, tube_name: bytes) -> None:
        """The job's tube or ttr changed, and perhaps more: all of it must be kept anew. prepare_rewrite() said True."""

    def abandon_rewrite(self, job: Job) -> None:
        """The rewrite() of this job does not come, whether it was prepared or not."""

    def has_begun(self, job: Job) -> bool:
        """Whether prepare() or prepare_rewrite() has kept some of the job, and its end is still to come."""
        return False

    def change(self, job: Job) -> None:
        """State, priority, delay, order or counts of the job changed."""

    def delete(self, job: Job) -> None:
        """The job is gone."""
