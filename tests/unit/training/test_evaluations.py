"""Evaluations and the goal of a run: confirmed twice, each model once, and a goal that cannot hold is said."""

from __future__ import annotations

import pytest

from p2pnode.training.evaluations import UNEVALUATED_STEPS, Evaluations
from p2pnode.training.progress import Progress
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer_link.interface import Evaluation
from tests.harness.environment.simulated import NoLog


def evaluations(until: str = "accuracy>=0.9", eval_steps: int = 0) -> tuple[Evaluations, Progress]:
    progress = Progress()
    return Evaluations(TrainingSettings(until=until, eval_steps=eval_steps), progress, NoLog()), progress


def note(found: Evaluations, step: int, **metrics: float) -> None:
    found.note(Evaluation(step, metrics, 10))


def test_without_a_goal_nothing_is_reached_and_nothing_missing() -> None:
    """Nor because another node says so."""
    found, _ = evaluations("")
    found.end_by_goal()
    note(found, 1, accuracy=1.0)
    note(found, 2, accuracy=1.0)

    assert not found.has_goal
    assert not found.is_goal_reached
    assert found.missing(10**6) == ""


@pytest.mark.parametrize(("eval_steps", "patience"), [(0, UNEVALUATED_STEPS), (100, 300)])
def test_a_run_that_evaluates_nothing_is_told_after_a_while(eval_steps: int, patience: int) -> None:
    """Where the task evaluates by itself, after three of its intervals."""
    found, _ = evaluations(eval_steps=eval_steps)

    assert found.missing(patience - 1) == ""
    assert found.missing(patience) == (f"training.until = accuracy>=0.9, but nothing was evaluated in {patience} steps")


def test_a_run_that_evaluates_something_else_is_told_at_once() -> None:
    """With the metrics that there are; the right one ends it."""
    found, _ = evaluations()
    note(found, 1, loss=0.1, error=0.2)
    assert found.missing(1) == "training.until = accuracy>=0.9, but evaluations report error, loss only"
    note(found, 1, accuracy=0.1)
    assert found.missing(10**6) == ""
