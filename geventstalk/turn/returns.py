"""The clients that a sync lets go on, and the time that the next sync waits for them to come back.

Under `-f0` a client sends its next change when the sync of the last one has ended. Without a wait, half of the clients
send their changes while the sync of the other half is under way, and each change waits for two syncs. This module must
not know what a sync is, nor the replies that wait for one. Invariant: a sync waits no longer than the last one took.
Where waits do not pay, ever fewer syncs wait.
"""

from __future__ import annotations

from typing import Final

from geventstalk.turn.tasks import Flag, Wait

_WAIT_NS_MAX: Final = 5_000_000
_AWAKE_NS: Final = 2_000_000
"""The event loop sleeps for whole milliseconds, so a shorter wait looks at the sockets again and again instead."""
_PAYS: Final = 8
"""A wait pays when all but an eighth of the clients come for which the sync waits."""
_ALONE_SYNCS: Final = 16
"""After a wait that did not pay, this many syncs wait for no client. The number doubles with each further such wait."""
_ALONE_SYNCS_MAX: Final = 256
"""The number does not grow beyond this."""


class Returns:
    """`expected` clients may come back before `until_ns` of the owner's clock. `came` is set when all have."""

    def __init__(self) -> None:
        self.expected = 0
        self.until_ns = 0
        self.came = Flag()
        self._alone = 0  # the number of further syncs that wait for no client
        self._alone_next = _ALONE_SYNCS  # what that number becomes after the next wait that does not pay

    def expect(self, clients: int, now_ns: int, took_ns: int) -> int:
        """Notes that these clients may come back, before a sync that took this long lets them go on.

        Returns `until_ns`, which is 0 when the next sync waits for no client.
        """
        self.expected = self.until_ns = 0
        if self._alone:
            self._alone -= 1
        elif clients > 1:
            self.expected = clients
            self.until_ns = now_ns + min(took_ns, _WAIT_NS_MAX)
        return self.until_ns

    def wait(self, now_ns: int) -> Wait | None:
        """Returns the wait of the sync that is about to begin; None when the time is over."""
        left_ns = self.until_ns - now_ns
        if left_ns <= 0:
            return None
        self.came.clear()
        return Wait(self.came, self.until_ns, awake=left_ns <= _AWAKE_NS)

    def waited(self, missing: int, still_missing: int) -> None:
        """Notes how many clients a wait missed at its beginning and at its end."""
        if still_missing * _PAYS > missing:
            self._alone = self._alone_next
            self._alone_next = min(2 * self._alone_next, _ALONE_SYNCS_MAX)
        else:
            self._alone_next = _ALONE_SYNCS
