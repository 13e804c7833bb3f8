"""Divides the descriptors of the process among the server itself, the journal, and the clients.

This module must know neither gevent nor the journal: the limit is raised before the sockets are opened.
Invariant: clients never take a descriptor that the server itself or the journal may need.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING

from geventstalk.exits import EXIT_DESCRIPTORS

if TYPE_CHECKING:
    import logging

LIMIT_MAX = 1 << 20
"""The soft limit is not raised any further; no server has more clients, and some systems allow a billion."""
_MOMENT = 1
"""Descriptors that the server itself takes for a moment, now and then."""
_LOOP = 2
"""Descriptors that the event loop opens."""
_KEPT_MAX = 16
"""The number of descriptors that are kept for other uses than clients, or an eighth of all where that is less."""


class TooFewError(Exception):
    """The limit of open files leaves no descriptor to a client."""

    exit_code = EXIT_DESCRIPTORS

    def __init__(self, limit: int, wanted: int) -> None:
        super().__init__(
            f"the limit of open files is {limit}, and with less than {wanted} no client can be served; "
            "raise ulimit -n or LimitNOFILE="
        )


def raise_limit(log: logging.Logger) -> None:
    """Lets the process have as many descriptors as it may, and says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays %d: %s", soft, error)
    else:
        log.info("raised the limit of open files from %d to %d", soft, wanted)


def require_some(listeners: int) -> None:
    """Raises TooFewError when the event loop, a client, and this many listeners do not fit.

    The event loop ends the process when it finds no descriptor.
    """
    limit, wanted = _limit(), _open_count() + listeners + _LOOP + _MOMENT + 1
    if limit < wanted:
        raise TooFewError(limit, wanted)


class Descriptors:
    """Shares out what the limit allows. To be made when the server has opened everything but the journal.

    A journal works with `least` descriptors and never takes more than `most`; without a journal both are 0.
    """

    shortage = os.strerror(errno.EMFILE)
    """Why take() says no."""

    def __init__(self, least: int = 0, most: int = 0) -> None:
        """Raises TooFewError."""
        self._own = _open_count() + _MOMENT
        limit = _limit()
        left = limit - self._own
        if left <= least:
            raise TooFewError(limit, self._own + least + 1)
        self.for_journal = max(least, min(most, left // 2))
        self._most = most
        self._clients = 0
        self._kept = 0

    def warn_of_few(self, log: logging.Logger) -> None:
        """Says when the journal has to share with the clients, half and half."""
        if self.for_journal < self._most:
            log.warning(
                "the limit of open files is %d; with less than %d, few clients fit beside the journal",
                _limit(),
                self._own + 2 * self._most,
            )

    def take(self) -> bool:
        """Takes a descriptor for a client. Returns whether there is one; the limit may have changed since the start."""
        if self._clients >= self.for_clients:
            return False
        self._clients += 1
        return True

    def give_back(self) -> None:
        """A client's descriptor is closed, or was never opened."""
        self._clients -= 1

    def keep_back(self) -> int:
        """From now on some are for others than clients. Returns how many; a client keeps the last one."""
        left = self.for_clients
        self._kept = min(_KEPT_MAX, max(left // 8, int(left > 1)))
        return self._kept

    @property
    def for_clients(self) -> int:
        """Returns how many clients there may be."""
        return _limit() - self._own - self.for_journal - self._kept


class Share(Descriptors):
    """The share of others than clients: `most` descriptors, or a quarter of the clients' where that is less.

    Some of them no client ever gets; the others are the clients', too. `wanted` is called when there is hardly one
    left, and may see to it that some are given back.
    """

    shortage = "there are as many HTTP connections as there may be"

    def __init__(self, everything: Descriptors, most: int, wanted: Callable[[], None]) -> None:
        self._everything = everything
        self._share = max(1, min(most, everything.for_clients // 4))
        self._own = everything.keep_back()
        self._taken = 0
        self._wanted = wanted

    def take(self) -> bool:
        if self._taken >= self._share - self._share // 8:
            self._wanted()
        if self._taken >= self._share:
            return False
        if self._taken >= self._own and not self._everything.take():
            self._wanted()
            return False
        self._taken += 1
        return True

    def give_back(self) -> None:
        self._taken -= 1
        if self._taken >= self._own:
            self._everything.give_back()


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return LIMIT_MAX if soft == resource.RLIM_INFINITY else soft


def _open_count() -> int:
    """Returns how many descriptors are open; their numbers may have gaps when some are inherited."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    except OSError:
        lowest = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
        os.close(lowest)
        return lowest
