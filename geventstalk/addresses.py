"""Names of the two ends of a socket, for people and in settings.

This module must not know who listens nor who is served.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

UNIX_PREFIX: Final = "unix:"


def address_of(listener: socket.socket) -> str:
    """The address of the socket: `127.0.0.1:11300`, `[::1]:11300` or a path."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return "@" + os.fsdecode(name[1:]) if name[:1] == b"\0" else os.fsdecode(name)
    host, port = name[:2]
    return f"[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{host}:{port}"


def full_address_of(listener: socket.socket) -> str:
    """The same in the form in which settings have it: a path begins with `unix:`."""
    return (UNIX_PREFIX if listener.family == socket.AF_UNIX else "") + address_of(listener)


def peer_of(sock: socket.socket) -> str:
    """Returns the peer of a socket: `10.0.0.7:40312`, or the process and the user at the other end of a unix socket."""
    try:
        if sock.family == socket.AF_UNIX:
            pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return f"process {pid}, user {uid}, group {gid}"
        host, port = sock.getpeername()[:2]
    except OSError:
        return "gone"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_end_of(sock: socket.socket) -> str:
    """Returns where a client of this host's came in: an address or a path."""
    try:
        return full_address_of(sock)
    except OSError:
        return "gone"


def host_of(peer: str) -> str:
    """Returns the host of an address with its port, such as `10.0.0.7:40312` or `[fd00::7]:40312`."""
    return peer.rpartition(":")[0].strip("[]")
