"""The first steps of a process: opens missing standard descriptors, handles signals until the server does; and its end.

This module must not import anything that takes time: a signal that comes before the handlers are set kills the process,
and a process with pid 1 ignores it.
"""

from __future__ import annotations

import os
import signal
import sys

from geventstalk.exits import STOP_SIGNALS

TYPE_CHECKING = False  # as in typing, which alone takes 5 ms
if TYPE_CHECKING:
    import socket
    from types import FrameType
    from typing import NoReturn

DRAIN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def fill_standard_descriptors() -> None:
    """Opens /dev/null as stdin, stdout and stderr where the process was started without.

    Otherwise a file of the journal or a client gets their number, and a library that prints to stderr writes there.
    """
    try:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(fd)
    except OSError:
        return  # no /dev/null, or no descriptor: what needs one says so


def settle_stdout() -> None:
    """Writes what Python holds for stdout, and discards what cannot be written: the end would fail with it."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (OSError, ValueError):
            return  # it is closed


def end(code: int) -> NoReturn:
    # Freeing a million jobs one by one takes the interpreter longer than a stop may last.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # its reader is gone
    os._exit(code)


def handle_early_signals(listeners: list[socket.socket], *, serves: bool) -> None:
    """Handles signals until the server or the command does. Without a handler, a process with pid 1 would get none.

    A stop signal ends the process on the spot, a server with exit code 0. A command has not done its work then, and
    ends with 128 and the number of the signal. An exception instead would surface in the middle of an import or of a
    replay, where it may be swallowed. There is nothing to save: the journal stands any end.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        if listeners:
            from geventstalk.serving import listen

            listen.close_listeners(listeners)
        os._exit(0 if serves else 128 + number)

    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup
        signal.signal(number, stop)
    for number in DRAIN_SIGNALS:
        signal.signal(number, _remember)


_last_drain_signal = 0


def _remember(number: int, _frame: FrameType | None) -> None:
    global _last_drain_signal
    _last_drain_signal = number


def drains() -> bool:
    """Returns whether to refuse puts, by the drain signals that came before the server handled them itself."""
    return _last_drain_signal == signal.SIGUSR1
