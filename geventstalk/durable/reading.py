"""Reads bodies of jobs back that only the log has.

A Reading waits for a device only in run(), which may be run in any thread.
Invariant: body_of() gives no body but the one with which the job was put.
"""

from __future__ import annotations

from geventstalk.core.bodies import Bodies
from geventstalk.core.job import DELETED, Job
from journal.errors import JournalDamaged
from journal.errors import JournalError as JournalError
from journal.log import Payloads, Wanted


class Reading:
    """Reads the bodies of jobs that have none in memory: run(), then body_of() for each of `jobs`."""

    def __init__(self, jobs: list[Job], bodies: Bodies, payloads: Payloads) -> None:
        self.jobs = jobs
        self._bodies = bodies
        self._payloads = payloads
        self._asked = {key: (segment, place) for segment, place, key in payloads.wanted}

    def run(self) -> None:
        self._payloads.run()

    @property
    def lacking(self) -> bool:
        """True when some bodies were not read for a lack of descriptors, memory or space: a later Reading may."""
        return self._payloads.lacking

    def body_of(self, job: Job) -> bytes | None:
        """Returns the body, or None when the job was moved or is gone meanwhile, or `lacking`.

        Raises JournalDamaged, or JournalFailed when the record cannot be read although it still stands there.
        """
        body = job.body
        if body is not None:
            return body
        payload = self._payloads.found.get(job.id)
        if payload is None:
            if job.state == DELETED or self._asked[job.id] != (job.segment, self._bodies.place_of(job)):
                return None
            failure = self._payloads.failed.get(job.id)
            if failure is None:
                return None
            raise failure
        if job.state == DELETED:
            return None
        size = self._bodies.size_of(job)
        body = payload[-size:]
        if len(body) != size or not body.endswith(b"\r\n"):
            raise JournalDamaged(f"the record of job {job.id} in segment {job.segment} is not that of the job")
        return body


def wanted_of(jobs: list[Job], bodies: Bodies) -> list[Wanted]:
    """Returns the places of the records of jobs whose bodies are not in memory."""
    return [(job.segment, bodies.place_of(job), job.id) for job in jobs if job.body is None]
