"""A client of beanstalkd and geventstalk. It needs the standard library only; docs/client.md shows how it is used.

`Client` is for threads and gevent. `geventstalk.client.aio` has the same for asyncio.
"""

from geventstalk.client.blocking import Client, Pipeline
from geventstalk.client.errors import (
    BadFormat,
    BadReply,
    BeanstalkError,
    Buried,
    ConnectionLost,
    DeadlineSoon,
    Draining,
    ExpectedCrlf,
    Forbidden,
    InternalError,
    JobTooBig,
    NotFound,
    NotIgnored,
    OutOfMemory,
    ServerError,
    TimedOut,
    Unauthorized,
    UnknownCommand,
)
from geventstalk.client.protocol import Job, Stats
from geventstalk.client.session import Pending

__all__ = [
    "BadFormat",
    "BadReply",
    "BeanstalkError",
    "Buried",
    "Client",
    "ConnectionLost",
    "DeadlineSoon",
    "Draining",
    "ExpectedCrlf",
    "Forbidden",
    "InternalError",
    "Job",
    "JobTooBig",
    "NotFound",
    "NotIgnored",
    "OutOfMemory",
    "Pending",
    "Pipeline",
    "ServerError",
    "Stats",
    "TimedOut",
    "Unauthorized",
    "UnknownCommand",
]
