"""The argument of a command that names a journal: a directory, or a database.

This module must not open the journal. Invariant: a password never comes from the command line, where every user of the
host can read it, and none is printed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from geventstalk.dsn import has_password, without_password

if TYPE_CHECKING:
    _TextType = click.ParamType[str]
else:
    _TextType = click.ParamType  # before click 8.4 it cannot be subscripted

NO_PASSWORD = (
    "a password on the command line can be read by every user of this host; "
    "give it in PGPASSWORD, in ~/.pgpass (PGPASSFILE), or in a service file"
)


class Place(_TextType):
    """The path of a directory, or postgresql://..."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if has_password(text):
            self.fail(f"{without_password(text)}: {NO_PASSWORD}", param, ctx)
        return text

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        return [click.shell_completion.CompletionItem(incomplete, type="dir")]


PLACE = Place()
