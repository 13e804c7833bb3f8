"""geventstalk import-binlog: reads the jobs of a stopped beanstalkd into a journal without jobs."""

from __future__ import annotations

import os

import click

from geventstalk.cli.output import refuse_damage
from geventstalk.cli.params import PLACE
from geventstalk.offline import transfer


@click.command(name="import-binlog")
@click.option("--accept-damage", is_flag=True, help="Import what can be read of a damaged binlog.")
@click.argument("binlog_directory", metavar="BINLOGDIR")
@click.argument("directory", metavar="DIR", type=PLACE)
def import_binlog(binlog_directory: str, directory: str, accept_damage: bool) -> int:
    """Read beanstalkd's binlog into a journal without jobs.

    Stop beanstalkd first. BINLOGDIR is only read. DIR is new, empty, or a journal without jobs. An import that fails
    changes nothing.
    """
    if os.path.exists(directory) and os.path.exists(binlog_directory) and os.path.samefile(binlog_directory, directory):
        raise click.UsageError("BINLOGDIR and DIR are the same directory")

    def judge(notes: list[str], findings: list[str]) -> None:
        for note in notes:
            click.echo(f"note: {note}", err=True)
        refuse_damage(findings, accept_damage)

    done = transfer.import_binlog(binlog_directory, directory, judge)
    counts = f"imported {done.jobs} jobs from {done.files} files into {directory}"
    click.echo(f"{counts}; {done.what_follows}")
    return 0
