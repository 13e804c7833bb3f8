"""The urgency with which a tube needs a person, and why: one answer for the API, the console and `geventstalk top`.

This module must not know where the numbers come from. The score is a level, as of sound: three more are twice the
trouble. It is whole, so that figures that only tremble change no order; equal scores are ordered by name.
"""

from __future__ import annotations

from math import log10
from typing import Final, NamedTuple

GROWS: Final = 0.1
"""A tube grows when this many more jobs a second come in than leave: six a minute. The console says the same."""
_BURIES: Final = 0.005
"""Buried jobs increase when this many are buried a second: one within the last minute, or one each three minutes."""
_BRIEF_S: Final = 10
"""A job that waits less is no trouble at all."""
_SOON_S: Final = 60
"""A job may wait this long where no connection watches, or where jobs increase, ..."""
_LONG_S: Final = 600
"""... and this long anywhere."""
_ALONE: Final = 10
"""Without a consumer a wait counts this many times: it ends only when a person acts."""
_AHEAD_S: Final = 3600
"""A growing tube counts as the jobs that come within a minute, each waiting a minute; buried jobs wait this long."""


class Trouble(NamedTuple):
    """The greater the score, the worse. `why` is empty where no person is needed."""

    score: int
    why: str


CALM: Final = Trouble(0, "")


def trouble(
    *, ready: int, waits_s: float, consumers: int, growth: float, buried: int, bury_rate: float, paused: bool
) -> Trouble:
    """Weighs jobs that wait by how long the oldest of them does, growth, and jobs that are buried.

    `waits_s` is the age of the oldest ready job. `growth` and `bury_rate` are jobs a second.
    """
    waiting = ready * max(0.0, waits_s - _BRIEF_S) * (1 if consumers else _ALONE)
    growing = growth * _AHEAD_S if ready and growth > GROWS else 0.0
    lost = buried * _SOON_S + bury_rate * _SOON_S * _AHEAD_S if buried else 0.0
    whys = []
    if ready and waits_s >= (_LONG_S if consumers else _SOON_S):
        how = ("paused" if paused else f"for {_span(waits_s)}") if consumers else "and no consumer"
        whys.append((waiting, f"{ready:,} waiting{',' if how == 'paused' else ''} {how}"))
    if growing and waits_s >= _SOON_S:
        whys.append((growing, f"growing by {growth:,.{growth < 10:d}f} a second"))
    if buried:
        whys.append((lost, f"{buried:,} buried{', becoming more' if bury_rate > _BURIES else ''}"))
    whys.sort(key=lambda each: -each[0])
    return Trouble(round(10 * log10(1 + waiting + growing + lost)), ", ".join([why for _, why in whys]))


def _span(seconds: float) -> str:
    for unit, word in ((86400, "d"), (3600, "h")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {word}"
    return f"{seconds / 60:.0f} min"
