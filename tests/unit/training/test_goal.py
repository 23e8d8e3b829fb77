"""The goal of a run, `training.until`, as it is parsed and evaluated."""

from __future__ import annotations

import pytest

from training.goal import Goal


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("accuracy>=0.95", Goal("accuracy", True, 0.95)),
        ("loss<=1e-3", Goal("loss", False, 0.001)),
        ("  val.loss  <=  -2.5E+1 ", Goal("val.loss", False, -25.0)),
        ("_f1>=+.5", Goal("_f1", True, 0.5)),
        ("", None),
        ("   ", None),
    ],
)
def test_a_goal_is_a_metric_a_comparison_and_a_number(text: str, goal: Goal | None) -> None:
    """Blanks are ignored, exponents and signs belong to the number, an empty text is no goal."""
    assert Goal.parse(text) == goal


@pytest.mark.parametrize(
    "text",
    [
        "accuracy",
        "accuracy>0.95",
        "accuracy=>0.95",
        "accuracy==1",
        ">=0.5",
        "accuracy>=",
        "accuracy>=high",
        "accuracy>=nan",
        "accuracy>=0.9 or loss<=1",
        "0.95<=accuracy",
        "2nd>=1",
        "accuracy>=1.2.3",
        "accuracy>=.",
    ],
)
def test_a_text_that_is_no_goal_is_an_error_with_an_example(text: str) -> None:
    """Any other text is an error that quotes it and shows an example."""
    with pytest.raises(ValueError) as caught:
        Goal.parse(text)

    assert repr(text) in str(caught.value)
    assert "accuracy>=0.95" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "metrics", "holds"),
    [
        ("accuracy>=0.95", {"accuracy": 0.95}, True),
        ("accuracy>=0.95", {"accuracy": 0.9499}, False),
        ("loss<=0.1", {"loss": 0.1}, True),
        ("loss<=0.1", {"loss": 0.2}, False),
        ("loss<=0.1", {"accuracy": 0.0}, False),
        ("loss<=0.1", {}, False),
        ("loss<=0.1", {"loss": float("nan")}, False),
        ("accuracy>=0.1", {"accuracy": float("nan")}, False),
        ("loss<=0.1", {"loss": float("-inf")}, True),
    ],
)
def test_a_goal_holds_by_its_own_metric_only(text: str, metrics: dict[str, float], holds: bool) -> None:
    """It holds at the value itself; never for a missing metric or NaN."""
    goal = Goal.parse(text)

    assert goal is not None
    assert goal.holds(metrics) is holds
