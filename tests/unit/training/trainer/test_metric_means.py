"""Means of a turn's losses and metrics."""

from __future__ import annotations

import math

import torch

from p2pnode.training.trainer.step_count import MetricMeans


def test_numbers_and_tensors_are_averaged_by_name() -> None:
    """Each name has its own count, and a tensor of any shape with one value counts."""
    means = MetricMeans()
    means.add("loss", 1.0)
    means.add("loss", torch.tensor([[3.0]], requires_grad=True))
    means.add("accuracy", 0.5)

    assert means.means() == {"loss": 2.0, "accuracy": 0.5}


def test_a_loss_that_was_never_given_is_left_out() -> None:
    """NaN is the default of `swarm.step(loss=…)`; after a real loss, and for metrics, it is a value."""
    means = MetricMeans()
    means.add("loss", math.nan)
    assert "loss" not in means
    assert means.means() == {}

    means.add("loss", 1.0)
    means.add("loss", math.nan)
    means.add("norm", math.nan)
    assert math.isnan(means.means()["loss"])
    assert "norm" in means
