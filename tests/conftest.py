"""Options and fixtures shared by all test modules."""

from __future__ import annotations

import os
import resource
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from geventstalk._build import BUILD
from geventstalk.serving.fd_limits import LIMIT_MAX
from tests.support.browser import browser, chromium
from tests.support.clients import Launch, launcher
from tests.support.disk import keep_mounts_private
from tests.support.live import Runner
from tests.support.postgres import postgres_alone, postgres_pair, postgres_server, postgres_url
from tests.support.process import (
    GEVENTSTALK,
    ServerProcess,
    TracebackFound,
    beanstalkd_path,
    check_logs,
    hand_down_no_ignored_signal,
)
from tests.support.seeds import draw_seed, have_changed

__all__ = ["browser", "chromium", "postgres_alone", "postgres_pair", "postgres_server", "postgres_url"]

TOGETHER = ("tests/test_console.py", "tests/test_console_server.py", "tests/test_packaging.py", "tests/test_run.py")
"""Files whose tests share what takes long to make, or build on each other."""
WORKERS_MAX = 8
"""Beyond these the servers that the tests start are more than a machine of any size lets run at once."""

collect_ignore: list[str] = []
if BUILD == "compiled":
    # A compiled Store takes nothing but a compiled Journal, and what that stands on cannot be replaced by a simulation.
    collect_ignore.append("test_simulation.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--build", choices=("pure", "compiled"), help="fail unless it is this build that is tested")
    parser.addoption("--long", action="store_true", help="also the tests marked long, which take minutes each")
    parser.addoption("--seed", type=int, default=None, help="seed of the random tests (default: drawn)")


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--build")
    if wanted not in (None, BUILD):
        raise pytest.UsageError(f"the {BUILD} build would be tested, not the {wanted} one")
    keep_mounts_private()
    # What the tests start has the environment of users. Bug: without this variable a failed write ended with 120.
    os.environ.pop("PYTHONUNBUFFERED", None)
    # As a server does: where it finds less it raises the limit and says so, in a line that no test expects.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns the workers of `-n auto`: more than cores, because many tests wait for a process or for a moment."""
    return min(2 * len(os.sched_getaffinity(0)) + 1, WORKERS_MAX)


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist carries no types
    """Gives each test to a free worker, but the tests of some files to one worker, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    # The marker xdist_group cannot be used: with pytest 9.2, xdist 3.8 ignores it without a word.
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is long, and lets what is slow come first, so that at the end no worker is alone with it."""
    if not config.getoption("--long"):
        left = [item for item in items if not item.get_closest_marker("long") and is_due(item)]
        config.hook.pytest_deselected(items=[*({*items} - {*left})])
        items[:] = left
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def is_due(item: pytest.Item) -> bool:
    """Returns whether a file of its mark `when_changed` has changed. Tests that are named are all due."""
    paths = [path for mark in item.iter_markers("when_changed") for path in mark.args]
    named = getattr(item.config, "workerinput", {}).get("named", are_named(item.config))
    return not paths or named or have_changed(*paths)


def are_named(config: pytest.Config) -> bool:
    return config.args_source is not pytest.Config.ArgsSource.TESTPATHS


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker's own settings do not tell where its arguments come from."""
    node.workerinput["named"] = are_named(node.config)


def pytest_report_header() -> str:
    left_out = f"; left out: {', '.join(collect_ignore)}" if collect_ignore else ""
    return f"build: {BUILD}{left_out}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of a random test; shown with the captured output when the test fails, and repeated by --seed."""
    return draw_seed(request.config)


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    """Returns how many times as much a random test does as a change has time for: 1, and 4 with --long."""
    return 4 if request.config.getoption("--long") else 1


@pytest.fixture(scope="session", autouse=True)
def no_ignored_signal() -> None:
    hand_down_no_ignored_signal()


@pytest.fixture(autouse=True)
def no_traceback() -> Iterator[None]:
    """A traceback of any server fails the test in which it is written, whatever the test asserts."""
    yield
    check_logs()


@pytest.fixture(autouse=True)
def no_open_database(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each opened SQLite file is closed, on every way out: left to the collector, SQLite merges a WAL unsynced."""
    opened: list[tuple[sqlite3.Connection, str]] = []
    real = sqlite3.connect

    def connect(path: Any, *args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = real(path, *args, **options)
        opened.append((connection, f"{path}, by {_callers(sys._getframe(1))}"))
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)
    yield
    left = [(connection, where) for connection, where in opened if is_open(connection)]
    for connection, _ in left:
        with suppress(sqlite3.ProgrammingError):  # one of a thread that is gone
            connection.close()
    assert not left, [where for _, where in left]


def _callers(frame: FrameType | None) -> list[str]:
    """Returns where the last five calls stand, in a tenth of the time that traceback takes."""
    found: list[str] = []
    while frame is not None and len(found) < 5:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def is_open(connection: sqlite3.Connection) -> bool:
    try:
        return connection.total_changes >= 0
    except sqlite3.ProgrammingError:
        return False


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """Starts geventstalk processes with the given flags; each answers when returned and is stopped at the end."""
    yield from _starter(GEVENTSTALK)


@pytest.fixture
def start_beanstalkd() -> Iterator[Callable[..., ServerProcess]]:
    """The same for the reference server; skips the test where it is not installed."""
    path = beanstalkd_path()
    if path is None:
        pytest.skip("beanstalkd is not installed")
    yield from _starter([path])


def _starter(command: list[str]) -> Iterator[Callable[..., ServerProcess]]:
    running: list[ServerProcess] = []

    def start(*args: str, **options: Any) -> ServerProcess:
        server = ServerProcess(command, args, **options)
        running.append(server)
        return server.wait_ready()

    yield start
    errors = []
    for server in running:
        try:
            server.stop()
        except TracebackFound as error:
            errors.append(error)
    if errors:
        raise errors[0]


@pytest.fixture(params=["tcp", "unix"])
def launch(
    request: pytest.FixtureRequest, start_server: Callable[..., ServerProcess], tmp_path: Path
) -> Iterator[Launch]:
    """Starts servers, on TCP and on a unix socket, and connects clients to them; where a test asks, behind a front."""
    more = ("--io-processes", "1") if request.param == "front" else ()
    yield from launcher(start_server, tmp_path, unix=request.param == "unix", more=more)


@pytest.fixture
def launch_tcp(start_server: Callable[..., ServerProcess], tmp_path: Path) -> Iterator[Launch]:
    yield from launcher(start_server, tmp_path, unix=False)


@pytest.fixture
def launch_front(start_server: Callable[..., ServerProcess], tmp_path: Path) -> Iterator[Launch]:
    """The same for servers whose clients come in at a front-end process."""
    yield from launcher(start_server, tmp_path, unix=False, more=("--io-processes", "1"))


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GEVENTSTALK_"):
            monkeypatch.delenv(name)


@pytest.fixture
def bare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_settings: None) -> Runner:
    """Runs a command that is told nothing about a server."""
    return Runner(capsys, monkeypatch)
