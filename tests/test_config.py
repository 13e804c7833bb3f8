"""The options: every source, their order, what is refused and in which words."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from geventstalk import config, logs
from geventstalk.config import ENV_OF_JOB, KEYS, OPTIONS, ConfigError, Option, Settings, load
from geventstalk.config_listeners import Listener, Tls
from journal.sqlite.builder import SEGMENT_BYTES
from tests.support.process import ROOT

EXAMPLE = ROOT / "conf" / "geventstalk.yaml"

# For each setting: text as a flag or a variable gives it, a YAML value, and what both become.
VALUES: dict[str, tuple[str, str, object]] = {
    "listen": ("127.0.0.1", "127.0.0.1", ("127.0.0.1",)),
    "port": ("7", "7", "7"),
    "journal": ("/d", "/d", "/d"),
    "fsync_ms": ("0", "0", 0),
    "segment_bytes": ("8192", "8192", 8192),
    "compact": ("false", "false", False),
    "max_journal_bytes": ("2000000", "2000000", 2_000_000),
    "accept_damage": ("true", "true", True),
    "max_job_bytes": ("100", "100", 100),
    "node": ("left", "left", "left"),
    "advertise": ("[::1]:7", "'[::1]:7'", "[::1]:7"),
    "lease": ("2.5", "2.5", 2.5),
    "put_wait": ("0", "0", 0.0),
    "takeover_wait": ("3", "3", 3.0),
    "user": ("nobody", "nobody", "nobody"),
    "http": ("8080", "8080", ("127.0.0.1:8080",)),
    "http_tokens": ("/t", "/t", "/t"),
    "http_cert": ("/c", "/c", "/c"),
    "http_key": ("/k", "/k", "/k"),
    "http_insecure": ("true", "true", True),
    "http_host": ("Queue.example", "Queue.example", ("queue.example",)),
    "name": ("Queue 1", "Queue 1", "Queue 1"),
    "name_color": ("red", "red", "red"),
    "audit": ("/a", "/a", "/a"),
    "io_processes": ("3", "3", 3),
    "max_tube_series": ("5", "5", 5),
    "verbose": ("2", "2", 2),
    "log_format": ("json", "json", "json"),
    "tls_listen": ("11301", "127.0.0.1:11301", "127.0.0.1:11301"),
    "tls_cert": ("/c", "/c", "/c"),
    "tls_key": ("/k", "/k", "/k"),
    "tls_client_ca": ("/a", "/a", "/a"),
}

BAD: dict[str, list[tuple[object, str]]] = {
    "node": [("", "invalid name of a node: (empty)"), ("a b", "invalid name of a node: a b"), (5, "invalid name")],
    "advertise": [
        ("host", "invalid address: host; give HOST:PORT"),
        ("host:0", "invalid address: host:0"),
        ("host:70000", "invalid address: host:70000"),
        (11300, "invalid address: 11300"),
    ],
    "lease": [
        ("0.1", "invalid lease: 0.1; give seconds from 0.2 to 60"),
        ("61", "invalid lease: 61"),
        ("soon", "invalid lease: soon"),
        (True, "invalid lease: true"),
        (None, "invalid lease: null"),
        ("nan", "invalid lease: nan"),
    ],
    "put_wait": [("-1", "invalid wait: -1; give seconds from 0 to 3600")],
    "takeover_wait": [("3601", "invalid wait: 3601")],
    "listen": [
        ("", "invalid address: (empty)"),
        ("unix:", "invalid address: unix:"),
        (5, "invalid address: 5"),
    ],
    "port": [
        ("-1", "invalid port: -1"),
        (-1, "invalid port: -1"),
        ("65536", "invalid port: 65536"),
        ("99999", "invalid port: 99999"),
        ("", "invalid port: (empty)"),
        ("a b", "invalid port: a b"),
        (True, "invalid port: true"),
        (None, "invalid port: null"),
        (1.5, "invalid port: 1.5"),
        ("abc", "invalid port: abc, which is no service of this host"),
    ],
    "journal": [
        ("", "invalid directory: (empty)"),
        ("a\0b", "invalid directory: a\0b"),
        (3, "invalid directory: 3"),
    ],
    "fsync_ms": [
        ("-5", "invalid size: -5"),
        ("10k", "invalid size: 10k"),
        ("", "invalid size: (empty)"),
        ("4294967296", "invalid size: 4294967296"),
        (None, "invalid size: null"),
        ("Never", "invalid size: Never"),
    ],
    "segment_bytes": [
        ("-1", "invalid size: -1"),
        ("1e6", "invalid size: 1e6"),
        (1 << 41, "invalid size: "),
        ("9000000000g", "invalid size: "),
    ],
    "compact": [("maybe", "invalid switch: maybe"), (2, "invalid switch: 2"), (None, "invalid switch: null")],
    "max_journal_bytes": [
        ("1000", "invalid size: 1000, the lowest is 1048576"),
        ("1T", "invalid size: 1T"),
        ("1k", "invalid size: 1k, the lowest is 1048576"),
    ],
    "accept_damage": [("perhaps", "invalid switch: perhaps")],
    "max_job_bytes": [
        ("-1", "invalid size: -1"),
        ("+5", "invalid size: +5"),
        (" 5", "invalid size:  5"),
        ("\u0665", "invalid size: \u0665"),
        ("9" * 5000, "invalid size: " + "9" * 100 + "..."),
    ],
    "user": [("", "invalid user: (empty)"), (0, "invalid user: 0")],
    "http": [
        ("", "invalid HTTP address: (empty); give ADDR:PORT, PORT or unix:PATH"),
        ("unix:", "invalid HTTP address: unix:, the path is missing"),
        ("localhost", "invalid HTTP address: localhost;"),
        ("::1:80", "invalid HTTP address: ::1:80;"),
        ("http://localhost:80", "invalid HTTP address: http://localhost:80;"),
        ("127.0.0.1:65536", "invalid port: 65536"),
        ("127.0.0.1:", "invalid HTTP address: 127.0.0.1:;"),
        ("-1", "invalid HTTP address: -1;"),
        (True, "invalid HTTP address: true;"),
        (None, "invalid HTTP address: null;"),
    ],
    "http_tokens": [("", "invalid file: (empty)"), (1, "invalid file: 1")],
    "http_host": [
        ("", "invalid host name: (empty)"),
        ("a:80", "invalid host name: a:80; give it without a port"),
        ("*", "invalid host name: *"),
        (None, "invalid host name: null"),
    ],
    "name": [
        ("", "invalid name: (empty)"),
        (" a", "invalid name:  a; give up to 60 printable characters"),
        ("a" * 61, "invalid name: aaa"),
        ("a\u202eb", "invalid name: "),
        (5, "invalid name: 5"),
    ],
    "name_color": [
        ("", "invalid colour: (empty)"),
        ("pink", "invalid colour: pink, it is one of red"),
        ([], "invalid colour: a list"),
    ],
    "audit": [("", "invalid file: (empty)"), (False, "invalid file: false")],
    "io_processes": [
        ("-1", "invalid number: -1; give a number or auto"),
        ("65", "invalid number: 65, the highest is 64; give a number or auto"),
        ("all", "invalid number: all; give a number or auto"),
    ],
    "max_tube_series": [("-1", "invalid number: -1"), ("100001", "invalid number: 100001, the highest is 100000")],
    "verbose": [
        ("x", "invalid verbosity: x"),
        (True, "invalid verbosity: true"),
        (-1, "invalid verbosity: -1"),
    ],
    "tls_listen": [
        ("", "invalid address: (empty); give ADDR:PORT, PORT or unix:PATH"),
        ("unix:", "invalid address: unix:, the path is missing"),
        ("localhost", "invalid address: localhost;"),
    ],
    "tls_key": [("", "invalid file: (empty)")],
    "log_format": [("xml", "invalid log format: xml"), (None, "invalid log format: null")],
}


def by_key(key: str) -> Option:
    (option,) = [option for option in KEYS if option.key == key]
    return option


def from_yaml(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    settings, _ = load({}, {}, str(path))
    return settings


def refusal(flags: dict[str, object], environ: dict[str, str], path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, environ, None if path is None else str(path))
    assert caught.value.exit_code == 5
    return str(caught.value)


def test_defaults_are_those_of_upstream() -> None:
    settings, warnings = load({}, {})
    assert settings == Settings()
    assert warnings == ()
    assert (settings.port, settings.listen, settings.journal) == ("11300", (), None)
    assert (settings.fsync_ms, settings.segment_bytes, settings.max_job_bytes) == (50, 10_485_760, 65_535)
    assert settings.compact and settings.user is None and settings.verbose == 0


def test_tools_write_segments_of_the_default_size() -> None:
    assert Settings().segment_bytes == SEGMENT_BYTES


def test_every_setting_has_a_row_in_the_table_and_every_row_is_complete() -> None:
    fields = [field.name for field in dataclasses.fields(Settings)]
    assert sorted(option.key for option in KEYS) == sorted(fields)
    assert [option.key for option in KEYS if option not in OPTIONS] == ["listeners", "policies", "schedules"], (
        "a mapping is no word"
    )
    for option in OPTIONS:
        assert f"--{option.key.replace('_', '-')}" in option.flags
        assert option.env == f"GEVENTSTALK_{option.key.upper()}"
        assert option.default == getattr(Settings(), option.key)
        assert option.help.endswith(".") and len(option.help) > 20
        assert bool(option.negative) == bool(option.negative_help) == bool(option.negative_value)
        assert (option.metavar == "") == (option.kind in ("switch", "count"))
    flags = [flag for option in OPTIONS for flag in option.flags + option.negative]
    assert len(flags) == len(set(flags))
    assert set("bfFlpuzscnV") == {flag[1] for flag in flags if len(flag) == 2}, "the letters of upstream"


def test_the_example_file_holds_the_defaults_of_exactly_these_options() -> None:
    content = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    assert sorted(content) == sorted(option.key for option in KEYS)
    settings, warnings = load({}, {}, str(EXAMPLE))
    assert settings == Settings(listen=("127.0.0.1",)), "who copies the example exposes nothing"
    assert warnings == ()


def test_the_example_file_explains_each_option_with_its_flags() -> None:
    blocks = EXAMPLE.read_text(encoding="utf-8").split("\n\n")
    explained = {block.splitlines()[-1].partition(":")[0]: block for block in blocks}
    for option in OPTIONS:
        for flag in option.flags + option.negative:
            assert flag in explained[option.key], f"{flag} is missing above {option.key}"


@pytest.mark.parametrize("key", VALUES)
def test_each_source_gives_each_setting(key: str, tmp_path: Path) -> None:
    text, in_yaml, expected = VALUES[key]
    option = by_key(key)
    assert expected != option.default, "the value must differ from the default to prove anything"
    flag: object = {"list": (text,), "count": 2, "switch": expected}.get(option.kind, text)
    assert getattr(load({key: flag}, {})[0], key) == expected
    assert getattr(load({}, {option.env: text})[0], key) == expected
    assert getattr(from_yaml(tmp_path, f"{key}: {in_yaml}\n"), key) == expected


def test_a_later_source_overrides_an_earlier_one(tmp_path: Path, seed: int) -> None:
    """Each source sets a random part of the options; the last one that sets an option decides."""
    rng = random.Random(seed)
    path = tmp_path / "settings.yaml"
    for _ in range(100):
        expected: dict[str, Any] = {}
        sources: list[dict[str, Any]] = []
        for _ in range(3):
            chosen = [key for key in ("port", "max_job_bytes", "segment_bytes", "verbose") if rng.random() < 0.5]
            sources.append(
                {key: rng.randrange(4096, 65536) if key != "verbose" else rng.randrange(9) for key in chosen}
            )
            expected.update(sources[-1])
        path.write_text(yaml.safe_dump(sources[0]), encoding="utf-8")
        environ = {by_key(key).env: str(value) for key, value in sources[1].items()}
        settings, _ = load({key: str(value) for key, value in sources[2].items()}, environ, str(path))
        for option in OPTIONS:
            wanted = expected.get(option.key, option.default)
            assert getattr(settings, option.key) == (str(wanted) if option.key == "port" else wanted)


@pytest.mark.parametrize(("key", "value", "words"), [(key, *case) for key, cases in BAD.items() for case in cases])
def test_bad_values_are_refused_from_every_source(key: str, value: object, words: str, tmp_path: Path) -> None:
    option = by_key(key)
    path = tmp_path / "settings.yaml"
    path.write_text(f"# first line\n{key}: {json.dumps(value)}\n", encoding="utf-8")
    text = refusal({}, {}, path)
    assert text.startswith(words)
    assert text.endswith(f"({key} in {path}, line 2)")
    if isinstance(value, str):
        assert refusal({}, {option.env: value}).startswith(words)
        assert refusal({}, {option.env: value}).endswith(f"(environment variable {option.env})")
        text = refusal({key: (value,) if option.kind == "list" else value}, {})
        assert text.startswith(words)
        assert text.endswith(f"({', '.join(option.flags)})")


def test_a_bad_value_is_refused_also_when_it_would_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 1\nverbose: loud\n", encoding="utf-8")
    assert "verbose in" in refusal({"verbose": 1}, {"GEVENTSTALK_VERBOSE": "2"}, path)
    assert "GEVENTSTALK_VERBOSE" in refusal({"verbose": 1}, {"GEVENTSTALK_VERBOSE": "loud"})


def test_unknown_keys_and_variables_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 1\nfsync-ms: 3\n", encoding="utf-8")
    assert refusal({}, {}, path) == f"unknown key: fsync-ms, did you mean fsync_ms? ({path}, line 2)"
    path.write_text("zzzz: 1\n", encoding="utf-8")
    assert refusal({}, {}, path) == f"unknown key: zzzz ({path}, line 1)"
    wanted = "unknown environment variable: GEVENTSTALK_PROT, did you mean GEVENTSTALK_PORT?"
    assert refusal({}, {"GEVENTSTALK_PROT": "1"}) == wanted


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"port: 1\nport: 2\n", "key given twice: port ("),
        (b"- port\n", "does not hold keys and values"),
        (b"just text\n", "does not hold keys and values"),
        (b"port: [1\n", "is not YAML: line "),
        (b"a: b: c\n", "is not YAML: line 1: "),
        (b"port: 1\n---\nport: 2\n", "is not YAML: line "),
        (b"port: \xff\xfe\n", "is not YAML: "),
        (b"port: !!int x\n", "is not YAML: "),
        (b"port: !!bool x\n", "is not YAML: "),
        (b"port: !!timestamp x\n", "is not YAML: "),
        (b"port: 2001-13-45\n", "is not YAML: "),
        (b"port: !!python/object:os.system x\n", "is not YAML: line 1: "),
        (b"? {a: b}\n: c\n", "is not YAML: line 1: "),
        (b"1: 2\n", "unknown key: 1 ("),
        (b"<<: {port: 1}\n", "unknown key: << ("),
        (b"port: *nobody\n", "is not YAML: line 1: "),
        (b"[" * 1500, "is not YAML: "),
        (b"port: " + b"9" * 5000, "is not YAML: "),
        (b"port: 1.5\n", "invalid port: 1.5 ("),
        (b"port: .nan\n", "invalid port: nan ("),
        (b"max_job_bytes: .inf\n", "invalid size: inf ("),
        (b"verbose: true\n", "invalid verbosity: true ("),
        (b"user: &a [*a]\n", "invalid user: a list ("),
        (b"user: {a: 1}\n", "invalid user: a mapping ("),
        (b"#" * (1 << 20) + b"\n", "is no file of settings: it is larger than 1048576 bytes"),
    ],
)
def test_files_that_are_no_settings_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(content)
    text = refusal({}, {}, path)
    assert words in text
    assert str(path) in text
    assert "\n" not in text


def test_a_few_aliases_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Ten lines that stand for ten thousand million words: the message used to hold them all."""
    path = tmp_path / "settings.yaml"
    lines = ["user:", "  - &a0 [x]", *(f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 11))]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert refusal({}, {}, path).startswith("invalid user: a list (user in ")


