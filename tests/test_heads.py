"""A start that leaves payloads where they are: what it reads of sealed segments, and what it finds out all the same."""

from __future__ import annotations

import gc
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from journal import FULL, JournalDamaged, JournalFailed
from journal.log import HEAD, HEAD_BYTES, Row
from journal.sqlite.files import BODIES_SUFFIX, is_suspect, segment_path
from journal.sqlite.format import INSIDE_MAX
from journal.sqlite.survey import SegmentSurvey
from tests.support.check import check
from tests.support.faults import Rig, payload, read
from tests.support.forgetful import Forgetful
from tests.support.old_segments import make_old
from tests.test_bodies import Rig as TurnRig
from tests.test_bodies import reserved


class LeavingRig(Rig):
    """A rig whose journal leaves payloads where they are."""

    def made(self, *, accept_damage: bool) -> Any:
        journal = super().made(accept_damage=accept_damage)
        journal.leave_payloads()
        return journal

    def replayed(self, *, accept_damage: bool = False) -> Any:
        self.said.clear()
        journal = self.made(accept_damage=accept_damage)
        try:
            self.rows = [(segment, row) for segment, rows in journal.batches() for row in rows]
        except BaseException:
            journal.abandon()
            raise
        return journal

    def heads(self) -> list[Row]:
        """The records whose payloads the last replay did not read."""
        return [row for _, row in self.rows if row[2] == HEAD]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LeavingRig]:
    rig = LeavingRig(tmp_path / "journal")
    yield rig
    rig.journal.abandon()


def live_in(rig: LeavingRig, seed: int) -> None:
    """Some segments with all kinds of records."""
    draw = random.Random(seed)
    for key in range(1, 121):
        rig.put(key, draw.choice([0, 20, 150, INSIDE_MAX - 8, INSIDE_MAX - 7, 3000, 3000, 5000, 5000, 9000]))
        for other in draw.sample(range(1, key + 1), min(key, draw.choice([0, 0, 1, 3]))):
            if other in rig.model:
                rig.delete(other) if draw.random() < 0.3 else rig.change(other, draw.choice([8, 8, 700]))
        if draw.random() < 0.5:
            rig.journal.commit()
            rig.settle()
    rig.journal.commit()
    rig.settle()


def rows_by(journal: Any) -> list[tuple[int, Row]]:
    return [(segment, row) for segment, rows in journal.batches() for row in rows]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("crashes", [False, True])
def test_heads_are_those_of_the_records(rig: LeavingRig, tmp_path: Path, seed: int, crashes: bool) -> None:
    """Also of a segment that a crash left, once the next start has sealed it."""
    live_in(rig, seed)
    if crashes:
        rig.journal.abandon()
        rig.open()
        rig.settle()
    rig.close()
    plain = Rig.made(rig, accept_damage=False)
    whole = rows_by(plain)
    plain.abandon()
    rig.open()
    assert len(whole) == len(rig.rows) and len(rig.heads()) > 40
    for (segment, (seq, key, kind, _, data)), (number, row) in zip(whole, rig.rows, strict=True):
        if row[2] == HEAD:
            row = (row[0], row[1], FULL, row[3], row[4])
            assert row[3:] == (len(data), data[:HEAD_BYTES]) and len(data) > INSIDE_MAX
        else:
            assert row[4] == data
        assert (number, *row[:3]) == (segment, seq, key, kind)


def test_payloads_that_were_left_can_be_read(rig: LeavingRig) -> None:
    live_in(rig, 7)
    rig.close()
    journal = rig.journal = rig.made(accept_damage=False)
    wanted = []
    for segment, rows in journal.batches():
        if any(row[2] == HEAD for row in rows):
            assert journal.reads_back(segment)
        wanted += [(segment, row[0], row[1]) for row in rows if row[2] == HEAD]
    journal.start()
    rig.settle()
    reading = journal.payloads(wanted)
    reading.run()
    assert len(reading.found) > 30 and not reading.failed
    for key, data in reading.found.items():
        assert key not in rig.model or data == payload(key, int.from_bytes(data[:8], "little"), len(data) - 8)


def table(path: str) -> list[tuple[int, int, bytes]]:
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:
        return db.execute("SELECT * FROM digest").fetchall()


