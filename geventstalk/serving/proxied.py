"""PROXY protocol, version 2: a proxy in front of the server says whose connection it passes on.

This module must not know sessions. The header of a proxy is in front of all else, also of TLS; between nodes it is
behind TLS. Its specification is section 2.2 of HAProxy's proxy-protocol.txt.
Invariant: no byte behind the header is read, and only listed addresses are believed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
_TLV: Final = Struct("!BH")
_OF_NODES: Final = 0xE0
"""The type of what nodes tell each other: the first one that is for private use (section 2.2.7)."""
_OF_NODES_MAX: Final = (1 << 16) - 256


class NoHeader(OSError):
    """The received bytes are no header of a proxy that is listed."""


def client_of(sock: Socket, proxies: tuple[Network, ...]) -> str:
    """Reads the header of a new connection. Returns the client's address, "" where the proxy itself is the client.

    Waits in the greenlet of the connection. Raises OSError, NoHeader among them.
    """
    host = ip_address(sock.getpeername()[0].partition("%")[0])
    mapped = getattr(host, "ipv4_mapped", None)
    if not any((mapped or host) in network for network in proxies):
        raise NoHeader("it is none of the proxies of this listener")
    return _header(partial(_read, sock, ends_s=monotonic() + HEADER_S), _REST_BYTES_MAX)[0]


def header_of(peer: str, more: bytes) -> bytes:
    """Returns the header with which a node passes a client on. Raises OSError when there is too much to tell."""
    if len(more) > _OF_NODES_MAX:
        raise NoHeader(f"{len(more)} bytes of its client are too many for a header")
    family, addresses = 0, b""
    host, _, port = peer.rpartition(":")
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:  # a process of the other node's host
        pass
    else:
        family = 0x21 if address.version == 6 else 0x11
        addresses = _ADDRESSES[family][0].pack(address.packed, bytes(len(address.packed)), int(port), 0)
    rest = addresses + _TLV.pack(_OF_NODES, len(more)) + more
    return _HEAD.pack(_SIGNATURE, _PROXY, family, len(rest)) + rest


def header_of_node(read: Callable[[int], bytes]) -> tuple[str, bytes]:
    """Reads such a header. Returns the client's address, "" where it has none, and what else the node tells.

    `read(size)` returns exactly `size` bytes. Raises NoHeader, and what `read` raises.
    """
    peer, rest = _header(read, 1 << 16)
    if len(rest) < _TLV.size or _TLV.unpack_from(rest) != (_OF_NODES, len(rest) - _TLV.size):
        raise NoHeader("it does not tell whose client it passes on")
    return peer, rest[_TLV.size :]


def _header(read: Callable[[int], bytes], most: int) -> tuple[str, bytes]:
    """Returns the client's address, and what stands behind the addresses. Raises NoHeader."""
    signature, command, family, size = _HEAD.unpack(read(_HEAD.size))
    if signature != _SIGNATURE or command not in (_LOCAL, _PROXY) or size > most:
        raise NoHeader("it sends no header of version 2")
    rest = read(size)
    known = _ADDRESSES.get(family)
    if command == _LOCAL or known is None:
        return "", rest
    layout, kind = known
    if size < layout.size:
        raise NoHeader("its header is too short")
    source, _, port, _ = layout.unpack_from(rest)
    address = kind(source)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}", rest[layout.size :]


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
