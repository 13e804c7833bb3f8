"""A network of its own for each node, so that a node can be cut off: network namespaces, for which one must be root.

Each node has two interfaces, one to its clients and the other nodes, and one to the database. Each is a veth whose
other end is a port of a bridge. A cut takes the port off its bridge: packets vanish, and no end is told, as with a
switch that dies. PostgreSQL and the clients are outside and reach the bridges.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from contextlib import suppress

CLIENTS, DATABASE = "clients", "database"
NETWORKS = {CLIENTS: "198.18", DATABASE: "198.19"}
"""Addresses that RFC 2544 sets aside for tests of networks."""


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def problem() -> str:
    """Why there can be no such network; "" when there can be."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        Network("try").close()
    except OSError as error:
        return f"no network namespaces here: {error}"
    return ""


class Place:
    """One node's namespace. `address` is where clients and other nodes find it."""

    def __init__(self, network: Network, number: int) -> None:
        self.namespace = f"{network.name}-{number}"
        self.address = network.address(CLIENTS, 10 + number)
        self._ports = {CLIENTS: f"{network.name}c{number}", DATABASE: f"{network.name}d{number}"}
        self._network = network
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        for which, port in self._ports.items():
            inside = f"{which[:8]}0"
            _ip("link", "add", port, "type", "veth", "peer", "name", inside, "netns", self.namespace)
            _ip("-n", self.namespace, "addr", "add", f"{network.address(which, 10 + number)}/24", "dev", inside)
            _ip("-n", self.namespace, "link", "set", inside, "up")
            _ip("link", "set", port, "master", network.bridges[which], "up")

    @property
    def prefix(self) -> list[str]:
        """In front of a command, so that it runs here. The process is the command's own."""
        return ["ip", "netns", "exec", self.namespace]

    def cut(self, *which: str) -> None:
        """From now on packets of these networks vanish, in both directions."""
        for each in which:
            _ip("link", "set", self._ports[each], "nomaster")

    def heal(self) -> None:
        for which, port in self._ports.items():
            _ip("link", "set", port, "master", self._network.bridges[which])

    def close(self) -> None:
        for port in self._ports.values():
            with suppress(OSError):
                _ip("link", "delete", port)
        with suppress(OSError):
            _ip("netns", "delete", self.namespace)


class Network:
    """The two bridges. `name` tells networks of one process apart; their maker closes them."""

    def __init__(self, name: str) -> None:
        self.name = f"gv{os.getpid() % 100_000}{name[:3]}"
        self.bridges: dict[str, str] = {}
        self._places: list[Place] = []
        taken = {
            address["local"]
            for link in json.loads(_ip("-j", "address", "show"))
            for address in link["addr_info"]
            if "local" in address
        }
        start = os.getpid() + sum(name.encode())
        free = (third % 250 for third in range(start, start + 250))
        self._third = next(
            third for third in free if not any(address.startswith(f"198.18.{third}.") for address in taken)
        )
        try:
            for at, which in enumerate(NETWORKS):
                bridge = f"{self.name}{which[0]}"
                _ip("link", "add", bridge, "type", "bridge")
                self.bridges[which] = bridge
                # Otherwise it takes the least address of its ports: when one comes back, all others have to ask anew.
                _ip("link", "set", bridge, "address", f"02:00:00:00:{self._third:02x}:{at:02x}")
                _ip("address", "add", f"{self.address(which, 1)}/24", "dev", bridge)
                _ip("link", "set", bridge, "up")
        except OSError:
            self.close()
            raise

    def address(self, which: str, host: int) -> str:
        return f"{NETWORKS[which]}.{self._third}.{host}"

    @property
    def database(self) -> str:
        """The address under which nodes reach what is outside, over the network to the database."""
        return self.address(DATABASE, 1)

    def place(self) -> Place:
        place = Place(self, len(self._places))
        self._places.append(place)
        return place

    def close(self) -> None:
        for place in self._places:
            place.close()
        for bridge in self.bridges.values():
            with suppress(OSError):
                _ip("link", "delete", bridge)
