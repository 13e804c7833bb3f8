"""Messages to a service manager: that the server is ready, what the server does, that it still runs, that it stops.

The protocol is systemd's sd_notify(3): lines in a datagram to the socket that NOTIFY_SOCKET names. This module must not
know the engine. Invariant: telling never waits and never fails; without a manager nothing happens.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

_EXTEND_US: Final = 60_000_000
"""A start may take this long behind the last sign of progress. A replay shows progress every few seconds."""


class Manager:
    """The manager that started this process, or none."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        """`address` is a path, or a name behind an `@`; empty for none. `watchdog_s` is 0 for no watchdog."""
        self.watchdog_s: Final = watchdog_s
        self._given = address
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Manager:
        """The manager that the environment names. Takes the names away: they are meant for this process alone."""
        address = environment.pop("NOTIFY_SOCKET", "")
        period_us = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "")
        watched = bool(address) and period_us.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address, int(period_us) / 1e6 if watched else 0.0)

    @property
    def is_there(self) -> bool:
        return bool(self._given)

    def give_back(self, environment: MutableMapping[str, str]) -> None:
        """Puts the names there again, for the next program of the same process."""
        if self._given:
            environment["NOTIFY_SOCKET"] = self._given
        if self.watchdog_s:
            environment["WATCHDOG_USEC"] = str(round(self.watchdog_s * 1e6))

    def replaying(self, records: int) -> None:
        """The start goes on, and may take longer than the manager allows for a start."""
        self.starting(f"Replaying the journal: {records} records so far")

    def starting(self, status: str) -> None:
        """The same in other words."""
        self._tell(f"EXTEND_TIMEOUT_USEC={_EXTEND_US}", f"STATUS={status}")

    def reloading(self, status: str, monotonic_ns: int) -> None:
        """The process begins anew; ready() follows."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns // 1000}", f"STATUS={status}")

    def ready(self, status: str) -> None:
        """Clients are served from now on."""
        self._tell("READY=1", f"STATUS={status}")

    def runs(self, status: str) -> None:
        """The server still runs; to be called at least once in `watchdog_s`."""
        self._tell("WATCHDOG=1", f"STATUS={status}")

    def stopping(self, why: str) -> None:
        """The end has begun."""
        self._tell("STOPPING=1", f"STATUS={why}")

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), self._address)
