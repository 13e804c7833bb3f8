"""Damage: whatever happens to the files of a journal, no client sees a garbled body and no operator a traceback.

A torn tail is what a crash leaves of writes that were never acknowledged: accepted, with a line in the log. All else is
refused with exit code 1 and a line for each finding, and with --accept-damage set aside, never deleted. What may happen
to files is drawn up in tests/support/faults.py. Each test proves first that it has done damage.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from geventstalk.core.job import BURIED, DELAYED, READY, STATE_NAMES, Job, held_body
from geventstalk.durable.records import ClockOffset
from geventstalk.durable.store import Store
from journal import Journal, JournalDamaged, JournalError, JournalNewer
from journal.sqlite.files import ASIDE_SUFFIX
from journal.sqlite.format import FORMAT_LIMIT, FORMAT_VERSION, Row
from journal.sqlite.replay import Replay
from tests.support import for_change
from tests.support.clients import Launch, burst, launcher, number, reserve_many, until
from tests.support.faults import wants_compaction
from tests.support.process import GEVENTSTALK, ROOT, ServerProcess, free_port
from tests.support.seeds import draw_seed
from tests.support.wire import Client

SECOND = 1_000_000_000
FLIPS = 500
LONG_FLIPS = 10_000
CYCLE_EVERY = 125  # of this many flips, one is accepted with --accept-damage and started again
START_TIMEOUT_S = 20.0
PREPARED = "segment-00000004.db"  # waits for its turn while the third is written, and holds nothing

Known = dict[int, tuple[bytes, bytes, int]]
"""Id to body, tube and state of a job."""


def body_of(id: int) -> bytes:
    """Returns what only this job holds, of a length that only few have."""
    line = hashlib.sha256(b"%d" % id).hexdigest().encode()
    return (line * 40)[: (id * 37) % 1200] + b"\r\n"


def tube_of(id: int) -> bytes:
    return b"tube-%d" % (id % 3)


@dataclass
class Story:
    """A journal's directory, and what stood in it after each commit of its newest segment."""

    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[Known] = field(default_factory=list)
    wal_ends: list[int] = field(default_factory=list)  # size of the newest WAL after each of those commits
    states: dict[int, set[int]] = field(default_factory=dict)  # all that a job ever was

    @property
    def last(self) -> Known:
        return self.commits[-1]

    @property
    def newest(self) -> str:
        return max(name for name in self.files if name.endswith(".db"))

    def write(self, folder: Path, change: dict[str, bytes | None] | None = None) -> Path:
        """Puts the files into a folder, emptied before; `change` has those that are otherwise, None for gone."""
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        files: dict[str, bytes | None] = {**self.files, **(change or {})}
        for name, content in files.items():
            if content is not None:
                (folder / name).write_bytes(content)
        return folder


class Teller:
    """Lives a small journal, in three segments, and writes down its story."""

    def __init__(self, folder: Path, *, synced: bool) -> None:
        self.folder = folder
        self.synced = synced
        self.story = Story()
        self.jobs: dict[int, Job] = {}
        self.next_id = 1
        self.segment = 0
        self.store = self.open()

    def open(self) -> Store:
        store = Store(Journal(str(self.folder), segment_bytes=1 << 20, compact=False), None, ClockOffset(0, 0))
        for job, _ in store.replay():
            self.jobs[job.id] = job
        store.start(lambda id: (self.jobs[id], tube_of(id)))
        self.segment += 1
        return store

    def commit(self) -> None:
        self.store.commit(0)
        if self.synced:
            point = self.store.sync_point()
            assert point is not None
            point.run()
        self.story.wal_ends.append((self.folder / f"segment-{self.segment:08d}.db-wal").stat().st_size)
        self.story.commits.append({id: (held_body(job), tube_of(id), job.state) for id, job in self.jobs.items()})

    def put(self, count: int) -> None:
        for id in range(self.next_id, self.next_id + count):
            job = self.jobs[id] = Job(id, 0, id % 7, 0, 60)
            job.body = body_of(id)
            self.change(id, READY, whole=True)
        self.next_id += count

    def change(self, id: int, state: int, *, whole: bool = False) -> None:
        job = self.jobs[id]
        job.state = state
        job.rank = {READY: 0, BURIED: id, DELAYED: 10**9 * SECOND}[state]
        self.story.states.setdefault(id, set()).add(state)
        if whole:
            self.store.put(job, tube_of(id))
        else:
            self.store.change(job)

    def delete(self, id: int) -> None:
        self.store.delete(self.jobs.pop(id))

    def turn(self, draw: random.Random) -> None:
        """One commit of mixed changes."""
        self.put(draw.randint(2, 4))
        for id in draw.sample(sorted(self.jobs), 2):
            self.change(id, draw.choice([READY, BURIED, DELAYED]))
        if len(self.jobs) > 6:
            self.delete(draw.choice(sorted(self.jobs)))
        self.commit()


