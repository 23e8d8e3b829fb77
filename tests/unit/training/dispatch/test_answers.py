"""The rules of a queue: what they may be."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.training.dispatch.answers import MAX_HELD, REPORTED_CAUSES, Cause, QueueRules


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"passes": 0},
        {"max_failures": 0, "max_losses": 0},
        {"max_failures": 255, "max_losses": 255},
        {"lease_floor_s": 5.0, "lease_ceiling_s": 5.0},
        {"leases_per_worker": 1},
        {"leases_per_worker": MAX_HELD},
        {"holds": 1.0},
    ],
)
def test_rules_at_their_limits_are_rules(rules: dict[str, Any]) -> None:
    """The defaults too."""
    assert QueueRules(**rules)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"max_failures": -1}, "max_failures and max_losses must be 0 to 255"),
        ({"max_losses": 256}, "max_failures and max_losses must be 0 to 255"),
        ({"lease_floor_s": 0.0}, "0 < lease_floor_s"),
        ({"lease_floor_s": 6.0, "lease_ceiling_s": 5.0}, "lease_floor_s ≤ lease_ceiling_s"),
        ({"lease_ceiling_s": float("inf")}, "lease_ceiling_s"),
        ({"lease_floor_s": float("nan")}, "lease_floor_s"),
        ({"passes": -1}, "passes must be ≥ 0"),
        ({"lease_factor": 0.0}, "lease_factor > 0"),
        ({"holds": 0.5}, "holds ≥ 1"),
        ({"leases_per_worker": 0}, f"leases_per_worker must be 1 to {MAX_HELD}"),
        ({"leases_per_worker": MAX_HELD + 1}, "leases_per_worker must be"),
    ],
)
def test_rules_that_cannot_be_are_refused_by_name(rules: dict[str, Any], reason: str) -> None:
    """Numbers of failures are kept in a byte; a lease has to end."""
    with pytest.raises(ValueError, match=reason):
        QueueRules(**rules)


def test_a_worker_reports_no_cause_that_the_queue_finds_itself() -> None:
    """A timeout and a death are the master's to say."""
    assert frozenset(Cause) - REPORTED_CAUSES == {Cause.TIMEOUT, Cause.DEATH}