# Bug: --config /dev/zero was read without end.
def test_a_device_without_an_end_is_refused() -> None:
    assert refusal({}, {}, Path("/dev/zero")).startswith("/dev/zero is no file of settings: ")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert refusal({}, {}, path) == f"cannot read {path}: No such file or directory"
    assert refusal({}, {}, tmp_path) == f"cannot read {tmp_path}: Is a directory"
    assert refusal({}, {"GEVENTSTALK_CONFIG": str(path)}) == f"cannot read {path}: No such file or directory"
    assert refusal({}, {"GEVENTSTALK_CONFIG": ""}).startswith("cannot read : ")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "") == from_yaml(tmp_path, "# nothing\n") == from_yaml(tmp_path, "---\n") == Settings()


def test_the_named_file_counts_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "geventstalk.yaml"
    first.write_text("port: 1\n", encoding="utf-8")
    second.write_text("port: 2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load({}, {})[0].port == "11300"
    assert load({}, {"GEVENTSTALK_CONFIG": str(first)})[0].port == "1"
    assert load({}, {"GEVENTSTALK_CONFIG": str(first)}, str(second))[0].port == "2"


def test_yaml_values_keep_their_meaning(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "listen: [127.0.0.1, 'unix:/a,b', '::1']").listen == (
        "127.0.0.1",
        "unix:/a,b",
        "::1",
    )
    assert from_yaml(tmp_path, "listen: []").listen == ()
    assert from_yaml(tmp_path, "fsync_ms: never").fsync_ms is None
    assert from_yaml(tmp_path, "journal: null\nuser: null").journal is None
    assert from_yaml(tmp_path, "compact: no").compact is False
    http = from_yaml(tmp_path, "http: [8080, 'localhost:1', '[::1]:2', 'unix:/a b']").http
    assert http == ("127.0.0.1:8080", "localhost:1", "[::1]:2", "unix:/a b")
    assert from_yaml(tmp_path, "http: []").http == ()


def test_environment_values_keep_their_meaning() -> None:
    environ = {
        "GEVENTSTALK_LISTEN": "127.0.0.1,unix:/s,::1",
        "GEVENTSTALK_FSYNC_MS": "never",
        "GEVENTSTALK_COMPACT": "No",
    }
    settings, _ = load({}, environ)
    assert settings.listen == ("127.0.0.1", "unix:/s", "::1")
    assert settings.fsync_ms is None
    assert settings.compact is False


def test_variables_that_are_not_meant_for_the_program_are_left_alone() -> None:
    """Those of the build and of a worker's job, and those that Kubernetes adds for services with such names."""
    environ = {
        "GEVENTSTALK_COMPILE": "1",
        **dict.fromkeys(ENV_OF_JOB, "1"),
        "GEVENTSTALK_SERVICE_HOST": "10.0.0.1",
        "GEVENTSTALK_SERVICE_PORT": "11300",
        "GEVENTSTALK_SERVICE_PORT_BEANSTALK": "11300",
        "GEVENTSTALK_PORT": "tcp://10.0.0.1:11300",
        "GEVENTSTALK_PORT_11300_TCP": "tcp://10.0.0.1:11300",
        "GEVENTSTALK_PORT_11300_TCP_PROTO": "tcp",
        "GEVENTSTALK_PORT_11300_TCP_PORT": "11300",
        "GEVENTSTALK_PORT_11300_TCP_ADDR": "10.0.0.1",
        "GEVENTSTALK_HTTP_SERVICE_HOST": "10.0.0.1",
        "GEVENTSTALK_HTTP_SERVICE_PORT": "8080",
        "GEVENTSTALK_HTTP_PORT": "tcp://10.0.0.1:8080",
        "GEVENTSTALK_HTTP_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "PORT": "x",
    }
    assert load({}, environ) == (Settings(), ())


def test_the_size_of_a_job_is_capped_with_upstreams_warning() -> None:
    for given in ("1073741825", "99999999999999999999"):
        settings, warnings = load({"max_job_bytes": given}, {})
        assert settings.max_job_bytes == 1_073_741_824
        assert warnings == ("maximum job size was set to 1073741824",)
    assert load({"max_job_bytes": "1073741824"}, {})[1] == ()
    assert load({"max_job_bytes": "0"}, {})[0].max_job_bytes == 0


def test_small_journal_files_become_a_page_with_a_warning() -> None:
    """Upstream takes any size and rounds the file up to 4096 bytes on disk; its users pass such sizes."""
    for given in ("0", "1", "1024", "4095"):
        settings, warnings = load({"segment_bytes": given}, {})
        assert settings.segment_bytes == 4096
        assert warnings == ("size of journal files was set to 4096",)
    settings, warnings = load({"segment_bytes": "4096"}, {})
    assert (settings.segment_bytes, warnings) == (4096, ())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tls_listen": "1"}, "--tls-listen needs --tls-cert and --tls-key"),
        ({"tls_listen": "1", "tls_cert": "/c"}, "--tls-listen needs --tls-cert and --tls-key"),
        ({"tls_cert": "/c", "tls_key": "/k"}, "--tls-cert is for --tls-listen, which is missing"),
        ({"tls_client_ca": "/a"}, "--tls-client-ca is for --tls-listen, which is missing"),
        (
            {"journal": "postgresql://h/d", "tls_listen": "1", "tls_cert": "/c", "tls_key": "/k"},
            "with a journal in PostgreSQL a standby passes its clients on, so TLS, ",
        ),
        ({"node": "a"}, "--node is for nodes that share a journal"),
        ({"journal": "/d", "lease": "2"}, "--lease is for nodes that share a journal"),
        ({"journal": "postgresql://h/d", "fsync_ms": "20"}, "-f20 is for files"),
    ],
)
def test_options_that_do_not_go_together_are_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.require_fitting(load(flags, {})[0])


