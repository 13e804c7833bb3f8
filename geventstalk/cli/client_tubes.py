"""geventstalk tubes, geventstalk pause: shows tubes, and pauses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import click

from geventstalk.cli.client import EXIT_NOTHING, Context, client_command, names
from geventstalk.cli.client_show import NO_VALUE, Column, age, count, echo_table
from geventstalk.cli.params import Seconds, TubeName
from geventstalk.exits import EXIT_OK
from geventstalk.remote import select, shapes
from geventstalk.remote.api import tube_path
from geventstalk.remote.errors import Absent
from geventstalk.remote.protocol import DEFAULT
from geventstalk.remote.shapes import Shape

STATE_COLUMNS: Final = (
    Column("READY", right=True),
    Column("RESERVED", right=True, rank=2),
    Column("DELAYED", right=True, rank=4),
    Column("BURIED", right=True),
)
_COLUMNS: Final = (
    Column("TUBE", flexible=True),
    *STATE_COLUMNS,
    Column("OLDEST", right=True, rank=1),
    Column("WATCHING", right=True, rank=3),
    Column("WAITING", right=True, rank=4),
    Column("USING", right=True, rank=7),
    Column("PUT", right=True, rank=5),
    Column("DELETED", right=True, rank=6),
    Column("PAUSED", right=True, rank=3),
)
SORTS: Final = ("name", "ready", "reserved", "delayed", "buried", "oldest", "watching", "put")


@client_command("tubes")
@click.option("--sort", type=click.Choice(SORTS), default="name", help="Largest first, names in their order.")
@click.argument("wanted", metavar="[TUBE]...", nargs=-1, type=TubeName(many=True))
def tubes(context: Context, sort: str, wanted: Sequence[str]) -> int:
    """Show the tubes and how many jobs each has.

    TUBE may hold `*`, which stands for anything. Over the protocol, for any beanstalkd. The exit code is 1 when there
    is no such tube.
    """
    found = sorted(tube_shapes(context, wanted), key=lambda tube: _order(tube, sort))
    if context.json:
        for tube in found:
            context.write(tube)
    elif found:
        echo_table(_COLUMNS, [_row(tube) for tube in found])
    else:
        raise Absent(f"there is no tube {names(wanted)}" if wanted else "there is no tube that this user may look at")
    return EXIT_OK if found else EXIT_NOTHING


def tube_shapes(context: Context, wanted: Sequence[str]) -> list[Shape]:
    """Returns the tubes that match one of the patterns, or all."""
    known = context.server.tubes()
    if wanted:
        known = [name for name in known if any(select.matches(name, pattern) for pattern in wanted)]
    return [shapes.tube(facts, asker_in=DEFAULT) for facts in context.server.tube_stats(known)]


def _order(tube: Shape, sort: str) -> tuple[Any, ...]:
    if sort == "name":
        return (tube["name"],)
    numbers = {**tube["jobs"], "oldest": oldest(tube) or 0, "watching": tube["watching"], "put": tube["totals"]["put"]}
    return (-numbers[sort], tube["name"])


def _row(tube: Shape) -> list[str]:
    totals = tube["totals"]
    return [
        tube["name"],
        *state_cells(tube),
        age(oldest(tube)),
        *[count(tube[key]) for key in ("watching", "waiting", "using")],
        count(totals["put"]),
        count(totals["delete"]),
        paused(tube),
    ]


_LASTING_S: Final = (1 << 32) - 1


def state_cells(tube: Shape) -> list[str]:
    return [count(tube["jobs"][state]) for state in ("ready", "reserved", "delayed", "buried")]


def oldest(tube: Shape) -> float | None:
    """Returns the age of the oldest ready job, where there is one and the server tells it."""
    found: float | None = tube.get("ages", {}).get("ready")
    return found


def paused(tube: Shape) -> str:
    """Returns the rest of the tube's pause; that of a policy has no end."""
    if tube["paused_s"] == _LASTING_S:
        return "by policy"
    return age(tube["pause_left_s"]) if tube["paused_s"] else NO_VALUE


@client_command("pause")
@click.argument("tube", type=TubeName(many=True))
@click.argument("time", type=Seconds())
def pause(context: Context, tube: str, time: int) -> int:
    """Pause a tube: no client can reserve a job of it for a while.

    TUBE may hold `*`, which stands for anything. TIME is 90, 90s, 15min, 2h or 1d; 0 ends a pause. Over the API where
    the server has one, so that its audit knows, otherwise over the protocol. The exit code is 1 when there is no such
    tube.
    """
    known = [name for name in context.server.tubes() if select.matches(name, tube)]
    api = context.allowed_api("admin") if known else None
    done = 0
    for name in known:
        try:
            if api is None:
                context.server.pause(name, time)
            else:
                api.patch(tube_path(name), {"pause_s": time})
        except Absent:
            continue  # the tube is gone with its last job
        done += 1
        context.say(f"{name} is paused for {age(time)}" if time else f"{name} is not paused any more")
        if context.json:
            context.write({"name": name, "paused_s": time})
    if not done:
        raise Absent(f"there is no tube {tube}")
    return EXIT_OK
