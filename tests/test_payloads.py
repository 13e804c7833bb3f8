"""Whole records that are read back from a journal by their places, while it goes on and after restarts."""

from __future__ import annotations

import os
import random
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from journal import DELETE, FULL, JournalDamaged, JournalFailed, JournalFull
from journal.log import PAYLOAD_MIN
from journal.sqlite.files import segment_path
from journal.sqlite.payloads import SegmentPayloads
from tests.support.faults import Rig, payload


class PlacedRig(Rig):
    """A rig that knows where each whole record stands."""

    def __init__(self, directory: Path) -> None:
        self.places: dict[int, tuple[int, int]] = {}
        super().__init__(directory)

    def put(self, key: int, size: int = 300) -> None:
        super().put(key, size)
        self.places[key] = self.journal.current, self.journal.tail

    def delete(self, key: int) -> None:
        super().delete(key)
        del self.places[key]

    def payload_of(self, key: int) -> bytes | None:
        if key in self.model:
            self.places[key] = self.journal.current, self.journal.tail + 1
        return super().payload_of(key)

    def readable(self) -> list[tuple[int, int, int]]:
        """Returns what can be read back now."""
        return [(segment, at, key) for key, (segment, at) in self.places.items() if self.journal.reads_back(segment)]

    def read_back(self) -> int:
        """Reads all that can be read, and compares it. Returns how many records that were."""
        wanted = self.readable()
        reading = self.journal.payloads(wanted)
        reading.run()
        assert not reading.failed
        for _, _, key in wanted:
            assert reading.found[key] == payload(key, *self.model[key])
        return len(wanted)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[PlacedRig]:
    rig = PlacedRig(tmp_path / "journal")
    yield rig
    rig.journal.abandon()


def filled(rig: PlacedRig, count: int = 400) -> None:
    """Some segments that are sealed."""
    for key in range(1, count + 1):
        rig.put(key, 500 + key)
        if key % 7 == 0:
            rig.journal.commit()
            rig.settle()
    rig.journal.commit()
    rig.settle()
    assert rig.journal.current > 3


def test_what_is_sealed_can_be_read_and_what_is_written_cannot(rig: PlacedRig) -> None:
    filled(rig)
    assert not rig.journal.reads_back(rig.journal.current)
    assert not rig.journal.reads_back(0) and not rig.journal.reads_back(rig.journal.current + 1)
    assert all(rig.journal.reads_back(number) for number in range(1, rig.journal.current))
    assert rig.read_back() > 300