@pytest.mark.parametrize("fsync", [{}, {"fsync_ms": "0"}, {"fsync_ms": "never"}])
def test_options_of_a_shared_journal_are_taken(fsync: dict[str, object]) -> None:
    settings, _ = load({"journal": "postgresql://user@h1,h2/d?schema=jobs", "node": "a", "lease": "2", **fsync}, {})
    config.require_fitting(settings)
    assert settings.shared and not Settings(journal="/d").shared and not Settings().shared


def test_listeners_are_read_from_the_file_alone(tmp_path: Path) -> None:
    text = (
        "listeners:\n"
        "  - address: 11301\n"
        "  - {address: '0.0.0.0:11302', tls: {certificate: c.pem, key: k.pem, client_ca: ca.pem}}\n"
        "  - {address: 'unix:/s', tls: {certificate: c.pem, key: k.pem, client_ca: null}}\n"
        "  - {address: '[::1]:11303', tls: null}\n"
        "  - {address: 'unix:/t', mode: '0660', owner: ann, group: www-data}\n"
    )
    settings = from_yaml(tmp_path, text)
    assert settings.listeners == settings.extra_listeners == (
        Listener("127.0.0.1:11301"),
        Listener("0.0.0.0:11302", Tls("c.pem", "k.pem", "ca.pem")),
        Listener("unix:/s", Tls("c.pem", "k.pem")),
        Listener("[::1]:11303"),
        Listener("unix:/t", mode=0o660, owner="ann", group="www-data"),
    )  # fmt: skip
    assert [each.is_plain for each in settings.listeners] == [True, False, False, True, True]
    assert from_yaml(tmp_path, "listeners: []\n") == Settings()
    assert refusal({}, {"GEVENTSTALK_LISTENERS": "x"}).startswith("unknown environment variable: GEVENTSTALK_LISTENERS")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("11301", "a listener is 11301, and has to be a mapping of address, "),
        ("{}", "the key address of a listener is missing"),
        ("{address: x}", "invalid address: x; give ADDR:PORT, PORT or unix:PATH"),
        ("{address: 1, tsl: {}}", "a listener has no key tsl, but address, tls, identity"),
        ("{address: 1, mode: '660'}", "mode, owner and group are for a unix socket, and not for 127.0.0.1:1"),
        ("{address: 1, group: root}", "mode, owner and group are for a unix socket, and not for 127.0.0.1:1"),
        (
            "{address: 'unix:/s', mode: 660}",
            "invalid mode: 660; give three octal digits such as 660, in quotes in a file",
        ),
        ("{address: 'unix:/s', proxy: 10.0.0.0/8}", "proxy is not for a unix socket"),
        ("{address: 1, proxy: x}", "proxy x is no network such as 10.1.0.0/16"),
        ("{address: 1, proxy: [10.0.0.1/8]}", "proxy 10.0.0.1/8 is no network such as 10.1.0.0/16"),
        ("{address: 'unix:/s', owner: 'a:b'}", "a:b is no name of a user or group"),
        ("{address: 1, 2: 3}", "a listener has no key 2, but "),
        ("{address: 1, [a]: 3}", "is not YAML"),
        ("{address: 1, identity: [name]}", "an identity is certificate, unix_user, address, token, and not name"),
        ("{address: 1, tls: yes}", "tls is true, and has to be a mapping of certificate, key, client_ca"),
        ("{address: 1, tls: {}}", "the key certificate of tls is missing"),
        ("{address: 1, tls: {certificate: c}}", "the key key of tls is missing"),
        ("{address: 1, tls: {certificate: c, key: 5}}", "invalid file: 5"),
        ("{address: 1, tls: {certificate: c, key: k, ca: a}}", "tls has no key ca, but "),
    ],
)
def test_listeners_that_make_no_sense_are_refused(entry: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"listeners:\n  - {entry}\n", encoding="utf-8")
    text = refusal({}, {}, path)
    assert words in text and str(path) in text and "\n" not in text


