"""The simulated runs of the figures: those that train a model, and those whose update sequence is measured.

Each run is one call, in a process of its own. `published` has the figures that they are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from p2pnode.training.simulation.figures import published
from p2pnode.training.simulation.figures.points import plan_of
from p2pnode.training.simulation.learning.learning import Curve, learn
from p2pnode.training.simulation.learning.parameter_server import Server, learn_at_server
from p2pnode.training.simulation.learning.problems import (
    Cnn,
    Images,
    MatrixFactorisation,
    Problem,
    SoftmaxRegression,
)
from p2pnode.training.simulation.model import metrics
from p2pnode.training.simulation.model.plan import Plan
from p2pnode.training.simulation.run import simulate

ProblemName = Literal["softmax", "factorisation", "network"]

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
    """Run one study. Raises `problems.BadData` if the images cannot be read."""
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
            return _accuracy(folder) if folder else []
        case "stored_accuracy":
            return _stored(folder) if folder else []
        case "factorisation":
            return [Study(figure, name, 0, plan_of(name, 63, 100), "factorisation") for name in published.FACTORISATION]
        case _:
            raise ValueError(f"{figure} has no studies")


def _accuracy(folder: str) -> list[Study]:
    found = []
    for name in published.MNIST:
        for seed in range(1, CNN_SEEDS + 1):
            plan = replace(plan_of(name, CNN_WORKERS, CNN_DURATION_S), seed=seed, self_sampled=False)
            server = Server(CNN_STEP_S, CNN_EVALUATION_S)
            found.append(Study("accuracy", name, seed, plan, "network", 0, folder, server))
    return found


def _stored(folder: str) -> list[Study]:
    return [
        Study(
            "stored_accuracy", name, share, plan_of(name, 60, 100, slow=f"{share}%x4,transient"), "softmax",
            10, folder,
        )
        for name in published.STORED_ACCURACY
        for share in published.SHARES
    ]  # fmt: skip


# -- inconsistency ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceStudy:
    """Inconsistency of one run's update sequence: of each prefix of it, and between two passes of a barrier."""

    name: str
    prefix: NDArray[np.float64]
    passes: NDArray[np.float64]
    #: F(4): the share of pairs at most four steps apart, at the end.
    lag_share: float


def run_sequence(name: str) -> SequenceStudy:
    """The experiments `exp_seqdiff` and `exp_frontier` of the simulator Ninox (`docs/psp.md`): P = 100, T = 100."""
    nodes = 100
    run = simulate(plan_of(name, nodes, 100), keep_trace=True)
    assert run.trace is not None
    return SequenceStudy(
        name,
        metrics.sequence_inconsistency(run.trace, nodes),
        metrics.progress_inconsistency(run.trace, nodes),
        metrics.lag_share(run.steps, 4),
    )
