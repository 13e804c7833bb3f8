"""Append, commit and sync do all they were asked, or the journal is at its end: whatever is raised in their middle.

A failing allocation is made by the interpreter itself, one place after the other, so that none is forgotten.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import stat
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from geventstalk._build import BUILD
from journal import CHANGE, DELETE, DESCRIPTORS_MAX, DESCRIPTORS_MIN, FULL, Journal, JournalFailed, JournalFull
from journal.sqlite.bodies import BodyFile
from journal.sqlite.files import NEW_SUFFIX
from journal.sqlite.log import KEY_MAX
from journal.sqlite.wal import WalFile
from journal.sqlite.writer import SegmentWriter
from tests.support.alone import alone
from tests.support.disk import KIB, free_bytes, small_disk, take_all, take_inodes
from tests.support.faults import Rig, wants_compaction

pytestmark = pytest.mark.timeout(60)
testcapi = pytest.importorskip("_testcapi", reason="this Python cannot make an allocation fail")

needs_the_source = pytest.mark.skipif(
    BUILD == "compiled", reason="mypyc ends the process when there is no memory for an integer"
)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "journal")


def facts(journal: Journal) -> tuple[object, ...]:
    live = journal.live
    return (
        live.keys,
        live.total_bytes,
        live.change_bytes,
        live.keys_in(journal.current),
        live.bytes_in(journal.current),
        journal.appended,
        journal.high_water,
        list(journal._batch),
    )


# Bug: An append raised behind its last step, and its record was written all the same. Python 3.13.0 also crashes where
# there is no memory for a generator.
@needs_the_source
@pytest.mark.parametrize(("kind", "size"), [(FULL, 10), (FULL, (1 << 24) + 10), (CHANGE, 10), (DELETE, 10)])
def test_an_append_without_memory_changes_nothing_or_is_the_end(tmp_path: Path, kind: int, size: int) -> None:
    """A key of a page that is not there yet; a change and a delete of one that is."""
    alone(lambda: append_without_memory(tmp_path, kind, size))


def append_without_memory(tmp_path: Path, kind: int, size: int) -> None:
    payload = bytes(size)
    outcomes = set()
    for at in range(200):
        rig = Rig(tmp_path / f"journal-{at}")
        journal = rig.journal
        rig.settle()  # the worker would be told that there is no memory, too
        journal.append(1, FULL, b"first")
        key = 1 if kind != FULL else 10_000
        before = facts(journal)
        testcapi.set_nomemory(at, at + 1)
        try:
            journal.append(key, kind, payload)
        except MemoryError:
            testcapi.remove_mem_hooks()
            assert facts(journal) == before, f"allocation {at}"
            journal.append(2, FULL, b"second")
            journal.commit()
            outcomes.add("nothing")
        except JournalFailed as error:
            testcapi.remove_mem_hooks()
            assert isinstance(error.unexpected, MemoryError), f"allocation {at}"
            with pytest.raises(JournalFailed):
                journal.append(2, FULL, b"second")
            with pytest.raises(JournalFailed):
                journal.commit()
            outcomes.add("end")
        else:
            testcapi.remove_mem_hooks()
            assert journal.appended == 2
            journal.commit()
            outcomes.add("all")
            break
        finally:
            testcapi.remove_mem_hooks()
            journal.abandon()
    assert "all" in outcomes, "it never succeeds"
    assert len(outcomes) > 1, "no allocation failed"


# Bug: Only a JournalError ended a commit. A MemoryError dropped the batch, and the next turn acknowledged it.
@pytest.mark.skipif(BUILD == "compiled", reason="a method of a compiled module cannot be replaced")
@pytest.mark.parametrize(
    "error", [MemoryError(), OverflowError("int too large"), RuntimeError("a bug"), OSError(5, "x")]
)
@pytest.mark.parametrize("method", ["rows", "append"])
def test_any_exception_of_a_commit_is_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    rig.put(1)
    rig.journal.commit()
    rig.settle()
    held = dict(rig.model)

    def fail(self: SegmentWriter, *parts: object) -> None:
        raise error

    real = getattr(SegmentWriter, method)
    monkeypatch.setattr(SegmentWriter, method, fail)
    rig.put(2)
    with pytest.raises(JournalFailed) as caught:
        rig.journal.commit()
    assert caught.value.__cause__ is error
    monkeypatch.setattr(SegmentWriter, method, real)
    for _ in range(2):
        with pytest.raises(JournalFailed):
            rig.journal.commit()
        with pytest.raises(JournalFailed):
            rig.journal.append(3, FULL, b"later")
    with pytest.raises(JournalFailed):
        wants_compaction(rig.journal)
    with pytest.raises(JournalFailed):
        rig.journal.close()
    rig.model = held
    rig.open()
    rig.close()


@needs_the_source
def test_a_commit_that_runs_out_of_memory_anywhere_is_the_end(tmp_path: Path) -> None:
    alone(lambda: commit_without_memory(tmp_path))


def commit_without_memory(tmp_path: Path) -> None:
    outcomes = set()
    for at in range(0, 400, 3):
        rig = Rig(tmp_path / f"journal-{at}")
        rig.put(1)
        rig.journal.commit()
        rig.settle()
        for key in range(2, 6):
            rig.put(key)
        held = {1: rig.model[1]}
        testcapi.set_nomemory(at, at + 1)
        try:
            rig.journal.commit()
            outcomes.add("all")
        except JournalFailed:
            testcapi.remove_mem_hooks()
            outcomes.add("end")
            with pytest.raises(JournalFailed):
                rig.journal.append(9, FULL, b"later")
            with pytest.raises(JournalFailed):
                rig.journal.commit()
        finally:
            testcapi.remove_mem_hooks()
            rig.journal.abandon()
        if "all" in outcomes:
            break
        found = {record.key for record in Journal(str(rig.directory), segment_bytes=1 << 15).replay()}
        assert found in ({1}, set(range(1, 6))), f"allocation {at}: {found} of {set(held)}"
    assert outcomes == {"all", "end"}


def test_a_key_beyond_sqlites_integers_changes_nothing(rig: Rig) -> None:
    rig.put(1)
    before = facts(rig.journal)
    with pytest.raises(OverflowError):
        rig.journal.append(KEY_MAX + 1, FULL, b"x")
    assert facts(rig.journal) == before
    rig.put(KEY_MAX)
    rig.journal.commit()
    rig.close()
    rig.open()
    rig.close()


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "Input/output error")])
def test_any_exception_of_a_sync_is_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    rig.put(1)
    rig.journal.commit()
    point = rig.journal.sync_point()
    assert point is not None

    def fail(fd: int) -> None:
        raise error

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(JournalFailed):
        point.run()
    monkeypatch.undo()
    rig.put(2)
    with pytest.raises(JournalFailed):
        rig.journal.commit()
    rig.journal.abandon()


@pytest.mark.parametrize("descriptors", [DESCRIPTORS_MIN, 30, DESCRIPTORS_MAX])
def test_a_journal_stays_within_the_descriptors_that_it_was_given(tmp_path: Path, descriptors: int) -> None:
    """On a device that does not keep pace: the next segment is always made first, so others wait to be sealed."""
    gc.collect()  # what other tests left behind must not give descriptors back meanwhile
    others = len(os.listdir("/proc/self/fd"))
    rig = Rig(tmp_path / "journal", segment_bytes=1 << 15, descriptors=descriptors)
    for key in range(1, 40):
        rig.put(key)
    peak = waited = changes = 0
    deadline = time.monotonic() + 50
    while waited < (descriptors - 12) // 5 - 1:
        changes += 1
        before = rig.journal.current
        rig.change(1 + changes % 39, 5000)
        rig.journal.commit()
        if rig.journal.current != before:  # each segment that is sealed takes so much longer
            rig.journal._worker.submit(partial(time.sleep, 0.02), lambda: None, urgent=False)
        if wants_compaction(rig.journal):
            rig.journal.compact_slice(rig.payload_of)
        waited = max(waited, sum(not sealed.ready for sealed in rig.journal._segments.sealed))
        peak = max(peak, len(os.listdir("/proc/self/fd")) - others)
        assert time.monotonic() < deadline, f"only {waited} segments wait to be sealed"
    for _ in range(300):
        rig.change(1, 5000)
        rig.journal.commit()
        wants_compaction(rig.journal)  # hears from the worker
        peak = max(peak, len(os.listdir("/proc/self/fd")) - others)
    print(f"{peak} of {descriptors}")
    assert descriptors - 13 <= peak <= descriptors
    rig.close()


def test_a_journal_with_fewer_descriptors_than_it_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"needs {DESCRIPTORS_MIN}"):
        Journal(str(tmp_path / "journal"), segment_bytes=1 << 15, descriptors=DESCRIPTORS_MIN - 1)


# Bug: A segment that found no descriptor while it was prepared ended the server.
def test_a_lack_of_descriptors_puts_the_next_segment_off(rig: Rig) -> None:
    """At each of the descriptors that making a segment takes; it is made once there are some again."""
    rig.put(1)
    rig.journal.commit()
    rig.settle()
    segments = rig.journal._segments
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for left in range(6):
        before = rig.journal.current
        fresh, segments.next = segments.next, None  # as if it had not been made yet
        assert fresh is not None
        fresh.discard()
        lowest = os.dup(0)
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, limits[1]))
            segments.prepare()
            deadline = time.monotonic() + 60
            while rig.journal._worker.busy:
                rig.journal._worker.check()
                assert time.monotonic() < deadline
                time.sleep(0.001)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        rig.rotate(1)
        assert rig.journal.current == before + 1, left
    rig.close()
    rig.open()
    rig.close()


def fail_new_files(monkeypatch: pytest.MonkeyPatch, number: int, *, first: int = 1) -> None:
    """Has each new segment from the first-th on fail with this errno, and each reserve that is to become larger."""
    really = os.open
    made = 0

    def open_one(path: str, flags: int, mode: int = 0o777) -> int:
        nonlocal made
        if flags & os.O_CREAT and path.endswith(NEW_SUFFIX):
            made += 1
            if made >= first:
                raise OSError(number, os.strerror(number))
        return really(path, flags, mode)

    def allocate(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", open_one)
    monkeypatch.setattr(os, "posix_fallocate", allocate)


# Bug: The worker tried to make the next segment 800 times a second, so changes waited for it without end.
def test_what_finds_no_room_is_not_tried_without_a_pause(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk changes wait while the worker is at work. So there have to be times when it is not."""
    segments = rig.journal._segments
    rig.put(1)
    rig.sync()
    rig.settle()
    fail_new_files(monkeypatch, errno.ENOSPC)
    deadline = time.monotonic() + 20
    late = 0
    while late < 20:
        rig.change(1, 3000)
        rig.journal.commit()
        while rig.journal.behind:
            wants_compaction(rig.journal)
            if not rig.journal.catch_up(rig.payload_of):
                time.sleep(0.001)
            assert time.monotonic() < deadline, f"changes wait for ever, behind {late} of them"
        late += segments.next is None and segments.overgrown
    was_short = rig.journal.short_of_room
    monkeypatch.undo()
    rig.settle()
    assert was_short and not rig.journal.short_of_room
    assert segments.next is not None
    rig.close()
    rig.open()
    rig.close()


