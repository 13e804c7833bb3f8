"""The tests' own server process: a traceback on a server's stderr is an error, whatever the test asserts."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.process import ServerProcess, TracebackFound, check_logs


@pytest.fixture
def says() -> Iterator[ServerProcess]:
    """A process that writes a traceback, and goes on."""
    process = ServerProcess([sys.executable, "-c", "import time, sys\nraise KeyError(5)"])
    yield process
    process.log.expects = "KeyError"
    process.kill()


def test_a_traceback_is_found_while_the_server_runs_and_only_once(says: ServerProcess) -> None:
    says.process.wait(30)
    with pytest.raises(TracebackFound, match="KeyError: 5"):
        check_logs()
    check_logs()


def test_a_traceback_is_found_when_the_server_is_stopped(says: ServerProcess) -> None:
    says.process.wait(30)
    with pytest.raises(TracebackFound, match="KeyError: 5"):
        says.stop()


def test_a_traceback_that_was_declared_is_none(says: ServerProcess) -> None:
    says.process.wait(30)
    says.log.expects = "KeyError: 5"
    check_logs()
    assert says.stop() == 1


def test_another_traceback_than_the_declared_one_is_found(says: ServerProcess) -> None:
    says.process.wait(30)
    says.log.expects = "ValueError"
    with pytest.raises(TracebackFound):
        check_logs()
