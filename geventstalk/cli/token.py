"""geventstalk token: makes a token for a user of --access."""

from __future__ import annotations

import secrets
import sys
from typing import Final

import click

from geventstalk.rights import SALT_BYTES, TOKEN_BYTES, USER_NAME, hash_of, slow_hash_of

_CHARS_MIN: Final = 8
_CHARS_MAX: Final = 128


def _user(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    if not USER_NAME.fullmatch(name):
        raise click.UsageError("the name of a user has up to 64 letters, digits and _ . @ -")
    return name


@click.group
def token() -> None:
    """Make tokens for the users of --access."""


@token.command
@click.argument("user", callback=_user)
def new(user: str) -> int:
    """Make a token, and print it once with its hash.

    The token itself is kept nowhere: the file of users has the hash.
    """
    made = secrets.token_urlsafe(TOKEN_BYTES)
    click.echo(f"token of {user}, for its program: {made}")
    click.echo(f'entry of {user}, for the file of --access: token: "{hash_of(made)}"')
    return 0


@token.command
@click.argument("user", callback=_user)
def choose(user: str) -> int:
    """Ask for the secret of a user, and print its hash.

    The user's program shows USER:SECRET as its token. The secret has 8 to 128 printable characters of ASCII and no
    space. Where stdin is no terminal, its first line is the secret.
    """
    if sys.stdin.isatty():
        secret = click.prompt("secret", hide_input=True, confirmation_prompt=True, err=True)
    else:
        secret = sys.stdin.readline().rstrip("\r\n")
    if not _CHARS_MIN <= len(secret) <= _CHARS_MAX or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise click.UsageError(f"a secret has {_CHARS_MIN} to {_CHARS_MAX} printable characters of ASCII and no space")
    click.echo(f"token of {user}, for its program: {user}:SECRET")
    made = slow_hash_of(f"{user}:{secret}", secrets.token_bytes(SALT_BYTES))
    click.echo(f'entry of {user}, for the file of --access: token: "{made}"')
    return 0
