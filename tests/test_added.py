"""Verbs beside beanstalkd's: what a slice of one may do, shares of tubes, bodies that are not in memory, large jobs.

The bytes of each verb and of each mistake are in transcripts/added-*.txt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.test_bodies as bodies
from geventstalk.core.meter import Times
from geventstalk.core.shares import MODES, WEIGHTED, WEIGHTED_FAIR, Shares
from geventstalk.core.tube import Tube
from geventstalk.wire.session import MOVE_SLICE, Session
from tests.support.check import check
from tests.support.clock import SECOND
from tests.support.forgetful import Forgetful
from tests.test_bodies import reserved
from tests.test_session import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    check(rig.engine)


def put(rig: Rig, session: Session, count: int, tube: bytes = b"default", more: bytes = b"0 0 60") -> None:
    rig.feed(session, (b"put-in %b %b 1\r\nx\r\n" % (tube, more)) * count)


@pytest.mark.parametrize("state", ["ready", "delayed", "buried", "reserved", "blocked", ""])
def test_a_large_tube_is_flushed_in_slices(rig: Rig, state: str) -> None:
    a = rig.connect()
    count = 3 * MOVE_SLICE + 7
    put(rig, a, count, more=b"0 100 60" if state == "delayed" else b"0 0 60")
    if state in ("buried", "reserved"):
        rig.feed(a, b"reserve\r\n" * count)
    if state == "buried":
        rig.feed(a, b"".join(b"bury %d 0\r\n" % id for id in range(1, count + 1)))
    if state == "blocked":
        rig.feed(a, b"flush-tube default\r\n" + b"put 0 0 60 1 con:k\r\nx\r\n" * count + b"reserve\r\n")
    put(rig, a, 5, tube=b"other")
    word = b"" if state in ("", "blocked") else b" " + state.encode()
    slices = 0
    a.receive(b"flush-tube default%b\r\n" % word, rig.clock.ns)
    while a.unfinished:
        before = len(rig.engine.jobs)
        a.run(rig.clock.ns)
        assert before - len(rig.engine.jobs) <= MOVE_SLICE + 64
        slices += 1
    assert slices >= 2 and a.take_out() == b"FLUSHED %d\r\n" % count
    assert len(rig.engine.jobs) == 5 and not rig.engine.default.jobs


def test_a_flush_ends_while_others_put(rig: Rig) -> None:
    a, b = rig.connect(), rig.connect()
    put(rig, a, 1000)
    a.receive(b"flush-tube default ready\r\n", rig.clock.ns)
    for _ in range(20):
        if a.unfinished:
            put(rig, b, 300)
            a.run(rig.clock.ns)
    assert a.take_out() == b"FLUSHED 1000\r\n"


def test_a_flush_of_a_tube_that_ends_meanwhile(rig: Rig) -> None:
    a, b = rig.connect(), rig.connect()
    put(rig, a, 2 * MOVE_SLICE, tube=b"t")
    a.receive(b"flush-tube t\r\n", rig.clock.ns)
    assert a.unfinished
    assert rig.feed(b, b"flush-tube t\r\n").startswith(b"FLUSHED ")
    put(rig, b, 1, tube=b"t")
    assert rig.finish(a).startswith(b"FLUSHED ")
    assert len(rig.engine.jobs) == 1, "it is another tube"


def test_lists_come_in_pages(rig: Rig) -> None:
    a = rig.connect()
    for _ in range(500):
        put(rig, a, 1)
        put(rig, a, 9, tube=b"other")
    rig.feed(a, b"delete 1\r\ndelete 11\r\n")
    found, after = [], 0
    while True:
        reply = rig.feed(a, b"list-jobs default ready 300 %d\r\n" % after).decode()
        head, _, text = reply.partition("\r\n")
        assert len(text) - 2 == int(head.split()[1]) < 1 << 18
        page = [int(line.split(",")[0].split(": ")[1]) for line in text.splitlines() if line.startswith("- {")]
        if not page:
            break
        found += page
        after = page[-1]
    assert found == [1 + 10 * number for number in range(2, 500)]


# --- shares


def shared(weights: dict[str, int], costs: dict[str, int], mode: int, rounds: int) -> Counter[str]:
    shares = Shares()
    shares.set_mode(mode)
    tubes = []
    for number, name in enumerate(weights):
        tube = Tube(number, name.encode())
        shares.weights[number] = weights[name]
        if name in costs:
            tube.worked = Times()
            tube.worked.add_here(costs[name])
        tubes.append(tube)
    return Counter(shares.choose(tubes).name.decode() for _ in range(rounds))


def test_weights_are_kept() -> None:
    found = shared({"a": 1, "b": 2, "c": 6}, {}, WEIGHTED, 9000)
    assert all(abs(found[name] - 1000 * weight) <= 2 for name, weight in {"a": 1, "b": 2, "c": 6}.items())


def test_times_are_kept() -> None:
    costs = {"a": SECOND, "b": 10 * SECOND, "c": SECOND // 2}
    found = shared({"a": 1, "b": 1, "c": 2}, costs, WEIGHTED_FAIR, 10_000)
    times = {name: found[name] * cost for name, cost in costs.items()}
    assert times["b"] == pytest.approx(times["a"], rel=0.05) and times["c"] == pytest.approx(2 * times["a"], rel=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_no_tube_starves(rig: Rig, mode: str) -> None:
    a, b = rig.connect(), rig.connect()
    rig.feed(a, b"watch x 3\r\nwatch y\r\nreserve-mode %b\r\n" % mode.encode())
    put(rig, b, 300, more=b"9 0 60")
    put(rig, b, 300, tube=b"x", more=b"1 0 60")
    put(rig, b, 300, tube=b"y", more=b"5 0 60")
    for _ in range(100):
        reply = rig.feed(a, b"reserve\r\n")
        rig.clock.pass_s(0.01)
        rig.feed(a, b"delete %b\r\n" % reply.split()[1])
    left = {name.decode(): tube.ready_count() for name, tube in rig.engine.tubes.items()}
    taken = {name: 300 - count for name, count in left.items()}
    if mode == "default":
        assert taken == {"default": 0, "x": 100, "y": 0}
    elif mode == "fifo-fair":
        assert taken == {"default": 34, "x": 33, "y": 33}
    else:
        assert taken["x"] == pytest.approx(60, abs=2) and taken["y"] == pytest.approx(20, abs=2)


def test_a_tube_that_was_empty_has_saved_nothing(rig: Rig) -> None:
    a, b = rig.connect(), rig.connect()
    rig.feed(a, b"watch x\r\nreserve-mode fifo-fair\r\n")
    put(rig, b, 100)
    for _ in range(50):
        rig.feed(a, b"reserve\r\n")
    put(rig, b, 100, tube=b"x")
    rig.feed(a, b"reserve\r\n" * 20)
    assert rig.engine.tubes[b"x"].reserved == 10
    rig.feed(a, b"ignore x\r\nwatch x\r\n" + b"reserve\r\n" * 20)
    assert rig.engine.tubes[b"x"].reserved == 20
    rig.feed(a, b"reserve-mode default\r\n" + b"reserve\r\n" * 20)
    assert rig.engine.tubes[b"x"].reserved == 20


# --- bodies that are not in memory, and large ones


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[bodies.Rig]:
    """200 jobs of which the first ones have left memory."""
    rig = bodies.Rig(tmp_path / "journal", Forgetful(10_000))
    rig.fill(rig.client(), 200)
    assert rig.forget() > 125
    yield rig
    check(rig.engine)
    assert rig.bodies is not None and not rig.bodies._pins
    rig.close()


@pytest.mark.parametrize("ends", ["moved", "deleted", "hangup"])
def test_a_job_is_moved_when_its_body_has_come(forgetful: bodies.Rig, ends: str) -> None:
    rig, wire, other = forgetful, forgetful.client(), forgetful.client()
    size = rig.engine.size_of(rig.engine.jobs.up_from(1)[0])
    assert rig.tell(wire, b"move 1 there\r\nlist-tube-used\r\n") == b""
    if ends == "hangup":
        rig.turn.leave(wire)
        rig.turn.end()
        assert rig.tell(other, b"stats-job 1\r\n").count(b'tube: "default"') == 1
        return
    if ends == "deleted":
        assert rig.tell(other, b"delete 1\r\n") == b"DELETED\r\n"
        rig.turn.let_awaiting_go_on()
        rig.turn.step(wire, b"")
        rig.turn.end()
        rig.go_on()
        assert wire.take() == b"NOT_FOUND\r\nUSING default\r\n"
        return
    rig.fetch()
    assert wire.take() == b"MOVED\r\nUSING default\r\n"
    reply = rig.tell(other, b"list-jobs there ready 9\r\n")
    assert b"id: 1, " in reply and b"size: %d}" % (size - 2) in reply


def test_a_reserved_job_without_a_body_is_peeked(forgetful: bodies.Rig) -> None:
    rig, wire, other = forgetful, forgetful.client(), forgetful.client()
    assert rig.tell(wire, b"reserve\r\n") == b""
    assert rig.tell(other, b"peek-reserved\r\nlist-tube-used\r\n") == b""
    rig.fetch()
    assert wire.take() == reserved(1)
    assert other.take() == reserved(1).replace(b"RESERVED", b"FOUND") + b"USING default\r\n"


def test_a_large_job_is_moved_in_parts(tmp_path: Path) -> None:
    rig = bodies.Rig(tmp_path / "journal", None, segment_bytes=1 << 22)
    wire, other = rig.client(), rig.client()
    size = (1 << 20) - 1
    rig.tell(wire, b"put 0 0 60 %d\r\n" % size + b"x" * size + b"\r\n")
    rig.store.large_bytes = 1 << 18
    rig.turn.step(wire, b"move 1 there\r\n")
    rig.turn.end()
    assert wire.take() == b"" and rig.store.has_begun(rig.engine.jobs.up_from(1)[0])
    rig.engine.held = True  # the ledger may need the end of what has begun
    rig.turn.step(wire, b"")
    rig.engine.held = False
    rig.go_on()
    assert wire.take() == b"MOVED\r\n"
    assert rig.tell(other, b"list-jobs there ready 9\r\n").count(b"size: %d}" % size) == 1
    rig.close()
