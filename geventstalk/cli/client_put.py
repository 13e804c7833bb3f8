"""geventstalk put: puts jobs into a tube."""

from __future__ import annotations

import os
import sys
from base64 import b64encode
from collections.abc import Iterator
from typing import Final

import click

from geventstalk.cli.client import Context, client_command, plural
from geventstalk.cli.client_progress import progress
from geventstalk.cli.ending import Failed, Stopped, whole
from geventstalk.cli.params import PutTags, Seconds, TubeName, Whole
from geventstalk.exits import EXIT_DAMAGE, EXIT_NONSENSE, EXIT_OK
from geventstalk.limits import U32_MAX
from geventstalk.remote.api import field
from geventstalk.remote.errors import ClientError

_PRI: Final = 1 << 16
_TTR_S: Final = 60
_STDIN: Final = "-"


@client_command("put")
@click.option("--pri", metavar="N", type=Whole(0, U32_MAX), default=_PRI, help=f"Priority, 0 first. Default: {_PRI}.")
@click.option(
    "--delay", metavar="TIME", type=Seconds(), default="0", help="Time before the job is ready, such as 90 or 15min."
)
@click.option("--ttr", metavar="TIME", type=Seconds(), default=str(_TTR_S), help=f"Time to run. Default: {_TTR_S}.")
@click.option(
    "--tags", metavar="TAGS", type=PutTags(), default="", help="Tags of the job, such as 'idp:order-7 tries:3'."
)
@click.option("--lines", is_flag=True, help="Put each line of standard input as a job of its own.")
@click.argument("tube", type=TubeName())
@click.argument("body", required=False)
def put(context: Context, pri: int, delay: int, ttr: int, tags: str, lines: bool, tube: str, body: str | None) -> int:
    """Put a job into a tube.

    Without BODY, or with -, the body is what comes on standard input, byte for byte. Over the API where the server has
    one, so that its audit knows, otherwise over the protocol. With --lines always over the protocol: that is faster,
    and each line would be one of the audit. The exit code is 1 when the server refuses the job. A job whose tag idp
    another job of the tube has is not put, and that is no failure.
    """
    if lines and body not in (None, _STDIN):
        raise click.UsageError("with --lines the jobs come on standard input, not as BODY")
    if lines:
        if any(word.startswith("idp:") for word in tags.split()):
            raise click.UsageError("with --lines all jobs would have the same unique key")
        return _put_lines(context, tube, (pri, delay, ttr), tags)
    content = _stdin_whole() if body is None or body == _STDIN else os.fsencode(body)
    api = context.allowed_api("admin")
    if api is None:
        context.server.use(tube)
        _require_tags(context, tags)
        id, state = context.server.put(content, pri, delay, ttr, tags)
    else:
        job = {"tube": tube, "body_base64": b64encode(content).decode(), "pri": pri, "delay_s": delay, "ttr_s": ttr}
        answer = api.post("/jobs", {**job, **({"tags": tags} if tags else {})})
        id = field(answer, "id", int)
        state = "" if "tube" in answer else field(answer, "state", str)
    context.say(f"job {id} has the same unique key: it is {state}" if state else f"put job {id} into {tube}")
    if context.json:
        context.write({"id": id, "tube": tube, **({"first": state} if state else {"size": len(content)})})
    return EXIT_OK


def _put_lines(context: Context, tube: str, numbers: tuple[int, int, int], tags: str) -> int:
    context.server.use(tube)
    _require_tags(context, tags)
    done = first = last = 0
    try:
        with progress(f"put into {tube}", _stdin_size()) as bar:
            sent = 0
            for line in _stdin_lines():
                with whole():
                    last, _ = context.server.put(line[:-1] if line.endswith(b"\n") else line, *numbers, tags)
                    done += 1
                first = first or last
                sent += len(line)
                bar.reach(sent if bar.total else done)
    except (Stopped, ClientError, Failed):
        _told(context, tube, done, first, last, stopped=True)
        raise
    _told(context, tube, done, first, last, stopped=False)
    if not done:
        raise Failed("there was no line on standard input", EXIT_DAMAGE)
    return EXIT_OK


def _require_tags(context: Context, tags: str) -> None:
    """Raises Failed for a server that would take the tags for an error, and the body for a command."""
    if tags and not context.server.knows(tags.partition(":")[0]):
        raise Failed("the server knows no tags", EXIT_NONSENSE)


def _told(context: Context, tube: str, done: int, first: int, last: int, *, stopped: bool) -> None:
    if context.json:
        context.write({"tube": tube, "done": done, "first": first or None, "last": last or None, "stopped": stopped})
    elif done or stopped:
        ids = f", ids {first} to {last}" if done > 1 else f", id {first}" if done else ""
        click.echo(f"{'stopped: ' if stopped else ''}put {plural(done, 'job')} into {tube}{ids}", err=stopped)


def _stdin_size() -> int:
    """Returns the number of bytes that come, 0 when that is unknown."""
    try:
        return os.fstat(sys.stdin.fileno()).st_size
    except (OSError, ValueError):
        return 0


def _stdin_whole() -> bytes:
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise _unreadable(error) from None


def _stdin_lines() -> Iterator[bytes]:
    try:
        yield from sys.stdin.buffer
    except OSError as error:
        raise _unreadable(error) from None


def _unreadable(error: OSError) -> Failed:
    return Failed(f"cannot read standard input: {error.strerror or error}", EXIT_DAMAGE)
