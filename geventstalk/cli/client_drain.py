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

    Over the API where the server has one, so that its audit knows, otherwise over the protocol. beanstalkd has no
    command for it: send it SIGUSR1, and it drains until it ends.
    """
    api = context.allowed_api("admin")
    draining = not off
    if api is not None:
        draining = field(api.patch("/server", {"draining": draining}), "draining", bool)
    elif context.server.knows("drain"):
        context.server.drain(draining)
    elif off:
        raise NotDone("beanstalkd drains until it ends")
    else:
        pid = context.server.facts.get("pid", "")
        raise NotDone(f"beanstalkd has no command for it; on its host: kill -USR1 {pid}")
    context.say("the server is draining: puts are refused" if draining else "the server takes jobs")
    if context.json:
        context.write({"draining": draining})
    return EXIT_OK
