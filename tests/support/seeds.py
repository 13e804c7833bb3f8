"""Facts from git for the tests. Seeds of random tests are drawn, but in CI the commit's own, so that the same code gets
the same answer there. Tests of what seldom changes are left out where it has not changed.
"""

from __future__ import annotations

import os
import random
import subprocess
from functools import cache

import pytest

from tests.support.process import ROOT


def draw_seed(config: pytest.Config) -> int:
    """Returns what `--seed` says, or a new one; it is printed either way, for the output of a test that fails."""
    given = config.getoption("--seed")
    if given is not None:
        seed = int(given)
    elif os.environ.get("CI"):
        seed = _seed_of_the_commit()
    else:
        seed = random.SystemRandom().randrange(2**32)
    print(f"--seed {seed}")
    return seed


def _seed_of_the_commit() -> int:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 1
    return int(done.stdout[:8], 16)


@cache
def have_changed(*paths: str) -> bool:
    """Returns whether one of these differs from the commit $BASE, by default the one before the last.

    Where git cannot tell, all have changed.
    """
    base = os.environ.get("BASE", "HEAD^")
    command = ["git", "diff", "--quiet", base, "--", *paths]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode != 0
    except OSError:
        return True
