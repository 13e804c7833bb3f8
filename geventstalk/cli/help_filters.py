"""geventstalk help filters: the grammar of filters, without a server. `help` and a command is that command's --help."""

from __future__ import annotations

from typing import Final

import click

from geventstalk.exits import EXIT_OK
from geventstalk.filters import SAYS

_GRAMMAR: Final = """\
A filter is made of terms, and a job has to match all of them. A shell needs quotes around < and >.

  tube:mail state:buried,delayed   a key, a colon, and values with commas
  'age>1h' 'pri<=10' id:100..200   numbers: > >= < <= and ranges. Times: 90s 5min 1.5h 2d; sizes: 500 10k 1.5M
  -state:buried                    a leading - negates a term
  body:word '"some words"'         part of the body; a word without a key is looked for in bodies
  'body:/order-[0-9]{6}/i'         a regular expression (RE2); i: without regard to case

Keys:
"""


@click.command(name="help")
@click.argument("topic", metavar="filters|COMMAND", type=click.Choice(["filters"]))
def help_filters(topic: str) -> int:
    """Explain filters, or a command.

    A filter chooses jobs by their tube, state, age, body and so on: for jobs, kick, delete and others, and in the
    console.
    """
    click.echo(_GRAMMAR + "".join(f"  {key:<10} {text}\n" for key, text in SAYS.items()), nl=False)
    return EXIT_OK
