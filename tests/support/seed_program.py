"""The command line of programs that try seed after seed: one seed, or many from a first one on."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import NoReturn

STOPPED = 130
"""The exit code of a program that was stopped."""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def seed_parser(prog: str, description: str | None, *, one: str, many: str) -> Parser:
    """A parser for SEED, --seeds and --first. `one` and `many` say what is done with a seed, and with N of them."""
    parser = Parser(prog=prog, description=description)
    parser.add_argument("seed", type=int, nargs="?", help=one)
    parser.add_argument("--seeds", type=int, metavar="N", help=many)
    parser.add_argument("--first", type=int, metavar="S", help="the first of those seeds (default: drawn)")
    return parser


def seeds_of(parser: Parser, options: argparse.Namespace) -> range:
    """The seeds that the arguments name. Ends the program when they name none."""
    if (options.seed is None) == (options.seeds is None):
        parser.error("give one seed, or --seeds N")
    if options.seed is not None:
        if options.first is not None:
            parser.error("--first belongs to --seeds")
        return range(options.seed, options.seed + 1)
    if options.seeds < 1:
        parser.error("--seeds needs a number of seeds")
    first = random.SystemRandom().randrange(2**32) if options.first is None else options.first
    return range(first, first + options.seeds)


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Ends the process with the exit code of `main`. A stop of the program shows no traceback."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(STOPPED)
