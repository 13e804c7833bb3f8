"""The place of a journal as text: a directory, or the DSN of a database, which may hold a password.

This module must not know how a database is reached. Text is read as libpq reads it; what libpq refuses counts as well.
"""

from __future__ import annotations

from typing import Final

SHARED: Final = ("postgresql://", "postgres://")
"""The beginnings of the place of a log in a database."""
_PASSWORD: Final = r"(?<=//)([^/?#@:]*):[^?#]*(?=@)"
"""The password of `//USER:PASSWORD@HOST`. An @ or / in it that is not escaped is a mistake, and a part of it."""
_PARAMETER: Final = r"(?<=[?&])([^=&]*)=([^&]*)"
_SECRET: Final = frozenset({"password", "sslpassword"})
_HIDDEN: Final = "***"


def is_shared(place: str) -> bool:
    """Returns whether the log is in a database, so that several nodes may share it."""
    return place.startswith(SHARED)


def has_password(place: str) -> bool:
    """Returns whether the text holds a secret. `passfile` only names a file with one."""
    return without_password(place) != place


def without_password(place: str) -> str:
    """Returns the text as it may be shown."""
    if not is_shared(place):
        return place
    import re  # late, both: the start of a server with a directory needs neither
    from urllib.parse import unquote

    def hide(found: re.Match[str]) -> str:
        return f"{found[1]}={_HIDDEN}" if unquote(found[1]) in _SECRET else found[0]

    return re.sub(_PARAMETER, hide, re.sub(_PASSWORD, rf"\1:{_HIDDEN}", place))