# Bug: The server ended with exit code 74 after thirty deletes: what commits and segments gave back was free for others.
def test_others_never_get_what_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who fills the disk comes after each commit, and while the worker syncs a directory. The journal goes on."""
    with small_disk(tmp_path / "disk", 1 << 22) as disk:
        delete_beside(disk / "filler", Rig(disk / "journal"), monkeypatch)
        gc.collect()  # the journal, which has a descriptor of its last WAL


def delete_beside(filler: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in range(1, 401):
        rig.put(key, 500)
        if key % 20 == 0:
            rig.journal.commit()
            rig.settle()
    fsync = os.fsync

    def sync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            take_all(filler)
        fsync(file)

    monkeypatch.setattr(os, "fsync", sync)
    take_all(filler)
    for key in range(1, 401):
        rig.delete(key)
        rig.journal.commit()
        rig.catch_up()
        while wants_compaction(rig.journal) or rig.journal._worker.busy:
            if wants_compaction(rig.journal):
                rig.journal.compact_slice(rig.payload_of)
            else:
                time.sleep(0.0005)
        take_all(filler)
    monkeypatch.undo()
    filler.unlink()
    rig.close()
    rig.open()
    rig.close()


@pytest.mark.parametrize("left", range(4))
def test_without_inodes_the_next_segment_is_put_off(tmp_path: Path, left: int) -> None:
    """Puts are refused, as on any full disk. Changes and deletes go on, and what they free lets segments come again."""
    with small_disk(tmp_path / "disk", 1 << 24, inodes=100) as disk:
        live_without_inodes(disk, left)
        gc.collect()  # the journal, which has a descriptor of its last WAL


def live_without_inodes(disk: Path, left: int) -> None:
    rig = Rig(disk / "journal")
    for key in range(1, 21):
        rig.put(key, 1000)
    rig.journal.commit()
    rig.settle()
    take_inodes(disk)
    for number in range(left):
        (disk / f"file-{number}").unlink()
    reserved = rig.journal._space.reserved
    for key in range(1, 201):
        rig.change(key % 20 + 1, 1000)
        rig.journal.commit()
        rig.catch_up()
    assert rig.said[0].startswith("journal: the disk has no inode left;")
    assert rig.journal._space.reserved >= reserved, "room does not help"
    for key in range(1, 21):
        rig.delete(key)
    rig.journal.commit()
    for file in disk.glob("file-*"):
        file.unlink()
    rig.compact_all()
    assert rig.journal.admits(1) and len(rig.said) < 20, rig.said
    rig.close()
    rig.open()
    rig.close()


# Bug: A start that found no room for its note or its watermark left its new segment behind.
@pytest.mark.parametrize("blocks", range(7, 15))
def test_a_start_without_room_leaves_nothing(tmp_path: Path, blocks: int) -> None:
    """Otherwise a supervisor that starts the server again and again would use up what little room there is."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        folder = disk / "journal"
        folder.mkdir()
        (disk / "full").write_bytes(bytes(free_bytes(disk) - 4 * KIB * blocks))
        journal = Journal(str(folder), segment_bytes=1 << 16)
        assert list(journal.replay()) == []
        started = False
        with suppress(JournalFull):
            journal.start()
            started = True
        journal.abandon()
        del journal
        gc.collect()  # it had a descriptor of its WAL
        assert started or (free_bytes(disk) == 4 * KIB * blocks and not list(folder.glob("segment-*")))


