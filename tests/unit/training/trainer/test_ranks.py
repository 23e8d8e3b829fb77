"""Ranks: a single process, and torchrun without a process group. (Two ranks: tests/process/test_attached_swarm.py.)"""

from __future__ import annotations

import math
from typing import Any

import pytest

from p2pnode.training.trainer.ranks import Ranks, Turn
from p2pnode.training.trainer_link.interface import TrainerFailed


def test_a_single_process_leads_and_combines_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch.distributed nothing is exchanged; a turn without losses has a mean of NaN."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.find()

    ranks.lead(Turn(1, 10, 4.0, is_first=True))
    ranks.lead(None)

    assert (ranks.rank, ranks.count, ranks.is_first) == (0, 1, True)
    assert ranks.combine({"loss": 2.0, "accuracy": 0.5}, 32, [7.0]) == (2.0, {"accuracy": 0.5}, 32, [[7.0]])
    loss, metrics, samples, _ = ranks.combine({}, 8)
    assert math.isnan(loss)
    assert (metrics, samples) == ({}, 8)
    assert ranks.gather("own") == ["own"]
    ranks.require_equal("layout", {"mask": "bool [2] 1"})


class Gathered(Ranks):
    """Rank 0 of several, with what all of them give."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__(0, len(given), "cpu")
        self.given = given

    def gather(self, value: Any) -> list[Any]:
        return self.given

    def _gather_numbers(self, values: list[float]) -> list[list[float]]:
        return self.given


def test_means_are_over_all_ranks_and_samples_are_added() -> None:
    """Statements stay by rank."""
    ranks = Gathered([[0.5, 2.0, 32.0, 7.0], [1.0, 4.0, 16.0, 8.0]])

    assert ranks.combine({"loss": 2.0, "accuracy": 0.5}, 32, [7.0]) == (3.0, {"accuracy": 0.75}, 48, [[7.0], [8.0]])


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (("b", {"mask": "1"}), "rank 1 has another model than rank 0"),
        (("a", {"mask": "2"}), "rank 1 has other values of mask than rank 0"),
        (("a", {}), "rank 1 has other values of mask than rank 0"),
    ],
)
def test_a_rank_with_another_model_is_refused(other: tuple[str, dict[str, str]], reason: str) -> None:
    """By layout, and by what is not exchanged, which no broadcast makes equal."""
    with pytest.raises(TrainerFailed, match=reason) as failure:
        Gathered([("a", {"mask": "1"}), other]).require_equal("a", {"mask": "1"})
    assert failure.value.fatal


def test_torchrun_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes that do not know each other would train several replicas; the hint names the call."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(TrainerFailed, match="WORLD_SIZE") as failure:
        Ranks.find()
    assert "init_process_group" in failure.value.hint
