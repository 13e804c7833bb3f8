"""The clients that have more to do than one pass of the event loop has time for.

This module must not know sockets, links or commands. A client whose slice was not enough, that costs much, or that ends
stands in a queue. One pass runs clients of the queue until the turn has lasted for its share of time.
Invariant: a client in the queue is there once, each pass runs one at least, and the order is that in which they came.
So each client runs, and a client that asks for little waits for little.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from mypy_extensions import mypyc_attr

from geventstalk.turn.replies import Channel
from geventstalk.turn.turn import Turn
from geventstalk.wire.session import Session

LITTLE_PRESSURE_MAX: Final = 6
"""At this pressure of the turn, clients that ask for little have to wait as well."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Runnable(Channel):
    """A channel that can go on in a later pass."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.queued = False

    def run(self) -> None:
        """The turn of this client has come. It looks at its state: there may be nothing to do any more."""
        raise NotImplementedError


class RunQueue:
    """All clients of a server share it. While the turn has no pressure, a client need not ask it for anything."""

    def __init__(self, loop: Any, turn: Turn) -> None:
        self._turn = turn
        self._light: deque[Runnable] = deque()  # they run before the others
        self._heavy: deque[Runnable] = deque()
        self._next_pass: Any = loop.timer(0)  # not run_callback(): gevent runs up to 50 of those before any socket

    def add(self, client: Runnable) -> None:
        """The client runs in a later pass."""
        if client.queued:
            return
        client.queued = True
        (self._heavy if client.heavy else self._light).append(client)
        if not self._next_pass.active:
            self._next_pass.start(self._run)

    def end(self, client: Runnable) -> None:
        """The client is gone. The work of its end is done in a later pass."""
        client.heavy = True
        self.add(client)
        self._turn.begin()
        self._turn.is_pressed()  # many that end at once have the others wait, too

    def postpones(self, client: Runnable) -> bool:
        """Returns whether a client that is ready has to wait. It is in the queue then."""
        if self._turn.pressure < (1 if client.heavy else LITTLE_PRESSURE_MAX):
            return False
        self.add(client)
        return True

    def lasts(self) -> bool:
        """Returns whether the turn goes on in the next pass, for clients of the queue."""
        return bool(self._light or self._heavy) and self._turn.lasts()

    def _run(self) -> None:
        self._turn.begin()
        self._turn.is_pressed()  # its time runs from here on
        for queue in (self._light, self._heavy):
            for _ in range(len(queue)):
                client = queue.popleft()
                client.queued = False
                client.run()
                if self._turn.is_pressed():
                    break
        if (self._light or self._heavy) and not self._next_pass.active:
            self._next_pass.start(self._run)
