"""Runs that learn: which belong to a figure, what needs the images, and claims about their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.psp.learning_figures import order_verdict, run_study, studies


def test_an_order_holds_only_beyond_its_noise() -> None:
    """Above on every seed by one amount it holds; above in the mean of a wide scatter it is not distinguishable."""
    low = [0.5, 0.6, 0.4, 0.55, 0.45]
    assert order_verdict([[value + 0.1 for value in low]], [low]) == "holds"
    assert order_verdict([[0.9, 0.3, 0.8, 0.2, 0.7]], [low]) == "not distinguishable"
    assert order_verdict([[value - 0.1 for value in low]], [low]) == "fails"
    assert order_verdict([[0.9] * 5, [value - 0.1 for value in low]], [low]) == "fails"


def test_studies_on_images_need_their_folder() -> None:
    """Without it they are left out; with it each barrier has runs."""
    assert studies("accuracy", None) == studies("stored_accuracy", None) == []
    assert {study.series for study in studies("accuracy", Path("mnist"))} >= {"asp", "bsp"}
    assert {study.x for study in studies("stored_accuracy", Path("mnist"))} == {0, 5, 10, 15, 20}


def test_a_study_learns() -> None:
    """Matrix factorisation under asp: its error falls; every update but each node's last is a step."""
    study = studies("factorisation", None)[0]
    result = run_study(study)

    assert result.curve.score[-1] < result.curve.score[0]
    assert result.curve.updates[-1] == round(result.mean_steps * study.plan.nodes)
    with pytest.raises(ValueError, match="nothing has no studies"):
        studies("nothing", None)