def test_only_the_start_that_leaves_payloads_gets_heads(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal")
    for key in range(1, 60):
        rig.put(key, 3000)
        rig.journal.commit()
    rig.close()
    plain = rig.made(accept_damage=False)
    assert not [row for _, row in rows_by(plain) if row[2] == HEAD]
    plain.abandon()
    leaving = LeavingRig(rig.directory)
    assert len(leaving.heads()) == len(leaving.rows) == 59
    leaving.close()


def rot(path: str, what: bytes) -> None:
    """One bit of the file changes, within the last such bytes."""
    content = bytearray(Path(path).read_bytes())
    at = bytes(content).rindex(what)
    content[at + len(what) // 2] ^= 1
    Path(path).write_bytes(content)


def sealed_with_heads(rig: LeavingRig, old: bool = False) -> tuple[str, int]:
    """Path of a sealed segment, and a key whose whole record it holds. `old` ones have hints."""
    for key in range(1, 61):
        rig.put(key, 3000)
        rig.journal.commit()
        rig.settle()
    rig.close()
    if old:
        for file in rig.directory.glob("segment-*.db"):
            if os.path.exists(f"{file}{BODIES_SUFFIX}"):
                make_old(str(file))
    path = segment_path(str(rig.directory), 2)
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:
        ((key,),) = db.execute("SELECT key FROM record WHERE kind & 7 = 1 LIMIT 1 OFFSET 3").fetchall()
    return path, int(key)


def test_damaged_hints_cost_nothing_but_time(rig: LeavingRig) -> None:
    path, key = sealed_with_heads(rig, old=True)
    rig.open()
    assert len(rig.heads()) == 60
    every = [row[1] for _, row in rig.rows]
    rig.close()
    rot(path, payload(key, *rig.model[key])[60:HEAD_BYTES])  # the last place where it stands
    rig.open()
    assert [row[1] for _, row in rig.rows] == every
    assert 0 < len(rig.heads()) < len(every) - 1
    assert any("the hints of" in line and path in line for line in rig.said)
    rig.close()
    survey = SegmentSurvey(str(rig.directory), lambda record: None)
    assert len([*survey.read()]) == len(every) and not survey.findings
    survey.close()
    assert any("the hints of" in line and path in line for line in survey.notes)


@pytest.mark.parametrize("old", [False, True])
def test_a_damaged_body_is_never_given_and_the_next_start_looks_at_everything(rig: LeavingRig, old: bool) -> None:
    path, key = sealed_with_heads(rig, old)
    rot(path if old else path + BODIES_SUFFIX, payload(key, *rig.model[key])[2000:2400])
    assert len(read(rig.directory).findings) == 1
    rig.open()  # it reads heads only
    rig.settle()
    (wanted,) = [(segment, row[0], row[1]) for segment, row in rig.rows if row[1] == key]
    assert not is_suspect(str(rig.directory))
    reading = rig.journal.payloads([wanted])
    reading.run()
    assert not reading.found and isinstance(reading.failed[key], JournalDamaged)
    assert is_suspect(str(rig.directory))
    rig.journal.abandon()
    for _ in range(2):
        with pytest.raises(JournalDamaged):
            rig.open()
    del rig.model[key]
    rig.open(accept_damage=True)
    rig.close()
    assert not is_suspect(str(rig.directory)) and os.path.exists(path + ".damaged")
    rig.open()
    assert {row[1] for _, row in rig.rows} == set(rig.model) and len(rig.heads()) > 30


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE record SET key = key + 5000 WHERE key = ?",
        "UPDATE record SET kind = 2 WHERE key = ?",
        "UPDATE record SET kind = 10 WHERE key = ?",
        "DELETE FROM record WHERE key = ?",
    ],
)
@pytest.mark.parametrize(("while_it_runs", "old"), [(False, True), (True, True), (True, False)])
def test_compaction_does_not_wait_for_a_record_that_is_not_there(
    rig: LeavingRig, change: str, while_it_runs: bool, old: bool
) -> None:
    """A start from hints does not see it. Compaction looked for the record for ever, 16 s for a put and a delete."""
    path, key = sealed_with_heads(rig, old)
    if while_it_runs:
        rig.open()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute(change, (key,)).rowcount
    if not while_it_runs:
        rig.open()
    for other in list(rig.model):
        if other != key:
            rig.delete(other)
    rig.journal.commit()
    with pytest.raises(JournalFailed, match=f"{path} lacks 1 records that count, such as that of key {key}"):
        rig.compact_all()
    assert is_suspect(str(rig.directory))
    rig.journal.abandon()
    with pytest.raises(JournalDamaged):
        rig.open()


def cut_short(content: bytes) -> bytes:
    return content[:-2048]


