"""Payloads beside their segment: what a loss of power may take of them, what is damage, and what copies have."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from journal import FULL, JournalDamaged, JournalFailed, JournalFull
from journal.sqlite.backup import backup
from journal.sqlite.files import ASIDE_SUFFIX, BODIES_SUFFIX, read_watermark, segment_path
from journal.sqlite.writer import SegmentWriter
from tests.support.disk import free_bytes, small_disk
from tests.support.faults import Rig, read, read_sound

SIZE = 5000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "journal")
    yield rig
    rig.journal.abandon()


def bodies_of(rig: Rig, number: int = 0) -> Path:
    """The file of a segment, by default of the current one."""
    return Path(segment_path(str(rig.directory), number or rig.journal.current) + BODIES_SUFFIX)


def lose(path: Path, at: int) -> None:
    """Leaves a file as a loss of power may: from here on it has its size and nothing else."""
    size = path.stat().st_size
    os.truncate(path, at)
    os.truncate(path, size)


def synced_and_not(rig: Rig, tmp_path: Path) -> None:
    """Two commits that are synced and three that are not, each of a small job, a large one and a small one."""
    for commit in range(5):
        for key in range(3):
            rig.put(1 + 3 * commit + key, SIZE if key == 1 else 20)
        rig.sync() if commit < 2 else rig.journal.commit()
    number = rig.journal.current
    assert read_watermark(str(rig.directory)) == (number, 6)
    rig.crash(tmp_path / "crash")


@pytest.mark.parametrize("lost", [2, 3, 4])
def test_a_payload_that_a_loss_of_power_took_takes_its_commit_and_all_behind_it(
    rig: Rig, tmp_path: Path, lost: int
) -> None:
    number = rig.journal.current
    synced_and_not(rig, tmp_path)
    lose(bodies_of(rig, number), lost * (SIZE + 8) + 100)
    rig.model = {key: value for key, value in rig.model.items() if key <= 3 * lost}
    assert read_sound(rig.directory).model == rig.model
    rig.said.clear()
    rig.open()
    assert any("a loss of power took the body" in line for line in rig.said)
    rig.put(100, SIZE)  # goes on behind it
    rig.close()
    rig.said.clear()
    rig.open()
    assert not [line for line in rig.said if "loss of power" in line], "the rows are gone once the segment is sealed"
    with closing(sqlite3.connect(segment_path(str(rig.directory), number))) as db:
        assert db.execute("SELECT max(seq) FROM record").fetchone() == (3 * lost,)


def test_a_promised_payload_that_is_not_there_is_damage(rig: Rig, tmp_path: Path) -> None:
    number = rig.journal.current
    synced_and_not(rig, tmp_path)
    content = bytearray(bodies_of(rig, number).read_bytes())
    content[100] ^= 1
    bodies_of(rig, number).write_bytes(content)
    with pytest.raises(JournalDamaged):
        rig.open()
    found = read(rig.directory)
    assert len(found.findings) == 1 and "has 1 damaged records" in found.findings[0]
    del rig.model[2]
    assert found.model == rig.model, "what is intact behind it is there"
    rig.open(accept_damage=True)
    rig.close()
    assert os.path.exists(f"{segment_path(str(rig.directory), number)}.damaged{BODIES_SUFFIX}")
    assert read_sound(rig.directory).model == rig.model


def test_a_newer_segment_that_counts_a_lost_payload_makes_it_damage(rig: Rig, tmp_path: Path) -> None:
    """The newer one was synced behind it: so the payload was on the device."""
    number = rig.journal.current
    synced_and_not(rig, tmp_path)
    rig.open()
    segment = segment_path(str(rig.directory), number)
    left = {path: path.read_bytes() for path in (tmp_path / "crash").glob(Path(segment).name + "*")}
    rig.put(100)
    rig.sync()
    rig.settle()
    rig.journal.abandon()
    for path, content in left.items():  # as if it had not been sealed
        path.write_bytes(content)
    lose(bodies_of(rig, number), 4 * (SIZE + 8))
    found = read(rig.directory)
    assert [line for line in found.findings if "but 15 were on the device" in line], found.findings


def test_a_backup_of_what_a_loss_of_power_left_is_sound(rig: Rig, tmp_path: Path) -> None:
    number = rig.journal.current
    synced_and_not(rig, tmp_path)
    lose(bodies_of(rig, number), 3 * (SIZE + 8))
    (tmp_path / "copy").mkdir()
    backup(str(rig.directory), str(tmp_path / "copy"))
    model = {key: value for key, value in rig.model.items() if key <= 9}
    assert read_sound(rig.directory).model == read_sound(tmp_path / "copy").model == model
    rig.model = model
    rig.open()


def test_a_backup_of_a_running_journal_has_its_payloads(rig: Rig, tmp_path: Path) -> None:
    for key in range(1, 40):
        rig.put(key, SIZE)
        rig.journal.commit()
        rig.settle()
    (tmp_path / "copy").mkdir()
    assert backup(str(rig.directory), str(tmp_path / "copy")) > 3
    assert read_sound(tmp_path / "copy").model == rig.model


def test_large_changes_are_read_and_compacted_like_others(rig: Rig) -> None:
    """No owner writes such changes, and the log promises nothing about their size."""
    for key in range(1, 60):
        rig.put(key, SIZE)
        rig.change(key, 3000)
        rig.journal.commit()
        rig.settle()
        if key > 3:
            rig.delete(key - 3)
    rig.journal.commit()
    rig.compact_all()
    rig.close()
    rig.open()
    assert len(list(rig.directory.glob(f"*{BODIES_SUFFIX}"))) < 8


def test_a_write_that_a_disk_takes_in_pieces_is_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    pieces: list[int] = []

    def pwrite(file: int, data: bytes, at: int) -> int:
        pieces.append(real(file, data[:3000], at))
        return pieces[-1]

    monkeypatch.setattr("journal.sqlite.bodies.os.pwrite", pwrite)
    for key in range(1, 4):
        rig.put(key, SIZE)
    rig.put(4, 200_000)
    rig.put(5, SIZE)
    rig.journal.commit()
    assert pieces and max(pieces) == 3000
    monkeypatch.undo()
    rig.close()
    rig.open()


def test_a_failed_write_is_the_end_and_what_was_committed_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(1, SIZE)
    rig.journal.commit()
    held = dict(rig.model)

    def pwrite(file: int, data: bytes, at: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("journal.sqlite.bodies.os.pwrite", pwrite)
    rig.put(2, SIZE)
    with pytest.raises(JournalFailed, match=f"{BODIES_SUFFIX}: Input/output error"):
        rig.journal.commit()
    monkeypatch.undo()
    rig.journal.abandon()
    rig.model = held
    rig.open()


@pytest.mark.parametrize("in_worker", [False, True])
def test_a_failed_sync_of_the_payloads_is_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch, in_worker: bool) -> None:
    """Also that of the worker, which seals: a sealed segment is promised to be on the device."""
    real = os.fdatasync

    def fdatasync(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(BODIES_SUFFIX):
            raise OSError(5, "Input/output error")
        real(file)

    rig.put(1, SIZE)
    rig.journal.commit()
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    if in_worker:
        with pytest.raises(JournalFailed, match="fsync of the journal failed"):
            rig.rotate(1)
    else:
        point = rig.journal.sync_point()
        assert point is not None
        with pytest.raises(JournalFailed, match="fsync of the journal failed"):
            point.run()
    monkeypatch.undo()
    assert read_watermark(str(rig.directory))[1] == 0
    with pytest.raises(JournalFailed):
        rig.put(2)
        rig.journal.commit()
    rig.journal.abandon()
    rig.model = read_sound(rig.directory).model


def test_a_full_disk_in_the_middle_of_a_payload_leaves_no_trace(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        path = disk / "segment-00000007.db"
        writer = SegmentWriter(str(path), 7, 99)
        writer.append([(1, FULL, b"a" * SIZE)])
        filler = disk / "filler"
        filler.write_bytes(bytes(free_bytes(disk) - (1 << 16)))
        batch = [(2, FULL, b"b" * 20), (3, FULL, b"c" * 100_000), (4, FULL, b"d" * SIZE)]
        for _ in range(2):
            with pytest.raises(JournalFull, match="No space left on device"):
                writer.append(batch)
            assert writer.records == 1
        filler.unlink()
        writer.append(batch)
        writer.seal()
        writer.bodies.close()
        del writer
        shutil.copytree(disk, tmp_path / "copy", ignore=lambda *_: ["lost+found"])
    content = (tmp_path / "copy" / f"{path.name}{BODIES_SUFFIX}").read_bytes()
    assert content == b"a" * SIZE + b"c" * 100_000 + b"d" * SIZE


def test_what_a_removed_segment_left_is_tidied_up(rig: Rig) -> None:
    """Its database goes first: a process that ends between the two leaves the payloads."""
    for key in range(1, 20):
        rig.put(key, SIZE)
        rig.journal.commit()
        rig.settle()
    rig.close()
    left = Path(segment_path(str(rig.directory), 900) + BODIES_SUFFIX)
    left.write_bytes(b"x" * 10)
    read_sound(rig.directory)
    rig.open()
    assert not left.exists()


def events_of(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> list[str]:
    """Returns what is unlinked, and the syncs of the directory, in order."""
    events: list[str] = []
    unlink, fsync = os.unlink, os.fsync

    def unlinked(path: str) -> None:
        unlink(path)
        events.append(os.path.basename(path))

    def synced(file: int) -> None:
        fsync(file)
        if os.readlink(f"/proc/self/fd/{file}") == str(rig.directory):
            events.append("sync")

    monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.setattr(os, "fsync", synced)
    return events


# Bug: A loss of power brought the database of a removed segment back without its payloads: no start was possible.
def test_the_payloads_of_a_removed_segment_go_when_its_database_cannot_come_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in range(1, 40):
        rig.put(key, SIZE)
        rig.journal.commit()
        rig.settle()
    events = events_of(monkeypatch, rig)
    for key in range(1, 30):
        rig.delete(key)
    rig.journal.commit()
    rig.compact_all()
    gone = [name for name in events if name.endswith(BODIES_SUFFIX)]
    assert len(gone) > 2
    for name in gone:
        at = events.index(name)
        assert "sync" in events[events.index(name.removesuffix(BODIES_SUFFIX)) : at], events


def test_nothing_that_a_kill_left_is_tidied_up_before_a_sync(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ended behind the removal of a database, and a loss of power could still bring it back."""
    rig.close()
    left = Path(segment_path(str(rig.directory), 900) + BODIES_SUFFIX)
    left.write_bytes(b"x" * 10)
    events = events_of(monkeypatch, rig)
    rig.open()
    assert "sync" in events[: events.index(left.name)]


# Bug: A kill while a segment was set aside left its payloads under the old name, and the next start removed them.
def test_what_belongs_to_a_segment_that_was_set_aside_stays(rig: Rig) -> None:
    for key in range(1, 20):
        rig.put(key, SIZE)
        rig.journal.commit()
        rig.settle()
    rig.close()
    aside = Path(segment_path(str(rig.directory), 900) + ASIDE_SUFFIX)
    aside.write_bytes(b"a database")
    left = [Path(segment_path(str(rig.directory), 900) + suffix) for suffix in ("-wal", BODIES_SUFFIX)]
    for path in left:
        path.write_bytes(b"x" * 10)
    rig.open()
    assert aside.exists() and all(path.exists() for path in left)
