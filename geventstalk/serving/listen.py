"""Listening sockets, and the user to run as. Both need the rights that the program was started with.

This module must not import gevent nor know the server: the port is open before either is loaded. The sockets that it
returns are bound, listening and non-blocking. It takes a unix socket over only when no process answers there. A lock
on the directory keeps two starters on one path apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from geventstalk.addresses import UNIX_PREFIX as UNIX_PREFIX
from geventstalk.addresses import address_of as address_of
from geventstalk.addresses import full_address_of as full_address_of
from geventstalk.addresses import own_end_of as own_end_of
from geventstalk.addresses import peer_of as peer_of
from geventstalk.config import ConfigError, Settings
from geventstalk.config_listeners import Listener
from geventstalk.exits import EXIT_LISTEN, EXIT_NO_SUCH_USER, EXIT_USER, EXIT_USER_UNREADABLE

if TYPE_CHECKING:
    import logging

BACKLOG = 1024
UNIX_PATH_BYTES_MAX = 107  # sockaddr_un has room for one byte more

_FIRST_INHERITED_FD = 3
_LOCK_WAIT_S = 0.5
_LOCK_RETRY_S = 0.01
# With these errors the host does not have an address, so the next address of the same name is tried. After any other
# error none is tried. If the port is in use on one address of a name, two servers would share the name.
_ADDRESS_UNAVAILABLE = frozenset({errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EADDRNOTAVAIL})

_AddressInfo = tuple[int, int, int, str, Any]  # as getaddrinfo gives it


class _UnixPlan(NamedTuple):
    path: str
    mode: int | None
    owner: str | None
    """USER:GROUP, where each of the two may be missing."""


_Plan = _UnixPlan | Sequence[_AddressInfo]


class ListenError(Exception):
    """The program cannot listen where it was told to."""

    exit_code = EXIT_LISTEN


class AddressInUse(ListenError):
    """Another process listens on the address."""


class UserError(Exception):
    """The program cannot become the user that it was told to. `exit_code` says why, as upstream."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class UnixListener(socket.socket):
    """A unix socket that this process bound, and the file that the system made for it.

    The descriptor `pin` keeps the inode number of the file in use, also after the socket is closed. So while `pin` is
    open, a path with that number is the file of this socket.
    """

    path = ""
    pin = -1

    def bind_pinned(self, path: str) -> None:
        """Binds, and remembers the file."""
        self.bind(path)
        self.path = path
        try:
            self.pin = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            os.unlink(path)  # the file could not be recognized later
            raise

    def remove_file(self) -> None:
        """Removes the file if the file still belongs to this socket and the process may remove it."""
        if self.pin < 0:
            return
        with contextlib.suppress(OSError), _directory_lock(self.path) as locked:
            if locked and os.path.samestat(os.fstat(self.pin), os.lstat(self.path)):
                os.unlink(self.path)
        os.close(self.pin)
        self.pin = -1


def open_listeners(
    settings: Settings, log: logging.Logger, environ: Mapping[str, str] = os.environ
) -> list[socket.socket]:
    """Opens a socket for every address of the settings, or takes the sockets that the service manager passed.

    Those of `settings.extra_listeners` come last; no service manager passes them. Resolves all names before it binds
    the first socket. Leaves nothing behind after a ListenError.
    """
    listeners: list[socket.socket] = []
    try:
        inherited = _inherited_fds(environ)
        if inherited:
            _warn_of_ignored(settings, log)
            listeners.extend(map(_adopt, inherited))
        plans = ([] if inherited else _plans(settings)) + _extra_plans(settings)
        listeners.extend(_open_all(plans, settings, log))
    except ListenError:
        close_listeners(listeners)
        raise
    return listeners


def open_http_listeners(settings: Settings, log: logging.Logger) -> list[socket.socket]:
    """Opens a socket for every HTTP address of the settings; a service manager passes none of these.

    Raises ConfigError for an address that needs tokens, and ListenError; leaves nothing behind then.
    """
    listeners: list[socket.socket] = []
    try:
        listeners.extend(_open_all(_http_plans(settings), settings, log))
    except ListenError:
        close_listeners(listeners)
        raise
    return listeners


def take_over(descriptors: Iterable[Sequence[int]]) -> list[socket.socket]:
    """The sockets that the last program of this process left: of each its descriptor, and that of its file or -1."""
    listeners: list[socket.socket] = []
    for fd, pin in descriptors:
        listener = UnixListener(fileno=fd)
        listener.set_inheritable(False)
        listener.setblocking(False)
        if pin >= 0:
            os.set_inheritable(pin, False)
            listener.path = os.fsdecode(listener.getsockname())
            listener.pin = pin
        listeners.append(listener)
    return listeners


