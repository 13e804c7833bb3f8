"""The deterministic simulation: thousands of lives of a server, planted faults it must find, and its disk's own tests.

One life: scripts/simulate SEED. Its modules are in tests/support/simulation/ (server, clients, oracle) and
tests/support/faulty_journal.py, which has the fault model at its top.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from geventstalk.core.operate import Operate
from journal import CHANGE, DELETE, FULL, Journal, JournalFailed, JournalFull
from tests.support.faults import wants_compaction
from tests.support.faulty_journal import Disk, FaultyJournal, worker_of
from tests.support.simulation.canaries import CANARIES
from tests.support.simulation.clients import Habits
from tests.support.simulation.operator import Operator, Promise
from tests.support.simulation.oracle import Oracle
from tests.support.simulation.simulation import Outcome, simulate

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 50
"""The known lives of every run, and beside them this many drawn ones."""
DRAWN_SEEDS = 50
LONG_SEEDS = 2_000
"""The same with --long."""
LONG_DRAWN_SEEDS = 1_000
CHUNK = 50
"""This many lives make a test, a few seconds long: enough of them to be shared out among the workers."""
CANARY_SEEDS = 600
PINNED = {
    "replies before commit": (3, 45, 47),
    "replies before sync": (5, 6, 7),
    "replies after a failed commit": (45, 218, 221),
    "replies out of order": (10, 21, 34),
    "never syncs when due": (3, 7, 8),
    "forgets to wake the clock": (3, 4),
    "forgets to arm the ttr": (1, 2, 3),
    "forgets to go on": (1, 2, 4),
    "forgets who was served": (4, 7),
    "loses replies when it stops": (62, 101, 161),
    "forgets who left": (22, 36, 47),
    "operations are done before commit": (287, 299, 428),
    "operations are done before sync": (6, 81, 89),
    "forgets operations": (1, 3, 4),
    "loses operations when it stops": (14, 51, 136),
    "operations are done after a failure": (33, 44, 51),
    "forgets moves": (1, 2, 3),
    "forgets a body that has come": (845, 859),
    "forgets a body that does not come": (89, 91, 130),
    "takes bodies of others": (46, 146, 209),
    "forgets a body that fails": (110, 177, 207),
    "tells of a reservation that ended": (1, 13, 15),
    "serves a waiter twice": (1, 3),
    "reuses ids": (8, 12),
    "forgets releases": (1, 3, 14),
    "forgets the order of burying": (1, 17),
    "forgets deletes": (1, 2, 3),
    "keeps monotonic deadlines": (1, 2, 3),
    "compaction drops a key": (14, 16),
    "compaction removes before it syncs": (17, 18, 20),
    "never compacts": (46, 124, 170),
    "compacts for ever": (1, 28, 41),
    "admits everything": (171, 414),
    "never admits again": (11, 24, 61),
    "keeps its reserve": (11, 12, 27),
}
"""Lives that show a planted fault, so that no run has to search. A change of the code makes them other lives: as long
as one of them shows its fault, nothing needs to be done."""
SETTLE_S = 20.0


def explain(outcome: Outcome) -> str:
    return "\n".join([*outcome.trace[-40:], f"replay with: scripts/simulate {outcome.scenario.seed}"])


def life(number: int) -> tuple[int, int]:
    """One life, which must be sound. Returns how many replies and restarts there were in it."""
    outcome = simulate(number)
    assert outcome.failure is None, explain(outcome)
    return outcome.replies, outcome.restarts


def chunks(seeds: int, long_seeds: int) -> list[Any]:
    """The first lives of this many chunks, those beyond the first number marked long."""
    more = [pytest.param(first, marks=pytest.mark.long) for first in range(seeds, long_seeds, CHUNK)]
    return [*range(0, seeds, CHUNK), *more]


# Bug: The lives found: a clean end that removed empty segments lowest first, so that a kill left a gap; a WAL that a
# start built on before it was synced; a loss of power around a rotation that passed for damage; compaction of very
# small segments that never came to rest; a watermark that named a new segment before the name of its file was on the
# device.
@pytest.mark.slow
@pytest.mark.parametrize("first", chunks(SEEDS, LONG_SEEDS))
def test_lives_of_known_seeds(first: int) -> None:
    lives = [life(number) for number in range(first + 1, first + 1 + CHUNK)]
    # Otherwise the lives are sound because nothing happens in them.
    assert sum(replies for replies, _ in lives) > 20 * CHUNK
    assert sum(restarts for _, restarts in lives) > CHUNK


@pytest.mark.slow
@pytest.mark.parametrize("first", chunks(DRAWN_SEEDS, LONG_DRAWN_SEEDS))
def test_lives_of_drawn_seeds(seed: int, first: int) -> None:
    for number in range(seed + first, seed + first + CHUNK):
        life(number)


@cache
def is_sound(seed: int) -> bool:
    return simulate(seed).failure is None


def shows(seed: int, name: str) -> bool:
    """Returns whether a life finds a planted fault and is sound without it."""
    return simulate(seed, CANARIES[name]).failure is not None and is_sound(seed)


@pytest.mark.parametrize("name", CANARIES)
def test_a_planted_fault_is_found(name: str) -> None:
    if any(shows(seed, name) for seed in PINNED[name]):
        return
    found = [seed for seed in range(1, CANARY_SEEDS + 1) if shows(seed, name)][:3]
    if found:
        pytest.fail(f"no pinned life shows it any more, but {found} do: they belong in PINNED")
    pytest.fail(f"{CANARY_SEEDS} lives do not show it")


@pytest.mark.slow
def test_a_seed_is_the_same_life_everywhere(seed: int) -> None:
    """In another process, too, with other hashes of strings and other addresses."""
    program = (
        "import sys\nfrom tests.support.simulation.simulation import simulate\n"
        "for seed in map(int, sys.argv[1:]): print(simulate(seed).digest)"
    )
    seeds = [seed + number for number in range(10)]
    command = [sys.executable, "-c", program, *map(str, seeds)]
    environment = {**os.environ, "PYTHONHASHSEED": "4321", "PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == [simulate(number).digest for number in seeds]


@pytest.mark.slow
def test_the_program_replays_a_seed_and_searches() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.support.simulation", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    sound = next(number for number in range(1, SEEDS) if is_sound(number))
    one = run(str(sound))
    assert one.returncode == 0 and f"seed {sound}: " in one.stdout and simulate(sound).digest[:12] in one.stdout
    many = run("--seeds", "1", "--first", str(sound))
    assert many.returncode == 0 and "seeds/s" in many.stdout and "1 lives were sound" in many.stdout
    for wrong in ((), ("x",), ("1", "--first", "2"), ("--seeds", "0")):
        refused = run(*wrong)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and not refused.stdout


class JournalBehaviour:
    """The behaviour of both journals while nothing fails. `open_journal` opens the same directory each time."""

    @pytest.fixture
    def open_journal(self) -> Iterator[Callable[..., Journal]]:
        raise NotImplementedError

    def work(self, journal: Journal) -> None:
        """Gives the journal's worker time for a piece of work."""
        raise NotImplementedError

    def started(self, journal: Journal) -> list[tuple[int, int, bytes]]:
        """Replays and starts; returns what there was."""
        records = [(key, kind, payload) for key, kind, payload, _ in journal.replay()]
        journal.start()
        journal.repair(lambda key: None)
        return records

    def settle(self, journal: Journal, model: dict[int, bytes]) -> None:
        """Compacts until there is nothing more to do."""
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            while wants_compaction(journal):
                journal.compact_slice(model.get)
            if not journal.settling:
                return
            self.work(journal)
        pytest.fail("the journal does not settle")

    def test_what_was_committed_is_replayed_in_order(self, open_journal: Callable[..., Journal]) -> None:
        journal = open_journal()
        assert self.started(journal) == []
        batch = [(1, FULL, b"one"), (2, FULL, b"two"), (1, CHANGE, b"uno"), (2, DELETE, b""), (7, FULL, b"x" * 5000)]
        for record in batch:
            assert journal.appended == batch.index(record)
            journal.append(*record)
            assert journal.dirty
        journal.commit()
        assert not journal.dirty and journal.records_written == 5 and journal.current == journal.oldest == 1
        journal.append(9, FULL, b"never committed")
        journal.abandon()
        journal = open_journal()
        assert self.started(journal) == batch
        journal.close()

    def test_a_clean_end_commits(self, open_journal: Callable[..., Journal]) -> None:
        journal = open_journal()
        self.started(journal)
        journal.append(3, FULL, b"three")
        journal.close()
        journal = open_journal()
        assert self.started(journal) == [(3, FULL, b"three")]
        journal.close()

    def test_what_there_is_to_sync(self, open_journal: Callable[..., Journal]) -> None:
        journal = open_journal()
        self.started(journal)
        first = journal.sync_point()
        if first is not None:
            first.run()
        assert journal.sync_point() is None
        journal.append(1, FULL, b"one")
        journal.commit()
        point = journal.sync_point()
        assert point is not None
        assert journal.sync_point() is None
        point.run()
        journal.close()

    def test_the_high_water_survives_all_that_was_written(self, open_journal: Callable[..., Journal]) -> None:
        journal = open_journal(segment_bytes=8192)
        self.started(journal)
        for key in range(1, 60):
            journal.append(key, FULL, b"x" * 500)
            journal.commit()
            journal.append(key, DELETE, b"")
            journal.commit()
            self.settle(journal, {})
        assert journal.oldest > 1
        for _ in range(3):
            journal.close()
            journal = open_journal(segment_bytes=8192)
            self.started(journal)
            assert journal.high_water == 59
            self.settle(journal, {})
        journal.close()

    def test_without_compaction_every_segment_stays(self, open_journal: Callable[..., Journal]) -> None:
        journal = open_journal(segment_bytes=8192, compact=False)
        self.started(journal)
        for key in range(1, 60):
            journal.append(key, FULL, b"x" * 500)
            journal.append(key, DELETE, b"")
            journal.commit()
            self.settle(journal, {})
        assert journal.oldest == 1 < journal.current
        journal.close()

    @pytest.mark.slow
    def test_client_keys_outlive_rotation_compaction_and_restarts(
        self, open_journal: Callable[..., Journal], seed: int
    ) -> None:
        draw = random.Random(seed)
        model: dict[int, bytes] = {}
        journal = open_journal(segment_bytes=16384)
        self.started(journal)
        last = 0
        for _ in range(400):
            kind = draw.choice((FULL, FULL, CHANGE, CHANGE, DELETE))
            if kind == FULL:
                key = last + 1
                if model and draw.random() < 0.2:
                    key = draw.choice(sorted(model))  # a live key may be written anew
                last = max(last, key)
                model[key] = b"%d." % draw.randrange(10**9) * draw.randint(1, 100)
                journal.append(key, FULL, model[key])
            elif model:
                key = draw.choice(sorted(model))
                model[key] = model[key] + b"c" if kind == CHANGE else b""
                journal.append(key, kind, b"c" if kind == CHANGE else b"")
                if kind == DELETE:
                    del model[key]
            if draw.random() < 0.5:
                journal.commit()
            if draw.random() < 0.1:
                self.settle(journal, model)
            if draw.random() < 0.02:
                journal.commit()
                draw.choice((journal.close, journal.abandon))()
                journal = open_journal(segment_bytes=16384)
                assert folded(self.started(journal)) == model
                assert journal.high_water == last and journal.live.keys == len(model)
        assert journal.records_moved or journal.oldest > 1
        journal.close()


