"""scripts/demo, run small, and proof that its accounting can fail: it must report what was lost or invented."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.process import ROOT, ServerProcess
from tests.support.wire import Client

PROGRAM = ROOT / "scripts" / "demo.py"
RUN_LIMIT_S = 100


def load() -> ModuleType:
    """The demo's program as a module; scripts is no package."""
    spec = importlib.util.spec_from_file_location("geventstalk_demo", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


demo: Any = load()


@pytest.fixture(autouse=True)
def temporary_files_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo with faults keeps its journal, which is no use here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # have it look again


def numbers(output: str) -> dict[str, int]:
    """The summary, as plain lines."""
    return {match[1].strip(): int(match[2]) for match in re.finditer(r"^([a-z ,']+): (\d+)$", output, re.MULTILINE)}


# the whole demo


@pytest.mark.slow
@pytest.mark.timeout(RUN_LIMIT_S + 20)
def test_nothing_is_lost_and_nothing_invented(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--jobs", "1500", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    print(done.stdout, done.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    result = numbers(done.stdout)
    assert (result["lost"], result["invented"], result["other faults"]) == (0, 0, 0)
    assert result["put and acknowledged"] == 1500
    arrived = result["put and acknowledged"] + result["of these in the server all the same"]
    ended = result["worked and deleted"] + result["worked, delete unanswered"]
    assert arrived == ended + result["buried, and there at the end"]
    assert result["buried, and there at the end"] > 0
    assert result["handed back by a worker and delivered again"] > 0
    assert "kill -9 with" in done.stdout
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []  # its journal is gone


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(RUN_LIMIT_S + 20)
def test_it_draws_bars_and_a_table_on_a_terminal(seed: int) -> None:
    command = [sys.executable, str(PROGRAM), "--jobs", "300", "--seed", str(seed)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    master, slave = pty.openpty()
    with subprocess.Popen(command, env=environment, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        output = b""
        while True:
            try:
                chunk = os.read(master, 1 << 16)
            except OSError:  # the other end is closed: a pty says so with EIO
                break
            output += chunk
        os.close(master)
        code = process.wait(RUN_LIMIT_S)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    print(text)
    assert code == 0
    assert "━" in text
    assert re.search(r"│ lost +│ +0 │", text)
    assert re.search(r"│ put and acknowledged +│ +300 │", text)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(RUN_LIMIT_S + 20)
def test_a_journal_that_vanishes_at_the_kill_is_noticed(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    def wipe(server: Any) -> None:
        shutil.rmtree(server.journal)
        server.journal.mkdir()

    assert demo.Demo(jobs=600, seed=seed, while_down=wipe).run() == 1
    output = capsys.readouterr().out
    print(output)
    assert numbers(output)["lost"] > 0
    assert numbers(output)["put and acknowledged"] == 600
    assert re.search(r"^FAULT: id \d+ was given to the jobs", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(RUN_LIMIT_S + 20)
def test_a_job_of_a_stranger_is_noticed(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    def put_one(server: Any) -> None:
        server.start()
        with server.connect(use="mail") as client:
            client.put(b"0.7 no client of the demo put this")
        server.kill()

    assert demo.Demo(jobs=300, seed=seed, while_down=put_one).run() == 1
    output = capsys.readouterr().out
    print(output)
    result = numbers(output)
    assert (result["lost"], result["invented"]) == (0, 1)


@pytest.mark.slow
def test_a_server_that_cannot_start_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    failing = [sys.executable, "-c", "import sys; print('no room today'); sys.exit(3)"]
    assert demo.Demo(jobs=10, seed=1, command=failing).run() == 1
    fault, where = capsys.readouterr().out.strip().splitlines()
    assert fault.startswith("FAULT: the demo did not come to its end: the server ended by itself, exit code 3")
    assert fault.endswith("no room today")
    assert where.startswith("journal and log are kept in")


def test_the_same_seed_makes_the_same_jobs() -> None:
    assert demo.make_plan(200, 7) == demo.make_plan(200, 7)
    assert demo.make_plan(200, 7) != demo.make_plan(200, 8)


# its accounting


class Story:
    """A ledger, and one job after the other that goes through it as the clients would note it."""

    def __init__(self) -> None:
        self.ledger = demo.Ledger()
        self.bodies: dict[int, bytes] = {}

    def put(self, number: int, *, fate: str = "work", delay: int = 0, answered: bool = True) -> None:
        plan = demo.Plan(number, "mail", 0, delay, fate, b"payload\r\n")
        self.bodies[number] = self.ledger.putting(plan, 0)
        if answered:
            self.ledger.put(self.bodies[number], number)
        else:
            self.ledger.put_unanswered(self.bodies[number])

    def deliver(self, number: int, life: int = 1) -> Any:
        return self.ledger.delivered(number, self.bodies[number], life)

    def leave(self, number: int, command: str, settled: str | None = None, life: int = 1) -> None:
        entry = self.deliver(number, life)
        self.ledger.leaving(entry, command)
        if settled:
            self.ledger.left(entry, settled)

    def found(self, number: int, state: str) -> None:
        self.ledger.found(number, self.bodies[number], state)

    @property
    def verdict(self) -> tuple[list[str], int, int]:
        return self.ledger.lost(), len(self.ledger.invented), len(self.ledger.complaints)


@pytest.fixture
def story() -> Story:
    return Story()


CLEAN: tuple[list[str], int, int] = ([], 0, 0)


def test_worked_and_buried_jobs_are_accounted_for(story: Story) -> None:
    story.put(1)
    story.leave(1, "delete", "worked")
    story.put(2, fate="bury")
    story.leave(2, "bury", "buried")
    story.found(2, "buried")
    assert story.verdict == CLEAN
    assert story.ledger.settled == 2


def test_an_acknowledged_job_that_is_nowhere_is_lost(story: Story) -> None:
    story.put(1)
    assert story.verdict == (["1.0"], 0, 0)


def test_a_buried_job_that_is_not_there_at_the_end_is_lost(story: Story) -> None:
    story.put(1, fate="bury")
    story.leave(1, "bury", "buried")
    assert story.verdict == (["1.0"], 0, 0)


def test_a_job_in_a_workers_hands_at_the_end_is_lost(story: Story) -> None:
    story.put(1)
    story.deliver(1)
    assert story.verdict == (["1.0"], 0, 0)


def test_an_unanswered_put_may_be_there_or_not(story: Story) -> None:
    story.put(1, answered=False)
    assert story.verdict == CLEAN
    story.put(2, answered=False)
    story.leave(2, "delete", "worked", life=2)
    assert story.verdict == CLEAN
    assert story.ledger.acknowledged == 0


def test_an_unanswered_put_that_was_delivered_once_must_not_vanish(story: Story) -> None:
    story.put(1, answered=False)
    story.deliver(1)
    assert story.verdict == (["1.0"], 0, 0)


@pytest.mark.parametrize("command", ["delete", "bury", "release"])
def test_after_an_unanswered_command_the_job_may_come_again(story: Story, command: str) -> None:
    story.put(1)
    story.leave(1, command)
    story.leave(1, "delete", "worked", life=2)
    assert story.verdict == CLEAN
    assert story.ledger.redelivered == 1


def test_after_an_unanswered_delete_the_job_may_be_gone(story: Story) -> None:
    story.put(1)
    story.leave(1, "delete")
    assert story.verdict == CLEAN


def test_after_an_unanswered_delete_and_another_delivery_it_must_not_vanish(story: Story) -> None:
    story.put(1)
    story.leave(1, "delete")
    story.deliver(1, life=2)
    assert story.verdict == (["1.0"], 0, 0)


def test_after_an_unanswered_bury_the_job_may_be_buried_but_not_gone(story: Story) -> None:
    story.put(1, fate="bury")
    story.leave(1, "bury")
    assert story.verdict == (["1.0"], 0, 0)
    story.found(1, "buried")
    assert story.verdict == CLEAN


def test_a_job_that_nobody_put_is_invented(story: Story) -> None:
    assert story.ledger.delivered(9, b"9.0 payload", 1) is None
    story.ledger.found(10, b"\xff\xfe", "buried")
    assert story.verdict == ([], 2, 0)


def test_a_job_whose_body_changed_is_invented(story: Story) -> None:
    story.put(1)
    assert story.ledger.delivered(1, story.bodies[1] + b"!", 1) is None
    assert story.verdict == (["1.0"], 1, 0)


def test_a_job_that_comes_under_another_id_is_invented(story: Story) -> None:
    story.put(1)
    story.ledger.left(story.ledger.delivered(2, story.bodies[1], 1), "worked")
    assert story.verdict == ([], 1, 0)


@pytest.mark.parametrize(("command", "settled"), [("delete", "worked"), ("bury", "buried")])
def test_a_job_that_comes_back_after_it_was_settled_is_invented(story: Story, command: str, settled: str) -> None:
    story.put(1)
    story.leave(1, command, settled)
    story.leave(1, command, settled, life=2)
    if settled == "buried":
        story.found(1, "buried")
    assert story.verdict == ([], 1, 0)


def test_a_worked_job_that_is_there_at_the_end_is_invented(story: Story) -> None:
    story.put(1)
    story.leave(1, "delete", "worked")
    story.found(1, "ready")
    assert story.verdict == ([], 1, 0)


def test_a_job_that_is_there_twice_is_invented(story: Story) -> None:
    story.put(1, fate="bury")
    story.leave(1, "bury", "buried")
    story.found(1, "buried")
    story.found(1, "buried")
    assert story.verdict == ([], 1, 0)


def test_a_note_that_comes_a_life_late_does_no_harm(story: Story) -> None:
    story.put(1)
    story.leave(1, "delete", "worked", life=2)
    assert story.deliver(1, life=1) is None
    assert story.verdict == CLEAN


def test_two_holders_of_one_job_are_a_fault(story: Story) -> None:
    story.put(1)
    story.deliver(1)
    story.leave(1, "delete", "worked")
    assert story.verdict == ([], 0, 1)


def test_a_job_that_comes_before_its_delay_is_over_is_a_fault(story: Story) -> None:
    story.put(1, delay=5)
    story.leave(1, "delete", "worked")
    assert story.verdict == ([], 0, 1)


def test_an_id_that_is_given_twice_is_a_fault(story: Story) -> None:
    story.put(1)
    story.leave(1, "delete", "worked")
    body = story.ledger.putting(demo.Plan(2, "mail", 0, 0, "work", b""), 0)
    story.ledger.put(body, 1)
    story.ledger.left(story.ledger.delivered(1, body, 1), "worked")
    assert story.verdict == ([], 0, 1)


def test_a_job_that_nobody_worked_is_a_fault(story: Story) -> None:
    story.put(1)
    story.found(1, "ready")
    assert story.verdict == ([], 0, 1)


def test_a_traceback_of_the_server_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import runpy, traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
        "runpy.run_module('geventstalk', run_name='__main__')"
    )
    assert demo.Demo(jobs=10, seed=1, command=[sys.executable, "-c", program]).run() == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


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
