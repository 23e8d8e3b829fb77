"""What a rank holds of a tensor, and where that lies in the whole: FSDP2 (`fully_shard`), HSDP and tensor parallel.

The vector is that of the whole model, however a node divides it. A plain tensor is whole on every rank. A DTensor has a
part, which is a box within the whole: it begins at an offset in each dimension. Every rank reads and writes its own
parts of the vector. Of a part that several ranks hold, the first of them writes it; plain tensors are shared out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from p2pnode.training.trainer_link.interface import TrainerFailed


class LocalPart(NamedTuple):
    """`box` has a slice for each dimension of the whole; it is empty for all of it. `writes`: whether this rank writes
    the part into the vector."""

    box: tuple[slice, ...]
    writes: bool

    @classmethod
    def of(cls, name: str, tensor: Tensor, *, writes_plain: bool) -> LocalPart:
        """`writes_plain`: whether this rank writes what all hold. Raises `TrainerFailed` where its part is no box."""
        if not is_distributed(tensor):
            return cls((), writes_plain)
        # Two seconds, which a script with distributed tensors has spent already.
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        spread: Any = tensor
        for placement in spread.placements:
            # A strided shard is a subclass in some versions of torch.
            if type(placement).__name__ not in ("Shard", "Replicate"):
                raise TrainerFailed(
                    f"{name} is placed as {placement!r}, and a node can share replicated tensors and plain shards only",
                    "let fully_shard and tensor parallel divide different dimensions of it (shard_placement_fn)"
                    if type(placement).__name__ == "_StridedShard"
                    else "redistribute it as Shard or Replicate before p2pnode.attach()",
                    fatal=True,
                )
        mesh = spread.device_mesh
        if mesh.get_coordinate() is None:
            raise TrainerFailed(
                f"{name} is on other ranks only, and every rank of a node has a part of each parameter",
                "run the stages of a pipeline as one program per node without p2pnode, or use fully_shard",
                fatal=True,
            )
        shape, offsets = compute_local_shape_and_global_offset(spread.shape, mesh, spread.placements)
        places = zip(spread.placements, mesh.get_coordinate(), strict=True)
        writes = all(coordinate == 0 for placement, coordinate in places if placement.is_replicate())
        return cls(tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True)), writes)


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor, found without its import."""
    return hasattr(tensor, "device_mesh")


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of it, in the same memory: all of a plain tensor."""
    if not is_distributed(tensor):
        return tensor
    spread: Any = tensor
    with torch.no_grad():
        local: Tensor = spread.to_local()
    return local


def whole_of(tensor: Tensor) -> Tensor:
    """All of it; for a DTensor all ranks have to call this."""
    if not is_distributed(tensor):
        return tensor
    spread: Any = tensor.detach()
    whole: Tensor = spread.full_tensor()
    return whole


def reshards(model: nn.Module) -> list[Callable[[], None]]:
    """To be called before a model's parameters are looked up or loaded: a forward pass without a backward pass leaves
    copies of whole parameters in modules of `fully_shard`, which the next forward pass would use again."""
    return [
        module.reshard  # type: ignore[misc]
        for module in model.modules()
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    ]
