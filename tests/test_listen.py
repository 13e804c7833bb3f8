"""Listening sockets: TCP, unix, inherited ones; what is left behind; and the change of user."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import logging
import os
import pwd
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from geventstalk.config import Settings
from geventstalk.config_listeners import Listener
from geventstalk.serving import listen
from geventstalk.serving.listen import (
    ListenError,
    UnixListener,
    UserError,
    address_of,
    close_listeners,
    drop_privileges,
    open_listeners,
)
from tests.support.process import ROOT, free_port

LOG = logging.getLogger("tests.listen")


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    listeners = open_listeners(settings, LOG, {})
    try:
        yield listeners
    finally:
        close_listeners(listeners)


def refusal(settings: Settings, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ListenError) as caught:
        open_listeners(settings, LOG, environ or {})
    assert caught.value.exit_code == 111
    assert "\n" not in str(caught.value)
    return str(caught.value)


def unix(path: Path | str) -> Settings:
    return Settings(listen=(f"unix:{path}",))


def talks(listener: socket.socket, to: tuple[str, int] | None = None, family: int | None = None) -> bool:
    """Returns whether a client reaches this listener, at its own address or at the given one."""
    with socket.socket(family or listener.family) as client:
        client.settimeout(5)
        client.connect(to or listener.getsockname())
        listener.settimeout(5)
        accepted, _ = listener.accept()
        listener.setblocking(False)
        with accepted:
            accepted.sendall(b"x")
            return client.recv(1) == b"x"


def leave_stale_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


# TCP


def test_tcp_sockets_have_upstreams_options_and_accepted_ones_inherit_them() -> None:
    with listening(Settings(listen=("127.0.0.1",), port="0")) as (listener,):
        assert listener.gettimeout() == 0
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
        assert not listener.get_inheritable()
        with socket.create_connection(listener.getsockname(), timeout=5):
            listener.settimeout(5)
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_unix_socket_has_the_mode_and_the_owner_that_were_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "s"
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    for mode, owner in ((0o660, f"{user}:{group}"), (0o606, f":{group}"), (0o600, user)):
        with listening(replace(unix(path), socket_mode=mode, socket_owner=owner)):
            status = path.stat()
            assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (mode, os.getuid(), os.getgid())
    for owner in ("no_such_user", ":no_such_group"):
        assert "no such owner of a socket: " in refusal(replace(unix(path), socket_owner=owner))
    assert not path.exists()


def test_a_unix_listener_has_a_mode_and_an_owner_of_its_own(tmp_path: Path) -> None:
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    paths = [tmp_path / name for name in "abc"]
    a, b, c = (f"unix:{path}" for path in paths)
    extra = (Listener(b, mode=0o606, owner=user, group=group), Listener(c))
    settings = Settings(listen=(a,), listeners=extra, socket_mode=0o640)
    assert listen.check_listeners(settings) == []
    with listening(settings):
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o640, 0o606, 0o640]
    for wrong in (Listener(b, owner="no_such_user"), Listener(b, group="no_such_group")):
        assert "no such owner of a socket: " in refusal(replace(settings, listeners=(wrong,)))
        with pytest.raises(ListenError, match="no such owner of a socket"):
            listen.check_listeners(replace(settings, listeners=(wrong,)))
    assert not any(path.exists() for path in paths)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_listener_adds_its_group_to_the_owner_of_all(tmp_path: Path) -> None:
    path = tmp_path / "s"
    one = Listener(f"unix:{path}", group="daemon")
    with listening(Settings(listen=("127.0.0.1",), port="0", listeners=(one,), socket_owner="nobody")):
        status = path.stat()
        assert (status.st_uid, status.st_gid) == (pwd.getpwnam("nobody").pw_uid, grp.getgrnam("daemon").gr_gid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_unix_socket_is_given_to_its_owner_before_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    seen = []
    monkeypatch.setattr(UnixListener, "listen", lambda *_args: seen.append(path.stat()))
    with listening(replace(unix(path), socket_mode=0o600, socket_owner="nobody")):
        pass
    assert [(one.st_uid, stat.S_IMODE(one.st_mode)) for one in seen] == [(pwd.getpwnam("nobody").pw_uid, 0o600)]


def test_the_backlog_holds_clients_that_come_before_the_server_runs(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(unix(path)), contextlib.ExitStack() as clients:
        for _ in range(1024):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(str(path))


def test_the_default_address_is_every_ipv4_address() -> None:
    with listening(Settings(port="0")) as (listener,):
        assert listener.getsockname()[0] == "0.0.0.0"
        assert address_of(listener) == f"0.0.0.0:{listener.getsockname()[1]}"


def test_several_addresses_at_once(tmp_path: Path) -> None:
    addresses = ("127.0.0.1", "127.0.0.2", "::1", f"unix:{tmp_path}/a", f"unix:{tmp_path}/b")
    with listening(Settings(listen=addresses, port=str(free_port()))) as listeners:
        assert len(listeners) == 5
        assert all(map(talks, listeners))


def test_ipv6_wildcard_serves_ipv4_too() -> None:
    with listening(Settings(listen=("::",), port="0")) as (listener,):
        port = listener.getsockname()[1]
        assert address_of(listener) == f"[::]:{port}"
        assert talks(listener, ("::1", port))
        assert talks(listener, ("127.0.0.1", port), socket.AF_INET)


@pytest.mark.parametrize("addresses", [("::", "0.0.0.0"), ("0.0.0.0", "::"), ("127.0.0.1", "::")])
def test_ipv6_wildcard_leaves_ipv4_to_ipv4_addresses(addresses: tuple[str, str]) -> None:
    port = free_port()
    with listening(Settings(listen=addresses, port=str(port))) as listeners:
        for listener in listeners:
            assert talks(listener, ("::1" if listener.family == socket.AF_INET6 else "127.0.0.1", port))


def test_host_names_and_service_names() -> None:
    with listening(Settings(listen=("localhost",), port="0")) as (listener,):
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    assert "nosuchservice" in refusal(Settings(listen=("127.0.0.1",), port="nosuchservice"))


@pytest.mark.parametrize("host", ["no such host", "256.1.1.1", "\u00e4" * 70, ".", "127.0.0.1:80", "a..b"])
def test_names_that_do_not_resolve(host: str) -> None:
    text = refusal(Settings(listen=(host,), port="0"))
    assert text.startswith(f"cannot resolve {host} port 0: ")


def test_an_address_of_another_host() -> None:
    assert refusal(Settings(listen=("192.0.2.1",), port="0")) == (
        "cannot listen on 192.0.2.1 port 0: Cannot assign requested address"
    )


def test_a_port_in_use_is_an_error_and_not_a_reason_to_try_the_next_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening(Settings(listen=("127.0.0.1",), port="0")) as (listener,):
        port = listener.getsockname()[1]
        assert refusal(Settings(listen=("127.0.0.1",), port=str(port))) == (
            f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        )
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
        assert "Address already in use" in refusal(Settings(listen=("both",), port=str(port)))


def test_an_address_that_is_not_there_is_a_reason_to_try_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
    with listening(Settings(listen=("name",), port="0")) as (listener,):
        assert listener.getsockname()[0] == "127.0.0.1"


def test_after_an_error_nothing_is_left_open(tmp_path: Path) -> None:
    port, path = str(free_port()), tmp_path / "s"
    refusal(Settings(listen=("127.0.0.1", f"unix:{path}", "192.0.2.1"), port=port))
    assert not path.exists()
    with listening(Settings(listen=("127.0.0.1",), port=port)):
        pass


def test_names_are_resolved_before_anything_is_bound(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leave_stale_socket(path)
    before = path.stat().st_ino
    refusal(Settings(listen=(f"unix:{path}", "no such host")))
    refusal(Settings(listen=(f"unix:{path}", f"unix:{'x' * 108}")))
    assert path.stat().st_ino == before


# Unix sockets


def test_a_unix_socket_is_made_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    old = os.umask(0o027)
    try:
        with listening(unix(path)) as (listener,):
            assert stat.S_IMODE(path.stat().st_mode) == 0o750, "the mode comes from the umask"
            assert listener.gettimeout() == 0
            assert address_of(listener) == str(path)
            assert talks(listener)
    finally:
        os.umask(old)
    assert not path.exists()


def test_a_relative_unix_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.chdir(deep)
    with listening(unix("s")) as (listener,):
        assert talks(listener)
    assert os.listdir(deep) == [], "removed although its absolute path would be too long to connect to"


def test_the_longest_unix_path(tmp_path: Path) -> None:
    room = 107 - len(os.fsencode(tmp_path)) - 1
    with listening(unix(tmp_path / ("x" * room))) as (listener,):
        assert talks(listener)
    long = tmp_path / ("x" * (room + 1))
    assert refusal(unix(long)) == (f"socket path {long} is too long (108 characters), where maximum allowed is 107")
    assert "(108 characters)" in refusal(unix(tmp_path / ("x" * (room - 1) + "\u00e4"))), "it is bytes that count"


def test_a_stale_socket_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    leave_stale_socket(path)
    with caplog.at_level(logging.INFO), listening(unix(path)) as (listener,):
        assert talks(listener)
    assert caplog.messages == [f"removing existing local socket to replace it: {path}"]


def test_a_live_servers_socket_is_never_taken(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(unix(path)) as (listener,):
        assert refusal(unix(path)) == f"local socket {path} is in use: a server listens on it"
        listener.settimeout(5)
        listener.accept()[0].close()
        assert talks(listener)


def test_a_live_server_with_a_full_backlog_is_alive(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as clients:
        busy.bind(str(path))
        busy.listen(0)
        with pytest.raises(BlockingIOError):
            for _ in range(10):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        assert refusal(unix(path)) == f"local socket {path} is in use: a server listens on it"
    assert path.exists()


def test_a_datagram_socket_of_another_program_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        assert refusal(unix(path)).startswith(f"local socket {path} is in use: ")
    assert path.exists()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("precious")
    link.symlink_to(file)
    for path in (file, link, tmp_path):
        assert refusal(unix(path)) == f"another file already exists in the given path: {path}"
    assert file.read_text() == "precious"
    assert refusal(unix(tmp_path / "no" / "s")) == (f"cannot listen on unix:{tmp_path}/no/s: No such file or directory")


@pytest.mark.parametrize("closed_first", [False, True])
def test_the_end_leaves_alone_what_another_server_made_of_the_path(tmp_path: Path, closed_first: bool) -> None:
    """Inode numbers are used again at once on many file systems, so the number alone would not tell."""
    path = tmp_path / "s"
    with listening(unix(path)) as (listener,):
        if closed_first:
            listener.close()
        path.unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(path))
        other.listen()
    with other:
        assert path.exists()


def test_the_socket_is_removed_also_when_the_server_has_closed_it(tmp_path: Path) -> None:
    with listening(unix(tmp_path / "s")) as (listener,):
        listener.close()
    assert os.listdir(tmp_path) == []


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with listening(unix(tmp_path / "s")):
        assert len(os.listdir("/proc/self/fd")) > len(before)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.slow
def test_of_many_starters_on_one_stale_path_exactly_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for _ in range(20):
        leave_stale_socket(path)
        opened: list[socket.socket] = []
        refused: list[str] = []
        gate = threading.Barrier(8)

        def start(
            gate: threading.Barrier = gate, opened: list[socket.socket] = opened, refused: list[str] = refused
        ) -> None:
            gate.wait(10)
            try:
                opened.extend(open_listeners(unix(path), LOG, {}))
            except ListenError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert (len(opened), len(refused)) == (1, 7), refused
        opened[0].settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            while True:
                opened[0].accept()[0].close()  # what the others asked
        assert talks(opened[0])
        close_listeners(opened)


def test_without_the_directorys_lock_no_socket_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_LOCK_WAIT_S", 0.02)
    path = tmp_path / "s"
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with listening(unix(path)) as (listener,):
            assert talks(listener), "a path that is free needs no lock"
        assert "cannot be locked" in refusal(unix(path))
    finally:
        os.close(fd)
    with listening(unix(path)):
        pass


# Inherited sockets: each case in a process of its own, because file descriptor 3 is fixed.

_ADOPT = """
import logging, os, socket, sys
from geventstalk.config import Settings
from geventstalk.serving.listen import ListenError, open_listeners

