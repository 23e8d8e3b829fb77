"""Results of benchmarks: a JSON line, an entry of `figures.json`, a row of docs/figures.md, and six rows of the README.

A figure is the median of its repetitions with their lowest and highest value. Each carries its command, its conditions
and its machine. Entries of benchmarks that did not run stay as they are. This module does not measure.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pnode.training import kernels

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "figures.json"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "figures.md"

#: Packages whose version changes the figures.
PACKAGES = ("torch", "numpy", "uvloop", "aiohttp", "kademlia")

#: These have so many figures that docs/figures.md shows only those with an aim. `figures.json` has them all, and
#: docs/performance.md those of the exchange.
AIMS_ALONE = ("kernels", "peers", "simulator", "overlay_large", "wan", "time_to_loss")

_AIM = re.compile(r"(≤|≥) (-?[\d.]+)")
_MARKED = re.compile(r"(<!-- figures: begin[^\n]*-->\n).*?(<!-- figures: end -->)", re.DOTALL)


class NotMeasured(Exception):
    """A process did not reach the state that a benchmark needs; the text names it, with its last output."""


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity as measured: a value per repetition. `aim` is "≤ x", "≥ x" or empty; `details` go into the JSON
    line alone."""

    name: str
    unit: str
    values: Sequence[float]
    aim: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All a benchmark found, and under which conditions, in a sentence."""

    benchmark: str
    conditions: str
    series: Sequence[Series]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `figures.json`. `spread` is the lowest and the highest repetition."""

    benchmark: str
    name: str
    unit: str
    median: float
    spread: tuple[float, float]
    repetitions: int
    aim: str
    command: str
    conditions: str
    machine: str

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the aim; None without one."""
        match = _AIM.fullmatch(self.aim)
        if match is None:
            return None
        limit = float(match[2])
        return self.median <= limit if match[1] == "≤" else self.median >= limit


class Headline(NamedTuple):
    """A figure that the README shows; `baseline` is what it is compared with."""

    benchmark: str
    name: str
    shown: str
    baseline: str

    @property
    def key(self) -> tuple[str, str]:
        return self.benchmark, self.name


HEADLINES = (
    Headline(
        "peers",
        "speed of p2pnode float32, plain over hivemind none, 25 M among 4",
        "speed of an exchange of 25 M parameters among four, over hivemind's",
        "hivemind 1.1.12, float32, same run",
    ),
    Headline(
        "peers",
        "p2pnode float32, plain beside gloo, 25 M among 4",
        "the same, over an all-reduce",
        "gloo, a fixed group without failures, same run",
    ),
    Headline("start", "start of the process to first step done", "start of a daemon to its first step", "5 s, the aim"),
    Headline(
        "time_to_loss",
        "time to torchft's loss, over torchft's time, 5 Mbit/s, 30 ms one way",
        "time until four nodes behind 5 Mbit/s lines have torchft's loss, over torchft's",
        "torchft 0.2.0, streaming DiLoCo, same lines",
    ),
    Headline(
        "process_faults",
        "faults: longest time of a survivor without a step",
        "longest pause of a node while others crash, stop and restart",
        "10 s, the detection bound",
    ),
    Headline(
        "partition",
        "partition 3 | 3: steps acknowledged on a side that are missing or doubled",
        "acknowledged steps lost or doubled by a network partition",
        "0, the promise",
    ),
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`figures.json`."""

    schema: int
    figures: list[Figure]


