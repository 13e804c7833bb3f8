"""A disk that forgets: what a loss of power may leave of all that was done to a directory.

The fault model. A call counts as synced when it had ended before an fsync of its file, or of the directory, began that
succeeded and had ended by the moment of the loss. Of all else any of this is left, drawn anew for each image:
- Data: of each sector (512 or 4,096 bytes) any version that it had since it was last synced, whatever the other sectors
  have; or all writes up to one of them. A sector that never came reads as zeros.
- Sizes: a file has one of the sizes that it had since then, and loses what stood beyond. What was written behind a
  truncation that is lost is lost as well, because its blocks are.
- Names: each creation, renaming and removal may be there or not, in order or (file systems without a journal, and
  btrfs where single files are synced) in any subset; one renaming is always whole.
- A failed fsync: what it should have covered is clean in the page cache from then on, so that no later fsync covers it.
- `-shm` files are memory: absent, zeros, or anything.
Nothing meaner: an fsync that succeeded does not lie, and nothing is written where no process wrote.
Kills in between change nothing here: the kernel still has what was written. So several traces follow each other.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.support.torture.recorder import (
    ALLOCATE,
    CLOSE,
    CREATE,
    MKDIR,
    OPEN,
    RENAME,
    SYNC,
    TRUNCATE,
    UNLINK,
    WRITE,
    Call,
)

PAGE = 4096
_NEVER = 1 << 62


@dataclass(slots=True)
class Change:
    """One change of one file: `data` at `at`, or, without data, a size of `at`."""

    begun: int
    ended: int
    at: int
    data: bytes | None
    safe: int = _NEVER  # from this moment on it is on the device


@dataclass(eq=False, slots=True)
class Inode:
    """A file, whatever it is called. `base` is on the device."""

    base: bytes = b""
    changes: list[Change] = field(default_factory=list)
    open_changes: list[Change] = field(default_factory=list)  # that an fsync may still make safe, or safe earlier

    def add(self, change: Change) -> None:
        self.changes.append(change)
        self.open_changes.append(change)

    def at(self, moment: int) -> bytes:
        """The content at this moment, as a reader of the file finds it."""
        content = bytearray(self.base)
        for change in self.changes:
            if change.ended <= moment:
                _apply(content, change)
        return bytes(content)


@dataclass(slots=True)
class Entry:
    """One change of the directory: `name` now means this file, or none; `away` is the name that it had before."""

    begun: int
    ended: int
    name: str
    inode: Inode | None
    away: str = ""
    safe: int = _NEVER


_Loose = TypeVar("_Loose", Change, Entry)


class Disk:
    """All that was done below one directory, over one or more lives of a process."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        """`files` are there from the beginning, on the device."""
        self.names: dict[str, Inode] = {name: Inode(data) for name, data in (files or {}).items()}
        self.end = 0
        self.moments: list[int] = []  # where a size changed, or an fsync ended
        self.turns: list[int] = []  # where a file came, went or changed its name
        self._base = dict(self.names)
        self._entries: list[Entry] = []
        self._open_entries: list[Entry] = []
        self._files: dict[int, Inode | None] = {}  # by descriptor; None: the directory

    # --- what happened

    def play(self, calls: Iterable[Call]) -> int:
        """Adds a life. Returns by how much its moments are later than those of its trace."""
        later = self.end
        self._files = {}
        in_order = sorted(calls, key=lambda call: call.ended if call.call in (OPEN, CREATE) else call.begun)
        for call in in_order:
            self.end = max(self.end, later + call.ended + 1)
            self._play(call, later)
        return later

    def _play(self, call: Call, later: int) -> None:
        begun, ended, kind = call.begun + later, call.ended + later, call.call
        if call.result < 0:
            if kind == SYNC and self._files.get(call.fd) is not None:
                self._failed(call.fd, begun)
            return
        if kind in (OPEN, CREATE):
            self._open(call, begun, ended)
        elif kind == CLOSE:
            self._files.pop(call.fd, None)
        elif kind == SYNC:
            self._sync(call.fd, begun, ended)
        elif kind in (WRITE, TRUNCATE, ALLOCATE):
            inode = self._files.get(call.fd)
            if inode is None:
                return
            size = call.at if kind != ALLOCATE else max(call.at, _size(inode))
            inode.add(Change(begun, ended, size, call.data if kind == WRITE else None))
            if kind != WRITE:
                self.moments.append(ended)
        elif kind in (UNLINK, RENAME, MKDIR):
            self._rename(call, begun, ended)

    def _open(self, call: Call, begun: int, ended: int) -> None:
        if not call.name:
            self._files[call.fd] = None
            return
        if call.name not in self.names:
            inode = self.names[call.name] = Inode()
            self._enter(Entry(begun, ended, call.name, inode))
        inode = self.names[call.name]
        self._files[call.fd] = inode
        if call.flags & os.O_TRUNC and _size(inode):
            inode.add(Change(begun, ended, 0, None))

    def _rename(self, call: Call, begun: int, ended: int) -> None:
        assert call.call != MKDIR, "the directory is there before"
        inode = self.names.pop(call.name)
        if call.call == UNLINK:
            self._enter(Entry(begun, ended, call.name, None))
        else:
            name = call.data.decode()
            self.names[name] = inode
            self._enter(Entry(begun, ended, name, inode, call.name))

    def _enter(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._open_entries.append(entry)
        self.turns.append(entry.ended)

    def _sync(self, fd: int, begun: int, ended: int) -> None:
        self.moments.append(ended)
        inode = self._files.get(fd)
        if inode is None:
            self._open_entries = _settle(self._open_entries, begun, ended)
        else:
            inode.open_changes = _settle(inode.open_changes, begun, ended)

    def _failed(self, fd: int, begun: int) -> None:
        inode = self._files[fd]
        assert inode is not None
        inode.open_changes = [change for change in inode.open_changes if change.ended >= begun]

    # --- what is left

    def image(self, moment: int, draw: random.Random, into: Path) -> None:
        """Writes what a loss of power at this moment may leave into an empty folder."""
        names = self._names_at(moment, draw)
        fate = _Fate(draw)
        for name, inode in names.items():
            path = into / name
            if name.endswith("-shm"):
                data = draw.choice([None, None, bytes(1 << 15), draw.randbytes(1 << 15)])
                if data is not None:
                    path.write_bytes(data)
            elif name == "reserve":
                with path.open("wb") as file:  # blocks whose content does not matter
                    file.truncate(len(inode.base) if not inode.changes else _size_at(inode, moment))
            else:
                path.write_bytes(fate.content(inode, moment))

    def whole(self, into: Path) -> None:
        """Writes what is there when nothing is lost."""
        for name, inode in self.names.items():
            (into / name).write_bytes(inode.at(_NEVER))

    def killed(self, moment: int) -> dict[str, Inode]:
        """The files that a kill at this moment leaves, without those of `-shm`, which are not recorded."""
        names = dict(self._base)
        for entry in self._entries:
            if entry.ended > moment:
                continue
            if entry.away:
                names.pop(entry.away, None)
            if entry.inode is None:
                names.pop(entry.name, None)
            else:
                names[entry.name] = entry.inode
        return {name: inode for name, inode in names.items() if not name.endswith("-shm")}

    def older(self, inode: Inode, moment: int, draw: random.Random) -> list[bytes]:
        """Returns what a file held at some earlier moments."""
        ends = [0, *(change.ended for change in inode.changes if change.ended <= moment)]
        return [inode.at(draw.choice(ends)) for _ in range(3)]

    def _names_at(self, moment: int, draw: random.Random) -> dict[str, Inode]:
        loose = [entry for entry in self._entries if entry.begun <= moment < entry.safe]
        way = draw.random()
        if way < 0.25:
            kept = set()
        elif way < 0.4:
            kept = {id(entry) for entry in loose}
        elif way < 0.7:
            kept = {id(entry) for entry in loose[: draw.randint(0, len(loose))]}
        else:
            kept = {id(entry) for entry in loose if draw.random() < 0.5}
        names = dict(self._base)
        for entry in self._entries:
            if entry.begun > moment or (entry.safe > moment and id(entry) not in kept):
                continue
            if entry.away:
                names.pop(entry.away, None)
            if entry.inode is None:
                names.pop(entry.name, None)
            else:
                names[entry.name] = entry.inode
        return names


class _Fate:
    """The meanness of one image."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._sector = draw.choice([512, PAGE])
        self._way = draw.choice(["nothing", "all", "up to", "sectors", "sectors", "mixed", "mixed"])
        self._share = draw.choice([0.05, 0.3, 0.5, 0.7, 0.95])

    def content(self, inode: Inode, moment: int) -> bytes:
        """Returns what is left of a file."""
        content = bytearray(inode.base)
        changes = [change for change in inode.changes if change.begun <= moment]
        settled = 0
        while settled < len(changes) and changes[settled].safe <= moment:
            _apply(content, changes[settled])
            settled += 1
        changes = changes[settled:]  # from the first on that may be lost
        if not changes:
            return bytes(content)
        draw = self._draw
        way = self._way if self._way != "mixed" else draw.choice(["nothing", "all", "up to", "sectors"])
        changes = self._truncations(changes, len(content), moment, way)
        if way == "sectors":
            self._sectors(content, changes, moment)
            return bytes(content)
        last = {"nothing": 0, "all": len(changes)}.get(way, draw.randint(0, len(changes)))
        for number, change in enumerate(changes):
            if number < last or change.safe <= moment:
                _apply(content, change)
        return bytes(content)

    def _truncations(self, changes: list[Change], size: int, moment: int, way: str) -> list[Change]:
        """Those in front of the first truncation that is lost."""
        if way in ("all", "up to"):
            return changes
        for number, change in enumerate(changes):
            if change.data is not None:
                size = max(size, change.at + len(change.data))
                continue
            safe = any(later.safe <= moment for later in changes[number:])
            if change.at < size and not safe and (way == "nothing" or self._draw.random() < 0.4):
                return changes[:number]
            size = change.at
        return changes

    def _sectors(self, content: bytearray, changes: list[Change], moment: int) -> None:
        """Each sector gets one of its versions, and the file one of its sizes."""
        draw = self._draw
        versions: dict[int, int] = {}
        floors: dict[int, int] = {}
        for change in changes:
            for sector in self._of(change):
                versions[sector] = versions.get(sector, 0) + 1
                if change.safe <= moment:
                    floors[sector] = versions[sector]
        chosen = {}
        for sector, count in versions.items():
            floor = floors.get(sector, 0)
            chosen[sector] = count if draw.random() < self._share else draw.randint(floor, count)
        sizes = [len(content)]
        for change in changes:
            if change.data is None:
                _apply(content, change)
            else:
                for sector in self._of(change):
                    chosen[sector] -= 1
                    if chosen[sector] >= 0:
                        self._write(content, change, sector)
            size = change.at if change.data is None else max(sizes[-1], change.at + len(change.data))
            if change.safe <= moment or size < sizes[-1]:
                sizes.clear()
            sizes.append(size)
        size = sizes[-1] if draw.random() < 0.6 else draw.choice(sizes)
        _apply(content, Change(0, 0, size, None))

    def _of(self, change: Change) -> range:
        """The sectors that a write touches."""
        if not change.data:
            return range(0)
        return range(change.at // self._sector, (change.at + len(change.data) - 1) // self._sector + 1)

    def _write(self, content: bytearray, change: Change, sector: int) -> None:
        assert change.data is not None
        begin = max(change.at, sector * self._sector)
        end = min(change.at + len(change.data), (sector + 1) * self._sector)
        _apply(content, Change(0, 0, begin, change.data[begin - change.at : end - change.at]))


def _settle(loose: list[_Loose], begun: int, ended: int) -> list[_Loose]:
    """Marks what an fsync covers: all that had ended before it began. Returns what a later fsync may still make safe.

    Of two fsyncs of one file at once, the one that began later may end first.
    """
    for each in loose:
        if each.ended < begun:
            each.safe = min(each.safe, ended)
    return [each for each in loose if each.safe > begun]


def _apply(content: bytearray, change: Change) -> None:
    end = change.at + len(change.data or b"")
    if change.data is None:
        del content[end:]
    if end > len(content):
        content.extend(bytes(end - len(content)))
    if change.data is not None:
        content[change.at : end] = change.data


def _size(inode: Inode) -> int:
    return _size_at(inode, _NEVER)


def _size_at(inode: Inode, moment: int) -> int:
    size = len(inode.base)
    for change in inode.changes:
        if change.begun <= moment:
            size = change.at if change.data is None else max(size, change.at + len(change.data))
    return size
