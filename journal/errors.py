"""What can go wrong with a journal, in four kinds; each message is one line for the operator."""

from __future__ import annotations


class JournalError(Exception):
    """Base of all errors of this package."""


class JournalLocked(JournalError):
    """Another process has the directory, or it cannot be had at all: missing, not a directory, not writable."""


class JournalDamaged(JournalError):
    """What is on disk is not what was written, or not ours. Nothing was changed."""


class JournalFull(JournalError):
    """There is no room on the disk. Nothing was written, and it may be tried again with more room."""


class JournalFailed(JournalError):
    """A write or an fsync failed. Final: nothing of that batch may be acknowledged, and nothing is tried again."""