def machine() -> dict[str, Any]:
    """Cores this process may use, platform and Python."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of this program and the packages that matter; "none" where one is not installed."""
    found = {}
    for package in ("p2pnode", *PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    found["arithmetic"] = kernels.name()
    return found


def figures_of(outcome: Outcome, command: str) -> list[Figure]:
    """The entries of one benchmark. Raises `ValueError` for an aim that cannot be checked, and for one name twice."""
    here = machine()
    packages = ", ".join(f"{name} {number}" for name, number in versions().items() if name != "p2pnode")
    names = [series.name for series in outcome.series]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{outcome.benchmark} has two figures named {', '.join(twice)}")
    for series in outcome.series:
        if series.aim and not _AIM.fullmatch(series.aim):
            raise ValueError(f'the aim "{series.aim}" of {series.name} is not of the form "≤ 1" or "≥ 1"')
    return [
        Figure(
            benchmark=outcome.benchmark,
            name=series.name,
            unit=series.unit,
            median=_rounded(statistics.median(series.values)),
            spread=(_rounded(min(series.values)), _rounded(max(series.values))),
            repetitions=len(series.values),
            aim=series.aim,
            command=command,
            conditions=outcome.conditions,
            machine=f"{here['cores']} cores, {here['platform']}, Python {here['python']}, {packages}",
        )
        for series in outcome.series
    ]


def json_line(figure: Figure, series: Series) -> str:
    """One figure with all that was measured, on one line."""
    entry: dict[str, Any] = msgspec.to_builtins(figure)
    entry |= {
        "met": figure.met,
        "values": [_rounded(value) for value in series.values],
        "machine": machine(),
        "versions": versions(),
        "details": series.details,
    }
    return msgspec.json.encode(entry).decode()


def merged(known: Sequence[Figure], fresh: Sequence[Figure]) -> list[Figure]:
    """`known` with what was measured anew: figures of the same benchmark and command, or name, give way.

    The fresh ones of a benchmark come after what stays of it, and those of a new benchmark last. Pure.
    """
    renewed = {(figure.benchmark, key) for figure in fresh for key in (figure.command, figure.name)}
    kept = [old for old in known if not renewed & {(old.benchmark, old.command), (old.benchmark, old.name)}]
    places = dict.fromkeys(figure.benchmark for figure in [*known, *fresh])
    return [figure for name in places for figure in [*kept, *fresh] if figure.benchmark == name]


def table(figures: Sequence[Figure]) -> str:
    """The part of docs/figures.md between the markers, ending in a newline; empty without figures."""
    if not figures:
        return ""
    lines = ["| figure | median | lowest to highest | aim | command |", "|---|---|---|---|---|"]
    for figure in figures:
        if figure.benchmark in AIMS_ALONE and not figure.aim:
            continue
        low, high = (_number(value) for value in figure.spread)
        aim = figure.aim + (" **missed**" if figure.met is False else "")
        name = figure.name.replace("|", "\\|")  # a bar would end the cell
        lines.append(
            f"| {name} | {_median(figure)} | {low} to {high}, {figure.repetitions} times | {aim} | `{figure.command}` |"
        )
    conditions = dict.fromkeys(f"* `{figure.benchmark}`: {figure.conditions}" for figure in figures)
    machines = dict.fromkeys(figure.machine for figure in figures)
    return "\n".join([*lines, "", *conditions, "", *(f"Machine: {text}." for text in machines), ""])


def headlines(figures: Sequence[Figure]) -> str:
    """The part of the README between the markers: a row per headline that was measured; empty without figures."""
    by_key = {(figure.benchmark, figure.name): figure for figure in figures}
    found = [(headline, by_key[headline.key]) for headline in HEADLINES if headline.key in by_key]
    if not found:
        return ""
    lines = ["| figure | measured | baseline | command |", "|---|---|---|---|"]
    for headline, figure in found:
        lines.append(
            f"| {headline.shown} | {_median(figure)} | {headline.baseline} | `make bench ARGS={figure.benchmark}` |"
        )
    return "\n".join([*lines, ""])


def renewed(page: str, content: str, name: str) -> str:
    """The page with the content between its markers. `name` is the page's, for the message of the `ValueError` that is
    raised where the markers are missing."""
    text, count = _MARKED.subn(lambda match: match[1] + content + match[2], page)
    if count != 1:
        raise ValueError(f"{name} has no lines <!-- figures: begin … --> and <!-- figures: end -->")
    return text


def load(path: Path = FIGURES) -> list[Figure]:
    """The committed figures; none where there is no file."""
    if not path.exists():
        return []
    return msgspec.json.decode(path.read_bytes(), type=Figures).figures


def write(figures: Sequence[Figure], path: Path = FIGURES, page: Path = PAGE, readme: Path = README) -> None:
    """Write `figures.json`, the table of docs/figures.md and the headlines of the README."""
    texts = {
        page: renewed(page.read_text(encoding="utf-8"), table(figures), page.name),
        readme: renewed(readme.read_text(encoding="utf-8"), headlines(figures), readme.name),
    }
    content = msgspec.json.format(msgspec.json.encode(Figures(schema=1, figures=list(figures))), indent=1)
    path.write_bytes(content + b"\n")
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise in a committed file."""
    return float(f"{value:.4g}")


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _median(figure: Figure) -> str:
    """With a digit more where a missed aim would look reached: 1.497 is not "1.5, ≥ 1.5 missed"."""
    shown = _number(figure.median)
    if figure.met is False and msgspec.structs.replace(figure, median=float(shown)).met:
        shown = f"{figure.median:.4g}"
    return f"{shown} {figure.unit}".strip()
