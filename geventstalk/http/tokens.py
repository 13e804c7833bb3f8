"""The tokens of HTTP: the file of `--http-tokens`, with lines `NAME ROLE TOKEN`, and the users of `--access`.

This module must not import gevent or falcon: --check-config reads the file, too. A fault of the file is a ConfigError
that names the line, never a token. Invariant: a token is compared in constant time, and only its hash is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from hmac import compare_digest
from typing import Literal, Protocol

from geventstalk.config import ConfigError
from geventstalk.config_secrets import read_secret
from geventstalk.http.scope import EVERYTHING, Scope
from geventstalk.rights import ALL, EVERY_TUBE, USER_NAME, User
from geventstalk.rights import Access as Users

Role = Literal["read", "admin", "user"]

TOKEN_CHARS_MIN = 16
TOKEN_CHARS_MAX = 512
_FILE_BYTES_MAX = 1 << 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what a header `Authorization: Bearer` may hold


@dataclass(frozen=True)
class Token:
    """One line of the file, or a user with a token. `digest` is the token's hash."""

    name: str
    role: Role
    digest: bytes
    scope: Scope = field(default=EVERYTHING, compare=False)


class Source(Protocol):
    """A source of tokens."""

    def find(self, text: str) -> Token | None:
        """Returns the token with this text. Takes as long for a token that is nearly right as for any other."""

    def is_slow(self, text: str) -> bool:
        """Returns whether find() may know the token once prove() has looked at it."""

    def prove(self, text: str) -> None:
        """Looks at a token for a tenth of a second, in a thread."""

    def holds(self, token: Token) -> bool:
        """Returns whether the token still counts, with the same role."""


class UserTokens:
    """The tokens of the users of `--access`: admins, who may do everything, and users with rights on tubes."""

    def __init__(self, access: Callable[[], Users]) -> None:
        self._access = access

    def find(self, text: str) -> Token | None:
        user = self._access().of_token(text)
        if user is None:
            return None
        digest = str(user.proof.token).encode()
        role = _role_of(user)
        if role == "admin":
            return Token(user.name, role, digest)
        return Token(user.name, role, digest, Scope(partial(self._present, user.name, user.proof.token)))

    def is_slow(self, text: str) -> bool:
        return self._access().is_slow(text)

    def prove(self, text: str) -> None:
        self._access().prove(text)

    def holds(self, token: Token) -> bool:
        user = self._present(token.name, token.digest.decode("ascii", "replace"))
        return user is not None and _role_of(user) == token.role

    def _present(self, name: str, token: str | None) -> User | None:
        """Returns the user of this name, if the token is still the user's."""
        user = self._access().users.get(name)
        return user if user is not None and user.proof.token == token else None


def _role_of(user: User) -> Role:
    return "admin" if user.operates and user.rights[EVERY_TUBE] & ALL == ALL else "user"


class Tokens:
    """The tokens of the file, as of its last correct reading."""

    def __init__(self, path: str, owner: int) -> None:
        """`owner` is the user who may own the file beside root. Raises ConfigError."""
        self._path = os.path.abspath(path)
        self._owner = owner
        self._seen: tuple[int, ...] | None = None
        self._tokens: tuple[Token, ...] = ()
        self.read_again()

    def find(self, text: str) -> Token | None:
        digest = sha256(text.encode("utf-8", "surrogatepass")).digest()
        found = None
        for token in self._tokens:
            if compare_digest(token.digest, digest):
                found = token
        return found

    def is_slow(self, text: str) -> bool:
        return False

    def prove(self, text: str) -> None:
        pass

    def holds(self, token: Token) -> bool:
        return token in self._tokens

    def has_changed(self) -> bool:
        """Returns whether the file was changed since it was last read, correct or not."""
        return self._mark() != self._seen

    def _mark(self) -> tuple[int, ...] | None:
        """Returns a value that any change of the file changes, also one of its mode or owner; None without a file."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def read_again(self) -> None:
        """Reads the file. Raises ConfigError; then the old tokens stay."""
        self._seen = self._mark()  # before it is read: a change meanwhile is found later
        self._tokens = tuple(self._parse(read_secret(self._path, "tokens", _FILE_BYTES_MAX, self._owner)))

    def _parse(self, content: bytes) -> list[Token]:
        tokens: list[Token] = []
        for number, line in enumerate(content.decode("latin-1").splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                token = _parsed(words)
                if any(token.digest == other.digest for other in tokens):
                    raise ValueError("the token stands above already")
            except ValueError as error:
                raise ConfigError(f"{error} ({self._path}, line {number})") from None
            tokens.append(token)
        if not tokens:
            raise ConfigError(f"{self._path} has no token; its lines are NAME read|admin TOKEN")
        return tokens


def _parsed(words: list[str]) -> Token:
    if len(words) != 3:
        raise ValueError("a line is not NAME read|admin TOKEN")
    name, role, text = words
    if not USER_NAME.fullmatch(name):
        raise ValueError("a name has up to 64 letters, digits and _.@-")
    if role not in ("read", "admin"):
        raise ValueError(f"the role of {name} is neither read nor admin")
    if not TOKEN_CHARS_MIN <= len(text) <= TOKEN_CHARS_MAX:
        raise ValueError(f"the token of {name} has {len(text)} characters, not {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX}")
    if not _TOKEN.fullmatch(text):
        raise ValueError(f"the token of {name} has characters other than letters, digits and ._~+/-")
    return Token(name, "admin" if role == "admin" else "read", sha256(text.encode()).digest())
