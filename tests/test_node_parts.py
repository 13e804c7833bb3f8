"""Parts of a node, without a database: its clock, and how it reaches addresses that other nodes have told."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Iterator
from time import monotonic_ns

import gevent
import pytest

from geventstalk.cluster import node as node_of
from geventstalk.cluster import relay
from geventstalk.cluster.clocks import Clocks
from geventstalk.cluster.member import Member
from geventstalk.cluster.wants import SILENT
from geventstalk.config import load
from journal.fence import TIMES, Identity, Patience
from tests.support.postgres import have_psycopg


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def hang(*_args: object, **_words: object) -> list[object]:
    """A name server that is cut off."""
    gevent.sleep(60)
    return []


# Bug: The clock of the lease stood still: a node that woke up answered clients though another one led.
@pytest.mark.skipif(not have_psycopg(), reason="psycopg is not installed")
def test_a_lease_runs_on_while_the_machine_is_suspended(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geventstalk.serving.clustered import ClusterServer

    settings, _ = load({"journal": "postgresql://nobody@127.0.0.1:1/d"}, {}, None)
    server = ClusterServer(settings, [listener], logging.getLogger("test"))
    member = server._node.member
    member.lease.renew(node_of.lease_clock_ns())
    assert server._leased.speaks()
    clocks = {time.CLOCK_MONOTONIC: 0, time.CLOCK_BOOTTIME: 2_000_000_000}
    awake = time.clock_gettime_ns
    monkeypatch.setattr(node_of, "clock_gettime_ns", lambda clock: awake(clock) + clocks[clock])
    assert member.lease.holds(monotonic_ns()), "the other clock stood still meanwhile"
    assert not server._leased.speaks()


class Hanging:
    """A log with a commit that has no answer."""

    cut = fenced = False

    def __init__(self, waits_ns: int) -> None:
        self.waits_ns = waits_ns


def test_a_commit_that_hangs_alone_is_looked_for() -> None:
    """Heartbeats come through over an old connection. That of the commit is dead, and nothing says so."""
    cuts: list[int] = []
    node = node_of.Node.__new__(node_of.Node)
    node._doubt_of = (0, 0)
    node._log = logging.getLogger("test")
    node.member = Member(Identity("a", "a:1", "a.1", 1000), monotonic_ns, node)
    node.member.log_is_cut = lambda: cuts.append(1)  # type: ignore[method-assign]  # a spy
    now_ns = monotonic_ns()
    for waits_ns, linked_ns, doubts in (
        (0, 1, False),
        (now_ns - 10**9, now_ns - 20 * 10**9, False),
        (now_ns - 10**9, now_ns, True),
        (now_ns - 31 * 10**9, now_ns - 60 * 10**9, True),
        (now_ns - 31 * 10**9, now_ns - 60 * 10**9, False),  # that was said
    ):
        node.shared = Hanging(waits_ns)  # type: ignore[assignment]  # all that is looked at
        cuts.clear()
        node._doubt(linked_ns)
        assert bool(cuts) == doubts, (now_ns - waits_ns, now_ns - linked_ns)


# Bug: An invalid address from another node ended a client's greenlet.
@pytest.mark.parametrize("address", ["", "host", "/tmp/socket", "a..b:1", "127.0.0.1:99999", "127.0.0.1:x"])
def test_an_address_that_is_none_is_not_reached(address: str) -> None:
    with pytest.raises(OSError):
        relay.connect(address, 0.5)
    assert node_of._probe(address, "b.1") == SILENT


# Bug: It held up the probe of the leader, the takeover, and a connection to the database, without a limit.
def test_a_name_server_that_is_cut_off_delays_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gevent.socket.getaddrinfo", hang)
    monkeypatch.setattr("gevent._socketcommon.getaddrinfo", hang)
    monkeypatch.setattr(node_of, "_RESOLVE_S", 0.05)
    begun_s = time.monotonic()
    with pytest.raises(TimeoutError):
        relay.connect("somewhere:11300", 0.05)
    with pytest.raises(TimeoutError):
        node_of.resolve("somewhere")
    assert node_of._probe("somewhere:11300", "b.1") == SILENT
    assert time.monotonic() - begun_s < 30


def test_a_wall_clock_that_is_off_is_told_once_and_so_is_its_end() -> None:
    clocks = Clocks()
    said = [
        clocks.compare(database_s, before_s, after_s)
        for database_s, before_s, after_s in (
            (1000.0, 1000.5, 1001.0),  # no clock is set better than this
            (1001.0, 8201.0, 8201.2),
            (1002.0, 8202.0, 8202.2),
            (1003.0, 8204.5, 8204.5),  # it drifts
            (1004.0, 1004.1, 1004.2),
            (1004.5, 8204.5, 8204.5),
            (1005.0, 995.0, 995.1),
            (1006.0, 1000.0, 1020.0),  # the question took long: unknown
        )
    ]
    assert [line.partition(" the database")[0] for line in said if line] == [
        "the wall clock of this host is 7200.1 s ahead of",
        "the wall clock of this host agrees with",
        "the wall clock of this host is 7200.0 s ahead of",
        "the wall clock of this host is 10.0 s behind",
    ]
    assert round(clocks.ahead_s, 2) == -9.95


def test_patience_follows_what_answers_took_within_its_bounds() -> None:
    """Whatever they took: never less than today's, never more than the lease allows, and back when they are quick."""
    draw = random.Random(7)
    for _ in range(300):
        patience, least_s = Patience(), draw.uniform(0.05, 5)
        most_s = least_s * draw.choice((1, 1.5, 3))
        assert patience.between(least_s, most_s) == least_s
        for _ in range(30):
            took_s = draw.choice((0.0, 0.001, least_s, 10.0)) * draw.random()
            patience.took(took_s)
            found = patience.between(least_s, most_s)
            assert least_s <= found <= most_s and found >= min(TIMES * took_s, most_s)
            patience.took(0.0)
            assert patience.between(least_s, most_s) <= found
        for _ in range(60):
            patience.took(0.001)
        assert patience.between(least_s, most_s) == least_s
