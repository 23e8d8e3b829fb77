"""`p2pnode simulate reproduce`: every figure as PNG and CSV beside the published values, and one table of verdicts.

What is run stands in `points`, `checks` and `studies`, what is expected in `published`. This module runs them, a
process per core, and writes. A figure that needs the images is left out, and said to be, without their folder.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from training.simulation.figures import published
from training.simulation.figures.checks import CHECKS
from training.simulation.figures.plots import Line, Panel, draw, step_panel
from training.simulation.figures.points import Verdict, judged, measure, plan_of, points, values_of
from training.simulation.figures.studies import SIX_WORKERS, StudyResult, run_sequence, run_study, studies
from training.simulation.model import bounds
from training.simulation.run import simulate

POINT_FIGURES = (
    "steps", "sample_size", "disciplines", "text_run", "straggler_share", "straggler_slowness",
    "straggler_share_1000", "scale", "doubling", "stored",
)  # fmt: skip
STUDY_FIGURES = ("accuracy", "stored_accuracy", "factorisation", "learning")
#: Left out without the files of MNIST.
NEED_IMAGES = ("accuracy", "stored_accuracy")
FIGURES = (*POINT_FIGURES, "inconsistency", "bounds", *STUDY_FIGURES)
#: Runs of Ninox whose sequences are drawn.
SEQUENCES = ("asp", "ssp(4)", "pbsp(5)", "pbsp(10)", "pssp(4,5)", "pssp(4,10)")

HOLDS = "holds"
#: Student's t for a two-sided 95 % interval, by the number of values.
T_95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 12: 2.201}

_LABELS = {
    "sample_size": "sample size β",
    "disciplines": "sample size β",
    "straggler_share": "slow nodes in percent",
    "straggler_share_1000": "slow nodes in percent",
    "stored": "slow steps in percent",
    "straggler_slowness": "factor of 5 % slow nodes",
    "scale": "nodes",
    "doubling": "nodes",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `within` is None where there is nothing to compare with."""

    figure: str
    what: str
    published: str
    ours: str
    tolerance: str
    within: bool | None


@dataclass(frozen=True, slots=True)
class CurveOrder:
    """What to make, where, and how. `say` is told what is going on, with the share done."""

    names: Sequence[str]
    folder: Path
    data_dir: Path | None
    processes: int
    say: Callable[[str, float], None]


def reproduce(order: CurveOrder) -> list[Row]:
    """Make the figures named. Raises `NoMatplotlib`, `BadData`, and `OSError` where a file cannot be written."""
    order.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    rows += _point_figures(order)
    if "inconsistency" in order.names:
        order.say("inconsistency", 0.0)
        rows += _inconsistency(order)
    if "bounds" in order.names:
        rows += _bounds(order)
    rows += _study_figures(order)
    _write_csv(
        order.folder / "table.csv",
        ("figure", "what", "published", "ours", "tolerance", "within"),
        [(row.figure, row.what, row.published, row.ours, row.tolerance, row.within) for row in rows],
    )
    return rows


# -- points -----------------------------------------------------------------------------------------------------------


def _point_figures(order: CurveOrder) -> list[Row]:
    names = [name for name in POINT_FIGURES if name in order.names]
    wanted = [point for point in points() if point.figure in names]
    if not wanted:
        return []

    def progress(done: int, total: int) -> None:
        order.say(f"{total} runs", done / total)

    verdicts = judged(wanted, measure(wanted, processes=order.processes, progress=progress))
    values = values_of(verdicts)
    rows = []
    for name in names:
        mine = [verdict for verdict in verdicts if verdict.point.figure == name]
        _write_points(order.folder / f"{name}.csv", mine)
        draw(_point_panels(name, mine), order.folder / f"{name}.png", name.replace("_", " "))
        rows += [_row(verdict) for verdict in mine]
        rows += [
            Row(name, check.text, "holds", "holds" if (right := check.holds(values)) else "fails", "order", right)
            for check in CHECKS
            if check.figure == name
        ]
    return rows


