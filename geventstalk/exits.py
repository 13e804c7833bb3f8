"""The signals that stop the process, and its exit codes.

This module must not import anything that takes time: the handlers of early signals need it. docs/reference.md tells an
operator what to do on each exit code.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

EXIT_OK = 0
EXIT_DAMAGE = 1
"""The journal is damaged or cannot be replayed, or a command could not do its work."""
EXIT_USAGE = 5
"""The command line or a setting is wrong."""
EXIT_LOCKED = 10
"""The journal's directory is in use by another process, or cannot be used."""
EXIT_USER_UNREADABLE = 32
EXIT_NO_SUCH_USER = 33
EXIT_USER = 34
"""The process cannot become the user of -u. These three are upstream's."""
EXIT_UNREACHABLE = 69
"""EX_UNAVAILABLE of sysexits.h: a server cannot be reached, went away, or does not answer in time."""
EXIT_UNEXPECTED = 70
"""EX_SOFTWARE of sysexits.h: geventstalk has a fault of unknown extent."""
EXIT_DESCRIPTORS = 71
"""EX_OSERR of sysexits.h: the limit of open files leaves none for a client."""
EXIT_JOURNAL = 74
"""EX_IOERR of sysexits.h: the journal could not be written. Nothing after the last commit was acknowledged."""
EXIT_NONSENSE = 76
"""EX_PROTOCOL of sysexits.h: the peer of a command is no beanstalkd, or not the API."""
EXIT_NOT_ALLOWED = 77
"""EX_NOPERM of sysexits.h: the server or its API wants a token, or another one."""
EXIT_LISTEN = 111
"""The server cannot listen. This is upstream's."""
