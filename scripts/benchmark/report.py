"""From measured numbers to text: the table, its verdicts, and the page that shows them.

Knows no servers. Invariant: every figure on the page comes out of one results file, which can be kept and drawn again.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmark.rows import BUSY, ROWS, Row, Scale
from scripts.benchmark.servers import REFERENCE, ROOT

PAGE = ROOT / "docs" / "performance.md"
OURS = ("pure", "compiled")

Results = dict[str, Any]
Runs = Sequence[Sequence[float]]  # of each run: value, server busy, load busy, server busy in user space


def median(runs: Runs, column: int = 0) -> float:
    return statistics.median(run[column] for run in runs)


def spread(runs: Runs) -> float:
    """Returns the spread of the runs as a share of their median: half of the way from the least to the greatest."""
    values = [run[0] for run in runs]
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


def figure(value: float) -> str:
    """Three to four digits that matter."""
    if value >= 1000:
        digits = 10 ** max(0, len(str(int(value))) - 4)
        return f"{round(value / digits) * digits:,}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(row: Row, runs: Mapping[str, Runs], build: str) -> float | None:
    """The median of a build over beanstalkd's; None when one of them was not measured."""
    if not runs.get(build) or not runs.get(REFERENCE):
        return None
    return median(runs[build]) / median(runs[REFERENCE])


def idle(runs: Runs) -> bool:
    """Returns whether the server was not what limited the figure."""
    return median(runs, 1) < BUSY


def _value_cell(row: Row, runs: Runs | None) -> str:
    if not runs:
        return "-"
    mark = " *" if idle(runs) and row.name != "memory" else ""
    return f"{figure(median(runs))} ±{spread(runs) * 100:.0f} %{mark}"


def _ratio_cell(row: Row, runs: Mapping[str, Runs], build: str) -> str:
    value = ratio(row, runs, build)
    if value is None:
        return "-"
    wanted = f"{'at most' if row.smaller else 'at least'} {row.target(build):g}"
    return f"**{value:.2f}** ({wanted}: {'met' if row.met(build, value) else 'missed'})"


def _busy_cell(runs: Mapping[str, Runs]) -> str:
    shown = [f"{median(runs[name], 1) * 100:.0f}" if runs.get(name) else "-" for name in (REFERENCE, *OURS)]
    load = [median(runs[name], 2) for name in (REFERENCE, *OURS) if runs.get(name)]
    return f"{' / '.join(shown)} (load {max(load) * 100:.0f})" if load else "-"


def cpu_us(row: Row, runs: Runs) -> float | None:
    """Microseconds of the server's processor time that a command takes, the least of the runs.

    None where the row counts no commands.
    """
    return _cheapest(runs)[0] if row.unit == "commands/s" else None


def _cheapest(runs: Runs) -> tuple[float, float | None]:
    """Microseconds a command of the run in which it took least, and how many of them in user space, if known."""
    run = min(runs, key=lambda run: run[1] / run[0])
    return run[1] * 1e6 / run[0], run[3] * 1e6 / run[0] if len(run) > 3 else None


def us(whole: float, user: float | None) -> str:
    """Microseconds; in brackets, of it in user space."""
    return figure(whole) + (f" ({user:.1f})" if user is not None else "")


def _cpu_cell(row: Row, runs: Mapping[str, Runs]) -> str:
    if row.unit != "commands/s":
        return "-"
    return " / ".join(us(*_cheapest(runs[name])) if runs.get(name) else "-" for name in (REFERENCE, *OURS))


