"""Studies: which runs belong to a figure, and what needs the images."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.simulation.figures import published
from training.simulation.figures.studies import CNN_SEEDS, FIGURE_BARRIERS, run_study, studies


def test_studies_on_images_need_their_folder() -> None:
    """Without it they are left out; with it there is one per barrier and seed, or share."""
    assert studies("accuracy", None) == studies("stored_accuracy", None) == []
    assert len(studies("accuracy", Path("mnist"))) == CNN_SEEDS * len(published.MNIST)
    assert len(studies("stored_accuracy", Path("mnist"))) == len(published.STORED_ACCURACY) * len(published.SHARES)


def test_every_problem_runs_under_the_five_barriers() -> None:
    """Additive and with the daemon's rule; softmax regression only with the images; one more with a lag weight."""
    assert len(studies("learning", None)) == 2 * 2 * len(FIGURE_BARRIERS) + 1
    assert len(studies("learning", Path("mnist"))) == 3 * 2 * len(FIGURE_BARRIERS) + 1
    with pytest.raises(ValueError, match="nothing has no studies"):
        studies("nothing", None)


def test_a_study_learns() -> None:
    """Linear regression under asp with the daemon's rule: its error falls, and each step is an update."""
    study = next(study for study in studies("learning", None) if study.series == "linear swarm asp")
    result = run_study(study)

    assert result.curve.score[-1] < 0.5 * result.curve.score[0]
    assert result.curve.updates[-1] == round(result.mean_steps * study.plan.nodes)
