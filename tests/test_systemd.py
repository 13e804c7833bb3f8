"""The unit files: systemd accepts them, they lock the service up, and the server lives within what they allow."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.programs import missing
from tests.support.process import GEVENTSTALK, ROOT, ServerProcess, free_port

SERVICE = ROOT / "conf" / "geventstalk.service"
SOCKET = ROOT / "conf" / "geventstalk.socket"
EXPOSURE_MAX = 1.5  # of 10, by systemd's own account; its verdict is "OK" below 4
PR_SET_MDWE, PR_GET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 66, 1


def needs(program: str) -> str:
    """The program's path; the test is skipped without it."""
    return shutil.which(program) or missing(f"{program} is not installed")


def values(unit: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Copies of the units whose program exists on this machine."""
    shutil.copy(SOCKET, tmp_path)
    text, count = re.subn(r"^ExecStart=\S+", "ExecStart=/bin/true", SERVICE.read_text(encoding="utf-8"), flags=re.M)
    assert count == 1
    (tmp_path / SERVICE.name).write_text(text, encoding="utf-8")
    return tmp_path


def analyze(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [needs("systemd-analyze"), "--no-pager", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_systemd_finds_nothing_wrong(units: Path) -> None:
    result = analyze(units, "verify", "--man=no", f"./{SERVICE.name}", f"./{SOCKET.name}")
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_the_service_is_locked_up(units: Path) -> None:
    result = analyze(units, "security", "--offline=true", f"./{SERVICE.name}")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", result.stdout)
    assert found, result.stdout + result.stderr
    assert float(found[1]) <= EXPOSURE_MAX


def test_the_settings_in_the_unit_are_ours(tmp_path: Path) -> None:
    """Environment= names settings that exist, and the command line is one the program accepts."""
    environment = dict(line.replace("%S", str(tmp_path)).split("=", 1) for line in values(SERVICE, "Environment"))
    assert "GEVENTSTALK_JOURNAL" in environment
    (command,) = values(SERVICE, "ExecStart")
    program, *flags = command.split()
    assert Path(program).name == "geventstalk"
    result = subprocess.run(
        [*GEVENTSTALK, *flags, "-p", "0", "--check-config"],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_only_this_host_can_connect_by_default() -> None:
    assert values(SOCKET, "ListenStream") == ["127.0.0.1:11300"]
    assert "GEVENTSTALK_LISTEN=127.0.0.1" in values(SERVICE, "Environment")
    # Settings of the administrator come behind, and systemd takes the last one.
    text = SERVICE.read_text(encoding="utf-8")
    assert text.index("EnvironmentFile=") > text.index("GEVENTSTALK_LISTEN=127.0.0.1")


def test_systemd_waits_until_the_server_serves_and_sees_when_it_hangs() -> None:
    """The server's messages to systemd are in test_sd_notify.py."""
    assert values(SERVICE, "Type") == ["notify"]
    assert values(SERVICE, "WatchdogSec") == ["2min"]


def test_what_stays_wrong_is_not_restarted_for_ever() -> None:
    assert values(SERVICE, "RestartPreventExitStatus") == ["1 5 10 32 33 34 71"]


@pytest.fixture
def activated(tmp_path: Path) -> Iterator[int]:
    """Port of a socket that systemd's own activation tool hands to a server with its first client."""
    port = free_port()
    command = [needs("systemd-socket-activate"), "--listen", f"127.0.0.1:{port}", "--setenv", f"PYTHONPATH={ROOT}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, *GEVENTSTALK, "-p", "1"], stdin=subprocess.DEVNULL, stderr=log)
    yield port
    process.terminate()
    assert process.wait(10) == 0, (tmp_path / "log").read_text()


@pytest.mark.slow
def test_activation(activated: int) -> None:
    with wait_for_port(activated) as client:
        client.sendall(b"list-tube-used\r\n")
        assert client.recv(64) == b"USING default\r\n"


def wait_for_port(port: int) -> socket.socket:
    """The activation tool gives no sign when it listens, so a refused connection is tried again."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def exercise(server: ServerProcess) -> None:
    """A little of everything, so that the server does what it does in service."""
    with server.connect() as client, client.makefile("rb") as replies:
        client.sendall(b"put 1 0 60 5\r\nhello\r\nput 1 1 60 5\r\nlater\r\nreserve\r\nbury 1 1\r\nkick 1\r\nstats\r\n")
        assert [replies.readline() for _ in range(2)] == [b"INSERTED 1\r\n", b"INSERTED 2\r\n"]
        client.sendall(b"reserve\r\nreserve\r\nquit\r\n")
        assert b"later" in replies.read()


@pytest.mark.slow
def test_no_writable_code_is_needed(tmp_path: Path) -> None:
    """MemoryDenyWriteExecute=yes: the kernel's own switch for it, inherited over exec."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_GET_MDWE, 0, 0, 0, 0) < 0 and ctypes.get_errno() == errno.EINVAL:
        missing("a kernel that can deny writable code (Linux 6.3) is not installed")
    switch = f"assert ctypes.CDLL(None).prctl({PR_SET_MDWE}, {PR_MDWE_REFUSE_EXEC_GAIN}, 0, 0, 0) == 0"
    program = f"import ctypes, os, sys\n{switch}\nos.execv(sys.argv[1], sys.argv[1:])"
    server = ServerProcess([sys.executable, "-c", program, *GEVENTSTALK], ["-b", str(tmp_path / "journal"), "-f0"])
    try:
        exercise(server.wait_ready())
    finally:
        assert server.stop() == 0


@pytest.mark.slow
def test_every_system_call_is_allowed(tmp_path: Path) -> None:
    """SystemCallFilter= against what strace sees the server do, from start to end, with a journal that fsyncs."""
    strace, trace = needs("strace"), tmp_path / "trace"
    allowed = system_calls(tmp_path, "@system-service") - system_calls(tmp_path, "@privileged")
    assert values(SERVICE, "SystemCallFilter") == ["@system-service", "~@privileged"]
    command = [strace, "-D", "-f", "-o", str(trace), *GEVENTSTALK]
    server = ServerProcess(command, ["-b", str(tmp_path / "journal"), "-f0", "-s", "4096"]).wait_ready()
    exercise(server)
    server.stop()
    used = set(re.findall(r"^\d+ +(\w+)\(", trace.read_text(errors="replace"), re.MULTILINE))
    assert {"fdatasync", "accept4", "execve"} & used
    # SQLite gives its files to the owner of the database, but only as root, which the service is not.
    assert used <= allowed | ({"fchown"} if os.geteuid() == 0 else set())


def system_calls(folder: Path, group: str) -> set[str]:
    """The calls of one of systemd's groups, with the groups inside it."""
    result = analyze(folder, "syscall-filter", group)
    words = [line.strip() for line in result.stdout.splitlines()[1:]]
    calls = {word for word in words if word and not word.startswith(("@", "#"))}
    return calls.union(*(system_calls(folder, word) for word in words if word.startswith("@")))
