"""Where HTTP listens, where it refuses to without tokens, and what --check-config finds of it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geventstalk.config import ConfigError, Settings, load, require_fitting
from geventstalk.serving.listen import (
    AddressInUse,
    check_listeners,
    close_listeners,
    full_address_of,
    open_http_listeners,
)
from tests.support.process import GEVENTSTALK, ROOT, free_port

LOG = logging.getLogger("tests.listen")


def opened(*addresses: str, tokens: str | None = None, insecure: bool = False) -> list[str]:
    """The addresses of the sockets that are opened for these; they are closed again."""
    settings = Settings(http=load({"http": addresses}, {})[0].http, http_tokens=tokens, http_insecure=insecure)
    listeners = open_http_listeners(settings, LOG)
    try:
        return [full_address_of(listener) for listener in listeners]
    finally:
        close_listeners(listeners)


def test_addresses_of_this_host_need_no_tokens(tmp_path: Path) -> None:
    port = free_port()
    path = f"unix:{tmp_path}/s"
    assert opened(str(port), "[::1]:0", path)[::2] == [f"127.0.0.1:{port}", path]
    assert opened(f"localhost:{port}")[0].endswith(f":{port}")
    assert opened() == [] and not (tmp_path / "s").exists()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "[::ffff:127.0.0.1]:0"])
def test_addresses_that_others_reach_need_tokens(address: str) -> None:
    with pytest.raises(ConfigError, match="say with --http-tokens who may"):
        opened("0", address)
    with pytest.raises(ConfigError, match="--http-tokens"):
        check_listeners(Settings(listen=("127.0.0.1",), port="0", http=(address,)))
    if "ffff" not in address:
        assert len(opened(address, tokens="/t", insecure=True)) == 1


def test_users_keep_others_out_as_tokens_do() -> None:
    settings = Settings(http=("0.0.0.0:0",), access="/a", http_insecure=True)
    assert not check_listeners(replace(settings, listen=("127.0.0.1",), port="0"))


def test_addresses_that_others_reach_need_tls(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could read tokens and jobs"):
        opened("0", "0.0.0.0:0", tokens="/t")
    settings = Settings(http=("0.0.0.0:0",), http_tokens="/t", http_cert="/c", http_key="/k")
    assert not check_listeners(replace(settings, listen=("127.0.0.1",), port="0"))
    assert len(opened("[::1]:0", f"unix:{tmp_path}/s", tokens="/t")) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"http": ("0",), "http_cert": "/c"}, "--http-cert and --http-key need each other"),
        ({"http": ("0",), "http_key": "/c"}, "--http-cert and --http-key need each other"),
        ({"http_cert": "/c", "http_key": "/k"}, "--http-cert is for --http, which is missing"),
    ],
)
def test_certificates_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_fitting(Settings(**settings))


def test_a_unix_socket_open_to_all_users_needs_tokens(tmp_path: Path) -> None:
    path = f"unix:{tmp_path}/s"
    before = os.umask(0o000)
    try:
        with pytest.raises(ConfigError, match="--http-tokens"):
            opened(path)
        assert opened(path, tokens="/t") == [path]
        assert not check_listeners(Settings(listen=("127.0.0.1",), port="0", http=(path,), socket_mode=0o660))
        os.umask(0o007)
        assert opened(path) == [path]
        with pytest.raises(ConfigError, match="--http-tokens"):
            check_listeners(Settings(listen=("127.0.0.1",), port="0", http=(path,), socket_mode=0o666))
    finally:
        os.umask(before)


def test_nothing_is_left_open_when_one_address_fails(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse):
            opened(f"unix:{tmp_path}/s", str(port))
        assert not (tmp_path / "s").exists()
        (warning,) = check_listeners(Settings(listen=("127.0.0.1",), port="0", http=(f"127.0.0.1:{port}",)))
    assert warning.startswith("at this moment: cannot listen on 127.0.0.1 port")


def check_config(*flags: str) -> tuple[int, str]:
    done = subprocess.run(
        [*GEVENTSTALK, "-l", "127.0.0.1", "-p", "0", "--check-config", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def test_check_config_finds_what_a_start_would_find(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a read abcdefghijklmnop\n")
    tokens.chmod(0o644)
    code, said = check_config("--http", "0", "--http-tokens", str(tokens))
    assert code == 5 and f"others can read or replace {tokens}" in said
    tokens.chmod(0o600)
    code, said = check_config("--http", "0", "--audit", str(tmp_path / "none" / "audit"))
    assert code == 5 and "(--audit)" in said
    code, said = check_config("--http", "0.0.0.0:0")
    assert code == 5 and "--http-tokens" in said
    audit = tmp_path / "audit"
    words = ["--http", "0.0.0.0:0", "--http-tokens", str(tokens), "--audit", str(audit)]
    code, said = check_config(*words)
    assert code == 5 and "--http-insecure" in said
    assert check_config("--http-insecure", *words) == (0, "")
    assert not audit.exists()
