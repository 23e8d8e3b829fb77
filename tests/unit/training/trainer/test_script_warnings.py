"""Warnings and findings of a script, on their way to its node."""

from __future__ import annotations

from p2pnode.training.trainer.script_warnings import ScriptWarnings
from p2pnode.training.trainer_link.messages import FromTrainer, Warned


def test_a_finding_is_sent_when_it_changes() -> None:
    """Once while it is so, again with another text, and once more when it has gone; a warning each time."""
    sent: list[FromTrainer] = []
    warnings = ScriptWarnings()
    warnings.finding("differ", "", "")
    for what in ("10 for 5", "10 for 5", "12 for 6", "", ""):
        warnings.finding("differ", what, "call it once")
    warnings("schedule_over", "it has ended")

    warnings.flush(sent.append)
    warnings.flush(sent.append)

    assert sent == [
        Warned("differ", "10 for 5", "call it once"),
        Warned("differ", "12 for 6", "call it once"),
        Warned("differ", "", "call it once"),
        Warned("schedule_over", "it has ended"),
    ]
