"""Ends a command before its work is done: by a failure with an exit code, or by a signal.

A signal raises an exception, at a moment that does no harm, and no handler swallows it. This module must not know any
command. Invariant: a signal does not interrupt a block of `whole()`; a second signal does.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Failed(Exception):
    """The command cannot do its work. The text is one line for the user."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Stopped(BaseException):
    """A signal asked for the end; the command removes its unfinished work on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Held:
    """The number of blocks that hold signals back, and the signal that waits."""

    depth = 0
    number = 0


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Within the block, a signal to stop ends the command with its clean-up. SIGUSR1 and SIGUSR2 are for servers."""
    _Held.depth = _Held.number = 0
    before = {}
    for number in _NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> None:
    if _Held.depth and not _Held.number:
        _Held.number = number
        return
    _Held.number = 0
    raise Stopped(number)


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Within the block, a signal waits for its end. A second signal does not wait."""
    _Held.depth += 1
    try:
        yield
    finally:
        _Held.depth -= 1
        if not _Held.depth and _Held.number:
            number, _Held.number = _Held.number, 0
            raise Stopped(number)
