"""geventstalk policies: what holds for puts into the tubes of a pattern."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote, urlencode

import click

from geventstalk.cli.client import EXIT_NOTHING, Context, client_command
from geventstalk.cli.client_show import Column, echo_table
from geventstalk.cli.params import TubeName
from geventstalk.exits import EXIT_OK
from geventstalk.policies import LIMITS
from geventstalk.remote.api import field
from geventstalk.remote.errors import Absent

_TEXTS: Final = ("cron", "zone", "tube", "body", "tags", "missed", "dead_letter")
"""Values that are texts, whatever they would be in YAML."""
_COLUMNS: Final = (Column("TUBES"), Column("POLICY", flexible=True))


@client_command("policies")
@click.argument("tube", required=False, type=TubeName())
def policies(context: Context, tube: str | None) -> int:
    """Show the policies of tubes, or the one that counts for a tube.

    Over the server's API. They are in the server's file of settings, which geventstalk reload has the server read
    again, or made at run time by geventstalk policy. The exit code is 1 when there is none.
    """
    query = "" if tube is None else f"?{urlencode({'tube': tube})}"
    found = field(context.need_api("the list of policies").get(f"/policies{query}"), "policies", list)
    if context.json:
        for each in found:
            context.write(each)
    elif found:
        echo_table(_COLUMNS, [[each["tubes"], _told(each)] for each in found])
    else:
        raise Absent("there is no policy" if tube is None else f"the tube {tube} has no policy")
    return EXIT_OK if found else EXIT_NOTHING


def _told(policy: dict[str, Any]) -> str:
    words = [key for key in ("pause", "events") if policy.get(key)] + list(policy["tags"])
    kept = policy.get("keep", {})
    words += [f"keep={kept[key]}{unit}" for key, unit in (("jobs", ""), ("seconds", "s")) if kept.get(key)]
    for key, lowest in (("priority", 0), ("delay", 0), ("ttr", 0)):
        least, most = policy[key]["min"], policy[key]["max"]
        words += [f"{key}>={least}"] * (least > lowest) + [f"{key}<={most}"] * (most < (1 << 32) - 1)
    words += [f"{key}={policy[key]}" for key in LIMITS if policy.get(key) is not None]
    words += [f"{policy[key]} {key.replace('_', ' ')}" for key in ("refused_puts", "delayed_puts") if policy.get(key)]
    return " ".join(words) or "-"


@client_command("policy")
@click.argument("action", type=click.Choice(("set", "remove")))
@click.argument("pattern")
@click.argument("terms", nargs=-1, metavar="[KEY=VALUE]...")
def policy(context: Context, action: str, pattern: str, terms: tuple[str, ...]) -> int:
    """Set or remove a policy at run time.

    Over the server's API, as an admin. `set` takes the keys of policies in the file of settings, with values as YAML:
    tries=5 dead_letter=lost backoff=[10,60] max_rate=100 pause=true. A policy of the same pattern is replaced. The
    journal keeps it; it stands in front of those of the file. `remove` ends one that was made at run time.
    """
    return change_setting(context, action, f"/policies/{quote(pattern, safe='')}", f"the policy of {pattern}", terms)


def change_setting(context: Context, action: str, path: str, what: str, terms: tuple[str, ...]) -> int:
    """Makes or removes a setting of run time."""
    if (action == "set") != bool(terms):
        raise click.UsageError("set needs KEY=VALUE, and remove takes none")
    api = context.need_api(f"a change of {what}")
    if action == "set":
        api.put(path, dict(map(_term, terms)))
    else:
        api.delete(path)
    context.say(f"{what} is {'set' if action == 'set' else 'removed'}")
    return EXIT_OK


def _term(word: str) -> tuple[str, object]:
    import yaml  # here: most commands need none

    key, equals, value = word.partition("=")
    if not equals:
        raise click.UsageError(f"{word} is not KEY=VALUE")
    if key in _TEXTS:
        return key, value
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise click.UsageError(f"{value} is not YAML, the value of {key}") from None