def folded(records: list[tuple[int, int, bytes]]) -> dict[int, bytes]:
    """Returns what a replay means when a change adds its payload."""
    model: dict[int, bytes] = {}
    for key, kind, payload in records:
        if kind == DELETE:
            del model[key]
        elif kind == CHANGE:
            model[key] += payload
        else:
            model[key] = payload
    return model


class TestRealJournal(JournalBehaviour):
    @pytest.fixture
    def open_journal(self, tmp_path: Path) -> Iterator[Callable[..., Journal]]:
        yield lambda **options: Journal(str(tmp_path / "journal"), **{"segment_bytes": 1 << 20, **options})

    def work(self, journal: Journal) -> None:
        time.sleep(0.001)


class TestFaultyJournal(JournalBehaviour):
    @pytest.fixture
    def open_journal(self) -> Iterator[Callable[..., Journal]]:
        disk = Disk(random.Random(1))
        yield lambda **options: FaultyJournal(disk.path, **{"segment_bytes": 1 << 20, **options})
        disk.unmount()

    def work(self, journal: Journal) -> None:
        worker_of(journal).turn()


@pytest.fixture
def disk(seed: int) -> Iterator[Disk]:
    made = Disk(random.Random(seed), 1 << 20)
    yield made
    made.unmount()


