"""The pictures of a results file: python -m scripts.benchmark.charts RESULTS DIRECTORY

matplotlib is not among what geventstalk or its tests need, so this runs in the benchmark's own environment.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from scripts.benchmark.report import OURS, REFERENCE, Results, load_results, ratio
from scripts.benchmark.rows import ROWS, Scale

COLOURS = {REFERENCE: "#7f7f7f", "pure": "#1f77b4", "compiled": "#d62728"}


def _pyplot() -> Any:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    # The same numbers give the same file; text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "geventstalk", "svg.fonttype": "none", "font.size": 9})
    return importlib.import_module("matplotlib.pyplot")


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def draw_table(results: Results, path: Path) -> None:
    """Each row as bars: how many times as good as beanstalkd, with a tick where the target is."""
    plt = _pyplot()
    rows = [row for row in ROWS if row.name in results["rows"]]
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.2))
    height = 0.38
    for position, row in enumerate(rows):
        for offset, build in zip((0.5, -0.5), reversed(OURS), strict=True):
            value = ratio(row, results["rows"][row.name], build)
            if value is None:
                continue
            target = row.target(build)
            good, wanted = (1 / value, 1 / target) if row.smaller else (value, target)
            y = -position + offset * height
            axes.barh(y, good - 1, height, left=1, color=COLOURS[build], label=build if position == 0 else None)
            axes.plot([wanted, wanted], [y - height / 2, y + height / 2], color="black", linewidth=1.5)
    axes.set_xscale("log")
    ticks = [0.5, 1, 2, 5, 10, 20, 50]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    scale = Scale(results["seconds"], results["jobs"], results["things"])
    axes.set_yticks([-position for position in range(len(rows))], [row.said(scale).replace("`", "") for row in rows])
    axes.axvline(1, color=COLOURS[REFERENCE])
    axes.set_xlabel("times as good as beanstalkd (right of 1 is better); black: what is aimed at")
    axes.legend(loc="lower right")
    _save(figure, path)
    plt.close(figure)


def draw_curves(results: Results, path: Path) -> None:
    """Microseconds a command against the number of things, a small picture for each."""
    plt = _pyplot()
    curves = results["curves"]
    across = 2
    down = (len(curves) + across - 1) // across
    figure, grid = plt.subplots(down, across, figsize=(9, 2.7 * down), squeeze=False)
    for axes, curve in zip(grid.flat, curves, strict=False):
        for name in (REFERENCE, *OURS):
            if name in curve["builds"]:
                axes.plot(
                    curve["sizes"], curve["builds"][name], marker="o", markersize=3, color=COLOURS[name], label=name
                )
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_title(curve["title"])
        axes.set_ylabel("µs a command")
    for axes in list(grid.flat)[len(curves) :]:
        axes.axis("off")
    (list(grid.flat)[-1] if len(curves) % across else grid.flat[0]).legend(
        *grid.flat[0].get_legend_handles_labels(), loc="center"
    )
    _save(figure, path)
    plt.close(figure)


def main() -> int:
    results = load_results(Path(sys.argv[1]))
    directory = Path(sys.argv[2])
    if results.get("rows"):
        draw_table(results, directory / "performance-table.svg")
    if results.get("curves"):
        draw_curves(results, directory / "performance-curves.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
