"""Studies: which runs belong to a figure, and what needs the images."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pnode.training.simulation.figures import published
from p2pnode.training.simulation.figures.studies import CNN_SEEDS, run_study, studies


def test_studies_on_images_need_their_folder() -> None:
    """Without it they are left out; with it there is one per barrier and seed, or share."""
    assert studies("accuracy", None) == studies("stored_accuracy", None) == []
    assert len(studies("accuracy", Path("mnist"))) == CNN_SEEDS * len(published.MNIST)
    assert len(studies("stored_accuracy", Path("mnist"))) == len(published.STORED_ACCURACY) * len(published.SHARES)


def test_a_study_learns() -> None:
    """Matrix factorisation under asp: its error falls; every update but each node's last is a step."""
    study = studies("factorisation", None)[0]
    result = run_study(study)

    assert result.curve.score[-1] < result.curve.score[0]
    assert result.curve.updates[-1] == round(result.mean_steps * study.plan.nodes)
    with pytest.raises(ValueError, match="nothing has no studies"):
        studies("nothing", None)