def opened(disk: Disk) -> tuple[Journal, list[int]]:
    """A journal that is ready to write, and the keys that were in it."""
    journal = FaultyJournal(disk.path, segment_bytes=1 << 14)
    keys = [record.key for record in journal.replay()]
    journal.start()
    return journal, keys


def write(journal: Journal, key: int) -> None:
    journal.append(key, FULL, b"payload")
    journal.commit()


def test_the_loss_of_power_takes_a_tail_of_what_is_not_synced(disk: Disk) -> None:
    found = set()
    for _ in range(50):
        disk.segments.clear()
        disk.watermarks = [(0, 0)]
        journal, _ = opened(disk)
        for key in range(1, 4):
            write(journal, key)
        point = journal.sync_point()
        assert point is not None
        point.run()
        for key in range(4, 9):
            write(journal, key)
        disk.lose_power()
        journal, keys = opened(disk)
        assert keys == list(range(1, len(keys) + 1)) and len(keys) >= 3
        found.add(len(keys))
        disk.lose_power()
    assert {3, 8} < found


def test_the_end_of_the_process_takes_nothing_that_was_committed(disk: Disk) -> None:
    journal, _ = opened(disk)
    for key in range(1, 9):
        write(journal, key)
    journal.append(9, FULL, b"not committed")
    disk.lose_process()
    assert opened(disk)[1] == list(range(1, 9))


