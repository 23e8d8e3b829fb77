"""Ranks: a single process, and torchrun without a process group. (Two ranks: tests/process/test_attached_swarm.py.)"""

from __future__ import annotations

import math

import pytest

from training.trainer.ranks import Ranks, Turn
from training.trainer_link.interface import TrainerFailed


def test_a_single_process_leads_and_combines_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch.distributed nothing is exchanged; a turn without losses has a mean of NaN."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.find()

    ranks.lead(Turn(1, 10, 4.0, is_first=True))
    ranks.lead(None)

    assert (ranks.rank, ranks.count, ranks.is_first) == (0, 1, True)
    assert ranks.combine({"loss": 2.0, "accuracy": 0.5}, 32) == (2.0, {"accuracy": 0.5}, 32)
    loss, metrics, samples = ranks.combine({}, 8)
    assert math.isnan(loss)
    assert (metrics, samples) == ({}, 8)


def test_torchrun_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes that do not know each other would train several replicas; the hint names the call."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(TrainerFailed, match="WORLD_SIZE") as failure:
        Ranks.find()
    assert "init_process_group" in failure.value.hint
