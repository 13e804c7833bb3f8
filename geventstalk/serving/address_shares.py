"""Bounds what each address takes, so that no host has all connections of the server, or its memory by half-sent bodies.

This module must not know sockets. Connections of this host are not counted: proxies stand there, and a program here can
do more harm in other ways. An IPv6 network of 64 bits counts as one address, because a host may have all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from time import monotonic
from typing import Final

from geventstalk.wire.commands import UploadShare

_TELL_EVERY_S: Final = 60.0


class _Host(UploadShare):
    """Counts the connections of an address, and the bytes of its half-sent bodies."""

    def __init__(self, shares: AddressShares, host: str) -> None:
        self._shares = shares
        self._host = host
        self.connections = 0
        self._bytes = 0

    def takes(self, before: int, more: int) -> bool:
        """One body alone may be as large as jobs may be."""
        if self._bytes + more > self._shares.uploads_most and self._bytes > before:
            self._shares.refuses_upload(self._host, self._bytes)
            return False
        self._bytes += more
        return True

    def gives_back(self, size: int) -> None:
        self._bytes -= size


class AddressShares:
    """Call enter() for each new connection, and leave() at its end."""

    def __init__(self, connections: Callable[[], int], uploads_most: int, log: logging.Logger) -> None:
        """`connections` returns how many there may be from all addresses together. `uploads_most` is in bytes."""
        self._connections = connections
        self._log = log
        self._told_s = -_TELL_EVERY_S
        self._hosts: dict[str, _Host] = {}
        self.uploads_most = uploads_most
        self.refused = 0
        self.refused_uploads = 0

    @property
    def most(self) -> int:
        """Returns how many connections an address may have: three quarters of all."""
        return max(1, self._connections() * 3 // 4)

    def enter(self, host: str) -> bool:
        """Counts a connection of a host. Returns whether it may be served, and logs seldom that it may not."""
        name = network_of(host)
        if not name:
            return True
        found = self._hosts.get(name)
        if found is None:
            found = self._hosts[name] = _Host(self, host)
        found.connections += 1
        if found.connections <= self.most:
            return True
        self.refused += 1
        self._tell(
            "closed a connection of %s, which has %d: three quarters of all that there may be; "
            "for a minute no other one is told of",
            *(host, found.connections - 1),
        )
        return False

    def leave(self, host: str) -> None:
        """A connection has ended."""
        name = network_of(host)
        if name:
            found = self._hosts[name]
            found.connections -= 1
            if not found.connections:
                del self._hosts[name]

    def of(self, host: str) -> UploadShare | None:
        """Returns the share that bounds the uploads of a host with a connection; None for this host."""
        return self._hosts.get(network_of(host))

    def refuses_upload(self, host: str, size: int) -> None:
        """Counts and logs a put that is refused."""
        self.refused_uploads += 1
        self._tell(
            "refused a put of %s, which has sent %d bytes of bodies that are not complete; "
            "for a minute no other one is told of",
            *(host, size),
        )

    def _tell(self, text: str, *values: object) -> None:
        if monotonic() >= self._told_s + _TELL_EVERY_S:
            self._told_s = monotonic()
            self._log.warning(text, *values)


def network_of(host: str) -> str:
    """Returns the key of the hosts that share with this one; "" for this host, and for a text that is no address."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return "" if address.is_loopback else address.packed[:8].hex()
        address = address.ipv4_mapped
    return "" if address.is_loopback else str(address)
