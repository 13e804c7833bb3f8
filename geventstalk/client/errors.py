"""The exceptions that calls of the client raise."""

from __future__ import annotations


class BeanstalkError(Exception):
    """Each error of this library is one."""


class ServerError(BeanstalkError):
    """The server's reply says that it did not do the command. The connection goes on."""


class NotFound(ServerError):
    """There is no such job or tube, or the job's state does not fit, or another client has reserved it."""


class TimedOut(ServerError):
    """No job came within the time of the reserve."""


class DeadlineSoon(ServerError):
    """A job that this connection has reserved times out within a second."""


class Buried(ServerError):
    """The server had no memory for the change and buried the job. `id` is that of a put."""

    def __init__(self, id: int | None) -> None:
        super().__init__("the server buried the job" if id is None else f"the server buried the job {id}")
        self.id = id


class Draining(ServerError):
    """The server takes no new jobs."""


class JobTooBig(ServerError):
    """The body is larger than the server takes."""


class OutOfMemory(ServerError):
    """The server has no room."""


class InternalError(ServerError):
    """The server has a fault."""


class BadFormat(ServerError):
    """The server does not understand the arguments."""


class ExpectedCrlf(ServerError):
    """The body does not end where the command said."""


class UnknownCommand(ServerError):
    """The server does not know the verb."""


class NotIgnored(ServerError):
    """The tube is the last one that the connection watches."""


class Unauthorized(ServerError):
    """The server knows no user by this token, or the connection shows none."""


class Forbidden(ServerError):
    """The user has no right to this."""


class ConnectionLost(BeanstalkError):
    """The connection is gone. If `sent` is true, the server may have done the command."""

    def __init__(self, message: str, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class BadReply(ConnectionLost):
    """The server's answer is no reply to the command. The connection is closed."""
