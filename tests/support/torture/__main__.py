"""Cuts the power of journals until something that was promised is lost, or shows a kept violation again.

Run as scripts/torture. A seed draws the same torment each time, but threads and the disk decide its exact moments: what
repeats a violation exactly is what was kept of it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.seed_program import run, seed_parser, seeds_of
from tests.support.torture.recorder import recorder_problem
from tests.support.torture.torturer import KINDS, POLICIES, Torment, see_again


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
    parser.add_argument("--go-on", action="store_true", help="also behind a violation")
    parser.add_argument("--again", type=Path, metavar="DIR", help="looks at a kept violation again")
    options = parser.parse_args(arguments)
    if problem := recorder_problem():
        parser.error(problem)
    if options.again is not None:
        violation = see_again(options.again)
        print(violation or "no violation any more")
        return bool(violation)
    return torture(seeds_of(parser, options), options)


def torture(seeds: range, options: argparse.Namespace) -> int:
    """Many torments, up to the first violation, or with all of them shown."""
    print(f"seeds {seeds[0]} to {seeds[-1]}", flush=True)
    keep = Path(tempfile.mkdtemp(prefix="torture-"))
    counts: Counter[str] = Counter()
    begun_s = time.monotonic()
    violations = 0
    for seed in seeds:
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
    run(main)
