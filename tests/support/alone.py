"""Runs a piece of a test in a process in which nothing else runs.

When memory is made to fail, it fails for every thread. pytest-xdist's workers have threads of their own. Such a thread
then ends, and its worker with it. A fork has the one thread that called it.
"""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from collections.abc import Callable


def alone(work: Callable[[], None]) -> None:
    """Runs `work` in a fork of this process. Raises AssertionError with its traceback when it fails there."""
    with tempfile.TemporaryFile("w+") as said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: there are other threads. That is why.
            pid = os.fork()
        if not pid:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc(file=said)
                said.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        assert not status, said.read() or f"the fork ended with {status}"
