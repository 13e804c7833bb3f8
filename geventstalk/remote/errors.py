"""The errors of commands for a running server. Each kind has an exit code, each text is one sentence for the user."""

from __future__ import annotations


class ClientError(Exception):
    """The command could not do its work."""


class Unreachable(ClientError):
    """The server cannot be reached, closed the connection, or does not answer in time."""


class Nonsense(ClientError):
    """The peer does not speak the protocol."""


class NotAllowed(ClientError):
    """The API wants a token, or another token."""


class NotDone(ClientError):
    """The server refuses, or cannot do that."""


class Absent(NotDone):
    """There is no such job or tube, or the job is in another state."""
