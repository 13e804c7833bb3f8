"""geventstalk copy: copies a whole journal, from a directory to a database or back."""

from __future__ import annotations

import contextlib
import json

import click

from geventstalk.cli.client_progress import Progress
from geventstalk.cli.output import refuse_damage
from geventstalk.cli.params import PLACE
from geventstalk.offline import move


@click.command(name="copy")
@click.option("--accept-damage", is_flag=True, help="Copy what is intact in a damaged journal.")
@click.option("--json", "as_json", is_flag=True, help="Print one object of JSON.")
@click.argument("source", metavar="SOURCE", type=PLACE)
@click.argument("target", metavar="TARGET", type=PLACE)
def copy(source: str, target: str, accept_damage: bool, as_json: bool) -> int:
    """Copy a journal to another place.

    SOURCE and TARGET are directories, or databases as postgresql://HOST/DATABASE. No server may use either meanwhile.
    TARGET has no journal yet. Every job comes with its state, its times, its counts and its place in line, and the next
    id stays the next. The copy is read again and compared. A copy that fails leaves nothing. SOURCE stays as it is.
    """
    with contextlib.closing(_Steps()) as steps:
        done = move.copy(source, target, lambda findings: refuse_damage(findings, accept_damage), steps.step)
    if as_json:
        facts = {"source": source, "target": target, "jobs": done.jobs, "next_id": done.next_id}
        click.echo(json.dumps(facts, separators=(",", ":")))
    else:
        click.echo(f"copied {done.jobs} jobs from {source} to {target}; {done.what_follows}")
    return 0


class _Steps:
    """Shows one progress after the other."""

    def __init__(self) -> None:
        self._what = ""
        self._progress: Progress | None = None

    def step(self, what: str, at: int, total: int) -> None:
        if self._progress is None or what != self._what:
            self.close()
            self._what, self._progress = what, Progress(what, total)
        self._progress.reach(at)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
