"""scripts/demo --cluster: of two nodes and two servers of PostgreSQL one each dies; and it can find fault."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from scripts.demo_cluster import Demo
from tests.support.cluster.load import TUBES, Link
from tests.support.cluster.nodes import Cluster
from tests.support.postgres import require_postgres
from tests.support.process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def postgres_is_there() -> None:
    require_postgres()


def test_nothing_is_lost_and_each_gap_is_told(seed: int) -> None:
    said: list[str] = []
    code = Demo(seed, said.append, changes=150).run()
    text = "\n".join(said)
    print(text)
    assert code == 0
    assert re.search(r"^lost: 0$", text, re.MULTILINE) and re.search(r"otherwise wrong: 0$", text, re.MULTILINE)
    assert len(re.findall(r"for \d+ ms no change was acknowledged", text)) == 3
    assert "kill -9 of the active node" in text and "primary killed, replica promoted" in text
    assert int(re.findall(r"^jobs put and acknowledged: (\d+)$", text, re.MULTILINE)[0]) > 50


def test_a_job_that_a_stranger_deletes_is_lost(seed: int) -> None:
    said: list[str] = []

    def steal(cluster: Cluster) -> None:
        link = Link(cluster.leader().address, 10)
        for tube in TUBES:
            link.ask(b"watch " + tube)
        reply = link.ask(b"reserve-with-timeout 5")
        assert reply.startswith(b"RESERVED ")
        link.ask(b"delete " + reply.split()[1])
        link.close()

    demo = Demo(seed, said.append, changes=150)
    demo.meddle = steal
    code = demo.run()
    print("\n".join(said))
    assert code == 1
    assert any(line.startswith("FAULT: ") for line in said)


def test_the_program_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.demo_cluster.programs", lambda: None)
    said: list[str] = []
    assert Demo(1, said.append).run() == 1
    assert said == ["FAULT: PostgreSQL is not installed (Debian: apt-get install postgresql)"]


def test_the_flag_is_there() -> None:
    command: list[Any] = [sys.executable, ROOT / "scripts" / "demo.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--cluster" in done.stdout
