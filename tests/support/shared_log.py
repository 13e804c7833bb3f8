"""A log on PostgreSQL as a node that leads uses it, without a fence: it claims epochs by a statement of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from journal import make_shared_log
from journal.log import Log, Record
from journal.postgres.link import Link
from journal.postgres.log import PostgresLog
from journal.postgres.place import Place
from tests.support.faults import Rig


def claim(url: str) -> int:
    """A newer epoch."""
    place = Place(url)
    link = Link(place)
    link.connect()
    try:
        (row,) = link.execute(f"UPDATE {place.schema}.leader SET epoch = epoch + 1 RETURNING epoch").rows
        return int(row[0] or 0)
    finally:
        link.close()


def take_over(log: PostgresLog) -> list[Record]:
    """Reads a log to its end, which is made where there is none, and leads it. start() is the caller's.

    Returns what it read.
    """
    make_shared_log(log.place_of.url)
    log.open()
    found = list(log.replay())
    epoch = claim(log.place_of.url)
    while True:
        batches = log.more()
        if not batches:
            break
        found += [Record(key, kind, payload, segment) for segment, rows in batches for _, key, kind, _, payload in rows]
    assert log.lead(epoch)
    return found


def open_log(url: str, **options: Any) -> PostgresLog:
    """A log that takes records."""
    log = PostgresLog(url, **{"segment_bytes": 1 << 20, **options})
    try:
        take_over(log)
        log.start()
    except BaseException:
        log.abandon()
        raise
    return log


def sync(log: Log) -> None:
    """Waits until all that was committed is safe."""
    point = log.sync_point()
    if point is not None:
        point.run()


def settle(log: Log, until: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Lets the log's own work go on until something is so."""
    end = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < end, "the log's own work does not come to an end"
        log.tend()
        if isinstance(log, PostgresLog):
            log.pump()
        time.sleep(0.001)


def compact(log: Log, payload_of: Callable[[int], bytes | None]) -> None:
    """Compacts for as long as there is something worth it."""
    end = time.monotonic() + 30
    while True:
        assert time.monotonic() < end, "compaction does not end"
        log.tend()
        if isinstance(log, PostgresLog):
            log.pump()
        if log.wants_compaction():
            log.compact_slice(payload_of)
        elif not log.settling:
            return
        else:
            time.sleep(0.0005)


class Pumped(PostgresLog):
    """A log whose owner has no watcher: tend() takes what has come."""

    def start(self) -> None:
        """Leads, as if this were the only node."""
        if not self.epoch:
            epoch = claim(self.place_of.url)
            while self.more():
                pass
            assert self.lead(epoch)
        super().start()

    def tend(self) -> None:
        self.pump()
        super().tend()


def pumped(url: str, **options: Any) -> Pumped:
    """A log that is used as one in a directory is: with replay() and start()."""
    make_shared_log(url)
    log = Pumped(url, **options)
    log.open()
    return log


class SharedRig(Rig):
    """The rig of a log in a database."""

    def __init__(self, url: str, *, segment_bytes: int = 1 << 16, compact: bool = True) -> None:
        self.url = url
        super().__init__(Path(), segment_bytes=segment_bytes, compact=compact)

    def made(self, *, accept_damage: bool) -> Any:
        return pumped(
            self.url,
            segment_bytes=self.segment_bytes,
            compact=self.compact,
            accept_damage=accept_damage,
            log=self.said.append,
        )

    def crash(self, into: Path) -> Rig:
        """Ends the process. Returns the rig, with a log that has everything that was acknowledged."""
        self.settle()
        self.sync()
        self.journal.abandon()
        return self

    def segments(self) -> list[str]:
        return [str(each.number) for each in self.journal.segments(1000) if each.state != "spare"]
