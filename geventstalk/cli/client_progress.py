"""Progress of long work: a bar on the terminal's stderr, or a count where the end is unknown. Quiet without a
terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

_SHOWN_AFTER_S: Final = 0.5
"""Work that ends within this time shows no progress."""
_COUNT_EVERY_S: Final = 0.1


class Progress:
    """The progress of some work. `total` is 0 where the end is unknown."""

    def __init__(self, label: str, total: int) -> None:
        self.total: Final = total
        self._label: Final = label
        self._shows: Final = sys.stderr is not None and sys.stderr.isatty()
        self._next = time.monotonic() + _SHOWN_AFTER_S
        self._counted = False
        self._bar: ProgressBar[int] | None = None
        self._at = 0

    def reach(self, at: int) -> None:
        """Sets how much is done."""
        step, self._at = at - self._at, at
        if self._bar is not None:
            self._bar.update(step)
        elif self._shows and time.monotonic() >= self._next:
            if self.total:
                self._bar = click.progressbar(length=self.total, label=self._label, width=0, file=sys.stderr)
                self._bar.__enter__()
                self._bar.update(at)
            else:
                self._next = time.monotonic() + _COUNT_EVERY_S
                self._counted = True
                click.echo(f"\r{self._label}: {at:,}", nl=False, err=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None
        elif self._counted:
            click.echo(err=True)


@contextmanager
def progress(label: str, total: int) -> Iterator[Progress]:
    """Shows the progress until the work ends, also with an exception."""
    made = Progress(label, total)
    try:
        yield made
    finally:
        made.close()
