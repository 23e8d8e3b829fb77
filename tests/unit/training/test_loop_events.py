"""What is logged of a run's beginning and end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from p2pnode.training.loop_events import NO_END, note_left, note_start
from tests.harness.environment.simulated import ListLog, VirtualClock


def log_of() -> ListLog:
    return ListLog([], clock=cast(VirtualClock, SimpleNamespace(monotonic=lambda: 0.0)))


@pytest.mark.parametrize(
    ("has_end", "events"), [(True, ["training_started"]), (False, ["training_started", "run_has_no_end"])]
)
def test_a_start_says_what_the_settings_lead_to(has_end: bool, events: list[str]) -> None:
    """A run without an end, with what to set."""
    log = log_of()
    note_start(log, 7, has_end=has_end)

    assert [one.event for one in log.records] == events
    assert log.records[0].fields == {"step": 7}
    assert has_end or log.records[-1].fields == {"hint": NO_END}


def test_a_script_that_left_without_a_step_is_a_warning() -> None:
    """It says what a step is; after a step it is no warning."""
    log = log_of()
    note_left(log, "it returned", 3)
    note_left(log, "it returned", 0)

    assert [(one.level, one.fields["steps"]) for one in log.records] == [("info", 3), ("warning", 0)]
    assert "swarm.step()" in log.records[1].fields["hint"]
