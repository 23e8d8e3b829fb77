"""What is said of weights that are not float32."""

from __future__ import annotations

import torch
from torch import nn

from p2pnode.training.trainer.contract import roundings
from p2pnode.training.trainer.vector import ModelVector


def test_each_type_that_is_rounded_is_named_once() -> None:
    """float64 loses digits in every turn, bfloat16 small changes; float32 is not mentioned."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.BatchNorm1d(2).bfloat16(), nn.Embedding(2, 2))

    wide, narrow = sorted(roundings(ModelVector(model).named_tensors()))

    assert wide.startswith("1.bias and 1 more tensors are float64: the swarm's values are float32")
    assert narrow.startswith("2.bias and 3 more tensors are bfloat16: a turn begins with the swarm's float32 values")
    assert roundings(ModelVector(nn.Linear(2, 2)).named_tensors()) == []
    assert roundings([("a", torch.zeros(1, dtype=torch.float16))])[0].startswith("a is float16: ")