@pytest.mark.parametrize(
    ("flags", "plain"),
    [
        ({}, (None,)),
        ({"port": "7"}, (None,)),
        ({"listen": ("::1",)}, ("::1",)),
        ({"tls_listen": "1"}, ()),
        ({"tls_listen": "1", "port": "11300"}, ("0.0.0.0",)),
        ({"tls_listen": "1", "listen": ("::1",)}, ("::1",)),
        ({"tls_listen": "1", "listen": ("::1",), "port": "7"}, ("::1",)),
    ],
)
def test_with_tls_nothing_listens_without_it_unless_asked_for(
    flags: dict[str, object], plain: tuple[str | None, ...], tmp_path: Path
) -> None:
    certificate = {"tls_cert": "/c", "tls_key": "/k"} if "tls_listen" in flags else {}
    settings, _ = load({**flags, **certificate}, {})
    config.require_fitting(settings)
    assert settings.plain_hosts == plain
    if "tls_listen" in flags:
        assert settings.extra_listeners == (Listener("127.0.0.1:1", Tls("/c", "/k")),)
        path = tmp_path / "settings.yaml"
        path.write_text("listeners: [{address: 1}]\n", encoding="utf-8")
        del flags["tls_listen"]
        assert load(flags, {}, str(path))[0].plain_hosts == plain


