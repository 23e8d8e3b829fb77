"""Says which of a model's tensors are rounded between model and vector: the swarm's values are float32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

WIDE = "the swarm's values are float32, to which these are rounded in every turn; keep the model in float32"
NARROW = (
    "a turn begins with the swarm's float32 values rounded to this type, which has no room for small changes; keep the "
    "weights in float32 and train under autocast"
)


def roundings(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """A sentence for each type other than float32 among the vector's tensors."""
    names: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(tensor.dtype, []).append(name)
    names.pop(torch.float32, None)
    said = []
    for dtype, found in names.items():
        others = f" and {len(found) - 1} more tensors are" if len(found) > 1 else " is"
        why = WIDE if dtype == torch.float64 else NARROW
        said.append(f"{found[0]}{others} {str(dtype).removeprefix('torch.')}: {why}")
    return said
