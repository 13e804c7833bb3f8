"""geventstalk change: another priority, delay, time to run or tube for a job."""

from __future__ import annotations

from typing import Final

import click

from geventstalk.cli.client import Context, client_command
from geventstalk.cli.params import Seconds, TubeName, Whole
from geventstalk.exits import EXIT_OK
from geventstalk.limits import U32_MAX
from geventstalk.remote import shapes
from geventstalk.remote.errors import Absent, NotDone

_ID_MAX: Final = (1 << 63) - 1


@client_command("change")
@click.option("--pri", metavar="N", type=Whole(0, U32_MAX), help="Priority; 0 is the most urgent.")
@click.option("--delay", metavar="TIME", type=Seconds(), help="Wait this long from now on; 0: become ready.")
@click.option("--ttr", metavar="TIME", type=Seconds(), help="Time that a worker has for the job.")
@click.option("--tube", metavar="TUBE", type=TubeName(), help="Move the job to this tube.")
@click.argument("id", metavar="ID", type=Whole(1, _ID_MAX))
def change(context: Context, id: int, pri: int | None, delay: int | None, ttr: int | None, tube: str | None) -> int:
    """Change the priority, delay, time to run or tube of a job.

    TIME is 90, 90s, 15min, 2h or 1d. Over the API where the server has one, so that its audit knows; otherwise over the
    protocol, which cannot change the time to run. The exit code is 1 when there is no such job, or its state does not
    allow the change.
    """
    wanted = {"pri": pri, "delay_s": delay, "ttr_s": ttr, "tube": tube}
    given = {key: value for key, value in wanted.items() if value is not None}
    if not given:
        raise click.UsageError("nothing to change: give --pri, --delay, --ttr or --tube")
    api = context.allowed_api("admin")
    found = api.patch(f"/jobs/{id}", given) if api is not None else _over_protocol(context, id, pri, delay, ttr, tube)
    if context.json:
        context.write(found)
    context.say(f"changed job {id}")
    return EXIT_OK


def _over_protocol(
    context: Context, id: int, pri: int | None, delay_s: int | None, ttr_s: int | None, tube: str | None
) -> shapes.Shape:
    server = context.server
    if ttr_s is not None:
        context.need_api("changing the time to run")
        raise NotDone("the protocol alone cannot change the time to run")
    if not server.knows("reprioritize"):
        raise NotDone("beanstalkd cannot change a job; move and kick do what can be done")
    if pri is not None or delay_s is not None:
        if pri is None:
            pri = shapes.number(_facts(context, id), "pri")
        server.reprioritize(id, pri, delay_s)
    if tube is not None:
        server.move(id, tube)
    return shapes.job(_facts(context, id), None, 0)


def _facts(context: Context, id: int) -> dict[str, str]:
    for facts in context.server.job_stats([id]):
        return dict(facts)
    raise Absent(f"there is no job {id}")
