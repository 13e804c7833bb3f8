"""geventstalk policies: what holds for puts into the tubes of a pattern."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

import click

from geventstalk.cli.client import EXIT_NOTHING, Context, client_command
from geventstalk.cli.client_show import Column, echo_table
from geventstalk.cli.params import TubeName
from geventstalk.exits import EXIT_OK
from geventstalk.remote.api import field
from geventstalk.remote.errors import Absent

_COLUMNS: Final = (Column("TUBES"), Column("POLICY", flexible=True))


@client_command("policies")
@click.argument("tube", required=False, type=TubeName())
def policies(context: Context, tube: str | None) -> int:
    """Show the policies of tubes, or the one that counts for a tube.

    Over the server's API. They are in the server's file of settings; geventstalk reload has the server read it again.
    The exit code is 1 when there is none.
    """
    query = "" if tube is None else f"?{urlencode({'tube': tube})}"
    found = field(context.need_api("the list of policies").get(f"/policies{query}"), "policies", list)
    if context.json:
        for each in found:
            context.write(each)
    elif found:
        echo_table(_COLUMNS, [[each["tubes"], _told(each)] for each in found])
    else:
        raise Absent("there is no policy" if tube is None else f"the tube {tube} has no policy")
    return EXIT_OK if found else EXIT_NOTHING


def _told(policy: dict[str, Any]) -> str:
    words = list(policy["tags"])
    for key, lowest in (("priority", 0), ("delay", 0), ("ttr", 0)):
        least, most = policy[key]["min"], policy[key]["max"]
        words += [f"{key}>={least}"] * (least > lowest) + [f"{key}<={most}"] * (most < (1 << 32) - 1)
    limits = ("max_jobs", "max_job_bytes", "max_bytes", "max_rate")
    words += [f"{key}={policy[key]}" for key in limits if policy.get(key) is not None]
    words += [f"{policy[key]} {key.replace('_', ' ')}" for key in ("refused_puts", "delayed_puts") if policy.get(key)]
    return " ".join(words) or "-"
