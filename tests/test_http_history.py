"""Figures over time: ranges and sparklines against a plain recount, gaps, bounds, and the greenlet that reads."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from geventstalk.api_shapes import RATES
from geventstalk.core.job import READY, SECOND_NS
from geventstalk.core.meter import Times, quantiles
from geventstalk.http import sampler
from geventstalk.http.history import (
    RANGES,
    SERIES,
    SPARK_POINTS,
    SPARK_STEP_NS,
    STEP_NS,
    TUBE_RANGES,
    TUBE_SERIES,
    Sparks,
)
from geventstalk.http.sampler import Sampler
from geventstalk.http.slices import Pace
from tests.support.clock import ManualClock
from tests.support.web import Inside, puts

Point = dict[str, float | None]
NOTHING: Point = dict.fromkeys(SERIES)


class Watched:
    """An engine whose clock stands still, and its sampler."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.inside = Inside(clock=lambda: self.clock.ns)
        self.sampler = Sampler(self.inside.backend)
        self.client = self.inside.session(b"watch t\r\n")

    def say(self, *lines: bytes) -> None:
        for line in lines:
            self.client.receive(line, self.clock.ns)
            while self.client.unfinished:
                self.client.run(self.clock.ns)
            self.client.take_out()

    def get(self, name: str) -> Any:
        return self.inside.get(f"/history?range={name}")

    def sparks(self) -> dict[str, Any]:
        tubes = self.inside.get("/tubes?spark=true&limit=1000")["tubes"]
        return {tube["name"]: tube["spark"] for tube in tubes}


@pytest.fixture
def watched() -> Watched:
    return Watched()


