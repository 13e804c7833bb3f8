"""The journal by itself, against a dict: append, commit, sync, rotate, compact, reopen, and failures at every moment.

What the records mean, and the random life that is killed and given errors, is in tests/support/faults.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from geventstalk._build import BUILD
from journal import CHANGE, DELETE, FULL, Journal, JournalDamaged, JournalError, JournalFailed, JournalLocked
from journal.sqlite.backup import backup
from journal.sqlite.files import read_watermark, write_watermark
from journal.sqlite.format import PAGE_BYTES
from journal.sqlite.lock import DirectoryLock
from journal.sqlite.replay import Replay
from journal.sqlite.writer import SegmentWriter
from tests.support.faults import (
    FAILED,
    PATIENCE_S,
    Life,
    Model,
    Rig,
    check_life,
    filler,
    inject,
    payload,
    read_sound,
    run_driver,
    strace_problem,
    wants_compaction,
)

needs_strace = pytest.mark.skipif(bool(strace_problem()), reason=strace_problem() or "strace works")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "journal")


@pytest.fixture(params=["sqlite", "postgres"])
def each_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """A rig of each kind of log."""
    rig = made_rig(request)
    yield rig
    rig.journal.abandon()


def made_rig(request: pytest.FixtureRequest, **options: Any) -> Rig:
    if request.param == "sqlite":
        return Rig(request.getfixturevalue("tmp_path") / "journal-0", **options)
    url = request.getfixturevalue("postgres_url")
    from tests.support.shared_log import SharedRig

    return SharedRig(url, **options)


def reopened(rig: Rig) -> Rig:
    """After a clean end; opening proves that everything is there."""
    rig.close()
    rig.open()
    return rig


# What a journal holds


def test_what_was_committed_is_there_again(each_rig: Rig) -> None:
    for key in (1, 2, 3, 4):
        each_rig.put(key)
    each_rig.change(2)
    each_rig.change(2)
    each_rig.delete(3)
    each_rig.put(5, 0)
    each_rig.journal.commit()
    reopened(each_rig).close()


# Bug: The end sealed the old segment twice, and reported a failure although nothing was lost.
def test_an_end_whose_own_commit_rotates_is_clean(rig: Rig) -> None:
    rig.settle()
    rig.put(1, 200_000)
    ended = rig.journal
    assert ended.current == 1
    reopened(rig)
    assert ended.current == 2, "it did rotate"
    rig.close()


def test_what_was_not_committed_is_not_there(rig: Rig, tmp_path: Path) -> None:
    rig.put(1)
    rig.journal.commit()
    rig.settle()  # a copy must not meet the worker at making the next segment
    held = dict(rig.model)
    rig.put(2)
    rig.change(1)
    shutil.copytree(rig.directory, tmp_path / "copy")
    assert read_sound(tmp_path / "copy").model == held
    rig.close()


@pytest.mark.parametrize("times", [1, 2, 5])
def test_restart_after_restart_changes_nothing(each_rig: Rig, times: int) -> None:
    each_rig.put(1)
    each_rig.put(2)
    each_rig.change(1)
    each_rig.journal.commit()
    for _ in range(times):
        reopened(each_rig)
        assert each_rig.journal.high_water == 2
        assert each_rig.said == []
    each_rig.close()
    assert len(each_rig.segments()) == 1, "a start that writes nothing leaves nothing"


def test_an_empty_journal_can_be_started_and_ended_again_and_again(each_rig: Rig) -> None:
    for _ in range(4):
        reopened(each_rig)
        assert each_rig.said == []
    each_rig.close()


def test_kill_after_kill_does_not_pile_up_segments(each_rig: Rig, tmp_path: Path) -> None:
    each_rig.put(1)
    each_rig.journal.commit()
    for number in range(6):
        each_rig.crash(tmp_path / f"copy-{number}").open()
        assert each_rig.said == []
        each_rig.compact_all()
    assert len(each_rig.segments()) <= 4, each_rig.segments()
    each_rig.close()


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049, 65_535, 1 << 20])
def test_bodies_of_every_size_come_back(each_rig: Rig, size: int) -> None:
    each_rig.put(1, size)
    each_rig.put(2, 10)
    each_rig.change(1)
    each_rig.journal.commit()
    reopened(each_rig).close()


@pytest.mark.slow
def test_a_body_larger_than_a_row_can_be_is_split_and_made_whole(each_rig: Rig, tmp_path: Path) -> None:
    """Parts are 16 MiB; compaction moves such a record as any other, and a kill leaves all of it or nothing."""
    for key, size in ((1, (1 << 24) - 8), (2, (1 << 24) - 7), (3, (1 << 25) + 5)):
        each_rig.put(key, size)
        each_rig.put(key + 10, 5)
        each_rig.journal.commit()
    reopened(each_rig)
    each_rig.rotate(11)
    for key in (11, 12, 13, 2):
        each_rig.delete(key)
    each_rig.journal.commit()
    each_rig.compact_all()
    each_rig.crash(tmp_path / "copy").open()
    each_rig.close()


def test_a_record_larger_than_a_segment_gets_its_own(each_rig: Rig) -> None:
    each_rig.put(1, 10)
    each_rig.put(2, 10 * each_rig.segment_bytes)
    each_rig.journal.commit()
    each_rig.settle()
    each_rig.rotate(1)
    assert each_rig.journal.current >= 2
    reopened(each_rig).close()


def test_keys_may_be_as_large_as_ids_can_be(each_rig: Rig) -> None:
    for key in (1, 2**32, 2**53 + 1, 2**63 - 1):
        each_rig.put(key)
    each_rig.delete(2**53 + 1)
    each_rig.journal.commit()
    reopened(each_rig)
    assert each_rig.journal.high_water == 2**63 - 1
    each_rig.close()


def test_a_second_journal_is_locked_out(rig: Rig) -> None:
    code = os.spawnlp(  # another process: locks of one process do not exclude each other
        os.P_WAIT,
        "python3",
        "python3",
        "-c",
        "import fcntl, sys\n"
        f"file = open({str(rig.directory / 'lock')!r}, 'a')\n"
        "try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError: sys.exit(7)\n",
    )
    assert code == 7
    rig.close()


def test_a_directory_that_cannot_be_had_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for where in (tmp_path / "a" / "b", tmp_path / "file"):
        with pytest.raises(JournalLocked) as caught:
            Journal(str(where), segment_bytes=1 << 15)
        assert str(where) in str(caught.value) and "\n" not in str(caught.value)


def test_the_directory_belongs_to_its_owner_alone(rig: Rig) -> None:
    """Other users of the host cannot read job bodies."""
    rig.put(1)
    rig.journal.commit()
    rig.rotate(1)
    for path in rig.directory.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
    rig.close()


# The largest key


def test_the_largest_key_is_remembered_after_everything_is_deleted_and_compacted(each_rig: Rig) -> None:
    """W12: an id is never given twice."""
    each_rig.put(1000)
    each_rig.journal.commit()
    for _ in range(3):
        for key in list(each_rig.model):
            each_rig.delete(key)
        each_rig.journal.commit()
        each_rig.compact_all()
        reopened(each_rig)
        assert each_rig.journal.high_water == 1000
        each_rig.compact_all()
    each_rig.close()


def test_the_largest_key_is_remembered_when_the_end_meets_the_last_removal(rig: Rig) -> None:
    """The end comes while the worker removes the only segment that had a record."""
    for key in range(1, 11):
        rig.put(key)
    for key in range(1, 11):
        rig.delete(key)
    rig.journal.commit()
    reopened(rig)
    deadline = time.monotonic() + PATIENCE_S
    while not wants_compaction(rig.journal):
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    rig.journal.compact_slice(rig.payload_of)
    rig.close()
    assert read_sound(rig.directory).high_water == 10
    rig.open()
    assert rig.journal.high_water == 10
    rig.close()


def test_the_largest_key_is_in_the_segment_before_the_one_with_its_record_goes(each_rig: Rig, tmp_path: Path) -> None:
    each_rig.put(1)
    each_rig.put(5000)
    each_rig.delete(5000)
    each_rig.journal.commit()
    each_rig.rotate(1)
    each_rig.compact_all()
    each_rig.crash(tmp_path / "copy").open()
    assert each_rig.journal.high_water == 5000
    each_rig.close()


# Segments


def test_segments_stay_about_as_large_as_asked(rig: Rig) -> None:
    for key in range(1, 601):
        rig.put(key, 100)
        rig.journal.commit()
        rig.settle()
    sizes = [path.stat().st_size for path in rig.directory.glob("segment-*.db")]
    assert len(sizes) > 5
    assert max(sizes) < 2 * rig.segment_bytes, sizes
    reopened(rig).close()


def test_compaction_leaves_what_is_live(each_rig: Rig, seed: int) -> None:
    draw = random.Random(seed)
    for key in range(1, 301):
        each_rig.put(key, 200)
        each_rig.journal.commit()
        each_rig.settle()
    for key in draw.sample(range(1, 301), 250):
        each_rig.delete(key)
    each_rig.journal.commit()
    before = len(each_rig.segments())
    each_rig.compact_all()
    assert len(each_rig.segments()) < before
    assert each_rig.journal.records_moved > 0
    reopened(each_rig).close()


def test_a_segment_that_grew_too_large_is_left_behind_also_when_nothing_is_written(rig: Rig) -> None:
    """The next segment was not ready when this one was full; it is soon, and what is dead here is given back then."""
    for key in range(1, 41):
        rig.put(key, 5000)
    rig.journal.commit()
    for key in range(2, 41):
        rig.delete(key)
    rig.journal.commit()
    deadline = time.monotonic() + PATIENCE_S
    while rig.journal.current == 1:
        assert time.monotonic() < deadline
        rig.compact_all()
        time.sleep(0.005)
    rig.compact_all()
    total = sum(path.stat().st_size for path in rig.directory.iterdir())
    assert total < 3 * rig.journal.live.total_bytes + 3 * rig.segment_bytes + (1 << 18), total
    rig.close()


def test_without_compaction_every_segment_stays(tmp_path: Path) -> None:
    """-n: nothing is removed, whatever is dead."""
    rig = Rig(tmp_path / "journal", compact=False)
    rig.put(1)
    for key in range(2, 200):
        rig.put(key, 1000)
        rig.delete(key)
        rig.journal.commit()
        rig.settle()
    assert not wants_compaction(rig.journal)
    numbers = [int(name[8:16]) for name in rig.segments()]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 5
    rig.close()
    rig.open()
    rig.close()


def test_a_segment_goes_only_when_what_replaced_it_is_on_the_device(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """W4: the order of what compaction does, as the system sees it."""
    calls: list[tuple[str, str]] = []
    real_sync, real_unlink = os.fdatasync, os.unlink

    def fdatasync(fd: int) -> None:
        real_sync(fd)
        calls.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))

    def unlink(path: str) -> None:
        calls.append(("unlink", str(path)))
        real_unlink(path)

    rig.put(1, 500)
    rig.rotate(1)
    rig.rotate(1)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(os, "unlink", unlink)
    rig.compact_all()
    removed = [place for place, call in enumerate(calls) if call[0] == "unlink" and call[1].endswith("00000001.db")]
    assert removed, calls
    current = f"segment-{rig.journal.current:08d}.db-wal"
    assert any(call[0] == "sync" and call[1].endswith(current) for call in calls[: removed[0]]), calls
    rig.close()


def test_segments_that_hold_nothing_go_with_one_note_and_one_sync(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note takes room. A note for each of them would take a full disk's last room before any of them goes."""
    rig.put(1)
    for _ in range(8):
        rig.rotate(1)
    rig.put(2)
    rig.delete(1)
    rig.journal.commit()
    rig.settle()
    wal = rig.directory / f"segment-{rig.journal.current:08d}.db-wal"
    before, gone, syncs = wal.stat().st_size, rig.segments()[:-2], counted_syncs(monkeypatch)
    assert len(gone) == 8
    rig.journal.compact_slice(rig.payload_of)
    assert not wants_compaction(rig.journal)
    assert wal.stat().st_size - before <= 2 * (PAGE_BYTES + 24), "the table of notes takes two pages at the most"
    rig.settle()
    assert not set(gone) & set(rig.segments()) and len(syncs) == 1
    rig.crash(tmp_path / "copy").open()
    rig.close()


