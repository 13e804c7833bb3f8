"""Takeovers of mixed causes: what was lost, what was invented, and how long no client was served.

python -m tests.support.cluster --rounds 1000 --seed S

Both servers of PostgreSQL have its default settings. Only the list of replicas that commits wait for is set.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from scripts.benchmark import report
from tests.support.cluster import net
from tests.support.cluster.campaign import Campaign, markdown
from tests.support.cluster.faults import BY_NAME
from tests.support.cluster.nodes import Cluster
from tests.support.postgres import have_psycopg, programs
from tests.support.process import ROOT

PAGE = ROOT / "docs" / "cluster.md"
TOGETHER = 20
"""Rounds under the load of one crew, whose history is judged as a whole."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.cluster", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, metavar="S", help="repeats the order of causes (default: drawn)")
    parser.add_argument("--cause", action="append", metavar="NAME", help=f"only these: {'; '.join(BY_NAME)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every gap, in ms, in this file")
    parser.add_argument("--write", action="store_true", help="put the table into docs/cluster.md")
    options = parser.parse_args(argv)
    unknown = set(options.cause or []) - set(BY_NAME)
    if unknown:
        parser.error(f"no such cause: {', '.join(sorted(unknown))}")
    if programs() is None or not have_psycopg():
        parser.exit(1, "PostgreSQL or psycopg is not installed (Debian: apt-get install postgresql)\n")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    problem = net.problem()
    print(f"--seed {seed}{f'; no cuts: {problem}' if problem else ''}", flush=True)
    begun = time.monotonic()
    with Cluster(cuttable=not problem, plain=True) as cluster:
        campaign = Campaign(cluster, seed)
        causes = campaign.order(options.rounds)
        if options.cause:
            causes = [BY_NAME[name] for name in options.cause] * options.rounds
            causes = causes[: options.rounds]
        try:
            for at in range(0, len(causes), TOGETHER):
                verdict = campaign.run(causes[at : at + TOGETHER])
                done = min(at + TOGETHER, len(causes))
                print(f"{done} rounds, {time.monotonic() - begun:.0f} s: {verdict}", flush=True)
                if not verdict:
                    print(f"logs: {cluster.keep()}")
                    break
        except BaseException:
            print(f"logs: {cluster.keep()}")
            raise
        finally:
            print(campaign.table(), flush=True)
            found = {name: [ns / 1e6 for ns in values] for name, values in campaign.gaps.items()}
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
            if options.write and campaign.verdict:
                PAGE.write_text(report.fill_page(PAGE.read_text(), "gaps", markdown(found)))
    print(campaign.verdict)
    return 0 if campaign.verdict else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
