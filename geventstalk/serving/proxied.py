"""PROXY protocol, version 2: a proxy in front of the server says whose connection it passes on.

This module must not know sessions. The header is in front of all else, also of TLS. Its specification is section 2.2 of
HAProxy's proxy-protocol.txt. Invariant: no byte behind the header is read, and only listed addresses are believed.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from socket import socket as Socket
from struct import Struct
from time import monotonic
from typing import Final

from gevent.socket import wait_read

from geventstalk.rights import Network

HEADER_S: Final = 10.0
"""A proxy without a header by then is hung up on."""
_SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
_HEAD: Final = Struct("!12sBBH")
_LOCAL: Final = 0x20  # the proxy's own connection, such as a look whether the server is there
_PROXY: Final = 0x21
_ADDRESSES: Final = {0x11: (Struct("!4s4sHH"), IPv4Address), 0x21: (Struct("!16s16sHH"), IPv6Address)}
_REST_BYTES_MAX: Final = 4096
"""The most behind the head: addresses, and what else a proxy tells, which does not matter here."""


class NoHeader(OSError):
    """What came is no header of a proxy that is listed."""


def client_of(sock: Socket, proxies: tuple[Network, ...]) -> str:
    """Reads the header of a new connection. Returns the client's address, "" where the proxy itself is the client.

    Waits in the greenlet of the connection. Raises OSError, NoHeader among them.
    """
    host = ip_address(sock.getpeername()[0].partition("%")[0])
    mapped = getattr(host, "ipv4_mapped", None)
    if not any((mapped or host) in network for network in proxies):
        raise NoHeader("it is none of the proxies of this listener")
    ends_s = monotonic() + HEADER_S
    signature, command, family, size = _HEAD.unpack(_read(sock, _HEAD.size, ends_s))
    if signature != _SIGNATURE or command not in (_LOCAL, _PROXY) or size > _REST_BYTES_MAX:
        raise NoHeader("it sends no header of version 2")
    rest = _read(sock, size, ends_s)
    known = _ADDRESSES.get(family)
    if command == _LOCAL or known is None:
        return ""
    layout, kind = known
    if size < layout.size:
        raise NoHeader("its header is too short")
    source, _, port, _ = layout.unpack_from(rest)
    address = kind(source)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _read(sock: Socket, size: int, ends_s: float) -> bytes:
    data = b""
    while len(data) < size:
        try:
            piece = sock.recv(size - len(data))
        except BlockingIOError:
            left_s = max(ends_s - monotonic(), 0.0)
            wait_read(sock.fileno(), timeout=left_s, timeout_exc=NoHeader(f"no header within {HEADER_S:g} s"))
            continue
        if not piece:
            raise ConnectionResetError("the proxy has gone")
        data += piece
    return data
