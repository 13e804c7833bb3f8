"""geventstalk jobs, geventstalk job: jobs that match a filter, and all about one job."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from geventstalk.api_shapes import body_shape
from geventstalk.cli.client import EXIT_NOTHING, Context, client_command, note, plural
from geventstalk.cli.client_show import NO_VALUE, Column, age, body_line, body_lines, count, echo_table, size
from geventstalk.cli.completion import terms
from geventstalk.cli.params import Whole
from geventstalk.exits import EXIT_OK
from geventstalk.fields import COUNTS
from geventstalk.logs import one_line
from geventstalk.remote import select, shapes
from geventstalk.remote.api import Api
from geventstalk.remote.errors import Absent, NotDone
from geventstalk.remote.protocol import PEEKS
from geventstalk.remote.select import BadSelection, Selection
from geventstalk.remote.shapes import Shape

LIST_BODY_BYTES: Final = 200
ONE_BODY_BYTES: Final = 65536
_API_BODY_BYTES_MAX: Final = 1 << 20
"""The bytes of a body that the API returns with a job."""
_COLUMNS: Final = (
    Column("ID", right=True),
    Column("TUBE", flexible=True, rank=1),
    Column("STATE"),
    Column("PRI", right=True, rank=3),
    Column("AGE", right=True, rank=2),
    Column("LEFT", right=True, rank=4),
    Column("RESERVES", right=True, rank=6),
    Column("SIZE", right=True, rank=5),
    Column("BODY", flexible=True),
)


def selection(words: Sequence[str], *, bare_words: bool) -> Selection:
    """Returns the selection of the words. Raises UsageError."""
    try:
        return select.parse(words, bare_words=bare_words)
    except BadSelection as error:
        raise click.UsageError(str(error)) from None


@client_command("jobs")
@click.option("--limit", metavar="N", type=Whole(0), help="So many jobs at the most, 0 for all. Default: 50.")
@click.option("--export", is_flag=True, help="Print all that match as lines for geventstalk import, with whole bodies.")
@click.option("--newest", is_flag=True, help="The newest first.")
@click.option(
    "--body",
    metavar="N",
    type=Whole(0, 65536),
    default=LIST_BODY_BYTES,
    help=f"So many bytes of each body. Default: {LIST_BODY_BYTES}.",
)
@click.argument("words", metavar="[FILTER]...", nargs=-1, shell_complete=terms)
def jobs(context: Context, limit: int | None, export: bool, newest: bool, body: int, words: Sequence[str]) -> int:
    """Show jobs that match a filter.

    FILTER is made of terms that must all hold, such as tube:mail state:buried,delayed 'age>1h' 'pri<10' id:100..200
    body:word. docs/reference.md has all of them.

    Over the server's API. Without the API only the next ready, delayed and buried job of each tube can be seen, and
    FILTER may name tubes and states. The exit code is 1 when no job matches.
    """
    wanted = selection(words, bare_words=True)
    if export:
        return _export(context, wanted, limit)
    limit = 50 if limit is None else limit
    found = _found(context, wanted, None if limit == 0 else limit + 1, newest, body)
    seen, more = 0, False
    rows = []
    for one in found:
        if more := bool(limit and seen == limit):
            break
        seen += 1
        if context.json:
            context.write(one)
        else:
            rows.append(_row(one))
    if rows:
        echo_table(_COLUMNS, rows)
    elif not seen and not context.json:
        raise Absent("no job matches")
    if more:
        note(f"there are more than {limit:,}; --limit says how many are shown")
    return EXIT_OK if seen else EXIT_NOTHING


def _export(context: Context, wanted: Selection, limit: int | None) -> int:
    """Prints the jobs that match with all that they have. The first line says what follows."""
    if limit is not None:
        raise click.UsageError("--export prints all jobs that match: --limit does not go with it")
    filter = f"id:{','.join(map(str, wanted.ids))}" if wanted.ids else wanted.filter
    lines = 0
    for line in context.need_api("an export").lines("/export", filter=filter):
        sys.stdout.buffer.write(line)
        lines += 1
    return EXIT_OK if lines > 1 else EXIT_NOTHING


def _found(context: Context, wanted: Selection, most: int | None, newest: bool, body: int) -> Iterator[Shape]:
    if wanted.ids:
        return _by_id(context, wanted.ids, body)
    api = context.allowed_api("read")
    if api is not None:
        return api.jobs(wanted.filter, newest_first=newest, body=body, most=most)
    if wanted.beyond is not None:
        context.need_api(f"looking for {wanted.beyond}")
        raise NotDone(f"the protocol alone cannot look for {wanted.beyond}")
    states = [state for state in PEEKS if state in wanted.states]
    if not states:
        context.need_api("looking for reserved jobs")
        raise NotDone("the protocol alone cannot look for reserved jobs")
    note("without the server's API (--http) only the next job of each tube and state can be seen")
    return _next_jobs(context, wanted, states, most, body)


def _by_id(context: Context, ids: Sequence[int], body: int) -> Iterator[Shape]:
    for facts in context.server.job_stats(ids):
        try:
            yield shapes.job(facts, context.server.peek(shapes.number(facts, "id")), body)
        except Absent:
            continue  # a client was faster


def _next_jobs(
    context: Context, wanted: Selection, states: Sequence[str], most: int | None, body: int
) -> Iterator[Shape]:
    server = context.server
    known = wanted.matching(server.tubes())
    for facts in list(server.tube_stats(sorted(known))):
        for state in states:
            if most == 0:
                return
            if not shapes.number(facts, f"current-jobs-{state}"):
                continue
            server.use(facts["name"])
            next_one = server.peek_next(state)
            for job_facts in server.job_stats([next_one[0]] if next_one else []):
                yield shapes.job(job_facts, next_one[1] if next_one else None, body)
                most = None if most is None else most - 1


def _row(job: Shape) -> list[str]:
    left = job.get("time_left_s")
    return [
        str(job["id"]),
        str(job["tube"]),
        str(job["state"]),
        str(job["pri"]),
        age(job["age_s"]),
        age(left) if left is not None else NO_VALUE,
        count(job["counts"]["reserves"]),
        size(job.get("size")),
        body_line(job.get("body")),
    ]


@client_command("job")
@click.option("--raw", is_flag=True, help="Print the body and nothing else, byte for byte.")
@click.option(
    "--body",
    metavar="N",
    type=Whole(0, 1 << 30),
    default=ONE_BODY_BYTES,
    help="So many bytes of the body. Default: 65536.",
)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=Whole(1, (1 << 63) - 1))
def job(context: Context, raw: bool, body: int, ids: Sequence[int]) -> int:
    """Show all about a job.

    Over the protocol, for any beanstalkd; the server's API adds who holds the job and since when. The body is shown as
    text, or in hexadecimal when it is no text. The exit code is 1 when one of the jobs is not there.
    """
    api = None if raw else context.allowed_api("read", quiet=True)
    missing = 0
    for at, id in enumerate(ids):
        try:
            found = _over_protocol(context, id, body) if api is None else (_over_api(context, api, id, body), b"")
        except Absent:
            missing += 1
            click.echo(f"there is no job {id}", err=True)
            continue
        if raw:
            sys.stdout.buffer.write(found[1])
        elif context.json:
            context.write(found[0])
        else:
            if at > missing:
                click.echo()
            _show(found[0])
    return EXIT_NOTHING if missing else EXIT_OK


def _over_api(context: Context, api: Api, id: int, most: int) -> Shape:
    """Returns the job's shape, with its holder. A body that is longer than the API returns comes over the protocol."""
    found = api.job(id, min(most, _API_BODY_BYTES_MAX))
    if most > _API_BODY_BYTES_MAX and not found["body"]["whole"]:
        body = context.server.peek(id)
        found["body"] = body_shape(body, len(body), most)
    return found


