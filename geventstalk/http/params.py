"""Reads the parameters and the JSON of a request, as the API's document allows them.

This module must not know the meaning of the values. A faulty value is a problem that names its parameter: nothing is
guessed, and no unknown name is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final

import falcon

_READ_BYTES: Final = 1 << 16
U32_MAX: Final = (1 << 32) - 1
TUBE_NAME: Final = re.compile(r"[A-Za-z0-9+/;.$_()][A-Za-z0-9+/;.$_()-]{0,199}")


def wrong(detail: str) -> falcon.HTTPError:
    """Returns the problem of a request that is not understood."""
    return falcon.HTTPBadRequest(description=detail)


class Parameters:
    """The parameters behind the `?`. Read each known one, then call end()."""

    def __init__(self, req: falcon.Request) -> None:
        self._values: dict[str, Any] = dict(req.params)

    def text(self, name: str, default: str = "", most: int = 200) -> str:
        value = self._values.pop(name, default)
        if not isinstance(value, str):
            raise wrong(f"{name} is there twice")
        if len(value) > most:
            raise wrong(f"{name} has more than {most} characters")
        return value

    def optional(self, name: str, most: int = 200) -> str | None:
        """Returns the text, or None without the parameter."""
        return self.text(name, most=most) if name in self._values else None

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        text = self.text(name, str(default))
        if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise wrong(f"{name} is not a number from {least} to {most}")
        return int(text)

    def boolean(self, name: str) -> bool:
        text = self.text(name, "false")
        if text not in ("true", "false"):
            raise wrong(f"{name} is neither true nor false")
        return text == "true"

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        text = self.text(name, default)
        if text not in choices:
            raise wrong(f"{name} is none of {', '.join(choices)}")
        return text

    def choices(self, name: str, choices: Collection[str]) -> frozenset[str]:
        """Returns several words with commas between them; there are no more of them than choices."""
        words = [word for word in self.text(name).split(",") if word]
        if len(words) > len(choices) or not set(choices).issuperset(words):
            raise wrong(f"{name} holds something else than {', '.join(choices)}")
        return frozenset(words)

    def tube(self, name: str) -> bytes | None:
        """Returns the name of a tube, or None without the parameter."""
        text = self.optional(name)
        return None if text is None else tube_name(text)

    def end(self) -> None:
        """Refuses unknown parameters: a misspelt word must not be ignored."""
        if self._values:
            raise wrong(f"there is no parameter {next(iter(self._values))}")


def tube_name(text: str) -> bytes:
    """Returns the name of a tube as the engine has it."""
    if not TUBE_NAME.fullmatch(text):
        raise wrong("this cannot be the name of a tube")
    return text.encode("ascii")


class Fields:
    """The JSON object in a request's body. Read each known field, then call end()."""

    def __init__(self, req: falcon.Request) -> None:
        kind = (req.content_type or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise falcon.HTTPUnsupportedMediaType(description="The body has to be application/json.")
        try:
            value = json.loads(_read(req), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise wrong("the body is not JSON") from None
        if not isinstance(value, dict):
            raise wrong("the body is no JSON object")
        self._values: dict[str, Any] = value

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str | None = None, most: int | None = None) -> str:
        value = self._values.pop(name, default)
        if not isinstance(value, str):
            raise wrong(f"{name} is missing" if value is None else f"{name} is no text")
        if most is not None and len(value) > most:
            raise wrong(f"{name} has more than {most} characters")
        return value

    def integer(self, name: str, default: int | None = None, least: int = 0, most: int = U32_MAX) -> int:
        value = self._values.pop(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON knows only one kind of number
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise wrong(f"{name} is not a whole number from {least} to {most}")
        return value

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._values.pop(name, default)
        if not isinstance(value, bool):
            raise wrong(f"{name} is neither true nor false")
        return value

    def choice(self, name: str, choices: Collection[str]) -> str:
        text = self.text(name)
        if text not in choices:
            raise wrong(f"{name} is none of {', '.join(choices)}")
        return text

    def tube(self, name: str) -> bytes:
        return tube_name(self.text(name))

    def rest(self) -> dict[str, Any]:
        """Returns all fields that are not read yet, whatever they are."""
        found, self._values = self._values, {}
        return found

    def end(self) -> None:
        """Refuses unknown fields."""
        if self._values:
            raise wrong(f"there is no field {next(iter(self._values))[:100]}")


def _read(req: falcon.Request) -> bytes:
    """Returns the body, which is within its limit."""
    # Not falcon's bounded stream: that takes a body in chunks for an empty one.
    return b"".join(iter(lambda: req.stream.read(_READ_BYTES), b""))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