# Bug: /api showed a password whose name a URL escapes (pass%77ord=): the settings had rules of their own.
@pytest.mark.parametrize(
    "place",
    [
        "postgresql://u:secret@h/d",
        "postgres://h/d?user=u&password=secret",
        "postgres://h/d?user=u&pass%77ord=secret",
        "postgresql://u:a:secret@h/d",
    ],
)
def test_a_password_on_the_command_line_is_refused_and_not_printed(place: str, tmp_path: Path) -> None:
    text = refusal({"journal": place}, {})
    assert "a password on the command line" in text and "secret" not in text
    settings = load({}, {"GEVENTSTALK_JOURNAL": place})[0]
    assert settings.journal == place
    assert "***" in str(settings.journal_shown) and "secret" not in str(settings.journal_shown)
    assert from_yaml(tmp_path, f"journal: {place}\n").journal == place
    assert load({"journal": "postgresql://u@h:5432/d"}, {})[0].shared


def test_sizes_may_end_in_letters() -> None:
    found, _ = load(
        {"segment_bytes": "10m", "max_journal_bytes": "1G", "max_memory": "256k", "max_job_bytes": "3k"}, {}
    )
    assert (found.segment_bytes, found.max_journal_bytes) == (10 << 20, 1 << 30)
    assert (found.max_memory, found.max_job_bytes) == (256 << 10, 3 << 10)