# Bug: The start asked the failed worker for five seconds without a pause, and then served.
def test_a_start_whose_worker_fails_is_the_end_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a start waits for the worker, and a worker that has failed does nothing any more."""
    rig.put(1)
    rig.close()
    os.unlink(rig.directory / "reserve")
    fail_new_files(monkeypatch, errno.EIO, first=2)
    begun = time.thread_time()
    with pytest.raises(JournalFailed, match=os.strerror(errno.EIO)):
        rig.open()
    assert time.thread_time() - begun < 1
    rig.journal.abandon()


def test_a_sync_beside_one_that_fails_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux tells of what it could not write once, and then says that all is well."""
    path = tmp_path / "x-wal"
    path.touch()
    file = WalFile(str(path), BodyFile(str(tmp_path / "x")))
    entered, go = threading.Event(), threading.Event()
    calls: list[int] = []

    def fdatasync(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            entered.set()
            go.wait(30)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    outcomes: list[str] = []

    def sync() -> None:
        try:
            file.sync()
            outcomes.append("synced")
        except JournalFailed:
            outcomes.append("failed")

    threads = [threading.Thread(target=sync) for _ in range(2)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    threads[1].join(0.05)
    go.set()
    for thread in threads:
        thread.join()
    assert outcomes == ["failed", "failed"]
    with pytest.raises(JournalFailed):
        file.sync()
    assert len(calls) == 1


# Bug: The next put was answered INTERNAL_ERROR with a traceback before the end came.
@pytest.mark.parametrize("ask", ["admits", "facts", "segments"])
@pytest.mark.parametrize("what", ["gone", "another's"])
def test_a_directory_that_goes_is_the_end_at_the_next_commit(rig: Rig, ask: str, what: str) -> None:
    """A caller that asks the journal is in the middle of a command: no exception may come out there."""
    for key in range(1, 11):
        rig.put(key, 100)
    rig.journal.commit()
    rig.settle()
    folder = Path(rig.journal.directory)
    away = folder.rename(folder.with_name("elsewhere"))
    if what == "another's":
        folder.write_bytes(b"")
    if ask == "facts":
        rig.journal.facts()
    elif ask == "segments":
        rig.journal.segments(10)
    else:
        asked = 0
        while rig.journal.admits(100_000):
            asked += 1
            assert asked < 1000, "the directory is never looked at"
    if ask == "admits" or what == "another's":  # the files of a segment that is gone take nothing, which is an answer
        assert rig.journal.dirty
        with pytest.raises(JournalFailed, match=folder.name) as failure:
            rig.journal.commit()
        assert failure.value.unexpected is None, "it is no fault of the program"
    folder.unlink(missing_ok=True)
    away.rename(folder)
    rig.journal.abandon()
    rig.open()
    rig.close()
