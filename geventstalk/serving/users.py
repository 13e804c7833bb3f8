"""The users of the file of `--access`: reads them, and finds whose a connection is.

This module must not import gevent: --check-config reads the file, too. A fault of the file is a ConfigError that names
the user, never a token. Invariant: no file is used that others can read or replace.
"""

from __future__ import annotations

import pwd
import struct
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_network
from socket import SO_PEERCRED, SOL_SOCKET
from socket import socket as Socket
from typing import Any, Final

import gevent

from geventstalk import config_values as values
from geventstalk.addresses import host_of
from geventstalk.config import ConfigError
from geventstalk.config_listeners import ADDRESS, CERTIFICATE, UNIX_USER, Listener
from geventstalk.config_secrets import read_secret
from geventstalk.globs import is_glob
from geventstalk.rights import (
    EVERY_TUBE,
    HASH,
    NO_LIMIT,
    OPERATE,
    RIGHTS,
    USER_NAME,
    Access,
    Limits,
    Network,
    Proof,
    User,
)
from geventstalk.serving.tls import TlsStream
from geventstalk.stream import Stream

_FILE_BYTES_MAX: Final = 1 << 20
_PROOFS: Final = ("certificate", "token", "unix_user", "address")


def read_access(path: str, owner: int) -> Access:
    """Returns the users of a file, which belongs to root or to the user `owner`. Raises ConfigError."""
    found = _yaml(path, owner)
    if not isinstance(found, dict) or set(found) != {"users"} or not isinstance(found["users"], dict):
        raise ConfigError(f"{path} does not hold users: its one key is `users`, a mapping of names")
    users = []
    for name, entry in found["users"].items():
        try:
            users.append(_user(name, entry))
        except ValueError as error:
            raise ConfigError(f"{path}, user {values.shown(name)}: {error}") from None
    _require_distinct(path, users)
    return Access(users)


def user_of(listener: Listener, stream: Stream, access: Access) -> User | None:
    """Returns the user of a new connection, by the first identity that the connection shows. None without any."""
    for identity in listener.identity:
        user: User | None = None
        if identity == CERTIFICATE:
            user = access.of_certificate(_names_of(stream))
        elif identity == UNIX_USER:
            user = access.of_uid(_uid_of(stream))
        elif identity == ADDRESS:
            user = _by_address(stream, access)
        if user is not None:
            return user
    return None


def _names_of(stream: Stream) -> Iterable[str]:
    if stream.passed_on is not None:
        names: tuple[str, ...] = stream.passed_on.names
        return names
    assert isinstance(stream, TlsStream)
    return stream.names_of_peer()


def _uid_of(stream: Stream) -> int:
    if stream.passed_on is None:
        return _connected_uid(stream.socket)
    found: int = _in_thread(_number_of, stream.passed_on.account)
    return found


def _connected_uid(sock: Socket) -> int:
    """Returns the number of the user whose process connected. See unix(7), SO_PEERCRED."""
    credentials = struct.Struct("3i")
    uid: int = credentials.unpack(sock.getsockopt(SOL_SOCKET, SO_PEERCRED, credentials.size))[1]
    return uid


def account_of(sock: Socket) -> str:
    """Returns the name of that user, "" without one. Numbers differ from host to host."""
    found: str = _in_thread(_name_of, _connected_uid(sock))
    return found


def _in_thread(look_up: Callable[[Any], Any], what: Any) -> Any:
    """A directory of users may be on another host, and no other client waits for that."""
    return gevent.get_hub().threadpool.apply(look_up, (what,))


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return ""


def _number_of(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, OSError, ValueError):
        return -1


def _by_address(stream: Stream, access: Access) -> User | None:
    try:
        if stream.peer:
            return access.of_address(host_of(stream.peer))
        return access.of_address(stream.socket.getpeername()[0])
    except (OSError, ValueError):  # the client has gone, or another node has told no address
        return None