def test_port_zero_is_kept_and_numbers_lose_leading_zeros() -> None:
    for given, kept in [("0", "0"), ("011300", "11300"), ("65535", "65535")]:
        assert load({"port": given}, {})[0].port == kept


def test_names_of_services_are_kept(tmp_path: Path) -> None:
    try:
        socket.getservbyname("http", "tcp")
    except OSError:
        pytest.skip("this host has no names of services")
    assert load({"port": "http"}, {})[0].port == "http"
    assert from_yaml(tmp_path, "port: http").port == "http"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = "1"  # type: ignore[misc]  # mypy sees the mistake, too


# Log lines and the trace.


def test_log_lines_have_time_and_level_and_stay_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.make_logger()
    log.info("listening on %s", "a\nb\x1b[31m\u2028")
    log.debug("not wanted")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO listening on a\\nb\\x1b\[31m\\u2028\n", err)


def test_json_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.make_logger("json", verbose=2)
    log.debug("a\n%s", "b")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"]) == ("DEBUG", "a\nb")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "ValueError: broken" in second["traceback"]


def test_a_text_log_keeps_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.make_logger()
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    assert capsys.readouterr().err.rstrip().endswith("ValueError: broken")


class _Gone:
    """A stream whose reader left."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_streams_that_are_gone_cost_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for gone in (_Gone(), None):
        monkeypatch.setattr("sys.stderr", gone)
        monkeypatch.setattr("sys.stdout", gone)
        logs.make_logger().error("lost")
        logs.print_error("lost")
        trace = logs.make_trace(1)
        if trace:
            trace.accept(5)


def test_the_trace_prints_upstreams_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.make_trace(0) is None
    connections = logs.make_trace(1)
    assert connections is not None and not connections.wire
    trace = logs.make_trace(2)
    assert trace is not None and trace.wire
    trace.bind(3, "0.0.0.0:11300")
    trace.accept(5)
    trace.command(5, b"put ")
    trace.job_in(5, 1)
    trace.reply(5, b"INSERTED 1")
    trace.reply(5, "USING a\rb")
    trace.job_out(5, 1)
    trace.close(5)
    assert capsys.readouterr().out.splitlines() == [
        "bind 3 0.0.0.0:11300",
        "accept 5",
        "<5 command put ",
        "<5 job 1",
        ">5 reply INSERTED 1",
        ">5 reply USING a\\rb",
        ">5 job 1",
        "close 5",
    ]


def test_the_logger_is_the_programs_own() -> None:
    log = logs.make_logger()
    assert log is logging.getLogger("geventstalk")
    assert not log.propagate
    assert len(logs.make_logger("json").handlers) == 1
    assert config.ENV_PREFIX == "GEVENTSTALK_"
