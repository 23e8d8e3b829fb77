"""Figures of runs that learn: runs their studies, and writes curves and claims about their order."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from p2pnode.training.simulation.figures import published
from p2pnode.training.simulation.figures.plots import Line, Panel, draw
from p2pnode.training.simulation.figures.studies import CNN_WORKERS, StudyResult, run_study, studies
from p2pnode.training.simulation.figures.tables import HOLDS, ReproductionRequest, Row, order_row, write_csv

STUDY_FIGURES = ("accuracy", "stored_accuracy", "factorisation")
#: Figures that are left out without the files of MNIST.
NEED_IMAGES = ("accuracy", "stored_accuracy")
#: Student's t of a two-sided 95 % interval, by the number of values.
T_95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 12: 2.201}


def learning_rows(request: ReproductionRequest) -> list[Row]:
    """Make the figures of learning runs that the request names."""
    names = [name for name in STUDY_FIGURES if name in request.names]
    wanted = [study for name in names for study in studies(name, request.data_dir)]
    left_out = [name for name in names if not studies(name, request.data_dir)]
    rows = [Row(name, "left out: it needs the images, --data-dir", "", "", "", None) for name in left_out]
    found: list[StudyResult] = []
    if wanted:
        with ProcessPoolExecutor(max(1, request.processes), mp_context=get_context("spawn")) as pool:
            for result in pool.map(run_study, wanted):
                found.append(result)
                request.on_progress(f"{len(wanted)} runs that learn", len(found) / len(wanted))
    write = {"accuracy": _accuracy, "stored_accuracy": _stored_accuracy, "factorisation": _factorisation}
    for name in names:
        mine = [result for result in found if result.study.figure == name]
        if mine:
            _write_curves(request.folder / f"{name}.csv", mine)
            rows += write[name](request, mine)
    return rows


def _accuracy(request: ReproductionRequest, found: Sequence[StudyResult]) -> list[Row]:
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
    rows.append(order_row("accuracy", "updates (evaluations): BSP < pBSP < SSP ≤ pSSP ≤ ASP", right))
    verdict = order_verdict([last["bsp"], last["pbsp(2)"]], [last["ssp(4)"], last["asp"]])
    text = "last accuracy: BSP and pBSP above SSP and ASP"
    rows.append(Row("accuracy", text, "holds", verdict, "order, 95 %", verdict == HOLDS))
    panels = _curve_panels([result for result in found if result.study.x == 1], "accuracy")
    draw(panels, request.folder / "accuracy.png", f"{CNN_WORKERS} workers, the chapter's network, seed 1")
    return rows


def order_verdict(upper: Sequence[Sequence[float]], lower: Sequence[Sequence[float]]) -> str:
    """Whether every upper series exceeds every lower one, by the 95 % interval of their difference over the seeds."""
    verdict = HOLDS
    for one, other in itertools.product(upper, lower):
        gaps = [high - low for high, low in zip(one, other, strict=True)]
        reach = T_95[len(gaps)] * statistics.stdev(gaps) / len(gaps) ** 0.5
        if statistics.fmean(gaps) + reach < 0:
            return "fails"
        if statistics.fmean(gaps) - reach <= 0:
            verdict = "not distinguishable"
    return verdict


def _stored_accuracy(request: ReproductionRequest, found: Sequence[StudyResult]) -> list[Row]:
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
    rows.append(order_row("stored_accuracy", "at every share: BSP < SSP, pBSP < pSSP ≤ ASP + 0.01", right))
    draw([panel], request.folder / "stored_accuracy.png")
    return rows


def _factorisation(request: ReproductionRequest, found: Sequence[StudyResult]) -> list[Row]:
    ours = {result.study.series: (result.curve.updates[-1], result.curve.score[-1]) for result in found}
    rows = [
        Row("factorisation", f"{name}: updates; last error", f"{theirs[0]:g}; {theirs[1]:g} (MovieLens)",
            f"{ours[name][0]}; {ours[name][1]:.0f} (synthetic)", "order", None)
        for name, theirs in published.FACTORISATION.items()
    ]  # fmt: skip
    names = list(published.FACTORISATION)
    pairs = list(itertools.pairwise(names))
    rows.append(order_row("factorisation", "updates fall from ASP over pBSP to BSP",
                       all(ours[one][0] > ours[other][0] for one, other in pairs)))  # fmt: skip
    rows.append(order_row("factorisation", "and the last error rises with it",
                       all(ours[one][1] < ours[other][1] for one, other in pairs)))  # fmt: skip
    draw(_curve_panels(found, "error"), request.folder / "factorisation.png", "matrix factorisation, P = 63, T = 100")
    return rows


def _curve_panels(found: Sequence[StudyResult], label: str) -> list[Panel]:
    """The same curves against time and against updates: the order of barriers differs between the two."""
    time = Panel("against time", "virtual seconds", label)
    updates = Panel("against updates", "updates at the server", label)
    for result in found:
        name = result.study.series
        time.lines.append(Line(name, result.curve.now_s, result.curve.score))
        updates.lines.append(Line(name, result.curve.updates, result.curve.score))
    return [time, updates]


def _mean(found: Sequence[StudyResult], series: str, value: Callable[[StudyResult], float]) -> float:
    return statistics.fmean(value(result) for result in found if result.study.series == series)


def _write_curves(path: Path, found: Sequence[StudyResult]) -> None:
    rows: list[tuple[Any, ...]] = []
    for result in found:
        curve = result.curve
        for now_s, updates, score in zip(curve.now_s, curve.updates, curve.score, strict=True):
            rows.append((result.study.series, result.study.x, round(now_s, 4), updates, f"{score:.6g}"))
    write_csv(path, ("series", "x", "now_s", "updates", "score"), rows)