class Recount:
    """The events with their times, from which every range can be counted."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, int]] = []  # moment, what, and for reserve and delete how long it took
        self.readings: list[tuple[int, dict[str, int]]] = []

    def point(self, firsts: dict[int, tuple[int, dict[str, int]]], number: int) -> Point:
        """The point of the step that ends at `number`, from the first reading behind each step."""
        earlier = [at for at in firsts if at < number]
        if number not in firsts or not earlier:
            return NOTHING
        (begun_ns, _), (end_ns, levels) = firsts[max(earlier)], firsts[number]
        events = [event for event in self.events if begun_ns < event[0] <= end_ns]
        found: Point = {**NOTHING, **levels}
        for name in RATES:
            found[name] = round(sum(what == name for _, what, _ in events) * SECOND_NS / (end_ns - begun_ns), 3)
        for what, ends in (("queued", ("reserve",)), ("worked", ("delete", "bury", "timeout"))):
            times = Times()
            for _, end, ns in events:
                if end in ends:
                    times.add_here(ns)
            if times.count():
                for percent, ns in zip((50, 95, 99), quantiles(times.counts), strict=True):
                    found[f"{what}_p{percent}"] = round(ns / SECOND_NS, 6)
        return found

    def series(self, name: str, now_ns: int) -> tuple[int, list[Point]]:
        step_ns, size = RANGES[name]
        firsts: dict[int, tuple[int, dict[str, int]]] = {}
        for at_ns, levels in self.readings:
            firsts.setdefault(at_ns // step_ns, (at_ns, levels))
        last_ns = self.readings[-1][0]
        number = max(last_ns // step_ns, now_ns // step_ns - 1)
        return number * step_ns, [self.point(firsts, each) for each in range(number - size + 1, number + 1)]


def traffic(watched: Watched, recount: Recount, rng: random.Random) -> None:
    """Something happens, a moment after the last event."""
    now_ns = watched.clock.pass_ns(rng.randrange(1, 400_000_000))
    engine = watched.inside.engine
    jobs = list(watched.client.reserved.values())
    action = rng.choice(["put", "put", "reserve", "reserve", "delete", "bury"])
    if action == "put":
        watched.say(b"use t\r\nput 0 0 1000000 1\r\nx\r\n")
        recount.events.append((now_ns, "put", 0))
    elif action == "reserve" and engine.ready_count:
        first = min((job for job in engine.jobs.in_order() if job.state == READY), key=lambda job: job.id)
        recount.events.append((now_ns, "reserve", now_ns - first.since_ns))
        watched.say(b"reserve-with-timeout 0\r\n")
    elif action in ("delete", "bury") and jobs:
        job = rng.choice(jobs)
        recount.events.append((now_ns, action, now_ns - job.since_ns))
        watched.say(b"%s %d%s\r\n" % (action.encode(), job.id, b" 0" if action == "bury" else b""))


def test_ranges_are_what_a_recount_gives(watched: Watched, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    recount = Recount()
    clock, engine = watched.clock, watched.inside.engine
    monkeypatch.setattr(sampler, "resident_bytes", lambda: clock.ns // SECOND_NS)
    for _ in range(300):
        for _ in range(rng.choice([0, 0, 1, 5])):
            traffic(watched, recount, rng)
        # Now and then the reader comes late, misses some steps, or many.
        late_ns = rng.choice([0, 0, 0, rng.randrange(STEP_NS), STEP_NS * rng.randrange(1, 30)])
        clock.to((clock.ns // STEP_NS + 1) * STEP_NS + late_ns)
        levels = {
            "ready": engine.ready_count,
            "reserved": engine.reserved_count,
            "delayed": 0,
            "buried": engine.buried_count,
            "memory_bytes": clock.ns // SECOND_NS,
            "journal_bytes": 0,
        }
        watched.sampler.sample()
        recount.readings.append((clock.ns, levels))
    for _ in range(3):
        clock.pass_ns(rng.randrange(3 * STEP_NS))
        for name, (step_ns, size) in RANGES.items():
            end_ns, wanted = recount.series(name, clock.ns)
            answer = watched.get(name)
            assert answer["step_s"] == step_ns / SECOND_NS
            assert answer["to"] - answer["from"] == pytest.approx(step_ns * size / SECOND_NS)
            assert clock.ns / SECOND_NS - end_ns / SECOND_NS == pytest.approx(time.time() - answer["to"], abs=1)
            assert list(answer["series"]) == list(SERIES)
            found = [dict(zip(SERIES, point, strict=True)) for point in zip(*answer["series"].values(), strict=True)]
            assert found == wanted, name


def test_timeouts_are_counted(watched: Watched) -> None:
    watched.sampler.sample()
    watched.say(b"use t\r\nput 0 0 1 1\r\nx\r\nreserve\r\n")
    watched.clock.pass_ns(STEP_NS)
    watched.inside.engine.advance(watched.clock.ns, 100)
    watched.sampler.sample()
    series = watched.get("15m")["series"]
    assert series["timeout"][-1] == 0.2 and series["worked_p50"][-1] > 0 and series["delete"][-1] == 0


def test_before_the_first_reading_nothing_is_known(watched: Watched) -> None:
    for name, (_, size) in RANGES.items():
        series = watched.get(name)["series"]
        assert all(column == [None] * size for column in series.values())
    watched.sampler.sample()
    assert set(watched.get("15m")["series"]["ready"]) == {None}, "one reading is no step"
    watched.clock.pass_ns(STEP_NS)
    watched.sampler.sample()
    assert watched.get("15m")["series"]["ready"][-2:] == [None, 0]


@pytest.mark.parametrize("query", ["range=2h", "range=", "rage=1h", "range=1h&range=1d"])
def test_what_is_asked_wrongly_is_a_problem(watched: Watched, query: str) -> None:
    assert watched.inside.status("GET", f"/api/v1/history?{query}") == 400


def test_a_clock_that_leaps_takes_no_memory(watched: Watched) -> None:
    """A machine that slept for a year, or a reader that was asked about one."""
    watched.sampler.sample()
    for _ in range(2):
        watched.clock.pass_s(365 * 86400)
        for name, (_, size) in RANGES.items():
            assert {len(column) for column in watched.get(name)["series"].values()} == {size}
        watched.sampler.sample()
        assert watched.get("1d")["series"]["ready"][-2:] == [None, 0]


# Sparklines


def test_sparklines_are_what_a_recount_gives(watched: Watched, seed: int) -> None:
    rng = random.Random(seed)
    history: list[dict[str, int]] = []
    for _ in range(60):
        watched.clock.to((watched.clock.ns // SPARK_STEP_NS + 1) * SPARK_STEP_NS + rng.randrange(SECOND_NS))
        for name in rng.sample(["a", "b", "c", "d"], 2):
            watched.say(b"use %s\r\n" % name.encode())
            if rng.random() < 0.5:
                watched.say(b"put 0 0 60 1\r\nx\r\n" * rng.randrange(1, 4))
            else:
                watched.say(b"watch %s\r\n" % name.encode(), b"ignore default\r\n", b"ignore t\r\n")
                while watched.inside.engine.ready_count and watched.inside.engine.tubes[name.encode()].ready:
                    id = watched.inside.json("GET", f"/api/v1/tubes/{name}")["next"]["ready"]["id"]
                    watched.say(b"delete %d\r\n" % id)
        if rng.random() < 0.2:
            history.append({})  # the reader misses this one
            continue
        watched.sampler.sample()
        history.append({name.decode(): len(tube.ready) for name, tube in watched.inside.engine.tubes.items()})
        shown = watched.sparks()
        last = history[-SPARK_POINTS:]
        for name, spark in shown.items():
            counts: list[int | None] = [each.get(name, 0) if each else None for each in last]
            while len(counts) < SPARK_POINTS:
                counts.insert(0, None)
            if spark is None:
                assert not any(counts)
                continue
            assert len(spark) == SPARK_POINTS
            # Of the time before a tube had a job nothing is told.
            known = next(at for at, point in enumerate(spark) if point is not None)
            assert spark[known:] == counts[known:] and not any(counts[:known])


def test_a_tube_that_is_emptied_keeps_its_line_as_long_as_it_shows(watched: Watched) -> None:
    def step() -> None:
        watched.clock.pass_ns(SPARK_STEP_NS)
        watched.sampler.sample()

    step()
    assert watched.sparks() == {"default": None, "t": None}
    watched.say(b"use t\r\nput 0 0 60 1\r\nx\r\n")
    step()
    assert watched.sparks()["t"] == [None] * 29 + [1]
    assert "spark" not in watched.inside.json("GET", "/api/v1/tubes")["tubes"][0]
    watched.say(b"delete 1\r\n")
    step()
    assert watched.sparks()["t"] == [None] * 28 + [1, 0]
    for _ in range(28):
        step()
    assert watched.sparks()["t"] == [1] + [0] * 29
    step()
    assert watched.sparks()["t"] == [0] * 30
    step()
    assert watched.sparks()["t"] is None and not len(watched.inside.backend.sparks)


def test_so_many_lines_and_no_more(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "TUBES_MAX", 20)
    for first in range(0, 60, 20):
        watched.say(*[puts([f"t{number}"] * (number + 1)) for number in range(first, first + 20)])
        watched.clock.pass_ns(SPARK_STEP_NS)
        watched.sampler.sample()
        sparks = watched.sparks()
        assert {name for name, spark in sparks.items() if spark} == {f"t{n}" for n in range(first, first + 20)}
        assert len(watched.inside.backend.sparks) == 20


def test_a_line_and_its_gaps() -> None:
    sparks = Sparks()
    sparks.add(b"t", 100, 5)
    sparks.add(b"t", 103, 7)
    assert sparks.line(b"t", 103 * SPARK_STEP_NS) == [None] * 26 + [5, None, None, 7]
    assert sparks.line(b"t", 104 * SPARK_STEP_NS) == [None] * 26 + [5, None, None, 7], "it may still come"
    assert sparks.line(b"t", 105 * SPARK_STEP_NS) == [None] * 25 + [5, None, None, 7, None]
    assert sparks.line(b"t", 10**9 * SPARK_STEP_NS) == [None] * 30
    assert not sparks.has_shape(b"t") and sparks.line(b"u", 0) is None


# Charts of tubes

HOUR_NS = 3600 * SECOND_NS
TUBE_NOTHING: Point = dict.fromkeys(TUBE_SERIES)


class Busy:
    """The history of a tube between readings, as points of its shortest step."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched

    def step(self, steps: int = 1) -> None:
        self.watched.inside.engine.settle_rates(self.watched.clock.ns, 1000)
        self.watched.clock.pass_ns(SPARK_STEP_NS * steps)
        self.watched.sampler.sample()

    def points(self, tube: str = "t", span: str = "15m") -> list[Point]:
        answer = self.watched.get(f"{span}&tube={tube}")
        assert list(answer["series"]) == list(TUBE_SERIES)
        return [dict(zip(TUBE_SERIES, point, strict=True)) for point in zip(*answer["series"].values(), strict=True)]

    def shown(self) -> set[str]:
        return {name.decode() for name in self.watched.inside.backend.tube_history.names()}


