"""The policies and schedules in use: those of the file, and those that the journal keeps because they were made later.

This module must not know sockets or the journal's format. Invariant: schedules run only while this server leads, and a
policy is in use before the first client waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from geventstalk.config import Settings
from geventstalk.core.trail import Trails
from geventstalk.policies import Policies
from geventstalk.runtime_settings import RuntimeSettings
from geventstalk.serving.throttle import PolicyLog, Throttle
from geventstalk.turn.operations import SettlePauses
from geventstalk.turn.turn import Turn
from geventstalk.wire.session import Service

if TYPE_CHECKING:
    from geventstalk.serving.schedules import Schedules


class LiveSettings:
    """`runs` is called with the schedules when they begin to run. `unix_s` is the wall clock."""

    def __init__(
        self,
        service: Service,
        turn: Turn,
        throttle: Throttle,
        log: logging.Logger,
        unix_s: Callable[[], float],
        runs: Callable[[Schedules], None],
    ) -> None:
        self.runtime_settings = RuntimeSettings()
        self._engine = turn.engine
        self._service = service
        self._turn = turn
        self._throttle = throttle
        self._log = log
        self._unix_s = unix_s
        self._runs = runs
        self._policy_log = PolicyLog(log)
        self._schedules: Schedules | None = None
        self._terms: tuple[Any, ...] = ()  # of the policies that are in use
        self._leads = False  # jobs are served, and schedules run

    def use(self, settings: Settings) -> None:
        """Uses the settings of the file, see reload.LIVE."""
        self.runtime_settings.of_file = {"policies": settings.policies, "schedules": settings.schedules}
        self._use()

    def load(self) -> None:
        """Takes the settings that stand in the journal, for there they were made at run time."""
        rules = self._engine.rules
        for why in self.runtime_settings.load(b"" if rules is None else rules.settings()):
            self._log.warning("a setting that was made at run time does not count: %s", why)
        self._use()

    def lead(self) -> None:
        """Begins to serve jobs and to run schedules."""
        self._leads = True
        if self._schedules is not None:
            self._runs(self._schedules)

    def _use(self) -> None:
        terms, schedules = self.runtime_settings.all("policies"), self.runtime_settings.all("schedules")
        if terms != self._terms:
            self._terms = terms
            self._use_policies(Policies(terms))
        if schedules and self._schedules is None:
            from geventstalk.serving.schedules import Schedules  # here: most servers have none

            self._schedules = Schedules(self._engine, self._service, self._turn.accept, self._log, self._unix_s)
            if self._leads:
                self._runs(self._schedules)
        if self._schedules is not None:
            self._schedules.use(schedules)

    def _use_policies(self, policies: Policies) -> None:
        engine = self._engine
        before = engine.policies
        engine.policies = policies if policies.all else None
        trails = engine.trails or Trails()
        engine.trails = trails if policies.trails else None
        self._policy_log.use(policies.all)
        self._throttle.resume_all()  # the turns of puts were those of other policies
        if policies.pauses or (before is not None and before.pauses):
            if self._leads:
                self._turn.accept(SettlePauses(engine))
            else:  # no client waits yet
                for tube in [*engine.tube_by_number.values()]:
                    engine.settle_pause(tube, monotonic_ns())
