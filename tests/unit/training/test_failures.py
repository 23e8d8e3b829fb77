"""Counting a trainer's failures."""

from __future__ import annotations

from p2pnode.training.failures import WINDOW_S, Failures, cause_of

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
    failures = Failures(max_restarts=4)
    found = counts(failures, ["a", "a", "b", "a", "a", "a"])

    assert found == [1, 2, 1, 3, 4, 5]
    assert [failures.are_too_many(count) for count in found] == [False] * 5 + [True]


def test_a_failure_a_day_is_forgotten() -> None:
    """A run of weeks meets the same short fault of its network again and again."""
    assert counts(Failures(4), ["a"] * 20, every_s=WINDOW_S + 1) == [1] * 20


def test_a_process_that_is_ended_from_outside_counts_only_without_a_completed_step() -> None:
    """A week of preemptions is no failure of the script; one that is always killed before its first step is."""
    failures = Failures(4)
    assert counts(failures, [""] * 100) == [1] * 100
    failures.completed_step()
    assert [failures.note("", now) for now in range(5)] == [1, 2, 3, 4, 5]


def test_all_failures_without_a_completed_step_count() -> None:
    """A script that never gets far may say something else each time."""
    failures = Failures(4)
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
