"""Bit rot and missing files: a start refuses, or everything that was promised is right.

`support/torture/rot.py` says what happens to files. First the lowest tests of what it found, then the rot itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from journal import FULL, Journal
from journal.sqlite.backup import backup
from journal.sqlite.builder import SegmentBuilder, mend
from journal.sqlite.files import segment_path
from journal.sqlite.survey import SegmentSurvey
from journal.sqlite.watermark import Watermark
from journal.sqlite.writer import SegmentWriter
from tests.support import for_change
from tests.support.faults import Rig, fold, payload, read, read_sound
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
            writer.append([(key, FULL, b"")])
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


def test_an_older_copy_of_the_newest_segment_is_noticed_after_a_clean_end(tmp_path: Path) -> None:
    """The empty segment behind it counted its records. A clean end removes that one."""
    rig = Rig(tmp_path / "journal")
    segment = rig.directory / "segment-00000001.db"
    older = segment.read_bytes()
    for key in range(1, 4):
        rig.put(key)
    rig.close()
    for _ in range(2):
        rig.open()
        rig.close()
        assert rig.segments() == [segment.name]
        assert read(rig.directory).model == rig.model
    segment.write_bytes(older)
    assert any("ends after record 0, but 3 were on the device" in finding for finding in read(rig.directory).findings)


def test_a_start_counts_each_uncounted_segment(tmp_path: Path) -> None:
    """A kill in an end: the segment is sealed, and the next one, which counts nothing, is not removed yet."""
    rig = Rig(tmp_path / "journal")
    segment = rig.directory / "segment-00000001.db"
    older = segment.read_bytes()
    for key in range(1, 4):
        rig.put(key)
    rig.settle()
    assert rig.segments() == [segment.name, "segment-00000002.db"]
    spare = (rig.directory / "segment-00000002.db").read_bytes()
    rig.close()
    (rig.directory / "segment-00000002.db").write_bytes(spare)
    for _ in range(3):
        rig.open()
        rig.close()
        assert read(rig.directory).model == rig.model
    assert rig.segments() == [segment.name]
    segment.write_bytes(older)
    assert any("ends after record 0, but 3 were on the device" in finding for finding in read(rig.directory).findings)


# Bug: The segments of an import or a repair counted nothing: an older copy of one of them was accepted.
def test_what_a_tool_builds_counts_its_records(tmp_path: Path) -> None:
    builder = SegmentBuilder(str(tmp_path), segment_bytes=1 << 15)
    for key in range(1, 3001):
        builder.append(key, payload(key, 1, 50))
    builder.finish()
    assert len(read_sound(tmp_path).model) == 3000
    segment = Path(segment_path(str(tmp_path), 1))
    segment.unlink()
    SegmentWriter(str(segment), 1, 0).leave()
    assert any("ends after record 0, but" in finding for finding in read(tmp_path).findings)


@pytest.mark.parametrize("tool", ["backup", "mend", "start"])
def test_what_a_loss_of_power_took_is_no_damage_to_a_tool_either(tmp_path: Path, tool: str) -> None:
    """Segment 2 counts four records of segment 1. The loss took the last one, which was never acknowledged."""
    folder, target = tmp_path / "journal", tmp_path / "target"
    for path in (folder, target):
        path.mkdir()
    for number, records in ((1, 3), (2, 2), (3, 1)):
        writer = SegmentWriter(segment_path(str(folder), number), number, 0)
        writer.before = {1: 4} if number == 2 else {}
        writer.note(0, 1)
        for key in range(number * 10, number * 10 + records):
            writer.append([(key, FULL, payload(key, 1, 5))])
        writer.seal() if number == 3 else writer.leave()
    watermark = Watermark(str(folder), 1)
    watermark.advance(1, 3)
    watermark.close()
    model = read_sound(folder).model
    assert len(model) == 6
    if tool == "backup":
        assert backup(str(folder), str(target)) == 3
        folder = target
    else:
        segment = Path(segment_path(str(folder), 3))
        segment.write_bytes(segment.read_bytes().replace(payload(30, 1, 5), payload(30, 2, 5)))
        assert len(read(folder).findings) == 1
        del model[30]
    if tool == "mend":
        survey = SegmentSurvey(str(folder), lambda record: None)
        mend(survey, SegmentBuilder(str(folder), first=4, oldest=1))
        survey.close()
    elif tool == "start":
        journal = Journal(str(folder), segment_bytes=1 << 16, accept_damage=True)
        assert fold(journal.replay()) == model
        journal.start()
        journal.repair(lambda key: None)
        journal.abandon()
    assert read_sound(folder).model == model


needs_the_recorder = pytest.mark.skipif(bool(recorder_problem()), reason=recorder_problem() or "the recorder works")


@needs_the_recorder
@pytest.mark.parametrize("number", for_change([1, 2, 3], 0))
@pytest.mark.slow
def test_rot_is_noticed_or_harmless(number: int) -> None:
    """On a busy machine lives are short, and one rot in seven is noticed; on an idle one, one in three."""
    rotting = Rotting(number, kind="plain", kills=0.7)
    noticed = rotting.rot(30)
    while noticed.keys() != {"noticed", "harmless"} and noticed.total() < 100:
        noticed += rotting.rot(30)
    assert noticed.keys() == {"noticed", "harmless"}


@needs_the_recorder
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_five_hundred_rounds_of_rot(seed: int, tmp_path: Path) -> None:
    """The files of a violation stay in the test's folder."""
    rounds = 0
    for number in range(12):
        rounds += Rotting(seed + number, kind="plain", kills=0.7, keep=tmp_path).rot(60).total()
    assert rounds >= 500
