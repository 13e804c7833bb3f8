"""Random commands to beanstalkd and to geventstalk give the same replies; and the comparison would notice if not.

`scripts/differential` runs the same for longer. tests/support/differential.md says what is left out, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from geventstalk._build import BUILD
from tests.support import differential
from tests.support.differential import (
    SHAPES,
    Command,
    Commands,
    Excluded,
    Framing,
    Outcome,
    alike,
    programs,
    run_seed,
    shrink,
)
from tests.support.process import beanstalkd_path
from tests.support.wire import ReplyReader, as_master, yaml_lines

STEPS = 400

needs_the_source = pytest.mark.skipif(BUILD == "compiled", reason="constants of compiled code cannot be replaced")
needs_beanstalkd = pytest.mark.skipif(beanstalkd_path() is None, reason="beanstalkd is not installed")


def two_of_the_reference(*limits: int) -> Callable[[int], Commands]:
    """Commands that start beanstalkd twice, with these limits or with the one that the seed draws."""

    def commands(drawn: int) -> tuple[Sequence[str], Sequence[str]]:
        first, second = limits or (drawn, drawn)
        path = str(beanstalkd_path())
        return [path, "-z", str(first)], [path, "-z", str(second)]

    return commands


def show(outcome: Outcome) -> str:
    return "\n".join([outcome.difference, *map(str, outcome.history[-20:])])


@needs_beanstalkd
@pytest.mark.slow
def test_same_replies(seed: int) -> None:
    for number in range(seed, seed + 3):
        outcome = run_seed(number, STEPS, timed=False)
        assert not outcome.difference, f"scripts/differential --seed {number}\n{show(outcome)}"
        assert outcome.steps >= STEPS


@needs_beanstalkd
@pytest.mark.slow
def test_same_replies_when_time_matters(seed: int) -> None:
    outcome = run_seed(seed, 50, timed=True)
    assert not outcome.difference, show(outcome)


@needs_beanstalkd
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "seeds", "steps"),
    [
        pytest.param("disk", 1, 300, marks=needs_the_source),
        ("fronts", 1, 300),
        pytest.param("disk", 5, 2000, marks=[needs_the_source, pytest.mark.long]),
        pytest.param("fronts", 5, 2000, marks=pytest.mark.long),
        pytest.param("three-fronts", 5, 2000, marks=pytest.mark.long),
    ],
)
def test_same_replies_in_another_shape(seed: int, shape: str, seeds: int, steps: int) -> None:
    chosen = SHAPES[shape]
    for number in range(seed, seed + seeds):
        commands = partial(programs, shape=chosen)
        outcome = run_seed(number, steps, commands, timed=False, journal=chosen.disk)
        assert not outcome.difference, f"scripts/differential --seed {number} --shape {shape}\n{show(outcome)}"


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the second server be 1.12 as well, which does not quote names."""
    monkeypatch.setattr(differential, "yaml_lines", lambda reply: yaml_lines(as_master(reply)))


@needs_beanstalkd
@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
def test_no_false_alarm(seed: int) -> None:
    outcome = run_seed(seed, STEPS, two_of_the_reference(), timed=False)
    assert not outcome.difference, show(outcome)
    assert outcome.steps >= STEPS


@needs_beanstalkd
@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
def test_notices_another_limit_and_shrinks_to_it() -> None:
    commands = two_of_the_reference(65535, 20)
    outcome = run_seed(5, STEPS, commands, timed=False)
    assert outcome.difference
    small = shrink(outcome, commands)
    assert small.difference
    assert len(small.history) <= 3


LIES = {
    "an id": (b"INSERTED 2", b"INSERTED 3"),
    "a count": (b"KICKED 1\r", b"KICKED 2\r"),
    "another reply": (b"RELEASED", b"BURIED"),
    "another refusal": (b"EXPECTED_CRLF", b"BAD_FORMAT"),
    "a byte of a body": (b" 1\r\n1\r", b" 1\r\n2\r"),
    "a counter": (b"cmd-use: ", b"cmd-use: 1"),
    "a state": (b"state: ready", b"state: buried"),
    "a key": (b"\nreleases: ", b"\nreleased: "),
    "a tube": (b"- default\n", b"- defaulu\n"),
    "a job that is not there": (b"FOUND 1", b"NOT_FOUND\r\n"),
}


