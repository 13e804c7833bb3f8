"""geventstalk kick, bury, delete, release, move, flush: change jobs, by their ids or by a filter.

Where the server has an API, the API makes the change: also to jobs that others have reserved, in one go, and recorded
in the audit. Otherwise the protocol changes job by job. Invariant: a signal interrupts no single change, and the
command reports what was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import click

from geventstalk.cli.client import EXIT_NOTHING, Context, client_command, confirm, note, plural
from geventstalk.cli.client_jobs import selection
from geventstalk.cli.client_progress import progress
from geventstalk.cli.completion import states, terms
from geventstalk.cli.ending import Stopped, whole
from geventstalk.cli.params import TubeName, Whole
from geventstalk.exits import EXIT_OK
from geventstalk.filters import STATES
from geventstalk.logs import one_line
from geventstalk.remote import api as http
from geventstalk.remote import bulk
from geventstalk.remote.bulk import Step
from geventstalk.remote.errors import Absent, ClientError, NotDone
from geventstalk.remote.select import Selection

_DONE: Final = {"delete": "deleted", "kick": "kicked", "bury": "buried", "release": "released", "move": "moved"}
_FITTING: Final = {"kick": "buried,delayed", "bury": "ready,delayed,reserved", "release": "reserved"}
"""The states out of which an action takes jobs, for actions that do not fit each state."""
_LOOK_S: Final = (0.02, 0.5)
"""The pause between requests for the progress of the server's own work: at first, and at the longest."""
_PROBLEMS_SHOWN: Final = 10


@dataclass
class Outcome:
    """The counts of a change."""

    action: str
    filter: str | None = None
    tube: str | None = None
    matched: int | None = None
    done: int = 0
    failed: int = 0
    dry_run: bool = False
    stopped: bool = False
    problems: list[str] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.done += step.done
        self.failed += step.failed
        if step.problem is not None:
            self.problems.append(step.problem)


Options = Callable[[Callable[..., int]], Callable[..., int]]


def _words(function: Callable[..., int]) -> Callable[..., int]:
    return click.argument("words", metavar="WHAT...", nargs=-1, required=True, shell_complete=terms)(function)


def _bounds(function: Callable[..., int]) -> Callable[..., int]:
    for option in (
        click.option("--dry-run", is_flag=True, help="Only say how many jobs match."),
        click.option("--limit", metavar="N", type=Whole(1), help="So many jobs at the most."),
    ):
        function = option(function)
    return function


@client_command("kick")
@_bounds
@_words
def kick(context: Context, words: Sequence[str], limit: int | None, dry_run: bool) -> int:
    """Make buried jobs ready, or chosen delayed ones.

    WHAT is ids, or a filter such as tube:mail. A filter that names no state is for buried jobs; state:delayed kicks
    delayed ones. Over the protocol alone, a filter may name tubes and states only. The exit code is 1 when nothing
    matched or a job could not be kicked.
    """
    wanted = selection(words, bare_words=False)
    if not wanted.ids and not wanted.names_states:
        wanted = selection([*words, "state:buried"], bare_words=False)
    return _change(context, "kick", wanted, limit, dry_run)


@client_command("bury")
@_bounds
@_words
def bury(context: Context, words: Sequence[str], limit: int | None, dry_run: bool) -> int:
    """Bury jobs.

    WHAT is ids, or a filter such as tube:mail state:ready. Over the protocol alone, a filter may name tubes and
    states only, each job is reserved for a moment, and jobs that others have reserved cannot be buried. The exit code
    is 1 when nothing matched or a job could not be buried.
    """
    return _change(context, "bury", selection(words, bare_words=False), limit, dry_run)


@client_command("release")
@_bounds
@_words
def release(context: Context, words: Sequence[str], limit: int | None, dry_run: bool) -> int:
    """Make reserved jobs ready.

    WHAT is ids, or a filter such as tube:mail 'age>1h'. The worker that holds a job loses it. Needs the server's API:
    over the protocol a client can only release its own jobs. The exit code is 1 when nothing matched or a job could not
    be released.
    """
    return _change(context, "release", selection(words, bare_words=False), limit, dry_run)


@client_command("delete")
@_bounds
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@_words
def delete(context: Context, words: Sequence[str], limit: int | None, dry_run: bool, yes: bool) -> int:
    """Delete jobs.

    WHAT is ids, or a filter such as tube:mail state:buried 'age>1d'. With a filter the command asks first; without a
    terminal, --yes is needed. Over the protocol alone, a filter may name tubes and states only, and jobs that others
    have reserved cannot be deleted. The exit code is 1 when nothing matched or a job could not be deleted.
    """
    wanted = selection(words, bare_words=False)
    return _change(context, "delete", wanted, limit, dry_run, ask=not wanted.ids and not yes)


