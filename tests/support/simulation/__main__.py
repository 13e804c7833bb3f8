"""Replays one seed with everything that happens in it, or lives many lives until one fails. Run as scripts/simulate."""

from __future__ import annotations

import time

from tests.support.seed_program import run, seed_parser, seeds_of
from tests.support.simulation.simulation import Outcome, simulate

SHOW_EVERY_S = 5.0


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 when every life was sound, 1 when one was not."""
    parser = seed_parser(
        "scripts/simulate",
        __doc__,
        one="the seed of one life, shown step by step",
        many="live N lives, one seed after the other",
    )
    options = parser.parse_args(arguments)
    seeds = seeds_of(parser, options)
    return search(seeds) if options.seed is None else replay(options.seed)


def replay(seed: int) -> int:
    """One life, line by line: step, seconds since the beginning, what happened."""
    outcome = simulate(seed, show=print)
    print(summary(outcome))
    return outcome.failure is not None


def search(seeds: range) -> int:
    """Many lives, up to the first that fails."""
    print(f"seeds {seeds[0]} to {seeds[-1]}", flush=True)
    begun_s = shown_s = time.monotonic()
    for count, seed in enumerate(seeds, 1):
        outcome = simulate(seed)
        if outcome.failure is not None:
            print(*outcome.trace, summary(outcome), f"replay with: scripts/simulate {seed}", sep="\n")
            return 1
        now_s = time.monotonic()
        if now_s - shown_s > SHOW_EVERY_S or count == len(seeds):
            shown_s = now_s
            print(f"{count} seeds, {count / (now_s - begun_s):.1f} seeds/s", flush=True)
    print(f"{len(seeds)} lives were sound")
    return 0


def summary(outcome: Outcome) -> str:
    """A life in one line."""
    what = "sound" if outcome.failure is None else f"VIOLATION: {outcome.failure}"
    numbers = f"{outcome.steps} steps, {outcome.replies} replies, {outcome.restarts} restarts"
    return f"seed {outcome.scenario.seed}: {numbers}, digest {outcome.digest[:12]}: {what}"


if __name__ == "__main__":
    run(main)
