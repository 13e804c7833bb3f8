"""Bit rot and missing files: a start refuses, or everything that was promised is right.

`support/torture/rot.py` says what happens to files. First the lowest tests of what it found, then the rot itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from journal.log import FULL
from journal.sqlite.files import segment_path
from journal.sqlite.watermark import Watermark
from journal.sqlite.writer import SegmentWriter
from tests.support.faults import Rig, read
from tests.support.torture.recorder import recorder_problem
from tests.support.torture.rot import Rotting


@pytest.mark.parametrize("change", ["flip", "no WAL"])
def test_what_a_rotated_segment_has_lost_before_it_was_sealed_is_damage(tmp_path: Path, change: str) -> None:
    """The watermark is that of the segment behind it by then."""
    rig = Rig(tmp_path / "journal")
    for key in range(1, 9):
        rig.put(key)
        rig.sync()
    before = rig.crash(tmp_path / "crashed")
    journal = before.open()
    wal = before.directory / "segment-00000001.db-wal"
    unsealed = {path.name: path.read_bytes() for path in (tmp_path / "journal").iterdir()}
    before.settle()
    journal.abandon()
    # As if the second start had died before its worker merged the first segment's WAL.
    for name in ("segment-00000001.db", "segment-00000001.db-wal"):
        (before.directory / name).write_bytes(unsealed[name])
    (before.directory / "segment-00000001.db-shm").unlink(missing_ok=True)
    assert read(before.directory).model == before.model
    assert not read(before.directory).findings
    content = bytearray(wal.read_bytes())
    content[3000] ^= 1
    wal.write_bytes(content)
    if change == "no WAL":
        wal.unlink()
    assert any("were on the device" in finding for finding in read(before.directory).findings)


@pytest.mark.parametrize("synced", [(1, 4), (2, 0), (2, 4), (3, 0)])
def test_an_older_wal_is_noticed_also_where_a_segment_that_is_not_synced_counts_its_records(
    tmp_path: Path, synced: tuple[int, int]
) -> None:
    """Nothing is sealed: segment 2 counts the records of segment 1, and segment 3 counts those of both."""
    wal = Path(segment_path(str(tmp_path), 1) + "-wal")
    older = b""
    for number in (1, 2, 3):
        writer = SegmentWriter(segment_path(str(tmp_path), number), number, 0)
        writer.before = dict.fromkeys(range(1, number), 4)
        writer.note(0, 1)
        for key in range(1, 5):
            if number == 1 and key == 4:
                older = wal.read_bytes()
            writer.append(writer.rows([(key, FULL, b"")]))
        writer.leave()
    watermark = Watermark(str(tmp_path), 1)
    watermark.advance(*synced)
    watermark.close()
    assert not read(tmp_path).findings
    wal.write_bytes(older)
    assert any("00000001.db ends after record 3, but 4 were" in finding for finding in read(tmp_path).findings)


def test_a_newest_segment_that_is_gone_is_noticed_behind_an_empty_one(tmp_path: Path) -> None:
    """A clean end removes an empty last segment; the watermark is still that one's."""
    rig = Rig(tmp_path / "journal")
    for key in range(1, 4):
        rig.put(key)
        rig.close()
        rig.open()
    rig.close()
    assert rig.segments()[-1] == "segment-00000003.db"
    (rig.directory / "segment-00000003.db").unlink()
    assert any("segment-00000003.db is missing" in finding for finding in read(rig.directory).findings)


needs_the_recorder = pytest.mark.skipif(bool(recorder_problem()), reason=recorder_problem() or "the recorder works")


@needs_the_recorder
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.slow
def test_rot_is_noticed_or_harmless(number: int) -> None:
    noticed = Rotting(number, kind="plain", kills=0.7).rot(30)
    assert set(noticed) == {"noticed", "harmless"}


@needs_the_recorder
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_five_hundred_rounds_of_rot(seed: int, tmp_path: Path) -> None:
    """What is kept of a violation stays in the test's folder."""
    rounds = 0
    for number in range(12):
        rounds += Rotting(seed + number, kind="plain", kills=0.7, keep=tmp_path).rot(60).total()
    assert rounds >= 500
