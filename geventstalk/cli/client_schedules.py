"""geventstalk schedules: the jobs that the server puts at times of its own."""

from __future__ import annotations

import time
from typing import Any, Final
from urllib.parse import quote

import click

from geventstalk.cli.client import EXIT_NOTHING, Context, client_command
from geventstalk.cli.client_policies import change_setting
from geventstalk.cli.client_show import Column, echo_table
from geventstalk.exits import EXIT_OK
from geventstalk.remote.api import field
from geventstalk.remote.errors import Absent

_COLUMNS: Final = (
    Column("SCHEDULE"),
    Column("CRON"),
    Column("ZONE", rank=2),
    Column("TUBE", flexible=True),
    Column("NEXT"),
    Column("LAST", rank=1),
)


@client_command("schedules")
def schedules(context: Context) -> int:
    """Show the schedules of the server and their next ticks.

    Over the server's API. They are in the server's file of settings, which geventstalk reload has the server read
    again, or made at run time by geventstalk schedule. The exit code is 1 when there is none.
    """
    found = field(context.need_api("the list of schedules").get("/schedules"), "schedules", list)
    if context.json:
        for each in found:
            context.write(each)
    elif found:
        echo_table(_COLUMNS, [_row(each) for each in found])
    else:
        raise Absent("there is no schedule")
    return EXIT_OK if found else EXIT_NOTHING


def _row(schedule: dict[str, Any]) -> list[str]:
    last = schedule["last"]
    told = "-"
    if last is not None:
        job = "" if last["job"] is None else f" job {last['job']}"
        told = f"{_moment(last['tick'])} {last['outcome']}{job}"
    return [
        schedule["name"],
        schedule["cron"],
        schedule["zone"],
        schedule["tube"],
        _moment(schedule["next"]),
        told,
    ]


def _moment(unix_s: int) -> str:
    """Returns a moment in the time zone of the reader."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


@client_command("schedule")
@click.argument("action", type=click.Choice(("set", "remove")))
@click.argument("name")
@click.argument("terms", nargs=-1, metavar="[KEY=VALUE]...")
def schedule(context: Context, action: str, name: str, terms: tuple[str, ...]) -> int:
    """Set or remove a schedule at run time.

    Over the server's API, as an admin. `set` takes the keys of schedules in the file of settings:
    cron="0 3 * * *" zone=Europe/Berlin tube=reports body=nightly. A schedule of the same name is replaced. The journal
    keeps it. `remove` ends one that was made at run time.
    """
    return change_setting(context, action, f"/schedules/{quote(name, safe='')}", f"the schedule {name}", terms)
