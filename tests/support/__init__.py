"""Helpers that several tests use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def for_change(values: Iterable[Any], *places: int) -> list[Any]:
    """Returns the parameters of a test: the values at these places for every change, the others marked long."""
    values = list(values)
    kept = {place % len(values) for place in places}
    made = []
    for place, value in enumerate(values):
        parts = value if isinstance(value, type(pytest.param())) else pytest.param(value)
        marks = parts.marks if place in kept else (*parts.marks, pytest.mark.long)
        made.append(pytest.param(*parts.values, marks=marks, id=parts.id))
    return made
