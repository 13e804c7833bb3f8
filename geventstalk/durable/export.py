"""A job as the line of an export, which `geventstalk import` reads: from a journal, or from a running server.

This module must not know where jobs are, nor the line's bytes. Times in a line are of the wall clock.
Invariant: the body comes last, so that a long one can be written piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from geventstalk.core.job import BURIED, DELAYED, DELETED, READY, RESERVED, STATE_NAMES, Job, TaggedTally, tags_of
from geventstalk.fields import COUNTS
from geventstalk.tags import REASONS

EXPORT_FORMAT: Final = "geventstalk-jobs"
EXPORT_VERSION: Final = 1


def header_of_export(jobs: int | None, highest_id: int) -> dict[str, object]:
    """Returns the first line. `jobs` is how many follow, None when that is unknown."""
    known = {} if jobs is None else {"jobs": jobs}
    return {"format": EXPORT_FORMAT, "version": EXPORT_VERSION, **known, "highest_id": highest_id}


def fields_of(job: Job, tube_name: bytes, to_wall: Callable[[int], int]) -> dict[str, object]:
    """Returns all of the line but the body. A reserved job is exported as ready, as a restart makes it.

    A job that is deleted stands for its key, which has to be unique until the deadline.
    """
    return {
        "id": job.id,
        "tube": tube_name.decode("ascii"),
        **changeable_fields_of(job, to_wall),
        "ttr": job.ttr_s,
        "created_ns": max(0, to_wall(job.created_ns)),
        **({"tags": tags.text.decode("ascii")} if (tags := tags_of(job)) is not None else {}),
    }


def changeable_fields_of(job: Job, to_wall: Callable[[int], int]) -> dict[str, object]:
    """Returns the fields that a change record holds, too."""
    state = READY if job.state == RESERVED else job.state
    fields: dict[str, object] = {"state": STATE_NAMES[state], "pri": job.pri, "delay": job.delay_s}
    if state in (DELAYED, DELETED):
        fields["deadline_ns"] = max(0, to_wall(job.rank))
    elif state == BURIED:
        fields["burying"] = job.rank
    if job.tally is not None:
        fields |= {key: getattr(job.tally, key) for key in COUNTS}
    if isinstance(job.tally, TaggedTally):
        fields |= {"tried": job.tally.tried, "reason": REASONS[job.tally.why]}
    return fields