def without_end(content: bytes) -> bytes:
    return content[: len(content) // 2 + 5]


def no_pages(content: bytes) -> bytes:
    return content[:2048]


@pytest.mark.parametrize("suffix", ["", BODIES_SUFFIX])
@pytest.mark.parametrize("change", [cut_short, without_end, no_pages])
def test_what_the_head_of_a_segment_tells_is_found_at_once(
    rig: LeavingRig, change: Callable[[bytes], bytes], suffix: str
) -> None:
    path = sealed_with_heads(rig)[0] + suffix
    Path(path).write_bytes(change(Path(path).read_bytes()))
    with pytest.raises(JournalDamaged):
        rig.open()


@pytest.mark.parametrize("suffix", ["", BODIES_SUFFIX])
def test_a_file_that_is_missing_is_found_at_once(rig: LeavingRig, suffix: str) -> None:
    path, _ = sealed_with_heads(rig)
    os.unlink(path + suffix)
    with pytest.raises(JournalDamaged):
        rig.open()


@pytest.mark.parametrize(("old", "share"), [(False, 1), (True, 16)])
def test_segments_are_asked_of_the_device_before_their_turn_comes(
    rig: LeavingRig, monkeypatch: pytest.MonkeyPatch, old: bool, share: int
) -> None:
    sealed_with_heads(rig, old)
    asked: list[tuple[str, int, int]] = []
    advise = os.posix_fadvise

    def told(file: int, offset: int, size: int, advice: int) -> None:
        asked.append((os.readlink(f"/proc/self/fd/{file}"), offset, size))
        advise(file, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", told)
    gc.collect()  # what other tests left behind must not give descriptors back meanwhile
    open_before = len(os.listdir("/proc/self/fd"))
    journal = rig.made(accept_damage=False)
    seen: list[int] = []
    for number, _ in journal.batches():
        ahead = {path for path, _, _ in asked}
        assert segment_path(str(rig.directory), number) in ahead and len(ahead) <= len(set(seen)) + 17
        seen.append(number)
    journal.abandon()
    assert len(os.listdir("/proc/self/fd")) == open_before
    for number in set(seen):
        path = segment_path(str(rig.directory), number)
        size = os.path.getsize(path)
        assert [each[1:] for each in asked if each[0] == path] == [(0, 1 << 14), (size - size // share, size // share)]
    asked.clear()
    assert read(rig.directory).model == rig.model and not asked


def test_hints_of_another_segment_are_none(rig: LeavingRig) -> None:
    path, _ = sealed_with_heads(rig, old=True)
    other = table(segment_path(str(rig.directory), 3))
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM digest")
        db.executemany("INSERT INTO digest VALUES(?, ?, ?)", other)
        db.commit()
    rig.open()
    assert {row[1] for _, row in rig.rows} == set(rig.model)
    assert any("the hints of" in line and path in line for line in rig.said)


def test_a_start_brings_jobs_back_without_their_bodies(tmp_path: Path) -> None:
    turn_rig = TurnRig(tmp_path / "journal", Forgetful(20_000))
    wire = turn_rig.client()
    turn_rig.fill(wire, 100, 3000)
    turn_rig.tell(wire, b"use " + b"t" * 200 + b"\r\n")
    turn_rig.fill(wire, 100, 3000)
    for id in range(1, 200, 10):
        assert turn_rig.tell(wire, b"delete %d\r\n" % id) == b"DELETED\r\n"
    turn_rig.put(wire, 201, 3000, "5 100 7")
    assert turn_rig.tell(wire, b"kick-job 201\r\n") == b"KICKED\r\n"
    turn_rig.settle()
    turn_rig.close()
    turn_rig = TurnRig(tmp_path / "journal", Forgetful(20_000), prompt=True)
    assert turn_rig.bodies is not None
    check(turn_rig.engine)
    assert turn_rig.bodies.held_bytes < 40_000 and turn_rig.bodies.gone > 150
    wire = turn_rig.client()
    turn_rig.tell(wire, b"watch " + b"t" * 200 + b"\r\n")
    for id in range(1, 202):
        if id % 10 != 1 or id > 200:
            assert turn_rig.tell(wire, b"reserve\r\n") == reserved(id, 3000)
            assert turn_rig.tell(wire, b"delete %d\r\n" % id) == b"DELETED\r\n"
    check(turn_rig.engine)
    assert not turn_rig.bodies.gone and not turn_rig.failures
    turn_rig.close()
