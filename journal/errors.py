"""The seven kinds of failures of a journal. Each message is one line for the operator."""

from __future__ import annotations

from typing import NoReturn


class JournalError(Exception):
    """Base of all errors of this package."""


class JournalLocked(JournalError):
    """Another process has the directory, or it cannot be had at all: missing, not a directory, not writable."""


class JournalDamaged(JournalError):
    """The data on disk is not as it was written, or is no journal's. Nothing was changed."""


class JournalNewer(JournalError):
    """A newer version of this program wrote it. Nothing was changed; it is no damage, and nothing may treat it so."""


class JournalFull(JournalError):
    """There is no room on the disk. Nothing was written, and it may be tried again with more room."""


class JournalUnreachable(JournalError):
    """The database does not answer. The request may have been executed or not, and may be repeated."""


class JournalForked(JournalError):
    """The database has lost records that this process has read or written. The process must begin anew."""


class JournalFailed(JournalError):
    """A write or an fsync failed. Final: nothing of that batch may be acknowledged, and nothing is tried again."""

    unexpected: BaseException | None = None
    """The exception with its traceback, where it is a fault of the program and not of the disk."""


def failure_of(error: BaseException) -> JournalFailed:
    """Returns the failure that ends a journal: the exception itself, or a new one whose cause is the exception."""
    if isinstance(error, JournalFailed):
        return error
    if isinstance(error, JournalError):
        failure = JournalFailed(str(error))
    elif isinstance(error, OSError):
        place = "" if error.filename is None else f": {error.filename}"
        failure = JournalFailed(f"journal: {error.strerror or error}{place}")
    else:
        text = " ".join(str(error).split())
        failure = JournalFailed(f"journal: unexpected {type(error).__name__}" + (f": {text}" if text else ""))
        failure.unexpected = error
    failure.__cause__ = error
    return failure


def raise_failure(error: BaseException) -> NoReturn:
    """Raises failure_of() an exception; what ends a program, as KeyboardInterrupt does, is raised as it is."""
    failure = failure_of(error)
    if failure is error or not isinstance(error, Exception):
        raise error
    raise failure from error
