"""Bit rot and missing files: after a clean end or a kill -9 at any moment, one file of a directory is not what it was.

The fault model. In one file: bits flip, a sector or page is zeros or noise, a page stands in the place of another, the
file is shorter, is gone, or is an older copy of itself. One file at a time, by one of these.
A start must refuse, or everything that was promised is right. With accepted damage it must start, and each job that it
shows has been like that at some time. A segment that is gone is noticed whatever it held, but for one that is compacted
already and the empty one behind the others.
"""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from journal import JournalError
from journal.sqlite.reader import SegmentReader
from tests.support.faults import backpressure
from tests.support.torture.disk import Disk
from tests.support.torture.life import Facts, Keeper
from tests.support.torture.oracle import Oracle, Violation
from tests.support.torture.torturer import Torment, read, scratch

SECTORS = (512, 2048, 4096)
_SEGMENT = re.compile(r"segment-\d+\.db")
WAYS = ("older", "older", "flip", "flip", "flips", "zeros", "noise", "swap", "copy", "shorter", "gone", "gone", "older")


def rot(name: str, data: bytes, older: list[bytes], draw: random.Random) -> tuple[str, bytes | None]:
    """One thing that happened to a file, and what it holds then: None when it is gone."""
    way = draw.choice(WAYS)
    if way == "gone" or not data:
        return f"{name} is gone", None
    if way == "older" and older:
        return f"{name} is an older copy", draw.choice(older)
    content = bytearray(data)
    size = draw.choice(SECTORS)
    at, other = (draw.randrange(len(data)) // size * size for _ in range(2))
    if way == "shorter":
        length = draw.choice([at, draw.randrange(len(data))])
        return f"{name} ends at {length}", data[:length]
    if way in ("zeros", "noise"):
        end = min(at + size, len(data))
        content[at:end] = bytes(end - at) if way == "zeros" else draw.randbytes(end - at)
        return f"{name} has {way} from {at} to {end}", bytes(content)
    if way in ("swap", "copy"):
        first, second = data[at : at + size], data[other : other + size]
        if len(first) == len(second):
            content[at : at + size] = second
            if way == "swap":
                content[other : other + size] = first
            return f"{name}: {way} of {size} bytes at {at} and {other}", bytes(content)
    places = [draw.randrange(len(data)) for _ in range(1 if way == "flip" else draw.randint(2, 20))]
    for place in places:
        content[place] ^= 1 << draw.randrange(8)
    return f"{name} has flipped bits at {places}", bytes(content)


class Rotting(Torment):
    """A directory that is lived in, and whose files rot after each life."""

    def rot(self, rounds: int = 50, lives: int = 3) -> Counter[str]:
        """Lets files rot this many times; raises Violation. Returns how often what happened was noticed."""
        self.noticed: Counter[str] = Counter()
        with tempfile.TemporaryDirectory(dir=scratch()) as folder:
            self._folder = Path(folder)
            with self._place() as directory:
                disk, oracle = Disk(), Oracle()
                for number in range(lives):
                    self._live(directory, disk, oracle, self._folder / f"trace-{number}")
                    left = {path.name: path.read_bytes() for path in directory.iterdir()}
                    every = disk.moments + disk.turns + oracle.commits  # behind a commit the sync is still to come
                    moments = [each for each in every if each >= self._first]
                    for _ in range(rounds // lives):
                        moment, files = disk.end, left
                        if moments and self._draw.random() < 0.5:
                            moment = self._draw.choice(moments) + self._draw.choice([0, 1, 2, 4, 8])
                            files = {name: inode.at(moment) for name, inode in disk.killed(moment).items()}
                        self._round(files, disk, oracle, moment)
        return self.noticed

    def _round(self, files: dict[str, bytes], disk: Disk, oracle: Oracle, moment: int) -> None:
        draw = self._draw
        names = sorted(name for name in files if name not in ("lock", "reserve"))
        if not names:
            return
        name = draw.choice(names)
        inode = disk.killed(moment).get(name)
        older = disk.older(inode, moment, draw) if inode else []
        what, content = rot(name, files[name], older, draw)
        if content == files[name]:
            return
        image = self._folder / "image"
        image.mkdir()
        try:
            for each, data in files.items():
                if each != name:
                    (image / each).write_bytes(data)
            if content is not None:
                (image / name).write_bytes(content)
            self._look_at(image, what, name, content, oracle, moment)
        except Violation as violation:
            kind = f"a kill at {moment}" if moment < disk.end or not oracle.ended else "a clean end"
            keep = f" (kept in {self._kept(image)})" if self._keep else ""
            raise Violation(f"seed {self.seed}, {self._policy}, after {kind}: {what}: {violation}{keep}") from None
        finally:
            shutil.rmtree(image)

    def _kept(self, image: Path) -> Path:
        assert self._keep is not None
        folder = self._keep / f"rot-{self.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(image, folder)
        return folder

    def _look_at(self, image: Path, what: str, name: str, content: bytes | None, oracle: Oracle, moment: int) -> None:
        keeper = Keeper(str(image), "F", self._orders.segment_bytes)
        noticed = False
        try:
            keeper.replay()
        except JournalError:
            noticed = True
        finally:
            keeper.store.abandon()
        if noticed:
            self.noticed["noticed"] += 1
            self._accept(image, oracle)
            return
        facts, high_water = read(image, self._orders)
        oracle.check(facts, high_water, moment)
        if content is None and _SEGMENT.fullmatch(name) and not self._is_spare(name, image):
            raise Violation("it was not noticed")
        self.noticed["harmless"] += 1

    def _is_spare(self, name: str, image: Path) -> bool:
        """Returns whether it was behind all others (the next one, or one without a record), or on its way out."""
        oldest = 0
        for path in image.glob("segment-*.db"):
            if path.name > name:
                reader = SegmentReader(str(path))
                oldest = max(oldest, reader.oldest)
                reader.close()
        return not oldest or name < f"segment-{oldest:08d}.db"

    def _accept(self, image: Path, oracle: Oracle) -> None:
        """With accepted damage it starts, and shows nothing that never was."""
        keeper = Keeper(str(image), "F", self._orders.segment_bytes, accept_damage=True)
        try:
            facts = keeper.replay()
            keeper.start()
            keeper.batch(random.Random(0), replace(self._orders, batch_max=3))
            keeper.append()
            keeper.store.commit(0)
            backpressure(keeper.store)
            keeper.store.close()
        except JournalError as error:
            raise Violation(f"accepted damage does not start: {error}") from error
        finally:
            keeper.store.abandon()
        self._known(facts, oracle)

    def _known(self, facts: Facts, oracle: Oracle) -> None:
        for id, fact in facts.items():
            if fact not in oracle.ever(id):
                raise Violation(f"accepted damage shows job {id} as {fact}, which it never was")
