"""The progress of training as `/status` shows it."""

from __future__ import annotations

import pytest

from p2pnode.training.failures import WINDOW_S, Failures
from p2pnode.training.progress import SHARE_STEPS, STEPS_KEPT, Progress
from p2pnode.training.trainer_link.interface import cause_of


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


# -- counting a trainer's failures


HOUR_S = 3600.0


def counts(failures: Failures, causes: list[str], every_s: float = HOUR_S) -> list[int]:
    """How many count at each of these failures; before each one a step is completed."""
    found = []
    for number, cause in enumerate(causes):
        failures.completed_step()
        found.append(failures.note(cause, number * every_s))
    return found


def test_failures_of_one_cause_count_together_whatever_is_completed_between() -> None:
    """Each start completes steps, an hour long; another cause between changes nothing."""
    failures = Failures()
    found = counts(failures, ["a", "a", "b", "a", "a", "a"])

    assert found == [1, 2, 1, 3, 4, 5]
    assert [failures.are_too_many(count) for count in found] == [False] * 5 + [True]


def test_a_failure_a_day_is_forgotten() -> None:
    """A run of weeks meets the same short fault of its network again and again."""
    assert counts(Failures(), ["a"] * 20, every_s=WINDOW_S + 1) == [1] * 20


def test_a_process_that_is_ended_from_outside_counts_only_without_a_completed_step() -> None:
    """A week of preemptions is no failure of the script; one that is always killed before its first step is."""
    failures = Failures()
    assert counts(failures, [""] * 100) == [1] * 100
    failures.completed_step()
    assert [failures.note("", now) for now in range(5)] == [1, 2, 3, 4, 5]


def test_all_failures_without_a_completed_step_count() -> None:
    """A script that never gets far may say something else each time."""
    failures = Failures()
    assert [failures.note(cause, 0.0) for cause in "abcde"] == [1, 2, 3, 4, 5]
    failures.completed_step()
    assert failures.note("f", 0.0) == 1
    assert failures.note("a", 0.0) == 2


def test_numbers_do_not_tell_two_causes_apart() -> None:
    """Steps, addresses and names of temporary files change; types and words do not."""
    first = "ValueError: step 17: no file /tmp/tmp3x_9/part, <object at 0x7f01>"
    again = "ValueError: step 18: no file /tmp/tmpa0bq1/part, <object at 0x7f02>"
    assert cause_of(first) == cause_of(again)
    assert cause_of(first) != cause_of(first.replace("ValueError", "KeyError"))
    assert cause_of("RuntimeError: shapes differ") != cause_of("RuntimeError: out of memory")
