"""geventstalk cluster: what an operator is told of nodes that share a log, and that another one leads.

The rows are those of a fence in memory, on a clock of its own: what happens to them when is written into each test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from geventstalk.cli import cluster as command
from geventstalk.cluster.member import ACTIVE, CLAIMING, ENDED, LEAVING, SILENT, STANDBY, STARTING
from geventstalk.offline import cluster
from geventstalk.offline.cluster import GONE, Node, NotDone, Watch
from journal import JournalLocked
from journal.fence import Fence, FenceUnreachable, MemberFacts, View
from tests.support.tools import Ran, run_tool

URL = "postgresql://h/db"
STEP_S = 0.001
"""What a round trip takes."""


def view(epoch: int, node: str, **more: Any) -> View:
    values = {
        "address": f"{node}:11300", "incarnation": f"{node}-1", "lease_ms": 1000, "owed_ms": 0, "beat": (epoch, 1),
        "released": False, "successor": "", "transfer_to": "", "locked": True, "timeline": 1, "system": 7,
    }  # fmt: skip
    return View(epoch, node, **{**values, **more})


class Rows(Fence):
    """`at` has what happens when. A heartbeat comes five times in a lease while `beats` says so."""

    def __init__(self, first: View, *members: MemberFacts) -> None:
        self.view = first
        self.told = list(members)
        self.now = 100.0
        self.at: list[tuple[float, Callable[[], None]]] = []
        self.beats = True
        self.requests: list[str] = []
        self.obeys: Callable[[str], None] = lambda node: None
        self.down_until = 0.0
        self.taken_s: float | None = None
        self._next_beat = self.now
        self.closed = False

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = min([each for each in self.at if each[0] <= end], key=lambda each: each[0], default=None)
            if due is None:
                break
            self.at.remove(due)
            self.now = max(self.now, due[0])
            due[1]()
        self.now = end
        while self.beats and self._next_beat <= self.now:
            self._next_beat += max(self.view.lease_ms, 100) / 5000
            self.change(beat=(self.view.epoch, self.view.beat[1] + 1))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at.append((self.now + seconds, what))

    def change(self, **values: Any) -> None:
        self.view = self.view._replace(**values)

    def lead(self, epoch: int, node: str, **more: Any) -> None:
        self.view = view(epoch, node, **{"beat": (epoch, self.view.beat[1] + 1), **more})

    def _trip(self) -> None:
        assert not self.closed
        self.sleep(STEP_S)
        if self.now < self.down_until:
            raise FenceUnreachable("the database does not answer")

    def look(self) -> View:
        self._trip()
        return self.view

    def members(self) -> list[MemberFacts]:
        self._trip()
        return list(self.told)

    def takeover_age_s(self) -> float | None:
        self._trip()
        return self.taken_s

    def request_transfer(self, node: str) -> None:
        self._trip()
        self.requests.append(node)
        self.change(transfer_to=node)
        self.obeys(node)

    def withdraw_transfer(self, node: str) -> None:
        self._trip()
        self.requests.append(f"not {node}")
        if self.view.transfer_to == node:
            self.change(transfer_to="")

    def close(self) -> None:
        self.closed = True


def told(node: str, role: str, place: int = 50, age_s: float = 0.3, epoch: int = 7) -> MemberFacts:
    return MemberFacts(node, f"{node}:11300", role, epoch, place, age_s)


def two(*more: MemberFacts) -> Rows:
    return Rows(view(7, "a"), told("a", ACTIVE, 60), told("b", STANDBY, 58), *more)


def seen(rows: Rows) -> Watch:
    return Watch(rows, rows.clock, rows.sleep)


def hand_over(rows: Rows, to: str, *, after: float = 0.1, gap: float = 0.08, epoch: int = 8) -> None:
    """The node that leads says goodbye after this long, and another one serves after the gap."""
    rows.after(after, lambda: rows.change(released=True, successor=to, transfer_to=""))
    rows.after(after + gap / 2, lambda: rows.lead(epoch, to, owed_ms=1))
    rows.after(after + gap, lambda: rows.change(owed_ms=0))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs `geventstalk cluster` with these rows."""

    def run(rows: Rows, *words: str) -> Ran:
        places: list[str] = []

        def watch(place: str) -> Watch:
            places.append(place)
            return seen(rows)

        monkeypatch.setattr(command, "watch", watch)
        for name in ("GEVENTSTALK_JOURNAL", "GEVENTSTALK_CONFIG"):
            monkeypatch.delenv(name, raising=False)
        ran = run_tool("cluster", words[0], "-b", URL, *words[1:])
        assert places == [URL] and rows.closed
        return ran

    return run


