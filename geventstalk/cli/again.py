"""Replaces the running program by a new one: the same command in the same process, with its listening sockets.

So no client is refused meanwhile, the parent process sees no exit, and ports and paths that only root may open stay
open. This module must not know the reason. Invariant: one variable of the environment names the sockets, and only this
process trusts it.
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
    """Starts the program anew; taken_over() returns `left` there. Signals wait until the program handles them again.

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
    """Returns a socket's descriptor, and that of the file of a unix socket that this process made."""
    fds = [listener.fileno(), getattr(listener, "pin", -1)]
    for fd in fds:
        if fd >= 0:
            os.set_inheritable(fd, True)
    return fds


def taken_over(environment: MutableMapping[str, str]) -> Mapping[str, Any] | None:
    """Returns the sockets and the state that the last program of this process left. None when there was none."""
    text = environment.pop(SOCKETS, None)
    if text is None:
        return None
    import json  # late: hardly any start needs it

    found: dict[str, Any] = json.loads(text)
    return found if found.get("pid") == os.getpid() else None


def let_signals_come() -> None:
    """Delivers waiting signals, once the program handles them again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