def test_a_segment_that_waits_to_be_sealed_is_not_read(rig: PlacedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(rig)
    sealed = rig.journal._segments.sealed[-1]
    assert rig.journal.reads_back(sealed.number)
    monkeypatch.setattr(sealed, "ready", False)
    assert not rig.journal.reads_back(sealed.number)


def test_reading_leaves_nothing_beside_a_segment_and_no_descriptor(rig: PlacedRig) -> None:
    filled(rig)
    before = sorted(os.listdir(rig.directory)), len(os.listdir("/proc/self/fd"))
    assert rig.read_back()
    assert (sorted(os.listdir(rig.directory)), len(os.listdir("/proc/self/fd"))) == before


def test_who_reads_without_a_descriptor_is_told_to_ask_again(rig: PlacedRig) -> None:
    """It slept until there was one, and once it was the thread that serves all clients."""
    filled(rig)
    wanted = rig.readable()
    reading = rig.journal.payloads(wanted)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with suppress(OSError):
            while True:
                taken.append(os.open("/", os.O_RDONLY))
        reading.run()
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert reading.lacking and not reading.found and not reading.failed
    again = rig.journal.payloads(wanted)
    again.run()
    assert not again.lacking and not again.failed and len(again.found) == len(wanted)


@pytest.mark.parametrize("error", [MemoryError(), JournalFull("no space left on device")], ids=["memory", "room"])
def test_who_reads_without_memory_or_room_is_told_to_ask_again(rig: PlacedRig, error: Exception) -> None:
    filled(rig)

    class Starved(SegmentPayloads):
        def _rows(self, path: str, places: list[int]) -> list[tuple[int, int, int, int, bytes]]:
            if path.endswith("-00000002.db"):
                raise error
            return super()._rows(path, places)

    reading = Starved(str(rig.directory), rig.readable())
    reading.run()
    assert reading.lacking and not reading.failed
    assert reading.found.keys() == {key for segment, _, key in reading.wanted if segment != 2}


def test_records_stand_where_the_replay_says(rig: PlacedRig) -> None:
    filled(rig)
    rig.close()
    found: dict[int, tuple[int, int]] = {}
    journal = rig.made(accept_damage=False)
    for segment, rows in journal.batches():
        assert journal.reads_back(segment), "the end was clean, so all of them are sealed"
        assert not journal.reads_back(segment + 1)
        found.update({key: (segment, seq) for seq, key, kind, _, _ in rows if kind == FULL})
    assert found == rig.places
    journal.start()
    rig.journal = journal
    assert rig.read_back() == len(rig.model)


def test_what_a_crash_left_in_a_wal_is_read_once_it_is_sealed(rig: PlacedRig, tmp_path: Path) -> None:
    filled(rig)
    last = rig.journal.current
    rig.crash(tmp_path / "copy")
    journal = rig.journal = rig.made(accept_damage=False)
    seen = {segment: journal.reads_back(segment) for segment, _ in journal.batches()}
    assert seen == {number: number < last for number in range(1, last + 1)}
    journal.start()
    rig.settle()
    assert journal.reads_back(last)
    assert rig.read_back() == len(rig.model)


def test_a_replay_that_accepts_damage_gives_nothing_up(rig: PlacedRig) -> None:
    filled(rig)
    rig.close()
    journal = rig.journal = rig.made(accept_damage=True)
    assert not any(journal.reads_back(segment) for segment, _ in journal.batches())
    journal.start()
    assert rig.read_back() == len(rig.model)


def test_small_records_do_not_shift_the_places_of_others(rig: PlacedRig, seed: int) -> None:
    draw = random.Random(seed)
    for key in range(1, 1500):
        small = draw.random() < 0.7
        rig.put(key, draw.randrange(0, PAYLOAD_MIN) if small else draw.randrange(PAYLOAD_MIN, 9000))
        if small:
            del rig.places[key]
            rig.change(key)
        if draw.random() < 0.1:
            rig.journal.commit()
            rig.settle()
    rig.journal.commit()
    rig.settle()
    assert rig.read_back() > 100


def test_what_compaction_moves_stands_where_it_says(rig: PlacedRig) -> None:
    filled(rig)
    for key in range(1, 380):
        if key % 5:
            rig.delete(key)
    rig.journal.commit()
    before = dict(rig.places)
    rig.compact_all()
    filled_up_to = 1000
    for key in range(401, filled_up_to):
        rig.put(key, 700)
    rig.journal.commit()
    rig.settle()
    moved = [key for key, place in before.items() if rig.places[key] != place]
    assert moved and rig.read_back() > len(moved)
    reading = rig.journal.payloads([(*before[key], key) for key in moved])
    reading.run()
    assert not reading.found and {type(error) for error in reading.failed.values()} == {JournalFailed}, "it is gone"


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE record SET payload = zeroblob(length(payload)) WHERE seq = ?",
        "UPDATE record SET crc = crc + 1 WHERE seq = ?",
        "UPDATE record SET kind = 2 WHERE seq = ?",
        "UPDATE record SET key = key + 1 WHERE seq = ?",
        "UPDATE record SET seq = 1000000 WHERE seq = ?",
        "DELETE FROM record WHERE seq = ?",
        "UPDATE record SET payload = substr(payload, 2) WHERE seq = ?",
        "UPDATE record SET key = 'x' WHERE seq = ?",
    ],
)
def test_a_record_that_is_not_as_it_was_written_is_not_given_back(rig: PlacedRig, damage: str) -> None:
    filled(rig)
    wanted = [each for each in rig.readable() if each[0] == 2]
    segment, place, key = wanted[3]
    with closing(sqlite3.connect(segment_path(str(rig.directory), segment), isolation_level=None)) as db:
        assert db.execute(damage, (place,)).rowcount == 1
    reading = rig.journal.payloads(wanted)
    reading.run()
    assert isinstance(reading.failed[key], JournalDamaged)
    assert key not in reading.found and reading.found.keys() | reading.failed.keys() == {each[2] for each in wanted}
    for other, found in reading.found.items():
        assert found == payload(other, *rig.model[other])


def test_a_wrong_key_or_place_gets_nothing(rig: PlacedRig) -> None:
    filled(rig)
    rig.put(5000)
    rig.delete(5000)
    rig.journal.commit()
    (segment, place, key), (_, other, _) = rig.readable()[:2]
    for wanted in (segment, place, key + 1), (segment, other, key), (segment, 0, key), (segment, 10**9, key):
        reading = rig.journal.payloads([wanted])
        reading.run()
        assert not reading.found and isinstance(reading.failed[wanted[2]], JournalDamaged)


def test_a_file_of_noise_is_damage(rig: PlacedRig) -> None:
    filled(rig)
    wanted = rig.readable()
    path = segment_path(str(rig.directory), 2)
    os.truncate(path, 100)
    reading = rig.journal.payloads(wanted)
    reading.run()
    bad = {key for segment, _, key in wanted if segment == 2}
    assert reading.failed.keys() == bad and all(isinstance(error, JournalDamaged) for error in reading.failed.values())
    assert len(reading.found) == len(wanted) - len(bad)
    rig.model.clear()
    for key in [*rig.places]:
        rig.journal.append(key, DELETE, b"")
