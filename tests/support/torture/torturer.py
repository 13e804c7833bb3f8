"""Power cuts on real files: lives of a journal are recorded, and images of what a loss may leave are looked at.

One torment is a directory with some lives, one after the other: each ends by itself, by kill -9, by a full disk or by a
failing call. After each, images are drawn at many moments; one of them may be what the next life begins with.
An image is looked at in this process: it is read without a finding, holds what was promised, can be started several
times without becoming another, and can be gone on with.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from journal import JournalError
from tests.support.disk import mount_problem, small_disk
from tests.support.faults import backpressure
from tests.support.process import ROOT
from tests.support.torture.disk import Disk
from tests.support.torture.life import FAILED, Facts, Keeper, Orders
from tests.support.torture.oracle import Oracle, Violation
from tests.support.torture.recorder import read_trace, recording

STARTS = 3
"""This often each image is started, and read once more behind that."""
BEYOND_S = 30.0
"""A life that does not end by itself this long after its bound is killed."""
SMALL_DISK_BYTES = 3 << 20
EIO, ENOSPC = 5, 28
POLICIES = ("f0", "fms", "F")
FAILING_SYNCS = "failing syncs"
"""A kind of disk for a planted fault: of the calls that fail, a sync is one of eight elsewhere."""
KINDS = ("plain", "plain", "plain", "failing", "full")


@dataclass
class Outcome:
    """The outcome of a torment."""

    seed: int
    cuts: int = 0
    lives: int = 0
    went_on: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failure: str = ""


def scratch() -> str | None:
    """Where files are quick to write: memory, where there is a file system of that kind."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Torment:
    """One directory and its lives. `keep` gets what is needed to see a violation again."""

    def __init__(
        self,
        seed: int,
        *,
        fault: str = "",
        policy: str = "",
        kind: str = "",
        orders: Mapping[str, Any] | None = None,
        kills: float = 0.4,
        keep: Path | None = None,
    ) -> None:
        """Draws all that is not given. `kills` is the number of lives that end by a kill."""
        self.seed = seed
        self.outcome = Outcome(seed)
        self._draw = draw = random.Random(seed)
        self._kind = kind or draw.choice(KINDS)
        if self._kind == "full" and mount_problem():
            self._kind = "failing"
        self._policy = policy or draw.choice(POLICIES)
        self._fault = fault
        self._keep = keep
        self._kills = kills
        drawn = Orders(
            "",
            0,
            self._policy,
            batches=draw.choice([20, 60, 120]),
            segment_bytes=draw.choice([1 << 15, 1 << 15, 1 << 17]),
            sizes=draw.choice([(0, 10, 60), (10, 200, 900), (100, 100, 8000), (300, 40_000)]),
            jobs=draw.choice([10, 60, 200]),
            batch_max=draw.choice([3, 12, 40]),
            budget=draw.choice([None, None, 3_000_000]),
            fault=fault,
            forgets=random.Random(f"what {seed} forgets").random() < 0.3,
        )
        self._orders = replace(drawn, **(orders or {}))

    def run(self, cuts: int = 100, lives: int = 4) -> Outcome:
        """Cuts the power this many times. A violation is in the outcome, with what was kept."""
        with tempfile.TemporaryDirectory(dir=scratch()) as name:
            self._folder = Path(name)
            try:
                with self._place() as directory:
                    self._run(directory, cuts, lives)
            except Violation as violation:
                self.outcome.failure = f"{self._kind}, {self._policy}: {violation}"
        return self.outcome

    @contextmanager
    def _place(self) -> Iterator[Path]:
        if self._kind != "full":
            directory = self._folder / "journal"
            directory.mkdir()
            yield directory
            return
        with small_disk(self._folder / "disk", SMALL_DISK_BYTES) as disk:
            directory = disk / "journal"
            directory.mkdir()
            yield directory

    def _run(self, directory: Path, cuts: int, lives: int) -> None:
        disk, oracle = Disk(), Oracle()
        base: dict[str, bytes] = {}
        traces: list[Path] = []
        for number in range(lives):
            trace = self._folder / f"trace-{self.outcome.lives}"
            again = self._live(directory, disk, oracle, trace)
            traces.append(trace)
            share = cuts // lives
            image = self._cut(disk, oracle, share, _Kept(base, traces))
            if number == lives - 1:
                return
            if again and self._draw.random() < 0.5:
                continue  # the process was lost, and nothing else: the kernel has what was not synced
            base, facts = image
            traces = []
            disk, oracle = Disk(base), Oracle(facts)
            for path in directory.iterdir():
                path.unlink()
            for name, data in base.items():
                (directory / name).write_bytes(data)

    # --- a life

    def _live(self, directory: Path, disk: Disk, oracle: Oracle, trace: Path) -> bool:
        """Runs and plays a life. Returns whether another may follow without a loss of power."""
        draw = self._draw
        orders = replace(
            self._orders,
            directory=str(directory.resolve()),
            seed=draw.randrange(2**32),
            first_batch=oracle.batch + 1,
            close=draw.random() < 0.6,
            filler=str(directory.parent / "filler") if self._kind == "full" else "",
        )
        options: dict[str, str] = {}
        if draw.random() < 0.3:
            options["SYNC_US"] = str(draw.choice([200, 2000]))
        killed = draw.random() < self._kills
        if killed:
            options["KILL"] = str(draw.choice([draw.randint(1, 120), draw.randint(1, 3000)]))
        lost = False
        if self._kind in ("failing", FAILING_SYNCS) and draw.random() < 0.8:
            options["FAIL"], lost = self._failing()
        self.outcome.lives += 1
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.support.torture.life", orders.text()],
                cwd=ROOT,
                env={**recording(directory, trace, options), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                timeout=orders.bound_s + BEYOND_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Violation(f"a life does not end, and does not say where it is: {orders.text()}") from error
        self._first = disk.end
        calls = list(read_trace(trace)) if trace.exists() else []
        later = disk.play(calls)
        oracle.play(calls, later)
        self.outcome.counts[f"ended with {done.returncode}"] += 1
        stderr = done.stderr.decode(errors="replace").strip()
        if done.returncode not in (0, FAILED, -9) or stderr:
            raise Violation(f"a life ended with {done.returncode}: {stderr}\nIts orders: {orders.text()}")
        if done.returncode == FAILED and self._kind == "plain" and not self._fault:
            raise Violation(f"a life gave up without a reason: {oracle.failure}")
        if filler := orders.filler:
            Path(filler).unlink(missing_ok=True)
        return not lost

    def _failing(self) -> tuple[str, bool]:
        """Some calls that fail, and whether an fsync is among them."""
        draw = self._draw
        calls, error = draw.choice(
            [("s", EIO)]
            if self._kind == FAILING_SYNCS
            else [
                ("s", EIO),
                ("w", EIO),
                ("wac", ENOSPC),
                ("wac", ENOSPC),
                ("t", EIO),
                ("r", EIO),
                ("u", EIO),
                ("c", EIO),
            ]
        )
        first = draw.choice([draw.randint(1, 40), draw.randint(1, 600)])
        return f"{calls}:{first}:{draw.choice([1, 1, 5, 200])}:{error}", calls == "s"

    # --- losses of power

    def _cut(self, disk: Disk, oracle: Oracle, count: int, kept: _Kept) -> tuple[dict[str, bytes], Facts]:
        """Looks at this many images. Returns the files and facts of one of them."""
        draw = self._draw
        chosen = draw.randrange(count)
        moments = [moment for moment in disk.moments if moment >= self._first]
        turns = [moment for moment in disk.turns if moment >= self._first]
        result: tuple[dict[str, bytes], Facts] = ({}, {})
        for number in range(count):
            near = draw.choice([moments, turns, []]) or [draw.randint(self._first, disk.end)]
            moment = draw.choice(near) + draw.choice([-2, 0, 1, 3, 6, 12, 25])
            image_seed = draw.randrange(2**32)
            self.outcome.cuts += 1
            into = self._folder / "image"
            into.mkdir()
            try:
                disk.image(moment, random.Random(image_seed), into)
                files = {path.name: path.read_bytes() for path in into.iterdir()} if number == chosen else {}
                facts = self._look(into, oracle, moment)
                if number == chosen:
                    result = files, facts
                start_again(into, facts, self._orders)
                if draw.random() < 0.25:
                    self.outcome.went_on += 1
                    go_on(into, facts, replace(self._orders, seed=image_seed, batches=6))
            except Violation as violation:
                what = f"cut {self.outcome.cuts} at {moment}: {violation}{self._save(kept, moment, image_seed)}"
                raise Violation(what) from None
            finally:
                shutil.rmtree(into)
        return result

    def _look(self, image: Path, oracle: Oracle, moment: int) -> Facts:
        facts, high_water = read(image, self._orders)
        oracle.check(facts, high_water, moment)
        return facts

    def _save(self, kept: _Kept, moment: int, image_seed: int) -> str:
        """Keeps what a violation can be seen again with; returns how."""
        if self._keep is None:
            return ""
        folder = self._keep / f"torment-{self.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "base").mkdir(parents=True)
        for name, data in kept.base.items():
            (folder / "base" / name).write_bytes(data)
        for number, trace in enumerate(kept.traces):
            shutil.copy(trace, folder / f"trace-{number}")
        case = {"moment": moment, "image": image_seed, "orders": self._orders.text(), "traces": len(kept.traces)}
        (folder / "case.json").write_text(json.dumps(case))
        return f"; see it again with: scripts/torture --again {folder}"


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises Violation when the block takes longer; stderr gets the stack of each thread. For the main thread alone."""

    def give_up(number: int, frame: object) -> None:
        faulthandler.dump_traceback()
        raise Violation(f"this takes longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, give_up)
    other = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *other)
        signal.signal(signal.SIGALRM, handler)


@dataclass(frozen=True)
class _Kept:
    """The state that lives began with, and the traces of those since."""

    base: dict[str, bytes]
    traces: list[Path]


def see_again(folder: Path) -> str:
    """The violation that was kept; empty when there is none any more. Its image is left in `image` of the folder."""
    case = json.loads((folder / "case.json").read_text())
    orders = Orders.of(case["orders"])
    base = {path.name: path.read_bytes() for path in (folder / "base").iterdir()}
    with tempfile.TemporaryDirectory(dir=scratch()) as name:
        into = Path(name)
        for file, data in base.items():
            (into / file).write_bytes(data)
        facts = read(into, orders)[0]
    disk, oracle = Disk(base), Oracle(facts)
    try:
        for number in range(case["traces"]):
            calls = list(read_trace(folder / f"trace-{number}"))
            oracle.play(calls, disk.play(calls))
        into = folder / "image"
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        disk.image(case["moment"], random.Random(case["image"]), into)
        facts, high_water = read(into, orders)
        oracle.check(facts, high_water, case["moment"])
        start_again(into, facts, orders)
        go_on(into, facts, replace(orders, seed=case["image"], batches=6))
    except Violation as violation:
        return str(violation)
    return ""


def read(directory: Path, orders: Orders) -> tuple[Facts, int]:
    """Returns what a start finds there, and the highest id. Raises Violation when it would refuse."""
    said: list[str] = []
    keeper = Keeper(str(directory), "F", orders.segment_bytes, said=said, forgets=orders.forgets)
    try:
        return keeper.replay(), keeper.high_water
    except (JournalError, AssertionError) as error:
        raise Violation(
            f"refused: {error} {said}".replace(f"{directory}/", "").replace(str(directory), "it")
        ) from error
    finally:
        keeper.store.abandon()


def start_again(directory: Path, facts: Facts, orders: Orders) -> None:
    """Reads and starts what was left, again and again: what one start excuses and changes is the next one's to judge.

    One of the starts ends cleanly, and the others as a kill ends them.
    """
    for number in range(STARTS):
        said: list[str] = []
        keeper = Keeper(str(directory), orders.policy, orders.segment_bytes, said=said, forgets=orders.forgets)
        try:
            found = keeper.replay()
            if found != facts:
                raise Violation(f"start {number + 1} finds something else: {_difference(found, facts)}")
            keeper.start()
            while keeper.store.settling:  # what was left over is sealed
                keeper.store.tend()
                time.sleep(0.0001)
            if number == 1:
                keeper.store.close()
        except (JournalError, AssertionError) as error:
            raise Violation(f"start {number + 1} fails: {error} {said}") from error
        finally:
            with suppress(JournalError):
                keeper.store.abandon()
    found, _ = read(directory, orders)
    if found != facts:
        raise Violation(f"after {STARTS} starts: {_difference(found, facts)}")


def go_on(directory: Path, facts: Facts, orders: Orders) -> None:
    """Works on what was left, ends, and starts again: nothing may be missing or too much."""
    draw = random.Random(orders.seed)
    said: list[str] = []
    keeper = Keeper(str(directory), orders.policy, orders.segment_bytes, said=said, forgets=orders.forgets)
    try:
        found = keeper.replay()
        if found != facts:
            raise Violation(f"a second look finds something else: {_difference(found, facts)}")
        keeper.start()
        for _ in range(orders.batches):
            keeper.batch(draw, orders)
            keeper.append()
            keeper.store.commit(0)
            backpressure(keeper.store)
            keeper.forget()
            keeper.compact(3)
        expected = {id: keeper.fact(id) for id in keeper.jobs}
        keeper.store.close()
    except JournalError as error:
        raise Violation(f"cannot be gone on with: {error} {said}") from error
    finally:
        with suppress(JournalError):
            keeper.store.abandon()
    found, _ = read(directory, orders)
    if found != expected:
        raise Violation(f"after going on: {_difference(found, expected)}")


def _difference(have: Facts, want: Facts) -> str:
    wrong = [id for id in have.keys() | want.keys() if have.get(id) != want.get(id)]
    return ", ".join(f"job {id} is {have.get(id)}, not {want.get(id)}" for id in sorted(wrong)[:5])
