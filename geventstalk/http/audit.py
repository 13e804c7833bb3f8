"""The audit of changes, logins and wrong tokens: the file of `--audit`, JSON lines, and the latest in memory.

This module must not import gevent or falcon: --check-config uses it, too. An entry is appended when its change is safe.
The file may be renamed at any time: the next entry goes to a new file of the old name. Invariant: a file that cannot be
written stops no change. The log says so once, and how many entries are missing. A flood of wrong tokens makes a line of
the log each minute, and an entry each ten minutes, so few other entries are lost.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, Protocol

from geventstalk.config import ConfigError

KEPT_MAX: Final = 1000
_REFUSAL_LOGGED_EVERY_NS: Final = 60_000_000_000
_REFUSAL_KEPT_EVERY_NS: Final = 600_000_000_000
_TAIL_BYTES: Final = 1 << 19
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK

Entry = dict[str, Any]
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "number": (int,),
    "at": (float, int),
    **dict.fromkeys(("who", "role", "from", "via", "action"), (str,)),
    **dict.fromkeys(("tube", "filter", "detail"), (str, type(None))),
    "job": (int, type(None)),
    "count": (int,),
}


class Author(Protocol):
    """The author of a change, as access.py has it."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def via(self) -> str: ...


class _Seldom:
    """Counts frequent events, and reports them rarely."""

    def __init__(self, every_ns: int) -> None:
        self._every_ns = every_ns
        self._told_ns = -every_ns
        self._untold = 0

    def due(self, now_ns: int) -> int:
        """Counts one more. Returns the number to report now, this one among them, or 0."""
        self._untold += 1
        if now_ns - self._told_ns < self._every_ns:
            return 0
        count, self._told_ns, self._untold = self._untold, now_ns, 0
        return count


class Audit:
    """The audit. Without a path only the latest changes are kept. `listeners` are called for each entry, in its
    greenlet.
    """

    def __init__(self, path: str | None, log: logging.Logger) -> None:
        """Raises ConfigError when the file cannot be opened."""
        self.path: Final = None if path is None else os.path.abspath(path)
        self.listeners: list[Callable[[Entry], None]] = []
        self.missing = 0  # entries that could not be written to the file
        self.refused_tokens = 0
        self.unix_s: Callable[[], float] = _no_time
        self._log = log
        self._to_log, self._to_keep = _Seldom(_REFUSAL_LOGGED_EVERY_NS), _Seldom(_REFUSAL_KEPT_EVERY_NS)
        self._entries: deque[Entry] = deque(maxlen=KEPT_MAX)
        self._number = 0
        self._fd = -1
        self._file = (0, 0)
        self._is_torn = False  # the last line in the file has no newline
        self._fails = False
        if self.path is not None:
            self._begin(self.path)

    def record(
        self,
        who: Author,
        action: str,
        count: int,
        *,
        tube: str | None = None,
        job: int | None = None,
        filter: str | None = None,
        detail: str | None = None,
    ) -> None:
        """Adds an entry, when the change is safe. `count` is of jobs, tubes, connections or attempts."""
        self._number += 1
        entry: Entry = {
            "number": self._number,
            "at": self.unix_s(),
            "who": who.name,
            "role": who.role,
            "from": who.address,
            "via": who.via,
            "action": action,
            "tube": tube,
            "job": job,
            "filter": filter,
            "detail": detail,
            "count": count,
        }
        self._entries.append(entry)
        if self.path is not None:
            self._write(self.path, entry)
        for listener in self.listeners:
            listener(entry)

    def refuse_token(self, who: Author, now_ns: int) -> None:
        """Counts an unknown token. The log and the audit have the address of the latest one only."""
        self.refused_tokens += 1
        if count := self._to_log.due(now_ns):
            more = f"; {count - 1} more since the last such line" if count > 1 else ""
            self._log.warning("refused a token over HTTP from %s%s", who.address, more)
        if count := self._to_keep.due(now_ns):
            self.record(who, "refuse token", count)

    def latest_first(self) -> Iterator[Entry]:
        """Returns the entries in memory. The caller must not yield while it reads them."""
        return reversed(self._entries)

    # --- the file

    def _begin(self, path: str) -> None:
        """Opens the file, and reads the entries at its end."""
        try:
            self._open(path)
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size  # 0 for a device, which has no end to look at
                tail = os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)) if size else b""
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror} (--audit)") from None
        self._is_torn = bool(tail) and not tail.endswith(b"\n")
        for line in tail.splitlines():
            with suppress(ValueError, RecursionError):  # a line that was cut, or is none of ours
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.keys() == _KINDS.keys() and _fits(entry):
                    self._number = max(self._number, entry["number"])
                    self._entries.append(entry)

    def _open(self, path: str) -> None:
        fd = os.open(path, _FLAGS, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        status = os.fstat(fd)
        self._fd, self._file = fd, (status.st_dev, status.st_ino)

    def _write(self, path: str, entry: Entry) -> None:
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            self._follow(path)
            data = b"\n" + line if self._is_torn else line
            written = os.write(self._fd, data)
            self._is_torn = self._is_torn if not written else written < len(data)
            if written < len(data):
                raise OSError(0, "there is no room")
        except OSError as error:
            self.missing += 1
            if not self._fails:
                self._log.error("the audit file cannot be written: %s; changes go on", error.strerror)
            self._fails = True
        else:
            if self._fails:
                self._log.info("the audit file is written again; it misses %d entries", self.missing)
            self._fails = False

    def _follow(self, path: str) -> None:
        """Opens the file of this name when the file that is open was renamed or removed."""
        with suppress(OSError):
            status = os.stat(path)
            if (status.st_dev, status.st_ino) == self._file:
                return
        try:
            self._open(path)
            self._is_torn = False
        except OSError:
            if self._fd < 0:
                raise  # otherwise the old file takes the entry


def _fits(entry: Entry) -> bool:
    """Returns whether the values are of the kinds that record() writes."""
    return all(isinstance(entry[name], kinds) and not isinstance(entry[name], bool) for name, kinds in _KINDS.items())


def check(path: str) -> None:
    """Raises ConfigError for a reason that would keep a start from opening the file. Creates no file."""
    folder = os.path.dirname(os.path.abspath(path))
    found = path if os.path.exists(path) else folder
    try:
        os.stat(found)
        if os.path.isdir(path):
            raise IsADirectoryError(0, "Is a directory")
        if not os.access(found, os.W_OK):
            raise PermissionError(0, "Permission denied")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror} (--audit)") from None


def _no_time() -> float:
    raise AssertionError("an entry comes before the server runs")