@pytest.fixture
def busy(watched: Watched) -> Busy:
    return Busy(watched)


def test_a_tube_has_all_series_in_all_ranges(busy: Busy) -> None:
    """One reading every 30 s; each range tells the counts and the rates of its own steps, of this tube alone."""
    watched, zero = busy.watched, dict.fromkeys(TUBE_SERIES, 0)
    watched.clock.to((watched.clock.ns // HOUR_NS + 1) * HOUR_NS)
    watched.say(b"use t\r\n", b"put 0 0 60 1\r\nx\r\n" * 6, b"put 0 9999 60 1\r\nx\r\n", puts(["u"] * 50))
    watched.sampler.sample()
    assert busy.points() == [TUBE_NOTHING] * 30, "one reading is no step"
    watched.say(b"reserve\r\n" * 4, b"delete 1\r\n", b"delete 2\r\n", b"bury 3 0\r\n")
    busy.step()
    levels = {"ready": 2, "reserved": 1, "delayed": 1, "buried": 1}
    done = {**zero, "reserve": 4, "delete": 2, "bury": 1}
    first = {key: round(count / 30, 3) for key, count in done.items()} | levels
    assert busy.points()[-2:] == [TUBE_NOTHING, first]
    watched.clock.pass_s(60)
    watched.inside.engine.advance(watched.clock.ns, 100)
    watched.sampler.sample()
    levels = {"ready": 3, "reserved": 0, "delayed": 1, "buried": 1}
    assert busy.points()[-3:] == [first, TUBE_NOTHING, {**zero, "timeout": round(1 / 60, 3), **levels}]
    for span, (step_ns, size) in TUBE_RANGES.items():
        for _ in range(-watched.clock.ns % step_ns // SPARK_STEP_NS):
            busy.step()
        points = busy.points(span=span)
        assert len(points) == size and {key: points[-1][key] for key in levels} == levels, span
    everything = {key: round(count / 3600, 3) for key, count in done.items()} | {"timeout": 0.0} | levels
    assert busy.points(span="1w")[-2:] == [TUBE_NOTHING, everything]
    assert busy.points("nothing") == [TUBE_NOTHING] * 30


def test_a_tube_that_goes_and_comes_keeps_its_charts(busy: Busy) -> None:
    """The counters of a tube begin at 0 each time that it is made."""
    watched = busy.watched
    watched.say(b"use u\r\nput 0 0 60 1\r\nx\r\n" * 3)
    busy.step()
    watched.say(b"use default\r\ndelete 1\r\n", b"delete 2\r\n", b"delete 3\r\n")
    assert b"u" not in watched.inside.engine.tubes
    busy.step()
    watched.say(b"use u\r\nput 0 0 60 1\r\nx\r\n")
    busy.step()
    zero = dict.fromkeys(TUBE_SERIES, 0)
    assert busy.points("u")[-2:] == [zero, {**zero, "put": round(1 / 30, 3), "ready": 1}]


def test_the_busiest_tubes_have_charts_and_no_other(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog that only lies there gives way to traffic, a short-lived tube to one that was busier of late."""
    watched = busy.watched
    monkeypatch.setattr(sampler, "BUSY_MAX", 3)

    def work(name: str, jobs: int) -> None:
        watched.say(b"use %s\r\n" % name.encode(), b"put 0 0 60 1\r\nx\r\n" * jobs)

    work("night", 40)
    work("mail", 2)
    busy.step()
    assert busy.shown() == {"night", "mail"}, "one without a job, where nothing ever happened, takes no room"
    work("thumbs", 4)
    work("sync", 6)
    busy.step()
    assert busy.shown() == {"night", "thumbs", "sync"}
    assert busy.points("mail") == [TUBE_NOTHING] * 30
    busy.step(2 * 3600 // 30)
    work("mail", 5)
    busy.step()
    assert busy.shown() == {"night", "mail", "sync"}, "the busiest moments fade, and night's is the greatest still"
    for _ in range(48):
        busy.step(3600 // 30)
        work("sync", 6)
        work("thumbs", 6)
        work("mail", 6)
    busy.step()
    assert busy.shown() == {"thumbs", "mail", "sync"}


def test_the_charts_of_tubes_take_what_is_documented(busy: Busy) -> None:
    """The bound of the memory is stated in docs/console.md: 16 kB each, however long they go on."""
    watched = busy.watched
    watched.say(puts([f"t{number}" for number in range(100)]))
    for _ in range(2):
        busy.step(3600 // 30)
    for name in watched.inside.backend.tube_history.names():
        watched.inside.backend.tube_history.forget(name)
    tracemalloc.start()
    try:
        for _ in range(3):
            watched.clock.pass_s(3600)
            watched.sampler._read_busy()
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(busy.shown()) == 100
    assert taken < 100 * 17_000


# The reader


def until(condition: Callable[[], object]) -> None:
    with gevent.Timeout(5):
        while not condition():
            gevent.sleep(0.002)


def test_the_reader_begins_when_the_journal_is_replayed_and_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "STEP_NS", 10_000_000)
    monkeypatch.setattr(sampler, "_LOOK_EVERY_S", 0.01)
    inside = Inside()
    inside.backend.replayed = False
    reader = Sampler(inside.backend)
    read: list[None] = []
    monkeypatch.setattr(reader, "sample", lambda: read.append(None))
    greenlet = gevent.spawn(reader.run)
    gevent.sleep(0.03)
    assert not read
    inside.backend.replayed = True
    until(lambda: len(read) > 2)
    inside.backend.stop()
    greenlet.join(5)
    assert greenlet.dead


def test_a_fault_of_the_reader_is_told_once_and_harms_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Inside()
    monkeypatch.setattr(inside.backend.history, "add", None)
    Sampler(inside.backend).run()
    assert "the charts of HTTP end here" in caplog.text
    assert inside.status("GET", "/api/v1/history") == 200


def test_many_tubes_are_read_in_slices(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two yields no more than a few tubes are looked at."""
    watched.say(*[puts([f"t{number}" for number in range(at, at + 500)]) for at in range(0, 3000, 500)])
    steps = [0]
    monkeypatch.setattr(Pace, "step", lambda pace: steps.__setitem__(0, steps[0] + 1))
    watched.sampler.sample()
    assert len(watched.inside.backend.sparks) == 2000 and len(watched.inside.backend.tube_history) == 500
    assert steps[0] > 5000 + 3500
