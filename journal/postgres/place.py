"""The place of a log in PostgreSQL: a URL for libpq, and a schema of ours in it. Knows nothing of connections.

`postgresql://user@host1,host2/database?schema=NAME`: all but `schema` is libpq's, with its environment variables,
password file and service file. Invariant: `shown` holds no password; only `shown` goes into messages.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode

SCHEMES: Final = ("postgresql://", "postgres://")
DEFAULT_SCHEMA: Final = "geventstalk"
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}\Z")
"""Names that need no quotes, and leave room for a suffix."""
_SECRETS: Final = ("password", "sslpassword", "passfile")


def is_place(text: str) -> bool:
    """Returns whether a text names a database and not a directory."""
    return text.startswith(SCHEMES)


class PlaceError(ValueError):
    """The text is no place; the message says why."""


class Place:
    """One log: which database, and which schema in it."""

    def __init__(self, text: str) -> None:
        """Raises PlaceError."""
        if not is_place(text):
            raise PlaceError(f"not a URL of PostgreSQL: it begins with neither {' nor '.join(SCHEMES)}")
        address, _, query = text.partition("?")
        words = parse_qsl(query, keep_blank_values=True)
        schemas = [value for name, value in words if name == "schema"]
        if len(schemas) > 1:
            raise PlaceError("schema is given twice")
        self.schema = schemas[0] if schemas else DEFAULT_SCHEMA
        if not _SCHEMA.match(self.schema) or self.schema.startswith("pg_"):
            raise PlaceError(
                f"schema {self.schema!r} has to begin with a letter, and to have at most 48 of a-z, 0-9 and _"
            )
        kept = [(name, value) for name, value in words if name != "schema"]
        self.url = text
        self.libpq = _joined(address, kept)
        """The connection string for libpq. It may hold a password."""
        scheme, _, rest = address.partition("://")
        user, at, host = rest.rpartition("@")
        if "@" in user or "/" in user:
            # libpq would take what is behind them for a host or a port, and name it in what it says.
            raise PlaceError("an @ or / in a name or a password has to be written as %40 or %2F")
        for each in host.partition("/")[0].split(","):
            if not re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?", each):
                raise PlaceError("a port is no number, or a ? or : in a password is not written as %3F or %3A")
        name, colon, _ = user.partition(":")
        shown = [(name, "***" if name in _SECRETS else value) for name, value in words]
        self.shown = _joined(f"{scheme}://{name}{':***' if colon else ''}{at}{host}", shown)
        """For messages and process lists."""
        self.name = unquote(host.partition("/")[2]) or "the database"


def _joined(address: str, words: list[tuple[str, str]]) -> str:
    return f"{address}?{urlencode(words, safe='/,:*')}" if words else address
