"""Replays one seed with everything that happens in it, or lives many lives until one fails. Run as scripts/simulate."""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import NoReturn

from tests.support.simulation.simulation import Outcome, simulate

SHOW_EVERY_S = 5.0


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 when every life was sound, 1 when one was not."""
    parser = Parser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="the seed of one life, shown step by step")
    parser.add_argument("--seeds", type=int, metavar="N", help="live N lives, one seed after the other")
    parser.add_argument("--first", type=int, metavar="S", help="the first of those seeds (default: drawn)")
    options = parser.parse_args(arguments)
    if (options.seed is None) == (options.seeds is None):
        parser.error("give one seed, or --seeds N")
    if options.seeds is None and options.first is not None:
        parser.error("--first belongs to --seeds")
    if options.seeds is not None and options.seeds < 1:
        parser.error("--seeds needs a number of lives")
    if options.seed is not None:
        return replay(options.seed)
    first = random.SystemRandom().randrange(2**32) if options.first is None else options.first
    return search(first, options.seeds)


def replay(seed: int) -> int:
    """One life, line by line: step, seconds since the beginning, what happened."""
    outcome = simulate(seed, show=print)
    print(summary(outcome))
    return outcome.failure is not None


def search(first: int, seeds: int) -> int:
    """Many lives, up to the first that fails."""
    print(f"seeds {first} to {first + seeds - 1}", flush=True)
    begun_s = shown_s = time.monotonic()
    for count, seed in enumerate(range(first, first + seeds), 1):
        outcome = simulate(seed)
        if outcome.failure is not None:
            print(*outcome.trace, summary(outcome), f"replay with: scripts/simulate {seed}", sep="\n")
            return 1
        now_s = time.monotonic()
        if now_s - shown_s > SHOW_EVERY_S or count == seeds:
            shown_s = now_s
            print(f"{count} seeds, {count / (now_s - begun_s):.1f} seeds/s", flush=True)
    print(f"{seeds} lives were sound")
    return 0


def summary(outcome: Outcome) -> str:
    """A life in one line."""
    what = "sound" if outcome.failure is None else f"VIOLATION: {outcome.failure}"
    numbers = f"{outcome.steps} steps, {outcome.replies} replies, {outcome.restarts} restarts"
    return f"seed {outcome.scenario.seed}: {numbers}, digest {outcome.digest[:12]}: {what}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
