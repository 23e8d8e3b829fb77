"""The parameters of a model as named values."""

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.engines import model_values
from p2pnode.training.engines.model_values import ModelValues


def test_a_model_comes_back_from_its_values(monkeypatch):
    """Large parameters are cut; another model that loads the values computes the same."""
    monkeypatch.setattr(model_values, "PART_VALUES", 7)
    torch.manual_seed(1)
    first, second = nn.Linear(5, 4), nn.Linear(5, 4)
    values = ModelValues(first)
    assert values.names == ["weight/0", "weight/1", "weight/2", "bias/0"]
    assert [value.shape for _, value in values.values()] == [(7,), (7,), (6,), (4,)]
    ModelValues(second).load(values.values())
    points = torch.randn(3, 5)
    assert torch.equal(first(points), second(points))


def test_values_are_copies():
    """What a script does to them does not change the model."""
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    for _, value in ModelValues(model).values():
        value += 1.0
    assert torch.equal(model.weight, before)


def test_gradients_have_the_names_of_their_parameters():
    """A parameter without a gradient has zeros; a frozen one is none of the values."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    (3.0 * model[1].bias).sum().backward()
    found = dict(ModelValues(model).gradients())
    assert list(found) == ["0.bias/0", "1.weight/0", "1.bias/0"]
    assert found["1.bias/0"].tolist() == [3.0]
    assert found["0.bias/0"].tolist() == [0.0, 0.0]
    assert found["1.bias/0"].dtype == np.float32


def test_values_of_another_model_are_refused():
    """A wrong size is named with its key."""
    values = ModelValues(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"'weight/0' has shape \(3,\)"):
        values.load([("weight/0", np.zeros(3))])
    with pytest.raises(KeyError):
        values.load([("other/0", np.zeros(3))])
