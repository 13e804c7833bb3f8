"""geventstalk journal: checks, prints, copies and repairs a journal."""

from __future__ import annotations

import click
import yaml

from geventstalk.cli.output import output, report
from geventstalk.cli.params import PLACE
from geventstalk.exits import EXIT_DAMAGE, EXIT_OK
from geventstalk.offline import inspect, keep


@click.group(name="journal", invoke_without_command=True)
@click.pass_context
def journal(context: click.Context) -> None:
    """Look at a journal, copy it, repair it.

    DIR is the journal's directory, or the database of a cluster as postgresql://HOST/DATABASE.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@journal.command(name="check")
@click.argument("directory", metavar="DIR", type=PLACE)
def _check(directory: str) -> int:
    """Read all of a journal and say what is wrong with it.

    DIR may also be postgresql://HOST/DATABASE, while its nodes serve.
    """
    checked = inspect.check(directory)
    for finding in checked.findings:
        click.echo(f"finding: {finding}")
    for note in checked.notes:
        click.echo(f"note: {note}")
    counts = f"{checked.segments} segments, {checked.records} records, {checked.jobs} jobs"
    click.echo(f"{counts}, {len(checked.findings)} findings")
    return EXIT_DAMAGE if checked.findings else EXIT_OK


@journal.command(name="dump")
@click.option("--bodies/--no-bodies", default=True, help="Whether the jobs' bodies are shown, in base64.")
@click.argument("directory", metavar="DIR", type=PLACE)
def _dump(directory: str, bodies: bool) -> int:
    """Print every record as a line of JSON.

    Records come in the order in which they were written, those of deleted jobs included. DIR may also be
    postgresql://HOST/DATABASE.
    """
    findings: list[str] = []
    with output() as write:
        for facts in inspect.dump(directory, bodies, findings.append):
            write(facts)
    return report(findings)


@journal.command(name="stats")
@click.argument("directory", metavar="DIR", type=PLACE)
def _stats(directory: str) -> int:
    """Print segments, sizes and numbers of jobs as YAML.

    DIR may also be postgresql://HOST/DATABASE, while its nodes serve.
    """
    summary, findings = inspect.stats(directory)
    click.echo(yaml.safe_dump(summary, sort_keys=False), nl=False)
    return report(findings)


@journal.command(name="backup")
@click.argument("directory", metavar="DIR", type=PLACE)
@click.argument("target", metavar="TARGET", type=PLACE)
def _backup(directory: str, target: str) -> int:
    """Copy a journal, also while its server runs.

    TARGET is a new or empty directory, also when DIR is postgresql://HOST/DATABASE: a server can start on it. The copy
    is checked when it is complete.
    """
    copied = keep.backup(directory, target)
    click.echo(f"copied {copied.segments} segments with {copied.jobs} jobs to {target}")
    return report(copied.findings)


@journal.command(name="repair")
@click.option("--in-place", is_flag=True, help="Repair DIR itself, and set damaged segments aside there.")
@click.argument("directory", metavar="DIR", type=PLACE)
@click.argument("target", metavar="[TARGET]", type=PLACE, required=False)
def _repair(directory: str, target: str | None, in_place: bool) -> int:
    """Write what is intact in a damaged journal anew.

    TARGET is a new or empty directory, and DIR is not changed. With --in-place only damaged segments of DIR
    are touched: what is intact in them is written anew, and they are set aside under other names. Nothing is deleted.
    The lost jobs that are known are listed. The exit code is 1 when there was damage. DIR and TARGET may also be
    postgresql://HOST/DATABASE; then all nodes have to be stopped for --in-place, and damaged rows are set aside in a
    table.
    """
    if (target is None) != in_place:
        raise click.UsageError("give a TARGET, or --in-place")
    repaired = keep.repair(directory, target, report)
    if not repaired.findings:
        click.echo(f"nothing to repair: {repaired.jobs} jobs")
        return 0
    if target is None:
        click.echo(f"{directory} has {repaired.jobs} jobs")
    else:
        click.echo(f"wrote {repaired.jobs} jobs to {target}")
    for path, name in repaired.aside:
        click.echo(f"set aside {path} as {name}; what is intact in it is written anew")
    for id in repaired.lost:
        click.echo(f"lost: job {id}")
    click.echo("what else the findings name is lost as well, and it is unknown of which jobs it was")
    return EXIT_DAMAGE
