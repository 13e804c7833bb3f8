"""Cuts the power of journals until something that was promised is lost, or shows a kept violation again.

Run as scripts/torture. A seed draws the same torment each time, but threads and the disk decide its exact moments: what
repeats a violation exactly is what was kept of it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NoReturn

from tests.support.torture.recorder import recorder_problem
from tests.support.torture.torturer import KINDS, POLICIES, Torment, see_again


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 when nothing was lost, 1 when something was."""
    parser = Parser(prog="scripts/torture", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="the seed of one torment")
    parser.add_argument("--seeds", type=int, metavar="N", help="N torments, one seed after the other")
    parser.add_argument("--first", type=int, metavar="S", help="the first of those seeds (default: drawn)")
    parser.add_argument(
        "--cuts", type=int, metavar="N", default=100, help="losses of power in a torment (default: 100)"
    )
    parser.add_argument("--policy", choices=POLICIES, default="", help="of fsync (default: drawn)")
    parser.add_argument("--kind", choices=sorted(set(KINDS)), default="", help="of disk (default: drawn)")
    parser.add_argument("--go-on", action="store_true", help="also behind a violation")
    parser.add_argument("--again", type=Path, metavar="DIR", help="looks at a kept violation again")
    options = parser.parse_args(arguments)
    if problem := recorder_problem():
        parser.error(problem)
    if options.again is not None:
        violation = see_again(options.again)
        print(violation or "no violation any more")
        return bool(violation)
    if (options.seed is None) == (options.seeds is None):
        parser.error("give one seed, or --seeds N")
    first = options.seed if options.seeds is None else options.first
    if first is None:
        first = random.SystemRandom().randrange(2**32)
    return torture(first, options.seeds or 1, options)


def torture(first: int, seeds: int, options: argparse.Namespace) -> int:
    """Many torments, up to the first violation, or with all of them shown."""
    print(f"seeds {first} to {first + seeds - 1}", flush=True)
    keep = Path(tempfile.mkdtemp(prefix="torture-"))
    counts: Counter[str] = Counter()
    begun_s = time.monotonic()
    violations = 0
    for seed in range(first, first + seeds):
        torment = Torment(seed, policy=options.policy, kind=options.kind, keep=keep)
        outcome = torment.run(options.cuts)
        counts.update(outcome.counts)
        counts.update(cuts=outcome.cuts, lives=outcome.lives, went_on=outcome.went_on)
        if outcome.failure:
            violations += 1
            print(f"seed {seed}: VIOLATION: {outcome.failure}", flush=True)
            if not options.go_on:
                break
    if not violations:
        keep.rmdir()
    told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    print(f"{told}; {violations} violations; {time.monotonic() - begun_s:.0f} s")
    return violations > 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