# --- status


def test_status_for_people(run: Callable[..., Ran]) -> None:
    rows = two(told("c", STARTING, 12, 0.9), told("old", STANDBY, 3, 4000.0, 2), told("d", ENDED, 9, 90.0, 5))
    ran = run(rows, "status")
    assert ran == (
        0,
        "a leads, epoch 7, lease 1.0 s\n"
        "\n"
        "NODE  ADDRESS    ROLE      EPOCH  LAG       LAST SEEN\n"
        "a     a:11300    active        7    0      300 ms ago\n"
        "b     b:11300    standby       7    2      300 ms ago\n"
        "c     c:11300    starting      7   48      900 ms ago\n"
        "d     d:11300    ended         5    -  1 min 30 s ago\n"
        "old   old:11300  gone          2    -   1 h 6 min ago\n",
        "",
    )


def test_status_says_since_when_a_node_leads(run: Callable[..., Ran]) -> None:
    rows = two()
    rows.taken_s = 7500.0
    assert run(rows, "status").out.startswith("a leads, epoch 7, lease 1.0 s, for 2 h 5 min\n")


def test_status_for_scripts(run: Callable[..., Ran]) -> None:
    rows = two()
    rows.change(transfer_to="b", replication="asynchronous")
    rows.taken_s = 7500.0
    ran = run(rows, "status", "--json")
    a, b = (
        {"node": node, "address": f"{node}:11300", "role": role, "epoch": 7, "lag": lag, "seen_s": 0.3}
        for node, role, lag in (("a", "active", 0), ("b", "standby", 2))
    )
    facts = {"leader": "a", "last": "a", "claims": None, "epoch": 7, "lease_s": 1.0, "wish": "b", "nodes": [a, b]}
    assert ran.code == 0 and json.loads(ran.out) == {**facts, "replication": "asynchronous", "takeover_s": 7500.0}


def test_no_node_leads(run: Callable[..., Ran]) -> None:
    """Only a heartbeat that comes says that a node leads: what the rows say of it may be long ago."""
    rows = two()
    rows.beats = False
    ran = run(rows, "status")
    assert ran.code == 1 and ran.out.startswith("no node leads; the last one was a, epoch 7\n")
    assert "\na     a:11300  gone         7    -" in ran.out and "b:11300  standby" in ran.out
    rows = two()
    rows.beats = False
    assert json.loads(run(rows, "status", "--json").out)["leader"] is None
    assert rows.now - 100 < 1.2
    rows = two()
    rows.change(released=True)
    ran = run(rows, "status")
    assert ran.code == 1 and "no node leads" in ran.out
    ran = run(Rows(view(0, "", lease_ms=0)), "status")
    assert ran == (1, "no node has ever led\n", "")


@pytest.mark.parametrize(
    ("first", "role", "expected"),
    [
        (view(7, "a"), STANDBY, ACTIVE),
        (view(7, "a"), ENDED, ACTIVE),
        (view(7, "a"), SILENT, SILENT),
        (view(7, "a"), LEAVING, LEAVING),
        (view(7, "a", owed_ms=800), STANDBY, CLAIMING),
    ],
)
def test_the_rows_know_more_of_the_node_that_leads_than_it_told(first: View, role: str, expected: str) -> None:
    status = seen(Rows(first, told("a", role, age_s=5.0, epoch=6))).status()
    assert status.nodes == [Node("a", "a:11300", expected, 7, 0, 5.0)]
    assert status.leader == ("" if expected == CLAIMING else "a")
    status = seen(Rows(first)).status()
    assert [each.role for each in status.nodes] == [CLAIMING if first.owed_ms else ACTIVE]


def test_a_node_that_led_and_was_started_again_is_a_standby() -> None:
    rows = two()
    rows.change(released=True)
    rows.told[0] = told("a", STANDBY)
    assert [(each.node, each.role) for each in seen(rows).status().nodes] == [("a", STANDBY), ("b", STANDBY)]
    rows.told[0] = told("a", STANDBY, age_s=3.5)
    assert seen(rows).status().nodes[-1][:3] == ("a", "a:11300", GONE)


