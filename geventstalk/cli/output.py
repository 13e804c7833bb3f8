"""Output of the commands beside the server: findings on stderr, objects as lines of JSON on stdout."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from collections.abc import Callable, Iterator
from typing import IO

import click

from geventstalk.exits import EXIT_DAMAGE, EXIT_OK
from journal.errors import JournalDamaged


def refuse_damage(findings: list[str], accept: bool) -> None:
    """Prints the findings. Raises JournalDamaged when the damage is not accepted."""
    report(findings)
    if findings and not accept:
        raise JournalDamaged(f"{len(findings)} findings; nothing was written, --accept-damage takes what is intact")


def report(findings: list[str]) -> int:
    """Prints the findings to stderr. Returns their exit code."""
    for finding in findings:
        click.echo(f"finding: {finding}", err=True)
    return EXIT_DAMAGE if findings else EXIT_OK


@contextlib.contextmanager
def output() -> Iterator[Callable[[dict[str, object]], None]]:
    """Yields a function that writes an object as a line of JSON to stdout."""
    stream: IO[str] | None = sys.stdout
    if stream is None:
        raise OSError(errno.EBADF, "stdout is closed")
    encode = json.JSONEncoder(separators=(",", ":")).encode

    def write(facts: dict[str, object]) -> None:
        stream.write(encode(facts) + "\n")

    yield write
    stream.flush()
