"""Schedules: one job a tick, whatever restarts, is late, is refused, or sets the clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gevent
import pytest
import yaml

from geventstalk.config import ConfigError, Settings, load
from geventstalk.config_schedules import Schedule
from geventstalk.core.job import tags_of
from geventstalk.serving.schedules import LATE_S, Schedules
from tests.support.clients import until
from tests.support.process import ServerProcess, free_port
from tests.support.web import Inside, Web
from tests.support.wire import Client
from tests.test_policies import run
from tests.test_reload import log_of

Starter = Callable[..., ServerProcess]
NOON = datetime(2026, 11, 27, 12, tzinfo=timezone.utc).timestamp()
EACH_MINUTE = Schedule("each", "* * * * *", "t", body="hello", tags="note:n")


def settings_of(folder: Path, entry: object) -> Settings:
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({"schedules": entry}, sort_keys=False), encoding="utf-8")
    return load({}, {}, str(path))[0]


def test_a_file_says_schedules(tmp_path: Path) -> None:
    most = {"priority": 1, "delay": 2, "ttr": 3, "tags": "tries:2  note:n", "missed": "once", "zone": "Europe/Berlin"}
    entry = {"a": {"cron": "@daily", "tube": "t"}, "b.1": {"cron": "*/5 1 * 2 mon", "tube": "u", "body": "x", **most}}
    assert settings_of(tmp_path, entry).schedules == (
        Schedule("a", "0 0 * * *", "t"),
        Schedule("b.1", "*/5 1 * 2 mon", "u", "Europe/Berlin", "x", 1, 2, 3, "tries:2 note:n", "once"),
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([], "schedules are a list, and have to be a mapping"),
        ({"a b": {}}, "a b is no name of a schedule"),
        ({5: {}}, "5 is no name of a schedule"),
        ({"a": {"tube": "t"}}, "schedule a: the key cron of a schedule is missing"),
        ({"a": {"cron": "* * * * *"}}, "the key tube of a schedule is missing"),
        ({"a": {"cron": "* * * *", "tube": "t"}}, "has to be minute, hour, day, month and day of the week"),
        ({"a": {"cron": "0 * * * * *", "tube": "t"}}, "has to be minute, hour, day, month and day of the week"),
        ({"a": {"cron": 5, "tube": "t"}}, "cron is 5, and has to be"),
        ({"a": {"cron": "61 * * * *", "tube": "t"}}, "cron 61 * * * * never comes: Bad minute"),
        ({"a": {"cron": "0 0 31 2 *", "tube": "t"}}, "cron 0 0 31 2 * never comes"),
        ({"a": {"cron": "* * * * *", "tube": "-"}}, "tube is -, which is no name of a tube"),
        ({"a": {"cron": "* * * * *", "tube": "t", "zone": "Mars"}}, "this host knows no time zone Mars"),
        ({"a": {"cron": "* * * * *", "tube": "t", "zone": "../passwd"}}, "this host knows no time zone"),
        ({"a": {"cron": "* * * * *", "tube": "t", "zone": "Europe"}}, "this host knows no time zone"),
        ({"a": {"cron": "* * * * *", "tube": "t", "tags": "idp:x"}}, "tags of a put other than idp:"),
        ({"a": {"cron": "* * * * *", "tube": "t", "tags": "ü:x"}}, "have to be tags of a put"),
        ({"a": {"cron": "* * * * *", "tube": "t", "body": 5}}, "body is 5, and has to be text"),
        ({"a": {"cron": "* * * * *", "tube": "t", "ttr": -1}}, "invalid ttr: -1"),
        ({"a": {"cron": "* * * * *", "tube": "t", "missed": "all"}}, "missed is all, and has to be once or skip"),
        ({"a": {"cron": "* * * * *", "tube": "t", "at": 1}}, "a schedule has no key at, but cron, tube"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(tmp_path: Path, entry: object, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        settings_of(tmp_path, entry)


class Clocked:
    """An engine, and schedules with a wall clock that the test sets."""

    def __init__(self, now_s: float, world: Inside | None = None, *, durable: bool = True) -> None:
        self.now_s = now_s
        self.world = Inside() if world is None else world
        made = Schedules(
            self.world.engine, self.world.service, self.world.turn.accept, self.world.backend.log, self.time
        )
        self.schedules = made
        self.durable = durable
        self._greenlet: Any = None

    def time(self) -> float:
        return self.now_s

    def use(self, *schedules: Schedule) -> None:
        self.schedules.use(schedules)
        if self._greenlet is None:
            self._greenlet = gevent.spawn(self.schedules.run, durable=self.durable)
        self.look()

    def pass_to(self, now_s: float) -> None:
        self.now_s = now_s
        self.look()

    def look(self) -> None:
        self.schedules._changed.set()
        gevent.sleep(0.02)

    def keys(self) -> list[int]:
        """The ticks whose jobs are there."""
        found = []
        for job in self.world.engine.jobs:
            tags = tags_of(job)
            assert tags is not None
            found.append(int(tags.unique.rpartition(b".")[2]) - int(NOON))
        return found

    def end(self) -> None:
        gevent.kill(self._greenlet)


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    made = Clocked(NOON + 10, durable=False)
    yield made
    made.end()


def test_each_tick_has_its_job(clocked: Clocked) -> None:
    clocked.use(EACH_MINUTE)
    assert clocked.keys() == []
    for moment in (59.9, 60, 61, 119, 120.5, 180):
        clocked.pass_to(NOON + moment)
    assert clocked.keys() == [60, 120, 180]
    job = next(iter(clocked.world.engine.jobs))
    tags = tags_of(job)
    assert (job.body, job.pri, job.ttr_s) == (b"hello\r\n", 65536, 60) and tags is not None
    assert tags.text == b"note:n idp:schedule.each.%d:3660" % (NOON + 60)
    (plan,) = clocked.schedules.plans
    assert (plan.next_s, plan.last_s, plan.outcome, plan.job) == (NOON + 240, NOON + 180, "put", 3)


def test_of_several_ticks_at_once_the_last_one_counts(clocked: Clocked) -> None:
    clocked.use(EACH_MINUTE)
    clocked.pass_to(NOON + 660 + LATE_S - 1)
    assert clocked.keys() == [660]


def test_a_tick_that_is_late_by_more_than_a_minute(clocked: Clocked) -> None:
    for missed, moment_s in (("skip", 7200), ("once", 14_400)):
        clocked.use(EACH_MINUTE._replace(cron="0 * * * *", missed=missed, tube=missed))
        clocked.pass_to(NOON + moment_s + LATE_S + 1)
    assert clocked.keys() == [14400], "skip: none"


def test_a_late_tick_by_less(clocked: Clocked) -> None:
    clocked.use(EACH_MINUTE._replace(cron="0 * * * *"))
    clocked.pass_to(NOON + 3600 + LATE_S)
    assert clocked.keys() == [3600]


def test_a_clock_that_is_set_back_brings_no_second_job(clocked: Clocked) -> None:
    clocked.use(EACH_MINUTE)
    clocked.pass_to(NOON + 60)
    clocked.pass_to(NOON + 30)
    clocked.pass_to(NOON + 60)
    assert clocked.keys() == [60] and clocked.schedules.plans[0].outcome == "put before"
    clocked.pass_to(NOON + 3 * 365 * 86400)
    clocked.pass_to(NOON + 70)
    clocked.pass_to(NOON + 120)
    assert clocked.keys().count(120) == 1, "a clock that was wrong for a moment stops no schedule"


@pytest.mark.parametrize(
    ("missed", "late_s", "durable", "keys"),
    [
        ("once", 10, True, [0]),
        ("once", 3000, True, [0]),
        ("once", 10, False, []),
        ("skip", 10, True, [0]),
        ("skip", 3000, True, []),
    ],
)
def test_a_start_looks_at_the_tick_before_it(missed: str, late_s: int, durable: bool, keys: list[int]) -> None:
    """A restart or a takeover at a tick must not lose it."""
    hourly = EACH_MINUTE._replace(cron="0 * * * *", missed=missed)
    clocked = Clocked(NOON + late_s, durable=durable)
    clocked.use(hourly)
    assert clocked.keys() == keys
    again = Clocked(NOON + late_s + 10, clocked.world, durable=durable)
    again.use(hourly)
    assert clocked.keys() == keys, "it has its job"
    clocked.end()
    again.end()


def test_a_clock_that_tells_no_year_ends_nothing(clocked: Clocked) -> None:
    clocked.use(EACH_MINUTE)
    for moment_s in (1e12, -1e12, 253_402_300_799.0):
        clocked.pass_to(moment_s)
    clocked.pass_to(NOON + 70)
    clocked.pass_to(NOON + 120)
    assert clocked.keys()[-1] == 120


def test_a_put_that_is_refused_is_tried_again(clocked: Clocked, caplog: pytest.LogCaptureFixture) -> None:
    clocked.world.engine.draining = True
    clocked.use(EACH_MINUTE)
    clocked.pass_to(NOON + 60)
    assert clocked.keys() == [] and clocked.schedules.plans[0].outcome == "the server drains"
    clocked.world.engine.draining = False
    gevent.sleep(1.1)
    assert clocked.keys() == [60] and caplog.text.count("refused: the server drains") == 1
    clocked.world.engine.draining = True
    clocked.pass_to(NOON + 120)
    clocked.pass_to(NOON + 180)
    gevent.sleep(1.1)
    clocked.world.engine.draining = False
    gevent.sleep(1.1)
    assert clocked.keys() == [60, 180], "until the next tick"


def test_schedules_that_change(clocked: Clocked) -> None:
    other = EACH_MINUTE._replace(name="other", tube="u", cron="*/2 * * * *")
    clocked.use(EACH_MINUTE, other)
    before = clocked.schedules.plans[0]
    clocked.use(EACH_MINUTE, other._replace(tube="v"))
    assert clocked.schedules.plans[0] is before
    clocked.use(other)
    clocked.pass_to(NOON + 60)
    clocked.pass_to(NOON + 120)
    assert clocked.keys() == [120] and "u" in {tube.decode() for tube in clocked.world.engine.tubes}
    clocked.use()
    clocked.pass_to(NOON + 240)
    assert clocked.keys() == [120]


@pytest.mark.slow
def test_a_server_with_a_journal(start_server: Starter, tmp_path: Path) -> None:
    path, port = tmp_path / "settings.yaml", free_port()
    entry = {"cron": "* * * * *", "tube": "ticks", "body": "tick", "missed": "once"}
    path.write_text(yaml.safe_dump({"schedules": {"each": entry, "yearly": {"cron": "@yearly", "tube": "y"}}}))
    words = ["--config", str(path), "-b", str(tmp_path / "journal"), "--http", str(port)]
    server = start_server(*words)
    with Client(server.connect()) as client:
        client.ask(b"watch ticks")
        found = client.ask(b"reserve-with-timeout 20")
        assert found.endswith(b"tick\r\n")
        first = int(found.split()[1])
        assert client.ask(b"delete %d" % first) == b"DELETED\r\n"
    tick = int(time.time()) // 60 * 60
    server.kill()
    server.read_log()
    server = start_server(*words)
    (each, yearly) = Web(port).get("/schedules")["schedules"]
    assert each["next"] % 60 == 0 and yearly["last"] is None and yearly["missed"] == "skip"
    with Client(server.connect()) as client:
        client.ask(b"watch ticks")
        if int(time.time()) // 60 * 60 == tick:
            until(lambda: Web(port).get("/schedules")["schedules"][0]["last"] is not None, "it has looked")
            assert Web(port).get("/schedules")["schedules"][0]["last"]["outcome"] == "put before"
            assert client.ask(b"reserve-with-timeout 0") == b"TIMED_OUT\r\n", "that tick had its job"
    shown = run(server, "schedules")
    assert "each" in shown and "put before" in shown and "yearly" in shown
    path.write_text("")
    assert Web(port).json("POST", "/api/v1/reload", {})["at_restart"] == []
    until(lambda: Web(port).get("/schedules")["schedules"] == [], "they are gone")
    assert run(server, "schedules") == "geventstalk: there is no schedule\n"
    assert "use those that have changed: schedules" in log_of(server)
