"""An append-only journal of keyed records in SQLite segments. It knows keys and opaque payloads, nothing of jobs.

Two steps: append() and commit() make records survive the end of the process (`kill -9`) and never wait for the device;
a SyncPoint, run by whoever may wait, makes what was committed before it survive the loss of power.
What a key means to a replay: its last FULL record, then the last CHANGE behind that; after DELETE, nothing.
Layout of a directory: `segment-NNNNNNNN.db` in ascending order, each with SQLite's own `-wal` and `-shm` while it is
open; `lock`; `synced`, how far the journal surely reached the device; `reserve`, room for when the disk is full.
Compaction appends the live keys of the oldest segment anew, syncs them, and only then unlinks it.
"""

from typing import TYPE_CHECKING

from journal.errors import JournalDamaged, JournalError, JournalFailed, JournalFull, JournalLocked, JournalNewer
from journal.log import CHANGE, DELETE, FULL, Log, Record, SyncPoint
from journal.sqlite.log import Journal
from journal.sqlite.segments import DESCRIPTORS_MAX, DESCRIPTORS_MIN

if TYPE_CHECKING:
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
    "JournalFull",
    "JournalLocked",
    "JournalNewer",
    "Log",
    "Record",
    "SyncPoint",
    "tools_for",
]


def tools_for(place: str) -> "LogTools":
    """What can be done to the log at a place: the path of a directory."""
    from journal.sqlite.tools import DirectoryTools  # late: a server never needs the tools

    return DirectoryTools(place)
