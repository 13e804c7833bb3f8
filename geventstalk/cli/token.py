"""geventstalk token: makes a token for a user of --access."""

from __future__ import annotations

import secrets

import click

from geventstalk.rights import TOKEN_BYTES, hash_of


@click.group
def token() -> None:
    """Make tokens for the users of --access."""


@token.command
@click.argument("user")
def new(user: str) -> int:
    """Make a token, and print it once with its hash.

    The token itself is kept nowhere: the file of users has the hash.
    """
    made = secrets.token_urlsafe(TOKEN_BYTES)
    click.echo(f"token of {user}, for its program: {made}")
    click.echo(f'entry of {user}, for the file of --access: token: "{hash_of(made)}"')
    return 0
