"""geventstalk export: prints every job of a journal as a line of JSON."""

from __future__ import annotations

import click

from geventstalk.cli.output import output, refuse_damage
from geventstalk.cli.params import PLACE
from geventstalk.offline import transfer


@click.command(name="export")
@click.option("--accept-damage", is_flag=True, help="Export what is intact in a damaged journal.")
@click.argument("directory", metavar="DIR", type=PLACE)
def export(directory: str, accept_damage: bool) -> int:
    """Print every job of a journal as a line of JSON.

    The first line says how many lines follow. DIR may be in use by a server. It may also be
    postgresql://HOST/DATABASE.
    """
    with output() as write:
        for line in transfer.export(directory, lambda findings: refuse_damage(findings, accept_damage)):
            write(line)
    return 0
