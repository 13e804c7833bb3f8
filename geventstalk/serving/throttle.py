"""Delays puts as policies say, and logs when limits of policies begin and end to hold.

This module must not know commands or tubes. Invariant: a client whose put waits has a timer, until its wait ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, Final

import gevent

from geventstalk.core.job import SECOND_NS
from geventstalk.policies import Policy
from geventstalk.turn.turn import Turn
from geventstalk.wire.commands import Commands
from geventstalk.wire.guarded import Hold

_LOOK_EVERY_S: Final = 1.0


class Throttle:
    """Suspends clients, and resumes them in time."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._timers: dict[int, tuple[Commands, Any]] = {}  # by the number of the client

    def suspend(self, client: Commands, ns: int) -> None:
        """Resumes a client after `ns` nanoseconds. The client has suspended itself."""
        timer = gevent.get_hub().loop.timer(ns / SECOND_NS)
        self._timers[client.number] = (client, timer)
        timer.start(self.resume, client)

    def resume(self, client: Commands) -> None:
        """Resumes a client now."""
        client.suspended = False
        _, timer = self._timers.pop(client.number, (None, None))
        if timer is not None:
            timer.stop()
            timer.close()
        channel = self._turn.channels.get(client.number)
        if channel is not None:
            channel.goes_on()

    def resume_all(self) -> None:
        """Resumes all clients: other policies count now."""
        for client, _ in [*self._timers.values()]:
            self.resume(client)


class PolicyLog:
    """Logs when the limits of a policy begin and end to refuse or delay puts."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._looks: list[_Look] = []
        self._timer: Any = gevent.get_hub().loop.timer(_LOOK_EVERY_S, _LOOK_EVERY_S)

    def use(self, policies: Sequence[tuple[str, Policy]]) -> None:
        """Looks at these policies from now on."""
        self._looks = [_Look(glob, policy) for glob, policy in policies]
        self._timer.stop()
        if policies:
            self._timer.start(self.look)

    def look(self) -> None:
        """Logs what has changed since the last look."""
        now_ns = monotonic_ns()
        for each in self._looks:
            for text in each.changes(now_ns):
                self._log.warning("%s", text)


class _Look:
    """The findings of the last look at a policy."""

    def __init__(self, glob: str, policy: Policy) -> None:
        self._policy = policy
        self._refused, self._delayed = policy.refused, policy.delayed
        self._full, self._paced = Hold(), Hold()
        self._tubes = f"the tubes {glob}" if "*" in glob else f"the tube {glob}"

    def changes(self, now_ns: int) -> list[str]:
        policy, found = self._policy, []
        refuses, delays = policy.refused > self._refused, policy.delayed > self._delayed
        self._refused, self._delayed = policy.refused, policy.delayed
        if refuses:
            if self._full.begins(now_ns):
                found.append(f"puts into {self._tubes} are refused: they are above a limit of their policy")
        elif self._full.ends(now_ns):
            found.append(f"puts into {self._tubes} are not refused any more")
        if delays:
            if self._paced.begins(now_ns):
                found.append(f"puts into {self._tubes} wait for their turn: they are above max_rate of their policy")
        elif self._paced.ends(now_ns):
            found.append(f"puts into {self._tubes} do not wait any more")
        return found
