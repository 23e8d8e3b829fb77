"""The progress of training as `/status` shows it."""

from __future__ import annotations

from training.progress import STEPS_KEPT, Progress


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
