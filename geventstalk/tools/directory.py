"""A directory that a tool writes to: its lock, and what is in it already."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from journal.sqlite.files import fsync_path
from journal.sqlite.lock import LOCK_NAME, DirectoryLock


@contextlib.contextmanager
def writing(directory: str) -> Iterator[None]:
    """Holds a directory's lock. A directory that was made for this goes again when it fails."""
    lock = DirectoryLock(directory)
    try:
        yield
        fsync_path(os.path.dirname(os.path.abspath(directory)))
    except BaseException:
        if lock.created:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, LOCK_NAME))
                os.rmdir(directory)
        raise
    finally:
        lock.close()