def _row(verdict: Verdict) -> Row:
    point = verdict.point
    low, high = point.published
    at = f" at {point.x:g}" if point.x else ""
    what = f"{point.series}{at}"
    if point.tolerance == 0.0:
        return Row(point.figure, what, "", f"{verdict.ours:.4g}", "", None)
    theirs = f"{low:g}" if low == high else f"{low:g}…{high:g}"
    if point.digitised is not None:
        theirs += f" (figure {point.digitised:g})"
    return Row(point.figure, what, theirs, f"{verdict.ours:.4g}", f"{100 * verdict.tolerance:.2g} %", verdict.within)


def _write_points(path: Path, verdicts: Sequence[Verdict]) -> None:
    head = ("series", "x", "quantity", "published_low", "published_high", "digitised", "ours", "sd_over_seeds",
            "seeds", "tolerance", "within")  # fmt: skip
    rows = []
    for verdict in verdicts:
        point = verdict.point
        compared = point.tolerance > 0.0
        low, high = point.published if compared else ("", "")
        rows.append(
            (point.series, point.x, point.quantity, low, high, "" if point.digitised is None else point.digitised,
             round(verdict.ours, 4), round(verdict.sd, 4), point.seeds, round(verdict.tolerance, 4),
             verdict.within if compared else "")
        )  # fmt: skip
    _write_csv(path, head, rows)


def _point_panels(name: str, verdicts: Sequence[Verdict]) -> list[Panel]:
    if name == "steps":
        return [_step_distributions()]
    if name == "text_run":
        return [_labelled(verdicts)]
    steps = [verdict for verdict in verdicts if verdict.point.quantity == "mean_steps"]
    log_x = name in ("sample_size", "disciplines", "doubling")
    panels = [_series(steps, name, "mean completed steps", log_x=log_x)]
    costs = [verdict for verdict in verdicts if verdict.point.quantity == "queries_per_step"]
    if costs:
        panels.append(_series(costs, name, "queries per step", log_x=log_x, log_y=True))
    if name == "straggler_share":
        panels.append(_relative(steps, name))
    return panels


def _series(verdicts: Sequence[Verdict], name: str, y_label: str, *, log_x: bool, log_y: bool = False) -> Panel:
    panel = Panel("lines: ours; crosses: published", _LABELS.get(name, ""), y_label, log_x=log_x, log_y=log_y)
    for series in dict.fromkeys(verdict.point.series for verdict in verdicts):
        mine = [v for v in verdicts if v.point.series == series and (v.point.x > 0 or not log_x)]
        x = [v.point.x for v in mine]
        panel.lines.append(Line(series, x, [v.ours for v in mine]))
        if mine and mine[0].point.tolerance > 0:
            middle = [sum(v.point.published) / 2 for v in mine]
            panel.lines.append(Line(f"_{series}", x, middle, marks=True, color=series))
    return panel


def _relative(verdicts: Sequence[Verdict], name: str) -> Panel:
    """As the source draws it: mean steps over those without stragglers."""
    panel = Panel("of the steps without stragglers", _LABELS[name], "share")
    for series in dict.fromkeys(verdict.point.series for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.point.series == series]
        panel.lines.append(Line(series, [v.point.x for v in mine], [v.ours / mine[0].ours for v in mine]))
    return panel


def _labelled(verdicts: Sequence[Verdict]) -> Panel:
    """Ours against the published, a point per value."""
    panel = Panel("each value of the table", "published mean steps", "ours")
    theirs = [sum(verdict.point.published) / 2 for verdict in verdicts]
    panel.lines.append(Line("values", theirs, [verdict.ours for verdict in verdicts], marks=True))
    panel.lines.append(Line("equal", [0, 100], [0, 100]))
    return panel


def _step_distributions() -> Panel:
    names = ("bsp", "ssp(5)", "pbsp(10)", "pssp(5,10)", "asp")
    panel = step_panel([(name, simulate(plan_of(name, 1000, 400))) for name in names])
    for name in names:
        digitised = published.STEPS[name][0]
        if digitised is not None:
            panel.lines.append(Line(f"_{name}", [digitised], [0.5], marks=True, color=name))
    return panel


