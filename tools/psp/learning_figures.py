"""Figures of runs that learn: the runs, each in a process of its own, their curves, and claims about their order.

The published values are those of the PSP chapter and of its simulator (`docs/psp.md`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np

from p2pnode.training.simulation.plan import Plan
from p2pnode.training.simulation.plots import Line, Panel, draw
from tools.psp.learning import Curve, Server, learn, learn_at_server
from tools.psp.points import plan_of
from tools.psp.problems import (
    Cnn,
    Images,
    MatrixFactorisation,
    Problem,
    SoftmaxRegression,
)
from tools.psp.tables import HOLDS, ReproductionRequest, Row, order_row, write_csv

ProblemName = Literal["softmax", "factorisation", "network"]

STUDY_FIGURES = ("accuracy", "stored_accuracy", "factorisation")
#: Figures that are left out without the files of MNIST.
NEED_IMAGES = ("accuracy", "stored_accuracy")
#: Student's t of a two-sided 95 % interval, by the number of values.
T_95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 12: 2.201}

#: Six workers on MNIST: updates reached and last accuracy.
MNIST: dict[str, tuple[float, float]] = {
    "bsp": (22, 0.88),
    "pbsp(2)": (45, 0.895),
    "ssp(4)": (71, 0.69),
    "pssp(4,2)": (72, 0.85),
    "asp": (74, 0.605),
}
#: Shares of slow steps, in percent.
SHARES = (0, 5, 10, 15, 20)
#: Last accuracy by share, P = 60, T = 100, transient ×4.
STORED_ACCURACY: dict[str, tuple[float, ...]] = {
    "asp": (0.808, 0.778, 0.786, 0.777, 0.764),
    "bsp": (0.632, 0.535, 0.471, 0.438, 0.448),
    "ssp(4)": (0.763, 0.718, 0.693, 0.692, 0.665),
    "pbsp(5)": (0.767, 0.757, 0.742, 0.728, 0.716),
    "pssp(4,5)": (0.801, 0.785, 0.768, 0.767, 0.746),
}
#: Matrix factorisation, P = 63, T = 100: updates and last loss (the loss starts at 93,623).
FACTORISATION: dict[str, tuple[float, float]] = {
    "asp": (3176, 73088),
    "pbsp(4)": (2439, 73502),
    "pbsp(8)": (2071, 73821),
    "pbsp(16)": (1678, 74296),
    "pbsp(32)": (1349, 74888),
    "pbsp(48)": (1137, 75441),
    "bsp": (1071, 75715),
}
#: The runs of the convolutional network: workers, and the seconds in which the server evaluates 74 times under asp, as
#: published. The seconds of a step and of an evaluation are fitted to all five published counts (`docs/psp.md`).
CNN_WORKERS, CNN_DURATION_S, CNN_STEP_S, CNN_EVALUATION_S = 6, 152.0, 4.0, 2.0
#: Its plain SGD. The publication gives neither rate nor batch; `docs/psp.md` lists the values that were tried.
CNN_LEARNING_RATE, CNN_BATCH = 0.005, 32
#: The rate at which softmax regression learns as slowly as published.
SOFTMAX_RATE = 0.003
#: With five seeds the confidence intervals of the differences (0.07 and 0.09) included zero; with twelve they do not.
CNN_SEEDS = 12


@dataclass(frozen=True, slots=True)
class Study:
    """One run that trains: `plan` has its nodes, barrier and step times. `series` and `x` say where it is drawn in
    `figure`. `scores`: how often the model is evaluated."""

    figure: str
    series: str
    x: float
    plan: Plan
    problem: ProblemName
    scores: int = 20
    data_dir: str = ""
    #: Runs on a single-threaded parameter server instead of the engine; `scores` is then ignored.
    server: Server | None = None


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The learning curve of a study, and the mean number of completed steps."""

    study: Study
    curve: Curve
    mean_steps: float


def run_study(study: Study) -> StudyResult:
    """Run one study. Raises `BadData` if the images cannot be read."""
    if study.server is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            return StudyResult(study, *learn_at_server(study.plan, study.server, _problem(study)))
    outcome, curve = learn(study.plan, _problem(study), scores=study.scores)
    return StudyResult(study, curve, float(outcome.steps.mean()))


