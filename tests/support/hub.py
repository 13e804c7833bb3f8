"""A server that notes what may wait in the thread of the hub: files, SQLite, sleeps. Run as a program, see test_hub.

Only what it does between its start and its end is noted, in lines of the file that HUB_NOTES names: a call, and the
innermost function of the project below it.
"""

from __future__ import annotations

import builtins
import os
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

serving = False
notes: set[str] = set()


def note(what: str) -> None:
    if serving and threading.current_thread() is threading.main_thread():
        notes.add(f"{what}: {_place(sys._getframe(1))}\n")


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] in ("geventstalk", "journal"):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def anything(*arguments: object) -> bool:
    return True


def noted(name: str, call: Callable[..., Any], is_ours: Callable[..., bool]) -> Any:
    def noting(*arguments: Any, **options: Any) -> Any:
        if serving and is_ours(*arguments):
            note(name)
        return call(*arguments, **options)

    return noting


def is_file(fd: int, *rest: object) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


class Cursor(sqlite3.Cursor):
    def execute(self, sql: str, *arguments: Any) -> Any:
        note(f"sqlite {sql.split()[0]}")
        return super().execute(sql, *arguments)

    def executemany(self, sql: str, *arguments: Any) -> Any:
        note(f"sqlite {sql.split()[0]}")
        return super().executemany(sql, *arguments)


class Connection(sqlite3.Connection):
    def cursor(self, factory: Any = Cursor) -> Any:
        return super().cursor(factory)

    def execute(self, sql: str, *arguments: Any) -> Any:
        return self.cursor().execute(sql, *arguments)


def connect(path: str, **options: Any) -> Any:
    note("sqlite connect")
    return _connect(path, factory=Connection, **options)


_connect = sqlite3.connect
for _module, _names, _is_ours in (
    (os, ("read", "pread", "write", "pwrite"), is_file),
    (os, ("open", "fsync", "fdatasync", "ftruncate", "posix_fallocate", "unlink", "rename"), anything),
    (builtins, ("open",), anything),
    (time, ("sleep",), anything),
):
    for _name in _names:
        setattr(_module, _name, noted(_name, getattr(_module, _name), _is_ours))
setattr(sqlite3, "connect", connect)  # noqa: B010  # an assignment is none that mypy takes


def main() -> int:
    from geventstalk.cli.main import main as serve
    from geventstalk.serving.server import Server

    accepts, finish = Server._accepts, Server._finish

    def begins(server: Server) -> None:
        global serving
        accepts(server)
        serving = True

    def ends(server: Server) -> int:
        global serving
        serving = False
        with open(os.environ["HUB_NOTES"], "w") as file:
            file.writelines(sorted(notes))
        return finish(server)

    for name, replacement in (("_accepts", begins), ("_finish", ends)):
        setattr(Server, name, replacement)
    return serve()


if __name__ == "__main__":
    sys.exit(main())