# -- inconsistency and bounds -----------------------------------------------------------------------------------------


def _inconsistency(order: CurveOrder) -> list[Row]:
    runs = [run_sequence(name) for name in SEQUENCES]
    prefix = Panel("Sequence inconsistency", "length of the prefix", "elements per node")
    density = Panel("Progress inconsistency", "steps of the swarm between two passes, per node", "density")
    table: list[tuple[Any, ...]] = []
    for run in runs:
        stride = max(1, run.prefix.size // 500)
        lengths = np.arange(1, run.prefix.size + 1)[::stride]
        prefix.lines.append(Line(run.name, lengths.tolist(), run.prefix[::stride].tolist()))
        counts, edges = np.histogram(run.passes, bins=60, range=(0, 6), density=True)
        density.lines.append(Line(run.name, ((edges[1:] + edges[:-1]) / 2).tolist(), counts.tolist()))
        table += [(run.name, "prefix", int(length), round(float(value), 4))
                  for length, value in zip(lengths, run.prefix[::stride], strict=True)]  # fmt: skip
        for quantity, value in _pass_moments(run.passes).items():
            table.append((run.name, f"pass {quantity}", "", round(value, 4)))
    _write_csv(order.folder / "inconsistency.csv", ("barrier", "quantity", "length", "value"), table)
    draw([prefix, density], order.folder / "inconsistency.png", "P = 100, T = 100, event-driven")
    last = {run.name: float(run.prefix[-run.prefix.size // 5 :].mean()) for run in runs}
    spread = {run.name: float(run.passes.std()) for run in runs}
    rows = [
        Row("inconsistency", f"{name}: sequence, last fifth; spread of passes", "",
            f"{last[name]:.2f}; {spread[name]:.2f}", "", None)
        for name in SEQUENCES
    ]  # fmt: skip
    right = last["asp"] > last["pssp(4,5)"] > last["pssp(4,10)"] > last["pbsp(5)"] > last["pbsp(10)"]
    claim = "sequence: ASP > pSSP(4,5) > pSSP(4,10) > pBSP(5) > pBSP(10)"
    return [*rows, Row("inconsistency", claim, "holds", "holds" if right else "fails", "order", right)]


def _pass_moments(passes: Any) -> dict[str, float]:
    """Mean, standard deviation, skew and kurtosis, as the source tabulates them."""
    mean, sd = float(passes.mean()), float(passes.std())
    scaled = (passes - mean) / max(sd, 1e-12)
    return {"mean": mean, "sd": sd, "skew": float((scaled**3).mean()), "kurtosis": float((scaled**4).mean())}


def _bounds(order: CurveOrder) -> list[Row]:
    rows, table = [], []
    r, length = 4, 10_000
    panels = [Panel(f"Bound on the mean{what} lag", "a = F(r)^β", "bound") for what in ("", " square of the")]
    grid = [number / 200 for number in range(4, 181)]
    for beta, golden in published.BOUNDS.items():
        least_1, at_1 = bounds.lowest(bounds.mean_bound, beta, r, length)
        least_2, at_2 = bounds.lowest(bounds.square_bound, beta, r, length)
        fixed = [bounds.mean_bound(a, bounds.share_within(a, beta), r, length) for a in (0.2, 0.5, 0.8)]
        fixed += [bounds.square_bound(a, bounds.share_within(a, beta), r, length) for a in (0.2, 0.5)]
        names = ("min B1", "at a", "min B2", "at a", "B1(.2)", "B1(.5)", "B1(.8)", "B2(.2)", "B2(.5)")
        for name, theirs, ours in zip(names, golden, (least_1, at_1, least_2, at_2, *fixed), strict=True):
            right = abs(theirs - ours) <= published.BOUNDS_TOLERANCE
            rows.append(Row("bounds", f"{name}, β = {beta}", f"{theirs:g}", f"{ours:.3f}", "0.001", right))
            table.append((beta, name, theirs, round(ours, 5), right))
        for panel, bound in zip(panels, (bounds.mean_bound, bounds.square_bound), strict=True):
            y = [bound(a, bounds.share_within(a, beta), r, length) for a in grid]
            panel.lines.append(Line(f"β = {beta}", grid, [min(value, 150.0) for value in y]))
    _write_csv(order.folder / "bounds.csv", ("beta", "quantity", "published", "ours", "within"), table)
    draw(panels, order.folder / "bounds.png", f"r = {r}, T = {length}")
    return rows


# -- what learns ------------------------------------------------------------------------------------------------------


def _study_figures(order: CurveOrder) -> list[Row]:
    names = [name for name in STUDY_FIGURES if name in order.names]
    wanted = [study for name in names for study in studies(name, order.data_dir)]
    left_out = [name for name in names if not studies(name, order.data_dir)]
    rows = [Row(name, "left out: it needs the images, --data-dir", "", "", "", None) for name in left_out]
    found: list[StudyResult] = []
    if wanted:
        with ProcessPoolExecutor(max(1, order.processes), mp_context=get_context("spawn")) as pool:
            for result in pool.map(run_study, wanted):
                found.append(result)
                order.say(f"{len(wanted)} runs that learn", len(found) / len(wanted))
    write = {"accuracy": _accuracy, "stored_accuracy": _stored_accuracy, "factorisation": _factorisation,
             "learning": _learning}  # fmt: skip
    for name in names:
        mine = [result for result in found if result.study.figure == name]
        if mine:
            _write_curves(order.folder / f"{name}.csv", mine)
            rows += write[name](order, mine)
    return rows


def _accuracy(order: CurveOrder, found: Sequence[StudyResult]) -> list[Row]:
    updates = {name: _mean(found, name, lambda result: result.curve.updates[-1]) for name in published.MNIST}
    last = {
        name: [result.curve.score[-1] for result in found if result.study.series == name] for name in published.MNIST
    }
    rows = [
        Row("accuracy", f"{name}: updates; last accuracy", f"{theirs[0]:g}; {theirs[1]:g}",
            f"{updates[name]:.0f}; {statistics.fmean(last[name]):.3f} "
            f"({min(last[name]):.2f}…{max(last[name]):.2f})", "order", None)
        for name, theirs in published.MNIST.items()
    ]  # fmt: skip
    counts = [updates[name] for name in ("bsp", "pbsp(2)", "ssp(4)", "pssp(4,2)", "asp")]
    right = counts[0] < counts[1] < counts[2] <= counts[3] <= counts[4]
    rows.append(_claim("accuracy", "updates (evaluations): BSP < pBSP < SSP ≤ pSSP ≤ ASP", right))
    verdict = order_verdict([last["bsp"], last["pbsp(2)"]], [last["ssp(4)"], last["asp"]])
    text = "last accuracy: BSP and pBSP above SSP and ASP"
    rows.append(Row("accuracy", text, "holds", verdict, "order, 95 %", verdict == HOLDS))
    panels = _curve_panels([result for result in found if result.study.x == 1], "accuracy")
    draw(panels, order.folder / "accuracy.png", f"{SIX_WORKERS} workers, the chapter's network, seed 1")
    return rows


def order_verdict(upper: Sequence[Sequence[float]], lower: Sequence[Sequence[float]]) -> str:
    """Whether each of the upper lies above each of the lower, seed by seed: by the 95 % interval of the difference."""
    verdict = HOLDS
    for one, other in itertools.product(upper, lower):
        gaps = [high - low for high, low in zip(one, other, strict=True)]
        reach = T_95[len(gaps)] * statistics.stdev(gaps) / len(gaps) ** 0.5
        if statistics.fmean(gaps) + reach < 0:
            return "fails"
        if statistics.fmean(gaps) - reach <= 0:
            verdict = "not distinguishable"
    return verdict


def _stored_accuracy(order: CurveOrder, found: Sequence[StudyResult]) -> list[Row]:
    ours = {(result.study.series, result.study.x): result.curve.score[-1] for result in found}
    panel = Panel("Softmax regression, P = 60, T = 100", "slow steps in percent", "accuracy")
    rows = []
    for name, theirs in published.STORED_ACCURACY.items():
        mine = [ours[name, share] for share in published.SHARES]
        panel.lines.append(Line(name, published.SHARES, mine))
        panel.lines.append(Line(f"_{name}", published.SHARES, theirs, marks=True, color=name))
        rows += [
            Row("stored_accuracy", f"{name} at {share} %", f"{value:g}", f"{ours[name, share]:.3f}", "order", None)
            for share, value in zip(published.SHARES, theirs, strict=True)
        ]
    right = all(
        ours["bsp", share] < min(ours["ssp(4)", share], ours["pbsp(5)", share])
        and max(ours["ssp(4)", share], ours["pbsp(5)", share]) < ours["pssp(4,5)", share] <= ours["asp", share] + 0.01
        for share in published.SHARES
    )
    rows.append(_claim("stored_accuracy", "at every share: BSP < SSP, pBSP < pSSP ≤ ASP + 0.01", right))
    draw([panel], order.folder / "stored_accuracy.png")
    return rows


def _factorisation(order: CurveOrder, found: Sequence[StudyResult]) -> list[Row]:
    ours = {result.study.series: (result.curve.updates[-1], result.curve.score[-1]) for result in found}
    rows = [
        Row("factorisation", f"{name}: updates; last error", f"{theirs[0]:g}; {theirs[1]:g} (MovieLens)",
            f"{ours[name][0]}; {ours[name][1]:.0f} (synthetic)", "order", None)
        for name, theirs in published.FACTORISATION.items()
    ]  # fmt: skip
    names = list(published.FACTORISATION)
    pairs = list(itertools.pairwise(names))
    rows.append(_claim("factorisation", "updates fall from ASP over pBSP to BSP",
                       all(ours[one][0] > ours[other][0] for one, other in pairs)))  # fmt: skip
    rows.append(_claim("factorisation", "and the last error rises with it",
                       all(ours[one][1] < ours[other][1] for one, other in pairs)))  # fmt: skip
    draw(_curve_panels(found, "error"), order.folder / "factorisation.png", "matrix factorisation, P = 63, T = 100")
    return rows


def _learning(order: CurveOrder, found: Sequence[StudyResult]) -> list[Row]:
    groups = list(dict.fromkeys(" ".join(result.study.series.split(" ")[:2]).rstrip(",") for result in found))
    for group in groups:
        mine = [result for result in found if result.study.series.startswith(group)]
        label = "accuracy" if group.startswith("softmax") else "error"
        draw(_curve_panels(mine, label), order.folder / f"learning_{group.replace(' ', '_')}.png", group)
    return [
        Row("learning", f"{result.study.series}: updates; last score", "",
            f"{result.curve.updates[-1]}; {result.curve.score[-1]:.4g}", "", None)
        for result in found
    ]  # fmt: skip


def _curve_panels(found: Sequence[StudyResult], label: str) -> list[Panel]:
    """Against time and against updates, which tell different stories."""
    time = Panel("against time", "virtual seconds", label)
    updates = Panel("against updates", "updates at the server", label)
    for result in found:
        name = result.study.series.split(" ")[-1] if " " in result.study.series else result.study.series
        name = f"{name}, lag weight" if "lag weight" in result.study.series else name
        time.lines.append(Line(name, result.curve.now_s, result.curve.score))
        updates.lines.append(Line(name, result.curve.updates, result.curve.score))
    return [time, updates]


def _mean(found: Sequence[StudyResult], series: str, value: Callable[[StudyResult], float]) -> float:
    return statistics.fmean(value(result) for result in found if result.study.series == series)


def _claim(figure: str, text: str, right: bool) -> Row:
    return Row(figure, text, HOLDS, HOLDS if right else "fails", "order", right)


def _write_curves(path: Path, found: Sequence[StudyResult]) -> None:
    rows: list[tuple[Any, ...]] = []
    for result in found:
        curve = result.curve
        for now_s, updates, score in zip(curve.now_s, curve.updates, curve.score, strict=True):
            rows.append((result.study.series, result.study.x, round(now_s, 4), updates, f"{score:.6g}"))
    _write_csv(path, ("series", "x", "now_s", "updates", "score"), rows)


def _write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)
