"""An append-only log of keyed records. It knows keys and opaque payloads, and nothing of jobs.

`log` is what a store needs of any log, `shared` what nodes need of theirs, `tools` what the commands need. `batched`
and `survey` are common to the kinds of logs. `sqlite` is the kind that is a directory of SQLite files, `postgres` the
kind that nodes share; only this package knows their classes.
A record becomes safe in two steps. After append() and commit(), which never wait for the device, the record survives
the end of the process (`kill -9`). A SyncPoint waits for the device; then the record survives a loss of power.
For a replay, a key is its last FULL record with the last CHANGE behind that record. After DELETE the key is gone.
Compaction appends the live keys of the oldest segment again, syncs them, and only then removes the segment.
"""

from contextlib import contextmanager
from typing import TYPE_CHECKING

from journal.errors import (
    JournalDamaged,
    JournalError,
    JournalFailed,
    JournalForked,
    JournalFull,
    JournalLocked,
    JournalNewer,
    JournalUnreachable,
)
from journal.log import CHANGE, DELETE, FULL, Log, Record, SyncPoint
from journal.shared import SharedLog
from journal.sqlite.log import Journal
from journal.sqlite.segments import DESCRIPTORS_MAX, DESCRIPTORS_MIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from journal.fence import Fence, Identity
    from journal.tools import LogTools

__all__ = [
    "CHANGE",
    "DELETE",
    "DESCRIPTORS_MAX",
    "DESCRIPTORS_MIN",
    "FULL",
    "Journal",
    "JournalDamaged",
    "JournalError",
    "JournalFailed",
    "JournalForked",
    "JournalFull",
    "JournalLocked",
    "JournalNewer",
    "JournalUnreachable",
    "Log",
    "Record",
    "SharedLog",
    "SyncPoint",
    "fence_for",
    "make_shared_log",
    "shared_log",
    "tools_for",
]


def shared_log(
    place: str,
    *,
    segment_bytes: int,
    compact: bool = True,
    budget: int | None = None,
    accept_damage: bool = False,
    synchronous: bool = True,
    answer_s: float = 10.0,
    wait: "Callable[[int, bool, bool, float], bool] | None" = None,
    resolve: "Callable[[str], list[str]] | None" = None,
    log: "Callable[[str], None]" = lambda text: None,
) -> SharedLog:
    """A log in a database, as PostgresLog says. Without `wait` its waits hold the whole thread.

    A database that is silent for `answer_s` while it is asked is given up, and another host is tried.
    """
    with _library():
        from journal.postgres.link import poll
        from journal.postgres.log import PostgresLog

    return PostgresLog(
        place,
        segment_bytes=segment_bytes,
        compact=compact,
        budget=budget,
        accept_damage=accept_damage,
        synchronous=synchronous,
        answer_s=answer_s,
        wait=wait or poll,
        resolve=resolve,
        log=log,
    )


def make_shared_log(place: str) -> bool:
    """Makes an empty log in a database. Returns whether there was none. Raises a JournalError, ValueError."""
    with _library():
        from journal.postgres.tools import make_log

    return make_log(place)


def fence_for(
    place: str,
    me: "Identity | None" = None,
    wait: "Callable[[int, bool, bool, float], bool] | None" = None,
    resolve: "Callable[[str], list[str]] | None" = None,
    tells: "Callable[[str], None]" = lambda text: None,
) -> "Fence":
    """The rows by which nodes agree which one leads. `me` is None for a process that only looks and requests."""
    with _library():
        from journal.postgres.fence import OBSERVER, PostgresFence  # late: most servers need no such library
        from journal.postgres.link import poll
        from journal.postgres.place import Place

    return PostgresFence(Place(place), me or OBSERVER, wait or poll, resolve, tells)


def tools_for(place: str) -> "LogTools":
    """Returns what can be done to the log at a place: the path of a directory, or the URL of a database.

    Raises JournalLocked when the URL is wrong, ImportError when the library for it is missing.
    """
    from journal.postgres.place import PlaceError, is_place  # late, all of these: a server never needs the tools

    if not is_place(place):
        from journal.sqlite.tools import DirectoryTools

        return DirectoryTools(place)
    with _library():
        from journal.postgres.tools import PostgresTools
    try:
        return PostgresTools(place)
    except PlaceError as error:
        raise JournalLocked(f"this is no place of a journal: {error}") from None


@contextmanager
def _library() -> "Iterator[None]":
    """Within, what a database needs is imported. Raises an ImportError with a line for the operator."""
    try:
        yield
    except ImportError as error:
        text = f"a journal in PostgreSQL needs psycopg: pip install 'geventstalk[postgres]' ({error})"
        raise ImportError(text, name="psycopg") from error
