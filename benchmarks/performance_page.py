"""The generated part of `docs/performance.md`: tables and plots from the JSON lines of the benchmarks.

`python -m benchmarks.performance_page` reads `benchmarks/performance.jsonl`, which the runner renews, and writes the
page between its markers and the plots under `docs/figures/`. What people write around it stays.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT

LINES = ROOT / "benchmarks" / "performance.jsonl"
PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "figures"
#: What the page shows, in this order. docs/figures.md shows only those of their figures that have an aim.
SHOWN = ("peers", "wan", "kernels", "async_rule")


#: Colours of what is compared.
OURS, OTHERS = "#4878a8", "#a8a8a8"

_GROUP = re.compile(r"([\d.]+) M among (\d+)")
_MARKED = re.compile(r"(<!-- lines: begin[^\n]*-->\n).*?(<!-- lines: end -->)", re.DOTALL)

Line = dict[str, Any]


def load(path: Path = LINES) -> list[Line]:
    """The lines kept; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def merged(known: Iterable[Line], fresh: Sequence[Line]) -> list[Line]:
    """`known` with the lines of the same benchmark and name replaced; new ones come last. Pure."""
    by_name = {(line["benchmark"], line["name"]): line for line in [*known, *fresh]}
    return list(by_name.values())


def keep(fresh: Sequence[str], path: Path = LINES) -> None:
    """Put the runner's lines of the benchmarks shown here into the file."""
    shown = [line for line in map(json.loads, fresh) if line["benchmark"] in SHOWN]
    if shown:
        lines = merged(load(path), shown)
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def tables(lines: Sequence[Line], plots: Sequence[str]) -> str:
    """The generated part, ending in a newline. Pure."""
    text: list[str] = []
    for benchmark in SHOWN:
        mine = [line for line in lines if line["benchmark"] == benchmark]
        if not mine:
            continue
        text += [f"### {benchmark}", "", *(f"{conditions}." for conditions in dict.fromkeys(_conditions(mine))), ""]
        text += [f"![{benchmark}](figures/{plot})\n" for plot in plots if plot.startswith(f"performance_{benchmark}")]
        text += ["| figure | median | lowest to highest | aim |", "|---|---|---|---|"]
        for line in mine:
            low, high = (f"{value:.3g}" for value in line["spread"])
            aim = line["aim"] + (" **missed**" if line["met"] is False else "")
            median = f"{line['median']:.3g} {line['unit']}".strip()
            text.append(f"| {line['name']} | {median} | {low} to {high}, {line['repetitions']} times | {aim} |")
        commands = dict.fromkeys(line["command"] for line in mine)
        machines = dict.fromkeys(_machine(line) for line in mine)
        text += ["", *(f"`{command}`" for command in commands), "", *machines, ""]
    return "\n".join(text) + "\n"


def _conditions(lines: Iterable[Line]) -> list[str]:
    return [line["conditions"][0].upper() + line["conditions"][1:] for line in lines]


def _machine(line: Line) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in line["versions"].items())
    machine = line["machine"]
    return f"Machine: {machine['cores']} cores, {machine['platform']}, Python {machine['python']}; {versions}."


def draw(lines: Sequence[Line], folder: Path = FIGURES) -> list[str]:
    """Draw what can be drawn; returns the names of the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawn = []
    speeds = [line for line in lines if line["benchmark"] == "peers" and line["unit"] == "MB/s per peer"]
    speeds.sort(key=lambda line: _group_of(line["name"]))
    if speeds:
        figure, axes = pyplot.subplots(figsize=(8, 0.4 + 0.28 * len(speeds)))
        medians = [line["median"] for line in speeds]
        low_high = [[abs(line["spread"][end] - line["median"]) for line in speeds] for end in (0, 1)]
        colours = [OURS if line["name"].startswith("p2pnode") else OTHERS for line in speeds]
        axes.barh([line["name"] for line in speeds], medians, xerr=low_high, color=colours)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel("MB of float32 parameters per second and peer (median, lowest and highest)")
        drawn.append(_save(figure, folder / "performance_peers.png"))
    curves = {
        line["name"].removeprefix("loss of "): line["details"]["curves"]
        for line in lines
        if line["benchmark"] == "async_rule" and line["name"].startswith("loss of ") and "curves" in line["details"]
    }
    if curves:
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for name, runs in curves.items():
            points = min(len(run) for run in runs)
            at = [point[0] for point in runs[0][:points]]
            axes.plot(at, [statistics.median(run[point][1] for run in runs) for point in range(points)], label=name)
        axes.set_xlabel("steps")
        axes.set_ylabel("validation loss, nats per byte")
        axes.legend()
        drawn.append(_save(figure, folder / "performance_async_rule.png"))
    return drawn


def _group_of(name: str) -> tuple[float, int]:
    """Parameters in millions, and peers, of a figure's name: what is compared stands together."""
    found = _GROUP.search(name)
    return (float(found[1]), int(found[2])) if found is not None else (0.0, 0)


def _save(figure: Any, path: Path) -> str:
    figure.savefig(path, dpi=90, bbox_inches="tight", metadata={"Software": None})
    return path.name


def with_tables(page: str, generated: str) -> str:
    """The page with its generated part renewed. Raises `ValueError` where the markers are missing."""
    text, count = _MARKED.subn(lambda match: match[1] + generated + match[2], page)
    if count != 1:
        raise ValueError("docs/performance.md has no lines <!-- lines: begin … --> and <!-- lines: end -->")
    return text


def main() -> int:
    lines = load()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables(lines, draw(lines))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
