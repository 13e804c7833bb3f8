"""Replays one seed of a cluster with everything that happens, or lives many lives until one fails."""

from __future__ import annotations

import time

from tests.support.seed_program import run, seed_parser, seeds_of
from tests.support.simulation.cluster.life import Outcome, Parts, live
from tests.support.simulation.cluster.whole import WholeProcess

NAME = "python -m tests.support.simulation.cluster"
SHOW_EVERY_S = 5.0


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 when every life was sound, 1 when one was not."""
    parser = seed_parser(
        NAME, __doc__, one="the seed of one life, shown line by line", many="live N lives, one seed after the other"
    )
    parser.add_argument("--whole", action="store_true", help="with the real turn, store, engine and sessions")
    options = parser.parse_args(arguments)
    parts = Parts(process=WholeProcess) if options.whole else Parts()
    seeds = seeds_of(parser, options)
    if options.seed is not None:
        outcome = live(options.seed, parts, show=print)
        print(summary(outcome))
        return outcome.failure is not None
    print(f"seeds {seeds[0]} to {seeds[-1]}", flush=True)
    begun_s = shown_s = time.monotonic()
    replies = takeovers = 0
    for count, seed in enumerate(seeds, 1):
        outcome = live(seed, parts)
        replies += outcome.replies
        takeovers += outcome.takeovers
        if outcome.failure is not None:
            print(
                *outcome.trace[-60:],
                summary(outcome),
                f"replay with: {NAME}{' --whole' * options.whole} {seed}",
                sep="\n",
            )
            return 1
        now_s = time.monotonic()
        if now_s - shown_s > SHOW_EVERY_S or count == len(seeds):
            shown_s = now_s
            rate = count / (now_s - begun_s)
            print(f"{count} seeds, {rate:.1f} seeds/s, {takeovers} takeovers, {replies} replies", flush=True)
    print(f"{len(seeds)} lives were sound")
    return 0


def summary(outcome: Outcome) -> str:
    """A life in one line."""
    what = "sound" if outcome.failure is None else f"VIOLATION: {outcome.failure}"
    numbers = f"{outcome.events} events, {outcome.takeovers} takeovers, {outcome.replies} replies"
    return f"seed {outcome.scenario.seed}: {numbers}, digest {outcome.digest[:12]}: {what}"


if __name__ == "__main__":
    run(main)
