"""The shapes of a server: bodies in memory, bodies on disk, clients behind front-end processes.

Run as a program, this is a server whose limits may be smaller than any option allows: `bound` has a `--max-memory` of
any size. `forgetful` has one in effect that is 0: a body leaves memory as soon as its segment is sealed, however small
it is, and no put is refused; segments are as small as `-s` says, which may be a page. That one is not for the compiled
build, whose constants and classes cannot be replaced.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.process import GEVENTSTALK

BOUND = [sys.executable, "-m", "tests.support.shapes", "bound"]
_FORGETFUL = [sys.executable, "-m", "tests.support.shapes", "forgetful", "--max-memory", "1"]
_PAGE = ("-s", "8192", "-n")
"""A segment takes a commit or two. Compaction would never come to an end, since such a segment is always too large."""
_PAGES = ("-s", "16384")


class Shape(NamedTuple):
    """A way to start a server: the command, and its flags."""

    command: list[str]
    flags: tuple[str, ...] = ()
    disk: bool = False  # it needs a journal

    def started(self, journal: Path) -> tuple[list[str], list[str]]:
        """The command, and its flags with a journal there if it needs one."""
        return self.command, [*self.flags, *(["-b", str(journal)] if self.disk else [])]


MEMORY = Shape(GEVENTSTALK)
FRONTS = Shape(GEVENTSTALK, ("--io-processes", "2"))
THREE_FRONTS = Shape(GEVENTSTALK, ("--io-processes", "3"))
FRONT = Shape(GEVENTSTALK, ("--io-processes", "1"))
"""What two clients do has an order."""
DISK = Shape(_FORGETFUL, _PAGES, True)
DISK_AT_ONCE = Shape(_FORGETFUL, _PAGE, True)
"""For conversations of a few commands."""


def forget() -> None:
    """From now on servers forget bodies."""
    import geventstalk.durable.store
    import geventstalk.serving.server
    import journal.sqlite.writer
    from journal.sqlite.sizing import Sizing
    from tests.support.forgetful import Forgetful

    vars(geventstalk.durable.store).update(PAYLOAD_MIN=1)
    vars(journal.sqlite.writer).update(GROUPED_MAX=0)
    Sizing.fit = lambda self, capacity: None  # type: ignore[method-assign]  # what makes small segments larger
    vars(geventstalk.serving.server).update(Bodies=Forgetful)


if __name__ == "__main__":
    from geventstalk import config, config_values
    from geventstalk.cli.main import main

    config_values.MAX_MEMORY_BYTES_MIN = config.SEGMENT_BYTES_MIN = 1
    if sys.argv.pop(1) == "forgetful":
        forget()
    sys.exit(main())
