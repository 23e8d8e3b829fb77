"""Estimates the memory of the host that a trainer will take after its first step: gradients, optimiser, and the copy of
the optimiser for a checkpoint.

At start the optimiser is empty, so its state is counted by its kind: how many values it keeps per parameter. Memory of
another device is not counted, but the copy for a checkpoint is on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

#: Values that an optimiser keeps per parameter, by the name of its class and the options of a parameter group.
_KEPT: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "Adadelta": lambda _: 2,
    "Adafactor": lambda _: 0,  # one per row and column
    "Adagrad": lambda _: 1,
    "Adam": lambda group: 2 + bool(group.get("amsgrad")),
    "AdamW": lambda group: 2 + bool(group.get("amsgrad")),
    "Adamax": lambda _: 2,
    "ASGD": lambda _: 1,
    "Muon": lambda _: 1,
    "NAdam": lambda _: 2,
    "RAdam": lambda _: 2,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Rprop": lambda _: 2,
    "SGD": lambda group: int(bool(group.get("momentum"))),
}


def host_bytes(optimizer: Optimizer) -> int:
    """Bytes of the host that training and a checkpoint will take beside the model itself."""
    bare: Any = getattr(optimizer, "optimizer", optimizer)  # a wrapper, such as Accelerate's, has it
    kept = _KEPT.get(type(bare).__name__, _unknown)
    total = 0
    for group in bare.param_groups:
        for parameter in group["params"]:
            size_bytes = parameter.numel() * parameter.element_size()
            on_host = parameter.device.type == "cpu"
            existing = _tensor_bytes(bare.state.get(parameter, {}))
            state = existing or kept(group) * size_bytes
            total += state  # the copy for a checkpoint
            total += size_bytes if on_host and parameter.requires_grad and parameter.grad is None else 0
            total += state if on_host and not existing else 0
    return total


def _unknown(_group: Mapping[str, Any]) -> int:
    """As most adaptive ones."""
    return 2


def _tensor_bytes(state: Mapping[str, Any]) -> int:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
