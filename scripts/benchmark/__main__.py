"""The program behind scripts/bench; see its head for what it does."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmark import backlog, bodies, curves, environment, fronts, limits, report, servers, tails
from scripts.benchmark.load import Client, LoadError
from scripts.benchmark.rows import ROWS, Row, Scale, journals

RESULTS = servers.ROOT / "build" / "bench" / "results.json"
QUICK = Scale(seconds=0.4, jobs=100_000, things=2_000)
QUICK_RUNS = 2
RUNS = 5


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures geventstalk beside beanstalkd.")
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument("row", nargs="*", help=f"rows of the table to measure (default: all): {names}")
    parser.add_argument(
        "--quick", action="store_true", help="two minutes: short runs, a tenth of the jobs; a glance only"
    )
    parser.add_argument("--runs", type=int, metavar="N", help=f"runs of each server (default {RUNS})")
    parser.add_argument("--seconds", type=float, metavar="S", help="of one run (default 3)")
    parser.add_argument("--builds", default="beanstalkd,pure,compiled", help="servers to measure, with commas")
    parser.add_argument("--table", action="store_true", help="the table (the default, when no other part is named)")
    parser.add_argument("--curves", action="store_true", help="cost per command against the number of jobs, tubes, ...")
    parser.add_argument("--tails", action="store_true", help="the longest request beside large work")
    parser.add_argument("--fronts", action="store_true", help="front-end processes: processor time and rates")
    parser.add_argument("--backlog", action="store_true", help="bodies beyond --max-memory; what a backlog leaves")
    parser.add_argument("--bodies", action="store_true", help="bodies of 64 bytes to 1 MB under each policy of fsync")
    parser.add_argument("--limits", action="store_true", help="how much of everything a machine with 4 GB carries")
    parser.add_argument("--cluster", action="store_true", help="PostgreSQL with a replica beside SQLite, and takeovers")
    parser.add_argument("--all", action="store_true", help="all parts but the cluster")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every single run in this file")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="measure nothing, take such a file")
    parser.add_argument("--write", action="store_true", help="put tables and pictures into the pages of docs/")
    options = parser.parse_args(argv)
    unknown = set(options.row) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))} (there are: {names})")
    if options.all:
        options.table = options.curves = options.tails = options.limits = options.fronts = options.backlog = True
        options.bodies = True
    elif options.row or not any(getattr(options, part) for part in _OTHER_PARTS):
        options.table = True
    return options


_OTHER_PARTS = ("curves", "tails", "limits", "fronts", "backlog", "bodies", "cluster")


def builds_for(wanted: Sequence[str]) -> list[servers.Build]:
    """The servers to measure, of those that this machine can start."""
    found: list[servers.Build | None] = []
    made = environment.make() if "compiled" in wanted else None
    if "beanstalkd" in wanted:
        found.append(servers.beanstalkd())
        if found[-1] is None:
            print("beanstalkd is not installed: no ratios", file=sys.stderr)
    if "pure" in wanted:
        pure = servers.pure(made.command[0] if made else sys.executable)  # both by the same interpreter
        if servers.is_compiled(pure):
            raise LoadError("this tree holds compiled modules; it is to be measured as pure Python")
        found.append(pure)
    if "compiled" in wanted:
        found.append(made)
    return [build for build in found if build is not None]


def version_of(build: servers.Build) -> str:
    """Returns what a server says of itself."""
    with servers.serving(build) as server, Client(server.port) as client:
        lines = client.text(b"stats\r\n").decode().splitlines()
    words = [line.partition(": ")[2].strip('"') for line in lines if line.startswith("version: ")]
    return f"{build.name} {words[0] if words else '?'}"


def measure_table(
    rows: Sequence[Row], builds: Sequence[servers.Build], runs: int, scale: Scale, core: int
) -> dict[str, dict[str, list[list[float]]]]:
    """Every row with every server, run by run in turn. A run that fails is told and left out of its row."""
    table: dict[str, dict[str, list[list[float]]]] = {}
    try:
        for row in rows:
            found: dict[str, list[list[float]]] = {build.name: [] for build in builds}
            for run in range(runs):
                for build in builds if run % 2 == 0 else reversed(builds):
                    try:
                        sample = row.measure(build, row, scale, core)
                    except (LoadError, OSError) as error:
                        print(f"{row.name}: a run of {build.name} is lost: {error}", file=sys.stderr, flush=True)
                        continue
                    found[build.name].append([sample.value, sample.server_busy, sample.load_busy, sample.server_user])
            table[row.name] = found
            print(report.line(row, found), flush=True)
    finally:
        journals.remove()
    return table


def measure(options: argparse.Namespace) -> report.Results:
    """Measures the parts that were asked for; for the page, what an earlier run found of the others is kept."""
    builds = builds_for([name.strip() for name in options.builds.split(",")])
    standard = QUICK if options.quick else Scale()
    scale = Scale(options.seconds or standard.seconds, standard.jobs, standard.things)
    runs = options.runs or (QUICK_RUNS if options.quick else RUNS)
    server_core, load_core = servers.pin_load()
    if server_core == load_core:
        print("there is only one core to run on: server and load take it from each other", file=sys.stderr)
    results = report.load_results(RESULTS) if options.write else {}
    results["machine"] = servers.machine()
    results["versions"] = ", ".join(version_of(build) for build in builds)
    results["taken"] = time.strftime("%Y-%m-%d", time.gmtime())
    print(f"{results['machine']}; {results['versions']}", flush=True)
    if options.table:
        rows = [row for row in ROWS if not options.row or row.name in options.row]
        results |= {"runs": runs, "seconds": scale.seconds, "jobs": scale.jobs, "things": scale.things}
        others = results.get("rows", {}) if options.row else {}
        results["rows"] = others | measure_table(rows, builds, runs, scale, server_core)
        keep(results, options)
    ours = [build for build in builds if build.name != report.REFERENCE]
    if options.fronts and ours:
        results["fronts"] = fronts.measure(builds, scale, server_core, load_core, runs)
        keep(results, options)
    if options.backlog:
        results["backlog"] = backlog.measure(builds, scale, server_core, runs)
        keep(results, options)
    if options.bodies:
        results["bodies"] = bodies.measure(builds, scale, server_core, runs)
        keep(results, options)
    if options.curves:
        results["curves"] = curves.measure(builds, scale, server_core)
        keep(results, options)
    if options.tails:
        results["tails"] = tails.measure(builds, scale, server_core)
        keep(results, options)
    if options.limits and ours:
        results["limits"] = limits.measure(ours[-1], scale, server_core)
        results["limits_build"] = ours[-1].name
    if options.cluster:
        from scripts.benchmark import cluster  # it needs what the tests need

        results["runs"] = runs
        results["cluster"] = cluster.measure(ours, scale, server_core, runs)
    return results


def keep(results: report.Results, options: argparse.Namespace) -> None:
    """Writes down what was measured, also in the middle: what fails later must not cost what took so long."""
    for path in (options.json, RESULTS if options.write else None):
        if path is not None and path != options.source:
            report.save_results(results, path)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        results = report.load_results(options.source) if options.source else measure(options)
    except (LoadError, OSError) as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    lost = {name: runs for name, runs in results.get("rows", {}).items() if options.table and not all(runs.values())}
    for key in report.PARTS:
        if results.get(key) and (options.source or getattr(options, "table" if key == "rows" else key)):
            print("\n" + "\n".join(report.PARTS[key][1](results)))
    keep(results, options)
    if options.write:
        report.write_page(results)
        charted = any(results.get(key) for key in report.PARTS if key not in report.PAGES)
        if charted and not report.draw(RESULTS, report.PAGE.parent, environment.PYTHON):
            print("scripts/bench: the pictures were not drawn", file=sys.stderr)
            return 1
    if lost:
        print(f"scripts/bench: not everything was measured: {', '.join(lost)}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
