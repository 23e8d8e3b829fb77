"""The progress of training as `/status` shows it."""

from __future__ import annotations

import pytest

from training.progress import SHARE_STEPS, STEPS_KEPT, Progress


def test_an_evaluated_metric_replaces_that_of_training() -> None:
    """Metrics with other names stay; the reports themselves are not changed."""
    progress = Progress(training_metrics={"accuracy": 0.1, "norm": 2.0}, evaluated_metrics={"accuracy": 0.9})
    assert progress.metrics == {"accuracy": 0.9, "norm": 2.0}
    assert progress.training_metrics["accuracy"] == 0.1


def test_only_the_last_steps_are_kept() -> None:
    """A run of weeks must not fill the memory."""
    progress = Progress()
    progress.steps.extend({"step": step} for step in range(STEPS_KEPT + 5))
    assert len(progress.steps) == STEPS_KEPT
    assert progress.steps[0]["step"] == 5


def test_the_share_of_training_is_that_of_the_last_steps() -> None:
    """Time in training over all time; none before the first step, and never more than 1 by two clocks' differences."""
    progress = Progress()
    assert progress.training_share is None
    for _ in range(SHARE_STEPS):
        progress.note_turn(0.0, 9.0)
    progress.note_turn(3.0, 4.0)
    assert progress.training_share == pytest.approx(3.0 / (4.0 + 9.0 * (SHARE_STEPS - 1)))
    for _ in range(SHARE_STEPS):
        progress.note_turn(2.001, 2.0)
    assert progress.training_share == 1.0
