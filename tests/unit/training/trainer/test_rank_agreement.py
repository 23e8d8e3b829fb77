"""What ranks that train apart say at the end of a turn, and what is found of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from p2pnode.training.trainer.rank_agreement import RankAgreement, difference
from p2pnode.training.trainer.script_arguments import ScriptArguments


def given(scale: float, rate: float) -> ScriptArguments:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
    scaler = SimpleNamespace(get_scale=lambda: scale)
    return ScriptArguments((optimizer,), (), cast(torch.amp.GradScaler, scaler), {}, None)


def stated(move: float, *, steps: int = 2, scale: float = 1.0, rate: float = 0.1) -> list[float]:
    """Of a rank whose weights, in several layers, all move by so much in a turn."""
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(20)))
    agreement = RankAgreement([parameter.detach().zero_() for parameter in model.parameters()])
    agreement.begin()
    for parameter in model.parameters():
        parameter.data += move
    return agreement.statement(steps, given(scale, rate))


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
    still = agreement.statement(0, given(0.0, 0.0))

    assert difference([still, still, still]) == ""
    assert difference([[0.0, 0.0, 0.0, float("inf")]] * 2) == ""


def test_a_rank_that_is_alone_says_nothing() -> None:
    """It costs it nothing, either."""
    agreement = RankAgreement([])
    agreement.begin()

    assert agreement.statement(2, given(1.0, 0.1)) == []
    assert difference([[]]) == ""