def _yaml(path: str, owner: int) -> Any:
    import yaml  # here: most runs have no such file

    content = read_secret(path, "users", _FILE_BYTES_MAX, owner)
    try:
        return yaml.safe_load(content)
    except yaml.MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line + 1
        raise ConfigError(f"{path} is not YAML: line {line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {type(error).__name__}") from None


def _user(name: object, entry: object) -> User:
    if not isinstance(name, str) or not USER_NAME.fullmatch(name):
        raise ValueError("a name has up to 64 letters, digits and _ . @ -")
    if not isinstance(entry, dict):
        raise ValueError(f"it is {values.shown(entry)}, and has to be a mapping of {', '.join(_PROOFS)} and rights")
    for key in entry:
        if key not in (*_PROOFS, "rights", *Limits._fields):
            known = ", ".join((*_PROOFS, "rights", *Limits._fields))
            raise ValueError(f"there is no key {values.shown(key)}, but {known}")
    proof = Proof(
        certificate=_certificate(entry.get("certificate")),
        token=_token(entry.get("token")),
        uid=_uid(entry.get("unix_user")),
        networks=tuple(_network(each) for each in _as_list(entry.get("address"))),
    )
    if proof == Proof():
        raise ValueError(f"nothing shows who it is: it needs one of {', '.join(_PROOFS)}")
    return User(name, proof, _rights(entry.get("rights")), _limits(entry))


def _limits(entry: Mapping[str, object]) -> Limits:
    given = {key: values.whole(key, NO_LIMIT - 1)(entry[key]) for key in Limits._fields if key in entry}
    for key in ("puts_per_second", "puts_burst"):
        if given.get(key) == 0:
            raise ValueError(f"{key} is 0, and has to be at least 1: without the right to put there are no puts")
    if "puts_burst" in given and "puts_per_second" not in given:
        raise ValueError("puts_burst is for puts_per_second, and there is none")
    given.setdefault("puts_burst", given.get("puts_per_second", NO_LIMIT))
    return Limits(**given)


def _certificate(value: object) -> str | None:
    return None if value is None else values.text("certificate")(value)


def _token(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not HASH.fullmatch(value):
        raise ValueError("token is no hash: `geventstalk token new USER` makes a token, and prints the hash")
    return value


def _uid(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is int:
        return value
    try:
        return pwd.getpwnam(values.text("unix_user")(value)).pw_uid
    except KeyError:
        raise ValueError(f"this host has no user {values.shown(value)}") from None


def _network(value: object) -> Network:
    try:
        return ip_network(values.text("address")(value))
    except ValueError as error:
        raise ValueError(f"address {values.shown(value)} is no network such as 10.1.0.0/16: {error}") from None


def _as_list(value: object) -> list[object]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _rights(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise ValueError('rights is a mapping of patterns of tubes, such as {"mail.*": work}')
    rights = {}
    for pattern, words in value.items():
        if not is_glob(pattern):
            raise ValueError(f"{values.shown(pattern)} is no pattern of tubes: a name, with * for any characters")
        granted = 0
        for word in _as_list(words):
            if not isinstance(word, str) or word not in RIGHTS:
                raise ValueError(f"a right is {', '.join(RIGHTS)}, and not {values.shown(word)}")
            granted |= RIGHTS[word]
        if granted & OPERATE and pattern != EVERY_TUBE:
            raise ValueError('operate is a right on every tube: "*": [all, operate]')
        rights[pattern] = granted
    return rights


def _require_distinct(path: str, users: list[User]) -> None:
    """Raises ConfigError when the same proof stands for two users."""
    seen: dict[object, str] = {}
    for user in users:
        proof = user.proof
        for kind, value in zip(_PROOFS, (proof.certificate, proof.token, proof.uid), strict=False):
            if value is not None and seen.setdefault((kind, value), user.name) != user.name:
                raise ConfigError(f"{path}: the same {kind} is that of {seen[kind, value]} and of {user.name}")
        for network in proof.networks:
            if seen.setdefault(network, user.name) != user.name:
                raise ConfigError(f"{path}: the same address is that of {seen[network]} and of {user.name}")
