"""Settings that an operator makes at run time, beside those of the file: policies and schedules.

This module must not know where they are kept, options or clients. What is made at run time stands in front of what the
file says, and in place of an entry of the file with the same name. Invariant: `text()` and load() are inverse.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, Literal

from geventstalk.config_policies import policies
from geventstalk.config_schedules import schedules
from geventstalk.tags import SETTINGS_BYTES_MAX

Kind = Literal["policies", "schedules"]
Entries = dict[str, dict[str, Any]]

_PARSERS: Final[dict[str, Callable[[object], tuple[Any, ...]]]] = {"policies": policies, "schedules": schedules}


class TooLarge(ValueError):
    """There are more settings than can be kept."""


class RuntimeSettings:
    """The settings that are in use. `of_file` has what the file says of each kind."""

    def __init__(self) -> None:
        self._entries: Entries = {kind: {} for kind in _PARSERS}
        self._parsed: dict[str, dict[str, Any]] = {kind: {} for kind in _PARSERS}
        self.of_file: dict[str, tuple[Any, ...]] = dict.fromkeys(_PARSERS, ())

    def entry(self, kind: Kind, name: str) -> dict[str, Any] | None:
        """Returns the entry of this name as it was given at run time; None when there is none."""
        return self._entries[kind].get(name)

    def all(self, kind: Kind) -> tuple[Any, ...]:
        """Returns everything of a kind that counts, in its order."""
        entries = self._entries[kind]
        return (*self._parsed[kind].values(), *[each for each in self.of_file[kind] if each[0] not in entries])

    def text_with(self, kind: Kind, name: str, entry: object) -> bytes:
        """Returns text() with another entry, or without the entry when it is None. Raises ValueError or KeyError."""
        entries = {each: dict(found) for each, found in self._entries.items()}
        if entry is None:
            del entries[kind][name]
        else:
            _PARSERS[kind]({name: entry})
            entries[kind][name] = entry
        text = _text(entries)
        if len(text) > SETTINGS_BYTES_MAX:
            raise TooLarge(f"settings of run time have at most {SETTINGS_BYTES_MAX} bytes: the file takes more")
        return text

    def text(self) -> bytes:
        """Returns everything that was made at run time; b"" when there is nothing."""
        return _text(self._entries)

    def load(self, text: bytes) -> list[str]:
        """Takes the result of text(), of this or another version. Returns the reasons why some entries do not count."""
        refused: list[str] = []
        found: Any = json.loads(text) if text else {}
        for kind, parse in _PARSERS.items():
            self._entries[kind] = found.get(kind, {})
            self._parsed[kind] = {}
            for name, entry in self._entries[kind].items():
                try:
                    self._parsed[kind][name] = parse({name: entry})[0]
                except ValueError as error:
                    refused.append(str(error))
        return refused


def _text(entries: Entries) -> bytes:
    if not any(entries.values()):
        return b""
    return json.dumps(entries, separators=(",", ":")).encode()
