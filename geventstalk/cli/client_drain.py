"""geventstalk drain: the server refuses puts, and serves the jobs it has."""

from __future__ import annotations

import click

from geventstalk.cli.client import Context, client_command
from geventstalk.exits import EXIT_OK
from geventstalk.remote.api import field
from geventstalk.remote.errors import NotDone


@client_command("drain")
@click.option("--off", is_flag=True, help="Take jobs again.")
def drain(context: Context, off: bool) -> int:
    """Refuse puts, and serve every other command; --off ends that.

    Over the server's API: the protocol has no command for it. Without the API, send the server SIGUSR1 (SIGUSR2 with
    geventstalk ends draining).
    """
    try:
        api = context.need_api("draining")
    except NotDone as error:
        pid = context.server.facts.get("pid", "")
        name = "USR2" if off else "USR1"
        raise NotDone(f"{error}; or on the server's host: kill -{name} {pid}") from None
    server = api.patch("/server", {"draining": not off})
    draining = field(server, "draining", bool)
    context.say("the server is draining: puts are refused" if draining else "the server takes jobs")
    if context.json:
        context.write({"draining": draining})
    return EXIT_OK
