"""geventstalk completion: the script for a shell that completes words, and the answers to its requests.

A shell runs the program itself, with a variable in the environment, as click defines it. Names of tubes come from the
running server, if it answers at once, and names of nodes from the cluster's database. Invariant: a request of a shell
fails silently.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, MutableMapping
from typing import Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from geventstalk.cli.main import COMPLETES
from geventstalk.filters import STATES
from geventstalk.logs import PROGRAM

_PATIENCE_S: Final = 0.3
_TUBES_MAX: Final = 1000
_SHELLS: Final = ("bash", "zsh", "fish")


@click.command(name="completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> int:
    """Print the script with which a shell completes words.

    bash: eval "$(geventstalk completion bash)" in ~/.bashrc. zsh: the same with zsh in ~/.zshrc. fish: geventstalk
    completion fish > ~/.config/fish/completions/geventstalk.fish
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    click.echo(found(_root(), {}, PROGRAM, COMPLETES).source())
    return 0


def answer(environment: MutableMapping[str, str]) -> int:
    """Answers a shell's request, which the environment holds. Returns the exit code."""
    shell, _, instruction = environment.pop(COMPLETES, "").partition("_")
    found = get_completion_class(shell)
    if found is None or instruction != "complete":
        return 1
    click.echo(found(_root(), {}, PROGRAM, COMPLETES).complete())
    return 0


def _root() -> click.Group:
    """Returns the commands, with the flags of the server beside them."""
    from geventstalk.cli.program import make_group
    from geventstalk.cli.serve import command_of_server

    return make_group(command_of_server().params)


def tubes(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Returns the names of the server's tubes that begin with this."""
    return [CompletionItem(name) for name in _tubes(context, incomplete)]


def states(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the states that complete the last of several."""
    return [CompletionItem(found) for found in _listed(incomplete, lambda begin: _beginning(STATES, begin))]


def terms(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns terms about tubes and states. bash splits words at colons, and wants only the part behind the last
    colon.
    """
    before: list[str] = list(context.params.get("words") or ())
    split = ""
    if incomplete == ":" and before:
        split, incomplete = f"{before[-1]}:", ""
    elif len(before) > 1 and before[-1] == ":":
        split = f"{before[-2]}:"
    found = _terms(context, split + incomplete)
    return [CompletionItem(term.removeprefix(split)) for term in found]


def _terms(context: click.Context, word: str) -> list[str]:
    key, colon, value = word.partition(":")
    if not colon:
        tubes = _tubes(context, "") if "tube:".startswith(key) else []
        return _beginning([*(f"state:{state}" for state in STATES), *(f"tube:{name}" for name in tubes)], key)
    if key == "state":
        return [f"state:{states}" for states in _listed(value, lambda begin: _beginning(STATES, begin))]
    if key == "tube":
        return [f"tube:{names}" for names in _listed(value, lambda begin: _tubes(context, begin))]
    return []


def nodes(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the names of the cluster's nodes that begin with this."""
    from geventstalk.config import ConfigError, load
    from geventstalk.offline.cluster import names

    given = {"journal": context.params["journal"]} if context.params.get("journal") else {}
    try:
        settings, _ = load(given, os.environ, context.params.get("config"))
    except ConfigError:
        return []
    found = [] if settings.journal is None else names(settings.journal)
    return [CompletionItem(name) for name in found if name.startswith(incomplete) and name.isprintable()]


def _listed(value: str, known: Callable[[str], Iterable[str]]) -> list[str]:
    """Returns the values that complete the last of several, with those before it."""
    before, comma, last = value.rpartition(",")
    return [before + comma + name for name in known(last)]


def _beginning(known: Iterable[str], begin: str) -> list[str]:
    return [one for one in known if one.startswith(begin)]


def _tubes(context: click.Context, begin: str) -> list[str]:
    from geventstalk.cli.client import SHARED, Context
    from geventstalk.config import ConfigError
    from geventstalk.remote.errors import ClientError
    from geventstalk.remote.protocol import Beanstalk

    try:
        asked = Context(**{name: context.params.get(name) for name in SHARED})
        server = Beanstalk(asked.address, _PATIENCE_S, asked.tls, asked.token)
    except (ConfigError, ClientError, click.UsageError):
        return []
    try:
        names = [name for name in server.tubes() if name.startswith(begin) and name.isprintable()]
    except ClientError:
        return []
    finally:
        server.close()
    return sorted(names)[:_TUBES_MAX]
