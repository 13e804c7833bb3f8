"""Long work: a bar on the terminal's stderr, quiet otherwise, and how far it came when a signal stops it."""

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
"""Work that is done sooner shows no bar."""


class Progress:
    """How far the work is. `left` says what is still to be told when a signal comes."""

    def __init__(self, label: str, total: int) -> None:
        self._label: Final = label
        self._total: Final = total
        self._began: Final = time.monotonic()
        self._bar: ProgressBar[int] | None = None
        self._at = 0

    def reach(self, at: int) -> None:
        """So much of the total is done."""
        step, self._at = at - self._at, at
        if self._bar is None:
            shown = sys.stderr is not None and sys.stderr.isatty()
            if not shown or self.took_s < _SHOWN_AFTER_S or not self._total:
                return
            self._bar = click.progressbar(length=self._total, label=self._label, width=0, file=sys.stderr)
            self._bar.__enter__()
            step = at
        self._bar.update(step)

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None


@contextmanager
def progress(label: str, total: int) -> Iterator[Progress]:
    """A bar that is gone at the end, whatever the end is."""
    made = Progress(label, total)
    try:
        yield made
    finally:
        made.close()