def test_a_sync_that_began_earlier_covers_less(disk: Disk) -> None:
    journal, _ = opened(disk)
    write(journal, 1)
    point = journal.sync_point()
    assert point is not None
    disk.as_of = disk.lengths()
    write(journal, 2)
    point.run()
    assert [key for key, _, _ in disk.segments[1].unsynced_rows] == [2]


def test_a_commit_and_a_sync_can_fail(disk: Disk) -> None:
    journal, _ = opened(disk)
    write(journal, 1)
    disk.commit_fails = 1
    with pytest.raises(JournalFailed):
        write(journal, 2)
    disk.lose_process()
    disk.commit_fails = 0
    journal, keys = opened(disk)
    assert keys in ([1], [1, 2])
    disk.sync_fails = 1
    write(journal, 3)
    point = journal.sync_point()
    assert point is not None
    with pytest.raises(JournalFailed):
        point.run()


def test_a_full_disk_gets_room_again(disk: Disk) -> None:
    journal, _ = opened(disk)
    write(journal, 1)
    assert journal.admits(100)
    disk.others_take(disk.free_bytes)
    write(journal, 2)  # into the room that was kept for this
    assert not journal.admits(100) and not disk.starved
    with pytest.raises(JournalFailed):
        for key in range(3, 100):
            disk.others_take(disk.others_bytes + disk.free_bytes)  # and what is given back to it, too
            write(journal, key)
    assert disk.failed
    disk.lose_process()
    with pytest.raises(JournalFull):
        opened(disk)
    disk.lose_process()
    disk.others_take(0)
    journal, keys = opened(disk)
    assert keys[:2] == [1, 2] and journal.admits(100)