def test_who_has_the_epoch_and_does_not_serve(run: Callable[..., Ran]) -> None:
    rows = two()
    rows.change(owed_ms=1)
    ran = run(rows, "status")
    assert ran.code == 1 and ran.out.startswith("no node leads; a is taking over, epoch 7\n")
    rows = two()
    rows.lead(8, "command 5 on h", address="", owed_ms=1)
    rows.told[0] = told("a", STANDBY)
    ran = run(rows, "status")
    assert ran.code == 1 and ran.out.startswith("no node leads; command 5 on h has the journal to itself, epoch 8\n")
    assert ran.out.count("command") == 1
    rows = two()
    rows.lead(8, "command 5 on h", address="", owed_ms=1)
    ran = run(rows, "promote", "b")
    assert ran.err == "geventstalk: no node leads, command 5 on h is at it: there is no node to hand over\n"
    rows = two()
    rows.lead(8, "command 5 on h", address="", owed_ms=1, released=True)
    ran = run(rows, "status")
    assert ran.code == 1 and ran.out.startswith("no node leads, epoch 8\n")


# --- promote and demote


def test_promote(run: Callable[..., Ran]) -> None:
    rows = two()
    rows.obeys = lambda node: hand_over(rows, node)
    ran = run(rows, "promote", "b")
    assert ran.code == 0 and ran.err == ""
    assert ran.out.startswith("b leads, epoch 8; a has handed over, and for ") and ran.out.endswith(" ms none led\n")
    assert rows.requests == ["b"], "the node that leads withdraws the request"


def test_the_gap_is_from_the_last_look_at_the_one_to_the_first_at_the_other(run: Callable[..., Ran]) -> None:
    rows = two()
    rows.obeys = lambda node: hand_over(rows, node, after=0.5, gap=0.2)
    facts = json.loads(run(rows, "promote", "b", "--json").out)
    gap_ms = facts.pop("gap_ms")
    assert facts == {"action": "promote", "before": "a", "leader": "b", "epoch": 8, "changed": True}
    assert 200 <= gap_ms < 215


@pytest.mark.parametrize("words", [["demote"], ["demote", "a"]])
def test_demote(words: list[str], run: Callable[..., Ran]) -> None:
    rows = two()
    rows.obeys = lambda node: hand_over(rows, "b")
    facts = json.loads(run(rows, *words, "--json").out)
    assert (facts["before"], facts["leader"], facts["changed"]) == ("a", "b", True)
    assert rows.requests == ["*"]


def test_what_is_so_already_is_fine(run: Callable[..., Ran]) -> None:
    rows = two()
    assert run(rows, "promote", "a") == (0, "a leads already, epoch 7\n", "")
    assert not rows.requests
    rows = two()
    assert run(rows, "demote", "b") == (0, "b does not lead; a does, epoch 7\n", "")
    rows = two()
    facts = json.loads(run(rows, "promote", "a", "--json").out)
    assert facts == {"action": "promote", "before": "a", "leader": "a", "epoch": 7, "changed": False, "gap_ms": 0.0}
    assert not rows.requests


def test_what_cannot_be_is_not_asked_for(run: Callable[..., Ran]) -> None:
    def refused(rows: Rows, *words: str) -> str:
        ran = run(rows, *words)
        assert ran.code == 1 and ran.out == "" and ran.err.count("\n") == 1 and not rows.requests
        return ran.err.removeprefix("geventstalk: ").rstrip("\n")

    others = (told("c", STARTING), told("d", ENDED), told("e", STANDBY, age_s=7.25))
    assert refused(two(), "promote", "x") == "there is no node x; known: a, b"
    assert refused(two(), "demote", "x") == "there is no node x; known: a, b"
    assert refused(two(*others), "promote", "c") == "c cannot lead now: it is starting"
    assert refused(two(*others), "promote", "d") == "d cannot lead now: it was stopped"
    assert refused(two(*others), "promote", "e") == "e cannot lead now: it told nothing for 7.2 s"
    alone = Rows(view(7, "a"), told("a", ACTIVE), *others)
    assert refused(alone, "demote") == "a leads on: there is no standby that could take over"
    rows = two()
    rows.beats = False
    assert refused(rows, "promote", "b") == "no node leads, a was the last one: there is no node to hand over"
    assert refused(Rows(view(0, "")), "demote") == "no node leads: there is no node to hand over"


def test_a_request_that_is_not_fulfilled_in_time_is_taken_back(run: Callable[..., Ran]) -> None:
    rows = two()
    ran = run(rows, "promote", "b", "--timeout", "3")
    assert ran == (1, "", "geventstalk: b does not lead after 3 s; the request is withdrawn\n")
    assert rows.requests == ["b", "not b"] and not rows.view.transfer_to and 3 <= rows.now - 100 < 4.5
    rows = two()
    ran = run(rows, "demote", "--timeout", "3")
    assert ran.err == "geventstalk: no other node leads after 3 s; the request is withdrawn\n" and ran.code == 1


