"""The interface of a log for the tools: look through a log, copy it, repair it, write a new one.

This module must not know files, SQL nor what a payload means. journal/sqlite/tools.py is one kind; another may be
networked. A log has a place: a text that an operator types, such as the path of a directory. Looking takes no lock and
changes no record, so a tool may look beside a running server.
Invariant: what a survey gives back is a state that the log was in, and a log that is being written counts only as a
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from journal.log import Record

Examine = Callable[[Record], None]
"""Raises ValueError when a record is not one that its owner writes."""


class ServerUser(NamedTuple):
    """The user as which a server would use a log."""

    uid: int
    gids: frozenset[int]


class SegmentFacts(NamedTuple):
    """One segment, whatever a kind of log calls so. A replay needs `live_bytes` of its `bytes`."""

    number: int
    records: int
    bytes: int
    live_bytes: int
    damaged: bool


class Survey:
    """One reading of a whole log: what is wrong with the log, and which records are live. Close it in the end."""

    findings: list[str]
    """Lines for the operator about damage. Complete after the last record."""
    notes: list[str]
    """Lines for the operator about what is no damage. Complete after close()."""
    segments: list[SegmentFacts]
    """Complete after the last record."""
    keys: int
    """The number of live keys."""
    high_water: int
    """The largest key in any record, also in records of keys that are deleted."""
    lost: list[int]
    """Keys that are known to be lost: a damaged record names them, or only their changes are left."""

    @property
    def live_bytes(self) -> int:
        """Returns how many bytes the records of the live keys take."""
        raise NotImplementedError

    @property
    def used_keys(self) -> int:
        """No key up to this one may be used again. After damage it is larger: lost records may have had larger keys."""
        raise NotImplementedError

    def read(self) -> Iterator[Record]:
        """Every sound record that belongs to a key's history, oldest first."""
        raise NotImplementedError

    def live_records(self) -> Iterator[tuple[Record, bytes | None]]:
        """Each live key's whole record, in the order of the log, with the payload of the key's last change.

        Reads the log twice. Holds some 100 bytes for each key, and one whole payload at a time. `findings` and
        `high_water` are complete before the first record.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Releases everything it holds. May be called again."""
        raise NotImplementedError


class Builder:
    """Writes a new log, or adds to an old one. No server takes what is unfinished for a log."""

    high_water: int
    """No key up to this one is used again. The caller may raise it before finish()."""

    def append(self, key: int, payload: bytes, change: bytes | None = None) -> None:
        """Adds a whole record of a key, and its last change; both are there or neither. Raises a JournalError."""
        raise NotImplementedError

    def finish(self) -> None:
        """Everything, and the high water with it, survives the loss of power and is valid. Raises a JournalError."""
        raise NotImplementedError

    def discard(self) -> None:
        """Removes the files that were written. The log is as it was."""
        raise NotImplementedError


class LogTools:
    """The operations on the log at one place. Making this object looks at nothing."""

    place: str

    # --- looking

    def exists(self) -> bool:
        """Returns whether a log is there. Raises JournalLocked when that cannot be known."""
        raise NotImplementedError

    def survey(self, examine: Examine) -> Survey:
        """A survey of the log as it is now. Raises JournalLocked when no readable log is there."""
        raise NotImplementedError

    def every_record(self, complain: Callable[[str], None]) -> Iterator[tuple[int, Record]]:
        """Each intact record, also dead ones, with its place in its segment. `complain` hears of what is damaged.

        Raises JournalLocked as survey() does.
        """
        raise NotImplementedError

    def strangers(self) -> list[str]:
        """Lines for the operator about what stands beside the log and is not read."""
        raise NotImplementedError

    # --- what a server would meet

    def require_usable(self, owner: ServerUser | None = None) -> None:
        """Raises JournalLocked, in the words of a start, when this user (by default: this process) could not use it.

        Changes nothing and takes no lock, not even for a moment: a server that starts meanwhile would be refused. Where
        that is seen without reading, raises JournalNewer and JournalDamaged, too; JournalUnreachable where a server
        would wait.
        """
        raise NotImplementedError

    def holder(self) -> int | None:
        """The process that has the log to itself; None when none does, or when that cannot be told."""
        raise NotImplementedError

    def without_writers(self) -> AbstractContextManager[None]:
        """No server writes to the log while the body runs. Changes no record. Raises JournalLocked when one has it."""
        raise NotImplementedError

    # --- writing

    def require_empty(self) -> None:
        """Raises JournalLocked when there is anything at the place of a new log."""
        raise NotImplementedError

    def writing(self) -> AbstractContextManager[None]:
        """Locks the log for this process. What is made for that is removed if the body fails. Raises JournalLocked."""
        raise NotImplementedError

    def builder(self, high_water: int = 0) -> Builder:
        """Returns a builder that writes behind the log. For a caller within writing(). Raises JournalFailed."""
        raise NotImplementedError

    def mend(self, examine: Examine) -> list[tuple[str, str]]:
        """Repairs damage in place: writes intact records of damaged segments again, and only then sets these aside.

        Returns the files that were set aside: old name and new name. Sound segments stay as they are. For a caller
        within writing(). Raises a JournalError.
        """
        raise NotImplementedError

    def backup(self, target: str) -> int:
        """Copies the log, also while its server runs, to an empty place. Returns the number of segments.

        The copy is the log as it was at some moment between begin and end. Raises JournalLocked when there is no log or
        the target is not empty, JournalDamaged when a segment cannot be read, and JournalFailed. The copy is then
        removed.
        """
        raise NotImplementedError


def rewrite(survey: Survey, builder: Builder) -> None:
    """Writes what is live in one log to another. Raises a JournalError; what was written is removed then."""
    try:
        for record, change in survey.live_records():
            builder.append(record.key, record.payload, change)
        builder.high_water = max(builder.high_water, survey.used_keys)
        builder.finish()
    except BaseException:
        builder.discard()
        raise
