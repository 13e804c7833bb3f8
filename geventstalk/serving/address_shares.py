"""Bounds the connections of each address, so that no host takes all connections of the server.

This module must not know sockets. Connections of this host are not counted: proxies stand there, and a program here can
do more harm in other ways. An IPv6 network of 64 bits counts as one address, because a host may have all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from time import monotonic
from typing import Final

_TELL_EVERY_S: Final = 60.0


class AddressShares:
    """Call enter() for each new connection, and leave() at its end."""

    def __init__(self, connections: Callable[[], int], log: logging.Logger) -> None:
        """`connections` returns how many there may be from all addresses together."""
        self._connections = connections
        self._log = log
        self._told_s = -_TELL_EVERY_S
        self._counts: dict[str, int] = {}
        self.refused = 0

    @property
    def most(self) -> int:
        """Returns how many connections an address may have: three quarters of all."""
        return max(1, self._connections() * 3 // 4)

    def enter(self, host: str) -> bool:
        """Counts a connection of a host. Returns whether it may be served, and logs seldom that it may not."""
        name = network_of(host)
        if not name:
            return True
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if count < self.most:
            return True
        self.refused += 1
        if monotonic() >= self._told_s + _TELL_EVERY_S:
            self._told_s = monotonic()
            self._log.warning(
                "closed a connection of %s, which has %d: three quarters of all that there may be; "
                "for a minute no other one is told of",
                *(host, count),
            )
        return False

    def leave(self, host: str) -> None:
        """A connection has ended."""
        name = network_of(host)
        if name:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]


def network_of(host: str) -> str:
    """Returns what stands for the hosts that share with this one; "" for this host, and for what is no address."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return "" if address.is_loopback else address.packed[:8].hex()
        address = address.ipv4_mapped
    return "" if address.is_loopback else str(address)
