"""The rules for applying deltas: that of Ninox, and the single-threaded parameter server of the literature."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from p2pnode.training.simulation.plan import Plan
from tests.harness.builders.linear_regression import LinearRegression
from tools.psp.learning import Server, learn, learn_at_server
from tools.psp.learning_figures import (
    CNN_DURATION_S,
    CNN_EVALUATION_S,
    CNN_STEP_S,
    CNN_WORKERS,
    MNIST,
    order_verdict,
    run_study,
    studies,
)
from tools.psp.points import plan_of
from tools.psp.problems import Vector


class Counting:
    """A problem whose vector counts: each delta is one unit at the node's own place."""

    name, better, size = "counting", "higher", 5

    def __init__(self) -> None:
        self.bases: list[tuple[int, int, float]] = []

    def initial(self) -> Vector:
        return np.zeros(self.size, np.float32)

    def delta(self, vector: Vector, node: int, step: int) -> Vector:
        self.bases.append((node, step, float(vector.sum())))
        return np.eye(1, self.size, node, dtype=np.float32)[0]

    def score(self, vector: Vector) -> float:
        return float(vector.sum())


def test_ninox_adds_when_the_barrier_passes_and_all_start_from_one_model() -> None:
    """Under bsp and the delayed rule all nodes of a round compute from one model, five deltas a round later."""
    problem = Counting()
    learn(plan_of("bsp", 5, 20), problem, scores=1)

    for _node, step, total in problem.bases:
        assert total == 5 * (step - 1)


SERVER = Server(CNN_STEP_S, CNN_EVALUATION_S)


SEEDS = range(1, 9)


def plan(name: str, seed: int) -> Plan:
    """The six workers of the literature."""
    return replace(plan_of(name, CNN_WORKERS, CNN_DURATION_S), seed=seed, self_sampled=False)


@pytest.mark.parametrize("name", list(MNIST))
def test_evaluations_are_counted_as_the_figure_counts(name: str) -> None:
    """The mean number of evaluations is within a quarter of the published one, for each of the five barriers."""
    print(f"seeds {list(SEEDS)}")
    counts = [learn_at_server(plan(name, seed), SERVER, None)[0].updates[-1] for seed in SEEDS]

    assert statistics.fmean(counts) == pytest.approx(MNIST[name][0], rel=0.25)


def test_an_evaluation_stands_for_one_delta_or_for_all() -> None:
    """Under asp for one; under bsp for one of each worker, less those still under way at the end."""
    curve, mean_steps = learn_at_server(plan("asp", 1), SERVER, None)
    assert curve.updates[-1] == round(mean_steps * CNN_WORKERS)

    curve, mean_steps = learn_at_server(plan("bsp", 1), SERVER, None)
    assert curve.updates[-1] <= mean_steps < curve.updates[-1] + 1


def test_a_busy_server_spaces_evaluations() -> None:
    """No two evaluations lie closer together than one takes, and asp keeps the server busy all the time."""
    curve, _ = learn_at_server(plan("asp", 2), SERVER, None)
    gaps = [later - earlier for earlier, later in zip(curve.now_s, curve.now_s[1:], strict=False)]

    assert min(gaps) >= CNN_EVALUATION_S - 1e-9
    assert statistics.fmean(gaps) == pytest.approx(CNN_EVALUATION_S, rel=0.02)


def test_what_is_learned_follows_the_deltas_and_not_the_evaluations() -> None:
    """In equal time bsp ends nearer to the truth than asp, from a third of the evaluations; a seed repeats exactly."""

    def ends(name: str) -> tuple[list[float], int]:
        problem = LinearRegression(1, size=20, learning_rate=0.02)
        curve, _ = learn_at_server(plan(name, 1), SERVER, problem)
        return curve.score, curve.updates[-1]

    bsp, asp = ends("bsp"), ends("asp")
    assert bsp[0][-1] < asp[0][-1]
    assert bsp[1] < asp[1] / 3
    assert ends("bsp") == bsp


# -- runs that learn


def test_an_order_holds_only_beyond_its_noise() -> None:
    """Above on every seed by one amount it holds; above in the mean of a wide scatter it is not distinguishable."""
    low = [0.5, 0.6, 0.4, 0.55, 0.45]
    assert order_verdict([[value + 0.1 for value in low]], [low]) == "holds"
    assert order_verdict([[0.9, 0.3, 0.8, 0.2, 0.7]], [low]) == "not distinguishable"
    assert order_verdict([[value - 0.1 for value in low]], [low]) == "fails"
    assert order_verdict([[0.9] * 5, [value - 0.1 for value in low]], [low]) == "fails"


def test_studies_on_images_need_their_folder() -> None:
    """Without it they are left out; with it each barrier has runs."""
    assert studies("accuracy", None) == studies("stored_accuracy", None) == []
    assert {study.series for study in studies("accuracy", Path("mnist"))} >= {"asp", "bsp"}
    assert {study.x for study in studies("stored_accuracy", Path("mnist"))} == {0, 5, 10, 15, 20}


def test_a_study_learns() -> None:
    """Matrix factorisation under asp: its error falls; every update but each node's last is a step."""
    study = studies("factorisation", None)[0]
    result = run_study(study)

    assert result.curve.score[-1] < result.curve.score[0]
    assert result.curve.updates[-1] == round(result.mean_steps * study.plan.nodes)
    with pytest.raises(ValueError, match="nothing has no studies"):
        studies("nothing", None)
