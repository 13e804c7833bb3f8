"""The sleep of a greenlet, and the only way in which the server's own greenlets are woken.

A watcher or a callback that switches into a greenlet resumes the greenlet wherever it is, also while it waits for
something else. wake() resumes the greenlet only while the greenlet sleeps in park() of this parking; otherwise wake()
does nothing. So a wake-up that comes too late, or twice, does no harm. Invariant: park() may return without a reason.
The greenlet then looks at its state, and may park again.
"""

from __future__ import annotations

from typing import Any, Final

from gevent import get_hub, getcurrent
from greenlet import greenlet


class Parking:
    """Belongs to the greenlet that makes it."""

    def __init__(self) -> None:
        hub: Any = get_hub()
        self.loop: Final[Any] = hub.loop
        self._parked = False
        self._sleep: Any = greenlet.switch.__get__(hub)
        self._resume: Any = getcurrent().switch

    def park(self) -> None:
        """Sleeps until wake(). A kill of the greenlet raises its exception here."""
        self._parked = True
        try:
            self._sleep()
        finally:
            self._parked = False

    def wake(self) -> None:
        """For the event loop alone, as the callback of a watcher."""
        if self._parked:
            self._parked = False
            self._resume()

    def wake_soon(self) -> None:
        """The same from any greenlet: the event loop resumes the sleeping greenlet later."""
        if self._parked:
            self.loop.run_callback(self.wake)

    def close(self) -> None:
        """No greenlet parks here again. Drops the reference to the greenlet, which would be part of a cycle."""
        self._parked = False
        self._resume = None