def test_on_a_full_disk_a_note_waits_for_the_room_that_the_last_note_frees(disk: Disk) -> None:
    """A segment that goes is noted first. Notes without end took the last room before anything had gone."""
    journal, _ = opened(disk)
    worker = worker_of(journal)

    def settle() -> bool:
        while not worker.idle:
            worker.turn()
        return wants_compaction(journal)

    for key in (1, 2, 3):
        last = journal.current
        while journal.current == last:
            write(journal, key)
            settle()
    disk.others_take(disk.free_bytes)
    write(journal, 3)
    settle()
    for key in (1, 2):
        journal.append(key, DELETE, b"")
        journal.commit()
        assert wants_compaction(journal) == (key == 1)
        if key == 1:
            journal.compact_slice(lambda key: b"payload")
    assert settle() and journal.oldest == 2
    journal.abandon()


@pytest.mark.parametrize("size", [10, 1000, 10_000])
def test_what_was_admitted_fits_when_others_fill_the_disk_between_two_looks(disk: Disk, size: int) -> None:
    """Puts went on for as long as a look of long ago had seen room: more than the reserve has."""
    journal, _ = opened(disk)
    assert journal.admits(size)
    disk.others_take(disk.free_bytes)
    keys = 0
    while journal.admits(size) and keys < 1000:
        keys += 1
        journal.append(keys, FULL, bytes(size))
    assert keys < 1000
    journal.commit()
    for key in range(1, keys + 1):
        journal.append(key, DELETE, b"")
        journal.commit()
        while not worker_of(journal).idle:
            worker_of(journal).turn()
    assert not disk.failed
    journal.abandon()


def test_without_inodes_what_is_dead_goes_also_behind_a_segment_that_is_too_large(disk: Disk) -> None:
    """No next segment can be made, so the current one grows; and only what is removed gives inodes back."""
    journal, _ = opened(disk)
    worker = worker_of(journal)
    for key in (1, 2, 2):
        while not worker.idle:
            worker.turn()
        disk.takes_files = False
        for _ in range(20):
            write(journal, key)
            journal.tend()
    assert journal.current == 2 and not journal.admits(1)
    journal.append(1, DELETE, b"")
    journal.commit()
    assert wants_compaction(journal)
    journal.compact_slice(lambda key: b"payload")
    worker.turn()
    disk.takes_files = True
    while journal.short_of_room or journal.settling:
        journal.tend()
        if not worker.idle:
            worker.turn()
    assert journal.oldest == 2 and journal.current == 3 and journal.admits(1)
    journal.abandon()


def test_without_room_for_its_note_what_is_dead_stays_for_now(disk: Disk) -> None:
    """Nothing has changed: a server that tidies up must not end for want of room."""
    journal, _ = opened(disk)
    worker = worker_of(journal)
    last = journal.current
    while journal.current == last:
        write(journal, 1)
        journal.tend()
        while not worker.idle:
            worker.turn()
    write(journal, 2)
    journal.append(1, DELETE, b"")
    journal.commit()
    for _ in range(2):
        disk.others_take(disk.others_bytes + disk.free_bytes + disk.reserved_bytes)
        disk.reserved_bytes = journal._space.reserved = 0
        assert wants_compaction(journal)
        journal.compact_slice(lambda key: b"payload")
        assert not wants_compaction(journal) and journal.oldest == last, "tried again at once"
        while not wants_compaction(journal):
            journal.tend()
    disk.others_take(0)
    journal.compact_slice(lambda key: b"payload")
    while not worker.idle:
        worker.turn()
        journal.tend()
    assert journal.oldest == last + 1
    journal.abandon()


# Bug: After an operation that could not read a body the oracle put off the replies of all other clients.
def test_an_operation_that_fails_is_over_to_the_oracle() -> None:
    """Of the tool: replies of other clients are put off while an operation's change runs, and not behind that."""
    draw = random.Random(1)
    oracle = Oracle(lambda: 0, lambda: Operate(0), 100)
    operator = Operator(draw, Habits.drawn(draw, 100), oracle, [], lambda text: None, False, lambda: True)

    def fails() -> None:
        raise JournalFailed("a body cannot be read")

    with pytest.raises(JournalFailed):
        operator.step(Promise("a change"), fails)
    assert oracle.stepping is None
