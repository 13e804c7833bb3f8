"""Planted faults, each of which the torturer must find: the proof that it would find a real one.

A life plants one in its own process, before anything is opened. What looks at images is sound.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from geventstalk.durable.store import Store
from journal import DELETE, FULL, Journal
from journal.sqlite import segments
from journal.sqlite.bodies import BodyFile
from journal.sqlite.sealed import FileSync
from journal.sqlite.wal import WalFile
from journal.sqlite.writer import SegmentWriter


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """The fault stands in the place of what `owner` calls `name`; it gets that to call it."""
    setattr(owner, name, make(getattr(owner, name)))


def delete_unrecorded_in_compaction() -> None:
    """A delete is not written down while its job's segment is the one that is compacted."""

    def make(append: Any) -> Any:
        def faulty(self: Journal, key: int, kind: int, payload: bytes) -> None:
            staying = self._segments.staying
            victim = staying[0] if staying else None
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

    _replace(segments, "fsync_path", make)


def moved_jobs_not_synced() -> None:
    """Before their segment goes."""

    def make(guard: Any) -> Any:
        def faulty(self: Journal) -> FileSync:
            point: FileSync = guard(self)
            point.run = lambda: None  # type: ignore[method-assign]  # the fault
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

            Journal.append = dropping  # type: ignore[method-assign,assignment]  # the fault
            try:
                compact_slice(self, payload_of)
            finally:
                Journal.append = append  # type: ignore[method-assign]  # the fault ends

        return faulty

    _replace(Journal, "compact_slice", make)


def sync_of_nothing() -> None:
    """An fsync that is promised and not done."""

    def make(run: Any) -> Any:
        def faulty(self: FileSync) -> None:
            self._files = []
            run(self)

        return faulty

    _replace(FileSync, "run", make)


def sync_of_the_newest_only() -> None:
    """Of several segments that were written since the last one."""

    def make(run: Any) -> Any:
        def faulty(self: FileSync) -> None:
            self._files = self._files[-1:]
            run(self)

        return faulty

    _replace(FileSync, "run", make)


def failed_sync_goes_unnoticed() -> None:
    def make(run: Any) -> Any:
        def faulty(self: FileSync) -> None:
            with suppress(Exception):
                run(self)

        return faulty

    _replace(FileSync, "run", make)


def left_over_built_upon() -> None:
    """Does not sync what a crash left in a WAL before the journal goes on."""
    _replace(segments, "sync_files", lambda sync_files: lambda path: None)


def body_file_behind_its_rows() -> None:
    """A sync of the WAL without the payloads that its rows name."""
    _replace(BodyFile, "sync", lambda sync: lambda self: None)


def sealed_without_its_bodies() -> None:
    """A sealed segment says that all of it is on the device."""

    def make(sync: Any) -> Any:
        def faulty(self: WalFile, *, only_bodies: bool = False) -> None:
            if not only_bodies:
                sync(self)

        return faulty

    _replace(WalFile, "sync", make)


def bodies_written_over() -> None:
    """A body file that is ahead of its rows: the next commit writes where the last one has written."""

    def make(write: Any) -> Any:
        def faulty(self: BodyFile, payloads: list[bytes]) -> int:
            written: int = write(self, payloads)
            return written - min(written, 700)

        return faulty

    _replace(BodyFile, "write", make)


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

    _replace(SegmentWriter, "note", make)


def changes_wait_for_ever() -> None:
    """No loss: a life that does not end."""
    _replace(Store, "behind", lambda behind: property(lambda self: True))
    _replace(Store, "catch_up", lambda catch_up: lambda self, now_ns: False)


class Canary(NamedTuple):
    """A planted fault, and where it is looked for: it shows soonest there."""

    plant: Callable[[], None]
    kind: str = "plain"
    policy: str = "f0"
    orders: Mapping[str, Any] = {}  # of Orders, otherwise than drawn
    kills: float = 0.4  # how many lives end by a kill


LARGE = {"sizes": (10, 3000, 6000), "segment_bytes": 1 << 15}
SMALL = {"sizes": (0, 10, 60), "segment_bytes": 1 << 15}
UNSEALED = {**SMALL, "segment_bytes": 1 << 22}
"""Sealing writes records once more, and so makes up for a sync that failed."""
CANARIES: dict[str, Canary] = {
    "delete unrecorded in compaction": Canary(delete_unrecorded_in_compaction, orders=SMALL),
    "no sync of the directory": Canary(no_sync_of_the_directory, orders=SMALL),
    "moved jobs not synced": Canary(moved_jobs_not_synced, policy="fms", orders=SMALL),
    "compaction drops a job": Canary(compaction_drops_a_job, orders=SMALL),
    "sync of nothing": Canary(sync_of_nothing, orders=SMALL),
    "sync of the newest only": Canary(sync_of_the_newest_only, policy="fms", orders=SMALL),
    "failed sync goes unnoticed": Canary(failed_sync_goes_unnoticed, "failing syncs", orders=UNSEALED),
    "left over built upon": Canary(left_over_built_upon, policy="F", orders=SMALL, kills=0.9),
    "body file behind its rows": Canary(body_file_behind_its_rows, orders=LARGE),
    "sealed without its bodies": Canary(sealed_without_its_bodies, policy="F", orders=LARGE),
    "bodies written over": Canary(bodies_written_over, orders=LARGE),
    "order of burying forgotten": Canary(order_of_burying_forgotten, orders=SMALL),
    "ids forgotten": Canary(ids_forgotten, orders={**SMALL, "jobs": 2}),
    "changes wait for ever": Canary(changes_wait_for_ever, orders={"bound_s": 1.0}, kills=0),
}


def plant(name: str) -> None:
    CANARIES[name].plant()
