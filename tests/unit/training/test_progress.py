"""The progress of training as `/status` shows it."""

from __future__ import annotations

import pytest

from p2pnode.training.progress import SHARE_STEPS, STEPS_KEPT, Progress


def test_the_time_of_each_phase_is_added_up() -> None:
    """Steps without an exchange have fewer phases; the sums are for `/metrics`, and outlive the rows."""
    progress = Progress()
    progress.add({"step": 1, "train_seconds": 1.0, "push_seconds": 0.5})
    progress.add({"step": 2, "train_seconds": 2.0})

    assert progress.phase_seconds == {"train": 3.0, "idle": 0.0, "push": 0.5, "wait": 0.0, "pull": 0.0}
    assert [row["step"] for row in progress.steps] == [1, 2]


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
