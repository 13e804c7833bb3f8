"""Addresses of the server's port and of its API.

This module must not connect to anything. Invariant: a token never goes to another host than the one that the user
named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

UNIX = "unix:"
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}
"""The spellings of "every address of a host", and how a client on that host connects to it."""


class Address(NamedTuple):
    """A TCP address, or the path of a unix socket, which has no port. `secure` says that an API has TLS there."""

    host: str
    port: str | None
    secure: bool = False

    @property
    def is_unix(self) -> bool:
        return self.port is None

    @property
    def is_local(self) -> bool:
        """Returns whether only processes of this host can listen there."""
        return self.is_unix or self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        if self.port is None:
            return UNIX + self.host
        scheme = "https://" if self.secure else ""
        return f"{scheme}[{self.host}]:{self.port}" if ":" in self.host else f"{scheme}{self.host}:{self.port}"


def of_server(listen: Sequence[str], port: str) -> Address:
    """Returns where a client of this host reaches the server that listens there; of several addresses the first."""
    first = listen[0] if listen else "127.0.0.1"
    if first.startswith(UNIX):
        return Address(first[len(UNIX) :], None)
    return Address(_HERE.get(first, first), port)


def of_api(said: str, server: Address) -> Address | None:
    """Returns the address of the API from the server's own facts: `127.0.0.1:8080`, `https://[::]:8443,unix:/run/web`.

    Returns None when the facts name no API, or none on the host of the server's port.
    """
    for one in filter(None, said.replace(",", " ").split()):
        if one.startswith(UNIX):
            if server.is_local:
                return Address(one[len(UNIX) :], None)
            continue
        secure = one.startswith("https://")
        host, colon, port = one.removeprefix("https://").rpartition(":")
        host = host.strip("[]")
        if not colon or not port.isdecimal():
            continue
        if host in _HERE:
            return Address(_HERE[host] if server.is_unix else server.host, port, secure)
        found = Address(host, port, secure)
        if host == server.host or (found.is_local and server.is_local):
            return found
    return None