def tell(folder: Path, draw: random.Random, *, crashed: bool, synced: bool = True) -> Story:
    """Three segments: two sealed by clean ends, the newest as a clean end or, `crashed`, a kill leaves it."""
    teller = Teller(folder, synced=synced)
    for _ in range(2):
        for _ in range(3):
            teller.turn(draw)
        teller.store.close()
        teller.story.commits.clear()
        teller.story.wal_ends.clear()
        teller.store = teller.open()
    teller.story.commits.append({id: (held_body(job), tube_of(id), job.state) for id, job in teller.jobs.items()})
    teller.story.wal_ends.append(0)
    for _ in range(6):
        teller.turn(draw)
    if crashed:
        until(lambda: not wants_compaction(teller.store) and not teller.store.settling, "the worker has nothing to do")
    else:
        teller.store.close()
    copy = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("lock", "reserve")}
    if crashed:
        teller.store.abandon()
        copy = {name: content for name, content in copy.items() if not name.startswith(PREPARED)}
    teller.story.files = copy
    assert teller.story.newest == "segment-00000003.db", sorted(copy)
    return teller.story


@pytest.fixture(scope="module")
def draw(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(draw_seed(request.config))


@pytest.fixture(scope="module", params=["ended", "killed"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, draw: random.Random) -> Story:
    return tell(tmp_path_factory.mktemp("story") / "journal", draw, crashed=request.param == "killed")


@pytest.fixture(scope="module")
def unsynced(tmp_path_factory: pytest.TempPathFactory, draw: random.Random) -> Story:
    """A killed one of which the newest segment was never synced."""
    return tell(tmp_path_factory.mktemp("unsynced") / "journal", draw, crashed=True, synced=False)


class Outcome(NamedTuple):
    """The outcome of a start with a directory: its jobs, or why it refused, and its log."""

    jobs: Known
    refused: str
    said: list[str]


def start(folder: Path, *, accept: bool = False) -> Outcome:
    """Goes through a start, as the server does, and ends cleanly; fails on an error that no operator should see."""
    said: list[str] = []
    jobs: dict[int, tuple[Job, bytes]] = {}
    journal = Journal(str(folder), segment_bytes=1 << 20, compact=False, accept_damage=accept, log=said.append)
    store = Store(journal, None, ClockOffset(0, 0))
    try:
        for job, tube in store.replay():
            jobs[job.id] = job, tube
        store.start(jobs.get)
        store.close()
    except JournalError as error:
        journal.abandon()
        assert "\n" not in str(error), error
        assert isinstance(error, JournalDamaged | JournalNewer), repr(error)  # a version with a bit more is newer
        return Outcome({}, str(error), said)
    for line in said:
        assert "\n" not in line, line
    return Outcome({id: (held_body(job), tube, job.state) for id, (job, tube) in jobs.items()}, "", said)


class _Reading(Journal):
    """A journal that is only read: without a lock, and without the merging of a WAL that a start begins."""

    def __init__(self, folder: Path) -> None:
        self.replay_of = Replay(str(folder))

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        yield from self.replay_of.batches()
        if self.replay_of.findings:
            raise JournalDamaged("; ".join(self.replay_of.findings))


def replay(folder: Path, story: Story) -> Outcome:
    """Returns what a start would find, but the directory stays as it is. Whatever comes back was put once."""
    reading = _Reading(folder)
    try:
        store = Store(reading, None, ClockOffset(0, 0))
        jobs = {job.id: (held_body(job), tube, job.state) for job, tube in store.replay()}
    except (JournalDamaged, JournalNewer) as error:
        assert "\n" not in str(error), error
        return Outcome({}, str(error), reading.replay_of.findings)
    never_garbled(jobs, story)
    return Outcome(jobs, "", [])


def never_garbled(jobs: Known, story: Story) -> None:
    for id, (body, tube, state) in jobs.items():
        assert body == body_of(id), f"job {id} has another body"
        assert tube == tube_of(id), f"job {id} is in another tube"
        assert state in story.states.get(id, ()), f"job {id} was never {STATE_NAMES[state]}"


# Of the tool


def test_the_story_is_what_a_replay_finds(tmp_path: Path, story: Story, unsynced: Story) -> None:
    for each in (story, unsynced):
        outcome = replay(each.write(tmp_path / "journal"), each)
        assert not outcome.refused, outcome
        assert outcome.jobs == each.last
        assert len(each.last) > 6


# Every byte


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flips", [FLIPS, pytest.param(LONG_FLIPS, marks=pytest.mark.long)])
def test_random_flips_of_single_bits(tmp_path: Path, story: Story, draw: random.Random, flips: int) -> None:
    """Refused, or accepted and then nothing is missing: each bit is checked by something or means nothing."""
    folder = story.write(tmp_path / "journal")
    names = [name for name in story.files if story.files[name]]
    weights = [len(story.files[name]) for name in names]
    outcomes: Counter[str] = Counter()
    cycles = 0
    for _ in range(flips):
        [name] = draw.choices(names, weights)
        place = draw.randrange(len(story.files[name]))
        flipped = story.files[name][place] ^ 1 << draw.randrange(8)
        where = f"{name}, byte {place}"
        overwrite(folder / name, place, bytes([flipped]))
        try:
            outcome = replay(folder, story)
        except BaseException as error:
            raise AssertionError(f"{where}: {error!r}") from error
        outcomes["refused" if outcome.refused else "accepted"] += 1
        if not outcome.refused:
            assert outcome.jobs == story.last, where
        elif "newer geventstalk" not in outcome.refused and cycles < flips // CYCLE_EVERY and draw.random() < 0.1:
            cycles += 1
            accepted_and_started_again(folder, story)
            story.write(folder)
        overwrite(folder / name, place, story.files[name][place : place + 1])
        for index in names:
            if index.endswith("-shm"):  # a reading may have written it anew
                overwrite(folder / index, 0, story.files[index])
    print(outcomes)
    assert outcomes["refused"] > flips // 50, outcomes


def test_each_bit_of_the_format_version(tmp_path: Path, story: Story) -> None:
    """A version that may exist one day is never set aside. One that cannot exist is damage, which may be accepted.

    Bug: with bit 22 flipped, the segment was "of a newer geventstalk" for ever, and no option started the server.
    """
    folder = story.write(tmp_path / "journal")
    name = min(name for name in story.files if name.startswith("segment"))
    for bit in range(32):
        byte = 63 - bit // 8  # the user version: four bytes, the lowest last (SQLite's file format, section 1.3)
        overwrite(folder / name, byte, bytes([story.files[name][byte] ^ 1 << bit % 8]))
        refused = replay(folder, story).refused
        number = FORMAT_VERSION ^ 1 << bit
        if FORMAT_VERSION < number <= FORMAT_LIMIT:
            assert "was written by a newer geventstalk" in refused
            changed = (folder / name).read_bytes()
            assert start(folder, accept=True).refused == refused
            assert (folder / name).read_bytes() == changed
        elif number > FORMAT_LIMIT:
            assert "which no geventstalk writes" in refused
        overwrite(folder / name, byte, story.files[name][byte : byte + 1])
    overwrite(folder / name, 61, bytes([1 << 6]))
    accepted_and_started_again(folder, story)


def overwrite(path: Path, place: int, content: bytes) -> None:
    """Writes in place: a file that is cut and written anew has some file systems wait for the device."""
    with path.open("r+b", buffering=0) as file:
        file.seek(place)
        file.write(content)


def accepted_and_started_again(folder: Path, story: Story) -> None:
    """With accept_damage it starts, a plain start follows, and every damaged file is still there."""
    before = {path.name: path.read_bytes() for path in folder.glob("segment-*.db")}
    accepted = start(folder, accept=True)
    assert not accepted.refused, accepted
    never_garbled(accepted.jobs, story)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, content in before.items():
        assert kept.get(name + ASIDE_SUFFIX) == content or name in kept, f"{name} is deleted"
    for _ in range(2):
        plain = start(folder)
        assert not plain.refused, plain
        assert plain.jobs == accepted.jobs


@pytest.mark.slow
def test_every_length_of_the_newest_file(tmp_path: Path, story: Story, draw: random.Random) -> None:
    """A file that was sealed or synced and has become shorter has lost something: refused, whatever the length."""
    suffix = "-wal" if story.newest + "-wal" in story.files else ""
    name = story.newest + suffix
    content = story.files[name]
    folder = story.write(tmp_path / "journal")
    for size in lengths(len(content), draw):
        os.truncate(folder / name, size)
        for other in folder.glob("*-shm"):
            other.unlink()
        outcome = replay(folder, story)
        assert outcome.refused, f"{name} cut to {size} of {len(content)} bytes is accepted"
        assert any(story.newest in line for line in outcome.said), (size, outcome)
    story.write(folder, {name: content[: len(content) // 2]})
    accepted_and_started_again(folder, story)


@pytest.mark.slow
def test_every_length_of_a_wal_that_was_not_synced(tmp_path: Path, unsynced: Story, draw: random.Random) -> None:
    """A torn tail: whole commits up to the cut, nothing of the one that was cut, and no refusal."""
    name = unsynced.newest + "-wal"
    content = unsynced.files[name]
    folder = unsynced.write(tmp_path / "journal")
    found = set()
    for size in lengths(len(content), draw):
        os.truncate(folder / name, size)
        for other in folder.glob("*-shm"):
            other.unlink()
        outcome = replay(folder, unsynced)
        assert not outcome.refused, (size, outcome)
        whole = max(count for count, end in enumerate(unsynced.wal_ends) if size >= end)
        assert outcome.jobs == unsynced.commits[whole], f"{size} of {len(content)} bytes, {whole} whole commits"
        found.add(whole)
    assert len(found) > 3, found


def lengths(whole: int, draw: random.Random) -> list[int]:
    """Every length near both ends, and a sample of those between: all of them take minutes. Longest first."""
    some = draw.sample(range(40, whole - 40), 300)
    return sorted({*range(40), *some, *range(whole - 40, whole)}, reverse=True)


def test_a_torn_tail_is_said_and_then_gone(tmp_path: Path, unsynced: Story) -> None:
    name = unsynced.newest + "-wal"
    cut = unsynced.wal_ends[3] + 777
    assert unsynced.wal_ends[3] < cut < unsynced.wal_ends[4], "nothing would be torn"
    folder = unsynced.write(tmp_path / "journal", {name: unsynced.files[name][:cut], unsynced.newest + "-shm": None})
    outcome = start(folder)
    assert not outcome.refused and outcome.jobs == unsynced.commits[3]
    assert [line for line in outcome.said if "torn" in line and unsynced.newest in line and "777" in line], outcome
    again = start(folder)
    assert again.said == [] and again.jobs == outcome.jobs


# Each kind of damage, through the real server


class Damage(NamedTuple):
    """A damage of a directory, and its refusal: the file that it names, and the words."""

    do: Callable[[Path], None]
    file: str
    says: str
    aside: tuple[str, ...]


ONE, TWO, THREE = (f"segment-{number:08d}.db" for number in (1, 2, 3))


def sql(path: Path, statement: str) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    assert db.execute(statement).rowcount != 0, "there is nothing to damage"
    db.close()


def in_the_middle(folder: Path) -> None:
    """The body of a job that is live, by a bit."""
    db = sqlite3.connect(folder / TWO)
    [key] = db.execute("SELECT key FROM record WHERE kind = 1 AND length(payload) > 100 LIMIT 1").fetchone()
    db.close()
    content = (folder / TWO).read_bytes()
    needle = body_of(key)[:64]
    assert content.count(needle) >= 1
    (folder / TWO).write_bytes(content.replace(needle, bytes([needle[0] ^ 1]) + needle[1:]))


def a_page(folder: Path) -> None:
    content = bytearray((folder / TWO).read_bytes())
    assert len(content) > 8192 and any(content[6144:8192])
    content[6144:8192] = bytes(2048)
    (folder / TWO).write_bytes(content)


def other_version(folder: Path) -> None:
    sql(folder / TWO, "PRAGMA user_version = 0")


def foreign(folder: Path) -> None:
    """Another program's database under a segment's name."""
    (folder / TWO).unlink()
    sql(folder / TWO, "CREATE TABLE cats(name)")


def text(folder: Path) -> None:
    (folder / TWO).write_bytes(b"this is no database\n" * 200)


def missing(folder: Path) -> None:
    (folder / TWO).unlink()


def missing_oldest(folder: Path) -> None:
    (folder / ONE).unlink()


def missing_newest(folder: Path) -> None:
    (folder / THREE).unlink()


def another_one(folder: Path) -> None:
    """A copy of a segment under the name of another."""
    assert (folder / ONE).read_bytes() != (folder / TWO).read_bytes()
    shutil.copy(folder / ONE, folder / TWO)


def shortened(folder: Path) -> None:
    os.truncate(folder / TWO, (folder / TWO).stat().st_size // 2)


def emptied(folder: Path) -> None:
    os.truncate(folder / TWO, 0)


def records_gone(folder: Path) -> None:
    sql(folder / TWO, "DELETE FROM record WHERE seq BETWEEN 3 AND 5")


DAMAGES = {
    "in-the-middle": Damage(in_the_middle, TWO, r"1 damaged records?", (TWO,)),
    "a-page-of-zeros": Damage(a_page, TWO, "damaged", (TWO,)),
    "unknown-version": Damage(other_version, TWO, "format version 0", (TWO,)),
    "foreign-database": Damage(foreign, TWO, "not a journal segment", (TWO,)),
    "foreign-text": Damage(text, TWO, "cannot be read as a journal segment", (TWO,)),
    "missing": Damage(missing, TWO, "is missing", ()),
    "missing-oldest": Damage(missing_oldest, ONE, "is missing", ()),
    "missing-newest": Damage(missing_newest, THREE, "is missing", ()),
    "another-segment": Damage(another_one, TWO, "says that it is segment 1", (TWO,)),
    "shortened": Damage(shortened, TWO, "", (TWO,)),
    "emptied": Damage(emptied, TWO, "not a journal segment", (TWO,)),
    "records-gone": Damage(records_gone, TWO, "damaged records", (TWO,)),
}


@pytest.fixture
def launch(start_server: Callable[..., ServerProcess], tmp_path: Path) -> Iterator[Launch]:
    yield from launcher(start_server, tmp_path, unix=False)


def refused(folder: Path) -> list[str]:
    """Returns what a server says that must not start on this directory."""
    done = subprocess.run(
        [*GEVENTSTALK, "-l", "127.0.0.1", "-p", str(free_port()), "-b", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()


def contents(folder: Path) -> dict[str, bytes]:
    """All files but those that a start may make."""
    made = ("lock", "reserve")
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name not in made and "-shm" not in path.name
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", for_change(DAMAGES, 0, 4, 8))
def test_damage_is_refused_and_accepted_when_asked(
    launch: Launch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, draw: random.Random, kind: str
) -> None:
    damage = DAMAGES[kind]
    folder = tmp_path / "journal"
    story = tell(folder, draw, crashed=False)
    before = contents(folder)
    damage.do(folder)
    damaged = contents(folder)
    assert damaged != before, "nothing was damaged"
    for _ in range(2):
        said = refused(folder)
        findings = [line for line in said if damage.file in line]
        assert findings, said
        assert any(damage.says.replace("s?", "s") in line for line in findings), said
        assert "damaged" in said[-1] and "jobs" in said[-1] and "--accept-damage" in said[-1], said
        assert len(said) <= 4, said
        assert contents(folder) == damaged, "a refused start changed something"
    server = launch("-b", str(folder), "--accept-damage", "-n")
    with Client(server.connect()) as client:
        served = serve(client, story)
        assert 0 < len(served) <= len(story.last) + 30
    assert server.stop() == 0
    kept = contents(folder)
    for name in damage.aside:
        assert kept[name + ASIDE_SUFFIX] == damaged[name]
    for name in damaged:
        assert name in kept or name + ASIDE_SUFFIX in kept or name == "synced" or "-wal" in name, f"{name} is deleted"
    log = tmp_path / "log"
    for end in (ServerProcess.kill, ServerProcess.stop):
        log.write_text("")
        server = launch("-b", str(folder), "-n")
        with Client(server.connect()) as client:
            assert serve(client, story) == served
        end(server)
        assert "damage" not in log.read_text() and "missing" not in log.read_text(), log.read_text()


def serve(client: Client, story: Story) -> set[int]:
    """The ids of all jobs that the server has; each is as it was put."""
    ids = sorted(story.states)
    found = set()
    for id, reply in zip(ids, burst(client, [b"peek %d\r\n" % id for id in ids]), strict=True):
        if reply != b"NOT_FOUND\r\n":
            assert reply == b"FOUND %d %d\r\n%b" % (id, len(body_of(id)) - 2, body_of(id))
            found.add(id)
    kinds = ("ready", "delayed", "buried", "reserved")
    assert sum(number(client, f"current-jobs-{kind}") for kind in kinds) == len(found)
    for name in {tube_of(id) for id in found}:
        client.ask(b"watch " + name)
    ready = number(client, "current-jobs-ready")
    assert set(reserve_many(client, ready)) <= found
    return found


@pytest.mark.slow
def test_flips_and_cuts_through_the_real_server(
    launch: Launch, tmp_path: Path, story: Story, draw: random.Random
) -> None:
    """A few, end to end: it serves what was put or says in a line why not."""
    folder = tmp_path / "journal"
    names = [name for name in story.files if name.endswith((".db", "-wal"))]
    for count in range(4):
        name = draw.choice(names)
        content = bytearray(story.files[name])
        if count % 2:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        else:
            del content[draw.randrange(len(content)) :]
        story.write(folder, {name: bytes(content), story.newest + "-shm": None})
        log = tmp_path / "log"
        log.write_text("")
        try:
            server = launch("-b", str(folder))
        except RuntimeError as error:
            assert str(error).endswith("exit code 1"), error
            server = launch("-b", str(folder), "--accept-damage")
        with Client(server.connect()) as client:
            serve(client, story)
        assert server.stop() == 0
        assert "Traceback" not in log.read_text()
