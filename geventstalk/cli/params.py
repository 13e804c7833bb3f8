"""Types of the commands' arguments: numbers, tubes, times, and places of journals.

This module must not open journals or send requests. Invariant: a password never comes from the command line, where
every user of the host can read it, and none is printed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from geventstalk.cli import completion
from geventstalk.dsn import has_password, without_password
from geventstalk.limits import U32_MAX, is_tube_name
from geventstalk.logs import one_line
from geventstalk.tags import parse_put

if TYPE_CHECKING:
    _TextType = click.ParamType[str]
    _NumberType = click.ParamType[int]
else:
    _TextType = _NumberType = click.ParamType  # before click 8.4 it cannot be subscripted

_UNITS: Final = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}

NO_PASSWORD = (
    "a password on the command line can be read by every user of this host; "
    "give it in PGPASSWORD, in ~/.pgpass (PGPASSFILE), or in a service file"
)


class Whole(click.IntRange):
    """A whole number within bounds."""

    name = "whole number"


class Number(click.FloatRange):
    """A number within bounds."""

    name = "number"


class PutTags(_TextType):
    """The tags of a put: words of docs/protocol.md."""

    name = "tags"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = " ".join(str(value).split())
        try:
            if text:
                parse_put(text.encode("ascii"))
        except UnicodeEncodeError:
            self.fail("tags hold a character that is not ASCII", param, ctx)
        except ValueError as error:
            self.fail(f"{one_line(text)}: {error}", param, ctx)
        return text


class TubeName(_TextType):
    """A name of a tube. With `many`, `*` in it stands for anything."""

    name = "tube"

    def __init__(self, *, many: bool = False) -> None:
        self.many = many

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        probe = text.replace("*", "x") if self.many else text
        if not is_tube_name(probe.encode("utf-8", "surrogateescape")):
            self.fail(f"{one_line(text)} is no name of a tube", param, ctx)
        return text

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        return completion.tubes(ctx, incomplete)


class Seconds(_NumberType):
    """Whole seconds: `90`, `90s`, `15min`, `2h`, `1d`."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        unit = _UNITS.get(text[len(digits) :])
        if unit is None or not digits.isascii() or not digits.isdecimal() or int(digits[:12]) * unit > U32_MAX:
            self.fail(f"{one_line(text)} is no time; write 90, 90s, 15min, 2h or 1d, up to {U32_MAX} s", param, ctx)
        return int(digits) * unit


class Place(_TextType):
    """The place of a journal: the path of a directory, or postgresql://..."""

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
