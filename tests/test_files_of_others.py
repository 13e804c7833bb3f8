"""A journal touches its own files only: whatever else stands in its directory stays as it is, in whatever shape."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from journal import FULL, Journal, JournalFailed
from journal.sqlite.files import WATERMARK_NAME, left_overs, segment_path
from journal.sqlite.space import RESERVE_NAME, Space
from journal.sqlite.writer import SegmentWriter
from tests.support.faults import Rig

OTHERS = [
    "x.new",
    "report.new.txt",
    "segment-1.db.new",
    "segment-00000007.db.newer",
    "segment-00000007.db.new.bak",
    "segment-000000007.db.new",
    "segment-00000007.db.damaged-wal",
    "segment-00000007.db-wal.gz",
    "segment-00000007.dbx-wal",
    "photos-wal",
    "notes-shm",
    "-wal",
    "other.db-wal",
]
OWN = [
    "segment-00000007.db.new",
    "segment-00000007.db.new-wal",
    "segment-00000007.db.new-shm",
    "segment-00000007.db.new-journal",
    "segment-00000007.db-wal",
    "segment-00000007.db-shm",
    "segment-123456789.db-journal",
]


def started(folder: Path) -> Journal:
    journal = Journal(str(folder), segment_bytes=1 << 15)
    try:
        assert list(journal.replay()) == []
        journal.start()
    except BaseException:
        journal.abandon()
        raise
    return journal


def look(path: Path) -> tuple[int, bytes]:
    status = os.lstat(path)
    return status.st_mode, path.read_bytes() if stat.S_ISREG(status.st_mode) else b""


# Bug: A start removed every file with .new in its name and every lone -wal or -shm, and a directory x.new prevented the
# start.
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_only_what_the_journal_makes_is_removed(tmp_path: Path, kind: str) -> None:
    """Its own names as well, where they are no files."""
    folder = tmp_path / "journal"
    folder.mkdir()
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    names = OTHERS + ([] if kind == "file" else OWN)
    for name in names:
        path = folder / name
        if kind == "file":
            path.write_bytes(b"precious")
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to(target)
    before = {name: look(folder / name) for name in names}
    journal = started(folder)
    journal.append(1, FULL, b"x")
    journal.commit()
    journal.close()
    assert {name: look(folder / name) for name in names} == before
    assert target.read_bytes() == b"precious"


def test_what_a_crash_left_half_made_or_half_removed_goes(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "segment-00000009.db").write_bytes(b"")
    kept = ["segment-00000009.db", "segment-00000009.db-wal", "segment-00000009.db-shm"]
    for name in OWN + kept[1:]:
        (folder / name).write_bytes(b"")
    assert sorted(map(os.path.basename, left_overs(str(folder)))) == sorted(OWN)
    (folder / "segment-00000009.db").unlink()
    assert sorted(map(os.path.basename, left_overs(str(folder)))) == sorted(OWN + kept[1:])
    journal = started(folder)
    assert not [name for name in OWN + kept[1:] if (folder / name).exists() and "00000009" in name]
    journal.close()


@pytest.mark.parametrize("name", ["segment-00000005.db", "segment-00000005.db.new"])
def test_a_new_segment_replaces_no_foreign_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(JournalFailed):
        SegmentWriter(segment_path(str(tmp_path), 5), 5, 0)
    assert (tmp_path / name).read_bytes() == b"precious"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("kind", ["link", "directory", "text"])
@pytest.mark.parametrize("name", [RESERVE_NAME, WATERMARK_NAME])
def test_what_only_has_the_name_of_a_file_of_the_journal_is_left_alone(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    path = folder / name
    other = tmp_path / "other"
    other.write_bytes(b"\0" * 5000)
    if kind == "link":
        path.symlink_to(other)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"a table for two\n" * 1000)
    before = look(path)
    for _ in range(2):  # the second time proves that the directory's lock was given back
        with pytest.raises(JournalFailed, match=name):
            started(folder)
    assert look(path) == before
    assert other.stat().st_size == 5000


# Bug: The reserve followed a link and cut another program's file.
def test_a_link_that_comes_later_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    space = Space(str(folder), None)
    (folder / RESERVE_NAME).symlink_to(other)
    space.refill(1 << 16, 0)
    assert (space.reserved, space.tight, other.read_bytes()) == (0, True, b"precious")


# Bug: An accepted segment that was put back later overwrote the segment that had been set aside.
def test_setting_aside_overwrites_nothing(tmp_path: Path) -> None:
    """An operator who put an accepted segment back may still have it under its other name as well."""
    rig = Rig(tmp_path / "journal")
    rig.put(1)
    rig.journal.commit()
    rig.close()
    path = rig.directory / rig.segments()[0]
    path.write_bytes(b"damaged")
    aside = path.with_name(path.name + ".damaged")
    aside.write_bytes(b"precious")
    journal = Journal(str(rig.directory), segment_bytes=1 << 15, accept_damage=True)
    list(journal.replay())
    journal.start()
    with pytest.raises(JournalFailed, match="exists"):
        journal.repair(lambda key: None)
    journal.abandon()
    assert (aside.read_bytes(), path.read_bytes()) == (b"precious", b"damaged")