def test_a_delete_that_is_not_committed_does_not_let_its_segment_go(rig: Rig, tmp_path: Path) -> None:
    """A slice of compaction may come between a change and its commit; a kill right then loses neither key nor order."""
    rig.put(1)
    rig.put(2)
    rig.journal.commit()
    rig.rotate(1)
    rig.change(2)
    rig.delete(1)
    rig.journal.commit()
    rig.rotate(2)
    rig.put(3)
    rig.journal.commit()
    held = dict(rig.model)
    rig.delete(2)
    first = rig.directory / rig.segments()[0]
    if wants_compaction(rig.journal):
        rig.journal.compact_slice(rig.payload_of)
    deadline = time.monotonic() + 0.5
    while first.exists() and time.monotonic() < deadline:  # that it stays is as well
        time.sleep(0.002)
    worker = rig.journal._worker
    while worker._open > len(worker._done):  # a copy beside a removal is no state that a kill leaves
        assert time.monotonic() < deadline + 60
        time.sleep(0.002)
    shutil.copytree(rig.directory, tmp_path / "copy")
    found = read_sound(tmp_path / "copy").model
    assert found in (held, rig.model)
    rig.close()


def test_a_reader_of_a_segment_that_is_sealed_does_no_harm(rig: Rig, tmp_path: Path) -> None:
    """sqlite3 or a backup reads the current segment when it is sealed: its WAL stays, and must go last or never."""
    rig.put(1)
    rig.put(2)
    rig.journal.commit()
    reader = sqlite3.connect(f"file:{rig.directory / rig.segments()[0]}?mode=ro", uri=True, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM each_record").fetchone()[0] >= 2
    rig.change(2)
    rig.delete(1)
    rig.journal.commit()
    rig.rotate(2)
    rig.crash(tmp_path / "copy-1").open()
    reader.close()
    rig.rotate(2)
    rig.compact_all()
    rig.crash(tmp_path / "copy-2").open()
    rig.close()


@needs_strace
def test_a_kill_between_the_removals_of_a_segment_with_its_wal_brings_nothing_back(tmp_path: Path) -> None:
    """A left-over WAL holds the deletes of its segment: without it, the rest of the segment would be believed."""
    home = tmp_path / "home"
    rig = Rig(home)
    rig.put(1)
    rig.put(2)
    rig.journal.commit()
    reader = sqlite3.connect(f"file:{home / rig.segments()[0]}?mode=ro", uri=True, isolation_level=None)
    rig.delete(1)
    rig.journal.commit()
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM each_record").fetchone()[0] == 3
    rig.put(3)
    rig.delete(3)
    rig.journal.commit()
    rig.rotate(2)
    calls: list[str] = []
    real = os.unlink

    def unlink(path: str) -> None:
        real(path)
        calls.append(str(path))
        if "00000001" in str(path):
            shutil.copytree(home, tmp_path / f"cut-{len(calls)}")

    os.unlink = unlink  # type: ignore[assignment]  # of its arguments the journal gives one
    try:
        rig.rotate(2)
        rig.compact_all()
    finally:
        os.unlink = real
    reader.close()
    cuts = sorted(tmp_path.glob("cut-*"))
    assert cuts, "the segment was not removed"
    for cut in cuts:
        assert read_sound(cut).model == rig.model, cut
    rig.close()


# Sync


def counted_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return names


def test_one_sync_covers_all_that_was_committed_before(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """W28: one fsync for all clients that wait."""
    rig.settle()
    names = counted_syncs(monkeypatch)
    for key in range(1, 5):
        rig.put(key)
        rig.journal.commit()
    point = rig.journal.sync_point()
    assert point is not None
    assert rig.journal.sync_point() is None, "there is nothing more to sync"
    point.run()
    assert names == ["segment-00000001.db-wal"]
    rig.close()


def test_commit_waits_for_no_device(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.settle()
    caller = threading.get_ident()
    waits: list[str] = []
    for name in ("fdatasync", "fsync"):
        real: Callable[[int], None] = getattr(os, name)

        def sync(fd: int, real: Callable[[int], None] = real) -> None:
            if threading.get_ident() == caller:
                waits.append(os.readlink(f"/proc/self/fd/{fd}"))
            real(fd)

        monkeypatch.setattr(os, name, sync)
    for key in range(1, 300):
        rig.put(key, 500)
        rig.journal.commit()
        rig.settle()
        if wants_compaction(rig.journal):
            rig.journal.compact_slice(rig.payload_of)
    assert rig.journal.current > 2
    assert waits == []
    monkeypatch.undo()
    rig.close()


def blocked(go: threading.Event) -> None:
    go.wait(60)


def behind(rig: Rig) -> bool:
    return bool(rig.journal.behind)


def somebody_waits(timeout_s: float) -> None:
    raise AssertionError("the caller waits for the worker")


def test_commit_waits_for_no_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the next segment does not come, changes have to wait, and nothing else."""
    rig.put(1)
    rig.journal.commit()
    rig.settle()
    go = threading.Event()
    rig.rotate(1)
    rig.settle()
    rig.journal._worker.submit(lambda: blocked(go), lambda: None, urgent=True)
    monkeypatch.setattr(rig.journal._worker, "wait", somebody_waits)
    before = rig.journal.current
    for _ in range(1000):
        rig.change(1, 2000)
        rig.journal.commit()
        if rig.journal.behind:
            break
    else:
        pytest.fail("changes never have to wait")
    for _ in range(1000):
        wants_compaction(rig.journal)
        if not rig.journal.catch_up(rig.payload_of):
            break  # only the worker can help
    else:
        pytest.fail("catching up comes to no end")
    assert rig.journal.current <= before + 1
    monkeypatch.undo()
    go.set()
    rig.catch_up()
    rig.settle()
    assert not behind(rig)
    rig.close()


def test_a_sync_after_rotation_covers_both_segments(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """W5: what the old segment got last is not forgotten. The worker, which seals it, is slower than the sync."""
    rig.put(1)
    rig.journal.commit()
    rig.settle()
    before = rig.journal.current
    sealing = threading.Event()
    real_submit = rig.journal._worker.submit
    later: list[tuple[Callable[[], None], Callable[[], None]]] = []
    monkeypatch.setattr(rig.journal._worker, "submit", lambda work, done, **_: later.append((work, done)))
    while rig.journal.current == before:
        rig.change(1, 2000)
        rig.journal.commit()
    names = counted_syncs(monkeypatch)
    point = rig.journal.sync_point()
    assert point is not None
    point.run()
    assert f"segment-{before:08d}.db-wal" in names
    assert f"segment-{before + 1:08d}.db-wal" in names
    monkeypatch.undo()
    for work, done in later:
        real_submit(work, done)
    sealing.set()
    rig.settle()
    rig.close()


# Bug: A loss of power between the two was taken for damage, and the next start refused the journal.
def test_the_watermark_never_speaks_of_a_segment_before_the_one_behind_is_synced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments end before the worker seals them, and neither an end nor what follows healing waits for that."""
    before = rig.journal.current
    monkeypatch.setattr(rig.journal._worker, "submit", lambda work, done, **_: None)  # a worker that is late
    while rig.journal.current == before:
        rig.put(1, 2000)
        rig.journal.commit()
    names = counted_syncs(monkeypatch)
    rig.journal._guard().run()
    first, second = (f"segment-{number:08d}.db" for number in (before, before + 1))
    assert names == [first + "-bodies", first + "-wal", second + "-wal"]
    assert read_watermark(str(rig.directory)) == (before + 1, 0)
    monkeypatch.undo()
    rig.journal.abandon()


def test_the_watermark_only_moves_forward(rig: Rig) -> None:
    """The worker's sync before a segment goes may end long after a newer one of the server's."""
    rig.put(1)
    rig.journal.commit()
    late = rig.journal._guard()
    rig.rotate(1)
    rig.put(2)
    rig.sync()
    newest = read_watermark(str(rig.directory))
    assert newest[0] == 2 and newest[1] > 0
    late.run()
    assert read_watermark(str(rig.directory)) == newest
    rig.close()


def test_a_sync_that_ends_after_the_journal_writes_into_no_file(rig: Rig, tmp_path: Path) -> None:
    """The number of its descriptor may be another file's by then."""
    rig.put(1)
    rig.journal.commit()
    rig.settle()
    watermark = rig.journal._segments._watermark
    assert watermark is not None
    rig.close()
    others = [(tmp_path / f"other-{count}").open("wb") for count in range(20)]
    watermark.advance(9, 9)
    for each in others:
        each.close()
    assert [each.stat().st_size for each in tmp_path.glob("other-*")] == [0] * 20


# Failures


class Failing:
    """Makes the n-th call of a function of `os` fail; counts all calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int, error: int) -> None:
        self.calls = 0
        self.failed = False
        real = getattr(os, name)

        def call(*args: object, **named: object) -> object:
            self.calls += 1
            if self.calls == at:
                self.failed = True
                raise OSError(error, os.strerror(error))
            return real(*args, **named)

        monkeypatch.setattr(os, name, call)


def test_after_a_failed_sync_nothing_is_written_synced_or_removed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux forgets what it could not write: a second fdatasync would say that all is well."""
    rig.put(1)
    rig.put(2)
    rig.journal.commit()
    rig.rotate(1)
    rig.rotate(2)
    rig.change(1)
    rig.journal.commit()
    point = rig.journal.sync_point()
    assert point is not None
    segments = rig.segments()
    syncs = Failing(monkeypatch, "fdatasync", 1, 5)
    with pytest.raises(JournalFailed) as caught:
        point.run()
    assert "\n" not in str(caught.value)
    with pytest.raises(JournalError):
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            rig.put(9)
            rig.journal.commit()
            if wants_compaction(rig.journal):
                rig.journal.compact_slice(rig.payload_of)
            time.sleep(0.001)
    rig.journal.abandon()
    assert syncs.calls == 1, "it was synced again"
    assert [name for name in segments if name not in rig.segments()] == []


def test_sealed_segments_keep_no_descriptor(rig: Rig) -> None:
    """Also where a sync is never asked for, as under `-F`."""
    counts = []
    rig.put(1)
    for _ in range(3):
        for _ in range(8):
            rig.rotate(1)
            rig.compact_all()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert rig.journal.current > 24
    assert counts[2] <= counts[0] + 2, counts
    rig.close()


@pytest.mark.parametrize(
    "large",
    [False, pytest.param(True, marks=pytest.mark.skipif(BUILD == "compiled", reason="a constant cannot be replaced"))],
)
def test_what_is_given_up_keeps_its_wal(rig: Rig, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """Closing the last connection, SQLite merges a WAL and unlinks it. No fsync comes before: a cut would take all."""
    for key in (1, 2, 3):
        rig.put(key, 1500 if key > 1 else 5000)
        rig.sync()
    rig.settle()
    before = {path.name: path.read_bytes() for path in rig.directory.glob("segment-00000001.db*")}
    assert len(before["segment-00000001.db-wal"]) > 6000 and len(before["segment-00000001.db-bodies"]) > 5000
    if large:  # a clean end leaves a WAL that takes too long to merge to the next start
        monkeypatch.setattr("journal.sqlite.log._SEAL_AT_END_BYTES", 1000)
        rig.close()
    else:
        rig.journal.abandon()
    for name in ("segment-00000001.db", "segment-00000001.db-wal", "segment-00000001.db-bodies"):
        assert (rig.directory / name).read_bytes() == before[name]
    rig.open()
    rig.close()


@pytest.mark.parametrize("call", ["fdatasync", "fsync", "unlink", "rename"])
def test_a_failure_in_the_worker_is_final(rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    rig.put(1)
    rig.journal.commit()
    rig.settle()
    failing = Failing(monkeypatch, call, 1, 5)
    deadline = time.monotonic() + PATIENCE_S
    with pytest.raises(JournalFailed) as caught:
        while time.monotonic() < deadline:
            rig.change(1, 2000)
            rig.journal.commit()
            rig.catch_up()
            if wants_compaction(rig.journal):
                rig.journal.compact_slice(rig.payload_of)
    assert failing.failed
    assert "\n" not in str(caught.value)
    with pytest.raises(JournalFailed):
        rig.put(2)
        rig.journal.commit()
    rig.journal.abandon()


def test_after_a_failure_the_next_start_has_all_that_was_committed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(1)
    rig.journal.commit()
    rig.settle()
    Failing(monkeypatch, "fdatasync", 1, 5)
    held = dict(rig.model)
    with pytest.raises(JournalFailed):
        while True:
            rig.change(1, 2000)
            rig.journal.commit()
            held = dict(rig.model)
            rig.catch_up()
            if wants_compaction(rig.journal):
                rig.journal.compact_slice(rig.payload_of)
    rig.journal.abandon()
    monkeypatch.undo()
    rig.model = held
    rig.open()
    rig.close()


# Bug: Each such start left two empty segments; a hundred filled a small disk.
def test_starts_that_are_killed_at_once_do_not_pile_up_segments(rig: Rig, tmp_path: Path) -> None:
    """Compaction has no time to tidy up; on a full disk, what they leave would keep the next one from starting."""
    rig.put(1)
    rig.journal.commit()
    counts = []
    for number in range(5):
        rig.crash(tmp_path / f"copy-{number}").open()
        assert rig.said == []
        counts.append(len(rig.segments()))
    assert counts[1:] == counts[:1] * 4, counts
    rig.put(2)
    reopened(rig).close()


def keep_from_unlinking(patch: pytest.MonkeyPatch, suffix: str) -> None:
    """Has the device fail where a file is removed whose name ends so."""
    real = os.unlink

    def unlink(path: str) -> None:
        if str(path).endswith(suffix):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(path)

    patch.setattr(os, "unlink", unlink)


# Bug: The start ended with a traceback and exit code 1.
@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_a_start_that_cannot_remove_a_segment_says_so_and_the_next_one_has_all(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    rig.put(1)
    rig.journal.commit()
    rig.crash(tmp_path / "first").open()
    rig.crash(tmp_path / "second")
    with monkeypatch.context() as patch:
        keep_from_unlinking(patch, f".db{suffix}")
        with pytest.raises(JournalFailed, match=rf"cannot remove .*\.db{suffix}: Input/output error"):
            rig.open()
    rig.journal.abandon()
    rig.open()
    assert rig.said == []
    rig.close()


@pytest.mark.parametrize(
    ("note", "before", "synced", "idle"),
    [
        ((2, 1), {}, 3, True),
        ((2, 1), {2: 1}, 3, True),
        ((9, 1), {}, 3, False),
        ((2, 2), {}, 3, False),
        ((2, 1), {1: 1, 2: 1}, 3, False),
        ((2, 1), {}, 4, False),
    ],
)
def test_a_start_replaces_a_newest_segment_only_when_nothing_is_lost_with_it(
    tmp_path: Path, note: tuple[int, int], before: dict[int, int], synced: int, idle: bool
) -> None:
    """A kill may come when it is gone and the new one is not there yet: what it says must be known without it."""
    for number in (1, 2, 3):
        writer = SegmentWriter(str(tmp_path / f"segment-0000000{number}.db"), number, 0)
        writer.before = before if number == 3 else {}
        writer.note(*(note if number == 3 else (number, 1)))
        if number < 3:
            writer.append([(number, FULL, b"one")])
        writer.leave()
    with (tmp_path / "synced").open("wb") as file:
        write_watermark(file.fileno(), synced, 0)
    replay = Replay(str(tmp_path))
    assert len(list(replay.records())) == 2
    assert not replay.findings
    assert [found.idle for found in replay.found] == [False, False, idle]


def lose_a_tail(directory: Path, sealed: bool = False) -> None:
    """Power that goes around a rotation may take the tail of the old segment and leave the new one's records."""
    first = SegmentWriter(str(directory / "segment-00000001.db"), 1, 0)
    first.append([(1, FULL, b"one")])
    second = SegmentWriter(str(directory / "segment-00000002.db"), 2, 2)
    second.append([(2, CHANGE, b"of a record that is gone"), (1, CHANGE, b"of one that is there")])
    if sealed:
        first.seal()
    first.leave()
    second.leave()


@pytest.mark.parametrize("sealed", [False, True])
def test_changes_of_unacknowledged_records_are_no_damage(tmp_path: Path, sealed: bool) -> None:
    lose_a_tail(tmp_path, sealed)
    replay = Replay(str(tmp_path))
    assert [record.key for record in replay.records()] == [1, 1]
    assert replay.orphans == {2: 2}
    assert len(replay.findings) == sealed, replay.findings
    assert len(replay.notes) == (not sealed)


# Bug: Such a change was excused as well.
def test_changes_in_front_of_the_segment_that_lost_its_tail_are_damage(tmp_path: Path) -> None:
    """The job of such a change stood in an older segment, and those are whole."""
    lose_a_tail(tmp_path, sealed=True)
    third = SegmentWriter(str(tmp_path / "segment-00000003.db"), 3, 2)
    third.append([(3, CHANGE, b"of another record that is gone")])
    third.leave()
    replay = Replay(str(tmp_path))
    assert [record.key for record in replay.records()] == [1, 1]
    assert replay.unpromised == {3}
    assert len(replay.findings) == 1, replay.findings


# Bug: The start excused changes of jobs that were lost unpromised, and sealed the segment that excused them: the next
# start refused the journal (found by power cuts under -f50).
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("clean", [False, True])
def test_what_a_start_excuses_the_next_one_finds_settled(tmp_path: Path, clean: bool, copied: bool) -> None:
    """The start seals the segment that lost its tail. A backup of the directory before that start is no other."""
    lose_a_tail(tmp_path)
    directory = tmp_path
    if copied:
        directory = tmp_path / "copy"
        directory.mkdir()
        assert backup(str(tmp_path), str(directory)) == 2
    for starts in range(4):
        said: list[str] = []
        journal = Journal(str(directory), segment_bytes=1 << 16, log=said.append)
        assert [record.key for record in journal.replay()] == [1, 1]
        assert ["known by their changes only" in line for line in said if "torn" not in line] == [True] * (not starts)
        journal.start()
        for kept in journal._segments.sealed:
            deadline = time.monotonic() + PATIENCE_S
            while not kept.merged and time.monotonic() < deadline:
                journal.tend()
                time.sleep(0.001)
            assert kept.merged
        if clean:
            journal.close()
        else:
            journal.abandon()


# Bug: A backup of a directory in that state could not be started.
def test_what_a_start_excuses_is_settled_before_anything_is_sealed(tmp_path: Path) -> None:
    lose_a_tail(tmp_path)
    (tmp_path / "synced").write_bytes(b"another program's file, much longer than a watermark ever is, ends the start")
    journal = Journal(str(tmp_path), segment_bytes=1 << 16)
    assert [record.key for record in journal.replay()] == [1, 1]
    with pytest.raises(JournalFailed, match="is no watermark"):
        journal.start()
    journal.abandon()
    replay = Replay(str(tmp_path))
    assert [record.key for record in replay.records()] == [1, 1]
    assert not replay.orphans
    assert not replay.findings


# Bug: Deletes of excused jobs were lost with the segment that had them.
def test_what_was_settled_stays_so_when_the_segment_that_says_it_is_set_aside(tmp_path: Path) -> None:
    lose_a_tail(tmp_path)
    for accept_damage in (False, True, False):
        journal = Journal(str(tmp_path), segment_bytes=1 << 16, accept_damage=accept_damage)
        assert {record.key for record in journal.replay() if record.kind == FULL} <= {1, 4}
        journal.start()
        journal.append(4, FULL, b"this is to be damaged" * 100)
        journal.append(4, DELETE, b"")
        journal.repair(lambda key: b"one")
        journal.close()
        third = tmp_path / "segment-00000003.db"
        if third.exists():
            damage(third, b"this is to be damaged", b"this was damaged here")
    assert (tmp_path / "segment-00000003.db.damaged").exists()


# Damage that is accepted


def damage(path: Path, what: bytes, by: bytes) -> None:
    """Replaces bytes that must be there, once."""
    content = path.read_bytes()
    assert content.count(what) >= 1, "there is nothing to damage"
    path.write_bytes(content.replace(what, by, 1))


def test_a_missing_oldest_segment_is_found(rig: Rig, tmp_path: Path) -> None:
    """Compaction removes from that end: what it removed must be told from what another program did."""
    for key in range(1, 60):
        rig.put(key, 1000)
        rig.journal.commit()
        rig.settle()
    rig.sync()
    rig.close()
    assert len(rig.segments()) >= 2
    (rig.directory / rig.segments()[0]).unlink()
    with pytest.raises(JournalDamaged):
        rig.replayed()


@pytest.mark.parametrize("end", ["clean", "kill"])
def test_a_missing_oldest_segment_is_found_also_beside_one_that_was_only_prepared(
    rig: Rig, tmp_path: Path, end: str
) -> None:
    """The prepared segment does not say which segment is the oldest one. That is no word against the others."""
    rig.put(1)
    rig.rotate(1)
    rig.put(2)
    rig.sync()
    if end == "clean":
        rig.close()
    else:
        rig.crash(tmp_path / "killed")
    assert len(rig.segments()) == (2 if end == "clean" else 3)
    (rig.directory / rig.segments()[0]).unlink()
    with pytest.raises(JournalDamaged):
        rig.replayed()
    assert "segment-00000001.db is missing" in rig.said[0]


def test_only_a_prepared_segment_is_left_and_no_record_names_the_oldest(rig: Rig, tmp_path: Path) -> None:
    rig.put(1)
    rig.sync()
    rig.crash(tmp_path / "killed")
    assert len(rig.segments()) == 2
    for path in rig.directory.glob("segment-00000001.db*"):
        path.unlink()
    (rig.directory / "synced").unlink()
    with pytest.raises(JournalDamaged):
        rig.replayed()


def cut_off(path: Path, size: int) -> None:
    """As an earlier version left a new segment when the disk was full and the power failed at once."""
    writer = SegmentWriter(str(path), int(path.name[8:16]), 0)
    content = path.read_bytes()
    writer.discard()
    path.write_bytes(content[:size])


@pytest.mark.parametrize("size", [0, 2048, 4096])
def test_a_segment_that_was_never_complete_is_replaced(rig: Rig, tmp_path: Path, size: int) -> None:
    rig.put(1)
    rig.sync()
    rig.crash(tmp_path / "killed")
    unused = rig.directory / "segment-00000002.db"
    for path in rig.directory.glob("segment-00000002.db*"):
        path.unlink()
    cut_off(unused, size)
    rig.open()
    assert any("segment-00000002.db was never complete and holds nothing" in line for line in rig.said), rig.said
    assert rig.journal.current == 2
    rig.put(2)
    reopened(rig).close()


def test_a_segment_that_was_never_complete_and_cannot_be_removed_fails_the_start(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.put(1)
    rig.sync()
    rig.crash(tmp_path / "killed")
    for path in rig.directory.glob("segment-00000002.db*"):
        path.unlink()
    cut_off(rig.directory / "segment-00000002.db", 2048)
    with monkeypatch.context() as patch:
        keep_from_unlinking(patch, "segment-00000002.db")
        with pytest.raises(JournalFailed, match=r"cannot remove .*segment-00000002\.db: Input/output error"):
            rig.open()
    rig.journal.abandon()
    rig.open()
    rig.put(2)
    reopened(rig).close()


# Bug: The segment stayed open: the collector merges its WAL unsynced then.
def test_a_new_segment_without_room_that_cannot_be_removed_fails_the_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watermark is the first that finds no room. The new segment is there by then, and must go."""
    rig.put(1)
    rig.close()

    def pwrite(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        keep_from_unlinking(patch, "segment-00000002.db")
        with pytest.raises(JournalFailed, match=r"cannot remove .*segment-00000002\.db: Input/output error"):
            rig.open()
    rig.journal.abandon()
    rig.open()
    rig.put(2)
    reopened(rig).close()


@pytest.mark.parametrize("content", [b"my notes", b"my notes " * 512, b"SQLite format 3\0" + b"\xff" * 4080])
def test_a_short_file_of_another_program_is_not_replaced(rig: Rig, content: bytes) -> None:
    rig.put(1)
    rig.sync()
    rig.close()
    (rig.directory / "segment-00000002.db").write_bytes(content)
    with pytest.raises(JournalDamaged):
        rig.replayed()
    assert (rig.directory / "segment-00000002.db").read_bytes() == content


@pytest.mark.parametrize("why", ["a WAL", "the watermark", "a later segment"])
def test_a_short_segment_that_may_have_held_something_is_damaged(rig: Rig, tmp_path: Path, why: str) -> None:
    rig.put(1)
    rig.rotate(1)
    rig.put(2)
    rig.sync()
    rig.crash(tmp_path / "killed")
    assert len(rig.segments()) == 3
    number = 3 if why == "a WAL" else 2
    for path in rig.directory.glob(f"segment-0000000{number}.db*"):
        path.unlink()
    if why == "the watermark":
        for path in rig.directory.glob("segment-00000003.db*"):
            path.unlink()
    elif why == "a later segment":
        (rig.directory / "synced").unlink()
    cut_off(rig.directory / f"segment-0000000{number}.db", 2048)
    if why == "a WAL":
        (rig.directory / "segment-00000003.db-wal").write_bytes(b"something")
    with pytest.raises(JournalDamaged):
        rig.replayed()
    assert any(f"segment-0000000{number}.db" in line for line in rig.said), rig.said


class Counted(tuple[int, int, int, int, bytes]):
    """A row that counts with how many others it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return tuple.__eq__(self, other)

    __hash__ = tuple.__hash__


# Bug: Each record of a batch was compared with all dead records of the batch: time grew with the square.
@pytest.mark.skipif(BUILD == "compiled", reason="a compiled replay takes plain tuples only")
def test_a_restart_behind_churn_compares_no_records_with_each_other(tmp_path: Path) -> None:
    """Half of a batch is changes of keys that were deleted long ago, and whose whole records are compacted away."""
    count = 4000
    rows = [Counted((seq, seq, FULL if seq % 2 else CHANGE, 0, b"x")) for seq in range(1, count + 1)]
    replay = Replay(str(tmp_path))
    replay.high_water = count
    Counted.comparisons = 0
    kept = replay._belonging([*rows], 1)
    assert [row[0] for row in kept] == list(range(1, count + 1, 2))
    assert Counted.comparisons == 0


def test_a_replay_that_is_given_up_leaves_no_file_open(rig: Rig) -> None:
    """A compiled generator that is given up closes nothing."""
    rig.put(1)
    rig.close()
    before = os.listdir("/proc/self/fd")
    journal = Journal(str(rig.directory), segment_bytes=rig.segment_bytes)
    records = journal.replay()
    assert next(records).key == 1
    journal.abandon()
    assert os.listdir("/proc/self/fd") == before
    del records


def test_a_garbled_watermark_is_no_reason_to_count_to_infinity(rig: Rig) -> None:
    rig.put(1)
    rig.journal.commit()
    rig.close()
    path = rig.directory / "synced"
    content = path.read_bytes()
    assert content.startswith(b"00000000000000000001")
    path.write_bytes(content.replace(b"00000000000000000001", b"00000000000000020001", 1))
    assert rig.replayed().live.keys == 1  # it is no part of what is kept, and without it nothing is missing
    assert len(rig.said) < 10, len(rig.said)


def with_damage(rig: Rig) -> Path:
    """Two jobs, of which the second is damaged. Returns their segment."""
    rig.put(1)
    rig.journal.commit()  # else they would share a row
    rig.put(2)
    rig.journal.commit()
    rig.close()
    segment = rig.directory / rig.segments()[0]
    damage(segment, filler(2, 32), filler(3, 32))
    return segment


def test_damage_is_refused_and_nothing_is_changed(rig: Rig) -> None:
    segment = with_damage(rig)
    content = segment.read_bytes()
    with pytest.raises(JournalDamaged) as caught:
        rig.replayed()
    assert "\n" not in str(caught.value) and "1 jobs" in str(caught.value)
    assert [line for line in rig.said if segment.name in line], rig.said
    assert segment.read_bytes() == content


def test_accepted_damage_sets_the_file_aside_and_keeps_the_rest(rig: Rig) -> None:
    segment = with_damage(rig)
    content = segment.read_bytes()
    rig.open(accept_damage=True)
    assert rig.model.keys() == {1}
    assert (rig.directory / (segment.name + ".damaged")).read_bytes() == content
    for _ in range(2):
        reopened(rig)
        assert rig.said == []
    rig.compact_all()
    reopened(rig).close()


def test_accepted_damage_does_not_bring_back_what_its_file_had_deleted(rig: Rig) -> None:
    """The deletes in the damaged segment were the only ones: set aside with it, they would be forgotten."""
    rig.put(1)
    rig.put(2)
    rig.put(3)
    rig.journal.commit()
    rig.rotate(3)
    rig.delete(1)
    rig.change(2)
    rig.journal.commit()  # else they would share a row
    rig.put(4)
    rig.journal.commit()
    place = rig.directory / f"segment-{rig.journal.current:08d}.db"
    rig.rotate(3)
    rig.close()
    damage(place, filler(4, 32), filler(5, 32))
    rig.open(accept_damage=True)
    assert rig.model.keys() == {2, 3}
    for _ in range(2):
        reopened(rig)
        assert rig.said == []
    rig.close()


# The random model


@pytest.mark.slow
@pytest.mark.parametrize("round", [0, *(pytest.param(round, marks=pytest.mark.long) for round in range(1, 4))])
def test_random_lives_against_a_dict(each_rig: Rig, tmp_path: Path, seed: int, round: int) -> None:
    draw = random.Random(seed + round)
    rig = each_rig
    rig.segment_bytes = draw.choice([8192, 20_000, 100_000])
    reopened(rig)
    next_key = 1
    for life in range(1, 6):
        for _ in range(draw.randrange(5, 100)):
            for _ in range(draw.randrange(1, 30)):
                kind = draw.random()
                if kind < 0.4 or not rig.model:
                    rig.put(next_key, draw.choice([0, 10, 200, 5000]))
                    next_key += 1
                elif kind < 0.7:
                    rig.change(draw.choice(list(rig.model)), draw.choice([0, 20]))
                else:
                    rig.delete(draw.choice(list(rig.model)))
            if draw.random() < 0.2 and wants_compaction(rig.journal):
                rig.journal.compact_slice(rig.payload_of)
            rig.journal.commit()
            if draw.random() < 0.3:
                rig.sync()
            if draw.random() < 0.6:
                for _ in range(5):
                    if wants_compaction(rig.journal):
                        rig.journal.compact_slice(rig.payload_of)
        if draw.random() < 0.5:
            rig.compact_all()
        if draw.random() < 0.5:
            rig.close()
        else:
            rig.crash(tmp_path / f"journal-{life}")
        rig.open()
        assert rig.journal.high_water >= next_key - 1
    rig.close()


CALLS = ["pwrite64", "fdatasync", "fsync", "ftruncate", "unlink", "rename", "fallocate", "openat"]


def some_moment(draw: random.Random, directory: Path) -> tuple[str, int, list[Path]]:
    """A kind of system call, which one of them, and the paths that count."""
    call = draw.choice(CALLS)
    only = []
    if call == "openat":  # Python opens so much itself
        suffixes = ["", "-wal", "-shm", ".new", ".new-wal", ".new-shm", ".new-journal"]
        only = [directory / f"segment-{number:08d}.db{suffix}" for number in range(1, 60) for suffix in suffixes]
    reach = {"pwrite64": 1500, "fdatasync": 120, "unlink": 60, "openat": 60}.get(call, 15)
    return call, draw.randint(1, draw.choice([3, reach // 4 + 1, reach])), only


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_at_any_system_call_all_that_was_committed_is_there(tmp_path: Path, seed: int, times: int) -> None:
    """Life after life in one directory, each ended by SIGKILL at the entry of some system call of the journal."""
    draw = random.Random(seed)
    directory = tmp_path / "journal"
    directory.mkdir()
    before: Model = {}
    killed = 0
    for number in range(1, 10 * times + 1):
        life = Life(
            str(directory),
            seed + number,
            number=number,
            batches=draw.choice([5, 60]),
            segment_bytes=draw.choice([8192, 20_000]),
            sync_share=draw.choice([0.0, 0.3, 1.0]),
            close=draw.random() < 0.7,
        )
        call, count, only = some_moment(draw, directory)
        told = run_driver(life, inject(call, "signal=KILL", count, only=only))
        assert told.code in (-9, 0), (call, count, told)
        killed += told.code == -9
        print(f"life {number}: {call} {count}: {told}")
        found = read_sound(directory)
        check_life(before, life, told, found)
        before = found.model
    assert killed > times, "hardly anything was killed"


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("error", [pytest.param("EIO", marks=pytest.mark.long), "ENOSPC"])
def test_an_error_of_any_system_call_loses_nothing_that_was_committed(
    tmp_path: Path, seed: int, times: int, error: str
) -> None:
    """It may end the life, in one line and with the documented code, or not; what was promised is there."""
    draw = random.Random(seed)
    directory = tmp_path / "journal"
    directory.mkdir()
    before: Model = {}
    for number in range(1, 5 * times + 1):
        life = Life(str(directory), seed + number, number=number, batches=40, segment_bytes=8192, sync_share=0.5)
        call, count, only = some_moment(draw, directory)
        told = run_driver(life, inject(call, f"error={error}", count, only=only))
        print(f"life {number}: {call} {count}: {told}")
        assert told.stderr == "", told.stderr
        assert told.code == (FAILED if told.failure else 0), told
        assert told.ended != bool(told.failure), told
        found = read_sound(directory)
        check_life(before, life, told, found)
        before = found.model


def test_the_check_of_a_life_sees_what_is_lost_added_or_old(tmp_path: Path) -> None:
    """Of the tool: a life is told from one that lost, kept or changed a single key."""
    life = Life(str(tmp_path / "journal"), 7, batches=30)
    told = run_driver(life)
    assert told.ended and told.committed == 30, told
    found = read_sound(tmp_path / "journal")
    check_life({}, life, told, found)
    key = next(iter(found.model))
    version, size = found.model[key]
    for wrong in (
        {other: value for other, value in found.model.items() if other != key},
        found.model | {10**6: (1, 1)},
        found.model | {key: (version - 1, size)},
    ):
        with pytest.raises(AssertionError):
            check_life({}, life, told, found._replace(model=wrong))
    with pytest.raises(AssertionError):
        check_life({}, life, told, found._replace(high_water=key - 1))


def test_records_of_all_kinds_are_given_back_in_order(tmp_path: Path) -> None:
    """The interface itself, without the tools above."""
    journal = Journal(str(tmp_path / "journal"), segment_bytes=1 << 15)
    assert journal.created
    assert list(journal.replay()) == []
    journal.start()
    written = [(1, FULL, payload(1, 1, 3)), (2, FULL, b""), (1, CHANGE, b"x" * 9), (2, DELETE, b"")]
    for key, kind, data in written:
        journal.append(key, kind, data)
    journal.commit()
    assert journal.records_written == 4
    journal.close()
    again = Journal(str(tmp_path / "journal"), segment_bytes=1 << 15)
    assert not again.created
    assert [record[:3] for record in again.replay()] == written
    again.start()
    again.close()


def test_a_segment_takes_as_much_where_its_wal_is_allocated_ahead(tmp_path: Path) -> None:
    taken = []
    for allocate in (False, True):
        folder = tmp_path / f"journal-{allocate}"
        journal = Journal(str(folder), segment_bytes=1 << 16, compact=False, allocate=allocate)
        assert list(journal.replay()) == []
        journal.start()
        deadline = time.monotonic() + 60
        while journal.settling:  # the next segment is made
            wants_compaction(journal)
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        for number in (1, 2):
            size = (folder / f"segment-{number:08d}.db-wal").stat().st_size
            assert size == (1 << 15) - 1 if allocate else size < 1 << 14
        key = 0
        while journal.current == 1:
            key += 1
            journal.append(key, FULL, bytes(500))
            journal.commit()
        taken.append(key)
        journal.close()
    assert taken[0] == taken[1] > 10


def test_nothing_is_allocated_ahead_where_there_is_little_room(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal"), segment_bytes=1 << 20, budget=1 << 16, allocate=True)
    assert list(journal.replay()) == []
    journal.start()
    assert (tmp_path / "journal" / f"segment-{journal.current:08d}.db-wal").stat().st_size < 1 << 14
    journal.close()


def test_what_was_removed_is_remembered_when_nothing_else_was_written(tmp_path: Path) -> None:
    """A life that only removes a segment: its own one is empty but for the note of that, and has to stay."""
    rig = Rig(tmp_path / "home", compact=False)
    rig.put(1)
    rig.journal.commit()
    rig.close()
    rig.open()
    rig.put(2, 20_000)  # too large to be worth moving
    rig.delete(1)
    rig.journal.commit()
    rig.close()
    rig.compact = True
    rig.open()
    rig.compact_all()
    assert len(rig.segments()) < 4, "the first one is gone"
    rig.close()
    rig.open()
    rig.close()


def test_without_its_lock_file_a_directory_is_still_locked(tmp_path: Path) -> None:
    """A second server would seal what the first one writes, and jobs would be lost."""
    first = DirectoryLock(str(tmp_path))
    (tmp_path / "lock").unlink()
    with pytest.raises(JournalLocked, match="is in use by another process"):
        DirectoryLock(str(tmp_path))
    first.close()
    DirectoryLock(str(tmp_path)).close()


def test_a_short_lock_on_the_directory_stops_no_start(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    timer = threading.Timer(0.05, os.close, [folder])
    timer.start()
    DirectoryLock(str(tmp_path)).close()
    timer.join()
