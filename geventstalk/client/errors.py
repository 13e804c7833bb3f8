"""Why a command against a running server ends without having done its work. Each kind has an exit code."""

from __future__ import annotations


class ClientError(Exception):
    """The text is one sentence for the user."""


class Unreachable(ClientError):
    """The server cannot be reached, went away, or does not answer in time."""


class Nonsense(ClientError):
    """What answers does not speak the protocol."""


class NotAllowed(ClientError):
    """The API wants a token, or another one."""


class NotDone(ClientError):
    """The server refuses, or cannot do that."""


class Absent(NotDone):
    """There is no such job or tube, or the job is in a state that does not fit."""
