"""The errors of commands for a running server. Each kind has an exit code, each text is one sentence for the user."""

from __future__ import annotations

from typing import Final

from geventstalk.stream import reason_of

_UNKNOWN_AUTHORITY: Final = (18, 19, 20, 21)
"""OpenSSL's codes for a certificate whose authority is not trusted (X509_STORE_CTX_get_error(3))."""


class ClientError(Exception):
    """The command could not do its work."""


class Unreachable(ClientError):
    """The server cannot be reached, closed the connection, or does not answer in time."""


class Nonsense(ClientError):
    """The peer does not speak the protocol."""


class NotAllowed(ClientError):
    """The server or its API wants a token, or another token, or the user has no right to do that."""


class WantsToken(NotAllowed):
    """The server serves only users, and has not seen whose the connection is."""


class NotDone(ClientError):
    """The server refuses, or cannot do that."""


class Absent(NotDone):
    """There is no such job or tube, or the job is in another state."""


def why_lost(error: OSError) -> str:
    """Returns why there is no connection, with the option that helps where the peer's certificate is not trusted."""
    hint = "; --tls-ca names its authority" if getattr(error, "verify_code", 0) in _UNKNOWN_AUTHORITY else ""
    return reason_of(error) + hint
