"""Puts the jobs of schedules when their ticks come.

This module must not know files or sockets. Invariant: a tick has one job, whatever restarts, takes over or is late. The
job is unique, by schedule and tick, until the next tick is past: so the journal knows what was done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

import gevent
from cronsim import CronSim
from gevent.event import Event

from geventstalk.config_schedules import ONCE, Schedule, zone_of
from geventstalk.core.engine import CYCLE, DRAINING, DUPLICATE, INSERTED, TOO_BIG
from geventstalk.core.operate import Operate
from geventstalk.limits import U32_MAX
from geventstalk.tags import parse
from geventstalk.turn.operations import Put
from geventstalk.turn.replies import Operation
from geventstalk.wire.commands import Service

LATE_S: Final = 60.0
"""A tick that is later than this was missed."""
_LOOK_EVERY_S: Final = 15.0
"""A step of the wall clock goes unnoticed for this long."""
_AGAIN_S: Final = 1.0
_NEVER_S: Final = 1 << 40
_MARGIN_S: Final = 3600
"""The key of a job stays taken this long after the next tick: clocks of nodes differ, and may be set back."""
_REFUSALS: Final = {DRAINING: "the server drains", TOO_BIG: "its body is too large", CYCLE: "its groups go in a circle"}


class Plan:
    """A schedule, its next tick, and the outcome of the last one."""

    def __init__(self, schedule: Schedule, now_s: float) -> None:
        self.schedule: Final = schedule
        self._zone = zone_of(schedule.zone)
        self.next_s = self.after(now_s)
        self.last_s = 0  # the last tick that was tried, 0 for none
        self.outcome = ""
        self.job = 0

    def after(self, moment_s: float) -> int:
        """Returns the first tick behind a moment, as Unix time."""
        return self._tick(moment_s, back=False) or _NEVER_S

    def before(self, moment_s: float) -> int:
        """Returns the last tick ahead of a moment, 0 for none."""
        return self._tick(moment_s, back=True)

    def _tick(self, moment_s: float, *, back: bool) -> int:
        try:
            moment = datetime.fromtimestamp(moment_s, self._zone)
            return int(next(CronSim(self.schedule.cron, moment, reverse=back)).timestamp())
        except (StopIteration, ValueError, OverflowError):  # a clock that tells no year of the calendar
            return 0


class Schedules:
    """All schedules of a server. begin() once it serves."""

    def __init__(
        self,
        engine: Operate,
        service: Service,
        accept: Callable[[Operation], None],
        log: logging.Logger,
        wall_clock_s: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._service = service
        self._accept = accept
        self._log = log
        self._now_s = wall_clock_s
        self._durable = False
        self._begun = False
        self._wanted: Sequence[Schedule] = ()
        self._changed = Event()
        self.plans: list[Plan] = []

    def use(self, schedules: Sequence[Schedule]) -> None:
        """Follows these from now on."""
        self._wanted = schedules
        self._changed.set()

    def run(self, *, durable: bool) -> None:
        """Puts jobs without an end. `durable` says that jobs outlive the process, so that missed ticks are known."""
        self._durable = durable
        while True:
            self._changed.clear()
            self._take_up()
            now_s = self._now_s()
            for plan in self.plans:
                self._look_at(plan, now_s)
            wait_s = min([plan.next_s - self._now_s() for plan in self.plans], default=_LOOK_EVERY_S)
            self._changed.wait(min(max(wait_s, 0.0), _LOOK_EVERY_S) if self.plans else None)

    def _take_up(self) -> None:
        """Follows new settings: schedules that have not changed go on, and new ones begin now."""
        if [plan.schedule for plan in self.plans] == list(self._wanted):
            return
        known = {plan.schedule: plan for plan in self.plans}
        now_s = self._now_s()
        self.plans = [known.get(each) or Plan(each, now_s) for each in self._wanted]
        for plan in self.plans:
            if plan.schedule not in known and self._durable:
                self._consider(plan, plan.before(now_s + 1), now_s)

    def _look_at(self, plan: Plan, now_s: float) -> None:
        following_s = plan.after(now_s)
        if plan.next_s > now_s:
            plan.next_s = min(plan.next_s, following_s)  # the clock was set back
            return
        plan.next_s = following_s
        tick_s = plan.before(now_s + 1)
        if not self._consider(plan, tick_s, now_s) and tick_s:
            self._log.warning("schedule %s: its tick of %s was missed", plan.schedule.name, _shown(tick_s))

    def _consider(self, plan: Plan, tick_s: int, now_s: float) -> bool:
        """Puts the job of a tick that was just now, or for which it is not too late. Returns whether it does."""
        puts = tick_s > 0 and (now_s - tick_s <= LATE_S or plan.schedule.missed == ONCE)
        if puts:
            gevent.spawn(self._put, plan, tick_s)
        return puts

    def _put(self, plan: Plan, tick_s: int) -> None:
        """Puts the job of a tick, again and again until it is there, or the next tick comes."""
        schedule, until_s = plan.schedule, plan.after(tick_s)
        unique_s = min(until_s - tick_s + _MARGIN_S, U32_MAX)
        tags = parse(f"{schedule.tags} idp:schedule.{schedule.name}.{tick_s}:{unique_s}".strip().encode())
        plan.last_s, plan.outcome, plan.job = tick_s, "under way", 0
        while True:
            one = _TickPut(self._engine, self._service, schedule, tags)
            self._accept(one)
            one.over.wait()
            if one.outcome == INSERTED and one.job is not None:
                plan.outcome, plan.job = "put", one.job.id
                self._log.info("schedule %s: put job %d for %s", schedule.name, one.job.id, _shown(tick_s))
                return
            if one.outcome == DUPLICATE:
                plan.outcome = "put before"
                return
            if one.has_failed:  # the server ends, and the next one looks
                return
            why = _REFUSALS.get(one.outcome, "there is no room")
            if plan.outcome != why:
                plan.outcome = why
                self._log.warning("schedule %s: the job of %s is refused: %s", schedule.name, _shown(tick_s), why)
            gevent.sleep(_AGAIN_S)
            if self._now_s() >= until_s or plan not in self.plans:
                return


class _TickPut(Put):
    """A put whose sender waits until it is over."""

    def __init__(self, engine: Operate, service: Service, schedule: Schedule, tags: Any) -> None:
        body = schedule.body.encode("utf-8", "surrogateescape")
        numbers = schedule.priority, schedule.delay, schedule.ttr
        super().__init__(engine, service, schedule.tube.encode(), body, *numbers, tags)
        self.over: Any = Event()
        self.has_failed = False

    def done(self) -> None:
        self.over.set()

    def failed(self) -> None:
        self.has_failed = True
        self.over.set()


def _shown(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
