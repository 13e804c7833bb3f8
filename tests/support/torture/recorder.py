"""Runs a program under recorder.c, and reads what that took down: the calls that changed files, in order, with data.

A moment is a tick of one counter for all threads. A call has happened when it has ended, it may have happened in part
from when it has begun. Marks are what the program itself says, in the same order (mark()).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import Struct
from typing import NamedTuple

SOURCE = Path(__file__).with_name("recorder.c")
_LENGTH = Struct("<I")
_HEAD = Struct("<QQQQqqiiIIII")

OPEN, CREATE, CLOSE, WRITE, TRUNCATE, ALLOCATE = "o", "c", "C", "w", "t", "a"
SYNC, UNLINK, RENAME, MKDIR = "s", "u", "r", "m"
MARK, SEND, RECEIVE = "M", "S", "R"


class Call(NamedTuple):
    """One call. `at` is an offset or a size; a negative `result` is that of a failed call, and says its errno."""

    begun: int
    ended: int
    begun_ns: int
    ended_ns: int
    at: int
    result: int
    fd: int
    thread: int
    call: str
    flags: int
    name: str
    data: bytes


@functools.cache
def recorder_problem() -> str:
    """Why nothing can be recorded here; empty when it can."""
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        return "no C compiler is installed"
    try:
        library()
    except subprocess.CalledProcessError as error:
        return f"the recorder cannot be compiled: {error.stderr.decode().strip()}"
    return ""


@functools.cache
def library() -> Path:
    """The recorder, compiled once for all processes of this user, and anew when its source changes."""
    folder = Path(tempfile.gettempdir()) / f"geventstalk-recorder-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    source = SOURCE.read_bytes()
    path = folder / f"recorder-{hash_of(source)}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not path.exists():
            half = path.with_suffix(".half")
            compiler = "gcc" if shutil.which("gcc") else "cc"
            command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(half), str(SOURCE), "-ldl", "-lpthread"]
            subprocess.run(command, check=True, capture_output=True)
            half.rename(path)
    return path


def hash_of(source: bytes) -> str:
    """Twelve digits that say which source it was."""
    return hashlib.sha256(source).hexdigest()[:12]


def recording(directory: Path, trace: Path, options: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which a program is recorded; `options` are those of recorder.c, without `TORTURE_`."""
    environment = {**os.environ, **{f"TORTURE_{name}": value for name, value in (options or {}).items()}}
    environment["LD_PRELOAD"] = str(library())
    environment["TORTURE_DIR"] = str(directory.resolve())
    environment["TORTURE_TRACE"] = str(trace)
    return environment


@functools.cache
def _marker() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None).torture_mark
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return function


def mark(text: str) -> None:
    """In the program that is recorded: says something, in the order of its calls."""
    data = text.encode()
    _marker()(data, len(data))


def read_trace(trace: Path) -> Iterator[Call]:
    """All calls that ended, in the order in which they ended."""
    data = trace.read_bytes()
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        head = _HEAD.unpack_from(data, at)
        begun, ended, begun_ns, ended_ns, offset, result, fd, thread, name, size, call, flags = head
        rest = at + _HEAD.size
        at += length
        assert rest + name + size == at, "a record of the trace is not whole"
        yield Call(
            begun,
            ended,
            begun_ns,
            ended_ns,
            offset,
            result,
            fd,
            thread,
            chr(call),
            flags,
            data[rest : rest + name].decode(),
            data[rest + name : at],
        )
