"""geventstalk reload: the server reads its files again."""

from __future__ import annotations

from geventstalk.cli.client import Context, client_command
from geventstalk.exits import EXIT_OK
from geventstalk.remote.api import field
from geventstalk.remote.errors import NotDone


@client_command("reload")
def reload(context: Context) -> int:
    """Read certificates, users and settings again, all or none.

    Over the server's API: the protocol has no command for it. Without the API, send the server SIGHUP.
    """
    try:
        api = context.need_api("a reload")
    except NotDone as error:
        raise NotDone(f"{error}; or on the server's host: kill -HUP {context.server.facts.get('pid', '')}") from None
    answer = api.post("/reload", {})
    files, at_restart = field(answer, "files", list), field(answer, "at_restart", list)
    context.say(f"read again: {', '.join(files)}" if files else "the server has no files to read again")
    if at_restart:
        context.say(f"in use after a restart only: {', '.join(at_restart)}")
    if context.json:
        context.write({"files": files, "at_restart": at_restart})
    return EXIT_OK
