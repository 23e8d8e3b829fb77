"""Findings from plain facts: the line, refused deltas, releases of peers, the tracker."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from p2pnode.overlay.line.rate import WINDOW_S, MeasuredLine
from p2pnode.status.findings import (
    MEANINGS,
    MIN_STEPS,
    line_findings,
    refusal_findings,
    release_of,
    tracker_findings,
    version_findings,
)
from p2pnode.status.sections import line_status
from p2pnode.training.encoding.codec_choice import CodecChoice, LineFacts
from p2pnode.training.encoding.step_bytes import StepShape, step_bytes
from p2pnode.training.exchange.messages import RefusalReason
from p2pnode.training.progress import Progress
from p2pnode.training.settings import ExchangeSettings


def measured(bytes_per_s: float) -> MeasuredLine:
    line = MeasuredLine()
    for _ in range(100):
        line.sent(WINDOW_S, round(bytes_per_s * WINDOW_S), is_busy=True, is_full=True)
    return line


def facts(line: MeasuredLine, **changes: Any) -> LineFacts:
    fields = {
        "shape": StepShape.even(5_000_000, 4),
        "upload_bytes_per_s": line.upload_bytes_per_s,
        "download_bytes_per_s": None,
        "step_s": 10.0,
        "push_s": None,
        "is_beside": True,
        **changes,
    }
    return LineFacts(**fields)


def test_a_line_that_carries_less_than_a_step_says_so_and_what_to_do() -> None:
    """bfloat16 of 5 M parameters over 2.5 MB/s in steps of two seconds: 5 of 22.5 MB."""
    line, choice = measured(2_500_000), CodecChoice(ExchangeSettings(codec="bfloat16"))
    known = facts(line, step_s=2.0)
    status = line_status(line, choice, known)

    assert status.upload_bytes_per_s == 2_500_000
    assert status.carried_bytes_per_step == 5_000_000
    assert status.needed_bytes_per_step == round(step_bytes(known.shape, "bfloat16").up) == 22_500_000
    (finding,) = line_findings(status, choice)
    assert finding.what == "this node's line carries 5.0 of 22.5 MB per step"
    assert finding.do == 'set exchange.codec = "auto"; or raise training.local_steps on all nodes'


def test_a_shared_model_that_stays_behind_says_so() -> None:
    """Beyond eight deltas' worth of training: with the shortest deltas because of the line, with a codec that is set
    because of that. A denser one that was chosen becomes shorter first."""
    line, chosen, is_set = (
        measured(100_000),
        CodecChoice(ExchangeSettings()),
        CodecChoice(ExchangeSettings(codec="sparse")),
    )
    known, what = facts(line, step_s=1000.0), "the shared model lacks about 12 deltas of this node's training: "
    chosen.codec = "sparse64"
    (finding,) = line_findings(line_status(line, chosen, known, 12.3), chosen)
    assert finding.what == what + "its line carries no more"
    assert "LoRA" in finding.do
    assert line_findings(line_status(line, chosen, known, 8.0), chosen) == []
    (finding,) = line_findings(line_status(line, is_set, known, 12.3), is_set)
    assert (finding.what, finding.do) == (what + 'exchange.codec = "sparse"', 'set exchange.codec = "auto"')
    chosen.codec = "sparse256"
    assert line_findings(line_status(line, chosen, known, 12.3), chosen) == []


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        ("sparse64", "raise training.local_steps on all nodes"),
        ("int8", 'set exchange.codec = "auto"; or raise training.local_steps on all nodes'),
    ],
)
def test_the_advice_is_what_is_left_to_do(codec: Any, expected: str) -> None:
    """Nobody is told to set what is set."""
    line, choice = measured(10_000), CodecChoice(ExchangeSettings(codec=codec))
    (finding,) = line_findings(line_status(line, choice, facts(line)), choice)

    assert finding.do == expected


def test_nothing_is_said_where_all_is_well_or_nothing_is_known() -> None:
    """A fast line, a line not measured, a first step, a node alone, no exchange."""
    choice = CodecChoice(ExchangeSettings(codec="bfloat16"))
    fast, unknown = measured(20_000_000), MeasuredLine()
    slow = measured(10_000)
    for line, known in (
        (fast, facts(fast)),
        (measured(2_500_000), facts(measured(2_500_000))),  # just enough
        (unknown, facts(unknown)),
        (slow, facts(slow, step_s=0.0)),
        (slow, facts(slow, shape=StepShape.even(5_000_000, 1))),
    ):
        assert line_findings(line_status(line, choice, known), choice) == []
    alone = line_status(slow, None, None)
    assert (alone.upload_bytes_per_s, alone.codec, alone.needed_bytes_per_step) == (10_000, "", None)
    assert line_findings(alone, None) == []


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


@pytest.mark.parametrize(
    ("version", "release"), [("0.2.1", "0.2"), ("10.20", "10.20"), ("0.2.1.dev3+gabc", "0.2"), ("main", "main")]
)
def test_a_release_is_the_first_two_numbers(version: str, release: str) -> None:
    """Two versions of one release do not differ in what they do."""
    assert release_of(version) == release


def test_the_same_release_is_no_finding() -> None:
    """Nor is a node that knows no version of its peers."""
    assert version_findings("0.2.1", []) == []
    assert version_findings("0.2.1", ["0.2.0", "0.2.9.dev1"]) == []


def test_another_release_is_named_with_its_count() -> None:
    """The two that most peers run are named; the number of the others is in the sum. It is for information."""
    (one,) = version_findings("0.2.1", ["0.2.1", "0.3.0", "0.3.0", "0.1.0"])
    assert one.level == "info"
    assert one.what == "3 of 4 peers run another release than this node (0.2.1): 2 × 0.3.0, 1 × 0.1.0"
    (many,) = version_findings("0.2.1", [f"1.{at % 9}.0" for at in range(20)])
    assert many.what == "20 of 20 peers run another release than this node (0.2.1): 3 × 1.0.0, 3 × 1.1.0, and others"
    assert "one node at a time" in many.do


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
