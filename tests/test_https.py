"""HTTPS: the console and the API over TLS, by people who are slow, silent, or speak something else."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.clients.programs import missing
from tests.support.clients import until
from tests.support.pki import Authority
from tests.support.process import GEVENTSTALK, ServerProcess, free_port
from tests.test_reload import log_of

Starter = Callable[..., ServerProcess]
TOKEN = "a" * 32


class Secure:
    """A server with HTTPS, and its clients."""

    def __init__(self, start: Starter, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.authority = Authority(folder, "authority")
        self.pair = self.authority.certify("server")
        (folder / "tokens").write_text(f"ops admin {TOKEN}\n")
        (folder / "tokens").chmod(0o600)
        words = [
            "--http",
            f"127.0.0.1:{self.port}",
            "--http",
            f"unix:{folder}/web",
            "--http-tokens",
            f"{folder}/tokens",
        ]
        files = ["--http-cert", str(self.pair.certificate), "--http-key", str(self.pair.key)]
        self.server = start(*words, *files)

    @contextmanager
    def connection(self) -> Iterator[http.client.HTTPSConnection]:
        context = self.authority.context()
        with closing(http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)) as made:
            yield made

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        sent = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"} | headers
        with self.connection() as made:
            made.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), sent)
            answer = made.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def run(self, *words: str, **environment: str) -> str:
        command = [*GEVENTSTALK, *words, "-p", str(self.server.port)]
        trusted = {"SSL_CERT_FILE": str(self.authority.trusted), "GEVENTSTALK_TOKEN": TOKEN} | environment
        done = subprocess.run(
            command, env=os.environ | trusted, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr


@pytest.fixture
def secure(start_server: Starter, tmp_path: Path) -> Secure:
    if shutil.which("openssl") is None:
        missing("openssl is not installed")
    return Secure(start_server, tmp_path)


def test_the_api_over_tls(secure: Secure) -> None:
    with secure.connection() as made:  # one connection for several requests
        for number in range(1, 4):
            body = json.dumps({"tube": "mail", "body": "x" * 20_000})
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            made.request("POST", "/api/v1/jobs", body, headers)
            answer = made.getresponse()
            assert (answer.status, json.loads(answer.read())["id"]) == (201, number)
    status, _, data = secure.ask("GET", "/api/v1/export")
    assert status == 200 and data.count(b'"tube":"mail"') == 3 and len(data) > 80_000
    assert secure.ask("GET", "/api/v1/server", Authorization="Bearer no")[0] == 401
    assert 'geventstalk_tls_handshakes_total{result="done"}' in secure.ask("GET", "/metrics")[2].decode()
    assert f"HTTPS on 127.0.0.1:{secure.port}" in log_of(secure.server)


def test_the_cookie_of_a_login_is_for_tls_alone(secure: Secure) -> None:
    form = urlencode({"token": TOKEN, "next": "/"}).encode()
    own = f"https://127.0.0.1:{secure.port}"
    kind = "application/x-www-form-urlencoded"
    status, headers, _ = secure.ask("POST", "/login", form, **{"Content-Type": kind, "Origin": own})
    assert status == 303 and "Secure" in headers["set-cookie"] and "HttpOnly" in headers["set-cookie"]


def test_commands_find_the_api_and_trust_its_authority(secure: Secure) -> None:
    assert secure.run("drain") == "the server is draining: puts are refused\n"
    assert secure.run("drain", "--off", "--api", f"https://127.0.0.1:{secure.port}") == "the server takes jobs\n"
    assert "local issuer certificate; --tls-ca names its authority" in secure.run("drain", SSL_CERT_FILE="/dev/null")
    assert secure.run("drain", "--off", "--api", f"unix:{secure.folder}/web") == "the server takes jobs\n"


def test_a_request_without_tls_gets_no_answer(secure: Secure) -> None:
    begun_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", secure.port), timeout=30) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = b""
        while data := sock.recv(4096):
            got += data
    assert b"HTTP" not in got and time.monotonic() - begun_s < 5


@pytest.mark.slow
def test_a_client_that_does_not_shake_hands_is_hung_up_on(secure: Secure) -> None:
    begun_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", secure.port), timeout=30) as sock:
        sock.sendall(b"\x16\x03\x01")
        assert sock.recv(100) == b""
    assert 8 < time.monotonic() - begun_s < 20
    assert "a TLS handshake failed" in log_of(secure.server)


def test_silent_clients_do_not_lock_others_out(secure: Secure) -> None:
    with ExitStack() as opened:
        for _ in range(600):
            opened.enter_context(socket.create_connection(("127.0.0.1", secure.port), timeout=30))
        begun_s = time.monotonic()
        assert secure.ask("GET", "/healthz")[0] == 200
        assert time.monotonic() - begun_s < 8, "not when the time of the silent ones is over"


def test_a_client_that_does_not_read_holds_up_no_other_one(secure: Secure) -> None:
    for _ in range(40):
        secure.ask("POST", "/api/v1/jobs", {"tube": "mail", "body": "x" * 60_000})
    context = secure.authority.context()
    with socket.create_connection(("127.0.0.1", secure.port), timeout=30) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as slow:
            head = f"GET /api/v1/export HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            slow.sendall(head.encode())
            assert secure.ask("GET", "/healthz")[0] == 200
            got = b""
            while b"0\r\n\r\n" not in got[-10:]:
                got += slow.recv(4096)
            assert got.count(b'"tube":"mail"') == 40, "and it gets all of it in the end"


def test_a_reload_reads_the_certificate_of_http(secure: Secure) -> None:
    other = Authority(secure.folder, "other")
    for source, target in zip(other.certify("next"), secure.pair, strict=True):
        os.replace(source, target)
    secure.server.process.send_signal(1)
    secure.authority = other

    def trusted() -> bool:
        try:
            return secure.ask("GET", "/healthz")[0] == 200
        except ssl.SSLCertVerificationError:
            return False

    until(trusted, "new connections get the new certificate")
