"""Repairs a journal for --accept-damage: writes the intact records of damaged segments anew, then sets these aside.

This module must not know what a payload means. Invariant: nothing is deleted and nothing is overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from journal.errors import JournalFailed
from journal.liveness import Liveness
from journal.log import DELETE, FULL, PayloadOf, SyncPoint
from journal.sqlite.files import ASIDE_SUFFIX, MISSING_SUFFIX, SUFFIXES, fsync_path, segment_path
from journal.sqlite.replay import Found, Replay


class Damage:
    """The damage that a replay found in a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._segments: list[Found] = []
        self._missing: list[tuple[int, int]] = []  # first and last number of each gap

    def take(self, replay: Replay) -> None:
        """Remembers the damage that is to be repaired."""
        self._segments = [found for found in replay.found if found.damaged]
        self._missing = replay.missing

    @property
    def numbers(self) -> list[int]:
        """The largest numbers of segments that are damaged or missing."""
        return [found.number for found in self._segments] + [last for _, last in self._missing]

    def rewrite(self, live: Liveness, payload_of: PayloadOf, append: Callable[[int, int, bytes], None]) -> int:
        """Appends the live records and the deletions of damaged segments anew. Returns how many live keys it wrote."""
        keys = 0
        for found in self._segments:
            for key in live.keys_in(found.number):
                payload = payload_of(key)
                assert payload is not None, "a live key has a payload"
                append(key, FULL, payload)
                keys += 1
            for key in found.deleted:
                if not live.segment_of(key):
                    append(key, DELETE, b"")
        return keys

    def set_aside(self, guard: Callable[[], SyncPoint], log: Callable[[str], None]) -> None:
        """Renames damaged segments and marks missing ones, once a sync of what was rewritten is over.

        Raises JournalFailed.
        """
        if not self._segments and not self._missing:
            return
        self._require_free_names()
        guard().run()
        try:
            for found in self._segments:
                for suffix in reversed(SUFFIXES):
                    if os.path.exists(found.path + suffix):
                        os.rename(found.path + suffix, found.path + ASIDE_SUFFIX + suffix)
                log(f"journal: {found.path} is set aside as {found.path + ASIDE_SUFFIX}")
            for first, last in self._missing:
                for number in range(first, last + 1):
                    mark = segment_path(self._directory, number) + MISSING_SUFFIX
                    os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise JournalFailed(f"cannot set damaged segments aside: {error.strerror}") from error
        fsync_path(self._directory)
        self._segments = []
        self._missing = []

    def _require_free_names(self) -> None:
        """An accepted segment that was put back may still stand under its other name as well."""
        for found in self._segments:
            for suffix in SUFFIXES:
                aside = found.path + ASIDE_SUFFIX + suffix
                if os.path.lexists(aside):
                    raise JournalFailed(f"cannot set {found.path} aside: {aside} exists")
