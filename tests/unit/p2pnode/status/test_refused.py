"""The finding about refused deltas."""

from __future__ import annotations

from typing import get_args

from p2pnode.status.refused import MEANINGS, MIN_STEPS, refusal_findings
from training.exchange.messages import RefusalReason
from training.progress import Progress


def test_each_reason_has_a_meaning_and_a_remedy() -> None:
    """A reason of a later version is passed on."""
    assert set(MEANINGS) == set(get_args(RefusalReason))
    for reason in (*MEANINGS, "from the future"):
        [(what, do)] = refusal_findings([{reason: 64}] * MIN_STEPS)
        assert reason in what
        assert do


def test_refusals_of_several_steps_are_a_finding() -> None:
    """Of one or two of them not; by reason, with the number of steps."""
    assert refusal_findings([{}, {"late": 3}, {}, {"late": 1}]) == []
    found = refusal_findings([{"late": 3}, {}, {"late": 1, "not_finite": 2}, {"not_finite": 64}, {"late": 9}])
    assert [what.partition(":")[0] for what, _ in found] == [
        "in 3 of the last 5 steps deltas of this node were refused (late)",
        "in 2 of the last 5 steps deltas of this node were refused (not_finite)",
    ]


def test_what_is_refused_later_counts() -> None:
    """A node behind a slow line hears of it after its step; the finding goes with the last such steps."""
    progress = Progress()
    later: dict[str, int] = {}
    progress.add({"step": 1, "refused": later})
    progress.add({"step": 2, "refused": {"late": 64}})
    progress.add({"step": 3, "refused": {"late": 64}})
    assert refusal_findings(progress.refusals) == []
    later["late"] = 2
    [(what, _)] = refusal_findings(progress.refusals)
    assert what.startswith("in 3 of the last 3 steps")

    for step in range(4, 12):
        progress.add({"step": step, "refused": {}})
    assert refusal_findings(progress.refusals) == []