def _problem(study: Study) -> Problem:
    seed = study.plan.seed
    match study.problem:
        case "factorisation":
            return MatrixFactorisation(seed, learning_rate=0.004)
        case "softmax":
            return SoftmaxRegression(_images(study.data_dir), seed, learning_rate=SOFTMAX_RATE)
        case "network":
            return Cnn(_images(study.data_dir), seed, learning_rate=CNN_LEARNING_RATE, batch=CNN_BATCH, tests=500)


@lru_cache(maxsize=1)
def _images(folder: str) -> Images:
    return Images(Path(folder))


def studies(figure: str, data_dir: Path | None) -> list[Study]:
    """The studies of a figure, without those on images if their folder is not given."""
    folder = str(data_dir) if data_dir else ""
    match figure:
        case "accuracy":
            return _accuracy_studies(folder) if folder else []
        case "stored_accuracy":
            return _stored_studies(folder) if folder else []
        case "factorisation":
            return [Study(figure, name, 0, plan_of(name, 63, 100), "factorisation") for name in FACTORISATION]
        case _:
            raise ValueError(f"{figure} has no studies")


def _accuracy_studies(folder: str) -> list[Study]:
    found = []
    for name in MNIST:
        for seed in range(1, CNN_SEEDS + 1):
            plan = replace(plan_of(name, CNN_WORKERS, CNN_DURATION_S), seed=seed, self_sampled=False)
            server = Server(CNN_STEP_S, CNN_EVALUATION_S)
            found.append(Study("accuracy", name, seed, plan, "network", 0, folder, server))
    return found


def _stored_studies(folder: str) -> list[Study]:
    return [
        Study(
            "stored_accuracy", name, share, plan_of(name, 60, 100, slow=f"{share}%x4,transient"), "softmax",
            10, folder,
        )
        for name in STORED_ACCURACY
        for share in SHARES
    ]  # fmt: skip


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
    updates = {name: _mean(found, name, lambda result: result.curve.updates[-1]) for name in MNIST}
    last = {name: [result.curve.score[-1] for result in found if result.study.series == name] for name in MNIST}
    rows = [
        Row("accuracy", f"{name}: updates; last accuracy", f"{theirs[0]:g}; {theirs[1]:g}",
            f"{updates[name]:.0f}; {statistics.fmean(last[name]):.3f} "
            f"({min(last[name]):.2f}…{max(last[name]):.2f})", "order", None)
        for name, theirs in MNIST.items()
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
    for name, theirs in STORED_ACCURACY.items():
        mine = [ours[name, share] for share in SHARES]
        panel.lines.append(Line(name, SHARES, mine))
        panel.lines.append(Line(f"_{name}", SHARES, theirs, marks=True, color=name))
        rows += [
            Row("stored_accuracy", f"{name} at {share} %", f"{value:g}", f"{ours[name, share]:.3f}", "order", None)
            for share, value in zip(SHARES, theirs, strict=True)
        ]
    right = all(
        ours["bsp", share] < min(ours["ssp(4)", share], ours["pbsp(5)", share])
        and max(ours["ssp(4)", share], ours["pbsp(5)", share]) < ours["pssp(4,5)", share] <= ours["asp", share] + 0.01
        for share in SHARES
    )
    rows.append(order_row("stored_accuracy", "at every share: BSP < SSP, pBSP < pSSP ≤ ASP + 0.01", right))
    draw([panel], request.folder / "stored_accuracy.png")
    return rows


def _factorisation(request: ReproductionRequest, found: Sequence[StudyResult]) -> list[Row]:
    ours = {result.study.series: (result.curve.updates[-1], result.curve.score[-1]) for result in found}
    rows = [
        Row("factorisation", f"{name}: updates; last error", f"{theirs[0]:g}; {theirs[1]:g} (MovieLens)",
            f"{ours[name][0]}; {ours[name][1]:.0f} (synthetic)", "order", None)
        for name, theirs in FACTORISATION.items()
    ]  # fmt: skip
    names = list(FACTORISATION)
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
