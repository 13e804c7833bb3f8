"""geventstalk cluster: makes a journal for nodes, shows the leader, and changes it.

Exit codes: 0 a node leads, or the right one leads now, or the journal exists; 1 none leads, or the wrong one; 5 usage;
10 no cluster is there; 69 the database cannot be reached; 128 and the number of a signal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable
from typing import Any, Final

import click

from geventstalk.cli import completion
from geventstalk.cli.client_show import Column, age, count, echo_table, time_of
from geventstalk.cli.ending import Failed
from geventstalk.cli.params import PLACE, Number
from geventstalk.config import ConfigError, load
from geventstalk.dsn import is_shared
from geventstalk.exits import EXIT_DAMAGE, EXIT_OK, EXIT_USAGE
from geventstalk.offline.cluster import Handover, NotDone, Status, Watch, init, watch

_TIMEOUT_S: Final = 10.0
_COLUMNS: Final = (
    Column("NODE", flexible=True),
    Column("ADDRESS", flexible=True, rank=1),
    Column("ROLE"),
    Column("EPOCH", right=True, rank=3),
    Column("LAG", right=True, rank=2),
    Column("LAST SEEN", right=True, rank=1),
)
_JUST_NOW_S: Final = 10.0


@click.group(name="cluster", invoke_without_command=True)
@click.pass_context
def cluster(context: click.Context) -> None:
    """Begin a cluster, see which node leads, and have another one lead."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cluster.command(name="init")
@click.option("-b", "--journal", metavar="URL", type=PLACE, help="The database that the nodes are to share.")
@click.option("--config", metavar="FILE", type=click.Path(), help="Take it from the settings of a node.")
def _init(journal: str | None, config: str | None) -> int:
    """Make the journal of a new cluster.

    Nodes never make one: they wait for a journal that is not there, for it may have been there and come back. One that
    is there is left as it is.
    """
    made = init(_place(journal, config))
    click.echo("made an empty journal" if made else "there is a journal already, and it is left as it is")
    return EXIT_OK


def _command(name: str) -> Callable[[Callable[..., int]], click.Command]:
    """Makes a command of a function whose first arguments are a Watch and whether it prints JSON."""

    def decorate(function: Callable[..., int]) -> click.Command:
        @functools.wraps(function)
        def run(journal: str | None, config: str | None, as_json: bool, **words: Any) -> int:
            with contextlib.closing(watch(_place(journal, config))) as seen:
                try:
                    return function(seen, as_json, **words)
                except NotDone as error:
                    raise Failed(str(error), EXIT_DAMAGE) from None

        command = cluster.command(name=name)(run)
        command.params += [
            click.Option(["-b", "--journal"], metavar="URL", type=PLACE, help="The database that the nodes share."),
            click.Option(["--config"], metavar="FILE", type=click.Path(), help="Take it from the settings of a node."),
            click.Option(["--json", "as_json"], is_flag=True, help="Print one object of JSON."),
        ]
        return command

    return decorate


def _place(journal: str | None, config: str | None) -> str:
    try:
        settings, _ = load({} if journal is None else {"journal": journal}, os.environ, config)
    except ConfigError as error:
        raise Failed(str(error), EXIT_USAGE) from None
    if settings.journal is None or not is_shared(settings.journal):
        where = "no journal is named" if settings.journal is None else f"{settings.journal} is a directory"
        raise click.UsageError(
            f"{where}; the nodes of a cluster share one in a database: -b postgresql://HOST/DATABASE"
        )
    return settings.journal


@_command("status")
def _status(seen: Watch, as_json: bool) -> int:
    """Show which node leads, and how far each has read.

    The exit code is 0 when a node leads, and 1 when none does.
    """
    status = seen.status()
    if as_json:
        click.echo(json.dumps(facts_of(status), separators=(",", ":")))
    else:
        click.echo(_headline(status))
        if status.nodes:
            click.echo()
            echo_table(_COLUMNS, [_row(each) for each in status.nodes])
    return EXIT_OK if status.leader else EXIT_DAMAGE


def _headline(status: Status) -> str:
    if status.leader:
        text = f"{status.leader} leads, epoch {status.epoch}, lease {time_of(status.lease_s)}"
        if status.takeover_s is not None:
            text += f", for {age(status.takeover_s)}"
    elif status.claims:
        what = "is taking over" if status.last else "has the journal to itself"
        text = f"no node leads; {status.claims} {what}, epoch {status.epoch}"
    elif status.last:
        text = f"no node leads; the last one was {status.last}, epoch {status.epoch}"
    elif status.epoch:
        text = f"no node leads, epoch {status.epoch}"
    else:
        text = "no node has ever led"
    if status.replication:
        text += f"; replication: {status.replication}"
    if status.transfer_to:
        text += f"; {'another node' if status.transfer_to == '*' else status.transfer_to} is asked to lead"
    return text


def _row(each: Any) -> list[str]:
    seen = time_of(each.seen_s) if each.seen_s < _JUST_NOW_S else age(each.seen_s)
    return [each.node, each.address, each.role, count(each.epoch), count(each.lag), f"{seen} ago"]


def facts_of(status: Status) -> dict[str, Any]:
    nodes = [
        {
            "node": each.node,
            "address": each.address,
            "role": each.role,
            "epoch": each.epoch,
            "lag": each.lag,
            "seen_s": round(each.seen_s, 3),
        }
        for each in status.nodes
    ]
    return {
        "leader": status.leader or None,
        "last": status.last or None,
        "claims": status.claims or None,
        "epoch": status.epoch,
        "lease_s": status.lease_s,
        "wish": status.transfer_to or None,
        "replication": status.replication or None,
        "takeover_s": None if status.takeover_s is None else round(status.takeover_s, 3),
        "nodes": nodes,
    }


def _timeout(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--timeout",
        metavar="SECONDS",
        type=Number(0.01, 86400),
        default=_TIMEOUT_S,
        help=f"Withdraw the request when it takes longer. Default: {_TIMEOUT_S:g}.",
    )(function)


@_command("promote")
@_timeout
@click.argument("node", metavar="NODE", shell_complete=completion.nodes)
def _promote(seen: Watch, as_json: bool, node: str, timeout: float) -> int:
    """Have this node lead.

    The node that leads finishes what it has begun, and hands over. The command waits for that, and says how long none
    led. The exit code is 0 when NODE leads.
    """
    return _told(seen.promote(node, timeout), as_json, "promote", node)


@_command("demote")
@_timeout
@click.argument("node", metavar="[NODE]", required=False, shell_complete=completion.nodes)
def _demote(seen: Watch, as_json: bool, node: str | None, timeout: float) -> int:
    """Have another node lead than this one.

    The standby that has read most leads then. Without NODE, the one that leads now hands over, whichever it is. The
    exit code is 0 when NODE does not lead.
    """
    return _told(seen.demote(node, timeout), as_json, "demote", node)


def _told(done: Handover, as_json: bool, action: str, node: str | None) -> int:
    gap_ms = round(done.gap_s * 1000, 1)
    if as_json:
        facts = {"action": action, "before": done.before, "leader": done.leader, "epoch": done.epoch}
        click.echo(json.dumps({**facts, "changed": done.changed, "gap_ms": gap_ms}, separators=(",", ":")))
    elif done.changed:
        gap = time_of(done.gap_s)
        click.echo(f"{done.leader} leads, epoch {done.epoch}; {done.before} has handed over, and for {gap} none led")
    elif action == "promote":
        click.echo(f"{node} leads already, epoch {done.epoch}")
    else:
        click.echo(f"{node} does not lead; {done.leader} does, epoch {done.epoch}")
    return EXIT_OK