def close_listeners(listeners: Iterable[socket.socket]) -> None:
    """Closes the sockets, and removes the files of the unix sockets that this process bound."""
    for listener in listeners:
        listener.close()
        if isinstance(listener, UnixListener):
            listener.remove_file()


def describe(listener: socket.socket) -> str:
    """The address of the socket for the log, with the meaning of a wildcard address."""
    address = full_address_of(listener)
    if listener.family == socket.AF_UNIX:
        return address
    host = listener.getsockname()[0]
    if host == "0.0.0.0":
        return f"{address}, which is every IPv4 address of this host"
    if host == "::":
        only_ipv6 = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return f"{address}, which is every {'IPv6 ' if only_ipv6 else ''}address of this host"
    return address


def advertised(settings: Settings, listeners: Iterable[socket.socket]) -> str:
    """Returns where other nodes reach this one, as HOST:PORT. Raises ListenError when that cannot be found out.

    The address of a listener, or for a wildcard the address of this host towards the database.
    """
    for listener in listeners:
        if listener.family != socket.AF_UNIX:
            host, port = listener.getsockname()[:2]
            if host not in ("0.0.0.0", "::"):
                return address_of(listener)
            own = _own_address(str(settings.journal))
            return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
    raise ListenError("other nodes cannot reach this one, which listens on no TCP port; say with --advertise where")


def _own_address(place: str) -> str:
    """Returns the address from which this host reaches the first host of a URL. Sends nothing."""
    from urllib.parse import unquote, urlsplit

    host = urlsplit(place).netloc.rpartition("@")[2].partition(",")[0]
    name, _, port = (
        (host, "", "") if host.endswith("]") else host.partition(":") if host.count(":") < 2 else (host, "", "")
    )
    name = unquote(name.strip("[]"))
    if not name or name.startswith(("/", "@")):
        return "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port or 5432, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def check_listeners(settings: Settings) -> list[str]:
    """Finds the errors that open_listeners() would find, and listens nowhere. Returns warnings about addresses in use.

    Binds each address for a moment. An address that another server has now is only a warning. Raises ListenError, and
    ConfigError for an HTTP address that needs tokens.
    """
    warnings = []
    for plans in (_plans(settings) + _extra_plans(settings), _http_plans(settings)):
        for plan in plans:
            try:
                if isinstance(plan, _UnixPlan):
                    _owner_ids(plan.owner)
                    _check_unix(plan.path)
                else:
                    _open_tcp(plan, _ipv4_apart(plans), listens=False).close()
            except AddressInUse as error:
                warnings.append(f"at this moment: {error}")
    return warnings


def user_id(settings: Settings) -> int:
    """Returns the user that the server will run as. Raises UserError."""
    return os.geteuid() if settings.user is None else _entry_of(settings.user).pw_uid


def check_user(user: str) -> tuple[int, frozenset[int]]:
    """The user's id and groups. Raises UserError when the process could not become this user."""
    entry = _entry_of(user)
    if os.geteuid() != 0 and not _is_already(entry):
        raise UserError(f"cannot become user {user}: {os.strerror(errno.EPERM)}", EXIT_USER)
    return entry.pw_uid, frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))


