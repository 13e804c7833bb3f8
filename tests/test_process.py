"""The processes of tests: a traceback on a server's stderr is an error, whatever the test asserts; signals and mounts.

And which tests a run leaves out.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import is_due
from tests.support.disk import small_disk
from tests.support.prefork import forker
from tests.support.process import (
    GEVENTSTALK,
    ROOT,
    ServerProcess,
    TracebackFound,
    check_logs,
    hand_down_no_ignored_signal,
)
from tests.support.seeds import have_changed


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


def test_what_is_started_does_not_ignore_the_signals_that_the_tests_ignore() -> None:
    """Under `nohup` a server that a test starts did not end at SIGHUP."""
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN}
    assert ignored <= {signal.SIGPIPE, signal.SIGXFSZ}, "the fixture no_ignored_signal of conftest.py prevents this"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hand_down_no_ignored_signal()
        signal.raise_signal(signal.SIGHUP)  # does nothing here
        assert subprocess.run(["sh", "-c", "kill -s HUP $$"], check=False).returncode == -signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_small_disk_ends_with_the_tests_because_no_other_process_sees_it(tmp_path: Path) -> None:
    """A disk that a killed test left made pytest's clean-up fail in the next run."""
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        seen = subprocess.run(["cat", "/proc/self/mountinfo"], capture_output=True, text=True, check=True).stdout
        assert str(disk) in seen
        assert str(disk) not in Path(f"/proc/{os.getppid()}/mountinfo").read_text()


EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""What git calls a commit of no files."""


@pytest.mark.parametrize(
    ("base", "paths", "named", "due"),
    [
        ("HEAD", ["no-such-file"], False, False),
        ("HEAD", ["no-such-file"], True, True),
        ("HEAD", [], False, True),
        (EMPTY_TREE, ["no-such-file"], False, False),
        (EMPTY_TREE, ["no-such-file", "setup.py"], False, True),
        ("no-such-commit", ["no-such-file"], False, True),
    ],
)
def test_tests_of_what_seldom_changes_are_due_when_it_has_changed(
    monkeypatch: pytest.MonkeyPatch, base: str, paths: list[str], named: bool, due: bool
) -> None:
    if not (ROOT / ".git").exists():
        due = True  # a copy of the tree does not know what has changed
    monkeypatch.setenv("BASE", base)
    have_changed.cache_clear()
    marks = [pytest.mark.when_changed(*paths).mark] if paths else []
    config = SimpleNamespace(workerinput={"named": named}, args_source=None)
    item: Any = SimpleNamespace(iter_markers=lambda name: marks, config=config)
    try:
        assert is_due(item) == due
    finally:
        have_changed.cache_clear()


@pytest.mark.parametrize("words", [["--version"], ["--no-such-flag"]])
def test_a_fork_does_what_an_interpreter_does(tmp_path: Path, words: list[str]) -> None:
    args = [*GEVENTSTALK, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    fresh = subprocess.run(args, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=60)
    with (tmp_path / "out").open("w+b") as out, (tmp_path / "err").open("w+b") as err:
        files = [out.fileno(), out.fileno(), err.fileno()]
        code = forker(str(ROOT)).start(args, str(tmp_path), environment, files).wait(60)
        said = tuple(os.pread(file.fileno(), 1 << 16, 0) for file in (out, err))
    assert (code, *said) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_a_fork_is_waited_for_and_killed() -> None:
    process = ServerProcess(GEVENTSTALK).wait_ready().process
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.kill()
    assert process.wait(20) == process.poll() == -signal.SIGKILL
