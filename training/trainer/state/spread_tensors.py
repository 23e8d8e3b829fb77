"""Keeps DTensors in files: each rank saves its own part of them, as a plain tensor beside its place.

A device mesh belongs to running processes, so it is not saved. What is read gets that of the model's own parameters
which has the same ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Size, Tensor

from p2pnode.training.trainer.model.local_part import is_distributed, local_of

#: The key of a dictionary that stands for a DTensor.
_SPREAD = "p2pnode.spread"
_REPLICATED = -1


def meshes_of(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """The meshes over which these tensors are spread, by their ranks."""
    meshes = [getattr(tensor, "device_mesh", None) for tensor in tensors]
    return {_ranks_of(mesh): mesh for mesh in meshes if mesh is not None}


def plain(value: Any) -> Any:
    """A state with a dictionary for each DTensor. Raises `ValueError` for one that is neither shard nor replica."""
    if isinstance(value, Tensor) and is_distributed(value):
        spread: Any = value
        return {
            _SPREAD: local_of(value.detach()),
            "placements": [_number(placement) for placement in spread.placements],
            "ranks": _ranks_of(spread.device_mesh),
            "shape": list(value.shape),
            "stride": list(value.stride()),
        }
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def spread(value: Any, meshes: dict[str, Any]) -> Any:
    """The state of which `plain` made this. Raises `KeyError` for a mesh that the model has not."""
    if type(value) is dict and _SPREAD in value:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Replicate() if number == _REPLICATED else Shard(number) for number in value["placements"]]
        shape, stride = value["shape"], tuple(value["stride"])
        mesh = meshes[value["ranks"]]
        local = value[_SPREAD].to(mesh.device_type)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=Size(shape), stride=stride)
    if type(value) is dict:
        return {key: spread(item, meshes) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(spread(item, meshes) for item in value)
    return value


def is_spread(value: Any) -> bool:
    """Whether something in what `plain` has made is a rank's part."""
    if isinstance(value, dict):
        return _SPREAD in value or any(map(is_spread, value.values()))
    return isinstance(value, list | tuple) and any(map(is_spread, value))


def _number(placement: Any) -> int:
    kind = type(placement).__name__
    if kind not in ("Shard", "Replicate"):
        raise ValueError(f"a tensor placed as {placement} cannot be saved; redistribute it as Shard or Replicate")
    return int(placement.dim) if kind == "Shard" else _REPLICATED


def _ranks_of(mesh: Any) -> str:
    return str(mesh.mesh.tolist())
