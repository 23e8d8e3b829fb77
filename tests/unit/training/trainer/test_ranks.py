"""What ranks compare. (Two ranks: tests/process/test_attached_swarm.py; none that know each other: test_attach.py.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from p2pnode.training.trainer.ranks import RankAgreement, Ranks, difference
from p2pnode.training.trainer_link.interface import TrainerFailed


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


def scaler(scale: float) -> torch.amp.GradScaler:
    return cast(torch.amp.GradScaler, SimpleNamespace(get_scale=lambda: scale))


def stated(move: float, *, steps: int = 2, scale: float = 1.0, rate: float = 0.1) -> list[float]:
    """Of a rank whose weights, in several layers, all move by so much in a turn."""
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(20)))
    agreement = RankAgreement([parameter.detach().zero_() for parameter in model.parameters()])
    agreement.begin()
    for parameter in model.parameters():
        parameter.data += move
    return agreement.statement(steps, scaler(scale), rate)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (stated(0.01), ""),
        (stated(0.01001), ""),  # other rounding on another device
        (stated(0.02), "rank 1 trains its weights to other values than rank 0"),
        (stated(0.0), "rank 1 trains its weights to other values than rank 0"),
        (stated(float("nan")), "the weights of rank 1 and those of rank 0 are not finite in the same places"),
        (stated(0.01, steps=3), "rank 1 has taken 3 optimiser steps in a turn, and rank 0 has taken 2"),
        (stated(0.01, scale=32.0), "rank 1 has a scaler at 32, and rank 0 has a scaler at 1"),
        (stated(0.01, rate=0.2), "rank 1 has a learning rate of 0.2, and rank 0 has a learning rate of 0.1"),
    ],
)
def test_any_difference_that_is_no_rounding_is_named(other: list[float], found: str) -> None:
    """Weights are compared by how far they have moved: small moves of large weights count as well."""
    assert difference([stated(0.01), other]).startswith(found)
    assert bool(difference([stated(0.01), other])) == bool(found)


def test_a_model_of_one_value_and_one_that_has_not_moved_agree() -> None:
    """Nothing is divided by zero, and few tensors are looked at more than once."""
    agreement = RankAgreement([torch.ones(())])
    agreement.begin()
    still = agreement.statement(0, None, 0.0)

    assert difference([still, still, still]) == ""
    assert difference([[0.0, 0.0, 0.0, float("inf")]] * 2) == ""


def test_a_rank_that_is_alone_says_nothing() -> None:
    """It costs it nothing, either."""
    agreement = RankAgreement(None)
    agreement.begin()

    assert agreement.statement(2, scaler(1.0), 0.1) == []
    assert difference([[]]) == ""
