"""Which records a tracker gets from the progress of a node."""

from __future__ import annotations

from p2pnode.tracking.service import StepFeed
from p2pnode.tracking.writers import Record
from training.progress import STEPS_KEPT, Progress, StepRow


def row(step: int) -> StepRow:
    return {"step": step, "loss": 1.0 / step, "samples": 32, "refused": {"stale": 1}, "merged": {"ab": step}}


def test_each_step_is_taken_once() -> None:
    """A second call returns what came since the first; tables of a row are no numbers of it."""
    progress, feed = Progress(), StepFeed()
    progress.steps.extend([row(1), row(2)])

    first = feed.take(progress, 5.0)
    progress.steps.append(row(3))

    assert first == [Record(1, 5.0, {"loss": 1.0, "samples": 32}), Record(2, 5.0, {"loss": 0.5, "samples": 32})]
    assert [record.step for record in feed.take(progress, 6.0)] == [3]
    assert feed.take(progress, 7.0) == []


def test_equal_rows_are_different_steps() -> None:
    """A trainer that went back repeats a step with the same numbers: both are recorded."""
    progress, feed = Progress(), StepFeed()
    progress.steps.append(row(1))
    feed.take(progress, 1.0)
    progress.steps.append(row(1))

    assert len(feed.take(progress, 2.0)) == 1


def test_steps_that_left_the_memory_are_not_awaited() -> None:
    """When more steps passed than the node keeps, those that it keeps are taken."""
    progress, feed = Progress(), StepFeed()
    progress.steps.append(row(1))
    feed.take(progress, 1.0)
    progress.steps.extend(row(step) for step in range(2, 2 * STEPS_KEPT))

    assert [record.step for record in feed.take(progress, 2.0)] == list(range(STEPS_KEPT, 2 * STEPS_KEPT))


def test_metrics_of_training_go_with_the_newest_step_and_evaluations_with_their_own() -> None:
    """An evaluation has the step of the model that was evaluated, and is recorded once."""
    progress, feed = Progress(), StepFeed()
    progress.steps.extend([row(4), row(5)])
    progress.training_metrics = {"accuracy": 0.7}
    progress.evaluated_metrics, progress.evaluated_step = {"accuracy": 0.6}, 4

    fourth, fifth, evaluation = feed.take(progress, 1.0, {"peers": 3})
    progress.steps.append(row(6))

    assert "train/accuracy" not in fourth.values
    assert (fifth.values["train/accuracy"], fifth.values["peers"]) == (0.7, 3)
    assert evaluation == Record(4, 1.0, {"eval/accuracy": 0.6})
    assert [record.step for record in feed.take(progress, 2.0)] == [6]
