"""The memory that gradients and optimiser will take, estimated before the first step and compared after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from p2pnode.training.trainer.connection import ScriptWarnings
from p2pnode.training.trainer.script_arguments import ScriptArguments
from p2pnode.training.trainer.state.state_writer import tensor_bytes

WIDTH = 256


def host_bytes(optimizer: Any) -> int:
    return ScriptArguments.of(optimizer, None, None, ScriptWarnings()).host_bytes()


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(dtype)
    model[0].weight.requires_grad_(False)
    return model


def taken_after_a_step(model: nn.Module, optimizer: Any) -> tuple[int, int]:
    """Bytes of the gradients, and of the optimiser's state."""
    model(torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return tensor_bytes(gradients), tensor_bytes(optimizer.state_dict()["state"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value) or "plain",
)
def test_the_estimate_is_what_the_first_step_takes(kind: Any, options: dict[str, Any]) -> None:
    """Gradients, state, and the copy of the state for a checkpoint, within a percent, for every optimiser of PyTorch
    and also afterwards, when only the copy is left to come."""
    model = model_of()
    optimizer = kind([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01, **options)
    estimated, existing = host_bytes(optimizer), tensor_bytes(optimizer.state_dict()["state"])  # Adagrad begins with it
    gradients, state = taken_after_a_step(model, optimizer)

    assert estimated == pytest.approx(gradients + 2 * state - existing, rel=0.01)
    assert host_bytes(optimizer) == pytest.approx(state, rel=0.01, abs=1)


def test_halves_count_as_halves_and_an_unknown_optimiser_as_adam() -> None:
    """bfloat16 weights have bfloat16 gradients and moments; a wrapper is looked into."""
    model = model_of(torch.bfloat16)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size_bytes = 2 * sum(parameter.numel() for parameter in parameters)

    class Lion(torch.optim.SGD):
        pass

    assert host_bytes(torch.optim.Adam(parameters)) == 5 * size_bytes
    assert host_bytes(Lion(parameters, lr=0.1)) == 5 * size_bytes
    wrapper: Any = SimpleNamespace(
        optimizer=torch.optim.SGD(parameters, lr=0.1), param_groups=[], state_dict=dict, load_state_dict=dict
    )
    assert host_bytes(wrapper) == size_bytes


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_memory_of_a_device_is_not_the_hosts() -> None:
    """Only the copy for a checkpoint is on the host."""
    model = model_of().cuda()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    assert host_bytes(torch.optim.Adam(parameters)) == 2 * 4 * sum(parameter.numel() for parameter in parameters)
