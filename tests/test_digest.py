"""Digests of sealed segments: what a start reads of them instead of all, and what it finds out all the same."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from journal import CHANGE, DELETE, FULL, Journal, JournalDamaged, JournalFailed
from journal.log import HEAD, HEAD_BYTES, Row
from journal.sqlite.digest import CUT_MAX, CUT_MIN, Digest
from journal.sqlite.files import is_suspect, segment_path
from journal.sqlite.format import LAST, PART
from journal.sqlite.survey import SegmentSurvey
from tests.support.check import check
from tests.support.faults import Rig, payload, read, wants_compaction
from tests.support.forgetful import Forgetful
from tests.test_bodies import Rig as TurnRig
from tests.test_bodies import reserved
from tests.test_journal_bounds import directory_bytes


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
        """What came out of a digest in the last replay."""
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
        rig.put(key, draw.choice([0, 20, 150, CUT_MIN - 9, CUT_MIN - 8, 3000, 3000, 5000, 5000, 9000]))
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
def test_a_digest_says_what_the_records_say(rig: LeavingRig, tmp_path: Path, seed: int, crashes: bool) -> None:
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
            assert row[3:] == (len(data), data[:HEAD_BYTES]) and len(data) >= CUT_MIN
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
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'digest'").fetchone() is None:
            return []
        return db.execute("SELECT * FROM digest").fetchall()


def test_only_who_leaves_payloads_has_digests(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal")
    for key in range(1, 60):
        rig.put(key, 3000)
        rig.journal.commit()
    rig.close()
    assert not any(table(str(path)) for path in rig.directory.glob("segment-*.db"))
    leaving = LeavingRig(rig.directory)
    leaving.close()
    assert not leaving.heads() and len(leaving.rows) == 59


@pytest.mark.parametrize(
    ("rows", "worth"),
    [
        ([(FULL, CUT_MIN)] * 3, True),
        ([(FULL, CUT_MIN - 1)] * 50, False),
        ([(FULL, 20)] * 400, False),
        ([(FULL, CUT_MAX), (CHANGE, 20), (DELETE, 0)], True),
        ([(FULL, CUT_MAX + 1), *[(FULL, 5000)] * 9], False),
        ([*[(FULL, 5000)] * 9, (PART, 5000), (LAST, 50)], False),
        ([(FULL, 8000), *[(CHANGE, 1000)] * 2], True),
        ([(FULL, 8000), *[(CHANGE, 1000)] * 3], False),
        ([*[(CHANGE, 1900)] * 200, *[(FULL, 9000)] * 900], False),  # it is given up before it takes memory
    ],
)
def test_a_digest_is_made_where_it_is_small(rows: list[tuple[int, int]], worth: bool) -> None:
    digest = Digest(1)
    for seq, (kind, size) in enumerate(rows, 1):
        digest.add(seq, seq, kind, bytes(size))
    made = digest.rows()
    assert bool(made) == worth
    size = sum(size for _, size in rows)
    assert sum(len(row[2]) for row in made) < size / 4 + 50 * len(rows)


def test_on_a_full_disk_there_are_no_digests(rig: LeavingRig) -> None:
    for key in range(1, 41):
        rig.settle()
        rig.put(key, 10_000)
        rig.journal._segments.space.tight = key > 20
        rig.journal.commit()
    numbers = [sealed.number for sealed in rig.journal._segments.sealed]
    tight = [sealed.number for sealed in rig.journal._segments.sealed if not sealed.digest_bytes]
    rig.settle()
    assert 1 < len(tight) < len(numbers)
    for number in numbers:
        assert bool(table(segment_path(str(rig.directory), number))) == (number not in tight)


def settle(journal: Journal, payload_of: Callable[[int], bytes]) -> None:
    """Compacts what can be compacted, and waits for the worker: on a busy machine it comes late."""
    while (moves := wants_compaction(journal)) or journal._worker.busy:
        if moves:
            journal.compact_slice(payload_of)
        else:
            journal._worker.wait(1.0)


def finds_room(journal: Journal, payload_of: Callable[[int], bytes]) -> bool:
    """Whether a put finds room, if need be after all that gives room back."""
    if journal.admits(10_000):
        return True
    settle(journal, payload_of)
    return journal.admits(10_000)


@pytest.mark.parametrize("seed", range(2))
def test_digests_never_take_the_journal_beyond_its_budget(tmp_path: Path, seed: int) -> None:
    """Nor do they keep jobs from their room: as many find room as without."""
    draw = random.Random(seed)
    budget = 3_000_000
    taken = {}
    for leaves in (False, True):
        journal = Journal(str(tmp_path / f"journal-{leaves}"), segment_bytes=1 << 17, budget=budget)
        if leaves:
            journal.leave_payloads()
        [*journal.batches()]
        journal.start()
        bodies: dict[int, bytes] = {}

        def payload_of(key: int, bodies: dict[int, bytes] = bodies) -> bytes:
            return bodies[key]

        key = admitted = 0
        for _ in range(3):
            while finds_room(journal, payload_of):
                key += 1
                admitted += 1
                bodies[key] = draw.randbytes(10_000)
                journal.append(key, FULL, bodies[key])
                journal.commit()
                while journal.behind:
                    wants_compaction(journal)
                    journal.catch_up(payload_of)
                assert directory_bytes(Path(journal.directory)) <= budget
            for gone in draw.sample(sorted(bodies), len(bodies) // 2):
                del bodies[gone]
                journal.append(gone, DELETE, b"")
                journal.commit()
                while journal.behind:
                    wants_compaction(journal)
                    journal.catch_up(payload_of)
                settle(journal, payload_of)
                assert directory_bytes(Path(journal.directory)) <= budget
        taken[leaves] = admitted
        sealed = [
            segment_path(journal.directory, each.number) for each in journal.segments(100) if each.state == "sealed"
        ]
        journal.close()
        assert any(table(path) for path in sealed if os.path.exists(path)) == leaves
    assert taken[True] >= 0.9 * taken[False] > 60


def rot(path: str, what: bytes) -> None:
    """One bit of the file changes, within the last such bytes."""
    content = bytearray(Path(path).read_bytes())
    at = bytes(content).rindex(what)
    content[at + len(what) // 2] ^= 1
    Path(path).write_bytes(content)


def sealed_with_heads(rig: LeavingRig) -> tuple[str, int]:
    """Path of a segment that has a digest, and a key whose whole record it holds."""
    for key in range(1, 61):
        rig.put(key, 3000)
        rig.journal.commit()
        rig.settle()
    rig.close()
    path = segment_path(str(rig.directory), 2)
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:
        ((key,),) = db.execute("SELECT key FROM record WHERE kind = 1 LIMIT 1 OFFSET 3").fetchall()
    return path, int(key)


def test_a_damaged_digest_costs_nothing_but_time(rig: LeavingRig) -> None:
    path, key = sealed_with_heads(rig)
    rig.open()
    every = [row[1] for _, row in rig.rows]
    rig.close()
    rot(path, payload(key, *rig.model[key])[60:HEAD_BYTES])  # the last place where it stands
    rig.open()
    assert [row[1] for _, row in rig.rows] == every
    assert 0 < len(rig.heads()) < len(every) - 1
    assert any("the digest of" in line and path in line for line in rig.said)
    rig.close()
    survey = SegmentSurvey(str(rig.directory), lambda record: None)
    assert len([*survey.read()]) == len(every) and not survey.findings
    survey.close()
    assert any("the digest of" in line and path in line for line in survey.notes)


def test_a_damaged_body_is_never_given_and_the_next_start_looks_at_everything(rig: LeavingRig) -> None:
    path, key = sealed_with_heads(rig)
    rot(path, payload(key, *rig.model[key])[2000:2400])
    assert len(read(rig.directory).findings) == 1
    rig.open()  # it reads digests only
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
        "DELETE FROM record WHERE key = ?",
    ],
)
@pytest.mark.parametrize("while_it_runs", [False, True])
def test_compaction_does_not_wait_for_a_record_that_is_not_there(
    rig: LeavingRig, change: str, while_it_runs: bool
) -> None:
    """A start from digests does not see it. Compaction looked for the record for ever, 16 s for a put and a delete."""
    path, key = sealed_with_heads(rig)
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


@pytest.mark.parametrize("change", [cut_short, without_end, no_pages])
def test_what_the_head_of_a_segment_tells_is_found_at_once(rig: LeavingRig, change: Callable[[bytes], bytes]) -> None:
    path, _ = sealed_with_heads(rig)
    Path(path).write_bytes(change(Path(path).read_bytes()))
    with pytest.raises(JournalDamaged):
        rig.open()


def test_a_segment_that_is_missing_is_found_at_once(rig: LeavingRig) -> None:
    path, _ = sealed_with_heads(rig)
    os.unlink(path)
    with pytest.raises(JournalDamaged):
        rig.open()


def test_segments_are_asked_of_the_device_before_their_turn_comes(
    rig: LeavingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed_with_heads(rig)
    asked: list[tuple[str, int, int]] = []
    advise = os.posix_fadvise

    def told(file: int, offset: int, size: int, advice: int) -> None:
        asked.append((os.readlink(f"/proc/self/fd/{file}"), offset, size))
        advise(file, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", told)
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
        assert [each[1:] for each in asked if each[0] == path] == [(0, 1 << 14), (size - size // 16, size // 16)]
    asked.clear()
    assert read(rig.directory).model == rig.model and not asked


def test_a_digest_of_another_segment_is_none(rig: LeavingRig) -> None:
    path, _ = sealed_with_heads(rig)
    other = table(segment_path(str(rig.directory), 3))
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM digest")
        db.executemany("INSERT INTO digest VALUES(?, ?, ?)", other)
        db.commit()
    rig.open()
    assert {row[1] for _, row in rig.rows} == set(rig.model)
    assert any("the digest of" in line and path in line for line in rig.said)


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


def test_a_digest_that_would_take_too_much_memory_is_given_up() -> None:
    """Digests in the making took up to a quarter of what was written, whatever the bound of memory was."""
    small, large = Digest(1, 100_000), Digest(1)
    for number in range(1, 1001):
        for digest in small, large:
            digest.add(number, number, FULL, bytes(5000))
    assert large.rows() and not small.rows()
    assert small._kept < 200_000 < large._kept
