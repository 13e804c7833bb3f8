"""The parts that all verbs share, and the verbs that take the name of a tube, or nothing.

This module must not know which verbs there are, nor sockets, gevent, clocks or durability.
Invariant: a handler raises ProtocolError before it has changed or counted anything, or answers, now or in later slices.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from geventstalk.wire import protocol as p
from geventstalk.wire.commands import Commands

# What a verb is about.
NOTHING: Final = 0
JOB: Final = 1
"""The job whose id is its first argument."""
JOBS: Final = 2
"""The jobs of a batch."""
TUBE: Final = 3
"""The tube that its first argument names."""
USED: Final = 4
"""The tube that the client uses."""
SERVER: Final = 5
"""All tubes."""
RESERVE: Final = 6
"""The tubes that the client watches."""


class Verb:
    """A command: the words that its lines begin with, with the space before arguments, and the key of its statistic.

    `changes` says that it may change what survives a restart. A put changes that when its body is complete.
    """

    def __init__(self, words: bytes, statistic: str = "", changes: bool = False) -> None:
        self.words = words
        self.statistic = statistic
        self.changes = changes
        self.number: i64 = 0  # of its count in Service.commands
        self.subject = NOTHING
        self.right = 0
        self.deletes = words in (b"delete ", b"delete-batch ")  # which takes another right for what is not reserved
        self.line_bytes_max = p.LINE_BYTES_MAX

    def needs(self, right: int, subject: int) -> Verb:
        """Sets the right that users need, where they have rights, and what the right is about: see guarded.py."""
        self.subject, self.right = subject, right
        return self

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        """Handles a command with these arguments, and counts it if they are right."""
        raise NotImplementedError

    def tube_name(self, arguments: bytes) -> bytes:
        """Returns the tube that the arguments of a verb with the subject TUBE name. Raises ProtocolError."""
        return p.name_argument(arguments)

    def refusal(self, arguments: bytes) -> bytes:
        """Returns the reply to a user without the right. Raises ProtocolError for arguments that are wrong."""
        return p.R_NOT_FOUND


class OfTube(Verb):
    """A verb whose argument is the name of a tube."""

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        name = p.name_argument(arguments)
        client.counts[self.number] += 1
        self.do(client, name, now_ns)

    def do(self, client: Commands, name: bytes, now_ns: int) -> None:
        raise NotImplementedError


class Bare(Verb):
    """A verb without arguments: nothing may follow its words."""

    def run(self, client: Commands, arguments: bytes, now_ns: int) -> None:
        client.counts[self.number] += 1
        self.do(client, now_ns)

    def do(self, client: Commands, now_ns: int) -> None:
        raise NotImplementedError
