"""--check-config: finds what a start would find before it serves, and changes nothing.

Addresses and ports are resolved and bound for a moment, but never listened on. A resource that another process holds
now, such as the server with these very settings, is a warning and no error: it may be free at the next start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

from geventstalk.cli.serve import Unusable, check_access, check_certificates, holds_binlog
from geventstalk.config import ConfigError, Settings
from geventstalk.dsn import is_shared
from geventstalk.exits import EXIT_DAMAGE
from geventstalk.serving import listen
from journal import JournalError, JournalLocked, JournalUnreachable, tools_for
from journal.tools import ServerUser


def check(settings: Settings, log: logging.Logger, files: Mapping[str, str | None]) -> None:
    """Checks the settings. Raises ConfigError, ListenError, UserError or Unusable, each with the exit code of a
    start.
    """
    if settings.http:
        check_http(settings)
    check_certificates(settings)
    check_access(settings)
    for warning in listen.check_listeners(settings):
        log.warning("%s", warning)
    owner = None if settings.user is None else ServerUser(*listen.check_user(settings.user))
    if settings.user is not None:
        listen.require_readable(settings.user, files)
    if settings.journal is not None:
        refuse_binlog(settings.journal)
        check_journal(settings.journal, owner, log)


def check_journal(place: str, owner: ServerUser | None, log: logging.Logger) -> None:
    """Checks the directory, or the database and this node's role in its cluster. Raises ConfigError or Unusable."""
    try:
        log_tools = tools_for(place)
        log_tools.require_usable(owner)
    except ImportError as error:
        raise ConfigError(str(error)) from None
    except JournalUnreachable as error:
        log.warning("at this moment the database cannot be reached, and a start would wait for it: %s", error)
        return
    except JournalLocked as error:
        raise Unusable(str(error)) from None
    except JournalError as error:
        raise Unusable(str(error), EXIT_DAMAGE) from None
    if is_shared(place):
        log.info("%s", role_in_cluster(place))
        return
    holder = log_tools.holder()
    if holder is not None:
        log.warning("at this moment: journal directory %s is in use by process %d", place, holder)


def refuse_binlog(place: str) -> None:
    """Raises Unusable when the directory is that of a beanstalkd, whose jobs a start would not serve."""
    if holds_binlog(place) and not tools_for(place).exists():
        raise Unusable(
            f"{place} is the directory of a beanstalkd, whose binlog is not read: stop beanstalkd, run "
            f"'geventstalk import-binlog {place} NEWDIR', and start with -b NEWDIR"
        )


def role_in_cluster(place: str) -> str:
    """Returns the role that a start would find in the rows of the cluster."""
    from geventstalk.offline.cluster import watch

    try:
        with contextlib.closing(watch(place)) as seen:
            status = seen.status()
    except JournalLocked:
        return "there is no log: this node would wait for one; `geventstalk cluster init` makes it where none ever was"
    except JournalError as error:
        return f"which node leads is unknown: {error}"
    if status.leader:
        return f"node {status.leader} leads, epoch {status.epoch}: this one would stand by"
    return "no node leads: this one would take over, if no other one is quicker"


def check_http(settings: Settings) -> None:
    """Checks the file of tokens and the audit file. The addresses are checked with the others.

    Raises ConfigError or UserError.
    """
    from geventstalk.http import audit
    from geventstalk.http.tokens import Tokens

    if settings.audit is not None:
        audit.check(settings.audit)

    if settings.http_tokens is not None:
        Tokens(settings.http_tokens, listen.user_id(settings))
