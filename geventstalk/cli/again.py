"""The process begins anew: the same command in the same process, with its listening sockets.

So no client is refused meanwhile, whoever started the process sees no end of it, and ports and paths that only root may
open stay open. This room must not know why that is done.
Invariant: what is handed over is named in one variable of the environment, which only this process takes at its word.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

from geventstalk.cli.main import SOCKETS
from geventstalk.exits import STOP_SIGNALS

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)


def begin_anew(
    served: Iterable[socket.socket],
    http: Iterable[socket.socket],
    environment: MutableMapping[str, str],
    **left: object,
) -> NoReturn:
    """`left` is for taken_over(). Signals wait until the program handles them again.

    Raises OSError when the program cannot be started.
    """
    import json

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    kept = {"pid": os.getpid(), "served": [_keep(one) for one in served], "http": [_keep(one) for one in http]}
    environment[SOCKETS] = json.dumps({**kept, **left})
    program = sys.executable
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os.execve(program, [program, *sys.orig_argv[1:]], environment)


def _keep(listener: socket.socket) -> list[int]:
    """A socket's descriptor, and that of the file of a unix socket that this process made."""
    fds = [listener.fileno(), getattr(listener, "pin", -1)]
    for fd in fds:
        if fd >= 0:
            os.set_inheritable(fd, True)
    return fds


def taken_over(environment: MutableMapping[str, str]) -> Mapping[str, Any] | None:
    """What the last program of this process has left: its sockets, and what it wanted. None when there was none."""
    text = environment.pop(SOCKETS, None)
    if text is None:
        return None
    import json  # late: hardly any start needs it

    found: dict[str, Any] = json.loads(text)
    return found if found.get("pid") == os.getpid() else None


def let_signals_come() -> None:
    """Once they are handled again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
