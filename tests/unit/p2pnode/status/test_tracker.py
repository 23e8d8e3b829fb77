"""The finding of a tracker that does not write."""

from __future__ import annotations

from p2pnode.status.tracker import tracker_findings


def test_a_tracker_that_writes_is_no_finding() -> None:
    """Also where records were lost before."""
    assert tracker_findings("tensorboard", "", 0) == []
    assert tracker_findings("tensorboard", "", 12) == []


def test_a_tracker_that_fails_is_a_warning_with_its_reason() -> None:
    """It names the setting, the reason, how much is missing, and that training goes on."""
    (finding,) = tracker_findings("trackio", "no space left", 12)
    assert finding.level == "warning"
    assert finding.what == (
        "training.tracker = trackio fails: no space left; 12 records are missing there, training goes on"
    )
    assert "next try" in finding.do
