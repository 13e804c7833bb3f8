"""geventstalk watch: prints the events of the jobs of a tube."""

from __future__ import annotations

import time
from typing import Final

import click

from geventstalk.cli.client import EXIT_NOTHING, Context, client_command, note, plural
from geventstalk.cli.client_show import body_line, count, cut, width
from geventstalk.cli.ending import Stopped
from geventstalk.cli.params import Number, Seconds, TubeName
from geventstalk.exits import EXIT_OK
from geventstalk.logs import one_line
from geventstalk.remote.watching import Event, OverApi, OverProtocol, Source, compare

_BODY_BYTES: Final = 200


@client_command("watch")
@click.option("--interval", metavar="SECONDS", type=Number(0.05, 3600), default=1.0, help="Seconds between two looks.")
@click.option("--for", "duration", metavar="TIME", type=Seconds(), help="End after this time, such as 90 or 15min.")
@click.argument("tube", type=TubeName())
def watch(context: Context, interval: float, duration: int | None, tube: str) -> int:
    """Print what happens to the jobs of a tube.

    Over the server's API: each put, reservation, release, burying and deletion of the first and the last 250 jobs
    of the tube. Over the protocol alone: the same of the jobs that were the next of their state once. Of other jobs,
    and of jobs that come and go between two looks, it says how many there were.

    The command goes on until Ctrl-C or --for. The exit code is then 130, or 0; and 1 when nothing happened.
    """
    seen = 0
    end = None if duration is None else time.monotonic() + duration
    try:
        source = _source(context, tube)
        before = source.look()
        if not before.jobs and not context.json:
            note(f"{tube} has no jobs at this moment")
        while end is None or time.monotonic() < end:
            time.sleep(interval if end is None else max(0.0, min(interval, end - time.monotonic())))
            now = source.look()
            for event in compare(before, now, source.where):
                seen += event.jobs
                _print(context, event)
            before = now
    except Stopped:
        note(f"stopped; {plural(seen, 'event')}")
        raise
    return EXIT_OK if seen else EXIT_NOTHING


def _source(context: Context, tube: str) -> Source:
    api = context.allowed_api("read")
    if api is not None:
        return OverApi(api, tube, _BODY_BYTES)
    note("without the server's API (--http) only jobs that were next of their state are seen one by one")
    return OverProtocol(context.server, tube, _BODY_BYTES)


def _print(context: Context, event: Event) -> None:
    if context.json:
        said = {key: value for key, value in vars(event).items() if value is not None}
        context.write(said)
        return
    moment = time.strftime("%H:%M:%S")
    if event.id is None or event.job is None:
        text = f"{moment}  {event.event:<9}  {plural(event.jobs, 'job')} between two looks"
    else:
        state = f"to {event.tube}" if event.tube else event.job["state"] if event.event != "deleted" else ""
        body = body_line(event.job.get("body"))
        text = f"{moment}  {event.event:<9}  {event.id:>8}  {state:<8}  pri {count(event.job['pri'])}  {body}"
    room = width()
    text = one_line(text.rstrip())
    click.echo(text if room is None else cut(text, room))
