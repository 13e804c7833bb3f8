"""geventstalk stats, geventstalk connections: the statistics of the protocol, and the clients of the server."""

from __future__ import annotations

from typing import Any, Final

import click

from geventstalk.cli.client import EXIT_NOTHING, Context, client_command
from geventstalk.cli.client_show import Column, age, count, echo_table
from geventstalk.cli.params import TubeName
from geventstalk.exits import EXIT_OK
from geventstalk.logs import one_line
from geventstalk.remote.api import PAGE, field
from geventstalk.remote.errors import Absent, Nonsense

_COLUMNS: Final = (
    Column("NUMBER", right=True),
    Column("ADDRESS", flexible=True),
    Column("USER", rank=5),
    Column("USES", flexible=True, rank=3),
    Column("WATCHES", flexible=True, rank=2),
    Column("HOLDS", right=True),
    Column("WAITS", right=True, rank=1),
    Column("SILENT", right=True, rank=4),
)


@client_command("stats")
@click.argument("tube", required=False, type=TubeName())
def stats(context: Context, tube: str | None) -> int:
    """Print the statistics of the server, or of a tube.

    As `stats` and `stats-tube` of the protocol have them, for any beanstalkd. The exit code is 1 when there is no such
    tube.
    """
    found = context.server.stats() if tube is None else next(iter(context.server.tube_stats([tube])), None)
    if found is None:
        raise Absent(f"there is no tube {tube}")
    if context.json:
        context.write(found)
    else:
        for key, value in found.items():
            click.echo(f"{one_line(key)}: {one_line(value)}")
    return EXIT_OK


@client_command("connections")
@click.option("--tube", metavar="TUBE", type=TubeName(), help="Only those that use or watch it.")
@click.option("--user", metavar="USER", help="Only those of this user.")
@click.option(
    "--sort",
    type=click.Choice(["number", "address", "reserved", "waiting", "connected"]),
    default="number",
    help="The most reserved jobs first, the longest wait first, and so on.",
)
def connections(context: Context, tube: str | None, user: str | None, sort: str) -> int:
    """Show the clients of the server.

    What each uses, watches and holds, and for how long it waits. Over the server's API. The exit code is 1
    when there is none.
    """
    api = context.need_api("the list of connections")
    descending = sort in ("reserved",) or None
    seen = 0
    rows: list[list[str]] = []
    while True:
        found = api.get(
            "/connections", tube=tube, user=user, sort=sort, descending=descending, offset=seen or None, limit=PAGE
        )
        shown = field(found, "connections", list)
        seen += len(shown)
        for one in shown:
            if context.json:
                context.write(one)
            else:
                rows.append(_row(one))
        if not shown or seen >= field(found, "total", int):
            break
    if rows:
        echo_table(_COLUMNS, rows)
    elif not seen and not context.json:
        raise Absent("there is no such connection" if tube or user else "there are no connections")
    return EXIT_OK if seen else EXIT_NOTHING


def _row(one: dict[str, Any]) -> list[str]:
    try:
        more = one["watching"] - len(one["watches"])
        return [
            str(one["number"]),
            str(one["address"]),
            str(one["user"] or "-"),
            str(one["uses"]),
            ", ".join(one["watches"]) + (f" and {count(more)} more" if more else ""),
            count(one["reserved"]),
            age(one["waiting_s"]),
            age(one["idle_s"]),
        ]
    except (KeyError, TypeError):
        raise Nonsense("what answers is not the API of geventstalk: a connection of it is none") from None