logging.basicConfig(format="%(message)s")
kinds, path, plain, environ = sys.argv[1].split(","), sys.argv[2], sys.argv[3] == "plain", sys.argv[4:]
passed = []
for kind in kinds:
    if kind == "file":
        passed.append(open("/dev/null"))
        continue
    family = {"tcp6": socket.AF_INET6, "unix": socket.AF_UNIX}.get(kind, socket.AF_INET)
    one = socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
    one.bind({"tcp6": ("::1", 0), "unix": path}.get(kind, ("127.0.0.1", 0)))
    if kind in ("tcp", "tcp6", "unix"):
        one.listen()
    passed.append(one)
assert [one.fileno() for one in passed] == list(range(3, 3 + len(passed))), "the first free ones"
for one in passed:
    os.set_inheritable(one.fileno(), True)
variables = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(passed))}
variables.update(one.split("=") for one in environ)
settings = Settings() if plain else Settings(listen=("127.0.0.1",), port="0")
try:
    listeners = open_listeners(settings, logging.getLogger(), variables)
except ListenError as error:
    print(error)
else:
    for one in listeners:
        print(one.fileno(), one.family.name, one.gettimeout(), one.get_inheritable())
        if one.family != socket.AF_UNIX:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
sys.stdout.flush()
os._exit(0)
"""


def adopt(kinds: str, path: Path, *environ: str, plain: bool = False) -> tuple[list[str], list[str]]:
    """Returns what a process prints and logs that was passed such file descriptors."""
    done = subprocess.run(
        [sys.executable, "-c", _ADOPT, kinds, str(path), "plain" if plain else "", *environ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_all_inherited_sockets_are_used(tmp_path: Path) -> None:
    path = tmp_path / "s"
    out, err = adopt("tcp,unix,tcp6", path, plain=True)
    assert out == ["3 AF_INET 0.0 False", "4 AF_UNIX 0.0 False", "5 AF_INET6 0.0 False"]
    assert err == []
    assert path.exists(), "the socket's file is the service manager's"


def test_flags_that_inherited_sockets_overrule_are_named(tmp_path: Path) -> None:
    out, err = adopt("tcp", tmp_path / "s")
    assert out == ["3 AF_INET 0.0 False"]
    assert err == [
        "inherited listen fd; ignoring option: -l 127.0.0.1",
        "inherited listen fd; ignoring option: -p 0",
    ]


@pytest.mark.parametrize("kind", ["file", "udp", "bound"])
def test_inherited_descriptors_that_do_not_listen_are_refused(kind: str, tmp_path: Path) -> None:
    out, _ = adopt(f"tcp,{kind}", tmp_path / "s")
    assert out == ["inherited fd 4 is not a TCP or UNIX listening socket"]


def test_more_descriptors_announced_than_passed(tmp_path: Path) -> None:
    out, _ = adopt("tcp", tmp_path / "s", "LISTEN_FDS=3")
    assert out == ["inherited fd 4 is not a TCP or UNIX listening socket"]


@pytest.mark.parametrize("variable", ["LISTEN_PID=1", "LISTEN_PID=x", "LISTEN_FDS=0"])
def test_sockets_for_another_process_are_ignored(variable: str, tmp_path: Path) -> None:
    out, err = adopt("tcp", tmp_path / "s", variable)
    assert out == ["4 AF_INET 0.0 False"]
    assert err == []


@pytest.mark.parametrize("count", ["x", "-1", "", "99999999999"])
def test_a_count_of_descriptors_that_is_none(count: str) -> None:
    text = refusal(Settings(), {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count})
    assert text == f"LISTEN_FDS is not a number: {count}"


# The change of user: with a stand-in for the system calls, because tests do not run as root.


class _System:
    """Records the calls that change the identity, in their order; `fails` is the one that is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, root: bool = True, fails: str = "") -> None:
        self.calls: list[tuple[object, ...]] = []
        for name in ("initgroups", "setgid", "setuid"):
            monkeypatch.setattr(os, name, lambda *args, name=name: self._call(name, fails, *args))
        monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
        entry = pwd.struct_passwd(("worker", "x", 1000, 100, "", "/", "/bin/sh"))
        monkeypatch.setattr(pwd, "getpwnam", {"worker": entry}.__getitem__)

    def _call(self, name: str, fails: str, *args: object) -> None:
        self.calls.append((name, *args))
        if name == fails:
            raise PermissionError(1, "Operation not permitted")


