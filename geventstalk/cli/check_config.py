"""--check-config: finds what a start would find before it serves, and changes nothing.

Addresses and ports are resolved and bound for a moment, but never listened on. What another process holds now, such as
the server that runs with these very settings, is a warning and no error: it may be gone at the next start.
"""

from __future__ import annotations

import logging

from geventstalk.cli.serve import Unusable
from geventstalk.config import Settings
from geventstalk.serving import listen
from journal import JournalLocked, tools_for
from journal.tools import Owner


def check(settings: Settings, log: logging.Logger) -> None:
    """Raises ConfigError, ListenError, UserError or Unusable, each with the exit code that a start would end with."""
    if settings.http:
        check_http(settings)
    for warning in listen.check_listeners(settings):
        log.warning("%s", warning)
    owner = None if settings.user is None else Owner(*listen.check_user(settings.user))
    if settings.journal is not None:
        log_tools = tools_for(settings.journal)
        try:
            log_tools.require_usable(owner)
        except JournalLocked as error:
            raise Unusable(str(error)) from None
        holder = log_tools.holder()
        if holder is not None:
            log.warning("at this moment: journal directory %s is in use by process %d", settings.journal, holder)


def check_http(settings: Settings) -> None:
    """The file of tokens and the audit file. The addresses are looked at with the others.

    Raises ConfigError or UserError.
    """
    from geventstalk.http import audit
    from geventstalk.http.tokens import Tokens

    if settings.audit is not None:
        audit.check(settings.audit)

    if settings.http_tokens is not None:
        Tokens(settings.http_tokens, listen.user_id(settings))
