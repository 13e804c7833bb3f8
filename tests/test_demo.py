"""scripts/demo, run small, and proof that the demo reports what was lost or invented."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.support.process import ROOT, ServerProcess
from tests.support.wire import Client

pytestmark = pytest.mark.when_changed("scripts/demo", "scripts/demo.py", "tests/test_demo.py")
PROGRAM = ROOT / "scripts" / "demo.py"
SERVER = [sys.executable, "-m", "geventstalk"]
RUN_LIMIT_S = 100


def load() -> ModuleType:
    """The demo's program as a module; scripts is no package."""
    spec = importlib.util.spec_from_file_location("geventstalk_demo", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo: Any = load()


def numbers(output: str) -> dict[str, int]:
    """The summary, as plain lines."""
    return {match[1]: int(match[2]) for match in re.finditer(r"^([a-z9 -]+): (\d+)$", output, re.MULTILINE)}


@pytest.mark.slow
@pytest.mark.timeout(RUN_LIMIT_S + 20)
def test_nothing_is_lost_and_nothing_invented() -> None:
    command = [sys.executable, str(PROGRAM), "--jobs", "900"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    print(done.stdout, done.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    result = numbers(done.stdout)
    assert (result["lost"], result["invented"]) == (0, 0)
    assert 880 < result["put and acknowledged"] <= 900
    assert "kill -9 with" in done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(RUN_LIMIT_S + 20)
def test_a_journal_that_vanishes_at_the_kill_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    def wipe(server: Any) -> None:
        shutil.rmtree(server.journal)
        server.journal.mkdir()

    assert demo.Demo(600, SERVER, wipe).run() == 1
    assert numbers(capsys.readouterr().out)["lost"] > 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(RUN_LIMIT_S + 20)
def test_a_job_of_another_client_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    def put_one(server: Any) -> None:
        server.start()
        with server.connect(use="mail") as client:
            client.put(b"no client of the demo put this")
        server.kill()

    assert demo.Demo(300, SERVER, put_one).run() == 1
    result = numbers(capsys.readouterr().out)
    assert (result["lost"], result["invented"]) == (0, 1)


def test_a_job_that_comes_back_after_its_delete_is_invented() -> None:
    ledger = demo.Ledger()
    for notes in (ledger.sent, ledger.put, ledger.deleting):
        notes.add(b"mail 1")
    ledger.seen(b"mail 1")  # the delete got no answer, so both is right: the job is gone, or the job comes again
    assert (ledger.invented, ledger.lost()) == ([], [])
    ledger.deleted.add(b"mail 1")
    ledger.seen(b"mail 1")
    assert len(ledger.invented) == 1


@pytest.mark.slow
def test_a_server_that_cannot_start_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    failing = [sys.executable, "-c", "import sys; print('no space today'); sys.exit(3)"]
    assert demo.Demo(10, failing).run() == 1
    (fault,) = capsys.readouterr().out.strip().splitlines()
    assert fault.startswith("FAULT: the demo did not come to its end: the server ended by itself, exit code 3")
    assert fault.endswith("no space today")


# traffic


@pytest.mark.slow
def test_traffic_puts_and_works_on_jobs(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    command = [sys.executable, str(ROOT / "scripts" / "traffic"), "--to", f"127.0.0.1:{server.port}"]
    done = subprocess.run([*command, "--rate", "300", "--seconds", "1"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    said = re.search(r"(\d+) put, (\d+) done in \d+ s", done.stdout)
    with Client(server.connect()) as client:
        stats = client.stats(b"stats")
    assert said is not None and int(said[1]) == int(stats["total-jobs"]) > 50 and int(said[2]) > 5
    server.stop()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Connection refused" in done.stderr and "Traceback" not in done.stderr