def table(rows: Mapping[str, Mapping[str, Runs]], scale: Scale | None = None) -> list[str]:
    """The table of targets as Markdown, one line each, with the notes that belong to it."""
    lines = [
        "| workload | beanstalkd | pure | compiled | pure ÷ beanstalkd | compiled ÷ beanstalkd | busy, % of a core "
        "| server's processor time, µs a command (of it in user space) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes: dict[str, None] = {}
    for row in ROWS:
        runs = rows.get(row.name)
        if runs is None:
            continue
        values = [_value_cell(row, runs.get(name)) for name in (REFERENCE, *OURS)]
        ratios = [_ratio_cell(row, runs, name) for name in OURS]
        title = f"{row.said(scale or Scale())}, {row.unit}"
        lines.append(f"| {title} | {' | '.join(values + ratios)} | {_busy_cell(runs)} | {_cpu_cell(row, runs)} |")
        if row.name != "memory" and any(idle(each) for each in runs.values() if each):
            notes[row.why_idle or "the server waited for something else: do not trust this figure"] = None
    if notes:
        lines += ["", f"\\* The server was busy for less than {BUSY * 100:.0f} % of the time: {'; '.join(notes)}."]
    return lines


def line(row: Row, runs: Mapping[str, Runs]) -> str:
    """A row while the benchmark runs."""
    values = []
    for name in (REFERENCE, *OURS):
        if runs.get(name):
            mark = "*" if idle(runs[name]) else " "
            busy = f"busy {median(runs[name], 1) * 100:3.0f} %{mark}"
            each_us = cpu_us(row, runs[name])
            busy += f" {figure(each_us)} µs" if each_us is not None else ""
            values.append(f"{name} {figure(median(runs[name])):>8} ±{spread(runs[name]) * 100:2.0f} % {busy}")
    verdicts = []
    for build in OURS:
        value = ratio(row, runs, build)
        if value is not None:
            verdict = "met" if row.met(build, value) else f"MISSED ({row.target(build):g})"
            verdicts.append(f"{build} {value:.2f} {verdict}{_by_processor(row, runs, build)}")
    return f"{row.name:14} {'  '.join(values)}  {', '.join(verdicts)}"


def _by_processor(row: Row, runs: Mapping[str, Runs], build: str) -> str:
    """The ratio of commands a second of processor time, which a busy machine disturbs less."""
    if row.unit != "commands/s":
        return ""
    each = [median(runs[name]) / max(median(runs[name], 1), 0.01) for name in (build, REFERENCE)]
    return f" ({each[0] / each[1]:.2f} by processor time)"


def taken(results: Results) -> str:
    """Returns how the figures of the table were taken, in one sentence."""
    return (
        f"{results['machine']}; {results['versions']}; {results['runs']} runs of {results['seconds']:g} s each, "
        f"servers taking turns, medians with half the way from the least to the greatest run; {results['taken']}."
        + (" Only a glance: short runs of few." if results["jobs"] < Scale().jobs else "")
    )


def table_part(results: Results) -> list[str]:
    scale = Scale(results["seconds"], results["jobs"], results["things"])
    return [taken(results), "", *table(results["rows"], scale), "", "![Ratios to beanstalkd](performance-table.svg)"]


def curves_part(results: Results) -> list[str]:
    """The growth curves: pictures, and how much dearer the last point of each is than the least."""
    lines = [
        "| thing | from | to | "
        + " | ".join(f"{name}: cost at the end ÷ the least" for name in (REFERENCE, *OURS))
        + " |",
        "|---|---|---|---|---|---|",
    ]
    for curve in results["curves"]:
        cells = []
        for name in (REFERENCE, *OURS):
            points = curve["builds"].get(name)
            cells.append(f"{points[-1] / min(points):.2f}" if points else "-")
        lines.append(f"| {curve['title']} | {curve['sizes'][0]:,} | {curve['sizes'][-1]:,} | {' | '.join(cells)} |")
    return [*lines, "", "![Cost per command](performance-curves.svg)"]


def tails_part(results: Results) -> list[str]:
    """The tails: p99.9 and the worst request of a prober, in milliseconds; and without waiting for a processor."""
    names = [name for name in (REFERENCE, *OURS) if any(name in tail["builds"] for tail in results["tails"])]
    lines = [
        "| while | " + " | ".join(f"{name}: p99.9 / worst ms" for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for tail in results["tails"]:
        cells = []
        for name in names:
            found = tail["builds"].get(name)
            cells.append(_tail_cell(found) if found else "-")
        lines.append(f"| {tail['title']} | {' | '.join(cells)} |")
    return lines


def _cluster_cost(names: Sequence[str], rates: Sequence[Mapping[str, Any]]) -> list[str]:
    """The node's processor time a command; older files do not have it."""
    if not all("cpu_us" in rate for rate in rates):
        return []
    head = " | ".join(f"{name}: SQLite | {name}: PostgreSQL" for name in names)
    lines = ["", f"| processor time of the node alone, µs a command | {head} |", "|---|" + "---|---|" * len(names)]
    for rate in rates:
        cells = [figure(min(values)) for name in names for values in rate["cpu_us"][name].values()]
        lines.append(f"| {rate['title']} | {' | '.join(cells)} |")
    return lines


def _tail_cell(waits: Mapping[str, Any]) -> str:
    if "fault" in waits:
        return str(waits["fault"])
    whole = f"{waits['p999_ms']:.1f} / {waits['worst_ms']:.1f}"
    net = f"{waits['net_p999_ms']:.1f} / {waits['net_worst_ms']:.1f}"
    return whole if net == whole else f"{whole} ({net})"


def limits_part(results: Results) -> list[str]:
    """The limits: what things cost, how many fit, and how many were tried."""
    build = results["limits_build"]
    lines = [f"| thing, {build} build | what each costs | in 4 GB | tried here |", "|---|---|---|---|"]
    lines += [f"| {each['title']} | {each['cost']} | {each['fits']} | {each['tried']} |" for each in results["limits"]]
    return lines


def cluster_part(results: Results) -> list[str]:
    """PostgreSQL with a synchronous replica beside SQLite, and how long a takeover takes."""
    found = results["cluster"]
    names = [name for name in OURS if any(name in rate["values"] for rate in found["rates"])]
    head = " | ".join(f"{name}: SQLite | {name}: PostgreSQL | ratio" for name in names)
    lines = [f"{results['machine']}; {results['taken']}.", ""]
    lines += [f"| commands/s | {head} |", "|---|" + "---|---|---|" * len(names)]
    for rate in found["rates"]:
        cells = []
        for name in names:
            sqlite, postgres = (statistics.median(values) for values in rate["values"][name].values())
            cells.append(f"{figure(sqlite)} | {figure(postgres)} | **{postgres / sqlite:.2f}**")
        lines.append(f"| {rate['title']} | {' | '.join(cells)} |")
    lines += _cluster_cost(names, found["rates"])
    lines += [
        "",
        "| kill -9 of the active node until the other one acknowledges a put | median | worst |",
        "|---|---|---|",
    ]
    for each in found["takeovers"]:
        milliseconds = [second * 1000 for second in each["seconds"]]
        title = f"{each['build']}, {each['jobs']:,} jobs in the queue"
        lines.append(f"| {title} | {statistics.median(milliseconds):.0f} ms | {max(milliseconds):.0f} ms |")
    return lines


def fronts_part(results: Results) -> list[str]:
    """Returns what a command costs the server's process with a front-end process, and the front, beside none."""
    found = results["fronts"]
    lines = [
        f"{results['machine']}; {results['taken']}; {found['runs']} runs, servers taking turns: the least processor "
        f"time, median rates; the {found['build']} build; {found['cores']}.",
        "",
        f"| µs of processor time a command (of it in user space) | {REFERENCE} | alone | with a front | its front "
        f"| commands/s: {REFERENCE} | alone | with a front |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in found["rows"]:
        kinds = each["kinds"]
        cells = []
        for kind, at in (("reference", 1), ("alone", 1), ("front", 1), ("front", 3)):
            runs = kinds.get(kind)
            cells.append(us(*min((run[at], run[at + 1]) for run in runs)) if runs else "-")
        cells += [figure(median(kinds[kind])) if kinds.get(kind) else "-" for kind in ("reference", "alone", "front")]
        lines.append(f"| {each['title']} | {' | '.join(cells)} |")
    return lines


def backlog_part(results: Results) -> list[str]:
    """Bodies beyond --max-memory beside bodies in memory, and what a backlog leaves in memory that is gone."""
    found = results["backlog"]
    lines = [
        f"{results['machine']}; {results['taken']}. {found['title']}.",
        "",
        "| server | commands/s, bodies in memory | beyond the cap | ratio (at least 0.5) "
        "| µs a command, in memory | beyond the cap | resident MB, in memory | beyond the cap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, kinds in found["rates"].items():
        rates = [median(kinds[kind]) if kind in kinds else None for kind in ("memory", "cap")]
        cells = [figure(rate) if rate is not None else "-" for rate in rates]
        cells.append(f"**{rates[1] / rates[0]:.2f}**" if rates[0] and rates[1] else "-")
        for at in (1, 2):
            of = min if at == 1 else max
            cells += [
                figure(of(run[at] for run in kinds[kind])) if kind in kinds else "-" for kind in ("memory", "cap")
            ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"| resident MB; {found['drained_title']} | with the backlog | drained | a fresh server with those that stay |",
        "|---|---|---|---|",
    ]
    for name, sizes in found["drained"].items():
        lines.append(f"| {name} | {' | '.join(figure(size) for size in sizes)} |")
    return lines


def bodies_part(results: Results) -> list[str]:
    """Returns what a command with a body of some size costs under each policy."""
    found = results["bodies"]
    names = [name for name in (REFERENCE, *OURS) if any(row["builds"].get(name) for row in found["rows"])]
    heads = [f"{name}, commands/s | µs a command (of it in user space) | p99, ms" for name in names]
    lines = [
        f"{results['machine']}; {results['taken']}. put+reserve+delete, one command at a time, 50 connections where "
        f"the row says nothing else, 4 with 1 MB; {found['runs']} runs in turns: median rates, the least processor "
        f"time and 99th percentile. The device takes {found['device']:.0f} MB/s of one file that is synced at its end.",
        "",
        f"| body, policy | {' | '.join(heads)} |",
        "|---" * (1 + 3 * len(names)) + "|",
    ]
    for row in found["rows"]:
        cells = []
        for name in names:
            runs = row["builds"].get(name)
            cells += (
                [figure(median(runs)), us(*min((run[1], run[2]) for run in runs)), f"{min(run[3] for run in runs):.2f}"]
                if runs
                else ["-"] * 3
            )
        lines.append(f"| {row['title']} | {' | '.join(cells)} |")
    return lines


PARTS = {"rows": ("table", table_part), "curves": ("curves", curves_part), "tails": ("tails", tails_part)}
PARTS["fronts"] = ("fronts", fronts_part)
PARTS["backlog"] = ("backlog", backlog_part)
PARTS["bodies"] = ("bodies", bodies_part)
PARTS["limits"] = ("limits", limits_part)
PARTS["cluster"] = ("cluster", cluster_part)
PAGES = {"cluster": ROOT / "docs" / "cluster.md"}
"""Where a part stands that is not on the page of all others."""


def fill_page(text: str, name: str, lines: Sequence[str]) -> str:
    """A page with what stands between the two marks of a name replaced. Raises ValueError when they are missing."""
    pattern = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no marks for {name}")
    body = "\n".join(lines) + "\n"
    return pattern.sub(lambda found: found[1] + body + found[2], text)


def write_page(results: Results, page: Path = PAGE) -> None:
    """Puts every part that was measured into its page."""
    for key, (name, part) in PARTS.items():
        if results.get(key):
            where = PAGES.get(key, page)
            where.write_text(fill_page(where.read_text(encoding="utf-8"), name, part(results)), encoding="utf-8")


def draw(results: Path, directory: Path, python: Path) -> bool:
    """Draws the pictures of a results file, with an interpreter that has matplotlib. Returns whether that worked."""
    command: list[str | Path] = [python, "-m", "scripts.benchmark.charts", results, directory]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def load_results(path: Path) -> Results:
    """A results file; an empty one when there is none."""
    if not path.exists():
        return {}
    found: Results = json.loads(path.read_text(encoding="utf-8"))
    return found


def save_results(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