def _entry_of(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise UserError(f'getpwnam("{user}"): no such user', EXIT_NO_SUCH_USER) from None
    except OSError as error:
        raise UserError(f'getpwnam("{user}"): {error.strerror}', EXIT_USER_UNREADABLE) from None


def _is_already(entry: pwd.struct_passwd) -> bool:
    return os.getresuid() == (entry.pw_uid,) * 3 and os.getresgid() == (entry.pw_gid,) * 3


def drop_privileges(user: str) -> None:
    """Makes the process run as this user: sets the groups, the primary group and the id. Raises UserError.

    Does nothing when the process already is this user and is not root: only root may set groups.
    """
    entry = _entry_of(user)
    if os.geteuid() != 0 and _is_already(entry):
        return
    try:
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    except OSError as error:
        raise UserError(f"cannot become user {user}: {error.strerror}", EXIT_USER) from None


def require_readable(user: str, files: Mapping[str, str | None]) -> None:
    """Raises ConfigError when this user cannot read the file of an option, which is read again later.

    Asks in a process of its own, which becomes the user.
    """
    if os.geteuid() != 0:
        return  # the process is this user, or cannot become it
    for option, path in files.items():
        child = 0 if path is None else os.fork()
        if path is not None and child == 0:
            try:
                drop_privileges(user)
                os._exit(not os.access(path, os.R_OK))
            finally:
                os._exit(1)
        if child and os.waitpid(child, 0)[1]:
            raise ConfigError(f"user {user} cannot read {path} ({option}), which is read again later")


def _warn_of_ignored(settings: Settings, log: logging.Logger) -> None:
    ignored = [f"-l {address}" for address in settings.listen]
    if settings.port != Settings.port:
        ignored.append(f"-p {settings.port}")
    for option in ignored:
        log.warning("inherited listen fd; ignoring option: %s", option)


def _open_all(plans: Sequence[_Plan], settings: Settings, log: logging.Logger) -> Iterator[socket.socket]:
    for plan in plans:
        yield _open_unix(plan, log) if isinstance(plan, _UnixPlan) else _open_tcp(plan, _ipv4_apart(plans))


def _plans(settings: Settings) -> list[_Plan]:
    """For each address of the settings: the path of its unix socket, or the addresses that its name resolves to."""
    plans: list[_Plan] = []
    for address in settings.plain_hosts:
        if address is not None and address.startswith(UNIX_PREFIX):
            plans.append(_unix_plan(address, settings))
        else:
            plans.append(_resolve(address, settings.port))
    return plans


def _extra_plans(settings: Settings) -> list[_Plan]:
    return [_plan_of(each.address, settings, each) for each in settings.extra_listeners]


def _plan_of(address: str, settings: Settings, terms: Listener | None = None) -> _Plan:
    if address.startswith(UNIX_PREFIX):
        return _unix_plan(address, settings, terms)
    host, _, port = address.rpartition(":")
    return _resolve(host.strip("[]"), port)


def _http_plans(settings: Settings) -> list[_Plan]:
    """The same for HTTP. Raises ConfigError when others could reach an address and no tokens keep them out."""
    plans: list[_Plan] = []
    for address in settings.http:
        plan = _plan_of(address, settings)
        if isinstance(plan, _UnixPlan):
            guarded = not _all_users_may_connect(plan.mode)
        else:
            guarded = all(_is_loopback(address_info[4][0]) for address_info in plan)
        if not guarded and settings.http_tokens is None and settings.access is None:
            raise ConfigError(
                f"every client that can reach {address} could read and delete every job (--http); "
                "say with --http-tokens who may, or give an address of this host alone"
            )
        is_local = isinstance(plan, _UnixPlan) or guarded
        if not is_local and settings.http_tls is None and not settings.http_insecure:
            raise ConfigError(
                f"eavesdroppers on the way to {address} could read tokens and jobs (--http); give --http-cert and "
                "--http-key, or say --http-insecure, such as where a proxy that has TLS stands in front of it"
            )
        plans.append(plan)
    return plans


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _all_users_may_connect(mode: int | None) -> bool:
    """Returns whether every user of this host can connect to a unix socket of this mode, or of the one that the umask
    gives.
    """
    if mode is not None:
        return bool(mode & stat.S_IWOTH)
    mask = os.umask(0o077)
    os.umask(mask)
    return not mask & stat.S_IWOTH


def _ipv4_apart(plans: Sequence[_Plan]) -> bool:
    """Returns whether some address is an IPv4 address. Then an IPv6 wildcard must not serve IPv4, too."""
    return any(not isinstance(plan, _UnixPlan) and plan[0][0] == socket.AF_INET for plan in plans)


def _resolve(host: str | None, port: str) -> Sequence[_AddressInfo]:
    # ASCII as bytes: text would go through the idna codec, which costs 5 ms to import.
    try:
        name = None if host is None else host.encode("ascii" if host.isascii() else "idna")
        return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ListenError(f"cannot resolve {host or 'any address'} port {port}: {reason}") from None


def _open_tcp(candidates: Sequence[_AddressInfo], ipv4_apart: bool, *, listens: bool = True) -> socket.socket:
    problem = None
    for family, kind, protocol, _, address in candidates:
        try:
            return _bind_tcp(family, kind, protocol, address, ipv4_apart, listens)
        except OSError as error:
            if problem is None:
                in_use = error.errno == errno.EADDRINUSE
                text = f"cannot listen on {address[0]} port {address[1]}: {error.strerror}"
                problem = AddressInUse(text) if in_use else ListenError(text)
            if error.errno not in _ADDRESS_UNAVAILABLE:
                break
    raise problem or ListenError("cannot listen: the name has no address")


def _bind_tcp(family: int, kind: int, protocol: int, address: Any, ipv4_apart: bool, listens: bool) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_connection_options(listener)
        if family == socket.AF_INET6 and address[0] == "::":
            # The wildcard also serves IPv4, unless another address is IPv4: the two would collide.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(ipv4_apart))
        listener.bind(address)
        if listens:
            listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _set_connection_options(listener: socket.socket) -> None:
    # Accepted sockets inherit both options.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _inherited_fds(environ: Mapping[str, str]) -> range:
    """File descriptors that the service manager passed to this very process (sd_listen_fds(3))."""
    pid, count = environ.get("LISTEN_PID"), environ.get("LISTEN_FDS")
    if pid is None or count is None or pid != str(os.getpid()):
        return range(0)
    if not (count.isascii() and count.isdecimal() and len(count) < 7):
        raise ListenError(f"LISTEN_FDS is not a number: {count}")
    return range(_FIRST_INHERITED_FD, _FIRST_INHERITED_FD + int(count))


def _adopt(fd: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=fd)
    except OSError:
        raise ListenError(f"inherited fd {fd} is not a TCP or UNIX listening socket") from None
    listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    known = listener.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    if not known or listener.type != socket.SOCK_STREAM or not listens:
        listener.close()
        raise ListenError(f"inherited fd {fd} is not a TCP or UNIX listening socket")
    listener.set_inheritable(False)
    listener.setblocking(False)
    if listener.family != socket.AF_UNIX:
        _set_connection_options(listener)
    return listener


def _unix_plan(address: str, settings: Settings, terms: Listener | None = None) -> _UnixPlan:
    """The socket of an address: with the mode and the owner of its listener, or those of all unix sockets."""
    path = address[len(UNIX_PREFIX) :]
    size = len(os.fsencode(path))
    if size > UNIX_PATH_BYTES_MAX:
        limit = f"where maximum allowed is {UNIX_PATH_BYTES_MAX}"
        raise ListenError(f"socket path {path} is too long ({size} characters), {limit}")
    mode, owner = settings.socket_mode, settings.socket_owner
    if terms is not None:
        mode = mode if terms.mode is None else terms.mode
        user, _, group = (owner or "").partition(":")
        owner = f"{terms.owner or user}:{terms.group or group}"
    return _UnixPlan(path, mode, owner)


def _owner_ids(owner: str | None) -> tuple[int, int]:
    """The ids of USER:GROUP; -1 for the one that is not named. Raises ListenError."""
    user, _, group = (owner or "").partition(":")
    try:
        return pwd.getpwnam(user).pw_uid if user else -1, grp.getgrnam(group).gr_gid if group else -1
    except KeyError as error:
        raise ListenError(f"no such owner of a socket: {error.args[0]}") from None


def _open_unix(plan: _UnixPlan, log: logging.Logger) -> UnixListener:
    path, owner = plan.path, _owner_ids(plan.owner)
    with _directory_lock(path) as locked:
        _make_way(path, locked, log)
        listener = UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind_pinned(path)
            if owner != (-1, -1):  # before it listens, so that no other mode or owner is ever served
                os.chown(path, *owner)
            if plan.mode is not None:
                os.chmod(path, plan.mode)
            listener.listen(BACKLOG)
        except OSError as error:
            close_listeners([listener])
            raise ListenError(f"cannot listen on {UNIX_PREFIX}{path}: {error.strerror}") from None
    return listener


def _make_way(path: str, locked: bool, log: logging.Logger) -> None:
    """Removes a socket that a dead server left at the path. Any other file at the path is an error."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ListenError(f"cannot listen on {UNIX_PREFIX}{path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"another file already exists in the given path: {path}")
    if not locked:
        # Without the lock, another starter may just have bound this socket, and not listen yet.
        raise ListenError(f"local socket {path} exists, and its directory cannot be locked to replace it")
    _require_unused(path)
    log.warning("removing existing local socket to replace it: %s", path)
    try:
        os.unlink(path)
    except OSError as error:
        raise ListenError(f"cannot remove local socket {path}: {error.strerror}") from None


def _require_unused(path: str) -> None:
    user = _who_answers(path)
    if user is not None:
        raise AddressInUse(f"local socket {path} is in use: {user}")


def _check_unix(path: str) -> None:
    """Raises ListenError when no unix socket could be made at the path."""
    folder = os.path.dirname(path) or "."
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not os.path.isdir(folder):
            raise ListenError(f"cannot listen on {UNIX_PREFIX}{path}: {os.strerror(errno.ENOENT)}") from None
    except OSError as error:
        raise ListenError(f"cannot listen on {UNIX_PREFIX}{path}: {error.strerror}") from None
    else:
        if not stat.S_ISSOCK(mode):
            raise ListenError(f"another file already exists in the given path: {path}")
        _require_unused(path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ListenError(f"cannot listen on {UNIX_PREFIX}{path}: {os.strerror(errno.EACCES)}")


def _who_answers(path: str) -> str | None:
    """Why the socket at the path may be alive. None when it certainly is not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except BlockingIOError:
            return "a server listens on it"  # its backlog is full
        except OSError as error:
            return str(error.strerror)
    return "a server listens on it"


@contextlib.contextmanager
def _directory_lock(path: str) -> Iterator[bool]:
    """Holds the advisory lock of the path's directory. Yields whether the lock could be taken."""
    try:
        fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _locked(fd)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_RETRY_S)
        except OSError:
            return False
