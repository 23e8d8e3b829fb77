"""The running loss of a trainer: the mean of a full window of finite losses."""

from __future__ import annotations

from p2pnode.training.trainer.device_turns import RecentLosses


def test_a_running_loss_needs_a_full_window_of_finite_losses() -> None:
    """With fewer batches, and with one that is not finite, there is none."""
    losses = RecentLosses()
    losses.add([4.0], 2)
    assert losses.mean() is None
    losses.add([2.0, 1.0], 2)
    assert losses.mean() == 1.5
    losses.add([float("nan")], 2)
    assert losses.mean() is None
