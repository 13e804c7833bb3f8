"""The commands against a running server where there is none, or one that misbehaves."""

from __future__ import annotations

import pytest

from geventstalk.exits import EXIT_NONSENSE, EXIT_UNREACHABLE, EXIT_USAGE
from tests.support.live import STATS, Runner, answer_of, answering
from tests.support.process import free_port


def test_no_server(bare: Runner) -> None:
    port = free_port()
    for words in (["tubes"], ["job", "1"], ["top"], ["watch", "x"], ["delete", "1"], ["put", "x", "y"], ["drain"]):
        ran = bare(*words, "-p", str(port))
        assert ran == (EXIT_UNREACHABLE, "", f"geventstalk: no server listens at 127.0.0.1:{port}\n")
    assert bare("tubes", "-l", "no.such.host.invalid").code == EXIT_UNREACHABLE
    ran = bare("tubes", "-l", "a..b")
    assert ran.code == EXIT_UNREACHABLE and ran.err.endswith(": there is no such host\n")
    ran = bare("tubes", "-p", "nosuchservice")
    assert ran.code == EXIT_USAGE and "invalid port: nosuchservice, which is no service of this host" in ran.err


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
        b"-ERR unknown command 'stats'\r\n",
        b"\x00" * 5000,
        b"OK -5\r\n",
        b"OK 99999999999999999\r\n",
        b"OK \xb2\r\n",
        b"OK 4\r\n---\n12",
        b"OK 0\r\n\r\n",
        b"NOT_FOUND\r\n",
        b"\r\n",
        answer_of({**STATS, "current-jobs-ready": "many"}),
    ],
)
def test_what_answers_is_no_beanstalkd(bare: Runner, answer: bytes) -> None:
    with answering(answer, answer) as port:
        ran = bare("top", "-p", str(port), "--timeout", "5")
    assert (ran.code, ran.out) == (EXIT_NONSENSE, "") and ran.err.count("\n") == 1


STATS_ANSWER = answer_of(STATS)


FOUND = b"FOUND 1 1\r\na\r\n"
JOB = {"id": 1, "tube": "x", "state": "ready", **dict.fromkeys(("pri", "age", "delay", "ttr", "time-left"), 1)}


@pytest.mark.parametrize(
    "answers",
    [
        [b"FOUND 1 x\r\n"],
        [b"FOUND\r\n"],
        [b"RESERVED 1 1\r\na\r\n"],
        [b"a\xff\r\n"],
        [b"\r\n"],
        [b"FOUND 1 1\nab"],
        [FOUND, FOUND],
        [FOUND, b"DELETED\r\n"],
        [FOUND, answer_of(JOB)],
    ],
)
def test_nonsense_in_the_middle(bare: Runner, answers: list[bytes]) -> None:
    with answering(STATS_ANSWER, *answers) as port:
        ran = bare("job", "1", "-p", str(port), "--timeout", "5")
    assert (ran.code, ran.out) == (EXIT_NONSENSE, "") and ran.err.count("\n") == 1


def test_a_tube_is_called_what_it_was_asked_by(bare: Runner) -> None:
    tube = {f"current-jobs-{state}": 0 for state in ("urgent", "ready", "reserved", "delayed", "buried")}
    tube |= dict.fromkeys(("current-using", "current-watching", "current-waiting", "pause", "pause-time-left"), 0)
    for name in ({}, {"name": "007"}):
        with answering(STATS_ANSWER, b"OK 9\r\n---\n- 07\n\r\n", answer_of({**tube, **name})) as port:
            ran = bare("tubes", "--json", "-p", str(port))
        assert (ran.code, ran.lines[0]["name"]) == (0, "07")


def test_a_server_that_hangs_is_given_up(bare: Runner) -> None:
    with answering(None) as port:
        ran = bare("tubes", "-p", str(port), "--timeout", "0.1")
    assert ran == (69, "", f"geventstalk: the server at 127.0.0.1:{port} did not answer within 0.1 s\n")
    with answering(STATS_ANSWER, None) as port:
        assert bare("put", "x", "y", "-p", str(port), "--timeout", "0.1").code == EXIT_UNREACHABLE


def test_a_server_that_goes_away(bare: Runner) -> None:
    deleted = [b"DELETED\r\n"] * 3
    with answering(STATS_ANSWER, *deleted, b"") as port:
        ran = bare("delete", *map(str, range(1, 9)), "-p", str(port))
    assert (ran.code, ran.out) == (EXIT_UNREACHABLE, "")
    assert ran.err == f"stopped: deleted 3 jobs\ngeventstalk: the server at 127.0.0.1:{port} closed the connection\n"