def test_the_user_is_changed_with_its_groups_and_groups_first(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _System(monkeypatch)
    drop_privileges("worker")
    assert system.calls == [("initgroups", "worker", 100), ("setgid", 100), ("setuid", 1000)]


@pytest.mark.parametrize("fails", ["initgroups", "setgid", "setuid"])
def test_a_user_that_cannot_be_changed_to(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _System(monkeypatch, fails=fails)
    with pytest.raises(UserError, match=r"^cannot become user worker: Operation not permitted$") as caught:
        drop_privileges("worker")
    assert caught.value.exit_code == 34


def test_an_unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    _System(monkeypatch)
    with pytest.raises(UserError) as caught:
        drop_privileges("nosuch")
    assert (str(caught.value), caught.value.exit_code) == ('getpwnam("nosuch"): no such user', 33)


def test_a_user_database_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pwd, "getpwnam", fail)
    with pytest.raises(UserError) as caught:
        drop_privileges("worker")
    assert (str(caught.value), caught.value.exit_code) == ('getpwnam("worker"): Input/output error', 32)


def test_who_already_is_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _System(monkeypatch, root=False)
    monkeypatch.setattr(os, "getresuid", lambda: (1000, 1000, 1000))
    monkeypatch.setattr(os, "getresgid", lambda: (100, 100, 100))
    drop_privileges("worker")
    assert system.calls == []
    monkeypatch.setattr(os, "getresgid", lambda: (5, 5, 5))
    drop_privileges("worker")
    assert system.calls != [], "another group is something to change"
