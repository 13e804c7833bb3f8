"""Traces the calls of a block, and only those."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def frames_traced(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Has Python call `trace` for each frame of this thread that begins in the block.

    Collects no garbage meanwhile: a collection ends the suspended generators of earlier tests, and their frames would
    be traced as well.
    """
    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