def test_a_node_that_leads_may_refuse(run: Callable[..., Ran]) -> None:
    rows = two()
    rows.obeys = lambda node: rows.after(0.2, lambda: rows.change(transfer_to=""))
    ran = run(rows, "promote", "b")
    assert (
        ran.code == 1 and ran.err == "geventstalk: a leads on: it found no standby to hand over to, which should be b\n"
    )
    assert rows.now - 100 < 1


def test_another_node_was_quicker(run: Callable[..., Ran]) -> None:
    rows = two(told("c", STANDBY))
    rows.obeys = lambda node: hand_over(rows, "c")
    assert run(rows, "promote", "b").err == "geventstalk: c leads now, and not b\n"
    rows = two()

    def again(node: str) -> None:
        hand_over(rows, "b")
        rows.at = rows.at[:1]
        rows.after(0.4, lambda: rows.lead(8, "a", incarnation="a-2"))

    rows.obeys = again
    assert run(rows, "demote").err == "geventstalk: a leads again: it was started anew\n"


def test_a_claim_anew_of_the_same_process_is_no_handover(run: Callable[..., Ran]) -> None:
    """Its link was cut: it has a newer epoch, and obeys a little later."""
    rows = two()

    def obey(node: str) -> None:
        rows.after(0.1, lambda: rows.change(epoch=8, owed_ms=500))
        rows.after(0.2, lambda: rows.change(owed_ms=0))
        hand_over(rows, node, after=0.4, epoch=9)

    rows.obeys = obey
    facts = json.loads(run(rows, "promote", "b", "--json").out)
    assert facts["epoch"] == 9 and facts["gap_ms"] < 100


def test_a_database_that_fails_over_meanwhile_is_asked_again(run: Callable[..., Ran]) -> None:
    rows = two()

    def obey(node: str) -> None:
        rows.down_until = rows.now + 2
        hand_over(rows, node, after=2.5)

    rows.obeys = obey
    assert run(rows, "promote", "b").code == 0
    rows = two()
    rows.obeys = lambda node: setattr(rows, "down_until", rows.now + 60)
    ran = run(rows, "promote", "b", "--timeout", "2")
    assert ran == (69, "", "geventstalk: the database does not answer\n")
    assert rows.now - 100 < 3


def test_a_signal_withdraws_the_request() -> None:
    rows = two()

    def stop() -> None:
        raise KeyboardInterrupt

    rows.obeys = lambda node: rows.after(0.2, stop)
    with pytest.raises(KeyboardInterrupt):
        seen(rows).promote("b", 10)
    assert rows.requests == ["b", "not b"]


# --- words


def test_where_the_cluster_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    asked: list[str] = []

    def watch(place: str) -> Watch:
        asked.append(place)
        return seen(two())

    monkeypatch.setattr(command, "watch", watch)
    file = tmp_path / "node.yaml"
    file.write_text("journal: postgresql://file/db\n")
    monkeypatch.setenv("GEVENTSTALK_CONFIG", str(file))
    assert run_tool("cluster", "status").code == 0
    monkeypatch.setenv("GEVENTSTALK_JOURNAL", "postgres://u:secret@environment/db")
    assert run_tool("cluster", "status").code == 0, "here a password is fine"
    assert run_tool("cluster", "status", "-b", URL).code == 0
    assert asked == ["postgresql://file/db", "postgres://u:secret@environment/db", URL]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status"], "no journal is named"),
        (["status", "-b", "/var/lib/geventstalk"], "/var/lib/geventstalk is a directory"),
        (["status", "-b", "postgresql://u:secret@h"], "postgresql://u:***@h"),
        (["promote", "-b", URL], "missing argument"),
        (["promote", "-b", URL, "--timeout", "0", "b"], "--timeout"),
        (["status", "--config", "/absent"], "cannot read /absent"),
        (["nonsense"], "no such command"),
    ],
)
def test_wrong_usage(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GEVENTSTALK_JOURNAL", "GEVENTSTALK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    ran = run_tool("cluster", *words)
    assert ran.code == 5 and ran.out == "" and ran.err.count("\n") == 1
    assert said in ran.err.lower() and "secret" not in ran.err


def test_names_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = two()
    monkeypatch.setattr(cluster, "fence_for", lambda place: rows)
    assert cluster.names(URL) == ["a", "b"] and rows.closed

    def absent(place: str) -> Fence:
        raise JournalLocked("no")

    monkeypatch.setattr(cluster, "fence_for", absent)
    assert cluster.names(URL) == []


def test_not_done_is_no_fault() -> None:
    with pytest.raises(NotDone):
        seen(two()).promote("x", 1)