def _over_protocol(context: Context, id: int, most: int) -> tuple[Shape, bytes]:
    """Returns the job's shape, and its whole body."""
    content = context.server.peek(id)
    for facts in context.server.job_stats([id]):
        return shapes.job(facts, content, most), content
    raise Absent("there is no such job")


_TAG_FACTS: Final = (("tags", "text"), ("tried", "tried"), ("reason", "reason"))


def _show(job: Shape) -> None:
    counts: dict[str, Any] = job["counts"]
    left = job["time_left_s"]
    state = job["state"] if left is None else f"{job['state']}, {age(left)} left"
    if job.get("since_s") is not None:
        state += f", since {age(job['since_s'])}"
    if job.get("holder") is not None:
        state += f", held by connection {job['holder']}"
    facts = [
        ("job", str(job["id"])),
        ("tube", str(job["tube"])),
        ("state", state),
        ("priority", count(job["pri"])),
        ("age", age(job["age_s"])),
        ("delay", age(job["delay_s"])),
        ("time to run", age(job["ttr_s"])),
        *[(name, count(counts[name])) for name in COUNTS],
        ("size", plural(job["size"], "byte")),
    ]
    tags = job["tags"] or {}
    facts += [(name, str(tags[key])) for name, key in _TAG_FACTS if tags.get(key) not in (None, "")]
    for name, value in facts:
        click.echo(f"{name:<12} {one_line(value)}")
    click.echo()
    for line in body_lines(job["body"]):
        click.echo(line)
    if not job["body"]["whole"]:
        note("the body is longer; --body says how much is shown, --raw prints all of it")