@needs_beanstalkd
@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("lie", LIES)
def test_notices_a_lie(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(ReplyReader):
        """Reads the second of each pair of connections."""

        made = 0

        def __init__(self) -> None:
            super().__init__()
            self.lies = Liar.made % 2 == 1
            Liar.made += 1

        def feed(self, data: bytes) -> list[bytes]:
            return [reply.replace(*LIES[lie]) if self.lies else reply for reply in super().feed(data)]

    monkeypatch.setattr(differential, "ReplyReader", Liar)
    assert any(run_seed(seed, STEPS, two_of_the_reference(), timed=False).difference for seed in range(1, 5))


@pytest.mark.parametrize(
    ("command", "reference", "ours"),
    [
        (b"list-tubes", b"OK 22\r\n---\n- default\n- a\n- b\n\r\n", b"OK 22\r\n---\n- default\n- b\n- a\n\r\n"),
        (b"list-tubes-watched", b"OK 18\r\n---\n- a\n- default\n\r\n", b"OK 18\r\n---\n- default\n- a\n\r\n"),
        (b"stats-tube a", b"OK 12\r\n---\nname: a\n\r\n", b'OK 14\r\n---\nname: "a"\n\r\n'),
        (b"stats-job 1", b"OK 19\r\n---\nid: 1\nage: 12\n\r\n", b"OK 19\r\n---\nid: 1\nage: 13\n\r\n"),
        (b"stats-job 1", b"OK 18\r\n---\nid: 1\nage: 9\n\r\n", b"OK 19\r\n---\nid: 1\nage: 10\n\r\n"),
        (b"stats-job 1", b"OK 17\r\n---\nid: 1\nfile: 4\n\r\n", b"OK 17\r\n---\nid: 1\nfile: 7\n\r\n"),
        (
            b"stats",
            b"OK 1\r\n---\ncurrent-jobs-urgent: 0\npid: 12\nplatform: x\n\r\n",
            b'OK 1\r\n---\ncurrent-jobs-urgent: 0\npid: 345\nplatform: "x"\nnew: 5\n\r\n',
        ),
    ],
)
def test_alike(command: bytes, reference: bytes, ours: bytes) -> None:
    assert alike(command, reference, ours, journal=True)


@pytest.mark.parametrize(
    ("command", "reference", "ours"),
    [
        (b"delete 1", b"DELETED\r\n", b"NOT_FOUND\r\n"),
        (b"peek 1", b"FOUND 1 1\r\nx\r\n", b"FOUND 1 1\r\ny\r\n"),
        (b"stats-job 1", b"OK 17\r\n---\nid: 1\nfile: 4\n\r\n", b"OK 17\r\n---\nid: 1\nfile: 7\n\r\n"),
        (b"list-tubes", b"OK 18\r\n---\n- default\n- a\n\r\n", b"OK 18\r\n---\n- a\n- default\n\r\n"),
        (b"list-tubes", b"OK 18\r\n---\n- default\n- a\n\r\n", b"OK 18\r\n---\n- default\n- b\n\r\n"),
        (b"stats-tube a", b"OK 12\r\n---\nname: a\n\r\n", b'OK 14\r\n---\nname: "b"\n\r\n'),
        (b"stats-job 1", b"OK 10\r\n---\nid: 1\n\r\n", b"OK 10\r\n---\nid: 2\n\r\n"),
        (b"stats-job 1", b"OK 18\r\n---\nid: 1\nage: 9\n\r\n", b"OK 19\r\n---\nid: 1\nage: 11\n\r\n"),
        (b"stats-job 1", b"OK 18\r\n---\nid: 1\nage: 9\n\r\n", b"OK 18\r\n---\nage: 9\nid: 1\n\r\n"),
        (b"stats-job 1", b"OK 18\r\n---\nid: 1\nage: 9\n\r\n", b"OK 10\r\n---\nid: 1\n\r\n"),
    ],
)
def test_not_alike(command: bytes, reference: bytes, ours: bytes) -> None:
    assert not alike(command, reference, ours)


def lines(commands: list[Command]) -> list[bytes]:
    return [command.line for command in commands]


INPUT = (
    b"watch a\r\nput 0 0 10 5\r\na\r\nb\r\r\nignore default\r\nreserve\r\nput 0 0 10 11x\r\n12345678901\r\n"
    b"put 0 0 10 1x\r\nuse b\r\nput 0 0 5 4294967296\r\nreserve-with-timeout 5 \r\nreserve-with-timeout 0\r\n"
    b"quitx\r\nuse c\r\n"
)


@pytest.mark.parametrize("size", [1, 2, 7, len(INPUT)])
def test_framing(size: int) -> None:
    framing = Framing(10)
    commands = [command for at in range(0, len(INPUT), size) for command in framing.feed(INPUT[at : at + size])]
    assert lines(commands) == [
        b"watch a",
        b"put 0 0 10 5",
        b"ignore default",
        b"reserve",
        b"put 0 0 10 11x",
        b"put 0 0 10 1x",
        b"use b",
        b"put 0 0 5 4294967296",
        b"reserve-with-timeout 5 ",
        b"reserve-with-timeout 0",
        b"quitx",
    ]
    assert [command.line for command in commands if command.kind == "reserve"] == [
        b"reserve",
        b"reserve-with-timeout 5 ",
    ]
    assert commands[3].watching == {b"a"}
    assert framing.closed


@pytest.mark.parametrize(
    "data",
    [
        b"use a\r\r\n",
        b"x" * 223 + b"\r\n",
        b"x" * 447 + b"\r\n",
        b"reserve-with-timeout x\r\n",
        b"reserve-with-timeout 4294967296\r\n",
    ],
)
def test_framing_excludes(data: bytes) -> None:
    with pytest.raises(Excluded):
        Framing(10).feed(data)


def test_rules_keep_out_what_may_differ() -> None:
    sides = partial(differential.Twin, sides=())  # type: ignore[arg-type]  # no sides: nothing is sent
    twins = [sides(number, Framing(65535)) for number in range(3)]
    rules = differential.Rules(twins)

    def take(number: int, data: bytes) -> bool:
        if not rules.admit(twins[number], data):
            return False
        twins[number].commands += twins[number].framing.feed(data)
        return True

    assert not take(0, b"put 0 5 10 1\r\nx\r\n"), "a delay that may end"
    assert take(0, b"watch a\r\nignore default\r\nreserve\r\n")
    assert not take(1, b"watch a\r\nreserve\r\n"), "two waiters in one tube"
    assert take(1, b"watch b\r\nignore default\r\nreserve\r\n")
    assert take(0, b"put 0 0 5000 5\r\nab"), "what is behind a reserve waits"
    assert not take(1, b"use c\r\n"), "two clients with something waiting"
    assert not take(2, b"use c\r\nuse d\r\n"), "two commands while something waits"
    assert not take(2, b"peek 7\r\n"), "a job that may be uploading"
    assert take(2, b"use c\r\n")


def test_rules_keep_out_what_follows_the_end_of_a_pause() -> None:
    """beanstalkd ends a pause with its next microsecond: what it has read behind the command may come before that."""
    twin = differential.Twin(0, Framing(65535), sides=())  # type: ignore[arg-type]  # no sides: nothing is sent
    rules = differential.Rules([twin])
    assert not rules.admit(twin, b"pause-tube a 0\r\npeek-ready\r\n")
    assert not rules.admit(twin, b"use a\r\npause-tube a  00\r\nreserve-with-timeout 0\r\n")
    assert rules.admit(twin, b"peek-ready\r\npause-tube a 1000\r\npeek-ready\r\npause-tube a 0\r\n")
    twin.commands += twin.framing.feed(b"reserve\r\npause-tube a 0\r\n")
    assert not rules.admit(twin, b"peek-ready\r\n"), "it waits behind a reserve, with what was sent before"