@client_command("move")
@_bounds
@click.option("--to", "target", required=True, metavar="TUBE", type=TubeName(), help="The tube that the jobs move to.")
@_words
def move(context: Context, words: Sequence[str], limit: int | None, dry_run: bool, target: str) -> int:
    """Move jobs to another tube.

    WHAT is ids, or a filter such as tube:mail state:buried. With beanstalkd each job is reserved, put anew under a
    new id, and deleted. That is not atomic: if the server or this command dies in between, a job can be there twice. No
    job is lost. The exit code is 1 when nothing matched or a job could not be moved.
    """
    return _change(context, "move", selection(words, bare_words=False), limit, dry_run, target=target)


@client_command("flush")
@_bounds
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--state",
    "states",
    metavar="STATES",
    shell_complete=states,
    default="ready,delayed,buried",
    help="States, with commas. Default: ready,delayed,buried.",
)
@click.argument("tube", type=TubeName(many=True))
def flush(context: Context, tube: str, states: str, limit: int | None, dry_run: bool, yes: bool) -> int:
    """Delete all jobs of a tube.

    The command asks first; without a terminal, --yes is needed. TUBE may hold `*`, which stands for anything. Reserved
    jobs can be deleted over the API only. The exit code is 1 when there was no such job.
    """
    wanted = selection([f"tube:{tube}", f"state:{states}"], bare_words=False)
    return _change(context, "delete", wanted, limit, dry_run, ask=not yes)


def _change(
    context: Context,
    action: str,
    wanted: Selection,
    limit: int | None,
    dry_run: bool,
    *,
    ask: bool = False,
    target: str | None = None,
) -> int:
    change = _begin(context, action, wanted, limit, target)
    outcome = Outcome(action, wanted.filter or None, target, dry_run=dry_run)
    if dry_run or ask:
        outcome.matched = change.count()
    if not dry_run and outcome.matched != 0:
        _run(context, change, outcome)
    _tell(context, outcome)
    left_alone = wanted.ids and outcome.failed
    fine = outcome.matched if dry_run else outcome.done and not left_alone
    return EXIT_OK if fine else EXIT_NOTHING


def _run(context: Context, change: _OverApi | _OverProtocol, outcome: Outcome) -> None:
    """Makes the change. Asks first where the number of jobs is known."""
    if outcome.matched is not None:
        to = f" to {outcome.tube}" if outcome.tube else ""
        jobs = f"{plural(outcome.matched, 'job')} that match {outcome.filter}"
        confirm(f"{outcome.action.capitalize()} {jobs}{to}?", yes=False)
    try:
        change.run(outcome)
    except (Stopped, ClientError) as error:
        outcome.stopped = True
        if outcome.done or outcome.failed or isinstance(error, Stopped):
            _tell(context, outcome)
        raise


def _begin(
    context: Context, action: str, wanted: Selection, limit: int | None, target: str | None
) -> _OverApi | _OverProtocol:
    """Returns the change, over the API where there is one. Raises NotDone where the protocol alone cannot do it."""
    if wanted.ids and limit is not None:
        raise click.UsageError("--limit is for a filter, not for ids")
    if context.allowed_api("admin") is not None:
        return _OverApi(context, action, wanted, limit, target)
    if wanted.beyond is not None:
        context.need_api(f"looking for {wanted.beyond}")
    if action not in bulk.FITTING:
        context.need_api("releasing jobs of others")
        raise NotDone("the protocol alone cannot release jobs of others")
    return _OverProtocol(context, action, wanted, limit, target)


def _tell(context: Context, outcome: Outcome) -> None:
    if context.json:
        context.write({key: value for key, value in vars(outcome).items() if value is not None})
    else:
        _print(outcome)


def _print(outcome: Outcome) -> None:
    for problem in outcome.problems[:_PROBLEMS_SHOWN]:
        click.echo(one_line(problem), err=True)
    if len(outcome.problems) > _PROBLEMS_SHOWN:
        click.echo(f"and {plural(len(outcome.problems) - _PROBLEMS_SHOWN, 'more job')}", err=True)
    if outcome.dry_run:
        click.echo(f"{plural(outcome.matched or 0, 'job')} would be {_DONE[outcome.action]}")
        return
    text = f"{_DONE[outcome.action]} {plural(outcome.done, 'job')}"
    if outcome.tube:
        text += f" to {outcome.tube}"
    if outcome.failed:
        text += f"; {outcome.failed:,} {'was' if outcome.failed == 1 else 'were'} left alone"
    if outcome.stopped:
        click.echo(f"stopped: {text}", err=True)
    elif outcome.done or outcome.failed:
        click.echo(text)
    else:
        click.echo("no job matches", err=True)


