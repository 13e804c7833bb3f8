"""Ways to make a journal fail, and a random life of a journal to fail in.

The fault model. Process loss: SIGKILL at the entry of any system call; those before it have happened, those after it
have not. Power loss: what a completed fsync covers is there; of the rest each write, or any part of it in sectors of
512 bytes, and each creation, renaming and removal of a file may have happened or not, in any order, save that one
file's changes of size keep theirs. Failing disk: a write or an fsync returns an error once; fsync then forgets it, as
Linux does. Damage: bits flip, files end early, vanish, or come from elsewhere. Nothing stronger: no fsync that lies,
no write into another file. Run as a program (`drive`), this is the process that is killed, traced and given errors.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from geventstalk.core.job import Job
from geventstalk.durable.store import Store
from journal import CHANGE, DELETE, DESCRIPTORS_MAX, FULL, Journal, JournalError, Record
from journal.log import Scan
from journal.sqlite.replay import Replay

ROOT = Path(__file__).resolve().parents[2]
DRIVER_TIMEOUT_S = 100.0
PATIENCE_S = 60.0  # for what takes milliseconds, and on a slow device a hundred fsyncs
FAILED = 74
_LIFE_VERSIONS = 1_000_000

# What a key means to these tests: the version that was written last, and the size of what was put


Model = dict[int, tuple[int, int]]
"""Key to (version, size of its body)."""


class Compacting(Protocol):
    """A log, or a store over one."""

    def tend(self) -> None: ...

    def wants_compaction(self) -> bool: ...

    def scan(self) -> Scan | None: ...

    def scanned(self, scan: Scan) -> None: ...


def wants_compaction(log: Compacting) -> bool:
    """Returns whether there is something to compact, now that the log has heard from its worker."""
    log.tend()
    if not log.wants_compaction():
        return False
    if scan := log.scan():
        scan.run()
        log.scanned(scan)
    if isinstance(log, Store):
        fetch(log, log.to_move())
    return True


def fetch(store: Store, jobs: Iterable[Job]) -> None:
    """Has the bodies of these jobs in memory."""
    if missing := [job for job in jobs if job.body is None]:
        assert store.bodies is not None
        reading = store.reading(missing)
        reading.run()
        for job in missing:
            body = reading.body_of(job)
            assert body is not None
            store.bodies.take(job, body)


class KeepsPace(Compacting, Protocol):
    """A store."""

    @property
    def behind(self) -> bool: ...

    def catch_up(self, now_ns: int) -> bool: ...


def backpressure(store: KeepsPace, between: Callable[[], None] = lambda: None) -> None:
    """Waits as long as changes have to, as the turn does. `between` is called all the time meanwhile."""
    while store.behind:
        wants_compaction(store)
        if not store.catch_up(time.monotonic_ns()):
            time.sleep(0.001)
        between()


def filler(key: int, size: int) -> bytes:
    """Bytes that only this key has, so that another's are noticed."""
    return (b"%016x" % (key * 0x9E3779B97F4A7C15 % 2**64) * (size // 16 + 1))[:size]


def payload(key: int, version: int, size: int) -> bytes:
    """Returns what is written for a version of a key."""
    return version.to_bytes(8, "little") + filler(key, size)


def fold(records: Iterable[Record]) -> Model:
    """Returns what a replay means. Fails when a record is not as it was written, or changes what is not there."""
    model: Model = {}
    for key, kind, data, _ in records:
        if kind == DELETE:
            del model[key]
            continue
        assert data[8:] == filler(key, len(data) - 8), f"the record of key {key} is garbled"
        version = int.from_bytes(data[:8], "little")
        model[key] = (version, len(data) - 8 if kind == FULL else model[key][1])
    return model


class Read(NamedTuple):
    """The content of a directory."""

    model: Model
    findings: list[str]
    high_water: int


def read(directory: Path) -> Read:
    """Reads a directory that no process has open."""
    replay = Replay(str(directory))
    model = fold(replay.records())
    return Read(model, replay.findings, replay.high_water)


def read_sound(directory: Path) -> Read:
    """The same, where no damage may be found."""
    found = read(directory)
    assert not found.findings, found.findings
    return found


# A journal in this process


class Rig:
    """A journal and the dict that says what is in it; opened, it has proved that they agree."""

    def __init__(
        self, directory: Path, *, segment_bytes: int = 1 << 16, compact: bool = True, descriptors: int = DESCRIPTORS_MAX
    ) -> None:
        self.directory = directory
        self.model: Model = {}
        self.said: list[str] = []
        self.segment_bytes = segment_bytes
        self.compact = compact
        self.descriptors = descriptors
        self.version = 0
        self.journal = self.open()

    def open(self, *, accept_damage: bool = False) -> Any:
        """Opens, replays and starts the journal; fails when it does not hold what the dict holds."""
        self.journal = self.replayed(accept_damage=accept_damage)
        self.journal.start()
        self.journal.repair(self.payload_of)
        return self.journal

    def made(self, *, accept_damage: bool) -> Any:
        """A journal that has read nothing."""
        return Journal(
            str(self.directory),
            segment_bytes=self.segment_bytes,
            compact=self.compact,
            accept_damage=accept_damage,
            descriptors=self.descriptors,
            log=self.said.append,
        )

    def replayed(self, *, accept_damage: bool = False) -> Any:
        """Opens and replays only. With `accept_damage`, the dict takes over what is still there."""
        self.said.clear()
        journal = self.made(accept_damage=accept_damage)
        try:
            found = fold(journal.replay())
        except BaseException:
            journal.abandon()
            raise
        if accept_damage:
            self.model = found
        assert found == self.model
        return journal

    def put(self, key: int, size: int = 100) -> None:
        self.version += 1
        self.model[key] = (self.version, size)
        self.journal.append(key, FULL, payload(key, *self.model[key]))

    def change(self, key: int, size: int = 8) -> None:
        self.version += 1
        self.model[key] = (self.version, self.model[key][1])
        self.journal.append(key, CHANGE, payload(key, self.version, size))

    def delete(self, key: int) -> None:
        del self.model[key]
        self.journal.append(key, DELETE, b"")

    def payload_of(self, key: int) -> bytes | None:
        return payload(key, *self.model[key]) if key in self.model else None

    def sync(self) -> None:
        """Commits and waits for the device."""
        self.journal.commit()
        if (point := self.journal.sync_point()) is not None:
            point.run()

    def rotate(self, key: int) -> None:
        """Fills the current segment with changes of a live key until the next one takes over."""
        before = self.journal.current
        deadline = time.monotonic() + PATIENCE_S
        while self.journal.current == before:
            self.change(key, 2000)
            self.journal.commit()
            wants_compaction(self.journal)  # hears from the worker
            assert time.monotonic() < deadline, "no segment follows"
        self.settle()

    def settle(self) -> None:
        """Waits until the worker has nothing to do; compacts nothing."""
        deadline = time.monotonic() + PATIENCE_S
        while wants_compaction(self.journal) or self.journal.settling:
            if not self.journal.settling:
                return
            assert time.monotonic() < deadline, "the worker does not come to an end"
            time.sleep(0.0005)

    def catch_up(self) -> None:
        """Waits as long as changes have to."""
        while self.journal.behind:
            wants_compaction(self.journal)
            if not self.journal.catch_up(self.payload_of):
                time.sleep(0.001)

    def compact_all(self) -> None:
        """Compacts until there is nothing to compact any more."""
        deadline = time.monotonic() + PATIENCE_S
        while wants_compaction(self.journal) or self.journal.settling:
            if wants_compaction(self.journal):
                self.journal.compact_slice(self.payload_of)
            else:
                time.sleep(0.0005)
            assert time.monotonic() < deadline, "compaction does not come to an end"

    def crash(self, into: Path) -> Rig:
        """Leaves the directory as kill -9 would leave it now, with the worker idle, and goes on in a copy of that."""
        self.settle()
        shutil.copytree(self.directory, into)
        self.journal.abandon()
        self.directory = into
        return self

    def close(self) -> None:
        self.journal.close()

    def segments(self) -> list[str]:
        """The names of the segments on disk, oldest first."""
        return sorted(path.name for path in self.directory.glob("segment-????????.db"))


# A random life, in a process of its own


class Plan:
    """The actions of a life, drawn from a seed: the same in the process that acts and in the one that checks."""

    def __init__(self, seed: int, model: Model, next_key: int, version: int) -> None:
        self.model = dict(model)
        self._random = random.Random(seed)
        self._next_key = next_key
        self._version = version
        self._delete_share = self._random.choice([0.25, 0.35, 0.5])
        self._batch_max = self._random.choice([3, 12, 40])
        self._sizes = self._random.choice([[0, 10, 60], [10, 200, 900], [100, 100, 8000]])

    def batch(self) -> list[tuple[int, int, bytes]]:
        """The next records that are committed together; `model` is what holds after them."""
        draw = self._random
        records = []
        for _ in range(draw.randint(1, self._batch_max)):
            self._version += 1
            kind = draw.random()
            if kind < 0.35 or not self.model:
                key, size = self._next_key, draw.choice(self._sizes)
                self._next_key += 1
                self.model[key] = (self._version, size)
                records.append((key, FULL, payload(key, self._version, size)))
                continue
            key = draw.choice(list(self.model))
            if kind < 0.35 + self._delete_share:
                del self.model[key]
                records.append((key, DELETE, b""))
            else:
                self.model[key] = (self._version, self.model[key][1])
                records.append((key, CHANGE, payload(key, self._version, 12)))
        return records


@dataclass(frozen=True)
class Life:
    """The orders of a driver process."""

    directory: str
    seed: int
    number: int = 1
    batches: int = 200
    segment_bytes: int = 1 << 15
    sync_share: float = 1.0  # how many of the batches are synced, each before it is promised
    close: bool = True


@dataclass
class Told:
    """The output of a driver until its end. `durable` counts the batches that are promised to survive loss of power."""

    high_water: int = -1
    committed: int = 0
    durable: int = 0
    failure: str = ""
    ended: bool = False
    code: int = 0
    stderr: str = ""

    @property
    def started(self) -> bool:
        return self.high_water >= 0


def drive(life: Life) -> int:
    """The driver process: lives, and says on stdout what it has promised."""

    def say(text: str) -> None:
        os.write(1, text.encode() + b"\n")

    journal = Journal(life.directory, segment_bytes=life.segment_bytes)
    try:
        model = fold(journal.replay())
        journal.start()
        say(f"S {journal.high_water}")
        plan = Plan(life.seed, model, journal.high_water + 1, life.number * _LIFE_VERSIONS)
        draw = random.Random(life.seed + 1)

        def compact(slices: int) -> None:
            while slices and (wants_compaction(journal) or journal.settling):
                if wants_compaction(journal):
                    journal.compact_slice(lambda key: payload(key, *plan.model[key]) if key in plan.model else None)
                else:
                    time.sleep(0.0005)  # the worker is at it
                slices -= 1

        for number in range(1, life.batches + 1):
            for key, kind, data in plan.batch():
                journal.append(key, kind, data)
            if draw.random() < 0.2:
                compact(1)
            journal.commit()
            say(f"C {number}")
            if draw.random() < life.sync_share:
                if (point := journal.sync_point()) is not None:
                    point.run()
                say(f"D {number}")
            if draw.random() < 0.5:
                compact(20)
        if life.close:
            journal.close()
            say("E")
    except JournalError as error:
        say(f"F {type(error).__name__}: {error}")
        journal.abandon()
        return FAILED
    return 0


def run_driver(life: Life, wrapper: Sequence[str] = ()) -> Told:
    """Runs a driver to its end, inside a wrapper such as strace."""
    done = subprocess.run(
        [*wrapper, sys.executable, "-m", "tests.support.faults", json.dumps(asdict(life))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        timeout=DRIVER_TIMEOUT_S,
        check=False,
    )
    told = Told(code=done.returncode, stderr=done.stderr.decode(errors="replace"))
    for line in done.stdout.decode().split("\n")[:-1]:
        word, _, rest = line.partition(" ")
        if word == "S":
            told.high_water = int(rest)
        elif word == "C":
            told.committed = int(rest)
        elif word == "D":
            told.durable = int(rest)
        elif word == "F":
            told.failure = rest
        else:
            told.ended = True
    return told


def check_life(before: Model, life: Life, told: Told, found: Read) -> None:
    """After the loss of the process: all that was committed is there, and of what came next all or nothing."""
    if not told.started:
        assert found.model == before
        return
    plan = Plan(life.seed, before, told.high_water + 1, life.number * _LIFE_VERSIONS)
    highest = told.high_water
    for _ in range(told.committed):
        highest = max([highest, *(key for key, _, _ in plan.batch())])
    if found.model != plan.model:
        committed = dict(plan.model)
        plan.batch()
        assert told.committed < life.batches, difference(found.model, committed)
        assert found.model == plan.model, difference(found.model, committed)
    assert found.high_water >= highest, "the largest key is forgotten"


def check_power_loss(before: Model, life: Life, told: Told, found: Read) -> None:
    """After the loss of power: what was promised, or what was written since, key by key."""
    assert not found.findings, found.findings
    if not told.started:
        assert found.model == before
        return
    plan = Plan(life.seed, before, told.high_water + 1, life.number * _LIFE_VERSIONS)
    highest = told.high_water
    for _ in range(told.durable):
        highest = max([highest, *(key for key, _, _ in plan.batch())])
    may: dict[int, set[tuple[int, int] | None]] = {key: {value} for key, value in plan.model.items()}
    for _ in range(told.durable, min(told.committed + 1, life.batches)):
        for key, kind, data in plan.batch():
            values = may.setdefault(key, {None})
            if kind == DELETE:
                values.add(None)
            else:
                version = int.from_bytes(data[:8], "little")
                size = len(data) - 8 if kind == FULL else next(value[1] for value in values if value is not None)
                values.add((version, size))
    for key in found.model.keys() | may.keys():
        have, legal = found.model.get(key), may.get(key, {None})
        assert have in legal, f"key {key} came back as {have}, may be {legal}"
    assert found.high_water >= highest, "the largest key is forgotten"


def difference(have: Model, want: Model) -> str:
    """Returns what is wrong with a model, in few words."""
    lost = sorted(want.keys() - have.keys())
    extra = sorted(have.keys() - want.keys())
    other = sorted(key for key in have.keys() & want.keys() if have[key] != want[key])
    return f"lost {lost[:5]} ({len(lost)}), extra {extra[:5]} ({len(extra)}), other {other[:5]} ({len(other)})"


# System calls that fail or kill, by strace


def strace_problem() -> str:
    """Why strace cannot be used here; empty when it can."""
    path = shutil.which("strace")
    if path is None:
        return "strace is not installed"
    probe = subprocess.run([path, "-qq", "-o", "/dev/null", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else f"strace does not work here: {probe.stderr.decode().strip()}"


def inject(call: str, what: str, number: int, *, trace: Path | None = None, only: Sequence[Path] = ()) -> list[str]:
    """Words before a command that give its n-th call of a kind (in one thread) a fate: `signal=KILL`, `error=EIO`.

    The command stays the process that was started: strace sits beside it (-D). `only` limits it to those paths.
    """
    where = [word for path in only for word in ("-P", str(path))]
    out = str(trace) if trace else "/dev/null"
    return ["strace", "-D", "-f", "-qq", "-o", out, *where, "-e", f"trace={call}",
            "-e", f"inject={call}:{what}:when={number}"]  # fmt: skip


# Loss of power: what system calls did, and what is left of that without those that no fsync covers


_TRACED = "openat,close,pwrite64,write,fdatasync,fsync,ftruncate,fallocate,unlink,rename"
_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+|\?).*")
_BEGUN = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>")
_ENDED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)\) += (-?\d+|\?).*")
_SECTOR = 512


class Op(NamedTuple):
    """One change of one file: `data` at `at`, or, without data, a size of `at`. It happened between two lines."""

    begun: int
    ended: int
    at: int
    data: bytes | None


@dataclass
class Inode:
    """A file, whatever it is called."""

    base: bytes = b""
    ops: list[Op] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)


class Entry(NamedTuple):
    """One change of the directory: `name` now means this file, or none; `away` is the name that it had before."""

    begun: int
    ended: int
    name: str
    inode: Inode | None
    away: str = ""


class Recording:
    """All that one process did to a directory, and what it said meanwhile."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._start = {path.name: Inode(path.read_bytes()) for path in directory.iterdir()}
        self._entries: list[Entry] = []
        self._syncs: list[tuple[int, int]] = []
        self._said: list[tuple[int, str]] = []
        self.length = 0
        self.moments: list[int] = []  # lines where a file came, went or changed its size, or a directory was synced

    def record(self, life: Life, trace: Path) -> Told:
        """Runs a driver, and takes down what it does."""
        told = run_driver(life, ["strace", "-f", "-qq", "-xx", "-s", "10000000", "-e", f"trace={_TRACED}",
                                 "-o", str(trace)])  # fmt: skip
        self._parse(trace)
        return told

    def points(self, draw: random.Random, count: int) -> Iterator[int]:
        """Lines to lose the power at, half of them near a moment of the directory."""
        for _ in range(count):
            if self.moments and draw.random() < 0.5:
                yield draw.choice(self.moments) + draw.randint(0, 6)
            else:
                yield draw.randrange(self.length)

    def told(self, point: int) -> Told:
        """Returns what had been said when line `point` was reached."""
        told = Told()
        for line, text in self._said:
            if line <= point:
                word, _, rest = text.partition(" ")
                if word == "S":
                    told.high_water = int(rest)
                elif word == "C":
                    told.committed = int(rest)
                elif word == "D":
                    told.durable = int(rest)
                elif word == "E":
                    told.ended = True
        return told

    def rebuild(self, point: int, draw: random.Random, into: Path) -> None:
        """Writes what a loss of power at line `point` may leave."""
        names: dict[str, Inode] = dict(self._start)
        covered = max((begun for begun, ended in self._syncs if ended <= point), default=-1)
        loose = [entry for entry in self._entries if entry.begun <= point and entry.ended >= covered]
        # Most file systems keep the order of what happens to a directory, but none promises it.
        count = draw.choice([0, len(loose), draw.randint(0, len(loose))])
        kept = set(range(count)) if draw.random() < 0.5 else set(draw.sample(range(len(loose)), count))
        fate = {id(entry): number in kept for number, entry in enumerate(loose)}
        for entry in self._entries:
            if entry.begun > point or not fate.get(id(entry), True):
                continue
            names.pop(entry.away, None)
            if entry.inode is None:
                names.pop(entry.name, None)
            else:
                names[entry.name] = entry.inode
        share = draw.choice([0.0, 0.3, 0.7, 1.0])
        for name, inode in names.items():
            (into / name).write_bytes(_content(inode, point, draw, share))

    def _parse(self, trace: Path) -> None:
        begun: dict[str, tuple[int, str]] = {}
        files: dict[int, Inode | str] = {}
        names = dict(self._start)
        with trace.open() as lines:
            for number, line in enumerate(lines):
                self.length = number + 1
                if match := _BEGUN.match(line):
                    begun[match[1]] = number, match[3]
                    if match[2] == "close":  # its number may be given anew before it is said to have ended
                        files.pop(int(match[3]), None)
                    continue
                if match := _ENDED.match(line):
                    start, args = begun.pop(match[1])
                    args += match[3]
                elif match := _CALL.match(line):
                    start, args = number, match[3]
                else:
                    continue
                if match[4] != "?" and int(match[4]) >= 0:
                    self._call(match[2], args, int(match[4]), (start, number), files, names)

    def _call(
        self,
        name: str,
        args: str,
        result: int,
        when: tuple[int, int],
        files: dict[int, Inode | str],
        names: dict[str, Inode],
    ) -> None:
        words = args.split(", ")
        if name in ("unlink", "rename"):
            self._rename(name, words, when, names)
            self.moments.append(when[1])
            return
        if name == "openat":
            self._open(words, result, when, files, names)
            return
        number = int(words[0])
        if name == "write" and number == 1:
            self._said += [(when[0], text) for text in _bytes(words[1]).decode().split("\n")[:-1]]
        file = files.get(number)
        if name == "close":
            files.pop(number, None)
        elif isinstance(file, str):
            assert name in ("fsync", "fdatasync"), name
            self._syncs.append(when)
            self.moments.append(when[1])
        elif file is None:
            return
        elif name in ("fsync", "fdatasync"):
            file.syncs.append(when)
        elif name == "pwrite64":
            file.ops.append(Op(*when, int(words[3]), _bytes(words[1])[:result]))
        elif name == "ftruncate":
            file.ops.append(Op(*when, int(words[1]), None))
            self.moments.append(when[1])
        else:
            assert name == "fallocate" and words[1] == "0", f"{name} on a file of the journal is not known here"
            file.ops.append(Op(*when, int(words[2]) + int(words[3]), None))  # each time beyond the file's end

    def _open(
        self,
        words: list[str],
        result: int,
        when: tuple[int, int],
        files: dict[int, Inode | str],
        names: dict[str, Inode],
    ) -> None:
        path = _bytes(words[1]).decode()
        files.pop(result, None)
        if path == self._directory:
            files[result] = path
        elif os.path.dirname(path) == self._directory:
            name = os.path.basename(path)
            if name not in names:
                names[name] = Inode()
                self._entries.append(Entry(*when, name, names[name]))
            files[result] = names[name]
            if "O_TRUNC" in words[2]:
                names[name].ops.append(Op(*when, 0, None))

    def _rename(self, call: str, words: list[str], when: tuple[int, int], names: dict[str, Inode]) -> None:
        paths = [_bytes(word).decode() for word in words]
        if os.path.dirname(paths[0]) != self._directory:
            return
        name = os.path.basename(paths[0])
        inode = names.pop(name)
        if call == "unlink":
            self._entries.append(Entry(*when, name, None))
        else:
            new = os.path.basename(paths[1])
            names[new] = inode
            self._entries.append(Entry(*when, new, inode, name))


def _bytes(word: str) -> bytes:
    return bytes.fromhex(word.strip('"').replace("\\x", ""))


def _content(inode: Inode, point: int, draw: random.Random, share: float) -> bytes:
    """Returns what is left of a file. `share` says how much of what no fsync covers is kept, about."""
    covered = max((begun for begun, ended in inode.syncs if ended <= point), default=-1)
    content = bytearray(inode.base)
    loose = [op for op in inode.ops if op.begun <= point and op.ended >= covered]
    sizes_kept = draw.randint(0, sum(op.data is None for op in loose))
    for op in inode.ops:
        if op.begun > point:
            continue
        if op.ended < covered:
            _apply(content, op)
        elif op.data is None:
            if not sizes_kept:
                break  # what was written behind a change of size that is lost has no place to stand
            sizes_kept -= 1
            _apply(content, op)
        elif draw.random() < share:
            _apply(content, op)
        elif draw.random() < 0.3:
            _apply_torn(content, op, draw)
    return bytes(content)


def _apply(content: bytearray, op: Op) -> None:
    end = op.at + len(op.data or b"")
    if op.data is None:
        del content[end:]
    content.extend(bytes(max(0, end - len(content))))
    if op.data is not None:
        content[op.at : end] = op.data


def _apply_torn(content: bytearray, op: Op, draw: random.Random) -> None:
    """Some sectors of a write; where the file was shorter, its end may be there without what stands in it."""
    assert op.data is not None
    end = op.at + len(op.data)
    if draw.random() < 0.5:
        content.extend(bytes(max(0, end - len(content))))
    at = op.at
    while at < end:
        stop = min(end, (at // _SECTOR + 1) * _SECTOR)
        if draw.random() < 0.5:
            _apply(content, Op(0, 0, at, op.data[at - op.at : stop - op.at]))
        at = stop


# Damage


def flips(data: bytes, draw: random.Random, count: int) -> Iterator[tuple[int, bytes]]:
    """This many copies of the data with one bit flipped, and where that was."""
    for _ in range(count):
        at = draw.randrange(len(data))
        yield at, data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


if __name__ == "__main__":
    sys.exit(drive(Life(**json.loads(sys.argv[1]))))
