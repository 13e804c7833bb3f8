"""The journal's thread: whatever ends a piece of work, or the thread itself, is told to the next caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from journal import JournalDamaged, JournalFailed, JournalFull
from journal.sqlite.worker import Worker

PATIENCE_S = 30.0


class _Odd(BaseException):
    """An unexpected exception."""


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def nothing() -> None:
    return


def failure_of(worker: Worker) -> JournalFailed:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            worker.check()
        except JournalFailed as error:
            return error
        time.sleep(0.001)
    raise AssertionError("the failure is told to no caller")


# Bug: The journal's thread ended unnoticed on an exception that was not a JournalError.
@pytest.mark.parametrize(
    "error",
    [
        JournalFailed("a device"),
        JournalFull("a disk"),
        JournalDamaged("a file"),
        OSError(5, "Input/output error", "a file"),
        MemoryError(),
        ValueError("a\nbug"),
        _Odd("worse"),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_of_work_is_the_end(error: BaseException) -> None:
    worker = Worker()
    later: list[str] = []
    worker.submit(raising(error), lambda: later.append("done"))
    worker.submit(lambda: later.append("work"), nothing)
    failure = failure_of(worker)
    assert failure is error or failure.__cause__ is error
    assert "\n" not in str(failure)
    bug = not isinstance(error, JournalFailed | JournalFull | JournalDamaged | OSError)
    assert (failure.unexpected is error) == bug
    if bug:
        assert error.__traceback__ is not None, "the log needs it"
    worker.abandon()
    assert later == []
    assert failure_of(worker) is failure, "the first failure is told"


def test_the_end_of_the_thread_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    error = MemoryError()
    monkeypatch.setattr(worker, "_next", raising(error))
    worker.submit(nothing, nothing)
    assert failure_of(worker).unexpected is error
    worker.abandon()


def test_the_first_of_many_failures_stays() -> None:
    worker = Worker()
    errors = [JournalFailed(str(count)) for count in range(8)]
    begin = threading.Barrier(len(errors))

    def fail(error: JournalFailed) -> None:
        begin.wait()
        worker.fail(error)

    threads = [threading.Thread(target=fail, args=(error,)) for error in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = failure_of(worker)
    worker.fail(JournalFailed("late"))
    assert failure_of(worker) is first
    worker.abandon()


# Bug: Giving the journal up raised a second error over the first one.
def test_a_thread_that_cannot_be_started_delays_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: raising(RuntimeError("can't start new thread"))())
    with pytest.raises(RuntimeError, match="new thread"):
        worker.submit(nothing, nothing)
    assert worker.abandon(), "no thread has files of the journal open"
