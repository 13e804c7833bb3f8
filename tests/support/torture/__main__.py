"""Cuts the power of journals until something that was promised is lost, or shows a kept violation again.

Run as scripts/torture. A seed draws the same torment each time, but threads and the disk decide its exact moments: what
repeats a violation exactly is what was kept of it.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NoReturn

from tests.support.disk import keep_mounts_private
from tests.support.seed_program import STOPPED, run, seed_parser, seeds_of
from tests.support.torture.recorder import recorder_problem
from tests.support.torture.torturer import KINDS, POLICIES, Torment, bounded, see_again

LIVES_S = 400.0
"""How long all lives of a torment may take, and a little more than that."""
CUT_S = 2.0
"""How long a loss of power may take, on average. On a busy machine it takes 0.2 s."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 when nothing was lost, 1 when something was."""
    parser = seed_parser(
        "scripts/torture", __doc__, one="the seed of one torment", many="N torments, one seed after the other"
    )
    parser.add_argument(
        "--cuts", type=int, metavar="N", default=100, help="losses of power in a torment (default: 100)"
    )
    parser.add_argument("--policy", choices=POLICIES, default="", help="of fsync (default: drawn)")
    parser.add_argument("--kind", choices=sorted(set(KINDS)), default="", help="of disk (default: drawn)")
    parser.add_argument(
        "--forgets", action="store_true", help="bodies leave memory as soon as they can (default: drawn)"
    )
    parser.add_argument("--go-on", action="store_true", help="also behind a violation")
    parser.add_argument("--again", type=Path, metavar="DIR", help="looks at a kept violation again")
    options = parser.parse_args(arguments)
    keep_mounts_private()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    if problem := recorder_problem():
        parser.error(problem)
    if options.again is not None:
        violation = see_again(options.again)
        print(violation or "no violation any more")
        return bool(violation)
    return torture(seeds_of(parser, options), options)


def stopped(number: int, frame: object) -> NoReturn:
    """A stop of the program leaves no folder with a small disk.

    A disk is busy while a life is at work on it. After a KeyboardInterrupt, `subprocess` kills a life and does not wait
    for its end; after any other exception it waits.
    """
    raise SystemExit(STOPPED)


def torture(seeds: range, options: argparse.Namespace) -> int:
    """Many torments, up to the first violation, or with all of them shown."""
    print(f"seeds {seeds[0]} to {seeds[-1]}", flush=True)
    keep = Path(tempfile.mkdtemp(prefix="torture-"))
    counts: Counter[str] = Counter()
    begun_s = time.monotonic()
    violations = 0
    slowest_s, slowest = 0.0, seeds[0]
    for seed in seeds:
        orders = {"forgets": True} if options.forgets else {}
        torment = Torment(seed, policy=options.policy, kind=options.kind, orders=orders, keep=keep)
        torment_s = time.monotonic()
        with bounded(LIVES_S + options.cuts * CUT_S):
            outcome = torment.run(options.cuts)
        slowest_s, slowest = max((slowest_s, slowest), (time.monotonic() - torment_s, seed))
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
    took = f"{time.monotonic() - begun_s:.0f} s, seed {slowest} the slowest with {slowest_s:.0f} s"
    print(f"{told}; {violations} violations; {took}")
    return violations > 0


if __name__ == "__main__":
    run(main)
