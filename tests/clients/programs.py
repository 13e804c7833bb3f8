"""Runs the client programs of this folder: finds interpreter and library, and reads the lines they print.

Nothing is written into the source tree: npm packages go to a folder of the user's cache, named after the lock
file. What is missing on a machine skips the test with the reason; with REQUIRE_CLIENTS=1 it fails instead.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.compiled import unpacked

HERE = Path(__file__).resolve().parent
RUN_LIMIT_S = 90
INSTALL_LIMIT_S = 90

STEPS = (
    "tubes",  # use, watch, ignore, list-tube-used, list-tubes-watched, list-tubes, NOT_IGNORED, BAD_FORMAT
    "priority",  # smallest priority first, then oldest
    "delay",  # TIMED_OUT, peek-delayed, then a waiting reserve gets it in time
    "deadline",  # DEADLINE_SOON one second before the end of the TTR, and again after touch
    "expiry",  # the TTR passes: another client gets the job, the first holder NOT_FOUND
    "release",  # with a new priority and a delay, kick-job, then without a delay
    "bury",  # oldest buried first: peek-buried, kick
    "kick-job",  # of a delayed job; kick reaches delayed jobs when nothing is buried
    "peek",  # by id and by state, found and not found
    "stats",  # stats, stats-job, stats-tube, each through the client's own YAML parser
    "pause",  # pause-tube holds jobs back and ends by itself
    "errors",  # NOT_FOUND for every command on a job that is not there or not mine
    "bodies",  # empty, binary, no UTF-8, line ends inside, exactly max-job-size
    "too-big",  # JOB_TOO_BIG, and the connection goes on
    "blocked",  # a waiting reserve is served by a put of another connection
    "reconnect",  # a job reserved by a client that left comes back
    "bulk",  # 500 jobs in and out in order
)


def missing(reason: str) -> NoReturn:
    """Skips the test because something is not installed; fails it instead where REQUIRE_CLIENTS is set."""
    if os.environ.get("REQUIRE_CLIENTS"):
        pytest.fail(f"REQUIRE_CLIENTS is set, but {reason}")
    pytest.skip(reason)


@dataclass(frozen=True)
class Program:
    """A program that takes host, port and max-job-size; `skips` are the steps that its library cannot do."""

    name: str
    command: tuple[str, ...]
    probe: tuple[str, ...]
    needs: str
    npm: bool = False
    skips: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """The environment to run it in; skips the test when the interpreter or the library is missing."""
        if shutil.which(self.command[0]) is None:
            missing(f"{self.command[0]} is not installed ({self.needs})")
        environment = dict(os.environ)
        if self.npm:
            environment["NODE_PATH"] = str(node_modules())
        probe = subprocess.run(self.probe, env=environment, capture_output=True, timeout=RUN_LIMIT_S)
        if probe.returncode != 0:
            missing(f"the library of {self.name} is not installed ({self.needs})")
        return environment

    def run(self, port: int, max_job_bytes: int) -> dict[str, str]:
        """Returns what became of each step: `ok`, `skip: why` or `not ok: why`."""
        done = subprocess.run(
            [*self.command, "127.0.0.1", str(port), str(max_job_bytes)],
            env=self.environment(),
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
        )
        print(done.stdout, done.stderr)
        results: dict[str, str] = {}
        for line in done.stdout.splitlines():
            head, _, why = line.partition(": ")
            outcome, _, step = head.rpartition(" ")
            results[step] = f"{outcome}: {why}" if why else outcome
        failed = any(result.startswith("not ok") for result in results.values())
        assert done.returncode == int(failed), f"exit code {done.returncode}: {done.stderr}"
        return results


PROGRAMS = (
    Program(
        "jackd",
        ("node", "node/jackd.js"),
        ("node", "-e", "require('jackd')"),
        "node and npm",
        npm=True,
        skips={"pause": "jackd 2.2.2 sends pause-tube without a line end"},
    ),
    Program(
        "fivebeans",
        ("node", "--no-deprecation", "node/fivebeans.js"),
        ("node", "--no-deprecation", "-e", "require('fivebeans')"),
        "node and npm",
        npm=True,
    ),
    Program(
        "beaneater",
        ("ruby", "ruby/round.rb"),
        ("ruby", "-e", "require 'beaneater'"),
        "Debian: ruby and ruby-beaneater",
    ),
    Program(
        "pheanstalk",
        ("php", "php/round.php"),
        ("php", "-r", "require 'Pheanstalk/autoload.php';"),
        "Debian: php-cli and php-pda-pheanstalk",
    ),
)


def node_modules() -> Path:
    """The folder with the packages of node/package-lock.json; installs them when they are not there yet."""
    if shutil.which("npm") is None:
        missing("npm is not installed")
    digest = hashlib.sha256()
    for name in ("package.json", "package-lock.json"):
        digest.update((HERE / "node" / name).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "geventstalk-tests"
    made = cache / f"node-{digest.hexdigest()[:16]}"
    if not made.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        _install(made)
    return made / "node_modules"


def _install(made: Path) -> None:
    """Into a folder beside it first, renamed when all is there: two test runs may be doing this at once."""
    with tempfile.TemporaryDirectory(dir=made.parent) as temporary:
        work = Path(temporary) / "made"
        work.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / "node" / name, work)
        failure = _failure(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], work)
        if failure:
            missing(f"npm ci failed: {failure}")
        try:
            work.rename(made)
        except OSError:
            if not made.is_dir():  # otherwise the other run was first
                raise


def _failure(command: Sequence[str], cwd: Path) -> str | None:
    """None when the command succeeds, otherwise the end of what it said."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {INSTALL_LIMIT_S} s"
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip()[-500:]


def fetch_sdist(requirement: str, sha256: str, into: Path) -> Path:
    """Downloads exactly this source distribution with pip and unpacks it; skips where that is impossible."""
    wanted = into / "wanted.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    options = ["--no-deps", "--no-binary", ":all:", "--require-hashes"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *options]
    failure = _failure([*pip, "-r", str(wanted), "-d", str(into)], into)
    if failure and "HASH" in failure:
        pytest.fail(f"{requirement} is not what it was: {failure}")
    if failure:
        missing(f"pip could not download {requirement}: {failure}")
    (archive,) = into.glob("*.tar.gz")
    return unpacked(archive, into / "unpacked")
