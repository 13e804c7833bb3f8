"""Planted faults, each of which the torturer must find: the proof that it would find a real one.

A life plants one in its own process, before anything is opened. What looks at images is sound.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from geventstalk.durable.store import Store
from journal import DELETE, FULL, Journal
from journal.sqlite import log
from journal.sqlite.log import SyncPoint


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """The fault stands in the place of what `owner` calls `name`; it gets that to call it."""
    setattr(owner, name, make(getattr(owner, name)))


def delete_unrecorded_in_compaction() -> None:
    """A delete is not written down while its job's segment is the one that is compacted."""

    def make(append: Any) -> Any:
        def faulty(self: Journal, key: int, kind: int, payload: bytes) -> None:
            victim = self._sealed[self._retiring] if len(self._sealed) > self._retiring else None
            skip = kind == DELETE and victim is not None and self.live.segment_of(key) == victim.number
            append(self, key, kind, payload)
            if skip:
                self._batch.pop()

        return faulty

    _replace(Journal, "append", make)


def no_sync_of_the_directory() -> None:
    """After a new segment was made, or renamed."""

    def make(fsync_path: Any) -> Any:
        def faulty(path: str) -> None:
            if not os.path.isdir(path):
                fsync_path(path)

        return faulty

    _replace(log, "fsync_path", make)


def moved_jobs_not_synced() -> None:
    """Before their segment goes."""

    def make(guard: Any) -> Any:
        def faulty(self: Journal) -> SyncPoint:
            point: SyncPoint = guard(self)
            point._files = []
            return point

        return faulty

    _replace(Journal, "_guard", make)


def compaction_drops_a_job() -> None:
    """One in three."""

    def make(compact_slice: Any) -> Any:
        def faulty(self: Journal, payload_of: Any) -> None:
            self.commit()
            append = Journal.append

            def dropping(journal: Journal, key: int, kind: int, payload: bytes) -> None:
                append(journal, key, kind, payload)
                if kind == FULL and not key % 3:
                    journal._batch.pop()

            Journal.append = dropping  # type: ignore[method-assign]
            try:
                compact_slice(self, payload_of)
            finally:
                Journal.append = append  # type: ignore[method-assign]

        return faulty

    _replace(Journal, "compact_slice", make)


def sync_of_nothing() -> None:
    """An fsync that is promised and not done."""

    def make(run: Any) -> Any:
        def faulty(self: SyncPoint) -> None:
            self._files = []
            run(self)

        return faulty

    _replace(SyncPoint, "run", make)


def sync_of_the_newest_only() -> None:
    """Of several segments that were written since the last one."""

    def make(run: Any) -> Any:
        def faulty(self: SyncPoint) -> None:
            self._files = self._files[-1:]
            run(self)

        return faulty

    _replace(SyncPoint, "run", make)


def failed_sync_goes_unnoticed() -> None:
    def make(run: Any) -> Any:
        def faulty(self: SyncPoint) -> None:
            with suppress(Exception):
                run(self)

        return faulty

    _replace(SyncPoint, "run", make)


def left_over_built_upon() -> None:
    """What a crash left in a WAL is not synced before the journal goes on."""
    _replace(log, "sync_files", lambda sync_files: lambda path: None)


def order_of_burying_forgotten() -> None:
    def make(change: Any) -> Any:
        def faulty(self: Store, job: Any) -> None:
            rank, job.rank = job.rank, 1 if job.rank and job.rank < 10**9 else job.rank
            change(self, job)
            job.rank = rank

        return faulty

    _replace(Store, "change", make)


def ids_forgotten() -> None:
    """The highest id is not noted in a new segment, so that it goes with its job's records."""

    def make(note: Any) -> Any:
        def faulty(self: Any, high_water: int, oldest: int) -> None:
            note(self, 0, oldest)

        return faulty

    _replace(log.SegmentWriter, "note", make)


CANARIES: dict[str, tuple[Callable[[], None], str, str]] = {
    "delete unrecorded in compaction": (delete_unrecorded_in_compaction, "plain", "f0"),
    "no sync of the directory": (no_sync_of_the_directory, "plain", "f0"),
    "moved jobs not synced": (moved_jobs_not_synced, "plain", "fms"),
    "compaction drops a job": (compaction_drops_a_job, "plain", "f0"),
    "sync of nothing": (sync_of_nothing, "plain", "f0"),
    "sync of the newest only": (sync_of_the_newest_only, "plain", "fms"),
    "failed sync goes unnoticed": (failed_sync_goes_unnoticed, "failing", "f0"),
    "left over built upon": (left_over_built_upon, "plain", "fms"),
    "order of burying forgotten": (order_of_burying_forgotten, "plain", "f0"),
    "ids forgotten": (ids_forgotten, "plain", "f0"),
}
"""Each with the kind of disk and the policy under which it is looked for."""


def plant(name: str) -> None:
    CANARIES[name][0]()
