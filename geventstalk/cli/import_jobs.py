"""geventstalk import: reads the output of `export` into a journal without jobs."""

from __future__ import annotations

import sys

import click

from geventstalk.cli.params import PLACE
from geventstalk.offline import transfer


@click.command(name="import")
@click.argument("directory", metavar="DIR", type=PLACE)
def import_jobs(directory: str) -> int:
    """Read jobs from standard input into a journal without jobs.

    The input is what `export` printed. DIR is new, empty, or a journal without jobs. An import that fails changes
    nothing. DIR may also be postgresql://HOST/DATABASE, when no node uses it.
    """
    done = transfer.import_lines(sys.stdin.buffer, directory)
    click.echo(f"imported {done.jobs} jobs into {directory}; {done.what_follows}")
    return 0
