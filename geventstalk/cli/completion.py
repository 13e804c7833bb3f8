"""geventstalk completion: what a shell needs to complete words of the command line, and its questions.

A shell asks the program itself, with a variable in the environment, as click has it. Names of tubes come from the
running server, if there is one that answers at once. Invariant: a question of a shell never fails aloud.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from geventstalk.cli.main import COMPLETES
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
    """Answers a shell's question, which the environment holds. Returns the exit code."""
    shell, _, instruction = environment.pop(COMPLETES, "").partition("_")
    found = get_completion_class(shell)
    if found is None or instruction != "complete":
        return 1
    click.echo(found(_root(), {}, PROGRAM, COMPLETES).complete())
    return 0


def _root() -> click.Group:
    """The commands, with the flags of the server beside them."""
    from geventstalk.cli.program import make_group
    from geventstalk.cli.serve import command_of_server

    return make_group(command_of_server().params)


def tubes(context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Names of the server's tubes that begin so."""
    from geventstalk.config import ConfigError, load
    from geventstalk.live.address import of_server
    from geventstalk.live.errors import LiveError
    from geventstalk.live.protocol import Server

    given = {key: context.params.get(key) for key in ("listen", "port")}
    flags = {key: (value,) if key == "listen" else value for key, value in given.items() if value}
    try:
        settings, _ = load(flags, os.environ, context.params.get("config"))
        server = Server(of_server(settings.listen, settings.port), _PATIENCE_S)
    except (ConfigError, LiveError):
        return []
    try:
        names = [name for name in server.tubes() if name.startswith(incomplete) and name.isprintable()]
    except LiveError:
        return []
    finally:
        server.close()
    return [CompletionItem(name) for name in sorted(names)[:_TUBES_MAX]]
