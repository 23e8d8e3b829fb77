"""The parameters of a PyTorch model as named values, for the engines: torch training is one client of them.

A parameter is one value, or several where it is larger than a value may be: `name/0`, `name/1`, … Nothing here imports
torch: the model brings its own methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pnode.training.values.encoding import Key

#: Values of one part: 960 KB of float32, below the limit of an encoded value.
PART_VALUES = 240_000


class ModelValues:
    """The trainable parameters of a `torch.nn.Module`, as float32 vectors."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        #: Every part: parameter, first and last value.
        self._parts: dict[Key, tuple[str, int, int]] = {}
        for name, one in self._parameters.items():
            size = one.numel()
            for part in range(max(1, math.ceil(size / PART_VALUES))):
                first = part * PART_VALUES
                self._parts[f"{name}/{part}"] = name, first, min(first + PART_VALUES, size)

    @property
    def names(self) -> list[Key]:
        """The keys of the model, in the order of its parameters."""
        return list(self._parts)

    def values(self) -> list[tuple[Key, npt.NDArray[np.float32]]]:
        """All parameters: copies."""
        return self._cut({name: one.detach() for name, one in self._parameters.items()})

    def gradients(self) -> list[tuple[Key, npt.NDArray[np.float32]]]:
        """All gradients: copies; zeros for a parameter without one."""
        return self._cut(
            {name: one.detach() * 0 if one.grad is None else one.grad for name, one in self._parameters.items()}
        )

    def load(self, params: Iterable[tuple[Key, Any]]) -> None:
        """Write values into the model. Raises `KeyError` for a key that is none of the model's, `ValueError` for a
        value of another size."""
        for key, value in params:
            name, first, last = self._parts[key]
            flat = self._parameters[name].data.view(-1)
            part = np.asarray(value, np.float32)
            if part.shape != (last - first,):
                raise ValueError(f"the value of {key!r} has shape {part.shape}, and the model needs {(last - first,)}")
            flat[first:last] = flat.new_tensor(part)

    def _cut(self, tensors: dict[str, Any]) -> list[tuple[Key, npt.NDArray[np.float32]]]:
        flat = {name: one.float().cpu().numpy().reshape(-1) for name, one in tensors.items()}
        return [(key, flat[name][first:last].copy()) for key, (name, first, last) in self._parts.items()]
