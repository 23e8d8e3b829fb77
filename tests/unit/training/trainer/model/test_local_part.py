"""Where the part that a rank holds is in the whole tensor, and which rank writes it. One process plays each rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from p2pnode.training.trainer.model.local_part import LocalPart, local_of
from p2pnode.training.trainer_link.interface import TrainerFailed

#: Two seconds of imports, which only the process with these tests needs.
pytestmark = pytest.mark.worker_group("distributed")

RANKS = 4


def on_each_rank(make: Callable[[Any], Any], shape: tuple[int, ...] = (RANKS,)) -> list[Any]:
    """What `make` returns on each rank for a mesh of this shape. No rank sends anything."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    for rank in range(RANKS):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        try:
            found.append(make(init_device_mesh("cpu", shape)))
        finally:
            torch.distributed.destroy_process_group()
    return found


def spread(shape: tuple[int, ...], mesh: Any, placements: list[Any]) -> Any:
    """A DTensor whose whole counts its values."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = local.chunk(mesh.size(dimension), placement.dim)
            index = mesh.get_coordinate()[dimension]
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[index] if index < len(chunks) else empty
    assert all(isinstance(placement, Replicate | Shard) for placement in placements)
    stride = torch.empty(shape).stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def kinds() -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize("shape", [(5, 3), (1, 5), (8, 2), (3, 4)])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (4, 1), (1, 4)])
def test_the_parts_that_are_written_make_up_the_whole(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    """Each value once, at its place, however the dimensions of the mesh shard and replicate; every rank reads what it
    holds."""
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for placements in product(kinds(), repeat=len(mesh_shape)):

        def part(mesh: Any, placements: Any = placements) -> tuple[LocalPart, torch.Tensor]:
            tensor = spread(shape, mesh, list(placements))
            return LocalPart.of("weight", tensor, writes_plain=False), local_of(tensor)

        written = torch.zeros(shape)
        for found, local in on_each_rank(part, mesh_shape):
            assert torch.equal(whole[found.box], local)
            if found.writes:
                written[found.box] += local + 1
        assert torch.equal(written, whole + 1)


def test_a_plain_tensor_is_whole_and_written_by_the_first_rank() -> None:
    """As under DistributedDataParallel."""
    assert LocalPart.of("weight", torch.zeros(3), writes_plain=True) == ((), True)
    assert LocalPart.of("weight", torch.zeros(3), writes_plain=False) == ((), False)


def test_what_is_no_box_of_the_whole_is_refused_by_name() -> None:
    """Sums that are not complete, rows of every other rank, and parameters of which a rank has nothing."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor.placement_types import _StridedShard

    def refused(tensor: Any) -> str:
        with pytest.raises(TrainerFailed) as failure:
            LocalPart.of("layer.weight", tensor, writes_plain=True)
        assert failure.value.fatal
        return failure.value.reason

    def reasons(mesh: Any) -> list[str]:
        strided = [_StridedShard(0, split_factor=2)]
        half = DeviceMesh("cpu", [0, 1])
        tensors = [
            DTensor.from_local(torch.zeros(2, 2), mesh, [Partial()], run_check=False),
            DTensor.from_local(
                torch.zeros(2, 2), mesh, strided, run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
            ),
        ]
        if mesh.get_rank() > 1:
            tensors.append(DTensor.from_local(torch.zeros(2, 2), half, [kinds()[0]], run_check=False))
        return [refused(tensor) for tensor in tensors]

    for rank, (partial, strided, *elsewhere) in enumerate(on_each_rank(reasons)):
        assert partial.startswith("layer.weight is placed as Partial(sum)")
        assert strided.startswith("layer.weight is placed as _StridedShard(")
        assert [reason.split(",")[0] for reason in elsewhere] == ["layer.weight is on other ranks only"] * (rank > 1)
