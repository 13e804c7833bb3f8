"""The judge of a cluster's histories: what must pass, and what must not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clients import until
from tests.support.cluster.jobs import (
    BACK,
    BOTH,
    FORGOTTEN,
    IDS,
    INVENTED,
    LOST,
    NS,
    TWICE,
    WRONG,
    Connection,
    Judge,
    Operation,
    Verdict,
    gaps,
    longest_gap,
)
from tests.support.cluster.linear import Step, TooHard, ends
from tests.support.cluster.load import Crew, Link, drain
from tests.support.process import ServerProcess

# The search, on a register


def register(history: list[tuple[str, int, int, int | None]], reads: bool = True) -> set[int]:
    """A history of `write` and `read` with a value, begin and end, on a register that begins with 0."""

    def model(value: int, number: int) -> list[int]:
        word, argument, _, _ = history[number]
        if word == "write":
            return [argument]
        return [value] if value == argument else []

    return ends([Step(word, begun, ended) for word, _, begun, ended in history], 0, model)


def test_a_register_is_read_as_it_was_written() -> None:
    assert register([]) == {0}
    assert register([("write", 1, 0, 1), ("read", 1, 2, 3)]) == {1}
    assert register([("write", 1, 0, 1), ("read", 0, 2, 3)]) == set()


def test_what_overlaps_may_come_in_any_order() -> None:
    assert register([("write", 1, 0, 9), ("read", 0, 1, 2), ("read", 1, 3, 4)]) == {1}
    assert register([("write", 1, 0, 9), ("read", 1, 1, 2), ("read", 0, 3, 4)]) == set()
    assert register([("write", 1, 0, 9), ("write", 2, 0, 9)]) == {1, 2}
    assert register([("write", 1, 0, 5), ("write", 2, 5, 9)]) == {1, 2}
    assert register([("write", 1, 0, 4), ("write", 2, 5, 9)]) == {2}


def test_what_was_not_answered_may_have_happened_at_any_time() -> None:
    assert register([("write", 1, 0, None), ("read", 0, 5, 6)]) == {0, 1}
    assert register([("write", 1, 0, None), ("read", 0, 5, 6), ("read", 1, 7, 8)]) == {1}
    assert register([("write", 1, 4, None), ("read", 1, 1, 2)]) == set()
    assert register([("write", 1, 0, None), ("read", 1, 1, 2), ("read", 0, 3, 4)]) == set()


def test_a_step_waits_for_those_that_it_names() -> None:
    steps = [Step("a", 0, 9), Step("b", 0, 9, after=(0,))]
    assert ends(steps, "", lambda state, number: [state + steps[number].name]) == {"ab"}


def test_a_search_is_bounded() -> None:
    steps = [Step("write", 0, 1) for _ in range(12)]
    with pytest.raises(TooHard):
        ends(steps, 0, lambda state, number: [state * 31 + number], limit=1000)


def every_order(steps: list[Step], numbers: set[int]) -> Iterator[tuple[int, ...]]:
    for order in itertools.permutations(numbers):
        if all(
            steps[later].ended is None or steps[earlier].begun <= (steps[later].ended or 0)
            for at, earlier in enumerate(order)
            for later in order[at:]
        ):
            yield order


def test_the_search_finds_what_trying_all_orders_finds(seed: int) -> None:
    draw = random.Random(seed)
    passed = 0
    for _ in range(400):
        history: list[tuple[str, int, int, int | None]] = []
        for _ in range(draw.randrange(1, 6)):
            begun = draw.randrange(8)
            ended = None if draw.random() < 0.2 else begun + draw.randrange(6)
            history.append((draw.choice(("write", "read")), draw.randrange(3), begun, ended))
        steps = [Step(word, begun, ended) for word, _, begun, ended in history]
        must = {number for number, step in enumerate(steps) if step.ended is not None}
        may = set(range(len(steps))) - must
        expected = set()
        chosen = itertools.chain.from_iterable(itertools.combinations(may, size) for size in range(len(may) + 1))
        for extra in chosen:
            for order in every_order(steps, must | set(extra)):
                value: int | None = 0
                for number in order:
                    word, argument, _, _ = history[number]
                    value = argument if word == "write" or value == argument else None
                    if value is None:
                        break
                if value is not None:
                    expected.add(value)
        assert register(history) == expected, history
        passed += bool(expected)
    assert 40 < passed < 360  # both kinds are tried


# One job


class Told:
    """A history, one operation behind the other, a second apart; `begun` and `ended` say otherwise."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.connections: dict[int, Connection] = {}
        self.now = 0

    def __call__(
        self,
        connection: int,
        word: str,
        reply: str,
        *,
        job: int = 1,
        id: int | None = None,
        begun: float | None = None,
        ended: float | None = None,
        delay: int = 0,
        ttr: int = 0,
    ) -> Told:
        begin = self.now if begun is None else int(begun * NS)
        self.now = begin + NS
        end = (self.now - 1 if ended is None else int(ended * NS)) if reply else 0
        known = (job if reply else 0) if id is None else id
        operation = Operation(connection, word, begin, end, reply, b"job %d" % job, known)
        operation.delay_ns, operation.ttr_ns = delay * NS, ttr * NS
        self.operations.append(operation)
        return self

    def other(self, connection: int, begun: float, reply: str = "TIMED_OUT") -> Told:
        """An operation of the connection that is about no job."""
        begin = int(begun * NS)
        self.operations.append(Operation(connection, "reserve", begin, begin + NS - 1, reply))
        return self

    def verdict(self) -> Verdict:
        return Judge().judge(self.operations, self.connections)

    @property
    def faults(self) -> set[str]:
        return {kind for kind, lines in self.verdict().faults.items() if lines}


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_job_that_is_put_reserved_and_deleted(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(2, "touch", "TOUCHED")(2, "delete", "DELETED")
    verdict = told.verdict()
    assert verdict and verdict.counts["jobs"] == 1 and verdict.counts["put INSERTED"] == 1


def test_a_job_on_all_its_ways(told: Told) -> None:
    told(1, "put", "INSERTED", delay=2)(1, "kick", "KICKED")(2, "reserve", "RESERVED")(2, "release", "RELEASED")
    told(3, "reserve", "RESERVED")(3, "bury", "BURIED")(1, "kick", "KICKED")(1, "kick", "NOT_FOUND")
    told(2, "reserve", "RESERVED")(2, "release", "RELEASED", delay=1)
    told.now += 2 * NS
    told(4, "reserve", "RESERVED")(1, "delete", "NOT_FOUND")(4, "delete", "DELETED")(4, "delete", "NOT_FOUND")
    assert told.verdict(), told.verdict()


def test_an_acknowledged_job_that_is_nowhere_is_lost(told: Told) -> None:
    assert told(1, "put", "INSERTED").faults == {LOST}


def test_a_put_without_an_answer_may_be_nowhere(told: Told) -> None:
    assert not told(1, "put", "").faults


def test_a_put_without_an_answer_that_was_seen_must_not_vanish(told: Told) -> None:
    assert told(1, "put", "")(2, "reserve", "RESERVED").faults == {LOST}


@pytest.mark.parametrize(("word", "reply"), [("release", "RELEASED"), ("bury", "BURIED")])
def test_what_was_acknowledged_of_such_a_job_makes_it_safe(told: Told, word: str, reply: str) -> None:
    assert told(1, "put", "")(2, "reserve", "RESERVED")(2, word, reply).faults == {LOST}


def test_a_delete_without_an_answer_may_be_seen_and_undone(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "delete", "")(3, "delete", "NOT_FOUND")
    told(4, "reserve", "RESERVED")(4, "delete", "DELETED")
    assert told.verdict() and told.verdict().counts[FORGOTTEN] == 1
    assert told(5, "reserve", "RESERVED").faults == {BACK}


def test_a_kick_without_an_answer_may_be_seen_and_undone(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(2, "bury", "BURIED")(2, "kick", "")
    told(3, "reserve", "RESERVED")(4, "kick", "KICKED")(4, "delete", "DELETED")
    assert told.verdict() and told.verdict().counts[FORGOTTEN] == 1
    assert told(4, "kick", "KICKED").faults


def test_a_change_that_was_acknowledged_is_not_undone(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(2, "bury", "BURIED")
    assert told(3, "reserve", "RESERVED")(3, "delete", "DELETED").faults == {WRONG}


def test_a_put_that_was_refused_is_nowhere(told: Told) -> None:
    assert not told(1, "put", "OUT_OF_MEMORY", id=0).faults


def test_a_put_that_was_refused_does_not_come(told: Told) -> None:
    told(1, "put", "OUT_OF_MEMORY", id=0)(2, "reserve", "RESERVED")(2, "delete", "DELETED")
    assert told.faults == {WRONG}


@pytest.mark.parametrize(("word", "reply"), [("release", "RELEASED"), ("bury", "BURIED"), ("touch", "TOUCHED")])
def test_a_job_that_was_given_away_must_not_vanish(told: Told, word: str, reply: str) -> None:
    assert told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(2, word, reply).faults == {LOST}


def test_a_job_that_was_deleted_does_not_come_back(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(2, "delete", "DELETED")
    assert told(3, "reserve", "RESERVED")(3, "delete", "DELETED").faults == {BACK}


def test_after_a_delete_without_an_answer_the_job_is_gone_or_comes_again(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(2, "delete", "")
    assert not told.faults
    assert not told(3, "reserve", "RESERVED")(3, "delete", "DELETED").faults


def test_a_job_that_is_held_is_not_handed_out(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(3, "reserve", "RESERVED")
    assert told(2, "delete", "DELETED")(3, "delete", "NOT_FOUND").faults == {TWICE}


def test_a_hold_ends_with_its_connection(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(3, "reserve", "RESERVED")
    assert not told(3, "delete", "DELETED").faults


def test_a_connection_that_is_answered_later_has_its_hold_still(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(3, "reserve", "RESERVED")(3, "delete", "DELETED")
    assert told.other(2, 9).faults == {TWICE}


def test_a_hold_may_end_as_soon_as_the_last_answer_of_its_connection_was_sent(told: Told) -> None:
    """The answer was on its way while the next node served."""
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED", begun=5, ended=9)(3, "reserve", "RESERVED", begun=6, ended=7)
    assert not told(3, "delete", "DELETED").faults


def test_a_touch_keeps_a_hold(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED", begun=1)(3, "reserve", "RESERVED", begun=2, ended=4)
    assert told(2, "touch", "TOUCHED", begun=5)(3, "delete", "DELETED", begun=8).faults == {TWICE}


def test_a_hold_ends_when_its_time_has_run_out(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED", ttr=3)
    told.now += 3 * NS
    assert not told(3, "reserve", "RESERVED")(2, "delete", "NOT_FOUND")(3, "delete", "DELETED").faults


def test_a_hold_does_not_end_before_its_time(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED", ttr=30)(3, "reserve", "RESERVED")
    assert told(2, "touch", "NOT_FOUND")(3, "delete", "DELETED").faults


def test_a_hold_that_was_touched_lasts_longer(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED", ttr=3)(2, "touch", "TOUCHED", begun=3, ttr=3)
    told(3, "reserve", "RESERVED", begun=4.5, ended=4.9).other(2, 8)
    assert told(3, "delete", "DELETED", begun=9).faults == {TWICE}


def test_a_job_does_not_come_before_its_delay(told: Told) -> None:
    told(1, "put", "INSERTED", delay=10)(2, "reserve", "RESERVED")(2, "delete", "DELETED")
    assert told.faults == {WRONG}


def test_a_buried_job_is_not_handed_out(told: Told) -> None:
    told(1, "put", "INSERTED")(2, "reserve", "RESERVED")(2, "bury", "BURIED")
    assert told(3, "reserve", "RESERVED")(3, "delete", "DELETED").faults == {WRONG}


def test_a_job_without_a_put_is_invented(told: Told) -> None:
    assert told(2, "reserve", "RESERVED")(2, "delete", "DELETED").faults == {INVENTED}


def test_a_job_that_comes_under_another_id_is_invented(told: Told) -> None:
    assert told(1, "put", "INSERTED")(2, "reserve", "RESERVED", id=7)(2, "delete", "DELETED", id=7).faults == {INVENTED}


def test_an_id_is_never_given_again(told: Told) -> None:
    judge = Judge()
    told(1, "put", "INSERTED")(1, "delete", "DELETED")
    assert judge.judge(told.operations, {})
    later = Told()(1, "put", "INSERTED", job=2, id=1)(1, "delete", "DELETED", job=2, id=1)
    verdict = judge.judge(later.operations, {})
    assert [kind for kind, lines in verdict.faults.items() if lines] == [IDS]
    assert "id given twice" in str(verdict) and not verdict


def test_a_put_without_an_answer_may_arrive_when_a_history_is_judged() -> None:
    judge = Judge()
    assert judge.judge(Told()(1, "put", "").operations, {})
    later = Told()
    later.now = 9 * NS
    later(2, "reserve", "RESERVED")(2, "delete", "DELETED")
    assert judge.judge(later.operations, {})
    assert not judge.judge(later.operations, {})  # it is gone for good


# Two nodes


def led(told: Told, *who: tuple[int, str, int]) -> None:
    for number, node, epoch in who:
        told.connections[number] = Connection(number, "", node, epoch)


def test_one_node_serves_after_the_other(told: Told) -> None:
    led(told, (1, "a", 1), (2, "b", 2), (3, "a", 3))
    assert not told.other(1, 0).other(1, 1).other(2, 2).other(2, 3).other(3, 4).faults


def test_an_answer_of_the_old_node_may_arrive_late(told: Told) -> None:
    led(told, (1, "a", 1), (2, "b", 2))
    told.other(2, 2)
    told.operations.append(Operation(1, "reserve", NS, 9 * NS, "TIMED_OUT"))
    assert not told.faults


def test_the_old_node_answers_nothing_that_comes_after_the_new_one_has_served(told: Told) -> None:
    led(told, (1, "a", 1), (2, "b", 2))
    assert told.other(1, 0).other(2, 2).other(1, 4).faults == {BOTH}


def test_a_node_that_claims_its_own_place_anew_goes_on(told: Told) -> None:
    led(told, (1, "a", 1), (2, "a", 2))
    assert not told.other(1, 0).other(2, 2).other(1, 4).faults


def test_two_nodes_of_one_epoch_are_seen(told: Told) -> None:
    led(told, (1, "a", 1), (2, "b", 1))
    assert told.other(1, 0).other(2, 2).faults == {BOTH}


# Gaps


def test_gaps_are_between_changes_that_were_acknowledged(told: Told) -> None:
    told(1, "put", "INSERTED", ended=1)(1, "put", "", begun=2)(1, "touch", "TOUCHED", begun=3, ended=4)
    told(1, "delete", "NOT_FOUND", begun=4, ended=5)(1, "put", "INSERTED", begun=6, ended=8)
    told(1, "put", "INSERTED", begun=8, ended=9)
    found = gaps(told.operations)
    assert found == [(1 * NS, 7 * NS), (8 * NS, 1 * NS)]
    assert longest_gap(found, 0, 2 * NS) == 7 * NS
    assert longest_gap(found, 8 * NS + 1, 20 * NS) == 1 * NS
    assert longest_gap(found, 30 * NS, 40 * NS) == 0


# The clients, on one server


def campaign(start_server: Callable[..., ServerProcess], seed: int, *flags: str) -> Verdict:
    """Clients at work on a server that is killed in the middle and started again."""
    server = start_server(*flags)
    addresses = [("127.0.0.1", server.port)]
    with Crew(addresses, seed, "c") as crew:
        until(lambda: crew.answered() > 200, "there is traffic")
        server.kill()
        start_server(*flags, port=server.port)
        more = crew.answered() + 200
        until(lambda: crew.answered() > more, "there is traffic again")
    assert not crew.record.complaints
    drain(lambda: Link(addresses[0], 30), crew.record)
    return Judge().judge(crew.record.all(), crew.record.connections)


@pytest.mark.slow
def test_a_server_that_keeps_its_jobs_passes(
    start_server: Callable[..., ServerProcess], seed: int, tmp_path: Path
) -> None:
    verdict = campaign(start_server, seed, "-b", str(tmp_path), "-f0")
    assert verdict, verdict
    assert verdict.counts["put INSERTED"] > 50 and verdict.counts["delete DELETED"] > 50


@pytest.mark.slow
def test_a_server_that_forgets_is_found_out(start_server: Callable[..., ServerProcess], seed: int) -> None:
    """Without a journal it also begins to count ids anew."""
    verdict = campaign(start_server, seed)
    assert verdict.faults[LOST] and verdict.faults[IDS], verdict