class _OverProtocol:
    """Changes jobs over the protocol alone."""

    def __init__(self, context: Context, action: str, wanted: Selection, limit: int | None, target: str | None) -> None:
        self._context = context
        self._action = action
        self._wanted = wanted
        self._limit = limit
        self._target = target
        self._plan: bulk.Plan | None = None

    def count(self) -> int:
        """Returns the number of jobs that would change."""
        if self._wanted.ids:
            return sum(1 for _ in self._context.server.job_stats(self._wanted.ids))
        total = self._planned().jobs
        return total if self._limit is None else min(total, self._limit)

    def run(self, outcome: Outcome) -> None:
        total = len(self._wanted.ids) or self.count()
        if not self._wanted.ids:
            outcome.failed = self._planned().held if self._limit is None else 0
            outcome.matched = total + outcome.failed
        steps = self._steps()
        at = 0
        with progress(self._action, total) as bar:
            while True:
                with whole():
                    step = next(steps, None)
                    if step is not None:
                        outcome.add(step)
                if step is None:
                    return
                bar.reach(at := at + step.done + step.failed)

    def _planned(self) -> bulk.Plan:
        if self._plan is None:
            try:
                self._plan = bulk.plan(self._context.server, self._action, self._wanted, self._target)
            except NotDone as error:
                self._context.need_api(f"this ({error})")
                raise
        return self._plan

    def _steps(self) -> Iterator[Step]:
        target: bulk.Target = self._target
        if self._target is not None and not self._context.server.knows("move"):
            note("to beanstalkd a move is a put and a delete: not atomic, under new ids")
            target = other = self._context.another()
            other.use(self._target)
        if self._wanted.ids:
            return bulk.change_ids(self._context.server, self._action, self._wanted.ids, target)
        return bulk.change(self._context.server, self._action, self._planned().parts, self._limit, target)


class _OverApi:
    """Changes jobs over the server's API."""

    def __init__(self, context: Context, action: str, wanted: Selection, limit: int | None, target: str | None) -> None:
        self._api = context.need_api("this")
        self._action = action
        self._ids = wanted.ids
        filter = wanted.filter
        if wanted.states == frozenset(STATES) and action in _FITTING:
            filter = f"{filter} state:{_FITTING[action]}"  # jobs in other states would count as left alone
        if target is not None:
            filter = f"{filter} -tube:{target}"  # jobs of the target stay as they are
        self._order: dict[str, object] = {"filter": filter, "action": action}
        if limit is not None:
            self._order["limit"] = limit
        if target is not None:
            self._order["tube"] = target
        self._target = target

    def count(self) -> int:
        """Returns the number of jobs that match."""
        if self._ids:
            return sum(self._is_there(id) for id in self._ids)
        answer = self._api.post_patiently("/bulk", {**self._order, "dry_run": True})
        return int(http.field(answer, "matched", int)) - int(http.field(answer, "failed", int))

    def _is_there(self, id: int) -> bool:
        try:
            self._api.get(f"/jobs/{id}", body=0)
        except Absent:
            return False
        return True

    def run(self, outcome: Outcome) -> None:
        if self._ids:
            self._run_ids(outcome)
        else:
            self._run_bulk(outcome)

    def _run_ids(self, outcome: Outcome) -> None:
        with progress(self._action, len(self._ids)) as bar:
            for id in self._ids:
                with whole():
                    outcome.add(self._one(id))
                bar.reach(outcome.done + outcome.failed)

    def _one(self, id: int) -> Step:
        try:
            if self._action == "delete":
                self._api.delete(f"/jobs/{id}")
            elif self._action == "move":
                self._api.patch(f"/jobs/{id}", {"tube": self._target})
            else:
                self._api.post(f"/jobs/{id}/{self._action}")
        except NotDone as error:
            return Step(failed=1, problem=f"job {id}: {error}")
        return Step(done=1)

    def _run_bulk(self, outcome: Outcome) -> None:
        with whole():
            state = self._api.post("/bulk", self._order)
            number = http.field(state, "number", int)
        pause_s = _LOOK_S[0]
        with progress(self._action, http.field(state, "jobs_before", int)) as bar:
            try:
                while state.get("state") == "running":
                    _take(outcome, state)
                    bar.reach(http.field(state, "searched", int))
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LOOK_S[1])
                    state = self._api.get(f"/bulk/{number}")
            except BaseException:
                with suppress(ClientError):
                    state = self._api.delete(f"/bulk/{number}")
                _take(outcome, state)
                raise
        _take(outcome, state)
        if state.get("state") != "done":
            raise NotDone(f"the change ended early: {state.get('error') or state.get('state')}")


def _take(outcome: Outcome, state: Mapping[str, Any]) -> None:
    outcome.matched = http.field(dict(state), "matched", int)
    outcome.done = http.field(dict(state), "done", int)
    outcome.failed = http.field(dict(state), "failed", int)
