"""The program's entry: handles early signals, then runs the command that the first word names, or the server.

This module must not import what takes time before the signals are handled. From the first line of `main` on, a stop
signal ends the process with exit code 0. So that this line comes 15 ms after the start and not 50, every other module
is imported where it is used.
"""

from __future__ import annotations

import os
import sys

from geventstalk.cli.early import fill_standard_descriptors, handle_early_signals

TYPE_CHECKING = False  # as in typing, which alone takes 5 ms
if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

COMMANDS = (
    "top",
    "stats",
    "tubes",
    "jobs",
    "job",
    "connections",
    "put",
    "kick",
    "bury",
    "release",
    "delete",
    "move",
    "change",
    "flush",
    "pause",
    "drain",
    "reload",
    "policies",
    "policy",
    "schedule",
    "schedules",
    "watch",
    "work",
    "completion",
    "help",
    "journal",
    "export",
    "import",
    "import-binlog",
    "copy",
    "cluster",
    "token",
)
"""The first words of command lines that are not the server's. With the list here, a start of the server imports none of
these commands.
"""
SOCKETS = "_GEVENTSTALK_SOCKETS"
"""The variable by which a server that begins anew keeps its sockets, see again.py."""
COMPLETES = "_GEVENTSTALK_COMPLETE"
"""The variable by which a shell requests completions of a command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with these words, by default those of the process; returns the exit code.

    Does not return once it has served: the process ends then.
    """
    fill_standard_descriptors()
    listeners: list[socket.socket] = []
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["help"] and (len(words) == 1 or words[1] in COMMANDS):
        words = [*words[1:], "--help"]
    completes = COMPLETES in os.environ
    serves = not completes and (not words or words[0] not in COMMANDS)
    handle_early_signals(listeners, serves=serves)
    if SOCKETS in os.environ:
        from geventstalk.cli import again

        again.let_signals_come()
    if completes:
        from geventstalk.cli import completion

        return completion.answer(os.environ)
    if not serves:
        from geventstalk.cli import program

        return program.main(words)
    from geventstalk.cli import serve

    return serve.run(words, listeners)
