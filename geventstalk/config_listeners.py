"""The key `listeners` of the settings' file: addresses where clients are served on terms of their own.

This module must not know options, files or sockets. A parser raises ValueError with a text for the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final, NamedTuple

from geventstalk import config_values as values

Network = IPv4Network | IPv6Network


class Tls(NamedTuple):
    """The paths of a certificate, of its key, and of the authorities of clients.

    With authorities a client needs a certificate, unless it is `optional`: the client can show something else.
    """

    certificate: str
    key: str
    client_ca: str | None = None
    optional: bool = False

    @property
    def files(self) -> dict[str, str]:
        """Returns the paths by their keys."""
        found = {"certificate": self.certificate, "key": self.key}
        return found if self.client_ca is None else found | {"client_ca": self.client_ca}


CERTIFICATE: Final = "certificate"
UNIX_USER: Final = "unix_user"
ADDRESS: Final = "address"
TOKEN: Final = "token"
IDENTITIES: Final = (CERTIFICATE, UNIX_USER, ADDRESS, TOKEN)
"""The ways in which a client proves its user. The first proof that a connection shows counts."""
_UNIX: Final = "unix:"
_ACCOUNT: Final = re.compile(r"[^\s:]+")


class Listener(NamedTuple):
    """One address. `identity` is empty where every client may do everything. Only `proxy` connects, if given.

    A connection whose certificate has one of the names `nodes` is that of a node of the cluster.

    `mode`, `owner` and `group` are those of a unix socket; without them, those of all unix sockets hold.
    """

    address: str
    tls: Tls | None = None
    identity: tuple[str, ...] = ()
    mode: int | None = None
    owner: str | None = None
    group: str | None = None
    proxy: tuple[Network, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Returns whether the first byte of a connection belongs to its first command, and all clients are the same."""
        return self.tls is None and not self.identity and not self.proxy

    @property
    def terms(self) -> str:
        """Returns for whom and how clients are served, for people."""
        terms = ["with TLS"] if self.tls else []
        terms += ["behind a proxy"] if self.proxy else []
        terms += ["for nodes"] if self.nodes else []
        return ", ".join(terms + ([f"for users by {', '.join(self.identity)}"] if self.identity else []))


def listener(value: object) -> Listener:
    """Parses one entry of the list."""
    parsers: dict[str, Callable[[object], Any]] = {
        "address": listen_address,
        "tls": values.optional(_tls),
        "identity": values.listed(_identity),
        "mode": values.socket_mode,
        "owner": _account,
        "group": _account,
        "proxy": values.listed(_network),
        "nodes": values.listed(values.text("name of a node")),
    }
    found = values.mapping(value, "a listener", parsers)
    values.require(found, "a listener", "address")
    made = Listener(**found)
    _require_possible(made)
    optional = CERTIFICATE in made.identity and set(made.identity) != {CERTIFICATE}
    return made if made.tls is None else made._replace(tls=made.tls._replace(optional=optional))


def _account(value: object) -> str:
    name = values.text("user or group")(value)
    if not _ACCOUNT.fullmatch(name):
        raise ValueError(f"{values.shown(value)} is no name of a user or group")
    return name


def _network(value: object) -> Network:
    try:
        return ip_network(values.text("address")(value))
    except ValueError as error:
        raise ValueError(f"proxy {values.shown(value)} is no network such as 10.1.0.0/16: {error}") from None


def _identity(value: object) -> str:
    if value not in IDENTITIES:
        raise ValueError(f"an identity is {', '.join(IDENTITIES)}, and not {values.shown(value)}")
    return str(value)


def _require_possible(made: Listener) -> None:
    """Raises ValueError for an identity that no connection of the listener can show, and a mode of no file."""
    unix = made.address.startswith(_UNIX)
    if not unix and (made.mode, made.owner, made.group) != (None, None, None):
        raise ValueError(f"mode, owner and group are for a unix socket, and not for {made.address}")
    if unix and made.proxy:
        raise ValueError("proxy is not for a unix socket")
    if CERTIFICATE in made.identity and (made.tls is None or made.tls.client_ca is None):
        raise ValueError(f"the identity {CERTIFICATE} is for a listener with tls and client_ca")
    if made.nodes and (made.tls is None or made.tls.client_ca is None):
        raise ValueError("nodes is for a listener with tls and client_ca")
    if made.nodes and made.proxy:
        raise ValueError("nodes connect to each other, and not through a proxy")
    if UNIX_USER in made.identity and not unix:
        raise ValueError(f"the identity {UNIX_USER} is for a unix socket")
    if ADDRESS in made.identity and unix:
        raise ValueError(f"the identity {ADDRESS} is not for a unix socket")
    if TOKEN in made.identity and made.tls is None and not unix:
        raise ValueError(f"the identity {TOKEN} is for a listener with tls, or a unix socket: others would read it")


def listen_address(value: object) -> str:
    """Parses `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`; a port alone is one of 127.0.0.1."""
    return values.endpoint(value, "address")


def _tls(value: object) -> Tls:
    file = values.text("file")
    found = values.mapping(value, "tls", {"certificate": file, "key": file, "client_ca": values.optional(file)})
    values.require(found, "tls", "certificate", "key")
    return Tls(**found)
