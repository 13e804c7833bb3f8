"""The key `listeners` of the settings' file: addresses where clients are served on terms of their own.

This module must not know options, files or sockets. A parser raises ValueError with a text for the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from geventstalk import config_values as values


class Tls(NamedTuple):
    """The paths of a certificate, of its key, and of the authorities of clients, where clients need a certificate."""

    certificate: str
    key: str
    client_ca: str | None = None


class Listener(NamedTuple):
    """One address."""

    address: str
    tls: Tls | None = None

    @property
    def is_plain(self) -> bool:
        """Returns whether the first byte of a connection belongs to its first command."""
        return self.tls is None


def listener(value: object) -> Listener:
    """Parses one entry of the list."""
    found = _mapping(value, "a listener", {"address": listen_address, "tls": values.optional(_tls)})
    _require(found, "a listener", "address")
    return Listener(**found)


def listen_address(value: object) -> str:
    """Parses `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`; a port alone is one of 127.0.0.1."""
    return values.endpoint(value, "address")


def _tls(value: object) -> Tls:
    file = values.text("file")
    found = _mapping(value, "tls", {"certificate": file, "key": file, "client_ca": values.optional(file)})
    _require(found, "tls", "certificate", "key")
    return Tls(**found)


def _mapping(value: object, noun: str, parsers: Mapping[str, Callable[[object], Any]]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{noun} is {values.shown(value)}, and has to be a mapping of {', '.join(parsers)}")
    for key in value:
        if key not in parsers:
            raise ValueError(f"{noun} has no key {values.shown(key)}, but {', '.join(parsers)}")
    return {key: parsers[key](one) for key, one in value.items()}


def _require(found: Mapping[str, Any], noun: str, *keys: str) -> None:
    for key in keys:
        if key not in found:
            raise ValueError(f"the key {key} of {noun} is missing")
