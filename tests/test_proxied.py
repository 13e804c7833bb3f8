"""The PROXY protocol: whose connection a proxy passes on, and proxies that do the wrong thing."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import gevent
import pytest
import yaml

from geventstalk.serving import proxied
from geventstalk.serving.proxied import NoHeader, client_of
from tests.support.pki import Authority
from tests.support.process import ServerProcess, free_port
from tests.support.web import Web
from tests.support.wire import Client
from tests.test_reload import log_of

Starter = Callable[..., ServerProcess]
SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
HERE = (ip_network("127.0.0.0/8"),)


def header(source: str, port: int = 4321, *, command: int = 0x21, more: bytes = b"") -> bytes:
    address = ip_address(source)
    other = ip_address("192.0.2.1" if address.version == 4 else "2001:db8::1")
    body = address.packed + other.packed + struct.pack("!HH", port, 11300) + more
    return SIGNATURE + struct.pack("!BBH", command, 0x11 if address.version == 4 else 0x21, len(body)) + body


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as server,
    ):
        server.setblocking(False)
        yield client, server


def told(data: bytes, *, in_pieces: bool = False, proxies: Any = HERE) -> tuple[str, bytes]:
    """The client's address, and what is left to read."""
    with connected() as (client, server):

        def send() -> None:
            for piece in [data[at : at + 1] for at in range(len(data))] if in_pieces else [data]:
                client.sendall(piece)
                gevent.sleep(0)
            client.shutdown(socket.SHUT_WR)

        sender = gevent.spawn(send)
        found = client_of(server, proxies)
        sender.join()
        return found, server.recv(100)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_the_client_is_the_one_that_the_proxy_tells(in_pieces: bool) -> None:
    rest = b"put 0 0 60 1\r\n"
    for source, wanted in (("203.0.113.7", "203.0.113.7:4321"), ("2001:db8::7", "[2001:db8::7]:4321")):
        assert told(header(source) + rest, in_pieces=in_pieces) == (wanted, rest)
        assert told(header(source, more=b"\x04\x00\x01x" * 50) + rest, in_pieces=in_pieces) == (wanted, rest)
    assert told(header("203.0.113.7", command=0x20) + rest) == ("", rest), "the proxy looks whether the server is there"
    unknown = SIGNATURE + struct.pack("!BBH", 0x21, 0, 3) + b"abc"
    assert told(unknown + rest) == ("", rest)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PROXY TCP4 203.0.113.7 192.0.2.1 4321 11300\r\n", "no header of version 2"),
        (b"put 0 0 60 1\r\nx\r\n", "no header of version 2"),
        (SIGNATURE + b"\x31\x11\x00\x0c" + bytes(12), "no header of version 2"),
        (SIGNATURE + b"\x22\x11\x00\x0c" + bytes(12), "no header of version 2"),
        (SIGNATURE + b"\x21\x11\xff\xff" + bytes(12), "no header of version 2"),
        (SIGNATURE + b"\x21\x11\x00\x0b" + bytes(11), "its header is too short"),
        (SIGNATURE + b"\x21\x21\x00\x0c" + bytes(12), "its header is too short"),
    ],
)
def test_what_is_no_header(data: bytes, words: str) -> None:
    with pytest.raises(NoHeader, match=words):
        told(data)


def test_a_proxy_that_goes_or_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionResetError):
        told(header("203.0.113.7")[:20])
    monkeypatch.setattr(proxied, "HEADER_S", 0.1)
    with connected() as (client, server), pytest.raises(NoHeader, match=r"no header within 0.1 s"):
        client.sendall(SIGNATURE)
        client_of(server, HERE)


def test_only_listed_addresses_are_proxies() -> None:
    with pytest.raises(NoHeader, match="none of the proxies"):
        told(header("203.0.113.7"), proxies=(ip_network("10.0.0.0/8"),))


@pytest.mark.parametrize("tls", [False, True])
def test_users_behind_a_proxy(start_server: Starter, tmp_path: Path, tls: bool) -> None:
    port, web = free_port(), Web(free_port(), "t" * 32)
    entry: dict[str, Any] = {"address": f"127.0.0.1:{port}", "identity": "address", "proxy": "127.0.0.0/8"}
    authority = Authority(tmp_path, "authority")
    pair = authority.certify("server")
    if tls:
        entry["tls"] = {"certificate": str(pair.certificate), "key": str(pair.key)}
    user = {"address": "203.0.113.0/24", "rights": {"*": "all"}}
    settings = {"listeners": [entry], "access": str(tmp_path / "access.yaml"), "http_tokens": str(tmp_path / "tokens")}
    for name, text in (
        ("access.yaml", yaml.safe_dump({"users": {"shop": user}})),
        ("tokens", f"ops admin {web.token}\n"),
        ("s.yaml", yaml.safe_dump(settings)),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    server = start_server("--config", str(tmp_path / "s.yaml"), "--http", str(web.port))

    def come(first: bytes) -> Client:
        sock = socket.create_connection(("127.0.0.1", port), timeout=20)
        sock.sendall(first)
        return Client(authority.context().wrap_socket(sock, server_hostname="127.0.0.1") if tls else sock)

    with come(header("203.0.113.7")) as client:
        assert client.put(b"x") == 1
        assert [each["address"] for each in web.get("/connections")["connections"]] == ["203.0.113.7:4321"]
    with come(header("198.51.100.7")) as client:
        assert client.ask(b"peek 1") == b"UNAUTHORIZED\r\n"
    with come(header("203.0.113.7", command=0x20)) as client:
        assert client.ask(b"peek 1") == b"UNAUTHORIZED\r\n", "the proxy itself is no user"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        begun_s = time.monotonic()
        sock.sendall(b"put 0 0 60 1\r\nx\r\n")
        assert Client(sock).at_end() and time.monotonic() - begun_s < 5
    assert "it sends no header of version 2" in log_of(server)
